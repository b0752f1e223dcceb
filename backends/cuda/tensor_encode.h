// SPDX-License-Identifier: Apache-2.0
// tensor_box (sm90/tensor_map.h) to the driver's CUtensorMap: for the plugin, and for benchmarks without one.
#pragma once

#include <cuda.h>

#include <cstring>

#include "backends/gpu/attention_params.h"
#include "backends/cuda/sm90/tensor_map.h"

namespace cqsa::cuda {

// `encode` is cuTensorMapEncodeTiled, of which there is no symbol to link to.
template <class Encode> CUresult encode_box(Encode encode, const gpu::tensor_box& b, gpu::tensor_map* out) {
  static_assert(sizeof(gpu::tensor_map) == sizeof(CUtensorMap));
  const CUtensorMapDataType type = b.kind == gpu::kind_f16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : b.kind == gpu::kind_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const cuuint64_t size[4] = {b.size[0], b.size[1], b.size[2], b.size[3]}, stride[3] = {b.stride[0], b.stride[1], b.stride[2]};
  const cuuint32_t box[4] = {b.box[0], b.box[1], b.box[2], b.box[3]}, step[4] = {1, 1, 1, 1};
  CUtensorMap map;  // aligned as the driver wants it
  const CUresult result = encode(&map, type, 4, const_cast<void*>(b.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) std::memcpy(out, &map, sizeof map);
  return result;
}

}  // namespace cqsa::cuda
