// SPDX-License-Identifier: Apache-2.0
// The FP8 products of the CUDA plugin by themselves on a device, for benchmarks/cuda_fp8_gemm.py: no core. Kernels come from a folder of cubins.
// docs/kernels/NOTES-fp8-gemm.md says how to build and run.
#include "backends/cuda/device.h"
#include "backends/cuda/error.h"
#include "backends/cuda/tuned.h"
#include "backends/gpu/fp8_gemm.h"

#include "benchmarks/cuda_cubins.h"

#include <cstring>

using namespace cqsa;
using namespace cqsa::gpu;

using bench::this_device;

namespace {

char fake_device[sizeof(cuda::device)];  // the handle: nobody here looks into it

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

extern "C" {

// Kernels of every cubin of the folder, in place of those of the same name that were there.
void bench_load(const char* folder, int tell) {
  if (this_device.arch == 0) bench::open_device(90);
  bench::load_folder(folder, tell != 0);
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
  bench::last_kernel = "";
  const cqsa_status status = impl->launch(fake_device, &x, call->workspace, call->workspace_bytes, nullptr, stream);
  return status == CQSA_OK ? 0 : 16 + int(status);
}

// The kernel that the last call ran.
const char* bench_last_kernel() { return bench::last_kernel; }

}  // extern "C"
