// SPDX-License-Identifier: Apache-2.0
// Leaf problems of the CPU backend's tests, run by the sm_70 kernels on the SIMT harness with Volta's rounding.
#pragma once

#include "tests/unit/cpu_leaf_problem.h"

#include "backends/cuda/tuned.h"
#include "simt_port.h"
#include "simt_runtime.h"

namespace {

using cqsa::gpu::sm70_attention_impl;
using cqsa::gpu::portable_attention;

cqsa::simt::device volta(uint64_t seed) {
  cqsa::simt::device d;
  d.facts.shared_bytes = 96 * 1024, d.facts.arch = d.facts.tier = 70, d.seed = seed;
  return d;
}

// The leaf as the CUDA backend of a V100 gets it.
cqsa_attention_leaf volta_leaf(const problem& p, const tensor& out, const tensor& lse, int32_t precision) {
  cqsa_attention_leaf x = p.with(out, lse);
  if (x.cu_seqlens_q) x.total_q = p.q.shape[2];
  if (x.cu_seqlens_k) x.total_k = p.k.shape[2];
  if (x.page_table) x.num_pages = p.k.shape[0];
  x.chip.tier = 70, x.chip.compute_units = 80, x.chip.shared_bytes = 96 * 1024;
  x.precision = precision;
  return x;
}

cqsa_status launch_volta(cqsa::simt::device& device, const cqsa_attention_leaf& leaf) {
  const uint64_t bytes = sm70_attention_impl.workspace(&leaf, 1);
  std::vector<char> memory(bytes + 64, char(0xff));
  char* at = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  return sm70_attention_impl.launch(&device, &leaf, at, bytes, nullptr, nullptr);
}

// What rounding p (and where q is f32 also q) to f16 may do. SPLIT leaves what f32 sums do.
double tolerance_of(const problem& p, int32_t precision) {
  const double v = largest_value(p);
  if (precision == CQSA_PRECISION_SPLIT) return 2e-5 + 4e-6 * v;
  return 2e-5 + (p.q.view.dtype == CQSA_DTYPE_F32 ? 0x1p-7 : 0x1p-10) * v;
}

// "" when the kernels give what the reference gave (p.exact_out, p.exact_lse), or "declined: ..".
std::string volta_mistake(problem& p, int32_t precision, uint64_t seed) {
  cqsa::simt::device device = volta(seed);
  guarded out(p.out), lse(p.lse);
  const cqsa_attention_leaf leaf = volta_leaf(p, p.out, p.lse, precision);
  char reason[256] = "";
  if (sm70_attention_impl.probe(&leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  if (launch_volta(device, leaf) != CQSA_OK) return cqsa::simt::last_error();
  const double tolerance = tolerance_of(p, precision);
  const double lse_tolerance = precision == CQSA_PRECISION_SPLIT || p.q.view.dtype == CQSA_DTYPE_F16 ? 2e-5 : 0x1p-8;
  const std::string a = differs(p.out, p.exact_out, tolerance), b = differs(p.lse, p.exact_lse, lse_tolerance);
  if (!a.empty()) return "out " + a;
  if (!b.empty()) return "lse " + b;
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

void check_volta(problem& p, uint64_t seed = 1) {
  run_reference(p);
  for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT}) {
    INFO((precision == CQSA_PRECISION_SPLIT ? "split" : "fast"));
    const std::string text = volta_mistake(p, precision, seed);
    if (!text.empty()) FAIL(text);
  }
}

// f16 or int8 k and v with scales for each group of channels, for a problem of plain().
void set_int8(problem& p, int64_t group, uint32_t seed) {
  dice random(seed);
  const int64_t items = p.k.shape[0], heads = p.k.shape[1], rows = p.k.shape[2], d = p.k.shape[3], dv = p.v.shape[3];
  p.k = tensor(CQSA_DTYPE_I8, {items, heads, rows, d}), p.v = tensor(CQSA_DTYPE_I8, {items, heads, rows, dv});
  auto draw = [&](auto...) { return double(random.upto(254) - 127); };
  p.k.fill(draw), p.v.fill(draw);
  p.leaf.scale_k = p.leaf.scale_v = CQSA_SCALE_GROUP, p.leaf.kv_group = group;
  p.k_scale = tensor(CQSA_DTYPE_F16, {items, heads, rows, (d + group - 1) / group});
  p.v_scale = tensor(CQSA_DTYPE_F16, {items, heads, rows, (dv + group - 1) / group});
  auto scale = [&](auto...) { return 0.005 + 0.025 * double(random.upto(1000)) / 1000; };
  p.k_scale.fill(scale), p.v_scale.fill(scale);
}

}  // namespace
