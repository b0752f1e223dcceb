/* SPDX-License-Identifier: Apache-2.0. The declarations of cqsa.h, by tools/declarations.py. */
#define CQSA_VERSION_MAJOR 0
#define CQSA_VERSION_MINOR 1
#define CQSA_VERSION_PATCH 0
#define CQSA_ABI_VERSION 0
#define CQSA_WORKSPACE_ALIGNMENT 64
int32_t cqsa_version(void);
int32_t cqsa_abi_version(void);
const char *cqsa_version_string(void);
const char *cqsa_build_info(void);
typedef int32_t cqsa_status;
enum {
  CQSA_OK = 0,
  CQSA_ERROR_INVALID_ARGUMENT = 1,
  CQSA_ERROR_STRUCT_SIZE = 2,
  CQSA_ERROR_UNKNOWN_FLAG = 3,
  CQSA_ERROR_NULL_POINTER = 4,
  CQSA_ERROR_SHAPE = 5,
  CQSA_ERROR_DTYPE = 6,
  CQSA_ERROR_STRIDES = 7,
  CQSA_ERROR_DEVICE = 8,
  CQSA_ERROR_OVERLAP = 9,
  CQSA_ERROR_INDEX = 10,
  CQSA_ERROR_WORKSPACE = 11,
  CQSA_ERROR_UNSUPPORTED = 20,
  CQSA_ERROR_BACKEND_NOT_FOUND = 21,
  CQSA_ERROR_BACKEND_LOAD_FAILED = 22,
  CQSA_ERROR_ABI_MISMATCH = 23,
  CQSA_ERROR_NO_DRIVER = 24,
  CQSA_ERROR_NO_DEVICE = 25,
  CQSA_ERROR_NO_DEVICE_CODE = 26,
  CQSA_ERROR_BUDGET_TOO_SMALL = 40,
  CQSA_ERROR_OUT_OF_HOST_MEMORY = 41,
  CQSA_ERROR_OUT_OF_DEVICE_MEMORY = 42,
  CQSA_ERROR_OUT_OF_PINNED_MEMORY = 43,
  CQSA_ERROR_CANCELLED = 60,
  CQSA_ERROR_CALLBACK = 61,
  CQSA_ERROR_RUNTIME = 62,
  CQSA_ERROR_IO = 63,
  CQSA_ERROR_CHECKPOINT = 64,
  CQSA_ERROR_CAPTURE_UNSAFE = 65,
  CQSA_ERROR_INTERNAL = 80
};
const char *cqsa_status_string(cqsa_status status);
const char *cqsa_last_error(void);
typedef int32_t cqsa_dtype;
enum {
  CQSA_DTYPE_NONE = 0,
  CQSA_DTYPE_I8 = 0x00010800,
  CQSA_DTYPE_I32 = 0x00012000,
  CQSA_DTYPE_I64 = 0x00014000,
  CQSA_DTYPE_U8 = 0x00010801,
  CQSA_DTYPE_F16 = 0x00011002,
  CQSA_DTYPE_F32 = 0x00012002,
  CQSA_DTYPE_F64 = 0x00014002,
  CQSA_DTYPE_BF16 = 0x00011004,
  CQSA_DTYPE_BOOL = 0x00010806,
  CQSA_DTYPE_E4M3FN = 0x0001080A,
  CQSA_DTYPE_E4M3FNUZ = 0x0001080B,
  CQSA_DTYPE_E5M2 = 0x0001080C,
  CQSA_DTYPE_E5M2FNUZ = 0x0001080D,
  CQSA_DTYPE_E8M0FNU = 0x0001080E
};
enum {
  CQSA_DEVICE_CPU = 1,
  CQSA_DEVICE_CUDA = 2,
  CQSA_DEVICE_CUDA_HOST = 3,
  CQSA_DEVICE_ROCM = 10,
  CQSA_DEVICE_ROCM_HOST = 11,
  CQSA_DEVICE_EXT = 12
};
typedef struct cqsa_tensor {
  void *data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  cqsa_dtype dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} cqsa_tensor;
