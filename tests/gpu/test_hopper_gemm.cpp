// SPDX-License-Identifier: Apache-2.0
// What the host part of the Hopper FP8 product asks for, of a port that takes it down: every tile once, boxes that fit, the sizes of tiles, and
// what it declines.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "backends/cuda/sm90/fp8_gemm_shape.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/port.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace cqsa::gpu {
namespace {

struct asked {
  int launches = 0, other = 0;  // of the Hopper kernels, and of others
  kernel_id kernel{};
  launch_shape shape{};
  sm90::gemm_launch params{};
  std::vector<tensor_box> boxes;
} seen;
const device_facts facts{32, 132, 232448, 90, 90};

}  // namespace

cqsa_status launch(void*, kernel_id kernel, const launch_shape& shape, const void* params, size_t bytes, void*) {
  if (bytes != sizeof seen.params) return ++seen.other, CQSA_OK;
  ++seen.launches, seen.kernel = kernel, seen.shape = shape;
  std::memcpy(&seen.params, params, bytes);
  return CQSA_OK;
}
cqsa_status upload(void*, void*, const void*, uint64_t, void*) { return CQSA_OK; }
cqsa_status encode_tensor(void*, const tensor_box& box, tensor_map*) {
  seen.boxes.push_back(box);
  return CQSA_OK;
}
const device_facts& facts_of(void*) { return facts; }
cqsa_status fail(cqsa_status status, const char*, ...) { return status; }

namespace {

alignas(64) char somewhere[64];

cqsa_fp8_gemm_leaf leaf_of(int64_t batch, int64_t m, int64_t n, int64_t k) {
  const int64_t row = (k + 15) / 16 * 16;
  cqsa_fp8_gemm_leaf a{};
  a.struct_size = sizeof a, a.chip = {90, 132, 232448, 0}, a.batch = batch, a.m = m, a.n = n, a.k = k, a.alpha = 1;
  a.a = {somewhere, CQSA_DTYPE_E4M3FN, 0, {m * row, row, 1}}, a.b = {somewhere, CQSA_DTYPE_E5M2, 0, {n * row, row, 1}};
  a.d = {somewhere, CQSA_DTYPE_BF16, 0, {m * n, n, 1}};
  return a;
}
void ask(const cqsa_fp8_gemm_leaf& a) {
  seen = {};
  REQUIRE(sm90_fp8_gemm.probe(nullptr, &a, nullptr, 0) == CQSA_OK);
  REQUIRE(sm90_fp8_gemm.launch(nullptr, &a, nullptr, 0, nullptr, nullptr) == CQSA_OK);
  REQUIRE((seen.launches == 1 && seen.other == 0 && seen.boxes.size() == 2));
}
std::string why_declined(const cqsa_fp8_gemm_leaf& a) {
  char reason[200] = "";
  return sm90_fp8_gemm.probe(nullptr, &a, reason, sizeof reason) == CQSA_OK ? "" : reason;
}

}  // namespace

TEST_CASE("hopper gemm: every tile once") {
  for (const int64_t batch : {1, 3})
    for (const int64_t m : {1, 64, 130, 1000, 4096, 8192})
      for (const int64_t n : {8, 128, 200, 1500, 8192}) {
        ask(leaf_of(batch, m, n, 1024));
        const gemm_params& g = seen.params.g;
        std::vector<int> taken(size_t(batch * g.row_tiles * g.column_tiles));
        for (int32_t first = 0; first < seen.params.clusters; ++first)
          for (int32_t tile = first; tile < int32_t(taken.size()); tile += seen.params.clusters) {
            const sm90::gemm_unit u = sm90::find_gemm_unit(int32_t(g.row_tiles), int32_t(g.column_tiles), seen.params.group, tile);
            REQUIRE((u.batch < batch && u.row >= 0 && u.row < g.row_tiles && u.column >= 0 && u.column < g.column_tiles));
            ++taken[size_t((u.batch * g.row_tiles + u.row) * g.column_tiles + u.column)];
          }
        INFO(batch << " x " << m << " x " << n);
        CHECK(std::all_of(taken.begin(), taken.end(), [](int t) { return t == 1; }));
        CHECK(seen.shape.grid[0] <= 132);
        CHECK(seen.boxes[0].box[0] == 128);
        CHECK(seen.boxes[1].box[1] <= 128);
      }
}

TEST_CASE("hopper gemm: large tiles for large products, small ones for few rows; a batch of stride 0 has one item") {
  ask(leaf_of(1, 8192, 8192, 8192));
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_large_plain);
  CHECK((seen.shape.grid[0] == 132 && seen.shape.threads == 384 && seen.params.g.row_tiles == 32 && seen.params.g.column_tiles == 32));
  ask(leaf_of(1, 16, 8192, 8192));
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_small_plain);
  cqsa_fp8_gemm_leaf a = leaf_of(4, 256, 256, 100);
  a.b.stride[0] = 0;
  ask(a);
  CHECK((seen.params.a_item == 1 && seen.params.b_item == 0 && seen.boxes[0].size[2] == 4 && seen.boxes[1].size[2] == 1));
  CHECK((seen.boxes[0].size[0] == 100 && seen.boxes[0].stride[0] == 112));
}

TEST_CASE("hopper gemm: scales choose the kernel") {
  static float scale = 1;
  cqsa_fp8_gemm_leaf a = leaf_of(1, 8192, 8192, 8192);
  a.accumulate = CQSA_FP8_FAST;
  ask(a);
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_large_fast);
  a.scale_inv_a = {&scale, CQSA_DTYPE_F32, 0, {1, 8192}, 8192, 64, {1, 128}}, a.scale_inv_b = {&scale, CQSA_DTYPE_F32, 0, {64, 1}, 64, 64, {128, 128}};
  ask(a);
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_large_blocks);
  a.scale_inv_b = {&scale, CQSA_DTYPE_F32, 0, {1, 8192}, 8192, 64, {1, 128}};
  ask(a);
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_large_columns);
  a.scale_inv_a = {&scale, CQSA_DTYPE_F32, 0, {1, 1}, 8192, 1, {1, 8192}}, a.scale_inv_b = {};
  ask(a);
  CHECK(seen.kernel == kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_large_fast);
}

TEST_CASE("hopper gemm: what it leaves to others") {
  cqsa_fp8_gemm_leaf a = leaf_of(1, 64, 64, 64);
  CHECK(why_declined(a) == "");
  a.a.stride[1] = 70;
  CHECK(why_declined(a) == "rows or batch items are not multiples of 16 bytes apart");
  a = leaf_of(1, 64, 64, 64), a.b.data = somewhere + 1;
  CHECK(why_declined(a) == "codes are not aligned to 16");
  a = leaf_of(1, 64, 64, 64), a.b.stride[2] = 64, a.b.stride[1] = 1;
  CHECK(why_declined(a) == "k is not contiguous");
  a = leaf_of(1, 64, 64, 64), a.a.dtype = CQSA_DTYPE_E4M3FNUZ;
  CHECK(why_declined(a) == "a and b must be e4m3fn or e5m2");
  a = leaf_of(1, 64, 64, 0);
  CHECK(why_declined(a) == "there is nothing to multiply");
  a = leaf_of(1, 64, 64, 64), a.chip.tier = 80;
  CHECK(why_declined(a) == "the device has no sm_90a code");
}

}  // namespace cqsa::gpu
