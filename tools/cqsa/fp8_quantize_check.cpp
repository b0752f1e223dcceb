// SPDX-License-Identifier: Apache-2.0
// A problem of `cqsa parity --op fp8-quantize`: operands, the calls, and the comparison with the model.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include "elements.h"
#include "fp8_array.h"
#include "fp8_model.h"
#include "fp8_parity.h"
#include "library.h"
#include "problem_data.h"

namespace tool {
namespace {

constexpr int kRingCalls = 4, kHistory = 3;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One output of the problem: what is asked for, the arrays, and what they should hold.
struct side {
  bool turned = false;
  const fp8_format* format = nullptr;
  fp8_block block;
  fp8_array codes, scale_in, scale, scale_inv;

  void bind(cqsa_fp8_side& to, int32_t scale_layout) {
    to.out = codes.view(), to.scale_in = scale_in.view(), to.scale = scale.view(), to.scale_inv = scale_inv.view();
    to.block[0] = block.rows, to.block[1] = block.columns;
    to.scale_layout = scale_layout;
  }
};

class quantize_problem {
 public:
  quantize_problem(cqsa_context* context, device_memory* device, const fp8_line& line) : context_(context), device_(device), line_(line) {
    sizes();
    scaling();
    make_x();
    if (line["side"] != "transposed") make_side(row_.emplace(), false);
    if (line["side"] != "row") make_side(turned_.emplace(), true);
    amax_ = fp8_array(device, CQSA_DTYPE_F32, {});
    counters_ = fp8_array(device, CQSA_DTYPE_I64, {4});
    if (line.truth("skip")) skip_ = fp8_array(device, CQSA_DTYPE_I32, {1});
    if (line["source"] == "ring") make_ring();
  }

  std::string run() {
    const int calls = line_["source"] == "ring" ? kRingCalls : 1;
    for (int call = 0; call < calls; ++call) {
      fill_x(call);
      execute();
      std::string failure = verify();
      if (!failure.empty()) return calls == 1 ? failure : fmt::format("call {} of {}: {}", call + 1, calls, failure);
    }
    return "";
  }

 private:
  void sizes() {
    batch_ = line_.number("batch", 0, 1 << 20);
    rows_ = line_.number("rows", 0, 1 << 24), columns_ = line_.number("cols", 0, 1 << 24);
    all_rows_ = std::max<int64_t>(batch_, 1) * rows_;
    seed_ = static_cast<uint64_t>(line_.number("seed", 0, int64_t{1} << 40));
  }

  void scaling() {
    rule_.margin = static_cast<int>(line_.number("margin", -64, 64));
    rule_.pow2 = line_.truth("pow2") || line_["scales"] != "f32";
    rule_.eps = static_cast<float>(line_.real("eps")), rule_.limit = static_cast<float>(line_.real("limit"));
    is_ignoring_ = line_["nan"] == "ignore";
    if (!is_ignoring_ && line_["nan"] != "propagate") throw std::runtime_error(fmt::format("nan={}: propagate or ignore is wanted", line_["nan"]));
  }

  std::vector<int64_t> shape() const {
    return batch_ ? std::vector<int64_t>{batch_, rows_, columns_} : std::vector<int64_t>{rows_, columns_};
  }

  void make_x() { x_ = fp8_array(device_, dtype_by_name(line_["dtype"]), shape(), fp8_layout_by_name(line_["layout"])); }

  void fill_x(int call) {
    const random_buffer random(seed_ * 16 + static_cast<uint64_t>(call));
    const std::string& kind = line_["data"];
    for (int64_t n = 0, all = x_.count(); n < all; ++n) x_.set(n, value(random, kind, n));
    if (kind == "outlier" && x_.count() > 0) x_.set(x_.count() - 2 + x_.count() % 2, 1000);
    x_.upload();
    values_ = x_.floats();
  }

