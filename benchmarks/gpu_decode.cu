// SPDX-License-Identifier: Apache-2.0
// The decode kernels of sm_80 by themselves on a CUDA device: sampled rows against fp64, then the copy bandwidth of the device and
// what of it decoding reaches, counting the bytes of keys and values once. No plugin, no core. Build: docs/kernels/NOTES-decode.md
#include "backends/cuda/sm80/decode_leaf.h"
#include "backends/cuda/sm80/decode_params.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_fill.h"
#include "backends/gpu/combine_params.h"
#include "backends/gpu/element.cuh"
#include "benchmarks/cuda_port.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;
using cqsa::gpu::decode::decode_params;

// ---------------------------------------------------------------------------------------------- where kernels are

extern "C" __global__ void cqsa_attention_combine(const combine_params p);
#define CQSA_DECLARE(name, threads, tier) extern "C" __global__ void name(const decode_params p);
CQSA_SM80_DECODE_KERNELS(CQSA_DECLARE)

const void* bench::code_of(kernel_id kernel) {
  if (kernel == kernel_id::cqsa_attention_combine) return (const void*)cqsa_attention_combine;
#define CQSA_FIND(name, threads, tier) \
  if (kernel == kernel_id::name) return (const void*)name;
  CQSA_SM80_DECODE_KERNELS(CQSA_FIND)
  return nullptr;
}
using bench::this_device;
extern const cqsa_attention_impl cqsa::gpu::portable_attention = {};  // only for rectangles, of which there are none here

template <class F> static double median_of(int times, const F& f) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> all;
  for (int i = 0; i < times + 2; ++i) {
    CHECK_CUDA(cudaEventRecord(begin));
    f();
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i > 1) all.push_back(ms);
  }
  std::sort(all.begin(), all.end());
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  return all[all.size() / 2] * 1e-3;
}

// ------------------------------------------------------------------------------------------------------------- problems

struct shape {
  cqsa_dtype query, type;
  int64_t batch, heads, kv_heads, dim, queries, keys, page;  // page 0: not paged
  bool causal;
  int splits;   // 0: the leaf's own
  bool heads_first;  // pages of [heads, rows, channels]
};

__global__ void fill(char* to, int kind, int64_t n, uint32_t seed, float size) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t x = uint32_t(i) * 2654435761u + uint32_t(i >> 32) * 97u + seed * 40503u;
    x = (x ^ x >> 15) * 2246822519u;
    x = (x ^ x >> 13) * 3266489917u;
    x ^= x >> 16;
    if (kind == kind_i8) to[i] = char(x);
    else if (kind >= kind_e4m3) to[i] = char(x & 0xbfu);
    else store_element(to, kind, i, (float(x) * 0x1p-32f - 0.5f) * size);
  }
}
// Scales are positive.
__global__ void fill_scales(char* to, int kind, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    store_element(to, kind, i, kind == kind_f16 ? 0.005f + 0.0001f * float(i % 97) : 0.5f + 0.01f * float(i % 89));
}

// What the kernels read, in device memory that all problems share.
class arena {
 public:
  explicit arena(size_t bytes) : bytes_(bytes) { CHECK_CUDA(cudaMalloc(&base_, bytes)); }
  ~arena() { cudaFree(base_); }
  void clear() { used_ = 0; }
  char* take(int64_t bytes) {
    char* const p = base_ + used_;
    used_ += size_t(bytes + 255) / 256 * 256;
    if (used_ > bytes_) std::printf("%zu bytes are not enough\n", bytes_), std::exit(2);
    return p;
  }

 private:
  char* base_;
  size_t bytes_, used_ = 0;
};

static int64_t size_of(cqsa_dtype t) { return (t >> 8 & 0xff) / 8; }
static bool narrow(cqsa_dtype t) { return size_of(t) == 1; }

static cqsa_view filled(arena& mem, cqsa_dtype type, int64_t b, int64_t h, int64_t rows, int64_t channels, bool heads_first,
                        uint32_t seed) {
  char* const data = mem.take(b * h * rows * channels * size_of(type));
  fill<<<2048, 256>>>(data, kind_of(type), b * h * rows * channels, seed, 4.0f);
  if (heads_first) return {data, type, 0, {h * rows * channels, rows * channels, channels, 1}};
  return {data, type, 0, {h * rows * channels, channels, h * channels, 1}};
}
static cqsa_view scales_for(arena& mem, cqsa_dtype type, int64_t b, int64_t h, int64_t rows, int64_t channels) {
  const bool grouped = type == CQSA_DTYPE_I8;
  const int64_t n = grouped ? channels / 64 : 1;
  const cqsa_dtype t = grouped ? CQSA_DTYPE_F16 : CQSA_DTYPE_F32;
  char* const data = mem.take(b * h * rows * n * size_of(t));
  fill_scales<<<1024, 256>>>(data, kind_of(t), b * h * rows * n);
  return {data, t, 0, {h * rows * n, n, h * n, 1}};
}