typedef struct cqsa_allocator {
  uint32_t struct_size;
  uint32_t flags;
  void *user;
  void *(*allocate)(void *user, uint64_t bytes, uint64_t alignment);
  void (*release)(void *user, void *memory, uint64_t bytes);
} cqsa_allocator;
enum { CQSA_LOG_DEBUG = 0, CQSA_LOG_INFO = 1, CQSA_LOG_WARNING = 2 };
typedef void (*cqsa_log_fn)(void *user, int32_t level, const char *message);
typedef int32_t (*cqsa_progress_fn)(void *user, int64_t done, int64_t total);
typedef int32_t (*cqsa_parallel_for_fn)(void *user, int64_t num_tasks, void (*task)(void *data, int64_t index), void *data);
enum {
  CQSA_BACKEND_READY = 0,
  CQSA_BACKEND_NOT_FOUND = 1,
  CQSA_BACKEND_LOAD_FAILED = 2,
  CQSA_BACKEND_ABI_MISMATCH = 3,
  CQSA_BACKEND_NO_DRIVER = 4,
  CQSA_BACKEND_NO_DEVICE = 5,
  CQSA_BACKEND_NO_DEVICE_CODE = 6
};
typedef struct cqsa_backend_info {
  uint32_t struct_size;
  uint32_t flags;
  int32_t state;
  int32_t device_count;
  char name[32];
  char reason[512];
  char device[128];
} cqsa_backend_info;
void cqsa_backend_info_init(cqsa_backend_info *info, uint64_t size);
const char *cqsa_backend_name(int32_t index);
cqsa_status cqsa_backend_query(const char *name, const char *backend_path, cqsa_backend_info *info_out);
typedef struct cqsa_context cqsa_context;
typedef struct cqsa_context_params {
  uint32_t struct_size;
  uint32_t flags;
  const char *backend;
  const char *backend_path;
  int32_t device;
  int32_t num_threads;
  const cqsa_allocator *allocator;
  cqsa_parallel_for_fn parallel_for;
  void *parallel_for_user;
  cqsa_log_fn log;
  void *log_user;
} cqsa_context_params;
void cqsa_context_params_init(cqsa_context_params *params, uint64_t size);
cqsa_status cqsa_context_create(const cqsa_context_params *params, cqsa_context **context_out);
void cqsa_context_destroy(cqsa_context *context);
const char *cqsa_context_backend(const cqsa_context *context);
cqsa_status cqsa_context_hardware(const cqsa_context *context, char *buffer, uint64_t size, uint64_t *length_out);
enum {
  CQSA_CAUSAL_NONE = 0,
  CQSA_CAUSAL_TOP_LEFT = 1,
  CQSA_CAUSAL_BOTTOM_RIGHT = 2
};
enum {
  CQSA_SCHEDULE_AUTO = 0,
  CQSA_SCHEDULE_DIRECT = 1,
  CQSA_SCHEDULE_STREAM = 2,
  CQSA_SCHEDULE_CQS = 3
};
enum {
  CQSA_MEMORY_HOST = 0,
  CQSA_MEMORY_PINNED = 1,
  CQSA_MEMORY_DEVICE = 2,
  CQSA_MEMORY_TILE = 3,
  CQSA_MEMORY_MAPPED = 4
};
enum {
  CQSA_SCALE_NONE = 0,
  CQSA_SCALE_TENSOR = 1,
  CQSA_SCALE_HEAD = 2,
  CQSA_SCALE_TOKEN = 3,
  CQSA_SCALE_GROUP = 4
};
enum {
  CQSA_ATTENTION_WINDOW = 1 << 0,
  CQSA_ATTENTION_VARLEN = 1 << 1,
  CQSA_ATTENTION_PAGED = 1 << 2,
  CQSA_ATTENTION_SEQUSED_K = 1 << 3,
  CQSA_ATTENTION_MASK = 1 << 4,
  CQSA_ATTENTION_BIAS = 1 << 5,
  CQSA_ATTENTION_ALIBI = 1 << 6,
  CQSA_ATTENTION_SINKS = 1 << 7,
  CQSA_ATTENTION_LSE = 1 << 8,
  CQSA_ATTENTION_BATCH_INVARIANT = 1 << 9,
  CQSA_ATTENTION_DETERMINISTIC = 1 << 10
};
enum {
  CQSA_BROADCAST_BATCH = 1 << 0,
  CQSA_BROADCAST_HEAD = 1 << 1,
  CQSA_BROADCAST_QUERY = 1 << 2,
  CQSA_BROADCAST_KEY = 1 << 3
};
enum {
  CQSA_PRECISION_DEFAULT = 0,
  CQSA_PRECISION_FAST = 1,
  CQSA_PRECISION_SPLIT = 2,
  CQSA_PRECISION_F32 = 3
};
typedef struct cqsa_attention_params {
  uint32_t struct_size;
  uint32_t flags;
  int64_t batch;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t total_q;
  int64_t total_k;
  int64_t page_size;
  int64_t num_pages;
  cqsa_dtype dtype_q;
  cqsa_dtype dtype_kv;
  cqsa_dtype dtype_out;
  cqsa_dtype dtype_bias;
  int32_t scale_k;
  int32_t scale_v;
  int64_t kv_group;
  int32_t memory_q;
  int32_t memory_kv;
  int32_t memory_out;
  int32_t causal;
  int64_t window_left;
  int64_t window_right;
  double softmax_scale;
  double softcap;
  double dropout;
  uint32_t mask_broadcast;
  uint32_t bias_broadcast;
  uint64_t max_device_bytes;
  uint64_t max_host_bytes;
  uint64_t max_pinned_bytes;
  int32_t schedule;
  int32_t cqs_c;
  int32_t cqs_itr;
  int32_t precision;
  int64_t tile_q;
  int64_t tile_k;
} cqsa_attention_params;
void cqsa_attention_params_init(cqsa_attention_params *params, uint64_t size);
typedef struct cqsa_run_info {
  uint32_t struct_size;
  uint32_t flags;
  uint64_t peak_device_bytes;
  uint64_t peak_host_bytes;
  uint64_t peak_pinned_bytes;
  uint64_t bytes_in;
  uint64_t bytes_out;
  int64_t tasks;
  double seconds;
  int32_t retries;
  int32_t schedule;
  int32_t cqs_c;
  int32_t cqs_itr;
  int32_t in_flight;
  int32_t place_acc;
  int64_t tile_q;
  int64_t tile_k;
} cqsa_run_info;
void cqsa_run_info_init(cqsa_run_info *info, uint64_t size);
typedef struct cqsa_attention_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *q;
  const cqsa_tensor *k;
  const cqsa_tensor *v;
  const cqsa_tensor *k_scale;
  const cqsa_tensor *v_scale;
  const cqsa_tensor *mask;
  const cqsa_tensor *bias;
  const cqsa_tensor *alibi_slopes;
  const cqsa_tensor *sinks;
  const cqsa_tensor *cu_seqlens_q;
  const cqsa_tensor *cu_seqlens_k;
  const cqsa_tensor *seqused_k;
  const cqsa_tensor *page_table;
  const cqsa_tensor *out;
  const cqsa_tensor *lse;
  void *workspace;
  uint64_t workspace_bytes;
  const int32_t *cancel;
  cqsa_progress_fn progress;
  void *progress_user;
  cqsa_run_info *info;
  const char *checkpoint;
} cqsa_attention_args;
void cqsa_attention_args_init(cqsa_attention_args *args, uint64_t size);
cqsa_status cqsa_attention_params_of(const cqsa_context *context, const cqsa_attention_args *args,
                                              cqsa_attention_params *params_inout);
