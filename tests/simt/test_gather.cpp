// SPDX-License-Identifier: Apache-2.0
// The portable gather with its host part on the harness, against a loop over elements: every type width, layout, runs and pages.
#include "backends/gpu/gather.h"
#include "simt_leaf.h"

namespace {

using cqsa::gpu::gather_leaf;
using cqsa::gpu::gather_run;

// Row n of the result: page or batch item (-1: zeros) and row of the view.
void row_of(const gather_leaf& leaf, int64_t b, int64_t n, int64_t* item, int64_t* row) {
  *item = b, *row = leaf.first_row + n;
  if (leaf.runs) {
    for (int64_t i = 0; i < leaf.num_runs; n -= leaf.runs[i++].count)
      if (n < leaf.runs[i].count) {
        *row = leaf.runs[i].row + n;
        return;
      }
  }
  if (!leaf.page_table) return;
  const int32_t page = leaf.page_table[b * leaf.page_table_stride[0] + *row / leaf.page_size * leaf.page_table_stride[1]];
  *item = page >= 0 && page < leaf.num_pages ? page : -1;
  *row %= leaf.page_size;
}

// "" when the kernel copies what the loop copies and writes nothing else; with a workspace of exactly the bytes asked for.
std::string gather_mistake(gather_leaf leaf, const tensor& from, int lanes, uint64_t seed, int64_t shift) {
  const int64_t bytes = bytes_of(from.view.dtype), all = leaf.batch * leaf.heads * leaf.rows * leaf.channels * bytes;
  const int64_t guard = 64;
  std::vector<char> got(size_t(all + 2 * guard + shift), 0x5a), want = got;
  leaf.from = from.view, leaf.to = got.data() + guard + shift;
  char* to = want.data() + guard + shift;
  for (int64_t b = 0; b < leaf.batch; ++b)
    for (int64_t h = 0; h < leaf.heads; ++h)
      for (int64_t n = 0; n < leaf.rows; ++n)
        for (int64_t c = 0; c < leaf.channels; ++c, to += bytes) {
          int64_t item, row;
          row_of(leaf, b, n, &item, &row);
          if (item < 0) std::memset(to, 0, size_t(bytes));
          else std::memcpy(to, from.at(item, h, row, c), size_t(bytes));
        }
  std::vector<char> workspace(cqsa::gpu::gather_workspace(leaf), char(0xff));
  cqsa::simt::device device = device_with(lanes, seed);
  if (cqsa::gpu::portable_gather(&device, leaf, workspace.data(), workspace.size(), nullptr) != CQSA_OK) return cqsa::simt::last_error();
  return got == want ? "" : "other bytes";
}

}  // namespace

TEST_CASE("simt gather: random views, runs and pages") {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    INFO("seed " << seed);
    dice d(seed);
    gather_leaf leaf{};
    leaf.batch = 1 + d.upto(2), leaf.heads = 1 + d.upto(2), leaf.rows = d.upto(40), leaf.channels = d.pick({1, 3, 8, 32, 40, 130});
    const int64_t rows = 60;
    leaf.first_row = d.upto(rows - leaf.rows);
    std::vector<int32_t> pages;
    std::vector<gather_run> runs;
    int64_t items = leaf.batch, length = rows;
    const int64_t form = d.upto(2);
    if (form == 1) {
      leaf.page_size = length = d.pick({1, 3, 16});
      const int64_t each = (rows + length - 1) / length;
      items = leaf.num_pages = 5;
      for (int64_t i = 0; i < leaf.batch * each; ++i) pages.push_back(d.pick({0, 1, 2, 3, 4, 4, 5, -1, INT32_MAX}));
      leaf.page_table = pages.data(), leaf.page_table_stride[0] = each, leaf.page_table_stride[1] = 1;
    }
    if (form == 2) {
      for (int64_t left = leaf.rows; left > 0;) {
        const int64_t count = std::min(left, d.upto(15));
        runs.push_back({d.upto(rows - count), count}), left -= count;
      }
      runs.push_back({0, 0});
      leaf.runs = runs.data(), leaf.num_runs = int64_t(runs.size());
    }
    tensor from(d.pick({CQSA_DTYPE_I8, CQSA_DTYPE_F16, CQSA_DTYPE_F32, CQSA_DTYPE_F64}), {items, leaf.heads, length, leaf.channels},
                layout(d.upto(num_layouts - 1)));
    for (char& x : from.memory) x = char(d.rng());
    REQUIRE(gather_mistake(leaf, from, d.once_in(2) ? 32 : 64, seed, d.once_in(3) ? 1 : 0) == "");
  }
}
