// SPDX-License-Identifier: Apache-2.0
// FP8 on the CPU, leaf by leaf: every instruction set and any number of threads give the bits of the reference, and the reference those
// of dtype.h.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <catch2/catch.hpp>

#include "backends/cpu/cpu_features.h"
#include "backends/cpu/fp8_element.h"
#include "backends/cpu/fp8_job.h"
#include "backends/cpu/fp8_lines.h"

namespace {

using namespace cqsa;
using namespace cqsa::cpu;

struct named_target {
  const char* name;
  const fp8_target* target;
};

std::vector<named_target> targets() {
  std::vector<named_target> list{{"baseline", &fp8_baseline}};
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx2) list.push_back({"avx2", &fp8_avx2});
  if (this_cpu().avx512) list.push_back({"avx512", &fp8_avx512});
#endif
  return list;
}

cqsa_status run_threads(void*, int64_t count, void (*task)(void*, int64_t), void* data) {
  std::vector<std::thread> threads;
  for (int64_t n = 1; n < count; ++n) threads.emplace_back(task, data, n);
  task(data, 0);
  for (std::thread& t : threads) t.join();
  return CQSA_OK;
}

cqsa_exec threads_of(int64_t n) { return {nullptr, run_threads, nullptr, n}; }

constexpr cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};

// ---- lines ------------------------------------------------------------------------------------------------------------------

// f32 bits around everything that matters: each code's neighbourhood and ties, powers of two, the ends.
std::vector<float> special_floats() {
  std::vector<float> list;
  const auto add = [&](uint32_t bits) {
    for (uint32_t sign : {0u, 0x80000000u})
      for (int d = -2; d <= 2; ++d) list.push_back(fp8::float_of(((bits + uint32_t(d)) & 0x7FFFFFFFu) | sign));
  };
  for (const cqsa_dtype format : formats)
    for (int code = 0; code < 127; ++code) {
      const float x = code_to_f32(uint8_t(code), format), y = code_to_f32(uint8_t(code + 1), format);
      add(fp8::bits_of(x)), add(fp8::bits_of(x + (y - x) / 2));
    }
  for (uint32_t e = 0; e < 256; ++e) add(e << 23), add(e << 23 | 0x400000u), add(e << 23 | 0x600000u);
  for (uint32_t nan : {0x7F800001u, 0x7FA00000u, 0x7FC00000u, 0x7FE00000u, 0x7FFFFFFFu}) add(nan);
  return list;
}

void check_codes(const std::vector<float>& x, float scale, cqsa_dtype format, bool saturate) {
  std::vector<uint8_t> codes(x.size());
  const fp8_coding how{format, saturate, false, false};
  const int64_t n = int64_t(x.size());
  for (const named_target& t : targets()) {
    t.target->encode(x.data(), CQSA_DTYPE_F32, n, n, &scale, &how, codes.data(), nullptr);
    size_t wrong = 0, at = 0;
    for (size_t i = 0; i < x.size(); ++i)
      if (codes[i] != f32_to_code(x[i] != x[i] ? x[i] : x[i] * scale, format, saturate)) ++wrong, at = i;
    INFO(t.name << " format " << format << " saturate " << saturate << " last at " << fp8::bits_of(x[at]) << ": " << int(codes[at]));
    REQUIRE(wrong == 0);
  }
}

TEST_CASE("fp8: special values become the codes of dtype.h", "[fp8]") {
  const std::vector<float> x = special_floats();
  for (const cqsa_dtype format : formats)
    for (const bool saturate : {true, false})
      for (const float scale : {1.0f, 0.37f, 0x1p-126f, 3.0e38f}) check_codes(x, scale, format, saturate);
}

TEST_CASE("fp8: sampled values become the codes of dtype.h", "[fp8]") {
  std::mt19937 random(7);
  std::vector<float> x(1 << 16);
  for (const cqsa_dtype format : formats)
    for (const bool saturate : {true, false}) {
      for (float& v : x) v = fp8::float_of(random());
      check_codes(x, 1.0f, format, saturate);
    }
}

