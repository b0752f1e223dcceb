// SPDX-License-Identifier: Apache-2.0
// Section 12 of cqsa.h once more, one element after the other and as the text says it: what every backend must give to the bit.
// And random problems for it, on the tensors of cpu_leaf_problem.h.
#pragma once

#include "cpu_leaf_problem.h"

#include <set>
#include <utility>

namespace {

namespace oracle {

using cqsa::f16_to_f32, cqsa::f32_to_f16;

float as_f32(const char* from, cqsa_dtype type) {
  uint16_t half;
  float x;
  std::memcpy(&x, from, type == CQSA_DTYPE_F32 ? 4 : 0);
  std::memcpy(&half, from, type == CQSA_DTYPE_F32 ? 0 : 2);
  return type == CQSA_DTYPE_F32 ? x : type == CQSA_DTYPE_F16 ? f16_to_f32(half) : cqsa::bf16_to_f32(half);
}

void store(char* to, cqsa_dtype type, float x) {
  if (std::isnan(x)) x = std::bit_cast<float>(0x7fc00000u);
  const uint16_t half = type == CQSA_DTYPE_F16 ? f32_to_f16(x) : cqsa::f32_to_bf16(x);
  if (type == CQSA_DTYPE_F32) std::memcpy(to, &x, 4);
  else std::memcpy(to, &half, 2);
}

uint16_t f16(float x) { return f32_to_f16(std::clamp(x, -65504.0f, 65504.0f)); }
void store_half(char* to, uint16_t bits) { std::memcpy(to, &bits, 2); }
float load_half(const char* from) { return as_f32(from, CQSA_DTYPE_F16); }

void rotate(std::vector<float>& x) {
  const size_t n = x.size();
  for (size_t h = 1; h < n; h *= 2)
    for (size_t i = 0; i < n; ++i)
      if (!(i & h)) {
        const float a = x[i], b = x[i + h];
        x[i] = a + b, x[i + h] = a - b;
      }
  const float factor = float(1.0 / std::sqrt(double(n)));
  for (float& y : x) y *= factor;
}

bool all_finite(const float* x, int64_t n) { return std::all_of(x, x + n, [](float y) { return std::isfinite(y); }); }

void quantize_group(const float* x, int64_t n, char* codes, int64_t step, char* scale) {
  float most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  const bool finite = all_finite(x, n);
  const uint16_t bits = finite ? f16(most / 127.0f) : 0x7e00;
  store_half(scale, bits);
  const float s = f16_to_f32(bits);
  for (int64_t i = 0; i < n; ++i)
    codes[i * step] = !finite || s == 0 ? 0 : char(int8_t(std::clamp(std::nearbyint(x[i] / s), -127.0f, 127.0f)));
}

void quantize_block(const float* x, unsigned char* to) {
  float m = 0;
  for (int i = 0; i < 32; ++i)
    if (std::fabs(x[i]) > std::fabs(m)) m = x[i];
  const float d = m / -8;
  const float id = std::isfinite(1 / d) ? 1 / d : 0;
  const bool finite = all_finite(x, 32);
  store_half(reinterpret_cast<char*>(to), finite ? f16(d) : uint16_t(0x7e00));
  unsigned code[32];
  for (int i = 0; i < 32; ++i) code[i] = finite ? std::min(15u, unsigned(std::trunc(std::fma(x[i], id, 8.5f)))) : 8;
  for (int i = 0; i < 16; ++i) to[2 + i] = static_cast<unsigned char>(code[i] | code[i + 16] << 4);
}

bool find(const cqsa_kv_leaf& a, int64_t n, int64_t* page, int64_t* row) {
  const int64_t cell = cqsa::cpu::index_of(a.cells, a.cells_dtype, n * a.cells_stride);
  if (cell < 0 || a.page_size < 1 || cell / a.page_size >= a.pages) return false;
  *row = cell % a.page_size;
  *page = a.page_table[n * a.page_table_stride[0] + cell / a.page_size * a.page_table_stride[1]];
  return *page >= 0 && *page < a.num_pages;
}

void append_row(const cqsa_kv_leaf& a, int64_t n, int64_t head, int64_t page, int64_t row) {
  const auto pool = [&](int64_t c) { return cqsa::cpu::element_address(a.pool, page, head, row, c); };
  const auto x_at = [&](int64_t c) { return cqsa::cpu::element_address(a.x, 0, head, n, c); };
  const int64_t dim = a.head_dim, step = a.pool.stride[3];
  std::vector<float> x;
  for (int64_t c = 0; c < dim; ++c) x.push_back(as_f32(x_at(c), a.x.dtype));
  if (a.format == CQSA_KV_FORMAT_Q4_0) {
    rotate(x);
    for (int64_t c = 0; c < dim; c += 32) quantize_block(&x[size_t(c)], reinterpret_cast<unsigned char*>(pool(c / 32 * 18)));
  } else if (a.pool.dtype == CQSA_DTYPE_I8) {
    for (int64_t c = 0; c < dim; c += a.kv_group)
      quantize_group(&x[size_t(c)], std::min(a.kv_group, dim - c), pool(c), step,
                     cqsa::cpu::element_address(a.scale, page, head, row, c / a.kv_group));
  } else {
    for (int64_t c = 0; c < dim; ++c) {
      if (a.x.dtype == a.pool.dtype) std::memcpy(pool(c), x_at(c), size_t(bytes_of(a.x.dtype)));
      else store(pool(c), a.pool.dtype, x[size_t(c)]);
    }
  }
}

float decoded(const cqsa_kv_leaf& a, int64_t page, int64_t head, int64_t row, int64_t c) {
  if (a.format == CQSA_KV_FORMAT_Q4_0) {
    const char* const block = cqsa::cpu::element_address(a.pool, page, head, row, c / 32 * 18);
    const auto byte = static_cast<unsigned char>(block[2 + c % 16]);
    return load_half(block) * (float(c % 32 < 16 ? byte & 15 : byte >> 4) - 8);
  }
  const char* const at = cqsa::cpu::element_address(a.pool, page, head, row, c);
  if (a.pool.dtype != CQSA_DTYPE_I8) return as_f32(at, a.pool.dtype);
  return load_half(cqsa::cpu::element_address(a.scale, page, head, row, c / a.kv_group)) * float(static_cast<signed char>(*at));
}

void append(const cqsa_kv_leaf& a) {
  int64_t page = 0, row = 0;
  for (int64_t n = 0; n < a.rows; ++n)
    for (int64_t head = 0; head < a.num_kv_heads; ++head)
      if (find(a, n, &page, &row)) append_row(a, n, head, page, row);
}

void gather(const cqsa_kv_leaf& a) {
  int64_t page = 0, row = 0;
  for (int64_t n = 0; n < a.rows; ++n)
    for (int64_t head = 0; head < a.num_kv_heads; ++head)
      for (int64_t c = 0; c < a.head_dim; ++c) {
        char* const to = cqsa::cpu::element_address(a.x, 0, head, n, c);
        if (!find(a, n, &page, &row)) store(to, a.x.dtype, 0);
        else if (a.pool.dtype == a.x.dtype)
          std::memcpy(to, cqsa::cpu::element_address(a.pool, page, head, row, c), size_t(bytes_of(a.x.dtype)));
        else store(to, a.x.dtype, decoded(a, page, head, row, c));
      }
}

void hadamard(const cqsa_hadamard_leaf& a) {
  const cqsa_view x{const_cast<void*>(a.x), a.dtype_x, 0, {a.x_stride[0], a.x_stride[1], a.x_stride[2], a.x_stride[3]}};
  const cqsa_view out{a.out, a.dtype_out, 0, {a.out_stride[0], a.out_stride[1], a.out_stride[2], a.out_stride[3]}};
  for (int64_t i = 0; i < a.shape[0]; ++i)
    for (int64_t j = 0; j < a.shape[1]; ++j)
      for (int64_t k = 0; k < a.shape[2]; ++k) {
        std::vector<float> row;
        for (int64_t c = 0; c < a.n; ++c) row.push_back(as_f32(cqsa::cpu::element_address(x, i, j, k, c), x.dtype));
        rotate(row);
        for (int64_t c = 0; c < a.n; ++c) store(cqsa::cpu::element_address(out, i, j, k, c), out.dtype, row[size_t(c)]);
      }
}

}  // namespace oracle

// ---- random problems

// A value of a row: of very different sizes, with halves for the ties, zeros of both signs, and now and then NaN or infinity.
double drawn_value(dice& d, double size, bool wild) {
  if (wild && d.once_in(200)) return d.pick({nan64, inf, -inf});
  if (d.once_in(20)) return d.pick({0.0, -0.0});
  return d.once_in(4) ? size * double(d.upto(16) - 8) / 2 : size * d.normal();
}

void fill_rows(dice& d, tensor& x) {
  const bool wild = d.once_in(3);
  for (int64_t b = 0; b < x.shape[0]; ++b)
    for (int64_t h = 0; h < x.shape[1]; ++h)
      for (int64_t r = 0; r < x.shape[2]; ++r) {
        const double size = d.once_in(12) ? 0 : std::pow(10.0, double(d.once_in(4) ? d.upto(80) - 42 : d.upto(6) - 4));
        for (int64_t c = 0; c < x.shape[3]; ++c) x.write(b, h, r, c, drawn_value(d, size, wild));
      }
}

void fill_bytes(dice& d, tensor& x) {
  for (char& byte : x.memory) byte = char(d.rng());
}

struct kv_problem {
  cqsa_kv_leaf leaf{};
  tensor x, pool, scale;
  std::vector<int32_t> table, cells;
  std::vector<int64_t> wide_cells;

