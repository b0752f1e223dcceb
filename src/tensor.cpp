// SPDX-License-Identifier: Apache-2.0
#include "tensor.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <numeric>

namespace cqsa {

namespace {

struct dtype_row {
  cqsa_dtype dtype;
  int8_t bits;
  const char* name;
};

constexpr dtype_row dtype_rows[] = {
    {CQSA_DTYPE_F32, 32, "f32"},      {CQSA_DTYPE_F16, 16, "f16"},  {CQSA_DTYPE_BF16, 16, "bf16"},
    {CQSA_DTYPE_F64, 64, "f64"},      {CQSA_DTYPE_I8, 8, "i8"},     {CQSA_DTYPE_I32, 32, "i32"},
    {CQSA_DTYPE_I64, 64, "i64"},      {CQSA_DTYPE_U8, 8, "u8"},     {CQSA_DTYPE_BOOL, 8, "bool"},
    {CQSA_DTYPE_E4M3FN, 8, "e4m3fn"}, {CQSA_DTYPE_E5M2, 8, "e5m2"},
    {CQSA_DTYPE_E4M3FNUZ, 8, "e4m3fnuz"}, {CQSA_DTYPE_E5M2FNUZ, 8, "e5m2fnuz"}, {CQSA_DTYPE_E8M0FNU, 8, "e8m0fnu"},
};

const dtype_row* find_dtype(cqsa_dtype dtype) {
  for (const dtype_row& row : dtype_rows)
    if (row.dtype == dtype) return &row;
  return nullptr;
}

int64_t element_bytes(const cqsa_tensor& tensor) { return dtype_bits(tensor.dtype) / 8; }

cqsa_status check_sizes(const cqsa_tensor& tensor, const char* name) {
  int64_t product = 1;
  bool overflow = false;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] < 0)
      return fail(CQSA_ERROR_SHAPE, "%s has shape %s, wanted no negative size", name,
                  shape_text(tensor.shape, tensor.ndim).text);
    overflow |= multiply_overflows(product, tensor.shape[i], &product);
  }
  if (overflow && !is_empty(tensor))
    return fail(CQSA_ERROR_SHAPE, "%s has shape %s, whose product overflows 64 bits", name,
                shape_text(tensor.shape, tensor.ndim).text);
  return CQSA_OK;
}

// The byte extent of a tensor that is not empty; false when it does not fit in int64.
bool compute_extent(const cqsa_tensor& tensor, byte_extent* extent_out) {
  const int64_t bytes = element_bytes(tensor);
  int64_t low = 0, high = 0, compact = 1, reach = 0;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const int64_t stride = tensor.strides != nullptr ? tensor.strides[i] : compact;
    if (tensor.strides == nullptr) compact *= tensor.shape[i];
    if (tensor.shape[i] == 1) continue;
    if (multiply_overflows(tensor.shape[i] - 1, stride, &reach)) return false;
    int64_t& end = reach < 0 ? low : high;
    if (__builtin_add_overflow(end, reach, &end)) return false;
  }
  if (multiply_overflows(low, bytes, &low) || multiply_overflows(high, bytes, &high)) return false;
  if (__builtin_add_overflow(high, bytes, &high)) return false;
  int64_t length = 0;
  if (__builtin_sub_overflow(high, low, &length)) return false;
  *extent_out = {low, high};
  return true;
}

cqsa_status check_address(const cqsa_tensor& tensor, const char* name, const byte_extent& extent) {
  if (tensor.data == nullptr)
    return fail(CQSA_ERROR_NULL_POINTER, "%s->data is NULL, but its shape is %s", name,
                shape_text(tensor.shape, tensor.ndim).text);
  uintptr_t first = 0, ignored = 0;
  if (__builtin_add_overflow(reinterpret_cast<uintptr_t>(tensor.data), tensor.byte_offset, &first) ||
      __builtin_add_overflow(first, extent.low, &ignored) || __builtin_add_overflow(first, extent.high, &ignored))
    return fail(CQSA_ERROR_STRIDES,
                "%s reaches past the end of the address space: byte_offset %" PRIu64 ", then %" PRId64 " to %" PRId64
                " bytes by its strides",
                name, tensor.byte_offset, extent.low, extent.high);
  return CQSA_OK;
}

