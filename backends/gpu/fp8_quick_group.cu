// SPDX-License-Identifier: Apache-2.0
#include "fp8_quick.cuh"

CQSA_TUNED_KERNEL(256, 5, cqsa_fp8_quick_group, cqsa::gpu::fp8_one_params) {
  if (p.jobs[0].x.kind == cqsa::gpu::kind_bf16) cqsa::gpu::quick_group<CQSA_LANES, cqsa::gpu::kind_bf16>(p);
  else cqsa::gpu::quick_group<CQSA_LANES, cqsa::gpu::kind_f16>(p);
}
