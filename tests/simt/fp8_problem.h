// SPDX-License-Identifier: Apache-2.0
// Random quantizations for tests of backends that run on this machine, and what they should give: one element after the other, by
// src/dtype.h. Every array lies between guards.
#pragma once

#include "backends/cqsa_backend.h"
#include "backends/fp8_rules.h"
#include "dtype.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace fp8_test {

using namespace cqsa;

// Memory with exactly its bytes (for ASan), at a chosen offset from 256.
struct memory {
  std::vector<char> bytes_before;
  char* whole = nullptr;
  size_t offset = 0, size = 0;
  memory() = default;
  memory(size_t n, size_t off = 0, int fill = 0x5a) : offset(off), size(n) {
    whole = static_cast<char*>(std::aligned_alloc(256, (n + off + 512) / 256 * 256));
    std::memset(whole, fill, (n + off + 512) / 256 * 256);
  }
  memory(memory&& o) noexcept { *this = std::move(o); }
  memory& operator=(memory&& o) noexcept { return std::swap(whole, o.whole), std::swap(offset, o.offset), std::swap(size, o.size), *this; }
  ~memory() { std::free(whole); }
  char* data() const { return whole ? whole + offset : nullptr; }
  std::vector<char> copy() const { return std::vector<char>(whole, whole + (size + offset + 512) / 256 * 256); }
  bool equals(const std::vector<char>& other) const { return !std::memcmp(whole, other.data(), other.size()); }
};

inline int bytes_of(cqsa_dtype t) { return (t >> 8 & 0xff) / 8; }

inline float decode(const char* at, cqsa_dtype t) {
  uint32_t w = 0;
  std::memcpy(&w, at, size_t(bytes_of(t)));
  switch (t) {
    case CQSA_DTYPE_F32: return fp8::float_of(w);
    case CQSA_DTYPE_F16: return f16_to_f32(uint16_t(w));
    case CQSA_DTYPE_BF16: return bf16_to_f32(uint16_t(w));
    case CQSA_DTYPE_E4M3FN: return e4m3fn_to_f32(uint8_t(w));
    case CQSA_DTYPE_E5M2: return e5m2_to_f32(uint8_t(w));
    case CQSA_DTYPE_E4M3FNUZ: return e4m3fnuz_to_f32(uint8_t(w));
    default: return e5m2fnuz_to_f32(uint8_t(w));
  }
}
inline void encode(char* at, cqsa_dtype t, float x) {
  const uint32_t w = t == CQSA_DTYPE_F32 ? fp8::bits_of(x) : t == CQSA_DTYPE_F16 ? f32_to_f16(x) : f32_to_bf16(x);
  std::memcpy(at, &w, size_t(bytes_of(t)));
}
inline uint8_t code_of(float x, cqsa_dtype t, bool saturate) {
  switch (t) {
    case CQSA_DTYPE_E4M3FN: return f32_to_e4m3fn(x, saturate);
    case CQSA_DTYPE_E5M2: return f32_to_e5m2(x, saturate);
    case CQSA_DTYPE_E4M3FNUZ: return f32_to_e4m3fnuz(x, saturate);
    default: return f32_to_e5m2fnuz(x, saturate);
  }
}
inline uint32_t last_code(cqsa_dtype t) { return t == CQSA_DTYPE_E4M3FN ? 0x7e : t == CQSA_DTYPE_E5M2 ? 0x7b : 0x7f; }
inline bool overflows(float x, cqsa_dtype t) {
  const uint8_t code = code_of(x, t, false);
  return t == CQSA_DTYPE_E4M3FNUZ || t == CQSA_DTYPE_E5M2FNUZ ? code == 0x80 : (code & 0x7fu) > last_code(t);
}