TEST_CASE("fp8: every f32 becomes the code of dtype.h", "[.long]") {
  std::vector<float> x(1 << 20);
  for (uint64_t begin = 0; begin < (uint64_t(1) << 32); begin += x.size()) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = fp8::float_of(uint32_t(begin + i));
    for (const cqsa_dtype format : formats)
      for (const bool saturate : {true, false}) check_codes(x, 1.0f, format, saturate);
  }
}

TEST_CASE("fp8: every bf16 and every code", "[fp8]") {
  std::vector<uint16_t> x(1 << 16);
  std::vector<uint8_t> codes(1 << 16), all(256);
  std::vector<float> numbers(256);
  std::vector<char> raw(1024);
  for (size_t i = 0; i < x.size(); ++i) x[i] = uint16_t(i);
  for (size_t i = 0; i < all.size(); ++i) all[i] = uint8_t(i);
  const float scale = 1.7f;
  for (const named_target& t : targets())
    for (const cqsa_dtype format : formats) {
      const fp8_coding how{format, true, false, false};
      t.target->encode(x.data(), CQSA_DTYPE_BF16, 1 << 16, 1 << 16, &scale, &how, codes.data(), nullptr);
      size_t wrong = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const float f = bf16_to_f32(x[i]);
        wrong += codes[i] != f32_to_code(f != f ? f : f * scale, format, true);
      }
      t.target->load(reinterpret_cast<const char*>(all.data()), format, 1, 256, raw.data(), numbers.data());
      for (size_t i = 0; i < 256; ++i) {
        const float want = code_to_f32(uint8_t(i), format);
        wrong += want != want ? numbers[i] == numbers[i] : fp8::bits_of(want) != fp8::bits_of(numbers[i]);
      }
      INFO(t.name << " " << format);
      REQUIRE(wrong == 0);
    }
}

TEST_CASE("fp8: codes that go past the caches are the same, at any address", "[fp8]") {
  std::mt19937 random(3);
  std::vector<uint16_t> x(3000);
  for (uint16_t& v : x) v = uint16_t(random());
  std::vector<uint8_t> plain(3000), past(3000 + 64);
  const float scale = 0.7f;
  for (const named_target& t : targets())
    for (const cqsa_dtype format : formats)
      for (int64_t shift = 0; shift < 64; shift += 7)
        for (const int64_t n : {1, 31, 32, 33, 100, 2999}) {
          uint32_t most[2] = {0, 0};
          const fp8_coding how[] = {{format, true, false, false}, {format, true, true, false}};
          t.target->encode(x.data() + shift, CQSA_DTYPE_BF16, std::min<int64_t>(n, 2900), n, &scale, &how[0], plain.data(), &most[0]);
          t.target->encode(x.data() + shift, CQSA_DTYPE_BF16, std::min<int64_t>(n, 2900), n, &scale, &how[1], past.data() + shift, &most[1]);
          t.target->finish();
          INFO(t.name << " " << format << " " << shift << " " << n);
          REQUIRE(std::memcmp(plain.data(), past.data() + shift, size_t(std::min<int64_t>(n, 2900))) == 0);
          REQUIRE(most[0] == most[1]);
        }
}

TEST_CASE("fp8: transposition", "[fp8]") {
  const int64_t rows = 150, columns = 201, from = 211;
  std::vector<uint8_t> x(size_t(rows * from)), want(size_t(columns * 256)), memory(want.size() + 64);
  for (size_t i = 0; i < x.size(); ++i) x[i] = uint8_t(i * 7 + i / 251);
  for (const int64_t to : {150, 192, 256})
    for (const named_target& t : targets())
      for (const bool streams : {false, true}) {
        uint8_t* const out = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
        t.target->transpose(x.data(), from, rows, columns, streams, out, to);
        t.target->finish();
        int64_t wrong = 0;
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < columns; ++j) wrong += out[j * to + i] != x[size_t(i * from + j)];
        INFO(t.name << " to " << to << " streams " << streams);
        REQUIRE(wrong == 0);
      }
}

