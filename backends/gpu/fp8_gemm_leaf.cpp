// SPDX-License-Identifier: Apache-2.0
// Host part of the portable FP8 product, and what the tuned ones share with it.
#include "fp8_gemm.h"

#include "backends/fp8_rules.h"

#include <cstdio>

namespace cqsa::gpu {

static_assert(sizeof(fp8::workspace_header) == 4 * gemm_ticket_word && fp8::workspace_magic == gemm_workspace_magic);

int32_t gemm_kind_of(cqsa_dtype t) {
  switch (t) {
    case CQSA_DTYPE_F32: return gemm_f32;
    case CQSA_DTYPE_F16: return gemm_f16;
    case CQSA_DTYPE_BF16: return gemm_bf16;
    case CQSA_DTYPE_E4M3FN: return gemm_e4m3fn;
    case CQSA_DTYPE_E5M2: return gemm_e5m2;
    case CQSA_DTYPE_E4M3FNUZ: return gemm_e4m3fnuz;
    case CQSA_DTYPE_E5M2FNUZ: return gemm_e5m2fnuz;
    default: return -1;
  }
}

bool is_gemm_output(const cqsa_fp8_gemm_leaf& a) {
  return gemm_kind_of(a.d.dtype) >= 0 && (!a.c.data || is_float(a.c.dtype)) && (!a.bias || is_float(a.bias_dtype));
}

uint64_t gemm_ticket_bytes(const cqsa_fp8_gemm_leaf& a) { return a.d_amax ? sizeof(fp8::workspace_header) + 64 : 0; }

namespace {

constexpr int64_t tile = 64;
constexpr uint32_t threads = 256, shared_bytes = 4 * (512 + 2 * 32 * (64 + 4));

gemm_operand operand_of(const cqsa_matrix& x) {
  return {static_cast<const unsigned char*>(x.data), {x.stride[0], x.stride[1], x.stride[2]}, gemm_kind_of(x.dtype), 0};
}

// rows, k: of the operand. A block that reaches over a whole axis is a stride of 0, so that blocks of k are always of 128.
gemm_scales scales_of(const cqsa_scale_grid& g, int64_t batch_stride, int64_t rows, int64_t k) {
  if (!g.data) return {nullptr, {0, 0, 0}, 1};
  const int64_t block = larger(g.block[0], 1);
  return {static_cast<const float*>(g.data), {batch_stride, block < rows ? g.stride[0] : 0, g.block[1] < k ? g.stride[1] : 0}, block};
}

// Eight neighbours at once: 16 bytes of two-byte elements, twice that of floats, 8 of codes.
bool is_wide(const cqsa_matrix& x, int64_t batch, int64_t rows, int64_t columns, int64_t bytes) {
  const int64_t run = 8 * bytes < 16 ? 8 : 16;
  const auto even = [&](int64_t value) { return value * bytes % run == 0; };
  return x.data && (x.stride[2] == 1 || columns == 1) && reinterpret_cast<uintptr_t>(x.data) % uintptr_t(run) == 0 && (rows <= 1 || even(x.stride[1])) &&
         (batch <= 1 || even(x.stride[0]));
}

gemm_matrix matrix_of(const cqsa_matrix& x, const cqsa_fp8_gemm_leaf& a) {
  const int32_t kind = gemm_kind_of(x.dtype), bytes = kind == gemm_f32 ? 4 : kind <= gemm_bf16 ? 2 : 1;
  return {static_cast<char*>(x.data), {x.stride[0], x.stride[1], x.stride[2]}, kind, is_wide(x, a.batch, a.m, a.n, bytes)};
}

gemm_end end_of(const cqsa_fp8_gemm_leaf& a, void* workspace) {
  gemm_end e{};
  e.d = matrix_of(a.d, a);
  if (a.beta != 0) e.c = matrix_of(a.c, a);
  e.bias = static_cast<const char*>(a.bias), e.bias_stride = a.bias_stride;
  e.bias_kind = a.bias ? gemm_kind_of(a.bias_dtype) : 0;
  e.d_scale = a.d_scale, e.d_amax = a.d_amax;
  if (a.d_amax) e.ticket = reinterpret_cast<uint32_t*>(static_cast<char*>(workspace) + sizeof(fp8::workspace_header));
  e.alpha = a.alpha == 0 ? 1.0f : float(a.alpha), e.beta = float(a.beta);
  return e;
}

const char* why_not(const cqsa_fp8_gemm_leaf& a) {
  if (gemm_kind_of(a.a.dtype) < gemm_e4m3fn || gemm_kind_of(a.b.dtype) < gemm_e4m3fn) return "a and b must be codes of FP8";
  if (!is_gemm_output(a)) return "d must be f32, f16, bf16 or codes of FP8, c and bias f32, f16 or bf16";
  return nullptr;
}

cqsa_status probe(void*, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_fp8_gemm_leaf* leaf, int64_t) { return gemm_ticket_bytes(*leaf); }

cqsa_status launch_leaf(void* device, const cqsa_fp8_gemm_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec*, void* stream) {
  const cqsa_fp8_gemm_leaf& a = *leaf;
  gemm_params p{};
  if (!fill_gemm(a, memory, bytes, &p)) return fail(CQSA_ERROR_WORKSPACE, "d_amax needs a workspace of %d bytes", int(gemm_ticket_bytes(a)));
  p.row_tiles = divide_up(a.m, tile), p.column_tiles = divide_up(a.n, tile);
  const int64_t units = p.batch * p.row_tiles * p.column_tiles, most = larger(facts_of(device).compute_units, 1) * 16;
  if (units < 1 && !a.d_amax) return CQSA_OK;
  const uint32_t blocks = uint32_t(larger(1, smaller(units, most)));
  return launch(device, kernel_id::cqsa_fp8_gemm, {{blocks, 1, 1}, threads, shared_bytes}, &p, sizeof p, stream);
}

}  // namespace

bool fill_gemm(const cqsa_fp8_gemm_leaf& a, void* workspace, uint64_t workspace_bytes, gemm_params* out) {
  if (workspace_bytes < gemm_ticket_bytes(a)) return false;
  gemm_params& p = *out;
  p.a = operand_of(a.a), p.b = operand_of(a.b);
  p.scale_a = scales_of(a.scale_inv_a, a.scale_batch_stride_a, a.m, a.k);
  p.scale_b = scales_of(a.scale_inv_b, a.scale_batch_stride_b, a.n, a.k);
  p.end = end_of(a, workspace);
  p.batch = a.batch, p.m = a.m, p.n = a.n, p.k = a.k;
  return true;
}

extern const cqsa_fp8_gemm_impl portable_fp8_gemm = {
    "gpu_portable", "any GPU; every format, size and stride", CQSA_FP8_PROVIDER_OWN, 0, probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
