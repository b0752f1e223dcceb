/* cqsa_backend.h - the struct through which the core talks to a backend: leaf operations, memory, streams, events.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Private to this project: core and plugin must carry the same build id. A backend knows nothing of budgets, streaming or
 * decomposition: it gets views, rectangles and tile sizes, and computes. The CPU backend is linked in and used through
 * the same struct; others are plugins, libcqsa_<name>.so, with one export, cqsa_backend_entry_v1().
 */
#ifndef CQSA_BACKEND_H
#define CQSA_BACKEND_H

#include "cqsa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A strided view. Strides count elements. Axes by operand:
 *   q, out            batch, query head, row, channel        k, v           batch (paged: page), key head, row, channel
 *   k_scale, v_scale  batch (page), key head, row, group     lse            batch, query head, row, -
 *   mask, bias        batch, query head, q row, k row        slopes, sinks  batch, query head, -, -
 * varlen: stride[0] = 0, and the segment's first row comes from cu_seqlens. data NULL: operand absent. */
typedef struct cqsa_view {
  void *data;
  cqsa_dtype dtype;
  int32_t reserved;
  int64_t stride[4];
} cqsa_view;

/* A rectangle of the (query, key) plane. Positions decide causality, window, ALiBi; rows address the views.
 * State rows address acc, m and l. Rectangles of one call either have the same query range or disjoint ones, and those with
 * the same query range stand next to each other. */
typedef struct cqsa_rect {
  int64_t q_pos, k_pos; /* global positions of the first query and key */
  int64_t q_len, k_len;
  int64_t q_row, k_row; /* rows of the first query in q/out/lse (and first axis pair of mask, bias), of the first key in k/v */
  int64_t state_row;
} cqsa_rect;

enum {
  CQSA_LEAF_STATE_IN = 1 << 0,  /* begin from (acc, m, l) instead of nothing */
  CQSA_LEAF_STATE_OUT = 1 << 1, /* end with the state instead of out and lse; sinks are applied only at the end without it */
  CQSA_LEAF_CLEAR_TAIL = 1 << 2 /* varlen without rects: rows from cu_seqlens_q[batch] to total_q get out = 0, lse = -inf.
                                 * Only backends with memory of their own are asked, in enqueue mode. */
};

/* What of a device decides which kernels there are and how they are cut. All 0 on a host backend, and for a machine that is not here. */
typedef struct cqsa_chip {
  int32_t tier;          /* the newest tuned kernels that this build has for it: 70, 75, 80, 90; 0: portable ones only */
  int32_t compute_units; /* multiprocessors */
  int32_t shared_bytes;  /* most shared memory of a block */
  int32_t reserved;
} cqsa_chip;

/* One leaf call: attention of every row named by the rectangles over the keys named by them. The same struct goes to probe,
 * workspace and launch. num_rects = 0 with rects NULL: for every batch item the whole of its rows and keys (the only form in
 * which cu_seqlens, seqused_k and page_table may be given). A rectangle with k_len = 0 only finishes its rows. */
