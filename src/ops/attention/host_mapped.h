// SPDX-License-Identifier: Apache-2.0
// Operands in mapped files: how many bytes of them are resident, and letting pages go.
#pragma once
#include "ops/attention/device_gather.h"
#include "ops/attention/plan.h"

namespace cqsa {

// Query rows and keys that are worked on, relative to a leaf's views.
struct mapped_block {
  int64_t q_begin = 0, q_len = 0, k_begin = 0, k_len = 0;
};

// Bytes of the mapped operands that a block of so many rows and keys of the leaf's heads makes resident, wherever it begins.
// The same code serves the plan (with compact views) and the run (with the caller's strides).
uint64_t resident_bytes(const attention_problem&, const cqsa_attention_leaf& leaf, int64_t q_len, int64_t k_len);

// .. that the whole of them makes resident.
uint64_t resident_bytes_of_all(const attention_problem&, const cqsa_attention_leaf& whole);

inline constexpr int most_mapped_parts = 9;

// The mappings in which the operands lie. Letting pages go loses nothing there: they are of a file, and shared, or private,
// read-only and never written (a page that was written is the process's own, and DONTNEED discards it).
class mapped_pages {
 public:
  explicit mapped_pages(const attention_problem& problem) : problem_(problem) {}
  ~mapped_pages();
  mapped_pages(const mapped_pages&) = delete;
  mapped_pages& operator=(const mapped_pages&) = delete;

  // Fails where an operand that params call CQSA_MEMORY_MAPPED lies in other memory.
  cqsa_status find(const cqsa_attention_leaf& whole);
  // Opens the files of what was found, by their paths, where those still lead to them. For those who read instead of touching pages.
  void open_files();
  // The mapping that holds the address, or none.
  mapped_range range_of(const void* address) const;

  void drop_keys(const cqsa_attention_leaf&, const mapped_block&) const;  // keys, values, scales, and mask and bias of the block
  void drop_rows(const cqsa_attention_leaf&, const mapped_block&) const;  // q and the outputs
  void want_keys(const cqsa_attention_leaf&, const mapped_block&) const;  // have them read while something else is computed

 private:
  template <class F>
  void for_ranges(const cqsa_attention_leaf&, const mapped_block&, bool by_key, F act) const;

  const attention_problem& problem_;
  mapped_range found_[most_mapped_parts];
};

// For checkpoints: out and lse lie in shared mappings of files. Fills their ranges (lse: empty without one).
cqsa_status find_shared_outputs(const attention_problem&, const cqsa_attention_leaf& whole, mapped_range ranges_out[2]);

}  // namespace cqsa