typedef struct cqsa_plan cqsa_plan;
cqsa_status cqsa_attention(cqsa_context *context, const cqsa_attention_params *params,
                                    const cqsa_attention_args *args, void *stream);
cqsa_status cqsa_attention_query(const cqsa_context *context, const cqsa_attention_params *params);
cqsa_status cqsa_attention_plan_create(cqsa_context *context, const cqsa_attention_params *params,
                                                cqsa_plan **plan_out);
cqsa_status cqsa_attention_plan_create_for(const char *hardware_json, const cqsa_attention_params *params,
                                                    cqsa_plan **plan_out);
void cqsa_plan_destroy(cqsa_plan *plan);
typedef struct cqsa_plan_info {
  uint32_t struct_size;
  uint32_t flags;
  int32_t schedule;
  int32_t cqs_c;
  int32_t cqs_itr;
  int32_t in_flight;
  int64_t tasks;
  int64_t tile_q;
  int64_t tile_k;
  uint64_t peak_device_bytes;
  uint64_t peak_host_bytes;
  uint64_t peak_pinned_bytes;
  uint64_t workspace_bytes;
  uint64_t bytes_in;
  uint64_t bytes_out;
  double flops;
  double seconds;
  int32_t place_q;
  int32_t place_kv;
  int32_t place_acc;
  int32_t place_out;
  char implementation[64];
  char backend[32];
} cqsa_plan_info;
void cqsa_plan_info_init(cqsa_plan_info *info, uint64_t size);
cqsa_status cqsa_plan_describe(const cqsa_plan *plan, cqsa_plan_info *info_out);
cqsa_status cqsa_plan_line(const cqsa_plan *plan, const cqsa_run_info *info, char *buffer, uint64_t size,
                                    uint64_t *length_out);