TEST_CASE("fp8: silu within a few ulp", "[fp8]") {
  std::vector<float> x, up;
  for (int i = -1500; i <= 1500; ++i) x.push_back(float(i) * 0.07f), up.push_back(1.0f + float(i % 5));
  for (const float wild : {0.0f, -0.0f, 1e30f, 1e-40f, float(NAN), float(INFINITY)}) x.push_back(wild), up.push_back(2.0f);
  for (const named_target& t : targets()) {
    std::vector<float> got = x;
    for (size_t at = 0; at < x.size(); at += 1000) t.target->silu(got.data() + at, up.data() + at, int64_t(std::min<size_t>(1000, x.size() - at)));
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = double(x[i]) / (1.0 + std::exp(-double(x[i]))) * double(up[i]);
      INFO(t.name << " of " << x[i] << ": " << got[i] << ", " << want);
      if (want != want) REQUIRE(got[i] != got[i]);
      else if (std::isinf(want)) REQUIRE(double(got[i]) == want);
      else REQUIRE(std::fabs(double(got[i]) - want) <= 6e-7 * std::fabs(want) + 1e-36);  // exp() overflows before the quotient is 0
    }
  }
}

// ---- quantize ---------------------------------------------------------------------------------------------------------------

// A random quantization with its memory. Everything that is written lies in `written`, so that two runs can be compared.
struct problem {
  std::mt19937 random;
  std::vector<char> x, up, written;
  std::vector<float> x_scale, static_scale[2];
  std::vector<int64_t> rng{5, 77}, groups;
  alignas(64) char ring_memory[64 + 16 * 4] = {};
  size_t used = 0;
  cqsa_fp8_job job{};
  std::string text;

  explicit problem(uint32_t seed) : random(seed), written(1 << 23, 0x55) { build(); }
  int64_t pick(int64_t n) { return int64_t(random() % uint64_t(n)); }
  bool chance(int n) { return pick(n) == 0; }

  void build();
  void choose_x();
  void choose_source();
  void choose_side(cqsa_fp8_output& side, int which);
  void choose_groups();
  void fill(std::vector<char>& to, cqsa_dtype type, int64_t count);
  cqsa_matrix matrix(std::vector<char>& memory, cqsa_dtype type);
  cqsa_scale_grid scales(int64_t block_rows, int64_t block_columns, bool inverse);
  char* take(int64_t bytes) {
    char* const at = written.data() + used;
    used += size_t(bytes + 15) / 16 * 16;
    REQUIRE(used <= written.size());
    return at;
  }
  int64_t total() const { return job.batch * job.rows; }
};

void problem::fill(std::vector<char>& to, cqsa_dtype type, int64_t count) {
  to.resize(size_t(count * bytes_of(type)) + 8);
  const bool wild = chance(6);
  std::normal_distribution<float> normal(0, chance(4) ? 1e-3f : 2.0f);
  for (int64_t i = 0; i < count; ++i) {
    float f = normal(random);
    if (wild && chance(200)) f = chance(2) ? NAN : chance(2) ? INFINITY : -3e30f;
    if (chance(300)) f = 0;
    char* const at = to.data() + i * bytes_of(type);
    if (bytes_of(type) == 1) *at = char(f32_to_code(f, type, true));
    else store_f32(at, type, f);
  }
}

