// SPDX-License-Identifier: Apache-2.0
// Quantized matrices: every decoder on every instruction set against one element at a time, closed forms, quantizers, and what is refused.
#include "backends/cpu/cpu_features.h"
#include "backends/cpu/quant_job.h"
#include "backends/cpu/quant_reference.h"
#include "dtype.h"
#include "quant_format.h"

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace cqsa;
using namespace cqsa::cpu;

namespace {

std::vector<std::pair<const char*, const quant_target*>> targets() {
  std::vector<std::pair<const char*, const quant_target*>> all{{"baseline", &quant_baseline}};
#if defined(CQSA_CPU_X86)
  if (this_cpu().avx2) all.push_back({"avx2", &quant_avx2});
#endif
  return all;
}

uint32_t plain_bits(float x) { return x != x ? 0x7fc00000u : std::bit_cast<uint32_t>(x); }

std::vector<uint8_t> random_bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// A context, a matrix of one format in memory of exactly its size, and an output with a guard around it.
struct call {
  cqsa_context* context = nullptr;
  std::vector<uint8_t> blocks;
  cqsa_quant_tensor w = CQSA_QUANT_TENSOR_INIT;
  std::vector<float> memory;
  int64_t shape[2], strides[2];
  cqsa_tensor out{};
  static constexpr float guard = -12345.0f;

  call(cqsa_quant_format format, int64_t rows, int64_t elements) {
    REQUIRE(cqsa_context_create(nullptr, &context) == CQSA_OK);
    const quant_format& f = quant_formats[format];
    blocks = random_bytes(static_cast<size_t>(rows * elements / f.block_elements * f.block_bytes), 7);
    w.format = format, w.device_type = CQSA_DEVICE_CPU, w.data = blocks.data(), w.rows = rows, w.row_elements = elements;
    w.data_bytes = blocks.size();
    memory.assign(static_cast<size_t>(rows * elements + 2), guard);
    shape[0] = rows, shape[1] = elements, strides[0] = elements, strides[1] = 1;
    out = {memory.data() + 1, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_F32, shape, strides, 0};
  }
  ~call() { cqsa_context_destroy(context); }
  call(const call&) = delete;
  call& operator=(const call&) = delete;

  cqsa_status run(int64_t first_row = 0, const cqsa_tensor* ids = nullptr) { return cqsa_dequantize_rows(context, &w, first_row, ids, &out, nullptr); }
  bool untouched() const {
    for (float x : memory)
      if (x != guard) return false;
    return true;
  }
  float wanted(int64_t row, int64_t column) const {
    const quant_format& f = quant_formats[w.format];
    const int64_t row_bytes = w.row_bytes ? static_cast<int64_t>(w.row_bytes) : w.row_elements / f.block_elements * f.block_bytes;
    const uint8_t* const block = static_cast<const uint8_t*>(w.data) + row * row_bytes + column / f.block_elements * f.block_bytes;
    return quant_element(w.format)(block, static_cast<int>(column % f.block_elements));
  }
};

std::string last() { return cqsa_last_error(); }
bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

cqsa_tensor ids_of(std::vector<int64_t>& ids, int64_t* shape) {
  *shape = static_cast<int64_t>(ids.size());
  return {ids.data(), CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_I64, shape, nullptr, 0};
}

}  // namespace

TEST_CASE("quant: the table and the query agree", "[quant]") {
  cqsa_quant_format_info info = CQSA_QUANT_FORMAT_INFO_INIT;
  for (cqsa_quant_format format = 1; format < quant_format_count; ++format) {
    REQUIRE(cqsa_quant_format_query(format, &info) == CQSA_OK);
    CHECK(std::string(info.name) == quant_formats[format].name);
    CHECK(info.block_elements == quant_formats[format].block_elements);
    CHECK(256 % info.block_elements == 0);
    CHECK(quant_format_of_ggml(static_cast<uint32_t>(info.ggml_type)) == format);
    CHECK(quant_element(format) != nullptr);
  }
  CHECK(quant_format_of_ggml(4) == CQSA_QUANT_NONE);
  for (cqsa_quant_format format : {-1, 0, int(quant_format_count), 1 << 30}) {
    CHECK(cqsa_quant_format_query(format, &info) == CQSA_ERROR_UNKNOWN_FLAG);
    CHECK(contains(last(), std::to_string(format).c_str()));
  }
  CHECK(cqsa_quant_format_query(1, nullptr) == CQSA_ERROR_NULL_POINTER);
}

