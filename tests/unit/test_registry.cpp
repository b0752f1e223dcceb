// SPDX-License-Identifier: Apache-2.0
// Backends by name, contexts from parameters, and the struct_size rule. Plugins that really load: tests/plugins.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "abi_struct.h"
#include "backend_registry.h"
#include "context.h"
#include "dynlib.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZER 1
#endif
#endif

namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string error() { return cqsa_last_error(); }

struct temporary_folder {
  std::string path;
  std::vector<std::string> files;
  temporary_folder() {
    char name[] = "/tmp/cqsa-registry-XXXXXX";
    path = mkdtemp(name);
  }
  ~temporary_folder() {
    for (const auto& file : files) unlink(file.c_str());
    rmdir(path.c_str());
  }
  std::string put(const std::string& name, const std::string& text) {
    files.push_back(path + "/" + name);
    std::ofstream(files.back()) << text;
    return files.back();
  }
};

cqsa_context_params defaults() { return CQSA_CONTEXT_PARAMS_INIT; }

struct counting_allocator {
  int64_t live = 0, calls = 0;
  uint64_t offset = 0;  // added to the pointer, to return misaligned memory
  static void* allocate(void* self, uint64_t bytes, uint64_t alignment) {
    auto& me = *static_cast<counting_allocator*>(self);
    me.live += static_cast<int64_t>(bytes);
    ++me.calls;
    return static_cast<char*>(std::aligned_alloc(alignment, (bytes + 2 * alignment) / alignment * alignment)) + me.offset;
  }
  static void release(void* self, void* memory, uint64_t bytes) {
    auto& me = *static_cast<counting_allocator*>(self);
    me.live -= static_cast<int64_t>(bytes);
    std::free(static_cast<char*>(memory) - me.offset);
  }
  cqsa_allocator as_allocator() { return {sizeof(cqsa_allocator), 0, this, allocate, release}; }
};

}  // namespace

TEST_CASE("version, build and status texts", "[capi]") {
  CHECK(cqsa_version() == CQSA_VERSION);
  CHECK(cqsa_abi_version() == CQSA_ABI_VERSION);
  CHECK(std::string(cqsa_version_string()) == std::to_string(CQSA_VERSION_MAJOR) + "." + std::to_string(CQSA_VERSION_MINOR) +
                                                  "." + std::to_string(CQSA_VERSION_PATCH));
  const std::string info = cqsa_build_info();
  CHECK(info.front() == '{');
  CHECK(info.back() == '}');
  CHECK(has(info, cqsa_version_string()));
  CHECK(std::string(cqsa_status_string(CQSA_OK)) == "CQSA_OK");
  CHECK(std::string(cqsa_status_string(CQSA_ERROR_SHAPE)) == "CQSA_ERROR_SHAPE");
  CHECK(std::string(cqsa_status_string(CQSA_ERROR_INTERNAL)) == "CQSA_ERROR_INTERNAL");
  for (const int32_t unknown : {-1, 12, 19, 27, 66, 81, INT32_MAX}) {
    CHECK(std::string(cqsa_status_string(unknown)) == "CQSA_ERROR_UNKNOWN");
  }
}

TEST_CASE("the last error belongs to its thread", "[capi]") {
  CHECK(cqsa_context_create(nullptr, nullptr) == CQSA_ERROR_NULL_POINTER);
  const std::string mine = error();
  CHECK(has(mine, "context_out is NULL"));
  std::string fresh = "unset";
  std::thread([&] { fresh = cqsa_last_error(); }).join();
  CHECK(fresh.empty());
  CHECK(error() == mine);
}

TEST_CASE("known backends", "[registry]") {
  CHECK(std::string(cqsa_backend_name(0)) == "cpu");
  CHECK(std::string(cqsa_backend_name(1)) == "cuda");
  CHECK(std::string(cqsa_backend_name(2)) == "hip");
  CHECK(cqsa_backend_name(3) == nullptr);
  CHECK(cqsa_backend_name(-1) == nullptr);
}

TEST_CASE("the cpu is always ready and never looked for", "[registry]") {
  temporary_folder folder;
  folder.put("libcqsa_cpu.so", "must not be opened");
  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  CHECK(cqsa_backend_query("cpu", folder.path.c_str(), &info) == CQSA_OK);
  CHECK(info.state == CQSA_BACKEND_READY);
  CHECK(info.device_count == 1);
  CHECK(std::string(info.name) == "cpu");
  CHECK(std::string(info.reason).empty());
  CHECK(std::strlen(info.device) > 0);
  CHECK(info.struct_size == sizeof info);
}

