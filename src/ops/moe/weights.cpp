// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/weights.h"

#include <cinttypes>
#include <cstdio>

#include "abi_struct.h"
#include "backends/moe_rules.h"
#include "quant_format.h"

namespace cqsa::moe {

namespace {

constexpr uint32_t first_weights = sizeof(cqsa_moe_weights);

// "args->w_gate->experts[7]", or "args->w_gate->all" for expert -1. Made only when something is wrong: there are thousands.
struct matrix_name {
  char text[96];
  matrix_name(const char* set, int64_t expert) {
    if (expert < 0) std::snprintf(text, sizeof text, "%s->all", set);
    else std::snprintf(text, sizeof text, "%s->experts[%" PRId64 "]", set, expert);
  }
};

// One matrix of a projection, or the block of all.
struct matrix_check {
  const cqsa_context& context;
  const cqsa_moe_set& set;
  const char* name;
  int64_t expert;  // -1: all
  const cqsa_moe_matrix& m;

  matrix_name who() const { return {name, expert}; }

  cqsa_status check_format() const {
    const quant_format* const format = find_quant_format(m.format);
    if (format == nullptr)
      return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s.format is %" PRId32 ", wanted one of CQSA_QUANT_*, 1 to %" PRId32, who().text, m.format, quant_format_count - 1);
    if (set.row_elements % format->block_elements == 0) return CQSA_OK;
    return fail(CQSA_ERROR_SHAPE, "%s->row_elements is %" PRId64 ", wanted a multiple of %" PRId32 ", the block of %s, which is the format of %s", name,
                set.row_elements, format->block_elements, format->name, who().text);
  }

  cqsa_status check_rest() const {
    if (m.flags & ~uint32_t{CQSA_MOE_MAPPED})
      return fail(CQSA_ERROR_UNKNOWN_FLAG, "%s.flags has the unknown bits 0x%x", who().text, static_cast<unsigned>(m.flags & ~uint32_t{CQSA_MOE_MAPPED}));
    if (m.scale != nullptr) return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s.scale is %p, wanted NULL: its format has its scales in its blocks", who().text, m.scale);
    if (m.reserved[0] == 0 && m.reserved[1] == 0) return CQSA_OK;
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s.reserved is not 0", who().text);
  }

  // Host memory will do where the device is the host.
  cqsa_status check_device() const {
    const cqsa_backend_v1& backend = *context.backend;
    const bool on_host = m.device_type == CQSA_DEVICE_CPU || m.device_type == CQSA_DEVICE_CUDA_HOST || m.device_type == CQSA_DEVICE_ROCM_HOST;
    if (m.device_type == 0 || (on_host && context.is_host())) return CQSA_OK;
    if (on_host)
      return fail(CQSA_ERROR_UNSUPPORTED, "%s is in host memory (device type %" PRId32 "), and this version takes experts of backend %s from its device only",
                  who().text, m.device_type, backend.name);
    if (m.device_type != backend.device_type)
      return fail(CQSA_ERROR_DEVICE, "%s is on device type %" PRId32 ", wanted %" PRId32 " (backend %s)", who().text, m.device_type, backend.device_type,
                  backend.name);
    if (context.is_host() || m.device_id == context.device_index) return CQSA_OK;
    return fail(CQSA_ERROR_DEVICE, "%s is on device %" PRId32 ", the context is for device %" PRId32, who().text, m.device_id, context.device_index);
  }

  uint64_t own_row_bytes() const {
    const quant_format& format = quant_formats[m.format];
    return static_cast<uint64_t>(set.row_elements / format.block_elements) * static_cast<uint64_t>(format.block_bytes);
  }
  uint64_t row_bytes() const { return m.row_bytes != 0 ? m.row_bytes : own_row_bytes(); }

