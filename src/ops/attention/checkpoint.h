// SPDX-License-Identifier: Apache-2.0
// How far a run has come, in a small file. Blocks are finished in order, so a count says which ones are.
#pragma once
#include <chrono>
#include <cstring>

#include "ops/attention/host_mapped.h"

namespace cqsa {

// A 64-bit hash against accidents, not against people.
class fingerprint {
 public:
  void add(const void* bytes, size_t count);
  // Rows of out and lse (view data NULL: none), for each of the heads.
  void add_rows(const cqsa_view& out, const cqsa_view& lse, int64_t heads, int64_t row, int64_t rows, int64_t channels);
  void add_row(const cqsa_view& view, int64_t batch, int64_t head, int64_t row, int64_t channels);
  uint64_t value() const { return value_; }
  void set(uint64_t value) { value_ = value; }

 private:
  uint64_t value_ = 0x9e3779b97f4a7c15u;
};

// Lengths and page tables whole, of everything else some rows, of what is in device memory nothing: the check that a run goes on
// with the inputs it began with.
uint64_t fingerprint_of_operands(const attention_problem&, const cqsa_attention_leaf& whole);

class checkpoint {
 public:
  // Reads the file, or writes a first one where there is none. outputs: what must be on disk before a count is.
  cqsa_status open(const char* path, uint64_t problem, uint64_t operands, int64_t total, const mapped_range outputs[2]);

  int64_t done() const { return record_.done; }
  fingerprint& outputs() { return outputs_; }
  cqsa_status check_outputs(const fingerprint& seen) const;

  cqsa_status finished(int64_t done);  // writes the file now and then
  void save_quietly();                 // leaves the thread's error as it is
  cqsa_status remove();                // the run is complete: outputs to disk, file gone

 private:
  // The file. Little-endian, as every machine this runs on.
  struct record {
    char magic[8];
    uint32_t version, bytes;
    uint64_t problem, operands;
    int64_t total, done;
    uint64_t outputs;   // of the rows of all finished blocks
    uint64_t checksum;  // of all before it
  };
  static uint64_t checksum_of(const record&);
  cqsa_status read(int file, record& out) const;
  cqsa_status check(const record&) const;
  cqsa_status sync_outputs() const;
  cqsa_status save();
  cqsa_status write_temporary(const char* name) const;

  using clock = std::chrono::steady_clock;
  const char* path_ = nullptr;
  record record_{};
  fingerprint outputs_;
  mapped_range ranges_[2];
  int64_t saved_ = -1;  // the count in the file
  clock::time_point next_{};
};

}  // namespace cqsa
