// SPDX-License-Identifier: Apache-2.0
// Host part of the portable merge.
#include "merge_params.h"
#include "port.h"

namespace cqsa::gpu {

cqsa_status portable_merge(void* device, const cqsa_merge_leaf* leaf, const cqsa_exec*, void* stream) {
  merge_params p{*leaf, 1};
  for (const int64_t size : leaf->shape) p.rows *= size;
  if (p.rows < 1 || leaf->head_dim_v < 1) return CQSA_OK;
  const device_facts& facts = facts_of(device);
  const int64_t rows_each = 256 / facts.lanes, most = int64_t(facts.compute_units > 0 ? facts.compute_units : 1) * 32;
  const int64_t wanted = (p.rows + rows_each - 1) / rows_each;
  const uint32_t blocks = uint32_t(wanted < most ? wanted : most);  // they go round
  return launch(device, kernel_id::cqsa_merge, {{blocks, 1, 1}, 256, 0}, &p, sizeof p, stream);
}

}  // namespace cqsa::gpu