  cqsa_status check_rows() const {
    int64_t bytes = 0;
    if (m.row_bytes != 0 && m.row_bytes < own_row_bytes())
      return fail(CQSA_ERROR_SHAPE, "%s.row_bytes is %" PRIu64 ", wanted at least %" PRIu64 " for %" PRId64 " elements of %s", who().text, m.row_bytes,
                  own_row_bytes(), set.row_elements, quant_formats[m.format].name);
    if (row_bytes() > INT64_MAX || multiply_overflows(set.rows, static_cast<int64_t>(row_bytes()), &bytes))
      return fail(CQSA_ERROR_SHAPE, "%s has %" PRId64 " rows of %" PRIu64 " bytes, which do not fit 64 bits", who().text, set.rows, row_bytes());
    if (quant_formats[m.format].block_bytes % 2 == 0 && row_bytes() % 2 != 0)
      return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s.row_bytes is %" PRIu64 ", wanted an even number for %s", who().text, m.row_bytes,
                  quant_formats[m.format].name);
    return CQSA_OK;
  }

  cqsa_status check_address() const {
    if (quant_formats[m.format].block_bytes % 2 != 0 || reinterpret_cast<uintptr_t>(m.data) % 2 == 0) return CQSA_OK;
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s.data is %p, wanted an even address for %s", who().text, m.data, quant_formats[m.format].name);
  }

  // What is between two rows need not be there after the last.
  uint64_t least_bytes() const { return static_cast<uint64_t>(set.rows - 1) * row_bytes() + own_row_bytes(); }
  uint64_t most_bytes() const { return static_cast<uint64_t>(set.rows) * row_bytes(); }

  cqsa_status check_length(uint64_t before, int64_t experts) const {
    const uint64_t least = before + least_bytes(), most = before + most_bytes();
    if (m.data_bytes == 0 || (m.data_bytes >= least && m.data_bytes <= most)) return CQSA_OK;
    return fail(CQSA_ERROR_SHAPE, "%s.data_bytes is %" PRIu64 ", wanted %" PRIu64 " for %" PRId64 " x %" PRId64 " rows of %" PRId64 " elements of %s", who().text,
                m.data_bytes, least, experts, set.rows, set.row_elements, quant_formats[m.format].name);
  }

  cqsa_status check() const {
    CQSA_TRY(check_format());
    CQSA_TRY(check_rest());
    CQSA_TRY(check_device());
    CQSA_TRY(check_rows());
    return check_address();
  }
};

// A descriptor of zeros is an expert that is not here.
bool is_nobody(const cqsa_moe_matrix& m) { return m.data == nullptr && m.format == CQSA_QUANT_NONE; }

cqsa_status check_experts(const cqsa_context& context, const char* name, cqsa_moe_set& set) {
  bool mixed = false;
  for (int64_t e = 0; e < set.num_experts; ++e) {
    const matrix_check one{context, set, name, e, set.experts[e]};
    if (is_nobody(one.m)) continue;
    CQSA_TRY(one.check());
    CQSA_TRY(one.check_length(0, 1));
    mixed = mixed || (set.format != CQSA_QUANT_NONE && set.format != one.m.format);
    set.format = one.m.format;
  }
  if (mixed) set.format = CQSA_QUANT_NONE;
  return CQSA_OK;
}

cqsa_status check_all(const cqsa_context& context, const char* name, uint64_t stated, cqsa_moe_set& set) {
  const matrix_check all{context, set, name, -1, set.all};
  CQSA_TRY(all.check());
  const uint64_t step = stated != 0 ? stated : all.most_bytes();
  int64_t reach = 0;
  if (step < all.least_bytes())
    return fail(CQSA_ERROR_SHAPE, "%s->expert_bytes is %" PRIu64 ", wanted at least %" PRIu64 " for %" PRId64 " rows of %" PRIu64 " bytes", name, stated,
                all.least_bytes(), set.rows, all.row_bytes());
  if (step > INT64_MAX || multiply_overflows(static_cast<int64_t>(step), set.num_experts, &reach))
    return fail(CQSA_ERROR_SHAPE, "%s->expert_bytes is %" PRIu64 ", and %" PRId64 " experts do not fit 64 bits", name, step, set.num_experts);
  if (quant_formats[set.all.format].block_bytes % 2 == 0 && step % 2 != 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->expert_bytes is %" PRIu64 ", wanted an even number", name, step);
  CQSA_TRY(all.check_length(step * static_cast<uint64_t>(set.num_experts - 1), set.num_experts));
  set.all.row_bytes = all.row_bytes();
  set.expert_bytes = static_cast<int64_t>(step);
  set.format = set.all.format;
  return CQSA_OK;
}

// The kernels read them; the format is what the host has to know.
cqsa_status check_device_list(const cqsa_context& context, const char* name, cqsa_moe_set& set) {
  if (context.is_host())
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->device_experts is given, but backend %s has no memory of its own: wanted NULL, and experts", name,
                context.backend->name);
  const matrix_check all{context, set, name, -1, set.all};
  CQSA_TRY(all.check_format());
  set.format = set.all.format;
  return CQSA_OK;
}

cqsa_status check_sizes(const char* name, const cqsa_moe_weights& w) {
  if (w.num_experts < 1 || w.num_experts > most_experts)
    return fail(CQSA_ERROR_SHAPE, "%s->num_experts is %" PRId64 ", wanted 1 to %" PRId64, name, w.num_experts, most_experts);
  if (w.rows < 1) return fail(CQSA_ERROR_SHAPE, "%s->rows is %" PRId64 ", wanted at least 1", name, w.rows);
  if (w.row_elements < 1 || w.row_elements > INT64_MAX / 8)
    return fail(CQSA_ERROR_SHAPE, "%s->row_elements is %" PRId64 ", wanted at least 1 and bytes that fit 64 bits", name, w.row_elements);
  if (w.experts == nullptr || w.device_experts == nullptr) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "%s->experts and %s->device_experts are both given, wanted one of them", name, name);
}

