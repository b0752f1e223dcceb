// SPDX-License-Identifier: Apache-2.0
// Delayed-scaling rings, cqsa.h section 13: their memory is the caller's, the rule that moves them is in backends/fp8_rules.h.
#pragma once
#include "ops/fp8/operands.h"

namespace cqsa::fp8 {

// The caller's struct, its numbers checked. name: "args->ring".
cqsa_status take_ring(const cqsa_fp8_ring* caller, const char* name, cqsa_fp8_ring& out);
// Its state, taken into the list; is_begun: on a host backend also what it says.
cqsa_status check_ring_memory(operand_list& list, const cqsa_fp8_ring& ring, const char* name, bool is_begun);

cqsa_status ring_bytes(const cqsa_fp8_ring* ring, uint64_t& bytes_out);
cqsa_status ring_init(const cqsa_context&, const cqsa_fp8_ring* ring, float amax, void* stream);
cqsa_status ring_fold(const cqsa_context&, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes, void* stream);
cqsa_status ring_staged(const cqsa_context&, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes_out, void* stream);
cqsa_status ring_read(const cqsa_context&, const cqsa_fp8_ring* ring, cqsa_fp8_ring_info* info_out, float* history_out, void* stream,
                      bool capturing);

}  // namespace cqsa::fp8
