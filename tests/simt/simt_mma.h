// SPDX-License-Identifier: Apache-2.0
// The wrappers of backends/cuda/sm70, sm75 and sm80/mma.cuh for the SIMT harness: the lanes meet, and the models do the work.
#pragma once

#include "mma_model.h"
#include "simt_device.h"

namespace cqsa::simt {

// How each instruction rounds: as on the chip that has it in hardware first. A test may change that.
inline mma_numerics numerics_m8n8k4 = sm70_numerics, numerics_m16n8k8 = sm75_numerics, numerics_m16n8k16 = sm80_numerics;

template <int A, int B> struct mma_operands {
  uint32_t a[A], b[B];
};

// The operands of all lanes side by side, for a model.
template <int A, int B, int C> struct mma_warp {
  uint32_t a[32][A], b[32][B];
  float c[32][C];
  explicit mma_warp(const lane_operand* lanes) {
    for (int i = 0; i < 32; ++i) {
      const auto* in = static_cast<const mma_operands<A, B>*>(lanes[i].in);
      std::memcpy(a[i], in->a, sizeof in->a), std::memcpy(b[i], in->b, sizeof in->b), std::memcpy(c[i], lanes[i].out, sizeof c[i]);
    }
  }
  void give(lane_operand* lanes) const {
    for (int i = 0; i < 32; ++i) std::memcpy(lanes[i].out, c[i], sizeof c[i]);
  }
};

template <int K, half_kind Kind> void mma_m16n8_lanes(lane_operand* lanes, int) {
  mma_warp<K / 4, K / 8, 4> w(lanes);
  model_m16n8<K>(w.a, w.b, w.c, Kind, K == 8 ? numerics_m16n8k8 : numerics_m16n8k16);
  w.give(lanes);
}
template <bool ARow, bool BRow> void mma_m8n8k4_lanes(lane_operand* lanes, int) {
  mma_warp<2, 2, 8> w(lanes);
  model_m8n8k4(w.a, w.b, w.c, ARow, BRow, numerics_m8n8k4);
  w.give(lanes);
}
template <int Count, bool Trans> void ldmatrix_lanes(lane_operand* lanes, int) {
  const void* rows[32];
  uint32_t registers[32][4];
  for (int i = 0; i < 32; ++i) rows[i] = lanes[i].in;
  model_ldmatrix(rows, Count, Trans, registers);
  for (int i = 0; i < 32; ++i) std::memcpy(lanes[i].out, registers[i], Count * 4);
}

template <int Count, bool Trans> void load_matrix(uint32_t* r, const void* row, const char* file, int line) {
  check_shared("ldmatrix", row, 16, 16);  // sm_75 wants a valid address of every lane
  meet_lanes("ldmatrix", 32, {row, r, 0}, ldmatrix_lanes<Count, Trans>, file, line);
}

}  // namespace cqsa::simt

namespace cqsa::gpu {

enum class order;

template <order A, order B> CQSA_DEVICE void mma_m8n8k4(float (&c)[8], const uint32_t (&a)[2], const uint32_t (&b)[2], CQSA_SIMT_SITE) {
  const simt::mma_operands<2, 2> in{{a[0], a[1]}, {b[0], b[1]}};
  simt::meet_lanes("mma_m8n8k4", 32, {&in, c, 0}, simt::mma_m8n8k4_lanes<int(A) == 0, int(B) == 0>, simt_file, simt_line);
}

CQSA_DEVICE void mma_m16n8k8_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b, CQSA_SIMT_SITE) {
  const simt::mma_operands<2, 1> in{{a[0], a[1]}, {b}};
  simt::meet_lanes("mma_m16n8k8_f16", 32, {&in, c, 0}, simt::mma_m16n8_lanes<8, simt::half_kind::f16>, simt_file, simt_line);
}
CQSA_DEVICE void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CQSA_SIMT_SITE) {
  const simt::mma_operands<4, 2> in{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  simt::meet_lanes("mma_m16n8k16_f16", 32, {&in, c, 0}, simt::mma_m16n8_lanes<16, simt::half_kind::f16>, simt_file, simt_line);
}
CQSA_DEVICE void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], CQSA_SIMT_SITE) {
  const simt::mma_operands<4, 2> in{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  simt::meet_lanes("mma_m16n8k16_bf16", 32, {&in, c, 0}, simt::mma_m16n8_lanes<16, simt::half_kind::bf16>, simt_file, simt_line);
}

CQSA_DEVICE int thread_now() { return thread_index(); }
CQSA_DEVICE int thread_in_loop() { return thread_index(); }
CQSA_DEVICE uint32_t pack_f16(float low, float high) { return uint32_t(f32_to_f16(low)) | uint32_t(f32_to_f16(high)) << 16; }
CQSA_DEVICE uint32_t pack_bf16(float low, float high) {
  const auto round = [](float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // as the instruction has it
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  };
  return round(low) | round(high) << 16;
}

CQSA_DEVICE void ldmatrix_x1(uint32_t (&r)[1], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<1, false>(r, row, simt_file, simt_line); }
CQSA_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<2, false>(r, row, simt_file, simt_line); }
CQSA_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<4, false>(r, row, simt_file, simt_line); }
CQSA_DEVICE void ldmatrix_x1_trans(uint32_t (&r)[1], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<1, true>(r, row, simt_file, simt_line); }
CQSA_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<2, true>(r, row, simt_file, simt_line); }
CQSA_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, CQSA_SIMT_SITE) { simt::load_matrix<4, true>(r, row, simt_file, simt_line); }

CQSA_DEVICE void cp_async_16(void* shared, const void* global, int valid = 16) { simt::issue_copy(shared, global, 16, valid); }
CQSA_DEVICE void cp_async_8(void* shared, const void* global, int valid = 8) { simt::issue_copy(shared, global, 8, valid); }
CQSA_DEVICE void cp_async_4(void* shared, const void* global, int valid = 4) { simt::issue_copy(shared, global, 4, valid); }
CQSA_DEVICE void cp_async_commit() { simt::commit_copies(); }
template <int Pending> CQSA_DEVICE void cp_async_wait(CQSA_SIMT_SITE) { simt::wait_copies(Pending, simt_file, simt_line); }

CQSA_DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [&](int shift) {
    return uint32_t(f32_to_f16(std::fma(f16_to_f32(uint16_t(a >> shift)), f16_to_f32(uint16_t(b >> shift)), f16_to_f32(uint16_t(c >> shift)))));
  };
  return half(0) | half(16) << 16;
}
CQSA_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [](uint32_t x, int shift) { return float_of(x >> shift << 16); };
  return pack_bf16(std::fma(half(a, 0), half(b, 0), half(c, 0)), std::fma(half(a, 16), half(b, 16), half(c, 16)));
}
CQSA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}

}  // namespace cqsa::gpu
