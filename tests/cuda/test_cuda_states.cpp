// SPDX-License-Identifier: Apache-2.0
// The CUDA plugin with a driver that is absent, old, broken or poor: states, refusals, and that nothing is left behind. Each case
// runs in a process of its own, because the plugin asks once. Usage:
//   test_cuda_states <plugin> <folder of the fake libcuda.so.1> <the incomplete one's> <libcqsa.so or -> [case...]
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/code_list.h"
#include "tests/device/driver.h"

namespace {

const char *plugin_path, *fake_folder, *incomplete_folder, *core_path;

// A library that is loaded already is what the plugin finds by its name.
void load_driver(const char* folder) {
  const std::string file = std::string(folder) + "/libcuda.so.1";
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
  std::printf("%s\n", dlerror());
  std::exit(2);
}

const cqsa_backend_v1& with_fake(std::initializer_list<std::pair<const char*, const char*>> environment = {}) {
  for (const auto& [name, value] : environment) setenv(name, value, 1);
  load_driver(fake_folder);
  return open_plugin(plugin_path);
}

std::string reason_of(const cqsa_backend_v1& b, int32_t wanted) {
  char reason[512] = "";
  const int32_t state = b.state(reason, sizeof reason);
  CHECK(state == wanted, "state %d: %s", state, reason);
  CHECK(b.state(nullptr, 0) == wanted, "asked again");
  return reason;
}

void expect(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* w : words) CHECK(text.find(w) != std::string::npos, "\"%s\" lacks \"%s\"", text.c_str(), w);
}

// What a backend that is not ready answers.
void expect_refusals(const cqsa_backend_v1& b, cqsa_status status, const std::string& reason) {
  cqsa_device_properties p;
  void* handle = &p;
  CHECK(b.device_count() == 0, "%d devices", b.device_count());
  CHECK(b.device_properties(0, &p) == status && reason == b.last_error(), "%s", b.last_error());
  CHECK(b.device_open(0, &handle) == status && handle == &p && reason == b.last_error(), "%s", b.last_error());
  CHECK(b.compute_rate(0, 64, CQSA_DTYPE_F32, nullptr) == 0, "a rate");
}

void expect_nothing_left() {
  fake_counts counts = {};
  cu().fake_cuda_counts(&counts);
  CHECK(counts.pushes == counts.pops && counts.contexts == 0 && counts.streams == 0 && counts.events == 0 && counts.device_bytes == 0 &&
            counts.pinned_bytes == 0 && counts.calls_without_context == 0 && counts.broken_captures == 0,
        "something is left");
}

// On a machine that has a driver, its absence cannot be tested.
bool has_real_driver() {
  const bool has = dlopen("libcuda.so.1", RTLD_NOW) != nullptr;
  if (has) std::printf("skipped: this machine has a driver\n");
  return has;
}

// ---- states -------------------------------------------------------------------------------------------------------------------------

void case_no_driver() {
  if (has_real_driver()) return;
  const cqsa_backend_v1& b = open_plugin(plugin_path);
  const std::string reason = reason_of(b, CQSA_BACKEND_NO_DRIVER);
  expect(reason, {"the NVIDIA driver does not load", "libcuda.so.1"});
  expect_refusals(b, CQSA_ERROR_NO_DRIVER, reason);
}

void case_old_driver() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_VERSION", "11040"}});
  const std::string needed = "needs a driver for CUDA " + std::to_string(CUDA_VERSION / 1000) + ".0 or newer";
  const std::string reason = reason_of(b, CQSA_BACKEND_NO_DRIVER);
  expect(reason, {"supports CUDA 11.4", needed.c_str()});
  expect_refusals(b, CQSA_ERROR_NO_DRIVER, reason);
}

// Within a major version an older driver runs newer code.
void case_same_major() {
  const std::string version = std::to_string(CUDA_VERSION / 1000 * 1000);
  reason_of(with_fake({{"FAKE_CUDA_VERSION", version.c_str()}}), CQSA_BACKEND_READY);
}

void case_incomplete_driver() {
  load_driver(incomplete_folder);
  expect(reason_of(open_plugin(plugin_path), CQSA_BACKEND_NO_DRIVER), {"lacks the function cuLibraryLoadData"});
}

void case_init_fails() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_INIT", "999"}});
  const std::string reason = reason_of(b, CQSA_BACKEND_NO_DRIVER);
  expect(reason, {"does not start", "cuInit failed", "999"});
  expect_refusals(b, CQSA_ERROR_NO_DRIVER, reason);
}