TEST_CASE("quant: every decoder has the bits of one element at a time", "[quant]") {
  constexpr int64_t elements = 256 * 17;  // past a piece
  for (cqsa_quant_format format = 1; format < quant_format_count; ++format) {
    const quant_format& f = quant_formats[format];
    for (uint32_t seed = 1; seed <= 12; ++seed) {
      std::vector<uint8_t> bytes = random_bytes(static_cast<size_t>(elements / f.block_elements * f.block_bytes + 2), seed * 31 + static_cast<uint32_t>(format));
      std::vector<float> wanted(elements);
      const uint8_t* const first = bytes.data() + seed % 2 * 2;  // addresses are multiples of two, not of four
      for (int64_t i = 0; i < elements; ++i)
        wanted[static_cast<size_t>(i)] = quant_element(format)(first + i / f.block_elements * f.block_bytes, static_cast<int>(i % f.block_elements));
      for (const auto& [name, target] : targets()) {
        std::vector<float> got(elements, -1);
        cqsa_dequantize_leaf leaf{};
        leaf.struct_size = sizeof leaf, leaf.format = format, leaf.data = first, leaf.rows = leaf.count = 1, leaf.row_elements = elements;
        leaf.out = got.data(), leaf.out_dtype = CQSA_DTYPE_F32, leaf.out_stride[0] = elements, leaf.out_stride[1] = 1;
        REQUIRE(dequantize_rows_on(*target, &leaf, nullptr) == CQSA_OK);
        int64_t wrong = 0;
        for (size_t i = 0; i < got.size(); ++i) wrong += plain_bits(got[i]) != plain_bits(wanted[i]);
        INFO(f.name << " " << name << " seed " << seed);
        REQUIRE(wrong == 0);
      }
    }
  }
}

TEST_CASE("quant: closed forms", "[quant]") {
  const uint8_t q2[18] = {0x00, 0x3c, 0xe4};  // 1.0; codes 0, 1, 2, 3 and then zeros
  const float q2_wanted[] = {-1, 0, 1, 2, -1};
  for (int i = 0; i < 5; ++i) CHECK(quant_element(CQSA_QUANT_Q2_0)(q2, i) == q2_wanted[i]);
  const uint8_t q1[18] = {0x00, 0xc0, 0x05, 0x80};  // -2.0; bits 0, 2 and 15
  for (int i = 0; i < 128; ++i) CHECK(quant_element(CQSA_QUANT_Q1_0)(q1, i) == (i == 0 || i == 2 || i == 15 ? -2.0f : 2.0f));
  uint8_t q4[18] = {0x00, 0x38};  // 0.5
  for (int i = 0; i < 16; ++i) q4[2 + i] = static_cast<uint8_t>(i | (15 - i) << 4);
  for (int i = 0; i < 32; ++i) CHECK(quant_element(CQSA_QUANT_Q4_0)(q4, i) == 0.5f * float((i < 16 ? i : 31 - i) - 8));
  uint8_t mx[17] = {128};  // 2
  for (int i = 0; i < 16; ++i) mx[1 + i] = static_cast<uint8_t>(i);
  const float e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
  for (int i = 0; i < 16; ++i) CHECK(quant_element(CQSA_QUANT_MXFP4)(mx, i) == 2 * e2m1[i]);
}

