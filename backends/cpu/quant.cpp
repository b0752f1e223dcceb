// SPDX-License-Identifier: Apache-2.0
// Quantized matrices, section 15 of cqsa.h: who works on which pieces of which rows.
#include "quant_job.h"

#include "cpu_features.h"
#include "dtype.h"
#include "element.h"
#include "quant_format.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

int64_t bytes_of(cqsa_dtype dtype) { return (dtype >> 8 & 0xff) / 8; }

// A call cut into units of one piece of one row each.
struct quant_work {
  const quant_target& target;
  const void* leaf;
  void (*unit)(const quant_work& work, int64_t row, int64_t column, int64_t n, quant_scratch* mem);
  int64_t rows, row_elements, tasks;

  int64_t pieces() const { return (row_elements + quant_piece - 1) / quant_piece; }
};

void run_part(void* data, int64_t index) {
  const quant_work& work = *static_cast<const quant_work*>(data);
  const int64_t pieces = work.pieces(), units = work.rows * pieces, each = units / work.tasks, more = units % work.tasks;
  const int64_t begin = index * each + std::min(index, more), end = begin + each + (index < more);
  quant_scratch mem;
  mem.ops = &conversions;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t column = i % pieces * quant_piece;
    work.unit(work, i / pieces, column, std::min(quant_piece, work.row_elements - column), &mem);
  }
}

cqsa_status run(quant_work& work, const cqsa_exec* exec) {
  // Less than this is done before another thread is awake.
  constexpr int64_t few = 32768;
  const int64_t units = work.rows * work.pieces();
  const bool large = work.rows > few / (work.row_elements + 16);
  if (large && exec && exec->run && exec->num_workers > 1) {
    work.tasks = std::min(exec->num_workers, units);
    return exec->run(exec->user, work.tasks, run_part, &work);
  }
  run_part(&work, 0);
  return CQSA_OK;
}

int64_t row_of(const cqsa_dequantize_leaf& leaf, int64_t n) {
  return leaf.row_ids ? index_of(leaf.row_ids, leaf.row_ids_dtype, n * leaf.row_ids_stride) : leaf.first_row + n;
}

void decode_unit(const quant_work& work, int64_t row, int64_t column, int64_t n, quant_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_dequantize_leaf*>(work.leaf);
  const quant_format& format = quant_formats[leaf.format];
  const uint8_t* const from = static_cast<const uint8_t*>(leaf.data) + row_of(leaf, row) * leaf.row_bytes;
  char* const to = static_cast<char*>(leaf.out) + (row * leaf.out_stride[0] + column * leaf.out_stride[1]) * bytes_of(leaf.out_dtype);
  work.target.decode(&leaf, from + column / format.block_elements * format.block_bytes, n, to, mem);
}

void encode_unit(const quant_work& work, int64_t row, int64_t column, int64_t n, quant_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_quantize_leaf*>(work.leaf);
  const quant_format& format = quant_formats[leaf.format];
  const char* const from = static_cast<const char*>(leaf.x) + (row * leaf.x_stride[0] + column * leaf.x_stride[1]) * bytes_of(leaf.x_dtype);
  uint8_t* const to = static_cast<uint8_t*>(leaf.data) + row * leaf.row_bytes + column / format.block_elements * format.block_bytes;
  work.target.load(from, leaf.x_dtype, leaf.x_stride[1], n, mem);
  encode_blocks(leaf.format, mem->row, n, to);
}

// F32, F16 and BF16 are the decoder the other way round: a matrix of one kind of number becomes one of another.
bool is_plain(cqsa_quant_format format) { return format <= CQSA_QUANT_BF16; }
cqsa_quant_format plain_format(cqsa_dtype dtype) {
  return dtype == CQSA_DTYPE_F32 ? CQSA_QUANT_F32 : dtype == CQSA_DTYPE_F16 ? CQSA_QUANT_F16 : CQSA_QUANT_BF16;
}
cqsa_dtype plain_dtype(cqsa_quant_format format) {
  return format == CQSA_QUANT_F32 ? CQSA_DTYPE_F32 : format == CQSA_QUANT_F16 ? CQSA_DTYPE_F16 : CQSA_DTYPE_BF16;
}

void convert_unit(const quant_work& work, int64_t row, int64_t column, int64_t n, quant_scratch* mem) {
  const auto& leaf = *static_cast<const cqsa_quantize_leaf*>(work.leaf);
  const int64_t bytes = bytes_of(leaf.x_dtype), step = leaf.x_stride[1] * bytes;
  const char* const from = static_cast<const char*>(leaf.x) + row * leaf.x_stride[0] * bytes + column * step;
  cqsa_dequantize_leaf to{};
  to.format = plain_format(leaf.x_dtype), to.out_dtype = plain_dtype(leaf.format), to.out_stride[1] = 1;
  char packed[4 * quant_piece];
  for (int64_t i = 0; i < n; ++i) std::memcpy(packed + i * bytes, from + i * step, static_cast<size_t>(bytes));
  char* const out = static_cast<char*>(leaf.data) + row * leaf.row_bytes + column * bytes_of(to.out_dtype);
  work.target.decode(&to, reinterpret_cast<const uint8_t*>(packed), n, out, mem);
}

}  // namespace

const quant_target& quant_best() {
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx2) return quant_avx2;
#endif
  return quant_baseline;
}

cqsa_status dequantize_rows_on(const quant_target& target, const cqsa_dequantize_leaf* leaf, const cqsa_exec* exec) {
  quant_work work{target, leaf, decode_unit, leaf->count, leaf->row_elements, 1};
  return run(work, exec);
}

cqsa_status dequantize_rows(void*, const cqsa_dequantize_leaf* leaf, const cqsa_exec* exec, void*) {
  return dequantize_rows_on(quant_best(), leaf, exec);
}

cqsa_status quantize_rows(void*, const cqsa_quantize_leaf* leaf, const cqsa_exec* exec, void*) {
  quant_work work{quant_best(), leaf, is_plain(leaf->format) ? convert_unit : encode_unit, leaf->rows, leaf->row_elements, 1};
  return run(work, exec);
}

}  // namespace cqsa::cpu
