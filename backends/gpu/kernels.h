// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier): every kernel of the portable tier. The names are those of the extern "C" functions.
#pragma once

#define CQSA_GPU_KERNELS(X)         \
  X(cqsa_attention_d64, 256, 0)     \
  X(cqsa_attention_d128, 256, 0)    \
  X(cqsa_attention_d256, 256, 0)    \
  X(cqsa_attention_d512, 256, 0)    \
  X(cqsa_attention_tail, 256, 0)    \
  X(cqsa_attention_combine, 128, 0) \
  X(cqsa_merge, 256, 0)             \
  X(cqsa_hadamard, 256, 0)          \
  X(cqsa_kv_append, 256, 0)         \
  X(cqsa_kv_append_q4, 256, 0)      \
  X(cqsa_kv_gather, 256, 0)         \
  X(cqsa_selected_d64, 256, 0)      \
  X(cqsa_selected_d128, 256, 0)     \
  X(cqsa_selected_d256, 256, 0)     \
  X(cqsa_selected_d512, 256, 0)     \
  X(cqsa_gather, 256, 0)            \
  X(cqsa_fp8_gemm, 256, 0)          \
  X(cqsa_fp8_stream, 1024, 0)       \
  X(cqsa_fp8_stream_many, 256, 0)   \
  X(cqsa_fp8_tile_half, 256, 0)     \
  X(cqsa_fp8_tile_f32, 256, 0)      \
  X(cqsa_fp8_group, 256, 0)         \
  X(cqsa_fp8_row, 256, 0)           \
  X(cqsa_fp8_columns, 1024, 0)      \
  X(cqsa_fp8_general, 256, 0)       \
  X(cqsa_fp8_quick_stream, 512, 0)  \
  X(cqsa_fp8_quick_row, 512, 0)     \
  X(cqsa_fp8_quick_group, 256, 0)   \
  X(cqsa_fp8_quick_tile, 256, 0)    \
  X(cqsa_fp8_rings, 256, 0)         \
  X(cqsa_fp8_scale, 256, 0)         \
  X(cqsa_fp8_decode, 256, 0)        \
  X(cqsa_fp8_turn, 256, 0)          \
  X(cqsa_fp8_init, 256, 0)          \
  X(cqsa_quant_simple, 256, 0)      \
  X(cqsa_quant_k, 256, 0)           \
  X(cqsa_quant_iq, 256, 0)          \
  X(cqsa_quant_plain, 256, 0)           \
  X(cqsa_gpu_moe_take, 256, 0)      \
  X(cqsa_gpu_moe_describe, 128, 0)  \
  X(cqsa_gpu_moe_group, 256, 0)     \
  X(cqsa_gpu_moe_tile, 256, 0)      \
  X(cqsa_gpu_moe_few_codes, 128, 0) \
  X(cqsa_gpu_moe_few_numbers, 128, 0) \
  X(cqsa_gpu_moe_combine, 256, 0)   \
  X(cqsa_gpu_moe_quantize, 256, 0)  \
  X(cqsa_gpu_moe_route, 128, 0)
