// SPDX-License-Identifier: Apache-2.0
// Rows of quantized matrices by the portable kernels in the harness, with 32 and with 64 lanes: every format on random bytes against one element at a
// time, to the bit; any even address, row distance, order of rows and type and strides of the output; nothing else written; mistakes noticed.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cpu/quant_reference.h"
#include "backends/gpu/quant.h"
#include "dtype.h"
#include "quant_format.h"
#include "simt_port.h"
#include "simt_runtime.h"

#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace cqsa;

namespace {

constexpr cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};

struct draw {
  std::mt19937_64 random;
  explicit draw(uint64_t seed) : random(seed) {}
  int64_t to(int64_t n) { return int64_t(random() % uint64_t(n)); }
  bool one_in(int64_t n) { return to(n) == 0; }
};

// A leaf and its memory. The blocks end where their memory ends, so that a sanitizer sees who reads further.
struct problem {
  std::unique_ptr<uint8_t[]> blocks;
  std::vector<uint8_t> out;
  std::vector<int64_t> ids;
  std::vector<int32_t> short_ids;
  cqsa_dequantize_leaf leaf{};
  std::string text;
};

void fill(draw& d, uint8_t* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = uint8_t(d.random());
  for (int64_t i = 1; i < n; ++i)
    if (d.one_in(40)) to[i] = uint8_t(d.one_in(2) ? 0x7e : 0xfe), to[i - 1] = uint8_t(d.random());  // a scale that is NaN, somewhere
}

void make_ids(draw& d, problem& p, bool many) {
  cqsa_dequantize_leaf& a = p.leaf;
  if (!many && !d.one_in(2)) {
    a.first_row = d.to(a.rows + 1), a.count = d.to(a.rows - a.first_row + 1);
    return;
  }
  a.row_ids_stride = 1 + d.to(3);
  p.ids.resize(size_t(a.count * a.row_ids_stride + 1));
  for (int64_t& id : p.ids) id = d.one_in(8) ? (d.one_in(2) ? -1 - d.to(3) : a.rows + d.to(3)) : d.to(a.rows);
  if (d.one_in(6)) p.ids[0] = d.one_in(2) ? INT64_MIN : INT64_MAX;
  a.row_ids = p.ids.data(), a.row_ids_dtype = CQSA_DTYPE_I64;
  if (d.one_in(2)) return;
  for (int64_t id : p.ids) p.short_ids.push_back(int32_t(id));
  for (size_t i = 0; i < p.ids.size(); ++i) p.ids[i] = p.short_ids[i];
  a.row_ids = p.short_ids.data(), a.row_ids_dtype = CQSA_DTYPE_I32;
}

// plain: as rows lie in practice.
void make_out(draw& d, problem& p, bool plain) {
  cqsa_dequantize_leaf& a = p.leaf;
  a.out_dtype = types[d.to(3)];
  const int64_t bytes = a.out_dtype == CQSA_DTYPE_F32 ? 4 : 2;
  const bool turned = !plain && d.one_in(3);
  a.out_stride[1] = turned ? a.count + d.to(3) : plain ? 1 : 1 + d.to(2);
  a.out_stride[0] = turned ? 1 : a.row_elements * a.out_stride[1] + (plain ? 0 : d.to(5));
  const int64_t last = (a.count > 0 ? a.count - 1 : 0) * a.out_stride[0] + (a.row_elements - 1) * a.out_stride[1], offset = plain ? 64 : 64 + d.to(9);
  p.out.assign(size_t(offset + (last + 1) * bytes + 64), 0x5a);
  a.out = p.out.data() + offset;
  if (plain) a.out = p.out.data() + (64 - uintptr_t(p.out.data()) % 16);
}

// many: so many rows that the blocks of a small device go round.
std::unique_ptr<problem> make(uint64_t seed, cqsa_quant_format format, bool many = false) {
  draw d(seed);
  auto p = std::make_unique<problem>();
  cqsa_dequantize_leaf& a = p->leaf;
  const quant_format& f = quant_formats[format];
  a.struct_size = sizeof a, a.format = format;
  a.rows = 1 + d.to(12), a.count = 1 + d.to(20);
  const int64_t blocks = 1 + d.to(f.block_elements == 1 ? 3000 : d.one_in(3) ? 2560 / f.block_elements : 4), own = blocks * f.block_bytes;
  a.row_elements = blocks * f.block_elements;
  if (many) a.rows = 900, a.count = 40 + (16 * 256 * 32 + d.to(9999)) / a.row_elements;
  const bool any_address = f.block_bytes % 2 != 0;
  a.row_bytes = own + d.to(4) * (any_address ? 1 : 2);
  const int64_t offset = any_address ? d.to(16) : 2 * d.to(8), bytes = offset + (a.rows - 1) * a.row_bytes + own;
  p->blocks.reset(new uint8_t[size_t(bytes)]);
  fill(d, p->blocks.get(), bytes);
  a.data = p->blocks.get() + offset;
  make_ids(d, *p, many);
  make_out(d, *p, d.one_in(2));
  p->text = std::string(f.name) + " seed " + std::to_string(seed) + " [" + std::to_string(a.rows) + ", " + std::to_string(a.row_elements) + "] to " +
            std::to_string(a.count) + " rows of " + std::to_string(a.out_dtype);
  return p;
}

