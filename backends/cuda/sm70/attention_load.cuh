// SPDX-License-Identifier: Apache-2.0
// q, k and v from global to shared memory, as f16 whatever they are: int8 codes are exact in f16. A thread holds its pieces of a tile
// (8 channels each: 16 bytes of f16, 8 of int8) in registers while the block computes with the tile before, and then stores them.
#pragma once

#include "attention_memory.cuh"

namespace cqsa::gpu {

// The pieces of a thread as they are in global memory, and its scales.
template <class Shape> struct sm70_stage {
  static constexpr int all = Shape::groups * Shape::keys, scales = all < Shape::threads ? 1 : all / Shape::threads;
  word4x piece[Shape::pieces];
  float scale[scales];
};

CQSA_DEVICE float load_f16(const char* data, int64_t i) { return f16_to_f32(uint16_t(load_u16(data + 2 * i))); }

// Scale of the 32 channels `group` of a key, 0 where there is nothing. Which: 0 for k, 1 for v.
template <int Which, class Shape>
CQSA_DEVICE float scale_of_key(const attention_params& p, const sm70_memory<Shape>& mem, int key, int group) {
  const int kind = Which == 0 ? p.scale_k : p.scale_v, channels = Which == 0 ? p.head_dim : p.head_dim_v;
  const gpu_view& s = Which == 0 ? p.k_scale : p.v_scale;
  if (kind == scale_none) return 1.0f;
  if (mem.key_offset(Which)[key] == no_row || group * 32 >= channels) return 0.0f;
  const int64_t at = mem.key_offset(2 + Which)[key];
  if (kind == scale_per_group) return load_f16(s.data, at + group * 32 / p.kv_group * s.stride[3]);
  if (kind == scale_per_token) return load_element(s.data, s.kind, at);
  return load_element(s.data, s.kind, kind == scale_per_head ? mem.facts().kv_head * s.stride[1] : 0);
}

// Channel of piece n of a thread, and where its row is.
template <class Shape> CQSA_DEVICE int64_t piece_offset(const int64_t* offsets, int t, int n, int channels) {
  const int i = t + n * Shape::threads, c = i % (Shape::dim / 8) * 8;
  const int64_t at = offsets[i / (Shape::dim / 8)];
  return c < channels && at != no_row ? at + c : no_row;
}

// Asks for the next tile; nothing waits for it here.
template <int Which, class Shape>
CQSA_DEVICE void load_tile(const attention_params& p, const sm70_memory<Shape>& mem, int t, sm70_stage<Shape>& stage) {
  const gpu_view& x = Which == 0 ? p.k : p.v;
  const int channels = Which == 0 ? p.head_dim : p.head_dim_v;
#pragma unroll
  for (int n = 0; n < Shape::pieces; ++n)
#pragma unroll
    for (int w = 0; w < 4; ++w) stage.piece[n].x[w] = 0;
  if (x.quads && x.kind == kind_f16) {
#pragma unroll
    for (int n = 0; n < Shape::pieces; ++n) {
      const int64_t at = piece_offset<Shape>(mem.key_offset(Which), t, n, channels);
      if (at != no_row) stage.piece[n] = *reinterpret_cast<const word4x*>(x.data + 2 * at);
    }
  } else if (x.quads) {
#pragma unroll
    for (int n = 0; n < Shape::pieces; ++n) {
      const int64_t at = piece_offset<Shape>(mem.key_offset(Which), t, n, channels);
      if (at != no_row) {
        const word2x codes = *reinterpret_cast<const word2x*>(x.data + at);
        stage.piece[n].x[0] = codes.x[0], stage.piece[n].x[1] = codes.x[1];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < stage.scales; ++n) {
    const int i = t + n * Shape::threads;
    if (i < stage.all) stage.scale[n] = scale_of_key<Which>(p, mem, i % Shape::keys, i / Shape::keys);
  }
}

// Rows of any stride and alignment, one element after another.
template <int Which, class Shape>
CQSA_DEVICE bool store_elements(const attention_params& p, const sm70_memory<Shape>& mem, int t) {
  const gpu_view& x = Which == 0 ? p.k : p.v;
  const int channels = Which == 0 ? p.head_dim : p.head_dim_v;
  bool bad = false;
#pragma unroll 1
  for (int i = t; i < Shape::keys * Shape::dim; i += Shape::threads) {
    const int c = i % Shape::dim, key = i / Shape::dim;
    const int64_t at = mem.key_offset(Which)[key];
    uint32_t bits = 0;
    if (at != no_row && c < channels) {
      const int64_t n = at + c * x.stride[3];
      if (x.kind == kind_f16) bits = load_u16(x.data + 2 * n);
      else bits = f32_to_f16(float(reinterpret_cast<const signed char*>(x.data)[n]));
    }
    bad = bad || not_finite(bits);
    mem.tile(Which)[piece_at<Shape>(key, c >> 3) + (c & 7)] = uint16_t(bits);
  }
  return bad;
}

// Stores what load_tile asked for. True when a value or a scale of v is NaN or Inf.
template <int Which, class Shape>
CQSA_DEVICE bool store_tile(const attention_params& p, const sm70_memory<Shape>& mem, int t, const sm70_stage<Shape>& stage) {
  const gpu_view& x = Which == 0 ? p.k : p.v;
  bool bad = false;
  auto store = [&](int n, const word4x& piece) {
    const int i = t + n * Shape::threads;
    *reinterpret_cast<word4x*>(mem.tile(Which) + piece_at<Shape>(i / (Shape::dim / 8), i % (Shape::dim / 8))) = piece;
  };
  if (!x.quads) {
    bad = store_elements<Which>(p, mem, t);
  } else if (x.kind == kind_f16) {
#pragma unroll
    for (int n = 0; n < Shape::pieces; ++n) {
      store(n, stage.piece[n]);
#pragma unroll
      for (int w = 0; w < 4; ++w) bad = bad || not_finite(stage.piece[n].x[w]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < Shape::pieces; ++n) {
      word4x piece;
      unpack_codes(stage.piece[n].x[0], piece.x);
      unpack_codes(stage.piece[n].x[1], piece.x + 2);
      store(n, piece);
    }
  }
#pragma unroll
  for (int n = 0; n < stage.scales; ++n) {
    const int i = t + n * Shape::threads;
    if (i >= stage.all) break;
    const float s = stage.scale[n];
    const bool broken = Which == 1 && (bits_of(s) & 0x7f800000u) == 0x7f800000u;
    bad = bad || broken;
    mem.scale(Which)[i] = broken ? 0.0f : s;
    if (Which == 1) mem.scale(2)[i] = s;
  }
  return bad && Which == 1;
}

// ------------------------------------------------------------------------------------------------------------------- q

CQSA_DEVICE float q_element(const attention_params& p, int64_t at, int c) {
  return at != no_row && c < p.head_dim ? load_element(p.q.data, p.q.kind, at + c * p.q.stride[3]) : 0.0f;
}

// A warp per row: f32 rows are multiplied by a power of two, so that their largest element is 2^10 .. 2^11 and what f16 leaves of
// it is far from f16's subnormals. The other way round in row_scale.
template <class Shape> CQSA_DEVICE void scale_rows(const attention_params& p, const sm70_memory<Shape>& mem, int t) {
  const int lane = t % 32;
#pragma unroll 1
  for (int row = t / 32; row < Shape::rows; row += Shape::threads / 32) {
    float most = 0.0f;
#pragma unroll 1
    for (int c = lane; c < p.head_dim; c += 32)
      most = max_f32(most, float_of(bits_of(q_element(p, mem.row_offset()[row], c)) & 0x7fffffffu));
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) most = max_f32(most, shuffle_xor<32>(most, mask));
    const power_pair power = power_for(most, 10);
    if (lane == 0) mem.row_factor()[row] = power.up, mem.row_scale()[row] = p.softmax_scale * power.down;
  }
}

// Part n of q lies behind part n - 1, rows as those of a tile. f16 is taken as it is, and its part 1 is nothing.
template <class Shape> CQSA_DEVICE void stage_q(const attention_params& p, const sm70_memory<Shape>& mem, int t) {
#pragma unroll 1
  for (int i = t; i < Shape::rows * Shape::dim / 2; i += Shape::threads) {
    const int c = i % (Shape::dim / 2) * 2, row = i / (Shape::dim / 2);
    const int64_t at = mem.row_offset()[row];
    const float up = p.q.kind == kind_f16 ? 1.0f : mem.row_factor()[row];
    uint32_t pair[Shape::parts];
    split_pair<Shape::parts>(q_element(p, at, c) * up, q_element(p, at, c + 1) * up, pair);
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part)
      *reinterpret_cast<uint32_t*>(mem.tile(0) + part * Shape::rows * Shape::dim + piece_at<Shape>(row, c >> 3) + (c & 7)) = pair[part];
  }
}

}  // namespace cqsa::gpu