TEST_CASE("not found names the file and each folder", "[registry]") {
  temporary_folder folder;
  const auto found = cqsa::find_backend("nobody", folder.path.c_str());
  CHECK(found.state == CQSA_BACKEND_NOT_FOUND);
  CHECK(found.backend == nullptr);
  CHECK(has(found.reason, "no libcqsa_nobody.so was found"));
  CHECK(has(found.reason, "not in " + folder.path + " (backend_path)"));
  CHECK(has(found.reason, "CQSA_BACKEND_PATH"));
  const auto in_file = cqsa::find_backend("nobody", "/dev/null");
  CHECK(has(in_file.reason, "/dev/null (backend_path, Not a directory)"));
  CHECK(has(cqsa::find_backend("nobody", "relative").reason, "\"relative\" was ignored because it is not absolute"));
}

TEST_CASE("a file that is no library", "[registry]") {
  temporary_folder folder;
  const std::string file = folder.put("libcqsa_junk.so", std::string(4096, 'x'));
  const auto found = cqsa::find_backend("junk", (folder.path + "/").c_str());
  CHECK(found.state == CQSA_BACKEND_LOAD_FAILED);
  CHECK(has(found.reason, file + " does not load: "));
  CHECK(has(found.reason, "ELF"));
  unlink(file.c_str());
  CHECK(cqsa::find_backend("junk", (folder.path + "/").c_str()).state == CQSA_BACKEND_LOAD_FAILED);  // remembered
}

TEST_CASE("many threads ask for many backends", "[registry]") {
  temporary_folder folder;
  folder.put("libcqsa_junk1.so", "x");
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 40; ++i) {
        const std::string name = "junk" + std::to_string((i + t) % 3);
        const int32_t wanted = name == "junk1" ? CQSA_BACKEND_LOAD_FAILED : CQSA_BACKEND_NOT_FOUND;
        wrong += cqsa::find_backend(name.c_str(), folder.path.c_str()).state != wanted;
        wrong += cqsa::find_backend("cpu", nullptr).backend == nullptr;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("each state has its status", "[registry]") {
  CHECK(cqsa::status_of_state(CQSA_BACKEND_READY) == CQSA_OK);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_NOT_FOUND) == CQSA_ERROR_BACKEND_NOT_FOUND);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_LOAD_FAILED) == CQSA_ERROR_BACKEND_LOAD_FAILED);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_ABI_MISMATCH) == CQSA_ERROR_ABI_MISMATCH);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_NO_DRIVER) == CQSA_ERROR_NO_DRIVER);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_NO_DEVICE) == CQSA_ERROR_NO_DEVICE);
  CHECK(cqsa::status_of_state(CQSA_BACKEND_NO_DEVICE_CODE) == CQSA_ERROR_NO_DEVICE_CODE);
  CHECK(cqsa::status_of_state(99) == CQSA_ERROR_INTERNAL);
}

TEST_CASE("a program that has the library inside has no plugin folder", "[registry]") {
  CHECK(cqsa::own_folder().empty());  // the executable's folder is never searched
  CHECK(has(cqsa::find_backend("nobody", "/").reason, "no folder of its own"));
}

TEST_CASE("contexts: defaults and references", "[context]") {
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(nullptr, &context) == CQSA_OK);
  CHECK(std::string(cqsa_context_backend(context)) != "");
  CHECK(context->num_threads >= 1);
  cqsa_context_destroy(context);
  cqsa_context_destroy(nullptr);
  CHECK(std::string(cqsa_context_backend(nullptr)).empty());

  auto params = defaults();
  params.backend = "cpu";
  params.num_threads = 3;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  CHECK(std::string(cqsa_context_backend(context)) == "cpu");
  CHECK(context->num_threads == 3);
  REQUIRE(context->pool);
  CHECK(context->pool->size() == 3);
  cqsa::retain(context);
  cqsa_context_destroy(context);
  CHECK(std::string(cqsa_context_backend(context)) == "cpu");  // a plan still holds it
  cqsa::release(context);
}

