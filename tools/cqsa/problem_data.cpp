// SPDX-License-Identifier: Apache-2.0
#include "problem_data.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "check.h"
#include "elements.h"
#include "library.h"
#include "parallel.h"

namespace tool {
namespace {

constexpr std::byte kGuard{0xCB};
constexpr int64_t kGuardBytes = 512, kGap = 3;  // gap: elements after each row
constexpr int64_t kBlockElements = 1 << 17, kBlockBytes = 1 << 20;  // that a thread takes at a time: about a millisecond
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

constexpr const cqsa_tensor* cqsa_attention_args::* kFields[] = {
    &cqsa_attention_args::q,     &cqsa_attention_args::k,            &cqsa_attention_args::v,
    &cqsa_attention_args::k_scale, &cqsa_attention_args::v_scale,    &cqsa_attention_args::mask,
    &cqsa_attention_args::bias,  &cqsa_attention_args::alibi_slopes, &cqsa_attention_args::sinks,
    &cqsa_attention_args::cu_seqlens_q, &cqsa_attention_args::cu_seqlens_k, &cqsa_attention_args::seqused_k,
    &cqsa_attention_args::page_table, &cqsa_attention_args::out,     &cqsa_attention_args::lse};
constexpr const char* kNames[] = {"q", "k", "v", "k_scale", "v_scale", "mask", "bias", "alibi_slopes", "sinks",
                                  "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "out", "lse"};

std::vector<int64_t> with(std::vector<int64_t> axes, int64_t last) {
  axes.push_back(last);
  return axes;
}

}  // namespace

uint64_t random_buffer::bits(uint64_t n) const {
  uint64_t z = seed_ + (n + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

double random_buffer::unit(uint64_t n) const { return static_cast<double>(bits(n) >> 40) * 0x1p-23 - 1; }

// ---------------------------------------------------------------------------------------------------------- guarded_array

guarded_array::guarded_array(cqsa_dtype dtype, std::vector<int64_t> shape, memory_layout layout)
    : dtype_(dtype), element_bytes_(type_of(dtype).bytes), shape_(std::move(shape)), strides_(shape_.size()) {
  place_axes(layout);
}

void guarded_array::place_axes(memory_layout layout) {
  const std::size_t axes = shape_.size();
  std::vector<std::size_t> order(axes);  // the slowest axis first
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (layout == memory_layout::bshd && axes == 4) std::swap(order[1], order[2]);
  if (layout == memory_layout::bshd && axes == 3) std::swap(order[0], order[1]);
  if (layout == memory_layout::transposed) std::reverse(order.begin(), order.end());

  int64_t step = 1;
  first_ = layout == memory_layout::gapped ? 1 : 0;
  for (std::size_t i = axes; i-- > 0;) {
    strides_[order[i]] = step;
    step *= std::max<int64_t>(shape_[order[i]], 1);
    if (i + 1 == axes && layout == memory_layout::gapped) step += kGap;
  }
  const int64_t elements = first_ + step;
  if (layout == memory_layout::reversed)
    for (std::size_t axis = 0; axis + 1 < axes; ++axis) {
      first_ += strides_[axis] * (std::max<int64_t>(shape_[axis], 1) - 1);
      strides_[axis] = -strides_[axis];
    }
  first_ += kGuardBytes / element_bytes_;
  memory_.assign(static_cast<std::size_t>(elements * element_bytes_ + 2 * kGuardBytes), kGuard);
}

int64_t guarded_array::count() const {
  return std::accumulate(shape_.begin(), shape_.end(), int64_t{present()}, std::multiplies<>());
}

const std::byte* guarded_array::at(int64_t n) const {
  int64_t offset = first_;
  for (std::size_t axis = shape_.size(); axis-- > 0; n /= shape_[axis]) offset += n % shape_[axis] * strides_[axis];
  return memory_.data() + offset * element_bytes_;
}

double guarded_array::get(int64_t n) const { return decode(dtype_, at(n)); }
void guarded_array::set(int64_t n, double value) { encode(dtype_, value, at(n)); }

void guarded_array::set_some(int64_t first, int64_t count, double value) {
  std::byte code[8];
  encode(dtype_, value, code);
  for (int64_t n = first; n < first + count;) {
    std::byte* to = at(n);
    for (int64_t end = std::min(first + count, n - n % width() + width()); n < end; ++n, to += step_bytes())
      std::memcpy(to, code, static_cast<std::size_t>(element_bytes_));
  }
}

void guarded_array::for_rows(int threads, const std::function<void(int64_t, const std::byte*)>& body) const {
  const int64_t row = width(), rows = row > 0 ? count() / row : 0;
  in_blocks(rows, kBlockElements / std::max<int64_t>(row, 1), threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r * row, at(r * row));
  });
}

void guarded_array::fill(uint64_t seed, double range, int threads) {
  const random_buffer random(seed);
  for_rows(threads, [&](int64_t first, const std::byte* row) {
    std::byte* to = const_cast<std::byte*>(row);
    for (int64_t n = first; n < first + width(); ++n, to += step_bytes()) {
      const auto index = static_cast<uint64_t>(n);
      if (dtype_ == CQSA_DTYPE_I8)
        *to = static_cast<std::byte>(random.bits(index) >> 56);
      else
        encode(dtype_, random.unit(index) * range, to);
    }
  });
}

namespace {

// The elements of a row to one byte each of theirs.
void set_row(std::byte* row, int64_t width, int64_t step, int64_t element, int value) {
  if (step == element) return void(std::memset(row, value, static_cast<std::size_t>(width * element)));
  for (int64_t d = 0; d < width; ++d) std::memset(row + d * step, value, static_cast<std::size_t>(element));
}

}  // namespace

void guarded_array::poison(int threads) {
  for_rows(threads, [&](int64_t, const std::byte* row) { set_row(const_cast<std::byte*>(row), width(), step_bytes(), element_bytes_, 0xFF); });
}

bool guarded_array::guards_intact(int threads) const {
  std::vector<std::byte> rest = memory_;
  for_rows(threads, [&](int64_t, const std::byte* row) {
    set_row(rest.data() + (row - memory_.data()), width(), step_bytes(), element_bytes_, static_cast<int>(kGuard));
  });
  std::atomic<bool> intact{true};
  in_blocks(static_cast<int64_t>(rest.size()), kBlockBytes, threads, [&](int64_t begin, int64_t end) {
    if (!std::all_of(rest.begin() + begin, rest.begin() + end, [](std::byte b) { return b == kGuard; })) intact = false;
  });
  return intact;
}

bool guarded_array::has_nan(int threads) const {
  std::atomic<bool> found{false};
  for_rows(threads, [&](int64_t, const std::byte* row) {
    for (int64_t d = 0; d < width(); ++d)
      if (std::isnan(decode(dtype_, row + d * step_bytes()))) found = true;
  });
  return found;
}

namespace {

uint64_t checksum_of(const std::byte* from, std::size_t bytes) {
  uint64_t sum = 0xCBF29CE484222325;  // FNV-1a over words
  for (std::size_t i = 0; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, from + i, std::min<std::size_t>(8, bytes - i));
    sum = (sum ^ word) * 0x100000001B3;
  }
  return sum;
}

}  // namespace

// Of the checksums of its blocks.
uint64_t guarded_array::checksum(int threads) const {
  std::vector<uint64_t> sums((memory_.size() + kBlockBytes - 1) / kBlockBytes);
  in_blocks(static_cast<int64_t>(memory_.size()), kBlockBytes, threads, [&](int64_t begin, int64_t end) {
    sums[static_cast<std::size_t>(begin / kBlockBytes)] = checksum_of(memory_.data() + begin, static_cast<std::size_t>(end - begin));
  });
  return checksum_of(reinterpret_cast<const std::byte*>(sums.data()), sums.size() * sizeof(uint64_t));
}

const cqsa_tensor* guarded_array::tensor() {
  if (!present()) return nullptr;
  tensor_ = {memory_.data(), CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape_.size()), dtype_, shape_.data(), strides_.data(),
             static_cast<uint64_t>(first_ * element_bytes_)};
  return &tensor_;
}

