/* SPDX-License-Identifier: Apache-2.0
 * A mixture-of-experts layer: 16 experts quantized to Q8_0 and Q4_0 by cqsa_quantize_rows(), a router that chooses 2 of them for each of 32 tokens, and the layer
 * once with activations rounded to int8 and once without. */
#include <cqsa.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 32, EXPERTS = 16, TOPK = 2, HIDDEN = 256, INTER = 512 };

static float x[TOKENS * HIDDEN], logits[TOKENS * EXPERTS], weights[TOKENS * TOPK], out[2][TOKENS * HIDDEN], matrix[INTER * HIDDEN];
static int32_t ids[TOKENS * TOPK];
static int64_t x_shape[] = {TOKENS, HIDDEN}, logits_shape[] = {TOKENS, EXPERTS}, slots_shape[] = {TOKENS, TOPK};

static cqsa_tensor view(void *data, cqsa_dtype dtype, int64_t *shape) {
  cqsa_tensor t = {NULL, CQSA_DEVICE_CPU, 0, 2, 0, NULL, NULL, 0};
  t.data = data;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

static void fill(float *to, size_t n) {
  while (n-- > 0) to[n] = (float)rand() / (float)RAND_MAX - 0.5f;
}

/* Every expert's matrix, one after the other, as a GGUF file has them. */
static cqsa_status make(cqsa_context *context, cqsa_quant_format format, int64_t rows, int64_t elements, cqsa_moe_weights *to) {
  cqsa_quant_format_info info = CQSA_QUANT_FORMAT_INFO_INIT;
  cqsa_quant_tensor w = CQSA_QUANT_TENSOR_INIT;
  int64_t shape[2];
  cqsa_tensor values = view(matrix, CQSA_DTYPE_F32, shape);
  cqsa_status status = cqsa_quant_format_query(format, &info);
  size_t bytes = (size_t)(rows * (elements / info.block_elements) * info.block_bytes);
  char *blocks = malloc(EXPERTS * bytes);
  int e;
  if (blocks == NULL) return CQSA_ERROR_OUT_OF_HOST_MEMORY;
  shape[0] = w.rows = to->rows = rows;
  shape[1] = w.row_elements = to->row_elements = elements;
  w.format = to->all.format = format;
  w.device_type = CQSA_DEVICE_CPU;
  to->num_experts = EXPERTS;
  to->all.data = blocks;
  to->all.data_bytes = EXPERTS * bytes;
  for (e = 0; e < EXPERTS && status == CQSA_OK; ++e) {
    fill(matrix, (size_t)(rows * elements));
    w.data = blocks + (size_t)e * bytes;
    status = cqsa_quantize_rows(context, &values, &w, NULL);
  }
  return status;
}

static cqsa_status choose_experts(cqsa_context *context, cqsa_tensor *chosen, cqsa_tensor *their_weights) {
  cqsa_tensor scores = view(logits, CQSA_DTYPE_F32, logits_shape);
  cqsa_moe_route_args args = CQSA_MOE_ROUTE_ARGS_INIT;
  args.flags = CQSA_MOE_RENORMALISE;
  args.logits = &scores;
  args.topk_ids = chosen;
  args.topk_weights = their_weights;
  return cqsa_moe_route(context, &args, NULL);
}

int main(void) {
  cqsa_context *context = NULL;
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  cqsa_moe_weights gate = CQSA_MOE_WEIGHTS_INIT, up = CQSA_MOE_WEIGHTS_INIT, down = CQSA_MOE_WEIGHTS_INIT;
  cqsa_moe_args args = CQSA_MOE_ARGS_INIT;
  cqsa_tensor tx = view(x, CQSA_DTYPE_F32, x_shape), ti = view(ids, CQSA_DTYPE_I32, slots_shape), tw = view(weights, CQSA_DTYPE_F32, slots_shape), to;
  cqsa_status status;
  double difference = 0, size = 0;
  int i;
  params.backend = "cpu"; /* the operands are in host memory */
  fill(x, TOKENS * HIDDEN);
  fill(logits, TOKENS * EXPERTS);
  status = cqsa_context_create(&params, &context);
  if (status == CQSA_OK) status = make(context, CQSA_QUANT_Q4_0, INTER, HIDDEN, &gate);
  if (status == CQSA_OK) status = make(context, CQSA_QUANT_Q4_0, INTER, HIDDEN, &up);
  if (status == CQSA_OK) status = make(context, CQSA_QUANT_Q8_0, HIDDEN, INTER, &down);
  if (status == CQSA_OK) status = choose_experts(context, &ti, &tw);
  args.x = &tx;
  args.topk_ids = &ti;
  args.topk_weights = &tw;
  args.w_gate = &gate;
  args.w_up = &up;
  args.w_down = &down;
  args.out = &to;
  for (i = 0; i < 2 && status == CQSA_OK; ++i) {
    to = view(out[i], CQSA_DTYPE_F32, x_shape);
    args.precision = i == 0 ? CQSA_MOE_PRECISION_Q8 : CQSA_MOE_PRECISION_F16;
    status = cqsa_moe_prefill(context, &args, NULL);
  }
  for (i = 0; i < TOKENS * HIDDEN; ++i) {
    difference += (double)(out[0][i] - out[1][i]) * (double)(out[0][i] - out[1][i]);
    size += (double)out[1][i] * (double)out[1][i];
  }
  if (status == CQSA_OK) printf("token 0 goes to experts %d and %d; int8 activations change the result by %.2f %%\n", ids[0], ids[1], 100 * sqrt(difference / size));
  else fprintf(stderr, "%s: %s\n", cqsa_status_string(status), cqsa_last_error());
  free((void *)gate.all.data);
  free((void *)up.all.data);
  free((void *)down.all.data);
  cqsa_context_destroy(context);
  return status != CQSA_OK || !(difference <= 1e-3 * size);
}
