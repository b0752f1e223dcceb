// SPDX-License-Identifier: Apache-2.0
// What the host part (attention_leaf.cpp) tells the portable attention kernels. Plain data, passed by value at launch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cqsa::gpu {

// Element types as the kernels number them.
enum element_kind : int32_t {
  kind_f32 = 0,
  kind_f16 = 1,
  kind_bf16 = 2,
  kind_i8 = 3,
  kind_e4m3 = 4,
  kind_e5m2 = 5,
  kind_u8 = 6
};

// CQSA_SCALE_* and CQSA_LEAF_*; attention_leaf.cpp asserts it.
enum scale_kind : int32_t { scale_none = 0, scale_per_tensor = 1, scale_per_head = 2, scale_per_token = 3, scale_per_group = 4 };
enum leaf_flag : int32_t { flag_state_in = 1, flag_state_out = 2 };

// A cqsa_view of device memory. Strides count elements.
struct gpu_view {
  char* data;
  int64_t stride[4];
  int32_t kind;
  int32_t quads;  // rows may be read or written four channels at a time: unit stride, aligned, a multiple of four long
};

// Queries that share a list of key ranges.
struct gpu_group {
  int64_t q_pos, q_len, q_row, state_row;
  int64_t first_range, num_ranges;
  int64_t first_tile;  // number of its first query tile among those of all groups
};

struct gpu_range {
  int64_t pos, len, row;
};

struct attention_params {
  gpu_view q, k, v, k_scale, v_scale, mask, bias, slopes, sinks, out, lse;
  // Whole problem (num_groups = 0): lengths are read on the device.
  const void *cu_seqlens_q, *cu_seqlens_k, *seqused_k;
  const char* page_table;
  int64_t page_table_stride[2];
  int64_t page_size, num_pages, total_q, total_k;
  int32_t index_bytes, seqused_bytes;
  // Rectangles: in the workspace, or, when groups is null, the one group and range that are here.
  const gpu_group* groups;
  const gpu_range* ranges;
  int64_t num_groups;
  gpu_group one_group;
  gpu_range one_range;
  float *state_acc, *state_m, *state_l;
  int64_t state_rows;
  int64_t batch, num_heads, num_kv_heads, seqlen_q, seqlen_k;
  // Visible: i + off - left <= j <= i + off + right. Causality is in right already, "no limit" is 2^60.
  int64_t left, right;
  int64_t q_tiles, first_unit;
  int32_t head_dim, head_dim_v;
  int32_t scale_k, scale_v, kv_group;
  float softmax_scale, softcap;  // softcap 0: none
  int32_t flags;                 // CQSA_LEAF_*
  int32_t top_left;              // off is 0
  int32_t longest_first;         // late queries have the most keys
  int32_t heads_packed;          // query heads of a key head that share a tile, row = query * heads + head
  int32_t head_groups;           // .. and how many tiles it takes for all of them
  int32_t tile_queries;          // queries of a tile
  int32_t fix_always;            // every tile of logits needs more than the scale: softcap, bias, slopes, mask
};

// The parameters of a varlen problem's rows past its last segment.
struct tail_params {
  gpu_view out, lse;
  const void* cu_seqlens_q;
  int64_t batch, num_heads, total_q;
  int32_t index_bytes, head_dim_v;
};

// Tile of an instantiation for head_dim_v up to dv: 16 * rows_each query rows, 64 keys.
template <int Dv> struct attention_shape {
  static constexpr int rows_each = Dv <= 128 ? 8 : Dv <= 256 ? 4 : 2;  // query rows of a thread
  static constexpr int rows = 16 * rows_each;
  static constexpr int keys = 64;
  static constexpr int chunk = 32;                                     // channels of q and k in shared memory at a time
  static constexpr int v_keys = Dv <= 64 ? 64 : Dv <= 256 ? 32 : 16;   // keys of v in shared memory at a time
  static constexpr int columns = Dv / 16;                              // channels of out of a thread
  // Bytes of the parts of shared memory, in this order.
  static constexpr int panel_bytes = 4 * (chunk * (rows + keys) > v_keys * Dv ? chunk * (rows + keys) : v_keys * Dv);
  static constexpr int p_bytes = 4 * keys * rows;
  static constexpr int row_bytes = rows * (8 + 4 * 5);
  static constexpr int key_bytes = keys * (4 * 8 + 2 * 4);
  static constexpr int facts_bytes = 256;
  static constexpr int shared_bytes = panel_bytes + p_bytes + row_bytes + key_bytes + facts_bytes;
};
static_assert(attention_shape<64>::shared_bytes <= 65536 && attention_shape<128>::shared_bytes <= 65536, "what every chip has");
static_assert(attention_shape<256>::shared_bytes <= 65536 && attention_shape<512>::shared_bytes <= 65536, "what every chip has");

}  // namespace cqsa::gpu
