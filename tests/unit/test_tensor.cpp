// SPDX-License-Identifier: Apache-2.0
// src/tensor.cpp: refusals with their sentences, and the overlap tests against sets of byte addresses.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <chrono>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tensor.h"

namespace {

using namespace cqsa;
using sizes = std::vector<int64_t>;

// A tensor that owns its shape and strides.
struct view {
  sizes shape, strides;
  cqsa_tensor tensor{};
  view(void* data, cqsa_dtype dtype, sizes shape_, sizes strides_ = {}, uint64_t byte_offset = 0)
      : shape(std::move(shape_)), strides(std::move(strides_)) {
    tensor = {data,
              CQSA_DEVICE_CPU,
              0,
              static_cast<int32_t>(shape.size()),
              dtype,
              shape.data(),
              strides.empty() ? nullptr : strides.data(),
              byte_offset};
  }
  view(const view&) = delete;
};

char memory[1 << 16];

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// Every byte of every element, with how often it is reached.
std::multiset<intptr_t> bytes_of(const view& v) {
  std::multiset<intptr_t> bytes;
  int64_t strides[max_axes];
  strides_of(v.tensor, strides);
  int64_t count = 1;
  for (const int64_t n : v.shape) count *= n;
  for (int64_t flat = 0; flat < count; ++flat) {
    int64_t rest = flat, offset = 0;
    for (int i = static_cast<int>(v.shape.size()) - 1; i >= 0; --i) {
      offset += rest % v.shape[i] * strides[i];
      rest /= v.shape[i];
    }
    const int64_t width = dtype_bits(v.tensor.dtype) / 8;
    for (int64_t byte = 0; byte < width; ++byte)
      bytes.insert(reinterpret_cast<intptr_t>(v.tensor.data) + static_cast<intptr_t>(v.tensor.byte_offset) + offset * width +
                   byte);
  }
  return bytes;
}

}  // namespace

TEST_CASE("every element type of the header has bits and a name", "[tensor]") {
  const struct {
    cqsa_dtype dtype;
    int64_t bits;
    const char* name;
  } rows[] = {{CQSA_DTYPE_I8, 8, "i8"},         {CQSA_DTYPE_I32, 32, "i32"},   {CQSA_DTYPE_I64, 64, "i64"},
              {CQSA_DTYPE_U8, 8, "u8"},         {CQSA_DTYPE_F16, 16, "f16"},   {CQSA_DTYPE_F32, 32, "f32"},
              {CQSA_DTYPE_F64, 64, "f64"},      {CQSA_DTYPE_BF16, 16, "bf16"}, {CQSA_DTYPE_BOOL, 8, "bool"},
              {CQSA_DTYPE_E4M3FN, 8, "e4m3fn"}, {CQSA_DTYPE_E5M2, 8, "e5m2"}};
  for (const auto& row : rows) {
    CHECK(dtype_bits(row.dtype) == row.bits);
    CHECK(std::string(dtype_name(row.dtype)) == row.name);
    CHECK(((row.dtype >> 8) & 0xff) == row.bits);
    CHECK(dtype_bits(row.dtype + 0x10000) == 0);  // two lanes
  }
  for (const cqsa_dtype unknown : {0, 1, -1, 0x00010400, 0x7fffffff}) {
    CHECK(dtype_bits(unknown) == 0);
    CHECK(std::string(dtype_name(unknown)) == "unknown");
  }
}

TEST_CASE("multiply_overflows", "[tensor]") {
  int64_t product = 0;
  CHECK_FALSE(multiply_overflows(INT64_MAX, 1, &product));
  CHECK(product == INT64_MAX);
  CHECK_FALSE(multiply_overflows(INT64_MIN, 1, &product));
  CHECK(multiply_overflows(INT64_MIN, -1, &product));
  CHECK(multiply_overflows(int64_t{1} << 32, int64_t{1} << 31, &product));
}

