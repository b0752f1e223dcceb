// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/moe.h"

#include <algorithm>
#include <cinttypes>

#include "abi_struct.h"
#include "backends/moe_rules.h"
#include "ops/fp8/workspace.h"
#include "quant_format.h"
#include "workspace.h"

namespace cqsa::moe {

namespace {

using args_type = cqsa_moe_args;
using fp8::operand_list;

constexpr uint32_t first_args = sizeof(args_type);

cqsa_status copy_args(const args_type* caller, args_type& out) { return copy_struct(caller, "args", first_args, CQSA_MOE_BATCH_INVARIANT, out); }

// The first whose probe accepts. declined: a line for each before it.
cqsa_status choose(const cqsa_context& context, const cqsa_moe_leaf& leaf, const cqsa_moe_impl*& impl_out, std::string* declined) {
  const cqsa_backend_v1& backend = *context.backend;
  if (backend.moe == nullptr || backend.num_moe < 1) return fp8::no_leaf(context, "mixture of experts");
  char reason[256] = "there is none";
  cqsa_status status = CQSA_ERROR_UNSUPPORTED;
  for (int32_t i = 0; i < backend.num_moe; ++i) {
    const cqsa_moe_impl& impl = backend.moe[i];
    if ((status = impl.probe(context.device, &leaf, reason, sizeof reason)) == CQSA_OK) return impl_out = &impl, CQSA_OK;
    if (declined) *declined += std::string(impl.name) + " declined: " + reason + "\n";
  }
  return fail(status, "no implementation of backend %s takes this layer; the last one says: %s", backend.name, reason);
}

// ---- pieces -----------------------------------------------------------------------------------------------------------------

uint64_t bytes_for(const cqsa_context& context, const cqsa_moe_leaf& leaf, const cqsa_moe_impl& impl) {
  if (leaf.tokens == 0) return 0;
  const uint64_t bytes = impl.workspace(&leaf, context.num_threads);
  return std::min(bytes, arena::limit) / workspace_alignment * workspace_alignment + (bytes % workspace_alignment ? workspace_alignment : 0);
}

uint64_t bytes_at(const cqsa_context& context, cqsa_moe_leaf leaf, const cqsa_moe_impl& impl, int64_t chunk) {
  leaf.chunk = chunk;
  return bytes_for(context, leaf, impl);
}

// The most tokens whose workspace fits; 0: not even one.
int64_t most_tokens(const cqsa_context& context, const cqsa_moe_leaf& leaf, const cqsa_moe_impl& impl, uint64_t limit) {
  int64_t fits = 0, too_many = leaf.tokens + 1;
  if (bytes_at(context, leaf, impl, leaf.tokens) <= limit) return leaf.tokens;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (bytes_at(context, leaf, impl, middle) <= limit ? fits : too_many) = middle;
  }
  return fits;
}

// Without a limit of the caller's a host takes no more than this while smaller pieces will do.
constexpr uint64_t usual_host_bytes = uint64_t{1} << 30;

cqsa_status choose_chunk(const cqsa_context& context, const cqsa_moe_impl& impl, uint64_t limit, cqsa_moe_leaf& leaf) {
  if (leaf.tokens == 0) return CQSA_OK;
  const uint64_t most = limit != 0 ? limit : context.is_host() ? usual_host_bytes : UINT64_MAX;
  const int64_t tokens = most_tokens(context, leaf, impl, most);
  if (tokens == 0 && limit != 0)
    return fail(CQSA_ERROR_BUDGET_TOO_SMALL, "args->max_bytes is %" PRIu64 ", and the least that works is %" PRIu64 ", for one token at a time", limit,
                bytes_at(context, leaf, impl, 1));
  leaf.chunk = std::max<int64_t>(tokens, 1);
  const int64_t pieces = (leaf.tokens - 1) / leaf.chunk + 1;
  leaf.chunk = (leaf.tokens - 1) / pieces + 1;
  return CQSA_OK;
}

// What a query looks at.
cqsa_status ask(const cqsa_context& context, const args_type* caller, cqsa_moe_leaf& leaf, const cqsa_moe_impl*& impl_out, std::string* declined) {
  args_type args;
  operand_list list(context, nullptr, fp8::look::shapes_only);
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind(list, args, leaf));
  CQSA_TRY(choose(context, leaf, impl_out, declined));
  return choose_chunk(context, *impl_out, args.max_bytes, leaf);
}

