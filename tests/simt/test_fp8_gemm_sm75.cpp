// SPDX-License-Identifier: Apache-2.0
// The FP8 product by the f16 matrix unit of sm_75, whose kernel is the source of sm_80's, in the harness.
#include "fp8_gemm_problem.h"

#include "backends/cuda/tuned.h"

TEST_CASE("simt fp8 gemm sm75: random products of every format, stride, scale and output") {
  gemm_options o;
  o.most = 200;
  CHECK(check_gemms(sm80_fp8_gemm, o, 40, 75, 1e-5) < 20);  // nothing to multiply is left to the portable kernel
}

TEST_CASE("simt fp8 gemm sm75: rows that may be read 16 bytes at a time") {
  gemm_options o;
  o.most = 150, o.aligned = true;
  CHECK(check_gemms(sm80_fp8_gemm, o, 40, 75, 1e-5) < 20);
}