typedef struct cqsa_attention_leaf {
  uint32_t struct_size;
  uint32_t flags; /* CQSA_LEAF_* */
  int64_t batch, num_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t seqlen_q, seqlen_k; /* of the whole problem (varlen: upper bounds): off = seqlen_k - seqlen_q unless top-left */
  cqsa_view q, k, v, k_scale, v_scale, mask, bias, slopes, sinks, out, lse;
  int32_t scale_k, scale_v; /* CQSA_SCALE_* */
  int64_t kv_group;
  /* NULL when absent. On a backend with memory of its own they are device memory, as is page_table, and nobody has looked at
   * their values: a kernel clamps what it would otherwise read or write out of bounds. */
  const void *cu_seqlens_q, *cu_seqlens_k, *seqused_k;
  int32_t index_dtype;                                 /* of those three: I32 or I64 (seqused has its own below) */
  int32_t seqused_dtype;
  const int32_t *page_table;
  int64_t page_table_stride[2]; /* elements: batch, page */
  int64_t page_size;
  int64_t num_pages;        /* paged: pages in the pool */
  int64_t total_q, total_k; /* varlen: rows of q and of k; otherwise 0 */
  /* Host memory, read before launch returns. workspace() may see num_rects with rects NULL. Where all rectangles have k_len 0
   * the operands are not read, and STATE_OUT writes the empty state. */
  const cqsa_rect *rects;
  int64_t num_rects;
  /* State of a row: acc[dv] = sum_j exp(s_j - m) v_j not normalised, m = largest logit so far (-inf: none), l = sum_j exp(s_j - m).
   * acc is f32 [batch, num_heads, state_rows, head_dim_v] compact; m and l f32 [batch, num_heads, state_rows] compact. */
  float *state_acc, *state_m, *state_l;
  int64_t state_rows;
  double softmax_scale, softcap;
  int32_t causal;
  int32_t batch_invariant;
  int64_t window_left, window_right; /* -1: no limit (also when there is no window) */
  int64_t tile_q, tile_k;            /* tiling the planner chose, from the implementation's own offers */
  int32_t precision;                 /* CQSA_PRECISION_* */
  int32_t reserved;
  cqsa_chip chip;
} cqsa_attention_leaf;

/* How a host-side leaf runs in parallel and stays cancellable. run() calls task(data, i) once for each i in [0, num_tasks),
 * num_tasks <= num_workers, at once or serially; a task never waits for another. poll() tells the core that `done` more tiles
 * are finished and returns non-zero when the leaf must stop soon (the leaf then returns CQSA_ERROR_CANCELLED). */
typedef struct cqsa_exec {
  void *user;
  cqsa_status (*run)(void *user, int64_t num_tasks, void (*task)(void *data, int64_t index), void *data);
  int32_t (*poll)(void *user, int64_t done);
  int64_t num_workers;
} cqsa_exec;

/* What an implementation does and at what price; used by the planner. */
typedef struct cqsa_leaf_tile {
  int64_t tile_q, tile_k;
  double efficiency; /* rate relative to the implementation's best tile, (0, 1] */
  double blocks_per_unit; /* query tiles that a compute unit works on at once; 0: not known */
} cqsa_leaf_tile;

/* One entry of an ordered dispatch list. The first whose probe accepts is used; the reference is last. */
typedef struct cqsa_attention_impl {
  const char *name;        /* "cpu_avx512" */
  const char *requirement; /* one clause for explain: "x86 with AVX-512 F, BW, DQ, VL" */
  /* CQSA_OK, or a status with a reason of the form "f64 is computed by cpu_reference only". Looks at sizes,
   * types and flags only, never at strides or data: a view's data only says whether the operand is there. */
  cqsa_status (*probe)(const cqsa_attention_leaf *leaf, char *reason, uint64_t reason_size);
  /* The tiles it offers for this leaf, best first (largest workspace first), the smallest workspace last. Writes at most
   * capacity entries, returns how many. */
  int32_t (*tiles)(const cqsa_attention_leaf *leaf, cqsa_leaf_tile *tiles_out, int32_t capacity);
  /* Bytes that launch needs for leaf->tile_q x tile_k with `workers` workers. */
  uint64_t (*workspace)(const cqsa_attention_leaf *leaf, int64_t workers);
  /* workspace is aligned to 64. exec is used by host-side backends; stream by asynchronous ones. */
  cqsa_status (*launch)(void *device, const cqsa_attention_leaf *leaf, void *workspace, uint64_t workspace_bytes,
                        const cqsa_exec *exec, void *stream);
  /* Tiles that poll() will report in total for this leaf. NULL: one. */
  int64_t (*units)(const cqsa_attention_leaf *leaf);
} cqsa_attention_impl;

/* out = merge of a and b, `rows` rows of head_dim_v; strides in elements, up to 4 leading axes. */
typedef struct cqsa_merge_leaf {
  int64_t shape[4]; /* leading axes, 1 where unused */
  int64_t head_dim_v;
  const float *out_a, *lse_a, *out_b, *lse_b;
  float *out, *lse;
  int64_t out_a_stride[5], out_b_stride[5], out_stride[5]; /* 4 leading axes, channel */
  int64_t lse_a_stride[4], lse_b_stride[4], lse_stride[4];
} cqsa_merge_leaf;

