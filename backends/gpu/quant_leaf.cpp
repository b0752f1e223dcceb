// SPDX-License-Identifier: Apache-2.0
// Host part of the decoding of quantized matrices.
#include "quant.h"

#include "attention_fill.h"
#include "quant_params.h"

namespace cqsa::gpu {
namespace {

constexpr int64_t threads = 256;

bool is_plain(cqsa_quant_format format) { return format <= CQSA_QUANT_BF16; }

kernel_id kernel_of(cqsa_quant_format format) {
  if (is_plain(format)) return kernel_id::cqsa_quant_plain;
  if (format >= CQSA_QUANT_Q2_K && format <= CQSA_QUANT_Q6_K) return kernel_id::cqsa_quant_k;
  const bool iq = format >= CQSA_QUANT_IQ1_S && format <= CQSA_QUANT_IQ4_XS && format != CQSA_QUANT_IQ4_NL;
  return iq ? kernel_id::cqsa_quant_iq : kernel_id::cqsa_quant_simple;
}

void fill_out(const cqsa_dequantize_leaf& leaf, quant_rows_params* p) {
  const cqsa_view view{leaf.out, leaf.out_dtype, 0, {0, 0, leaf.out_stride[0], leaf.out_stride[1]}};
  p->out = view_of(view, 1, 1, leaf.count, leaf.row_elements);
  p->wide = has_runs(view, 1, 1, leaf.count, leaf.row_elements, leaf.out_dtype == CQSA_DTYPE_F32 ? 4 : 8);
}

}  // namespace

cqsa_status portable_dequantize_rows(void* device, const cqsa_dequantize_leaf* leaf, const cqsa_exec*, void* stream) {
  if (leaf->count < 1 || leaf->row_elements < 1) return CQSA_OK;
  const bool plain = is_plain(leaf->format);
  quant_rows_params p{};
  p.data = static_cast<const char*>(leaf->data);
  p.rows = leaf->rows, p.row_bytes = leaf->row_bytes, p.count = leaf->count, p.first_row = leaf->first_row;
  p.row_ids = leaf->row_ids, p.row_ids_stride = leaf->row_ids_stride, p.row_ids_bytes = leaf->row_ids_dtype == CQSA_DTYPE_I64 ? 8 : 4;
  p.format = leaf->format;
  p.pieces = divide_up(leaf->row_elements, plain ? quant_plain_piece : 32), p.elements = leaf->row_elements;
  fill_out(*leaf, &p);
  const device_facts& facts = facts_of(device);
  const int64_t each = plain ? threads / facts.lanes : threads;  // units that a block takes at a time
  const int64_t blocks = smaller(divide_up(p.count * p.pieces, each), larger(facts.compute_units, 1) * 16);
  const launch_shape shape{{uint32_t(blocks), 1, 1}, uint32_t(threads), plain ? 0 : uint32_t(threads * quant_lane_bytes)};
  return launch(device, kernel_of(leaf->format), shape, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
