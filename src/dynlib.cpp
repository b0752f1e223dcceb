// SPDX-License-Identifier: Apache-2.0
#include "dynlib.h"

#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>

namespace cqsa {

namespace {

const char own_address = 0;  // an address that belongs to this library

std::string loader_error() {
  const char* const text = dlerror();
  return text != nullptr ? text : "the loader gives no reason";
}

// The name under which the loader knows this library: "" in an executable, otherwise as it was opened, perhaps relative to a
// current folder of long ago.
const char* own_name() {
  Dl_info info;
  void* map = nullptr;
  if (dladdr1(&own_address, &info, &map, RTLD_DL_LINKMAP) == 0 || map == nullptr) return "";
  return static_cast<const link_map*>(map)->l_name;
}

struct file_closer {
  void operator()(FILE* file) const { std::fclose(file); }
};

// The file that the kernel has mapped at our address, from a line such as
// "7f1200000000-7f1200021000 r-xp 00000000 fe:01 393 <blanks> /usr/lib/libcqsa.so.0".
std::string own_mapped_file() {
  const std::unique_ptr<FILE, file_closer> maps(std::fopen("/proc/self/maps", "re"));
  if (!maps) return "";
  const auto here = reinterpret_cast<uintptr_t>(&own_address);
  char line[8192];
  while (std::fgets(line, sizeof line, maps.get()) != nullptr) {
    unsigned long low = 0, high = 0;
    int path_at = 0;
    if (std::sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &low, &high, &path_at) < 2 || path_at == 0) continue;
    if (here < low || here >= high) continue;
    std::string path(line + path_at);
    while (!path.empty() && path.back() == '\n') path.pop_back();
    return path;
  }
  return "";
}

}  // namespace

// A loader without memory is not a broken file: what is remembered of the latter must not be said of the former.
void* library_open(const std::string& file, std::string& error) {
  errno = 0;
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr && errno == ENOMEM) throw std::bad_alloc();
  if (library == nullptr) error = loader_error();
  return library;
}

void* library_symbol(void* library, const char* name, std::string& error) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) error = loader_error();
  return symbol;
}

void library_close(void* library) { dlclose(library); }

std::string own_folder() {
  const std::string name = own_name();
  if (name.empty()) return "";
  const std::string file = is_absolute(name.c_str()) ? real_path(name) : own_mapped_file();
  return is_absolute(file.c_str()) ? file.substr(0, file.rfind('/')) : "";
}

// The handle is dropped on purpose. The loader finds its own name again without looking at any file.
void pin_self() {
  const char* const name = own_name();
  if (*name != '\0') dlopen(name, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

bool is_absolute(const char* path) { return path[0] == '/'; }

std::string real_path(const std::string& file) {
  const std::unique_ptr<char, decltype(&std::free)> real(realpath(file.c_str(), nullptr), &std::free);
  return real ? std::string(real.get()) : file;
}

}  // namespace cqsa