TEST_CASE("contexts: threads of their own only where they are needed", "[context]") {
  cqsa_context* context = nullptr;
  auto params = defaults();
  params.backend = "cpu";
  params.num_threads = 1;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  CHECK_FALSE(context->pool);
  cqsa_context_destroy(context);
  params.num_threads = 8;
  params.parallel_for = [](void*, int64_t, void (*)(void*, int64_t), void*) -> int32_t { return 0; };
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  CHECK_FALSE(context->pool);
  CHECK(context->num_threads == 8);
  cqsa_context_destroy(context);
}

TEST_CASE("contexts: refused parameters leave the output alone", "[context]") {
  cqsa_context* const untouched = reinterpret_cast<cqsa_context*>(0x1234);
  cqsa_context* context = untouched;
  counting_allocator memory;
  cqsa_allocator half = memory.as_allocator();
  const auto refused = [&](const cqsa_context_params& params, cqsa_status status, const char* words) {
    CHECK(cqsa_context_create(&params, &context) == status);
    CHECK(context == untouched);
    CAPTURE(error());
    CHECK(has(error(), words));
  };
  auto params = defaults();
  for (const int32_t threads : {-1, 4097, INT32_MIN, INT32_MAX}) {
    params.num_threads = threads;
    refused(params, CQSA_ERROR_INVALID_ARGUMENT, ("num_threads is " + std::to_string(threads)).c_str());
  }
  params = defaults();
  params.backend = "cpu";
  for (const int32_t device : {-1, 1, INT32_MAX}) {
    params.device = device;
    refused(params, CQSA_ERROR_NO_DEVICE, "backend cpu has 1 device");
  }
  params = defaults();
  params.backend = "No such";
  refused(params, CQSA_ERROR_INVALID_ARGUMENT, "params->backend is \"No such\"");
  params.backend = "";
  refused(params, CQSA_ERROR_INVALID_ARGUMENT, "params->backend is \"\"");
  params.backend = "nobody";
  refused(params, CQSA_ERROR_BACKEND_NOT_FOUND, "libcqsa_nobody.so");
  params = defaults();
  params.backend_path = "plugins";
  refused(params, CQSA_ERROR_INVALID_ARGUMENT, "params->backend_path is \"plugins\"");
  params = defaults();
  params.allocator = &half;
  half.allocate = nullptr;
  refused(params, CQSA_ERROR_NULL_POINTER, "allocator->allocate is NULL");
  half = memory.as_allocator();
  half.release = nullptr;
  refused(params, CQSA_ERROR_NULL_POINTER, "allocator->release is NULL");
  half = memory.as_allocator();
  half.struct_size = 8;
  refused(params, CQSA_ERROR_STRUCT_SIZE, "params->allocator->struct_size is 8");
  half = memory.as_allocator();
  half.flags = 1;
  refused(params, CQSA_ERROR_UNKNOWN_FLAG, "params->allocator->flags");
}

TEST_CASE("contexts: the allocator is copied and used", "[context]") {
  counting_allocator memory;
  cqsa_allocator allocator = memory.as_allocator();
  auto params = defaults();
  params.backend = "cpu";
  params.allocator = &allocator;
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  allocator = {};
  void* const block = cqsa::host_allocate(*context, 1000);
  CHECK(memory.live == 1000);
  CHECK(reinterpret_cast<uintptr_t>(block) % CQSA_WORKSPACE_ALIGNMENT == 0);
  cqsa::host_release(*context, block, 1000);
  CHECK(memory.live == 0);
  void* const none = cqsa::host_allocate(*context, 0);  // nothing is asked for, and it is not a failure
  CHECK(none != nullptr);
  cqsa::host_release(*context, none, 0);
  cqsa::host_release(*context, nullptr, 100);
  CHECK(memory.calls == 1);
  memory.offset = 8;
  CHECK(cqsa::host_allocate(*context, 100) == nullptr);
  CHECK(memory.live == 0);
  cqsa_context_destroy(context);
}

TEST_CASE("contexts: the default allocator is aligned, and reports what it cannot give", "[context]") {
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(nullptr, &context) == CQSA_OK);
  for (const uint64_t bytes : {1, 63, 64, 65, 100000}) {
    void* const memory = cqsa::host_allocate(*context, bytes);
    REQUIRE(memory != nullptr);
    CHECK(reinterpret_cast<uintptr_t>(memory) % CQSA_WORKSPACE_ALIGNMENT == 0);
    std::memset(memory, 1, bytes);
    cqsa::host_release(*context, memory, bytes);
  }
#ifndef SANITIZER  // there such a request ends the program
  CHECK(cqsa::host_allocate(*context, uint64_t{1} << 62) == nullptr);
