// SPDX-License-Identifier: Apache-2.0
// The FP8 product by the f16 matrix unit of sm_80 in the harness.
#include "fp8_gemm_problem.h"

#include "backends/cuda/tuned.h"

TEST_CASE("simt fp8 gemm sm80: random products of every format, stride, scale and output") {
  gemm_options o;
  o.most = 200;
  CHECK(check_gemms(sm80_fp8_gemm, o, 40, 80, 1e-5) < 20);  // nothing to multiply is left to the portable kernel
}

TEST_CASE("simt fp8 gemm sm80: rows that may be read 16 bytes at a time") {
  gemm_options o;
  o.most = 150, o.aligned = true;
  CHECK(check_gemms(sm80_fp8_gemm, o, 40, 80, 1e-5) < 20);
}

// Every code of every format against 1: the halves that codes become are exact.
TEST_CASE("simt fp8 gemm sm80: every code, NaN and Inf too") {
  for (const cqsa_dtype t : {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ}) {
    std::vector<uint8_t> codes(256);
    for (int i = 0; i < 256; ++i) codes[size_t(i)] = uint8_t(i);
    uint8_t one = encode_code(t, 1.0f);
    std::vector<float> d(256, -1);
    cqsa_fp8_gemm_leaf x{};
    x.struct_size = sizeof x, x.batch = 1, x.m = 256, x.n = 1, x.k = 1, x.alpha = 1;
    x.a = {codes.data(), t, 0, {0, 1, 1}}, x.b = {&one, t, 0, {0, 1, 1}}, x.d = {d.data(), CQSA_DTYPE_F32, 0, {0, 1, 1}};
    simt::device device = gemm_device(1, 32, 80);
    x.chip = {80, 1, device.facts.shared_bytes, 0};
    REQUIRE(sm80_fp8_gemm.launch(&device, &x, nullptr, 0, nullptr, nullptr) == CQSA_OK);
    int wrong = 0;
    for (int i = 0; i < 256; ++i) {
      const float want = decode_code(t, uint8_t(i));
      wrong += std::isnan(want) ? !std::isnan(d[size_t(i)]) : d[size_t(i)] != want;
    }
    INFO("type " << t);
    CHECK(wrong == 0);
  }
}

// Scales of 128 of k for 256, and codes that come while the products before them are under way.
TEST_CASE("simt fp8 gemm sm80: every mutant is noticed", "[mutants]") {
  for (int mutant = 1; mutant <= 2; ++mutant) {
    cqsa_simt_mutant = mutant;
    bool noticed = false;
    for (int n = 0; n < 60 && !noticed; ++n) {
      gemm_problem x(uint64_t(n + 1));
      gemm_options o;
      x.make(o);
      simt::device device = gemm_device(n, 32, 80);
      const std::string text = run_gemm(device, sm80_fp8_gemm, x);
      noticed = text.rfind("declined", 0) != 0 && (!text.empty() || !x.mistake(1e-5).empty());
    }
    cqsa_simt_mutant = 0;
    INFO("CQSA_MUTANT(" << mutant << ")");
    CHECK(noticed);
  }
}
