// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of FP8: guard, validate, call.
#include "abi_struct.h"
#include "guard.h"
#include "ops/attention/describe.h"
#include "ops/attention/enqueue.h"
#include "ops/fp8/dequantize.h"
#include "ops/fp8/gemm.h"
#include "ops/fp8/quantize.h"
#include "ops/fp8/ring.h"
#include "ops/fp8/scales.h"
#include "ops/fp8/workspace.h"

using namespace cqsa;

namespace {

template <class Call>
cqsa_status on_stream(const cqsa_context* context, void* stream, const Call& call) {
  return guard([&]() -> cqsa_status {
    if (context == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "context is NULL");
    bool capturing = false;
    CQSA_TRY(query_stream(*context, stream, capturing));
    return call(capturing);
  });
}

template <class Call>
cqsa_status on_context(const cqsa_context* context, const Call& call) {
  return guard([&]() -> cqsa_status { return context ? call() : fail(CQSA_ERROR_NULL_POINTER, "context is NULL"); });
}

cqsa_status need_bytes_out(const uint64_t* bytes_out) { return bytes_out ? CQSA_OK : fail(CQSA_ERROR_NULL_POINTER, "bytes_out is NULL"); }

}  // namespace

extern "C" {

void cqsa_fp8_ring_struct_init(cqsa_fp8_ring* ring, uint64_t size) { init_struct(ring, size); }
void cqsa_fp8_ring_info_init(cqsa_fp8_ring_info* info, uint64_t size) { init_struct(info, size); }
void cqsa_fp8_quantize_args_init(cqsa_fp8_quantize_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_fp8_scale_args_init(cqsa_fp8_scale_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_fp8_dequantize_args_init(cqsa_fp8_dequantize_args* args, uint64_t size) { init_struct(args, size); }
void cqsa_fp8_gemm_args_init(cqsa_fp8_gemm_args* args, uint64_t size) { init_struct(args, size); }

// ---- rings ------------------------------------------------------------------------------------------------------------------

cqsa_status cqsa_fp8_ring_bytes(const cqsa_fp8_ring* ring, uint64_t* bytes_out) {
  return guard([&]() -> cqsa_status {
    CQSA_TRY(need_bytes_out(bytes_out));
    return fp8::ring_bytes(ring, *bytes_out);
  });
}

cqsa_status cqsa_fp8_ring_init(cqsa_context* context, const cqsa_fp8_ring* ring, float amax, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::ring_init(*context, ring, amax, stream); });
}

cqsa_status cqsa_fp8_ring_fold(cqsa_context* context, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::ring_fold(*context, rings, count, amaxes, stream); });
}

cqsa_status cqsa_fp8_ring_staged(cqsa_context* context, const cqsa_fp8_ring* rings, int64_t count, const cqsa_tensor* amaxes_out, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::ring_staged(*context, rings, count, amaxes_out, stream); });
}

cqsa_status cqsa_fp8_ring_read(cqsa_context* context, const cqsa_fp8_ring* ring, cqsa_fp8_ring_info* info_out, float* history_out, void* stream) {
  return on_stream(context, stream, [&](bool capturing) { return fp8::ring_read(*context, ring, info_out, history_out, stream, capturing); });
}

// ---- quantization -----------------------------------------------------------------------------------------------------------

cqsa_status cqsa_fp8_quantize(cqsa_context* context, const cqsa_fp8_quantize_args* args, void* stream) {
  return on_stream(context, stream, [&](bool capturing) { return fp8::quantize(*context, &args, 1, false, stream, capturing); });
}

cqsa_status cqsa_fp8_quantize_many(cqsa_context* context, const cqsa_fp8_quantize_args* const* args, int64_t count, void* stream) {
  return on_stream(context, stream, [&](bool capturing) { return fp8::quantize(*context, args, count, true, stream, capturing); });
}

cqsa_status cqsa_fp8_quantize_workspace(const cqsa_context* context, const cqsa_fp8_quantize_args* const* args, int64_t count, uint64_t* bytes_out) {
  return on_context(context, [&]() -> cqsa_status {
    CQSA_TRY(need_bytes_out(bytes_out));
    return fp8::quantize_workspace(*context, args, count, *bytes_out);
  });
}

cqsa_status cqsa_fp8_workspace_init(cqsa_context* context, void* workspace, uint64_t bytes, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::workspace_init(*context, workspace, bytes, stream); });
}

cqsa_status cqsa_fp8_amax(cqsa_context* context, const cqsa_tensor* x, const int64_t* block, int32_t nan_policy, const cqsa_tensor* amax_out,
                          void* workspace, uint64_t workspace_bytes, void* stream) {
  return on_stream(context, stream, [&](bool capturing) {
    return fp8::amax(*context, {x, block, nan_policy, amax_out, workspace, workspace_bytes}, stream, capturing);
  });
}

// ---- scales and codes -------------------------------------------------------------------------------------------------------

cqsa_status cqsa_fp8_scale_from_amax(cqsa_context* context, const cqsa_fp8_scale_args* args, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::scale_from_amax(*context, args, stream); });
}

cqsa_status cqsa_fp8_scale_relayout(cqsa_context* context, const cqsa_tensor* scales, int32_t layout, const cqsa_tensor* scales_out,
                                    int32_t layout_out, int64_t block_rows, int64_t block_columns, void* stream) {
  return on_stream(context, stream, [&](bool) {
    return fp8::scale_relayout(*context, scales, layout, scales_out, layout_out, block_rows, block_columns, stream);
  });
}

cqsa_status cqsa_fp8_dequantize(cqsa_context* context, const cqsa_fp8_dequantize_args* args, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::dequantize(*context, args, stream); });
}

cqsa_status cqsa_fp8_transpose(cqsa_context* context, const cqsa_tensor* x, const cqsa_tensor* out, void* stream) {
  return on_stream(context, stream, [&](bool) { return fp8::transpose(*context, x, out, stream); });
}

// ---- product ----------------------------------------------------------------------------------------------------------------

cqsa_status cqsa_fp8_gemm(cqsa_context* context, const cqsa_fp8_gemm_args* args, void* stream) {
  return on_stream(context, stream, [&](bool capturing) { return fp8::gemm(*context, args, stream, capturing); });
}

cqsa_status cqsa_fp8_gemm_workspace(const cqsa_context* context, const cqsa_fp8_gemm_args* args, uint64_t* bytes_out) {
  return on_context(context, [&]() -> cqsa_status {
    CQSA_TRY(need_bytes_out(bytes_out));
    return fp8::gemm_workspace(*context, args, *bytes_out);
  });
}

cqsa_status cqsa_fp8_gemm_explain(const cqsa_context* context, const cqsa_fp8_gemm_args* args, char* buffer, uint64_t size, uint64_t* length_out) {
  return on_context(context, [&]() -> cqsa_status {
    std::string text;
    CQSA_TRY(fp8::gemm_explain(*context, args, text));
    return copy_text(text, buffer, size, length_out);
  });
}

}  // extern "C"