  static double value(const random_buffer& random, const std::string& kind, int64_t n) {
    const uint64_t at = 4 * static_cast<uint64_t>(n);
    if (kind == "zero") return n % 2 ? 0.0 : -0.0;
    if (kind == "wide" || kind == "special") {
      const uint64_t bits = random.bits(at);
      if (kind == "special" && bits % 16 == 0) return std::array{std::nan(""), kInfinity, -kInfinity, -0.0}[bits / 16 % 4];
      return std::ldexp(random.unit(at + 1), static_cast<int>(bits / 64 % 40) - 20);
    }
    if (kind == "codes") return fp8_decode(fp8_format_by_name("e4m3fn"), static_cast<unsigned>(n % 127)) * (1 + static_cast<double>(n / 127 % 3) * 0.0625);
    if (kind != "normal" && kind != "outlier") throw std::runtime_error(fmt::format("data={}: normal, wide, special, zero, codes or outlier is wanted", kind));
    return random.unit(at) + random.unit(at + 1) + random.unit(at + 2) + random.unit(at + 3);
  }

  void make_side(side& to, bool turned) {
    to.turned = turned;
    const std::string& format = line_["format_t"];
    to.format = &fp8_format_by_name(turned && !format.empty() ? format : line_["format"]);
    const std::string& block = line_["granularity_t"];
    to.block = fp8_block_by_name(turned && !block.empty() ? block : line_["granularity"]);
    to.codes = fp8_array(device_, to.format->dtype, turned ? std::vector<int64_t>{columns_, all_rows_} : shape(), fp8_layout_by_name(line_["layout_out"]));
    const int64_t down = to.block.down(all_rows_), across = to.block.across(columns_);
    to.scale = fp8_array(device_, CQSA_DTYPE_F32, {down, across});
    const std::string& scales = line_["scales"];
    if (scales == "f32") to.scale_inv = fp8_array(device_, CQSA_DTYPE_F32, {down, across});
    else if (scales == "e8m0") to.scale_inv = fp8_array(device_, CQSA_DTYPE_E8M0FNU, {down, across});
    else if (scales == "packed") to.scale_inv = fp8_array(device_, CQSA_DTYPE_I32, {down, (across + 3) / 4});
    else if (scales == "tiled") to.scale_inv = fp8_array(device_, CQSA_DTYPE_U8, {(down + 127) / 128 * ((across + 3) / 4) * 512});
    else throw std::runtime_error(fmt::format("scales={}: f32, e8m0, packed or tiled is wanted", scales));
    if (line_["source"] == "static") make_static(to, down, across);
  }

  void make_static(side& to, int64_t down, int64_t across) {
    const random_buffer random(seed_ * 16 + 9);
    to.scale_in = fp8_array(device_, CQSA_DTYPE_F32, {down, across});
    for (int64_t n = 0; n < down * across; ++n) {
      const auto at = static_cast<uint64_t>(n);
      to.scale_in.set(n, rule_.pow2 ? std::ldexp(1.0, static_cast<int>(random.bits(at) % 16)) : 40 * (1.5 + random.unit(at)));
    }
    to.scale_in.upload();
  }

  void make_ring() {
    ring_.hist_len = kHistory, ring_.format = row_ ? row_->format->dtype : turned_->format->dtype;
    ring_.margin = rule_.margin, ring_.flags = rule_.pow2 ? CQSA_FP8_POW2 : 0;
    ring_.algorithm = line_["algorithm"] == "max" ? CQSA_FP8_RING_MAX : CQSA_FP8_RING_MOST_RECENT;
    require(cqsa_fp8_ring_bytes(&ring_, &ring_.bytes));
    ring_memory_ = fp8_array(device_, CQSA_DTYPE_U8, {static_cast<int64_t>(ring_.bytes) + CQSA_WORKSPACE_ALIGNMENT});
    const auto start = reinterpret_cast<uintptr_t>(ring_memory_.address());
    ring_.state = reinterpret_cast<void*>((start + CQSA_WORKSPACE_ALIGNMENT - 1) / CQSA_WORKSPACE_ALIGNMENT * CQSA_WORKSPACE_ALIGNMENT);
    fp8_scaling rule = rule_;
    rule.format = row_ ? row_->format : turned_->format;
    ring_scale_ = fp8_scale_of(2.0f, rule);
    require(cqsa_fp8_ring_init(context_, &ring_, 2.0f, stream()));
  }

