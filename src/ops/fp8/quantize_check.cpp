// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/quantize_check.h"

#include <cinttypes>
#include <cmath>

#include "backends/fp8_rules.h"
#include "ops/fp8/ring.h"

namespace cqsa::fp8 {

namespace {

using args_type = cqsa_fp8_quantize_args;

struct side_names {
  const char *out, *scale_in, *scale, *scale_inv, *layout, *block, *reserved;
};
constexpr side_names row_names = {"args->row.out",       "args->row.scale_in",     "args->row.scale",
                                  "args->row.scale_inv", "args->row.scale_layout", "args->row.block",
                                  "args->row.reserved"};
constexpr side_names transposed_names = {"args->transposed.out",       "args->transposed.scale_in",     "args->transposed.scale",
                                         "args->transposed.scale_inv", "args->transposed.scale_layout", "args->transposed.block",
                                         "args->transposed.reserved"};

// ---- numbers ----------------------------------------------------------------------------------------------------------------

cqsa_status check_numbers(const args_type& a) {
  if (a.source < CQSA_FP8_CURRENT || a.source > CQSA_FP8_RING)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->source is %" PRId32 ", wanted CQSA_FP8_CURRENT, _STATIC or _RING", a.source);
  if (a.nan_policy != CQSA_FP8_NAN_PROPAGATE && a.nan_policy != CQSA_FP8_NAN_IGNORE)
    return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->nan_policy is %" PRId32 ", wanted one of CQSA_FP8_NAN_*", a.nan_policy);
  CQSA_TRY(check_margin(a.margin, "args->margin"));
  CQSA_TRY(check_bounds(a.eps, a.amax_limit, "args->eps", "args->amax_limit"));
  if (a.reserved != 0) return fail(CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is %g, wanted 0", static_cast<double>(a.reserved));
  if ((a.flags & CQSA_FP8_RING_STAGE) && a.source != CQSA_FP8_RING)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->flags has CQSA_FP8_RING_STAGE, but args->source is not CQSA_FP8_RING");
  if (a.groups && a.source == CQSA_FP8_RING)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->groups is given, but args->source is CQSA_FP8_RING, which has one scale: wanted NULL");
  if ((a.ring != nullptr) == (a.source == CQSA_FP8_RING)) return CQSA_OK;
  if (a.ring) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->ring is given, but args->source is not CQSA_FP8_RING: wanted NULL");
  return fail(CQSA_ERROR_NULL_POINTER, "args->ring is NULL, but args->source is CQSA_FP8_RING");
}

}  // namespace

cqsa_status check_block(const int64_t* block, const char* name) {
  const auto is = [block](int64_t rows, int64_t columns) { return block[0] == rows && block[1] == columns; };
  if (is(0, 0) || is(1, 0) || is(0, 1) || is(128, 128) || (block[0] == 1 && block[1] >= 16) || (block[1] == 1 && block[0] >= 16)) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT,
              "%s is {%" PRId64 ", %" PRId64 "}, wanted {0, 0}, {1, 0}, {0, 1}, {128, 128}, or {1, g} or {g, 1} with g of at least 16", name, block[0],
              block[1]);
}

cqsa_status take_shape(const cqsa_tensor& x, const char* name, shape_of_x& out) {
  out.batch = x.ndim == 3 ? x.shape[0] : 1;
  out.rows = x.shape[x.ndim - 2];
  out.columns = x.shape[x.ndim - 1];
  if (!multiply_overflows(out.batch, out.rows, &out.all_rows)) return CQSA_OK;
  return fail(CQSA_ERROR_SHAPE, "%s has shape %s, whose rows overflow 64 bits", name, shape_text(x.shape, x.ndim).text);
}

namespace {

// Of strides: only those of an empty tensor are so large that it wraps around, and nobody goes by them.
int64_t wrapped_product(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }

}  // namespace

bool fold_batch(int64_t batch, int64_t rows, cqsa_matrix* const* matrices, int count) {
  for (int i = 0; i < count && batch != 1; ++i) {
    const cqsa_matrix& m = *matrices[i];
    if (m.data && rows != 1 && m.stride[0] != wrapped_product(rows, m.stride[1])) return false;
  }
  for (int i = 0; i < count; ++i) {
    if (rows == 1 && batch != 1) matrices[i]->stride[1] = matrices[i]->stride[0];
    matrices[i]->stride[0] = 0;
  }
  return true;
}

namespace {

// ---- x ----------------------------------------------------------------------------------------------------------------------

cqsa_status take_codes_of_x(operand_list& list, const args_type& a, const shape_of_x& shape, cqsa_fp8_job& job) {
  if (a.x_scale_inv == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "args->x_scale_inv is NULL, but args->x is %s", dtype_name(a.x->dtype));
  if (a.flags & CQSA_FP8_SILU) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->flags has CQSA_FP8_SILU, but args->x is %s, wanted f32, f16 or bf16", dtype_name(a.x->dtype));
  CQSA_TRY(check_block(a.x_block, "args->x_block"));
  job.x_scale_inv = grid_of(shape.all_rows, shape.columns, a.x_block);
  return take_f32_grid(list, a.x_scale_inv, "args->x_scale_inv", false, job.x_scale_inv);
}

cqsa_status take_up(operand_list& list, const args_type& a, cqsa_fp8_job& job) {
  if (a.flags & CQSA_FP8_SILU) {
    CQSA_TRY(list.input(a.up, "args->up", a.x->ndim, a.x->ndim));
    CQSA_TRY(check_dtype("args->up", *a.up, a.x->dtype));
    CQSA_TRY(check_shape(*a.up, "args->up", a.x->shape, a.x->ndim));
    job.up = matrix_of(list, *a.up);
  } else if (a.up) {
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->up is given, but args->flags has no CQSA_FP8_SILU: wanted NULL");
  }
  return CQSA_OK;
}

cqsa_status take_x(operand_list& list, const args_type& a, shape_of_x& shape, cqsa_fp8_job& job) {
  CQSA_TRY(list.input(a.x, "args->x", 2, 3));
  const bool codes = is_format(a.x->dtype);
  if (!codes && !is_float(a.x->dtype)) return wrong_dtype("args->x", *a.x, "f32, f16, bf16, or a format with args->x_scale_inv");
  CQSA_TRY(take_shape(*a.x, "args->x", shape));
  if (codes && !a.row.out && !a.transposed.out) return wrong_dtype("args->x", *a.x, "f32, f16 or bf16");
  if (codes) CQSA_TRY(take_codes_of_x(list, a, shape, job));
  else if (a.x_scale_inv)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->x_scale_inv is given, but args->x is %s, which has no scales: wanted NULL", dtype_name(a.x->dtype));
  if (!codes && (a.x_block[0] || a.x_block[1]))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->x_block is {%" PRId64 ", %" PRId64 "}, but args->x is %s, which has no scales: wanted {0, 0}", a.x_block[0],
                a.x_block[1], dtype_name(a.x->dtype));
  job.x = matrix_of(list, *a.x);
  return take_up(list, a, job);
}

// ---- outputs ----------------------------------------------------------------------------------------------------------------

// A side that is not wanted has nothing else either.
cqsa_status check_absent(const cqsa_fp8_side& side, const side_names& names) {
  if (side.reserved) return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s is %" PRId32 ", wanted 0", names.reserved, side.reserved);
  const char* const given = side.scale_in ? names.scale_in : side.scale ? names.scale : side.scale_inv ? names.scale_inv : nullptr;
  if (given == nullptr) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, but %s is NULL: wanted NULL", given, names.out);
}

cqsa_status check_side(const args_type& a, const cqsa_fp8_side& side, const side_names& names) {
  CQSA_TRY(check_block(side.block, names.block));
  if (side.reserved) return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s is %" PRId32 ", wanted 0", names.reserved, side.reserved);
  const auto refuse = [&](const char* wanted, const char* why) {
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is {%" PRId64 ", %" PRId64 "}, wanted %s with %s", names.block, side.block[0], side.block[1], wanted, why);
  };
  if (a.source == CQSA_FP8_RING && (side.block[0] || side.block[1])) return refuse("{0, 0}", "CQSA_FP8_RING");
  if (a.groups && side.block[0] != 1 && (side.block[0] || side.block[1])) return refuse("{0, 0}, {1, 0} or {1, g}", "args->groups");
  if (side.scale_in && a.source != CQSA_FP8_STATIC)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is given, but args->source is not CQSA_FP8_STATIC: wanted NULL", names.scale_in);
  if (!side.scale_in && a.source == CQSA_FP8_STATIC)
    return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL, but args->source is CQSA_FP8_STATIC", names.scale_in);
  const bool bytes = side.scale_inv && side.scale_inv->dtype != CQSA_DTYPE_F32;  // whose values are checked
  if ((a.flags & CQSA_FP8_POW2) && a.source == CQSA_FP8_STATIC && !bytes)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->flags has CQSA_FP8_POW2, but the scales of %s are those of %s: wanted E8M0 in %s, or no flag", names.out,
                names.scale_in, names.scale_inv);
  return CQSA_OK;
}

