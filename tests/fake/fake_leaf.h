// SPDX-License-Identifier: Apache-2.0
// A leaf call on its way to the CPU backend: all its addresses checked against what is alive, then translated.
#pragma once
#include <string>
#include <vector>

#include "backends/cqsa_backend.h"

namespace fake {

struct leaf_call {
  cqsa_attention_leaf leaf;  // with real addresses
  std::vector<cqsa_rect> rects;
  void* workspace = nullptr;
  uint64_t workspace_bytes = 0;

  // "" or what is wrong with the call. Rectangles are read now: they belong to the host, which may change them afterwards.
  std::string prepare(const cqsa_attention_leaf& from, void* workspace, uint64_t bytes);
  // Whether everything is still allocated.
  bool alive() const;
  // Computes on the CPU what the device would, once or, as a part of a graph, several times.
  bool run(const cqsa_attention_impl& impl) const;

 private:
  struct range {
    const void* begin;
    uint64_t bytes;
  };
  std::string operand(const char* name, cqsa_view& view, const int64_t (&first)[4], const int64_t (&count)[4]);
  std::string bytes(const char* name, const void* begin, uint64_t count);
  std::string indices();
  std::string operands();
  std::string state();
  std::string rows_and_keys(int64_t* rows, int64_t* keys);
  std::vector<range> ranges_;
};

}  // namespace fake
