// SPDX-License-Identifier: Apache-2.0
// FP8 on the CPU: bytes per second of each way to quantize, against a copy of as many bytes by the same threads in the same run, and
// FLOP/s of the product against the FMA peak.
//   bench_cpu_fp8 [--threads N] [--size N: N x N elements] [--seconds S per row] [--gemm N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backends/cqsa_backend.h"
#include "backends/fp8_rules.h"
#include "fma_peak.h"
#include "src/thread_pool.h"

namespace {

struct options {
  int threads = cqsa::available_cores();
  int64_t size = 8192, gemm = 1024;
  double seconds = 0.5;
};

cqsa_status run_on_pool(void* user, int64_t tasks, void (*task)(void*, int64_t), void* data) {
  static_cast<cqsa::thread_pool*>(user)->run(tasks, task, data);
  return CQSA_OK;
}

// Pages that nobody else wrote to, on any boundary that matters.
struct memory {
  char* data;
  explicit memory(int64_t bytes) : data(static_cast<char*>(std::aligned_alloc(4096, size_t((bytes + 4095) / 4096 * 4096)))) { std::memset(data, 1, size_t(bytes)); }
  ~memory() { std::free(data); }
  memory(const memory&) = delete;
  memory& operator=(const memory&) = delete;
};

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct copying {
  char *from, *to;
  int64_t bytes, parts;
};

void copy_part(void* data, int64_t n) {
  const copying& c = *static_cast<copying*>(data);
  const int64_t each = c.bytes / c.parts;
  std::memcpy(c.to + n * each, c.from + n * each, size_t(each));
}

struct bench {
  options opt;
  cqsa::thread_pool pool{opt.threads};
  cqsa_exec exec{&pool, run_on_pool, nullptr, opt.threads};
  int64_t count = opt.size * opt.size;
  memory x{3 * count}, row{3 * count}, transposed{count}, scales{8 * count / 16 + 4096};
  cqsa_fp8_job job{};
  float one[2] = {0.25f, 0.25f}, amax = 0;
  alignas(64) char ring_memory[64 + 16 * 4];

  explicit bench(const options& o) : opt(o) {
    uint32_t seed = 1;
    auto* const to = reinterpret_cast<uint16_t*>(x.data);
    for (int64_t i = 0; i < count; ++i) seed = seed * 1664525u + 1013904223u, to[i] = uint16_t(0x3C00u + (seed >> 22) + (seed & 0x8000u));
  }