cqsa_status cqsa_plan_explain(const cqsa_plan *plan, char *buffer, uint64_t size, uint64_t *length_out);
cqsa_status cqsa_plan_json(const cqsa_plan *plan, char *buffer, uint64_t size, uint64_t *length_out);
cqsa_status cqsa_workspace_query(const cqsa_plan *plan, uint64_t *bytes_out);
cqsa_status cqsa_workspace_init(const cqsa_plan *plan, void *workspace, uint64_t bytes);
cqsa_status cqsa_attention_execute(const cqsa_plan *plan, const cqsa_attention_args *args, void *stream);
typedef struct cqsa_attention_merge_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *out_a;
  const cqsa_tensor *lse_a;
  const cqsa_tensor *out_b;
  const cqsa_tensor *lse_b;
  const cqsa_tensor *out;
  const cqsa_tensor *lse;
} cqsa_attention_merge_args;
void cqsa_attention_merge_args_init(cqsa_attention_merge_args *args, uint64_t size);
cqsa_status cqsa_attention_merge(cqsa_context *context, const cqsa_attention_merge_args *args, void *stream);
enum {
  CQSA_SELECTED_CHECK = 1 << 0
};
typedef struct cqsa_attention_selected_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *q;
  const cqsa_tensor *k;
  const cqsa_tensor *v;
  const cqsa_tensor *k_scale;
  const cqsa_tensor *v_scale;
  const cqsa_tensor *page_table;
  const cqsa_tensor *cells;
  const cqsa_tensor *counts;
  const cqsa_tensor *out;
  const cqsa_tensor *lse;
  double softmax_scale;
  int32_t precision;
  int32_t kv_group;
  void *workspace;
  uint64_t workspace_bytes;
} cqsa_attention_selected_args;
void cqsa_attention_selected_args_init(cqsa_attention_selected_args *args, uint64_t size);
cqsa_status cqsa_attention_selected(cqsa_context *context, const cqsa_attention_selected_args *args, void *stream);
cqsa_status cqsa_attention_selected_workspace(const cqsa_context *context, const cqsa_attention_selected_args *args,
                                                       uint64_t *bytes_out);
