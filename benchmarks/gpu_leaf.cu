// SPDX-License-Identifier: Apache-2.0
// The portable GPU leaf by itself on a CUDA device: random problems against cpu_reference, then TFLOP/s with sampled rows checked
// in fp64, next to the FMA peak measured in the same run. No plugin, no core. Build and run: docs/kernels/NOTES-attention-portable.md
//
//   gpu_leaf [seconds for random problems, 30] [first seed, 1]
#include "backends/gpu/attention_params.h"
#include "backends/gpu/element.cuh"
#include "backends/gpu/merge_params.h"
#include "benchmarks/cuda_port.h"
#include "benchmarks/gpu_leaf_random.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;

// ---------------------------------------------------------------------------------------------- where kernels are

extern "C" __global__ void cqsa_merge(const merge_params p);
extern "C" __global__ void cqsa_attention_tail(const tail_params p);
#define ATTENTION(X) X(cqsa_attention_d64) X(cqsa_attention_d128) X(cqsa_attention_d256) X(cqsa_attention_d512)
#define DECLARE(name) extern "C" __global__ void name(const attention_params p);
ATTENTION(DECLARE)

const void* bench::code_of(kernel_id kernel) {
#define FIND(name) \
  if (kernel == kernel_id::name) return (const void*)name;
  ATTENTION(FIND) FIND(cqsa_merge) FIND(cqsa_attention_tail)
  return nullptr;
}
using bench::this_device;

namespace cqsa::cpu {
cqsa_status fail(cqsa_status status, const char*) { return status; }
}  // namespace cqsa::cpu


static double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ------------------------------------------------------------------------------------------------------- random problems

static cqsa_status run_tasks(void*, int64_t n, void (*task)(void*, int64_t), void* data) {
  std::vector<std::thread> all;
  for (int64_t i = 0; i < n; ++i) all.emplace_back(task, data, i);
  for (auto& t : all) t.join();
  return CQSA_OK;
}

static int check_random(double limit, uint64_t seed) {
  const size_t room = size_t(1) << 30;
  char* base;
  size_t used = 0;
  CHECK_CUDA(cudaMallocManaged(&base, room));
  random_leaf::memory mem{[&](size_t n) {
                            void* p = base + used;
                            used += (n + 63) / 64 * 64;
                            if (used > room) std::abort();
                            return p;
                          },
                          [&] { used = 0; }};
  const cqsa_exec exec{nullptr, run_tasks, nullptr, 12};
  int failures = 0, count = 0;
  for (const double end = seconds() + limit; seconds() < end; ++count) {
    const std::string wrong = random_leaf::check(seed++, mem, 700, nullptr, [](void*) { CHECK_CUDA(cudaDeviceSynchronize()); }, &exec);
    if (!wrong.empty() && ++failures <= 10) std::printf("WRONG %s\n", wrong.c_str());
  }
  std::printf("%d random problems, %d wrong\n", count, failures);
  CHECK_CUDA(cudaFree(base));
  return failures;
}

// -------------------------------------------------------------------------------------------------------------- FMA peak

__global__ void fma_loop(float* out, int rounds) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = float(threadIdx.x + i);
  const float a = 0.999f, b = 0.001f;
  for (int n = 0; n < rounds; ++n)
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = fmaf(x[i], a, b);
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  if (sum == 12345.0f) *out = sum;
}

template <class F> static double best_of(int times, const F& f) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  float best = 1e30f;
  for (int i = 0; i <= times; ++i) {
    CHECK_CUDA(cudaEventRecord(begin));
    f();
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0) best = std::min(best, ms);
  }
  return best * 1e-3;
}

static double fma_peak() {
  float* out;
  CHECK_CUDA(cudaMalloc(&out, 4));
  const int blocks = this_device.compute_units * 8, rounds = 4000;
  const double s = best_of(3, [&] { fma_loop<<<blocks, 256>>>(out, rounds); });
  CHECK_CUDA(cudaFree(out));
  return 2.0 * blocks * 256 * 128.0 * rounds / s;
}

// -------------------------------------------------------------------------------------------------------------- timings

__global__ void fill(char* to, int kind, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u + seed * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    x ^= x >> 16;
    store_element(to, kind, i, (float(x) * 0x1p-32f - 0.5f) * 4.0f);
  }
}

