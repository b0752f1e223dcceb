// SPDX-License-Identifier: Apache-2.0
// The sm_70 kernels on a newer GPU: their PTX is compiled by its driver, which emulates mma.m8n8k4. So layouts and logic run on real
// hardware, though not Volta's rounding and speed. The tests are those of the SIMT harness (test_sm70.cpp, test_sm70_selected.cpp) with
// this file as backends/gpu/port.h, and a problem of full size here.
//
//   test_sm70_jit FOLDER [arguments of Catch]      FOLDER has the PTX: <name of the kernel>.ptx
//   test_sm70_jit FOLDER compile NAME              compiles one kernel into the driver's cache: one process each, a driver may take turns
//
// Every allocation of the process comes from managed memory, so that operands of the tests are where a kernel can read them.
#define CATCH_CONFIG_RUNNER
#include "tests/simt/sm70_selected.h"

#include <cuda.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdarg>
#include <fstream>
#include <mutex>
#include <sstream>

int cqsa_simt_mutant = 0;

namespace {

#define JIT_FUNCTIONS(X)                                                                                                             \
  X(cuInit) X(cuDeviceGet) X(cuDeviceGetName) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemAllocManaged) X(cuModuleLoadDataEx) \
  X(cuModuleGetFunction) X(cuFuncSetAttribute) X(cuLaunchKernel) X(cuCtxSynchronize) X(cuGetErrorName)
struct jit_driver {
#define JIT_MEMBER(name) decltype(&::name) name;
  JIT_FUNCTIONS(JIT_MEMBER)
#undef JIT_MEMBER
};
jit_driver cu;
CUcontext context;
char folder[1024];

[[noreturn]] void give_up(const char* what, int code) {
  std::printf("%s: %d\n", what, code);
  std::exit(code == 77 ? 77 : 2);
}
void must(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) give_up(what, int(result));
}

bool open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return false;
  auto find = [&](const char* name) { return dlsym(library, name); };
