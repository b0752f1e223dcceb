// SPDX-License-Identifier: Apache-2.0
// The combine kernel with its host part against fp64: random states of several splits, empty ones full of NaN.
#include "backends/gpu/combine_leaf.h"
#include "backends/gpu/row_end.cuh"
#include "simt_leaf.h"

#include <array>

using namespace cqsa::simt;

namespace {

// What a state stands for, in fp64.
struct exact_state {
  double m = -inf, l = 0;
  std::vector<double> acc;
};

struct combine_case {
  problem p;
  std::vector<char> memory;
  cqsa::gpu::split_states states{};
  std::vector<exact_state> merged;  // by row of a split
  bool varlen = false, state_out = false;
  int64_t state_row = 0;
  std::vector<cqsa_rect> rect;
  std::vector<float> acc, m, l;
};

// Row of the outputs of row r of batch item b; -1: there is none.
int64_t output_row(const combine_case& c, int64_t b, int64_t r) {
  if (!c.rect.empty()) return c.rect[0].q_row + r;
  if (!c.varlen) return r;
  return r < c.p.cu_q[size_t(b) + 1] - c.p.cu_q[size_t(b)] ? c.p.cu_q[size_t(b)] + r : -1;
}

void draw_states(dice& d, combine_case& c) {
  const cqsa::gpu::split_states& s = c.states;
  const int64_t dv = c.p.leaf.head_dim_v;
  c.merged.assign(size_t(s.rows), {});
  for (int64_t r = 0; r < s.rows; ++r) {
    const bool no_key = d.once_in(12);
    exact_state& sum = c.merged[size_t(r)];
    sum.acc.assign(size_t(dv), 0);
    std::vector<double> m(size_t(s.splits), -inf);
    for (int64_t n = 0; n < s.splits; ++n) {
      const bool empty = no_key || d.once_in(4);
      const int64_t at = n * s.rows + r;
      m[size_t(n)] = s.m[at] = empty ? -INFINITY : float(4 * d.normal());
      s.l[at] = empty ? 0.0f : float(1 + d.upto(100));
      for (int64_t i = 0; i < dv; ++i) s.acc[at * dv + i] = empty ? NAN : float(d.normal());
      sum.m = std::max(sum.m, m[size_t(n)]);
    }
    for (int64_t n = 0; n < s.splits; ++n) {
      if (m[size_t(n)] == -inf) continue;
      const double w = std::exp(m[size_t(n)] - sum.m);
      sum.l += w * s.l[n * s.rows + r];
      for (int64_t i = 0; i < dv; ++i) sum.acc[size_t(i)] += w * double(s.acc[(n * s.rows + r) * dv + i]);
    }
  }
}

void expect_result(combine_case& c) {
  const cqsa_attention_leaf& x = c.p.leaf;
  c.p.exact_out.fill([](auto...) { return 0.0; });
  c.p.exact_lse.fill([](auto...) { return -inf; });
  for (int64_t r = 0; r < c.states.rows; ++r) {
    const int64_t row = r % c.states.row_capacity, h = r / c.states.row_capacity % x.num_heads, b = r / c.states.row_capacity / x.num_heads;
    const int64_t to = output_row(c, b, row), item = c.varlen ? 0 : b;
    if (to < 0) continue;
    const exact_state& s = c.merged[size_t(r)];
    const double sink = c.p.sinks.empty() ? -inf : c.p.sinks.read(0, h, 0, 0), top = std::max(s.m, sink);
    if (top == -inf) continue;
    const double sum = std::exp(s.m - top) * s.l + std::exp(sink - top);
    c.p.exact_lse.write(item, h, to, 0, top + std::log(sum));
    for (int64_t i = 0; i < x.head_dim_v; ++i) c.p.exact_out.write(item, h, to, i, s.acc[size_t(i)] * std::exp(s.m - top) / sum);
  }
}

void draw_shape(dice& d, combine_case& c, int64_t* capacity, int64_t* out_rows) {
  cqsa_attention_leaf& x = c.p.leaf;
  x.batch = 1 + d.upto(2), x.num_heads = 1 + d.upto(3), x.num_kv_heads = 1, x.head_dim = 8;
  x.head_dim_v = d.pick({1, 3, 8, 64, 66, 100, 128, 200, 256, 512});
  *capacity = x.seqlen_q = 1 + d.upto(5);
  *out_rows = *capacity;
  c.varlen = d.once_in(3), c.state_out = !c.varlen && d.once_in(4);
  if (c.varlen) {
    c.p.cu_q = {0};
    for (int64_t b = 0; b < x.batch; ++b) c.p.cu_q.push_back(c.p.cu_q.back() + int32_t(d.upto(*capacity)));
    *out_rows = c.p.cu_q.back();
  } else if (d.once_in(3)) {
    c.rect = {{0, 0, *capacity, 10, 3, 0, 2}};
    *out_rows += 4;
  }
}

std::unique_ptr<combine_case> make_case(uint32_t seed) {
  dice d(seed);
  auto c = std::make_unique<combine_case>();
  cqsa_attention_leaf& x = c->p.leaf;
  int64_t capacity, out_rows;
  draw_shape(d, *c, &capacity, &out_rows);
  const int64_t splits = d.once_in(6) ? 33 + d.upto(60) : 1 + d.upto(12), items = c->varlen ? 1 : x.batch;
  c->memory.resize(size_t(cqsa::gpu::split_bytes(x, capacity, splits)));
  c->states = cqsa::gpu::split_memory(x, capacity, splits, c->memory.data());
  c->p.out = tensor(d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {items, x.num_heads, out_rows, x.head_dim_v},
                    layout(d.upto(num_layouts - 1)));
  c->p.lse = tensor(CQSA_DTYPE_F32, {items, x.num_heads, out_rows, 1}, layout(d.upto(2)));
  c->p.exact_out = tensor(CQSA_DTYPE_F64, {items, x.num_heads, out_rows, x.head_dim_v});
  c->p.exact_lse = tensor(CQSA_DTYPE_F64, {items, x.num_heads, out_rows, 1});
  if (d.once_in(3)) {
    c->p.sinks = tensor(CQSA_DTYPE_F32, {1, x.num_heads, 1, 1});
    c->p.sinks.fill([&](auto...) { return d.once_in(4) ? -inf : 4 * d.normal(); });
  }
  draw_states(d, *c);
  expect_result(*c);
  return c;
}

// "" when the merged states are right.
std::string state_differs(const combine_case& c, int64_t state_rows, int64_t first) {
  const int64_t dv = c.p.leaf.head_dim_v;
  for (int64_t r = 0; r < c.states.rows; ++r) {
    const int64_t at = r / c.states.row_capacity * state_rows + first + r % c.states.row_capacity;
    const exact_state& want = c.merged[size_t(r)];
    const auto wrong = [](double got, double x) { return !(got == x || std::fabs(got - x) <= 1e-4 + 1e-5 * std::fabs(x)); };
    if (wrong(c.m[size_t(at)], want.m) || wrong(c.l[size_t(at)], want.l)) return "state of row " + std::to_string(r);
    for (int64_t i = 0; i < dv; ++i)
      if (wrong(c.acc[size_t(at * dv + i)], want.acc[size_t(i)]))
        return "acc of row " + std::to_string(r) + ", channel " + std::to_string(i);
  }
  return "";
}

std::string run_case(combine_case& c, int lanes, uint64_t seed) {
  cqsa::simt::device device = device_with(lanes, seed);
  guarded out(c.p.out), lse(c.p.lse);
  cqsa_attention_leaf leaf = c.p.with(c.p.out, c.p.lse);
  if (c.varlen) leaf.total_q = c.p.cu_q.back();
  if (!c.rect.empty()) leaf.rects = c.rect.data(), leaf.num_rects = 1;
  const int64_t state_rows = c.states.row_capacity + 3, first = c.rect.empty() ? 0 : c.rect[0].state_row;
  const size_t states = size_t(leaf.batch * leaf.num_heads * state_rows);
  c.acc.assign(states * size_t(leaf.head_dim_v), NAN), c.m.assign(states, NAN), c.l.assign(states, NAN);
  if (c.state_out) {
    leaf.flags = CQSA_LEAF_STATE_OUT;
    leaf.state_acc = c.acc.data(), leaf.state_m = c.m.data(), leaf.state_l = c.l.data(), leaf.state_rows = state_rows;
  }
  if (cqsa::gpu::combine(&device, leaf, c.states, nullptr) != CQSA_OK) return last_error();
  if (c.state_out) return state_differs(c, state_rows, first);
  // Rows beside the rectangle are not the call's.
  const auto row_differs = [&](const tensor& got, const tensor& want) {
    std::string text;
    got.each([&](int64_t b, int64_t h, int64_t r, int64_t i) {
      if (!c.rect.empty() && (r < 3 || r >= 3 + c.states.row_capacity)) return;
      const double g = got.read(b, h, r, i), w = want.read(b, h, r, i);
      if (!(g == w || std::fabs(g - w) <= 2e-5 + 1.01 * rounding(got.view.dtype) * std::fabs(w)) && text.empty())
        text = "row " + std::to_string(r) + " channel " + std::to_string(i) + " is " + std::to_string(g) + ", wanted " + std::to_string(w);
    });
    return text;
  };
  const std::string text = row_differs(c.p.out, c.p.exact_out) + row_differs(c.p.lse, c.p.exact_lse);
  if (!text.empty()) return text;
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

}  // namespace

TEST_CASE("simt combine: random states, with the same bits for both lane counts") {
  for (uint32_t seed = 1; seed <= 150; ++seed) {
    INFO("seed " << seed);
    auto c = make_case(seed);
    std::array<std::vector<char>, 2> bits;
    for (const int lanes : {32, 64}) {
      REQUIRE(run_case(*c, lanes, seed) == "");
      bits[lanes / 64] = c->p.out.memory;
    }
    CHECK(bits[0] == bits[1]);
  }
}

TEST_CASE("simt combine: one split changes nothing") {
  combine_case c;
  cqsa_attention_leaf& x = c.p.leaf;
  x.batch = 1, x.num_heads = 2, x.num_kv_heads = 1, x.head_dim = x.head_dim_v = 16, x.seqlen_q = 1;
  c.memory.resize(size_t(cqsa::gpu::split_bytes(x, 1, 1)));
  c.states = cqsa::gpu::split_memory(x, 1, 1, c.memory.data());
  c.p.out = tensor(CQSA_DTYPE_F32, {1, 2, 1, 16}), c.p.lse = tensor(CQSA_DTYPE_F32, {1, 2, 1, 1});
  std::vector<float> acc(32), m{1.5f, -3}, l{2, 3};
  for (int i = 0; i < 32; ++i) c.states.acc[i] = 0.1f * float(i);
  for (int i = 0; i < 2; ++i) c.states.m[i] = m[size_t(i)], c.states.l[i] = l[size_t(i)];
  cqsa::simt::device device = device_with(32, 1);
  cqsa_attention_leaf leaf = c.p.with(c.p.out, c.p.lse);
  REQUIRE(cqsa::gpu::combine(&device, leaf, c.states, nullptr) == CQSA_OK);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t i = 0; i < 16; ++i) CHECK(float(c.p.out.read(0, h, 0, i)) == c.states.acc[h * 16 + i] / l[size_t(h)]);
}

