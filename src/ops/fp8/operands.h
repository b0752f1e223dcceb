// SPDX-License-Identifier: Apache-2.0
// The tensors of an FP8 call: each checked as it is named, and all of them for overlap at the end.
#pragma once
#include <memory>

#include "context.h"
#include "ops/attention/enqueue.h"
#include "tensor.h"

namespace cqsa::fp8 {

// Room for `count` elements, on the stack where they are few.
template <class T, int few>
class small_array {
 public:
  explicit small_array(int64_t count) : more_(count > few ? new T[static_cast<size_t>(count)] : nullptr) {}
  T* data() { return more_ ? more_.get() : few_; }
  T& operator[](int64_t i) { return data()[i]; }

 private:
  T few_[few];
  std::unique_ptr<T[]> more_;
};

// Some memory that a call reads or writes: a tensor, or bytes (a ring, a workspace).
struct operand {
  const cqsa_tensor* tensor;  // nullptr: the bytes from low to high
  const char* name;           // "args->row.out"
  uintptr_t low, high;        // equal: nothing
  int32_t entry;              // of an array of arguments, where there is one
  bool is_output;
};

enum class look : uint8_t { everywhere, shapes_only };  // shapes_only: data, devices and overlap do not count, as data may be NULL

class operand_list {
 public:
  // room: for all that will be taken.
  operand_list(const cqsa_context& context, operand* room, look mode) : context_(context), all_(room), mode_(mode) {}

  cqsa_status input(const cqsa_tensor* t, const char* name, int min_ndim, int max_ndim) { return take(t, name, min_ndim, max_ndim, false); }
  cqsa_status output(const cqsa_tensor* t, const char* name, int min_ndim, int max_ndim) { return take(t, name, min_ndim, max_ndim, true); }
  // Memory that is written; its place has been checked.
  void bytes(const void* memory, uint64_t count, const char* name);
  // Whether memory is the device's own, status otherwise.
  cqsa_status check_place(const void* memory, const char* name, cqsa_status otherwise);
  void begin_entry(int32_t entry) { entry_ = entry; }

  // No output shares memory with anything else. `but_same`: an input that may be exactly the output `as`.
  cqsa_status check_overlap(const cqsa_tensor* but_same = nullptr, const cqsa_tensor* as = nullptr) const;

  // What a leaf gets: the first element, nullptr where there is none.
  void* first(const cqsa_tensor& t) const;
  bool shapes_only() const { return mode_ == look::shapes_only; }
  const cqsa_context& context() const { return context_; }

 private:
  cqsa_status take(const cqsa_tensor* t, const char* name, int min_ndim, int max_ndim, bool is_output);
  cqsa_status check_device(const cqsa_tensor& t, const char* name);
  cqsa_status check_many() const;

  const cqsa_context& context_;
  operand* all_;
  int64_t count_ = 0;
  int32_t entry_ = -1;
  look mode_;
  pointer_answers answers_;
};

bool is_float(cqsa_dtype dtype);  // f32, f16, bf16
cqsa_status wrong_dtype(const char* name, const cqsa_tensor& t, const char* wanted);
cqsa_status check_dtype(const char* name, const cqsa_tensor& t, cqsa_dtype wanted);
cqsa_status check_float(const char* name, const cqsa_tensor& t);
cqsa_status check_format(const char* name, const cqsa_tensor& t);
cqsa_status check_format(const char* name, cqsa_dtype format);

// A tensor of one element of a type, of any axes; nullptr where it is not given.
cqsa_status take_one(operand_list& list, const cqsa_tensor* t, const char* name, cqsa_dtype dtype, bool is_output, void*& out);
// One of `count` elements along one axis.
cqsa_status take_row(operand_list& list, const cqsa_tensor* t, const char* name, int64_t count, const char* axis, bool is_output);

// [rows, columns] or [batch, rows, columns] as a leaf sees it. A batch counts as rows where it can: batch_ becomes 1.
cqsa_matrix matrix_of(const operand_list& list, const cqsa_tensor& t);

// ---- scales -----------------------------------------------------------------------------------------------------------------

inline int64_t blocks_of(int64_t size, int64_t block) { return block == 0 ? 1 : size / block + (size % block != 0); }

// The grid of a matrix of rows x columns, without data. block: as the caller states it, 0 for all.
cqsa_scale_grid grid_of(int64_t rows, int64_t columns, const int64_t* block);

struct grid_names {
  const char *tensor, *layout;  // "args->row.scale_inv", "args->row.scale_layout"
};
// Data, type, layout and strides of a grid whose rows and columns are known. t nullptr: absent.
cqsa_status take_grid(operand_list& list, const cqsa_tensor* t, const grid_names& names, int32_t layout, bool is_output, cqsa_scale_grid& grid);
cqsa_status take_f32_grid(operand_list& list, const cqsa_tensor* t, const char* name, bool is_output, cqsa_scale_grid& grid);
// The type and layout imply powers of two.
inline bool is_e8m0(const cqsa_scale_grid& grid) { return grid.data && grid.dtype != CQSA_DTYPE_F32; }

cqsa_status check_layout(int32_t layout, const char* name);
cqsa_status check_margin(int32_t margin, const char* name);
cqsa_status check_bounds(float eps, float amax_limit, const char* eps_name, const char* limit_name);

// ---- groups -----------------------------------------------------------------------------------------------------------------

struct groups_view {
  const void* data = nullptr;
  cqsa_dtype dtype = CQSA_DTYPE_NONE;
  int64_t stride = 0, count = 0;
};
cqsa_status take_groups(operand_list& list, const cqsa_tensor* t, groups_view& out);
// Their values, on a host backend: never falling, 0 to rows.
cqsa_status check_groups(const groups_view& groups, int64_t rows);

// ---- leaves -----------------------------------------------------------------------------------------------------------------

// The last message, which speaks of `base` ("args"), for one entry of an array: "args[3]->x is ..".
cqsa_status name_entry(cqsa_status status, const char* base, int64_t entry);
cqsa_status report(const cqsa_context& context, cqsa_status status, const char* what);
cqsa_status no_leaf(const cqsa_context& context, const char* what);

}  // namespace cqsa::fp8