/* Attention over selected cells of a paged cache; cqsa.h section 11 has the formula. Views: q, out [-, query head, row, channel];
 * k, v, their scales [page, key head, row of the page, channel or group]; lse [-, query head, row, -]. */
typedef struct cqsa_selected_leaf {
  uint32_t struct_size;
  uint32_t flags; /* none yet */
  int64_t total_q, num_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t num_pages, page_size, pages; /* in the pool, rows of one, entries of a row of page_table */
  int64_t capacity;                    /* entries of a row of cells */
  cqsa_view q, k, v, k_scale, v_scale, out, lse;
  int64_t kv_group; /* int8: channels of a scale; otherwise 0 */
  /* Device memory on a backend with its own; nobody has looked at the values, and wrong ones are skipped as cqsa.h says. */
  const int32_t *page_table, *cells, *counts;
  int64_t page_table_stride[2], cells_stride[2], counts_stride; /* elements: query (0: one for all), entry */
  double softmax_scale;
  int32_t precision; /* CQSA_PRECISION_* */
  int32_t reserved;
  cqsa_chip chip;
} cqsa_selected_leaf;

/* As cqsa_attention_impl. */
typedef struct cqsa_selected_impl {
  const char *name;
  const char *requirement;
  cqsa_status (*probe)(const cqsa_selected_leaf *leaf, char *reason, uint64_t reason_size);
  uint64_t (*workspace)(const cqsa_selected_leaf *leaf, int64_t workers);
  cqsa_status (*launch)(void *device, const cqsa_selected_leaf *leaf, void *workspace, uint64_t workspace_bytes, const cqsa_exec *exec,
                        void *stream);
} cqsa_selected_impl;

/* Rows into or out of a cache; cqsa.h section 12. Views: x [-, key head, row, channel], pool and scale [page, key head, row of the
 * page, channel (Q4_0: byte) or group]. */
typedef struct cqsa_kv_leaf {
  uint32_t struct_size;
  int32_t format; /* CQSA_KV_FORMAT_* */
  int64_t rows, num_kv_heads, head_dim;
  int64_t num_pages, page_size, pages;
  cqsa_view x, pool, scale;
  int64_t kv_group;
  const int32_t *page_table;
  const void *cells;
  cqsa_dtype cells_dtype; /* I32 or I64 */
  int32_t reserved;
  int64_t page_table_stride[2], cells_stride;
} cqsa_kv_leaf;

/* out = x times the orthonormal Walsh-Hadamard matrix of size n. */
typedef struct cqsa_hadamard_leaf {
  int64_t shape[3]; /* leading axes, 1 where unused */
  int64_t n;
  const void *x;
  void *out;
  cqsa_dtype dtype_x, dtype_out;
  int64_t x_stride[4], out_stride[4]; /* leading axes, channel; elements */
} cqsa_hadamard_leaf;

/* FP8; cqsa.h sections 13 and 14 have the rules, backends/fp8_rules.h those that must be the same to the bit.
 * A matrix operand has axes batch, row, column. Everything is resolved: a block is at least 1 x 1 and at most the whole. */
typedef struct cqsa_matrix {
  void *data; /* NULL: absent, or empty */
  cqsa_dtype dtype;
  int32_t reserved;
  int64_t stride[3]; /* elements: batch, row, column */
} cqsa_matrix;

/* Scales of the blocks of a matrix: [rows, columns] of them, counted over batch * rows rows. */
typedef struct cqsa_scale_grid {
  void *data; /* NULL: absent */
  cqsa_dtype dtype;  /* F32, E8M0FNU, I32 (packed) */
  int32_t layout;    /* CQSA_FP8_SCALES_* */
  int64_t stride[2]; /* elements: block row, block column */
  int64_t rows, columns;
  int64_t block[2]; /* rows and columns of the matrix */
} cqsa_scale_grid;