void case_no_device() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_DEVICES", ""}});
  const std::string reason = reason_of(b, CQSA_BACKEND_NO_DEVICE);
  expect(reason, {"no device"});
  expect_refusals(b, CQSA_ERROR_NO_DEVICE, reason);
  const pid_t child = fork();  // not the fork's fault, so the same answer
  if (child == 0) {
    reason_of(b, CQSA_BACKEND_NO_DEVICE);
    _exit(failures != 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "the child");
}

void case_no_code() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_DEVICES", "61"}});
  const std::string reason = reason_of(b, CQSA_BACKEND_NO_DEVICE_CODE);
  expect(reason, {"device 0 (Fake GPU 0) is sm_61, this build has code for ", b.code});
  expect_refusals(b, CQSA_ERROR_NO_DEVICE_CODE, reason);
}

void case_one_of_two() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_DEVICES", "61,90"}});
  reason_of(b, CQSA_BACKEND_READY);
  CHECK(b.device_count() == 2, "%d devices", b.device_count());
  cqsa_device_properties p = {};
  CHECK(b.device_properties(0, &p) == CQSA_OK && std::strcmp(p.arch, "sm_61") == 0, "%s", p.arch);
  void* handle = nullptr;
  CHECK(b.device_open(0, &handle) == CQSA_ERROR_NO_DEVICE_CODE && handle == nullptr, "an old device");
  expect(b.last_error(), {"device 0 (Fake GPU 0) is sm_61"});
  CHECK(b.device_open(1, &handle) == CQSA_OK, "%s", b.last_error());
  b.device_close(handle);
  expect_nothing_left();
}

// ---- opening ------------------------------------------------------------------------------------------------------------------------

void case_load_fails() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_LOAD", "209"}});
  void* handle = nullptr;
  CHECK(b.device_open(0, &handle) == CQSA_ERROR_NO_DEVICE_CODE && handle == nullptr, "%s", b.last_error());
  expect(b.last_error(), {"loading the device code of", "209"});
  expect_nothing_left();
  setenv("FAKE_CUDA_LOAD", "2", 1);
  CHECK(b.device_open(0, &handle) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY && handle == nullptr, "%s", b.last_error());
  expect_nothing_left();
  setenv("FAKE_CUDA_LOAD", "0", 1);
  CHECK(b.device_open(0, &handle) == CQSA_OK, "%s", b.last_error());
  b.device_close(handle);
  fake_counts first = {}, second = {};
  cu().fake_cuda_counts(&first);
  CHECK(b.device_open(1, &handle) == CQSA_OK, "%s", b.last_error());
  b.device_close(handle);
  cu().fake_cuda_counts(&second);
  CHECK(first.libraries > 0 && first.libraries == second.libraries, "the code is loaded once for all devices");
  expect_nothing_left();
}

void case_no_kernel() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_NO_KERNEL", "cqsa_merge"}});
  void* handle = nullptr;
  CHECK(b.device_open(0, &handle) == CQSA_ERROR_INTERNAL && handle == nullptr, "%s", b.last_error());
  expect(b.last_error(), {"cqsa_merge"});
  expect_nothing_left();
}

void case_no_pools() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_NO_POOLS", "1"}});
  void *handle = nullptr, *memory = nullptr;
  CHECK(b.device_open(0, &handle) == CQSA_OK, "%s", b.last_error());
  CHECK(b.stream_alloc(handle, 100, nullptr, &memory) == CQSA_ERROR_UNSUPPORTED && memory == nullptr, "%s", b.last_error());
  expect(b.last_error(), {"device 0 (Fake GPU 0)", "stream order", "workspace"});
  b.device_close(handle);
}

void case_allocation_fails() {
  const cqsa_backend_v1& b = with_fake();
  void *handle = nullptr, *memory = nullptr;
  CHECK(b.device_open(0, &handle) == CQSA_OK, "%s", b.last_error());
  for (auto [allocate, status] : {std::pair(b.device_alloc, CQSA_ERROR_OUT_OF_DEVICE_MEMORY), {b.pinned_alloc, CQSA_ERROR_OUT_OF_PINNED_MEMORY}}) {
    cu().fake_cuda_fail_allocation(1);
    CHECK(allocate(handle, 100, &memory) == status && memory == nullptr, "%s", b.last_error());
    expect(b.last_error(), {"allocating 100 bytes of", "on device 0", "CUDA_ERROR_OUT_OF_MEMORY"});
  }
  cu().fake_cuda_fail_allocation(1);
  CHECK(b.stream_alloc(handle, 100, nullptr, &memory) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY && memory == nullptr, "%s", b.last_error());
  b.device_close(handle);
  for (int n = 1; n <= 2; ++n) {  // of the measurement's two allocations
    cu().fake_cuda_fail_allocation(n);
    CHECK(b.compute_rate(0, 64, CQSA_DTYPE_F32, nullptr) == 0, "allocation %d", n);
    expect_nothing_left();
  }
  cu().fake_cuda_fail_allocation(0);
  CHECK(b.compute_rate(0, 64, CQSA_DTYPE_F32, nullptr) > 0, "%s", b.last_error());
  CHECK(b.compute_rate(0, 64, CQSA_DTYPE_F16, nullptr) == 0, "the stub takes f32 only");
  expect_nothing_left();
}

