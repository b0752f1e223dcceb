// SPDX-License-Identifier: Apache-2.0
// The portable FP8 product in the harness.
#include "fp8_gemm_problem.h"

#include "backends/gpu/fp8_gemm_end.cuh"

TEST_CASE("simt fp8 gemm: random products of every format, stride, scale and output") {
  gemm_options o;
  o.most = 90;
  CHECK(check_gemms(portable_fp8_gemm, o, 120, 0, 2e-6) == 0);
}

TEST_CASE("simt fp8 gemm: every code means what the oracle says, and every number gets its code") {
  const cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
  for (const cqsa_dtype t : formats) {
    const int kind = gemm_kind_of(t);
    int64_t wrong = 0;
    for (int code = 0; code < 256; ++code) wrong += cqsa::gpu::bits_of(decode_fp8(uint32_t(code), kind)) != cqsa::gpu::bits_of(decode_code(t, uint8_t(code)));
    std::mt19937 random(3);
    for (int i = 0; i < 2000000; ++i) {
      const float x = float_of(i < 65536 ? uint32_t(i) << 16 | (i & 1) : uint32_t(random()));
      wrong += encode_fp8(x, kind) != encode_code(t, x);
    }
    INFO("type " << t);
    CHECK(wrong == 0);
  }
}

TEST_CASE("simt fp8 gemm: NaN codes reach their row, their column and amax; k of 0 gives c and bias; one that nobody prepared shows") {
  gemm_problem x(7);
  gemm_options o;
  do x = gemm_problem(x.random()), x.make(o);
  while (x.leaf.k < 16 || x.leaf.m < 2 || x.leaf.n < 2 || x.leaf.d.dtype != CQSA_DTYPE_F32 || x.leaf.beta != 0 || !x.leaf.d_amax || x.leaf.batch > 1);
  *x.a.at(0, 1, 3) = char(x.leaf.a.dtype == CQSA_DTYPE_E4M3FN || x.leaf.a.dtype == CQSA_DTYPE_E5M2 ? 0x7f : 0x80);
  simt::device device = gemm_device(1, 32, 0);
  x.leaf.alpha = 0;  // counts as 1
  REQUIRE(run_gemm(device, portable_fp8_gemm, x) == "");
  for (int64_t r = 0; r < x.leaf.m; ++r)
    for (int64_t n = 0; n < x.leaf.n; ++n) CHECK(std::isnan(read_element(x.d.at(0, r, n), CQSA_DTYPE_F32)) == (r == 1));
  CHECK(std::isnan(x.amax));
  std::vector<uint64_t> memory(16, 0);
  x.amax = 1;
  *x.a.at(0, 1, 3) = 0;
  REQUIRE(portable_fp8_gemm.launch(&device, &x.leaf, memory.data(), 128, nullptr, nullptr) == CQSA_OK);
  CHECK(std::isnan(x.amax));
  CHECK(portable_fp8_gemm.launch(&device, &x.leaf, memory.data(), 127, nullptr, nullptr) == CQSA_ERROR_WORKSPACE);
}
