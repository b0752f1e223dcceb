// SPDX-License-Identifier: Apache-2.0
// The portable gather in the harness: random views, runs and page tables against plain loops, byte for byte.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/gpu/gather.h"
#include "simt_device.h"
#include "simt_port.h"

#include <cstring>
#include <random>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;

namespace {

constexpr int64_t source_rows = 120, pool = 7;

struct gather_case {
  gather_leaf leaf{};
  std::vector<gather_run> runs;
  std::vector<int32_t> pages;
  std::vector<char> source, result;
  int64_t bytes = 0;  // of an element

  // Where element (b, h, n, c) of the result comes from; null where its page is missing.
  const char* origin(int64_t b, int64_t h, int64_t n, int64_t c) const {
    int64_t item = b, row = leaf.first_row + n;
    if (leaf.runs) {
      size_t i = 0;
      for (; n >= runs[i].count; ++i) n -= runs[i].count;
      row = runs[i].row + n;
    } else if (leaf.page_table) {
      item = pages[size_t(b * leaf.page_table_stride[0] + row / leaf.page_size)];
      row %= leaf.page_size;
      if (item < 0 || item >= pool) return nullptr;
    }
    const int64_t* s = leaf.from.stride;
    return static_cast<const char*>(leaf.from.data) + bytes * (item * s[0] + h * s[1] + row * s[2] + c * s[3]);
  }
};

char* aligned(std::vector<char>& memory) {
  char* p = memory.data();
  return p + (16 - (reinterpret_cast<uintptr_t>(p) & 15)) % 16;
}

void make(std::mt19937_64& random, gather_case& x) {
  auto between = [&](int64_t a, int64_t b) { return a + int64_t(random() % uint64_t(b - a + 1)); };
  constexpr cqsa_dtype types[] = {CQSA_DTYPE_I8, CQSA_DTYPE_F16, CQSA_DTYPE_F32, CQSA_DTYPE_F64};
  gather_leaf& l = x.leaf;
  l.from.dtype = types[between(0, 3)];
  x.bytes = (l.from.dtype >> 8 & 0xff) / 8;
  l.batch = between(1, 3), l.heads = between(1, 3), l.rows = between(1, 90);
  l.channels = between(0, 1) ? between(1, 70) : 16 * between(1, 40);
  int64_t rows = source_rows, items = l.batch;
  const int64_t form = between(0, 2);
  if (form == 0) l.first_row = between(0, source_rows - l.rows);
  if (form == 1) {
    l.rows = 0;
    for (int i = 0; i < 5; ++i) {
      x.runs.push_back({between(0, source_rows - 10), between(i == 2, 9)});
      l.rows += x.runs.back().count;
    }
    l.runs = x.runs.data(), l.num_runs = 5;
  }
  if (form == 2) {
    l.page_size = rows = between(1, 20), l.num_pages = items = pool, l.first_row = between(0, 15);
    const int64_t per = (l.first_row + l.rows + rows - 1) / rows;
    for (int64_t i = 0; i < per * l.batch; ++i) x.pages.push_back(int32_t(between(-2, pool + 1)));
    l.page_table = x.pages.data(), l.page_table_stride[0] = per, l.page_table_stride[1] = 1;
  }
  const bool transposed = between(0, 2) == 0;
  const int64_t stride[4] = {l.heads * rows * l.channels, rows * l.channels, transposed ? 1 : l.channels, transposed ? rows : 1};
  std::memcpy(l.from.stride, stride, sizeof stride);
  x.source.resize(size_t(items * stride[0] * x.bytes + 64));
  for (char& c : x.source) c = char(random());
  l.from.data = aligned(x.source) + (between(0, 2) ? 0 : between(1, 15));
  x.result.assign(size_t(l.batch * l.heads * l.rows * l.channels * x.bytes + 96), 0x55);
  l.to = aligned(x.result) + 16 + (between(0, 3) ? 0 : 3);
}

// How many bytes of case n are wrong, those beside the result included; -1 where the gather itself fails.
int64_t wrong_bytes(std::mt19937_64& random, int n) {
  gather_case x;
  make(random, x);
  simt::device device;
  device.facts.lanes = n % 2 ? 32 : 64, device.facts.compute_units = 1 + n % 3, device.seed = uint64_t(n);
  std::vector<char> workspace(gather_workspace(x.leaf) + 1);
  if (portable_gather(&device, x.leaf, workspace.data(), workspace.size() - 1, nullptr) != CQSA_OK) return -1;
  const gather_leaf& l = x.leaf;
  const char* to = static_cast<const char*>(l.to);
  const int64_t count = l.batch * l.heads * l.rows * l.channels;
  int64_t wrong = (to[-1] != 0x55) + (to[count * x.bytes] != 0x55);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = i % l.channels, row = i / l.channels % l.rows, h = i / l.channels / l.rows % l.heads;
    const char zeros[8] = {0};
    const char* want = x.origin(i / l.channels / l.rows / l.heads, h, row, c);
    wrong += std::memcmp(want ? want : zeros, to + i * x.bytes, size_t(x.bytes)) != 0;
  }
  return wrong;
}

}  // namespace

TEST_CASE("simt gather: runs, page tables and plain rows at any stride and address") {
  std::mt19937_64 random(5);
  for (int n = 0; n < 300; ++n) {
    INFO("case " << n);
    REQUIRE(wrong_bytes(random, n) == 0);
  }
}

// Its threads share nothing and meet nowhere: the mistakes are a run's first row looked for in the run before, a page that is not
// there read from page 0, and half of a unit of eight bytes.
TEST_CASE("simt gather: every mutant is noticed") {
  for (int mutant = 1; mutant <= 3; ++mutant) {
    cqsa_simt_mutant = mutant;
    std::mt19937_64 random(5);
    bool noticed = false;
    for (int n = 0; n < 60 && !noticed; ++n) noticed = wrong_bytes(random, n) != 0;
    cqsa_simt_mutant = 0;
    INFO("CQSA_MUTANT(" << mutant << ")");
    CHECK(noticed);
  }
}

TEST_CASE("simt gather: what cannot be done is refused") {
  simt::device device;
  const gather_run run{0, 4};
  char memory[256];
  gather_leaf l{};
  l.from = {memory, CQSA_DTYPE_I8, 0, {0, 0, 4, 1}};
  l.to = memory + 128, l.batch = l.heads = 1, l.rows = 4, l.channels = 4, l.runs = &run, l.num_runs = 1;
  REQUIRE(gather_workspace(l) == 64);
  CHECK(portable_gather(&device, l, nullptr, 0, nullptr) == CQSA_ERROR_WORKSPACE);
  CHECK(portable_gather(&device, l, memory, 63, nullptr) == CQSA_ERROR_WORKSPACE);
  CHECK(device.launches == 0);
}
