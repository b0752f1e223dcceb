/* SPDX-License-Identifier: Apache-2.0
 * Loaded before the library (LD_PRELOAD): every run is the library's, and then one thing is wrong, which CQSA_WRONG names. For the
 * test that `cqsa parity` sees it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "cqsa.h"

typedef cqsa_status (*query_fn)(const cqsa_context *, const cqsa_attention_params *);
typedef cqsa_status (*execute_fn)(const cqsa_plan *, const cqsa_attention_args *, void *);

static char *first(const cqsa_tensor *tensor) { return (char *)tensor->data + tensor->byte_offset; }

CQSA_API cqsa_status cqsa_attention_execute(const cqsa_plan *plan, const cqsa_attention_args *args, void *stream) {
  execute_fn real;
  *(void **)&real = dlsym(RTLD_NEXT, "cqsa_attention_execute");
  const cqsa_status status = real(plan, args, stream);
  const char *wrong = getenv("CQSA_WRONG");
  if (status != CQSA_OK || !wrong) return status;
  if (!strcmp(wrong, "value")) first(args->out)[3] ^= 1; /* the exponent of the first f32 */
  if (!strcmp(wrong, "unwritten")) memset(first(args->out), 0xFF, 4);
  if (!strcmp(wrong, "lse")) memset(first(args->lse), 0, 4);
  if (!strcmp(wrong, "before")) first(args->out)[-1] = 0;
  if (!strcmp(wrong, "input")) first(args->v)[0] ^= 1;
  if (!strcmp(wrong, "workspace")) ((char *)args->workspace)[args->workspace_bytes] = 0;
  if (!strcmp(wrong, "memory")) args->info->peak_host_bytes += 1 << 30;
  return status;
}

/* A backend without f64. */
CQSA_API cqsa_status cqsa_attention_query(const cqsa_context *context, const cqsa_attention_params *params) {
  query_fn real;
  *(void **)&real = dlsym(RTLD_NEXT, "cqsa_attention_query");
  const char *wrong = getenv("CQSA_WRONG");
  if (wrong && !strcmp(wrong, "no f64") && params->dtype_q == CQSA_DTYPE_F64) return CQSA_ERROR_UNSUPPORTED;
  return real(context, params);
}

/* Of the f32 results of a query: the first one, or (once they are compared with those of another precision) the second one. */
CQSA_API cqsa_status cqsa_attention_selected(cqsa_context *context, const cqsa_attention_selected_args *args, void *stream) {
  cqsa_status (*real)(cqsa_context *, const cqsa_attention_selected_args *, void *);
  *(void **)&real = dlsym(RTLD_NEXT, "cqsa_attention_selected");
  const cqsa_status status = real(context, args, stream);
  const char *wrong = getenv("CQSA_WRONG");
  if (status != CQSA_OK || !wrong) return status;
  float *out = (float *)first(args->out), *second = out + args->out->shape[1] * args->out->shape[2];
  if (!strcmp(wrong, "value")) out[0] += 0.001f;
  if (!strcmp(wrong, "unwritten")) memset(out, 0xFF, 4);
  if (!strcmp(wrong, "lse")) memset(first(args->lse), 0, 4);
  if (!strcmp(wrong, "split") && args->precision == CQSA_PRECISION_SPLIT) out[0] += 0.00005f;
  if (!strcmp(wrong, "elsewhere") && args->precision == CQSA_PRECISION_SPLIT) second[0] += 0.01f;
  if (!strcmp(wrong, "no tensor cores") && args->precision != CQSA_PRECISION_F32) return CQSA_ERROR_UNSUPPORTED;
  return status;
}