  cqsa_kv_leaf with() const {
    cqsa_kv_leaf a = leaf;
    a.struct_size = sizeof a;
    a.x = x.view, a.pool = pool.view;
    if (!scale.empty()) a.scale = scale.view;
    a.page_table = table.data();
    a.cells = wide_cells.empty() ? static_cast<const void*>(cells.data()) : wide_cells.data();
    return a;
  }
};

void draw_shapes(dice& d, kv_problem& p, int64_t most_rows) {
  cqsa_kv_leaf& a = p.leaf;
  const cqsa_dtype x = d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  const int64_t kind = d.upto(4);  // three types of elements, int8, q4_0
  a.format = kind == 4 ? CQSA_KV_FORMAT_Q4_0 : CQSA_KV_FORMAT_ELEMENTS;
  a.rows = d.upto(most_rows), a.num_kv_heads = 1 + d.upto(3);
  a.head_dim = kind == 4 ? 32 << d.upto(d.once_in(10) ? 7 : 3) : d.once_in(2) ? 4 + 4 * d.upto(80) : 1 + d.upto(300);
  a.num_pages = 1 + d.upto(7), a.page_size = 1 + d.upto(16);
  a.kv_group = kind == 3 ? 32 << d.upto(2) : 0;
  const auto how = [&] { return layout(d.once_in(2) ? int64_t(compact) : d.upto(num_layouts - 1)); };
  p.x = tensor(x, {1, a.num_kv_heads, a.rows, a.head_dim}, how());
  const layout paged = how();
  const std::vector<int64_t> place{a.num_pages, a.num_kv_heads, a.page_size};
  const auto shaped = [&](cqsa_dtype type, int64_t channels, layout form) {
    return tensor(type, {place[0], place[1], place[2], channels}, form);
  };
  if (kind == 4) p.pool = shaped(CQSA_DTYPE_U8, a.head_dim / 32 * 18, paged == spread ? bshd : paged);
  else p.pool = shaped(kind == 3 ? CQSA_DTYPE_I8 : d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), a.head_dim, paged);
  if (kind == 3) p.scale = shaped(CQSA_DTYPE_F16, (a.head_dim + a.kv_group - 1) / a.kv_group, how());
}