// The sums  u[0]*size[0] + u[1]*size[1] + ..  with 0 <= u[k] <= count[k] and size[k] > 0: where the elements of a strided
// view lie, and also the distances between those of two views.
struct sum_set {
  int n = 0;
  int64_t size[2 * max_axes];
  int64_t count[2 * max_axes];

  // Keeps size descending; equal sizes are one step with the sum of their counts.
  void add(int64_t step, int64_t times) {
    int at = n;
    while (at > 0 && size[at - 1] < step) --at;
    if (at > 0 && size[at - 1] == step) {
      count[at - 1] += times;
      return;
    }
    for (int i = n++; i > at; --i) size[i] = size[i - 1], count[i] = count[i - 1];
    size[at] = step, count[at] = times;
  }
  // A step that ends where the next smaller one has filled the room before it continues that one: a compact tensor becomes a
  // single step.
  void collapse() {
    for (int k = n - 2; k >= 0; --k) {
      const int64_t ratio = size[k] / size[k + 1];
      if (size[k] % size[k + 1] != 0 || ratio > count[k + 1] + 1) continue;
      count[k + 1] += count[k] * ratio;
      for (int i = k + 1; i < n; ++i) size[i - 1] = size[i], count[i - 1] = count[i];
      --n;
    }
  }
};

// Is some sum of the set within [low, high]? Exact up to a number of search steps, past which it says yes.
struct sum_search {
  sum_set set;
  int64_t reach[2 * max_axes + 1];    // the largest sum of the steps k..
  int64_t divisor[2 * max_axes + 1];  // what all sums of the steps k.. are multiples of
  int64_t steps_left = 100000;

  bool run(int64_t low, int64_t high) {
    set.collapse();
    reach[set.n] = divisor[set.n] = 0;
    for (int k = set.n - 1; k >= 0; --k) {
      reach[k] = reach[k + 1] + set.size[k] * set.count[k];
      divisor[k] = std::gcd(set.size[k], divisor[k + 1]);
    }
    return from(0, low, high);
  }
  bool from(int k, int64_t low, int64_t high) {
    low = std::max<int64_t>(low, 0);
    high = std::min(high, reach[k]);
    if (low > high) return false;
    if (low == 0 || high == reach[k]) return true;  // all u zero, or all u at their count
    if (--steps_left < 0) return true;
    if (high / divisor[k] * divisor[k] < low) return false;
    if (k == set.n - 1) return true;
    const int64_t size = set.size[k], missing = low - reach[k + 1];
    const int64_t first = missing > 0 ? (missing + size - 1) / size : 0;
    for (int64_t u = std::min(set.count[k], high / size); u >= first; --u)
      if (from(k + 1, low - u * size, high - u * size)) return true;
    return false;
  }
};

void add_axes(const cqsa_tensor& tensor, int64_t unit, sum_set& set) {
  int64_t strides[max_axes];
  strides_of(tensor, strides);
  for (int i = 0; i < tensor.ndim; ++i)
    if (tensor.shape[i] > 1 && strides[i] != 0) set.add(std::abs(strides[i]) * unit, tensor.shape[i] - 1);
}

// Sums stay far from the end of int64 below this; no tensor of this world is larger.
constexpr int64_t largest_reach = INT64_MAX / 8;

// Two index tuples reach the same element when their difference d, not all zero, has sum d[k]*size[k] = 0. With k the first
// axis of descending stride at which they differ, d[k] >= 1 without loss of generality.
bool self_overlaps(const cqsa_tensor& tensor) {
  int64_t strides[max_axes], size[max_axes], count[max_axes], reach[max_axes + 1];
  strides_of(tensor, strides);
  int n = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 1) continue;
    if (strides[i] == 0) return true;
    int at = n++;
    for (; at > 0 && size[at - 1] < std::abs(strides[i]); --at) size[at] = size[at - 1], count[at] = count[at - 1];
    size[at] = std::abs(strides[i]), count[at] = tensor.shape[i] - 1;
  }
  reach[n] = 0;
  for (int k = n - 1; k >= 0; --k) reach[k] = reach[k + 1] + size[k] * count[k];
  if (reach[0] > largest_reach) return true;
  for (int k = 0; k < n; ++k) {
    if (size[k] > reach[k + 1]) continue;  // nested, as in every tensor cut out of a compact one
    sum_search search;
    if (count[k] > 1) search.set.add(size[k], count[k] - 1);
    for (int j = k + 1; j < n; ++j) search.set.add(size[j], 2 * count[j]);
    const int64_t target = reach[k + 1] - size[k];
    if (search.run(target, target)) return true;
  }
  return false;
}

}  // namespace