#define JIT_FIND(name) \
  if (!(cu.name = reinterpret_cast<decltype(cu.name)>(find(#name)))) return false;
  JIT_FIND(cuInit) JIT_FIND(cuDeviceGet) JIT_FIND(cuDeviceGetName) JIT_FIND(cuDevicePrimaryCtxRetain) JIT_FIND(cuCtxSetCurrent)
  JIT_FIND(cuModuleLoadDataEx) JIT_FIND(cuModuleGetFunction) JIT_FIND(cuFuncSetAttribute) JIT_FIND(cuLaunchKernel) JIT_FIND(cuCtxSynchronize)
  JIT_FIND(cuGetErrorName) JIT_FIND(cuMemAllocManaged)
#undef JIT_FIND
  CUdevice device;
  if (cu.cuInit(0) != CUDA_SUCCESS || cu.cuDeviceGet(&device, 0) != CUDA_SUCCESS) return false;
  must(cu.cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  must(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent");
  return true;
}

// ------------------------------------------------------------------------------------------ managed memory for every allocation

// Blocks of powers of two from one arena; what is freed is used again. 64 bytes in front of each say its size.
class arena {
 public:
  void* take(size_t bytes) {
    int order = 7;
    while ((size_t(1) << order) < bytes + 64) ++order;
    const std::lock_guard<std::mutex> hold(mutex_);
    char* block = static_cast<char*>(free_[order]);
    if (block) {
      std::memcpy(&free_[order], block, sizeof(void*));
    } else {
      if (!next_) start();
      if (next_ + (size_t(1) << order) > end_) return nullptr;
      block = next_;
      next_ += size_t(1) << order;
    }
    std::memcpy(block + 56, &order, sizeof order);
    return block + 64;
  }
  void give(void* p) {
    if (!p) return;
    char* block = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) - 64);  // by way of a number: compilers know what new returned
    int order;
    std::memcpy(&order, block + 56, sizeof order);
    const std::lock_guard<std::mutex> hold(mutex_);
    std::memcpy(block, &free_[order], sizeof(void*));
    free_[order] = block;
  }

 private:
  void start() {
    const size_t bytes = size_t(4) << 30;
    CUdeviceptr at = 0;
    if (!open_driver()) give_up("no driver", 77);
    must(cu.cuMemAllocManaged(&at, bytes, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
    next_ = reinterpret_cast<char*>(at), end_ = next_ + bytes;
  }
  std::mutex mutex_;
  void* free_[64] = {};
  char *next_ = nullptr, *end_ = nullptr;
};
arena& memory() {
  alignas(arena) static char place[sizeof(arena)];
  static arena* const one = ::new (static_cast<void*>(place)) arena;
  return *one;
}

// -------------------------------------------------------------------------------------------------------------------- kernels

constexpr const char* kernel_names[] = {
#define JIT_KERNEL_NAME(name, threads, tier) #name,
    CQSA_ALL_KERNELS(JIT_KERNEL_NAME)
#undef JIT_KERNEL_NAME
};
constexpr size_t num_kernels = sizeof kernel_names / sizeof *kernel_names;
CUfunction functions[num_kernels];
char error_text[1024];

void load(size_t i) {
  std::ifstream file(std::string(folder) + "/" + kernel_names[i] + ".ptx");
  if (!file) return;
  std::stringstream text;
  text << file.rdbuf();
  char log[4096] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, reinterpret_cast<void*>(sizeof log)};
  CUmodule module;
  const CUresult result = cu.cuModuleLoadDataEx(&module, text.str().c_str(), 2, options, values);
  if (result != CUDA_SUCCESS) give_up((std::string(kernel_names[i]) + " " + log).c_str(), int(result));
  must(cu.cuModuleGetFunction(&functions[i], module, kernel_names[i]), kernel_names[i]);
  must(cu.cuFuncSetAttribute(functions[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 96 * 1024), "shared memory");
}

void load_all(const char* only) {
  for (size_t i = 0; i < num_kernels; ++i)
    if (!only || std::strcmp(only, kernel_names[i]) == 0) load(i);
}

}  // namespace

void* operator new(size_t bytes) {
  void* p = memory().take(bytes);
  if (!p) throw std::bad_alloc();
  return p;
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void operator delete(void* p) noexcept { memory().give(p); }
void operator delete[](void* p) noexcept { memory().give(p); }
void operator delete(void* p, size_t) noexcept { memory().give(p); }
void operator delete[](void* p, size_t) noexcept { memory().give(p); }

namespace cqsa::simt {
const char* last_error() { return error_text; }
}  // namespace cqsa::simt

namespace cqsa::gpu {

cqsa_status fail(cqsa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
  return status;
}

const device_facts& facts_of(void* device) { return static_cast<simt::device*>(device)->facts; }

cqsa_status launch(void*, kernel_id kernel, const launch_shape& shape, const void* params, size_t, void*) {
  const size_t i = size_t(kernel);
  if (!functions[i]) return fail(CQSA_ERROR_INTERNAL, "%s: there is no PTX", kernel_names[i]);
  void* arguments[] = {const_cast<void*>(params)};
  CUresult result = cu.cuLaunchKernel(functions[i], shape.grid[0], shape.grid[1], shape.grid[2], shape.threads, 1, 1, shape.shared_bytes, nullptr,
                                      arguments, nullptr);
  if (result == CUDA_SUCCESS) result = cu.cuCtxSynchronize();  // the test reads the results at once
  const char* name = "";
  if (result != CUDA_SUCCESS) cu.cuGetErrorName(result, &name);
  return result == CUDA_SUCCESS ? cqsa_status(CQSA_OK) : fail(CQSA_ERROR_RUNTIME, "%s: %s", kernel_names[i], name);
}

cqsa_status upload(void*, void* to, const void* from, uint64_t bytes, void*) {
  if (bytes) std::memcpy(to, from, bytes);
  return CQSA_OK;
}

}  // namespace cqsa::gpu

TEST_CASE("sm70 on this GPU: 24 heads on 2, head_dim 256, 2,051 of 32,768 cells") {
  for (const cqsa_dtype kv : {CQSA_DTYPE_I8, CQSA_DTYPE_F16}) {
    selected_sizes s;
    s.queries = 4, s.heads = 24, s.kv_heads = 2, s.context = 32768, s.kv = kv;
    selected_problem p = make_selected(s, 3);
    exact_selected(p);
    for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT}) {
      REQUIRE(run_selected(p, precision, 1) == "");
      const selected_error e = error_of(p);
      const bool split = precision == CQSA_PRECISION_SPLIT;
      std::printf("32,768 cells, %s, %s: error %.2e of %.2f\n", kv == CQSA_DTYPE_I8 ? "int8" : "f16", split ? "SPLIT" : "FAST", e.out, e.most);
      CHECK(e.out <= (split ? 3e-6 : 2e-3) * e.most);
    }
  }
}

int main(int argc, char** argv) {
  if (argc < 2) give_up("wanted the folder of the PTX", 2);
  std::snprintf(folder, sizeof folder, "%s", argv[1]);
  operator delete(operator new(1));  // opens the driver
  const auto begin = std::chrono::steady_clock::now();
  const bool compile = argc == 4 && std::strcmp(argv[2], "compile") == 0;
  load_all(compile ? argv[3] : nullptr);
  char name[128] = "";
  cu.cuDeviceGetName(name, sizeof name, 0);
  size_t loaded = 0;
  for (CUfunction f : functions) loaded += f != nullptr;
  std::printf("%s: %zu kernels compiled in %.1f s\n", name, loaded, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (compile) return loaded == 1 ? 0 : 2;
  argv[1] = argv[0];
  return Catch::Session().run(argc - 1, argv + 1);
}
