// SPDX-License-Identifier: Apache-2.0
// The extern "C" bodies of quantized matrices and of GGUF files: guard, validate, call.
#include "abi_struct.h"
#include "gguf.h"
#include "guard.h"
#include "ops/attention/enqueue.h"
#include "ops/moe/dequantize.h"
#include "quant_format.h"

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

// A query of an open file, with one output.
template <class Call> cqsa_status on_file(const cqsa_gguf* gguf, const void* name, const void* out, const Call& call) {
  return guard([&]() -> cqsa_status {
    if (gguf == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "gguf is NULL");
    if (name == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "the name is NULL");
    if (out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "the output is NULL");
    return call();
  });
}

}  // namespace

extern "C" {

void cqsa_quant_format_info_init(cqsa_quant_format_info* info, uint64_t size) { init_struct(info, size); }
void cqsa_quant_tensor_init(cqsa_quant_tensor* tensor, uint64_t size) { init_struct(tensor, size); }
void cqsa_gguf_tensor_info_init(cqsa_gguf_tensor_info* info, uint64_t size) { init_struct(info, size); }

cqsa_status cqsa_quant_format_query(cqsa_quant_format format, cqsa_quant_format_info* info_out) {
  return guard([&] { return describe_quant_format(format, info_out); });
}

cqsa_status cqsa_dequantize_rows(cqsa_context* context, const cqsa_quant_tensor* w, int64_t first_row, const cqsa_tensor* row_ids,
                                 const cqsa_tensor* out, void* stream) {
  return on_stream(context, stream, [&] { return dequantize_rows(*context, w, first_row, row_ids, out, stream); });
}

cqsa_status cqsa_quantize_rows(cqsa_context* context, const cqsa_tensor* x, const cqsa_quant_tensor* w, void* stream) {
  return on_stream(context, stream, [&] { return quantize_rows(*context, x, w, stream); });
}

cqsa_status cqsa_gguf_open(const char* path, cqsa_gguf** gguf_out) {
  return guard([&]() -> cqsa_status {
    if (gguf_out == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "gguf_out is NULL");
    if (path == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "path is NULL");
    return cqsa_gguf::open(path, gguf_out);
  });
}

void cqsa_gguf_close(cqsa_gguf* gguf) { delete gguf; }

int64_t cqsa_gguf_tensor_count(const cqsa_gguf* gguf) { return gguf ? gguf->tensor_count() : 0; }

cqsa_status cqsa_gguf_find(const cqsa_gguf* gguf, const char* name, int64_t* index_out) {
  return on_file(gguf, name, index_out, [&] { return gguf->find(name, *index_out); });
}

cqsa_status cqsa_gguf_tensor(const cqsa_gguf* gguf, int64_t index, cqsa_gguf_tensor_info* info_out) {
  return on_file(gguf, "", info_out, [&] { return gguf->describe(index, info_out); });
}

cqsa_status cqsa_gguf_matrix(const cqsa_gguf* gguf, int64_t index, int64_t expert, cqsa_quant_tensor* matrix_out) {
  return on_file(gguf, "", matrix_out, [&] { return gguf->matrix(index, expert, matrix_out); });
}

int64_t cqsa_gguf_key_count(const cqsa_gguf* gguf) { return gguf ? gguf->key_count() : 0; }
const char* cqsa_gguf_key(const cqsa_gguf* gguf, int64_t index) { return gguf ? gguf->key(index) : nullptr; }

cqsa_status cqsa_gguf_integer(const cqsa_gguf* gguf, const char* key, int64_t* value_out) {
  return on_file(gguf, key, value_out, [&] { return gguf->integer(key, *value_out); });
}

cqsa_status cqsa_gguf_number(const cqsa_gguf* gguf, const char* key, double* value_out) {
  return on_file(gguf, key, value_out, [&] { return gguf->number(key, *value_out); });
}

cqsa_status cqsa_gguf_text(const cqsa_gguf* gguf, const char* key, char* buffer, uint64_t size, uint64_t* length_out) {
  return on_file(gguf, key, length_out, [&] { return gguf->text(key, buffer, size, length_out); });
}

}  // extern "C"
