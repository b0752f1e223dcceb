// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm80/decode.cuh"

CQSA_TUNED_KERNEL(128, 4, cqsa_sm80_decode_f16_d64, cqsa::gpu::decode::decode_params) {
  cqsa::gpu::decode::decode_block<64, cqsa::gpu::kind_f16, 2>(p);
}
