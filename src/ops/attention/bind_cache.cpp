// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/bind_cache.h"

#include <type_traits>

#include "tensor.h"

namespace cqsa {

namespace {

using args_type = cqsa_attention_args;
using leaf_type = cqsa_attention_leaf;

struct place {
  const cqsa_tensor* args_type::*tensor;
  cqsa_view leaf_type::*view;  // nullptr: an index array, see put_index()
};

constexpr place places[] = {
    {&args_type::out, &leaf_type::out},         {&args_type::lse, &leaf_type::lse},          {&args_type::q, &leaf_type::q},
    {&args_type::k, &leaf_type::k},             {&args_type::v, &leaf_type::v},              {&args_type::k_scale, &leaf_type::k_scale},
    {&args_type::v_scale, &leaf_type::v_scale}, {&args_type::mask, &leaf_type::mask},        {&args_type::bias, &leaf_type::bias},
    {&args_type::alibi_slopes, &leaf_type::slopes}, {&args_type::sinks, &leaf_type::sinks},  {&args_type::cu_seqlens_q, nullptr},
    {&args_type::cu_seqlens_k, nullptr},        {&args_type::seqused_k, nullptr},            {&args_type::page_table, nullptr}};
constexpr int num_places = sizeof places / sizeof *places;
constexpr int outputs = 2;  // the first of them
constexpr int most_dims = 4;

void put_index(int at, void* data, leaf_type& leaf) {
  const auto tensor = places[at].tensor;
  if (tensor == &args_type::cu_seqlens_q) leaf.cu_seqlens_q = data;
  if (tensor == &args_type::cu_seqlens_k) leaf.cu_seqlens_k = data;
  if (tensor == &args_type::seqused_k) leaf.seqused_k = data;
  if (tensor == &args_type::page_table) leaf.page_table = static_cast<const int32_t*>(data);
}

// All of a tensor but its address. There are no empty ones.
struct outline {
  int32_t ndim, dtype, device_type, device_id;
  bool strided;
  int64_t shape[most_dims], strides[most_dims];
  byte_extent extent;

  bool fits(const cqsa_tensor& t) const {
    if (t.ndim != ndim || t.dtype != dtype || t.device_type != device_type || t.device_id != device_id || (t.strides != nullptr) != strided ||
        t.data == nullptr)
      return false;
    for (int i = 0; i < ndim; ++i)
      if (t.shape[i] != shape[i]) return false;
    for (int i = 0; strided && i < ndim; ++i)
      if (t.strides[i] != strides[i]) return false;
    return true;
  }
};

struct binding {
  uint64_t plan;  // its number, 0: nothing here
  int count;      // of operands
  int number[num_places];  // of the place of each, rising
  outline tensors[num_places];
  leaf_type leaf;
};
static_assert(std::is_trivially_destructible_v<binding>);

constexpr int most = 4;
thread_local constinit binding known[most] = {};
thread_local constinit int next = 0;

struct range {
  uintptr_t low, high;
  bool meets(const range& other) const { return low < other.high && other.low < high; }
};

int count_operands(const args_type& args) {
  int count = 0;
  for (const place& p : places) count += args.*p.tensor != nullptr;
  return count;
}

// A run writes to all of its workspace.
bool workspace_range(const args_type& args, range& out) {
  const auto low = reinterpret_cast<uintptr_t>(args.workspace);
  out = {low, args.workspace ? low + args.workspace_bytes : low};
  return out.low <= out.high;  // else it wraps
}

// Where the tensors lie. False when one is not as it was, or an output or the workspace may share memory with another operand.
bool locate(const binding& b, const args_type& args, uintptr_t* first_out) {
  range written[outputs + 1];
  int num_written = 1;
  if (!workspace_range(args, written[0])) return false;
  for (int i = 0; i < b.count; ++i) {
    const cqsa_tensor* const t = args.*places[b.number[i]].tensor;
    const outline& o = b.tensors[i];
    if (t == nullptr || !o.fits(*t)) return false;
    const uintptr_t first = address_of(*t);
    const range mine = {first + static_cast<uintptr_t>(o.extent.low), first + static_cast<uintptr_t>(o.extent.high)};
    if (first < t->byte_offset || mine.low > first || mine.high <= first) return false;  // wraps
    for (int j = 0; j < num_written; ++j)
      if (written[j].meets(mine)) return false;
    if (b.number[i] < outputs) written[num_written++] = mine;
    first_out[i] = first;
  }
  return true;
}

bool outline_of(const cqsa_tensor& t, outline& out) {
  if (t.ndim > most_dims || is_empty(t) || check_tensor(&t, "", 0, most_dims, &out.extent) != CQSA_OK) return false;
  out.ndim = t.ndim, out.dtype = t.dtype, out.device_type = t.device_type, out.device_id = t.device_id;
  out.strided = t.strides != nullptr;
  for (int i = 0; i < t.ndim; ++i) out.shape[i] = t.shape[i], out.strides[i] = out.strided ? t.strides[i] : 0;
  return true;
}

}  // namespace

bool bind_again(const cqsa_plan& plan, const cqsa_attention_args& args, cqsa_attention_leaf& leaf_out) {
  uintptr_t first[num_places];
  const int count = count_operands(args);
  for (const binding& b : known) {
    if (b.plan != plan.number || b.count != count || !locate(b, args, first)) continue;
    leaf_out = b.leaf;
    for (int i = 0; i < count; ++i) {
      const auto view = places[b.number[i]].view;
      void* const data = reinterpret_cast<void*>(first[i]);
      view ? void((leaf_out.*view).data = data) : put_index(b.number[i], data, leaf_out);
    }
    return true;
  }
  return false;
}

void remember_binding(const cqsa_plan& plan, const cqsa_attention_args& args, const cqsa_attention_leaf& leaf) {
  binding& b = known[next];
  b.plan = 0;
  b.count = 0;
  for (int i = 0; i < num_places; ++i) {
    const cqsa_tensor* const t = args.*places[i].tensor;
    if (t == nullptr) continue;
    if (t->device_type != plan.context->backend->device_type || !outline_of(*t, b.tensors[b.count])) return;
    b.number[b.count++] = i;
  }
  b.leaf = leaf;
  b.plan = plan.number;
  next = (next + 1) % most;
}

}  // namespace cqsa
