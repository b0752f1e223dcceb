// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/ring.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "abi_struct.h"
#include "backends/fp8_rules.h"

namespace cqsa::fp8 {

namespace {

constexpr uint32_t first_ring = sizeof(cqsa_fp8_ring), first_ring_info = sizeof(cqsa_fp8_ring_info);
constexpr int32_t longest_history = 1024;

uint64_t bytes_of(const cqsa_fp8_ring& ring) { return sizeof(ring_state) + sizeof(float) * static_cast<uint64_t>(ring.hist_len); }

cqsa_status check_numbers(const cqsa_fp8_ring& ring, const char* name) {
  char of[96];  // only where something is wrong
  const auto member = [&](const char* what) { return std::snprintf(of, sizeof of, "%s->%s", name, what), of; };
  if (ring.hist_len < 1 || ring.hist_len > longest_history)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->hist_len is %" PRId32 ", wanted 1 to %" PRId32, name, ring.hist_len, longest_history);
  if (!is_format(ring.format)) return check_format(member("format"), ring.format);
  if (ring.margin < -64 || ring.margin > 64) return check_margin(ring.margin, member("margin"));
  if (ring.algorithm == CQSA_FP8_RING_MAX || ring.algorithm == CQSA_FP8_RING_MOST_RECENT) return CQSA_OK;
  return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s->algorithm is %" PRId32 ", wanted one of CQSA_FP8_RING_*", name, ring.algorithm);
}

cqsa_status check_state(const cqsa_fp8_ring& ring, const char* name) {
  const auto& state = *static_cast<const ring_state*>(ring.state);
  if (is_ring(state, ring)) return CQSA_OK;
  if (state.magic != ring_magic || state.version != ring_version)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->state is not a ring: it begins with 0x%08" PRIx32 " and %" PRIu32 ", wanted what cqsa_fp8_ring_init() writes",
                name, state.magic, state.version);
  ring_state same = state;
  same.scale = 1;
  if (is_ring(same, ring))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->state is a ring whose scale is %g, wanted a number from 2^-126 to FLT_MAX", name,
                static_cast<double>(state.scale));
  return fail(CQSA_ERROR_INVALID_ARGUMENT,
              "%s->state is a ring of hist_len %" PRId32 ", format %s, margin %" PRId32 ", algorithm %" PRId32 ", pow2 %" PRId32 ", index %" PRId32
              ", wanted %" PRId32 ", %s, %" PRId32 ", %" PRId32 ", %d, an index below hist_len",
              name, state.hist_len, dtype_name(state.format), state.margin, state.algorithm, state.pow2, state.index, ring.hist_len,
              dtype_name(ring.format), ring.margin, ring.algorithm, ring.flags & CQSA_FP8_POW2 ? 1 : 0);
}

}  // namespace

cqsa_status take_ring(const cqsa_fp8_ring* caller, const char* name, cqsa_fp8_ring& out) {
  CQSA_TRY(copy_struct(caller, name, first_ring, CQSA_FP8_POW2, out));
  return check_numbers(out, name);
}

cqsa_status check_ring_memory(operand_list& list, const cqsa_fp8_ring& ring, const char* name, bool is_begun) {
  const auto address = reinterpret_cast<uintptr_t>(ring.state);
  const uint64_t needed = bytes_of(ring);
  if (ring.state == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "%s->state is NULL", name);
  if (address % CQSA_WORKSPACE_ALIGNMENT)
    return fail(CQSA_ERROR_WORKSPACE, "%s->state is not aligned to %d bytes", name, CQSA_WORKSPACE_ALIGNMENT);
  if (ring.bytes < needed) return fail(CQSA_ERROR_WORKSPACE, "%s->bytes is %" PRIu64 ", this ring needs %" PRIu64, name, ring.bytes, needed);
  if (address > UINTPTR_MAX - needed) return fail(CQSA_ERROR_WORKSPACE, "%s->state reaches past the end of the address space", name);
  CQSA_TRY(list.check_place(ring.state, name, CQSA_ERROR_DEVICE));
  list.bytes(ring.state, needed, name);
  return is_begun && list.context().is_host() ? check_state(ring, name) : CQSA_OK;
}