// ------------------------------------------------------------------------------------------------------------- problem_data

guarded_array& problem_data::make(which w, cqsa_dtype dtype, std::vector<int64_t> shape, bool with_layout) {
  return arrays_[w] = guarded_array(dtype, std::move(shape), with_layout ? spec_.layout : memory_layout::packed);
}

uint64_t problem_data::seed_of(which w) const { return random_buffer(spec_.seed).bits(static_cast<uint64_t>(w)); }

// cu_seqlens: the first segment is the longest, a quarter of the others is empty, and a few rows follow the last one.
void problem_data::make_lengths() {
  if (!spec_.varlen) return;
  const auto segments = [&](which w, int64_t longest) {
    random_buffer random(seed_of(w));
    guarded_array& cu = make(w, spec_.index, {params_.batch + 1});
    int64_t row = 0;
    cu.set(0, 0);
    for (int64_t b = 0; b < params_.batch; ++b) {
      row += b == 0 ? longest : random.chance(25) ? 0 : random.integer(0, longest);
      cu.set(b + 1, static_cast<double>(row));
    }
    return row + random.integer(0, 3);
  };
  total_q_ = segments(kCuQ, params_.seqlen_q);
  if (params_.page_size == 0) total_k_ = segments(kCuK, params_.seqlen_k);
}

