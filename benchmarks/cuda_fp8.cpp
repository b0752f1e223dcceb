// SPDX-License-Identifier: Apache-2.0
// FP8 quantization by itself on a CUDA device, for benchmarks/cuda_fp8.py: no plugin, no core. Kernels come from a folder of cubins, so
// that versions of them can be compared. docs/kernels/NOTES-fp8.md says how to build and run.
#include "backends/fp8_rules.h"
#include "backends/gpu/fp8.h"
#include "backends/gpu/port.h"
#include "dtype.h"

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <vector>

using namespace cqsa;
using namespace cqsa::gpu;

#define CHECK_CUDA(call)                                                                  \
  do {                                                                                    \
    const cudaError_t status_of_call = (call);                                            \
    if (status_of_call != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status_of_call)); \
      std::fflush(stdout);                                                                \
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
device_facts this_device{32, 0, 0, 90, 90};
int64_t launches = 0;

void take_kernels(cudaLibrary_t library, bool tell) {
  for (int i = 0; i < int(kernel_id::count); ++i) {
    cudaKernel_t kernel;
    if (cudaLibraryGetKernel(&kernel, library, names[i]) != cudaSuccess) continue;
    kernels[i] = kernel;
    cudaFuncAttributes a;
    CHECK_CUDA(cudaFuncGetAttributes(&a, (const void*)kernel));
    if (tell) std::printf("%s: %d registers, %zu bytes of local memory\n", names[i], a.numRegs, a.localSizeBytes);
  }
  cudaGetLastError();
}

}  // namespace

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
  void* argument = const_cast<void*>(params);
  ++launches;
  const cudaError_t error = cudaLaunchKernel((const void*)kernels[int(kernel)], dim3(s.grid[0], s.grid[1], s.grid[2]), dim3(s.threads), &argument,
                                             s.shared_bytes, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "%s: %s", names[int(kernel)], cudaGetErrorString(error));
}
cqsa_status upload(void*, void* to, const void* from, uint64_t bytes, void* stream) {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return CQSA_OK;
}
}  // namespace cqsa::gpu

// What the script says of a call; see class Job there.
struct bench_job {
  int64_t rows, columns, x_stride;
  void *x, *out, *turned;
  int32_t type, format, format_turned, source;  // type: 0 f32, 1 f16, 2 bf16; formats: 0 e4m3fn, 1 e5m2, 2 e4m3fnuz, 3 e5m2fnuz
  int64_t block[2], block_turned[2];            // 0: all
  float *scale_in, *scale_inv, *scale_inv_turned, *amax;
  int64_t* counters;
  int32_t* skip;
  void* ring;
  void* workspace;
  int32_t hist_len, flags, nan_policy, margin;
};

namespace {

constexpr cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
constexpr cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};

cqsa_scale_grid grid_for(const bench_job& b, const int64_t (&block)[2], float* data) {
  const int64_t high = block[0] ? std::min(block[0], b.rows) : b.rows, wide = block[1] ? std::min(block[1], b.columns) : b.columns;
  const int64_t rows = (b.rows + high - 1) / high, columns = (b.columns + wide - 1) / wide;
  return {data, CQSA_DTYPE_F32, CQSA_FP8_SCALES_STRIDED, {columns, 1}, rows, columns, {high, wide}};
}

cqsa_fp8_ring ring_of(const bench_job& b) {
  cqsa_fp8_ring r = CQSA_FP8_RING_INIT;
  r.state = b.ring, r.bytes = uint64_t(64 + 4 * b.hist_len), r.hist_len = b.hist_len, r.format = formats[b.format];
  return r;
}