TEST_CASE("simt combine: every mutant and every meeting place is noticed") {
  const auto failures = [] {
    for (uint32_t seed = 1; seed <= 12; ++seed)
      for (const int lanes : {32, 64})
        if (!run_case(*make_case(seed), lanes, seed).empty()) return true;
    return false;
  };
  record_sites(true);
  REQUIRE_FALSE(failures());
  const std::vector<call_site> sites = recorded_sites();
  record_sites(false);
  CHECK(sites.size() == 4);
  for (const call_site& site : sites) {
    leave_out(&site);
    INFO(site.what << " at " << site.file << ":" << site.line);
    CHECK(failures());
    leave_out(nullptr);
  }
  for (const int mutant : {11, 12}) {
    cqsa_simt_mutant = mutant;
    INFO("mutant " << mutant);
    CHECK(failures());
    cqsa_simt_mutant = 0;
  }
}

// All kernels end their rows so.
TEST_CASE("simt combine: the end of a row is that of f64, in f32") {
  dice d(5);
  const float no_sink = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < 20000; ++i) {
    const float m = float(20 * d.normal()), l = float(std::exp2(std::clamp(d.normal() * (i % 2 ? 40 : 3), -120.0, 120.0)));
    const float sink = i % 3 ? no_sink : float(20 * d.normal());
    const cqsa::gpu::row_end end = cqsa::gpu::end_row(m, l, sink);
    const double top = std::max(double(m), double(sink)), factor = std::exp(m - top);
    const double sum = l * factor + (i % 3 ? 0 : std::exp(sink - top)), lse = top + std::log(sum);
    INFO(m << " " << l << " " << sink);
    REQUIRE(std::fabs(end.lse - lse) <= 1e-7 * (1 + std::fabs(lse)));
    REQUIRE(std::fabs(end.divisor - sum) <= 1.2e-7 * sum);
    REQUIRE(std::fabs(end.factor - factor) <= 1.2e-7 * factor + 1e-37);
  }
  const double log_of[][2] = {{0, -inf}, {inf, inf}, {-1, nan64}, {nan64, nan64}, {1, 0}, {0x1p-140, std::log(0x1p-140)}};
  for (const auto& [x, want] : log_of) {
    const double got = cqsa::gpu::log_of_sum(float(x));
    CHECK((got == want || (got != got && want != want) || std::fabs(got - want) < 1e-5));
  }
}