TEST_CASE("check_tensor: extents", "[tensor]") {
  byte_extent e{};
  const auto extent = [&](const view& v) {
    REQUIRE(check_tensor(&v.tensor, "t", 0, 4, &e) == CQSA_OK);
    return std::pair(e.low, e.high);
  };
  CHECK(extent({memory, CQSA_DTYPE_F32, {2, 3, 4}}) == std::pair<int64_t, int64_t>(0, 96));
  CHECK(extent({memory, CQSA_DTYPE_F16, {}}) == std::pair<int64_t, int64_t>(0, 2));
  CHECK(extent({memory, CQSA_DTYPE_F16, {3, 5}, {0, 0}}) == std::pair<int64_t, int64_t>(0, 2));
  CHECK(extent({memory + 4096, CQSA_DTYPE_F32, {3, 5}, {-10, 2}}) == std::pair<int64_t, int64_t>(-80, 36));
  CHECK(extent({memory + 4096, CQSA_DTYPE_E5M2, {4}, {-1}}) == std::pair<int64_t, int64_t>(-3, 1));
  CHECK(extent({nullptr, CQSA_DTYPE_F32, {3, 0}}) == std::pair<int64_t, int64_t>(0, 0));
  CHECK(extent({nullptr, CQSA_DTYPE_F32, {0, INT64_MAX, INT64_MAX}}) == std::pair<int64_t, int64_t>(0, 0));
  CHECK(extent({memory, CQSA_DTYPE_F32, {1, 1}, {INT64_MAX, INT64_MIN}}) == std::pair<int64_t, int64_t>(0, 4));
  // A huge broadcast needs no memory.
  CHECK(extent({memory, CQSA_DTYPE_F32, {int64_t{1} << 31, int64_t{1} << 31}, {0, 0}}) == std::pair<int64_t, int64_t>(0, 4));
}

TEST_CASE("check_tensor: refusals name the argument and the numbers", "[tensor]") {
  const int64_t big = int64_t{1} << 33;
  const struct {
    view v;
    cqsa_status status;
    std::vector<const char*> parts;
  } rows[] = {
      {{memory, CQSA_DTYPE_F32, {2}}, CQSA_ERROR_SHAPE, {"args->x", "has 1 axes", "wanted 2 to 4"}},
      {{memory, CQSA_DTYPE_F32, {1, 1, 1, 1, 1}}, CQSA_ERROR_SHAPE, {"has 5 axes", "2 to 4"}},
      {{memory, 0x00022002, {2, 2}}, CQSA_ERROR_DTYPE, {"args->x", "0x00022002"}},
      {{memory, CQSA_DTYPE_NONE, {2, 2}}, CQSA_ERROR_DTYPE, {"0x00000000"}},
      {{memory, CQSA_DTYPE_F32, {2, -3}}, CQSA_ERROR_SHAPE, {"[2, -3]", "negative"}},
      {{memory, CQSA_DTYPE_F32, {0, -3}}, CQSA_ERROR_SHAPE, {"[0, -3]"}},
      {{memory, CQSA_DTYPE_F32, {big, big}}, CQSA_ERROR_SHAPE, {"[8589934592, 8589934592]", "overflows"}},
      {{memory, CQSA_DTYPE_F32, {big, big / 16}}, CQSA_ERROR_STRIDES, {"4-byte", "64 bits", "(compact)"}},
      {{memory, CQSA_DTYPE_F32, {2, 3}, {INT64_MAX, 1}}, CQSA_ERROR_STRIDES, {"[2, 3]", "[9223372036854775807, 1]"}},
      {{memory, CQSA_DTYPE_I8, {2, 2}, {INT64_MIN, 1}}, CQSA_ERROR_STRIDES, {"-9223372036854775808"}},
      {{memory, CQSA_DTYPE_I8, {2, 2}, {INT64_MIN + 9, INT64_MAX - 9}}, CQSA_ERROR_STRIDES, {"args->x"}},
      {{nullptr, CQSA_DTYPE_F32, {2, 3}}, CQSA_ERROR_NULL_POINTER, {"args->x->data is NULL", "[2, 3]"}},
      {{memory, CQSA_DTYPE_F32, {2, 3}, {}, UINT64_MAX - 8}, CQSA_ERROR_STRIDES, {"byte_offset 18446744073709551607"}},
      {{reinterpret_cast<void*>(16), CQSA_DTYPE_F32, {2, 3}, {-30, 1}}, CQSA_ERROR_STRIDES, {"address space", "-120"}},
  };
  for (const auto& row : rows) {
    byte_extent e{};
    CHECK(check_tensor(&row.v.tensor, "args->x", 2, 4, &e) == row.status);
    const std::string text = last_error_text();
    for (const char* part : row.parts) {
      INFO(text << "  lacks  " << part);
      CHECK(has(text, part));
    }
  }
  byte_extent e{};
  CHECK(check_tensor(nullptr, "args->x", 2, 4, &e) == CQSA_ERROR_NULL_POINTER);
  CHECK(std::string(last_error_text()) == "args->x is NULL");
  cqsa_tensor no_shape = {memory, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_F32, nullptr, nullptr, 0};
  CHECK(check_tensor(&no_shape, "args->x", 2, 2, &e) == CQSA_ERROR_NULL_POINTER);
  no_shape.ndim = -1;
  CHECK(check_tensor(&no_shape, "args->x", 0, 4, &e) == CQSA_ERROR_SHAPE);
  no_shape.ndim = INT32_MAX;
  CHECK(check_tensor(&no_shape, "args->x", 0, 1000, &e) == CQSA_ERROR_SHAPE);
}

