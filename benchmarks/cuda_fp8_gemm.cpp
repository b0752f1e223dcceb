// SPDX-License-Identifier: Apache-2.0
// The FP8 products of the CUDA plugin by themselves on a device, for benchmarks/cuda_fp8_gemm.py: no core. Kernels come from a folder of cubins.
// docs/kernels/NOTES-fp8-gemm.md says how to build and run.
#include "backends/cuda/device.h"
#include "backends/cuda/error.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/fp8_gemm.h"

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <filesystem>

using namespace cqsa;
using namespace cqsa::gpu;

#define CHECK_CUDA(call)                                                                  \
  do {                                                                                    \
    const cudaError_t status_of_call = (call);                                            \
    if (status_of_call != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_of_call)); \
      std::exit(2);                                                                       \
    }                                                                                     \
  } while (0)

namespace {

constexpr const char* names[] = {
#define CQSA_KERNEL_NAME(name, threads, tier) #name,
    CQSA_ALL_KERNELS(CQSA_KERNEL_NAME)
#undef CQSA_KERNEL_NAME
};
cudaKernel_t kernels[int(kernel_id::count)];
const char* last_kernel = "";
device_facts this_device{32, 0, 0, 90, 90};
char fake_device[sizeof(cuda::device)];  // the handle: nobody here looks into it

void take_kernels(cudaLibrary_t library, bool tell) {
  for (int i = 0; i < int(kernel_id::count); ++i) {
    cudaKernel_t kernel;
    if (cudaLibraryGetKernel(&kernel, library, names[i]) != cudaSuccess) continue;
    kernels[i] = kernel;
    CHECK_CUDA(cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, this_device.shared_bytes, 0));
    cudaFuncAttributes a;
    CHECK_CUDA(cudaFuncGetAttributes(&a, (const void*)kernel));
    if (tell) std::printf("%s: %d registers, %zu bytes of local memory\n", names[i], a.numRegs, a.localSizeBytes);
  }
  cudaGetLastError();
}

}  // namespace

// What cublaslt.cpp takes from the plugin: torch has made the context, and it is current.
namespace cqsa::cuda {
const driver_api& driver() {
  static driver_api none{};
  return none;
}
scope::scope(CUcontext, capture) : status_(CQSA_OK), exemption_(false) {}
scope::~scope() {}
}  // namespace cqsa::cuda

namespace cqsa::gpu {
cqsa_status fail(cqsa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::printf("\n");
  return status;
}
const device_facts& facts_of(void*) { return this_device; }
cqsa_status launch(void*, kernel_id kernel, const launch_shape& s, const void* params, size_t, void* stream) {
  if (!kernels[int(kernel)]) return fail(CQSA_ERROR_INTERNAL, "no kernel %s", names[int(kernel)]);
  last_kernel = names[int(kernel)];
  void* argument = const_cast<void*>(params);
  const cudaError_t error = cudaLaunchKernel((const void*)kernels[int(kernel)], dim3(s.grid[0], s.grid[1], s.grid[2]), dim3(s.threads), &argument,
                                             s.shared_bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "%s: %s", names[int(kernel)], cudaGetErrorString(error));
}
cqsa_status encode_tensor(void*, const tensor_box& b, tensor_map* out) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (!encode) CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, cudaEnableDefault, &found));
  const cuuint64_t size[4] = {b.size[0], b.size[1], b.size[2], b.size[3]}, stride[3] = {b.stride[0], b.stride[1], b.stride[2]};
  const cuuint32_t box[4] = {b.box[0], b.box[1], b.box[2], b.box[3]}, step[4] = {1, 1, 1, 1};
  const CUresult error = encode(reinterpret_cast<CUtensorMap*>(out), CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(b.data), size, stride, box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "cuTensorMapEncodeTiled: %d", int(error));
}
cqsa_status upload(void*, void* to, const void* from, uint64_t bytes, void* stream) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return CQSA_OK;
}
}  // namespace cqsa::gpu

