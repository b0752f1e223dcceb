// SPDX-License-Identifier: Apache-2.0
#include "ops/fp8/gemm.h"

#include <cinttypes>
#include <cmath>
#include <cstring>

#include "abi_struct.h"
#include "ops/fp8/workspace.h"

namespace cqsa::fp8 {

namespace {

using args_type = cqsa_fp8_gemm_args;

constexpr uint32_t first_args = sizeof(args_type);

const char* provider_name(int32_t provider) { return provider == CQSA_FP8_PROVIDER_VENDOR ? "CQSA_FP8_PROVIDER_VENDOR" : "CQSA_FP8_PROVIDER_OWN"; }

cqsa_status none_takes(const cqsa_context& context, int32_t provider, cqsa_status status, const char* reason) {
  const char* const name = context.backend->name;
  if (provider == CQSA_FP8_PROVIDER_AUTO)
    return fail(status, "no implementation of backend %s takes this product; the last one says: %s", name, reason);
  return fail(CQSA_ERROR_UNSUPPORTED, "no implementation of backend %s that args->provider, %s, admits takes this product: %s", name,
              provider_name(provider), reason);
}

// The first that the caller admits and whose probe accepts. declined: a line for each before it.
cqsa_status choose(const cqsa_context& context, const cqsa_fp8_gemm_leaf& leaf, int32_t provider, const cqsa_fp8_gemm_impl*& impl_out,
                   std::string* declined) {
  const cqsa_backend_v1& backend = *context.backend;
  if (backend.fp8_gemm == nullptr || backend.num_fp8_gemm < 1) return no_leaf(context, "fp8_gemm");
  char reason[256] = "there is none";
  cqsa_status status = CQSA_ERROR_UNSUPPORTED;
  for (int32_t i = 0; i < backend.num_fp8_gemm; ++i) {
    const cqsa_fp8_gemm_impl& impl = backend.fp8_gemm[i];
    const bool admitted = provider == CQSA_FP8_PROVIDER_AUTO || provider == impl.provider;
    if (admitted && (status = impl.probe(context.device, &leaf, reason, sizeof reason)) == CQSA_OK) return impl_out = &impl, CQSA_OK;
    if (declined) *declined += std::string(impl.name) + " declined: " + (admitted ? reason : "args->provider does not admit it") + "\n";
  }
  return none_takes(context, provider, status, reason);
}

uint64_t bytes_for(const cqsa_context& context, const cqsa_fp8_gemm_leaf& leaf, const cqsa_fp8_gemm_impl& impl) {
  return impl.workspace ? impl.workspace(&leaf, context.num_threads) : 0;
}

cqsa_status copy_args(const args_type* caller, args_type& out) { return copy_struct(caller, "args", first_args, 0, out); }

// What a query looks at: shapes, types and strides, and the alignment of data that is there.
void show_data(const args_type& a, cqsa_fp8_gemm_leaf& leaf) {
  const auto data = [](const cqsa_tensor* t) { return t && t->data ? reinterpret_cast<void*>(address_of(*t)) : nullptr; };
  leaf.a.data = data(a.a), leaf.b.data = data(a.b), leaf.c.data = data(a.c), leaf.d.data = data(a.d);
}

cqsa_status ask(const cqsa_context& context, const args_type* caller, cqsa_fp8_gemm_leaf& leaf, const cqsa_fp8_gemm_impl*& impl_out,
                std::string* declined) {
  args_type args;
  operand_list list(context, nullptr, look::shapes_only);
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind_gemm(list, args, leaf));
  show_data(args, leaf);
  return choose(context, leaf, args.provider, impl_out, declined);
}

// What only a host backend can look at.
cqsa_status check_d_scale(const float* d_scale) {
  float scale = 1;
  if (d_scale) std::memcpy(&scale, d_scale, sizeof scale);
  if (scale > 0 && std::isfinite(scale)) return CQSA_OK;
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->d_scale is %g, wanted a finite number above 0", static_cast<double>(scale));
}

}  // namespace

cqsa_status gemm(const cqsa_context& context, const args_type* caller, void* stream, bool capturing) {
  args_type args;
  cqsa_fp8_gemm_leaf leaf;
  operand room[most_gemm_operands + 1];
  operand_list list(context, room, look::everywhere);
  const cqsa_fp8_gemm_impl* impl = nullptr;
  CQSA_TRY(copy_args(caller, args));
  CQSA_TRY(bind_gemm(list, args, leaf));
  CQSA_TRY(choose(context, leaf, args.provider, impl, nullptr));
  const workspace_use use{args.workspace, args.workspace_bytes, bytes_for(context, leaf, *impl), capturing, stream};
  CQSA_TRY(check_workspace(list, use));
  if (use.memory) CQSA_TRY(list.check_overlap(args.c, args.c && same_view(*args.c, *args.d) ? args.d : nullptr));
  if (context.is_host()) CQSA_TRY(check_d_scale(leaf.d_scale));
  if (is_empty(*args.d) && args.d_amax == nullptr) return CQSA_OK;
  return run_with_workspace(context, use, "args->workspace", [&](void* workspace) {
    const cqsa_exec exec = plain_exec(context);
    const uint64_t bytes = workspace == nullptr ? 0 : use.memory ? use.given : use.needed;
    return report(context, impl->launch(context.device, &leaf, workspace, bytes, context.is_host() ? &exec : nullptr, stream), impl->name);
  });
}

cqsa_status gemm_workspace(const cqsa_context& context, const args_type* caller, uint64_t& bytes_out) {
  cqsa_fp8_gemm_leaf leaf;
  const cqsa_fp8_gemm_impl* impl = nullptr;
  CQSA_TRY(ask(context, caller, leaf, impl, nullptr));
  bytes_out = bytes_for(context, leaf, *impl);
  return CQSA_OK;
}

cqsa_status gemm_explain(const cqsa_context& context, const args_type* caller, std::string& out) {
  cqsa_fp8_gemm_leaf leaf;
  const cqsa_fp8_gemm_impl* impl = nullptr;
  std::string declined;
  CQSA_TRY(ask(context, caller, leaf, impl, &declined));
  out = "impl=" + std::string(impl->name) + "\nrequirement: " + (impl->requirement ? impl->requirement : "") + "\n" + declined;
  return CQSA_OK;
}

}  // namespace cqsa::fp8