TEST_CASE("check_shape", "[tensor]") {
  const view v(memory, CQSA_DTYPE_F32, {2, 3, 64, 32});
  const int64_t same[] = {2, 3, 64, 32}, other[] = {2, 4, 64, 32}, wide[] = {2, 3, 64, 32, 1};
  const char* const names[] = {"batch", "num_kv_heads", "seqlen_k", "head_dim"};
  CHECK(check_shape(v.tensor, "args->k", same, 4) == CQSA_OK);
  CHECK(check_shape(v.tensor, "args->k", other, 4, false, names) == CQSA_ERROR_SHAPE);
  CHECK(std::string(last_error_text()) ==
        "args->k has shape [2, 3, 64, 32], wanted [2, 4, 64, 32] (batch, num_kv_heads, seqlen_k, head_dim)");
  CHECK(check_shape(v.tensor, "args->k", wide, 5) == CQSA_ERROR_SHAPE);
  CHECK(check_shape(v.tensor, "args->k", same, 0) == CQSA_ERROR_SHAPE);
  CHECK(has(last_error_text(), "wanted []"));
  const view ones(memory, CQSA_DTYPE_F32, {1, 3, 1, 32});
  CHECK(check_shape(ones.tensor, "args->mask", same, 4, true) == CQSA_OK);
  CHECK(check_shape(ones.tensor, "args->mask", other, 4, true) == CQSA_ERROR_SHAPE);
  CHECK(check_shape(ones.tensor, "args->mask", same, 4) == CQSA_ERROR_SHAPE);
  CHECK(std::string(shape_text(sizes(8, INT64_MIN).data(), 8).text).size() == 8 * 20 + 7 * 2 + 2);  // the longest fits
}

TEST_CASE("strides_of", "[tensor]") {
  int64_t strides[max_axes];
  const auto of = [&](const view& v) {
    strides_of(v.tensor, strides);
    return sizes(strides, strides + v.shape.size());
  };
  CHECK(of({memory, CQSA_DTYPE_F32, {2, 3, 4}}) == sizes{12, 4, 1});
  CHECK(of({memory, CQSA_DTYPE_F32, {2, 3, 4}, {-1, 0, 7}}) == sizes{-1, 0, 7});
  CHECK(of({memory, CQSA_DTYPE_F32, {2, 1, 4, 1}, {-9, INT64_MAX, 2, INT64_MIN}}) == sizes{-9, 4, 2, 1});
  CHECK(of({memory, CQSA_DTYPE_F32, {0, 4}, {INT64_MAX, 3}}) == sizes{4, 3});
  CHECK(of({memory, CQSA_DTYPE_F32, {2, 0, 4}}) == sizes{4, 4, 1});
  CHECK(of({memory, CQSA_DTYPE_F32, {3, 0, INT64_MAX, INT64_MAX}})[3] == 1);
}