// One scale for each group instead of one for all.
cqsa_scale_grid grid_of_side(const shape_of_x& shape, const cqsa_fp8_side& side, const groups_view& groups, bool grouped) {
  cqsa_scale_grid grid = grid_of(shape.all_rows, shape.columns, side.block);
  if (grouped && side.block[0] == 0) grid.rows = groups.count;
  return grid;
}

cqsa_status take_scales(operand_list& list, const cqsa_fp8_side& side, const side_names& names, const cqsa_scale_grid& grid, bool grouped, cqsa_fp8_output& out) {
  out.scale_in = out.scale = out.scale_inv = grid;
  out.ratio = 1;
  out.per_group = grouped && side.block[0] == 0;
  CQSA_TRY(take_f32_grid(list, side.scale_in, names.scale_in, false, out.scale_in));
  CQSA_TRY(take_f32_grid(list, side.scale, names.scale, true, out.scale));
  return take_grid(list, side.scale_inv, {names.scale_inv, names.layout}, side.scale_layout, true, out.scale_inv);
}

// Of an output that is wanted: in a leaf NULL says that it is not. Of an empty one nobody goes there.
alignas(64) char somewhere[64];

void* wanted_data(const operand_list& list, const cqsa_tensor& t) {
  if (void* const data = list.first(t)) return data;
  return t.data ? reinterpret_cast<void*>(address_of(t)) : somewhere;
}

