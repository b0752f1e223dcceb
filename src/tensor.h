// SPDX-License-Identifier: Apache-2.0
// Checks of the caller's tensors: sizes, strides, products that overflow, and outputs that overlap.
#pragma once
#include <cstring>

#include "backends/cqsa_backend.h"
#include "error.h"

namespace cqsa {

int64_t dtype_bits(cqsa_dtype dtype);          // 0 for a type the library does not know
inline int64_t dtype_bytes(cqsa_dtype dtype) { return dtype_bits(dtype) / 8; }
const char* dtype_name(cqsa_dtype dtype);  // "f16"; "unknown" otherwise

// The most axes that any operand may have.
inline constexpr int max_axes = 8;

// Element i of an I32 or I64 array at any address.
inline int64_t index_at(const void* array, cqsa_dtype dtype, int64_t i) {
  int32_t narrow;
  int64_t wide;
  if (dtype == CQSA_DTYPE_I64) return std::memcpy(&wide, static_cast<const char*>(array) + 8 * i, sizeof wide), wide;
  return std::memcpy(&narrow, static_cast<const char*>(array) + 4 * i, sizeof narrow), narrow;
}

bool multiply_overflows(int64_t a, int64_t b, int64_t* product_out);

// Bytes from the first to one past the last byte that a tensor touches, relative to data + byte_offset (low <= 0 < high;
// both 0 for an empty tensor).
struct byte_extent {
  int64_t low, high;
};

// ndim in [min, max], shape not NULL, sizes >= 0, element product and byte extent fit in int64, a known dtype, data not NULL
// unless empty. `name` is the argument's name in messages ("args->q"). Fills the extent.
cqsa_status check_tensor(const cqsa_tensor* tensor, const char* name, int min_ndim, int max_ndim, byte_extent* extent_out);

// Axis sizes must be equal to `wanted` (message prints both as [a, b, c]). allow_one: size 1 is accepted for any axis
// (broadcast). axis_names: ndim names that the message adds in parentheses, or nullptr.
cqsa_status check_shape(const cqsa_tensor& tensor, const char* name, const int64_t* wanted, int ndim, bool allow_one = false,
                        const char* const* axis_names = nullptr);

// A shape as text, "[2, 4, 64, 32]", for messages.
struct shape_text {
  char text[184];
  shape_text(const int64_t* shape, int ndim);
};

bool is_empty(const cqsa_tensor& tensor);
// The address of the first element. Unsigned: an empty tensor may have any offset, and its sum may wrap.
uintptr_t address_of(const cqsa_tensor& tensor);

// Element for element the same memory; the two have the same shape.
bool same_view(const cqsa_tensor& a, const cqsa_tensor& b);

// Strides of the tensor in elements (explicit or compact row-major; an axis of size 0 counts as 1). An axis with less than two
// elements always has the compact one: the caller's may be any number, one that overflows in bytes too.
void strides_of(const cqsa_tensor& tensor, int64_t* strides_out);

// Two different index tuples of one output reach the same byte: CQSA_ERROR_STRIDES. The tensor has passed check_tensor.
cqsa_status check_no_self_overlap(const cqsa_tensor& tensor, const char* name);

// True when some byte belongs to both; an empty tensor overlaps nothing. Both have passed check_tensor. Addresses are compared
// whatever the devices are: CUDA and HIP have one address space with the host. Exact for interleaved views of one buffer (a packed qkv buffer is fine) up to a bound
// on the work, past which it says true.
bool tensors_overlap(const cqsa_tensor& a, const cqsa_tensor& b);

// CQSA_ERROR_OVERLAP with the byte ranges of both when they overlap. `relation` may add what would have been allowed.
cqsa_status check_no_overlap(const cqsa_tensor& output, const char* output_name, const cqsa_tensor& other, const char* other_name,
                             const char* relation = "");

}  // namespace cqsa
