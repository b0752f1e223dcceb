// SPDX-License-Identifier: Apache-2.0
// cqsa quantize: a .safetensors file with its matrices in FP8. Works from mapped file to mapped file, some rows at a time.
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "array.h"
#include "fp8_model.h"
#include "interrupt.h"
#include "library.h"
#include "mapped_file.h"
#include "options.h"
#include "safetensors.h"
#include "sizes.h"

namespace tool {
namespace {

constexpr char kScales[] = ".scale_inv";
constexpr int64_t kBandBytes = 64 << 20;  // of input at a time
constexpr int64_t kBandRows = 128;        // bands begin at multiples of it, which those of all blocks are

struct quantize_options {
  std::string input, output, format = "e4m3fn", granularity = "tensor";
  std::vector<std::string> include, exclude;
  int32_t threads = 0;
  bool pow2 = false, check = false, json = false, quiet = false;
};

bool matches(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& p) { return fnmatch(p.c_str(), name.c_str(), 0) == 0; });
}

// What becomes of one tensor, and how it went.
struct task {
  file_array in;
  bool quantized = false;
  int64_t out = 0, scales = 0;  // offsets in the output's data
  double error = 0;             // with --check: relative RMS
  std::string failure;
};

class quantizer {
 public:
  explicit quantizer(const quantize_options& options)
      : options_(options), format_(fp8_format_by_name(options.format)), block_(fp8_block_by_name(options.granularity)),
        is_mx_(options.granularity == "mx"), file_(options.input), context_(make_context("cpu", options.threads)) {
    if (block_.rows > 1 && kBandRows % block_.rows != 0)
      throw std::runtime_error(fmt::format("--granularity {}: rows of a block that divide {} are wanted", options.granularity, kBandRows));
    rule_.format = &format_;
    rule_.pow2 = options.pow2 || is_mx_;
    const std::vector<file_array> arrays = read_safetensors(file_.bytes(), options.input);
    for (const file_array& array : arrays) note_scales(array);
    for (const file_array& array : arrays) plan(array);
    if (std::none_of(tasks_.begin(), tasks_.end(), [](const task& t) { return t.quantized; }))
      throw std::runtime_error(fmt::format("{}: none of its {} tensors is a matrix of f32, f16 or bf16 with a name that is asked for", options.input, tasks_.size()));
  }

  int run() {
    std::map<std::string, std::string> metadata = safetensors_metadata(file_.bytes(), options_.input);
    metadata["quantization"] = fmt::format("{} {}{}", options_.format, options_.granularity, rule_.pow2 ? " pow2" : "");
    const std::string header = safetensors_header(arrays_, metadata);
    output_file out(options_.output, header.size() + static_cast<std::size_t>(end_), output_mode::temporary);
    out.reserve();
    std::memcpy(out.bytes().data(), header.data(), header.size());
    for (task& one : tasks_) {
      one.quantized ? quantize(one, out, header.size()) : copy(one, out, header.size());
      if (interrupted()) throw interrupted_error();
      report(one);
    }
    file_.require_unchanged();
    out.commit();
    return summary();
  }

 private:
  void plan(const file_array& array) {
    task one{array, is_wanted(array), end_, 0, 0, ""};
    if (one.quantized) {
      arrays_.push_back({array.name, CQSA_DTYPE_NONE, array.shape, type_by_safetensors(format_.safetensors)});
      end_ += array.shape[0] * array.shape[1];
      one.scales = end_;
      const std::vector<int64_t> grid = grid_of(array);
      arrays_.push_back({array.name + kScales, CQSA_DTYPE_NONE, grid, type_by_safetensors(is_mx_ ? "F8_E8M0" : "F32")});
      end_ += grid[0] * grid[1] * (is_mx_ ? 1 : 4);
    } else {
      arrays_.push_back({array.name, CQSA_DTYPE_NONE, array.shape, array.type});
      end_ += byte_count(array.shape, array.type->bytes, array.name);
    }
    tasks_.push_back(one);
  }

  // What is in FP8 already keeps the numbers of its scales.
  void note_scales(const file_array& array) {
    if (std::string_view(array.type->safetensors).starts_with("F8_")) scales_.insert(array.name + kScales);
  }

