// SPDX-License-Identifier: Apache-2.0
#include "check.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "elements.h"
#include "interrupt.h"
#include "parallel.h"

namespace tool {
namespace {

constexpr int64_t kFar = int64_t{1} << 60;  // a window wider than any sequence
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Address of an element; an axis of size 1 is the same for every index.
const std::byte* address(const cqsa_tensor& t, const int64_t* index, int axes) {
  int64_t offset = 0;
  for (int axis = 0; axis < axes; ++axis)
    if (t.shape[axis] != 1) offset += index[axis] * t.strides[axis];
  return static_cast<const std::byte*>(t.data) + t.byte_offset + offset * type_of(t.dtype).bytes;
}
const std::byte* address(const cqsa_tensor& t, std::initializer_list<int64_t> index) {
  return address(t, index.begin(), static_cast<int>(index.size()));
}
double value(const cqsa_tensor& t, std::initializer_list<int64_t> index) { return decode(t.dtype, address(t, index)); }
int64_t integer(const cqsa_tensor& t, std::initializer_list<int64_t> index) {
  return static_cast<int64_t>(value(t, index));  // exact up to 2^53
}

const std::function<void()> nothing = [] {};

struct problem {
  const cqsa_attention_params& p;
  const cqsa_attention_args& a;
  const std::function<void()>& now_and_then;

