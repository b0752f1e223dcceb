// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of mixtures of experts: guard, validate, call.
#include "abi_struct.h"
#include "guard.h"
#include "ops/attention/describe.h"
#include "ops/attention/enqueue.h"
#include "ops/moe/moe.h"
#include "ops/moe/parts.h"

using namespace cqsa;

namespace {

template <class Call> cqsa_status on_stream(const cqsa_context* context, void* stream, const Call& call) {
  return guard([&]() -> cqsa_status {
    if (context == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
    bool capturing = false;
    CQSA_TRY(query_stream(*context, stream, capturing));
    return call(capturing);
  });
}

template <class Call> cqsa_status on_context(const cqsa_context* context, const Call& call) {
  return guard([&]() -> cqsa_status { return context ? call() : fail(CQSA_ERROR_NULL_POINTER, "context is NULL"); });
}

}  // namespace

extern "C" {

void cqsa_moe_weights_init(cqsa_moe_weights* weights, uint64_t size) { init_struct(weights, size); }
void cqsa_moe_shared_init(cqsa_moe_shared* shared, uint64_t size) { init_struct(shared, size); }
void cqsa_moe_args_init(cqsa_moe_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_moe_route_args_init(cqsa_moe_route_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_moe_group_args_init(cqsa_moe_group_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_moe_combine_args_init(cqsa_moe_combine_args* args, uint64_t size) { init_struct(args, size); }

cqsa_status cqsa_moe_prefill(cqsa_context* context, const cqsa_moe_args* args, void* stream) {
  return on_stream(context, stream, [&](bool capturing) { return moe::prefill(*context, args, stream, capturing); });
}

cqsa_status cqsa_moe_workspace(const cqsa_context* context, const cqsa_moe_args* args, uint64_t* bytes_out) {
  return on_context(context, [&]() -> cqsa_status {
    if (bytes_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "bytes_out is NULL");
    return moe::workspace(*context, args, *bytes_out);
  });
}

cqsa_status cqsa_moe_explain(const cqsa_context* context, const cqsa_moe_args* args, char* buffer, uint64_t size, uint64_t* length_out) {
  return on_context(context, [&]() -> cqsa_status {
    std::string text;
    CQSA_TRY(moe::explain(*context, args, text));
    return copy_text(text, buffer, size, length_out);
  });
}

cqsa_status cqsa_moe_route(cqsa_context* context, const cqsa_moe_route_args* args, void* stream) {
  return on_stream(context, stream, [&](bool) { return moe::route(*context, args, stream); });
}

cqsa_status cqsa_moe_group(cqsa_context* context, const cqsa_moe_group_args* args, void* stream) {
  return on_stream(context, stream, [&](bool) { return moe::group(*context, args, stream); });
}

cqsa_status cqsa_moe_quantize_activations(cqsa_context* context, const cqsa_tensor* x, const cqsa_tensor* codes, const cqsa_tensor* scales, void* stream) {
  return on_stream(context, stream, [&](bool) { return moe::quantize_activations(*context, x, codes, scales, stream); });
}

cqsa_status cqsa_moe_combine(cqsa_context* context, const cqsa_moe_combine_args* args, void* stream) {
  return on_stream(context, stream, [&](bool) { return moe::combine(*context, args, stream); });
}

}  // extern "C"
