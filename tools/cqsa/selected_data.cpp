// SPDX-License-Identifier: Apache-2.0
#include "selected_data.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <numeric>

#include "elements.h"

namespace tool {
namespace {

constexpr int64_t kRecent = 512;          // cells that every query selects
constexpr double kDrift = 0.03;           // of the older ones, from query to query
constexpr double kKeySigma = 1.5, kValueSigma = 1.0, kQuerySigma = 2.0;
constexpr double kLeastScale = 0.005, kLargestScale = 0.03;

// splitmix64
class random_words {
 public:
  explicit random_words(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double normal() { return std::sqrt(-2 * std::log(1 - unit())) * std::cos(2 * std::numbers::pi * unit()); }

 private:
  uint64_t state_;
};

selected_tensor make(cqsa_dtype dtype, std::vector<int64_t> shape) {
  selected_tensor t;
  t.dtype = dtype;
  t.shape = std::move(shape);
  t.strides.resize(t.shape.size());
  int64_t step = 1;
  for (std::size_t i = t.shape.size(); i-- > 0; step *= t.shape[i]) t.strides[i] = step;
  t.bytes.resize(static_cast<std::size_t>(step * type_of(dtype).bytes));
  return t;
}

// [page][key head][row of the page][channel] in memory, as [page, row, key head, channel].
selected_tensor make_pool(const selected_spec& s, cqsa_dtype dtype, int64_t channels) {
  selected_tensor t = make(dtype, {s.pages(), s.page_size, s.kv_heads, channels});
  t.strides[1] = channels;
  t.strides[2] = s.page_size * channels;
  return t;
}

// A pool has hundreds of millions of elements: four at a time, from a table of 65,536 normal numbers.
void fill_normal(selected_tensor& t, double sigma, uint64_t seed) {
  random_words random(seed);
  std::vector<uint16_t> table(65536);
  for (uint16_t& entry : table) encode(CQSA_DTYPE_F16, sigma * random.normal(), reinterpret_cast<std::byte*>(&entry));
  uint16_t* const out = t.as<uint16_t>();
  const std::size_t count = t.bytes.size() / 2;
  for (std::size_t i = 0; i < count; i += 4) {
    const uint64_t word = random.next();
    for (std::size_t j = 0; j < std::min<std::size_t>(4, count - i); ++j) out[i + j] = table[word >> 16 * j & 0xFFFF];
  }
}

// 255 codes from 16 bits: some are more likely than others by less than 0.4 %.
void fill_codes(selected_tensor& t, uint64_t seed) {
  random_words random(seed);
  int8_t* const out = t.as<int8_t>();
  for (std::size_t i = 0; i < t.bytes.size(); i += 4) {
    const uint64_t word = random.next();
    for (std::size_t j = 0; j < std::min<std::size_t>(4, t.bytes.size() - i); ++j)
      out[i + j] = static_cast<int8_t>(static_cast<int64_t>((word >> 16 * j & 0xFFFF) * 255 >> 16) - 127);
  }
}

void fill_scales(selected_tensor& t, uint64_t seed) {
  random_words random(seed);
  const std::size_t count = t.bytes.size() / 2;
  for (std::size_t i = 0; i < count; ++i)
    encode(CQSA_DTYPE_F16, kLeastScale + (kLargestScale - kLeastScale) * random.unit(), &t.bytes[2 * i]);
}

void fill_queries(selected_tensor& t, uint64_t seed) {
  random_words random(seed);
  float* const out = t.as<float>();
  for (std::size_t i = 0; i < t.bytes.size() / 4; ++i) out[i] = static_cast<float>(kQuerySigma * random.normal());
}

void fill_table(selected_tensor& t, uint64_t seed) {
  random_words random(seed);
  int32_t* const out = t.as<int32_t>();
  std::iota(out, out + t.shape[0], 0);
  for (int64_t i = t.shape[0]; i-- > 1;) std::swap(out[i], out[random.below(i + 1)]);
}

// The older cells that are selected, and how they change.
class drifting_set {
 public:
  drifting_set(int64_t count, int64_t room, uint64_t seed) : random_(seed), present_(static_cast<std::size_t>(room)) {
    for (int64_t i = 0; i < count; ++i) chosen_.push_back(draw(room));
  }
  // To cells before `end`, which never falls.
  void drift(int64_t end) {
    present_.resize(static_cast<std::size_t>(end));
    const auto changes = static_cast<int64_t>(kDrift * static_cast<double>(chosen_.size()));
    for (int64_t i = 0; i < changes; ++i) {
      int64_t& cell = chosen_[static_cast<std::size_t>(random_.below(static_cast<int64_t>(chosen_.size())))];
      const int64_t now = draw(end);
      present_[static_cast<std::size_t>(cell)] = false;
      cell = now;
    }
  }
  template <class F> void each(int64_t end, const F& f) const {
    for (int64_t cell = 0; cell < end; ++cell)
      if (present_[static_cast<std::size_t>(cell)]) f(cell);
  }