inline char* place(const cqsa_matrix& m, const cqsa_fp8_job& j, int64_t i, int64_t c) {
  return static_cast<char*>(m.data) + bytes_of(m.dtype) * (i / j.rows * m.stride[0] + i % j.rows * m.stride[1] + c * m.stride[2]);
}
inline char* scale_place(const cqsa_scale_grid& g, int64_t r, int64_t c) {
  char* const base = static_cast<char*>(g.data);
  if (g.layout == CQSA_FP8_SCALES_PACKED) return base + 4 * (r * g.stride[0] + c / 4 * g.stride[1]) + c % 4;
  if (g.layout == CQSA_FP8_SCALES_TILED) return base + (r / 128 * ((g.columns + 3) / 4) + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
  return base + bytes_of(g.dtype) * (r * g.stride[0] + c * g.stride[1]);
}
inline bool powers(const cqsa_scale_grid& g) { return g.data && (g.layout != CQSA_FP8_SCALES_STRIDED || g.dtype != CQSA_DTYPE_F32); }
inline float load_scale(const cqsa_scale_grid& g, int64_t r, int64_t c) {
  if (powers(g)) return e8m0fnu_to_f32(uint8_t(*scale_place(g, r, c)));
  return decode(scale_place(g, r, c), CQSA_DTYPE_F32);
}
inline void store_scale(const cqsa_scale_grid& g, int64_t r, int64_t c, float x) {
  if (!g.data) return;
  if (powers(g)) *scale_place(g, r, c) = char(f32_to_e8m0fnu(x));
  else std::memcpy(scale_place(g, r, c), &x, 4);
}
inline void clear_padding(const cqsa_scale_grid& g) {
  if (!g.data || g.layout == CQSA_FP8_SCALES_STRIDED) return;
  for (int64_t r = 0; r < (g.layout == CQSA_FP8_SCALES_TILED ? (g.rows + 127) / 128 * 128 : g.rows); ++r)
    for (int64_t c = 0; c < (g.columns + 3) / 4 * 4; ++c)
      if (r >= g.rows || c >= g.columns) *scale_place(g, r, c) = 0;
}

// ---- the oracle -------------------------------------------------------------------------------------------------------------

inline int64_t group_at(const cqsa_fp8_job& j, int64_t g) {
  if (j.groups_dtype == CQSA_DTYPE_I64) return static_cast<const int64_t*>(j.groups)[g * j.groups_stride];
  return static_cast<const int32_t*>(j.groups)[g * j.groups_stride];
}
inline int64_t used_rows(const cqsa_fp8_job& j) { return j.groups ? group_at(j, j.num_groups) : j.batch * j.rows; }
inline int64_t block_row(const cqsa_fp8_job& j, const cqsa_scale_grid& g, bool per_group, int64_t i) {
  if (!per_group) return i / g.block[0];
  int64_t r = 0;
  while (r + 1 < j.num_groups && group_at(j, r + 1) <= i) ++r;
  return r;
}

inline float element(const cqsa_fp8_job& j, int64_t i, int64_t c) {
  float x = decode(place(j.x, j, i, c), j.x.dtype);
  if (j.x_scale_inv.data) x *= load_scale(j.x_scale_inv, i / j.x_scale_inv.block[0], c / j.x_scale_inv.block[1]);
  if (j.up.data) x = x / (1.0f + std::exp(-x)) * decode(place(j.up, j, i, c), j.up.dtype);
  return x;
}
inline float nan_max(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
inline float counted(const cqsa_fp8_job& j, float x) { return j.nan_policy == CQSA_FP8_NAN_IGNORE && !std::isfinite(x) ? 0 : std::fabs(x); }

// Largest magnitude of a block of a grid.
inline float amax_of(const cqsa_fp8_job& j, const cqsa_scale_grid* g, int64_t r, int64_t c, bool per_group = false) {
  float most = 0;
  for (int64_t i = 0; i < used_rows(j); ++i) {
    if (g && block_row(j, *g, per_group, i) != r) continue;
    for (int64_t k = 0; k < j.columns; ++k)
      if (!g || k / g->block[1] == c) most = nan_max(most, counted(j, element(j, i, k)));
  }
  return most;
}

inline fp8::ring_state& state_of(const cqsa_fp8_ring& r) { return *static_cast<fp8::ring_state*>(r.state); }
inline void take(const cqsa_fp8_ring& r, float amax) {
  fp8::ring_state& s = state_of(r);
  float* const history = reinterpret_cast<float*>(&s + 1);
  if (!std::isfinite(amax) || amax < 0) return void(++s.refused);
  history[s.index] = amax, s.index = (s.index + 1) % s.hist_len;
  float most = 0;
  for (int n = 0; n < s.hist_len; ++n) most = std::isfinite(history[n]) ? std::max(most, history[n]) : most;
  if (s.algorithm == CQSA_FP8_RING_MOST_RECENT) most = amax;
  if (most == 0) return;
  const fp8::scale_pair pair = fp8::scale_of(most, {s.format, s.margin, s.pow2, 0, 0});
  s.scale = pair.scale, s.scale_inv = pair.scale_inv;
}

inline float clamp_scale(float x) { return std::min(std::max(x, 0x1p-126f), 0x1.fffffep127f); }
inline fp8::scale_pair scale_for(const cqsa_fp8_job& j, const cqsa_fp8_output& o, const cqsa_fp8_output& first, int64_t r, int64_t c) {
  if (j.source == CQSA_FP8_STATIC) {
    const float scale = o.scale_in.data ? load_scale(o.scale_in, r, c) : clamp_scale(load_scale(first.scale_in, r, c) * o.ratio);
    return {scale, 1.0f / scale, 0};
  }
  if (j.source == CQSA_FP8_RING) {
    if (o.ratio == 1) return {state_of(j.ring).scale, state_of(j.ring).scale_inv, 0};
    const float scale = clamp_scale(state_of(j.ring).scale * o.ratio);
    return {scale, 1.0f / scale, 0};
  }
  return fp8::scale_of(amax_of(j, &o.scale, r, c, o.per_group), {o.codes.dtype, j.margin, (j.flags & CQSA_FP8_POW2) || powers(o.scale_inv), j.eps, j.amax_limit});
}

inline void side(const cqsa_fp8_job& j, const cqsa_fp8_output& o, const cqsa_fp8_output& first) {
  std::vector<fp8::scale_pair> pairs;
  for (int64_t r = 0; r < o.scale.rows; ++r)
    for (int64_t c = 0; c < o.scale.columns; ++c) {
      pairs.push_back(scale_for(j, o, first, r, c));
      if (j.groups && !o.per_group && r >= used_rows(j)) continue;  // a row in no group
      store_scale(o.scale, r, c, pairs.back().scale), store_scale(o.scale_inv, r, c, pairs.back().scale_inv);
    }
  clear_padding(o.scale_inv);
  for (int64_t i = 0; i < used_rows(j); ++i)
    for (int64_t c = 0; c < j.columns; ++c) {
      const float x = element(j, i, c), y = x * pairs[size_t(block_row(j, o.scale, o.per_group, i) * o.scale.columns + c / o.scale.block[1])].scale;
      const bool saturate = !(j.flags & CQSA_FP8_NO_SATURATE);
      uint8_t code = code_of(y, o.codes.dtype, saturate);
      bool large = overflows(y, o.codes.dtype);
      if (j.rng && !std::isnan(x)) {
        const uint32_t mag = fp8::magnitude_at_random(y, o.codes.dtype, fp8::random_word(j.rng[0], j.rng[j.rng_stride], uint64_t(i * j.columns + c)));
        large = mag > last_code(o.codes.dtype);
        if (large) code = code_of(std::copysign(INFINITY, y), o.codes.dtype, saturate);
        else code = uint8_t(mag | (std::signbit(y) && (mag || o.codes.dtype == CQSA_DTYPE_E4M3FN || o.codes.dtype == CQSA_DTYPE_E5M2) ? 0x80 : 0));
      }
      *place(o.codes, j, i, c) = char(code);
      if (!j.counters || &o != &first) continue;
      if (std::isnan(x)) ++j.counters[0];
      else if (std::isinf(x)) ++j.counters[j.counters_stride];
      else if (large) ++j.counters[2 * j.counters_stride];
    }
}

inline void reference(const cqsa_fp8_job& j) {
  if (j.skip && *j.skip) return;
  const cqsa_fp8_output& first = j.row.codes.data ? j.row : j.transposed;
  if (j.row.codes.data) side(j, j.row, first);
  if (j.transposed.codes.data) side(j, j.transposed, first);
  const float amax = amax_of(j, nullptr, 0, 0);
  if (j.amax) *j.amax = amax;
  for (int64_t r = 0; j.block_amax.data && r < j.block_amax.rows; ++r)
    for (int64_t c = 0; c < j.block_amax.columns; ++c) store_scale(j.block_amax, r, c, amax_of(j, &j.block_amax, r, c));
  for (int64_t c = 0; j.column_sum && c < j.columns; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < used_rows(j); ++i) sum += double(element(j, i, c));
    j.column_sum[c * j.column_sum_stride] = float(sum);
  }
  if (!j.ring.state) return;
  if (!(j.flags & CQSA_FP8_RING_STAGE)) return take(j.ring, amax);
  if (!std::isfinite(amax)) ++state_of(j.ring).refused;
  else if (amax > state_of(j.ring).staged) state_of(j.ring).staged = amax;
}

// ---- problems ---------------------------------------------------------------------------------------------------------------

struct draw {
  std::mt19937_64 engine;
  explicit draw(uint64_t seed) : engine(seed) {}
  int64_t to(int64_t n) { return int64_t(engine() % uint64_t(n)); }
  bool one_in(int64_t n) { return to(n) == 0; }
  template <class T, size_t N> T of(const T (&list)[N]) { return list[to(N)]; }
};

struct problem {
  cqsa_fp8_job job{};
  std::vector<std::unique_ptr<memory>> all;  // everything but x, which is never written
  std::string text;

  char* take(size_t bytes, size_t offset = 0, int fill = 0x5a) {
    all.push_back(std::make_unique<memory>(bytes, offset, fill));
    return all.back()->data();
  }
  std::vector<std::vector<char>> snapshot() const {
    std::vector<std::vector<char>> out;
    for (const auto& m : all) out.push_back(m->copy());
    return out;
  }
  void restore(const std::vector<std::vector<char>>& from) {
    for (size_t i = 0; i < all.size(); ++i) std::memcpy(all[i]->whole, from[i].data(), from[i].size());
  }
};

struct wishes {
  bool plain = false;   // compact, aligned, nothing special
  int source = -1;
  int64_t rows = 0, columns = 0;
  cqsa_dtype type = 0;
  int sides = 0;        // bits: 1 row, 2 transposed; 0: any
  int64_t block[2] = {-1, -1};
  bool wild = true;     // NaN and infinities turn up
};

inline float number(draw& d, bool wild) {
  const float x = float(std::ldexp(double(d.to(2001) - 1000) / 500, int(d.to(12)) - 6));
  if (!wild || !d.one_in(200)) return x;
  const uint32_t strange[] = {0x7fc00000u, 0xffc12345u, 0x7f800000u, 0xff800000u, 0x80000000u, 0x00000001u, 0x7f7fffffu, 0x7fa00000u};
  return fp8::float_of(strange[d.to(8)]);
}

inline void fill(draw& d, const cqsa_matrix& m, const cqsa_fp8_job& j, bool wild) {
  for (int64_t i = 0; i < j.batch * j.rows; ++i)
    for (int64_t c = 0; c < j.columns; ++c) {
      if (bytes_of(m.dtype) == 1) *place(m, j, i, c) = char(d.to(256));
      else encode(place(m, j, i, c), m.dtype, number(d, wild));
    }
}

// A matrix of a type: compact, or with strides and an offset.
inline cqsa_matrix matrix(problem& p, draw& d, cqsa_dtype type, bool plain, bool transposed = false) {
  const cqsa_fp8_job& j = p.job;
  const int64_t size = bytes_of(type), pad = plain || d.one_in(2) ? 0 : d.to(9), step = plain || transposed || !d.one_in(5) ? 1 : 2;
  cqsa_matrix m{nullptr, type, 0, {0, 0, 0}};
  int64_t bytes;
  if (transposed) {
    const int64_t all = j.batch * j.rows;
    m.stride[0] = j.rows, m.stride[1] = 1, m.stride[2] = all + pad;
    bytes = j.columns * m.stride[2];
  } else {
    m.stride[2] = step, m.stride[1] = step * j.columns + pad, m.stride[0] = j.rows * m.stride[1] + (plain || d.one_in(2) ? 0 : 3);
    bytes = j.batch * m.stride[0] * size;
  }
  m.data = p.take(size_t(bytes + 1), size_t(plain || d.one_in(2) ? 0 : d.to(9) * size));
  return m;
}

inline cqsa_scale_grid grid(problem& p, draw& d, int64_t b0, int64_t b1, cqsa_dtype type, int32_t layout, bool data, bool groups) {
  const cqsa_fp8_job& j = p.job;
  const int64_t all = j.batch * j.rows;
  cqsa_scale_grid g{nullptr, type, layout, {0, 0}, 0, 0, {b0 ? b0 : all, b1 ? b1 : j.columns}};
  g.block[0] = std::max<int64_t>(std::min(g.block[0], all), 1), g.block[1] = std::max<int64_t>(std::min(g.block[1], j.columns), 1);
  g.rows = groups ? j.num_groups : (all + g.block[0] - 1) / g.block[0], g.columns = (j.columns + g.block[1] - 1) / g.block[1];
  if (!data) return g;
  size_t bytes;
  if (layout == CQSA_FP8_SCALES_TILED) bytes = size_t((g.rows + 127) / 128 * ((g.columns + 3) / 4) * 512), g.dtype = CQSA_DTYPE_E8M0FNU;
  else {
    const int64_t wide = layout == CQSA_FP8_SCALES_PACKED ? (g.columns + 3) / 4 : g.columns;
    if (layout == CQSA_FP8_SCALES_PACKED) g.dtype = CQSA_DTYPE_I32;
    if (d.one_in(2)) g.stride[0] = wide + d.to(3), g.stride[1] = 1, bytes = size_t(g.rows * g.stride[0]);
    else g.stride[1] = (g.rows + 3) / 4 * 4, g.stride[0] = 1, bytes = size_t(wide * g.stride[1]);
    bytes *= size_t(bytes_of(g.dtype));
  }
  g.data = p.take(bytes);
  return g;
}

inline cqsa_fp8_ring make_ring(problem& p, draw& d, cqsa_dtype format) {
  const int32_t lengths[] = {1, 2, 16, 40, 200};
  cqsa_fp8_ring r = CQSA_FP8_RING_INIT;
  r.hist_len = d.of(lengths), r.format = format, r.margin = int32_t(d.to(4)) - 1, r.algorithm = int32_t(d.to(2)), r.flags = d.one_in(3) ? CQSA_FP8_POW2 : 0;
  r.bytes = uint64_t(64 + 4 * r.hist_len), r.state = p.take(size_t(r.bytes));
  fp8::ring_state s{fp8::ring_magic, fp8::ring_version, r.hist_len, format, r.margin, r.algorithm, r.flags ? 1 : 0, int32_t(d.to(r.hist_len)), 3, 0.5f, 4.0f, 0.25f, {}};
  std::memcpy(r.state, &s, 64);
  float* const history = reinterpret_cast<float*>(static_cast<char*>(r.state) + 64);
  for (int n = 0; n < r.hist_len; ++n) history[n] = d.one_in(3) ? 0 : float(d.to(300));
  return r;
}

inline void add_side(problem& p, draw& d, cqsa_fp8_output& o, const wishes& w, bool transposed, bool groups) {
  cqsa_fp8_job& j = p.job;
  const cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
  o.codes = matrix(p, d, w.plain ? formats[d.to(2)] : d.of(formats), w.plain, transposed);
  const int64_t blocks[][2] = {{0, 0}, {0, 0}, {1, 0}, {0, 1}, {1, 128}, {128, 1}, {128, 128}, {1, 32}, {1, 17}, {40, 1}, {1, 256}, {16, 16}, {1, 64}};
  int64_t b[2] = {w.block[0], w.block[1]};
  if (b[0] < 0 || j.source == CQSA_FP8_RING) {
    const int64_t(&chosen)[2] = blocks[j.source == CQSA_FP8_RING ? 0 : d.to(13)];
    b[0] = chosen[0], b[1] = chosen[1];
  } else if (transposed) {
    std::swap(b[0], b[1]);
  }
  if (groups && b[0] != 1) b[0] = b[1] = 0;
  const bool each = groups && b[0] == 0;
  const int32_t layout = d.one_in(3) ? int32_t(d.to(3)) : 0;
  const cqsa_dtype type = d.one_in(3) ? CQSA_DTYPE_E8M0FNU : CQSA_DTYPE_F32;
  o.scale = grid(p, d, b[0], b[1], CQSA_DTYPE_F32, 0, !d.one_in(3), each);
  o.scale_inv = grid(p, d, b[0], b[1], type, layout, !d.one_in(4), each);
  o.ratio = 1, o.per_group = each;
  if (j.source != CQSA_FP8_STATIC) return;
  o.scale_in = grid(p, d, b[0], b[1], CQSA_DTYPE_F32, 0, true, each);
  for (int64_t r = 0; r < o.scale.rows; ++r)
    for (int64_t c = 0; c < o.scale.columns; ++c) store_scale(o.scale_in, r, c, powers(o.scale_inv) ? std::ldexp(1.0f, int(d.to(16)) - 8) : float(1 + d.to(1000)) / float(1 + d.to(50)));
}

inline problem make(uint64_t seed, const wishes& w = {}) {
  draw d(seed);
  problem p;
  cqsa_fp8_job& j = p.job;
  const int64_t sizes[] = {1, 2, 7, 16, 33, 100, 128, 130, 200, 257};
  j.batch = w.plain || !d.one_in(4) ? 1 : 1 + d.to(3);
  j.rows = w.rows ? w.rows : d.of(sizes), j.columns = w.columns ? w.columns : d.of(sizes);
  j.source = w.source >= 0 ? w.source : int32_t(d.to(3));
  j.nan_policy = int32_t(d.to(2)), j.margin = d.one_in(3) ? int32_t(d.to(5)) - 2 : 0;
  j.flags = (d.one_in(4) ? CQSA_FP8_POW2 : 0) | (d.one_in(4) ? CQSA_FP8_NO_SATURATE : 0);
  if (d.one_in(5)) j.eps = 0.5f;
  if (d.one_in(5)) j.amax_limit = 20;
  const cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
  const bool codes_in = !w.plain && d.one_in(8), groups = !w.plain && j.source != CQSA_FP8_RING && d.one_in(5);
  j.x = matrix(p, d, codes_in ? CQSA_DTYPE_E4M3FN : w.type ? w.type : d.of(types), w.plain);
  fill(d, j.x, j, w.wild && d.one_in(2));
  if (codes_in) {
    j.x_scale_inv = grid(p, d, 1, 32, CQSA_DTYPE_F32, 0, true, false);
    for (int64_t r = 0; r < j.x_scale_inv.rows; ++r)
      for (int64_t c = 0; c < j.x_scale_inv.columns; ++c) store_scale(j.x_scale_inv, r, c, float(1 + d.to(100)) / 64);
  }
  if (groups) {
    j.num_groups = 1 + d.to(4), j.groups_stride = 1, j.groups_dtype = d.one_in(2) ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64;
    std::vector<int64_t> ends{0};
    for (int64_t g = 0; g < j.num_groups; ++g) ends.push_back(std::min(j.batch * j.rows, ends.back() + d.to(j.batch * j.rows / j.num_groups + 2)));
    char* const at = p.take(8 * ends.size());
    for (size_t g = 0; g < ends.size(); ++g) {
      if (j.groups_dtype == CQSA_DTYPE_I64) reinterpret_cast<int64_t*>(at)[g] = ends[g];
      else reinterpret_cast<int32_t*>(at)[g] = int32_t(ends[g]);
    }
    j.groups = at;
  }
  const int sides = w.sides ? w.sides : 1 + int(d.to(3));
  if (sides & 1) add_side(p, d, j.row, w, false, groups);
  if (sides & 2) add_side(p, d, j.transposed, w, true, groups);
  cqsa_fp8_output& second = j.transposed;
  if (sides == 3 && (j.source == CQSA_FP8_RING || (j.source == CQSA_FP8_STATIC && d.one_in(2) && !powers(second.scale_inv) && second.scale.rows == j.row.scale.rows && second.scale.columns == j.row.scale.columns))) {
    second.scale_in.data = nullptr;
    second.ratio = fp8::largest_of(second.codes.dtype) / fp8::largest_of(j.row.codes.dtype);
  }
  if (j.source == CQSA_FP8_RING) j.ring = make_ring(p, d, sides & 1 ? j.row.codes.dtype : j.transposed.codes.dtype), j.flags |= d.one_in(3) ? CQSA_FP8_RING_STAGE : 0;
  if (!d.one_in(3)) j.amax = reinterpret_cast<float*>(p.take(4));
  if (d.one_in(3)) {
    j.counters_stride = 1 + d.to(2), j.counters = reinterpret_cast<int64_t*>(p.take(size_t(32 * j.counters_stride), 0, 0));
  }
  if (!w.plain && d.one_in(6)) {
    j.rng_stride = 1, j.rng = reinterpret_cast<const int64_t*>(p.take(16));
  }
  if (d.one_in(8)) j.skip = reinterpret_cast<const int32_t*>(p.take(4, 0, d.one_in(2) ? 0 : 1));
  p.text = "seed " + std::to_string(seed) + ": " + std::to_string(j.batch) + "x" + std::to_string(j.rows) + "x" + std::to_string(j.columns) + " source " +
           std::to_string(j.source) + " sides " + std::to_string(sides) + " type " + std::to_string(j.x.dtype) + " blocks " +
           std::to_string(j.row.scale.block[0]) + "x" + std::to_string(j.row.scale.block[1]) + ", " + std::to_string(j.transposed.scale.block[0]) + "x" +
           std::to_string(j.transposed.scale.block[1]) + " flags " + std::to_string(j.flags) + (j.rng ? " rng" : "") + (groups ? " groups" : "") +
           (j.skip ? " skip" : "") + (j.counters ? " counters" : "");
  return p;
}

}  // namespace fp8_test