TEST_CASE("quant: rows in any order, types, strides and row distances", "[quant]") {
  for (cqsa_quant_format format : {CQSA_QUANT_Q4_K, CQSA_QUANT_IQ2_S, CQSA_QUANT_MXFP4, CQSA_QUANT_Q8_0, CQSA_QUANT_F16, CQSA_QUANT_BF16, CQSA_QUANT_F32}) {
    call c(format, 6, 512);
    const quant_format& f = quant_formats[format];
    c.w.row_bytes = static_cast<uint64_t>(2 * 512 / f.block_elements * f.block_bytes);  // every other row
    c.w.rows = 3, c.w.data_bytes = 0;
    std::vector<int64_t> ids{2, 0, 2, 1};
    int64_t ids_shape;
    const cqsa_tensor rows = ids_of(ids, &ids_shape);
    for (cqsa_dtype dtype : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
      std::vector<uint16_t> narrow(4 * 512 * 2, 0x1234);
      std::vector<float> wide(4 * 512 * 2, call::guard);
      void* const memory = dtype == CQSA_DTYPE_F32 ? static_cast<void*>(wide.data()) : narrow.data();
      int64_t shape[2] = {4, 512}, strides[2] = {2, 8};  // columns first
      const cqsa_tensor out = {memory, CQSA_DEVICE_CPU, 0, 2, dtype, shape, strides, 0};
      REQUIRE(cqsa_dequantize_rows(c.context, &c.w, 0, &rows, &out, nullptr) == CQSA_OK);
      for (int64_t n = 0; n < 4; ++n)
        for (int64_t i = 0; i < 512; ++i) {
          const size_t at = static_cast<size_t>(2 * n + 8 * i);
          const float wanted = c.wanted(ids[static_cast<size_t>(n)], i);
          if (dtype == CQSA_DTYPE_F32) REQUIRE(plain_bits(wide[at]) == plain_bits(wanted));
          else if (wanted == wanted) REQUIRE(narrow[at] == (dtype == CQSA_DTYPE_F16 ? f32_to_f16(wanted) : f32_to_bf16(wanted)));
          if (dtype == CQSA_DTYPE_F32) REQUIRE(wide[at + 1] == call::guard);
          else REQUIRE(narrow[at + 1] == 0x1234);
        }
    }
  }
}

TEST_CASE("quant: a range of rows, on all threads", "[quant]") {
  call c(CQSA_QUANT_Q6_K, 300, 768);
  c.shape[0] = 290;
  REQUIRE(c.run(7) == CQSA_OK);
  for (int64_t n = 0; n < 290; ++n)
    for (int64_t i = 0; i < 768; ++i) REQUIRE(plain_bits(c.memory[static_cast<size_t>(1 + n * 768 + i)]) == plain_bits(c.wanted(n + 7, i)));
  CHECK(c.memory[0] == call::guard);
  CHECK(c.memory[1 + 290 * 768] == call::guard);
}

TEST_CASE("quant: what is refused, with the numbers, and outputs untouched", "[quant]") {
  struct refusal {
    const char* name;
    std::function<void(call&)> spoil;
    cqsa_status status;
    const char* text;
  };
  const refusal all[] = {
      {"one byte short", [](call& c) { --c.w.data_bytes; }, CQSA_ERROR_SHAPE, "w->data_bytes is 431, wanted 432"},
      {"one byte more", [](call& c) { ++c.w.data_bytes; }, CQSA_ERROR_SHAPE, "w->data_bytes is 433, wanted 432"},
      {"unknown id", [](call& c) { c.w.format = 99; }, CQSA_ERROR_UNKNOWN_FLAG, "w->format is 99"},
      {"no id", [](call& c) { c.w.format = 0; }, CQSA_ERROR_UNKNOWN_FLAG, "w->format is 0"},
      {"columns", [](call& c) { c.w.row_elements = 250; }, CQSA_ERROR_SHAPE, "w->row_elements is 250, wanted a multiple of 256"},
      {"negative columns", [](call& c) { c.w.row_elements = -256; }, CQSA_ERROR_SHAPE, "-256"},
      {"huge columns", [](call& c) { c.w.row_elements = INT64_MAX / 256 * 256; }, CQSA_ERROR_SHAPE, "overflows 64 bits"},
      {"negative rows", [](call& c) { c.w.rows = -1; }, CQSA_ERROR_SHAPE, "w->rows is -1"},
      {"huge rows", [](call& c) { c.w.rows = INT64_MAX; }, CQSA_ERROR_SHAPE, "w"},
      {"rows too near", [](call& c) { c.w.row_bytes = 142; }, CQSA_ERROR_SHAPE, "w->row_bytes is 142, wanted at least 144"},
      {"rows of 2^63 bytes", [](call& c) { c.w.row_bytes = uint64_t{1} << 63; }, CQSA_ERROR_STRIDES, "w->row_bytes"},
      {"odd address", [](call& c) { c.w.data = static_cast<char*>(c.w.data) + 1; }, CQSA_ERROR_INVALID_ARGUMENT, "even address"},
      {"odd rows", [](call& c) { c.w.row_bytes = 145, c.w.data_bytes = 0; }, CQSA_ERROR_INVALID_ARGUMENT, "w->row_bytes is 145"},
      {"no data", [](call& c) { c.w.data = nullptr; }, CQSA_ERROR_NULL_POINTER, "w"},
      {"reserved", [](call& c) { c.w.reserved = 3; }, CQSA_ERROR_INVALID_ARGUMENT, "w->reserved is 3"},
      {"flags", [](call& c) { c.w.flags = 8; }, CQSA_ERROR_UNKNOWN_FLAG, "0x8"},
      {"size", [](call& c) { c.w.struct_size = 8; }, CQSA_ERROR_STRUCT_SIZE, "struct_size is 8"},
      {"device", [](call& c) { c.w.device_type = CQSA_DEVICE_CUDA; }, CQSA_ERROR_DEVICE, "w is on device type 2"},
      {"too many rows", [](call& c) { c.shape[0] = 4; }, CQSA_ERROR_INDEX, "first_row is 0 and out has 4 rows, but w has 3"},
      {"columns of out", [](call& c) { c.shape[1] = 255; }, CQSA_ERROR_SHAPE, "[3, 255]"},
      {"type of out", [](call& c) { c.out.dtype = CQSA_DTYPE_I32; }, CQSA_ERROR_DTYPE, "out is i32"},
      {"axes of out", [](call& c) { c.out.ndim = 1; }, CQSA_ERROR_SHAPE, "out"},
      {"rows of out on each other", [](call& c) { c.strides[0] = 1; }, CQSA_ERROR_STRIDES, "out"},
      {"out on w", [](call& c) { c.out.data = c.blocks.data(); }, CQSA_ERROR_OVERLAP, "out"},
  };
  for (const refusal& one : all) {
    call c(CQSA_QUANT_Q4_K, 3, 256);
    one.spoil(c);
    INFO(one.name);
    CHECK(c.run() == one.status);
    INFO(last());
    CHECK(contains(last(), one.text));
    CHECK(c.untouched());
  }
}