cqsa_status ring_bytes(const cqsa_fp8_ring* caller, uint64_t& bytes_out) {
  cqsa_fp8_ring ring{};
  CQSA_TRY(copy_struct(caller, "ring", first_ring, CQSA_FP8_POW2, ring));
  CQSA_TRY(check_numbers(ring, "ring"));
  bytes_out = bytes_of(ring);
  return CQSA_OK;
}

// ---- leaves -----------------------------------------------------------------------------------------------------------------

namespace {

cqsa_status launch(const cqsa_context& context, const cqsa_fp8_ring_leaf& leaf, const char* what, void* stream) {
  if (context.backend->fp8_rings == nullptr) return no_leaf(context, what);
  const cqsa_exec exec = plain_exec(context);
  return report(context, context.backend->fp8_rings(context.device, &leaf, context.is_host() ? &exec : nullptr, stream), what);
}

// Rings one after the other, of the size that the caller's header has, and a tensor with a number for each.
struct ring_call {
  static constexpr int few = 16;
  small_array<cqsa_fp8_ring, few> rings;
  small_array<operand, few + 1> operands;
  operand_list list;
  int64_t count;

  ring_call(const cqsa_context& context, int64_t n) : rings(n), operands(n + 1), list(context, operands.data(), look::everywhere), count(n) {}

  cqsa_status take(const cqsa_fp8_ring* caller) {
    const auto* at = reinterpret_cast<const char*>(caller);
    for (int64_t i = 0; i < count; ++i) {
      list.begin_entry(static_cast<int32_t>(i));
      const cqsa_status status = take_one(reinterpret_cast<const cqsa_fp8_ring*>(at), rings[i]);
      if (status != CQSA_OK) return name_entry(status, "rings", i);
      at += caller->struct_size;
    }
    return check_distinct();
  }

  cqsa_status take_one(const cqsa_fp8_ring* caller, cqsa_fp8_ring& out) {
    CQSA_TRY(take_ring(caller, "rings", out));
    return check_ring_memory(list, out, "rings", true);
  }

  cqsa_status check_distinct() {
    small_array<const operand*, few> order(count);
    for (int64_t i = 0; i < count; ++i) order[i] = &operands[i];
    std::sort(order.data(), order.data() + count, [](const operand* a, const operand* b) { return a->low < b->low; });
    for (int64_t i = 1; i < count; ++i)
      if (order[i - 1]->high > order[i]->low)
        return fail(CQSA_ERROR_INVALID_ARGUMENT, "rings[%" PRId32 "] and rings[%" PRId32 "] share memory, wanted each ring once", order[i - 1]->entry,
                    order[i]->entry);
    return CQSA_OK;
  }

  cqsa_status take_numbers(const cqsa_tensor* t, const char* name, bool is_output, cqsa_fp8_ring_leaf& leaf) {
    CQSA_TRY(take_row(list, t, name, count, "count", is_output));
    CQSA_TRY(check_dtype(name, *t, CQSA_DTYPE_F32));
    leaf.amaxes = static_cast<float*>(list.first(*t));
    strides_of(*t, &leaf.amaxes_stride);
    return CQSA_OK;
  }
};

cqsa_status check_count(const cqsa_fp8_ring* rings, int64_t count) {
  if (count < 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "count is %" PRId64 ", wanted at least 0", count);
  return count > 0 && rings == nullptr ? fail(CQSA_ERROR_NULL_POINTER, "rings is NULL") : CQSA_OK;
}

cqsa_status on_rings(const cqsa_context& context, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* numbers, int32_t what, void* stream) {
  const bool fold = what == CQSA_FP8_RINGS_FOLD;
  CQSA_TRY(check_count(rings, count));
  ring_call call(context, count);
  cqsa_fp8_ring_leaf leaf{};
  CQSA_TRY(call.take(rings));
  if (numbers || !fold) CQSA_TRY(call.take_numbers(numbers, fold ? "amaxes" : "amaxes_out", !fold, leaf));
  CQSA_TRY(call.list.check_overlap());
  if (count == 0) return CQSA_OK;
  leaf.what = what;
  leaf.rings = call.rings.data();
  leaf.count = count;
  return launch(context, leaf, fold ? "fp8_ring_fold" : "fp8_ring_staged", stream);
}

}  // namespace

