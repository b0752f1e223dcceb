// SPDX-License-Identifier: Apache-2.0
// From the leaf of a mixture of experts to the parameters of kernels, and what is in its workspace: shared by the portable layer and the tuned ones, which
// differ in how the products are made.
#pragma once

#include "attention_fill.h"
#include "moe_params.h"
#include "port.h"

namespace cqsa::gpu {

moe_view moe_view_of(const cqsa_moe_rows& x, int64_t rows, int64_t columns);
moe_ids moe_ids_of(const cqsa_moe_leaf& leaf);
bool moe_takes_codes(const cqsa_moe_leaf& leaf, cqsa_quant_format format);  // q8
bool moe_is_uniform(const cqsa_moe_set& set);                                // one format
constexpr int64_t moe_group_each(int64_t experts, int64_t blocks) { return divide_up(experts, smaller(experts, larger(blocks, 1))); }

// How products are made.
enum class moe_way {
  slots,  // every slot is a tile, whose expert the first launch finds: few tokens
  few,    // up to four tokens of an expert at a time
  tiles,  // 64 tokens at a time, the portable kernel
  tuned   // of a tier; activations are f16
};
// What one piece takes.
struct moe_plan {
  moe_way way;
  int32_t most;                // tokens of a tile
  bool codes, plain, half;     // forms of x and of h that products want
  int32_t order;               // of halves of x (moe_order.cuh)
  int64_t tokens;              // of a piece, at most
  bool few_of_q2 = false;      // few tokens: by the kernel of sm_80 for Q2_0 alone
};

// The routed experts, or the shared one.
struct moe_layer {
  const cqsa_moe_set *gate, *up, *down;
  int64_t inter;
  bool shared;
  moe_weights weights[3];               // gate, up, down
  const cqsa_moe_matrix* lists[3];      // in memory of the device; NULL: none
};

struct moe_memory {
  uint32_t* control;            // [16]: ticket, number of tiles
  cqsa_moe_matrix* lists[6];    // of experts that the host names: gate, up, down, and of the shared one
  int32_t *experts, *order, *offsets;
  moe_tile* tiles;
  moe_activations x, h;
  float *y, *shared_y, *factors;
};

// tuned: most tokens of a tile of a tuned way, or 0.
moe_plan moe_plan_of(const cqsa_moe_leaf& leaf, int32_t tuned);
uint64_t moe_carve(const cqsa_moe_leaf& leaf, const moe_plan& plan, void* base, moe_memory* out);
const char* why_no_moe(const cqsa_moe_leaf& leaf);

// A call: the leaf, its memory, and the piece that is under way.
struct moe_call {
  void *device, *stream;
  const cqsa_moe_leaf& leaf;
  moe_plan plan;
  moe_memory mem;
  moe_layer routed, shared;
  int64_t first = 0, tokens = 0;
  int64_t slots() const { return tokens * leaf.topk; }
};
// Products of a layer: h of all places, then y of all slots.
using moe_products = cqsa_status (*)(const moe_call& call, const moe_layer& layer);
cqsa_status moe_run(void* device, const cqsa_moe_leaf& leaf, const moe_plan& plan, void* workspace, uint64_t bytes, void* stream, moe_products products);

// Everything of a launch of products but the grid and the rows of a unit.
moe_multiply_params moe_multiply_of(const moe_call& call, const moe_layer& layer, bool gate_up);
int64_t moe_most_tiles(const moe_call& call, const moe_layer& layer, int32_t most);
// Halves of h from its numbers, as down takes them.
cqsa_status moe_halves_of_h(const moe_call& call, const moe_layer& layer, int32_t order);
bool moe_has_plain(const cqsa_moe_leaf& leaf);  // some matrix is F32, F16 or BF16
cqsa_status moe_portable_products(const moe_call& call, const moe_layer& layer);

}  // namespace cqsa::gpu