  bool is_wanted(const file_array& array) const {
    if (scales_.contains(array.name)) return false;
    const cqsa_dtype type = array.type->dtype;
    const bool is_float = type == CQSA_DTYPE_F32 || type == CQSA_DTYPE_F16 || type == CQSA_DTYPE_BF16;
    const bool is_matrix = array.shape.size() == 2 && array.shape[0] > 0 && array.shape[1] > 0;
    return is_float && is_matrix && (options_.include.empty() || matches(options_.include, array.name)) && !matches(options_.exclude, array.name);
  }

  std::vector<int64_t> grid_of(const file_array& array) const { return {block_.down(array.shape[0]), block_.across(array.shape[1])}; }

  void copy(const task& one, output_file& out, std::size_t header) const {
    const auto bytes = static_cast<std::size_t>(byte_count(one.in.shape, one.in.type->bytes, one.in.name));
    for (std::size_t at = 0; at < bytes; at += kBandBytes) {
      std::memcpy(out.bytes().data() + header + one.out + at, one.in.data + at, std::min<std::size_t>(kBandBytes, bytes - at));
      drop(out);
    }
  }

  void drop(const output_file& out) const {
    file_.drop_pages();
    out.drop_pages();
  }

  // ---- one matrix, in bands of rows ----------------------------------------------------------------------------------------

  struct band {
    int64_t first = 0, rows = 0;
  };
  std::vector<band> bands_of(const file_array& array) const {
    const int64_t row_bytes = array.shape[1] * array.type->bytes;
    const int64_t most = std::max<int64_t>(kBandBytes / std::max<int64_t>(row_bytes, 1) / kBandRows, 1) * kBandRows;
    std::vector<band> bands;
    for (int64_t first = 0; first < array.shape[0]; first += most) bands.push_back({first, std::min(most, array.shape[0] - first)});
    return bands;
  }

  void quantize(task& one, output_file& out, std::size_t header) {
    const int64_t columns = one.in.shape[1];
    const std::vector<int64_t> grid = grid_of(one.in);
    const std::vector<band> bands = bands_of(one.in);
    const bool joins_bands = block_.rows == 0 && bands.size() > 1;
    std::vector<float> scales(joins_bands ? static_cast<std::size_t>(grid[1]) : 0);
    if (joins_bands) scales = scales_of_all(one, bands, grid[1], out);
    std::byte* const codes = out.bytes().data() + header + one.out;
    std::byte* const inverse = out.bytes().data() + header + one.scales;
    totals sum;
    for (const band& part : bands) {
      const int64_t above = block_.rows == 0 ? 0 : part.first / block_.rows, down = block_.down(part.rows);
      std::vector<float> scale_inv(static_cast<std::size_t>(down * grid[1]));
      std::vector<uint8_t> bytes(is_mx_ ? scale_inv.size() : 0);
      quantize_band(one, part, scales, codes + part.first * columns, is_mx_ ? static_cast<void*>(bytes.data()) : scale_inv.data(), down, grid[1]);
      const int64_t width = is_mx_ ? 1 : 4;
      const void* const made = is_mx_ ? static_cast<void*>(bytes.data()) : scale_inv.data();
      std::memcpy(inverse + above * grid[1] * width, made, static_cast<std::size_t>(down * grid[1] * width));
      for (std::size_t n = 0; n < bytes.size(); ++n) scale_inv[n] = static_cast<float>(std::ldexp(1.0, bytes[n] - 127));
      if (options_.check) check_band(one, part, codes + part.first * columns, scale_inv, grid[1], joins_bands, sum);
      drop(out);
    }
    one.error = sum.size > 0 ? std::sqrt(sum.off / sum.size) : 0;
  }