// Tables with -1 and ids outside the pool, cells before and behind it; no two rows in one place.
void draw_places(dice& d, kv_problem& p) {
  cqsa_kv_leaf& a = p.leaf;
  a.pages = d.upto(6);
  const bool each = d.once_in(2), turned = d.once_in(3), wide = d.once_in(2);
  const int64_t rows = each ? std::max<int64_t>(a.rows, 1) : 1;
  a.page_table_stride[0] = !each ? 0 : turned ? 1 : a.pages;
  a.page_table_stride[1] = each && turned ? rows : 1;
  p.table.resize(size_t(rows * a.pages) + 1);
  for (int32_t& id : p.table) {
    id = int32_t(d.upto(a.num_pages - 1));
    if (d.once_in(5)) id = d.pick({-1, INT32_MIN, INT32_MAX, int32_t(a.num_pages)});
  }
  a.cells_dtype = wide ? CQSA_DTYPE_I64 : CQSA_DTYPE_I32;
  a.cells_stride = 1 + d.once_in(3);
  std::set<std::pair<int64_t, int64_t>> taken;
  p.cells.assign(size_t(a.rows * 2 + 1), 0);
  if (wide) p.wide_cells.assign(p.cells.size(), 0);
  for (int64_t n = 0; n < a.rows; ++n) {
    const int64_t past = a.pages * a.page_size;
    int64_t cell = d.once_in(6) ? d.pick<int64_t>({-1, INT32_MIN, past, past + 3, INT32_MAX}) : d.upto(std::max<int64_t>(past - 1, 0));
    if (wide && d.once_in(9)) cell = d.pick<int64_t>({INT64_MIN, INT64_MAX, int64_t(1) << 32});
    const auto put_cell = [&](int64_t value) {
      if (wide) p.wide_cells[size_t(n * a.cells_stride)] = value;
      else p.cells[size_t(n * a.cells_stride)] = int32_t(value);
    };
    put_cell(cell);
    int64_t page = 0, row = 0;
    if (oracle::find(p.with(), n, &page, &row) && !taken.insert({page, row}).second) put_cell(-1);
  }
}

kv_problem random_kv(uint32_t seed, int64_t most_rows = 40) {
  dice d(seed);
  kv_problem p;
  draw_shapes(d, p, most_rows);
  draw_places(d, p);
  return p;
}

