// SPDX-License-Identifier: Apache-2.0
// Selected-cell attention by itself on a CUDA device, as published: 2,048 queries of 24 heads on 2 key heads of 256 over 2,051 cells, at
// several contexts. Sampled queries against fp64, everything against the f32 kernel, then times. No plugin, no core. Build and run:
// docs/kernels/NOTES-selected.md
#include "backends/cuda/tuned.h"
#include "backends/gpu/element.cuh"
#include "backends/gpu/selected_fill.h"
#include "benchmarks/cuda_port.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;

// ---------------------------------------------------------------------------------------------- where kernels are

#define KERNELS(X)                                                                                                               \
  X(cqsa_selected_d256) X(cqsa_sm80_selected_f16_d256_fast) X(cqsa_sm80_selected_f16_d256_split) X(cqsa_sm80_selected_i8_d256_fast) \
      X(cqsa_sm80_selected_i8_d256_split)
#define DECLARE(name) extern "C" __global__ void name(const selected_params p);
KERNELS(DECLARE)

const void* bench::code_of(kernel_id id) {
#define FIND(name) \
  if (id == kernel_id::name) return (const void*)name;
  KERNELS(FIND)
  return nullptr;
}
using bench::this_device;

// ---------------------------------------------------------------------------------------------------------------- the problem

constexpr int64_t queries = 2048, heads = 24, kv_heads = 2, dim = 256, budget = 2048 + 3, recent = 512, page_size = 64, group = 64;

__device__ float uniform(uint64_t i, uint32_t seed) {
  uint64_t x = i * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (float((x ^ x >> 31) >> 40) + 0.5f) * 0x1p-24f;
}
enum class draw { code, scale, gauss };
__global__ void fill(char* to, int kind, int64_t n, draw what, float size, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const float u = uniform(uint64_t(i), seed);
    if (what == draw::code) to[i] = char(int(u * 255.0f) - 127);
    else if (what == draw::scale) store_element(to, kind_f16, i, 0.005f + 0.025f * u);
    else store_element(to, kind, i, size * sqrtf(-2.0f * logf(u)) * cospif(2.0f * uniform(uint64_t(i), seed + 1000)));
  }
}

// The last cells, and older ones of which some 3 % change from query to query.
static void make_lists(int64_t context, std::vector<int32_t>* cells, std::vector<int32_t>* counts) {
  std::mt19937 random(11);
  std::vector<int32_t> older;
  std::vector<char> taken(size_t(context), 0);
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t keys = std::max<int64_t>(1, context - queries + i + 1);
    int32_t* list = cells->data() + i * budget;
    if (keys <= budget) {
      std::iota(list, list + keys, 0);
      (*counts)[size_t(i)] = int32_t(keys);
      continue;
    }
    const auto draw_one = [&] {
      int32_t c;
      do c = int32_t(random() % uint64_t(keys - recent));
      while (taken[size_t(c)]);
      taken[size_t(c)] = 1;
      return c;
    };
    while (int64_t(older.size()) < budget - recent) older.push_back(draw_one());
    for (int n = 0; n < int(older.size()) * 3 / 100 && keys - recent > budget; ++n) {
      int32_t& c = older[random() % older.size()];
      taken[size_t(c)] = 0;
      c = draw_one();
    }
    std::copy(older.begin(), older.end(), list);
    std::sort(list, list + older.size());
    std::iota(list + older.size(), list + budget, int32_t(keys - recent));
    (*counts)[size_t(i)] = int32_t(budget);
  }
}

struct problem {
  cqsa_selected_leaf leaf{};
  float* out[4];  // by CQSA_PRECISION_*
};

