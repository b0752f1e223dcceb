// SPDX-License-Identifier: Apache-2.0
// FP8 as the text of cqsa.h has it, one element after the other. The fast code gives the same bits.
#include "fp8_element.h"
#include "fp8_job.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

struct rectangle {
  int64_t top, bottom, left, right;
};

// A job with what follows from its arguments.
struct reference_job {
  const cqsa_fp8_job& job;
  fp8_groups groups;
  int64_t top, bottom;  // rows that are worked on
  explicit reference_job(const cqsa_fp8_job& j) : job(j), groups{j.groups, j.groups_dtype, j.groups_stride, j.num_groups, j.batch * j.rows} {
    top = j.groups ? groups.begin(0) : 0;
    bottom = !j.groups ? groups.rows : std::max(groups.begin(j.num_groups), top);
  }
};

uint32_t largest_bits(const cqsa_fp8_job& job, const rectangle& at) {
  uint32_t most = 0;
  for (int64_t i = at.top; i < at.bottom && at.left < at.right; ++i)
    for (int64_t j = at.left; j < at.right; ++j) most = std::max(most, magnitude_bits(job_element(job, i, j), job.nan_policy));
  return most;
}

// Block (r, c) of a grid; rows that are not worked on are in none.
rectangle block_of(const reference_job& x, const cqsa_scale_grid& g, bool per_group, int64_t r, int64_t c) {
  rectangle at{r * g.block[0], (r + 1) * g.block[0], c * g.block[1], std::min((c + 1) * g.block[1], x.job.columns)};
  if (per_group) at.top = x.groups.begin(r), at.bottom = x.groups.end(r);
  at.top = std::clamp(at.top, x.top, x.bottom);
  at.bottom = std::clamp(at.bottom, x.top, x.bottom);
  return at;
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

fp8::scale_pair scale_of_block(const reference_job& x, const cqsa_fp8_output& side, int64_t r, int64_t c) {
  if (x.job.source == CQSA_FP8_CURRENT) return fp8::scale_of(amax_of(largest_bits(x.job, block_of(x, side.scale, side.per_group, r, c))), job_rule(x.job, side));
  return given_scale(x.job, side, r, c);
}

// ---- elements ---------------------------------------------------------------------------------------------------------------

uint8_t encode(const cqsa_fp8_job& job, int64_t i, int64_t j, float scale, cqsa_dtype format) {
  const float x = job_element(job, i, j), y = x * scale;
  const bool saturate = !(job.flags & CQSA_FP8_NO_SATURATE);
  if (!job.rng || x != x) return f32_to_code(x != x ? x : y, format, saturate);
  const char* const rng = reinterpret_cast<const char*>(job.rng);
  const uint64_t e = uint64_t(i) * uint64_t(job.columns) + uint64_t(j);
  const uint32_t word = fp8::random_word(load_as<int64_t>(rng), load_as<int64_t>(rng + 8 * job.rng_stride), e);
  return code_at_random(y, format, saturate, word);
}

// Whether a finite element was too large. At random: whether it came out too large.
bool saturates(const cqsa_fp8_job& job, int64_t i, int64_t j, float scale, cqsa_dtype format) {
  const float x = job_element(job, i, j), y = x * scale;
  if (!fp8::is_finite(x)) return false;
  if (!job.rng) return overflows(y, format);
  const char* const rng = reinterpret_cast<const char*>(job.rng);
  const uint64_t e = uint64_t(i) * uint64_t(job.columns) + uint64_t(j);
  const uint32_t word = fp8::random_word(load_as<int64_t>(rng), load_as<int64_t>(rng + 8 * job.rng_stride), e);
  return fp8::magnitude_at_random(y, format, word) > largest_code(format);
}

void quantize_block(const reference_job& x, const cqsa_fp8_output& side, int64_t r, int64_t c, int64_t* saturated) {
  if (x.job.groups && !side.per_group && (r < x.top || r >= x.bottom)) return;  // rows in no group
  const fp8::scale_pair pair = scale_of_block(x, side, r, c);
  store_scale(side.scale, r, c, pair.scale);
  store_scale(side.scale_inv, r, c, pair.scale_inv);
  const rectangle at = block_of(x, side.scale, side.per_group, r, c);
  const cqsa_dtype format = side.codes.dtype;
  for (int64_t i = at.top; i < at.bottom && at.left < at.right && side.codes.data; ++i)
    for (int64_t j = at.left; j < at.right; ++j) {
      *matrix_address(side.codes, x.job.rows, i, j) = static_cast<char>(encode(x.job, i, j, pair.scale, format));
      if (saturated && saturates(x.job, i, j, pair.scale, format)) ++*saturated;
    }
}

void quantize_side(const reference_job& x, const cqsa_fp8_output& side, int64_t* saturated) {
  const cqsa_scale_grid& g = side.scale;
  const bool empty = x.job.batch * x.job.rows == 0 || x.job.columns == 0;
  if (!fp8::is_format(side.codes.dtype) || (empty && !side.scale.data && !side.scale_inv.data)) return;
  for (int64_t r = 0; r < g.rows; ++r)
    for (int64_t c = 0; c < g.columns; ++c) quantize_block(x, side, r, c, saturated);
  clear_padding(side.scale_inv);
}

// ---- the rest ---------------------------------------------------------------------------------------------------------------

void find_block_amaxes(const reference_job& x) {
  const cqsa_scale_grid& g = x.job.block_amax;
  for (int64_t r = 0; g.data && r < g.rows; ++r)
    for (int64_t c = 0; c < g.columns; ++c) store_scale(g, r, c, amax_of(largest_bits(x.job, block_of(x, g, false, r, c))));
}

void sum_columns(const reference_job& x) {
  for (int64_t j = 0; x.job.column_sum && j < x.job.columns; ++j) {
    double sum = 0;
    for (int64_t i = x.top; i < x.bottom; ++i) sum += double(job_element(x.job, i, j));
    const float rounded = plain_nan(float(sum));
    std::memcpy(x.job.column_sum + j * x.job.column_sum_stride, &rounded, sizeof rounded);
  }
}

void count_wild(const reference_job& x, int64_t counts[3]) {
  for (int64_t i = x.top; i < x.bottom && x.job.columns > 0; ++i)
    for (int64_t j = 0; j < x.job.columns; ++j) {
      const float value = job_element(x.job, i, j);
      counts[0] += value != value;
      counts[1] += std::isinf(value);
    }
}

}  // namespace

