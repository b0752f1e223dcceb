// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/operands.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <vector>

#include "backends/fp8_rules.h"

namespace cqsa::fp8 {

// ---- tensors ----------------------------------------------------------------------------------------------------------------

namespace {

// Where the data of tensors is that nobody follows: far from both ends, so that every extent fits.
void* nowhere() { return reinterpret_cast<void*>(uintptr_t{1} << 62); }

bool is_usable(const cqsa_context& context, int32_t device_type) {
  if (!context.is_host()) return device_type == context.backend->device_type;
  return device_type == CQSA_DEVICE_CPU || device_type == CQSA_DEVICE_CUDA_HOST || device_type == CQSA_DEVICE_ROCM_HOST;
}

cqsa_status check_bare(const cqsa_tensor* t, const char* name, int min_ndim, int max_ndim) {
  byte_extent extent;
  if (t == nullptr) return check_tensor(t, name, min_ndim, max_ndim, &extent);
  cqsa_tensor bare = *t;
  bare.data = nowhere();
  bare.byte_offset = 0;
  return check_tensor(&bare, name, min_ndim, max_ndim, &extent);
}

}  // namespace

cqsa_status operand_list::check_device(const cqsa_tensor& t, const char* name) {
  const cqsa_backend_v1& backend = *context_.backend;
  if (!is_usable(context_, t.device_type))
    return fail(CQSA_ERROR_DEVICE, "%s is on device type %" PRId32 ", wanted %" PRId32 " (backend %s)", name, t.device_type,
                backend.device_type, backend.name);
  if (context_.is_host()) return CQSA_OK;
  if (t.device_id != context_.device_index)
    return fail(CQSA_ERROR_DEVICE, "%s is on device %" PRId32 ", the context is for device %" PRId32, name, t.device_id,
                context_.device_index);
  return check_pointer(context_, t, name, answers_);
}

cqsa_status operand_list::take(const cqsa_tensor* t, const char* name, int min_ndim, int max_ndim, bool is_output) {
  if (shapes_only()) return check_bare(t, name, min_ndim, max_ndim);
  byte_extent extent;
  CQSA_TRY(check_tensor(t, name, min_ndim, max_ndim, &extent));
  CQSA_TRY(check_device(*t, name));
  if (is_output) CQSA_TRY(check_no_self_overlap(*t, name));
  const uintptr_t address = address_of(*t);
  all_[count_++] = {t, name, address + static_cast<uintptr_t>(extent.low), address + static_cast<uintptr_t>(extent.high), entry_, is_output};
  return CQSA_OK;
}

void operand_list::bytes(const void* memory, uint64_t count, const char* name) {
  const auto low = reinterpret_cast<uintptr_t>(memory);
  all_[count_++] = {nullptr, name, low, low + count, entry_, true};
}

cqsa_status operand_list::check_place(const void* memory, const char* name, cqsa_status otherwise) {
  if (context_.is_host() || context_.backend->pointer_query == nullptr) return CQSA_OK;
  cqsa_pointer_info found;
  if (answers_.on_device(context_, reinterpret_cast<uintptr_t>(memory))) return CQSA_OK;
  CQSA_TRY(answers_.ask(context_, reinterpret_cast<uintptr_t>(memory), name, found));
  if (found.kind == CQSA_POINTER_MANAGED || (found.kind == CQSA_POINTER_DEVICE && found.device == context_.device_index)) return CQSA_OK;
  return fail(otherwise, "%s is not memory of %s device %" PRId32, name, context_.backend->name, context_.device_index);
}

void* operand_list::first(const cqsa_tensor& t) const {
  if (shapes_only()) return nowhere();
  return is_empty(t) ? nullptr : reinterpret_cast<void*>(address_of(t));
}

// ---- overlap ----------------------------------------------------------------------------------------------------------------

namespace {

bool ranges_meet(const operand& a, const operand& b) { return a.low < b.high && b.low < a.high; }

// A name with the number of its entry in it.
struct entry_name {
  char text[80];
  explicit entry_name(const operand& o) {
    const bool many = o.entry >= 0 && std::strncmp(o.name, "args->", 6) == 0;
    if (many) std::snprintf(text, sizeof text, "args[%" PRId32 "]->%s", o.entry, o.name + 6);
    else std::snprintf(text, sizeof text, "%s", o.name);
  }
};

// The bytes of an operand that is no tensor, as one.
struct as_tensor {
  int64_t count;
  cqsa_tensor bytes;
  const cqsa_tensor& operator()(const operand& o) {
    if (o.tensor) return *o.tensor;
    count = static_cast<int64_t>(o.high - o.low);
    bytes = {reinterpret_cast<void*>(o.low), CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_U8, &count, nullptr, 0};
    return bytes;
  }
};

// Their ranges meet; do they?
cqsa_status check_pair(const operand& output, const operand& other) {
  as_tensor a, b;
  return check_no_overlap(a(output), entry_name(output).text, b(other), entry_name(other).text);
}

}  // namespace

cqsa_status operand_list::check_overlap(const cqsa_tensor* but_same, const cqsa_tensor* as) const {
  if (shapes_only()) return CQSA_OK;
  if (count_ > 32) return check_many();
  for (int64_t i = 0; i < count_; ++i) {
    if (!all_[i].is_output) continue;
    for (int64_t j = 0; j < count_; ++j) {
      if (i == j || (j < i && all_[j].is_output) || !ranges_meet(all_[i], all_[j])) continue;
      if (but_same && all_[i].tensor == as && all_[j].tensor == but_same) continue;
      CQSA_TRY(check_pair(all_[i], all_[j]));
    }
  }
  return CQSA_OK;
}

// Outputs in the order of their addresses, with the highest end so far: what may meet an operand is found by halving.
cqsa_status operand_list::check_many() const {
  std::vector<const operand*> outputs;
  for (int64_t i = 0; i < count_; ++i)
    if (all_[i].is_output && all_[i].low != all_[i].high) outputs.push_back(&all_[i]);
  std::sort(outputs.begin(), outputs.end(), [](const operand* a, const operand* b) { return a->low < b->low; });
  std::vector<uintptr_t> reach(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) reach[i] = std::max(outputs[i]->high, i ? reach[i - 1] : 0);
  for (int64_t i = 0; i < count_; ++i) {
    const operand& o = all_[i];
    const auto end = std::lower_bound(outputs.begin(), outputs.end(), o.high, [](const operand* a, uintptr_t high) { return a->low < high; });
    for (auto n = end - outputs.begin(); n-- > 0 && reach[static_cast<size_t>(n)] > o.low;) {
      const operand& output = *outputs[static_cast<size_t>(n)];
      if (&output != &o && ranges_meet(output, o)) CQSA_TRY(check_pair(output, o));
    }
  }
  return CQSA_OK;
}

// ---- types and small tensors ------------------------------------------------------------------------------------------------

bool is_float(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16; }

cqsa_status wrong_dtype(const char* name, const cqsa_tensor& t, const char* wanted) {
  return fail(CQSA_ERROR_DTYPE, "%s is %s, wanted %s", name, dtype_name(t.dtype), wanted);
}

cqsa_status check_dtype(const char* name, const cqsa_tensor& t, cqsa_dtype wanted) {
  return t.dtype == wanted ? CQSA_OK : wrong_dtype(name, t, dtype_name(wanted));
}

cqsa_status check_float(const char* name, const cqsa_tensor& t) {
  return is_float(t.dtype) ? CQSA_OK : wrong_dtype(name, t, "f32, f16 or bf16");
}

cqsa_status check_format(const char* name, const cqsa_tensor& t) {
  return is_format(t.dtype) ? CQSA_OK : wrong_dtype(name, t, "e4m3fn, e5m2, e4m3fnuz or e5m2fnuz");
}

cqsa_status check_format(const char* name, cqsa_dtype format) {
  if (is_format(format)) return CQSA_OK;
  return fail(CQSA_ERROR_DTYPE, "%s is 0x%08x (%s), wanted e4m3fn, e5m2, e4m3fnuz or e5m2fnuz", name, static_cast<unsigned>(format), dtype_name(format));
}

cqsa_status take_one(operand_list& list, const cqsa_tensor* t, const char* name, cqsa_dtype dtype, bool is_output, void*& out) {
  out = nullptr;
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(is_output ? list.output(t, name, 0, max_axes) : list.input(t, name, 0, max_axes));
  CQSA_TRY(check_dtype(name, *t, dtype));
  for (int i = 0; i < t->ndim; ++i)
    if (t->shape[i] != 1) return fail(CQSA_ERROR_SHAPE, "%s has shape %s, wanted one element", name, shape_text(t->shape, t->ndim).text);
  out = list.first(*t);
  return CQSA_OK;
}

cqsa_status take_row(operand_list& list, const cqsa_tensor* t, const char* name, int64_t count, const char* axis, bool is_output) {
  CQSA_TRY(is_output ? list.output(t, name, 1, 1) : list.input(t, name, 1, 1));
  if (t->shape[0] == count) return CQSA_OK;
  return check_shape(*t, name, &count, 1, false, &axis);
}

cqsa_matrix matrix_of(const operand_list& list, const cqsa_tensor& t) {
  int64_t strides[max_axes];
  strides_of(t, strides);
  const int64_t* const last = strides + t.ndim - 2;
  return {list.first(t), t.dtype, 0, {t.ndim == 3 ? strides[0] : 0, last[0], last[1]}};
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

cqsa_scale_grid grid_of(int64_t rows, int64_t columns, const int64_t* block) {
  cqsa_scale_grid grid{};
  grid.dtype = CQSA_DTYPE_F32;
  grid.rows = blocks_of(rows, block[0]);
  grid.columns = blocks_of(columns, block[1]);
  const auto resolve = [](int64_t size, int64_t stated) {
    const int64_t most = std::max<int64_t>(size, 1);
    return stated == 0 || stated > most ? most : stated;
  };
  grid.block[0] = resolve(rows, block[0]);
  grid.block[1] = resolve(columns, block[1]);
  return grid;
}

cqsa_status check_layout(int32_t layout, const char* name) {
  if (layout >= CQSA_FP8_SCALES_STRIDED && layout <= CQSA_FP8_SCALES_TILED) return CQSA_OK;
  return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s is %" PRId32 ", wanted one of CQSA_FP8_SCALES_*", name, layout);
}

namespace {

bool is_byte_scale(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_E8M0FNU || dtype == CQSA_DTYPE_U8; }

cqsa_status check_grid_shape(const cqsa_tensor& t, const char* name, int64_t rows, int64_t columns, const char* columns_name) {
  bool one = t.ndim < 2 && rows == 1 && columns == 1;
  for (int i = 0; one && i < t.ndim; ++i) one = t.shape[i] == 1;
  if (one) return CQSA_OK;
  const int64_t wanted[] = {rows, columns};
  if (t.ndim == 2 && t.shape[0] == rows && t.shape[1] == columns) return CQSA_OK;
  const char* const axes[] = {"block rows", columns_name};
  return check_shape(t, name, wanted, 2, false, axes);
}

void fill_strides(const operand_list& list, const cqsa_tensor& t, cqsa_dtype dtype, cqsa_scale_grid& grid) {
  int64_t strides[2] = {0, 0};
  if (t.ndim == 2) strides_of(t, strides);
  grid.data = list.first(t);
  grid.dtype = dtype;
  grid.stride[0] = strides[0], grid.stride[1] = strides[1];
}

cqsa_status bind_tiled(const operand_list& list, const cqsa_tensor& t, const char* name, cqsa_scale_grid& grid) {
  if (!is_byte_scale(t.dtype)) return wrong_dtype(name, t, "e8m0fnu or u8 for CQSA_FP8_SCALES_TILED");
  int64_t wanted = 0;
  if (multiply_overflows(blocks_of(grid.rows, 128), blocks_of(grid.columns, 4), &wanted) || multiply_overflows(wanted, 512, &wanted)) wanted = INT64_MAX;
  static const char* const axes[] = {"ceil(block rows / 128) * ceil(block columns / 4) * 512"};
  CQSA_TRY(check_shape(t, name, &wanted, 1, false, axes));
  int64_t stride = 1;
  strides_of(t, &stride);
  if (stride != 1 && wanted > 1)
    return fail(CQSA_ERROR_STRIDES, "%s has stride %" PRId64 ", wanted 1 for CQSA_FP8_SCALES_TILED", name, stride);
  grid.data = list.first(t);
  grid.dtype = CQSA_DTYPE_E8M0FNU;
  return CQSA_OK;
}

cqsa_status bind_packed(const operand_list& list, const cqsa_tensor& t, const char* name, cqsa_scale_grid& grid) {
  if (t.dtype != CQSA_DTYPE_I32) return wrong_dtype(name, t, "i32 for CQSA_FP8_SCALES_PACKED");
  CQSA_TRY(check_grid_shape(t, name, grid.rows, blocks_of(grid.columns, 4), "ceil(block columns / 4)"));
  return fill_strides(list, t, t.dtype, grid), CQSA_OK;
}

cqsa_status bind_strided(const operand_list& list, const cqsa_tensor& t, const char* name, cqsa_scale_grid& grid) {
  const bool bytes = is_byte_scale(t.dtype);
  if (t.dtype != CQSA_DTYPE_F32 && !bytes) return wrong_dtype(name, t, "f32, e8m0fnu or u8 for CQSA_FP8_SCALES_STRIDED");
  CQSA_TRY(check_grid_shape(t, name, grid.rows, grid.columns, "block columns"));
  return fill_strides(list, t, bytes ? CQSA_DTYPE_E8M0FNU : t.dtype, grid), CQSA_OK;
}

}  // namespace

cqsa_status take_grid(operand_list& list, const cqsa_tensor* t, const grid_names& names, int32_t layout, bool is_output, cqsa_scale_grid& grid) {
  CQSA_TRY(check_layout(layout, names.layout));
  grid.layout = layout;
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(is_output ? list.output(t, names.tensor, 0, 2) : list.input(t, names.tensor, 0, 2));
  if (layout == CQSA_FP8_SCALES_TILED) return bind_tiled(list, *t, names.tensor, grid);
  if (layout == CQSA_FP8_SCALES_PACKED) return bind_packed(list, *t, names.tensor, grid);
  return bind_strided(list, *t, names.tensor, grid);
}

cqsa_status take_f32_grid(operand_list& list, const cqsa_tensor* t, const char* name, bool is_output, cqsa_scale_grid& grid) {
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(is_output ? list.output(t, name, 0, 2) : list.input(t, name, 0, 2));
  CQSA_TRY(check_dtype(name, *t, CQSA_DTYPE_F32));
  CQSA_TRY(check_grid_shape(*t, name, grid.rows, grid.columns, "block columns"));
  return fill_strides(list, *t, CQSA_DTYPE_F32, grid), CQSA_OK;
}

cqsa_status check_margin(int32_t margin, const char* name) {
  if (margin >= -64 && margin <= 64) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %" PRId32 ", wanted -64 to 64", name, margin);
}

cqsa_status check_bounds(float eps, float amax_limit, const char* eps_name, const char* limit_name) {
  const auto fits = [](float x) { return x >= 0 && std::isfinite(x); };
  if (!fits(eps)) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g, wanted a finite number of at least 0", eps_name, static_cast<double>(eps));
  if (fits(amax_limit)) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is %g, wanted a finite number above 0, or 0 for none", limit_name, static_cast<double>(amax_limit));
}

// ---- groups -----------------------------------------------------------------------------------------------------------------

cqsa_status take_groups(operand_list& list, const cqsa_tensor* t, groups_view& out) {
  if (t == nullptr) return CQSA_OK;
  CQSA_TRY(list.input(t, "args->groups", 1, 1));
  if (t->dtype != CQSA_DTYPE_I32 && t->dtype != CQSA_DTYPE_I64) return wrong_dtype("args->groups", *t, "i32 or i64");
  if (t->shape[0] < 1) return fail(CQSA_ERROR_SHAPE, "args->groups has shape [0], wanted [num_groups + 1]");
  strides_of(*t, &out.stride);
  out.data = list.first(*t), out.dtype = t->dtype, out.count = t->shape[0] - 1;
  return CQSA_OK;
}

cqsa_status check_groups(const groups_view& groups, int64_t rows) {
  int64_t before = 0;
  for (int64_t g = 0; g <= groups.count; ++g) {
    const int64_t end = index_at(groups.data, groups.dtype, g * groups.stride);
    if (g == 0 && end != 0) return fail(CQSA_ERROR_INDEX, "args->groups[0] is %" PRId64 ", wanted 0", end);
    if (end < before || end > rows)
      return fail(CQSA_ERROR_INDEX, "args->groups[%" PRId64 "] is %" PRId64 ", wanted %" PRId64 " (the entry before it) to %" PRId64 " (rows)", g, end, before,
                  rows);
    before = end;
  }
  return CQSA_OK;
}

// ---- leaves -----------------------------------------------------------------------------------------------------------------

cqsa_status name_entry(cqsa_status status, const char* base, int64_t entry) {
  const char* from = last_error_text();
  const size_t length = std::strlen(base);
  char text[512];
  size_t used = 0;
  for (bool first = true; *from && used + length + 32 < sizeof text; first = false) {
    const bool named = std::strncmp(from, base, length) == 0 && (std::strncmp(from + length, "->", 2) == 0 || (first && from[length] == ' '));
    if (!named) {
      text[used++] = *from++;
      continue;
    }
    used += static_cast<size_t>(std::snprintf(text + used, sizeof text - used, "%s[%" PRId64 "]", base, entry));
    from += length;
  }
  text[used] = '\0';
  return fail(status, "%s", text);
}

cqsa_status report(const cqsa_context& context, cqsa_status status, const char* what) {
  if (status == CQSA_OK || status == CQSA_ERROR_CALLBACK) return status;  // of the callback the core has said what is wrong
  return fail(status, "%s failed on backend %s: %s", what, context.backend->name, context.backend->last_error());
}

cqsa_status no_leaf(const cqsa_context& context, const char* what) {
  return fail(CQSA_ERROR_UNSUPPORTED, "backend %s has no %s", context.backend->name, what);
}

}  // namespace cqsa::fp8