#endif
  cqsa_context_destroy(context);
}

TEST_CASE("contexts: the log names the backend, and why others were passed over", "[context]") {
  temporary_folder folder;
  folder.put("libcqsa_cuda.so", "x");
  folder.put("libcqsa_hip.so", "x");
  std::string lines;
  auto params = defaults();
  params.backend_path = folder.path.c_str();
  params.log_user = &lines;
  params.log = [](void* user, int32_t level, const char* message) {
    *static_cast<std::string*>(user) += std::to_string(level) + " " + message + "\n";
  };
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  CHECK(has(lines, "1 backend cuda is not used: " + folder.path + "/libcqsa_cuda.so does not load"));
  CHECK(has(lines, "1 backend hip is not used: "));
  CHECK(has(lines, "1 backend cpu, device 0, "));
  cqsa_context_destroy(context);
}

namespace {

// The rule of cqsa.h section 1 for one struct. `first`: the size it was born with.
template <class T>
void check_struct_rule(const char* name, uint32_t known_flags) {
  INFO(name);
  const auto size = static_cast<uint32_t>(sizeof(T));
  const uint32_t first = size;
  std::vector<unsigned char> memory(size + 64, 0xAB);  // what lies past struct_size is not ours to read
  T* const caller = reinterpret_cast<T*>(memory.data());
  T out;
  const auto copy = [&](uint32_t stated) {
    std::memcpy(memory.data(), &stated, sizeof stated);
    std::memset(static_cast<void*>(&out), 0xCD, sizeof out);
    return cqsa::copy_struct(static_cast<const T*>(caller), name, first, known_flags, out);
  };
  std::memset(memory.data(), 0, size);
  CHECK(copy(size) == CQSA_OK);
  CHECK(out.struct_size == size);

  for (const uint32_t wrong : {0u, 4u, first - 1, 65537u, UINT32_MAX}) {
    CAPTURE(wrong);
    CHECK(copy(wrong) == CQSA_ERROR_STRUCT_SIZE);
    CHECK(has(error(), std::string(name) + "->struct_size is " + std::to_string(wrong)));
  }
  CHECK(copy(size + 8) == CQSA_ERROR_STRUCT_SIZE);  // a newer caller that uses what we do not know
  CHECK(has(error(), "non-zero byte at " + std::to_string(size)));
  std::memset(memory.data() + size, 0, 64);
  for (const uint32_t larger : {size + 1, size + 8, size + 64}) CHECK(copy(larger) == CQSA_OK);
  CHECK(out.struct_size == size);
  memory[size + 63] = 1;
  CHECK(copy(size + 63) == CQSA_OK);
  CHECK(copy(size + 64) == CQSA_ERROR_STRUCT_SIZE);

  for (int bit = 0; bit < 32; ++bit) {
    caller->flags = uint32_t{1} << bit;
    const bool known = known_flags >> bit & 1;
    CHECK(copy(size) == (known ? CQSA_OK : CQSA_ERROR_UNKNOWN_FLAG));
  }
  CHECK(cqsa::copy_struct(static_cast<const T*>(nullptr), name, first, 0, out) == CQSA_ERROR_NULL_POINTER);
  CHECK(has(error(), std::string(name) + " is NULL"));
}

// An older caller: its struct ends where `first` says, and the rest is as if zero.
void check_older_caller() {
  cqsa_run_info caller;
  std::memset(&caller, 0xAB, sizeof caller);
  caller.struct_size = 16;
  caller.flags = 0;
  caller.peak_device_bytes = 7;
  cqsa_run_info out;
  CHECK(cqsa::copy_struct(&caller, "info", 16, 0, out) == CQSA_OK);
  CHECK(out.peak_device_bytes == 7);
  CHECK(out.peak_host_bytes == 0);
  CHECK(out.tile_k == 0);

  out.tasks = 5;
  out.peak_device_bytes = 9;
  cqsa::write_struct(out, &caller);
  CHECK(caller.peak_device_bytes == 9);
  CHECK(caller.struct_size == 16);
  CHECK(static_cast<uint64_t>(caller.tasks) == 0xABABABABABABABAB);  // not a byte past its size
}

template <class T>
void check_init(void (*init)(T*, uint64_t), const T& by_macro) {
  T zero;
  std::memset(static_cast<void*>(&zero), 0, sizeof zero);
  zero.struct_size = sizeof zero;
  CHECK(std::memcmp(&by_macro, &zero, sizeof zero) == 0);  // the macro says what the function does

  std::vector<unsigned char> memory(sizeof(T) + 16, 0xAB);
  T* const caller = reinterpret_cast<T*>(memory.data());
  init(caller, sizeof(T));
  CHECK(std::memcmp(caller, &zero, sizeof zero) == 0);
  CHECK(memory[sizeof(T)] == 0xAB);
  init(caller, 12);  // an older, smaller struct
  CHECK(caller->struct_size == 12);
  init(caller, sizeof(T) + 8);  // a newer, larger one
  CHECK(caller->struct_size == sizeof(T) + 8);
  CHECK(memory[sizeof(T) + 7] == 0);
  CHECK(memory[sizeof(T) + 8] == 0xAB);
  init(nullptr, sizeof(T));
  memory.assign(memory.size(), 0xAB);
  init(caller, 3);  // too small for anything: left alone
  CHECK(memory[0] == 0xAB);
}

}  // namespace