// Rows, columns or both a little apart; or column by column.
cqsa_matrix problem::matrix(std::vector<char>& memory, cqsa_dtype type) {
  const int64_t gap = pick(3) * pick(4), rows = job.rows, columns = job.columns;
  cqsa_matrix m{nullptr, type, 0, {rows * (columns + gap), columns + gap, 1}};
  if (chance(5)) m.stride[0] = columns * (rows + gap), m.stride[1] = 1, m.stride[2] = rows + gap;
  if (chance(8)) m.stride[0] *= 2, m.stride[1] *= 2, m.stride[2] *= 2;
  fill(memory, type, 2 * job.batch * (rows + gap) * (columns + gap) + 8);
  m.data = memory.data() + (chance(4) ? bytes_of(type) : 0);
  return m;
}

void problem::choose_x() {
  job.batch = chance(4) ? 1 + pick(3) : 1;
  const bool large = chance(10);
  job.rows = large ? 300 + pick(200) : chance(12) ? 1 : 1 + pick(150);
  job.columns = large ? 200 + pick(500) : chance(12) ? 1 + pick(20) : 1 + pick(400);
  if (chance(30)) (chance(2) ? job.rows : job.columns) = 0;
  const cqsa_dtype types[] = {CQSA_DTYPE_BF16, CQSA_DTYPE_BF16, CQSA_DTYPE_F32, CQSA_DTYPE_F16, formats[pick(4)]};
  const cqsa_dtype type = types[pick(5)];
  job.x = matrix(x, type);
  text = "rows " + std::to_string(job.batch) + "*" + std::to_string(job.rows) + " columns " + std::to_string(job.columns) + " type " + std::to_string(type);
  if (bytes_of(type) != 1) return;
  const int64_t g = 1 + pick(40), columns = (job.columns + g - 1) / g;
  x_scale.assign(size_t(std::max<int64_t>(total() * columns, 1)), 0.5f);
  for (float& s : x_scale) s = 0.1f + float(pick(100));
  job.x_scale_inv = {x_scale.data(), CQSA_DTYPE_F32, 0, {columns, 1}, total(), columns, {1, g}};
}

void problem::choose_source() {
  job.source = int32_t(pick(3));
  job.nan_policy = int32_t(pick(2));
  job.margin = int32_t(pick(3)) - 1;
  job.flags = (chance(3) ? uint32_t(CQSA_FP8_POW2) : 0u) | (chance(3) ? uint32_t(CQSA_FP8_NO_SATURATE) : 0u);
  if (chance(4)) job.eps = 1e-2f;
  if (chance(4)) job.amax_limit = 3.0f;
  if (chance(4)) job.rng = rng.data(), job.rng_stride = 1;
  text += " source " + std::to_string(job.source) + " flags " + std::to_string(job.flags);
}

cqsa_scale_grid problem::scales(int64_t block_rows, int64_t block_columns, bool inverse) {
  const int64_t rows = block_rows == 0 ? 1 : (total() + block_rows - 1) / block_rows;
  const int64_t columns = block_columns == 0 ? 1 : (job.columns + block_columns - 1) / block_columns;
  const int64_t r = block_rows == 0 || block_rows > total() ? std::max<int64_t>(total(), 1) : block_rows;
  const int64_t c = block_columns == 0 || block_columns > job.columns ? std::max<int64_t>(job.columns, 1) : block_columns;
  cqsa_scale_grid g{nullptr, CQSA_DTYPE_F32, CQSA_FP8_SCALES_STRIDED, {columns, 1}, rows, columns, {r, c}};
  if (chance(3)) g.stride[0] = 1, g.stride[1] = (rows + 3) / 4 * 4;
  if (inverse && chance(3)) g.layout = int32_t(pick(3)), g.dtype = CQSA_DTYPE_E8M0FNU;
  if (g.layout == CQSA_FP8_SCALES_PACKED) g.dtype = CQSA_DTYPE_I32, g.stride[0] = (columns + 3) / 4, g.stride[1] = 1;
  return g;
}

int64_t grid_bytes(const cqsa_scale_grid& g) {
  if (g.layout == CQSA_FP8_SCALES_TILED) return (g.rows + 127) / 128 * ((g.columns + 3) / 4) * 512;
  return 4 * (g.rows + 4) * (g.columns + 4);
}

