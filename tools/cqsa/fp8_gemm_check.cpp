// SPDX-License-Identifier: Apache-2.0
// A problem of `cqsa parity --op fp8-gemm`: operands, the call, and sums in fp64 of the decoded operands.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "elements.h"
#include "fp8_array.h"
#include "fp8_model.h"
#include "fp8_parity.h"
#include "library.h"
#include "parallel.h"
#include "problem_data.h"

namespace tool {
namespace {

// Relative RMS error of f32 results: of sums in f32, of matrix units with promotion, and of those alone.
constexpr double kHostError = 3e-6, kPromotedError = 2e-4, kFastError = 1e-2;
constexpr double kCodeScale = 4;  // of results that are codes; some of them saturate
constexpr double kMostMultiplications = 1e9;  // for all rows; else a sample

// A matrix of codes and its scales, decoded.
struct factor {
  fp8_array codes, scale_inv;
  fp8_block block;
  std::vector<double> values;  // [batch][row][k], scaled
  int64_t batch = 1, rows = 0, depth = 0;

  const double* row(int64_t item, int64_t r) const { return values.data() + ((batch == 1 ? 0 : item) * rows + r) * depth; }
};

class gemm_problem {
 public:
  gemm_problem(cqsa_context* context, device_memory* device, const fp8_line& line, int threads)
      : context_(context), device_(device), line_(line), threads_(threads_or_all(threads)), m_(line.number("m", 0, 1 << 20)), n_(line.number("n", 0, 1 << 20)),
        k_(line.number("k", 0, 1 << 24)), batch_(line.number("batch", 0, 1 << 16)), seed_(static_cast<uint64_t>(line.number("seed", 0, int64_t{1} << 40))) {
    make(a_, "a", m_, batch_, 1);
    make(b_, "b", n_, batch_ && line.truth("batch_b") ? batch_ : batch_ ? 1 : 0, 2);
    format_ = line["out"] == "f32" || line["out"] == "bf16" || line["out"] == "f16" ? nullptr : &fp8_format_by_name(line["out"]);
    d_ = fp8_array(device, format_ ? format_->dtype : dtype_by_name(line["out"]), shape(m_, n_, batch_));
    if (format_) d_scale_ = fp8_array(device, CQSA_DTYPE_F32, {1});
    if (line.truth("amax")) d_amax_ = fp8_array(device, CQSA_DTYPE_F32, {1});
    if (line["bias"] != "none") fill(bias_, dtype_by_name(line["bias"]), {n_}, 5);
    if (line.real("beta") != 0) fill(c_, CQSA_DTYPE_BF16, shape(m_, n_, batch_), 6);
  }

  fp8_verdict run() {
    cqsa_fp8_gemm_args args = CQSA_FP8_GEMM_ARGS_INIT;
    bind(args);
    fp8_verdict verdict;
    verdict.implementation = implementation(args);
    execute(args);
    verdict.failure = compare(verdict.error);
    return verdict;
  }

 private:
  static std::vector<int64_t> shape(int64_t rows, int64_t columns, int64_t batch) {
    return batch ? std::vector<int64_t>{batch, rows, columns} : std::vector<int64_t>{rows, columns};
  }