cqsa_fp8_job job_of(const bench_job& b) {
  cqsa_fp8_job j{};
  j.batch = 1, j.rows = b.rows, j.columns = b.columns;
  j.x = {b.x, types[b.type], 0, {b.rows * b.x_stride, b.x_stride, 1}};
  if (b.out) j.row = {{b.out, formats[b.format], 0, {b.rows * b.columns, b.columns, 1}}, grid_for(b, b.block, b.scale_in), grid_for(b, b.block, nullptr), grid_for(b, b.block, b.scale_inv), 1, 0};
  if (b.turned)
    j.transposed = {{b.turned, formats[b.format_turned], 0, {b.rows, 1, b.rows}}, grid_for(b, b.block_turned, b.scale_in), grid_for(b, b.block_turned, nullptr),
                    grid_for(b, b.block_turned, b.scale_inv_turned), 1, 0};
  j.transposed.ratio = j.row.ratio = 1;
  j.source = b.source, j.amax = b.amax, j.counters = b.counters, j.counters_stride = 1, j.skip = b.skip, j.flags = uint32_t(b.flags), j.nan_policy = b.nan_policy, j.margin = b.margin;
  if (b.ring) j.ring = ring_of(b);
  return j;
}

uint8_t code_of(float x, int format, bool saturate) {
  if (format == 0) return f32_to_e4m3fn(x, saturate);
  if (format == 1) return f32_to_e5m2(x, saturate);
  return format == 2 ? f32_to_e4m3fnuz(x, saturate) : f32_to_e5m2fnuz(x, saturate);
}

uint32_t pattern(uint64_t i) {
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return uint32_t((z ^ (z >> 31)) >> 16);
}

template <class F> void in_threads(int64_t n, const F& f) {
  std::vector<std::thread> all;
  const int64_t count = std::max(1u, std::thread::hardware_concurrency());
  for (int64_t t = 0; t < count; ++t) all.emplace_back([=, &f] { f(n * t / count, n * (t + 1) / count, t); });
  for (std::thread& t : all) t.join();
}