void problem::choose_side(cqsa_fp8_output& side, int which) {
  const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 128}, {128, 1}, {128, 128}, {1, 16 + pick(60)}, {16 + pick(60), 1}, {1, 32}};
  const int64_t* block = blocks[job.source == CQSA_FP8_RING ? 0 : pick(9)];
  if (job.groups) block = blocks[pick(2) == 0 ? 0 : pick(2) == 0 ? 1 : 3];
  side.codes = {nullptr, formats[pick(4)], 0, {job.rows * job.columns, job.columns, 1}};
  if (which == 1) side.codes.stride[0] = job.rows, side.codes.stride[1] = 1, side.codes.stride[2] = total() + pick(3);
  if (which == 0 && chance(6)) side.codes.stride[0] *= 2, side.codes.stride[1] *= 2, side.codes.stride[2] = 2;
  if (total() * job.columns > 0) side.codes.data = take(2 * total() * job.columns + 3 * job.columns) + pick(3);
  side.scale = scales(block[0], block[1], false);
  side.scale_inv = scales(block[0], block[1], true);
  side.per_group = job.groups && block[0] == 0;
  if (side.per_group) side.scale.rows = side.scale_inv.rows = int64_t(groups.size()) - 1;
  for (cqsa_scale_grid* g : {&side.scale, &side.scale_inv}) {
    if (g->layout == CQSA_FP8_SCALES_STRIDED && g->stride[1] != 1) g->stride[1] = (g->rows + 3) / 4 * 4;
    if (!chance(4)) g->data = take(grid_bytes(*g));
  }
  side.ratio = 1;
  text += " side " + std::to_string(which) + " block " + std::to_string(block[0]) + "," + std::to_string(block[1]);
  if (job.source != CQSA_FP8_STATIC) return;
  std::vector<float>& s = static_scale[which];
  s.assign(size_t(std::max<int64_t>(side.scale.rows * side.scale.columns, 1)), 1.0f);
  for (float& v : s) v = std::exp2(float(pick(16)) - 8) * 1.3f;
  side.scale_in = side.scale;
  side.scale_in.data = s.data(), side.scale_in.stride[0] = side.scale.columns, side.scale_in.stride[1] = 1;
}

void problem::choose_groups() {
  if (job.source == CQSA_FP8_RING || !chance(4)) return;
  const int64_t count = chance(4) ? 300 : 1 + pick(8);
  groups.push_back(pick(3) == 0 ? 0 : std::min<int64_t>(2, total()));
  for (int64_t g = 0; g < count; ++g) groups.push_back(std::min(total(), groups.back() + (chance(3) ? 0 : pick(2 * total() / count + 2))));
  job.groups = groups.data(), job.groups_dtype = CQSA_DTYPE_I64, job.groups_stride = 1, job.num_groups = count;
  text += " groups " + std::to_string(count);
}

void problem::build() {
  choose_x();
  choose_source();
  choose_groups();
  const int64_t which = pick(8);
  if (which != 0 && which != 1) choose_side(job.row, 0);
  if (which == 0 || which > 4) choose_side(job.transposed, 1);
  if (which > 4 && chance(3)) job.transposed.codes.dtype = job.row.codes.dtype;
  if (which > 4 && chance(2) && !job.groups && job.source == CQSA_FP8_STATIC && job.row.scale.block[0] == job.transposed.scale.block[0] &&
      job.row.scale.block[1] == job.transposed.scale.block[1])
    job.transposed.scale_in.data = nullptr, job.transposed.ratio = 0.5f;
  if (which == 1) job.source = CQSA_FP8_CURRENT;
  if (which == 1 && !job.groups) {
    job.block_amax = scales(chance(2) ? 0 : 1 + pick(50), chance(2) ? 0 : 1 + pick(50), false);
    job.block_amax.data = take(grid_bytes(job.block_amax));
  }
  if (chance(2)) job.amax = reinterpret_cast<float*>(take(4));
  if (chance(3)) job.column_sum = reinterpret_cast<float*>(take(4 * job.columns)), job.column_sum_stride = 1;
  if (chance(2)) job.counters = reinterpret_cast<int64_t*>(take(32)), job.counters_stride = 1;
  if (job.source != CQSA_FP8_RING) return;
  job.ring = {sizeof(cqsa_fp8_ring), 0, ring_memory, sizeof ring_memory, 16, formats[pick(4)], 0, int32_t(pick(2))};
  job.flags |= chance(3) ? uint32_t(CQSA_FP8_RING_STAGE) : 0u;
  job.row.ratio = 0.5f;
}