  void make(factor& to, const char* which, int64_t rows, int64_t batch, uint64_t salt) {
    const std::string name = which;
    const fp8_format& format = fp8_format_by_name(line_["format_" + name]);
    to.block = fp8_block_by_name(line_["scale_" + name]);
    to.batch = std::max<int64_t>(batch, 1), to.rows = rows, to.depth = k_;
    to.codes = fp8_array(device_, format.dtype, shape(rows, k_, batch), fp8_layout_by_name(line_["layout_" + name]));
    const int64_t down = to.block.down(rows), across = to.block.across(k_);
    const bool one = to.block.rows == 0 && to.block.columns == 0;
    to.scale_inv = fp8_array(device_, CQSA_DTYPE_F32, one ? std::vector<int64_t>{} : shape(down, across, batch));
    const random_buffer random(seed_ * 16 + salt);
    for (int64_t n = 0; n < to.scale_inv.count(); ++n) to.scale_inv.set(n, 0.02 * (1.5 + random.unit(static_cast<uint64_t>(n))));
    to.values.resize(static_cast<std::size_t>(to.batch * rows * k_));
    for (int64_t n = 0; n < static_cast<int64_t>(to.values.size()); ++n) {
      const auto at = static_cast<uint64_t>(n) * 2 + (uint64_t{1} << 40);
      const unsigned code = fp8_encode(format, 48 * (random.unit(at) + random.unit(at + 1)), true);
      *to.codes.at(n) = static_cast<std::byte>(code);
      const int64_t item = n / std::max<int64_t>(rows * k_, 1), r = n / k_ % rows, c = n % k_;
      const int64_t block = one ? 0 : (item * down + (to.block.rows ? r / to.block.rows : 0)) * across + (to.block.columns ? c / to.block.columns : 0);
      to.values[static_cast<std::size_t>(n)] = fp8_decode(format, code) * to.scale_inv.get(block);
    }
    to.codes.upload(), to.scale_inv.upload();
  }

  void fill(fp8_array& to, cqsa_dtype dtype, std::vector<int64_t> shape, uint64_t salt) {
    const random_buffer random(seed_ * 16 + salt);
    to = fp8_array(device_, dtype, std::move(shape));
    for (int64_t n = 0; n < to.count(); ++n) to.set(n, random.unit(static_cast<uint64_t>(n)));
    to.upload();
  }

  void bind(cqsa_fp8_gemm_args& args) {
    args.a = a_.codes.view(), args.b = b_.codes.view(), args.scale_inv_a = a_.scale_inv.view(), args.scale_inv_b = b_.scale_inv.view();
    args.block_a[0] = a_.block.rows, args.block_a[1] = a_.block.columns, args.block_b[0] = b_.block.rows, args.block_b[1] = b_.block.columns;
    args.c = c_.view(), args.bias = bias_.view(), args.d = d_.view(), args.d_scale = d_scale_.view(), args.d_amax = d_amax_.view();
    args.alpha = line_.real("alpha"), args.beta = line_.real("beta");
    args.accumulate = line_["accumulate"] == "fast" ? CQSA_FP8_FAST : CQSA_FP8_PROMOTE_128;
    const std::string& provider = line_["provider"];
    args.provider = provider == "own" ? CQSA_FP8_PROVIDER_OWN : provider == "vendor" ? CQSA_FP8_PROVIDER_VENDOR : CQSA_FP8_PROVIDER_AUTO;
    if (d_scale_.present()) d_scale_.set(0, kCodeScale);
    for (fp8_array* array : {&d_, &d_scale_, &d_amax_}) array->upload();
  }

  std::string implementation(const cqsa_fp8_gemm_args& args) const {
    char text[256] = "";
    uint64_t length = 0;
    require(cqsa_fp8_gemm_explain(context_, &args, text, sizeof text, &length));
    const std::string first = std::string(text).substr(0, std::string(text).find('\n'));
    return first.rfind("impl=", 0) == 0 ? first.substr(5) : first;
  }

  void execute(cqsa_fp8_gemm_args& args) {
    uint64_t bytes = 0;
    require(cqsa_fp8_gemm_workspace(context_, &args, &bytes));
    const fp8_workspace workspace(context_, device_, bytes);
    args.workspace = workspace.address(), args.workspace_bytes = bytes;
    require(cqsa_fp8_gemm(context_, &args, device_ ? device_->stream() : nullptr));
    if (device_) device_->wait();
    d_.download(), d_amax_.download();
  }

  // ---- the comparison ----------------------------------------------------------------------------------------------------

  // Value and sum of magnitudes of each result of a row.
  struct exact {
    double value = 0, magnitude = 0;
  };
  exact exact_of(int64_t item, int64_t r, int64_t c) {
    exact out;
    const double *a = a_.row(item, r), *b = b_.row(item, c);
    for (int64_t k = 0; k < k_; ++k) out.value += a[k] * b[k], out.magnitude += std::fabs(a[k] * b[k]);
    const double alpha = line_.real("alpha");
    out.value *= alpha, out.magnitude *= std::fabs(alpha);
    if (c_.present()) out.value += line_.real("beta") * c_.get((item * m_ + r) * n_ + c);
    if (bias_.present()) out.value += bias_.get(c);
    return out;
  }