bool is_empty(const cqsa_tensor& tensor) {
  return std::any_of(tensor.shape, tensor.shape + tensor.ndim, [](int64_t n) { return n == 0; });
}

uintptr_t address_of(const cqsa_tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset; }

int64_t dtype_bits(cqsa_dtype dtype) {
  const dtype_row* row = find_dtype(dtype);
  return row != nullptr ? row->bits : 0;
}

const char* dtype_name(cqsa_dtype dtype) {
  const dtype_row* row = find_dtype(dtype);
  return row != nullptr ? row->name : "unknown";
}

bool multiply_overflows(int64_t a, int64_t b, int64_t* product_out) { return __builtin_mul_overflow(a, b, product_out); }

shape_text::shape_text(const int64_t* shape, int ndim) {
  int length = std::snprintf(text, sizeof text, "[");
  for (int i = 0; i < ndim && i < max_axes; ++i)
    length += std::snprintf(text + length, sizeof text - static_cast<size_t>(length), i == 0 ? "%" PRId64 : ", %" PRId64,
                            shape[i]);
  std::snprintf(text + length, sizeof text - static_cast<size_t>(length), "]");
}

cqsa_status check_tensor(const cqsa_tensor* tensor, const char* name, int min_ndim, int max_ndim, byte_extent* extent_out) {
  if (tensor == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "%s is NULL", name);
  max_ndim = std::min(max_ndim, max_axes);
  if (tensor->ndim < min_ndim || tensor->ndim > max_ndim) {
    if (min_ndim == max_ndim) return fail(CQSA_ERROR_SHAPE, "%s has %d axes, wanted %d", name, tensor->ndim, min_ndim);
    return fail(CQSA_ERROR_SHAPE, "%s has %d axes, wanted %d to %d", name, tensor->ndim, min_ndim, max_ndim);
  }
  if (dtype_bits(tensor->dtype) == 0)
    return fail(CQSA_ERROR_DTYPE, "%s has dtype 0x%08x, which this version does not know", name,
                static_cast<unsigned>(tensor->dtype));
  if (tensor->ndim > 0 && tensor->shape == nullptr)
    return fail(CQSA_ERROR_NULL_POINTER, "%s->shape is NULL, but the tensor has %d axes", name, tensor->ndim);
  CQSA_TRY(check_sizes(*tensor, name));
  *extent_out = {0, 0};
  if (is_empty(*tensor)) return CQSA_OK;
  if (!compute_extent(*tensor, extent_out))
    return fail(CQSA_ERROR_STRIDES,
                "%s of shape %s reaches, by its strides %s and %" PRId64 "-byte elements, further than 64 bits can say",
                name, shape_text(tensor->shape, tensor->ndim).text,
                tensor->strides != nullptr ? shape_text(tensor->strides, tensor->ndim).text : "(compact)",
                element_bytes(*tensor));
  return check_address(*tensor, name, *extent_out);
}

cqsa_status check_shape(const cqsa_tensor& tensor, const char* name, const int64_t* wanted, int ndim, bool allow_one,
                        const char* const* axis_names) {
  bool same = tensor.ndim == ndim;
  for (int i = 0; same && i < ndim; ++i) same = tensor.shape[i] == wanted[i] || (allow_one && tensor.shape[i] == 1);
  if (same) return CQSA_OK;
  char names[160] = "";
  for (int i = 0, length = 0; axis_names != nullptr && i < ndim && length < static_cast<int>(sizeof names); ++i)
    length += std::snprintf(names + length, sizeof names - static_cast<size_t>(length), "%s%s%s", i == 0 ? " (" : ", ",
                            axis_names[i], i + 1 == ndim ? ")" : "");
  return fail(CQSA_ERROR_SHAPE, "%s has shape %s, wanted %s%s%s", name, shape_text(tensor.shape, tensor.ndim).text,
              shape_text(wanted, ndim).text, names, allow_one ? ", or 1 along any of them" : "");
}