static cqsa_attention_leaf make(const shape& x, arena& mem) {
  cqsa_attention_leaf a{};
  a.struct_size = sizeof a;
  a.batch = x.batch, a.num_heads = x.heads, a.num_kv_heads = x.kv_heads, a.head_dim = a.head_dim_v = x.dim, a.seqlen_q = x.queries,
  a.seqlen_k = x.keys;
  a.chip = {80, this_device.compute_units, this_device.shared_bytes, 0};
  const int64_t each = x.page ? (x.keys + x.page - 1) / x.page : 1, items = x.batch * each, rows = x.page ? x.page : x.keys;
  a.q = filled(mem, x.query, x.batch, x.heads, x.queries, x.dim, true, 1);
  a.k = filled(mem, x.type, items, x.kv_heads, rows, x.dim, x.heads_first, 2);
  a.v = filled(mem, x.type, items, x.kv_heads, rows, x.dim, x.heads_first, 3);
  a.out = filled(mem, x.query, x.batch, x.heads, x.queries, x.dim, true, 4);
  a.lse = {mem.take(x.batch * x.heads * x.queries * 4), CQSA_DTYPE_F32, 0, {x.heads * x.queries, x.queries, 1, 1}};
  if (narrow(x.type)) {
    a.k_scale = scales_for(mem, x.type, items, x.kv_heads, rows, x.dim),
    a.v_scale = scales_for(mem, x.type, items, x.kv_heads, rows, x.dim);
    a.scale_k = a.scale_v = x.type == CQSA_DTYPE_I8 ? CQSA_SCALE_GROUP : CQSA_SCALE_TOKEN;
    a.kv_group = 64;
  }
  if (x.page) {
    std::vector<int32_t> pages(static_cast<size_t>(items));
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = int32_t(i);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(7));
    char* const table = mem.take(items * 4);
    CHECK_CUDA(cudaMemcpy(table, pages.data(), pages.size() * 4, cudaMemcpyHostToDevice));
    a.page_table = reinterpret_cast<const int32_t*>(table);
    a.page_table_stride[0] = each, a.page_table_stride[1] = 1;
    a.page_size = x.page, a.num_pages = items;
  }
  a.softmax_scale = 1.0 / std::sqrt(double(x.dim));
  a.causal = x.causal ? CQSA_CAUSAL_BOTTOM_RIGHT : CQSA_CAUSAL_NONE;
  a.window_left = a.window_right = -1;
  return a;
}

// ---------------------------------------------------------------------------------------------------------------- fp64

struct sample {
  int64_t batch, head, query;
};

__device__ double element_of(const attention_params& p, bool values, int64_t b, int64_t g, int64_t key, int64_t c) {
  int64_t item = b, row = key;
  if (p.page_table) {
    item = reinterpret_cast<const int32_t*>(p.page_table)[b * p.page_table_stride[0] + key / p.page_size];
    row = key % p.page_size;
  }
  const gpu_view &view = values ? p.v : p.k, &scale = values ? p.v_scale : p.k_scale;
  const double x = load_element(view.data, view.kind, offset_of(view, item, g, row, c));
  if (!scale.data) return x;
  return x * load_element(scale.data, scale.kind, offset_of(scale, item, g, row, p.scale_k == scale_per_group ? c / p.kv_group : 0));
}