TEST_CASE("struct_size: smaller, larger, dirty tails, unknown flags", "[abi_struct]") {
  check_struct_rule<cqsa_allocator>("allocator", 0);
  check_struct_rule<cqsa_backend_info>("info", 0);
  check_struct_rule<cqsa_context_params>("params", 0);
  check_struct_rule<cqsa_attention_params>("params", (CQSA_ATTENTION_DETERMINISTIC << 1) - 1);
  check_struct_rule<cqsa_attention_args>("args", 0);
  check_struct_rule<cqsa_run_info>("info", 0);
  check_struct_rule<cqsa_plan_info>("info", 0);
  check_struct_rule<cqsa_attention_merge_args>("args", 0);
  check_struct_rule<cqsa_attention_selected_args>("args", CQSA_SELECTED_CHECK);
  check_struct_rule<cqsa_kv_args>("args", 0);
  check_older_caller();
}

TEST_CASE("struct_size at the door of context and query", "[abi_struct]") {
  struct newer {
    cqsa_context_params params;
    int64_t added[2];
  } caller{};
  const auto create = [&] {
    cqsa_context* context = nullptr;
    const cqsa_status status = cqsa_context_create(&caller.params, &context);
    cqsa_context_destroy(context);
    return status;
  };
  caller.params.backend = "cpu";
  CHECK(create() == CQSA_ERROR_STRUCT_SIZE);
  caller.params.struct_size = sizeof(cqsa_context_params) - 8;
  CHECK(create() == CQSA_ERROR_STRUCT_SIZE);
  caller.params.struct_size = sizeof caller;
  CHECK(create() == CQSA_OK);
  caller.added[1] = 1;
  CHECK(create() == CQSA_ERROR_STRUCT_SIZE);
  caller.params.struct_size = sizeof(cqsa_context_params);
  CHECK(create() == CQSA_OK);
  caller.params.flags = 1;
  CHECK(create() == CQSA_ERROR_UNKNOWN_FLAG);

  cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
  info.struct_size = 0;
  info.device_count = 77;
  CHECK(cqsa_backend_query("cpu", nullptr, &info) == CQSA_ERROR_STRUCT_SIZE);
  CHECK(info.device_count == 77);
}

TEST_CASE("*_init functions and *_INIT macros agree", "[abi_struct]") {
  check_init<cqsa_backend_info>(cqsa_backend_info_init, CQSA_BACKEND_INFO_INIT);
  check_init<cqsa_context_params>(cqsa_context_params_init, CQSA_CONTEXT_PARAMS_INIT);
  check_init<cqsa_attention_params>(cqsa_attention_params_init, CQSA_ATTENTION_PARAMS_INIT);
  check_init<cqsa_run_info>(cqsa_run_info_init, CQSA_RUN_INFO_INIT);
  check_init<cqsa_attention_args>(cqsa_attention_args_init, CQSA_ATTENTION_ARGS_INIT);
  check_init<cqsa_plan_info>(cqsa_plan_info_init, CQSA_PLAN_INFO_INIT);
  check_init<cqsa_attention_merge_args>(cqsa_attention_merge_args_init, CQSA_ATTENTION_MERGE_ARGS_INIT);
  check_init<cqsa_attention_selected_args>(cqsa_attention_selected_args_init, CQSA_ATTENTION_SELECTED_ARGS_INIT);
  check_init<cqsa_kv_args>(cqsa_kv_args_init, CQSA_KV_ARGS_INIT);
}
