// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/merge.h"

#include <algorithm>

#include "abi_struct.h"
#include "ops/attention/enqueue.h"
#include "tensor.h"

namespace cqsa {

namespace {

constexpr uint32_t first_merge_args = sizeof(cqsa_attention_merge_args);

struct side {
  const cqsa_tensor* out;
  const cqsa_tensor* lse;
  const char* out_name;
  const char* lse_name;
};

cqsa_status check_operand(const cqsa_context& context, const cqsa_tensor* tensor, const char* name, int min_ndim, int max_ndim,
                          pointer_answers& answers) {
  const cqsa_backend_v1& backend = *context.backend;
  byte_extent extent;
  CQSA_TRY(check_tensor(tensor, name, min_ndim, max_ndim, &extent));
  if (tensor->dtype != CQSA_DTYPE_F32)
    return fail(CQSA_ERROR_DTYPE, "%s is %s, wanted f32", name, dtype_name(tensor->dtype));
  if (tensor->device_type != backend.device_type)
    return fail(CQSA_ERROR_DEVICE, "%s is on device type %d, wanted %d (backend %s)", name, tensor->device_type,
                backend.device_type, backend.name);
  if (context.is_host()) return CQSA_OK;
  if (tensor->device_id != context.device_index)
    return fail(CQSA_ERROR_DEVICE, "%s is on device %d, the context is for device %d", name, tensor->device_id, context.device_index);
  return check_pointer(context, *tensor, name, answers);
}

// Shapes of every side equal those of `like`.
cqsa_status check_side(const cqsa_context& context, const side& s, const cqsa_tensor* like, pointer_answers& answers) {
  CQSA_TRY(check_operand(context, s.out, s.out_name, 2, 5, answers));
  if (like) CQSA_TRY(check_shape(*s.out, s.out_name, like->shape, like->ndim));
  CQSA_TRY(check_operand(context, s.lse, s.lse_name, s.out->ndim - 1, s.out->ndim - 1, answers));
  return check_shape(*s.lse, s.lse_name, s.out->shape, s.out->ndim - 1);
}

cqsa_status check_output(const cqsa_tensor& output, const char* name, const side& a, const side& b) {
  CQSA_TRY(check_no_self_overlap(output, name));
  const struct { const cqsa_tensor* tensor; const char* name; } inputs[] = {
      {a.out, a.out_name}, {a.lse, a.lse_name}, {b.out, b.out_name}, {b.lse, b.lse_name}};
  for (const auto& input : inputs) {
    const bool in_place = input.tensor->ndim == output.ndim && same_view(*input.tensor, output);
    if (!in_place) CQSA_TRY(check_no_overlap(output, name, *input.tensor, input.name, " without being the same view"));
  }
  return CQSA_OK;
}

// Leading axes are padded to four with size 1 in front. An empty tensor may have any address and offset: nobody goes there.
float* lay_out(const cqsa_tensor& tensor, int leading, int64_t* stride_out, bool channel) {
  if (is_empty(tensor)) return std::fill_n(stride_out, channel ? 5 : 4, 0), nullptr;
  int64_t stride[5];
  strides_of(tensor, stride);
  for (int i = 0; i < 4; ++i) stride_out[i] = i < 4 - leading ? 0 : stride[i - (4 - leading)];
  if (channel) stride_out[4] = stride[leading];
  return reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

void fill(const cqsa_attention_merge_args& args, cqsa_merge_leaf& leaf) {
  const int leading = args.out->ndim - 1;
  for (int i = 0; i < 4; ++i) leaf.shape[i] = i < 4 - leading ? 1 : args.out->shape[i - (4 - leading)];
  leaf.head_dim_v = args.out->shape[leading];
  leaf.out_a = lay_out(*args.out_a, leading, leaf.out_a_stride, true);
  leaf.out_b = lay_out(*args.out_b, leading, leaf.out_b_stride, true);
  leaf.out = lay_out(*args.out, leading, leaf.out_stride, true);
  leaf.lse_a = lay_out(*args.lse_a, leading, leaf.lse_a_stride, false);
  leaf.lse_b = lay_out(*args.lse_b, leading, leaf.lse_b_stride, false);
  leaf.lse = lay_out(*args.lse, leading, leaf.lse_stride, false);
}

}  // namespace

cqsa_status merge(const cqsa_context& context, const cqsa_attention_merge_args* caller, void* stream) {
  cqsa_attention_merge_args args{};
  CQSA_TRY(copy_struct(caller, "args", first_merge_args, 0, args));
  const side a{args.out_a, args.lse_a, "args->out_a", "args->lse_a"};
  const side b{args.out_b, args.lse_b, "args->out_b", "args->lse_b"};
  const side out{args.out, args.lse, "args->out", "args->lse"};
  pointer_answers answers;
  CQSA_TRY(check_side(context, a, nullptr, answers));
  CQSA_TRY(check_side(context, b, args.out_a, answers));
  CQSA_TRY(check_side(context, out, args.out_a, answers));
  CQSA_TRY(check_output(*args.out, out.out_name, a, b));
  CQSA_TRY(check_output(*args.lse, out.lse_name, a, b));
  CQSA_TRY(check_no_overlap(*args.out, "args->out", *args.lse, "args->lse"));
  if (is_empty(*args.lse)) return CQSA_OK;  // no row
  cqsa_merge_leaf leaf{};
  fill(args, leaf);
  const cqsa_exec exec = plain_exec(context);
  const cqsa_status status = context.backend->merge(context.device, &leaf, context.is_host() ? &exec : nullptr, stream);
  if (status == CQSA_OK || status == CQSA_ERROR_CALLBACK) return status;
  return fail(status, "merge failed: %s", context.backend->last_error());
}

}  // namespace cqsa
