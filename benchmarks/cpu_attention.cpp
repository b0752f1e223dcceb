// SPDX-License-Identifier: Apache-2.0
// CPU attention against the FMA peak of the machine and against two GEMMs with a softmax between them, all in one process.
// The machine is shared and noisy, so every figure is the best of several and competitors are timed alternately. Each timing
// is followed by a check of sampled rows against fp64.
//   bench_cpu_attention [--quick] > table.md
#include <cqsa.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fma_peak.h"
#include "src/dtype.h"

#ifdef CQSA_BENCH_BLAS
extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                            const float* b, int ldb, float beta, float* c, int ldc);
extern "C" char* openblas_get_corename(void) __attribute__((weak));
extern "C" int openblas_get_num_threads(void) __attribute__((weak));
#endif

namespace {

constexpr int64_t heads = 8;

struct problem {
  int64_t seqlen, dim;
  cqsa_dtype dtype;
  bool causal;
  double flops() const { return 4.0 * heads * static_cast<double>(seqlen) * static_cast<double>(seqlen) * dim * (causal ? 0.5 : 1.0); }
};

int64_t element_bytes(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_F32 ? 4 : 2; }
const char* name(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_F32 ? "f32" : dtype == CQSA_DTYPE_F16 ? "f16" : "bf16"; }

// q, k, v random in [-1, 1), in the problem's type and, as computed from those very bits, in f32.
struct operands {
  std::vector<char> raw[4];     // q, k, v, out
  std::vector<float> plain[3];

  explicit operands(const problem& p) {
    std::mt19937 random(1234);
    std::uniform_real_distribution<float> uniform(-1, 1);
    const size_t count = static_cast<size_t>(heads * p.seqlen * p.dim);
    for (int t = 0; t < 4; ++t) raw[t].resize(count * static_cast<size_t>(element_bytes(p.dtype)));
    for (int t = 0; t < 3; ++t) {
      plain[t].resize(count);
      for (size_t i = 0; i < count; ++i) plain[t][i] = store(p.dtype, raw[t].data(), i, 2 * uniform(random));
    }
  }

  static float store(cqsa_dtype dtype, char* to, size_t index, float value) {
    if (dtype == CQSA_DTYPE_F32) return reinterpret_cast<float*>(to)[index] = value;
    uint16_t& half = reinterpret_cast<uint16_t*>(to)[index];
    half = dtype == CQSA_DTYPE_F16 ? cqsa::f32_to_f16(value) : cqsa::f32_to_bf16(value);
    return dtype == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(half) : cqsa::bf16_to_f32(half);
  }

  float result(const problem& p, size_t index) const {
    if (p.dtype == CQSA_DTYPE_F32) return reinterpret_cast<const float*>(raw[3].data())[index];
    const uint16_t half = reinterpret_cast<const uint16_t*>(raw[3].data())[index];
    return p.dtype == CQSA_DTYPE_F16 ? cqsa::f16_to_f32(half) : cqsa::bf16_to_f32(half);
  }
};

// Largest error of 24 sampled rows against fp64; `out` gives element i of the result.
double sampled_error(const problem& p, const operands& data, const std::function<float(size_t)>& out) {
  std::mt19937 random(7);
  double worst = 0;
  std::vector<double> logit(static_cast<size_t>(p.seqlen)), sum(static_cast<size_t>(p.dim));
  for (int sample = 0; sample < 24; ++sample) {
    const int64_t head = static_cast<int64_t>(random() % heads), row = static_cast<int64_t>(random()) % p.seqlen;
    const size_t base = static_cast<size_t>(head * p.seqlen * p.dim), at = base + static_cast<size_t>(row * p.dim);
    const int64_t keys = p.causal ? row + 1 : p.seqlen;
    double high = -HUGE_VAL, total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < p.dim; ++c)
        dot += static_cast<double>(data.plain[0][at + static_cast<size_t>(c)]) * data.plain[1][base + static_cast<size_t>(j * p.dim + c)];
      logit[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(p.dim));
      high = std::max(high, logit[static_cast<size_t>(j)]);
    }
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = std::exp(logit[static_cast<size_t>(j)] - high);
      total += weight;
      for (int64_t c = 0; c < p.dim; ++c) sum[static_cast<size_t>(c)] += weight * data.plain[2][base + static_cast<size_t>(j * p.dim + c)];
    }
    for (int64_t c = 0; c < p.dim; ++c)
      worst = std::max(worst, std::abs(sum[static_cast<size_t>(c)] / total - out(at + static_cast<size_t>(c))));
  }
  return worst;
}