/* One output, in coordinates of x: the transposed one has stride 1 along the rows, which its batch axis continues. Not wanted:
 * codes.data is NULL and its dtype NONE; an empty one that is wanted has an address that must not be followed. STATIC has scale_in for each that is wanted. */
typedef struct cqsa_fp8_output {
  cqsa_matrix codes;
  cqsa_scale_grid scale_in;         /* STATIC */
  cqsa_scale_grid scale, scale_inv; /* grids of both are filled (rows, columns, block) also where data is NULL */
  float ratio; /* STATIC without scale_in.data, and RING: times the scale of the first output's format. 1 where they are the same */
  int32_t per_group; /* 1: groups and block {0, 0}, a scale for each group of rows */
} cqsa_fp8_output;

/* One tensor. Both outputs absent: only amax, block_amax or column_sum. A batch comes as rows, batch 1, where the strides of all matrices allow it. With groups
 * a grid of block {0, 0} has num_groups rows, one scale each (per_group). No rows or columns: amax and sums are 0, and scales that there are, 1. */
typedef struct cqsa_fp8_job {
  int64_t batch, rows, columns;
  cqsa_matrix x, up;            /* up: data NULL without CQSA_FP8_SILU */
  cqsa_scale_grid x_scale_inv;  /* x of codes */
  cqsa_fp8_output row, transposed;
  float *amax, *column_sum;     /* strides: 1 element; column_sum_stride */
  int64_t column_sum_stride;
  cqsa_scale_grid block_amax;   /* cqsa_fp8_amax(): F32 */
  int64_t *counters;
  int64_t counters_stride;
  const int32_t *skip;
  const int64_t *rng;
  int64_t rng_stride;
  const void *groups;           /* values not looked at on backends with memory of their own: clamped, and never falling by maximum */
  cqsa_dtype groups_dtype;      /* I32 or I64 */
  uint32_t flags;               /* CQSA_FP8_* */
  int64_t groups_stride, num_groups;
  int32_t source, nan_policy, margin;
  float eps, amax_limit;
  int32_t reserved;
  cqsa_fp8_ring ring;           /* state NULL: none */
} cqsa_fp8_job;

typedef struct cqsa_fp8_quantize_leaf {
  uint32_t struct_size;
  uint32_t flags; /* none yet */
  const cqsa_fp8_job *jobs; /* host memory, read before the launch returns */
  int64_t count;
  cqsa_chip chip;
} cqsa_fp8_quantize_leaf;

typedef struct cqsa_fp8_dequantize_leaf {
  int64_t batch, rows, columns;
  cqsa_matrix codes, out;
  cqsa_scale_grid scale_inv;
  const void *groups;
  cqsa_dtype groups_dtype;
  int32_t per_group; /* as in cqsa_fp8_output */
  int64_t groups_stride, num_groups;
} cqsa_fp8_dequantize_leaf;

/* amax (F32 grid) -> scale and scale_inv; or, with amax absent, scale_inv_in -> scale_inv in another layout. */
typedef struct cqsa_fp8_scale_leaf {
  cqsa_scale_grid amax, scale_inv_in, scale, scale_inv; /* blocks do not count */
  cqsa_dtype format;
  int32_t margin, pow2;
  float eps, amax_limit;
  int32_t reserved;
} cqsa_fp8_scale_leaf;

/* out[j, i] = x[i, j], bytes. */
typedef struct cqsa_fp8_transpose_leaf {
  int64_t rows, columns; /* of x */
  const uint8_t *x;
  uint8_t *out;
  int64_t x_stride[2], out_stride[2]; /* of x[i, j], of out[j, i]: both in (i, j) */
} cqsa_fp8_transpose_leaf;

enum { CQSA_FP8_RINGS_INIT = 0, CQSA_FP8_RINGS_FOLD = 1, CQSA_FP8_RINGS_READ_STAGED = 2 };
typedef struct cqsa_fp8_ring_leaf {
  int32_t what; /* CQSA_FP8_RINGS_* */
  int32_t reserved;
  const cqsa_fp8_ring *rings; /* host memory, read before the launch returns */
  int64_t count;
  float *amaxes; /* FOLD: in, or NULL for the staged ones; READ_STAGED: out */
  int64_t amaxes_stride;
  float amax; /* INIT */
  int32_t reserved2;
} cqsa_fp8_ring_leaf;