cqsa_fp8_ring_leaf begin(problem& p) { return {CQSA_FP8_RINGS_INIT, 0, &p.job.ring, 1, nullptr, 0, 7.5f, 0}; }

// What a run leaves behind.
std::vector<char> outcome(problem& p, const fp8_target* target, int64_t threads) {
  std::fill(p.written.begin(), p.written.begin() + int64_t(p.used), char(0x55));
  const cqsa_fp8_ring_leaf ring = begin(p);
  if (p.job.ring.state) REQUIRE(fp8_rings(nullptr, &ring, nullptr, nullptr) == CQSA_OK);
  const cqsa_fp8_quantize_leaf leaf{sizeof(cqsa_fp8_quantize_leaf), 0, &p.job, 1, {}};
  const cqsa_exec exec = threads_of(threads);
  REQUIRE((target ? fp8_quantize_on(*target, &leaf, &exec) : fp8_quantize_reference(&leaf)) == CQSA_OK);
  std::vector<char> all(p.written.begin(), p.written.begin() + int64_t(p.used));
  if (p.job.ring.state) all.insert(all.end(), p.ring_memory, p.ring_memory + sizeof p.ring_memory);
  return all;
}

void check_problem(uint32_t seed) {
  problem p(seed);
  const std::vector<char> want = outcome(p, nullptr, 1);
  for (const named_target& t : targets())
    for (const int64_t threads : {1, 3, 8}) {
      const std::vector<char> got = outcome(p, t.target, threads);
      size_t at = 0;
      while (at < want.size() && got[at] == want[at]) ++at;
      INFO("seed " << seed << " " << t.name << " threads " << threads << ": " << p.text << ", first at " << at << " of " << want.size());
      REQUIRE((got == want));
    }
}

TEST_CASE("fp8: random quantizations equal the reference", "[fp8]") {
  for (uint32_t seed = 1; seed <= 150; ++seed) check_problem(seed);
}

TEST_CASE("fp8: many random quantizations equal the reference", "[.long]") {
  for (uint32_t seed = 1000; seed <= 4000; ++seed) check_problem(seed);
}

// ---- dequantize -------------------------------------------------------------------------------------------------------------

// Codes that were made by a random quantization's x: any strides, scales of any blocks, groups.
void check_decoding(uint32_t seed) {
  problem p(seed);
  if (bytes_of(p.job.x.dtype) != 1) return;
  const cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
  const cqsa_dtype type = types[seed % 3];
  const int64_t rows = p.job.rows, columns = p.job.columns, gap = p.pick(3);
  std::vector<char> out[2];
  for (auto& o : out) o.assign(size_t(p.job.batch * rows * (columns + gap) * bytes_of(type) + 8), char(0x33));
  cqsa_fp8_dequantize_leaf leaf{};
  leaf.batch = p.job.batch, leaf.rows = rows, leaf.columns = columns;
  leaf.codes = p.job.x, leaf.scale_inv = p.job.x_scale_inv;
  leaf.groups = p.job.groups, leaf.groups_dtype = p.job.groups_dtype, leaf.groups_stride = p.job.groups_stride, leaf.num_groups = p.job.num_groups;
  leaf.out = {out[0].data(), type, 0, {rows * (columns + gap), columns + gap, 1}};
  REQUIRE(fp8_dequantize_reference(&leaf) == CQSA_OK);
  leaf.out.data = out[1].data();
  for (const named_target& t : targets())
    for (const int64_t threads : {1, 3}) {
      std::fill(out[1].begin(), out[1].end(), char(0x33));
      const cqsa_exec exec = threads_of(threads);
      REQUIRE(fp8_dequantize_on(*t.target, &leaf, &exec) == CQSA_OK);
      INFO("seed " << seed << " " << t.name << " " << threads << ": " << p.text);
      REQUIRE((out[0] == out[1]));
    }
}