TEST_CASE("self-overlap", "[tensor]") {
  const auto refused = [](const view& v) { return check_no_self_overlap(v.tensor, "args->out") != CQSA_OK; };
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {2, 3, 4}}));
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {2, 3, 4, 8}, {96, 8, 24, 1}}));  // transposed
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {2, 3}, {-100, -1}}));
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {1, 1, 5}, {0, 0, 1}}));
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {0, 4}, {0, 0}}));
  CHECK_FALSE(refused({memory, CQSA_DTYPE_F32, {3, 2}, {2, 3}}));  // 0 2 4 3 5 7: not nested, yet distinct
  CHECK(refused({memory, CQSA_DTYPE_F32, {4, 3}, {2, 3}}));        // 6 = 3 * 2 = 2 * 3
  CHECK(refused({memory, CQSA_DTYPE_F32, {2, 3}, {0, 1}}));
  CHECK(has(last_error_text(), "args->out is an output, but with shape [2, 3] and strides [0, 1]"));
  CHECK(refused({memory, CQSA_DTYPE_F32, {2, 3}, {2, 1}}));
  CHECK(refused({memory, CQSA_DTYPE_F32, {2, 3}, {2, -1}}));
}

TEST_CASE("self-overlap agrees with a set of addresses", "[tensor]") {
  std::mt19937 random(20240917);
  int overlapping = 0;
  for (int round = 0; round < 4000; ++round) {
    sizes shape, strides;
    for (int axes = 1 + static_cast<int>(random() % 4); axes > 0; --axes) {
      shape.push_back(1 + random() % 5);
      strides.push_back(static_cast<int64_t>(random() % 61) - 30);
    }
    const view v(memory + 8192, CQSA_DTYPE_F16, shape, strides);
    const std::multiset<intptr_t> bytes = bytes_of(v);
    const bool truth = std::set<intptr_t>(bytes.begin(), bytes.end()).size() != bytes.size();
    overlapping += truth;
    INFO("round " << round << " shape " << shape_text(shape.data(), v.tensor.ndim).text << " strides "
                  << shape_text(strides.data(), v.tensor.ndim).text);
    REQUIRE((check_no_self_overlap(v.tensor, "t") != CQSA_OK) == truth);
  }
  CHECK(overlapping > 400);
  CHECK(overlapping < 3600);
}

TEST_CASE("overlap of two tensors agrees with sets of addresses", "[tensor]") {
  std::mt19937 random(4711);
  const cqsa_dtype dtypes[] = {CQSA_DTYPE_I8, CQSA_DTYPE_F16, CQSA_DTYPE_F32, CQSA_DTYPE_F64};
  int overlapping = 0, close = 0;
  const auto draw = [&](int round) {
    sizes shape, strides;
    for (int axes = static_cast<int>(random() % 5); axes > 0; --axes) {
      shape.push_back(random() % 12 == 0 ? 0 : 1 + random() % 4);
      const int64_t step = round % 2 ? 1 : 1 + static_cast<int64_t>(random() % 6);  // a common divisor leaves gaps
      strides.push_back((static_cast<int64_t>(random() % 81) - 40) / step * step);
    }
    char* data = memory + 16384 + random() % 300;
    return new view(data, dtypes[random() % 4], shape, strides, random() % 2 * 3);
  };
  for (int round = 0; round < 20000; ++round) {
    const std::unique_ptr<view> a(draw(round)), b(draw(round));
    const std::multiset<intptr_t> bytes_a = bytes_of(*a), bytes_b = bytes_of(*b);
    bool truth = false;
    for (const intptr_t byte : bytes_a) truth = truth || bytes_b.count(byte) != 0;
    overlapping += truth;
    close += !truth && !bytes_a.empty() && !bytes_b.empty() && *bytes_a.begin() <= *bytes_b.rbegin() &&
             *bytes_b.begin() <= *bytes_a.rbegin();
    INFO("round " << round);
    REQUIRE(tensors_overlap(a->tensor, b->tensor) == truth);
    REQUIRE(tensors_overlap(b->tensor, a->tensor) == truth);
  }
  CHECK(overlapping > 2000);
  CHECK(close > 2000);
}

