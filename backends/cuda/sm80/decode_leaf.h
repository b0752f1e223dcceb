// SPDX-License-Identifier: Apache-2.0
// Host part of the decode kernels: how a problem is cut.
#pragma once

#include "backends/cqsa_backend.h"
#include "backends/gpu/port.h"

namespace cqsa::gpu::decode {

struct decode_cut {
  kernel_id kernel;
  int32_t m_tiles;         // tiles of 16 rows
  int32_t stages;          // of the ring; 0: a block has too little shared memory
  int32_t shared_bytes;
  int32_t blocks_per_unit;
  int32_t splits;
};

// From sizes alone.
decode_cut cut_of(const cqsa_attention_leaf& leaf);

// Splits for `units` blocks without a split, of which `slots` run at a time, over so many stages of keys.
int32_t splits_for(int64_t units, int64_t slots, int64_t stages);

// The launches of a cut. Workspace: combine_leaf.h's split_bytes() where there is more than one split, otherwise none.
cqsa_status launch_cut(void* device, const cqsa_attention_leaf& leaf, const decode_cut& cut, void* memory, uint64_t bytes, void* stream);

}  // namespace cqsa::gpu::decode