enum {
  CQSA_KV_FORMAT_ELEMENTS = 0,
  CQSA_KV_FORMAT_Q4_0 = 1
};
typedef struct cqsa_kv_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *x;
  const cqsa_tensor *pool;
  const cqsa_tensor *scale;
  const cqsa_tensor *page_table;
  const cqsa_tensor *cells;
  int32_t format;
  int32_t kv_group;
} cqsa_kv_args;
void cqsa_kv_args_init(cqsa_kv_args *args, uint64_t size);
cqsa_status cqsa_kv_append(cqsa_context *context, const cqsa_kv_args *args, void *stream);
cqsa_status cqsa_kv_gather(cqsa_context *context, const cqsa_kv_args *args, void *stream);
cqsa_status cqsa_hadamard(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *out, void *stream);
enum {
  CQSA_FP8_CURRENT = 0,
  CQSA_FP8_STATIC = 1,
  CQSA_FP8_RING = 2
};
enum {
  CQSA_FP8_SCALES_STRIDED = 0,
  CQSA_FP8_SCALES_PACKED = 1,
  CQSA_FP8_SCALES_TILED = 2
};
enum {
  CQSA_FP8_NAN_PROPAGATE = 0,
  CQSA_FP8_NAN_IGNORE = 1
};
enum {
  CQSA_FP8_POW2 = 1 << 0,
  CQSA_FP8_NO_SATURATE = 1 << 1,
  CQSA_FP8_RING_STAGE = 1 << 2,
  CQSA_FP8_SILU = 1 << 3
};
typedef struct cqsa_fp8_ring {
  uint32_t struct_size;
  uint32_t flags;
  void *state;
  uint64_t bytes;
  int32_t hist_len;
  cqsa_dtype format;
  int32_t margin;
  int32_t algorithm;
} cqsa_fp8_ring;
enum { CQSA_FP8_RING_MAX = 0, CQSA_FP8_RING_MOST_RECENT = 1 };
void cqsa_fp8_ring_struct_init(cqsa_fp8_ring *ring, uint64_t size);
cqsa_status cqsa_fp8_ring_bytes(const cqsa_fp8_ring *ring, uint64_t *bytes_out);
cqsa_status cqsa_fp8_ring_init(cqsa_context *context, const cqsa_fp8_ring *ring, float amax, void *stream);
cqsa_status cqsa_fp8_ring_fold(cqsa_context *context, const cqsa_fp8_ring *rings, int64_t count, const cqsa_tensor *amaxes, void *stream);
cqsa_status cqsa_fp8_ring_staged(cqsa_context *context, const cqsa_fp8_ring *rings, int64_t count, const cqsa_tensor *amaxes_out, void *stream);
typedef struct cqsa_fp8_ring_info {
  uint32_t struct_size;
  uint32_t flags;
  int32_t index;
  int32_t refused;
  float staged;
  float scale;
  float scale_inv;
  float reserved;
} cqsa_fp8_ring_info;
void cqsa_fp8_ring_info_init(cqsa_fp8_ring_info *info, uint64_t size);
cqsa_status cqsa_fp8_ring_read(cqsa_context *context, const cqsa_fp8_ring *ring, cqsa_fp8_ring_info *info_out, float *history_out, void *stream);
typedef struct cqsa_fp8_side {
  const cqsa_tensor *out;
  const cqsa_tensor *scale_in;
  const cqsa_tensor *scale;
  const cqsa_tensor *scale_inv;
  int64_t block[2];
  int32_t scale_layout;
  int32_t reserved;
} cqsa_fp8_side;
typedef struct cqsa_fp8_quantize_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *x;
  const cqsa_tensor *x_scale_inv;
  int64_t x_block[2];
  const cqsa_tensor *up;
  cqsa_fp8_side row;
  cqsa_fp8_side transposed;
  int32_t source;
  int32_t nan_policy;
  int32_t margin;
  float eps;
  float amax_limit;
  float reserved;
  const cqsa_fp8_ring *ring;
  const cqsa_tensor *groups;
  const cqsa_tensor *rng;
  const cqsa_tensor *skip;
  const cqsa_tensor *amax;
  const cqsa_tensor *column_sum;
  const cqsa_tensor *counters;
  void *workspace;
  uint64_t workspace_bytes;
} cqsa_fp8_quantize_args;
void cqsa_fp8_quantize_args_init(cqsa_fp8_quantize_args *args, uint64_t size);
cqsa_status cqsa_fp8_quantize(cqsa_context *context, const cqsa_fp8_quantize_args *args, void *stream);
cqsa_status cqsa_fp8_quantize_many(cqsa_context *context, const cqsa_fp8_quantize_args *const *args, int64_t count, void *stream);
cqsa_status cqsa_fp8_quantize_workspace(const cqsa_context *context, const cqsa_fp8_quantize_args *const *args, int64_t count, uint64_t *bytes_out);
cqsa_status cqsa_fp8_workspace_init(cqsa_context *context, void *workspace, uint64_t bytes, void *stream);
cqsa_status cqsa_fp8_amax(cqsa_context *context, const cqsa_tensor *x, const int64_t *block, int32_t nan_policy, const cqsa_tensor *amax_out, void *workspace,
                                   uint64_t workspace_bytes, void *stream);
typedef struct cqsa_fp8_scale_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *amax;
  const cqsa_tensor *scale;
  const cqsa_tensor *scale_inv;
  cqsa_dtype format;
  int32_t scale_layout;
  int32_t margin;
  float eps;
  float amax_limit;
  float reserved;
} cqsa_fp8_scale_args;
void cqsa_fp8_scale_args_init(cqsa_fp8_scale_args *args, uint64_t size);
cqsa_status cqsa_fp8_scale_from_amax(cqsa_context *context, const cqsa_fp8_scale_args *args, void *stream);
cqsa_status cqsa_fp8_scale_relayout(cqsa_context *context, const cqsa_tensor *scales, int32_t layout, const cqsa_tensor *scales_out, int32_t layout_out,
                                             int64_t block_rows, int64_t block_columns, void *stream);
