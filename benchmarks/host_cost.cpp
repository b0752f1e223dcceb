// SPDX-License-Identifier: Apache-2.0
// Host time of a call in enqueue mode on CUDA, beside what the driver itself takes: an empty kernel, and every question that a
// call asks it. Needs only the two libraries and a driver:
//   bench_host_cost libcqsa.so libcqsa_cuda.so
// Some calls are queued, timed, and waited for outside the timing; medians of many such batches. On the stand-in for the
// driver (tests/cuda) it shows what is left of ours.
#include <cuda.h>
#include <dlfcn.h>
#undef cuStreamGetCaptureInfo

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "backends/cqsa_backend.h"

namespace {

void* libcuda = nullptr;
void* libcqsa = nullptr;
CUcontext primary = nullptr;
CUstream stream = nullptr;  // the "a stream" of the table

// By name, nullptr where the library has no such function.
template <class Function> Function* find(void* library, const char* name) { return reinterpret_cast<Function*>(dlsym(library, name)); }

#define CU(name) find<decltype(::name)>(libcuda, #name)
#define CQSA(name) find<decltype(::name)>(libcqsa, #name)

void die(const char* what, const char* why) {
  std::printf("%s: %s\n", what, why);
  std::exit(2);
}

void must(cqsa_status status) {
  if (status != CQSA_OK) die("libcqsa", CQSA(cqsa_last_error)());
}

void must(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) die(what, std::to_string(static_cast<int>(result)).c_str());
}

// Short batches: a driver holds about a thousand launches, and then waits.
constexpr int batches = 61, calls_each = 128;

void wait_for_device() {
  const auto wait = CU(cuStreamSynchronize);
  CUcontext before = nullptr;
  must(CU(cuCtxGetCurrent)(&before), "cuCtxGetCurrent");
  must(CU(cuCtxSetCurrent)(primary), "cuCtxSetCurrent");
  for (const CUstream s : {CUstream{nullptr}, stream}) must(wait(s), "waiting");
  must(CU(cuCtxSetCurrent)(before), "cuCtxSetCurrent");
}

template <class F> double microseconds(F&& call) {
  std::vector<double> taken;
  for (int b = 0; b < batches; ++b) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls_each; ++i) call();
    taken.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / calls_each);
    wait_for_device();
  }
  std::nth_element(taken.begin(), taken.begin() + batches / 2, taken.end());
  return taken[batches / 2];
}

template <class F> void row(const char* name, F&& call) { std::printf("%-84s %8.3f\n", name, microseconds(call)), std::fflush(stdout); }

void absent(const char* name) { std::printf("%-84s %8s\n", name, "-"); }

// ---- the driver's own part --------------------------------------------------------------------------------------------------

constexpr char ptx[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry empty() { ret; }
.visible .entry empty_256(.param .align 8 .b8 p[256]) { ret; }
.visible .entry empty_1024(.param .align 8 .b8 p[1024]) { ret; }
)";