// The operator in fp64 for sampled rows of a compact problem; one block a sample. error[2 sample]: largest |difference| of out
// beyond half a unit of its type, |difference| of lse.
__global__ void reference_rows(attention_params p, int64_t samples_each, bool causal, double* scratch, double* error) {
  __shared__ double part[256];
  __shared__ double top;
  const int64_t h = blockIdx.x / samples_each, row = (blockIdx.x % samples_each) * (p.seqlen_q - 1) / (samples_each - 1);
  const int64_t g = h / (p.num_heads / p.num_kv_heads), keys = causal ? row + 1 : p.seqlen_k;
  double* s = scratch + blockIdx.x * p.seqlen_k;
  double m = -1e300;
  for (int64_t j = threadIdx.x; j < keys; j += 256) {
    double x = 0;
    for (int c = 0; c < p.head_dim; ++c)
      x += double(load_element(p.q.data, p.q.kind, offset_of(p.q, 0, h, row, c))) * load_element(p.k.data, p.k.kind, offset_of(p.k, 0, g, j, c));
    s[j] = x * p.softmax_scale;
    m = s[j] > m ? s[j] : m;
  }
  part[threadIdx.x] = m;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 256; ++i) m = part[i] > m ? part[i] : m;
    top = m;
  }
  __syncthreads();
  double l = 0;
  for (int64_t j = threadIdx.x; j < keys; j += 256) l += s[j] = exp(s[j] - top);
  part[threadIdx.x] = l;
  __syncthreads();
  l = 0;
  for (int i = 0; i < 256; ++i) l += part[i];
  __syncthreads();
  double worst = 0;
  for (int c = threadIdx.x; c < p.head_dim_v; c += 256) {
    double o = 0;
    for (int64_t j = 0; j < keys; ++j) o += s[j] * load_element(p.v.data, p.v.kind, offset_of(p.v, 0, g, j, c));
    o /= l;
    const double unit = p.out.kind == kind_f32 ? 0x1p-24 : p.out.kind == kind_f16 ? 0x1p-11 : 0x1p-8;
    const double e = fabs(load_element(p.out.data, p.out.kind, offset_of(p.out, 0, h, row, c)) - o) - unit * fabs(o);
    worst = e > worst || e != e ? e : worst;
  }
  part[threadIdx.x] = worst;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 0; i < 256; ++i) worst = part[i] > worst || part[i] != part[i] ? part[i] : worst;
  error[2 * blockIdx.x] = worst;
  error[2 * blockIdx.x + 1] = fabs(load_element(p.lse.data, kind_f32, offset_of(p.lse, 0, h, row, 0)) - (top + log(l)));
}

struct shape {
  cqsa_dtype type;
  int64_t heads, kv_heads, dim, rows;
  bool causal;
};