template <class T> static T* device_array(int64_t n) {
  T* p;
  CHECK_CUDA(cudaMalloc(&p, size_t(n) * sizeof(T)));
  return p;
}
template <class T> static T* to_device(const std::vector<T>& x) {
  T* p = device_array<T>(int64_t(x.size()));
  CHECK_CUDA(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

static void make_pool(bool codes, int64_t pages, uint32_t seed, float size, cqsa_view* x, cqsa_view* scale) {
  const int64_t n = pages * kv_heads * page_size * dim;
  char* data = device_array<char>(n * (codes ? 1 : 2));
  fill<<<2048, 256>>>(data, kind_f16, n, codes ? draw::code : draw::gauss, size, seed);
  *x = {data, cqsa_dtype(codes ? CQSA_DTYPE_I8 : CQSA_DTYPE_F16), 0, {kv_heads * page_size * dim, page_size * dim, dim, 1}};
  if (!codes) return;
  const int64_t groups = dim / group;
  char* scales = device_array<char>(n / group * 2);
  fill<<<2048, 256>>>(scales, kind_f16, n / group, draw::scale, 0, seed + 1);
  *scale = {scales, CQSA_DTYPE_F16, 0, {kv_heads * page_size * groups, page_size * groups, groups, 1}};
}

static problem make_problem(bool codes, int64_t context) {
  problem x;
  cqsa_selected_leaf& a = x.leaf;
  a.struct_size = sizeof a;
  a.total_q = queries, a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = a.head_dim_v = dim;
  a.page_size = page_size, a.num_pages = a.pages = (context + page_size - 1) / page_size, a.capacity = budget;
  float* q = device_array<float>(queries * heads * dim);
  fill<<<2048, 256>>>(reinterpret_cast<char*>(q), kind_f32, queries * heads * dim, draw::gauss, 2.0f, 1);
  a.q = {q, CQSA_DTYPE_F32, 0, {0, dim, heads * dim, 1}};
  make_pool(codes, a.num_pages, 10, 1.5f, &a.k, &a.k_scale);
  make_pool(codes, a.num_pages, 20, 1.0f, &a.v, &a.v_scale);
  a.kv_group = codes ? group : 0;
  a.lse = {device_array<float>(queries * heads), CQSA_DTYPE_F32, 0, {0, queries, 1, 1}};
  for (float*& out : x.out) out = device_array<float>(queries * heads * dim);
  std::vector<int32_t> pages(size_t(a.pages)), cells(size_t(queries * budget), 0), counts(size_t(queries), 0);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(5));
  make_lists(context, &cells, &counts);
  a.page_table = to_device(pages), a.cells = to_device(cells), a.counts = to_device(counts);
  a.page_table_stride[1] = 1, a.cells_stride[0] = budget, a.cells_stride[1] = 1, a.counts_stride = 1;
  a.softmax_scale = 1.0 / std::sqrt(double(dim));
  a.chip = {80, this_device.compute_units, this_device.shared_bytes, 0};
  return x;
}

static void free_problem(problem& x) {
  const cqsa_selected_leaf& a = x.leaf;
  for (void* p : {a.q.data, a.k.data, a.v.data, a.k_scale.data, a.v_scale.data, a.lse.data}) CHECK_CUDA(cudaFree(p));
  for (const int32_t* p : {a.page_table, a.cells, a.counts}) CHECK_CUDA(cudaFree(const_cast<int32_t*>(p)));
  for (float* p : x.out) CHECK_CUDA(cudaFree(p));
}

// ----------------------------------------------------------------------------------------------------------------- the checks

// One block for a sampled query and head: attention in fp64. error: largest |out - exact| of each of the three outputs, and of |exact|.
struct outputs {
  const float* out[4];
};
__global__ void check_query(selected_params p, outputs got, const int32_t* samples, double* scratch, double* error) {
  __shared__ double part[256];
  const int64_t query = samples[blockIdx.x], h = blockIdx.y, g = h / (heads / kv_heads);
  const int32_t* cells = reinterpret_cast<const int32_t*>(p.cells) + query * budget;
  const int32_t count = reinterpret_cast<const int32_t*>(p.counts)[query];
  double* s = scratch + (blockIdx.x * heads + h) * budget;
  const auto value = [&](const gpu_view& x, const gpu_view& scale, int n, int c) {
    const int64_t page = reinterpret_cast<const int32_t*>(p.page_table)[cells[n] / page_size], row = cells[n] % page_size;
    const double code = load_element(x.data, x.kind, offset_of(x, page, g, row, c));
    return scale.data ? code * load_element(scale.data, kind_f16, offset_of(scale, page, g, row, c / group)) : code;
  };
  double top = -1e300, l = 0;
  for (int n = threadIdx.x; n < count; n += 256) {
    double x = 0;
    for (int c = 0; c < dim; ++c)
      x += double(load_element(p.q.data, kind_f32, offset_of(p.q, 0, h, query, c))) * value(p.k, p.k_scale, n, c);
    s[n] = x / 16.0;
    top = s[n] > top ? s[n] : top;
  }
  part[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < 256; ++i) top = part[i] > top ? part[i] : top;
  __syncthreads();
  for (int n = threadIdx.x; n < count; n += 256) l += s[n] = exp(s[n] - top);
  part[threadIdx.x] = l;
  __syncthreads();
  l = 0;
  for (int i = 0; i < 256; ++i) l += part[i];
  const int c = threadIdx.x;
  double o = 0;
  for (int n = 0; n < count; ++n) o += s[n] * value(p.v, p.v_scale, n, c);
  o /= l;
  for (int which = 0; which < 4; ++which) {
    const double e = which == 0 ? fabs(o) : fabs(got.out[which][(query * heads + h) * dim + c] - o);
    __syncthreads();
    part[c] = e;
    __syncthreads();
    if (c) continue;
    double worst = 0;
    for (int i = 0; i < 256; ++i) worst = part[i] > worst || part[i] != part[i] ? part[i] : worst;
    error[(blockIdx.x * heads + h) * 4 + which] = worst;
  }
}

// Largest |a - b| and |b|, as the bits of floats, which order as they do. NaN counts as the largest.
__global__ void compare(const float* a, const float* b, int64_t n, unsigned* out) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    atomicMax(&out[0], __float_as_uint(fabsf(a[i] - b[i])));
    atomicMax(&out[1], __float_as_uint(fabsf(b[i])));
  }
}