void demand(cqsa_status status, const char* what) {
  if (status == CQSA_OK) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, cqsa_status_string(status), cqsa_last_error());
  std::exit(1);
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Best time of each, taken in turn.
std::vector<double> best_of(int rounds, const std::vector<std::function<void()>>& works) {
  std::vector<double> best(works.size(), HUGE_VAL);
  for (const auto& work : works) work();
  for (int r = 0; r < rounds; ++r)
    for (size_t i = 0; i < works.size(); ++i) best[i] = std::min(best[i], seconds_of(works[i]));
  return best;
}

// A plan with its workspace, ready to be timed.
class prepared {
 public:
  prepared(cqsa_context* context, const problem& p, operands& data, const std::function<void(cqsa_attention_params&)>& change = {}) {
    shape_[0] = 1; shape_[1] = heads; shape_[2] = p.seqlen; shape_[3] = p.dim;
    for (int t = 0; t < 4; ++t)
      tensor_[t] = {data.raw[t].data(), CQSA_DEVICE_CPU, 0, 4, p.dtype, shape_, nullptr, 0};
    args_.q = &tensor_[0]; args_.k = &tensor_[1]; args_.v = &tensor_[2]; args_.out = &tensor_[3];
    cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
    demand(cqsa_attention_params_of(context, &args_, &params), "params_of");
    params.causal = p.causal ? CQSA_CAUSAL_TOP_LEFT : CQSA_CAUSAL_NONE;
    if (change) change(params);
    demand(cqsa_attention_plan_create(context, &params, &plan_), "plan");
    demand(cqsa_workspace_query(plan_, &args_.workspace_bytes), "workspace_query");
    args_.workspace = std::aligned_alloc(64, args_.workspace_bytes + 64 - args_.workspace_bytes % 64);
    demand(cqsa_workspace_init(plan_, args_.workspace, args_.workspace_bytes), "workspace_init");
  }
  ~prepared() { cqsa_plan_destroy(plan_); std::free(args_.workspace); }
  prepared(const prepared&) = delete;

  void run() { demand(cqsa_attention_execute(plan_, &args_, nullptr), "execute"); }
  std::function<void()> work() { return [this] { run(); }; }
  cqsa_plan_info info() const {
    cqsa_plan_info i = CQSA_PLAN_INFO_INIT;
    demand(cqsa_plan_describe(plan_, &i), "describe");
    return i;
  }

 private:
  int64_t shape_[4];
  cqsa_tensor tensor_[4];
  cqsa_attention_args args_ = CQSA_ATTENTION_ARGS_INIT;
  cqsa_plan* plan_ = nullptr;
};

#ifdef CQSA_BENCH_BLAS
// What a program without a fused kernel does: scores by one GEMM, softmax, output by another, a head at a time.
void two_gemms(const problem& p, const operands& data, std::vector<float>& scores, std::vector<float>& out) {
  const int n = static_cast<int>(p.seqlen), d = static_cast<int>(p.dim);
  for (int64_t h = 0; h < heads; ++h) {
    const size_t base = static_cast<size_t>(h * p.seqlen * p.dim);
    cblas_sgemm(101, 111, 112, n, n, d, 1.0f / std::sqrt(static_cast<float>(d)), &data.plain[0][base], d, &data.plain[1][base], d, 0, scores.data(), n);
    const auto rows = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) {
        float* row = &scores[static_cast<size_t>(i) * static_cast<size_t>(n)];
        float high = -HUGE_VALF, total = 0;
        for (int j = 0; j < n; ++j) high = std::max(high, row[j]);
        for (int j = 0; j < n; ++j) total += row[j] = std::exp(row[j] - high);
        for (int j = 0; j < n; ++j) row[j] /= total;
      }
    };
    std::thread half([&] { rows(0, n / 2); });
    rows(n / 2, n);
    half.join();
    cblas_sgemm(101, 111, 111, n, d, n, 1.0f, scores.data(), n, &data.plain[2][base], d, 0, &out[base], d);
  }
}
#endif

// The least budget whose stream plan still works on 128-row tiles.
uint64_t least_budget_of_128_rows(cqsa_context* context, const problem& p, operands& data) {
  uint64_t low = 1024, high = uint64_t{1} << 30;
  const auto good = [&](uint64_t bytes) {
    cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
    params.batch = 1; params.num_heads = params.num_kv_heads = heads;
    params.head_dim = params.head_dim_v = p.dim; params.seqlen_q = params.seqlen_k = p.seqlen;
    params.dtype_q = params.dtype_kv = p.dtype; params.schedule = CQSA_SCHEDULE_STREAM; params.max_host_bytes = bytes;
    cqsa_plan* plan = nullptr;
    if (cqsa_attention_plan_create(context, &params, &plan) != CQSA_OK) return false;
    cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
    demand(cqsa_plan_describe(plan, &info), "describe");
    cqsa_plan_destroy(plan);
    return info.tile_q >= 128;
  };
  (void)data;
  while (low + 1 < high) {
    const uint64_t middle = low + (high - low) / 2;
    (good(middle) ? high : low) = middle;
  }
  return high;
}