bool moves_only(cqsa_quant_format format, cqsa_dtype type) {
  return format <= CQSA_QUANT_BF16 && type == types[format - CQSA_QUANT_F32];
}

void put(const cqsa_dequantize_leaf& a, uint8_t* to, const uint8_t* block, int i) {
  if (block && moves_only(a.format, a.out_dtype)) return void(std::memcpy(to, block, a.out_dtype == CQSA_DTYPE_F32 ? 4 : 2));
  float value = block ? cpu::quant_element(a.format)(block, i) : 0.0f;
  if (value != value) value = std::bit_cast<float>(0x7fc00000u);
  if (a.out_dtype == CQSA_DTYPE_F32) return void(std::memcpy(to, &value, 4));
  const uint16_t half = a.out_dtype == CQSA_DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(to, &half, 2);
}

// What the memory of out should hold.
std::vector<uint8_t> wanted(const problem& p) {
  const cqsa_dequantize_leaf& a = p.leaf;
  const quant_format& f = quant_formats[a.format];
  std::vector<uint8_t> out = p.out;
  uint8_t* const first = out.data() + (static_cast<uint8_t*>(a.out) - p.out.data());
  const int64_t bytes = a.out_dtype == CQSA_DTYPE_F32 ? 4 : 2;
  for (int64_t n = 0; n < a.count; ++n) {
    const int64_t row = a.row_ids ? p.ids[size_t(n * a.row_ids_stride)] : a.first_row + n;
    const bool there = row >= 0 && row < a.rows;
    for (int64_t i = 0; i < a.row_elements; ++i)
      put(a, first + (n * a.out_stride[0] + i * a.out_stride[1]) * bytes,
          there ? static_cast<const uint8_t*>(a.data) + row * a.row_bytes + i / f.block_elements * f.block_bytes : nullptr, int(i % f.block_elements));
  }
  return out;
}

// "" when the kernel wrote what it should and nothing else.
std::string wrong(uint64_t seed, cqsa_quant_format format, int lanes, bool many = false) {
  const std::unique_ptr<problem> p = make(seed, format, many);
  const std::vector<uint8_t> want = wanted(*p);
  simt::device device;
  device.facts.lanes = lanes, device.facts.compute_units = 1, device.seed = seed;
  if (gpu::portable_dequantize_rows(&device, &p->leaf, nullptr, nullptr) != CQSA_OK) return p->text + ": " + simt::last_error();
  for (size_t i = 0; i < want.size(); ++i)
    if (p->out[i] != want[i])
      return p->text + ": byte " + std::to_string(int64_t(p->out.data() + i - static_cast<uint8_t*>(p->leaf.out))) + " is " + std::to_string(p->out[i]) + ", not " +
             std::to_string(want[i]);
  return "";
}

}  // namespace

TEST_CASE("simt quant: every format has the bits of one element at a time") {
  for (cqsa_quant_format format = 1; format < quant_format_count; ++format)
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      const std::string text = wrong(seed * 100 + uint64_t(format), format, seed % 2 ? 32 : 64);
      if (!text.empty()) FAIL(text);
    }
}

TEST_CASE("simt quant: more than the blocks of a launch take at once") {
  for (cqsa_quant_format format : {CQSA_QUANT_F16, CQSA_QUANT_Q4_1, CQSA_QUANT_Q6_K, CQSA_QUANT_IQ3_S})
    for (const int lanes : {32, 64}) {
      const std::string text = wrong(3, format, lanes, true);
      if (!text.empty()) FAIL(text);
    }
}

TEST_CASE("simt quant: one launch, and none for nothing") {
  for (cqsa_quant_format format : {CQSA_QUANT_F16, CQSA_QUANT_Q4_0, CQSA_QUANT_Q4_K, CQSA_QUANT_IQ2_S}) {
    const std::unique_ptr<problem> p = make(7, format);
    simt::device device;
    p->leaf.row_ids = nullptr, p->leaf.first_row = 0, p->leaf.count = 0;
    REQUIRE(gpu::portable_dequantize_rows(&device, &p->leaf, nullptr, nullptr) == CQSA_OK);
    CHECK(device.launches == 0);
    p->leaf.count = 1;
    REQUIRE(gpu::portable_dequantize_rows(&device, &p->leaf, nullptr, nullptr) == CQSA_OK);
    CHECK(device.launches == 1);
  }
}

TEST_CASE("simt quant: every mutant is noticed") {
  for (const int mutant : {61, 62, 63}) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    bool noticed = false;
    for (uint64_t seed = 1; seed <= 60 && !noticed; ++seed)
      for (cqsa_quant_format format : {CQSA_QUANT_Q8_0, CQSA_QUANT_MXFP4})
        noticed = noticed || !wrong(seed, format, seed % 2 ? 32 : 64, seed % 10 == 0).empty();
    cqsa_simt_mutant = 0;
    CHECK(noticed);
  }
}
