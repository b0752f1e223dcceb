// SPDX-License-Identifier: Apache-2.0
// Random quantizations of everything that cqsa_fp8_quantize_args can say, and what has to come out.
#pragma once
#include <sstream>

#include "fp8_oracle.h"

namespace fp8_test {

struct side_problem {
  bool wanted = false;
  int64_t block[2] = {0, 0};
  int32_t layout = CQSA_FP8_SCALES_STRIDED;
  box out, scale_in, scale, scale_inv;
};

struct problem {
  int64_t batch = 1, rows = 1, cols = 1;
  bool three_axes = false;
  box x, x_scale_inv, up, groups, rng, skip, amax, column_sum, counters;
  int64_t x_block[2] = {0, 0};
  side_problem row, transposed;
  int32_t source = CQSA_FP8_CURRENT, nan_policy = CQSA_FP8_NAN_PROPAGATE, margin = 0;
  uint32_t flags = 0;
  float eps = 0, limit = 0;
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;

  int64_t all_rows() const { return batch * rows; }
  bool pow2(const side_problem& s) const { return (flags & CQSA_FP8_POW2) || (s.scale_inv.there() && s.scale_inv.dtype != CQSA_DTYPE_F32); }
  std::vector<box*> boxes() {
    return {&x, &x_scale_inv, &up, &groups, &rng, &skip, &amax, &column_sum, &counters, &row.out, &row.scale_in, &row.scale, &row.scale_inv,
            &transposed.out, &transposed.scale_in, &transposed.scale, &transposed.scale_inv};
  }
  std::vector<box*> inputs() { return {&x, &x_scale_inv, &up, &groups, &rng, &skip, &row.scale_in, &transposed.scale_in}; }

  const cqsa_fp8_quantize_args& bound() {
    args.flags = flags, args.source = source, args.nan_policy = nan_policy, args.margin = margin, args.eps = eps, args.amax_limit = limit;
    args.x = x.tensor(), args.x_scale_inv = x_scale_inv.tensor(), args.up = up.tensor(), args.groups = groups.tensor(), args.rng = rng.tensor();
    args.skip = skip.tensor(), args.amax = amax.tensor(), args.column_sum = column_sum.tensor(), args.counters = counters.tensor();
    std::copy_n(x_block, 2, args.x_block);
    bind(row, args.row), bind(transposed, args.transposed);
    args.ring = source == CQSA_FP8_RING ? &ring : nullptr;
    return args;
  }
  void bind(side_problem& s, cqsa_fp8_side& to) {
    to.out = s.out.tensor(), to.scale_in = s.scale_in.tensor(), to.scale = s.scale.tensor(), to.scale_inv = s.scale_inv.tensor();
    std::copy_n(s.block, 2, to.block);
    to.scale_layout = s.layout;
  }

  // Rows that are worked on, and the group of one.
  int64_t bottom() const { return groups.there() ? static_cast<int64_t>(groups.get(groups.count() - 1)) : all_rows(); }
  int64_t group_of(int64_t i) const {
    for (int64_t g = 0; g + 1 < groups.count(); ++g)
      if (i >= groups.get(g) && i < groups.get(g + 1)) return g;
    return -1;
  }
  bool per_group(const side_problem& s) const { return groups.there() && s.block[0] == 0; }
  int64_t grid_rows(const side_problem& s) const { return per_group(s) ? groups.count() - 1 : blocks(all_rows(), s.block[0]); }
  int64_t grid_cols(const side_problem& s) const { return blocks(cols, s.block[1]); }
  int64_t block_row(const side_problem& s, int64_t i) const { return per_group(s) ? group_of(i) : s.block[0] == 0 ? 0 : i / s.block[0]; }
  int64_t block_col(const side_problem& s, int64_t j) const { return s.block[1] == 0 ? 0 : j / s.block[1]; }

