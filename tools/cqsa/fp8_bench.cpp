// SPDX-License-Identifier: Apache-2.0
#include "fp8_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "elements.h"
#include "fp8_array.h"
#include "fp8_model.h"
#include "fp8_parity.h"
#include "interrupt.h"
#include "library.h"
#include "machine.h"
#include "options.h"
#include "parallel.h"
#include "problem.h"
#include "problem_data.h"
#include "sizes.h"

namespace tool {
namespace {

using clock = std::chrono::steady_clock;

constexpr double kSeriesSeconds = 0.03;
constexpr int64_t kCopyGrain = 1 << 20;

// A way to quantize, in the words of a parity problem.
struct kind {
  const char* name;
  const char* keys;
};
constexpr kind kKinds[] = {
    {"row, ring", "source=ring"},
    {"row, static", "source=static"},
    {"transposed, ring", "source=ring side=transposed"},
    {"dual, ring", "source=ring side=dual"},
    {"row, current", ""},
    {"dual, current", "side=dual"},
    {"row, a scale for each row", "granularity=row"},
    {"row, 1x128", "granularity=1x128"},
    {"dual, 1x128 and 128x1", "granularity=1x128 granularity_t=128x1 side=dual"},
    {"row, 128x128", "granularity=128x128"},
    {"row, mx", "granularity=mx scales=e8m0"},
};

class fp8_bench {
 public:
  explicit fp8_bench(const fp8_bench_options& options)
      : options_(options), threads_(threads_or_all(static_cast<int>(parse_count(options.threads)))),
        context_(make_context(options.backend, threads_)) {
    const std::string backend = cqsa_context_backend(context_.get());
    if (!is_host_backend(backend)) device_ = open_device_memory(backend);
    options.json_lines ? print(machine_json(context_.get())) : fmt::print("{}\n", machine_text(context_.get()));
  }

  int run() {
    if (!options_.json_lines) fmt::print("{:<28} {:<6} {:>7} {:>7} {:>11} {:>9} {:>11} {:>8}\n", "quantize", "type", "rows", "cols", "time", "GB/s", "copy GB/s", "of copy");
    for (const std::string& dtype : split(options_.dtype, ','))
      for (const std::string& rows : split(options_.rows, ','))
        for (const std::string& columns : split(options_.columns, ',')) quantize(dtype, parse_count(rows), parse_count(columns));
    if (options_.sizes != "0") products();
    return failures_ ? kExitCheckFailed : kExitOk;
  }

 private:
  static void print(const nlohmann::ordered_json& json) {
    fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    std::fflush(stdout);
  }

  // Median of several series; work is queued on a device.
  double time(const std::function<void()>& once) const {
    const auto series = [&](int count) {
      const auto begin = clock::now();
      for (int i = 0; i < count; ++i) once();
      if (device_) device_->wait();
      if (interrupted()) throw interrupted_error();
      return std::chrono::duration<double>(clock::now() - begin).count() / count;
    };
    series(1);
    const int count = static_cast<int>(std::clamp(kSeriesSeconds / std::max(series(1), 1e-9), 1.0, 1000.0));
    std::vector<double> seconds;
    for (int i = 0; i < options_.runs; ++i) seconds.push_back(series(count));
    std::nth_element(seconds.begin(), seconds.begin() + options_.runs / 2, seconds.end());
    return seconds[static_cast<std::size_t>(options_.runs / 2)];
  }

  // Seconds of a copy that reads and writes so many bytes in all, by all threads of the context or by the device.
  double copy(int64_t bytes) {
    const std::vector<int64_t> shape = {std::max<int64_t>(bytes / 2, 1)};
    fp8_array from(device_.get(), CQSA_DTYPE_U8, shape), to(device_.get(), CQSA_DTYPE_U8, shape);
    auto* const source = static_cast<std::byte*>(from.address());
    auto* const target = static_cast<std::byte*>(to.address());
    if (device_) return time([&] { device_->copy(target, source, static_cast<uint64_t>(bytes / 2)); });
    return time([&] {
      in_blocks(bytes / 2, std::max(kCopyGrain, bytes / 2 / threads_ + 1), threads_,
                [&](int64_t begin, int64_t end) { std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin)); });
    });
  }

  std::string checked(const std::string& op, const fp8_line& line) {
    try {
      return op == "fp8-gemm" ? check_fp8_gemm(context_.get(), device_.get(), line, threads_).failure : check_fp8_quantize(context_.get(), device_.get(), line).failure;
    } catch (const library_error& error) {
      return error.what();
    }
  }

