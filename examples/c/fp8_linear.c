/* SPDX-License-Identifier: Apache-2.0
 * One linear layer in FP8: y = x w^T forward, dx = dy w and dw = dy^T x backward. x, w and dy are quantized once each, from one reading: the
 * row-major codes for one product and the transposed ones for another. First with the amaxes of the calls themselves ("current"), then with
 * rings ("delayed"). Errors against fp64 stand beside those of bf16. */
#include <cqsa.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 96, IN = 160, OUT = 128, STEPS = 4, HISTORY = 8, MOST = OUT * IN };

/* A matrix, and both sides of it in FP8: 0 as it is, 1 transposed. */
typedef struct {
  int64_t shape[2][2];
  cqsa_dtype format;
  float spread, values[MOST], scale_inv[2];
  uint8_t codes[2][MOST], memory[1024]; /* of the ring */
  cqsa_fp8_ring ring;
} matrix;

static matrix x = {{{TOKENS, IN}, {IN, TOKENS}}, CQSA_DTYPE_E4M3FN, 1.0f, {0}, {0}, {{0}}, {0}, CQSA_FP8_RING_INIT};
static matrix w = {{{OUT, IN}, {IN, OUT}}, CQSA_DTYPE_E4M3FN, 0.05f, {0}, {0}, {{0}}, {0}, CQSA_FP8_RING_INIT};
static matrix dy = {{{TOKENS, OUT}, {OUT, TOKENS}}, CQSA_DTYPE_E5M2, 0.001f, {0}, {0}, {{0}}, {0}, CQSA_FP8_RING_INIT};
static float result[MOST];

static cqsa_tensor view(void *data, cqsa_dtype dtype, int64_t *shape, int32_t ndim) {
  cqsa_tensor t = {NULL, CQSA_DEVICE_CPU, 0, 0, 0, NULL, NULL, 0};
  t.data = data, t.dtype = dtype, t.shape = shape, t.ndim = ndim;
  return t;
}

static void fill(matrix *m) { /* nearly Gaussian */
  int64_t i, n;
  for (i = 0; i < m->shape[0][0] * m->shape[0][1]; ++i)
    for (m->values[i] = -6 * m->spread, n = 0; n < 12; ++n) m->values[i] += (float)rand() / (float)RAND_MAX * m->spread;
}

static cqsa_status begin_ring(cqsa_context *context, matrix *m) {
  m->ring.hist_len = HISTORY, m->ring.format = m->format;
  m->ring.bytes = sizeof m->memory - CQSA_WORKSPACE_ALIGNMENT; /* cqsa_fp8_ring_bytes() says how many it takes */
  m->ring.state = m->memory + (CQSA_WORKSPACE_ALIGNMENT - (uintptr_t)m->memory % CQSA_WORKSPACE_ALIGNMENT);
  return cqsa_fp8_ring_init(context, &m->ring, 0, NULL);
}

static cqsa_status quantize(cqsa_context *context, matrix *m, int delayed) {
  cqsa_tensor in = view(m->values, CQSA_DTYPE_F32, m->shape[0], 2), out[2], scale_inv[2];
  cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
  int t;
  for (t = 0; t < 2; ++t) {
    cqsa_fp8_side *side = t ? &args.transposed : &args.row;
    out[t] = view(m->codes[t], m->format, m->shape[t], 2);
    scale_inv[t] = view(&m->scale_inv[t], CQSA_DTYPE_F32, NULL, 0);
    side->out = &out[t], side->scale_inv = &scale_inv[t];
  }
  args.x = &in, args.source = delayed ? CQSA_FP8_RING : CQSA_FP8_CURRENT;
  args.ring = delayed ? &m->ring : NULL;
  return cqsa_fp8_quantize(context, &args, NULL);
}

static double rounded(float value) { /* to bf16 */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
  memcpy(&value, &bits, 4);
  return value;
}

/* result[m, n] = sum over k of a[m, k] b[n, k], of side ta of a and tb of b; its error, which should be `most` or less. */
static cqsa_status product(cqsa_context *context, const char *name, matrix *a, int ta, matrix *b, int tb, double most, int *right) {
  const int64_t rows = a->shape[ta][0], columns = b->shape[tb][0], depth = a->shape[ta][1];
  int64_t shape[2], m, n, k;
  cqsa_tensor in_a = view(a->codes[ta], a->format, a->shape[ta], 2), in_b = view(b->codes[tb], b->format, b->shape[tb], 2), d = view(result, CQSA_DTYPE_F32, shape, 2);
  cqsa_tensor scale_a = view(&a->scale_inv[ta], CQSA_DTYPE_F32, NULL, 0), scale_b = view(&b->scale_inv[tb], CQSA_DTYPE_F32, NULL, 0);
  cqsa_fp8_gemm_args args = CQSA_FP8_GEMM_ARGS_INIT;
  double size = 0, fp8 = 0, bf16 = 0;
  shape[0] = rows, shape[1] = columns;
  args.a = &in_a, args.b = &in_b, args.d = &d;
  args.scale_inv_a = &scale_a, args.scale_inv_b = &scale_b;
  if (cqsa_fp8_gemm(context, &args, NULL) != CQSA_OK) return CQSA_ERROR_RUNTIME;
  for (m = 0; m < rows; ++m)
    for (n = 0; n < columns; ++n) {
      double exact = 0, half = 0;
      for (k = 0; k < depth; ++k) {
        const float va = a->values[ta ? k * rows + m : m * depth + k], vb = b->values[tb ? k * columns + n : n * depth + k];
        exact += (double)va * vb;
        half += rounded(va) * rounded(vb);
      }
      size += exact * exact;
      fp8 += pow(result[m * columns + n] - exact, 2);
      bf16 += pow(half - exact, 2);
    }
  printf("  %s: %.4f (bf16 %.4f)", name, sqrt(fp8 / size), sqrt(bf16 / size));
  if (!(sqrt(fp8 / size) <= most)) *right = 0;
  return CQSA_OK;
}

int main(void) {
  cqsa_context *context = NULL;
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  matrix *all[] = {&x, &w, &dy};
  int step, i, right = 1;
  cqsa_status status;
  params.backend = "cpu"; /* the operands are in host memory */
  status = cqsa_context_create(&params, &context);
  for (i = 0; i < 3 && status == CQSA_OK; ++i) status = begin_ring(context, all[i]);
  for (step = 0; step <= STEPS && status == CQSA_OK; ++step) {
    const double factor = step == 1 ? 2 : 1; /* the first call of a ring knows no size yet */
    for (i = 0; i < 3 && status == CQSA_OK; ++i) fill(all[i]), status = quantize(context, all[i], step > 0);
    printf(step ? "delayed, step %d: errors of" : "current scaling: errors of", step);
    if (status == CQSA_OK) status = product(context, "y", &x, 0, &w, 0, 0.05 * factor, &right);
    if (status == CQSA_OK) status = product(context, "dx", &dy, 0, &w, 1, 0.08 * factor, &right);
    if (status == CQSA_OK) status = product(context, "dw", &dy, 1, &x, 1, 0.08 * factor, &right);
    printf("\n");
  }
  if (status != CQSA_OK) fprintf(stderr, "%s: %s\n", cqsa_status_string(status), cqsa_last_error());
  cqsa_context_destroy(context);
  return status != CQSA_OK || !right;
}