void strides_of(const cqsa_tensor& tensor, int64_t* strides_out) {
  int64_t compact = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    strides_out[i] = tensor.strides != nullptr && tensor.shape[i] > 1 ? tensor.strides[i] : compact;
    // Overflows only when another axis has size 0; then no stride is ever used.
    if (multiply_overflows(compact, std::max<int64_t>(tensor.shape[i], 1), &compact)) compact = 0;
  }
}

bool same_view(const cqsa_tensor& a, const cqsa_tensor& b) {
  if (address_of(a) != address_of(b)) return false;
  int64_t stride_a[max_axes], stride_b[max_axes];
  strides_of(a, stride_a);
  strides_of(b, stride_b);
  for (int i = 0; i < a.ndim; ++i)
    if (a.shape[i] > 1 && stride_a[i] != stride_b[i]) return false;
  return true;
}

cqsa_status check_no_self_overlap(const cqsa_tensor& tensor, const char* name) {
  if (tensor.strides == nullptr || is_empty(tensor) || !self_overlaps(tensor)) return CQSA_OK;
  return fail(CQSA_ERROR_STRIDES, "%s is an output, but with shape %s and strides %s several of its elements share memory",
              name, shape_text(tensor.shape, tensor.ndim).text, shape_text(tensor.strides, tensor.ndim).text);
}

bool tensors_overlap(const cqsa_tensor& a, const cqsa_tensor& b) {
  byte_extent extent_a, extent_b;
  if (is_empty(a) || is_empty(b)) return false;
  if (!compute_extent(a, &extent_a) || !compute_extent(b, &extent_b)) return true;
  const uintptr_t low_a = address_of(a) + static_cast<uintptr_t>(extent_a.low),
                  low_b = address_of(b) + static_cast<uintptr_t>(extent_b.low);
  const int64_t length_a = extent_a.high - extent_a.low, length_b = extent_b.high - extent_b.low;
  const bool apart =
      low_a <= low_b ? low_b - low_a >= static_cast<uintptr_t>(length_a) : low_a - low_b >= static_cast<uintptr_t>(length_b);
  if (apart) return false;
  if (length_a > largest_reach || length_b > largest_reach) return true;
  // An element of a begins at low_a + x, one of b at last_b - y, with x and y sums of the tensors' own steps. They share a
  // byte when  -bytes_a < (low_a + x) - (last_b - y) < bytes_b,  that is when x + y is near last_b - low_a.
  const int64_t bytes_a = element_bytes(a), bytes_b = element_bytes(b);
  const int64_t distance = static_cast<int64_t>(low_b - low_a) + length_b - bytes_b;
  sum_search search;
  add_axes(a, bytes_a, search.set);
  add_axes(b, bytes_b, search.set);
  return search.run(distance - bytes_a + 1, distance + bytes_b - 1);
}

cqsa_status check_no_overlap(const cqsa_tensor& output, const char* output_name, const cqsa_tensor& other, const char* other_name,
                             const char* relation) {
  if (!tensors_overlap(output, other)) return CQSA_OK;
  const auto bytes = [](const cqsa_tensor& t, uintptr_t* range) {
    byte_extent extent{};
    check_tensor(&t, "", 0, max_axes, &extent);
    const uintptr_t base = address_of(t);
    range[0] = base + static_cast<uintptr_t>(extent.low);
    range[1] = base + static_cast<uintptr_t>(extent.high);
  };
  uintptr_t a[2], b[2];
  bytes(output, a);
  bytes(other, b);
  return fail(CQSA_ERROR_OVERLAP, "%s overlaps %s%s: bytes 0x%llx to 0x%llx and 0x%llx to 0x%llx", output_name, other_name, relation,
              static_cast<unsigned long long>(a[0]), static_cast<unsigned long long>(a[1]), static_cast<unsigned long long>(b[0]),
              static_cast<unsigned long long>(b[1]));
}

}  // namespace cqsa
