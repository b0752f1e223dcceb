/* SPDX-License-Identifier: Apache-2.0
 * A plan kept and run many times: describe it, allocate its workspace once, execute without any further allocation. */
#include <cqsa.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 4, TOKENS = 300, DIM = 64 };

static cqsa_status run(cqsa_plan *plan, void *workspace, uint64_t bytes, float *data) {
  int64_t shape[4] = {1, HEADS, TOKENS, DIM};
  cqsa_tensor tensor[4];
  for (int i = 0; i < 4; ++i) {
    cqsa_tensor view = {data + i * HEADS * TOKENS * DIM, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, shape, NULL, 0};
    tensor[i] = view;
  }
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tensor[0];
  args.k = &tensor[1];
  args.v = &tensor[2];
  args.out = &tensor[3];
  args.workspace = workspace;
  args.workspace_bytes = bytes;
  return cqsa_attention_execute(plan, &args, NULL);
}

int main(void) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  params.batch = 1;
  params.num_heads = params.num_kv_heads = HEADS;
  params.head_dim = params.head_dim_v = DIM;
  params.seqlen_q = params.seqlen_k = TOKENS;
  params.dtype_q = params.dtype_kv = CQSA_DTYPE_F32;
  params.causal = CQSA_CAUSAL_TOP_LEFT;

  cqsa_context_params where = CQSA_CONTEXT_PARAMS_INIT;
  where.backend = "cpu"; /* on a GPU the workspace would be device memory */
  cqsa_context *context = NULL;
  cqsa_plan *plan = NULL;
  uint64_t bytes = 0;
  char line[512];
  void *workspace = NULL;
  float *data = calloc((size_t)4 * HEADS * TOKENS * DIM, sizeof(float));
  cqsa_status status = data ? cqsa_context_create(&where, &context) : CQSA_ERROR_OUT_OF_HOST_MEMORY;
  if (status == CQSA_OK) status = cqsa_attention_plan_create(context, &params, &plan);
  if (status == CQSA_OK) status = cqsa_plan_line(plan, NULL, line, sizeof line, NULL);
  if (status == CQSA_OK) status = cqsa_workspace_query(plan, &bytes);
  if (status == CQSA_OK) {
    puts(line);
    /* Over-allocated to align it to CQSA_WORKSPACE_ALIGNMENT in plain C99. */
    workspace = malloc(bytes + CQSA_WORKSPACE_ALIGNMENT);
    if (workspace == NULL) status = CQSA_ERROR_OUT_OF_HOST_MEMORY;
  }
  if (status == CQSA_OK) {
    void *aligned = (void *)(((uintptr_t)workspace + CQSA_WORKSPACE_ALIGNMENT - 1) & ~(uintptr_t)(CQSA_WORKSPACE_ALIGNMENT - 1));
    status = cqsa_workspace_init(plan, aligned, bytes);
    for (int step = 0; step < 3 && status == CQSA_OK; ++step) status = run(plan, aligned, bytes, data);
  }
  if (status != CQSA_OK) fprintf(stderr, "%s: %s\n", cqsa_status_string(status), cqsa_last_error());
  cqsa_plan_destroy(plan);
  cqsa_context_destroy(context);
  free(workspace);
  free(data);
  return status != CQSA_OK;
}