const char* verdict(bool good) { return good ? "met" : "MISSED"; }

// The worst case of each bar over all rows of the table.
struct bars {
  double least_share = 1, worst_half = 0, least_causal = HUGE_VAL, least_speedup = HUGE_VAL;
  double full_f32 = 0, full = 0;  // seconds of the rows that later rows are compared with

  void add(const problem& p, double seconds, double share) {
    if (p.dtype == CQSA_DTYPE_F32 && !p.causal) full_f32 = seconds, least_share = std::min(least_share, share);
    if (p.dtype != CQSA_DTYPE_F32 && !p.causal) worst_half = std::max(worst_half, seconds / full_f32);
    if (!p.causal) full = seconds;
    if (p.causal && p.seqlen == 8192) least_causal = std::min(least_causal, full / seconds);
  }

  void print(bool with_peer) const {
    std::printf("\n| bar | worst row | |\n|---|---|---|\n");
    std::printf("| f32 >= 55 %% of the FMA peak (goal 75 %%) | %.1f %% | %s |\n", 100 * least_share, verdict(least_share >= 0.55));
    std::printf("| f16, bf16 within 10 %% of f32 | %.2fx its time | %s |\n", worst_half, verdict(worst_half <= 1.10));
    std::printf("| causal >= 1.8x faster than full at 8192 | %.2fx | %s |\n", least_causal, verdict(least_causal >= 1.8));
    if (with_peer) std::printf("| >= 1.5x two GEMMs on OpenBLAS | %.2fx | %s |\n", least_speedup, verdict(least_speedup >= 1.5));
  }
};