// "" when run(leaf) leaves the bytes of `memory` that the oracle leaves, those beside the elements included.
template <class Leaf, class Oracle, class Run>
std::string wrong_bytes(std::vector<char>& memory, const Leaf& leaf, const Oracle& wanted, const Run& run) {
  const std::vector<char> before = memory;
  wanted(leaf);
  const std::vector<char> want = memory;
  std::copy(before.begin(), before.end(), memory.begin());
  if (const cqsa_status status = run(leaf); status != CQSA_OK) return "status " + std::to_string(status);
  const auto at = std::mismatch(memory.begin(), memory.end(), want.begin());
  if (at.first == memory.end()) return "";
  return "byte " + std::to_string(at.first - memory.begin()) + " of " + std::to_string(memory.size()) + " is " +
         std::to_string(*at.first & 255) + ", wanted " + std::to_string(*at.second & 255) + ", was " +
         std::to_string(before[size_t(at.first - memory.begin())] & 255);
}

// A whole problem there and back: append into a pool of random bytes, then gather from random bytes.
template <class Append, class Gather> std::string wrong_cache(kv_problem& p, uint32_t seed, const Append& append, const Gather& gather) {
  dice d(seed ^ 0x9e3779b9u);
  fill_bytes(d, p.pool), fill_bytes(d, p.scale);
  if (d.once_in(4)) fill_bytes(d, p.x);  // every bit pattern
  else fill_rows(d, p.x);
  // Two outputs: whichever the oracle is not compared in keeps what the oracle wrote, so each is compared once.
  const cqsa_kv_leaf leaf = p.with();
  const std::vector<char> scales = p.scale.memory, x = p.x.memory;
  std::string wrong = wrong_bytes(p.pool.memory, leaf, oracle::append, append);
  std::copy(scales.begin(), scales.end(), p.scale.memory.begin());
  if (wrong.empty() && !p.scale.empty()) wrong = wrong_bytes(p.scale.memory, leaf, oracle::append, append);
  if (!wrong.empty()) return "append: " + wrong;
  if (p.x.memory != x) return "append wrote its input";
  fill_bytes(d, p.pool), fill_bytes(d, p.scale), fill_bytes(d, p.x);
  const std::vector<char> pool = p.pool.memory;
  wrong = wrong_bytes(p.x.memory, leaf, oracle::gather, gather);
  if (!wrong.empty()) return "gather: " + wrong;
  return p.pool.memory == pool ? "" : "gather wrote its input";
}

std::string text_of(const kv_problem& p) {
  const cqsa_kv_leaf& a = p.leaf;
  return "format " + std::to_string(a.format) + " x 0x" + std::to_string(p.x.view.dtype) + " pool " + std::to_string(p.pool.view.dtype) +
         " rows " + std::to_string(a.rows) + " heads " + std::to_string(a.num_kv_heads) + " head_dim " + std::to_string(a.head_dim) +
         " group " + std::to_string(a.kv_group) + " pages " + std::to_string(a.pages) + " of " + std::to_string(a.num_pages) + " x " +
         std::to_string(a.page_size);
}

// ---- rotations

struct rotation_problem {
  cqsa_hadamard_leaf leaf{};
  tensor x, out;
  bool in_place = false;

  cqsa_hadamard_leaf with() const {
    cqsa_hadamard_leaf a = leaf;
    const tensor& to = in_place ? x : out;
    a.x = x.view.data, a.out = to.view.data, a.dtype_x = x.view.dtype, a.dtype_out = to.view.dtype;
    std::copy(x.view.stride, x.view.stride + 4, a.x_stride);
    std::copy(to.view.stride, to.view.stride + 4, a.out_stride);
    return a;
  }
  std::vector<char>& result() { return in_place ? x.memory : out.memory; }
};

rotation_problem random_rotation(uint32_t seed, int64_t most_values = 30000) {
  dice d(seed);
  rotation_problem p;
  p.leaf.n = int64_t(1) << d.upto(12);
  const int64_t most = std::max<int64_t>(1, most_values / p.leaf.n);
  for (int64_t& size : p.leaf.shape) size = 1 + d.upto(std::min<int64_t>(4, most / 2));
  p.leaf.shape[2] = std::max<int64_t>(1, d.upto(most / p.leaf.shape[0] / p.leaf.shape[1]));
  const auto made = [&] {
    const layout how = d.once_in(2) ? compact : layout(d.upto(num_layouts - 1));
    const int64_t* const shape = p.leaf.shape;
    return tensor(d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {shape[0], shape[1], shape[2], p.leaf.n}, how);
  };
  p.x = made(), p.out = made();
  p.in_place = d.once_in(3);
  fill_bytes(d, p.out), fill_bytes(d, p.x);
  if (!d.once_in(4)) fill_rows(d, p.x);
  return p;
}

}  // namespace
