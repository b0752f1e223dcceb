// SPDX-License-Identifier: Apache-2.0
// Layers of the CPU's tests, run by the kernels of GPUs in the harness: bound as on the CPU, launched as a device's, with the memory of the host as its own.
#pragma once

#include "tests/unit/moe_problem.h"

#include "backends/gpu/moe.h"
#include "simt_device.h"
#include "simt_port.h"

namespace moe_test {

struct simt_run {
  const cqsa_moe_impl* impl = &gpu::portable_moe;
  int lanes = 32, units = 3, tier = 0;
  uint64_t seed = 1;
  int64_t chunk = 0;
  bool on_device = false;  // descriptors in memory of the device, instead of a list of the host
};

inline simt::device device_of(const simt_run& r) {
  simt::device d;
  d.facts.lanes = r.lanes, d.facts.compute_units = r.units, d.facts.tier = d.facts.arch = r.tier, d.seed = r.seed;
  if (r.tier >= 80) d.facts.shared_bytes = 160 * 1024;
  return d;
}

inline void to_device_lists(cqsa_moe_leaf& leaf) {
  for (cqsa_moe_set* s : {&leaf.gate, &leaf.up, &leaf.down, &leaf.shared_gate, &leaf.shared_up, &leaf.shared_down}) {
    if (!s->experts || s->format == CQSA_QUANT_NONE) continue;
    s->device_experts = s->experts, s->experts = nullptr, s->all.format = s->format;
  }
}

// In memory of exactly its size that is full of NaN.
inline std::string run_simt(const simt_run& r, problem& p, uint32_t flags = 0) {
  cqsa_moe_leaf leaf;
  fp8::operand room[moe::most_operands + 1];
  fp8::operand_list list(*cpu_context(), room, fp8::look::everywhere);
  p.args.flags = flags;
  if (moe::bind(list, p.args, leaf) != CQSA_OK) return "not bound";
  leaf.chunk = r.chunk ? std::min(r.chunk, p.tokens) : p.tokens;
  if (r.on_device) to_device_lists(leaf);
  simt::device device = device_of(r);
  leaf.chip = {device.facts.tier, device.facts.compute_units, device.facts.shared_bytes, 0};
  char reason[256] = "";
  if (r.impl->probe(&device, &leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  const uint64_t bytes = (r.impl->workspace(&leaf, 1) + 63) / 64 * 64;
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, bytes + 64)), std::free);
  std::memset(memory.get(), 0xff, bytes + 64);
  std::fill(p.out.memory.begin(), p.out.memory.end(), char(0xff));
  if (r.impl->launch(&device, &leaf, memory.get(), bytes, nullptr, nullptr) != CQSA_OK) return simt::last_error();
  for (uint64_t i = bytes; i < bytes + 64; ++i)
    if (memory.get()[i] != char(0xff)) return "wrote beyond the workspace";
  return "";
}

// "" or what is wrong with the error of the last run.
inline std::string wrong_errors(problem& p, const std::vector<double>& exact, const std::vector<double>& model) {
  const errors mine = compare(p.result(), exact, p.hidden), allowed = compare(model, exact, p.hidden);
  const bool halves = !p.slots() && p.out_dtype != CQSA_DTYPE_F32;
  const double of_out = halves ? (p.out_dtype == CQSA_DTYPE_F16 ? 0x1p-10 : 0x1p-7) : 0;
  const double most = p.precision == CQSA_MOE_PRECISION_F16 ? 1e-3 + of_out : 1.05 * allowed.relative + 1e-5 + of_out;
  return mine.relative <= most ? "" : "relative error " + std::to_string(mine.relative) + ", at most " + std::to_string(most);
}

}  // namespace moe_test