  float element(int64_t i, int64_t j) const {
    volatile float value = x.f32(i * cols + j);
    if (x_scale_inv.there()) {
      const int64_t r = x_block[0] == 0 ? 0 : i / x_block[0], c = x_block[1] == 0 ? 0 : j / x_block[1];
      value = value * x_scale_inv.f32(r * blocks(cols, x_block[1]) + c);
    }
    if (!up.there()) return value;
    const volatile float denominator = 1.0f + std::exp(-value), gate = value / denominator;
    return gate * up.f32(i * cols + j);
  }
};

// ---- what has to come out -----------------------------------------------------------------------------------------------------

struct grid {
  int64_t rows, cols;
  std::vector<float> amax;  // by policy, of each block
};

inline void join(float& amax, float x, int32_t policy) {
  const float size = std::fabs(x);
  if (policy == CQSA_FP8_NAN_IGNORE && !std::isfinite(size)) return;
  if (std::isnan(amax)) return;
  if (std::isnan(size) || size > amax) amax = size;
}

inline grid amaxes(const problem& p, const side_problem& s) {
  grid g{p.grid_rows(s), p.grid_cols(s), {}};
  g.amax.assign(static_cast<size_t>(g.rows * g.cols), 0.0f);
  for (int64_t i = 0; i < p.bottom(); ++i)
    for (int64_t j = 0; j < p.cols; ++j) join(g.amax[static_cast<size_t>(p.block_row(s, i) * g.cols + p.block_col(s, j))], p.element(i, j), p.nan_policy);
  return g;
}

inline bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, sizeof a) == 0; }

struct differences {
  std::ostringstream text;
  int count = 0;
  template <class... T>
  void say(const T&... parts) {
    if (++count <= 5) (text << ... << parts), text << "\n";
  }
};

struct expectation {
  const problem& p;
  scales ring_now{1, 1};  // what the ring published before the call
  float ring_largest = 1;
  differences wrong{};
  int64_t nans = 0, infinities = 0, saturated = 0;
  float amax = 0;

  // silu: within a few ulp.
  bool about(float a, float b) const { return same(a, b) || (p.up.there() && std::fabs(a - b) <= 4e-6f * std::fabs(b)); }

  scales scale_of_block(const side_problem& s, const grid& g, int64_t n) const {
    if (p.source == CQSA_FP8_CURRENT) return scale_of(g.amax[static_cast<size_t>(n)], {s.out.dtype, p.margin, p.pow2(s), p.eps, p.limit});
    float scale = p.source == CQSA_FP8_RING ? ring_now.scale : s.scale_in.f32(n);
    if (p.source == CQSA_FP8_RING && &s == &p.transposed && p.row.wanted) {
      const volatile float ratio = static_cast<float>(fp8_max(s.out.dtype)) / ring_largest;
      scale = clamp_scale(scale * ratio);
    }
    return {scale, 1.0f / scale};
  }

  void check_scale_inv(const side_problem& s, const grid& g, int64_t r, int64_t c, float wanted) {
    const box& out = s.scale_inv;
    const uint8_t byte = cqsa::f32_to_e8m0fnu(wanted);
    if (s.layout == CQSA_FP8_SCALES_PACKED) {
      const auto packed = static_cast<uint32_t>(load<int32_t>(out.at(r * ((g.cols + 3) / 4) + c / 4)));
      if ((packed >> (8 * (c % 4)) & 0xFF) != byte) wrong.say("packed scale ", r, " ", c, " is ", packed, " wanted byte ", int(byte));
    } else if (s.layout == CQSA_FP8_SCALES_TILED) {
      const int64_t tile = r / 128 * ((g.cols + 3) / 4) + c / 4, at = tile * 512 + r % 128 % 32 * 16 + r % 128 / 32 * 4 + c % 4;
      if (out.byte(at) != byte) wrong.say("tiled scale ", r, " ", c, " is ", int(out.byte(at)), " wanted ", int(byte));
    } else if (out.dtype == CQSA_DTYPE_F32) {
      if (!about(out.f32(r * g.cols + c), wanted)) wrong.say("scale_inv ", r, " ", c, " is ", out.f32(r * g.cols + c), " wanted ", wanted);
    } else if (out.byte(r * g.cols + c) != byte) {
      wrong.say("e8m0 scale ", r, " ", c, " is ", int(out.byte(r * g.cols + c)), " wanted ", int(byte));
    }
  }