TEST_CASE("fp8: decoded numbers equal the reference", "[fp8]") {
  for (uint32_t seed = 1; seed <= 250; ++seed) check_decoding(seed);
}

// ---- product ----------------------------------------------------------------------------------------------------------------

struct gemm_problem {
  std::mt19937 random;
  std::vector<char> a, b, c, bias, d;
  std::vector<float> scale_a, scale_b;
  float d_scale = 0.5f, amax = 0;
  cqsa_fp8_gemm_leaf leaf{};
  explicit gemm_problem(uint32_t seed) : random(seed) { build(); }
  int64_t pick(int64_t n) { return int64_t(random() % uint64_t(n)); }
  bool chance(int n) { return pick(n) == 0; }
  void build();
  cqsa_matrix matrix(std::vector<char>& to, cqsa_dtype type, int64_t rows, int64_t columns);
  cqsa_scale_grid scales(std::vector<float>& to, int64_t rows, int64_t k, bool square);
};

cqsa_matrix gemm_problem::matrix(std::vector<char>& to, cqsa_dtype type, int64_t rows, int64_t columns) {
  const int64_t gap = pick(4), bytes = bytes_of(type);
  cqsa_matrix m{nullptr, type, 0, {rows * (columns + gap), columns + gap, 1}};
  if (chance(5)) m.stride[0] = columns * (rows + gap), m.stride[1] = 1, m.stride[2] = rows + gap;
  const int64_t count = leaf.batch * (rows + gap) * (columns + gap) + 1;
  to.resize(size_t(count * bytes));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i)
    if (bytes == 1) to[size_t(i)] = char(f32_to_code(normal(random), type, true));
    else store_f32(to.data() + i * bytes, type, normal(random));
  m.data = to.data();
  return m;
}

cqsa_scale_grid gemm_problem::scales(std::vector<float>& to, int64_t rows, int64_t k, bool square) {
  const int64_t blocks[][2] = {{0, 0}, {1, 0}, {1, 128}, {128, 128}};
  const int64_t* block = blocks[pick(square ? 4 : 3)];
  cqsa_scale_grid g{nullptr, CQSA_DTYPE_F32, 0, {0, 1}, 0, 0, {}};
  g.block[0] = std::max<int64_t>(block[0] ? std::min(block[0], rows) : rows, 1), g.block[1] = std::max<int64_t>(block[1] ? std::min(block[1], k) : k, 1);
  g.rows = block[0] ? (rows + g.block[0] - 1) / g.block[0] : 1, g.columns = block[1] ? (k + g.block[1] - 1) / g.block[1] : 1;
  g.stride[0] = g.columns;
  to.resize(size_t(leaf.batch * g.rows * g.columns + 1));
  for (float& s : to) s = 0.5f + float(pick(100)) * 0.01f;
  if (!chance(4)) g.data = to.data();
  return g;
}

