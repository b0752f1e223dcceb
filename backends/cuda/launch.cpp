// SPDX-License-Identifier: Apache-2.0
// backends/gpu/port.h for CUDA.
#include <cinttypes>
#include <cstring>

#include "backends/gpu/attention_params.h"
#include "backends/gpu/port.h"
#include "code.h"
#include "device.h"
#include "error.h"

namespace cqsa::gpu {

using namespace cqsa::cuda;

namespace {

cqsa_status check_launch(const cuda::device& d, kernel_id kernel, const launch_shape& shape, size_t params_bytes) {
  const int i = static_cast<int>(kernel);
  if (i < 0 || i >= most_kernels) return fail(CQSA_ERROR_INTERNAL, "there is no kernel %d", i);
  if (d.function[i] == nullptr) return fail(CQSA_ERROR_INTERNAL, "kernel %s is not for device %" PRId32, kernel_name(kernel), d.index);
  if (d.params_bytes[i] != 0 && d.params_bytes[i] != params_bytes)
    return fail(CQSA_ERROR_INTERNAL, "kernel %s takes %" PRIu64 " bytes of parameters, not %zu", kernel_name(kernel), d.params_bytes[i],
                params_bytes);
  if (shape.shared_bytes > static_cast<uint32_t>(d.most_shared_bytes[i]))
    return fail(CQSA_ERROR_INTERNAL, "kernel %s is to have %" PRIu32 " bytes of shared memory, device %" PRId32 " has %" PRId32,
                kernel_name(kernel), shape.shared_bytes, d.index, d.most_shared_bytes[i]);
  return CQSA_OK;
}

}  // namespace

cqsa_status launch(void* handle, kernel_id kernel, const launch_shape& shape, const void* params, size_t params_bytes, void* stream) {
  const cuda::device& d = device_of(handle);
  CQSA_CUDA_TRY(check_launch(d, kernel, shape, params_bytes));
  const scope here(d, scope::capture::as_is);
  CQSA_CUDA_TRY(here.status());
  void* arguments[] = {const_cast<void*>(params)};
  const CUresult result =
      driver().cuLaunchKernel(d.function[static_cast<int>(kernel)], shape.grid[0], shape.grid[1], shape.grid[2], shape.threads, 1, 1,
                              shape.shared_bytes, static_cast<CUstream>(stream), arguments, nullptr);
  return check(result, kernel_name(kernel));
}

// By way of the stack, which is pageable for certain: pinned memory would be read later. A captured copy would read the stack
// again whenever its graph runs, so it is refused.
cqsa_status upload(void* handle, void* to, const void* from, uint64_t bytes, void* stream) {
  const scope here(device_of(handle));
  CQSA_CUDA_TRY(here.status());
  CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
  CQSA_CUDA_TRY(check(driver().cuStreamIsCapturing(static_cast<CUstream>(stream), &capturing), "asking whether the stream is being captured"));
  if (capturing != CU_STREAM_CAPTURE_STATUS_NONE)
    return fail(CQSA_ERROR_INTERNAL, "%" PRIu64 " bytes of host memory were to be copied in a stream that is being captured", bytes);
  char piece[16 << 10];
  for (uint64_t done = 0; done < bytes; done += sizeof piece) {
    const uint64_t count = bytes - done < sizeof piece ? bytes - done : sizeof piece;
    std::memcpy(piece, static_cast<const char*>(from) + done, count);
    const CUdeviceptr at = reinterpret_cast<CUdeviceptr>(to) + done;
    CQSA_CUDA_TRY(check(driver().cuMemcpyHtoDAsync_v2(at, piece, count, static_cast<CUstream>(stream)), "uploading a list"));
  }
  return CQSA_OK;
}

cqsa_status encode_tensor(void* handle, const tensor_box& b, tensor_map* out) {
  static_assert(sizeof(tensor_map) == sizeof(CUtensorMap));
  const scope here(device_of(handle), scope::capture::as_is);
  CQSA_CUDA_TRY(here.status());
  const CUtensorMapDataType type = b.kind == kind_f16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : b.kind == kind_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                         : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const cuuint64_t size[4] = {b.size[0], b.size[1], b.size[2], b.size[3]}, stride[3] = {b.stride[0], b.stride[1], b.stride[2]};
  const cuuint32_t box[4] = {b.box[0], b.box[1], b.box[2], b.box[3]}, step[4] = {1, 1, 1, 1};
  CUtensorMap map;
  CQSA_CUDA_TRY(check(driver().cuTensorMapEncodeTiled(&map, type, 4, const_cast<void*>(b.data), size, stride, box, step,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "describing a tensor to the copy engine"));
  std::memcpy(out, &map, sizeof map);
  return CQSA_OK;
}

const device_facts& facts_of(void* handle) { return device_of(handle).facts; }

}  // namespace cqsa::gpu