  // What is outside of the grid is 0: nothing else of it may be set.
  void check_filling(const side_problem& s, const grid& g) {
    if (!s.scale_inv.there() || s.layout == CQSA_FP8_SCALES_STRIDED) return;
    const bool tiled = s.layout == CQSA_FP8_SCALES_TILED;
    const int64_t cols4 = (g.cols + 3) / 4 * 4, rows = tiled ? (g.rows + 127) / 128 * 128 : g.rows;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols4; ++c) {
        if (r < g.rows && c < g.cols) continue;
        const int64_t at = (r / 128 * (cols4 / 4) + c / 4) * 512 + r % 128 % 32 * 16 + r % 128 / 32 * 4 + c % 4;
        const int byte = tiled ? s.scale_inv.byte(at) : load<uint8_t>(s.scale_inv.at(r * (cols4 / 4) + c / 4) + c % 4);
        if (byte != 0) wrong.say("beside the scales, at ", r, " ", c, ", stands ", byte);
      }
  }

  bool row_is_worked_on(const side_problem& s, int64_t r) const { return p.per_group(s) || !p.groups.there() || r < p.bottom(); }

  void check_scales(const side_problem& s, const grid& g) {
    for (int64_t r = 0; r < g.rows; ++r)
      for (int64_t c = 0; c < g.cols; ++c) {
        const scales wanted = scale_of_block(s, g, r * g.cols + c);
        if (!row_is_worked_on(s, r)) continue;
        if (s.scale.there() && !about(s.scale.f32(r * g.cols + c), wanted.scale))
          wrong.say("scale ", r, " ", c, " is ", s.scale.f32(r * g.cols + c), " wanted ", wanted.scale);
        if (s.scale_inv.there()) check_scale_inv(s, g, r, c, wanted.scale_inv);
      }
    check_filling(s, g);
  }

  code_result wanted_code(const side_problem& s, const grid& g, int64_t i, int64_t j) const {
    const int64_t n = p.block_row(s, i) * g.cols + p.block_col(s, j);
    const float scale = p.up.there() && s.scale.there() ? s.scale.f32(n) : scale_of_block(s, g, n).scale;
    const uint32_t word = p.rng.there() ? random_word(load<int64_t>(p.rng.at(0)), load<int64_t>(p.rng.at(1)), i * p.cols + j) : 0;
    return quantize_element(p.element(i, j), scale, s.out.dtype, !(p.flags & CQSA_FP8_NO_SATURATE), p.rng.there() ? &word : nullptr);
  }

  void check_codes(const side_problem& s, const grid& g, bool counts) {
    const bool turned = &s == &p.transposed;
    for (int64_t i = 0; i < p.all_rows(); ++i)
      for (int64_t j = 0; j < p.cols; ++j) {
        const int64_t at = turned ? j * p.all_rows() + i : i * p.cols + j;
        const uint8_t got = s.out.byte(at);
        if (i >= p.bottom()) {
          if (got != load<uint8_t>(s.out.before.data() + s.out.byte_of(at))) wrong.say("row ", i, " is in no group, but was written");
          continue;
        }
        const code_result wanted = wanted_code(s, g, i, j);
        saturated += counts && wanted.saturated;
        const bool near = p.up.there() && std::abs(got - wanted.code) <= 1;
        if (got != wanted.code && !near)
          wrong.say(turned ? "transposed" : "row", " code ", i, " ", j, " of ", p.element(i, j), " is ", int(got), " wanted ", int(wanted.code));
      }
  }

  void check_side(const side_problem& s, bool counts) {
    if (!s.wanted) return;
    const grid g = amaxes(p, s);
    check_scales(s, g);
    check_codes(s, g, counts);
  }

  void check_sums() {
    for (int64_t j = 0; p.column_sum.there() && j < p.cols; ++j) {
      double sum = 0, size = 0;
      for (int64_t i = 0; i < p.bottom(); ++i) sum += static_cast<double>(p.element(i, j)), size += std::fabs(static_cast<double>(p.element(i, j)));
      const float got = p.column_sum.f32(j);
      if (std::isfinite(size) && size < 1e38 ? std::fabs(got - sum) > 1e-5 * size + 1e-37 : std::isnan(sum) && !std::isnan(got))
        wrong.say("sum of column ", j, " is ", got, " wanted ", sum);
    }
  }

  void check_counters(const std::vector<int64_t>& before) {
    for (int64_t i = 0; i < p.bottom(); ++i)
      for (int64_t j = 0; j < p.cols; ++j) {
        nans += std::isnan(p.element(i, j)), infinities += std::isinf(p.element(i, j));
        join(amax, p.element(i, j), p.nan_policy);
      }
    const int64_t added[] = {nans, infinities, saturated, 0};
    for (int64_t n = 0; p.counters.there() && n < 4; ++n)
      if (load<int64_t>(p.counters.at(n)) != before[static_cast<size_t>(n)] + added[n] && !(n == 2 && p.up.there()))
        wrong.say("counter ", n, " rose by ", load<int64_t>(p.counters.at(n)) - before[static_cast<size_t>(n)], " wanted ", added[n]);
    if (p.amax.there() && !about(p.amax.f32(0), amax)) wrong.say("amax is ", p.amax.f32(0), " wanted ", amax);
  }
};

