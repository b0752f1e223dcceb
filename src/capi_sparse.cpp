// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of attention over selected cells: guard, validate, call.
#include "abi_struct.h"
#include "guard.h"
#include "ops/attention/enqueue.h"
#include "ops/sparse/selected.h"

using namespace cqsa;

extern "C" {

void cqsa_attention_selected_args_init(cqsa_attention_selected_args* args, uint64_t size) { init_struct(args, size); }

cqsa_status cqsa_attention_selected(cqsa_context* context, const cqsa_attention_selected_args* args, void* stream) {
  return guard([&]() -> cqsa_status {
    if (context == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
    bool capturing = false;
    CQSA_TRY(query_stream(*context, stream, capturing));
    return attention_selected(*context, args, stream, capturing);
  });
}

cqsa_status cqsa_attention_selected_workspace(const cqsa_context* context, const cqsa_attention_selected_args* args, uint64_t* bytes_out) {
  return guard([&]() -> cqsa_status {
    if (context == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
    if (bytes_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "bytes_out is NULL");
    return attention_selected_workspace(*context, args, *bytes_out);
  });
}

}  // extern "C"
