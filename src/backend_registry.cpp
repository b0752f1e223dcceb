// SPDX-License-Identifier: Apache-2.0
#include "backend_registry.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "dynlib.h"
#include "process_lock.h"

#if __has_include("cqsa_build_id.h")
#include "cqsa_build_id.h"
#endif
#ifndef CQSA_BUILD_ID
#define CQSA_BUILD_ID "dev"
#endif

namespace cqsa {

const char* const backend_names[] = {"cpu", "cuda", "hip", nullptr};

const char* build_id() { return CQSA_BUILD_ID; }

cqsa_status status_of_state(int32_t backend_state) {
  switch (backend_state) {
    case CQSA_BACKEND_READY: return CQSA_OK;
    case CQSA_BACKEND_NOT_FOUND: return CQSA_ERROR_BACKEND_NOT_FOUND;
    case CQSA_BACKEND_LOAD_FAILED: return CQSA_ERROR_BACKEND_LOAD_FAILED;
    case CQSA_BACKEND_ABI_MISMATCH: return CQSA_ERROR_ABI_MISMATCH;
    case CQSA_BACKEND_NO_DRIVER: return CQSA_ERROR_NO_DRIVER;
    case CQSA_BACKEND_NO_DEVICE: return CQSA_ERROR_NO_DEVICE;
    case CQSA_BACKEND_NO_DEVICE_CODE: return CQSA_ERROR_NO_DEVICE_CODE;
    default: return CQSA_ERROR_INTERNAL;
  }
}

namespace {

using std::string;

backend_lookup refuse(int32_t state, string reason) { return {nullptr, state, std::move(reason)}; }

// What is wrong with the struct that a plugin handed over; READY when nothing is. build_id is read only when the struct is
// long enough to have it.
backend_lookup check_struct(const cqsa_backend_v1* backend, const string& file, const char* name) {
  if (backend == nullptr) return refuse(CQSA_BACKEND_LOAD_FAILED, file + ": its entry point gave no backend");
  const uint32_t size = backend->struct_size, wanted = sizeof(cqsa_backend_v1);
  const bool has_id = size >= offsetof(cqsa_backend_v1, build_id) + sizeof(char*);
  const string ids = string("build id of the plugin \"") + (has_id && backend->build_id ? backend->build_id : "") +
                     "\", of this library \"" + build_id() + "\"";
  if (size != wanted) {
    return refuse(CQSA_BACKEND_ABI_MISMATCH, file + ": its backend struct has " + std::to_string(size) + " bytes, wanted " +
                                                 std::to_string(wanted) + "; " + ids);
  }
  if (backend->build_id == nullptr || std::strcmp(backend->build_id, build_id()) != 0)
    return refuse(CQSA_BACKEND_ABI_MISMATCH, file + " belongs to another build: " + ids);
  if (backend->name == nullptr || std::strcmp(backend->name, name) != 0) {
    return refuse(CQSA_BACKEND_LOAD_FAILED, file + " is the backend \"" + (backend->name ? backend->name : "") +
                                                "\", wanted \"" + name + "\"");
  }
  if (!backend->last_error || !backend->state || !backend->device_count || !backend->device_properties ||
      !backend->device_open || !backend->device_close)
    return refuse(CQSA_BACKEND_LOAD_FAILED, file + ": its backend struct lacks a function that every backend must have");
  return {backend, CQSA_BACKEND_READY, ""};
}

backend_lookup check_state(const cqsa_backend_v1* backend, const string& file) {
  char reason[512] = "";
  const int32_t state = backend->state(reason, sizeof reason);
  reason[sizeof reason - 1] = '\0';
  if (state == CQSA_BACKEND_READY) return {backend, state, ""};
  if (state < CQSA_BACKEND_READY || state > CQSA_BACKEND_NO_DEVICE_CODE)
    return refuse(CQSA_BACKEND_LOAD_FAILED, file + ": it reports the unknown state " + std::to_string(state));
  return refuse(state, file + ": " + (reason[0] != '\0' ? reason : "it is not ready and gives no reason"));
}

// Asks an open plugin for its backend.
backend_lookup enter(void* library, const string& file, const char* name) {
  string error;
  void* const symbol = library_symbol(library, CQSA_BACKEND_ENTRY, error);
  if (symbol == nullptr)
    return refuse(CQSA_BACKEND_LOAD_FAILED, file + " has no entry point " CQSA_BACKEND_ENTRY ": " + error);
  const cqsa_host_v1 host = {sizeof(cqsa_host_v1), CQSA_ABI_VERSION, build_id()};
  const cqsa_backend_v1* backend = nullptr;
  const cqsa_status status = reinterpret_cast<cqsa_backend_entry_fn>(symbol)(&host, &backend);
  if (status == CQSA_ERROR_ABI_MISMATCH && backend == nullptr)
    return refuse(CQSA_BACKEND_ABI_MISMATCH, file + " refuses this library, whose build id is \"" + build_id() + "\"");
  if (status != CQSA_OK && status != CQSA_ERROR_ABI_MISMATCH) {
    return refuse(CQSA_BACKEND_LOAD_FAILED,
                  file + ": its entry point failed with " + cqsa_status_string(status) + " (" + std::to_string(status) + ")");
  }
  backend_lookup found = check_struct(backend, file, name);
  if (status != CQSA_OK && found.state == CQSA_BACKEND_READY)
    return refuse(CQSA_BACKEND_ABI_MISMATCH, file + " refuses this library although their build ids agree: " + build_id());
  return found.state == CQSA_BACKEND_READY ? check_state(backend, file) : found;
}

// Closes a plugin on every way out, an exception's included, unless it is to stay.
struct open_plugin {
  void* library;
  ~open_plugin() {
    if (library != nullptr) library_close(library);
  }
};

// A ready plugin stays for good, and with it this library: its device context may call back into neither once unmapped.
backend_lookup load(const string& file, const char* name) {
  string error;
  open_plugin plugin{library_open(file, error)};
  if (plugin.library == nullptr) return refuse(CQSA_BACKEND_LOAD_FAILED, file + " does not load: " + error);
  backend_lookup found = enter(plugin.library, file, name);
  if (found.state == CQSA_BACKEND_READY) {
    pin_self();
    plugin.library = nullptr;
  }
  return found;
}

class registry {
 public:
  // The environment is read at the library's first use and then never again: a forked child takes what its parent read.
  explicit registry(const registry* of_parent) {
    const char* const value = of_parent == nullptr ? secure_getenv("CQSA_BACKEND_PATH") : of_parent->environment_.c_str();
    environment_ = value != nullptr ? value : "";
    own_folder_ = own_folder();
  }

