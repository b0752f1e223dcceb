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
      if (t.shape[i] != shape[i] || (strided && t.strides[i] != strides[i])) return false;
    return true;
  }
};

struct binding {
  uint64_t plan;     // its number, 0: nothing here
  uint32_t present;  // bit i: places[i] has a tensor
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

// Where the tensors lie. False when one is not as it was, or an output may share memory with another operand.
bool locate(const binding& b, const args_type& args, range* ranges) {
  for (int i = 0; i < num_places; ++i) {
    const cqsa_tensor* const t = args.*places[i].tensor;
    if ((t != nullptr) != (b.present >> i & 1)) return false;
    if (t == nullptr) continue;
    const outline& o = b.tensors[i];
    if (!o.fits(*t)) return false;
    const uintptr_t first = address_of(*t);
    ranges[i] = {first + static_cast<uintptr_t>(o.extent.low), first + static_cast<uintptr_t>(o.extent.high)};
    if (first < t->byte_offset || ranges[i].low > first || ranges[i].high <= first) return false;  // wraps
    for (int j = 0; j < (i < outputs ? i : outputs); ++j)
      if ((b.present >> j & 1) && ranges[j].meets(ranges[i])) return false;
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
  range ranges[num_places];
  for (const binding& b : known) {
    if (b.plan != plan.number || !locate(b, args, ranges)) continue;
    leaf_out = b.leaf;
    for (int i = 0; i < num_places; ++i) {
      if (!(b.present >> i & 1)) continue;
      void* const data = reinterpret_cast<void*>(address_of(*(args.*places[i].tensor)));
      places[i].view ? void((leaf_out.*places[i].view).data = data) : put_index(i, data, leaf_out);
    }
    return true;
  }
  return false;
}

void remember_binding(const cqsa_plan& plan, const cqsa_attention_args& args, const cqsa_attention_leaf& leaf) {
  binding& b = known[next];
  b.plan = 0;
  b.present = 0;
  for (int i = 0; i < num_places; ++i) {
    const cqsa_tensor* const t = args.*places[i].tensor;
    if (t == nullptr) continue;
    if (t->device_type != plan.context->backend->device_type || !outline_of(*t, b.tensors[i])) return;
    b.present |= 1u << i;
  }
  b.leaf = leaf;
  b.plan = plan.number;
  next = (next + 1) % most;
}

}  // namespace cqsa