  void* stream() const { return device_ ? device_->stream() : nullptr; }

  void bind(cqsa_fp8_quantize_args& args) {
    static constexpr std::pair<const char*, int32_t> layouts[] = {{"packed", CQSA_FP8_SCALES_PACKED}, {"tiled", CQSA_FP8_SCALES_TILED}};
    int32_t layout = CQSA_FP8_SCALES_STRIDED;
    for (const auto& [name, number] : layouts) layout = line_["scales"] == name ? number : layout;
    args.x = x_.view();
    if (row_) row_->bind(args.row, layout);
    if (turned_) turned_->bind(args.transposed, layout);
    const uint32_t pow2 = CQSA_FP8_POW2, wrapping = CQSA_FP8_NO_SATURATE;
    args.flags = (rule_.pow2 && line_["source"] != "static" ? pow2 : 0) | (line_.truth("saturate") ? 0 : wrapping);
    args.source = line_["source"] == "current" ? CQSA_FP8_CURRENT : line_["source"] == "static" ? CQSA_FP8_STATIC : CQSA_FP8_RING;
    args.nan_policy = is_ignoring_ ? CQSA_FP8_NAN_IGNORE : CQSA_FP8_NAN_PROPAGATE;
    if (args.source == CQSA_FP8_CURRENT) args.margin = rule_.margin, args.eps = rule_.eps, args.amax_limit = rule_.limit;
    args.ring = args.source == CQSA_FP8_RING ? &ring_ : nullptr;
    args.amax = amax_.view(), args.counters = counters_.view(), args.skip = skip_.view();
  }

  void execute() {
    for (int64_t n = 0; n < 4; ++n) counters_.set(n, 0);
    if (skip_.present()) skip_.set(0, 1);
    for (fp8_array* array : outputs()) array->upload();
    skip_.upload();
    cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
    bind(args);
    const cqsa_fp8_quantize_args* list[] = {&args};
    uint64_t bytes = 0;
    require(cqsa_fp8_quantize_workspace(context_, list, 1, &bytes));
    const fp8_workspace workspace(context_, device_, bytes);
    args.workspace = workspace.address(), args.workspace_bytes = bytes;
    require(cqsa_fp8_quantize(context_, &args, stream()));
    if (device_) device_->wait();
    for (fp8_array* array : outputs()) array->download();
  }

  std::vector<fp8_array*> outputs() {
    std::vector<fp8_array*> all = {&amax_, &counters_};
    for (std::optional<side>* one : {&row_, &turned_})
      if (*one) all.insert(all.end(), {&(*one)->codes, &(*one)->scale, &(*one)->scale_inv});
    return all;
  }

  // ---- the comparison ----------------------------------------------------------------------------------------------------

  std::string verify() {
    for (fp8_array* array : outputs())
      if (!array->untouched_around()) return "bytes outside of an output were written";
    if (skip_.present()) return verify_untouched();
    const float most = fp8_amaxes(values_, all_rows_, columns_, {}, is_ignoring_)[0];
    int64_t saturated = 0;
    for (std::optional<side>* one : {&turned_, &row_})  // counted of row where there is one: last
      if (*one) {
        saturated = 0;
        std::string failure = verify_side(**one, saturated);
        if (!failure.empty()) return (*one)->turned ? "transposed: " + failure : failure;
      }
    if (!same(amax_.get(0), most)) return fmt::format("amax is {}, wanted {}", amax_.get(0), most);
    return verify_counters(saturated, most);
  }