extern "C" {

// Kernels of every cubin of the folder, in place of those of the same name that were there.
void bench_load(const char* folder, int tell) {
  cudaDeviceProp prop;
  CHECK_CUDA(cudaGetDeviceProperties(&prop, 0));
  this_device.compute_units = prop.multiProcessorCount;
  this_device.shared_bytes = int32_t(prop.sharedMemPerBlockOptin);
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() != ".cubin") continue;
    cudaLibrary_t library;
    CHECK_CUDA(cudaLibraryLoadFromFile(&library, file.path().c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    take_kernels(library, tell != 0);
  }
}

// A call, as benchmarks/cuda_fp8_gemm.py lays it out. Types are numbered as gemm_kind.
struct bench_call {
  int64_t batch, m, n, k;
  void* data[4];  // a, b, c, d
  int64_t stride[4][3];
  int32_t type[4];
  float* scale[2];
  int64_t scale_stride[2][3];  // batch, row, k
  int64_t block[2][2];
  void* bias;
  int64_t bias_stride;
  int32_t bias_type, accumulate;
  float *d_scale, *d_amax;
  double alpha, beta;
  void* workspace;
  uint64_t workspace_bytes;
};

static cqsa_dtype type_of(int32_t kind) {
  constexpr cqsa_dtype types[] = {CQSA_DTYPE_F32,    CQSA_DTYPE_F16,        CQSA_DTYPE_BF16,      CQSA_DTYPE_E4M3FN,
                                  CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
  return types[kind];
}

static cqsa_fp8_gemm_leaf leaf_of(const bench_call& c) {
  cqsa_fp8_gemm_leaf x{};
  x.struct_size = sizeof x, x.accumulate = c.accumulate, x.batch = c.batch, x.m = c.m, x.n = c.n, x.k = c.k;
  cqsa_matrix* all[4] = {&x.a, &x.b, &x.c, &x.d};
  for (int i = 0; i < 4; ++i) *all[i] = {c.data[i], type_of(c.type[i]), 0, {c.stride[i][0], c.stride[i][1], c.stride[i][2]}};
  cqsa_scale_grid* grids[2] = {&x.scale_inv_a, &x.scale_inv_b};
  int64_t* batch_strides[2] = {&x.scale_batch_stride_a, &x.scale_batch_stride_b};
  for (int i = 0; i < 2; ++i) {
    if (!c.scale[i]) continue;
    const int64_t rows = i ? c.n : c.m, size[2] = {rows, c.k};
    int64_t block[2];
    for (int j = 0; j < 2; ++j) block[j] = larger(1, c.block[i][j] ? smaller(c.block[i][j], size[j]) : size[j]);
    *grids[i] = {c.scale[i], CQSA_DTYPE_F32, 0, {c.scale_stride[i][1], c.scale_stride[i][2]}, divide_up(rows, block[0]), divide_up(c.k, block[1]), {block[0], block[1]}};
    *batch_strides[i] = c.scale_stride[i][0];
  }
  x.bias = c.bias, x.bias_dtype = type_of(c.bias_type), x.bias_stride = c.bias_stride, x.d_scale = c.d_scale, x.d_amax = c.d_amax;
  x.alpha = c.alpha, x.beta = c.beta;
  x.chip = {this_device.tier, this_device.compute_units, this_device.shared_bytes, 0};
  return x;
}

static const cqsa_fp8_gemm_impl* impl_of(const char* name) {
  if (std::strcmp(name, "cublaslt") == 0) return &cublaslt_fp8_gemm;
  if (std::strcmp(name, "f16") == 0) return &sm80_fp8_gemm;
  return std::strcmp(name, "sm90") == 0 ? &sm90_fp8_gemm : std::strcmp(name, "portable") == 0 ? &portable_fp8_gemm : nullptr;
}

// 0: queued, 1: declined, with the reason; 2: there is no such implementation.
int bench_gemm(const char* name, const bench_call* call, void* stream, char* reason, uint64_t size) {
  const cqsa_fp8_gemm_impl* impl = impl_of(name);
  if (!impl) return 2;
  const cqsa_fp8_gemm_leaf x = leaf_of(*call);
  if (size > 0 && impl->probe(fake_device, &x, reason, size) != CQSA_OK) return 1;
  const cqsa_status status = impl->launch(fake_device, &x, call->workspace, call->workspace_bytes, nullptr, stream);
  return status == CQSA_OK ? 0 : 16 + int(status);
}

// The kernel that the last call ran.
const char* bench_last_kernel() { return last_kernel; }

}  // extern "C"
