// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of cqsa.h sections 2, 3, 6 and 7, and every *_init: validate, call, no exception out.
#include <cinttypes>
#include <cstdlib>
#include <cstring>

#include "abi_struct.h"
#include "backend_registry.h"
#include "context.h"
#include "dynlib.h"
#include "guard.h"

#if __has_include("cqsa_build_id.h")
#include "cqsa_build_id.h"
#endif

#define CQSA_TEXT_OF(x) #x
#define CQSA_TEXT(x) CQSA_TEXT_OF(x)
#define CQSA_VERSION_TEXT CQSA_TEXT(CQSA_VERSION_MAJOR) "." CQSA_TEXT(CQSA_VERSION_MINOR) "." CQSA_TEXT(CQSA_VERSION_PATCH)
#ifndef CQSA_BUILD_INFO_JSON
#define CQSA_BUILD_INFO_JSON "{\"version\": \"" CQSA_VERSION_TEXT "\", \"git\": \"dev\"}"
#endif

namespace cqsa {

namespace {

// Sizes the structs were born with, see copy_struct(). They stay when a struct grows.
constexpr uint32_t first_context_params = 72, first_allocator = 32, first_backend_info = 688;
static_assert(sizeof(cqsa_context_params) >= first_context_params && sizeof(cqsa_allocator) >= first_allocator &&
              sizeof(cqsa_backend_info) >= first_backend_info);

constexpr int32_t most_threads = 4096;

void* default_allocate(void*, uint64_t bytes, uint64_t alignment) {
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void default_release(void*, void* memory, uint64_t) { std::free(memory); }

cqsa_status take_allocator(const cqsa_allocator* given, cqsa_allocator& out) {
  if (given == nullptr) {
    out = {sizeof(cqsa_allocator), 0, nullptr, default_allocate, default_release};
    return CQSA_OK;
  }
  CQSA_TRY(copy_struct(given, "params->allocator", first_allocator, 0, out));
  if (out.allocate == nullptr || out.release == nullptr)
    return fail(CQSA_ERROR_NULL_POINTER, "params->allocator->%s is NULL, an allocator needs both functions",
                out.allocate == nullptr ? "allocate" : "release");
  return CQSA_OK;
}

cqsa_status take_threads(int32_t given, int32_t& out) {
  if (given < 0 || given > most_threads)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "params->num_threads is %" PRId32 ", wanted 0 to %" PRId32, given, most_threads);
  out = given != 0 ? given : available_cores();
  if (out > most_threads) out = most_threads;
  return CQSA_OK;
}

// A name becomes part of a file name, so nothing that could lead out of the folder.
cqsa_status check_name(const char* name, const char* argument) {
  const size_t length = std::strlen(name);
  if (length >= 1 && length <= 31 && std::strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == length) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is \"%s\", wanted 1 to 31 of the characters a-z, 0-9, _", argument, name);
}

cqsa_status check_path(const char* path, const char* argument) {
  if (path == nullptr || is_absolute(path)) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s is \"%s\", wanted an absolute folder or NULL", argument, path);
}

cqsa_status take_named_backend(cqsa_context& context, const char* name, const char* path) {
  const backend_lookup found = find_backend(name, path);
  if (found.state != CQSA_BACKEND_READY) return fail(status_of_state(found.state), "%s", found.reason.c_str());
  context.backend = found.backend;
  return CQSA_OK;
}

// The first ready GPU backend, else the CPU. Why one was passed over is not an error, but worth a line of the log.
cqsa_status take_best_backend(cqsa_context& context, const char* path) {
  for (int i = 1; backend_names[i] != nullptr; ++i) {
    const backend_lookup found = find_backend(backend_names[i], path);
    if (found.state == CQSA_BACKEND_READY) {
      context.backend = found.backend;
      return CQSA_OK;
    }
    log(context, CQSA_LOG_INFO, "backend %s is not used: %s", backend_names[i], found.reason.c_str());
  }
  return take_named_backend(context, "cpu", nullptr);
}

cqsa_status take_backend(const cqsa_context_params& params, cqsa_context& context) {
  const char* const name = params.backend;
  CQSA_TRY(check_path(params.backend_path, "params->backend_path"));
  if (name == nullptr || std::strcmp(name, "auto") == 0) return take_best_backend(context, params.backend_path);
  CQSA_TRY(check_name(name, "params->backend"));
  return take_named_backend(context, name, params.backend_path);
}

