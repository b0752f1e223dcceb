// SPDX-License-Identifier: Apache-2.0
#include "fake_selected.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "fake_memory.h"

namespace fake {
namespace {

using ranges = std::vector<std::pair<const void*, uint64_t>>;

const cqsa_selected_impl& fast() { return cqsa_cpu_backend()->selected[0]; }

const cqsa_selected_impl& accepting(const cqsa_selected_leaf* leaf) {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  for (int32_t i = 0; i < cpu.num_selected; ++i)
    if (cpu.selected[i].probe(leaf, nullptr, 0) == CQSA_OK) return cpu.selected[i];
  return fast();
}

// Everything from the first to the last of the elements.
std::string reach(const char* name, const void* data, int64_t element, const int64_t* stride, const int64_t* count, int axes, ranges& out) {
  int64_t low = 0, high = 0;
  if (!data) return "";
  if (!is_device(data)) {
    for (int a = 0; a < axes; ++a)
      if (count[a] <= 0) return "";  // nobody goes there
    return std::string("a leaf is given a host address: ") + name;
  }
  for (int a = 0; a < axes; ++a) {
    if (count[a] <= 0) return "";
    (stride[a] < 0 ? low : high) += stride[a] * (count[a] - 1);
  }
  const void* begin = static_cast<const char*>(data) + low * element;
  const auto bytes = static_cast<uint64_t>((high - low + 1) * element);
  if (!the_memory().holds(begin, bytes, false)) return std::string("a leaf reaches outside what is allocated: ") + name;
  return out.emplace_back(begin, bytes), "";
}

std::string reach(const char* name, const cqsa_view& v, const int64_t (&count)[4], ranges& out) {
  return reach(name, v.data, (v.dtype >> 8 & 0xFF) / 8, v.stride, count, 4, out);
}

std::string check(const cqsa_selected_leaf& l, void* workspace, uint64_t bytes, ranges& out) {
  const int64_t group = std::max<int64_t>(l.kv_group, 1);
  const int64_t table[] = {l.total_q, l.pages}, list[] = {l.total_q, l.capacity};
  const int64_t one = 1, workspace_bytes = static_cast<int64_t>(bytes);
  for (const std::string& wrong :
       {reach("q", l.q, {1, l.num_heads, l.total_q, l.head_dim}, out),
        reach("k", l.k, {l.num_pages, l.num_kv_heads, l.page_size, l.head_dim}, out),
        reach("v", l.v, {l.num_pages, l.num_kv_heads, l.page_size, l.head_dim_v}, out),
        reach("k_scale", l.k_scale, {l.num_pages, l.num_kv_heads, l.page_size, (l.head_dim + group - 1) / group}, out),
        reach("v_scale", l.v_scale, {l.num_pages, l.num_kv_heads, l.page_size, (l.head_dim_v + group - 1) / group}, out),
        reach("out", l.out, {1, l.num_heads, l.total_q, l.head_dim_v}, out), reach("lse", l.lse, {1, l.num_heads, l.total_q, 1}, out),
        reach("page_table", l.page_table, 4, l.page_table_stride, table, 2, out), reach("cells", l.cells, 4, l.cells_stride, list, 2, out),
        reach("counts", l.counts, 4, &l.counts_stride, list, 1, out), reach("workspace", workspace, 1, &one, &workspace_bytes, 1, out)})
    if (!wrong.empty()) return wrong;
  return reinterpret_cast<uintptr_t>(workspace) % 64 ? "the workspace is not aligned to 64 bytes" : "";
}

template <class T>
void translate(T*& p) {
  if (p && is_device(p)) p = static_cast<T*>(to_real(p));
}

cqsa_selected_leaf translated(cqsa_selected_leaf l) {
  for (cqsa_view* v : {&l.q, &l.k, &l.v, &l.k_scale, &l.v_scale, &l.out, &l.lse}) translate(v->data);
  translate(l.page_table);
  translate(l.cells);
  translate(l.counts);
  return l;
}

}  // namespace

std::string prepare_selected(const cqsa_selected_leaf& leaf, void* workspace, uint64_t bytes, std::function<void()>& work_out) {
  ranges all;
  if (const std::string wrong = check(leaf, workspace, bytes, all); !wrong.empty()) return wrong;
  work_out = [leaf = translated(leaf), real = to_real(workspace), bytes, all] {
    for (const auto& [begin, count] : all)
      if (!the_memory().holds(begin, count, false)) return report_fault("a leaf ran after its memory was freed");
    if (accepting(&leaf).launch(nullptr, &leaf, real, bytes, nullptr, nullptr) != CQSA_OK)
      report_fault("a leaf over selected cells failed");
  };
  return "";
}

cqsa_status probe_selected(const cqsa_selected_leaf* leaf, char* reason, uint64_t size) {
  return accepting(leaf).probe(leaf, reason, size);
}

uint64_t workspace_of_selected(const cqsa_selected_leaf* leaf, int64_t) { return accepting(leaf).workspace(leaf, 1); }

}  // namespace fake
