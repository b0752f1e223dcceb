// SPDX-License-Identifier: Apache-2.0
// The operands and results of a problem, in memory that shows what should not have been touched.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cqsa.h"
#include "problem.h"

namespace tool {

// Pseudo-random numbers that any program can make again: element n of the buffer with seed s is made from
// splitmix64(s + n * golden), as tests/vectors/README.md describes it.
class random_buffer {
 public:
  explicit random_buffer(uint64_t seed) : seed_(seed) {}
  uint64_t bits(uint64_t n) const;
  double unit(uint64_t n) const;  // in [-1, 1), a multiple of 2^-23
  int64_t integer(int64_t low, int64_t high) { return low + static_cast<int64_t>(bits(next_++) % static_cast<uint64_t>(high - low + 1)); }
  bool chance(int percent) { return integer(1, 100) <= percent; }

 private:
  uint64_t seed_, next_ = 0;
};

// A strided array of at most 4 axes that owns its memory: guard zones at both ends, gaps between rows, all with one pattern.
class guarded_array {
 public:
  guarded_array() = default;
  guarded_array(cqsa_dtype dtype, std::vector<int64_t> shape, memory_layout layout = memory_layout::packed);

  bool present() const { return dtype_ != CQSA_DTYPE_NONE; }
  cqsa_dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t count() const;
  // Its whole memory, guard zones and gaps included.
  uint64_t bytes() const { return memory_.size(); }
  std::byte* data() { return memory_.data(); }
  // By row-major number of the element.
  double get(int64_t n) const;
  void set(int64_t n, double value);
  void set_some(int64_t first, int64_t count, double value);
  void fill(uint64_t seed, double range, int threads);  // [-range, range); i8: every code
  void poison(int threads);  // every element to 0xFF bytes, which is NaN in every floating-point type
  bool guards_intact(int threads) const;
  bool has_nan(int threads) const;
  uint64_t checksum(int threads) const;
  const cqsa_tensor* tensor();  // nullptr when absent; valid until the array moves

 private:
  void place_axes(memory_layout layout);
  const std::byte* at(int64_t n) const;
  int64_t width() const { return shape_.empty() ? 1 : shape_.back(); }
  int64_t step_bytes() const { return shape_.empty() ? element_bytes_ : strides_.back() * element_bytes_; }
  // body(number of the first element, its address) for the rows of the last axis, in several threads.
  void for_rows(int threads, const std::function<void(int64_t, const std::byte*)>& body) const;
  std::byte* at(int64_t n) { return const_cast<std::byte*>(static_cast<const guarded_array*>(this)->at(n)); }

  cqsa_dtype dtype_ = CQSA_DTYPE_NONE;
  int64_t element_bytes_ = 0, first_ = 0;  // first_: element of the memory that index 0, 0, .. has
  std::vector<int64_t> shape_, strides_;
  std::vector<std::byte> memory_;
  cqsa_tensor tensor_{};
};

// All operands of a problem. NaN lies in keys and values that no query may see, in rows past the last segment, and in gaps.
class problem_data {
 public:
  problem_data(const cqsa_context* context, const problem_spec& spec, int threads);

  const cqsa_attention_params& params() const { return params_; }  // complete but for schedule and budget
  cqsa_attention_args args();
  // The operands and results that are there.
  struct slot {
    int number;
    const char* name;
    const cqsa_tensor* cqsa_attention_args::*field;
    guarded_array* array;
    bool is_result, of_keys;  // of_keys: k, v or their scales
  };
  std::vector<slot> slots();
  void poison_results();
  std::string damage() const;  // "" or what was written that should not have been
  bool nan_in_results() const;

 private:
  enum which { kQ, kK, kV, kKScale, kVScale, kMask, kBias, kSlopes, kSinks, kCuQ, kCuK, kUsed, kPages, kOut, kLse, kCount };
  guarded_array& make(which w, cqsa_dtype dtype, std::vector<int64_t> shape, bool with_layout = false);
  uint64_t seed_of(which w) const;
  void make_lengths();
  void make_pages();
  void make_keys();
  void make_scales(which w, int32_t kind, const std::vector<int64_t>& key_axes, int64_t dim);
  void make_extras();
  void make_queries();
  void plant_nan();

  const problem_spec& spec_;
  int threads_;
  cqsa_attention_params params_;
  std::array<guarded_array, kCount> arrays_;
  std::array<uint64_t, kCount> checksums_{};
  int64_t total_q_ = 0, total_k_ = 0;
};

}  // namespace tool
