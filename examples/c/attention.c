/* SPDX-License-Identifier: Apache-2.0
 * Exact causal attention of 8 heads over 1024 tokens within 256 KiB of working memory. */
#include <cqsa.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  int64_t shape[4] = {1, 8, 1024, 64}; /* batch, heads, seqlen, head_dim */
  size_t count = 8 * 1024 * 64;
  float *data = malloc(4 * count * sizeof(float)); /* q, k, v, out one after the other */
  if (data == NULL) return 1;
  for (size_t i = 0; i < 3 * count; ++i) data[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  cqsa_tensor tensor[4];
  for (int i = 0; i < 4; ++i) {
    cqsa_tensor view = {data + (size_t)i * count, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, shape, NULL, 0};
    tensor[i] = view;
  }
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  params.causal = CQSA_CAUSAL_TOP_LEFT;
  params.max_host_bytes = 256 * 1024;
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tensor[0]; args.k = &tensor[1]; args.v = &tensor[2]; args.out = &tensor[3]; args.info = &info;
  cqsa_context *context = NULL;
  cqsa_status status = cqsa_context_create(NULL, &context);
  if (status == CQSA_OK) status = cqsa_attention(context, &params, &args, NULL);
  if (status == CQSA_OK)
    printf("out[0] = %f, peak %llu bytes, %.2f ms\n", data[3 * count], (unsigned long long)info.peak_host_bytes, info.seconds * 1e3);
  else
    fprintf(stderr, "%s: %s\n", cqsa_status_string(status), cqsa_last_error());
  cqsa_context_destroy(context);
  free(data);
  return status != CQSA_OK;
}
