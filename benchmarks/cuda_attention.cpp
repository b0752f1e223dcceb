// SPDX-License-Identifier: Apache-2.0
// The attention leaves of sm_80 and of Hopper by themselves on a CUDA device, for benchmarks/cuda_attention.py: no plugin, no core. Kernels come from a
// folder of cubins, so that versions of them can be compared. docs/kernels/NOTES-attention-sm80.md says how to build and run.
#include "backends/cuda/tuned.h"
#include "backends/gpu/attention_params.h"
#include "backends/gpu/port.h"
#include "benchmarks/cuda_cubins.h"
#include "benchmarks/gpu_leaf_random.h"

#include <chrono>
#include <thread>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;

using bench::this_device;

namespace {

cqsa_status run_tasks(void*, int64_t n, void (*task)(void*, int64_t), void* data) {
  std::vector<std::thread> all;
  for (int64_t i = 0; i < n; ++i) all.emplace_back(task, data, i);
  for (auto& t : all) t.join();
  return CQSA_OK;
}
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

const cqsa_attention_impl* leaf_in_use = &sm80_attention;
cqsa_chip this_chip() { return {this_device.tier, this_device.compute_units, this_device.shared_bytes, 0}; }

}  // namespace

namespace cqsa::cpu {
cqsa_status fail(cqsa_status status, const char*) { return status; }
}  // namespace cqsa::cpu

extern "C" {

// Kernels of every cubin of the folder, in place of those of the same name that were there.
void bench_load(const char* folder, int tell) {
  if (this_device.arch == 0) bench::open_device(80);
  bench::load_folder(folder, tell != 0);
}

// The leaf that the other functions measure: 80 or 90.
void bench_use(int tier) {
  this_device.tier = tier;
  leaf_in_use = tier == 90 ? &sm90_attention : &sm80_attention;
}

// Compact [batch, heads, n, d]; type 1 f16, 2 bf16. state: three arrays, or null.
int bench_attention(const void* q, const void* k, const void* v, void* out, float* lse, int type, int64_t batch, int64_t heads, int64_t kv_heads,
                    int64_t n, int64_t d, int64_t dv, int causal, void* stream) {
  const cqsa_dtype t = type == 1 ? CQSA_DTYPE_F16 : CQSA_DTYPE_BF16;
  const auto view = [&](const void* data, int64_t h, int64_t c) { return cqsa_view{const_cast<void*>(data), t, 0, {h * n * c, n * c, c, 1}}; };
  cqsa_attention_leaf a{};
  a.struct_size = sizeof a;
  a.batch = batch, a.num_heads = heads, a.num_kv_heads = kv_heads, a.head_dim = d, a.head_dim_v = dv, a.seqlen_q = a.seqlen_k = n;
  a.q = view(q, heads, d), a.k = view(k, kv_heads, d), a.v = view(v, kv_heads, dv), a.out = view(out, heads, dv);
  a.lse = {lse, CQSA_DTYPE_F32, 0, {heads * n, n, 1, 1}};
  a.softmax_scale = 1.0 / std::sqrt(double(d));
  a.causal = causal ? CQSA_CAUSAL_BOTTOM_RIGHT : CQSA_CAUSAL_NONE;
  a.window_left = a.window_right = -1;
  a.chip = this_chip();
  char reason[256] = "";
  if (leaf_in_use->probe(&a, reason, sizeof reason) != CQSA_OK) return std::printf("declined: %s\n", reason), 1;
  return leaf_in_use->launch(nullptr, &a, nullptr, 0, nullptr, stream);
}

// One window of keys of a causal stream: n rows of q at position 0, keys from k_pos on, with the state of the rows in and out.
int bench_window(const void* q, const void* k, const void* v, float* acc, float* m, float* l, int64_t heads, int64_t n, int64_t k_pos, int64_t keys,
                 int64_t d, int first, void* stream) {
  const auto view = [&](const void* data, int64_t rows) { return cqsa_view{const_cast<void*>(data), CQSA_DTYPE_F16, 0, {0, rows * d, d, 1}}; };
  cqsa_attention_leaf a{};
  a.struct_size = sizeof a;
  a.batch = 1, a.num_heads = a.num_kv_heads = heads, a.head_dim = a.head_dim_v = d, a.seqlen_q = a.seqlen_k = n;
  a.q = view(q, n), a.k = view(k, keys), a.v = view(v, keys);
  a.softmax_scale = 1.0 / std::sqrt(double(d));
  a.causal = CQSA_CAUSAL_BOTTOM_RIGHT, a.window_left = a.window_right = -1;
  a.state_acc = acc, a.state_m = m, a.state_l = l, a.state_rows = n;
  a.flags = (first ? 0 : CQSA_LEAF_STATE_IN) | CQSA_LEAF_STATE_OUT;
  const cqsa_rect r{0, k_pos, n, keys, 0, 0, 0};
  a.rects = &r, a.num_rects = 1;
  a.chip = this_chip();
  return leaf_in_use->launch(nullptr, &a, nullptr, 0, nullptr, stream);
}

// Random problems against cpu_reference for so many seconds; how many were wrong.
int bench_random(double limit, uint64_t seed) {
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
  int failures = 0, count = 0, declined = 0;
  for (const double end = seconds() + limit; seconds() < end; ++count) {
    const std::string wrong = random_leaf::check(seed++, mem, 700, nullptr, [](void*) { CHECK_CUDA(cudaDeviceSynchronize()); }, &exec, *leaf_in_use, this_chip(), count % 4 != 0,
                                                 this_device.tier == 90 ? 16 : 0);
    declined += wrong == "declined";
    if (!wrong.empty() && wrong != "declined" && ++failures <= 10) std::printf("WRONG %s\n", wrong.c_str());
  }
  std::printf("%d random problems, %d declined, %d wrong\n", count, declined, failures);
  std::fflush(stdout);
  CHECK_CUDA(cudaFree(base));
  return failures;
}

}  // extern "C"