// One block a sample. error: largest |difference| of out beyond half a unit of its type, in units of the largest |v|; of lse.
__global__ void reference_rows(attention_params p, const sample* samples, double* scratch, double* error) {
  __shared__ double part[256];
  const sample at = samples[blockIdx.x];
  const int64_t g = at.head / (p.num_heads / p.num_kv_heads), off = p.seqlen_k - p.seqlen_q;
  const int64_t end = at.query + off + p.right + 1, keys = end < p.seqlen_k ? end : p.seqlen_k;
  double* s = scratch + blockIdx.x * p.seqlen_k;
  double m = -1e300, l = 0;
  for (int64_t j = threadIdx.x; j < keys; j += 256) {
    double x = 0;
    for (int c = 0; c < p.head_dim; ++c)
      x += double(load_element(p.q.data, p.q.kind, offset_of(p.q, at.batch, at.head, at.query, c))) *
           element_of(p, false, at.batch, g, j, c);
    s[j] = x * p.softmax_scale;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int64_t j = 0; j < keys; ++j) m = s[j] > m ? s[j] : m;
    part[0] = m;
  }
  __syncthreads();
  m = part[0];
  __syncthreads();
  for (int64_t j = threadIdx.x; j < keys; j += 256) l += s[j] = exp(s[j] - m);
  part[threadIdx.x] = l;
  __syncthreads();
  l = 0;
  for (int i = 0; i < 256; ++i) l += part[i];
  __syncthreads();
  double worst = 0;
  for (int c = threadIdx.x; c < p.head_dim_v; c += 256) {
    double o = 0, top = 0;
    for (int64_t j = 0; j < keys; ++j) {
      const double v = element_of(p, true, at.batch, g, j, c);
      o += s[j] * v, top = fabs(v) > top ? fabs(v) : top;
    }
    o /= l;
    const double unit = p.out.kind == kind_f16 ? 0x1p-11 : 0x1p-8;
    const double e =
        (fabs(load_element(p.out.data, p.out.kind, offset_of(p.out, at.batch, at.head, at.query, c)) - o) - unit * fabs(o)) / top;
    worst = e > worst || e != e ? e : worst;
  }
  part[threadIdx.x] = worst;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 0; i < 256; ++i) worst = part[i] > worst || part[i] != part[i] ? part[i] : worst;
  error[2 * blockIdx.x] = worst;
  error[2 * blockIdx.x + 1] = fabs(load_element(p.lse.data, kind_f32, offset_of(p.lse, at.batch, at.head, at.query, 0)) - (m + log(l)));
}