  std::string verify_untouched() {
    for (fp8_array* array : outputs())
      if (array != &counters_)
        for (int64_t n = 0; n < array->count(); ++n)
          if (*array->at(n) != std::byte{0xFF}) return "an output was written in spite of skip";
    return "";
  }

  static bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, 4) == 0; }

  // The scale of each block.
  std::vector<fp8_scale> scales_of(side& one) {
    fp8_scaling rule = rule_;
    rule.format = one.format;
    const int64_t count = one.block.down(all_rows_) * one.block.across(columns_);
    std::vector<fp8_scale> scales(static_cast<std::size_t>(count));
    const std::vector<float> amaxes = fp8_amaxes(values_, all_rows_, columns_, one.block, is_ignoring_);
    for (std::size_t n = 0; n < scales.size(); ++n) {
      if (line_["source"] == "current") scales[n] = fp8_scale_of(amaxes[n], rule);
      else if (line_["source"] == "static") scales[n] = given(one.scale_in.get(static_cast<int64_t>(n)));
      else scales[n] = of_ring(one);
    }
    return scales;
  }

  static fp8_scale given(float scale) {
    const float inverse = 1.0f / scale;
    return {scale, inverse, static_cast<unsigned>(std::ilogb(inverse) + 127)};
  }

  fp8_scale of_ring(const side& one) const {
    const fp8_format& own = row_ ? *row_->format : *turned_->format;
    if (one.format == &own) return ring_scale_;
    return given(ring_scale_.scale * static_cast<float>(one.format->largest / own.largest));
  }

  std::string verify_side(side& one, int64_t& saturated) {
    const std::vector<fp8_scale> scales = scales_of(one);
    const int64_t down = one.block.down(all_rows_), across = one.block.across(columns_);
    const bool saturate = line_.truth("saturate");
    for (int64_t r = 0; r < all_rows_; ++r)
      for (int64_t c = 0; c < columns_; ++c) {
        const int64_t block = (one.block.rows ? r / one.block.rows : 0) * across + (one.block.columns ? c / one.block.columns : 0);
        const float x = values_[static_cast<std::size_t>(r * columns_ + c)], product = x * scales[static_cast<std::size_t>(block)].scale;
        const unsigned wanted = fp8_encode(*one.format, product, saturate);
        const auto got = static_cast<unsigned>(*one.codes.at(one.turned ? c * all_rows_ + r : r * columns_ + c));
        // The sign of a NaN is that of an intermediate result, which nobody promises.
        if (got != wanted && !(std::isnan(fp8_decode(*one.format, got)) && std::isnan(fp8_decode(*one.format, wanted))))
          return fmt::format("the code of element [{}, {}], {}, is {:#04x}, wanted {:#04x} (scale {})", r, c, x, got, wanted,
                             scales[static_cast<std::size_t>(block)].scale);
        saturated += std::isfinite(x) && is_saturated(*one.format, product);
      }
    return verify_scales(one, scales, down, across);
  }

  // Whether the nearest code of infinitely many would be larger than the largest.
  static bool is_saturated(const fp8_format& f, float product) {
    const double size = std::fabs(static_cast<double>(product)), unit = std::ldexp(1.0, std::ilogb(f.largest) - f.mantissa_bits);
    return std::isnan(size) || std::isinf(size) || std::nearbyint(size / unit) * unit > f.largest;
  }

  std::string verify_scales(side& one, const std::vector<fp8_scale>& scales, int64_t down, int64_t across) {
    for (int64_t n = 0; n < down * across; ++n) {
      const fp8_scale& wanted = scales[static_cast<std::size_t>(n)];
      if (!same(one.scale.get(n), wanted.scale)) return fmt::format("scale {} is {}, wanted {}", n, one.scale.get(n), wanted.scale);
      if (line_["scales"] == "f32" && !same(one.scale_inv.get(n), wanted.scale_inv))
        return fmt::format("scale_inv {} is {}, wanted {}", n, one.scale_inv.get(n), wanted.scale_inv);
    }
    return line_["scales"] == "f32" ? "" : verify_bytes(one, scales, down, across);
  }

