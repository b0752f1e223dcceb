// SPDX-License-Identifier: Apache-2.0
// The dynamic loader, as little of it as is needed: open a plugin, find where we are ourselves, stay loaded.
#pragma once
#include <string>

namespace cqsa {

// RTLD_NOW | RTLD_LOCAL. nullptr with the loader's own sentence in `error`.
void* library_open(const std::string& file, std::string& error);
void* library_symbol(void* library, const char* name, std::string& error);
void library_close(void* library);

// Folder of the shared library this code is in, absolute, symbolic links resolved. "" when it is linked into the executable
// (whose folder is never searched) or cannot be told.
std::string own_folder();

// Keeps this library mapped until the process ends, whatever dlclose its users call.
void pin_self();

bool is_absolute(const char* path);

// Absolute, links resolved; `file` itself when that fails.
std::string real_path(const std::string& file);

}  // namespace cqsa