static bool check(const problem& x, int64_t context, bool codes) {
  const std::vector<int32_t> samples = {0, 1, 700, 1023, 1500, 2047};
  int32_t* where = to_device(samples);
  const int64_t blocks = int64_t(samples.size()) * heads;
  double *scratch = device_array<double>(blocks * budget), *error = device_array<double>(blocks * 4);
  selected_params p{};
  fill_params(x.leaf, 1, &p);
  check_query<<<dim3(unsigned(samples.size()), heads), 256>>>(p, outputs{{nullptr, x.out[1], x.out[2], x.out[3]}}, where, scratch, error);
  unsigned* words = device_array<unsigned>(4);
  CHECK_CUDA(cudaMemset(words, 0, 16));
  compare<<<1024, 256>>>(x.out[CQSA_PRECISION_SPLIT], x.out[CQSA_PRECISION_F32], queries * heads * dim, words);
  std::vector<double> host(size_t(blocks * 4));
  unsigned bits[4];
  CHECK_CUDA(cudaMemcpy(host.data(), error, host.size() * 8, cudaMemcpyDeviceToHost));
  CHECK_CUDA(cudaMemcpy(bits, words, 16, cudaMemcpyDeviceToHost));
  double worst[4] = {0, 0, 0, 0};
  for (size_t i = 0; i < host.size(); ++i) worst[i % 4] = !(host[i] <= worst[i % 4]) ? host[i] : worst[i % 4];
  float apart, largest;
  std::memcpy(&apart, &bits[0], 4), std::memcpy(&largest, &bits[1], 4);
  const double fast = worst[CQSA_PRECISION_FAST], split = worst[CQSA_PRECISION_SPLIT], f32 = worst[CQSA_PRECISION_F32];
  const bool right = split <= std::max(4 * f32, 1e-6 * worst[0]) && double(apart) <= 1e-4 * double(largest) && fast <= 5e-3 * worst[0];
  std::printf("%-4s %6lld: errors fast %.2e split %.2e f32 %.2e, largest |out| %.2f; split less f32 everywhere %.2e of %.2f%s\n",
              codes ? "int8" : "f16", (long long)context, fast, split, f32, worst[0], double(apart), double(largest),
              right ? "" : " WRONG");
  for (void* q : {(void*)where, (void*)scratch, (void*)error, (void*)words}) CHECK_CUDA(cudaFree(q));
  return right;
}

// ------------------------------------------------------------------------------------------------------------------ the times

static double median_ms(int times, const std::function<bool()>& f) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> all;
  for (int i = 0; i < times; ++i) {
    CHECK_CUDA(cudaEventRecord(begin));
    if (!f()) std::exit(1);
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    all.push_back(ms);
  }
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

static bool run_one(bool codes, int64_t context) {
  problem x = make_problem(codes, context);
  double ms[4];
  for (const int32_t precision : {CQSA_PRECISION_F32, CQSA_PRECISION_SPLIT, CQSA_PRECISION_FAST}) {
    cqsa_selected_leaf a = x.leaf;
    a.precision = precision;
    a.out = {x.out[precision], CQSA_DTYPE_F32, 0, {0, dim, heads * dim, 1}};
    CHECK_CUDA(cudaMemset(a.out.data, 0xff, queries * heads * dim * 4));
    char reason[200] = "";
    const cqsa_selected_impl& impl = sm80_selected.probe(&a, reason, sizeof reason) == CQSA_OK ? sm80_selected : portable_selected;
    if ((precision == CQSA_PRECISION_F32) != (&impl == &portable_selected)) std::printf("declined: %s\n", reason);
    const auto launch_it = [&] { return impl.launch(nullptr, &a, nullptr, 0, nullptr, nullptr) == CQSA_OK; };
    launch_it();
    CHECK_CUDA(cudaDeviceSynchronize());
    ms[precision] = median_ms(precision == CQSA_PRECISION_F32 ? 3 : 15, launch_it);
  }
  const bool right = check(x, context, codes);
  std::printf("%-4s %6lld: fast %.3f ms, split %.3f ms, f32 %.3f ms\n", codes ? "int8" : "f16", (long long)context, ms[CQSA_PRECISION_FAST],
              ms[CQSA_PRECISION_SPLIT], ms[CQSA_PRECISION_F32]);
  std::fflush(stdout);
  free_problem(x);
  return right;
}

int main() {
  bench::open_device(80);
  bench::prepare_all();
  bool right = true;
  for (const int64_t context : {32768, 8192, 131072, 2100, 1500})
    for (const bool codes : {true, false}) right = run_one(codes, context) && right;
  std::printf("%s\n", right ? "all right" : "WRONG");
  return !right;
}