cqsa_status ring_init(const cqsa_context& context, const cqsa_fp8_ring* caller, float amax, void* stream) {
  cqsa_fp8_ring ring;
  operand room[1];
  operand_list list(context, room, look::everywhere);
  CQSA_TRY(take_ring(caller, "ring", ring));
  if (!(amax >= 0) || !std::isfinite(amax))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "amax is %g, wanted a finite number of at least 0", static_cast<double>(amax));
  CQSA_TRY(check_ring_memory(list, ring, "ring", false));
  cqsa_fp8_ring_leaf leaf{};
  leaf.what = CQSA_FP8_RINGS_INIT;
  leaf.rings = &ring;
  leaf.count = 1;
  leaf.amax = amax;
  return launch(context, leaf, "fp8_ring_init", stream);
}

cqsa_status ring_fold(const cqsa_context& context, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes, void* stream) {
  return on_rings(context, rings, count, amaxes, CQSA_FP8_RINGS_FOLD, stream);
}

cqsa_status ring_staged(const cqsa_context& context, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes_out, void* stream) {
  return on_rings(context, rings, count, amaxes_out, CQSA_FP8_RINGS_READ_STAGED, stream);
}

// ---- reading ----------------------------------------------------------------------------------------------------------------

namespace {

struct ring_copy {
  ring_state state;
  float history[longest_history];
};

cqsa_status copy_to_host(const cqsa_context& context, const cqsa_fp8_ring& ring, ring_copy& out, void* stream) {
  const cqsa_backend_v1& backend = *context.backend;
  const uint64_t bytes = bytes_of(ring);
  if (context.is_host()) return std::memcpy(static_cast<void*>(&out), ring.state, bytes), CQSA_OK;
  CQSA_TRY(report(context, backend.copy(context.device, &out, ring.state, bytes, CQSA_COPY_TO_HOST, stream), "copying the ring to the host"));
  return report(context, backend.stream_sync(context.device, stream), "waiting for the device");
}

}  // namespace

cqsa_status ring_read(const cqsa_context& context, const cqsa_fp8_ring* caller, cqsa_fp8_ring_info* info_out, float* history_out, void* stream,
                      bool capturing) {
  cqsa_fp8_ring ring;
  ring_copy copy;
  operand room[1];
  operand_list list(context, room, look::everywhere);
  CQSA_TRY(take_ring(caller, "ring", ring));
  CQSA_TRY(check_out_struct(info_out, "info_out", first_ring_info));
  CQSA_TRY(check_ring_memory(list, ring, "ring", false));
  if (capturing) return fail(CQSA_ERROR_CAPTURE_UNSAFE, "stream is being captured into a graph, but reading a ring waits for what is queued on it");
  CQSA_TRY(copy_to_host(context, ring, copy, stream));
  ring.state = &copy.state;
  CQSA_TRY(check_state(ring, "ring"));
  const ring_state& s = copy.state;
  write_struct(cqsa_fp8_ring_info{sizeof(cqsa_fp8_ring_info), 0, s.index, s.refused, s.staged, s.scale, s.scale_inv, 0}, info_out);
  if (history_out) std::memcpy(history_out, copy.history, sizeof(float) * static_cast<size_t>(ring.hist_len));
  return CQSA_OK;
}

}  // namespace cqsa::fp8