typedef struct cqsa_fp8_gemm_leaf {
  uint32_t struct_size;
  int32_t accumulate; /* CQSA_FP8_PROMOTE_128, .. */
  int64_t batch, m, n, k; /* any may be 0; with d empty, which is asked only with d_amax, that is 0 */
  cqsa_matrix a, b, c, d; /* axes batch, m | n | m | m, k | k | n | n; a batch stride may be 0 */
  cqsa_scale_grid scale_inv_a, scale_inv_b; /* F32; stride_batch below; data NULL: 1 */
  int64_t scale_batch_stride_a, scale_batch_stride_b;
  const void *bias;
  cqsa_dtype bias_dtype;
  int32_t reserved;
  int64_t bias_stride;
  const float *d_scale; /* d of codes; NULL: 1 */
  float *d_amax;
  double alpha, beta;
  cqsa_chip chip;
} cqsa_fp8_gemm_leaf;

/* As cqsa_attention_impl. */
typedef struct cqsa_fp8_gemm_impl {
  const char *name;        /* "cuda_cublaslt", "cuda_sm90", "gpu_portable", "cpu" */
  const char *requirement;
  int32_t provider;        /* CQSA_FP8_PROVIDER_OWN or _VENDOR */
  int32_t reserved;
  /* As there, and may look at strides and alignments (of data that is not NULL) too. `device` may be NULL: asked about sizes alone. */
  cqsa_status (*probe)(void *device, const cqsa_fp8_gemm_leaf *leaf, char *reason, uint64_t reason_size);
  uint64_t (*workspace)(const cqsa_fp8_gemm_leaf *leaf, int64_t workers);
  cqsa_status (*launch)(void *device, const cqsa_fp8_gemm_leaf *leaf, void *workspace, uint64_t workspace_bytes, const cqsa_exec *exec,
                        void *stream);
} cqsa_fp8_gemm_impl;

/* Rows of a quantized matrix; cqsa.h section 15. Sizes and addresses are checked; on a backend with memory of its own nobody has looked at row_ids. */
typedef struct cqsa_dequantize_leaf {
  uint32_t struct_size;
  cqsa_quant_format format;
  const void *data;
  int64_t rows, row_elements, row_bytes; /* of the matrix */
  int64_t count, first_row;              /* rows of out; row_ids NULL: from this one on */
  const void *row_ids;
  cqsa_dtype row_ids_dtype; /* I32 or I64 */
  cqsa_dtype out_dtype;
  int64_t row_ids_stride;
  void *out;
  int64_t out_stride[2]; /* elements: row, column */
} cqsa_dequantize_leaf;

typedef struct cqsa_quantize_leaf {
  uint32_t struct_size;
  cqsa_quant_format format;
  const void *x;
  cqsa_dtype x_dtype;
  int32_t reserved;
  int64_t x_stride[2]; /* elements: row, column */
  int64_t rows, row_elements, row_bytes;
  void *data;
} cqsa_quantize_leaf;

/* Mixture of experts; cqsa.h section 17. What all backends share (the matrix of an expert, the expert of an id) is in backends/moe_rules.h. On a backend with
 * memory of its own nobody has looked at ids, expert_map, device_experts or the weights: ids out of range are skipped and counted. */

/* One projection. One of experts, device_experts and all says where its matrices are; sizes and addresses of the first and the last are checked. */
typedef struct cqsa_moe_set {
  int64_t num_experts;                   /* 0: the projection is absent */
  int64_t rows, row_elements;
  cqsa_quant_format format;              /* of every expert that has one; NONE: they differ, or none has (experts only) */
  int32_t reserved;
  const cqsa_moe_matrix *experts;        /* host memory, read before the launch returns; row_bytes may be 0 */
  const cqsa_moe_matrix *device_experts; /* row_bytes may be 0 */
  cqsa_moe_matrix all;                   /* row_bytes resolved */
  int64_t expert_bytes;                  /* of all, resolved */
  const float *bias;                     /* [num_experts, rows], or NULL */
  int64_t bias_stride[2];
} cqsa_moe_set;

