// SPDX-License-Identifier: Apache-2.0
// What the host code of the CUDA plugin is linked with in the tests that have no GPU: images that no driver would take, and
// leaves that launch a kernel and compute nothing.
#include <cstring>

#include "backends/cuda/images.h"
#include "backends/cuda/plugin.h"
#include "backends/gpu/port.h"

#ifndef STUB_CODE_LIST
#define STUB_CODE_LIST "sm_70(PTX) sm_75 sm_80 sm_90a compute_90"
#endif

extern "C" {
const cqsa_cuda_image cqsa_cuda_images[] = {{"first.cu", "first", 6, 0, STUB_CODE_LIST}, {"second.cu", "second", 7, 0, STUB_CODE_LIST}};
const int cqsa_cuda_num_images = 2;
const char cqsa_cuda_code_list[] = STUB_CODE_LIST;
}

namespace cqsa::gpu {

namespace {

struct stub_params {
  char bytes[64];
};

cqsa_status probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  if (size > 0) std::strncpy(reason, "the stub takes f32 only", size - 1);
  return leaf->q.dtype == CQSA_DTYPE_F32 ? CQSA_OK : CQSA_ERROR_UNSUPPORTED;
}

int32_t tiles(const cqsa_attention_leaf*, cqsa_leaf_tile* out, int32_t) { return out[0] = {64, 64, 1, 2}, 1; }

uint64_t workspace(const cqsa_attention_leaf*, int64_t) { return 4096; }

// Uploads its rectangles; the shape says what the device is.
cqsa_status launch_attention(void* device, const cqsa_attention_leaf* leaf, void* memory, uint64_t, const cqsa_exec*, void* stream) {
  const uint64_t bytes = static_cast<uint64_t>(leaf->num_rects) * sizeof(cqsa_rect);
  if (bytes > 0)
    if (const cqsa_status status = upload(device, memory, leaf->rects, bytes, stream); status != CQSA_OK) return status;
  const device_facts& facts = facts_of(device);
  const launch_shape shape = {{static_cast<uint32_t>(facts.compute_units), 2, 1}, static_cast<uint32_t>(8 * facts.lanes),
                              static_cast<uint32_t>(leaf->tile_q)};
  stub_params params = {};
  std::memcpy(params.bytes, &leaf->head_dim, sizeof leaf->head_dim);
  return launch(device, kernel_id::cqsa_attention_d64, shape, &params, sizeof params, stream);
}

const cqsa_attention_impl attention = {"stub", "f32", probe, tiles, workspace, launch_attention, nullptr};

// shape[3] asks for faults, 2: too much shared memory, 3: parameters of another size.
cqsa_status merge(void* device, const cqsa_merge_leaf* leaf, const cqsa_exec*, void* stream) {
  const launch_shape shape = {{1, 1, 1}, 256, leaf->shape[3] == 2 ? uint32_t{1} << 20 : 0};
  const stub_params params = {};
  return launch(device, kernel_id::cqsa_merge, shape, &params, leaf->shape[3] == 3 ? 60 : sizeof params, stream);
}

}  // namespace

}  // namespace cqsa::gpu

void cqsa::cuda::add_leaves(cqsa_backend_v1& backend) {
  backend.attention = &gpu::attention;
  backend.num_attention = 1;
  backend.merge = gpu::merge;
}