cqsa_status take_row_out(operand_list& list, const args_type& a, cqsa_fp8_output& out) {
  CQSA_TRY(list.output(a.row.out, row_names.out, a.x->ndim, a.x->ndim));
  CQSA_TRY(check_format(row_names.out, *a.row.out));
  CQSA_TRY(check_shape(*a.row.out, row_names.out, a.x->shape, a.x->ndim));
  out.codes = matrix_of(list, *a.row.out);
  out.codes.data = wanted_data(list, *a.row.out);
  return CQSA_OK;
}

cqsa_status take_transposed_out(operand_list& list, const args_type& a, const shape_of_x& shape, cqsa_fp8_output& out) {
  static const char* const axes[] = {"cols", "batch * rows"};
  const cqsa_tensor* const t = a.transposed.out;
  CQSA_TRY(list.output(t, transposed_names.out, 2, 2));
  CQSA_TRY(check_format(transposed_names.out, *t));
  const int64_t wanted[] = {shape.columns, shape.all_rows};
  CQSA_TRY(check_shape(*t, transposed_names.out, wanted, 2, false, axes));
  int64_t strides[2];
  strides_of(*t, strides);
  out.codes = {wanted_data(list, *t), t->dtype, 0, {wrapped_product(shape.rows, strides[1]), strides[1], strides[0]}};
  return CQSA_OK;
}

cqsa_status take_sides(operand_list& list, const args_type& a, const shape_of_x& shape, const groups_view& groups, cqsa_fp8_job& job) {
  const auto grid = [&](const cqsa_fp8_side& side) { return grid_of_side(shape, side, groups, a.groups != nullptr); };
  if (a.row.out == nullptr) CQSA_TRY(check_absent(a.row, row_names));
  if (a.transposed.out == nullptr) CQSA_TRY(check_absent(a.transposed, transposed_names));
  if (a.row.out) {
    CQSA_TRY(check_side(a, a.row, row_names));
    CQSA_TRY(take_row_out(list, a, job.row));
    CQSA_TRY(take_scales(list, a.row, row_names, grid(a.row), a.groups != nullptr, job.row));
  }
  if (a.transposed.out == nullptr) return CQSA_OK;
  CQSA_TRY(check_side(a, a.transposed, transposed_names));
  CQSA_TRY(take_transposed_out(list, a, shape, job.transposed));
  return take_scales(list, a.transposed, transposed_names, grid(a.transposed), a.groups != nullptr, job.transposed);
}