/* Views: [tokens, n] of x, out, ids, weights; out of PER_SLOT [tokens * k, hidden]. */
typedef struct cqsa_moe_rows {
  void *data;
  cqsa_dtype dtype;
  int32_t reserved;
  int64_t stride[2]; /* elements */
} cqsa_moe_rows;

typedef struct cqsa_moe_leaf {
  uint32_t struct_size;
  uint32_t flags; /* CQSA_MOE_BATCH_INVARIANT */
  int64_t tokens, topk, hidden, inter;
  int64_t num_experts; /* of the weights */
  int64_t num_ids;     /* ids are below this: the length of expert_map, or num_experts */
  cqsa_moe_rows x, ids, weights, out;
  const int32_t *expert_map; /* NULL: none */
  int64_t expert_map_stride;
  int64_t *counters; /* [2] or NULL */
  int64_t counters_stride;
  cqsa_moe_set gate, up, down; /* CONCAT, INTERLEAVED: both in gate, up absent. Not gated: gate absent */
  cqsa_moe_set shared_gate, shared_up, shared_down; /* shared_down.num_experts 0: no shared expert */
  int64_t shared_inter;
  const float *shared_factor; /* NULL: 1 */
  int64_t shared_factor_stride;
  int32_t shared_factor_is_logit; /* 1: [tokens], the gate itself; 0: [hidden], to be multiplied by x */
  int32_t layout, activation, output; /* CQSA_MOE_SEPARATE, .. */
  float alpha, beta, limit;           /* resolved: limit is +Inf where there is none */
  int32_t precision;                  /* Q8 or F16 */
  int64_t chunk; /* tokens at a time, 1..tokens: what the workspace is for. No tokens: 0 */
  cqsa_chip chip;
} cqsa_moe_leaf;

/* As cqsa_attention_impl. A workspace may hold anything. */
typedef struct cqsa_moe_impl {
  const char *name;
  const char *requirement;
  cqsa_status (*probe)(void *device, const cqsa_moe_leaf *leaf, char *reason, uint64_t reason_size); /* `device` may be NULL: asked about sizes alone */
  uint64_t (*workspace)(const cqsa_moe_leaf *leaf, int64_t workers); /* never falls with leaf->chunk */
  cqsa_status (*launch)(void *device, const cqsa_moe_leaf *leaf, void *workspace, uint64_t workspace_bytes, const cqsa_exec *exec, void *stream);
} cqsa_moe_impl;

typedef struct cqsa_moe_route_leaf {
  int64_t tokens, num_experts, topk;
  cqsa_moe_rows logits, ids, weights;
  const float *bias; /* NULL: none */
  int64_t bias_stride;
  int32_t scoring, group_score, num_groups, topk_groups; /* num_groups at least 1 */
  int32_t renormalise;
  float scale;
} cqsa_moe_route_leaf;

typedef struct cqsa_moe_group_leaf {
  int64_t tokens, topk, num_experts, num_ids;
  cqsa_moe_rows ids;
  const int32_t *expert_map;
  int64_t expert_map_stride;
  cqsa_dtype dtype; /* of the outputs: I32, I64 */
  int32_t reserved;
  void *offsets, *order, *counts, *places; /* counts, places: NULL where not wanted */
  int64_t offsets_stride, order_stride, counts_stride, places_stride[2];
  int64_t *counters;
  int64_t counters_stride;
} cqsa_moe_group_leaf;

typedef struct cqsa_moe_quantize_leaf {
  int64_t rows, row_elements;
  cqsa_moe_rows x, codes, scales;
} cqsa_moe_quantize_leaf;

typedef struct cqsa_moe_combine_leaf {
  int64_t tokens, topk, hidden;
  cqsa_moe_rows y, weights, ids, out; /* ids.data NULL: none */
} cqsa_moe_combine_leaf;