static int time_one(const shape& x, char* memory, double peak) {
  const int64_t bytes = (x.type >> 8 & 0xff) / 8, q_count = x.heads * x.rows * x.dim, k_count = x.kv_heads * x.rows * x.dim;
  auto view = [&](char* data, cqsa_dtype type) { return cqsa_view{data, type, 0, {0, x.rows * x.dim, x.dim, 1}}; };
  cqsa_attention_leaf a{};
  a.struct_size = sizeof a;
  a.batch = 1, a.num_heads = x.heads, a.num_kv_heads = x.kv_heads, a.head_dim = a.head_dim_v = x.dim, a.seqlen_q = a.seqlen_k = x.rows;
  a.q = view(memory, x.type), a.k = view(memory + q_count * bytes, x.type), a.v = view(memory + (q_count + k_count) * bytes, x.type);
  a.out = view(memory + (q_count + 2 * k_count) * bytes, x.type);
  float* lse = reinterpret_cast<float*>(memory + (2 * q_count + 2 * k_count) * bytes);
  a.lse = {lse, CQSA_DTYPE_F32, 0, {0, x.rows, 1, 1}};
  a.softmax_scale = 1.0 / std::sqrt(double(x.dim));
  a.causal = x.causal ? CQSA_CAUSAL_BOTTOM_RIGHT : CQSA_CAUSAL_NONE;
  a.window_left = a.window_right = -1;
  attention_params p{};
  auto gpu = [&](const cqsa_view& v, int32_t kind) { return gpu_view{static_cast<char*>(v.data), {v.stride[0], v.stride[1], v.stride[2], v.stride[3]}, kind, 0}; };
  const int32_t kind = x.type == CQSA_DTYPE_F32 ? kind_f32 : x.type == CQSA_DTYPE_F16 ? kind_f16 : kind_bf16;
  p.q = gpu(a.q, kind), p.k = gpu(a.k, kind), p.v = gpu(a.v, kind), p.out = gpu(a.out, kind), p.lse = gpu(a.lse, kind_f32);
  p.num_heads = x.heads, p.num_kv_heads = x.kv_heads, p.seqlen_q = p.seqlen_k = x.rows, p.head_dim = p.head_dim_v = int32_t(x.dim);
  p.softmax_scale = float(a.softmax_scale);
  fill<<<1024, 256>>>(memory, kind, q_count + 2 * k_count, 7);
  int bad = 0;
  const double s = best_of(2, [&] { bad |= portable_attention.launch(nullptr, &a, nullptr, 0, nullptr, nullptr); });
  const int64_t samples = 4, blocks = samples * x.heads;
  double *scratch, *error;
  CHECK_CUDA(cudaMalloc(&scratch, size_t(blocks * x.rows) * 8));
  CHECK_CUDA(cudaMallocManaged(&error, size_t(blocks) * 16));
  reference_rows<<<unsigned(blocks), 256>>>(p, samples, x.causal, scratch, error);
  CHECK_CUDA(cudaDeviceSynchronize());
  double out_error = 0, lse_error = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    if (!(error[2 * i] <= out_error)) out_error = error[2 * i];
    if (!(error[2 * i + 1] <= lse_error)) lse_error = error[2 * i + 1];
  }
  CHECK_CUDA(cudaFree(scratch));
  CHECK_CUDA(cudaFree(error));
  bad |= !(out_error < 1e-5) || !(lse_error < 1e-4);
  const double pairs = x.causal ? double(x.rows) * double(x.rows + 1) / 2 : double(x.rows) * double(x.rows);
  const double rate = 4.0 * double(x.dim) * pairs * double(x.heads) / s;
  std::printf("%s D=%-3lld N=%-5lld H=%lld/%lld %-6s %9.3f ms %6.2f TFLOP/s %5.1f %% of FMA peak, error out %.1e lse %.1e%s\n",
              x.type == CQSA_DTYPE_F32 ? "f32 " : x.type == CQSA_DTYPE_F16 ? "f16 " : "bf16", (long long)x.dim, (long long)x.rows,
              (long long)x.heads, (long long)x.kv_heads, x.causal ? "causal" : "full", s * 1e3, rate * 1e-12, 100 * rate / peak, out_error,
              lse_error, bad ? " WRONG" : "");
  std::fflush(stdout);
  return bad != 0;
}

static int time_all() {
  const double peak = fma_peak();
  std::printf("FMA peak %.1f TFLOP/s\n", peak * 1e-12);
  char* memory;
  CHECK_CUDA(cudaMalloc(&memory, size_t(1) << 30));
  int wrong = 0;
  for (const cqsa_dtype type : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
    for (const int64_t dim : {64, 128})
      for (const bool causal : {false, true})
        for (int64_t n = 1024; n <= 16384; n *= 2) wrong += time_one({type, 16, 16, dim, n, causal}, memory, peak);
  for (const int64_t dim : {32, 96, 256, 512}) wrong += time_one({CQSA_DTYPE_F16, 16, 16, dim, 4096, false}, memory, peak);
  wrong += time_one({CQSA_DTYPE_F16, 32, 8, 128, 8192, true}, memory, peak);
  CHECK_CUDA(cudaFree(memory));
  return wrong;
}

int main(int argc, char** argv) {
  bench::open_device(0);
  bench::prepare_all();
  int wrong = time_all();
  wrong += check_random(argc > 1 ? std::atof(argv[1]) : 30, argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  std::printf("%s\n", wrong ? "WRONG" : "all right");
  return wrong != 0;
}