bool print_rates(cqsa_context* context, double peak, int rounds) {
  std::printf("\n| type | D | N | causal | ms | GFLOP/s | %% of FMA peak | max error vs fp64 | two GEMMs, ms | speedup |\n|---|---|---|---|---|---|---|---|---|---|\n");
  bool all = true, with_peer = false;
  bars worst;
  for (const int64_t dim : {64, 128})
    for (const int64_t seqlen : {2048, 8192})
      for (const cqsa_dtype dtype : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
        for (const bool causal : {false, true}) {
          const problem p{seqlen, dim, dtype, causal};
          operands data(p);
          prepared run(context, p, data);
          std::vector<std::function<void()>> works{run.work()};
          double gemm_error = 0;
#ifdef CQSA_BENCH_BLAS
          std::vector<float> scores, out;
          const bool peer = !causal && dtype == CQSA_DTYPE_F32;
          if (peer) {
            scores.resize(static_cast<size_t>(seqlen * seqlen));
            out.resize(data.plain[0].size());
            works.push_back([&] { two_gemms(p, data, scores, out); });
          }
#else
          const bool peer = false;
#endif
          const std::vector<double> best = best_of(seqlen > 4096 ? std::max(1, rounds / 3) : rounds, works);
          const double error = sampled_error(p, data, [&](size_t i) { return data.result(p, i); });
#ifdef CQSA_BENCH_BLAS
          if (peer) gemm_error = sampled_error(p, data, [&](size_t i) { return out[i]; });
#endif
          const double bound = dtype == CQSA_DTYPE_F32 ? 1e-5 : dtype == CQSA_DTYPE_F16 ? 1e-3 : 8e-3;
          all &= error < bound && gemm_error < bound;
          const double rate = p.flops() / best[0];
          worst.add(p, best[0], rate / peak);
          if (peer) with_peer = true, worst.least_speedup = std::min(worst.least_speedup, best[1] / best[0]);
          std::printf("| %s | %lld | %lld | %s | %.1f | %.1f | %.1f %% | %.1e %s | ", name(dtype), (long long)dim, (long long)seqlen,
                      causal ? "yes" : "no", best[0] * 1e3, rate * 1e-9, 100 * rate / peak, error, error < bound ? "ok" : "WRONG");
          peer ? std::printf("%.1f | %.2fx |\n", best[1] * 1e3, best[1] / best[0]) : std::printf("| |\n");
          std::fflush(stdout);
        }
  worst.print(with_peer);
  return all;
}

bool print_schedules(cqsa_context* context, int rounds) {
  std::printf("\n| D | N | schedule | budget or peak, KiB | tile | ratio to direct | bar | |\n|---|---|---|---|---|---|---|---|\n");
  bool all = true;
  for (const int64_t dim : {64, 128}) {
    const problem p{8192, dim, CQSA_DTYPE_F32, false};
    operands data(p);
    prepared direct(context, p, data);
    const uint64_t budget = least_budget_of_128_rows(context, p, data);
    prepared stream(context, p, data, [&](cqsa_attention_params& q) { q.schedule = CQSA_SCHEDULE_STREAM; q.max_host_bytes = budget; });
    prepared cqs(context, p, data, [](cqsa_attention_params& q) { q.schedule = CQSA_SCHEDULE_CQS; q.cqs_c = 7; q.cqs_itr = 1; });
    const std::vector<double> best = best_of(rounds, {direct.work(), stream.work(), cqs.work()});
    const struct { const char* name; prepared* plan; double ratio, bar; } rows[] = {
        {"stream", &stream, best[1] / best[0], 1.10}, {"cqs c=7 itr=1", &cqs, best[2] / best[0], 1.15}};
    for (const auto& row : rows) {
      row.plan->run();
      const double error = sampled_error(p, data, [&](size_t i) { return data.result(p, i); });
      all &= error < 1e-5;
      const cqsa_plan_info info = row.plan->info();
      std::printf("| %lld | 8192 | %s | %.1f | %lldx%lld | %.3f | <= %.2f | %s, error %.1e |\n", (long long)dim, row.name,
                  (double)info.peak_host_bytes / 1024, (long long)info.tile_q, (long long)info.tile_k, row.ratio, row.bar,
                  verdict(row.ratio <= row.bar), error);
    }
  }
  return all;
}

void print_small(cqsa_context* context) {
  const problem p{1, 64, CQSA_DTYPE_F32, false};
  operands data(p);
  int64_t shape[4] = {1, heads, 1, 64};
  cqsa_tensor tensor[4];
  for (int t = 0; t < 4; ++t) tensor[t] = {data.raw[t].data(), CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, shape, nullptr, 0};
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tensor[0]; args.k = &tensor[1]; args.v = &tensor[2]; args.out = &tensor[3];
  const cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  constexpr int calls = 20000;
  double best = HUGE_VAL;
  for (int round = 0; round < 5; ++round)
    best = std::min(best, seconds_of([&] { for (int i = 0; i < calls; ++i) demand(cqsa_attention(context, &params, &args, nullptr), "one-shot"); }) / calls);
  std::printf("\none-shot call, B1 H8 seqlen 1 D64, existing context: %.2f us (bar 20 us: %s)\n", best * 1e6, verdict(best <= 20e-6));
}

// In a child process image the library would be loaded already; so a copy of the file is opened under another name.
void print_load(const char* copy) {
  if (copy == nullptr) return;
  void* handle = nullptr;
  const double took = seconds_of([&] { handle = dlopen(copy, RTLD_NOW | RTLD_LOCAL); });
  if (handle) std::printf("load by dlopen: %.2f ms (bar 5 ms: %s)\n", took * 1e3, verdict(took <= 5e-3));
  else std::fprintf(stderr, "%s\n", dlerror());
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const char* copy = argc > 1 + quick ? argv[1 + quick] : nullptr;
  print_load(copy);
  cqsa_context_params context_params = CQSA_CONTEXT_PARAMS_INIT;
  context_params.backend = "cpu";
  cqsa_context* context = nullptr;
  demand(cqsa_context_create(&context_params, &context), "context");
  const int threads = static_cast<int>(std::thread::hardware_concurrency());
  const double peak = fma_peak(threads, quick ? 0.5 : 2.0);
  std::printf("%s\n\nFMA peak, %d threads, %s: %.1f GFLOP/s\n", cqsa_build_info(), threads, fma_peak_isa(), peak * 1e-9);
#ifdef CQSA_BENCH_BLAS
  if (openblas_get_corename) std::printf("peer: OpenBLAS, core %s, %d threads\n", openblas_get_corename(), openblas_get_num_threads());
#endif
  bool good = print_rates(context, peak, quick ? 2 : 9);
  good &= print_schedules(context, quick ? 2 : 9);
  print_small(context);
  std::printf("\nFMA peak again: %.1f GFLOP/s\n", fma_peak(threads, 1.0) * 1e-9);
  cqsa_context_destroy(context);
  if (!good) std::printf("\nWRONG results above\n");
  return good ? 0 : 1;
}