void measure_launches() {
  const auto load = CU(cuModuleLoadData);
  const auto get = CU(cuModuleGetFunction);
  const auto launch = CU(cuLaunchKernel);
  const auto launch_ex = CU(cuLaunchKernelEx);
  if (load == nullptr || get == nullptr) return absent("cuLaunchKernel of an empty kernel");
  CUmodule module = nullptr;
  must(load(&module, ptx), "cuModuleLoadData");
  const auto function = [&](const char* name) {
    CUfunction f = nullptr;
    must(get(&f, module, name), name);
    return f;
  };
  const CUfunction none = function("empty"), some = function("empty_256"), many = function("empty_1024");
  static char params[1024] = {};
  void* arguments[] = {params};
  const auto plain = [&](CUfunction f, CUstream s) { return launch(f, 8, 1, 1, 256, 1, 1, 0, s, arguments, nullptr); };
  row("cuLaunchKernel, empty kernel, no parameters, NULL stream", [&] { must(plain(none, nullptr), "launch"); });
  row("cuLaunchKernel, empty kernel, no parameters, a stream", [&] { must(plain(none, stream), "launch"); });
  row("cuLaunchKernel, empty kernel, 256 bytes of parameters, NULL stream", [&] { must(plain(some, nullptr), "launch"); });
  row("cuLaunchKernel, empty kernel, 1024 bytes of parameters, NULL stream", [&] { must(plain(many, nullptr), "launch"); });
  size_t bytes = sizeof params;
  void* packed[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, params, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  row("cuLaunchKernel, the same, parameters as one buffer", [&] { must(launch(many, 8, 1, 1, 256, 1, 1, 0, nullptr, nullptr, packed), "launch"); });
  if (launch_ex == nullptr) return absent("cuLaunchKernelEx");
  CUlaunchConfig config = {};
  config.gridDimX = 8, config.gridDimY = config.gridDimZ = 1, config.blockDimX = 256, config.blockDimY = config.blockDimZ = 1;
  row("cuLaunchKernelEx, the same", [&] { must(launch_ex(&config, many, arguments, nullptr), "launch"); });
  row("cuLaunchKernelEx, parameters as one buffer", [&] { must(launch_ex(&config, many, nullptr, packed), "launch"); });
  row("cuLaunchKernel again, 1024 bytes of parameters, NULL stream", [&] { must(plain(many, nullptr), "launch"); });
}

void measure_contexts() {
  const auto push = find<CUresult(CUcontext)>(libcuda, "cuCtxPushCurrent_v2");
  const auto pop = find<CUresult(CUcontext*)>(libcuda, "cuCtxPopCurrent_v2");
  CUcontext out = nullptr;
  row("cuCtxPushCurrent and cuCtxPopCurrent", [&] { push(primary), pop(&out); });
  const auto current = CU(cuCtxGetCurrent);
  row("cuCtxGetCurrent", [&] { current(&out); });
}

void measure_stream_questions() {
  const auto capturing = CU(cuStreamIsCapturing);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  row("cuStreamIsCapturing, NULL stream", [&] { capturing(nullptr, &status); });
  row("cuStreamIsCapturing, a stream", [&] { capturing(stream, &status); });
  CUcontext context = nullptr;
  const auto context_of = find<CUresult(CUstream, CUcontext*)>(libcuda, "cuStreamGetCtx");
  row("cuStreamGetCtx, a stream", [&] { context_of(stream, &context); });
  unsigned long long id = 0;
  const auto id_of = find<CUresult(CUstream, unsigned long long*)>(libcuda, "cuStreamGetId");
  id_of ? row("cuStreamGetId, a stream", [&] { id_of(stream, &id); }) : absent("cuStreamGetId, a stream");
  CUdevice device = 0;
  const auto device_of = find<CUresult(CUstream, CUdevice*)>(libcuda, "cuStreamGetDevice");
  device_of ? row("cuStreamGetDevice, a stream", [&] { device_of(stream, &device); }) : absent("cuStreamGetDevice, a stream");
}

void measure_pointer_questions(CUdeviceptr memory) {
  const auto many = CU(cuPointerGetAttributes);
  const auto one = CU(cuPointerGetAttribute);
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
  uint64_t answers[5] = {};
  void* places[] = {&answers[0], &answers[1], &answers[2], &answers[3], &answers[4]};
  for (const unsigned count : {1u, 2u, 3u, 5u}) {
    char name[64];
    std::snprintf(name, sizeof name, "cuPointerGetAttributes, %u", count);
    row(name, [&] { must(many(count, wanted, places, memory), "cuPointerGetAttributes"); });
  }
  const struct { const char* name; CUpointer_attribute which; } single[] = {
      {"cuPointerGetAttribute, type of memory", CU_POINTER_ATTRIBUTE_MEMORY_TYPE},
      {"cuPointerGetAttribute, device", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL},
      {"cuPointerGetAttribute, number of the buffer", CU_POINTER_ATTRIBUTE_BUFFER_ID}};
  for (const auto& s : single)
    one ? row(s.name, [&] { one(&answers[0], s.which, memory); }) : absent(s.name);
  const auto range = find<CUresult(CUdeviceptr*, size_t*, CUdeviceptr)>(libcuda, "cuMemGetAddressRange_v2");
  CUdeviceptr start = 0;
  size_t size = 0;
  range ? row("cuMemGetAddressRange", [&] { range(&start, &size, memory); }) : absent("cuMemGetAddressRange");
}

// ---- operands ---------------------------------------------------------------------------------------------------------------

CUdeviceptr allocate(size_t bytes) {
  CUdeviceptr out = 0;
  must(find<CUresult(CUdeviceptr*, size_t)>(libcuda, "cuMemAlloc_v2")(&out, bytes), "cuMemAlloc");
  return out;
}

struct shape {
  const char* name;
  int64_t batch, heads, queries, keys, dim;
};

// f16, contiguous, every operand an allocation of its own or all of them in one, as torch's allocator has them.
struct operands {
  int64_t q_shape[4], k_shape[4];
  cqsa_tensor q, k, v, out;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;

  operands(const shape& s, bool together) : q_shape{s.batch, s.heads, s.queries, s.dim}, k_shape{s.batch, s.heads, s.keys, s.dim} {
    const size_t q_bytes = size_t(2 * s.batch * s.heads * s.queries * s.dim), k_bytes = size_t(2 * s.batch * s.heads * s.keys * s.dim);
    CUdeviceptr next = together ? allocate(2 * (q_bytes + k_bytes)) : 0;
    const auto tensor = [&](int64_t* sizes, size_t bytes) {
      const CUdeviceptr at = together ? next : allocate(bytes);
      next += bytes;
      return cqsa_tensor{reinterpret_cast<void*>(at), CQSA_DEVICE_CUDA, 0, 4, CQSA_DTYPE_F16, sizes, nullptr, 0};
    };
    q = tensor(q_shape, q_bytes);
    k = tensor(k_shape, k_bytes);
    v = tensor(k_shape, k_bytes);
    out = tensor(q_shape, q_bytes);
    args.q = &q, args.k = &k, args.v = &v, args.out = &out;
  }
  operands(const operands&) = delete;
};

cqsa_view view_of(const cqsa_tensor& t) {
  const int64_t* n = t.shape;
  return {t.data, t.dtype, 0, {n[1] * n[2] * n[3], n[2] * n[3], n[3], 1}};
}

cqsa_attention_leaf leaf_of(const operands& o) {
  cqsa_attention_leaf leaf = {};
  leaf.struct_size = sizeof leaf;
  leaf.batch = o.q_shape[0];
  leaf.num_heads = leaf.num_kv_heads = o.q_shape[1];
  leaf.seqlen_q = o.q_shape[2];
  leaf.seqlen_k = o.k_shape[2];
  leaf.head_dim = leaf.head_dim_v = o.q_shape[3];
  leaf.q = view_of(o.q), leaf.k = view_of(o.k), leaf.v = view_of(o.v), leaf.out = view_of(o.out);
  leaf.softmax_scale = 0.125;
  leaf.window_left = leaf.window_right = -1;
  return leaf;
}

// ---- the plugin and the library ---------------------------------------------------------------------------------------------

const cqsa_backend_v1& open_plugin(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) die(path, dlerror());
  const auto entry = reinterpret_cast<cqsa_backend_entry_fn>(dlsym(library, CQSA_BACKEND_ENTRY));
  const cqsa_host_v1 host = {sizeof host, CQSA_ABI_VERSION, ""};
  const cqsa_backend_v1* backend = nullptr;
  if (entry != nullptr) entry(&host, &backend);  // another build's id, but the struct is there all the same
  if (backend == nullptr) die(path, "no backend");
  return *backend;
}