// Everything that an accepted call writes; "" where it is right.
inline std::string compare(problem& p, const scales& ring_now, const std::vector<int64_t>& counters_before) {
  expectation e{p, ring_now, p.source == CQSA_FP8_RING ? static_cast<float>(fp8_max(p.ring.format)) : 1.0f};
  e.check_side(p.row, true);
  e.check_side(p.transposed, !p.row.wanted);
  e.check_sums();
  e.check_counters(counters_before);
  for (box* b : p.inputs())
    if (b->there() && !b->unchanged()) e.wrong.say("an input was written");
  for (box* b : p.boxes())
    if (b->there() && !b->padding_is_whole()) e.wrong.say("something beside an output was written");
  return e.wrong.text.str();
}

// ---- random problems ----------------------------------------------------------------------------------------------------------

inline void draw_block(dice& d, const problem& p, int64_t* block) {
  const bool rows_only = p.groups.there();
  const int64_t g = one_of<int64_t>(d, {16, 17, 32, 128});
  const int64_t choices[][2] = {{0, 0}, {1, 0}, {1, g}, {1, 128}, {0, 1}, {g, 1}, {128, 1}, {128, 128}};
  const int64_t* const chosen = p.source == CQSA_FP8_RING ? choices[0] : choices[between(d, 0, rows_only ? 3 : 7)];
  std::copy_n(chosen, 2, block);
}

inline box draw_grid(dice& d, cqsa_dtype type, int64_t rows, int64_t cols) {
  if (rows == 1 && cols == 1 && chance(d, 40)) return chance(d, 50) ? box(type, {1}, d) : box(type, {}, d);
  return box(type, {rows, cols}, d);
}

inline void draw_scale_inv(dice& d, const problem& p, side_problem& s) {
  const int64_t r = p.grid_rows(s), c = p.grid_cols(s);
  const bool bytes = chance(d, 30) && p.source != CQSA_FP8_RING;
  const int kind = bytes ? static_cast<int>(between(d, 0, 2)) : 0;
  s.layout = kind;
  const cqsa_dtype byte_type = chance(d, 50) ? CQSA_DTYPE_E8M0FNU : CQSA_DTYPE_U8;
  if (kind == CQSA_FP8_SCALES_PACKED) s.scale_inv = box(CQSA_DTYPE_I32, {r, (c + 3) / 4}, d);
  else if (kind == CQSA_FP8_SCALES_TILED) s.scale_inv = box(byte_type, {(r + 127) / 128 * ((c + 3) / 4) * 512}, d, how::compact);
  else s.scale_inv = draw_grid(d, bytes ? byte_type : CQSA_DTYPE_F32, r, c);
}

inline void draw_side(dice& d, problem& p, side_problem& s, std::vector<int64_t> shape) {
  draw_block(d, p, s.block);
  s.wanted = true;
  s.out = box(formats[between(d, 0, 3)], std::move(shape), d);
  const int64_t r = p.grid_rows(s), c = p.grid_cols(s);
  if (chance(d, 70) || p.up.there()) s.scale = draw_grid(d, CQSA_DTYPE_F32, r, c);
  if (chance(d, 80)) draw_scale_inv(d, p, s);
  if (p.source != CQSA_FP8_STATIC) return;
  const double step = p.pow2(s) ? 0 : 0.01;  // E8M0 takes powers of two alone
  s.scale_in = draw_grid(d, CQSA_DTYPE_F32, r, c);
  for (int64_t n = 0; n < r * c; ++n) s.scale_in.set(n, std::exp2(static_cast<double>(between(d, -6, 12)) + step * static_cast<double>(between(d, 0, 99))));
}

