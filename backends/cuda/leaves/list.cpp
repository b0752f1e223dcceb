// SPDX-License-Identifier: Apache-2.0
// What this backend computes, and by which kernels: the tuned ones in front of the portable ones.
#include "backends/cuda/plugin.h"
#include "backends/gpu/fp8.h"
#include "backends/gpu/fp8_gemm.h"
#include "backends/gpu/kv.h"
#include "backends/gpu/moe.h"
#include "backends/gpu/port.h"
#include "backends/gpu/quant.h"
#include "backends/cuda/tuned.h"

namespace cqsa::cuda {

// The lists are made at the first call, because their entries are constants of other files.
void add_leaves(cqsa_backend_v1& backend) {
  static const cqsa_attention_impl attention[] = {gpu::sm80_decode, gpu::sm90_attention, gpu::sm80_attention, gpu::sm75_attention,
                                                  gpu::sm70_attention_impl, gpu::portable_attention};
  static const cqsa_selected_impl selected[] = {gpu::sm80_selected, gpu::sm70_selected_impl, gpu::portable_selected};
  static const cqsa_fp8_gemm_impl fp8_gemm[] = {gpu::cublaslt_fp8_gemm, gpu::sm90_fp8_gemm, gpu::sm80_fp8_gemm, gpu::portable_fp8_gemm};
  static const cqsa_moe_impl moe[] = {gpu::sm90_moe, gpu::sm80_moe, gpu::portable_moe};
  backend.attention = attention;
  backend.num_attention = static_cast<int32_t>(sizeof attention / sizeof *attention);
  backend.selected = selected;
  backend.num_selected = static_cast<int32_t>(sizeof selected / sizeof *selected);
  backend.merge = gpu::portable_merge;
  backend.kv_append = gpu::portable_kv_append;
  backend.kv_gather = gpu::portable_kv_gather;
  backend.hadamard = gpu::portable_hadamard;
  backend.fp8_gemm = fp8_gemm;
  backend.num_fp8_gemm = static_cast<int32_t>(sizeof fp8_gemm / sizeof *fp8_gemm);
  backend.fp8_quantize_workspace = gpu::portable_fp8_quantize_workspace;
  backend.fp8_quantize = gpu::portable_fp8_quantize;
  backend.fp8_workspace_init = gpu::portable_fp8_workspace_init;
  backend.fp8_dequantize = gpu::portable_fp8_dequantize;
  backend.fp8_scale = gpu::portable_fp8_scale;
  backend.fp8_transpose = gpu::portable_fp8_transpose;
  backend.fp8_rings = gpu::portable_fp8_rings;
  backend.moe = moe;
  backend.num_moe = static_cast<int32_t>(sizeof moe / sizeof *moe);
  backend.moe_route = gpu::portable_moe_route;
  backend.moe_group = gpu::portable_moe_group;
  backend.moe_quantize = gpu::portable_moe_quantize;
  backend.moe_combine = gpu::portable_moe_combine;
  backend.dequantize_rows = gpu::portable_dequantize_rows;
}

}  // namespace cqsa::cuda