  // Blocks that reach over all rows need the amax of all bands first.
  std::vector<float> scales_of_all(const task& one, const std::vector<band>& bands, int64_t across, const output_file& out) {
    std::vector<float> most(static_cast<std::size_t>(across)), amax(most.size()), scale(most.size());
    const int64_t block[2] = {block_.rows, block_.columns};
    tensor_view x, to;
    for (const band& part : bands) {
      bind_x(x, one, part);
      to.set(amax.data(), CQSA_DTYPE_F32, {1, across});
      require(cqsa_fp8_amax(context_.get(), x.get(), block, CQSA_FP8_NAN_IGNORE, to.get(), nullptr, 0, nullptr));
      for (std::size_t n = 0; n < most.size(); ++n) most[n] = std::max(most[n], amax[n]);
      drop(out);
    }
    tensor_view all, scales;
    all.set(most.data(), CQSA_DTYPE_F32, {1, across});
    scales.set(scale.data(), CQSA_DTYPE_F32, {1, across});
    cqsa_fp8_scale_args args = CQSA_FP8_SCALE_ARGS_INIT;
    args.flags = rule_.pow2 ? CQSA_FP8_POW2 : 0;
    args.amax = all.get(), args.scale = scales.get(), args.format = format_.dtype;
    require(cqsa_fp8_scale_from_amax(context_.get(), &args, nullptr));
    return scale;
  }

  static void bind_x(tensor_view& x, const task& one, const band& part) {
    x.set(one.in.data + part.first * one.in.shape[1] * one.in.type->bytes, one.in.type->dtype, {part.rows, one.in.shape[1]});
  }

  // scales: given, or empty: from the band's own amaxes.
  void quantize_band(const task& one, const band& part, std::vector<float>& scales, std::byte* codes, void* inverse, int64_t down, int64_t across) {
    tensor_view x, to, given, scale_inv;
    bind_x(x, one, part);
    to.set(codes, format_.dtype, {part.rows, one.in.shape[1]});
    scale_inv.set(inverse, is_mx_ ? CQSA_DTYPE_E8M0FNU : CQSA_DTYPE_F32, {down, across});
    cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
    args.x = x.get(), args.row.out = to.get(), args.row.scale_inv = scale_inv.get();
    args.row.block[0] = block_.rows, args.row.block[1] = block_.columns;
    args.flags = rule_.pow2 ? CQSA_FP8_POW2 : 0;
    args.nan_policy = CQSA_FP8_NAN_IGNORE;  // one NaN should not cost a matrix its scale
    if (!scales.empty()) {
      given.set(scales.data(), CQSA_DTYPE_F32, {down, across});
      args.source = CQSA_FP8_STATIC, args.row.scale_in = given.get();
    }
    require(cqsa_fp8_quantize(context_.get(), &args, nullptr));
  }

  // ---- --check -------------------------------------------------------------------------------------------------------------

  struct totals {
    double off = 0, size = 0;
  };