// A large device, and every class of kernels: cqsa.h promises 32 MiB.
void case_measurement_memory() {
  const cqsa_backend_v1& b = with_fake({{"FAKE_CUDA_UNITS", "192"}});
  for (const int64_t head_dim : {1, 64, 128, 256, 576}) {
    CHECK(b.compute_rate(0, head_dim, CQSA_DTYPE_F32, nullptr) > 0, "%s", b.last_error());
    fake_counts counts = {};
    cu().fake_cuda_counts(&counts);
    CHECK(counts.most_device_bytes > 0 && counts.most_device_bytes <= int64_t{32} << 20, "%lld bytes with head_dim %lld",
          static_cast<long long>(counts.most_device_bytes), static_cast<long long>(head_dim));
  }
  expect_nothing_left();
}

// ---- launches -----------------------------------------------------------------------------------------------------------------------

struct open_device {
  const cqsa_backend_v1& b;
  void *handle = nullptr, *stream = nullptr, *memory = nullptr;
  explicit open_device(const cqsa_backend_v1& backend) : b(backend) {
    CALL_OK(b, device_open, 0, &handle);
    CALL_OK(b, stream_create, handle, &stream);
    CALL_OK(b, device_alloc, handle, uint64_t{1} << 20, &memory);
  }
  ~open_device() {
    CALL(b, device_free, handle, memory);
    CALL(b, stream_destroy, handle, stream);
    CALL(b, device_close, handle);
    expect_nothing_left();
  }
  open_device(const open_device&) = delete;
};

void case_launch() {
  open_device d(with_fake({{"FAKE_CUDA_PARAM_BYTES", "64"}}));
  cqsa_attention_leaf leaf = {};
  leaf.head_dim = 77;
  leaf.tile_q = 200 << 10;  // the stub's shared memory: more than is there without asking
  CHECK(CALL(d.b, attention[0].launch, d.handle, &leaf, d.memory, uint64_t{4096}, nullptr, d.stream) == CQSA_OK, "%s", d.b.last_error());
  fake_launch last = {};
  cu().fake_cuda_last_launch(&last);
  CHECK(std::strcmp(last.kernel, "cqsa_attention_d64") == 0 && last.grid[0] == 20 && last.grid[1] == 2 && last.grid[2] == 1, "%s", last.kernel);
  CHECK(last.threads == 256 && last.shared_bytes == 200 << 10 && last.stream == d.stream && last.params[0] == 77, "%u", last.threads);
  cqsa_merge_leaf merge = {};
  merge.shape[3] = 2;
  CHECK(CALL(d.b, merge, d.handle, &merge, nullptr, d.stream) == CQSA_ERROR_INTERNAL, "%s", d.b.last_error());
  expect(d.b.last_error(), {"cqsa_merge", "1048576 bytes of shared memory"});
  merge.shape[3] = 3;
  CHECK(CALL(d.b, merge, d.handle, &merge, nullptr, d.stream) == CQSA_ERROR_INTERNAL, "%s", d.b.last_error());
  expect(d.b.last_error(), {"cqsa_merge takes 64 bytes of parameters, not 60"});
}