typedef struct cqsa_fp8_dequantize_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *codes;
  const cqsa_tensor *scale_inv;
  const cqsa_tensor *groups;
  const cqsa_tensor *out;
  int64_t block[2];
  int32_t scale_layout;
  int32_t reserved;
} cqsa_fp8_dequantize_args;
void cqsa_fp8_dequantize_args_init(cqsa_fp8_dequantize_args *args, uint64_t size);
cqsa_status cqsa_fp8_dequantize(cqsa_context *context, const cqsa_fp8_dequantize_args *args, void *stream);
cqsa_status cqsa_fp8_transpose(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *out, void *stream);
enum {
  CQSA_FP8_PROMOTE_128 = 0,
  CQSA_FP8_FAST = 1
};
typedef struct cqsa_fp8_gemm_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *a;
  const cqsa_tensor *b;
  const cqsa_tensor *scale_inv_a;
  const cqsa_tensor *scale_inv_b;
  int64_t block_a[2];
  int64_t block_b[2];
  const cqsa_tensor *c;
  const cqsa_tensor *bias;
  const cqsa_tensor *d;
  const cqsa_tensor *d_scale;
  const cqsa_tensor *d_amax;
  double alpha;
  double beta;
  int32_t accumulate;
  int32_t provider;
  void *workspace;
  uint64_t workspace_bytes;
} cqsa_fp8_gemm_args;
enum {
  CQSA_FP8_PROVIDER_AUTO = 0,
  CQSA_FP8_PROVIDER_OWN = 1,
  CQSA_FP8_PROVIDER_VENDOR = 2
};
void cqsa_fp8_gemm_args_init(cqsa_fp8_gemm_args *args, uint64_t size);
cqsa_status cqsa_fp8_gemm(cqsa_context *context, const cqsa_fp8_gemm_args *args, void *stream);
cqsa_status cqsa_fp8_gemm_workspace(const cqsa_context *context, const cqsa_fp8_gemm_args *args, uint64_t *bytes_out);
cqsa_status cqsa_fp8_gemm_explain(const cqsa_context *context, const cqsa_fp8_gemm_args *args, char *buffer, uint64_t size, uint64_t *length_out);
typedef int32_t cqsa_quant_format;
enum {
  CQSA_QUANT_NONE = 0,
  CQSA_QUANT_F32 = 1,
  CQSA_QUANT_F16 = 2,
  CQSA_QUANT_BF16 = 3,
  CQSA_QUANT_Q1_0 = 4,
  CQSA_QUANT_Q2_0 = 5,
  CQSA_QUANT_Q4_0 = 6,
  CQSA_QUANT_Q4_1 = 7,
  CQSA_QUANT_Q5_0 = 8,
  CQSA_QUANT_Q5_1 = 9,
  CQSA_QUANT_Q8_0 = 10,
  CQSA_QUANT_Q2_K = 11,
  CQSA_QUANT_Q3_K = 12,
  CQSA_QUANT_Q4_K = 13,
  CQSA_QUANT_Q5_K = 14,
  CQSA_QUANT_Q6_K = 15,
  CQSA_QUANT_IQ1_S = 16,
  CQSA_QUANT_IQ1_M = 17,
  CQSA_QUANT_IQ2_XXS = 18,
  CQSA_QUANT_IQ2_XS = 19,
  CQSA_QUANT_IQ2_S = 20,
  CQSA_QUANT_IQ3_XXS = 21,
  CQSA_QUANT_IQ3_S = 22,
  CQSA_QUANT_IQ4_NL = 23,
  CQSA_QUANT_IQ4_XS = 24,
  CQSA_QUANT_TQ1_0 = 25,
  CQSA_QUANT_TQ2_0 = 26,
  CQSA_QUANT_MXFP4 = 27,
  CQSA_QUANT_NVFP4 = 28
};
typedef struct cqsa_quant_format_info {
  uint32_t struct_size;
  uint32_t flags;
  char name[16];
  int32_t ggml_type;
  int32_t block_elements;
  int32_t block_bytes;
  int32_t can_quantize;
} cqsa_quant_format_info;
void cqsa_quant_format_info_init(cqsa_quant_format_info *info, uint64_t size);
cqsa_status cqsa_quant_format_query(cqsa_quant_format format, cqsa_quant_format_info *info_out);
typedef struct cqsa_quant_tensor {
  uint32_t struct_size;
  uint32_t flags;
  cqsa_quant_format format;
  int32_t device_type;
  int32_t device_id;
  int32_t reserved;
  void *data;
  int64_t rows;
  int64_t row_elements;
  uint64_t row_bytes;
  uint64_t data_bytes;
} cqsa_quant_tensor;
void cqsa_quant_tensor_init(cqsa_quant_tensor *tensor, uint64_t size);
cqsa_status cqsa_dequantize_rows(cqsa_context *context, const cqsa_quant_tensor *w, int64_t first_row, const cqsa_tensor *row_ids,
                                          const cqsa_tensor *out, void *stream);