static bool rows_are_right(const shape& x, const cqsa_attention_leaf& a, double* out_error, double* lse_error) {
  std::vector<sample> samples;
  for (const int64_t b : {int64_t(0), x.batch - 1})
    for (const int64_t h : {int64_t(0), x.heads / 2, x.heads - 1})
      for (const int64_t q : {int64_t(0), x.queries - 1}) samples.push_back({b, h, q});
  attention_params p{};
  fill_params(a, &p);
  sample* list;
  double *scratch, *error;
  CHECK_CUDA(cudaMalloc(&list, samples.size() * sizeof(sample)));
  CHECK_CUDA(cudaMalloc(&scratch, samples.size() * size_t(x.keys) * 8));
  CHECK_CUDA(cudaMalloc(&error, samples.size() * 16));
  CHECK_CUDA(cudaMemcpy(list, samples.data(), samples.size() * sizeof(sample), cudaMemcpyHostToDevice));
  reference_rows<<<unsigned(samples.size()), 256>>>(p, list, scratch, error);
  std::vector<double> got(2 * samples.size());
  CHECK_CUDA(cudaMemcpy(got.data(), error, got.size() * 8, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < got.size(); i += 2) {
    if (!(got[i] <= *out_error)) *out_error = got[i];
    if (!(got[i + 1] <= *lse_error)) *lse_error = got[i + 1];
  }
  CHECK_CUDA(cudaFree(list));
  CHECK_CUDA(cudaFree(scratch));
  CHECK_CUDA(cudaFree(error));
  const double bound = narrow(x.type) ? 1e-4 : x.query == CQSA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
  return *out_error <= bound && *lse_error <= 1e-4;
}

// -------------------------------------------------------------------------------------------------------------- timings

static const char* name_of(cqsa_dtype t) {
  return t == CQSA_DTYPE_F16 ? "f16" : t == CQSA_DTYPE_BF16 ? "bf16" : t == CQSA_DTYPE_I8 ? "i8" : t == CQSA_DTYPE_E4M3FN ? "e4m3" : "e5m2";
}

static int run_one(const shape& x, arena& mem, double copy, bool timed) {
  mem.clear();
  const cqsa_attention_leaf a = make(x, mem);
  char reason[256] = "";
  if (sm80_decode.probe(&a, reason, sizeof reason) != CQSA_OK) return std::printf("declined: %s WRONG\n", reason), 1;
  auto cut = decode::cut_of(a);
  if (x.splits) cut.splits = x.splits;
  const uint64_t bytes = uint64_t(cut.splits) * uint64_t(x.batch * x.heads * x.queries) * uint64_t(x.dim + 2) * 4 + 256;
  char* const memory = mem.take(int64_t(bytes));
  int bad = 0;
  const auto call = [&] { bad |= decode::launch_cut(nullptr, a, cut, memory, bytes, nullptr); };
  call();
  CHECK_CUDA(cudaDeviceSynchronize());
  double out_error = 0, lse_error = 0;
  bad |= !rows_are_right(x, a, &out_error, &lse_error);
  std::printf(
      "q %-4s kv %-4s batch %-2lld heads %lld/%lld D %-3lld q %-2lld k %-6lld page %-3lld%s%s splits %-3d stages %d:", name_of(x.query),
      name_of(x.type), (long long)x.batch, (long long)x.heads, (long long)x.kv_heads, (long long)x.dim, (long long)x.queries,
      (long long)x.keys, (long long)x.page, x.heads_first ? " heads first" : "", x.causal ? " causal" : "", cut.splits, cut.stages);
  if (timed) {
    const double s = median_of(7, call);
    const double scale_bytes = !narrow(x.type) ? 0 : x.type == CQSA_DTYPE_I8 ? double(x.dim) / 64 * 2 : 4;
    const double read = 2.0 * double(x.batch * x.keys * x.kv_heads) * (double(x.dim * size_of(x.type)) + scale_bytes);
    std::printf(" %8.1f us %5.2f TB/s %5.1f %% of copy,", s * 1e6, read / s * 1e-12, 100 * read / s / copy);
  }
  std::printf(" error out %.1e lse %.1e%s\n", out_error, lse_error, bad ? " WRONG" : "");
  std::fflush(stdout);
  return bad != 0;
}

static double copy_bandwidth() {
  const size_t n = size_t(2) << 30;
  char *a, *b;
  CHECK_CUDA(cudaMalloc(&a, n));
  CHECK_CUDA(cudaMalloc(&b, n));
  const double s = median_of(7, [&] { CHECK_CUDA(cudaMemcpyAsync(b, a, n, cudaMemcpyDeviceToDevice)); });
  CHECK_CUDA(cudaFree(a));
  CHECK_CUDA(cudaFree(b));
  return 2.0 * double(n) / s;
}

int main() {
  bench::open_device(80);
  bench::prepare_all(false);
  const double copy = copy_bandwidth();
  std::printf("%d bytes of shared memory, copy %.2f TB/s (read + write)\n", this_device.shared_bytes, copy * 1e-12);
  arena mem(size_t(9) << 30);
  int wrong = 0;
  const cqsa_dtype f16 = CQSA_DTYPE_F16, bf16 = CQSA_DTYPE_BF16, i8 = CQSA_DTYPE_I8, e4m3 = CQSA_DTYPE_E4M3FN, e5m2 = CQSA_DTYPE_E5M2;
  for (const cqsa_dtype query : {f16, bf16})
    for (const cqsa_dtype type : {query, i8, e4m3, e5m2})
      for (const int64_t dim : {64, 128, 256})
        for (const int64_t queries : {1, 5, 16})
          wrong += run_one({query, type, 3, 8, 2, dim, queries, 1500, queries == 5 ? 0 : 16, true, 0, false}, mem, copy, false);
  for (const int64_t page : {16, 64})
    for (const int splits : {0, 1, 2, 3, 4, 6, 8, 16})
      wrong += run_one({f16, f16, 32, 32, 8, 128, 1, 32768, page, false, splits, false}, mem, copy, true);
  wrong += run_one({f16, f16, 32, 32, 8, 128, 1, 32768, 0, false, 0, true}, mem, copy, true);
  wrong += run_one({f16, f16, 32, 32, 8, 128, 1, 32768, 16, false, 0, true}, mem, copy, true);
  for (const cqsa_dtype type : {f16, i8, e4m3})
    for (const int64_t keys : {4096, 32768})
      for (const int64_t batch : {1, 8, 32})
        for (const int64_t page : {16, 64, 256})
          wrong += run_one({f16, type, batch, 32, 8, 128, 1, keys, page, false, 0, false}, mem, copy, true);
  for (const int64_t queries : {4, 16}) wrong += run_one({f16, f16, 32, 32, 8, 128, queries, 32768, 64, true, 0, false}, mem, copy, true);
  wrong += run_one({f16, f16, 32, 32, 8, 64, 1, 32768, 64, false, 0, false}, mem, copy, true);
  wrong += run_one({f16, f16, 16, 16, 4, 256, 1, 32768, 64, false, 0, false}, mem, copy, true);
  wrong += run_one({bf16, bf16, 32, 64, 8, 128, 1, 32768, 64, false, 0, false}, mem, copy, true);
  std::printf("%s\n", wrong ? "WRONG" : "all right");
  return wrong != 0;
}
