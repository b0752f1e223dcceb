// SPDX-License-Identifier: Apache-2.0
#include "placement.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tool {

placed_operands::placed_operands(device_memory* memory, memory_place place, problem_data& data) : place_(place), data_(data) {
  for (const problem_data::slot& slot : data_.slots()) {
    const int32_t kind = place_of(slot);
    if (kind == CQSA_MEMORY_HOST) continue;
    const bool pinned = kind == CQSA_MEMORY_PINNED;
    placed p{device_buffer(*memory, slot.array->bytes(), pinned), *slot.array->tensor()};
    p.buffer.write(slot.array->data());
    p.tensor.data = p.buffer.address();
    p.tensor.device_type = pinned ? memory->pinned_type() : memory->device_type();
    placed_.emplace(slot.number, std::move(p));
  }
}

int32_t placed_operands::place_of(const problem_data::slot& slot) const {
  switch (place_) {
    case memory_place::pageable:
      return CQSA_MEMORY_HOST;
    case memory_place::pinned:
      return CQSA_MEMORY_PINNED;
    case memory_place::kv_pageable:
      return slot.of_keys ? CQSA_MEMORY_HOST : CQSA_MEMORY_DEVICE;
    case memory_place::kv_pinned:
      return slot.of_keys ? CQSA_MEMORY_PINNED : CQSA_MEMORY_DEVICE;
    default:
      return CQSA_MEMORY_DEVICE;
  }
}

cqsa_attention_args placed_operands::args() {
  cqsa_attention_args args = data_.args();
  for (const problem_data::slot& slot : data_.slots())
    if (const auto found = placed_.find(slot.number); found != placed_.end()) args.*slot.field = &found->second.tensor;
  return args;
}

void placed_operands::tell(cqsa_attention_params& params) const {
  problem_data::slot keys{}, others{};
  keys.of_keys = true;
  params.memory_q = params.memory_out = place_of(others);
  params.memory_kv = place_of(keys);
}

void placed_operands::poison_results() {
  data_.poison_results();
  for (const problem_data::slot& slot : data_.slots())
    if (const auto found = placed_.find(slot.number); slot.is_result && found != placed_.end())
      found->second.buffer.write(slot.array->data());
}

void placed_operands::collect_results() {
  for (const problem_data::slot& slot : data_.slots())
    if (const auto found = placed_.find(slot.number); slot.is_result && found != placed_.end())
      found->second.buffer.read(slot.array->data());
}

namespace {

// Whether the buffer still holds the bytes of the array: pinned memory where it is, the device's in pieces.
bool holds(const device_buffer& buffer, const std::byte* bytes, std::vector<std::byte>& piece) {
  if (buffer.host_address()) return std::memcmp(buffer.host_address(), bytes, buffer.bytes()) == 0;
  for (uint64_t done = 0; done < buffer.bytes(); done += piece.size()) {
    const uint64_t count = std::min<uint64_t>(piece.size(), buffer.bytes() - done);
    buffer.read_part(done, piece.data(), count);
    if (std::memcmp(piece.data(), bytes + done, count) != 0) return false;
  }
  return true;
}

}  // namespace

std::string placed_operands::damage() const {
  std::vector<std::byte> piece(std::size_t{8} << 20);
  for (const problem_data::slot& slot : data_.slots()) {
    const auto found = placed_.find(slot.number);
    if (slot.is_result || found == placed_.end()) continue;
    if (!holds(found->second.buffer, slot.array->data(), piece)) return std::string("the input ") + slot.name + " was changed";
  }
  return "";
}

}  // namespace tool
