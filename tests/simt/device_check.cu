// SPDX-License-Identifier: Apache-2.0
// Holds the models of the harness against the instructions of a GPU. A program of its own, not part of ctest:
//   nvcc -std=c++17 -O2 -arch=sm_90 -I. -Itests/simt tests/simt/device_check.cu -o device_check && ./device_check
// (sm_80 and later; on an older chip the instructions that it lacks do not compile.)
//
// For each instruction and kind of input: how many of the outputs are not the model's bit for bit, and the largest difference
// relative to the sum of the magnitudes of what was added, for every rounding that is known. Small integers are exact under any
// rounding, so there a difference is a wrong fragment layout. Exits with 1 when a layout, ldmatrix or cp.async differs, or when a
// sum is further off than truncation explains.
#include "backends/cuda/sm70/mma.cuh"
#include "backends/cuda/sm80/mma.cuh"

#include "mma_model.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace gpu = cqsa::gpu;
namespace simt = cqsa::simt;
using simt::half_kind;

namespace {

#define CHECK_CUDA(call)                                                                 \
  do {                                                                                   \
    const cudaError_t status = (call);                                                   \
    if (status != cudaSuccess) std::printf("%s: %s\n", #call, cudaGetErrorString(status)), std::exit(2); \
  } while (0)

enum instruction { k16_f16, k16_bf16, k8_f16, k4_rr, k4_rc, k4_cr, k4_cc, num_instructions };
constexpr const char* names[] = {"mma_m16n8k16_f16", "mma_m16n8k16_bf16", "mma_m16n8k8_f16", "mma_m8n8k4 row.row",
                                 "mma_m8n8k4 row.col", "mma_m8n8k4 col.row", "mma_m8n8k4 col.col"};
template <int I> constexpr int a_words = I <= k16_bf16 ? 4 : 2;
template <int I> constexpr int b_words = I == k8_f16 ? 1 : 2;
template <int I> constexpr int c_words = I <= k8_f16 ? 4 : 8;

// One warp a problem; lane by lane, registers in order.
template <int I> __global__ void run_mma(const uint32_t* a_all, const uint32_t* b_all, float* c_all) {
  constexpr instruction which = instruction(I);
  constexpr int na = a_words<I>, nb = b_words<I>, nc = c_words<I>;
  const int64_t lane = int64_t(blockIdx.x) * 32 + threadIdx.x;
  uint32_t a[na], b[nb];
  float c[nc];
  for (int i = 0; i < na; ++i) a[i] = a_all[lane * na + i];
  for (int i = 0; i < nb; ++i) b[i] = b_all[lane * nb + i];
  for (int i = 0; i < nc; ++i) c[i] = c_all[lane * nc + i];
  if constexpr (which == k16_f16) gpu::mma_m16n8k16_f16(c, a, b);
  if constexpr (which == k16_bf16) gpu::mma_m16n8k16_bf16(c, a, b);
  if constexpr (which == k8_f16) gpu::mma_m16n8k8_f16(c, a, b[0]);
  if constexpr (which == k4_rr) gpu::mma_m8n8k4<gpu::order::row, gpu::order::row>(c, a, b);
  if constexpr (which == k4_rc) gpu::mma_m8n8k4<gpu::order::row, gpu::order::col>(c, a, b);
  if constexpr (which == k4_cr) gpu::mma_m8n8k4<gpu::order::col, gpu::order::row>(c, a, b);
  if constexpr (which == k4_cc) gpu::mma_m8n8k4<gpu::order::col, gpu::order::col>(c, a, b);
  for (int i = 0; i < nc; ++i) c_all[lane * nc + i] = c[i];
}

template <int I> void model_mma(const uint32_t* a_in, const uint32_t* b_in, float* c_out, simt::mma_numerics how) {
  constexpr instruction which = instruction(I);
  uint32_t a[32][a_words<I>], b[32][b_words<I>];
  float c[32][c_words<I>];
  std::memcpy(a, a_in, sizeof a), std::memcpy(b, b_in, sizeof b), std::memcpy(c, c_out, sizeof c);
  if constexpr (which <= k16_bf16) simt::model_m16n8<16>(a, b, c, which == k16_bf16 ? half_kind::bf16 : half_kind::f16, how);
  else if constexpr (which == k8_f16) simt::model_m16n8<8>(a, b, c, half_kind::f16, how);
  else simt::model_m8n8k4(a, b, c, which == k4_rr || which == k4_rc, which == k4_rr || which == k4_cr, how);
  std::memcpy(c_out, c, sizeof c);
}

// ---- inputs

uint16_t half_bits(double x, half_kind kind) {  // nearest representable, by search from below: slow and obvious
  const int mantissa = kind == half_kind::f16 ? 10 : 7;
  int e = 0;
  if (x == 0) return 0;
  const double m = std::frexp(std::fabs(x), &e);  // [0.5, 1) 2^e
  const int bias = kind == half_kind::f16 ? 15 : 127, lowest = 1 - bias;
  const int exponent = e - 1 < lowest ? lowest : e - 1;
  const long significand = std::lrint(std::ldexp(m, e - exponent + mantissa));
  const long bits = (long(exponent + bias - 1) << mantissa) + significand;  // a subnormal has no hidden bit: the sum is right too
  const long most = ((2l * bias + 1) << mantissa) - 1;
  return uint16_t((bits > most ? most : bits) | (x < 0 ? 0x8000 : 0));
}

enum input { integers, normal_values, wide, cancelling, subnormal, large, num_inputs };
constexpr const char* input_names[] = {"integers", "normal", "wide exponents", "cancelling", "subnormal", "large"};

struct generator {
  std::mt19937_64 rng{1};
  std::normal_distribution<double> normal;
  int upto(int n) { return int(rng() % uint64_t(n + 1)); }
  double draw(input kind, half_kind type) {
    const bool f16 = type == half_kind::f16;
    switch (kind) {
      case integers: return upto(16) - 8;
      case wide: return std::ldexp(1 + normal(rng) / 4, upto(f16 ? 20 : 60) - (f16 ? 12 : 40)) * (upto(1) ? 1 : -1);
      case cancelling: return (upto(1) ? 1 : -1) * (upto(3) ? 1.0 + upto(3) / 512.0 : std::ldexp(1.0, -upto(12)));
      case subnormal: return std::ldexp(normal(rng), f16 ? -17 - upto(7) : -62 - upto(20));
      case large: return std::ldexp(1 + normal(rng) / 4, f16 ? 14 : 60) * (upto(1) ? 1 : -1);
      default: return normal(rng);
    }
  }
  float accumulator(input kind, half_kind type) {
    const double x = draw(kind, type);
    return float(kind == integers ? x : x * (upto(3) ? draw(kind == subnormal ? subnormal : normal_values, type) : 1));
  }
};

bool failed = false;

template <int I> void check_mma(input kind, int warps) {
  constexpr instruction which = instruction(I);
  constexpr int na = a_words<I>, nb = b_words<I>, nc = c_words<I>;
  const half_kind type = which == k16_bf16 ? half_kind::bf16 : half_kind::f16;
  generator g;
  std::vector<uint32_t> a(size_t(warps) * 32 * na), b(size_t(warps) * 32 * nb);
  std::vector<float> c(size_t(warps) * 32 * nc), got(c.size());
  for (auto* v : {&a, &b})
    for (uint32_t& x : *v) x = half_bits(g.draw(kind, type), type) | uint32_t(half_bits(g.draw(kind, type), type)) << 16;
  for (float& x : c) x = g.accumulator(kind, type);

  uint32_t *da, *db;
  float* dc;
  CHECK_CUDA(cudaMalloc(&da, a.size() * 4));
  CHECK_CUDA(cudaMalloc(&db, b.size() * 4));
  CHECK_CUDA(cudaMalloc(&dc, c.size() * 4));
  CHECK_CUDA(cudaMemcpy(da, a.data(), a.size() * 4, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(db, b.data(), b.size() * 4, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(dc, c.data(), c.size() * 4, cudaMemcpyHostToDevice));
  run_mma<I><<<warps, 32>>>(da, db, dc);
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemcpy(got.data(), dc, c.size() * 4, cudaMemcpyDeviceToHost));
  cudaFree(da), cudaFree(db), cudaFree(dc);

  // Magnitudes: the same product of absolute values, exactly.
  std::vector<uint32_t> abs_a = a, abs_b = b;
  std::vector<float> scale(c.size());
  for (uint32_t& x : abs_a) x &= 0x7fff7fffu;
  for (uint32_t& x : abs_b) x &= 0x7fff7fffu;
  for (size_t i = 0; i < c.size(); ++i) scale[i] = std::fabs(c[i]);
  for (int w = 0; w < warps; ++w) model_mma<I>(&abs_a[size_t(w) * 32 * na], &abs_b[size_t(w) * 32 * nb], &scale[size_t(w) * 32 * nc], simt::exact_numerics);

  const struct { const char* name; simt::mma_numerics how; } candidates[] = {
      {"sm70", simt::sm70_numerics}, {"sm75", simt::sm75_numerics}, {"sm80", simt::sm80_numerics}, {"k8+2", {8, 2}}, {"sm90", simt::sm90_numerics}, {"exact", simt::exact_numerics}, {"chain", simt::chain_numerics}};
  std::printf("%-20s %-15s", names[I], input_names[kind]);
  for (const auto& candidate : candidates) {
    std::vector<float> want = c;
    for (int w = 0; w < warps; ++w) model_mma<I>(&a[size_t(w) * 32 * na], &b[size_t(w) * 32 * nb], &want[size_t(w) * 32 * nc], candidate.how);
    long different = 0;
    double worst = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
      ++different;
      const double d = std::fabs(double(got[i]) - double(want[i])) / (double(scale[i]) + 1e-45);
      if (!(d <= worst)) worst = d;
    }
    std::printf("  %s %ld (%.1e)", candidate.name, different, worst);
    const double bound = kind == subnormal ? 1e-1 : 0x1p-18;  // 16 terms, each cut at 2^-23 of the largest
    if ((kind == integers && different) || !(worst <= bound)) std::printf(" FAILED"), failed = true;
  }
  std::printf("  of %zu\n", c.size());
}

// ---- copies

template <int Count, bool Trans> __global__ void run_ldmatrix(const uint4* in, uint32_t* out) {
  __shared__ uint4 rows[64];
  const int lane = int(threadIdx.x);
  rows[lane] = in[lane], rows[lane + 32] = in[lane + 32];
  __syncthreads();
  const void* row = &rows[(lane * 29 + 5) % 64];  // any order
  uint32_t r[Count];
  if constexpr (Count == 1) Trans ? gpu::ldmatrix_x1_trans(r, row) : gpu::ldmatrix_x1(r, row);
  if constexpr (Count == 2) Trans ? gpu::ldmatrix_x2_trans(r, row) : gpu::ldmatrix_x2(r, row);
  if constexpr (Count == 4) Trans ? gpu::ldmatrix_x4_trans(r, row) : gpu::ldmatrix_x4(r, row);
  for (int i = 0; i < Count; ++i) out[lane * Count + i] = r[i];
}

template <int Count, bool Trans> void check_ldmatrix() {
  std::vector<uint32_t> in(256), got(32 * Count);
  for (size_t i = 0; i < in.size(); ++i) in[i] = uint32_t(i * 2654435761u);
  uint4* din;
  uint32_t* dout;
  CHECK_CUDA(cudaMalloc(&din, 1024));
  CHECK_CUDA(cudaMalloc(&dout, got.size() * 4));
  CHECK_CUDA(cudaMemcpy(din, in.data(), 1024, cudaMemcpyHostToDevice));
  run_ldmatrix<Count, Trans><<<1, 32>>>(din, dout);
  CHECK_CUDA(cudaMemcpy(got.data(), dout, got.size() * 4, cudaMemcpyDeviceToHost));
  cudaFree(din), cudaFree(dout);
  const void* rows[32];
  for (int lane = 0; lane < 32; ++lane) rows[lane] = &in[size_t((lane * 29 + 5) % 64) * 4];
  uint32_t want[32][4];
  simt::model_ldmatrix(rows, Count, Trans, want);
  int different = 0;
  for (int i = 0; i < 32 * Count; ++i) different += got[size_t(i)] != want[i / Count][i % Count];
  std::printf("ldmatrix x%d%s: %d of %d registers differ%s\n", Count, Trans ? " trans" : "", different, 32 * Count, different ? " FAILED" : "");
  failed |= different != 0;
}

template <int Bytes> __global__ void run_copy(const unsigned char* in, unsigned char* out, int valid) {
  __shared__ alignas(16) unsigned char tile[32 * Bytes];
  const int lane = int(threadIdx.x);
  for (int i = 0; i < Bytes; ++i) tile[lane * Bytes + i] = 0x77;
  __syncthreads();
  unsigned char* to = tile + (31 - lane) * Bytes;
  if constexpr (Bytes == 16) gpu::cp_async_16(to, in + lane * Bytes, valid);
  if constexpr (Bytes == 8) gpu::cp_async_8(to, in + lane * Bytes, valid);
  if constexpr (Bytes == 4) gpu::cp_async_4(to, in + lane * Bytes, valid);
  gpu::cp_async_commit();
  gpu::cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < Bytes; ++i) out[lane * Bytes + i] = tile[lane * Bytes + i];
}

template <int Bytes> void check_copy() {
  int different = 0;
  for (int valid = 0; valid <= Bytes; ++valid) {
    unsigned char in[32 * Bytes], got[32 * Bytes], *din, *dout;
    for (int i = 0; i < 32 * Bytes; ++i) in[i] = static_cast<unsigned char>(1 + i * 7);
    CHECK_CUDA(cudaMalloc(&din, sizeof in));
    CHECK_CUDA(cudaMalloc(&dout, sizeof in));
    CHECK_CUDA(cudaMemcpy(din, in, sizeof in, cudaMemcpyHostToDevice));
    run_copy<Bytes><<<1, 32>>>(din, dout, valid);
    CHECK_CUDA(cudaMemcpy(got, dout, sizeof in, cudaMemcpyDeviceToHost));
    cudaFree(din), cudaFree(dout);
    for (int i = 0; i < 32 * Bytes; ++i) different += got[i] != (i % Bytes < valid ? in[(31 - i / Bytes) * Bytes + i % Bytes] : 0);
  }
  std::printf("cp_async_%d: %d bytes differ%s\n", Bytes, different, different ? " FAILED" : "");
  failed |= different != 0;
}

template <int I> void check_all_inputs(int warps) {
  for (int kind = 0; kind < num_inputs; ++kind) check_mma<I>(input(kind), warps);
}

}  // namespace

int main(int argc, char** argv) {
  const int warps = argc > 1 ? std::atoi(argv[1]) : 400;
  cudaDeviceProp device{};
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, sm_%d%d; outputs that differ from each rounding (largest difference relative to the magnitudes added)\n", device.name, device.major, device.minor);
  check_all_inputs<k16_f16>(warps), check_all_inputs<k16_bf16>(warps), check_all_inputs<k8_f16>(warps);
  check_all_inputs<k4_rr>(warps), check_all_inputs<k4_rc>(warps), check_all_inputs<k4_cr>(warps), check_all_inputs<k4_cc>(warps);
  check_ldmatrix<1, false>(), check_ldmatrix<2, false>(), check_ldmatrix<4, false>();
  check_ldmatrix<1, true>(), check_ldmatrix<2, true>(), check_ldmatrix<4, true>();
  check_copy<16>(), check_copy<8>(), check_copy<4>();
  std::printf(failed ? "FAILED\n" : "ok\n");
  return failed;
}