  void quantize(const std::string& dtype, int64_t rows, int64_t columns) {
    for (const kind& one : kKinds) {
      const int64_t few = std::min<int64_t>(rows, 256);
      const fp8_line line(kFp8QuantizeKeys, fmt::format("rows={} cols={} dtype={} seed=1 {}", few, columns, dtype, one.keys));
      const std::string failure = checked("fp8-quantize", line);
      if (!failure.empty()) {
        fail(one.name, failure, fmt::format("cqsa parity --op fp8-quantize --problem '{}'", line.text()));
        continue;
      }
      job work(context_.get(), device_.get(), fp8_line(kFp8QuantizeKeys, fmt::format("dtype={} {}", dtype, one.keys)), rows, columns);
      const double seconds = time([&] { work.launch(); }), of_copy = copy(work.moved());
      const double rate = static_cast<double>(work.moved()) / seconds, peer = static_cast<double>(work.moved()) / of_copy;
      if (options_.json_lines)
        print({{"record", "fp8_quantize"}, {"kind", one.name}, {"dtype", dtype}, {"rows", rows}, {"cols", columns}, {"threads", threads_},
               {"seconds", seconds},
               {"bytes", work.moved()}, {"gb_per_s", rate * 1e-9}, {"copy_gb_per_s", peer * 1e-9}, {"share_of_copy", rate / peer}, {"pass", true}});
      else
        fmt::print("{:<28} {:<6} {:>7} {:>7} {:>11} {:>9.2f} {:>11.2f} {:>7.1f} %\n", one.name, dtype, rows, columns, seconds_text(seconds), rate * 1e-9, peer * 1e-9,
                   100 * rate / peer);
      std::fflush(stdout);
    }
  }

  void fail(const std::string& what, const std::string& why, const std::string& reproduce) {
    ++failures_;
    if (options_.json_lines)
      print({{"record", "failure"}, {"kind", what}, {"failure", why}, {"reproduce", reproduce}, {"pass", false}});
    else
      fmt::print("{:<28} FAIL: {}\n  reproduce: {}\n", what, why, reproduce);
  }

  // One quantization with all it needs, to be launched again and again.
  class job {
   public:
    job(cqsa_context* context, device_memory* device, const fp8_line& line, int64_t rows, int64_t columns)
        : context_(context), device_(device), is_row_(line["side"] != "transposed"), is_turned_(line["side"] != "row"),
          x_(device, dtype_by_name(line["dtype"]), {rows, columns}), amax_(device, CQSA_DTYPE_F32, {}), rows_(rows), columns_(columns) {
      const random_buffer random(1);
      for (int64_t n = 0, all = rows * columns; n < all; ++n) x_.set(n, random.unit(static_cast<uint64_t>(n % 65536)));
      x_.upload();
      args_.x = x_.view(), args_.amax = amax_.view();
      args_.source = line["source"] == "ring" ? CQSA_FP8_RING : line["source"] == "static" ? CQSA_FP8_STATIC : CQSA_FP8_CURRENT;
      if (is_row_) bind(args_.row, line, line["granularity"], 0);
      if (is_turned_) bind(args_.transposed, line, line["granularity_t"].empty() ? line["granularity"] : line["granularity_t"], 1);
      if (args_.source == CQSA_FP8_RING) make_ring();
      const cqsa_fp8_quantize_args* list[] = {&args_};
      uint64_t bytes = 0;
      require(cqsa_fp8_quantize_workspace(context, list, 1, &bytes));
      workspace_ = fp8_workspace(context, device, bytes);
      args_.workspace = workspace_.address(), args_.workspace_bytes = bytes;
    }

    void launch() { require(cqsa_fp8_quantize(context_, &args_, device_ ? device_->stream() : nullptr)); }
    int64_t moved() const { return rows_ * columns_ * (x_.element_bytes() + is_row_ + is_turned_); }

   private:
    void bind(cqsa_fp8_side& to, const fp8_line& line, const std::string& granularity, int n) {
      const fp8_block block = fp8_block_by_name(granularity);
      const int64_t down = block.down(rows_), across = block.across(columns_);
      const bool bytes = line["scales"] == "e8m0";
      codes_[n] = fp8_array(device_, CQSA_DTYPE_E4M3FN, n ? std::vector<int64_t>{columns_, rows_} : std::vector<int64_t>{rows_, columns_});
      scale_inv_[n] = fp8_array(device_, bytes ? CQSA_DTYPE_E8M0FNU : CQSA_DTYPE_F32, {down, across});
      to.out = codes_[n].view(), to.scale_inv = scale_inv_[n].view();
      to.block[0] = block.rows, to.block[1] = block.columns;
      args_.flags |= bytes ? static_cast<uint32_t>(CQSA_FP8_POW2) : 0u;
      if (args_.source != CQSA_FP8_STATIC) return;
      scale_in_[n] = fp8_array(device_, CQSA_DTYPE_F32, {1, 1});
      scale_in_[n].set(0, 100), scale_in_[n].upload();
      to.scale_in = scale_in_[n].view();
    }

    void make_ring() {
      ring_.hist_len = 16, ring_.format = CQSA_DTYPE_E4M3FN;
      require(cqsa_fp8_ring_bytes(&ring_, &ring_.bytes));
      memory_ = fp8_array(device_, CQSA_DTYPE_U8, {static_cast<int64_t>(ring_.bytes) + CQSA_WORKSPACE_ALIGNMENT});
      const auto start = reinterpret_cast<uintptr_t>(memory_.address());
      ring_.state = reinterpret_cast<void*>((start + CQSA_WORKSPACE_ALIGNMENT - 1) / CQSA_WORKSPACE_ALIGNMENT * CQSA_WORKSPACE_ALIGNMENT);
      require(cqsa_fp8_ring_init(context_, &ring_, 1, device_ ? device_->stream() : nullptr));
      args_.ring = &ring_;
    }

