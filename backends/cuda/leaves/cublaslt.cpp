// SPDX-License-Identifier: Apache-2.0
// FP8 products by NVIDIA's cuBLASLt where it is there: opened at run time like the driver, types from the toolkit's cublasLt.h. What it is asked
// for a shape, and the algorithm it names for that, are kept for each device from the first call of the shape on.
//
// It knows matrices with columns contiguous: our d [m, n] is its n x m, so that our b is its A and our a its B.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "backends/cuda/tuned.h"
#include "backends/gpu/fp8_gemm.h"
#include "backends/cuda/device.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define CQSA_HAVE_CUBLASLT 1
#endif

#include <dlfcn.h>

namespace cqsa::gpu {
namespace {

cqsa_status decline(const char* text, char* reason, uint64_t size) {
  if (reason && size) std::snprintf(reason, size, "%s", text);
  return CQSA_ERROR_UNSUPPORTED;
}
// No scratch memory: algorithms that split k are not asked for, so that every sum is the same in every run and calls may be captured.
uint64_t workspace(const cqsa_fp8_gemm_leaf*, int64_t) { return 0; }

#ifndef CQSA_HAVE_CUBLASLT

cqsa_status probe(void*, const cqsa_fp8_gemm_leaf*, char* reason, uint64_t size) {
  return decline("this build was made without cublasLt.h", reason, size);
}
cqsa_status launch_leaf(void*, const cqsa_fp8_gemm_leaf*, void*, uint64_t, const cqsa_exec*, void*) {
  return fail(CQSA_ERROR_UNSUPPORTED, "this build was made without cublasLt.h");
}

#else

// ------------------------------------------------------------------------------------------------------------ the library

#define CQSA_CUBLASLT_FUNCTIONS(X)                                                                                          \
  X(cublasLtGetVersion) X(cublasLtCreate) X(cublasLtMatmulDescInit_internal) X(cublasLtMatmulDescSetAttribute)              \
  X(cublasLtMatrixLayoutInit_internal) X(cublasLtMatrixLayoutSetAttribute) X(cublasLtMatmulPreferenceInit_internal)         \
  X(cublasLtMatmulPreferenceSetAttribute) X(cublasLtMatmulAlgoGetHeuristic) X(cublasLtMatmul)

struct cublaslt_api {
#define CQSA_CUBLASLT_MEMBER(name) decltype(&::name) name;
  CQSA_CUBLASLT_FUNCTIONS(CQSA_CUBLASLT_MEMBER)
#undef CQSA_CUBLASLT_MEMBER
  size_t version;
};

// One that the process has already comes first, so that there is only one; then by the loader's rules; then beside the plugin.
void* open_library() {
  constexpr const char* names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (const int mode : {RTLD_NOLOAD, 0})
    for (const char* name : names)
      if (void* found = dlopen(name, RTLD_NOW | RTLD_LOCAL | mode)) return found;
  Dl_info self{};
  if (!dladdr(reinterpret_cast<const void*>(&workspace), &self) || !self.dli_fname) return nullptr;
  const char* slash = std::strrchr(self.dli_fname, '/');
  for (const char* name : names) {
    char path[1024];
    if (!slash || std::snprintf(path, sizeof path, "%.*s/%s", int(slash - self.dli_fname), self.dli_fname, name) >= int(sizeof path)) continue;
    if (void* found = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return found;
  }
  return nullptr;
}

bool find_all(void* library, cublaslt_api* api) {
#define CQSA_CUBLASLT_FIND(name) \
  if (!(api->name = reinterpret_cast<decltype(api->name)>(dlsym(library, #name)))) return false;
  CQSA_CUBLASLT_FUNCTIONS(CQSA_CUBLASLT_FIND)
#undef CQSA_CUBLASLT_FIND
  api->version = api->cublasLtGetVersion();
  return api->version >= 120000;
}

// Plain data that stays: no destructor may run while another thread is still here.
constinit std::mutex library_lock;
constinit cublaslt_api the_api{};
constinit int library_state = 0;  // 0: not looked for, 1: there, 2: not there

// nullptr: it is not there.
const cublaslt_api* ensure_library() {
  const std::lock_guard hold(library_lock);
  if (library_state == 0) {
    void* library = open_library();  // never closed
    library_state = library && find_all(library, &the_api) ? 1 : 2;
  }
  return library_state == 1 ? &the_api : nullptr;
}

// -------------------------------------------------------------------------------------------------------------- problems

enum scale_mode : int32_t { scale_one = 0, scale_outer = 1, scale_128 = 2, scale_128x128 = 3, scale_other = 4 };

// All that decides what cuBLASLt is asked; compared as bytes.
struct request {
  int64_t m, n, k, batch;
  int64_t row[4], item[4];       // strides of a, b, c, d
  int32_t kind[4];               // c: of the layout that it is given also where beta is 0
  int32_t alignment[5];          // bytes of a, b, c, d and bias
  int32_t scale_a, scale_b;      // scale_mode
  int32_t has_scale[2], bias_kind, has_d_scale, fast, has_c;
};

cudaDataType type_of(int32_t kind) {
  switch (kind) {
    case gemm_f32: return CUDA_R_32F;
    case gemm_f16: return CUDA_R_16F;
    case gemm_bf16: return CUDA_R_16BF;
    default: return kind == gemm_e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3;
  }
}

int32_t alignment_of(const void* p) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p) | 256;
  return int32_t(bits & ~(bits - 1));
}

// As cuBLASLt wants them to lie: compact, 1x128 with the rows next to each other, 128x128 with four columns at a time.
scale_mode mode_of(const cqsa_scale_grid& g, int64_t rows, int64_t k) {
  if (!g.data || (g.block[0] >= rows && g.block[1] >= k)) return scale_one;
  if (g.block[0] == 1 && g.block[1] >= k) return g.stride[0] == 1 || rows == 1 ? scale_outer : scale_other;
  if (g.block[0] == 1 && g.block[1] == 128) return g.stride[0] == 1 && g.stride[1] == rows && rows % 4 == 0 ? scale_128 : scale_other;
  if (g.block[0] == 128 && g.block[1] == 128) return g.stride[1] == 1 && g.stride[0] == divide_up(g.columns, 4) * 4 ? scale_128x128 : scale_other;
  return scale_other;
}

const char* why_not_types(const cqsa_fp8_gemm_leaf& a) {
  const int32_t kind_a = gemm_kind_of(a.a.dtype), kind_b = gemm_kind_of(a.b.dtype), kind_d = gemm_kind_of(a.d.dtype);
  const auto code = [](int32_t kind) { return kind == gemm_e4m3fn || kind == gemm_e5m2; };
  if (!code(kind_a) || !code(kind_b)) return "a and b must be e4m3fn or e5m2";
  if (kind_a == gemm_e5m2 && kind_b == gemm_e5m2) return "e5m2 by e5m2 is not taken";
  if (kind_d < 0 || kind_d > gemm_e5m2 || (kind_d == gemm_e5m2 && kind_a == kind_b)) return "d is not of a type that goes with a and b";
  if (a.beta != 0 && (kind_d > gemm_bf16 ? a.c.dtype == CQSA_DTYPE_F32 : a.c.dtype != a.d.dtype)) return "c is not of a type that goes with d";
  if (a.bias && (kind_d == gemm_f16 ? a.bias_dtype != CQSA_DTYPE_F16 : kind_d <= gemm_bf16 ? a.bias_dtype != CQSA_DTYPE_BF16 : a.bias_dtype == CQSA_DTYPE_F32))
    return "bias is not of a type that goes with d";
  if (a.bias && a.beta != 0 && kind_d > gemm_bf16 && a.bias_dtype != a.c.dtype) return "bias and c are not of one type";
  if (a.d_amax) return "d_amax is not taken";
  return nullptr;
}

bool is_even(const cqsa_matrix& x, int64_t bytes, int64_t rows, int64_t columns, int64_t batch) {
  const auto even = [&](int64_t stride) { return stride * bytes % 16 == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (columns <= 1 || x.stride[2] == 1) && (rows <= 1 || (even(x.stride[1]) && x.stride[1] >= columns)) &&
         (batch <= 1 || even(x.stride[0]));
}
int64_t bytes_of_kind(int32_t kind) { return kind == gemm_f32 ? 4 : kind <= gemm_bf16 ? 2 : 1; }

bool lie_alike(const cqsa_fp8_gemm_leaf& a) {
  return a.c.dtype == a.d.dtype && (a.m <= 1 || a.c.stride[1] == a.d.stride[1]) && (a.batch <= 1 || a.c.stride[0] == a.d.stride[0]);
}

const char* why_not_sizes(const cqsa_fp8_gemm_leaf& a) {
  constexpr int64_t most = INT32_MAX;
  if (a.batch < 1 || a.m < 1 || a.n < 1 || a.k < 1) return "there is nothing to multiply";
  if (a.k % 16 != 0 || a.n % 16 != 0) return "k and n must be multiples of 16";
  if (a.m > most || a.n > most || a.k > most || a.batch > most) return "sizes are below 2^31";
  if (!is_even(a.a, 1, a.m, a.k, a.batch) || !is_even(a.b, 1, a.n, a.k, a.batch)) return "rows of codes must be contiguous and multiples of 16 bytes apart";
  if (!is_even(a.d, bytes_of_kind(gemm_kind_of(a.d.dtype)), a.m, a.n, a.batch) || (a.batch > 1 && a.d.stride[0] == 0)) return "rows of d must be contiguous and multiples of 16 bytes apart";
  if (a.beta != 0 && !is_even(a.c, bytes_of_kind(gemm_kind_of(a.c.dtype)), a.m, a.n, a.batch)) return "rows of c must be contiguous and multiples of 16 bytes apart";
  if (a.beta != 0 && a.c.data == a.d.data && !lie_alike(a)) return "c and d are one memory in two layouts";
  if (a.bias && a.n > 1 && a.bias_stride != 1) return "bias is not contiguous";
  return nullptr;
}

const char* why_not_scales(const cqsa_fp8_gemm_leaf& a, size_t version) {
  const scale_mode x = mode_of(a.scale_inv_a, a.m, a.k), y = mode_of(a.scale_inv_b, a.n, a.k);
  if (x == scale_other || y == scale_other) return "scales do not lie as cuBLASLt wants them";
  if (a.batch > 1 && (x != scale_one || y != scale_one || a.scale_batch_stride_a != 0 || a.scale_batch_stride_b != 0)) return "scales of a batch are not taken";
  if (x == scale_one && y == scale_one) return nullptr;
  const bool outer = x == scale_outer && y == scale_outer, blocks = x >= scale_128 && y >= scale_128 && !(x == scale_128x128 && y == scale_128x128);
  if (!outer && !blocks) return "scales of a and of b are of different kinds";
#if CUBLAS_VERSION >= 120900
  if (version < 120900) return "scales of rows and of blocks need cuBLASLt 12.9";
  return nullptr;
#else
  (void)version;
  return "this build was made for a cuBLASLt before 12.9, which has one scale only";
#endif
}

// A row of one is any distance from the next one.
int64_t row_stride(const cqsa_matrix& x, int64_t rows, int64_t columns) { return rows > 1 ? x.stride[1] : divide_up(columns, 16) * 16; }

request request_of(const cqsa_fp8_gemm_leaf& a) {
  request r;
  std::memset(&r, 0, sizeof r);
  r.m = a.m, r.n = a.n, r.k = a.k, r.batch = a.batch;
  r.has_c = a.beta != 0;
  const cqsa_matrix& c = r.has_c ? a.c : a.d;
  const cqsa_matrix* all[4] = {&a.a, &a.b, &c, &a.d};
  const int64_t rows[4] = {a.m, a.n, a.m, a.m}, columns[4] = {a.k, a.k, a.n, a.n};
  for (int i = 0; i < 4; ++i) {
    r.row[i] = row_stride(*all[i], rows[i], columns[i]);
    r.item[i] = a.batch > 1 ? all[i]->stride[0] : 0;
    r.kind[i] = gemm_kind_of(all[i]->dtype);
    r.alignment[i] = alignment_of(all[i]->data);
  }
  r.alignment[4] = alignment_of(a.bias);
  r.bias_kind = a.bias ? gemm_kind_of(a.bias_dtype) : -1;
  if (!r.has_c && r.kind[2] > gemm_bf16) r.kind[2] = a.bias ? r.bias_kind : gemm_bf16;
  r.scale_a = mode_of(a.scale_inv_a, a.m, a.k), r.scale_b = mode_of(a.scale_inv_b, a.n, a.k);
  r.has_scale[0] = a.scale_inv_a.data != nullptr, r.has_scale[1] = a.scale_inv_b.data != nullptr;
  r.has_d_scale = r.kind[3] > gemm_bf16 && a.d_scale;
  r.fast = a.accumulate == CQSA_FP8_FAST && r.scale_a < scale_128;
  return r;
}

// --------------------------------------------------------------------------------------------------------------- answers

// What cuBLASLt made of a request. Layouts of a, b, c, d.
struct answer {
  request asked;
  bool usable;
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t layout[4];
  cublasLtMatmulAlgo_t algorithm;
};

template <class T> bool set(const cublaslt_api& api, cublasLtMatmulDescOpaque_t& d, cublasLtMatmulDescAttributes_t what, const T& value) {
  return api.cublasLtMatmulDescSetAttribute(&d, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}
template <class T> bool set(const cublaslt_api& api, cublasLtMatrixLayoutOpaque_t& l, cublasLtMatrixLayoutAttribute_t what, const T& value) {
  return api.cublasLtMatrixLayoutSetAttribute(&l, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}
template <class T> bool set(const cublaslt_api& api, cublasLtMatmulPreferenceOpaque_t& p, cublasLtMatmulPreferenceAttributes_t what, const T& value) {
  return api.cublasLtMatmulPreferenceSetAttribute(&p, what, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}

bool make_layouts(const cublaslt_api& api, answer& x) {
  const request& r = x.asked;
  const int64_t rows[4] = {r.m, r.n, r.m, r.m}, columns[4] = {r.k, r.k, r.n, r.n};
  for (int i = 0; i < 4; ++i) {
    cublasLtMatrixLayoutOpaque_t& l = x.layout[i];
    const auto status = api.cublasLtMatrixLayoutInit_internal(&l, sizeof l, type_of(r.kind[i]), uint64_t(columns[i]), uint64_t(rows[i]), r.row[i]);
    if (status != CUBLAS_STATUS_SUCCESS) return false;
    if (r.batch > 1 && !(set(api, l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t(r.batch)) && set(api, l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, r.item[i])))
      return false;
  }
  return true;
}

#if CUBLAS_VERSION >= 120900
int32_t mode_value(int32_t mode) {
  return mode == scale_outer ? CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
         : mode == scale_128 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                             : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}
bool set_scale_modes(const cublaslt_api& api, answer& x) {
  const request& r = x.asked;
  return (r.scale_b == scale_one || set(api, x.operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode_value(r.scale_b))) &&
         (r.scale_a == scale_one || set(api, x.operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode_value(r.scale_a)));
}
#else
bool set_scale_modes(const cublaslt_api&, answer& x) { return x.asked.scale_a == scale_one && x.asked.scale_b == scale_one; }
#endif

bool make_operation(const cublaslt_api& api, answer& x) {
  const request& r = x.asked;
  if (api.cublasLtMatmulDescInit_internal(&x.operation, sizeof x.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS) return false;
  bool good = set(api, x.operation, CUBLASLT_MATMUL_DESC_TRANSA, int32_t(CUBLAS_OP_T)) && set(api, x.operation, CUBLASLT_MATMUL_DESC_TRANSB, int32_t(CUBLAS_OP_N)) &&
              set(api, x.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(r.fast)) && set_scale_modes(api, x);
  if (good && r.bias_kind >= 0)
    good = set(api, x.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, int32_t(CUBLASLT_EPILOGUE_BIAS)) &&
           set(api, x.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(type_of(r.bias_kind)));
  return good;
}

bool set_pointers(const cublaslt_api& api, cublasLtMatmulDescOpaque_t& d, const request& r, const cqsa_fp8_gemm_leaf& a) {
  const void *of_a = a.scale_inv_a.data, *of_b = a.scale_inv_b.data, *of_d = a.d_scale;
  return (!r.has_scale[1] || set(api, d, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_b)) && (!r.has_scale[0] || set(api, d, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_a)) &&
         (!r.has_d_scale || set(api, d, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, of_d)) &&
         (r.bias_kind < 0 || set(api, d, CUBLASLT_MATMUL_DESC_BIAS_POINTER, a.bias));
}

bool find_algorithm(const cublaslt_api& api, cublasLtHandle_t handle, answer& x) {
  cublasLtMatmulPreferenceOpaque_t wish;
  if (api.cublasLtMatmulPreferenceInit_internal(&wish, sizeof wish) != CUBLAS_STATUS_SUCCESS) return false;
  const request& r = x.asked;
  const bool good = set(api, wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(0)) &&
                    set(api, wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE)) &&
                    set(api, wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(r.alignment[1])) &&
                    set(api, wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(r.alignment[0])) &&
                    set(api, wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(r.alignment[2])) &&
                    set(api, wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(r.alignment[3]));
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  if (!good || api.cublasLtMatmulAlgoGetHeuristic(handle, &x.operation, &x.layout[1], &x.layout[0], &x.layout[2], &x.layout[3], &wish, 1, &result, &count) !=
                   CUBLAS_STATUS_SUCCESS)
    return false;
  x.algorithm = result.algo;
  return count > 0 && result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize == 0;
}

constexpr int most_devices = 64, most_answers = 64;
struct device_answers {
  std::mutex lock;
  cublasLtHandle_t handle;
  bool no_handle;
  int count, next;
  answer answers[most_answers];
};
constinit device_answers* by_device[most_devices] = {};
constinit std::mutex by_device_lock;

device_answers* answers_of(int32_t index) {
  if (index < 0 || index >= most_devices) return nullptr;
  const std::lock_guard hold(by_device_lock);
  if (!by_device[index]) by_device[index] = new (std::nothrow) device_answers{};  // stays
  return by_device[index];
}

// False: cuBLASLt does not take it.
bool ask(void* device, const cublaslt_api& api, const cqsa_fp8_gemm_leaf& a, answer* out, cublasLtHandle_t* handle) {
  device_answers* const known = answers_of(cuda::device_of(device).index);
  if (!known) return false;
  const request r = request_of(a);
  const std::lock_guard hold(known->lock);
  *handle = known->handle;
  for (int i = 0; i < known->count; ++i)
    if (std::memcmp(&known->answers[i].asked, &r, sizeof r) == 0) return *out = known->answers[i], out->usable;
  if (!known->handle && !known->no_handle) known->no_handle = api.cublasLtCreate(&known->handle) != CUBLAS_STATUS_SUCCESS;
  if (known->no_handle) return false;
  answer& x = known->answers[known->next];
  x = answer{};
  x.asked = r;
  x.usable = make_layouts(api, x) && make_operation(api, x) && set_pointers(api, x.operation, r, a) && find_algorithm(api, known->handle, x);
  known->next = (known->next + 1) % most_answers;
  if (known->count < most_answers) ++known->count;
  *out = x, *handle = known->handle;
  return x.usable;
}

// ------------------------------------------------------------------------------------------------------------ probe, launch

const char* why_not(void* device, const cqsa_fp8_gemm_leaf& a, const cublaslt_api** api_out) {
  if (a.chip.tier < 80 || (device && facts_of(device).arch < 89)) return "cuBLASLt has FP8 from sm_89 on";
  const char* text = why_not_types(a);
  if (!text) text = why_not_sizes(a);
  if (text) return text;
  *api_out = ensure_library();
  if (!*api_out) return "libcublasLt.so.13 or .12 is not there";
  return why_not_scales(a, (*api_out)->version);
}

cqsa_status probe(void* device, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  const cublaslt_api* api = nullptr;
  if (const char* text = why_not(device, *leaf, &api)) return decline(text, reason, size);
  if (!device) return CQSA_OK;
  const cuda::scope here(cuda::device_of(device));
  if (here.status() != CQSA_OK) return decline("the device's context cannot be entered", reason, size);
  answer x;
  cublasLtHandle_t handle = nullptr;
  return ask(device, *api, *leaf, &x, &handle) ? CQSA_OK : decline("cuBLASLt names no algorithm for it", reason, size);
}

// No probe asks for this shape again.
void forget(void* device, const request& asked) {
  device_answers* const known = answers_of(cuda::device_of(device).index);
  const std::lock_guard hold(known->lock);
  for (int i = 0; i < known->count; ++i)
    if (std::memcmp(&known->answers[i].asked, &asked, sizeof asked) == 0) known->answers[i].usable = false;
}

// The next one of the list that takes it. It has no workspace, which was asked for this one: only d_amax needs any.
cqsa_status launch_next(void* device, const cqsa_fp8_gemm_leaf* leaf, const cqsa_exec* exec, void* stream) {
  for (const cqsa_fp8_gemm_impl* next : {&sm90_fp8_gemm, &sm80_fp8_gemm})
    if (next->probe(device, leaf, nullptr, 0) == CQSA_OK) return next->launch(device, leaf, nullptr, 0, exec, stream);
  return portable_fp8_gemm.launch(device, leaf, nullptr, 0, exec, stream);
}

// cublasLtMatmul() looks at more than the heuristic does, before it queues anything.
bool is_refusal(cublasStatus_t s) { return s == CUBLAS_STATUS_INVALID_VALUE || s == CUBLAS_STATUS_NOT_SUPPORTED; }

// Without c: d is that only if both are of one layout. cuBLASLt refuses one address with two.
const void* c_of(const request& r, const cqsa_fp8_gemm_leaf& a) { return r.has_c ? a.c.data : r.kind[2] == r.kind[3] ? a.d.data : nullptr; }

cqsa_status launch_leaf(void* device, const cqsa_fp8_gemm_leaf* leaf, void*, uint64_t, const cqsa_exec* exec, void* stream) {
  const cqsa_fp8_gemm_leaf& a = *leaf;
  const cublaslt_api* api = nullptr;
  if (const char* text = why_not(device, a, &api)) return fail(CQSA_ERROR_UNSUPPORTED, "%s", text);
  const cuda::scope here(cuda::device_of(device));
  if (here.status() != CQSA_OK) return here.status();
  answer x;
  cublasLtHandle_t handle = nullptr;
  if (!ask(device, *api, a, &x, &handle) || !set_pointers(*api, x.operation, x.asked, a)) return fail(CQSA_ERROR_UNSUPPORTED, "cuBLASLt names no algorithm for it");
  const float alpha = a.alpha == 0 ? 1.0f : float(a.alpha), beta = float(a.beta);
  const void* c = c_of(x.asked, a);
  const cublasStatus_t status = api->cublasLtMatmul(handle, &x.operation, &alpha, a.b.data, &x.layout[1], a.a.data, &x.layout[0], &beta, c, &x.layout[2], a.d.data,
                                                    &x.layout[3], &x.algorithm, nullptr, 0, static_cast<cudaStream_t>(stream));
  if (is_refusal(status)) {
    forget(device, x.asked);
    return launch_next(device, leaf, exec, stream);
  }
  return status == CUBLAS_STATUS_SUCCESS ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "cublasLtMatmul failed with status %d", int(status));
}

#endif

}  // namespace

extern const cqsa_fp8_gemm_impl cublaslt_fp8_gemm = {
    "cuda_cublaslt", "cuBLASLt on sm_89 and newer; k and n multiples of 16, k contiguous", CQSA_FP8_PROVIDER_VENDOR, 0, probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