cqsa_status open_device(int32_t index, cqsa_context& context) {
  const int32_t count = context.backend->device_count();
  if (index < 0 || index >= count)
    return fail(CQSA_ERROR_NO_DEVICE, "params->device is %" PRId32 ", but backend %s has %" PRId32 " device%s", index,
                context.backend->name, count, count == 1 ? "" : "s");
  context.device_index = index;
  if (context.is_host()) return CQSA_OK;
  cqsa_device_properties properties{};
  cqsa_status status = context.backend->device_properties(index, &properties);
  context.chip = properties.chip;
  if (status == CQSA_OK) status = context.backend->device_open(index, &context.device);
  return status == CQSA_OK ? CQSA_OK : fail(status, "%s", context.backend->last_error());
}

cqsa_status fill(const cqsa_context_params& params, cqsa_context& context) {
  context.log = params.log;
  context.log_user = params.log_user;
  context.parallel_for = params.parallel_for;
  context.parallel_for_user = params.parallel_for_user;
  CQSA_TRY(take_allocator(params.allocator, context.allocator));
  CQSA_TRY(take_threads(params.num_threads, context.num_threads));
  CQSA_TRY(take_backend(params, context));
  if (context.parallel_for == nullptr && context.num_threads > 1)
    context.pool = std::make_unique<thread_pool>(context.num_threads);
  CQSA_TRY(open_device(params.device, context));  // last: what comes before it needs no closing
  log(context, CQSA_LOG_INFO, "backend %s, device %" PRId32 ", %" PRId32 " host thread%s", context.backend->name,
      context.device_index, context.num_threads, context.num_threads == 1 ? "" : "s");
  return CQSA_OK;
}

cqsa_status create_context(const cqsa_context_params* caller, cqsa_context** context_out) {
  if (context_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context_out is NULL");
  cqsa_context_params params{};
  if (caller != nullptr) CQSA_TRY(copy_struct(caller, "params", first_context_params, 0, params));
  static std::atomic<uint64_t> contexts{0};
  auto context = std::make_unique<cqsa_context>();
  context->number = ++contexts;
  CQSA_TRY(fill(params, *context));
  *context_out = context.release();
  return CQSA_OK;
}

// A text for a fixed array; one that is too long is cut between two characters of its UTF-8.
template <size_t size>
void copy_text(char (&out)[size], const char* text) {
  size_t length = std::strlen(text);
  if (length >= size) {
    length = size - 1;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  }
  std::memcpy(out, text, length);
  out[length] = '\0';
}

void describe_device(const cqsa_backend_v1& backend, cqsa_backend_info& info) {
  info.device_count = backend.device_count();
  cqsa_device_properties properties{};
  if (info.device_count < 1 || backend.device_properties(0, &properties) != CQSA_OK) return;
  properties.name[sizeof properties.name - 1] = '\0';
  copy_text(info.device, properties.name);
}

cqsa_status query_backend(const char* name, const char* path, cqsa_backend_info* info_out) {
  if (name == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "name is NULL");
  CQSA_TRY(check_name(name, "name"));
  CQSA_TRY(check_path(path, "backend_path"));
  CQSA_TRY(check_out_struct(info_out, "info_out", first_backend_info));
  const backend_lookup found = find_backend(name, path);
  cqsa_backend_info info{};
  info.state = found.state;
  copy_text(info.name, name);
  copy_text(info.reason, found.reason.c_str());
  if (found.state == CQSA_BACKEND_READY) describe_device(*found.backend, info);
  write_struct(info, info_out);
  return CQSA_OK;
}

}  // namespace

}  // namespace cqsa