// ---- the ring ---------------------------------------------------------------------------------------------------------------

// A scale that is no power of two would be published as another one than the codes were made with.
cqsa_status check_ring_scales(const cqsa_fp8_output& out, const side_names& names, const cqsa_fp8_ring& ring) {
  if (!is_e8m0(out.scale_inv)) return CQSA_OK;
  if (!(ring.flags & CQSA_FP8_POW2))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s holds powers of two, but args->ring has no CQSA_FP8_POW2", names.scale_inv);
  if (std::exp2(std::ilogb(out.ratio)) == out.ratio) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s holds powers of two, but %s is %s, whose scale is %g times that of args->ring's %s", names.scale_inv, names.out,
              dtype_name(out.codes.dtype), static_cast<double>(out.ratio), dtype_name(ring.format));
}

cqsa_status take_job_ring(operand_list& list, const args_type& a, cqsa_fp8_job& job) {
  CQSA_TRY(take_ring(a.ring, "args->ring", job.ring));
  if ((a.flags & CQSA_FP8_POW2) && !(job.ring.flags & CQSA_FP8_POW2))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->flags has CQSA_FP8_POW2, but args->ring has not, which says what its scales are");
  const cqsa_tensor& first = a.row.out ? *a.row.out : *a.transposed.out;
  if (job.ring.format != first.dtype)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->ring->format is %s, wanted %s, as %s", dtype_name(job.ring.format), dtype_name(first.dtype),
                a.row.out ? row_names.out : transposed_names.out);
  if (a.row.out && a.transposed.out) job.transposed.ratio = largest_of(a.transposed.out->dtype) / largest_of(first.dtype);
  CQSA_TRY(check_ring_scales(job.row, row_names, job.ring));
  CQSA_TRY(check_ring_scales(job.transposed, transposed_names, job.ring));
  if (!list.shapes_only()) return check_ring_memory(list, job.ring, "args->ring", true);
  job.ring.state = reinterpret_cast<void*>(uintptr_t{1} << 62);
  return CQSA_OK;
}

// ---- the small ones ---------------------------------------------------------------------------------------------------------

cqsa_status take_rows(operand_list& list, const args_type& a, const shape_of_x& shape, cqsa_fp8_job& job) {
  if (a.column_sum) {
    CQSA_TRY(take_row(list, a.column_sum, "args->column_sum", shape.columns, "cols", true));
    CQSA_TRY(check_dtype("args->column_sum", *a.column_sum, CQSA_DTYPE_F32));
    job.column_sum = static_cast<float*>(list.first(*a.column_sum));
    strides_of(*a.column_sum, &job.column_sum_stride);
  }
  if (a.counters) {
    CQSA_TRY(take_row(list, a.counters, "args->counters", 4, "counters", true));
    CQSA_TRY(check_dtype("args->counters", *a.counters, CQSA_DTYPE_I64));
    job.counters = static_cast<int64_t*>(list.first(*a.counters));
    strides_of(*a.counters, &job.counters_stride);
  }
  if (a.rng == nullptr) return CQSA_OK;
  CQSA_TRY(take_row(list, a.rng, "args->rng", 2, "seed, offset", false));
  CQSA_TRY(check_dtype("args->rng", *a.rng, CQSA_DTYPE_I64));
  job.rng = static_cast<const int64_t*>(list.first(*a.rng));
  strides_of(*a.rng, &job.rng_stride);
  return CQSA_OK;
}

cqsa_status take_small(operand_list& list, const args_type& a, const shape_of_x& shape, cqsa_fp8_job& job) {
  void* one = nullptr;
  CQSA_TRY(take_one(list, a.skip, "args->skip", CQSA_DTYPE_I32, false, one));
  job.skip = static_cast<const int32_t*>(one);
  CQSA_TRY(take_one(list, a.amax, "args->amax", CQSA_DTYPE_F32, true, one));
  job.amax = static_cast<float*>(one);
  return take_rows(list, a, shape, job);
}