void measure_plugin(const cqsa_backend_v1& backend, const operands& o) {
  void* device = nullptr;
  if (backend.device_open(0, &device) != CQSA_OK) die("device_open", backend.last_error());
  const cqsa_attention_impl* impl = nullptr;
  cqsa_attention_leaf leaf = leaf_of(o);
  char reason[256];
  for (int32_t i = backend.num_attention; i-- > 0;)
    if (backend.attention[i].probe(&leaf, reason, sizeof reason) == CQSA_OK) impl = &backend.attention[i];
  if (impl == nullptr) die("probe", reason);
  cqsa_leaf_tile tile = {};
  impl->tiles(&leaf, &tile, 1);
  leaf.tile_q = tile.tile_q, leaf.tile_k = tile.tile_k;
  int32_t capturing = 0;
  cqsa_pointer_info info = {};
  char name[80];
  std::snprintf(name, sizeof name, "plugin: launch of %s", impl->name);
  row(name, [&] { impl->launch(device, &leaf, nullptr, 0, nullptr, nullptr); });
  row("plugin: stream_query, NULL stream", [&] { backend.stream_query(device, nullptr, &capturing); });
  row("plugin: stream_query, a stream", [&] { backend.stream_query(device, stream, &capturing); });
  row("plugin: pointer_query", [&] { backend.pointer_query(device, o.q.data, &info); });
  backend.device_close(device);
}