  double allowed() const {
    return line_["accumulate"] == "fast" && device_ ? kFastError : device_ ? kPromotedError : kHostError;
  }

  std::string compare(double& error) {
    if (!d_.untouched_around()) return "bytes outside of the result were written";
    const int64_t items = std::max<int64_t>(batch_, 1), all = items * m_;
    const double work = static_cast<double>(all) * static_cast<double>(n_) * static_cast<double>(std::max<int64_t>(k_, 1));
    const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(work / kMostMultiplications));
    const int64_t sampled = (all + step - 1) / step;
    std::vector<std::string> failures(static_cast<std::size_t>(sampled));
    std::vector<double> off(failures.size()), size(failures.size()), most(failures.size());
    in_parallel(failures.size(), threads_, [&](std::size_t i) {
      failures[i] = compare_row(static_cast<int64_t>(i) * step, off[i], size[i], most[i]);
    });
    double total = 0, wanted = 0, largest = 0;
    for (std::size_t i = 0; i < failures.size(); ++i) {
      if (!failures[i].empty()) return failures[i];
      total += off[i], wanted += size[i], largest = std::max(largest, most[i]);
    }
    error = wanted > 0 ? std::sqrt(total / wanted) : 0;
    const double rounding = format_ ? 0.08 : line_["out"] == "bf16" ? 3e-3 : line_["out"] == "f16" ? 4e-4 : 0;
    if (!(error <= allowed() + rounding)) return fmt::format("the relative RMS error is {:.2e}, allowed {:.2e}", error, allowed() + rounding);
    if (!d_amax_.present() || sampled != all || std::fabs(d_amax_.get(0) - largest) <= 1e-3 * largest) return "";
    return fmt::format("amax is {}, wanted {}", d_amax_.get(0), largest);
  }

  std::string compare_row(int64_t row, double& off, double& size, double& most) {
    const int64_t item = row / std::max<int64_t>(m_, 1), r = row % std::max<int64_t>(m_, 1);
    for (int64_t c = 0; c < n_; ++c) {
      exact wanted = exact_of(item, r, c);
      most = std::max(most, std::fabs(wanted.value));
      double got = 0, unit = 0;
      if (format_) {
        const double largest = format_->largest / kCodeScale;
        wanted.value = std::clamp(wanted.value, -largest, largest);
        got = fp8_decode(*format_, static_cast<unsigned>(*d_.at(row * n_ + c))) / kCodeScale;
        unit = std::max(std::fabs(wanted.value) * std::ldexp(1.0, -format_->mantissa_bits - 1),
                        std::ldexp(1.0, -format_->bias - format_->mantissa_bits) / kCodeScale);
      } else {
        got = d_.get(row * n_ + c);
        unit = ulp(dtype_by_name(line_["out"]), std::fabs(wanted.value));
      }
      const double distance = std::fabs(got - wanted.value), bound = unit + 16 * allowed() * wanted.magnitude + 1e-6 * std::fabs(wanted.value);
      if (!(distance <= bound)) return fmt::format("element [{}, {}, {}] is {}, wanted {} (allowed {:.2e})", item, r, c, got, wanted.value, bound);
      off += distance * distance, size += wanted.value * wanted.value;
    }
    return "";
  }

  cqsa_context* context_;
  device_memory* device_;
  const fp8_line& line_;
  int threads_;
  int64_t m_, n_, k_, batch_;
  uint64_t seed_;
  factor a_, b_;
  fp8_array c_, bias_, d_, d_scale_, d_amax_;
  const fp8_format* format_ = nullptr;
};

}  // namespace

fp8_verdict check_fp8_gemm(cqsa_context* context, device_memory* device, const fp8_line& line, int threads) {
  return gemm_problem(context, device, line, threads).run();
}

}  // namespace tool
