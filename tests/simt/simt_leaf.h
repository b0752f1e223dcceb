// SPDX-License-Identifier: Apache-2.0
// Leaf problems of the CPU backend's tests, run by the portable GPU kernels on the SIMT harness.
#pragma once

#include "tests/unit/cpu_leaf_problem.h"

#include "simt_port.h"
#include "simt_runtime.h"

namespace {

using cqsa::gpu::portable_attention;

// The leaf as a backend with memory of its own gets it: with the sizes that index arrays on the device are clamped to.
cqsa_attention_leaf device_leaf(const problem& p, const tensor& out, const tensor& lse) {
  cqsa_attention_leaf x = p.with(out, lse);
  if (x.cu_seqlens_q) x.total_q = p.q.shape[2];
  if (x.cu_seqlens_k) x.total_k = p.k.shape[2];
  if (x.page_table) x.num_pages = p.k.shape[0];
  return x;
}

// Runs with a workspace of exactly the bytes asked for, full of NaN, between two guards.
cqsa_status launch_simt(cqsa::simt::device& device, const cqsa_attention_leaf& leaf) {
  const uint64_t bytes = portable_attention.workspace(&leaf, 1), guard = 256;
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, size_t((bytes + 2 * guard + 63) / 64 * 64))), std::free);
  std::memset(memory.get(), 0xff, bytes + 2 * guard);
  std::memset(memory.get(), 0x5a, guard);
  std::memset(memory.get() + guard + bytes, 0x5a, guard);
  const cqsa_status status = portable_attention.launch(&device, &leaf, memory.get() + guard, bytes, nullptr, nullptr);
  for (uint64_t i = 0; i < guard; ++i)
    if (memory.get()[i] != 0x5a || memory.get()[guard + bytes + i] != 0x5a) FAIL("wrote outside the workspace");
  return status;
}

int workers = 2;

cqsa::simt::device device_with(int lanes, uint64_t seed) {
  cqsa::simt::device d;
  d.facts.lanes = lanes, d.seed = seed, d.workers = workers;
  return d;
}

// "" when the kernels give what the reference gave (p.exact_out, p.exact_lse).
std::string mistake(problem& p, int lanes, uint64_t seed, double tolerance) {
  cqsa::simt::device device = device_with(lanes, seed);
  guarded out(p.out), lse(p.lse);
  const cqsa_attention_leaf leaf = device_leaf(p, p.out, p.lse);
  char reason[256] = "";
  if (portable_attention.probe(&leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  if (launch_simt(device, leaf) != CQSA_OK) return cqsa::simt::last_error();
  const std::string a = differs(p.out, p.exact_out, tolerance), b = differs(p.lse, p.exact_lse, tolerance);
  if (!a.empty()) return "out " + a;
  if (!b.empty()) return "lse " + b;
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

// Against the reference, with 32 and 64 lanes; the results of the two must have the same bits, as lanes only tell how sums over a
// row are carried out.
void check_simt(problem& p, double tolerance = 2e-5, uint64_t seed = 1) {
  run_reference(p);
  for (const int lanes : {32, 64}) {
    INFO("lanes " << lanes);
    const std::string text = mistake(p, lanes, seed, tolerance);
    if (!text.empty()) FAIL(text);
  }
}

}  // namespace