cqsa_status cqsa_quantize_rows(cqsa_context *context, const cqsa_tensor *x, const cqsa_quant_tensor *w, void *stream);
typedef struct cqsa_gguf cqsa_gguf;
cqsa_status cqsa_gguf_open(const char *path, cqsa_gguf **gguf_out);
void cqsa_gguf_close(cqsa_gguf *gguf);
typedef struct cqsa_gguf_tensor_info {
  uint32_t struct_size;
  uint32_t flags;
  const char *name;
  int32_t ggml_type;
  cqsa_quant_format format;
  int32_t ndim;
  int32_t reserved;
  int64_t shape[4];
  const void *data;
  uint64_t bytes;
  uint64_t file_offset;
} cqsa_gguf_tensor_info;
void cqsa_gguf_tensor_info_init(cqsa_gguf_tensor_info *info, uint64_t size);
int64_t cqsa_gguf_tensor_count(const cqsa_gguf *gguf);
cqsa_status cqsa_gguf_find(const cqsa_gguf *gguf, const char *name, int64_t *index_out);
cqsa_status cqsa_gguf_tensor(const cqsa_gguf *gguf, int64_t index, cqsa_gguf_tensor_info *info_out);
cqsa_status cqsa_gguf_matrix(const cqsa_gguf *gguf, int64_t index, int64_t expert, cqsa_quant_tensor *matrix_out);
int64_t cqsa_gguf_key_count(const cqsa_gguf *gguf);
const char *cqsa_gguf_key(const cqsa_gguf *gguf, int64_t index);
cqsa_status cqsa_gguf_integer(const cqsa_gguf *gguf, const char *key, int64_t *value_out);
cqsa_status cqsa_gguf_number(const cqsa_gguf *gguf, const char *key, double *value_out);
cqsa_status cqsa_gguf_text(const cqsa_gguf *gguf, const char *key, char *buffer, uint64_t size, uint64_t *length_out);
enum {
  CQSA_MOE_SWIGLU = 0,
  CQSA_MOE_GEGLU = 1,
  CQSA_MOE_GEGLU_TANH = 2,
  CQSA_MOE_SILU = 3,
  CQSA_MOE_GELU = 4,
  CQSA_MOE_GELU_TANH = 5,
  CQSA_MOE_RELU2 = 6
};
enum {
  CQSA_MOE_SEPARATE = 0,
  CQSA_MOE_CONCAT = 1,
  CQSA_MOE_INTERLEAVED = 2
};
enum {
  CQSA_MOE_PRECISION_AUTO = 0,
  CQSA_MOE_PRECISION_Q8 = 1,
  CQSA_MOE_PRECISION_F16 = 2
};
enum {
  CQSA_MOE_COMBINED = 0,
  CQSA_MOE_PER_SLOT = 1
};
enum { CQSA_MOE_MAPPED = 1 << 0 };
typedef struct cqsa_moe_matrix {
  const void *data;
  uint64_t data_bytes;
  uint64_t row_bytes;
  const void *scale;
  cqsa_quant_format format;
  int32_t device_type;
  int32_t device_id;
  uint32_t flags;
  int64_t reserved[2];
} cqsa_moe_matrix;
typedef struct cqsa_moe_weights {
  uint32_t struct_size;
  uint32_t flags;
  int64_t num_experts;
  int64_t rows;
  int64_t row_elements;
  const cqsa_moe_matrix *experts;
  const cqsa_moe_matrix *device_experts;
  cqsa_moe_matrix all;
  uint64_t expert_bytes;
} cqsa_moe_weights;
void cqsa_moe_weights_init(cqsa_moe_weights *weights, uint64_t size);
typedef struct cqsa_moe_shared {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_moe_weights *w_gate;
  const cqsa_moe_weights *w_up;
  const cqsa_moe_weights *w_down;
  const cqsa_tensor *gate;
} cqsa_moe_shared;
void cqsa_moe_shared_init(cqsa_moe_shared *shared, uint64_t size);
enum { CQSA_MOE_BATCH_INVARIANT = 1 << 0 };
typedef struct cqsa_moe_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *x;
  const cqsa_tensor *topk_ids;
  const cqsa_tensor *topk_weights;
  const cqsa_moe_weights *w_gate;
  const cqsa_moe_weights *w_up;
  const cqsa_moe_weights *w_down;
  const cqsa_tensor *b_gate;
  const cqsa_tensor *b_up;
  const cqsa_tensor *b_down;
  const cqsa_tensor *expert_map;
  const cqsa_moe_shared *shared;
  const cqsa_tensor *out;
  const cqsa_tensor *counters;
  int32_t gate_up_layout;
  int32_t activation;
  float alpha;
  float beta;
  float limit;
  int32_t precision;
  int32_t output;
  int32_t reserved;
  uint64_t max_bytes;
  void *workspace;
  uint64_t workspace_bytes;
} cqsa_moe_args;
void cqsa_moe_args_init(cqsa_moe_args *args, uint64_t size);
cqsa_status cqsa_moe_prefill(cqsa_context *context, const cqsa_moe_args *args, void *stream);
cqsa_status cqsa_moe_workspace(const cqsa_context *context, const cqsa_moe_args *args, uint64_t *bytes_out);
cqsa_status cqsa_moe_explain(const cqsa_context *context, const cqsa_moe_args *args, char *buffer, uint64_t size, uint64_t *length_out);
enum {
  CQSA_MOE_SOFTMAX = 0,
  CQSA_MOE_SIGMOID = 1
};
enum {
  CQSA_MOE_GROUP_MAX = 0,
  CQSA_MOE_GROUP_TOP2 = 1
};
enum { CQSA_MOE_RENORMALISE = 1 << 0 };
typedef struct cqsa_moe_route_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *logits;
  const cqsa_tensor *bias;
  const cqsa_tensor *topk_ids;
  const cqsa_tensor *topk_weights;
  int32_t scoring;
  int32_t group_score;
  int32_t num_groups;
  int32_t topk_groups;
  float scale;
  int32_t reserved;
} cqsa_moe_route_args;
void cqsa_moe_route_args_init(cqsa_moe_route_args *args, uint64_t size);
cqsa_status cqsa_moe_route(cqsa_context *context, const cqsa_moe_route_args *args, void *stream);
typedef struct cqsa_moe_group_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *topk_ids;
  const cqsa_tensor *expert_map;
  const cqsa_tensor *offsets;
  const cqsa_tensor *order;
  const cqsa_tensor *counts;
  const cqsa_tensor *places;
  const cqsa_tensor *counters;
} cqsa_moe_group_args;
void cqsa_moe_group_args_init(cqsa_moe_group_args *args, uint64_t size);
cqsa_status cqsa_moe_group(cqsa_context *context, const cqsa_moe_group_args *args, void *stream);
cqsa_status cqsa_moe_quantize_activations(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *codes, const cqsa_tensor *scales, void *stream);
typedef struct cqsa_moe_combine_args {
  uint32_t struct_size;
  uint32_t flags;
  const cqsa_tensor *y;
  const cqsa_tensor *topk_weights;
  const cqsa_tensor *topk_ids;
  const cqsa_tensor *out;
} cqsa_moe_combine_args;
void cqsa_moe_combine_args_init(cqsa_moe_combine_args *args, uint64_t size);
cqsa_status cqsa_moe_combine(cqsa_context *context, const cqsa_moe_combine_args *args, void *stream);
