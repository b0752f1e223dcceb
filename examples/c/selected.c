/* SPDX-License-Identifier: Apache-2.0
 * Decoding with sparse attention: a cache of 1,000 cells in pages of 16, f16, filled by cqsa_kv_append(), and one query that
 * attends to 100 of them. The list of all cells gives what attention over the whole cache gives. */
#include <cqsa.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { CELLS = 1000, PAGE = 16, PAGES = (CELLS + PAGE - 1) / PAGE, KV_HEADS = 2, HEADS = 8, DIM = 64 };

static float rows[CELLS * KV_HEADS * DIM], q[HEADS * DIM], out[HEADS * DIM], lse[HEADS];
static uint16_t keys[PAGES * PAGE * KV_HEADS * DIM], values[PAGES * PAGE * KV_HEADS * DIM]; /* f16 */
static int32_t page_table[PAGES], cells[CELLS], count;

static cqsa_tensor view(void *data, cqsa_dtype dtype, int32_t ndim, int64_t *shape) {
  cqsa_tensor t = {NULL, CQSA_DEVICE_CPU, 0, 0, 0, NULL, NULL, 0};
  t.data = data;
  t.dtype = dtype;
  t.ndim = ndim;
  t.shape = shape;
  return t;
}

static void fill(float *to, size_t n) {
  while (n-- > 0) to[n] = (float)rand() / (float)RAND_MAX - 0.5f;
}

static int64_t rows_shape[] = {CELLS, KV_HEADS, DIM}, pool_shape[] = {PAGES, PAGE, KV_HEADS, DIM}, table_shape[] = {PAGES};
static int64_t list_shape[] = {1, CELLS}, one[] = {1}, q_shape[] = {1, HEADS, DIM}, lse_shape[] = {HEADS, 1};

/* New keys and values into all cells of the cache. */
static cqsa_status append(cqsa_context *context, void *pool) {
  cqsa_tensor x = view(rows, CQSA_DTYPE_F32, 3, rows_shape), to = view(pool, CQSA_DTYPE_F16, 4, pool_shape);
  cqsa_tensor table = view(page_table, CQSA_DTYPE_I32, 1, table_shape), places = view(cells, CQSA_DTYPE_I32, 1, rows_shape);
  cqsa_kv_args args = CQSA_KV_ARGS_INIT;
  fill(rows, CELLS * KV_HEADS * DIM);
  args.x = &x;
  args.pool = &to;
  args.page_table = &table;
  args.cells = &places;
  return cqsa_kv_append(context, &args, NULL);
}

/* The query over the first `count` entries of `cells`. */
static cqsa_status attend(cqsa_context *context) {
  cqsa_tensor tq = view(q, CQSA_DTYPE_F32, 3, q_shape), to = view(out, CQSA_DTYPE_F32, 3, q_shape), tl = view(lse, CQSA_DTYPE_F32, 2, lse_shape);
  cqsa_tensor tk = view(keys, CQSA_DTYPE_F16, 4, pool_shape), tv = view(values, CQSA_DTYPE_F16, 4, pool_shape);
  cqsa_tensor table = view(page_table, CQSA_DTYPE_I32, 1, table_shape), list = view(cells, CQSA_DTYPE_I32, 2, list_shape);
  cqsa_tensor counts = view(&count, CQSA_DTYPE_I32, 1, one);
  cqsa_attention_selected_args args = CQSA_ATTENTION_SELECTED_ARGS_INIT;
  args.flags = CQSA_SELECTED_CHECK; /* while a program is young: wrong lists are an error, not skipped */
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.page_table = &table;
  args.cells = &list;
  args.counts = &counts;
  args.out = &to;
  args.lse = &tl;
  return cqsa_attention_selected(context, &args, NULL);
}

int main(void) {
  cqsa_context *context = NULL;
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  cqsa_status status;
  int i, total = CELLS;
  float all = 0;
  params.backend = "cpu"; /* the operands are in host memory */
  for (i = 0; i < PAGES; ++i) page_table[i] = (i * 5) % PAGES; /* any order */
  for (i = 0; i < CELLS; ++i) cells[i] = i;
  fill(q, HEADS * DIM);
  status = cqsa_context_create(&params, &context);
  if (status == CQSA_OK) status = append(context, keys);
  if (status == CQSA_OK) status = append(context, values);
  count = total;
  if (status == CQSA_OK) status = attend(context);
  all = lse[0];
  for (i = 0; i < 100; ++i) cells[i] = i * 10; /* a real model scores blocks of cells and takes the best */
  count = 100;
  if (status == CQSA_OK) status = attend(context);
  if (status == CQSA_OK)
    printf("%d of %d cells have %.1f %% of the weight of head 0; out[0] = %f\n", count, total, 100 * exp((double)(lse[0] - all)), out[0]);
  else
    fprintf(stderr, "%s: %s\n", cqsa_status_string(status), cqsa_last_error());
  cqsa_context_destroy(context);
  return status != CQSA_OK;
}