cqsa_context* open_context(const char* plugin) {
  const std::string folder = std::filesystem::absolute(plugin).parent_path();
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = "cuda";
  params.backend_path = folder.c_str();
  cqsa_context* context = nullptr;
  must(CQSA(cqsa_context_create)(&params, &context));
  return context;
}

void measure_calls(cqsa_context* context, const shape& s, bool together, CUstream on) {
  operands o(s, together);
  cqsa_attention_params bare = CQSA_ATTENTION_PARAMS_INIT, stated = CQSA_ATTENTION_PARAMS_INIT;
  must(CQSA(cqsa_attention_params_of)(context, &o.args, &stated));
  cqsa_plan* plan = nullptr;
  must(CQSA(cqsa_attention_plan_create)(context, &stated, &plan));
  uint64_t bytes = 0;
  must(CQSA(cqsa_workspace_query)(plan, &bytes));
  cqsa_attention_args given = o.args;
  given.workspace = reinterpret_cast<void*>(allocate(bytes + 256));
  given.workspace_bytes = bytes;
  const auto execute = CQSA(cqsa_attention_execute);
  const auto attention = CQSA(cqsa_attention);
  char place[96];
  std::snprintf(place, sizeof place, "%s, %s, %s", s.name, together ? "one allocation" : "four allocations", on ? "a stream" : "NULL stream");
  const auto named = [&](const char* what) { return std::string(what) + ": " + place; };
  row(named("execute").c_str(), [&] { must(execute(plan, &o.args, on)); });
  row(named("execute, workspace given").c_str(), [&] { must(execute(plan, &given, on)); });
  row(named("one call").c_str(), [&] { must(attention(context, &stated, &o.args, on)); });
  row(named("one call, shapes from the tensors").c_str(), [&] { must(attention(context, &bare, &o.args, on)); });
  CQSA(cqsa_plan_destroy)(plan);
}

void measure_merge(cqsa_context* context) {
  int64_t shape[] = {1, 8, 128, 64};
  cqsa_tensor out[3], lse[3];
  for (int i = 0; i < 3; ++i) {
    out[i] = {reinterpret_cast<void*>(allocate(4 * 8 * 128 * 64)), CQSA_DEVICE_CUDA, 0, 4, CQSA_DTYPE_F32, shape, nullptr, 0};
    lse[i] = {reinterpret_cast<void*>(allocate(4 * 8 * 128)), CQSA_DEVICE_CUDA, 0, 3, CQSA_DTYPE_F32, shape, nullptr, 0};
  }
  cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
  args.out_a = &out[0], args.lse_a = &lse[0], args.out_b = &out[1], args.lse_b = &lse[1], args.out = &out[2], args.lse = &lse[2];
  const auto merge = CQSA(cqsa_attention_merge);
  row("merge: f32 [1, 8, 128, 64]", [&] { must(merge(context, &args, nullptr)); });
}