  void pause() const {
    if (interrupted()) throw interrupted_error();
    now_and_then();
  }
  bool has(uint32_t flag) const { return p.flags & flag; }
  bool varlen() const { return has(CQSA_ATTENTION_VARLEN); }
  int64_t query_rows() const { return varlen() ? p.total_q : p.batch * p.seqlen_q; }
  double scale() const { return p.softmax_scale != 0 ? p.softmax_scale : 1 / std::sqrt(static_cast<double>(p.head_dim)); }
};

// One row of q: which it is, and the keys of its sequence.
struct row_place {
  int64_t batch, head, kv_head;
  int64_t i;                 // position in its sequence
  int64_t q_row;             // varlen: row of q; otherwise i
  int64_t first_key;         // varlen: row of k of key 0; otherwise 0
  int64_t seqlen_q, seqlen_k;
  int64_t offset;            // query i stands beside key i + offset
};

// `flat` counts rows of q in the order batch, head, position (varlen: head, row).
row_place place_of(const problem& x, int64_t flat) {
  row_place r{};
  const int64_t rows = x.varlen() ? x.p.total_q : x.p.seqlen_q;
  r.q_row = r.i = flat % rows;
  r.head = flat / rows % x.p.num_heads;
  r.batch = flat / rows / x.p.num_heads;
  r.kv_head = r.head / (x.p.num_heads / x.p.num_kv_heads);
  r.seqlen_q = x.p.seqlen_q;
  r.seqlen_k = x.p.seqlen_k;
  if (x.varlen()) {
    const cqsa_tensor& cu = *x.a.cu_seqlens_q;
    r.batch = 0;
    while (r.batch < x.p.batch && integer(cu, {r.batch + 1}) <= r.q_row) ++r.batch;
    if (r.batch == x.p.batch) return r;  // past the last segment: no keys
    const int64_t begin = integer(cu, {r.batch});
    r.i = r.q_row - begin;
    r.seqlen_q = integer(cu, {r.batch + 1}) - begin;
    if (x.a.cu_seqlens_k) {
      r.first_key = integer(*x.a.cu_seqlens_k, {r.batch});
      r.seqlen_k = integer(*x.a.cu_seqlens_k, {r.batch + 1}) - r.first_key;
    }
  }
  if (x.a.seqused_k) r.seqlen_k = integer(*x.a.seqused_k, {r.batch});
  r.offset = x.p.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : r.seqlen_k - r.seqlen_q;
  return r;
}

// Keys first .. last - 1 that the causal rule and the window leave.
struct key_range {
  int64_t first, last;
};
key_range visible_range(const problem& x, const row_place& r) {
  const int64_t here = r.i + r.offset;
  key_range keys{0, r.seqlen_k};
  if (x.varlen() && r.batch == x.p.batch) keys.last = 0;
  if (x.p.causal != CQSA_CAUSAL_NONE) keys.last = std::min(keys.last, here + 1);
  if (!x.has(CQSA_ATTENTION_WINDOW)) return keys;
  if (x.p.window_left >= 0) keys.first = std::max(keys.first, here - std::min(x.p.window_left, kFar));
  if (x.p.window_right >= 0 && x.p.window_right < keys.last - here) keys.last = here + x.p.window_right + 1;
  return keys;
}

// Leading indices of row j of k and v, the channel left out. False: the key is on a masked page.
bool key_index(const problem& x, const row_place& r, int64_t j, int64_t (&index)[4]) {
  if (x.has(CQSA_ATTENTION_PAGED)) {
    index[0] = integer(*x.a.page_table, {r.batch, j / x.p.page_size});
    index[1] = j % x.p.page_size;
    index[2] = r.kv_head;
    return index[0] >= 0;
  }
  if (x.varlen()) {
    index[0] = r.first_key + j;
    index[1] = r.kv_head;
  } else {
    index[0] = r.batch;
    index[1] = r.kv_head;
    index[2] = j;
  }
  return true;
}

// The row at `index` of k or v, as numbers. Its scale has no axis (or one element), the heads, the row's own axes, or these
// and one of groups of channels.
template <class T>
void read_key(const problem& x, const row_place& r, const cqsa_tensor& t, const cqsa_tensor* scale, int64_t (&index)[4],
              T* out) {
  const int lead = t.ndim - 1;
  index[lead] = 0;
  decode_row(t.dtype, address(t, index, t.ndim), t.strides[lead], t.shape[lead], out);
  if (!scale) return;
  for (int64_t d = 0; d < t.shape[lead]; ++d) {
    index[lead] = d / std::max<int64_t>(x.p.kv_group, 1);
    const std::byte* from = scale->ndim < 2 ? address(*scale, &r.kv_head, scale->ndim) : address(*scale, index, scale->ndim);
    out[d] *= static_cast<T>(decode(scale->dtype, from));
  }
}

double slope_of(const problem& x, const row_place& r) {
  if (!x.a.alibi_slopes) return 0;
  const cqsa_tensor& slopes = *x.a.alibi_slopes;
  return slopes.ndim == 1 ? value(slopes, {r.head}) : value(slopes, {r.batch, r.head});
}

struct row_result {
  std::vector<double> out;
  double lse;
};

// softmax(q k^T) v of one row in arithmetic T, one key after the other with a running maximum. The weights are rounded to
// `weight_type` before they meet v, as a matrix product of that type would have them.
template <class T> row_result attend(const problem& x, const row_place& r, cqsa_dtype weight_type) {
  const int64_t dim = x.p.head_dim, dim_v = x.p.head_dim_v;
  // Past the last segment: no sequence, so no key, no slope and no sink.
  if (x.varlen() && r.batch == x.p.batch) return {std::vector<double>(dim_v, 0.0), -kInfinity};
  std::vector<T> q(dim), k(dim), v(dim_v), acc(dim_v, T(0));
  const cqsa_tensor& tq = *x.a.q;
  const std::byte* q_row = x.varlen() ? address(tq, {r.q_row, r.head, 0}) : address(tq, {r.batch, r.head, r.i, 0});
  decode_row(tq.dtype, q_row, tq.strides[tq.ndim - 1], dim, q.data());

  const T scale = static_cast<T>(x.scale()), cap = static_cast<T>(x.p.softcap), slope = static_cast<T>(slope_of(x, r));
  T maximum = x.a.sinks ? static_cast<T>(value(*x.a.sinks, {r.head})) : -std::numeric_limits<T>::infinity();
  T sum = x.a.sinks && maximum > -std::numeric_limits<T>::infinity() ? T(1) : T(0);

  const key_range keys = visible_range(x, r);
  int64_t index[4] = {};
  for (int64_t j = keys.first; j < keys.last; ++j) {
    if ((j & 0x3FF) == 0) x.pause();
    if (x.a.mask && value(*x.a.mask, {r.batch, r.head, r.i, j}) == 0) continue;
    if (!key_index(x, r, j, index)) continue;
    read_key(x, r, *x.a.k, x.a.k_scale, index, k.data());
    T s = 0;
    for (int64_t d = 0; d < dim; ++d) s += q[d] * k[d];
    s *= scale;
    if (cap > 0) s = cap * std::tanh(s / cap);
    if (x.a.bias) s += static_cast<T>(value(*x.a.bias, {r.batch, r.head, r.i, j}));
    if (x.a.alibi_slopes) s -= slope * static_cast<T>(std::llabs(r.i + r.offset - j));
    if (s == -std::numeric_limits<T>::infinity()) continue;

    if (s > maximum) {
      const T shrink = std::exp(maximum - s);
      sum *= shrink;
      for (T& a : acc) a *= shrink;
      maximum = s;
    }
    T weight = std::exp(s - maximum);
    sum += weight;
    if (weight_type != CQSA_DTYPE_NONE) weight = static_cast<T>(round_to(weight_type, static_cast<double>(weight)));
    read_key(x, r, *x.a.v, x.a.v_scale, index, v.data());
    for (int64_t d = 0; d < dim_v; ++d) acc[d] += weight * v[d];
  }

  row_result result{std::vector<double>(dim_v), static_cast<double>(sum > 0 ? maximum + std::log(sum) : maximum)};
  // A row with no key at all is zero; NaN in a visible key stays NaN.
  if (sum == 0) result.lse = -kInfinity;
  for (int64_t d = 0; d < dim_v; ++d) result.out[d] = sum == 0 ? 0 : static_cast<double>(acc[d] / sum);
  return result;
}

// |a - b| where equal infinities and two NaN agree, and anything else that is not finite is infinitely wrong.
double distance(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) return 0;
  const double d = std::fabs(a - b);
  return std::isfinite(d) ? d : kInfinity;
}

struct totals {
  double max_abs = 0, naive_max_abs = 0, lse_max_abs = 0, naive_lse_max_abs = 0;
  double error2 = 0, naive2 = 0, exact2 = 0, got2 = 0, dot = 0;
  double largest = 0, largest_lse = 0;