TEST_CASE("interleaved slots of one buffer do not overlap", "[tensor]") {
  // [batch, seq, slot, head, dim], seen as [batch, head, seq, dim].
  const int64_t batch = 2, seq = 65537, slots = 4, heads = 12, dim = 64, row = slots * heads * dim;
  const sizes shape{batch, heads, seq, dim}, strides{seq * row, dim, row, 1};
  std::vector<std::unique_ptr<view>> slot;
  for (int64_t i = 0; i < slots; ++i)
    slot.push_back(
        std::make_unique<view>(memory, CQSA_DTYPE_F16, shape, strides, static_cast<uint64_t>(i * heads * dim * 2)));
  for (int64_t i = 0; i < slots; ++i) {
    CHECK(check_no_self_overlap(slot[i]->tensor, "out") == CQSA_OK);
    for (int64_t j = 0; j < slots; ++j) CHECK(tensors_overlap(slot[i]->tensor, slot[j]->tensor) == (i == j));
  }
  const view shifted(memory, CQSA_DTYPE_F16, shape, strides, static_cast<uint64_t>(heads * dim * 2 - 1));
  CHECK(tensors_overlap(slot[0]->tensor, shifted.tensor));
  // Two column blocks of one matrix, and the same cut by heads.
  const view left(memory, CQSA_DTYPE_F32, {1000, 100}, {200, 1}), right(memory, CQSA_DTYPE_F32, {1000, 100}, {200, 1}, 400);
  CHECK_FALSE(tensors_overlap(left.tensor, right.tensor));
  // Even and odd elements, one of them reversed.
  const view even(memory, CQSA_DTYPE_F32, {1000}, {2}), odd(memory, CQSA_DTYPE_F32, {1000}, {-2}, 4 + 999 * 8);
  CHECK_FALSE(tensors_overlap(even.tensor, odd.tensor));
}

TEST_CASE("a search without end gives up on the safe side, soon", "[tensor]") {
  // Strides without structure, and a distance that is hard to reach.
  const sizes shape{40, 41, 42, 43, 44}, strides{1000003, 999983, 1000033, 1000037, 1000039};
  const view a(memory, CQSA_DTYPE_I8, shape, strides), b(memory, CQSA_DTYPE_I8, shape, strides, 499);
  tensors_overlap(a.tensor, b.tensor);  // must end; ctest's time limit is the judge
  const view huge(memory, CQSA_DTYPE_I8, {2, 2}, {INT64_MAX / 4, INT64_MAX / 4 - 1});
  CHECK(check_no_self_overlap(huge.tensor, "t") != CQSA_OK);
}

TEST_CASE("cost of the overlap test", "[.cost]") {
  const int64_t row = 4 * 12 * 64;
  const sizes shape{2, 12, 4096, 64}, strides{4096 * row, 64, row, 1};
  const view q(memory, CQSA_DTYPE_F16, shape, strides), out(memory, CQSA_DTYPE_F16, shape, strides, 3 * 12 * 64 * 2);
  const int rounds = 1000000;
  bool any = false;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < rounds; ++i) any |= tensors_overlap(q.tensor, out.tensor);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CHECK_FALSE(any);
  WARN("packed qkv: " << seconds / rounds * 1e9 << " ns for one pair");
}