void gemm_problem::build() {
  const cqsa_dtype numbers[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
  leaf.struct_size = sizeof leaf;
  leaf.batch = chance(4) ? 2 : 1;
  leaf.m = chance(4) ? 1 + pick(4) : pick(230), leaf.n = chance(6) ? 300 + pick(300) : 1 + pick(90), leaf.k = chance(10) ? 0 : 1 + pick(600);
  leaf.a = matrix(a, formats[pick(4)], leaf.m, leaf.k), leaf.b = matrix(b, formats[pick(4)], leaf.n, leaf.k);
  if (chance(3)) leaf.b.stride[0] = 0;
  leaf.d = matrix(d, chance(4) ? formats[pick(4)] : numbers[pick(3)], leaf.m, leaf.n);
  leaf.scale_inv_a = scales(scale_a, leaf.m, leaf.k, false), leaf.scale_inv_b = scales(scale_b, leaf.n, leaf.k, true);
  leaf.scale_batch_stride_a = leaf.scale_inv_a.rows * leaf.scale_inv_a.columns;
  leaf.alpha = chance(2) ? 1.0 : -0.75;
  if (chance(3)) leaf.beta = 0.5, leaf.c = matrix(c, numbers[pick(3)], leaf.m, leaf.n);
  if (chance(2)) {
    leaf.bias_dtype = numbers[pick(3)], leaf.bias_stride = 1;
    bias.resize(size_t(4 * leaf.n));
    for (int64_t j = 0; j < leaf.n; ++j) store_f32(bias.data() + j * bytes_of(leaf.bias_dtype), leaf.bias_dtype, float(pick(9)));
    leaf.bias = bias.data();
  }
  if (chance(2)) leaf.d_scale = &d_scale;
  leaf.d_amax = &amax;
}

std::vector<char> run_gemm(gemm_problem& p, const cqsa_fp8_gemm_impl& impl, int64_t threads) {
  std::fill(p.d.begin(), p.d.end(), char(0));
  const uint64_t bytes = impl.workspace(&p.leaf, threads);
  std::vector<char> memory(bytes + 64);
  void* const workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  REQUIRE(fp8_workspace_init(nullptr, workspace, bytes, nullptr) == CQSA_OK);
  const cqsa_exec exec = threads_of(threads);
  REQUIRE(impl.launch(nullptr, &p.leaf, workspace, bytes, &exec, nullptr) == CQSA_OK);
  return p.d;
}

// Root of the mean square of the differences, relative to that of the numbers.
double distance(const gemm_problem& p, const std::vector<char>& got, const std::vector<char>& want) {
  const cqsa_dtype type = p.leaf.d.dtype;
  double off = 0, all = 1e-30;
  for (size_t i = 0; i < got.size(); i += size_t(bytes_of(type))) {
    const double x = load_f32(got.data() + i, type), y = load_f32(want.data() + i, type);
    off += (x - y) * (x - y), all += y * y;
  }
  return std::sqrt(off / all);
}

TEST_CASE("fp8: products equal those in f64, with the same bits for any number of threads", "[fp8]") {
  int32_t count = 0;
  const cqsa_fp8_gemm_impl* const list = fp8_gemm_impls(&count);
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    gemm_problem p(seed);
    const std::vector<char> want = run_gemm(p, list[count - 1], 2);
    const float amax = p.amax;
    for (int32_t n = 0; n + 1 < count; ++n) {
      if (list[n].probe(nullptr, &p.leaf, nullptr, 0) != CQSA_OK) continue;
      const std::vector<char> got = run_gemm(p, list[n], 1);
      const double most = bytes_of(p.leaf.d.dtype) == 4 ? 2e-6 : bytes_of(p.leaf.d.dtype) == 2 ? 1e-4 : 4e-3, off = distance(p, got, want);
      INFO("seed " << seed << " " << list[n].name << " " << p.leaf.batch << "x" << p.leaf.m << "x" << p.leaf.n << "x" << p.leaf.k << " off by " << off);
      REQUIRE(off <= most);
      REQUIRE(std::fabs(p.amax - amax) <= 1e-5f * amax);
      for (const int64_t threads : {3, 8}) REQUIRE((run_gemm(p, list[n], threads) == got));
    }
  }
}

}  // namespace
