// SPDX-License-Identifier: Apache-2.0
// The product of FP8 matrices as the text of cqsa.h has it: every sum in f64, one rounding at the end.
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "fp8_job.h"

#include <atomic>

namespace cqsa::cpu {
namespace {

struct product {
  const cqsa_fp8_gemm_leaf& leaf;
  int64_t tasks;
  std::atomic<uint32_t> amax{0};
};

double value(const cqsa_matrix& x, int64_t b, int64_t i, int64_t j) {
  return load_f32(static_cast<char*>(x.data) + bytes_of(x.dtype) * (b * x.stride[0] + i * x.stride[1] + j * x.stride[2]), x.dtype);
}

double scale(const cqsa_scale_grid& g, int64_t batch_stride, int64_t b, int64_t i, int64_t k) {
  if (!g.data) return 1;
  const int64_t at = b * batch_stride + i / g.block[0] * g.stride[0] + k / g.block[1] * g.stride[1];
  return load_as<float>(static_cast<const char*>(g.data) + 4 * at);
}

double dot(const cqsa_fp8_gemm_leaf& x, int64_t b, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t k = 0; k < x.k; ++k)
    sum += value(x.a, b, i, k) * scale(x.scale_inv_a, x.scale_batch_stride_a, b, i, k) * value(x.b, b, j, k) *
           scale(x.scale_inv_b, x.scale_batch_stride_b, b, j, k);
  return sum;
}

uint32_t store(const cqsa_fp8_gemm_leaf& x, int64_t b, int64_t i, int64_t j, double d) {
  char* const to = static_cast<char*>(x.d.data) + bytes_of(x.d.dtype) * (b * x.d.stride[0] + i * x.d.stride[1] + j * x.d.stride[2]);
  const float f = float(d);
  if (fp8::is_format(x.d.dtype)) {
    const float d_scale = x.d_scale ? load_as<float>(reinterpret_cast<const char*>(x.d_scale)) : 1.0f;
    *to = static_cast<char>(f32_to_code(plain_nan(f * d_scale), x.d.dtype, true));
  } else if (x.d.dtype == CQSA_DTYPE_F32 || d != d) {
    store_f32(to, x.d.dtype, f);
  } else {
    const uint16_t half = x.d.dtype == CQSA_DTYPE_F16 ? f64_to_f16(d) : f64_to_bf16(d);
    std::memcpy(to, &half, 2);
  }
  return magnitude_bits(f, CQSA_FP8_NAN_PROPAGATE);
}

uint32_t compute_row(const cqsa_fp8_gemm_leaf& x, int64_t b, int64_t i) {
  uint32_t most = 0;
  for (int64_t j = 0; j < x.n; ++j) {
    double d = x.k > 0 ? x.alpha * dot(x, b, i, j) : 0;
    if (x.c.data && x.beta != 0) d += x.beta * value(x.c, b, i, j);
    if (x.bias) d += load_f32(static_cast<const char*>(x.bias) + bytes_of(x.bias_dtype) * j * x.bias_stride, x.bias_dtype);
    const uint32_t bits = store(x, b, i, j, d);
    most = bits > most ? bits : most;
  }
  return most;
}

void compute_part(void* data, int64_t index) {
  const plain_floats mode;
  product& p = *static_cast<product*>(data);
  const int64_t rows = p.leaf.n == 0 ? 0 : p.leaf.batch * p.leaf.m;
  uint32_t most = 0;
  for (int64_t n = rows * index / p.tasks; n < rows * (index + 1) / p.tasks; ++n) {
    const uint32_t bits = compute_row(p.leaf, n / p.leaf.m, n % p.leaf.m);
    most = bits > most ? bits : most;
  }
  uint32_t seen = p.amax.load(std::memory_order_relaxed);
  while (most > seen && !p.amax.compare_exchange_weak(seen, most, std::memory_order_relaxed)) {}
}

cqsa_status probe(void*, const cqsa_fp8_gemm_leaf*, char*, uint64_t) { return CQSA_OK; }
uint64_t workspace_for(const cqsa_fp8_gemm_leaf*, int64_t) { return 0; }

cqsa_status launch(void*, const cqsa_fp8_gemm_leaf* leaf, void*, uint64_t, const cqsa_exec* exec, void*) {
  product p{*leaf, 1};
  if (exec && exec->run && exec->num_workers > 1) p.tasks = exec->num_workers;
  cqsa_status status = CQSA_OK;
  if (p.tasks > 1) status = exec->run(exec->user, p.tasks, compute_part, &p);
  else compute_part(&p, 0);
  const float amax = amax_of(p.amax.load());
  if (status == CQSA_OK && leaf->d_amax) std::memcpy(leaf->d_amax, &amax, sizeof amax);
  return status;
}

}  // namespace

const cqsa_fp8_gemm_impl fp8_gemm_reference_impl = {"cpu_reference", "any CPU", CQSA_FP8_PROVIDER_OWN, 0, probe, workspace_for, launch};

}  // namespace cqsa::cpu
