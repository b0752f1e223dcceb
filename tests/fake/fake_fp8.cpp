// SPDX-License-Identifier: Apache-2.0
#include "fake_fp8.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "backends/fp8_rules.h"
#include "fake_memory.h"

namespace fake {
namespace {

using cqsa::fp8::workspace_header;

struct walker {
  bool translate;  // else only look
  std::string wrong;

  template <class T>
  void at(T*& p, const char* what) {
    if (p == nullptr) return;
    if (translate) p = static_cast<T*>(to_real(p));
    else if (!the_memory().holds(p, 1, false)) wrong = std::string("a leaf of FP8 is given an address that is not alive: ") + what;
  }
  void at(cqsa_fp8_output& o, bool empty) {
    if (empty) o.codes.data = nullptr;  // an address that is nobody's
    at(o.codes.data, "codes"), at(o.scale_in.data, "scale_in"), at(o.scale.data, "scale"), at(o.scale_inv.data, "scale_inv");
  }
  void at(cqsa_fp8_job& j) {
    const bool empty = j.batch == 0 || j.rows == 0 || j.columns == 0;
    at(j.x.data, "x"), at(j.up.data, "up"), at(j.x_scale_inv.data, "x_scale_inv"), at(j.row, empty), at(j.transposed, empty), at(j.amax, "amax");
    at(j.column_sum, "column_sum"), at(j.block_amax.data, "block_amax"), at(j.counters, "counters"), at(j.skip, "skip"), at(j.rng, "rng");
    at(j.groups, "groups"), at(j.ring.state, "ring");
  }
  void at(cqsa_fp8_dequantize_leaf& l) { at(l.codes.data, "codes"), at(l.out.data, "out"), at(l.scale_inv.data, "scale_inv"), at(l.groups, "groups"); }
  void at(cqsa_fp8_scale_leaf& l) {
    at(l.amax.data, "amax"), at(l.scale_inv_in.data, "scale_inv_in"), at(l.scale.data, "scale"), at(l.scale_inv.data, "scale_inv");
  }
  void at(cqsa_fp8_transpose_leaf& l) { at(l.x, "x"), at(l.out, "out"); }
  void at(cqsa_fp8_gemm_leaf& l) {
    at(l.a.data, "a"), at(l.b.data, "b"), at(l.c.data, "c"), at(l.d.data, "d"), at(l.scale_inv_a.data, "scale_inv_a");
    at(l.scale_inv_b.data, "scale_inv_b"), at(l.bias, "bias"), at(l.d_scale, "d_scale"), at(l.d_amax, "d_amax");
  }
};

// The leaf with real addresses, or what is wrong with them.
template <class Leaf>
std::string translated(const Leaf& leaf, Leaf& out) {
  out = leaf;
  walker look{false, {}}, change{true, {}};
  look.at(out);
  if (look.wrong.empty()) change.at(out);
  return look.wrong;
}

std::string check_workspace(void* workspace, uint64_t needed, uint64_t bytes) {
  if (needed == 0) return "";
  const std::string numbers = std::to_string(bytes) + " bytes of workspace, wanted " + std::to_string(needed);
  if (workspace == nullptr || bytes < needed) return "a leaf of FP8 is given " + numbers;
  if (reinterpret_cast<uintptr_t>(workspace) % 64) return "the workspace is not aligned to 64 bytes";
  return the_memory().holds(workspace, bytes, false) ? "" : "the workspace is not alive";
}

// Prepared, and left clean by whoever had it before.
bool is_prepared(const void* real, uint64_t needed) {
  if (needed == 0) return true;
  workspace_header header;
  std::memcpy(&header, real, sizeof header);
  if (header.magic != cqsa::fp8::workspace_magic || header.bytes < needed) return false;
  for (uint64_t i = sizeof header; i < needed; ++i)
    if (static_cast<const char*>(real)[i] != 0) return false;
  return true;
}

void refuse(const cqsa_fp8_job& job) {
  if (job.counters) ++job.counters[3 * job.counters_stride];
}

// One job by the CPU backend, with a workspace as it wants it.
void run_job(const cqsa_fp8_job& job) {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  const cqsa_fp8_quantize_leaf leaf{sizeof leaf, 0, &job, 1, {}};
  const uint64_t bytes = cpu.fp8_quantize_workspace(&leaf, 1);
  std::vector<char> memory(bytes + 64);
  void* const workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  if (bytes) cpu.fp8_workspace_init(nullptr, workspace, bytes, nullptr);
  const cqsa_status status = cpu.fp8_quantize(nullptr, &leaf, bytes ? workspace : nullptr, bytes, nullptr, nullptr);
  if (status == CQSA_ERROR_INVALID_ARGUMENT) return refuse(job);
  if (status != CQSA_OK) report_fault(std::string("fp8_quantize failed: ") + cpu.last_error());
}

template <class Leaf>
std::string prepare_plain(const Leaf& leaf, cqsa_status (*work)(void*, const Leaf*, const cqsa_exec*, void*), work_fn& work_out) {
  Leaf real;
  if (const std::string wrong = translated(leaf, real); !wrong.empty()) return wrong;
  work_out = [real, work] {
    if (work(nullptr, &real, nullptr, nullptr) != CQSA_OK) report_fault(std::string("a leaf of FP8 failed: ") + cqsa_cpu_backend()->last_error());
  };
  return "";
}

bool reduces(const cqsa_fp8_job& j) {
  const bool whole = j.source == CQSA_FP8_CURRENT && (j.row.scale.rows == 1 || j.transposed.scale.rows == 1);
  return whole || j.ring.state || j.amax || j.column_sum || (j.block_amax.data && j.block_amax.block[0] > 1);
}

}  // namespace

uint64_t fp8_workspace_of(const cqsa_fp8_quantize_leaf* leaf, int64_t) {
  uint64_t jobs = 0;
  for (int64_t i = 0; i < leaf->count; ++i) jobs += reduces(leaf->jobs[i]);
  return jobs ? sizeof(workspace_header) + 64 * jobs : 0;
}

std::string prepare_fp8(const cqsa_fp8_quantize_leaf& leaf, void* workspace, uint64_t bytes, work_fn& work_out) {
  const uint64_t needed = fp8_workspace_of(&leaf, 1);
  if (const std::string wrong = check_workspace(workspace, needed, bytes); !wrong.empty()) return wrong;
  std::vector<cqsa_fp8_job> jobs(static_cast<size_t>(leaf.count));
  for (size_t i = 0; i < jobs.size(); ++i)
    if (const std::string wrong = translated(leaf.jobs[i], jobs[i]); !wrong.empty()) return wrong;
  work_out = [jobs, needed, workspace] {
    if (needed && !the_memory().holds(workspace, needed, false)) return report_fault("a leaf of FP8 ran after its workspace was freed");
    const bool prepared = is_prepared(to_real(workspace), needed);
    for (const cqsa_fp8_job& job : jobs) prepared ? run_job(job) : refuse(job);
  };
  return "";
}

std::string prepare_fp8(const cqsa_fp8_dequantize_leaf& leaf, work_fn& work_out) {
  return prepare_plain(leaf, cqsa_cpu_backend()->fp8_dequantize, work_out);
}
std::string prepare_fp8(const cqsa_fp8_scale_leaf& leaf, work_fn& work_out) { return prepare_plain(leaf, cqsa_cpu_backend()->fp8_scale, work_out); }
std::string prepare_fp8(const cqsa_fp8_transpose_leaf& leaf, work_fn& work_out) {
  return prepare_plain(leaf, cqsa_cpu_backend()->fp8_transpose, work_out);
}

std::string prepare_fp8(const cqsa_fp8_ring_leaf& leaf, work_fn& work_out) {
  std::vector<cqsa_fp8_ring> rings(leaf.rings, leaf.rings + leaf.count);
  cqsa_fp8_ring_leaf real = leaf;
  walker look{false, {}}, change{true, {}};
  look.at(real.amaxes, "amaxes");
  for (cqsa_fp8_ring& ring : rings) look.at(ring.state, "ring");
  if (!look.wrong.empty()) return look.wrong;
  change.at(real.amaxes, "amaxes");
  for (cqsa_fp8_ring& ring : rings) change.at(ring.state, "ring");
  work_out = [real, rings]() mutable {
    real.rings = rings.data();
    cqsa_cpu_backend()->fp8_rings(nullptr, &real, nullptr, nullptr);  // a ring that is none stays as it is
  };
  return "";
}

std::string prepare_fp8(const cqsa_fp8_gemm_leaf& leaf, void* workspace, uint64_t bytes, work_fn& work_out) {
  const uint64_t needed = fp8_gemm_workspace_of(&leaf, 1);
  cqsa_fp8_gemm_leaf real;
  if (const std::string wrong = check_workspace(workspace, needed, bytes); !wrong.empty()) return wrong;
  if (const std::string wrong = translated(leaf, real); !wrong.empty()) return wrong;
  work_out = [real, needed, workspace] {
    const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
    const cqsa_fp8_gemm_impl& reference = cpu.fp8_gemm[cpu.num_fp8_gemm - 1];
    if (!is_prepared(to_real(workspace), needed)) return report_fault("a product was given a workspace that is not prepared");
    if (reference.workspace(&real, 1) != 0) return report_fault("the reference wants a workspace");
    if (reference.launch(nullptr, &real, nullptr, 0, nullptr, nullptr) != CQSA_OK) report_fault("a product failed");
  };
  return "";
}

std::string prepare_fp8_workspace(void* workspace, uint64_t bytes, work_fn& work_out) {
  if (!the_memory().holds(workspace, bytes, false)) return "the workspace is not alive";
  work_out = [real = to_real(workspace), bytes] { cqsa_cpu_backend()->fp8_workspace_init(nullptr, real, bytes, nullptr); };
  return "";
}

uint64_t fp8_gemm_workspace_of(const cqsa_fp8_gemm_leaf* leaf, int64_t) { return leaf->k >= 64 ? 256 : 0; }

cqsa_status fp8_vendor_probe(void*, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  if (leaf->k % 16 != 0) return std::snprintf(reason, size, "k is %lld, wanted a multiple of 16", static_cast<long long>(leaf->k)), CQSA_ERROR_UNSUPPORTED;
  for (const void* p : {leaf->a.data, leaf->b.data})
    if (reinterpret_cast<uintptr_t>(p) % 16) return std::snprintf(reason, size, "a or b is not aligned to 16 bytes"), CQSA_ERROR_UNSUPPORTED;
  return CQSA_OK;
}

cqsa_status fp8_own_probe(void* device, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  return cpu.fp8_gemm[cpu.num_fp8_gemm - 1].probe(device, leaf, reason, size);
}

}  // namespace fake