 private:
  int64_t draw(int64_t end) {
    int64_t cell = random_.below(end);
    while (present_[static_cast<std::size_t>(cell)]) cell = random_.below(end);
    present_[static_cast<std::size_t>(cell)] = true;
    return cell;
  }
  random_words random_;
  std::vector<bool> present_;
  std::vector<int64_t> chosen_;
};

void fill_lists(const selected_spec& s, selected_tensor& cells, selected_tensor& counts, uint64_t seed) {
  std::unique_ptr<drifting_set> older;
  for (int64_t i = 0; i < s.queries; ++i) {
    int32_t* out = cells.as<int32_t>() + i * cells.shape[1];
    const int64_t seen = s.cells_of(i), recent = seen <= s.width ? 0 : seen - std::min(kRecent, s.width);
    if (recent > 0 && !older) older = std::make_unique<drifting_set>(s.width - (seen - recent), recent, seed);
    else if (recent > 0) older->drift(recent);
    if (older) older->each(recent, [&](int64_t cell) { *out++ = static_cast<int32_t>(cell); });
    for (int64_t cell = recent; cell < seen; ++cell) *out++ = static_cast<int32_t>(cell);
    counts.as<int32_t>()[i] = static_cast<int32_t>(out - (cells.as<int32_t>() + i * cells.shape[1]));
  }
}

}  // namespace

int64_t selected_spec::cells_of(int64_t query) const { return std::max<int64_t>(1, context - queries + 1 + query); }

cqsa_tensor selected_tensor::view(void* data, int32_t device_type) {
  return {data, device_type, 0, static_cast<int32_t>(shape.size()), dtype, shape.data(), strides.data(), 0};
}

selected_data::selected_data(const selected_spec& s) : spec(s) {
  const bool codes = s.kv == CQSA_DTYPE_I8;
  q = make(CQSA_DTYPE_F32, {s.queries, s.heads, s.head_dim});
  k = make_pool(s, s.kv, s.head_dim);
  v = make_pool(s, s.kv, s.head_dim);
  page_table = make(CQSA_DTYPE_I32, {s.pages()});
  cells = make(CQSA_DTYPE_I32, {s.queries, std::min(s.context, s.width)});
  counts = make(CQSA_DTYPE_I32, {s.queries});
  const auto stream = [&](uint64_t number) { return s.seed * 1000003 + number; };
  fill_queries(q, stream(1));
  if (codes) {
    fill_codes(k, stream(2));
    fill_codes(v, stream(3));
    k_scale = make_pool(s, CQSA_DTYPE_F16, s.head_dim / s.group);
    v_scale = make_pool(s, CQSA_DTYPE_F16, s.head_dim / s.group);
    fill_scales(k_scale, stream(4));
    fill_scales(v_scale, stream(5));
  } else {
    fill_normal(k, kKeySigma, stream(2));
    fill_normal(v, kValueSigma, stream(3));
  }
  fill_table(page_table, stream(6));
  fill_lists(s, cells, counts, stream(7));
}

void selected_data::decode(const selected_tensor& x, const selected_tensor& scale, int64_t cell, int64_t kv_head, double* to) const {
  const int64_t page = page_table.as<int32_t>()[cell / spec.page_size], row = cell % spec.page_size;
  const auto at = [&](const selected_tensor& t) {
    return &t.bytes[static_cast<std::size_t>((page * t.strides[0] + row * t.strides[1] + kv_head * t.strides[2]) * type_of(t.dtype).bytes)];
  };
  decode_row(x.dtype, at(x), 1, spec.head_dim, to);
  if (spec.kv != CQSA_DTYPE_I8) return;
  for (int64_t c = 0; c < spec.head_dim; ++c) to[c] *= tool::decode(CQSA_DTYPE_F16, at(scale) + 2 * (c / spec.group));
}

}  // namespace tool