// ---- explain ----------------------------------------------------------------------------------------------------------------

const char* format_name(const cqsa_moe_set& set) { return set.format == CQSA_QUANT_NONE ? "several formats" : quant_formats[set.format].name; }

void tell_projection(const cqsa_moe_leaf& leaf, const cqsa_moe_set& set, const char* name, std::string& out) {
  if (set.num_experts == 0) return;
  const bool mixed = set.format == CQSA_QUANT_NONE, q8 = leaf.precision == CQSA_MOE_PRECISION_Q8;
  const char* const how = !q8 || (!mixed && is_plain(set.format)) ? "f16 or better" : mixed ? "int8 (q8), f16 or better for F32, F16 and BF16" : "int8 (q8)";
  out += std::string(name) + ": " + format_name(set) + ", activations " + how + "\n";
}

void tell_pieces(const cqsa_context& context, const cqsa_moe_leaf& leaf, const cqsa_moe_impl& impl, std::string& out) {
  const int64_t pieces = leaf.tokens == 0 ? 0 : (leaf.tokens - 1) / leaf.chunk + 1;
  out += std::to_string(leaf.tokens) + " tokens in " + std::to_string(pieces) + (pieces == 1 ? " piece, " : " pieces, ") +
         std::to_string(bytes_for(context, leaf, impl)) + " bytes of workspace\n";
}

}  // namespace

cqsa_status prefill(const cqsa_context& context, const args_type* caller, void* stream, bool capturing) {
  args_type args;
  cqsa_moe_leaf leaf;
  fp8::operand room[most_operands + 1];
  operand_list list(context, room, fp8::look::everywhere);
  const cqsa_moe_impl* impl = nullptr;
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind(list, args, leaf));
  CQSA_TRY(choose(context, leaf, impl, nullptr));
  CQSA_TRY(choose_chunk(context, *impl, args.max_bytes, leaf));
  const fp8::workspace_use use{args.workspace, args.workspace_bytes, bytes_for(context, leaf, *impl), capturing, stream, false};
  CQSA_TRY(check_workspace(list, use));
  if (use.memory) CQSA_TRY(list.check_overlap());
  CQSA_TRY(check_weights(list, args, leaf));
  if (context.is_host()) CQSA_TRY(check_ids(leaf));
  if (leaf.tokens == 0) return CQSA_OK;
  return run_with_workspace(context, use, "args->workspace", [&](void* memory) {
    const cqsa_exec exec = plain_exec(context);
    return fp8::report(context, impl->launch(context.device, &leaf, memory, use.needed, context.is_host() ? &exec : nullptr, stream), impl->name);
  });
}

cqsa_status workspace(const cqsa_context& context, const args_type* caller, uint64_t& bytes_out) {
  cqsa_moe_leaf leaf;
  const cqsa_moe_impl* impl = nullptr;
  CQSA_TRY(ask(context, caller, leaf, impl, nullptr));
  bytes_out = bytes_for(context, leaf, *impl);
  return CQSA_OK;
}

cqsa_status explain(const cqsa_context& context, const args_type* caller, std::string& out) {
  cqsa_moe_leaf leaf;
  const cqsa_moe_impl* impl = nullptr;
  std::string declined;
  CQSA_TRY(ask(context, caller, leaf, impl, &declined));
  out = "impl=" + std::string(impl->name) + "\nrequirement: " + (impl->requirement ? impl->requirement : "") + "\n";
  tell_projection(leaf, leaf.gate, leaf.layout == CQSA_MOE_SEPARATE ? "w_gate" : "w_gate (with up)", out);
  tell_projection(leaf, leaf.up, "w_up", out);
  tell_projection(leaf, leaf.down, "w_down", out);
  tell_pieces(context, leaf, *impl, out);
  out += declined;
  return CQSA_OK;
}

}  // namespace cqsa::moe
