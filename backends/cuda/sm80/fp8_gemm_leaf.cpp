// SPDX-License-Identifier: Apache-2.0
// Host part of the FP8 product by the f16 matrix unit, of sm_80 and newer and of sm_75.
#include "backends/gpu/fp8_gemm.h"
#include "backends/cuda/tuned.h"
#include "fp8_gemm_shape.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm80::gemm_tile;

const char* why_not(const cqsa_fp8_gemm_leaf& a) {
  if (a.chip.tier < 75) return "the device has no code for f16 matrix instructions of sm_75 or newer";
  if (gemm_kind_of(a.a.dtype) < gemm_e4m3fn || gemm_kind_of(a.b.dtype) < gemm_e4m3fn) return "a and b must be codes of FP8";
  if (!is_gemm_output(a)) return "d must be f32, f16, bf16 or codes of FP8, c and bias f32, f16 or bf16";
  if (a.batch < 1 || a.m < 1 || a.n < 1 || a.k < 1) return "there is nothing to multiply";
  return nullptr;
}

cqsa_status probe(void*, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_fp8_gemm_leaf* leaf, int64_t) { return gemm_ticket_bytes(*leaf); }

// 16 neighbours in k at once.
bool is_wide(const cqsa_matrix& x, int64_t rows, int64_t batch) {
  return x.stride[2] == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (rows <= 1 || x.stride[1] % 16 == 0) && (batch <= 1 || x.stride[0] % 16 == 0);
}

cqsa_status launch_leaf(void* device, const cqsa_fp8_gemm_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  const cqsa_fp8_gemm_leaf& a = *leaf;
  gemm_params p{};
  if (!fill_gemm(a, memory, bytes, &p)) return fail(CQSA_ERROR_WORKSPACE, "d_amax needs a workspace of %d bytes", int(gemm_ticket_bytes(a)));
  p.a.wide = is_wide(a.a, a.m, a.batch), p.b.wide = is_wide(a.b, a.n, a.batch);
  p.row_tiles = divide_up(a.m, gemm_tile::rows), p.column_tiles = divide_up(a.n, gemm_tile::columns);
  const int64_t units = p.batch * p.row_tiles * p.column_tiles;
  const uint32_t blocks = uint32_t(smaller(units, larger(facts_of(device).compute_units, 1) * 16));
  const kernel_id kernel = a.chip.tier < 80 ? kernel_id::cqsa_sm75_fp8_gemm : kernel_id::cqsa_sm80_fp8_gemm;
  return launch(device, kernel, {{blocks, 1, 1}, gemm_tile::threads, gemm_tile::shared_bytes}, &p, sizeof p, stream);
}

}  // namespace

extern const cqsa_fp8_gemm_impl sm80_fp8_gemm = {
    "cuda_f16", "sm_75 and newer; codes become f16, any format and stride", CQSA_FP8_PROVIDER_OWN, 0, probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