TEST_CASE("quant: rows that are not there", "[quant]") {
  call c(CQSA_QUANT_Q4_0, 5, 64);
  CHECK(c.run(1) == CQSA_ERROR_INDEX);
  CHECK(c.run(-1) == CQSA_ERROR_INDEX);
  CHECK(c.run(INT64_MAX) == CQSA_ERROR_INDEX);
  for (int64_t bad : {int64_t{5}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    std::vector<int64_t> ids{0, 1, bad, 3, 4};
    int64_t shape;
    const cqsa_tensor rows = ids_of(ids, &shape);
    CHECK(c.run(0, &rows) == CQSA_ERROR_INDEX);
    CHECK(contains(last(), ("row_ids[2] is " + std::to_string(bad) + ", wanted 0 to 4").c_str()));
    CHECK(c.run(2, &rows) == CQSA_ERROR_INVALID_ARGUMENT);
  }
  CHECK(c.untouched());
  CHECK(cqsa_dequantize_rows(nullptr, &c.w, 0, nullptr, &c.out, nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_dequantize_rows(c.context, nullptr, 0, nullptr, &c.out, nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_dequantize_rows(c.context, &c.w, 0, nullptr, nullptr, nullptr) == CQSA_ERROR_NULL_POINTER);
}

TEST_CASE("quant: the Q2_0 of 34 bytes for 128 elements is refused by its length", "[quant]") {
  call c(CQSA_QUANT_Q2_0, 4, 256);
  c.w.data_bytes = 4 * 2 * 34;
  CHECK(c.run() == CQSA_ERROR_SHAPE);
  CHECK(contains(last(), "w->data_bytes is 272, wanted 288"));
  CHECK(c.untouched());
}

TEST_CASE("quant: nothing to do is fine", "[quant]") {
  call c(CQSA_QUANT_Q4_K, 3, 256);
  c.shape[0] = 0;
  CHECK(c.run(3) == CQSA_OK);
  c.w.rows = 0, c.w.data = nullptr, c.w.data_bytes = 0;
  CHECK(c.run() == CQSA_OK);
  c.w.rows = 3, c.w.row_elements = 0, c.shape[0] = 3, c.shape[1] = 0;
  CHECK(c.run() == CQSA_OK);
  CHECK(cqsa_quantize_rows(c.context, &c.out, &c.w, nullptr) == CQSA_ERROR_UNSUPPORTED);
  c.w.format = CQSA_QUANT_Q8_0;
  CHECK(cqsa_quantize_rows(c.context, &c.out, &c.w, nullptr) == CQSA_OK);
  CHECK(c.untouched());
}

TEST_CASE("quant: an odd address is fine where a block has an odd number of bytes", "[quant]") {
  call c(CQSA_QUANT_MXFP4, 2, 64);
  std::vector<uint8_t> moved(c.blocks.size() + 1);
  std::memcpy(moved.data() + 1, c.blocks.data(), c.blocks.size());
  c.w.data = moved.data() + 1;
  REQUIRE(c.run() == CQSA_OK);
  for (int64_t i = 0; i < 64; ++i) REQUIRE(plain_bits(c.memory[static_cast<size_t>(1 + i)]) == plain_bits(c.wanted(0, i)));
}

TEST_CASE("quant: what was quantized comes back within half a step", "[quant]") {
  const std::pair<cqsa_quant_format, double> formats[] = {{CQSA_QUANT_Q8_0, 0.5 / 127}, {CQSA_QUANT_Q4_0, 1.01 / 8}, {CQSA_QUANT_Q2_0, 0.51}, {CQSA_QUANT_IQ4_NL, 14.5 / 113},
                                                          {CQSA_QUANT_MXFP4, 0.26}, {CQSA_QUANT_F32, 0}, {CQSA_QUANT_F16, 0x1p-11}, {CQSA_QUANT_BF16, 0x1p-8}};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const auto& [format, step] : formats) {
    call c(format, 4, 192);
    std::vector<float> x(4 * 192);
    for (float& value : x) value = normal(random);
    cqsa_tensor from = c.out;
    from.data = x.data();
    REQUIRE(cqsa_quantize_rows(c.context, &from, &c.w, nullptr) == CQSA_OK);
    REQUIRE(c.run() == CQSA_OK);
    const size_t block = static_cast<size_t>(std::max(32, quant_formats[format].block_elements));
    for (size_t b = 0; b < x.size(); b += block) {
      double largest = 0, error = 0;
      for (size_t i = b; i < b + block; ++i) largest = std::fmax(largest, std::fabs(x[i])), error = std::fmax(error, std::fabs(double(x[i]) - c.memory[1 + i]));
      INFO(quant_formats[format].name << " error " << error << " of " << largest);
      CHECK(error <= step * 1.01 * largest);
    }
  }
}

TEST_CASE("quant: a block with a NaN or an infinity shows, and spoils no other", "[quant]") {
  for (cqsa_quant_format format : {CQSA_QUANT_Q8_0, CQSA_QUANT_Q4_0, CQSA_QUANT_Q2_0, CQSA_QUANT_IQ4_NL, CQSA_QUANT_MXFP4})
    for (float wild : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
      call c(format, 1, 192);
      std::vector<float> x(192, 1.0f);
      x[70] = wild;
      cqsa_tensor from = c.out;
      from.data = x.data();
      REQUIRE(cqsa_quantize_rows(c.context, &from, &c.w, nullptr) == CQSA_OK);
      REQUIRE(c.run() == CQSA_OK);
      const int64_t block = quant_formats[format].block_elements;
      for (int64_t i = 0; i < 192; ++i) CHECK(std::isfinite(c.memory[static_cast<size_t>(1 + i)]) == (i / block != 70 / block));
    }
}

TEST_CASE("quant: zeros, the largest and the smallest numbers stay finite", "[quant]") {
  for (cqsa_quant_format format : {CQSA_QUANT_Q8_0, CQSA_QUANT_Q4_0, CQSA_QUANT_Q2_0, CQSA_QUANT_IQ4_NL, CQSA_QUANT_MXFP4})
    for (float value : {0.0f, 1e-45f, 1e-38f, 3e38f, -3e38f}) {
      call c(format, 1, 64);
      std::vector<float> x(64, value);
      cqsa_tensor from = c.out;
      from.data = x.data();
      REQUIRE(cqsa_quantize_rows(c.context, &from, &c.w, nullptr) == CQSA_OK);
      REQUIRE(c.run() == CQSA_OK);
      for (size_t i = 1; i <= 64; ++i) CHECK(std::isfinite(c.memory[i]));
      if (value == 0) for (size_t i = 1; i <= 64; ++i) CHECK(c.memory[i] == 0);
    }
}
