// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of key-value caches: guard, validate, call. Each call is one launch, which may be captured.
#include "abi_struct.h"
#include "guard.h"
#include "ops/attention/enqueue.h"
#include "ops/sparse/kv.h"

using namespace cqsa;

namespace {

template <class Call> cqsa_status on_stream(const cqsa_context* context, void* stream, const Call& call) {
  return guard([&]() -> cqsa_status {
    if (context == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
    bool capturing = false;
    CQSA_TRY(query_stream(*context, stream, capturing));
    return call();
  });
}

}  // namespace

extern "C" {

void cqsa_kv_args_init(cqsa_kv_args* args, uint64_t size) { init_struct(args, size); }

cqsa_status cqsa_kv_append(cqsa_context* context, const cqsa_kv_args* args, void* stream) {
  return on_stream(context, stream, [&] { return kv_rows(*context, args, kv_direction::append, stream); });
}

cqsa_status cqsa_kv_gather(cqsa_context* context, const cqsa_kv_args* args, void* stream) {
  return on_stream(context, stream, [&] { return kv_rows(*context, args, kv_direction::gather, stream); });
}

cqsa_status cqsa_hadamard(cqsa_context* context, const cqsa_tensor* x, const cqsa_tensor* out, void* stream) {
  return on_stream(context, stream, [&] { return hadamard(*context, x, out, stream); });
}

}  // extern "C"