    cqsa_context* context_;
    device_memory* device_;
    bool is_row_, is_turned_;
    fp8_array x_, amax_, codes_[2], scale_inv_[2], scale_in_[2], memory_;
    int64_t rows_, columns_;
    cqsa_fp8_ring ring_ = CQSA_FP8_RING_INIT;
    cqsa_fp8_quantize_args args_ = CQSA_FP8_QUANTIZE_ARGS_INIT;
    fp8_workspace workspace_;
  };

  void products() {
    static constexpr kind scales[] = {{"tensor", ""}, {"row x row", "scale_a=row scale_b=row"}, {"1x128 x 128x128", "scale_a=1x128 scale_b=128x128"}};
    if (!options_.json_lines) fmt::print("\n{:<28} {:>7} {:<24} {:>11} {:>12}\n", "product, bf16 result", "m=n=k", "implementation", "time", "GFLOP/s");
    for (const std::string& size : split(options_.sizes, ','))
      for (const kind& one : scales) product(one, parse_count(size));
  }

  void product(const kind& one, int64_t size) {
    const fp8_line line(kFp8GemmKeys, fmt::format("m={0} n={0} k={1} out=bf16 seed=1 {2}", std::min<int64_t>(size, 256), size, one.keys));
    const std::string failure = checked("fp8-gemm", line);
    if (!failure.empty()) return fail(one.name, failure, fmt::format("cqsa parity --op fp8-gemm --problem '{}'", line.text()));
    fp8_array a = factor(size), b = factor(size), d(device_.get(), CQSA_DTYPE_BF16, {size, size});
    const fp8_block block_a = fp8_block_by_name(line["scale_a"]), block_b = fp8_block_by_name(line["scale_b"]);
    fp8_array scale_a = ones(block_a, size), scale_b = ones(block_b, size);
    cqsa_fp8_gemm_args args = CQSA_FP8_GEMM_ARGS_INIT;
    args.a = a.view(), args.b = b.view(), args.d = d.view(), args.scale_inv_a = scale_a.view(), args.scale_inv_b = scale_b.view();
    args.block_a[0] = block_a.rows, args.block_a[1] = block_a.columns, args.block_b[0] = block_b.rows, args.block_b[1] = block_b.columns;
    uint64_t bytes = 0;
    require(cqsa_fp8_gemm_workspace(context_.get(), &args, &bytes));
    const fp8_workspace workspace(context_.get(), device_.get(), bytes);
    args.workspace = workspace.address(), args.workspace_bytes = bytes;
    const std::string name = implementation(args);
    const double seconds = time([&] { require(cqsa_fp8_gemm(context_.get(), &args, device_ ? device_->stream() : nullptr)); });
    const double rate = 2.0 * std::pow(static_cast<double>(size), 3) / seconds;
    if (options_.json_lines)
      print({{"record", "fp8_gemm"}, {"scales", one.name}, {"size", size}, {"implementation", name}, {"threads", threads_}, {"seconds", seconds},
             {"gflops", rate * 1e-9}, {"pass", true}});
    else
      fmt::print("{:<28} {:>7} {:<24} {:>11} {:>12.1f}\n", one.name, size, name, seconds_text(seconds), rate * 1e-9);
    std::fflush(stdout);
  }

  std::string implementation(const cqsa_fp8_gemm_args& args) const {
    char text[128] = "";
    uint64_t length = 0;
    require(cqsa_fp8_gemm_explain(context_.get(), &args, text, sizeof text, &length));
    const std::string first = std::string(text).substr(0, std::string(text).find('\n'));
    return first.rfind("impl=", 0) == 0 ? first.substr(5) : first;
  }

  fp8_array factor(int64_t size) {
    fp8_array out(device_.get(), CQSA_DTYPE_E4M3FN, {size, size});
    const random_buffer random(3);
    for (int64_t n = 0; n < size * size; ++n) {
      const uint64_t bits = random.bits(static_cast<uint64_t>(n));
      *out.at(n) = static_cast<std::byte>(bits % 0x48 | (bits >> 32 & 0x80));
    }
    out.upload();
    return out;
  }

  fp8_array ones(fp8_block block, int64_t size) {
    fp8_array out(device_.get(), CQSA_DTYPE_F32, {block.down(size), block.across(size)});
    for (int64_t n = 0; n < out.count(); ++n) out.set(n, 1);
    out.upload();
    return out;
  }

  const fp8_bench_options& options_;
  int threads_;
  context_ptr context_;
  std::unique_ptr<device_memory> device_;
  int failures_ = 0;
};

}  // namespace

int run_fp8_bench(const fp8_bench_options& options) {
  if (options.runs < 1) throw std::runtime_error("--runs: a number of at least 1 is wanted");
  catch_signals();
  return fp8_bench(options).run();
}

}  // namespace tool
