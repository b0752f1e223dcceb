// SPDX-License-Identifier: Apache-2.0
// Element types: their names in files and on the command line, and their values as doubles. Written apart from the
// library's own conversions on purpose: --check must not share code with what it checks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cqsa.h"

namespace tool {

struct element_type {
  cqsa_dtype dtype;         // CQSA_DTYPE_NONE: a type that files may hold but the library does not take
  const char* name;         // "f16"
  const char* safetensors;  // "F16"; nullptr: not in such files
  const char* npy;          // "<f2"; nullptr: likewise
  int64_t bytes;
};

std::span<const element_type> element_types();
const element_type& type_of(cqsa_dtype dtype);                 // throws for a type that is not in the list
const element_type* type_by_safetensors(std::string_view name);  // nullptr when unknown
const element_type* type_by_npy(std::string_view descr);
cqsa_dtype dtype_by_name(std::string_view name);  // "f16" of the command line; throws

double decode(cqsa_dtype dtype, const std::byte* element);

// Rounds as round_to() does; integers are truncated. NaN for a type without one is a defect of the caller.
void encode(cqsa_dtype dtype, double value, std::byte* element);

// `count` elements that lie `stride` elements apart.
template <class T> void decode_row(cqsa_dtype dtype, const std::byte* first, int64_t stride, int64_t count, T* out);

// The nearest value of a floating-point type, ties to even; overflow gives infinity.
double round_to(cqsa_dtype dtype, double value);

// Distance between neighbouring values of the type just above `magnitude`.
double ulp(cqsa_dtype dtype, double magnitude);

}  // namespace tool
