// SPDX-License-Identifier: Apache-2.0
// What the host part of the mixture of experts tells its kernels. Plain data, passed by value at launch.
#pragma once

#include "attention_params.h"
#include "backends/moe_rules.h"

namespace cqsa::gpu {

constexpr int moe_pad = 128;        // rows of activations end at a multiple, with zeros
constexpr int moe_tile_rows = 64;   // of weights, in a tile of the portable kernel: 32 of gate and 32 of up, or 64 of down
constexpr int moe_tile_tokens = 64;
constexpr int moe_few_tokens = 4;   // most tokens of an expert that the kernels for few rows take at a time

constexpr int64_t moe_padded(int64_t n) { return (n + moe_pad - 1) / moe_pad * moe_pad; }

// A matrix in memory of the device; strides in elements.
struct moe_view {
  char* data;
  int64_t stride[2];
  int32_t kind;   // element_kind; of ids: bytes
  int32_t quads;  // elements 4 i .. 4 i + 3 of a row are neighbours, aligned to their bytes
};

// One projection of all experts: a list in memory of the device, or one block of memory.
struct moe_weights {
  const cqsa_moe_matrix* list;
  const char* data;
  int64_t expert_bytes, row_bytes;  // of data; row_bytes also where the list says 0
  int64_t rows, row_elements;
  const char* bias;  // NULL: none
  int64_t bias_stride[2];
  int32_t format;   // without a list
  int32_t present;  // 0: there is no such projection
};

// ids [tokens, topk], and what they mean.
struct moe_ids {
  moe_view ids;
  const int32_t* map;
  int64_t map_stride, num_ids, num_experts, topk;
  int64_t* counters;  // NULL: nobody counts
  int64_t counters_stride;
};

// Rows of activations, as numbers and as codes of q8; what is not there is NULL.
struct moe_activations {
  float* plain;       // [row][padded]
  signed char* code;  // [row][padded]
  float* scale;       // [row][padded / 32]
  unsigned short* half;  // [row][padded]: f16 for matrix units, in their order (moe_order.cuh), times half_scale
  float* half_scale;     // [row]: what they have to be multiplied by
  int64_t padded;
};

// Tokens of one expert, places first .. first + count - 1 of the order.
struct moe_tile {
  int32_t expert, first, count, reserved;
};
// Who is multiplied: a list of tiles; without one tiles of `most` neighbours, of places 0 .. tokens - 1 and expert 0 (the shared one), or of one slot
// each, whose expert is where experts says (few tokens).
struct moe_tiles {
  const moe_tile* list;
  const uint32_t* count;
  const int32_t* order;    // slot at a place; NULL: the place itself
  int32_t* experts;        // [slot], of slots as tiles
  int64_t tokens;          // places in all
  int32_t most;            // tokens of a tile
  int32_t slots_are_tiles;
};

struct moe_activation {
  int32_t kind;  // CQSA_MOE_SWIGLU, ..
  float alpha, beta, limit;
};

// moe_take: tokens of a piece to what is multiplied.
struct moe_take_params {
  moe_view x;
  moe_ids ids;
  moe_activations to;
  const cqsa_moe_matrix* lists[3];  // whose data may be NULL: gate, up, down; NULL: no list
  int32_t* experts;                 // [slot]
  uint32_t* control;                // words that become 0
  const float* factor;              // of the shared expert, or NULL
  int64_t factor_stride;
  float* factors;                   // [token], or NULL
  int64_t tokens, elements;
  int32_t q8_first;                 // half: of the numbers as rounded to q8
  int32_t factor_is_logit;
  int32_t order;           // of halves (moe_order.cuh)
  int32_t teams;           // a team of lanes takes a row, not a block
};

// moe_group: slots by expert.
struct moe_group_params {
  const int32_t* experts;  // [slot]; NULL: by ids
  moe_ids ids;
  int64_t slots, num_experts;
  int64_t each;            // experts of a block
  char *offsets, *order, *counts, *places;  // NULL: not wanted
  int64_t offsets_stride, order_stride, counts_stride, places_stride[2];
  int32_t bytes;           // of those
  int32_t fill;            // order past the last slot becomes -1
  moe_tile* tiles;         // NULL: none wanted
  uint32_t* num_tiles;
  uint32_t* ticket;        // 0 before
  int32_t most;            // tokens of a tile
  int32_t reserved;
};

// moe_describe: a part of the descriptors of experts in host memory.
constexpr int moe_described = 120;
struct moe_description {
  const void* data;
  uint64_t row_bytes;
  int32_t format, reserved;
};
struct moe_describe_params {
  cqsa_moe_matrix* to;
  int64_t count;
  moe_description list[moe_described];
};

// moe_tile, moe_few_*: gate and up with the activation, or down.
struct moe_multiply_params {
  moe_weights gate, up;  // down: in up, without gate
  moe_weights down;      // of gate and up: for which h is made
  moe_tiles tiles;
  moe_view rows_of_x;    // few: where activations are, and how; plain f32 rows of h, or x itself
  moe_activations x;     // tile
  moe_activations h;     // of gate and up, by place
  moe_view y;            // of down, f32, by slot
  moe_activation how;
  moe_ids ids;           // few, slots as tiles: gate and up look them up, and count
  const cqsa_moe_matrix* lists[3];
  int64_t outputs;       // rows of h or y
  int64_t topk;          // x of a slot is row slot / topk
  int64_t row_blocks;
  int64_t rows_each;     // few: of h or y, in a unit
  int32_t layout, gate_up, q8, find_experts;
};

// moe_combine: sums over slots, or zeros where there are none.
struct moe_combine_params {
  moe_view y, weights, out;
  moe_ids ids;             // ids.ids.data NULL: none
  const int32_t* experts;  // [slot]; NULL: by ids below 0
  const float* shared;     // [token][hidden], or NULL
  const float* factors;    // [token], or NULL: 1
  int64_t tokens, topk, hidden;
  int32_t clear;           // out is per slot: zeros where a slot has no expert
  int32_t reserved;
};

// moe_quantize
struct moe_quantize_params {
  moe_view x, codes, scales;
  int64_t rows, elements;
};

// moe_route
struct moe_route_params {
  moe_view logits, ids, weights;
  const char* bias;
  int64_t bias_stride;
  int64_t tokens, num_experts, topk;
  int32_t scoring, group_score, num_groups, topk_groups, renormalise, by_logits;
  float scale;
};

}  // namespace cqsa::gpu
