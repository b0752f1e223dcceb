// SPDX-License-Identifier: Apache-2.0
#include "fake_moe.h"

#include <cstring>
#include <vector>

#include "backends/moe_rules.h"
#include "fake_memory.h"

namespace fake {
namespace {

namespace moe = cqsa::moe;

struct walker {
  bool translate;  // else only look
  std::string wrong;

  template <class T> void at(T*& p, const char* what) {
    if (p == nullptr) return;
    if (translate) p = static_cast<T*>(to_real(p));
    else if (!the_memory().holds(p, 1, false)) wrong = std::string("a leaf of experts is given an address that is not alive: ") + what;
  }
  void at(cqsa_moe_rows& rows, const char* what) { at(rows.data, what); }
  void at(cqsa_moe_set& set) {
    at(set.all.data, "all"), at(set.device_experts, "device_experts"), at(set.bias, "bias");
  }
  void at(cqsa_moe_leaf& l) {
    at(l.x, "x"), at(l.ids, "ids"), at(l.weights, "weights"), at(l.out, "out"), at(l.expert_map, "expert_map"), at(l.counters, "counters");
    at(l.shared_factor, "shared_factor");
    for (cqsa_moe_set* set : {&l.gate, &l.up, &l.down, &l.shared_gate, &l.shared_up, &l.shared_down}) at(*set);
  }
  void at(cqsa_moe_route_leaf& l) { at(l.logits, "logits"), at(l.ids, "ids"), at(l.weights, "weights"), at(l.bias, "bias"); }
  void at(cqsa_moe_group_leaf& l) {
    at(l.ids, "ids"), at(l.expert_map, "expert_map"), at(l.offsets, "offsets"), at(l.order, "order"), at(l.counts, "counts"), at(l.places, "places");
    at(l.counters, "counters");
  }
  void at(cqsa_moe_quantize_leaf& l) { at(l.x, "x"), at(l.codes, "codes"), at(l.scales, "scales"); }
  void at(cqsa_moe_combine_leaf& l) { at(l.y, "y"), at(l.weights, "weights"), at(l.ids, "ids"), at(l.out, "out"); }
};

template <class Leaf> std::string translated(const Leaf& leaf, Leaf& out) {
  out = leaf;
  walker look{false, {}}, change{true, {}};
  look.at(out);
  if (look.wrong.empty()) change.at(out);
  return look.wrong;
}

using matrices = std::vector<cqsa_moe_matrix>;

// A list of the host's is read now, as it says.
void keep(const cqsa_moe_set& set, matrices& out) {
  if (set.experts) out.assign(set.experts, set.experts + set.num_experts);
}

// When the leaf runs: a list with real addresses, whichever way the matrices were given.
void resolve(cqsa_moe_set& set, const matrices& kept, matrices& out) {
  if (set.num_experts == 0) return;
  const bool whole = set.all.data != nullptr && !set.device_experts && kept.empty();
  for (int64_t e = 0; e < set.num_experts && !whole; ++e) {
    out.push_back(set.device_experts ? set.device_experts[e] : kept.empty() ? set.all : kept[static_cast<size_t>(e)]);
    if (out.back().data) out.back().data = to_real(out.back().data);
  }
  set.device_experts = nullptr;
  set.experts = whole ? nullptr : out.data();
}

int64_t id_at(const cqsa_moe_rows& ids, int64_t t, int64_t s) {
  const char* const at = static_cast<const char*>(ids.data) + (t * ids.stride[0] + s * ids.stride[1]) * (ids.dtype == CQSA_DTYPE_I64 ? 8 : 4);
  int32_t narrow;
  int64_t wide;
  if (ids.dtype == CQSA_DTYPE_I64) return std::memcpy(&wide, at, 8), wide;
  return std::memcpy(&narrow, at, 4), narrow;
}

bool has_data(const cqsa_moe_set& set, int64_t e) {
  return set.num_experts == 0 || moe::matrix_at(set.experts, set.all, set.expert_bytes, e).data != nullptr;
}

// Ids that mean nobody, or an expert that is not there, are counted; the map that leads past them.
std::vector<int32_t> usable_map(const cqsa_moe_leaf& l) {
  std::vector<int32_t> map(static_cast<size_t>(l.num_ids));
  int64_t counted[2] = {0, 0};
  const auto here = [&](int32_t e) { return has_data(l.gate, e) && has_data(l.up, e) && has_data(l.down, e); };
  for (int64_t id = 0; id < l.num_ids; ++id) {
    const int32_t e = moe::expert_of(id, l.num_ids, l.expert_map, l.expert_map_stride, l.num_experts);
    map[static_cast<size_t>(id)] = e >= 0 && here(e) ? e : -1;
  }
  for (int64_t i = 0; i < l.tokens * l.topk; ++i) {
    const int32_t e = moe::expert_of(id_at(l.ids, i / l.topk, i % l.topk), l.num_ids, l.expert_map, l.expert_map_stride, l.num_experts);
    counted[0] += e == moe::out_of_range, counted[1] += e >= 0 && !here(e);
  }
  for (int i = 0; i < 2 && l.counters; ++i) l.counters[i * l.counters_stride] += counted[i];
  return map;
}

void run(cqsa_moe_leaf l, const matrices (&kept)[6]) {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  matrices lists[6];
  cqsa_moe_set* const sets[] = {&l.gate, &l.up, &l.down, &l.shared_gate, &l.shared_up, &l.shared_down};
  for (int i = 0; i < 6; ++i) resolve(*sets[i], kept[i], lists[i]);
  const std::vector<int32_t> map = usable_map(l);
  l.expert_map = map.data(), l.expert_map_stride = 1;
  for (int32_t i = 0; i < cpu.num_moe; ++i) {
    if (cpu.moe[i].probe(nullptr, &l, nullptr, 0) != CQSA_OK) continue;
    const uint64_t bytes = (cpu.moe[i].workspace(&l, 1) + 63) / 64 * 64;
    std::vector<char> memory(bytes + 64);
    void* const workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    if (cpu.moe[i].launch(nullptr, &l, workspace, bytes, nullptr, nullptr) != CQSA_OK) report_fault(std::string("a leaf of experts failed: ") + cpu.last_error());
    return;
  }
}

template <class Leaf>
std::string prepare_plain(const Leaf& leaf, cqsa_status (*work)(void*, const Leaf*, const cqsa_exec*, void*), std::function<void()>& work_out) {
  Leaf real;
  if (const std::string wrong = translated(leaf, real); !wrong.empty()) return wrong;
  work_out = [real, work] {
    if (work(nullptr, &real, nullptr, nullptr) != CQSA_OK) report_fault("a leaf of experts failed");
  };
  return "";
}

}  // namespace

uint64_t moe_workspace_of(const cqsa_moe_leaf* leaf, int64_t) { return 64 * static_cast<uint64_t>(leaf->chunk); }

std::string prepare_moe(const cqsa_moe_leaf& leaf, void* workspace, uint64_t bytes, std::function<void()>& work_out) {
  const uint64_t needed = moe_workspace_of(&leaf, 1);
  if (workspace == nullptr || bytes < needed || !the_memory().holds(workspace, needed, false))
    return "a leaf of experts is given " + std::to_string(bytes) + " bytes of workspace, wanted " + std::to_string(needed);
  struct { matrices lists[6]; } kept;
  cqsa_moe_leaf real;
  if (const std::string wrong = translated(leaf, real); !wrong.empty()) return wrong;
  const cqsa_moe_set* const sets[] = {&leaf.gate, &leaf.up, &leaf.down, &leaf.shared_gate, &leaf.shared_up, &leaf.shared_down};
  for (int i = 0; i < 6; ++i) keep(*sets[i], kept.lists[i]);
  work_out = [real, kept, workspace, needed] {
    if (!the_memory().holds(workspace, needed, false)) return report_fault("a leaf of experts ran after its workspace was freed");
    run(real, kept.lists);
  };
  return "";
}

std::string prepare_moe(const cqsa_moe_route_leaf& leaf, std::function<void()>& work_out) { return prepare_plain(leaf, cqsa_cpu_backend()->moe_route, work_out); }
std::string prepare_moe(const cqsa_moe_group_leaf& leaf, std::function<void()>& work_out) { return prepare_plain(leaf, cqsa_cpu_backend()->moe_group, work_out); }
std::string prepare_moe(const cqsa_moe_quantize_leaf& leaf, std::function<void()>& work_out) {
  return prepare_plain(leaf, cqsa_cpu_backend()->moe_quantize, work_out);
}
std::string prepare_moe(const cqsa_moe_combine_leaf& leaf, std::function<void()>& work_out) {
  return prepare_plain(leaf, cqsa_cpu_backend()->moe_combine, work_out);
}

}  // namespace fake