  void add(double exact, double naive, double got) {
    const double e = distance(got, exact), n = distance(naive, exact);
    max_abs = std::max(max_abs, e);
    // Where the naive computation overflows it allows nothing.
    if (std::isfinite(n)) naive_max_abs = std::max(naive_max_abs, n);
    if (!std::isfinite(exact)) return;
    largest = std::max(largest, std::fabs(exact));
    error2 += e * e;
    if (std::isfinite(n)) naive2 += n * n;
    exact2 += exact * exact;
    got2 += got * got;
    dot += exact * got;
  }
  void add_lse(double exact, double naive, double got) {
    lse_max_abs = std::max(lse_max_abs, distance(got, exact));
    if (const double n = distance(naive, exact); std::isfinite(n)) naive_lse_max_abs = std::max(naive_lse_max_abs, n);
    if (std::isfinite(exact)) largest_lse = std::max(largest_lse, std::fabs(exact));
  }
  void merge(const totals& o) {
    for (auto field : {&totals::max_abs, &totals::naive_max_abs, &totals::lse_max_abs, &totals::naive_lse_max_abs,
                       &totals::largest, &totals::largest_lse})
      this->*field = std::max(this->*field, o.*field);
    for (auto field : {&totals::error2, &totals::naive2, &totals::exact2, &totals::got2, &totals::dot})
      this->*field += o.*field;
  }
};

struct row_answer {
  row_result exact, naive;
};

row_answer answer_of(const problem& x, int64_t flat) {
  const row_place r = place_of(x, flat);
  if (x.p.dtype_q == CQSA_DTYPE_F64)
    return {attend<long double>(x, r, CQSA_DTYPE_NONE), attend<double>(x, r, x.p.dtype_q)};
  return {attend<double>(x, r, CQSA_DTYPE_NONE), attend<float>(x, r, x.p.dtype_q)};
}

void compare_row(const problem& x, int64_t flat, const row_answer& answer, totals& sums) {
  const row_place r = place_of(x, flat);
  const cqsa_tensor& out = *x.a.out;
  std::vector<double> got(x.p.head_dim_v);
  const std::byte* row = x.varlen() ? address(out, {r.q_row, r.head, 0}) : address(out, {r.batch, r.head, r.i, 0});
  decode_row(out.dtype, row, out.strides[out.ndim - 1], x.p.head_dim_v, got.data());
  for (std::size_t d = 0; d < got.size(); ++d)
    sums.add(answer.exact.out[d], round_to(out.dtype, answer.naive.out[d]), got[d]);

  if (!x.a.lse) return;
  const double lse = x.varlen() ? value(*x.a.lse, {r.head, r.q_row}) : value(*x.a.lse, {r.batch, r.head, r.i});
  sums.add_lse(answer.exact.lse, round_to(x.a.lse->dtype, answer.naive.lse), lse);
}

uint64_t splitmix64(uint64_t& state) {
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// One random row from each of `wanted` equal parts of all rows, which are ordered by batch, head and position.
std::vector<int64_t> sample(int64_t total, int64_t wanted, uint64_t seed) {
  std::vector<int64_t> rows;
  const int64_t count = std::min(total, wanted);
  for (int64_t part = 0; part < count; ++part) {
    const auto begin = static_cast<int64_t>(static_cast<long double>(total) * part / count);
    const auto end = static_cast<int64_t>(static_cast<long double>(total) * (part + 1) / count);
    rows.push_back(begin + static_cast<int64_t>(splitmix64(seed) % static_cast<uint64_t>(std::max<int64_t>(end - begin, 1))));
  }
  // Mistakes like the borders.
  if (count > 0) rows.front() = 0;
  if (count > 1) rows.back() = total - 1;
  return rows;
}

// sqrt(a / b), where nothing compared with nothing is 0.
double ratio(double a, double b) { return a == 0 ? 0 : b == 0 ? kInfinity : std::sqrt(a / b); }

check_report report_of(const totals& t, const problem& x, int64_t rows, double tolerance) {
  const cqsa_dtype type = x.a.out->dtype;
  check_report report;
  report.rows = rows;
  report.max_abs = t.max_abs;
  report.naive_max_abs = t.naive_max_abs;
  report.relative_rms = ratio(t.error2, t.exact2);
  report.naive_relative_rms = ratio(t.naive2, t.exact2);
  report.cosine = t.exact2 > 0 && t.got2 > 0 ? t.dot / std::sqrt(t.exact2 * t.got2) : t.exact2 == t.got2 ? 1 : 0;
  report.allowed_max_abs = tolerance * (2 * t.naive_max_abs + 2 * ulp(type, t.largest));
  report.allowed_relative_rms = tolerance * (2 * report.naive_relative_rms + ulp(type, 1));
  report.pass = std::isfinite(t.max_abs) && std::isfinite(report.relative_rms) && t.max_abs <= report.allowed_max_abs &&
                report.relative_rms <= report.allowed_relative_rms;
  report.has_lse = x.a.lse != nullptr;
  if (!report.has_lse) return report;
  report.lse_max_abs = t.lse_max_abs;
  report.lse_allowed = tolerance * (2 * t.naive_lse_max_abs + 8 * ulp(x.a.lse->dtype, t.largest_lse));
  report.pass = report.pass && std::isfinite(report.lse_max_abs) && report.lse_max_abs <= report.lse_allowed;
  return report;
}

}  // namespace

check_report check_rows(const cqsa_attention_params& params, const cqsa_attention_args& args, int64_t rows, uint64_t seed,
                        int threads, const std::function<void()>& now_and_then) {
  const problem x{params, args, now_and_then};
  const std::vector<int64_t> chosen = sample(x.query_rows() * params.num_heads, rows, seed);
  std::mutex lock;
  totals sums;
  in_parallel(chosen.size(), threads, [&](std::size_t i) {
    totals mine;
    compare_row(x, chosen[i], answer_of(x, chosen[i]), mine);
    const std::lock_guard guard(lock);
    sums.merge(mine);
  });
  return report_of(sums, x, static_cast<int64_t>(chosen.size()), 1);
}

struct row_reference::contents {
  const cqsa_attention_params& params;
  cqsa_attention_args args;
  std::vector<int64_t> rows;
  std::vector<row_answer> answers;
};

row_reference::row_reference(const cqsa_attention_params& params, const cqsa_attention_args& args, int64_t rows, uint64_t seed,
                             int threads)
    : contents_(new contents{params, args, {}, {}}) {
  const problem x{params, args, nothing};
  const int64_t total = x.query_rows() * params.num_heads;
  contents_->rows = sample(total, rows > 0 ? rows : total, seed);
  contents_->answers.resize(contents_->rows.size());
  in_parallel(contents_->rows.size(), threads,
              [&](std::size_t i) { contents_->answers[i] = answer_of(x, contents_->rows[i]); });
}

row_reference::~row_reference() = default;

check_report row_reference::compare(double tolerance) const {
  const problem x{contents_->params, contents_->args, nothing};
  totals sums;
  for (std::size_t i = 0; i < contents_->rows.size(); ++i) compare_row(x, contents_->rows[i], contents_->answers[i], sums);
  return report_of(sums, x, static_cast<int64_t>(contents_->rows.size()), tolerance);
}

std::vector<bool> seen_keys(const cqsa_attention_params& params, const cqsa_attention_args& args) {
  const problem x{params, args, nothing};
  const cqsa_tensor& k = *args.k;
  int64_t total = 1;
  for (int axis = 0; axis + 1 < k.ndim; ++axis) total *= k.shape[axis];
  std::vector<bool> seen(static_cast<std::size_t>(total));

  // For each sequence and key head the key ranges of its queries, as +1 where one begins and -1 behind its end.
  struct keys_of_head {
    row_place place{};
    std::vector<int64_t> steps;
  };
  std::vector<keys_of_head> heads(static_cast<std::size_t>(params.batch * params.num_kv_heads));
  const int64_t rows = x.query_rows() * params.num_heads;
  for (int64_t flat = 0; flat < rows; ++flat) {
    const row_place r = place_of(x, flat);
    const key_range keys = visible_range(x, r);
    if (keys.first >= keys.last) continue;
    keys_of_head& head = heads[static_cast<std::size_t>(r.batch * params.num_kv_heads + r.kv_head)];
    head.place = r;
    head.steps.resize(static_cast<std::size_t>(r.seqlen_k + 1));
    const auto mark = [&](int64_t first, int64_t last) {
      ++head.steps[static_cast<std::size_t>(first)];
      --head.steps[static_cast<std::size_t>(last)];
    };
    if (!args.mask) mark(keys.first, keys.last);
    for (int64_t j = keys.first; args.mask && j < keys.last; ++j)
      if (*address(*args.mask, {r.batch, r.head, r.i, j}) != std::byte{0}) mark(j, j + 1);
  }
  for (const keys_of_head& head : heads) {
    int64_t queries = 0, index[4] = {};
    for (std::size_t j = 0; j < head.steps.size(); ++j) {
      queries += head.steps[j];
      if (queries == 0 || !key_index(x, head.place, static_cast<int64_t>(j), index)) continue;
      int64_t flat = 0;
      for (int axis = 0; axis + 1 < k.ndim; ++axis) flat = flat * k.shape[axis] + index[axis];
      seen[static_cast<std::size_t>(flat)] = true;
    }
  }
  return seen;
}

double visible_pairs(const cqsa_attention_params& params, const cqsa_attention_args& args) {
  const problem x{params, args, nothing};
  const int64_t rows = x.query_rows() * params.num_heads;
  int64_t pairs = 0;
  for (int64_t flat = 0; flat < rows; ++flat) {
    const key_range keys = visible_range(x, place_of(x, flat));
    pairs += std::max<int64_t>(keys.last - keys.first, 0);
  }
  return static_cast<double>(pairs);
}

}  // namespace tool