void fill_numbers(const args_type& a, const shape_of_x& shape, const groups_view& groups, cqsa_fp8_job& job) {
  job.flags = a.flags;  // E8M0 implies CQSA_FP8_POW2 for its side alone
  job.source = a.source, job.nan_policy = a.nan_policy, job.margin = a.margin;
  job.eps = a.eps, job.amax_limit = a.amax_limit;
  job.groups = groups.data, job.groups_dtype = groups.dtype, job.groups_stride = groups.stride, job.num_groups = groups.count;
  cqsa_matrix* const matrices[] = {&job.x, &job.up, &job.row.codes, &job.transposed.codes};
  if (is_empty(*a.x))  // no element: strides of any size are none
    for (cqsa_matrix* m : matrices) m->stride[0] = m->stride[1] = m->stride[2] = 0;
  const bool folded = fold_batch(shape.batch, shape.rows, matrices, 4);
  job.batch = folded ? 1 : shape.batch, job.rows = folded ? shape.all_rows : shape.rows, job.columns = shape.columns;
}

cqsa_status check_some_output(const args_type& a, bool no_output) {
  if (a.row.out || a.transposed.out) return CQSA_OK;
  if (!no_output) return fail(CQSA_ERROR_NULL_POINTER, "args->row.out and args->transposed.out are both NULL, wanted an output");
  if (a.source == CQSA_FP8_CURRENT) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->source is %" PRId32 ", but there is no output to scale: wanted CQSA_FP8_CURRENT", a.source);
}

}  // namespace

cqsa_status bind_job(operand_list& list, const args_type& a, cqsa_fp8_job& job, bool no_output) {
  shape_of_x shape{};
  groups_view groups;
  job = {};
  CQSA_TRY(check_some_output(a, no_output));
  CQSA_TRY(check_numbers(a));
  CQSA_TRY(take_x(list, a, shape, job));
  CQSA_TRY(take_groups(list, a.groups, groups));
  CQSA_TRY(take_sides(list, a, shape, groups, job));
  if (a.ring) CQSA_TRY(take_job_ring(list, a, job));
  CQSA_TRY(take_small(list, a, shape, job));
  if (!a.row.out && !a.transposed.out) {
    CQSA_TRY(check_block(a.row.block, row_names.block));
    job.block_amax = grid_of(shape.all_rows, shape.columns, a.row.block);
    job.block_amax.data = reinterpret_cast<void*>(uintptr_t{1} << 62);  // somewhere: the caller of this says where
  }
  fill_numbers(a, shape, groups, job);
  return CQSA_OK;
}

// ---- values -----------------------------------------------------------------------------------------------------------------

namespace {

// powers: scale_inv holds powers of two.
cqsa_status check_static(const cqsa_scale_grid& grid, bool powers, const side_names& names) {
  for (int64_t r = 0; grid.data && r < grid.rows; ++r)
    for (int64_t c = 0; c < grid.columns; ++c) {
      float scale;
      std::memcpy(&scale, static_cast<const char*>(grid.data) + 4 * (r * grid.stride[0] + c * grid.stride[1]), sizeof scale);
      if (!is_scale(scale))
        return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g at [%" PRId64 ", %" PRId64 "], wanted a number from 2^-126 to FLT_MAX", names.scale_in,
                    static_cast<double>(scale), r, c);
      if (powers && !is_power_of_two(scale))
        return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g at [%" PRId64 ", %" PRId64 "], wanted a power of two, as %s holds powers of two",
                    names.scale_in, static_cast<double>(scale), r, c, names.scale_inv);
    }
  return CQSA_OK;
}

}  // namespace

cqsa_status check_job_values(const cqsa_fp8_job& job) {
  int32_t skip = 0;
  if (job.skip) std::memcpy(&skip, job.skip, sizeof skip);
  if (skip != 0) return CQSA_OK;
  if (job.groups) CQSA_TRY(check_groups({job.groups, job.groups_dtype, job.groups_stride, job.num_groups}, job.batch * job.rows));
  if (job.source != CQSA_FP8_STATIC) return CQSA_OK;
  CQSA_TRY(check_static(job.row.scale_in, is_e8m0(job.row.scale_inv), row_names));
  return check_static(job.transposed.scale_in, is_e8m0(job.transposed.scale_inv), transposed_names);
}

}  // namespace cqsa::fp8