// bf16 of some rows to codes, all in one allocation: with a given scale; with a ring and the amax, which need a workspace; and a product.
void measure_fp8(cqsa_context* context) {
  int64_t shape[] = {256, 1024}, one[] = {1, 1}, square[] = {256, 256};
  char* const memory = reinterpret_cast<char*>(allocate(1 << 21));
  const auto tensor = [&](size_t at, int32_t axes, cqsa_dtype dtype, int64_t* sizes) {
    return cqsa_tensor{memory + at, CQSA_DEVICE_CUDA, 0, axes, dtype, sizes, nullptr, 0};
  };
  const cqsa_tensor x = tensor(0, 2, CQSA_DTYPE_BF16, shape), codes = tensor(1 << 19, 2, CQSA_DTYPE_E4M3FN, shape);
  const cqsa_tensor other = tensor(3 << 18, 2, CQSA_DTYPE_E4M3FN, shape), d = tensor(1 << 20, 2, CQSA_DTYPE_BF16, square);
  const cqsa_tensor scale = tensor(3 << 19, 2, CQSA_DTYPE_F32, one), amax = tensor((3 << 19) + 256, 1, CQSA_DTYPE_F32, one);
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  ring.state = memory + (3 << 19) + 4096, ring.hist_len = 16, ring.format = CQSA_DTYPE_E4M3FN;
  must(CQSA(cqsa_fp8_ring_bytes)(&ring, &ring.bytes));
  must(CQSA(cqsa_fp8_ring_init)(context, &ring, 1.0f, nullptr));
  const float a_scale = 64.0f;
  must(find<CUresult(CUdeviceptr, const void*, size_t)>(libcuda, "cuMemcpyHtoD_v2")(reinterpret_cast<CUdeviceptr>(scale.data), &a_scale, 4), "cuMemcpyHtoD");
  const auto quantize = CQSA(cqsa_fp8_quantize);
  cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
  args.x = &x, args.row.out = &codes, args.row.scale_in = &scale, args.source = CQSA_FP8_STATIC;
  row("fp8_quantize: bf16 [256, 1024], static scale", [&] { must(quantize(context, &args, nullptr)); });
  args.row.scale_in = nullptr, args.source = CQSA_FP8_RING, args.ring = &ring, args.amax = &amax;
  const cqsa_fp8_quantize_args* list[] = {&args};
  must(CQSA(cqsa_fp8_quantize_workspace)(context, list, 1, &args.workspace_bytes));
  args.workspace = memory + (7 << 18);
  must(CQSA(cqsa_fp8_workspace_init)(context, args.workspace, args.workspace_bytes, nullptr));
  row("fp8_quantize: the same, ring, amax, workspace given", [&] { must(quantize(context, &args, nullptr)); });
  cqsa_fp8_gemm_args product = CQSA_FP8_GEMM_ARGS_INIT;
  product.a = &codes, product.b = &other, product.d = &d;
  const auto gemm = CQSA(cqsa_fp8_gemm);
  for (const int32_t provider : {CQSA_FP8_PROVIDER_VENDOR, CQSA_FP8_PROVIDER_OWN}) {
    const char* const name = provider == CQSA_FP8_PROVIDER_OWN ? "fp8_gemm: 256 x 256 x 1024, own kernel" : "fp8_gemm: 256 x 256 x 1024, cuBLASLt";
    product.provider = provider;
    if (gemm(context, &product, nullptr) == CQSA_OK) row(name, [&] { must(gemm(context, &product, nullptr)); });
    else absent(name);
  }
}

void* open_library(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) die(path, dlerror());
  return library;
}

// The primary context is the current one, as in every program of the CUDA run-time library.
void start_driver() {
  must(CU(cuInit)(0), "cuInit");
  CUdevice device = 0;
  must(CU(cuDeviceGet)(&device, 0), "cuDeviceGet");
  must(CU(cuDevicePrimaryCtxRetain)(&primary, device), "cuDevicePrimaryCtxRetain");
  must(CU(cuCtxSetCurrent)(primary), "cuCtxSetCurrent");
  must(CU(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) die("usage", "bench_host_cost libcqsa.so libcqsa_cuda.so");
  constexpr shape small = {"B1 H8 N128 D64", 1, 8, 128, 128, 64}, decode = {"B1 H8 N1x1024 D64", 1, 8, 1, 1024, 64};
  constexpr shape far_decode = {"B1 H8 N1x32768 D64", 1, 8, 1, 32768, 64};
  libcuda = open_library("libcuda.so.1");
  libcqsa = open_library(argv[1]);
  start_driver();
  std::printf("%-84s %8s\n", "host time of one call, median", "us");
  measure_launches();
  measure_contexts();
  measure_stream_questions();
  measure_pointer_questions(allocate(1 << 20));
  measure_plugin(open_plugin(argv[2]), operands(small, true));
  cqsa_context* const context = open_context(argv[2]);
  measure_calls(context, small, true, nullptr);
  measure_calls(context, small, false, nullptr);
  measure_calls(context, small, true, stream);
  measure_calls(context, decode, true, nullptr);
  measure_calls(context, far_decode, true, stream);
  measure_merge(context);
  measure_fp8(context);
  std::printf("with no current context:\n");
  operands o(small, true);
  cqsa_attention_params bare = CQSA_ATTENTION_PARAMS_INIT;
  must(CU(cuCtxSetCurrent)(nullptr), "cuCtxSetCurrent");
  row("one call, shapes from the tensors", [&] { must(CQSA(cqsa_attention)(context, &bare, &o.args, nullptr)); });
  CQSA(cqsa_context_destroy)(context);
  return 0;
}