cqsa_status check_apart(const matrix_check& one, uint64_t bytes, const written& outputs) {
  const auto low = reinterpret_cast<uintptr_t>(one.m.data), high = low + bytes;
  if (high < low) return fail(CQSA_ERROR_STRIDES, "%s reaches past the end of the address space", one.who().text);
  for (int i = 0; i < outputs.count; ++i)
    if (low < outputs.ranges[i].high && outputs.ranges[i].low < high)
      return fail(CQSA_ERROR_OVERLAP, "%s overlaps %s", outputs.ranges[i].name, one.who().text);
  return CQSA_OK;
}

}  // namespace

void written::add(const cqsa_tensor* t, const char* name) {
  byte_extent extent;
  if (t == nullptr || check_tensor(t, name, 0, max_axes, &extent) != CQSA_OK) return;
  const uintptr_t address = address_of(*t);
  add(byte_range{address + static_cast<uintptr_t>(extent.low), address + static_cast<uintptr_t>(extent.high), name});
}

cqsa_status read_set(const cqsa_context& context, const cqsa_moe_weights* caller, const char* name, cqsa_moe_set& out) {
  cqsa_moe_weights w;
  CQSA_TRY(copy_struct(caller, name, first_weights, 0, w));
  CQSA_TRY(check_sizes(name, w));
  out = {};
  out.num_experts = w.num_experts, out.rows = w.rows, out.row_elements = w.row_elements;
  out.experts = w.experts, out.device_experts = w.device_experts, out.all = w.all;
  if (w.experts) return check_experts(context, name, out);
  if (w.device_experts) return check_device_list(context, name, out);
  return check_all(context, name, w.expert_bytes, out);
}

cqsa_status check_memory(fp8::operand_list& list, const cqsa_moe_set& set, const char* name, const written& outputs) {
  if (list.shapes_only() || set.num_experts == 0) return CQSA_OK;
  if (set.device_experts) return list.check_place(set.device_experts, name, CQSA_ERROR_DEVICE);
  const int64_t count = set.experts ? set.num_experts : 1;
  for (int64_t e = 0; e < count; ++e) {
    const matrix_check one{list.context(), set, name, set.experts ? e : -1, set.experts ? set.experts[e] : set.all};
    if (one.m.data == nullptr) continue;
    CQSA_TRY(list.check_place(one.m.data, name, CQSA_ERROR_DEVICE));
    const uint64_t before = set.experts ? 0 : static_cast<uint64_t>(set.expert_bytes) * static_cast<uint64_t>(set.num_experts - 1);
    CQSA_TRY(check_apart(one, before + one.least_bytes(), outputs));
  }
  return CQSA_OK;
}

bool has_data(const cqsa_moe_set& set, int64_t expert) {
  return set.num_experts == 0 || matrix_at(set.experts, set.all, set.expert_bytes, expert).data != nullptr;
}

}  // namespace cqsa::moe