typedef struct cqsa_device_properties {
  char name[128];
  char arch[32];               /* "avx512", "sm_90" */
  uint64_t total_bytes;        /* device memory (host memory for the CPU) */
  uint64_t free_bytes;         /* now */
  cqsa_chip chip;              /* all 0 but compute_units (cores) on a host backend */
} cqsa_device_properties;

/* What the driver knows of an address. */
enum {
  CQSA_POINTER_UNKNOWN = 0, /* ordinary host memory */
  CQSA_POINTER_DEVICE = 1,  /* memory of device `device` */
  CQSA_POINTER_PINNED = 2,  /* page-locked host memory */
  CQSA_POINTER_MANAGED = 3  /* both sides may touch it */
};
typedef struct cqsa_pointer_info {
  int32_t kind; /* CQSA_POINTER_* */
  int32_t device;
  uint64_t start, bytes; /* the allocation that the address lies in; bytes 0: not known */
} cqsa_pointer_info;

enum { CQSA_COPY_TO_DEVICE = 0, CQSA_COPY_TO_HOST = 1, CQSA_COPY_ON_DEVICE = 2 };

enum {
  /* Device memory is host memory: operands are used in place, launches are synchronous and use cqsa_exec, and the memory,
   * stream, event and copy functions below are NULL. */
  CQSA_BACKEND_HOST = 1 << 0
};