  backend_lookup find(const char* name, const char* path) {
    const string key = string(name) + '\n' + (path != nullptr ? path : "");
    if (const backend_lookup* known = recall(by_question_, key)) return *known;
    backend_lookup found = std::strcmp(name, "cpu") == 0 ? linked_in() : search(name, path);
    by_question_.push_back({key, found});
    return found;
  }

 private:
  struct memory {
    string key;
    backend_lookup found;
  };

  static const backend_lookup* recall(const std::vector<memory>& memories, const string& key) {
    for (const memory& m : memories)
      if (m.key == key) return &m.found;
    return nullptr;
  }

  static backend_lookup linked_in() {
    backend_lookup found = check_state(cqsa_cpu_backend(), "the CPU backend");
    found.backend = cqsa_cpu_backend();
    return found;
  }

  // The first file of the right name decides: a broken plugin in the folder that the caller named must not be passed over
  // in silence for another one.
  backend_lookup search(const char* name, const char* path) {
    const string file = string("libcqsa_") + name + ".so";
    string tried;
    string found;
    if (path != nullptr && !is_absolute(path)) {
      note(tried, string("backend_path \"") + path + "\" was ignored because it is not absolute");
    } else if (path != nullptr && look(path, "backend_path", file, tried, found)) {
      return load_once(found, name);
    }
    if (environment_.empty()) {
      note(tried, "CQSA_BACKEND_PATH is not set");
    } else if (!is_absolute(environment_.c_str())) {
      note(tried, "CQSA_BACKEND_PATH \"" + environment_ + "\" was ignored because it is not absolute");
    } else if (look(environment_, "CQSA_BACKEND_PATH", file, tried, found)) {
      return load_once(found, name);
    }
    if (own_folder_.empty()) {
      note(tried, "libcqsa has no folder of its own");
    } else if (look(own_folder_, "the folder of libcqsa", file, tried, found)) {
      return load_once(found, name);
    }
    return refuse(CQSA_BACKEND_NOT_FOUND, "no " + file + " was found: " + tried);
  }

  static void note(string& tried, const string& sentence) { tried += (tried.empty() ? "" : "; ") + sentence; }

  static bool look(const string& folder, const char* origin, const string& file, string& tried, string& found) {
    const string candidate = folder + (folder.back() == '/' ? "" : "/") + file;
    struct stat status;
    if (stat(candidate.c_str(), &status) == 0) {
      found = candidate;
      return true;
    }
    const string trouble = errno == ENOENT ? "" : string(", ") + strerrordesc_np(errno);
    note(tried, "not in " + folder + " (" + origin + trouble + ")");
    return false;
  }

  backend_lookup load_once(const string& file, const char* name) {
    const string key = real_path(file) + '\n' + name;
    if (const backend_lookup* known = recall(by_file_, key)) return *known;
    backend_lookup found = load(file, name);
    by_file_.push_back({key, found});
    return found;
  }

  string environment_;  // read once, at the library's first use
  string own_folder_;
  std::vector<memory> by_question_;
  std::vector<memory> by_file_;
};

// Both are usable before any constructor and after all destructors: exit() runs those while other threads may still be here.
constinit process_lock lock;
constinit registry* instance = nullptr;

// At dlclose, so that nothing is left behind, and at exit.
__attribute__((destructor)) void forget() {
  const process_lock_guard hold(lock);
  if (!hold.inherited()) delete instance;
  instance = nullptr;
}

}  // namespace

backend_lookup find_backend(const char* name, const char* path) {
  const process_lock_guard hold(lock);
  // An inherited one is left alone, and leaked on purpose: a thread of the parent may have been at work on it.
  const registry* const of_parent = hold.inherited() ? instance : nullptr;
  if (hold.inherited()) instance = nullptr;
  if (instance == nullptr) instance = new registry(of_parent);
  return instance->find(name, path);
}

}  // namespace cqsa