// How many codes of these numbers are not the oracle's.
int64_t wrong_codes(void* x, uint8_t* codes, void* device_x, void* device_codes, int64_t n, int type, int format, bool saturate, float scale, float* device_scale) {
  const int64_t bytes = type == 0 ? 4 : 2;
  CHECK_CUDA(cudaMemcpy(device_x, x, size_t(n * bytes), cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemcpy(device_scale, &scale, 4, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaMemset(device_codes, 0xa5, size_t(n)));
  bench_job b{};
  b.rows = 1, b.columns = b.x_stride = n, b.x = device_x, b.out = device_codes, b.type = type, b.format = format, b.source = CQSA_FP8_STATIC, b.scale_in = device_scale;
  b.flags = saturate ? 0 : CQSA_FP8_NO_SATURATE;
  const cqsa_fp8_job j = job_of(b);
  const cqsa_fp8_quantize_leaf leaf{sizeof leaf, 0, &j, 1, {}};
  if (portable_fp8_quantize(nullptr, &leaf, nullptr, 0, nullptr, nullptr) != CQSA_OK) return n;
  CHECK_CUDA(cudaMemcpy(codes, device_codes, size_t(n), cudaMemcpyDeviceToHost));
  int64_t wrong[1024] = {};
  in_threads(n, [&](int64_t from, int64_t to, int64_t t) {
    for (int64_t i = from; i < to; ++i) {
      float y;
      if (type == 0) y = fp8::float_of(static_cast<uint32_t*>(x)[i]);
      else y = type == 1 ? f16_to_f32(static_cast<uint16_t*>(x)[i]) : bf16_to_f32(static_cast<uint16_t*>(x)[i]);
      const uint8_t want = code_of(y * scale, format, saturate);
      if (want != codes[i] && ++wrong[t] < 2) std::printf("type %d format %d x %08x: %02x, not %02x\n", type, format, fp8::bits_of(y), codes[i], want);
    }
  });
  int64_t all = 0;
  for (const int64_t w : wrong) all += w;
  return all;
}

}  // namespace

extern "C" {

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

int bench_quantize(const bench_job* jobs, int64_t count, uint64_t workspace_bytes, void* stream) {
  std::vector<cqsa_fp8_job> all;
  for (int64_t i = 0; i < count; ++i) all.push_back(job_of(jobs[i]));
  const cqsa_fp8_quantize_leaf leaf{sizeof leaf, 0, all.data(), count, {}};
  return portable_fp8_quantize(nullptr, &leaf, jobs[0].workspace, workspace_bytes, nullptr, stream);
}
int64_t bench_launches() { return launches; }

int bench_workspace_init(void* workspace, uint64_t bytes, void* stream) { return portable_fp8_workspace_init(nullptr, workspace, bytes, stream); }
int bench_ring_init(const bench_job* b, float amax, void* stream) {
  const cqsa_fp8_ring r = ring_of(*b);
  const cqsa_fp8_ring_leaf leaf{CQSA_FP8_RINGS_INIT, 0, &r, 1, nullptr, 0, amax, 0};
  return portable_fp8_rings(nullptr, &leaf, nullptr, stream);
}
// scale_of() of fp8_rules.h, for what the script expects.
float bench_scale(float amax, int format, int margin) { return fp8::scale_of(amax, {formats[format], margin, 0, 0, 0}).scale; }

int bench_dequantize(void* codes, int format, void* out, int type, int64_t rows, int64_t columns, float* scale_inv, void* stream) {
  bench_job b{};
  b.rows = rows, b.columns = columns;
  cqsa_fp8_dequantize_leaf a{};
  a.batch = 1, a.rows = rows, a.columns = columns;
  a.codes = {codes, formats[format], 0, {rows * columns, columns, 1}}, a.out = {out, types[type], 0, {rows * columns, columns, 1}};
  a.scale_inv = grid_for(b, b.block, scale_inv);
  return portable_fp8_dequantize(nullptr, &a, nullptr, stream);
}
int bench_transpose(void* x, void* out, int64_t rows, int64_t columns, void* stream) {
  const cqsa_fp8_transpose_leaf a{rows, columns, static_cast<uint8_t*>(x), static_cast<uint8_t*>(out), {columns, 1}, {1, rows}};
  return portable_fp8_transpose(nullptr, &a, nullptr, stream);
}

// Conversions against the oracle: all 16-bit numbers, and 2^samples patterns of f32; formats 0 and 1 twice, with and without saturation.
int64_t bench_conversions(int samples) {
  const int64_t n = int64_t(1) << 24;
  std::vector<uint32_t> x(static_cast<size_t>(n));
  std::vector<uint8_t> codes(static_cast<size_t>(n));
  void *device_x, *device_codes, *device_scale;
  CHECK_CUDA(cudaMalloc(&device_x, size_t(4 * n)));
  CHECK_CUDA(cudaMalloc(&device_codes, size_t(n)));
  CHECK_CUDA(cudaMalloc(&device_scale, 4));
  int64_t wrong = 0;
  const auto check = [&](int64_t count, int type, int format, bool saturate, float scale) {
    wrong += wrong_codes(x.data(), codes.data(), device_x, device_codes, count, type, format, saturate, scale, static_cast<float*>(device_scale));
  };
  for (int i = 0; i < 65536; ++i) reinterpret_cast<uint16_t*>(x.data())[i] = uint16_t(i);
  for (const int type : {1, 2})
    for (int format = 0; format < 4; ++format)
      for (const float scale : {1.0f, 0.37f, 1e-30f, 3e30f})
        for (const bool saturate : {true, false}) check(65536, type, format, saturate, scale);
  for (int64_t piece = 0; piece < int64_t(1) << samples; piece += n) {
    in_threads(n, [&](int64_t from, int64_t to, int64_t) {
      for (int64_t i = from; i < to; ++i) {
        const uint32_t r = pattern(uint64_t(piece + i));
        // Three quarters where codes differ: exponents around those of the formats.
        x[size_t(i)] = i % 4 == 0 ? r : (r & 0x807fffffu) | (127u - 20 + (r >> 23 & 0xffu) % 40) << 23;
      }
    });
    const int format = int(piece / n % 4);
    for (const bool saturate : {true, false}) check(n, 0, format, saturate, 1.0f), check(n, 0, format & 1, saturate, 1.0f);
  }
  CHECK_CUDA(cudaFree(device_x));
  CHECK_CUDA(cudaFree(device_codes));
  CHECK_CUDA(cudaFree(device_scale));
  std::fflush(stdout);
  return wrong;
}

}  // extern "C"