extern "C" {

int32_t cqsa_version(void) { return CQSA_VERSION; }

int32_t cqsa_abi_version(void) { return CQSA_ABI_VERSION; }

const char* cqsa_version_string(void) { return CQSA_VERSION_TEXT; }

const char* cqsa_build_info(void) { return CQSA_BUILD_INFO_JSON; }

const char* cqsa_status_string(cqsa_status status) {
#define CQSA_CASE(name) \
  case name: return #name
  switch (status) {
    CQSA_CASE(CQSA_OK);
    CQSA_CASE(CQSA_ERROR_INVALID_ARGUMENT);
    CQSA_CASE(CQSA_ERROR_STRUCT_SIZE);
    CQSA_CASE(CQSA_ERROR_UNKNOWN_FLAG);
    CQSA_CASE(CQSA_ERROR_NULL_POINTER);
    CQSA_CASE(CQSA_ERROR_SHAPE);
    CQSA_CASE(CQSA_ERROR_DTYPE);
    CQSA_CASE(CQSA_ERROR_STRIDES);
    CQSA_CASE(CQSA_ERROR_DEVICE);
    CQSA_CASE(CQSA_ERROR_OVERLAP);
    CQSA_CASE(CQSA_ERROR_INDEX);
    CQSA_CASE(CQSA_ERROR_WORKSPACE);
    CQSA_CASE(CQSA_ERROR_UNSUPPORTED);
    CQSA_CASE(CQSA_ERROR_BACKEND_NOT_FOUND);
    CQSA_CASE(CQSA_ERROR_BACKEND_LOAD_FAILED);
    CQSA_CASE(CQSA_ERROR_ABI_MISMATCH);
    CQSA_CASE(CQSA_ERROR_NO_DRIVER);
    CQSA_CASE(CQSA_ERROR_NO_DEVICE);
    CQSA_CASE(CQSA_ERROR_NO_DEVICE_CODE);
    CQSA_CASE(CQSA_ERROR_BUDGET_TOO_SMALL);
    CQSA_CASE(CQSA_ERROR_OUT_OF_HOST_MEMORY);
    CQSA_CASE(CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
    CQSA_CASE(CQSA_ERROR_OUT_OF_PINNED_MEMORY);
    CQSA_CASE(CQSA_ERROR_CANCELLED);
    CQSA_CASE(CQSA_ERROR_CALLBACK);
    CQSA_CASE(CQSA_ERROR_RUNTIME);
    CQSA_CASE(CQSA_ERROR_IO);
    CQSA_CASE(CQSA_ERROR_CHECKPOINT);
    CQSA_CASE(CQSA_ERROR_CAPTURE_UNSAFE);
    CQSA_CASE(CQSA_ERROR_INTERNAL);
    default: return "CQSA_ERROR_UNKNOWN";
  }
#undef CQSA_CASE
}

const char* cqsa_last_error(void) { return cqsa::last_error_text(); }

void cqsa_backend_info_init(cqsa_backend_info* info, uint64_t size) { cqsa::init_struct(info, size); }

void cqsa_context_params_init(cqsa_context_params* params, uint64_t size) { cqsa::init_struct(params, size); }

void cqsa_attention_params_init(cqsa_attention_params* params, uint64_t size) { cqsa::init_struct(params, size); }

void cqsa_run_info_init(cqsa_run_info* info, uint64_t size) { cqsa::init_struct(info, size); }

void cqsa_attention_args_init(cqsa_attention_args* args, uint64_t size) { cqsa::init_struct(args, size); }

void cqsa_plan_info_init(cqsa_plan_info* info, uint64_t size) { cqsa::init_struct(info, size); }

void cqsa_attention_merge_args_init(cqsa_attention_merge_args* args, uint64_t size) { cqsa::init_struct(args, size); }

const char* cqsa_backend_name(int32_t index) {
  if (index < 0) return nullptr;
  for (int32_t i = 0; cqsa::backend_names[i] != nullptr; ++i)
    if (i == index) return cqsa::backend_names[i];
  return nullptr;
}

cqsa_status cqsa_backend_query(const char* name, const char* backend_path, cqsa_backend_info* info_out) {
  return cqsa::guard([&] { return cqsa::query_backend(name, backend_path, info_out); });
}

cqsa_status cqsa_context_create(const cqsa_context_params* params, cqsa_context** context_out) {
  return cqsa::guard([&] { return cqsa::create_context(params, context_out); });
}

void cqsa_context_destroy(cqsa_context* context) {
  if (context != nullptr) cqsa::release(context);
}

const char* cqsa_context_backend(const cqsa_context* context) { return context != nullptr ? context->backend->name : ""; }

}  // extern "C"