/* Functions return a status; the text of a failure comes from last_error() of the same thread. */
typedef struct cqsa_backend_v1 {
  uint32_t struct_size;
  uint32_t flags;       /* CQSA_BACKEND_HOST */
  const char *name;     /* "cpu" */
  const char *build_id; /* equal to the core's */
  int32_t device_type;  /* CQSA_DEVICE_* of its device memory */
  int32_t pinned_type;  /* CQSA_DEVICE_* of its pinned host memory, or 0 */
  const char *(*last_error)(void);
  /* CQSA_BACKEND_READY or why not, with a text. */
  int32_t (*state)(char *reason, uint64_t reason_size);
  int32_t (*device_count)(void);
  cqsa_status (*device_properties)(int32_t device, cqsa_device_properties *properties_out);
  /* Measured rates; see core's hardware model. FLOP/s of the default implementation for a head_dim, 0: not measurable. */
  double (*compute_rate)(int32_t device, int64_t head_dim, cqsa_dtype dtype, const cqsa_exec *exec);
  cqsa_status (*device_open)(int32_t device, void **device_out);
  void (*device_close)(void *device);

  /* Memory. alloc returns OUT_OF_DEVICE_MEMORY / OUT_OF_PINNED_MEMORY. */
  cqsa_status (*device_alloc)(void *device, uint64_t bytes, void **memory_out);
  void (*device_free)(void *device, void *memory);
  cqsa_status (*pinned_alloc)(void *device, uint64_t bytes, void **memory_out);
  void (*pinned_free)(void *device, void *memory);
  /* Streams and events. Work on one stream is in order; streams are not ordered among each other but by events. Several threads
   * use them, and copy(), at the same time. */
  cqsa_status (*stream_create)(void *device, void **stream_out);
  void (*stream_destroy)(void *device, void *stream);
  cqsa_status (*stream_sync)(void *device, void *stream);
  cqsa_status (*event_create)(void *device, void **event_out);
  void (*event_destroy)(void *device, void *event);
  cqsa_status (*event_record)(void *device, void *event, void *stream);
  cqsa_status (*event_sync)(void *device, void *event);           /* host waits, without burning a core: I/O threads wait for leaves */
  cqsa_status (*stream_wait)(void *device, void *stream, void *event); /* stream waits */
  /* In stream order. Host memory that is not pinned has been read when a copy to the device returns. */
  cqsa_status (*copy)(void *device, void *to, const void *from, uint64_t bytes, int32_t direction, void *stream);

  /* Leaf operations. */
  const cqsa_attention_impl *attention;
  int32_t num_attention;
  cqsa_status (*merge)(void *device, const cqsa_merge_leaf *leaf, const cqsa_exec *exec, void *stream);

  /* Enqueue mode: the caller's operands are on the device and the work goes to the caller's stream (NULL: the default stream),
   * without waiting for it. Every backend with memory of its own has these; stream_sync, launch and merge get such a stream too. */
  /* Whether work queued on the stream is being captured into a graph; never touches it. CQSA_ERROR_DEVICE when it belongs to
   * another device. */
  cqsa_status (*stream_query)(void *device, void *stream, int32_t *capturing_out);
  /* Memory in stream order: it may be used by what is queued between the two calls. UNSUPPORTED where the device has none. */
  cqsa_status (*stream_alloc)(void *device, uint64_t bytes, void *stream, void **memory_out);
  cqsa_status (*stream_free)(void *device, void *memory, void *stream);
  /* Called for the operands of every run, once for those in one allocation, so it has to be quick. NULL: pointers are not
   * looked at. */
  cqsa_status (*pointer_query)(void *device, const void *pointer, cqsa_pointer_info *info_out);
  /* Architectures this build has code for: "sm_75 sm_80 sm_90a compute_90". */
  const char *code;

  /* Selected cells and caches. */
  const cqsa_selected_impl *selected;
  int32_t num_selected;
  cqsa_status (*kv_append)(void *device, const cqsa_kv_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*kv_gather)(void *device, const cqsa_kv_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*hadamard)(void *device, const cqsa_hadamard_leaf *leaf, const cqsa_exec *exec, void *stream);

  /* FP8. Workspaces begin with a workspace_header (fp8_rules.h), are aligned to CQSA_WORKSPACE_ALIGNMENT and are left as they were found;
   * fp8_workspace_init makes one. NULL: the backend has none of this. */
  uint64_t (*fp8_quantize_workspace)(const cqsa_fp8_quantize_leaf *leaf, int64_t workers);
  cqsa_status (*fp8_quantize)(void *device, const cqsa_fp8_quantize_leaf *leaf, void *workspace, uint64_t workspace_bytes, const cqsa_exec *exec,
                              void *stream);
  cqsa_status (*fp8_workspace_init)(void *device, void *workspace, uint64_t bytes, void *stream);
  cqsa_status (*fp8_dequantize)(void *device, const cqsa_fp8_dequantize_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*fp8_scale)(void *device, const cqsa_fp8_scale_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*fp8_transpose)(void *device, const cqsa_fp8_transpose_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*fp8_rings)(void *device, const cqsa_fp8_ring_leaf *leaf, const cqsa_exec *exec, void *stream);
  const cqsa_fp8_gemm_impl *fp8_gemm;
  int32_t num_fp8_gemm;

  /* Quantized matrices. */
  cqsa_status (*dequantize_rows)(void *device, const cqsa_dequantize_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*quantize_rows)(void *device, const cqsa_quantize_leaf *leaf, const cqsa_exec *exec, void *stream);

  /* Mixture of experts. NULL: the backend has none of this. */
  const cqsa_moe_impl *moe;
  int32_t num_moe;
  cqsa_status (*moe_route)(void *device, const cqsa_moe_route_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*moe_group)(void *device, const cqsa_moe_group_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*moe_quantize)(void *device, const cqsa_moe_quantize_leaf *leaf, const cqsa_exec *exec, void *stream);
  cqsa_status (*moe_combine)(void *device, const cqsa_moe_combine_leaf *leaf, const cqsa_exec *exec, void *stream);
} cqsa_backend_v1;

typedef struct cqsa_host_v1 {
  uint32_t struct_size;
  int32_t abi_version;
  const char *build_id;
} cqsa_host_v1;

/* The one export of a plugin. Returns CQSA_OK with the struct (static, never freed), or ABI_MISMATCH. The plugin copies
 * nothing from host and keeps no pointer into it: two copies of the core may share one plugin. */
typedef cqsa_status (*cqsa_backend_entry_fn)(const cqsa_host_v1 *host, const cqsa_backend_v1 **backend_out);
#define CQSA_BACKEND_ENTRY "cqsa_backend_entry_v1"

/* The CPU backend, linked in. */
const cqsa_backend_v1 *cqsa_cpu_backend(void);

#ifdef __cplusplus
}
#endif
#endif /* CQSA_BACKEND_H */