// Every page of the pool in random order, two of them in no sequence; now and then a page is absent, or another sequence's.
void problem_data::make_pages() {
  if (params_.page_size == 0) return;
  random_buffer random(seed_of(kPages));
  const int64_t columns = (params_.seqlen_k + params_.page_size - 1) / params_.page_size;
  params_.num_pages = columns * params_.batch + 2;
  std::vector<int64_t> ids(static_cast<std::size_t>(params_.num_pages));
  std::iota(ids.begin(), ids.end(), int64_t{0});
  for (std::size_t i = ids.size(); i > 1; --i)
    std::swap(ids[i - 1], ids[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  guarded_array& table = make(kPages, CQSA_DTYPE_I32, {params_.batch, columns});
  for (int64_t n = 0; n < table.count(); ++n) {
    const int64_t other = random.chance(10) ? random.integer(0, n) : n;
    table.set(n, random.chance(10) ? -1 : static_cast<double>(ids[static_cast<std::size_t>(other)]));
  }
}

void problem_data::make_keys() {
  const cqsa_attention_params& p = params_;
  std::vector<int64_t> axes = {p.batch, p.num_kv_heads, p.seqlen_k};
  if (spec_.varlen) axes = {total_k_, p.num_kv_heads};
  if (p.page_size > 0) axes = {p.num_pages, p.page_size, p.num_kv_heads};
  make(kK, p.dtype_kv, with(axes, p.head_dim), true).fill(seed_of(kK), spec_.range, threads_);
  make(kV, p.dtype_kv, with(axes, p.head_dim_v), true).fill(seed_of(kV), spec_.range, threads_);
  make_scales(kKScale, p.scale_k, axes, p.head_dim);
  make_scales(kVScale, p.scale_v, axes, p.head_dim_v);
  if (!spec_.seqused) return;
  random_buffer random(seed_of(kUsed));
  guarded_array& used = make(kUsed, spec_.index, {p.batch});
  for (int64_t b = 0; b < p.batch; ++b) {
    const guarded_array& cu = arrays_[kCuK];
    const auto length = cu.present() ? static_cast<int64_t>(cu.get(b + 1) - cu.get(b)) : p.seqlen_k;
    used.set(b, static_cast<double>(random.integer(b == 0 ? length / 2 : 0, length)));
  }
}

// Factors that bring the codes near [-range, range).
void problem_data::make_scales(which w, int32_t kind, const std::vector<int64_t>& key_axes, int64_t dim) {
  if (kind == CQSA_SCALE_NONE) return;
  const bool group = kind == CQSA_SCALE_GROUP;
  std::vector<int64_t> shape = key_axes;
  if (kind == CQSA_SCALE_TENSOR) shape = {1};
  if (kind == CQSA_SCALE_HEAD) shape = {params_.num_kv_heads};
  if (group) shape.push_back((dim + params_.kv_group - 1) / params_.kv_group);
  guarded_array& scale = make(w, group ? CQSA_DTYPE_F16 : CQSA_DTYPE_F32, shape);
  const random_buffer random(seed_of(w));
  for (int64_t n = 0; n < scale.count(); ++n)
    scale.set(n, (group ? spec_.range / 127 : 1) * (0.75 + 0.25 * random.unit(static_cast<uint64_t>(n))));
}

void problem_data::make_extras() {
  const cqsa_attention_params& p = params_;
  const auto plane = [&](uint32_t broadcast) {
    std::vector<int64_t> shape = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
    for (std::size_t i = 0; i < shape.size(); ++i)
      if (broadcast >> i & 1) shape[i] = 1;
    return shape;
  };
  if (spec_.mask) {
    random_buffer random(seed_of(kMask));
    guarded_array& mask = make(kMask, CQSA_DTYPE_BOOL, plane(spec_.mask_broadcast));
    for (int64_t n = 0; n < mask.count(); ++n) mask.set(n, random.chance(75));
  }
  if (spec_.bias) make(kBias, p.dtype_bias, plane(spec_.bias_broadcast)).fill(seed_of(kBias), 3, threads_);
  if (spec_.alibi) {
    guarded_array& slopes = make(kSlopes, CQSA_DTYPE_F32, spec_.alibi_per_sequence ? std::vector{p.batch, p.num_heads} : std::vector{p.num_heads});
    slopes.fill(seed_of(kSlopes), 0.25, threads_);
  }
  if (spec_.sinks) make(kSinks, CQSA_DTYPE_F32, {p.num_heads}).fill(seed_of(kSinks), 4, threads_);
}

void problem_data::make_queries() {
  const cqsa_attention_params& p = params_;
  std::vector<int64_t> axes = {p.batch, p.num_heads, p.seqlen_q};
  if (spec_.varlen) axes = {total_q_, p.num_heads};
  make(kQ, p.dtype_q, with(axes, p.head_dim), true).fill(seed_of(kQ), spec_.range, threads_);
  make(kOut, p.dtype_out, with(axes, p.head_dim_v), true);
  if (spec_.varlen) std::swap(axes[0], axes[1]);
  if (spec_.lse) make(kLse, p.dtype_q == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32, axes);
}

void problem_data::plant_nan() {
  const std::vector<bool> seen = seen_keys(params_, args());
  const auto key_rows = static_cast<int64_t>(seen.size());
  for (const which w : {kK, kV, kKScale, kVScale}) {
    guarded_array& array = arrays_[w];
    // int8 codes have no NaN, their scales have; a scale that several keys share is left alone.
    if (!array.present() || array.dtype() == CQSA_DTYPE_I8 || key_rows == 0 || array.count() < key_rows) continue;
    const bool own = w == kK || w == kV || (w == kKScale ? params_.scale_k : params_.scale_v) >= CQSA_SCALE_TOKEN;
    const int64_t width = array.count() / key_rows;
    in_blocks(own ? key_rows : 0, kBlockElements / std::max<int64_t>(width, 1), threads_, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        if (!seen[static_cast<std::size_t>(row)]) array.set_some(row * width, width, kNan);
    });
  }
  if (!spec_.varlen) return;
  guarded_array& q = arrays_[kQ];
  const int64_t width = params_.num_heads * params_.head_dim;
  const int64_t first = static_cast<int64_t>(arrays_[kCuQ].get(params_.batch)) * width;
  q.set_some(first, q.count() - first, kNan);
}

problem_data::problem_data(const cqsa_context* context, const problem_spec& spec, int threads)
    : spec_(spec), threads_(threads), params_(spec.params) {
  make_lengths();
  make_pages();
  make_keys();
  make_extras();
  make_queries();
  const cqsa_attention_args all = args();
  require(cqsa_attention_params_of(context, &all, &params_));
  plant_nan();
  for (int i = 0; i < kOut; ++i) checksums_[static_cast<std::size_t>(i)] = arrays_[static_cast<std::size_t>(i)].checksum(threads_);
}

cqsa_attention_args problem_data::args() {
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  for (std::size_t i = 0; i < kCount; ++i) args.*kFields[i] = arrays_[i].tensor();
  return args;
}

std::vector<problem_data::slot> problem_data::slots() {
  std::vector<slot> found;
  for (int i = 0; i < kCount; ++i) {
    guarded_array& array = arrays_[static_cast<std::size_t>(i)];
    if (array.present()) found.push_back({i, kNames[i], kFields[i], &array, i >= kOut, i >= kK && i <= kVScale});
  }
  return found;
}

void problem_data::poison_results() {
  arrays_[kOut].poison(threads_);
  arrays_[kLse].poison(threads_);
}

std::string problem_data::damage() const {
  for (std::size_t i = 0; i < kCount; ++i) {
    if (i >= kOut && arrays_[i].present() && !arrays_[i].guards_intact(threads_))
      return std::string("bytes around or between the elements of ") + kNames[i] + " were written";
    if (i < kOut && arrays_[i].checksum(threads_) != checksums_[i]) return std::string("the input ") + kNames[i] + " was changed";
  }
  return "";
}

bool problem_data::nan_in_results() const { return arrays_[kOut].has_nan(threads_) || arrays_[kLse].has_nan(threads_); }

}  // namespace tool