  // Codes and scales against the model, and the error that rounding has made.
  void check_band(task& one, const band& part, const std::byte* codes, const std::vector<float>& scale_inv, int64_t across, bool is_given, totals& sum) {
    const int64_t columns = one.in.shape[1], count = part.rows * columns;
    std::vector<float> x(static_cast<std::size_t>(count));
    decode_row(one.in.type->dtype, one.in.data + part.first * columns * one.in.type->bytes, 1, count, x.data());
    std::vector<float> amaxes;
    if (!is_given) amaxes = fp8_amaxes(x, part.rows, columns, block_, true);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t r = n / columns, c = n % columns;
      const auto block = static_cast<std::size_t>((block_.rows ? r / block_.rows : 0) * across + (block_.columns ? c / block_.columns : 0));
      const fp8_scale scale = is_given ? fp8_scale{1 / scale_inv[block], scale_inv[block], 0} : fp8_scale_of(amaxes[block], rule_);
      const auto got = static_cast<unsigned>(codes[n]);
      const float value = x[static_cast<std::size_t>(n)];
      // A scale that bands share is known by its reciprocal alone, which may be an ulp off: then only the size of the error is looked at.
      const unsigned wanted = fp8_encode(format_, value * scale.scale, true);
      if (!is_given && (got != wanted || scale.scale_inv != scale_inv[block]) && !std::isnan(value) && one.failure.empty())
        one.failure = fmt::format("element [{}, {}], {}, became {:#04x} with scale_inv {}, wanted {:#04x} with {}", part.first + r, c, value, got,
                                  scale_inv[block], wanted, scale.scale_inv);
      if (!std::isfinite(value)) continue;
      const double off = fp8_decode(format_, got) * scale_inv[block] - value;
      const double least = std::ldexp(1.0, -format_.bias - format_.mantissa_bits) * scale_inv[block];
      const double unit = 1.01 * (std::ldexp(1.0, -format_.mantissa_bits - 1) * std::fabs(value) + least);
      if (std::fabs(off) > unit && one.failure.empty()) one.failure = fmt::format("element [{}, {}], {}, came back {} off", part.first + r, c, value, off);
      sum.off += off * off, sum.size += static_cast<double>(value) * value;
    }
  }

  void report(const task& one) {
    if (one.quantized) ++quantized_, failures_ += !one.failure.empty();
    if (options_.json) return report_json(one);
    if (options_.quiet && one.failure.empty()) return;
    if (!one.quantized) return fmt::print("{:<48} {:<5} {:<16} copied\n", one.in.name, one.in.type->name, shape_text(one.in.shape));
    fmt::print("{:<48} {:<5} {:<16} {} {}{}\n", one.in.name, one.in.type->name, shape_text(one.in.shape), options_.format, options_.granularity,
               !options_.check ? "" : one.failure.empty() ? fmt::format("  error {:.2e}  ok", one.error) : "  FAIL: " + one.failure);
  }

  void report_json(const task& one) const {
    nlohmann::ordered_json json = {{"record", "tensor"}, {"name", one.in.name}, {"dtype", one.in.type->name}, {"shape", one.in.shape},
                                   {"quantized", one.quantized}};
    if (options_.check && one.quantized) json.update({{"error", one.error}, {"pass", one.failure.empty()}});
    if (!one.failure.empty()) json["failure"] = one.failure;
    fmt::print("{}\n", json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  }

  int summary() const {
    const auto in = static_cast<double>(file_.bytes().size());
    if (!options_.json)
      fmt::print("{} of {} tensors in {}, {}: {} from {}{}\n", quantized_, tasks_.size(), options_.format, options_.granularity,
                 bytes_text(static_cast<double>(end_)), bytes_text(in), options_.check ? failures_ ? ": FAIL" : ": PASS" : "");
    return failures_ ? kExitCheckFailed : kExitOk;
  }

  const quantize_options& options_;
  const fp8_format& format_;
  const fp8_block block_;
  const bool is_mx_;
  fp8_scaling rule_;
  mapped_file file_;
  context_ptr context_;
  std::vector<task> tasks_;
  std::vector<output_array> arrays_;
  std::set<std::string> scales_;  // names of scales of what is in FP8
  int64_t end_ = 0, quantized_ = 0, failures_ = 0;
};

int run_quantize(const quantize_options& options) {
  catch_signals();
  return quantizer(options).run();
}

}  // namespace

void add_quantize(CLI::App& app, int& status) {
  const auto options = std::make_shared<quantize_options>();
  CLI::App& command = *app.add_subcommand("quantize", "Matrices of a .safetensors file in FP8: NAME and NAME.scale_inv; everything else is copied");
  command.add_option("input", options->input, "a .safetensors file")->required()->type_name("IN");
  command.add_option("-o,--output", options->output, "the file to write")->required()->type_name("OUT");
  command.add_option("--format", options->format, "e4m3fn (default), e5m2, e4m3fnuz, e5m2fnuz")->type_name("NAME");
  command.add_option("--granularity", options->granularity, "what shares a scale: tensor (default), row, col, 1x128, 128x128, 1x64 .., or mx (1x32, E8M0)")
      ->type_name("NAME");
  command.add_option("--include", options->include, "only tensors with a name like this, * and ? as in a shell; may be given again")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  command.add_option("--exclude", options->exclude, "not those; may be given again")->type_name("PATTERN")->allow_extra_args(false);
  command.add_option("--threads", options->threads, "host threads; default: one per core")->check(CLI::NonNegativeNumber);
  command.add_flag("--pow2", options->pow2, "scales that are powers of two");
  command.add_flag("--check", options->check, "compare every code with a model in fp64, and print the error of rounding");
  command.add_flag("--json", options->json, "print JSON lines");
  command.add_flag("--quiet", options->quiet, "print the summary, and what is wrong");
  command.callback([options, &status] { status = run_quantize(*options); });
}

}  // namespace tool