void fp8_quantize_job_reference(const cqsa_fp8_job& job) {
  const reference_job x(job);
  int64_t counts[3] = {0, 0, 0};
  const bool has_row = job.row.codes.data != nullptr;
  quantize_side(x, job.row, has_row ? counts + 2 : nullptr);
  quantize_side(x, job.transposed, has_row ? nullptr : counts + 2);
  find_block_amaxes(x);
  sum_columns(x);
  if (job.counters) count_wild(x, counts);
  const bool wants_amax = job.amax || job.ring.state;
  fp8_publish(job, wants_amax ? largest_bits(job, {x.top, x.bottom, 0, job.columns}) : 0, counts);
}

namespace {

bool are_scales(const cqsa_scale_grid& g) {
  for (int64_t r = 0; g.data && r < g.rows; ++r)
    for (int64_t c = 0; c < g.columns; ++c)
      if (!fp8::is_scale(load_scale(g, r, c))) return false;
  return true;
}

}  // namespace

void fp8_publish(const cqsa_fp8_job& job, uint32_t amax_bits, const int64_t counts[3]) {
  const float amax = amax_of(amax_bits);
  if (job.amax) std::memcpy(job.amax, &amax, sizeof amax);
  for (int n = 0; n < 3 && job.counters; ++n) {
    char* const at = reinterpret_cast<char*>(job.counters + n * job.counters_stride);
    const int64_t sum = load_as<int64_t>(at) + counts[n];
    std::memcpy(at, &sum, sizeof sum);
  }
  if (!job.ring.state) return;
  if (job.flags & CQSA_FP8_RING_STAGE) fp8_ring_stage(job.ring, amax);
  else fp8_ring_take(job.ring, amax);
}

bool fp8_is_skipped(const cqsa_fp8_job& job) { return job.skip && load_as<int32_t>(reinterpret_cast<const char*>(job.skip)) != 0; }

cqsa_status fp8_check_jobs(const cqsa_fp8_quantize_leaf* leaf) {
  for (int64_t n = 0; n < leaf->count; ++n) {
    const cqsa_fp8_job& job = leaf->jobs[n];
    if (fp8_is_skipped(job)) continue;
    if (job.ring.state && !fp8_ring_is_sound(job.ring)) return fail(CQSA_ERROR_INVALID_ARGUMENT, "the memory of a ring holds another ring, or none");
    const bool known = job.source == CQSA_FP8_STATIC;
    if (known && !(are_scales(job.row.scale_in) && are_scales(job.transposed.scale_in)))
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "a scale of scale_in is not in [2^-126, FLT_MAX]");
  }
  return CQSA_OK;
}

cqsa_status fp8_quantize_reference(const cqsa_fp8_quantize_leaf* leaf) {
  const cqsa_status status = fp8_check_jobs(leaf);
  if (status != CQSA_OK) return status;
  for (int64_t n = 0; n < leaf->count; ++n)
    if (!fp8_is_skipped(leaf->jobs[n])) fp8_quantize_job_reference(leaf->jobs[n]);
  return CQSA_OK;
}

cqsa_status fp8_dequantize_reference(const cqsa_fp8_dequantize_leaf* leaf) {
  const cqsa_scale_grid& g = leaf->scale_inv;
  const fp8_groups groups{leaf->groups, leaf->groups_dtype, leaf->groups_stride, leaf->num_groups, leaf->batch * leaf->rows};
  const int64_t count = leaf->groups ? leaf->num_groups : 1;
  for (int64_t n = 0; n < count; ++n)
    for (int64_t i = leaf->groups ? groups.begin(n) : 0; i < (leaf->groups ? groups.end(n) : groups.rows); ++i)
      for (int64_t j = 0; j < leaf->columns; ++j) {
        const float scale = g.data ? load_scale(g, leaf->per_group ? n : i / g.block[0], j / g.block[1]) : 1.0f;
        const float code = code_to_f32(load_as<uint8_t>(matrix_address(leaf->codes, leaf->rows, i, j)), leaf->codes.dtype);
        store_f32(matrix_address(leaf->out, leaf->rows, i, j), leaf->out.dtype, code * scale);
      }
  return CQSA_OK;
}

cqsa_status fp8_transpose_reference(const cqsa_fp8_transpose_leaf* leaf) {
  for (int64_t i = 0; i < leaf->rows; ++i)
    for (int64_t j = 0; j < leaf->columns; ++j)
      leaf->out[i * leaf->out_stride[0] + j * leaf->out_stride[1]] = leaf->x[i * leaf->x_stride[0] + j * leaf->x_stride[1]];
  return CQSA_OK;
}

}  // namespace cqsa::cpu