  std::string verify_bytes(side& one, const std::vector<fp8_scale>& scales, int64_t down, int64_t across) {
    const std::string& layout = line_["scales"];
    const int64_t four = (across + 3) / 4, pad_rows = layout == "tiled" ? (down + 127) / 128 * 128 : down, pad = layout == "e8m0" ? across : four * 4;
    for (int64_t r = 0; r < pad_rows; ++r)
      for (int64_t c = 0; c < pad; ++c) {
        const unsigned wanted = r < down && c < across ? scales[static_cast<std::size_t>(r * across + c)].e8m0 : 0;
        const std::byte* at = layout == "e8m0"     ? one.scale_inv.at(r * across + c)
                              : layout == "packed" ? one.scale_inv.at(r * four + c / 4) + c % 4
                                                   : one.scale_inv.at((r / 128 * four + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4);
        if (static_cast<unsigned>(*at) != wanted)
          return fmt::format("the E8M0 scale of block [{}, {}] is {}, wanted {}", r, c, static_cast<unsigned>(*at), wanted);
      }
    return "";
  }

  std::string verify_counters(int64_t saturated, float most) {
    int64_t wanted[4] = {0, 0, saturated, 0};
    for (const float x : values_) wanted[0] += std::isnan(x), wanted[1] += std::isinf(x);
    for (int64_t n = 0; n < 4; ++n) {
      int64_t got = 0;
      std::memcpy(&got, counters_.at(n), 8);
      if (got != wanted[n]) return fmt::format("counter {} is {}, wanted {}", n, got, wanted[n]);
    }
    return line_["source"] == "ring" ? advance(most) : "";
  }

  // The ring of the model, and whether the library's has gone the same way.
  std::string advance(float most) {
    fp8_scaling rule = rule_;
    rule.format = row_ ? row_->format : turned_->format, rule.eps = rule.limit = 0;
    if (std::isfinite(most)) {
      history_[static_cast<std::size_t>(index_)] = most;
      index_ = (index_ + 1) % kHistory;
      const float decisive = line_["algorithm"] == "max" ? *std::max_element(history_.begin(), history_.end()) : most;
      if (decisive > 0) ring_scale_ = fp8_scale_of(decisive, rule);
    } else {
      ++refused_;
    }
    cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
    std::vector<float> history(kHistory);
    require(cqsa_fp8_ring_read(context_, &ring_, &info, history.data(), stream()));
    if (history != history_ || info.index != index_ || info.refused != refused_) return "the ring's history is not that of the amaxes";
    if (!same(info.scale, ring_scale_.scale) || !same(info.scale_inv, ring_scale_.scale_inv))
      return fmt::format("the ring's scale is {}, wanted {}", info.scale, ring_scale_.scale);
    return "";
  }

  cqsa_context* context_;
  device_memory* device_;
  const fp8_line& line_;
  int64_t batch_ = 0, rows_ = 0, columns_ = 0, all_rows_ = 0;
  uint64_t seed_ = 0;
  fp8_scaling rule_;
  bool is_ignoring_ = false;
  fp8_array x_, amax_, counters_, skip_, ring_memory_;
  std::vector<float> values_;
  std::optional<side> row_, turned_;
  cqsa_fp8_ring ring_ = CQSA_FP8_RING_INIT;
  fp8_scale ring_scale_;
  std::vector<float> history_ = std::vector<float>(kHistory);
  int32_t index_ = 0, refused_ = 0;
};

}  // namespace

fp8_verdict check_fp8_quantize(cqsa_context* context, device_memory* device, const fp8_line& line) {
  return {quantize_problem(context, device, line).run(), 0, ""};
}

}  // namespace tool