// Host memory of an upload has been read on return, also when it is pinned, which a copy reads later.
void case_upload() {
  open_device d(with_fake({{"FAKE_CUDA_PARAM_BYTES", "64"}}));
  constexpr int64_t count = 2000;  // several pieces
  constexpr uint64_t bytes = count * sizeof(cqsa_rect);
  void* pinned = nullptr;
  CALL_OK(d.b, pinned_alloc, d.handle, bytes, &pinned);
  std::vector<cqsa_rect> pageable(count);
  for (cqsa_rect* rects : {pageable.data(), static_cast<cqsa_rect*>(pinned)}) {
    for (int64_t i = 0; i < count; ++i) rects[i] = {i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6};
    const std::vector<cqsa_rect> kept(rects, rects + count);
    cqsa_attention_leaf leaf = {};
    leaf.rects = rects;
    leaf.num_rects = count;
    CHECK(CALL(d.b, attention[0].launch, d.handle, &leaf, d.memory, bytes, nullptr, d.stream) == CQSA_OK, "%s", d.b.last_error());
    std::memset(static_cast<void*>(rects), 0xEE, bytes);
    std::vector<cqsa_rect> back(count);
    CALL_OK(d.b, copy, d.handle, back.data(), d.memory, bytes, CQSA_COPY_TO_HOST, d.stream);
    CHECK(std::memcmp(back.data(), kept.data(), bytes) == 0, "read after the upload had returned");
  }
  CALL(d.b, pinned_free, d.handle, pinned);
}

void case_upload_in_capture() {
  open_device d(with_fake());
  CUcontext context = nullptr;
  cu().cuDevicePrimaryCtxRetain(&context, 0);
  cu().cuCtxPushCurrent_v2(context);
  const auto stream = static_cast<CUstream>(d.stream);
  cu().cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
  cqsa_rect rect = {};
  cqsa_attention_leaf leaf = {};
  leaf.rects = &rect;
  leaf.num_rects = 1;
  CHECK(CALL(d.b, attention[0].launch, d.handle, &leaf, d.memory, uint64_t{4096}, nullptr, d.stream) == CQSA_ERROR_INTERNAL, "an upload");
  expect(d.b.last_error(), {"56 bytes of host memory", "captured"});
  CUgraph graph = nullptr;
  CHECK(cu().cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "the refusal broke the capture");
  cu().cuGraphDestroy(graph);
  cu().cuCtxPopCurrent_v2(&context);
  cu().cuDevicePrimaryCtxRelease_v2(0);
}

// ---- processes and threads ------------------------------------------------------------------------------------------------------------

// A plugin that nobody has asked yet may be used by the child, and then by the parent too.
void case_fork_before_use() {
  const cqsa_backend_v1& b = with_fake();
  const pid_t child = fork();
  reason_of(b, CQSA_BACKEND_READY);
  { const open_device d(b); }
  if (child == 0) _exit(failures != 0);
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "the child");
}

void case_first_use_of_threads() {
  const cqsa_backend_v1& b = with_fake();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&b] {
      reason_of(b, CQSA_BACKEND_READY);
      void* handle = nullptr;
      CHECK(b.device_open(0, &handle) == CQSA_OK, "%s", b.last_error());
      b.device_close(handle);
    });
  for (std::thread& t : threads) t.join();
  expect_nothing_left();
}

// ---- the list of architectures ---------------------------------------------------------------------------------------------------------

void case_code_list() {
  const struct {
    const char* list;
    int arch;
    bool runs;
  } table[] = {{"sm_75", 75, true},         {"sm_75", 80, false},        {"sm_80", 86, true},          {"sm_86", 80, false},
               {"sm_86", 89, true},         {"sm_90a", 90, true},        {"sm_90a", 100, false},       {"sm_90", 100, false},
               {"sm_100", 103, true},       {"sm_100a", 103, false},     {"sm_100f", 103, true},       {"sm_100f", 120, false},
               {"sm_120", 121, true},       {"sm_70(PTX)", 70, true},    {"sm_70(PTX)", 120, true},    {"sm_70(PTX)", 61, false},
               {"compute_90", 90, true},    {"compute_90", 120, true},   {"compute_90", 89, false},    {"compute_90a", 100, false},
               {"compute_100f", 103, true}, {"compute_100f", 120, false}, {"sm_75 sm_80", 89, true},   {"  sm_80   sm_75", 75, true},
               {"", 90, false},             {"sm_", 90, false},          {"sm_9", 9, false},           {"gfx90a", 90, false},
               {"sm_90x", 90, false},       {"sm_90(PTX", 90, false},    {"sm_75,sm_80", 75, false},   {"sm_99999999999", 90, false}};
  for (const auto& row : table)
    CHECK(cqsa::cuda::list_has_code(row.list, row.arch) == row.runs, "\"%s\" on sm_%d", row.list, row.arch);
}

// ---- through the core -------------------------------------------------------------------------------------------------------------------