inline void draw_x(dice& d, problem& p, int wild) {
  std::vector<int64_t> shape = {p.rows, p.cols};
  if (p.three_axes) shape.insert(shape.begin(), p.batch);
  const bool codes = chance(d, 15);
  p.x = box(codes ? formats[between(d, 0, 3)] : one_of(d, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), shape, d);
  const double size = std::exp2(static_cast<double>(between(d, -12, 8)));
  for (int64_t n = 0; n < p.x.count(); ++n) p.x.set(n, draw_value(d, wild, size));
  if (codes) {
    problem plain;
    draw_block(d, plain, p.x_block);
    p.x_scale_inv = draw_grid(d, CQSA_DTYPE_F32, blocks(p.all_rows(), p.x_block[0]), blocks(p.cols, p.x_block[1]));
    for (int64_t n = 0; n < p.x_scale_inv.count(); ++n) p.x_scale_inv.set(n, std::exp2(static_cast<double>(between(d, -8, 8)) + 0.3));
  } else if (chance(d, 10)) {
    p.flags |= CQSA_FP8_SILU;
    p.up = box(p.x.dtype, shape, d);
    for (int64_t n = 0; n < p.up.count(); ++n) p.up.set(n, draw_value(d, 0, 2));
    for (int64_t n = 0; n < p.x.count(); ++n) p.x.set(n, draw_value(d, 0, 2));
  }
}

inline void draw_groups(dice& d, problem& p) {
  const int64_t count = between(d, 0, 4);
  std::vector<int64_t> ends = {0};
  for (int64_t g = 0; g < count; ++g) ends.push_back(between(d, 0, p.all_rows()));
  std::sort(ends.begin() + 1, ends.end());
  p.groups = box(chance(d, 50) ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64, {count + 1}, d);
  for (int64_t g = 0; g <= count; ++g) p.groups.set(g, static_cast<double>(ends[static_cast<size_t>(g)]));
}

inline void draw_numbers(dice& d, problem& p) {
  p.nan_policy = static_cast<int32_t>(between(d, 0, 1));
  p.margin = chance(d, 30) ? static_cast<int32_t>(between(d, -3, 5)) : 0;
  if (chance(d, 15)) p.eps = 0.01f;
  if (chance(d, 15)) p.limit = 2.0f;
  if (chance(d, 20) && p.source == CQSA_FP8_CURRENT) p.flags |= CQSA_FP8_POW2;
  if (chance(d, 20)) p.flags |= CQSA_FP8_NO_SATURATE;
}

inline void draw_small(dice& d, problem& p) {
  if (chance(d, 60)) p.amax = chance(d, 50) ? box(CQSA_DTYPE_F32, {1}, d) : box(CQSA_DTYPE_F32, {}, d);
  if (chance(d, 30)) p.column_sum = box(CQSA_DTYPE_F32, {p.cols}, d);
  if (chance(d, 40)) p.counters = box(CQSA_DTYPE_I64, {4}, d);
  for (int64_t n = 0; p.counters.there() && n < 4; ++n) p.counters.set(n, static_cast<double>(between(d, 0, 1000)));
  if (chance(d, 25)) {
    p.rng = box(CQSA_DTYPE_I64, {2}, d);
    p.rng.set(0, static_cast<double>(between(d, -1000000, 1000000))), p.rng.set(1, static_cast<double>(between(d, 0, 1 << 30)));
  }
  if (chance(d, 15)) p.skip = box(CQSA_DTYPE_I32, {}, d), p.skip.set(0, 0);
}

inline problem random_problem(uint64_t seed, int64_t largest = 40, int32_t source = -1) {
  dice d(seed);
  problem p;
  p.three_axes = chance(d, 30);
  p.rows = chance(d, 4) ? 0 : between(d, 1, largest), p.cols = chance(d, 4) ? 0 : chance(d, 20) ? between(d, 1, 300) : between(d, 1, largest);
  if (chance(d, 5)) p.rows = 200;
  if (p.three_axes) p.batch = between(d, chance(d, 10) ? 0 : 1, 3);
  p.source = source >= 0 ? source : static_cast<int32_t>(between(d, 0, 1));
  draw_x(d, p, chance(d, 40) ? 5 : 0);
  if (chance(d, 15) && p.source != CQSA_FP8_RING) draw_groups(d, p);
  draw_numbers(d, p);
  const int sides = static_cast<int>(between(d, 1, 3));
  std::vector<int64_t> shape = p.x.shape;
  if (sides & 1) draw_side(d, p, p.row, shape);
  if (sides & 2) draw_side(d, p, p.transposed, {p.cols, p.all_rows()});
  draw_small(d, p);
  for (box* b : p.boxes()) b->freeze();
  return p;
}

}  // namespace fp8_test