  void reset(int32_t source) {
    const int64_t n = opt.size;
    job = {};
    job.batch = 1, job.rows = job.columns = n;
    job.x = {x.data, CQSA_DTYPE_BF16, 0, {count, n, 1}};
    job.source = source;
    job.amax = &amax;
  }
  void add(cqsa_fp8_output& side, char* to, bool turned, int64_t block_rows, int64_t block_columns, char* scale_memory) {
    const int64_t n = opt.size, r = block_rows ? block_rows : n, c = block_columns ? block_columns : n;
    const cqsa_scale_grid grid{scale_memory, CQSA_DTYPE_F32, 0, {(n + c - 1) / c, 1}, (n + r - 1) / r, (n + c - 1) / c, {r, c}};
    side.codes = {to, CQSA_DTYPE_E4M3FN, 0, {n, turned ? 1 : n, turned ? n : 1}};
    side.scale = side.scale_inv = grid;
    side.scale.data = nullptr;
    if (job.source == CQSA_FP8_STATIC) side.scale_in = grid, side.scale_in.data = one;
    side.ratio = 1;
  }
  void quantize() {
    const cqsa_fp8_quantize_leaf leaf{sizeof(cqsa_fp8_quantize_leaf), 0, &job, 1, {}};
    if (cqsa_cpu_backend()->fp8_quantize(nullptr, &leaf, nullptr, 0, &exec, nullptr) != CQSA_OK) std::printf("failed\n");
  }
  // Copies and calls take turns, so that both see the same neighbours. Medians.
  void report(const char* name, int64_t bytes, const std::function<void()>& work) {
    copying c{x.data, row.data, bytes / 2, opt.threads};
    std::vector<double> copies, calls;
    work();
    for (double spent = 0; spent < opt.seconds || calls.size() < 5;) {
      copies.push_back(seconds_of([&] { pool.run(opt.threads, copy_part, &c); }));
      calls.push_back(seconds_of(work));
      spent += copies.back() + calls.back();
    }
    std::sort(copies.begin(), copies.end()), std::sort(calls.begin(), calls.end());
    const double copy = copies[copies.size() / 2], call = calls[calls.size() / 2];
    std::printf("%-44s %8.2f ms %7.2f GB/s, copy %7.2f GB/s: %5.1f %%, best/best %5.1f %%\n", name, 1e3 * call, double(bytes) / call * 1e-9, double(bytes) / copy * 1e-9,
                100 * copy / call, 100 * copies[0] / calls[0]);
  }
  void rows();
  void both_sides();
  void others();
  void gemm();
};

void bench::rows() {
  reset(CQSA_FP8_STATIC), add(job.row, row.data, false, 0, 0, nullptr);
  report("row-major, static, with amax", 3 * count, [&] { quantize(); });
  job.amax = nullptr;
  report("row-major, static", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_RING), add(job.row, row.data, false, 0, 0, nullptr);
  job.ring = {sizeof(cqsa_fp8_ring), 0, ring_memory, sizeof ring_memory, 16, CQSA_DTYPE_E4M3FN, 0, 0};
  const cqsa_fp8_ring_leaf begin{CQSA_FP8_RINGS_INIT, 0, &job.ring, 1, nullptr, 0, 4.0f, 0};
  cqsa_cpu_backend()->fp8_rings(nullptr, &begin, nullptr, nullptr);
  report("row-major, ring, with amax", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 0, 0, nullptr);
  report("row-major, current tensor (5 bytes)", 5 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 1, 0, scales.data);
  report("row-major, a scale for each row", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 1, 128, scales.data);
  report("row-major, 1x128", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 1, 32, scales.data);
  report("row-major, 1x32", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 128, 128, scales.data);
  report("row-major, 128x128", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 0, 1, scales.data);
  report("row-major, a scale for each column", 3 * count, [&] { quantize(); });
}

void bench::both_sides() {
  reset(CQSA_FP8_STATIC), add(job.transposed, transposed.data, true, 0, 0, nullptr);
  report("transposed, static, with amax", 3 * count, [&] { quantize(); });
  reset(CQSA_FP8_STATIC), add(job.row, row.data, false, 0, 0, nullptr), add(job.transposed, transposed.data, true, 0, 0, nullptr);
  report("dual, static, with amax", 4 * count, [&] { quantize(); });
  reset(CQSA_FP8_CURRENT), add(job.row, row.data, false, 1, 128, scales.data), add(job.transposed, transposed.data, true, 128, 1, scales.data + 4 * count / 16);
  report("dual, 1x128 and 128x1", 4 * count, [&] { quantize(); });
}

void bench::others() {
  const int64_t n = opt.size;
  const cqsa_fp8_transpose_leaf turn{n, n, reinterpret_cast<uint8_t*>(x.data), reinterpret_cast<uint8_t*>(transposed.data), {n, 1}, {1, n}};
  report("transpose", 2 * count, [&] { cqsa_cpu_backend()->fp8_transpose(nullptr, &turn, &exec, nullptr); });
  cqsa_fp8_dequantize_leaf leaf{};
  leaf.batch = 1, leaf.rows = leaf.columns = n;
  leaf.codes = {transposed.data, CQSA_DTYPE_E4M3FN, 0, {count, n, 1}};
  leaf.out = {row.data, CQSA_DTYPE_BF16, 0, {count, n, 1}};
  leaf.scale_inv = {one, CQSA_DTYPE_F32, 0, {1, 1}, 1, 1, {n, n}};
  report("dequantize to bf16", 3 * count, [&] { cqsa_cpu_backend()->fp8_dequantize(nullptr, &leaf, &exec, nullptr); });
}

void bench::gemm() {
  const int64_t n = opt.gemm;
  memory a(n * n), b(n * n), d(4 * n * n);
  for (int64_t i = 0; i < n * n; ++i) a.data[i] = char(i * 7 % 120), b.data[i] = char(i * 5 % 120);
  cqsa_fp8_gemm_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.batch = 1, leaf.m = leaf.n = leaf.k = n;
  leaf.a = {a.data, CQSA_DTYPE_E4M3FN, 0, {n * n, n, 1}}, leaf.b = {b.data, CQSA_DTYPE_E4M3FN, 0, {n * n, n, 1}};
  leaf.d = {d.data, CQSA_DTYPE_BF16, 0, {n * n, n, 1}};
  leaf.alpha = 1;
  const cqsa_fp8_gemm_impl& impl = cqsa_cpu_backend()->fp8_gemm[0];
  const uint64_t bytes = impl.workspace(&leaf, opt.threads);
  memory workspace(int64_t(bytes) + 64);
  cqsa_cpu_backend()->fp8_workspace_init(nullptr, workspace.data, bytes, nullptr);
  std::vector<double> rates, peaks;
  for (int i = 0; i < 7; ++i) {
    peaks.push_back(fma_peak(opt.threads, 0.1));
    const double s = seconds_of([&] { if (impl.launch(nullptr, &leaf, workspace.data, bytes, &exec, nullptr) != CQSA_OK) std::printf("failed\n"); });
    rates.push_back(2.0 * double(n) * double(n) * double(n) / s);
  }
  std::sort(rates.begin(), rates.end()), std::sort(peaks.begin(), peaks.end());
  std::printf("%s %lld^3: %.1f GFLOP/s of a peak of %.1f (%s): %.1f %%, best/best %.1f %%\n", impl.name, static_cast<long long>(n), rates[3] * 1e-9, peaks[3] * 1e-9, fma_peak_isa(),
              100 * rates[3] / peaks[3], 100 * rates[6] / peaks[6]);
}

}  // namespace

int main(int argc, char** argv) {
  options opt;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--threads") opt.threads = std::atoi(argv[i + 1]);
    else if (name == "--size") opt.size = std::atoll(argv[i + 1]);
    else if (name == "--gemm") opt.gemm = std::atoll(argv[i + 1]);
    else if (name == "--seconds") opt.seconds = std::atof(argv[i + 1]);
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  bench b(opt);
  std::printf("%lld x %lld bf16 to e4m3fn, %d threads\n", static_cast<long long>(opt.size), static_cast<long long>(opt.size), opt.threads);
  b.rows();
  b.both_sides();
  b.others();
  b.gemm();
  return 0;
}