struct core {
  decltype(&cqsa_backend_query) backend_query = nullptr;
  decltype(&cqsa_context_create) context_create = nullptr;
  decltype(&cqsa_context_destroy) context_destroy = nullptr;
  decltype(&cqsa_context_backend) context_backend = nullptr;
  decltype(&cqsa_last_error) last_error = nullptr;
  std::string folder{plugin_path};
  core() {
    void* const library = dlopen(core_path, RTLD_NOW);
    CHECK(library != nullptr, "%s", dlerror());
    find_symbol(library, "cqsa_backend_query", backend_query);
    find_symbol(library, "cqsa_context_create", context_create);
    find_symbol(library, "cqsa_context_destroy", context_destroy);
    find_symbol(library, "cqsa_context_backend", context_backend);
    find_symbol(library, "cqsa_last_error", last_error);
    folder.resize(folder.rfind('/'));
  }
  cqsa_status create(const char* backend, cqsa_context** out) const {
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = backend;
    params.backend_path = folder.c_str();
    return context_create(&params, out);
  }
};

bool plugin_is_mapped() {
  void* const handle = dlopen(plugin_path, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

void case_core_without_driver() {
  if (std::strcmp(core_path, "-") == 0 || has_real_driver()) return;
  const core c;
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  CHECK(c.backend_query("cuda", c.folder.c_str(), &info) == CQSA_OK, "%s", c.last_error());
  CHECK(info.state == CQSA_BACKEND_NO_DRIVER && info.device_count == 0, "state %d", info.state);
  expect(info.reason, {plugin_path, "the NVIDIA driver does not load", "libcuda.so.1"});
  CHECK(!plugin_is_mapped(), "a plugin that is not ready stays loaded");
  cqsa_context* context = nullptr;
  CHECK(c.create("cuda", &context) == CQSA_ERROR_NO_DRIVER && context == nullptr, "%s", c.last_error());
  CHECK(c.create("auto", &context) == CQSA_OK && std::strcmp(c.context_backend(context), "cpu") == 0, "%s", c.last_error());
  c.context_destroy(context);
}

void case_core_with_driver() {
  if (std::strcmp(core_path, "-") == 0) return;
  load_driver(fake_folder);
  const core c;
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  CHECK(c.backend_query("cuda", c.folder.c_str(), &info) == CQSA_OK && info.state == CQSA_BACKEND_READY, "%s", info.reason);
  CHECK(info.device_count == 2 && std::strcmp(info.device, "Fake GPU 0") == 0, "%d %s", info.device_count, info.device);
  cqsa_context* context = nullptr;
  CHECK(c.create("auto", &context) == CQSA_OK && std::strcmp(c.context_backend(context), "cuda") == 0, "%s", c.last_error());
  c.context_destroy(context);
  CHECK(plugin_is_mapped(), "a ready plugin must stay");
  expect_nothing_left();
}

struct test_case {
  const char* name;
  void (*run)();
};
const test_case cases[] = {{"code_list", case_code_list},
                           {"no_driver", case_no_driver},
                           {"old_driver", case_old_driver},
                           {"same_major", case_same_major},
                           {"incomplete_driver", case_incomplete_driver},
                           {"init_fails", case_init_fails},
                           {"no_device", case_no_device},
                           {"no_code", case_no_code},
                           {"one_of_two", case_one_of_two},
                           {"load_fails", case_load_fails},
                           {"no_kernel", case_no_kernel},
                           {"no_pools", case_no_pools},
                           {"allocation_fails", case_allocation_fails},
                           {"measurement_memory", case_measurement_memory},
                           {"launch", case_launch},
                           {"upload", case_upload},
                           {"upload_in_capture", case_upload_in_capture},
                           {"fork_before_use", case_fork_before_use},
                           {"first_use_of_threads", case_first_use_of_threads},
                           {"core_without_driver", case_core_without_driver},
                           {"core_with_driver", case_core_with_driver}};

bool run_apart(const test_case& c) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    c.run();
    std::fflush(stdout);
    std::exit(failures != 0);  // with what runs at exit
  }
  int status = -1;
  waitpid(child, &status, 0);
  std::printf("%s %s\n", status == 0 ? "ok    " : "FAILED", c.name);
  return status == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::printf("usage: test_cuda_states <plugin> <fake driver's folder> <incomplete one's> <libcqsa.so or -> [case...]\n");
    return 2;
  }
  plugin_path = argv[1], fake_folder = argv[2], incomplete_folder = argv[3], core_path = argv[4];
  bool good = true;
  for (const test_case& c : cases) {
    bool wanted = argc == 5;
    for (int i = 5; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], c.name) == 0;
    if (wanted) good = run_apart(c) && good;
  }
  return !good;
}
