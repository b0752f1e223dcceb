/* cqsa.h - exact attention under any memory budget, from any language.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * libcqsa computes exact softmax attention, whatever memory it is given. The caller names a budget; the library plans,
 * splits, streams and merges, and the result is the attention of the whole sequence. This header is the whole public API.
 * It is C99, includes only <stdint.h>, and is written to be read from top to bottom.
 *
 * The shortest complete use (README.md has it as a program):
 *
 *     cqsa_context *context = NULL;
 *     cqsa_context_create(NULL, &context);                        // NULL: all defaults, best backend of this machine
 *     cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;  // all zero: shapes are taken from the tensors
 *     cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
 *     args.q = &q; args.k = &k; args.v = &v; args.out = &out;     // cqsa_tensor views of the caller's memory
 *     if (cqsa_attention(context, &params, &args, NULL) != CQSA_OK) puts(cqsa_last_error());
 *     cqsa_context_destroy(context);
 *
 * Contents
 *   1. Rules that hold for every function      6. Backends
 *   2. Version and build                       7. Context
 *   3. Status and errors                       8. Attention: what is asked (params) and with what (args)
 *   4. Data types and tensors                  9. One call, or plan / describe / execute
 *   5. Callbacks                              10. Merge of partial results
 *                                             11. Attention over selected cells of a paged cache
 *                                             12. Key-value caches: append, gather, Hadamard rotation
 *                                             13. FP8: quantize, delayed scaling, dequantize
 *                                             14. FP8: matrix product
 *                                             15. Quantized matrices
 *                                             16. GGUF files: quantized matrices in place
 *                                             17. Mixture of experts: one layer straight from quantized weights
 */
#ifndef CQSA_H
#define CQSA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* In front of every function that the library exports. */
#if defined(_WIN32)
#define CQSA_API
#elif defined(__GNUC__)
#define CQSA_API __attribute__((visibility("default")))
#else
#define CQSA_API
#endif

/* ================================================================================================================
 * 1. Rules that hold for every function
 *
 * - Structs that cross this boundary begin with `struct_size` (set it to sizeof, or use the *_INIT macro or the *_init
 *   function) and `flags` (an unknown bit is an error). All other fields zero is a usable default. New fields are only ever
 *   appended and mean "as before" when zero, so a program built against an older or a newer header works: the library
 *   copies the smaller size, and accepts a larger caller struct when its unknown tail is zero.
 * - Every function that can fail returns a cqsa_status. On failure no output byte is changed (except that a run which
 *   began and was then cancelled, or failed at run time, leaves its outputs undefined), nothing leaks, the next call works,
 *   and cqsa_last_error() says in one sentence what was wrong.
 * - The library never aborts, prints, throws, or reads the environment after its first use.
 * - Sizes, strides and positions are int64_t; byte counts are uint64_t; strides count elements, not bytes.
 * - Thread classes, stated for each function:
 *     free       any thread, any time
 *     shared     any thread; takes a lock inside
 *     const      any number of threads at once on the same object
 *     exclusive  one thread at a time for the same object
 * - Text is UTF-8 and zero-terminated. Functions that fill a text buffer take (buffer, size) and report the length needed
 *   without the zero; a buffer that is too small gets the truncated, terminated text. buffer may be NULL when size is 0.
 * ================================================================================================================ */

/* ================================================================================================================
 * 2. Version and build
 * ================================================================================================================ */

#define CQSA_VERSION_MAJOR 0 /* of the header */
#define CQSA_VERSION_MINOR 1 /* of the header */
#define CQSA_VERSION_PATCH 0 /* of the header */
/* 0x00MMmmpp: major, minor, patch, one byte each. */
#define CQSA_VERSION ((CQSA_VERSION_MAJOR << 16) | (CQSA_VERSION_MINOR << 8) | CQSA_VERSION_PATCH)
/* The number in the soname, libcqsa.so.0. It changes when a binary interface breaks. */
#define CQSA_ABI_VERSION 0

/* Packed version of the loaded library, comparable with CQSA_VERSION. Thread class: free. Since 0.1. */
CQSA_API int32_t cqsa_version(void);
/* ABI number of the loaded library, comparable with CQSA_ABI_VERSION. Thread class: free. Since 0.1. */
CQSA_API int32_t cqsa_abi_version(void);
/* "0.1.0". Static text. Thread class: free. Since 0.1. */
CQSA_API const char *cqsa_version_string(void);
/* How the library was built, as JSON: version, git id, compiler, build type, CPU targets and GPU architectures compiled in.
 * Static text. Thread class: free. Since 0.1. */
CQSA_API const char *cqsa_build_info(void);

/* ================================================================================================================
 * 3. Status and errors
 * ================================================================================================================ */

/* 0 is success; 1-19 the caller's mistake; 20-39 not available here; 40-59 resources; 60-79 run time; 80 a defect of ours.
 * The values are pinned for ever. */
typedef int32_t cqsa_status;
enum {
  CQSA_OK = 0,

  CQSA_ERROR_INVALID_ARGUMENT = 1, /* a value is outside its range, or two values contradict each other */
  CQSA_ERROR_STRUCT_SIZE = 2,      /* struct_size is not one that any version had, or an unknown tail is not zero */
  CQSA_ERROR_UNKNOWN_FLAG = 3,     /* a bit of flags, or an enum value, that this version does not know */
  CQSA_ERROR_NULL_POINTER = 4,     /* a required pointer, or the data of a non-empty tensor, is NULL */
  CQSA_ERROR_SHAPE = 5,            /* a tensor has the wrong number of axes or sizes; or a shape product overflows */
  CQSA_ERROR_DTYPE = 6,            /* a tensor has another element type than wanted */
  CQSA_ERROR_STRIDES = 7,          /* an output whose own elements overlap, or an offset that overflows */
  CQSA_ERROR_DEVICE = 8,           /* a tensor lives on a device that this context cannot use */
  CQSA_ERROR_OVERLAP = 9,          /* an output overlaps an input or another output */
  CQSA_ERROR_INDEX = 10,           /* cu_seqlens, seqused_k, a page id, a cell or a count of cells is out of its range */
  CQSA_ERROR_WORKSPACE = 11,       /* the caller's workspace is too small, misaligned or not initialised */

  CQSA_ERROR_UNSUPPORTED = 20,         /* valid, but no implementation of this backend takes it */
  CQSA_ERROR_BACKEND_NOT_FOUND = 21,   /* no plugin of that name in any folder searched */
  CQSA_ERROR_BACKEND_LOAD_FAILED = 22, /* the plugin is there, but does not load or has no entry point */
  CQSA_ERROR_ABI_MISMATCH = 23,        /* the plugin belongs to another build of the library */
  CQSA_ERROR_NO_DRIVER = 24,           /* the vendor's driver is absent or too old */
  CQSA_ERROR_NO_DEVICE = 25,           /* no such device in this machine */
  CQSA_ERROR_NO_DEVICE_CODE = 26,      /* this build has no code for the device's architecture */

  CQSA_ERROR_BUDGET_TOO_SMALL = 40,     /* no schedule fits the budget; the message states the least that works */
  CQSA_ERROR_OUT_OF_HOST_MEMORY = 41,   /* an allocation of host memory failed */
  CQSA_ERROR_OUT_OF_DEVICE_MEMORY = 42, /* an allocation of device memory failed and no retry could help */
  CQSA_ERROR_OUT_OF_PINNED_MEMORY = 43, /* an allocation of pinned host memory failed and no retry could help */

  CQSA_ERROR_CANCELLED = 60, /* the cancel flag was set, or a progress callback asked to stop */
  CQSA_ERROR_CALLBACK = 61,  /* a callback failed: parallel_for returned non-zero or left tasks out */
  CQSA_ERROR_RUNTIME = 62,   /* the device or its driver reported a failure */
  CQSA_ERROR_IO = 63,        /* a file could not be read or written: outputs, checkpoint or GGUF */
  CQSA_ERROR_CHECKPOINT = 64, /* the checkpoint is damaged, or of another version, problem, plan, input or output */
  CQSA_ERROR_CAPTURE_UNSAFE = 65, /* the stream is being captured into a graph, and this call cannot be part of one */

  CQSA_ERROR_INTERNAL = 80 /* a defect of the library; please report it with the message */
};

/* The name of a status, "CQSA_ERROR_SHAPE"; "CQSA_ERROR_UNKNOWN" for other numbers. Static text.
 * Thread class: free. Since 0.1. */
CQSA_API const char *cqsa_status_string(cqsa_status status);

/* What went wrong in the last failing call of this thread: one sentence naming the argument, what it was and what was
 * wanted. "" before the first failure. Valid until the next failing call of the same thread, at most 511 bytes.
 * Thread class: free. Since 0.1. */
CQSA_API const char *cqsa_last_error(void);

/* ================================================================================================================
 * 4. Data types and tensors
 * ================================================================================================================ */

/* An element type: the four bytes of DLPack's DLDataType {code, bits, lanes} read as a little-endian number, so that a
 * DLTensor can be passed as it is. 0 means "not given". */
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
  CQSA_DTYPE_E8M0FNU = 0x0001080E /* powers of two: scales of section 13 */
};

/* Kinds of device, with DLPack's numbers. */
enum {
  CQSA_DEVICE_CPU = 1,
  CQSA_DEVICE_CUDA = 2,
  CQSA_DEVICE_CUDA_HOST = 3, /* host memory pinned by CUDA */
  CQSA_DEVICE_ROCM = 10,
  CQSA_DEVICE_ROCM_HOST = 11, /* host memory pinned by HIP */
  CQSA_DEVICE_EXT = 12        /* memory of an out-of-tree backend */
};

/* A view of the caller's memory: byte for byte DLPack's DLTensor (48 bytes), and frozen for ever, which is why it alone has
 * no struct_size. The library never keeps one beyond the call. Element i,j,.. lives at
 * data + byte_offset + (i*strides[0] + j*strides[1] + ..) * bytes per element. Any strides, 0 and negative included. */
typedef struct cqsa_tensor {
  void *data;           /* of the first element, before byte_offset; NULL where there is no element */
  int32_t device_type;  /* CQSA_DEVICE_* */
  int32_t device_id;    /* index of the device */
  int32_t ndim;         /* number of axes */
  cqsa_dtype dtype;     /* of an element */
  int64_t *shape;       /* ndim sizes */
  int64_t *strides;     /* ndim strides in elements, or NULL: compact row-major */
  uint64_t byte_offset; /* added to data */
} cqsa_tensor;

/* ================================================================================================================
 * 5. Callbacks. They may be called from any thread unless stated otherwise, must not throw or longjmp, and must not call
 * functions of this library on the context that is calling them.
 * ================================================================================================================ */

/* Host memory for the library. `alignment` is a power of two, at most 4096. NULL from allocate = out of memory.
 * release gets the same byte count that allocate got. */
typedef struct cqsa_allocator {
  uint32_t struct_size;
  uint32_t flags;                                                    /* none yet */
  void *user;                                                        /* passed to both functions */
  void *(*allocate)(void *user, uint64_t bytes, uint64_t alignment); /* memory, aligned, or NULL */
  void (*release)(void *user, void *memory, uint64_t bytes);         /* what allocate gave */
} cqsa_allocator;
#define CQSA_ALLOCATOR_INIT { sizeof(cqsa_allocator), 0, 0, 0, 0 }

/* Levels of a log message. */
enum { CQSA_LOG_DEBUG = 0, CQSA_LOG_INFO = 1, CQSA_LOG_WARNING = 2 };
/* One line, without the newline. */
typedef void (*cqsa_log_fn)(void *user, int32_t level, const char *message);

/* Called by a blocking run from the thread that called it, between tiles: `done` of `total` tiles (0 <= done <= total, done
 * never falls). A run that is queued calls it twice, see section 9. Return 0 to go on, anything else to cancel (CQSA_ERROR_CANCELLED). */
typedef int32_t (*cqsa_progress_fn)(void *user, int64_t done, int64_t total);

/* Runs task(data, i) once for each i in [0, num_tasks), in any order, at once or one after the other, and returns 0 when all
 * have ended. A task never waits for another one. Lets an engine lend its own threads. Runs on a device start I/O threads of
 * their own all the same, up to 8 each way (12 for operands in mapped files), since those wait for the device; num_threads = 1
 * forbids them. */
typedef int32_t (*cqsa_parallel_for_fn)(void *user, int64_t num_tasks, void (*task)(void *data, int64_t index), void *data);

/* ================================================================================================================
 * 6. Backends: "cpu" is always there; others are plugins, libcqsa_<name>.so, looked for in the folder of the context
 * parameter `backend_path`, then in the absolute path CQSA_BACKEND_PATH of the environment, then beside the library itself; never in the
 * current folder. A plugin is loaded at the first context or query that needs it, not before.
 * ================================================================================================================ */

enum {
  CQSA_BACKEND_READY = 0,
  CQSA_BACKEND_NOT_FOUND = 1,
  CQSA_BACKEND_LOAD_FAILED = 2,
  CQSA_BACKEND_ABI_MISMATCH = 3,
  CQSA_BACKEND_NO_DRIVER = 4,
  CQSA_BACKEND_NO_DEVICE = 5,
  CQSA_BACKEND_NO_DEVICE_CODE = 6
};

/* What is known of a backend. */
typedef struct cqsa_backend_info {
  uint32_t struct_size;
  uint32_t flags;       /* none yet */
  int32_t state;        /* CQSA_BACKEND_* */
  int32_t device_count; /* devices that it can use */
  char name[32];        /* "cpu", "cuda", .. */
  char reason[512];     /* why it is not ready: what was looked for, where, and what was found; "" when ready */
  char device[128];     /* name of device 0, "" without one */
} cqsa_backend_info;
#define CQSA_BACKEND_INFO_INIT { sizeof(cqsa_backend_info), 0, 0, 0, "", "", "" }
/* Zeroes `size` bytes and sets struct_size to size: what the INIT macro does, for languages without macros; pass the size of
 * the struct as the caller knows it. NULL is ignored. Thread class: free. Since 0.1. All *_init functions do the same. */
CQSA_API void cqsa_backend_info_init(cqsa_backend_info *info, uint64_t size);

/* Name of the index-th backend that this version knows ("cpu" first), NULL past the end. Static text.
 * Thread class: free. Since 0.1. */
CQSA_API const char *cqsa_backend_name(int32_t index);

/* State of one backend. A backend that is absent is not an error of this call: it returns CQSA_OK and info_out->state says
 * so. backend_path: folder to look in first, or NULL. Errors: name NULL, empty or with characters other than a-z, 0-9, _.
 * Thread class: shared. Since 0.1. */
CQSA_API cqsa_status cqsa_backend_query(const char *name, const char *backend_path, cqsa_backend_info *info_out);

/* ================================================================================================================
 * 7. Context: a backend, a device, its threads and its allocator
 * ================================================================================================================ */

/* A backend, a device, its threads and its allocator. */
typedef struct cqsa_context cqsa_context;

/* How a context is made. */
typedef struct cqsa_context_params {
  uint32_t struct_size;
  uint32_t flags;                    /* none yet */
  const char *backend;               /* "cpu", "cuda", ..; NULL or "auto": the first ready GPU backend, else "cpu" */
  const char *backend_path;          /* absolute folder in which plugins are looked for first, or NULL */
  int32_t device;                    /* index of the device within the backend */
  int32_t num_threads;               /* host threads a call may use, the caller's included; 0: one per core available */
  const cqsa_allocator *allocator;   /* copied; NULL: aligned malloc */
  cqsa_parallel_for_fn parallel_for; /* NULL: the context's own threads, started at first need */
  void *parallel_for_user;           /* passed to parallel_for */
  cqsa_log_fn log;                   /* NULL: silent */
  void *log_user;                    /* passed to log */
} cqsa_context_params;
#define CQSA_CONTEXT_PARAMS_INIT { sizeof(cqsa_context_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_context_params_init(cqsa_context_params *params, uint64_t size);

/* Makes a context. params NULL: all defaults. context_out: destroy it with cqsa_context_destroy(). Errors: INVALID_ARGUMENT;
 * BACKEND_* and NO_* with the reason when a backend asked by name is not ready; NO_DEVICE for a device index out of range.
 * Thread class: shared. Since 0.1. */
CQSA_API cqsa_status cqsa_context_create(const cqsa_context_params *params, cqsa_context **context_out);

/* Drops the caller's reference. Plans keep their context alive, so the order of destruction does not matter. NULL is fine.
 * Threads are joined when the last reference goes, and pinned memory goes back: up to 128 MiB of staging that a device context
 * keeps from one run to the next (docs/streams.md). Thread class: exclusive. Since 0.1. */
CQSA_API void cqsa_context_destroy(cqsa_context *context);

/* Name of the backend in use, "cpu". Lives as long as the context. NULL context: "". Thread class: const. Since 0.1. */
CQSA_API const char *cqsa_context_backend(const cqsa_context *context);

/* The measured properties of the context's device as the JSON document that cqsa_attention_plan_create_for() reads: memory,
 * compute rate per head_dim, copy rates, launch cost. Measured at the first call, in under a second, with up to 32 MiB each of
 * host, pinned and device memory that are given back at once; then kept, for a device by the process, and used by later plans.
 * Until then plans for a device are priced with the nominal rates of a fast one. Errors: NULL_POINTER, RUNTIME. Thread class: shared. Since 0.1. */
CQSA_API cqsa_status cqsa_context_hardware(const cqsa_context *context, char *buffer, uint64_t size, uint64_t *length_out);

/* ================================================================================================================
 * 8. Attention: what is asked (params) and with what (args)
 *
 * For batch b, query head h and key head g = h / (num_heads / num_kv_heads):
 *
 *     s[i,j]   = softmax_scale * dot(q[b,h,i,:], k[b,g,j,:])
 *     s[i,j]   = softcap * tanh(s[i,j] / softcap)            if softcap > 0
 *     s[i,j]  += bias[b,h,i,j] - slope[h] * |i + off - j|    where given
 *     s[i,j]   = -inf                                        where the mask, the causal rule or the window hides key j
 *     p[i,:]   = softmax(s[i,:])                             with one extra logit sinks[h] in the sum, where given
 *     out[b,h,i,:] = sum_j p[i,j] * v[b,g,j,:]
 *     lse[b,h,i]   = ln(sum_j exp(s[i,j]))                   natural logarithm, the sink included
 *
 * Shapes (any strides):
 *   batched   q, out [batch, num_heads, seqlen_q, head_dim | head_dim_v]   k, v [batch, num_kv_heads, seqlen_k, ..]
 *             lse [batch, num_heads, seqlen_q]. A [batch, seq, heads, dim] array is passed as such a view by its strides.
 *   varlen    q, out [total_q, num_heads, ..]  k, v [total_k, num_kv_heads, ..]  lse [num_heads, total_q];
 *             segment b has rows cu_seqlens_q[b] .. cu_seqlens_q[b+1] (empty ones are legal). Rows past the last segment
 *             get out = 0 and lse = -inf.
 *   paged     k, v are pools [num_pages, page_size, num_kv_heads, ..]; key j of sequence b is row j % page_size of page
 *             page_table[b, j / page_size]; page id -1 hides its keys. q is batched or varlen.
 * Rules:
 *   - A row with no visible key has out = 0 and lse = -inf (with a sink: lse = sink). Never NaN.
 *   - Only structure hides a key: the causal rule, the window, a false mask element, a page id of -1, or a logit that is
 *     actually -inf. A very negative finite logit does not. Hidden and padded k/v may hold NaN and change nothing.
 *   - Positions: off = 0 for CQSA_CAUSAL_TOP_LEFT, seqlen_k - seqlen_q otherwise, with the lengths of the segment.
 *   - Sums and the softmax are in f32 or better whatever the types are, f32 inputs are computed in f32, and out is rounded once.
 *   - A given plan always gives the same bits. No dropout.
 * ================================================================================================================ */

enum {
  CQSA_CAUSAL_NONE = 0,
  CQSA_CAUSAL_TOP_LEFT = 1,    /* key j is visible to query i iff j <= i (PyTorch, ONNX) */
  CQSA_CAUSAL_BOTTOM_RIGHT = 2 /* iff j <= i + seqlen_k - seqlen_q (FlashAttention >= 2.1, MLX) */
};

enum {
  CQSA_SCHEDULE_AUTO = 0,
  CQSA_SCHEDULE_DIRECT = 1, /* one pass over everything */
  CQSA_SCHEDULE_STREAM = 2, /* query tiles stay, windows of keys and values pass by */
  CQSA_SCHEDULE_CQS = 3     /* stateless tasks over cyclic quorum sets of chunks */
};

/* Where operands live, as seen from the context's device. */
enum {
  CQSA_MEMORY_HOST = 0,   /* ordinary host memory */
  CQSA_MEMORY_PINNED = 1, /* page-locked host memory */
  CQSA_MEMORY_DEVICE = 2, /* memory of the context's device */
  CQSA_MEMORY_TILE = 3,   /* in cqsa_plan_info only: on the device, but never more than a tile of it */
  /* In host memory: a mapping of a file, MAP_SHARED, or MAP_PRIVATE, read-only and never written. Its pages that are resident
   * because of a run count in max_host_bytes, and the run lets them go behind itself (madvise MADV_DONTNEED, which loses nothing
   * in such a mapping), so operands may be larger than memory. A run that would let pages go first reads /proc/self/maps, and
   * for private mappings smaps: a mapping with a page that was changed, even before it was made read-only, is
   * CQSA_ERROR_INVALID_ARGUMENT, as is a private one of huge pages (hugetlbfs) or where smaps cannot be read. Nobody may write
   * to a private one during the run. Not for paged keys. The file must not get shorter during the run, and an
   * output's disk space must be there before it (posix_fallocate): otherwise SIGBUS, which no library can turn into a status. */
  CQSA_MEMORY_MAPPED = 4
};

/* Shape of the scales of 8-bit keys and values. */
enum {
  CQSA_SCALE_NONE = 0,   /* no scale tensor: factor 1 (not for int8) */
  CQSA_SCALE_TENSOR = 1, /* fp8: one f32 */
  CQSA_SCALE_HEAD = 2,   /* fp8: f32 [num_kv_heads] */
  CQSA_SCALE_TOKEN = 3,  /* fp8: f32 with k's axes but the last */
  CQSA_SCALE_GROUP = 4   /* int8: f16 with k's axes but the last, then ceil(head_dim / kv_group) */
};

/* Bits of cqsa_attention_params.flags. */
enum {
  CQSA_ATTENTION_WINDOW = 1 << 0,    /* window_left and window_right count */
  CQSA_ATTENTION_VARLEN = 1 << 1,    /* cu_seqlens_q, and cu_seqlens_k unless paged */
  CQSA_ATTENTION_PAGED = 1 << 2,     /* page_table */
  CQSA_ATTENTION_SEQUSED_K = 1 << 3, /* seqused_k */
  CQSA_ATTENTION_MASK = 1 << 4,      /* mask */
  CQSA_ATTENTION_BIAS = 1 << 5,      /* bias */
  CQSA_ATTENTION_ALIBI = 1 << 6,     /* alibi_slopes */
  CQSA_ATTENTION_SINKS = 1 << 7,     /* sinks */
  CQSA_ATTENTION_LSE = 1 << 8,       /* lse is wanted */
  /* A row's bits do not depend on which other rows and batch items are computed with it, nor on the budget. */
  CQSA_ATTENTION_BATCH_INVARIANT = 1 << 9,
  /* Forward is always reproducible; the flag is accepted so that callers can state the wish. */
  CQSA_ATTENTION_DETERMINISTIC = 1 << 10
};

/* Axes along which a mask or a bias is the same (size 1, or stride 0): bits of mask_broadcast and bias_broadcast. */
enum {
  CQSA_BROADCAST_BATCH = 1 << 0,
  CQSA_BROADCAST_HEAD = 1 << 1,
  CQSA_BROADCAST_QUERY = 1 << 2,
  CQSA_BROADCAST_KEY = 1 << 3
};

/* The least precision of the products; sums and the softmax are in f32 or better whatever it is. An implementation may be more
 * precise than was asked. */
enum {
  CQSA_PRECISION_DEFAULT = 0, /* what the dtypes ask for: 16-bit operands as they are, probabilities rounded to q's type; f32 in f32 */
  CQSA_PRECISION_FAST = 1,    /* f32 queries may be rounded to 16 bits */
  CQSA_PRECISION_SPLIT = 2,   /* what 16 bits do not hold is the sum of two of them, both multiplied by the matrix units */
  CQSA_PRECISION_F32 = 3      /* f32 products */
};

/* All that decides the plan. In cqsa_attention() the shapes, dtypes, places and presence flags may be left out: with
 * num_heads = 0 all of them are taken from the tensors in args (what is stated all the same must agree with them; a stated
 * CQSA_MEMORY_MAPPED counts for what is in host memory). cqsa_attention_params_of() does the same for a plan. */
typedef struct cqsa_attention_params {
  uint32_t struct_size;
  uint32_t flags; /* CQSA_ATTENTION_* */

  int64_t batch;        /* sequences; 0 is an empty problem */
  int64_t num_heads;    /* of q; 0 in cqsa_attention(): see above */
  int64_t num_kv_heads; /* divides num_heads */
  int64_t head_dim;     /* 1..576 */
  int64_t head_dim_v;   /* 1..512 */
  int64_t seqlen_q;     /* varlen: the longest segment, or an upper bound */
  int64_t seqlen_k;     /* varlen, paged: likewise */
  int64_t total_q;      /* varlen: rows of q; otherwise 0 */
  int64_t total_k;      /* varlen and not paged: rows of k; otherwise 0 */
  int64_t page_size;    /* paged: keys in a page, >= 1; otherwise 0 */
  int64_t num_pages;    /* paged: pages in the pool; otherwise 0 */

  cqsa_dtype dtype_q;    /* F32, F16, BF16; F64 is computed by the reference */
  cqsa_dtype dtype_kv;   /* as q, or I8, E4M3FN, E5M2 */
  cqsa_dtype dtype_out;  /* F32, F16, BF16 (F64 with F64); NONE: as q */
  cqsa_dtype dtype_bias; /* F32, F16, BF16 (F64 with F64); NONE without a bias */
  int32_t scale_k;       /* CQSA_SCALE_* of k_scale */
  int32_t scale_v;       /* CQSA_SCALE_* of v_scale */
  int64_t kv_group;      /* int8: channels that share a scale: 32, 64 or 128; otherwise 0 */

  int32_t memory_q;        /* CQSA_MEMORY_*: place of q, and of mask, bias and the small operands */
  int32_t memory_kv;       /* place of k, v and their scales */
  int32_t memory_out;      /* place of out and lse */
  int32_t causal;          /* CQSA_CAUSAL_* */
  int64_t window_left;     /* with CQSA_ATTENTION_WINDOW: key j is visible iff i+off-left <= j <= i+off+right, */
  int64_t window_right;    /* both inclusive; -1: no limit on that side */
  double softmax_scale;    /* 0: 1/sqrt(head_dim) */
  double softcap;          /* 0: none */
  double dropout;          /* must be 0: there is no dropout */
  uint32_t mask_broadcast; /* CQSA_BROADCAST_* */
  uint32_t bias_broadcast; /* likewise, of the bias */

  /* The budget: what the library itself may allocate for the call, in bytes; operands and outputs are not counted, nor are
   * the device driver's own context and code. 0: no limit, but of device memory a tenth of what is free is left to others.
   * Resident pages of operands that are CQSA_MEMORY_MAPPED do count, in max_host_bytes. On the CPU backend max_host_bytes is the one that binds. */
  uint64_t max_device_bytes;
  uint64_t max_host_bytes;   /* pageable host memory */
  uint64_t max_pinned_bytes; /* page-locked host memory */

  int32_t schedule; /* CQSA_SCHEDULE_* */
  int32_t cqs_c;    /* with CQSA_SCHEDULE_CQS: number of chunks, 3 7 13 21 31 57 73 91 133; 0: the planner chooses */
  int32_t cqs_itr;  /* depth, 1..3; 0: the planner chooses */
  int32_t precision; /* CQSA_PRECISION_*; 0: what the dtypes ask for */
  int64_t tile_q;   /* rows that stay resident at a time; 0: the planner chooses */
  int64_t tile_k;   /* keys that are resident at a time; 0: the planner chooses */
} cqsa_attention_params;
#define CQSA_ATTENTION_PARAMS_INIT                                                                                         \
  { sizeof(cqsa_attention_params), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_attention_params_init(cqsa_attention_params *params, uint64_t size);

/* What a run did; filled by cqsa_attention() and cqsa_attention_execute() when args.info is given. */
typedef struct cqsa_run_info {
  uint32_t struct_size;
  uint32_t flags;             /* none yet */
  uint64_t peak_device_bytes; /* real high-water marks of what the library allocated (or carved from the caller's workspace) */
  uint64_t peak_host_bytes;   /* likewise, of pageable host memory */
  uint64_t peak_pinned_bytes; /* likewise, of page-locked host memory */
  uint64_t bytes_in;          /* bytes copied to the device */
  uint64_t bytes_out;         /* bytes copied back */
  int64_t tasks;              /* leaf calls made */
  double seconds;             /* wall time of the run */
  int32_t retries;            /* re-plans after a failed allocation; the peaks are then the new plan's, still within the budget */
  int32_t schedule;           /* what the run ended with; the plan's own unless there were retries */
  int32_t cqs_c;              /* what the run ended with, as all below: see cqsa_plan_info */
  int32_t cqs_itr;            /* likewise */
  int32_t in_flight;          /* likewise */
  int32_t place_acc;          /* likewise */
  int64_t tile_q;             /* likewise */
  int64_t tile_k;             /* likewise */
} cqsa_run_info;
#define CQSA_RUN_INFO_INIT { sizeof(cqsa_run_info), 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_run_info_init(cqsa_run_info *info, uint64_t size);

/* The operands of one run. Optional ones are NULL exactly when params do not announce them. */
typedef struct cqsa_attention_args {
  uint32_t struct_size;
  uint32_t flags;                  /* none yet */
  const cqsa_tensor *q;            /* queries */
  const cqsa_tensor *k;            /* keys */
  const cqsa_tensor *v;            /* values */
  const cqsa_tensor *k_scale;      /* see CQSA_SCALE_* */
  const cqsa_tensor *v_scale;      /* likewise, of v */
  const cqsa_tensor *mask;         /* bool or u8 [batch|1, num_heads|1, seqlen_q|1, seqlen_k|1]; 0 hides the key */
  const cqsa_tensor *bias;         /* same shape rule; added to the scaled, capped logit */
  const cqsa_tensor *alibi_slopes; /* f32 [num_heads] or [batch, num_heads] */
  const cqsa_tensor *sinks;        /* f32 [num_heads] */
  const cqsa_tensor *cu_seqlens_q; /* i32 or i64 [batch + 1], begins with 0, never falls */
  const cqsa_tensor *cu_seqlens_k; /* same type as cu_seqlens_q */
  const cqsa_tensor *seqused_k;    /* i32 or i64 [batch]: keys in use, at most the length of the segment */
  const cqsa_tensor *page_table;   /* i32 [batch, pages per sequence] */
  const cqsa_tensor *out;          /* output */
  const cqsa_tensor *lse;          /* output, f32 (f64 with F64); see the shapes above */
  void *workspace;                 /* NULL: the library allocates what is needed; else see cqsa_workspace_query() */
  uint64_t workspace_bytes;
  const int32_t *cancel;     /* NULL, or a flag the caller may set from any thread: non-zero stops the run between tiles */
  cqsa_progress_fn progress; /* NULL, or told how far the run has come */
  void *progress_user;       /* passed to progress */
  cqsa_run_info *info;       /* NULL, or filled with what the run did */
  /* NULL, or the path of a file that keeps how far the run has come, so that the same call after a crash, a kill or a cancel
   * goes on from there: finished tiles are not computed again, and the outputs get the bits of a run that was never stopped.
   * Schedules direct and stream; out and lse must lie in MAP_SHARED mappings of files, which the caller keeps. Schedule CQS, and
   * a direct run whose operands are all on the device, refuse a checkpoint: CQSA_ERROR_UNSUPPORTED.
   * The file is replaced atomically, after the outputs it vouches for are on disk, as often as costs 2 % of the time; it
   * is removed when the run is complete. A file of other params, plan, inputs or outputs: CQSA_ERROR_CHECKPOINT. Inputs are
   * compared by samples, those in device memory not at all. */
  const char *checkpoint;
} cqsa_attention_args;
#define CQSA_ATTENTION_ARGS_INIT \
  { sizeof(cqsa_attention_args), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_attention_args_init(cqsa_attention_args *args, uint64_t size);

/* Fills the shapes, dtypes, places and presence flags of params_inout from the tensors of args, leaving all other fields,
 * and CQSA_MEMORY_MAPPED where it is stated for what is in host memory: no tensor says that. A kv_group is kept too.
 * Errors: as cqsa_attention(). Thread class: free. Since 0.1. */
CQSA_API cqsa_status cqsa_attention_params_of(const cqsa_context *context, const cqsa_attention_args *args,
                                              cqsa_attention_params *params_inout);

/* ================================================================================================================
 * 9. One call, or plan / describe / execute
 *
 * Streams. On a backend with memory of its own every function with a `stream` parameter works in the order of that stream, the
 * vendor's own handle (cudaStream_t, hipStream_t); NULL is the default stream. On the CPU backend it must be NULL.
 *
 *   Enqueue mode: when every operand and output is in device memory and the plan is direct (cqsa_plan_info: schedule DIRECT,
 *     place_q, place_kv and place_out DEVICE). The work is queued on the stream and the call returns without waiting: the outputs
 *     are there for what is queued on that stream afterwards, and for the host once it has waited for the stream. Operands,
 *     outputs and workspace must live until then; tensors, params and args need not. Nothing is synchronised, and with a
 *     workspace (or a plan that needs none: workspace_bytes 0) nothing is allocated; without one the library takes memory in the
 *     order of the stream. Errors of the device may show up at a later call.
 *       args.cancel is looked at once, before anything is queued. args.progress is called with 0 of 1 before and with 1 of 1 once
 *     the work is queued; a non-zero return at 0 queues nothing. info.seconds is the time of the call, not of the work.
 *       Values of cu_seqlens_q, cu_seqlens_k, seqused_k and page_table are on the device, and the host does not look at them: they
 *     are clamped, so that nothing outside the operands is touched, and not checked. Rows of wrong values have no defined result.
 *   Blocking: every other run. It begins when what is queued on the stream has ended, and returns when the result is there, for
 *     the host and for every stream. So does a direct run whose memory cannot be had and that goes on with less.
 *   Graphs: a call whose stream is being captured becomes part of the graph when it is in enqueue mode and either needs no memory
 *     or was given a workspace, also when it is the first call of the process; the workspace belongs to the graph. Any other call is
 *     refused with CQSA_ERROR_CAPTURE_UNSAFE before the stream is touched, and the capture goes on.
 *   A stream of another device is CQSA_ERROR_DEVICE, and so is an operand whose pointer is not the memory that its tensor says
 *     (host memory as device memory, or the reverse, or memory of another device). Managed memory is device memory. Memory that is
 *     declared pinned and is not is only slower.
 *   Threads: const, as without streams: any number of threads may use one context or plan, on the same or on different streams.
 * ================================================================================================================ */

/* How one problem will be run. */
typedef struct cqsa_plan cqsa_plan;

/* Attention in one call: plans, allocates within the budget, and runs on `stream`: queued, or blocking (see above; always
 * blocking on the CPU backend, where stream is NULL). Errors: any of section 3; the budget contract of section 8 holds.
 * Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_attention(cqsa_context *context, const cqsa_attention_params *params,
                                    const cqsa_attention_args *args, void *stream);

/* Would cqsa_attention_plan_create() take these params here? Same status, same message, no plan.
 * Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_attention_query(const cqsa_context *context, const cqsa_attention_params *params);

/* Makes an immutable plan; it keeps the context alive. plan_out: destroy it with cqsa_plan_destroy(). Errors: those of params
 * (1 to 11), UNSUPPORTED with the reason of the last implementation, BUDGET_TOO_SMALL with the least budget that works.
 * Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_attention_plan_create(cqsa_context *context, const cqsa_attention_params *params,
                                                cqsa_plan **plan_out);

/* Plans for a machine that need not be here, described as JSON (docs/planning.md lists the keys; cqsa_context_hardware()
 * prints one). Such a plan can be described and explained, not executed. plan_out: destroy it with cqsa_plan_destroy().
 * Errors: INVALID_ARGUMENT naming the key of the JSON, and those of cqsa_attention_plan_create().
 * Thread class: free. Since 0.1. */
CQSA_API cqsa_status cqsa_attention_plan_create_for(const char *hardware_json, const cqsa_attention_params *params,
                                                    cqsa_plan **plan_out);

/* Destroys a plan that no thread is executing. NULL is fine. Thread class: exclusive. Since 0.1. */
CQSA_API void cqsa_plan_destroy(cqsa_plan *plan);

/* A plan in numbers. */
typedef struct cqsa_plan_info {
  uint32_t struct_size;
  uint32_t flags;             /* none yet */
  int32_t schedule;           /* CQSA_SCHEDULE_*, never AUTO */
  int32_t cqs_c;              /* 0 unless CQS */
  int32_t cqs_itr;            /* 0 unless CQS */
  int32_t in_flight;          /* tiles or tasks worked on at once: threads on a CPU, buffers on a device */
  int64_t tasks;              /* leaf calls */
  int64_t tile_q;             /* rows resident at a time */
  int64_t tile_k;             /* keys resident at a time */
  uint64_t peak_device_bytes; /* never exceeded by the run, never above the budget */
  uint64_t peak_host_bytes;   /* likewise */
  uint64_t peak_pinned_bytes; /* likewise */
  uint64_t workspace_bytes;   /* see cqsa_workspace_query() */
  uint64_t bytes_in;          /* copied to the device */
  uint64_t bytes_out;         /* copied back */
  double flops;               /* 2 * (head_dim + head_dim_v) * pairs of query and key that causality and window leave */
  double seconds;             /* predicted from the rates that the plan was made by: on the CPU backend measured at the first call; those
                                 of a device are nominal until cqsa_context_hardware() has measured it in this process, and until then
                                 this compares plans and tells no time */
  int32_t place_q;            /* CQSA_MEMORY_*: where the operands are while the kernels work */
  int32_t place_kv;           /* likewise, of k and v */
  int32_t place_acc;          /* where the f32 accumulator lives */
  int32_t place_out;          /* where outputs are while the kernels work */
  char implementation[64];    /* entry of the dispatch list, "cpu_avx512" */
  char backend[32];           /* that the plan is for, "cpu" */
} cqsa_plan_info;
#define CQSA_PLAN_INFO_INIT { sizeof(cqsa_plan_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, "", "" }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_plan_info_init(cqsa_plan_info *info, uint64_t size);

/* The plan in numbers. On the CPU backend the first call of a context measures its compute rate for the prediction, in some
 * tens of ms; so do the three functions below. Errors: NULL_POINTER, STRUCT_SIZE. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_plan_describe(const cqsa_plan *plan, cqsa_plan_info *info_out);

/* The plan as one line that states every automatic choice: schedule, c, itr, tasks, tiles, where q, k/v and the accumulator
 * live, in flight, output, implementation, bytes. With info of a run: the same line with what really happened.
 * info may be NULL. Errors: NULL_POINTER, STRUCT_SIZE. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_plan_line(const cqsa_plan *plan, const cqsa_run_info *info, char *buffer, uint64_t size,
                                    uint64_t *length_out);

/* Why this plan: the candidates, fastest first (at most 40, and how many more), each with its time, its peak and why it lost;
 * and why each earlier implementation declined. Text of several lines. Errors: NULL_POINTER. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_plan_explain(const cqsa_plan *plan, char *buffer, uint64_t size, uint64_t *length_out);

/* The plan as a JSON object: the fields of cqsa_plan_info (cqs_c and cqs_itr as c and itr), enums by name. Errors: NULL_POINTER.
 * Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_plan_json(const cqsa_plan *plan, char *buffer, uint64_t size, uint64_t *length_out);

/* Every workspace begins at a multiple of so many bytes. */
#define CQSA_WORKSPACE_ALIGNMENT 64

/* Bytes of workspace with which cqsa_attention_execute() allocates nothing of that kind itself: host memory on the CPU
 * backend, device memory otherwise, where it may be 0. Aligned to CQSA_WORKSPACE_ALIGNMENT. Exact: one byte less is refused. All of
 * workspace_bytes is the run's: a workspace that overlaps an operand or an output is CQSA_ERROR_OVERLAP. Errors:
 * NULL_POINTER. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_workspace_query(const cqsa_plan *plan, uint64_t *bytes_out);

/* Prepares a workspace, once, before its first use with this plan. A workspace serves one run at a time (runs that are queued on
 * one stream follow each other), and stays the caller's. Errors: NULL_POINTER, WORKSPACE with both sizes.
 * Thread class: const (plan), exclusive (workspace). Since 0.1. */
CQSA_API cqsa_status cqsa_workspace_init(const cqsa_plan *plan, void *workspace, uint64_t bytes);

/* Runs a plan on operands that match its params, on `stream`: queued, or blocking (see the top of this section). Errors: those of
 * args (1 to 11), UNSUPPORTED (a plan for a machine that is not here, a checkpoint that this run cannot keep), OUT_OF_* with the
 * bytes, CANCELLED, CALLBACK, RUNTIME, IO, CHECKPOINT, CAPTURE_UNSAFE.
 * Thread class: const (plan), each run with its own workspace. Since 0.1. */
CQSA_API cqsa_status cqsa_attention_execute(const cqsa_plan *plan, const cqsa_attention_args *args, void *stream);

/* ================================================================================================================
 * 10. Merge of partial results over disjoint sets of keys
 *
 *     m = max(lse_a, lse_b),  a = exp(lse_a - m),  b = exp(lse_b - m)
 *     out = (a * out_a + b * out_b) / (a + b),  lse = m + ln(a + b)
 *
 * Commutative to the bit. A side whose lse is -inf, +inf or NaN is empty: the other side is copied bit for bit; two empty
 * sides give out = 0, lse = -inf.
 * ================================================================================================================ */

/* The operands of cqsa_attention_merge(). */
typedef struct cqsa_attention_merge_args {
  uint32_t struct_size;
  uint32_t flags;           /* none yet */
  const cqsa_tensor *out_a; /* f32 [.., head_dim_v], 1 to 4 axes before the last */
  const cqsa_tensor *lse_a; /* f32 [..] */
  const cqsa_tensor *out_b; /* as out_a */
  const cqsa_tensor *lse_b; /* as lse_a */
  const cqsa_tensor *out;   /* output; may be exactly out_a or out_b (same data and strides) */
  const cqsa_tensor *lse;   /* output; may be exactly lse_a or lse_b */
} cqsa_attention_merge_args;
#define CQSA_ATTENTION_MERGE_ARGS_INIT { sizeof(cqsa_attention_merge_args), 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_attention_merge_args_init(cqsa_attention_merge_args *args, uint64_t size);

/* Merges two partial results as above. All six tensors on the context's device, the shapes of out_a and lse_a throughout.
 * stream: on a backend with memory of its own the merge is always queued, needs no memory and can be captured (section 9);
 * NULL on the CPU backend. Errors: NULL_POINTER, SHAPE, DTYPE, DEVICE, STRIDES, OVERLAP, RUNTIME.
 * Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_attention_merge(cqsa_context *context, const cqsa_attention_merge_args *args, void *stream);

/* ================================================================================================================
 * 11. Attention over selected cells of a paged cache
 *
 * Query i attends to the cells (keys) cells[i, 0 .. counts[i]) of its sequence and to nothing else. With cell(i,n) = cells[i,n] and
 * g = h / (num_heads / num_kv_heads):
 *
 *     s[i,h,n]   = softmax_scale * dot(q[i,h,:], k[cell(i,n), g, :])
 *     out[i,h,:] = sum_n softmax_n(s[i,h,:]) * v[cell(i,n), g, :]          lse[h,i] = ln(sum_n exp(s[i,h,n]))
 *
 * Cell c lies in row c % page_size of page page_table[i, c / page_size]. A cell whose page id is -1, or outside the pool, is not
 * there: it is hidden. Hidden and unselected cells may hold anything, NaN included. No cell at all: out = 0, lse = -inf.
 *   Ids of a query ascend strictly. One that is negative, not above the entry before it in the list, or past the page table is
 * skipped; a count above the capacity of the list, or below 0, counts as the capacity, or as 0. With CQSA_SELECTED_CHECK these are
 * refused instead. Entries past the count are never read.
 * ================================================================================================================ */

/* Bits of cqsa_attention_selected_args.flags. */
enum {
  /* Looks at counts, ids and the page ids they lead to first: CQSA_ERROR_INDEX names the first that is wrong, and nothing is written.
   * On a backend with memory of its own this waits for the stream, so a call whose stream is being captured is refused with
   * CQSA_ERROR_CAPTURE_UNSAFE. */
  CQSA_SELECTED_CHECK = 1 << 0
};

/* The operands of cqsa_attention_selected(), and what is asked. */
typedef struct cqsa_attention_selected_args {
  uint32_t struct_size;
  uint32_t flags;                /* CQSA_SELECTED_* */
  const cqsa_tensor *q;          /* F32, F16, BF16 [total_q, num_heads, head_dim], head_dim up to 576 */
  const cqsa_tensor *k;          /* pool [num_pages, page_size, num_kv_heads, head_dim], any strides: q's type, or F16, or I8 */
  const cqsa_tensor *v;          /* pool [num_pages, page_size, num_kv_heads, head_dim_v], k's type, head_dim_v up to 512 */
  const cqsa_tensor *k_scale;    /* I8: F16 [num_pages, page_size, num_kv_heads, ceil(head_dim / kv_group)]; otherwise NULL */
  const cqsa_tensor *v_scale;    /* likewise, of head_dim_v */
  const cqsa_tensor *page_table; /* I32 [pages] for all queries, or [total_q, pages] */
  const cqsa_tensor *cells;      /* I32 [total_q, capacity] */
  const cqsa_tensor *counts;     /* I32 [total_q] */
  const cqsa_tensor *out;        /* output, F32, F16, BF16 [total_q, num_heads, head_dim_v] */
  const cqsa_tensor *lse;        /* output, F32 [num_heads, total_q], or NULL */
  double softmax_scale;          /* 0: 1/sqrt(head_dim) */
  int32_t precision;             /* CQSA_PRECISION_* */
  int32_t kv_group;              /* I8: channels that share a scale: 32, 64 or 128; 0: 64. Otherwise 0 */
  void *workspace;               /* NULL: the library allocates what is needed; else see cqsa_attention_selected_workspace() */
  uint64_t workspace_bytes;
} cqsa_attention_selected_args;
#define CQSA_ATTENTION_SELECTED_ARGS_INIT \
  { sizeof(cqsa_attention_selected_args), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_attention_selected_args_init(cqsa_attention_selected_args *args, uint64_t size);

/* Attention over selected cells, as above. All tensors on the context's device. stream: on a backend with memory of its own the
 * work is queued (enqueue mode of section 9) and may be captured when it needs no memory or was given a workspace; NULL on the CPU
 * backend. Errors: NULL_POINTER, SHAPE, DTYPE, DEVICE, STRIDES, OVERLAP, INVALID_ARGUMENT, UNKNOWN_FLAG, INDEX (with CHECK),
 * WORKSPACE, UNSUPPORTED (nothing on this device for these types at this precision), OUT_OF_*, CALLBACK, RUNTIME, CAPTURE_UNSAFE.
 * Thread class: const (context), each call with its own workspace. Since 0.1. */
CQSA_API cqsa_status cqsa_attention_selected(cqsa_context *context, const cqsa_attention_selected_args *args, void *stream);

/* Bytes of workspace with which the call above allocates nothing, aligned to CQSA_WORKSPACE_ALIGNMENT; host memory on the CPU
 * backend, device memory otherwise; may be 0. Exact: one byte less is refused. Looks at shapes and types only: data, strides and
 * devices of the tensors are not looked at, nor is args->workspace. Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_attention_selected_workspace(const cqsa_context *context, const cqsa_attention_selected_args *args,
                                                       uint64_t *bytes_out);

/* ================================================================================================================
 * 12. Key-value caches: append, gather, Hadamard rotation
 *
 * A cache is a pool of pages as in section 8. How a row x of head_dim elements is kept, exactly, and with the same bits on every
 * backend (f32 operations, each rounded to nearest even; f16() rounds so too, but what is finite stays within +-65504):
 *
 *   F32, F16, BF16  each element rounded to the pool's type; of the same type, its bits
 *   I8              for each group of kv_group channels, the last one may be short:
 *                     scale = f16(max|x| / 127)
 *                     code  = clamp(rint(x / scale), -127, 127), with the scale as rounded to f16; 0 where it is 0
 *                     back:   scale * code
 *   Q4_0            the row is first rotated, x H as in cqsa_hadamard(), without rounding in between; then for each 32 channels
 *                     m    = the element of largest magnitude, the first of equals, +0 if all are zero
 *                     d    = m / -8, id = 1 / d, or 0 where that is not finite
 *                     code = min(15, trunc(fma(x, id, 8.5)))
 *                   18 bytes: f16(d), which may be negative, then 16 bytes, the n-th with code n low and code n + 16 high
 *                     back:   f16(d) * (code - 8), still rotated
 *
 * A group or block with a NaN or an infinity in it gets the scale or d NaN and the code of zero, so it comes back as NaN. (A
 * rotation spreads either over its row.) A NaN that is computed or converted is the positive quiet one without payload.
 * ================================================================================================================ */

enum {
  CQSA_KV_FORMAT_ELEMENTS = 0, /* the dtype of the pool: F32, F16, BF16, or I8 with scales */
  CQSA_KV_FORMAT_Q4_0 = 1      /* the pool is U8 [num_pages, page_size, num_kv_heads, head_dim / 32 * 18], the last axis compact;
                                * head_dim is a power of two, 32 to 4096 */
};

/* Row n of x goes to (append) or comes from (gather) cell cells[n] of the sequence whose pages are page_table[n, :], or
 * page_table[:], the same for all rows: row cells[n] % page_size of page page_table[.., cells[n] / page_size]. A cell that is
 * negative, past the page table, or on a page that is -1 or otherwise outside the pool is not there: append leaves such a row out,
 * and gather fills it with zeros. Where two rows of an append have the same place in the pool, that place gets parts of either. */
typedef struct cqsa_kv_args {
  uint32_t struct_size;
  uint32_t flags;                /* none yet */
  const cqsa_tensor *x;          /* F32, F16, BF16 [rows, num_kv_heads, head_dim]: append's input, gather's output */
  const cqsa_tensor *pool;       /* [num_pages, page_size, num_kv_heads, head_dim], any strides: append's output, gather's input */
  const cqsa_tensor *scale;      /* I8: F16 [num_pages, page_size, num_kv_heads, ceil(head_dim / kv_group)], likewise; else NULL */
  const cqsa_tensor *page_table; /* I32 [pages] or [rows, pages] */
  const cqsa_tensor *cells;      /* I32 or I64 [rows] */
  int32_t format;                /* CQSA_KV_FORMAT_* */
  int32_t kv_group;              /* I8: 32, 64 or 128, and 0 is 64; else 0 */
} cqsa_kv_args;
#define CQSA_KV_ARGS_INIT { sizeof(cqsa_kv_args), 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_kv_args_init(cqsa_kv_args *args, uint64_t size);

/* Writes the rows of x into a cache, quantized as above, and touches nothing else of it. All tensors on the context's device.
 * stream: on a backend with memory of its own the work is always queued, needs no memory and can be captured (section 9); NULL on
 * the CPU backend. Values of cells and page_table are not looked at before. Errors: NULL_POINTER, SHAPE, DTYPE, DEVICE, STRIDES,
 * OVERLAP, INVALID_ARGUMENT, UNKNOWN_FLAG, UNSUPPORTED, CALLBACK, RUNTIME. Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_kv_append(cqsa_context *context, const cqsa_kv_args *args, void *stream);

/* Reads rows back into x: what the cache has, computed in f32 as above, then rounded to the type of x. Rows of a Q4_0 cache are not
 * rotated back: cqsa_hadamard() does, which is its own inverse. stream and errors: as cqsa_kv_append(). Thread class: const (context).
 * Since 0.1. */
CQSA_API cqsa_status cqsa_kv_gather(cqsa_context *context, const cqsa_kv_args *args, void *stream);

/* out = x H along the last axis, H[a,b] = (-1)^popcount(a & b) / sqrt(n), whose size n is a power of two, 1 to 4096. In f32: for
 * h = 1, 2, 4, .. n/2 every pair (x[i], x[i + h]) with i & h = 0 becomes its sum and difference; then times 1/sqrt(n), rounded to
 * f32; then rounded to the type of out. x, out: F32, F16, BF16, 1 to 4 axes, of one shape; out may be exactly x (same data, type and
 * strides). stream and errors: as cqsa_kv_append(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_hadamard(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *out, void *stream);

/* ================================================================================================================
 * 13. FP8: quantize, delayed scaling, dequantize
 *
 * A matrix x [rows, cols] is cut into blocks that share a scale. For an element x of a block:
 *
 *     code  = fp8(f32(x) * scale)            the product in f32, rounded to nearest even, or at random (rng)
 *     x    ~= f32(code) * scale_inv          scale_inv = 1 / scale, rounded to nearest
 *
 *   fp8()   What is too large becomes the largest finite code (448, 57344, 240, 57344 for the four formats), +-Inf too, or with
 *           CQSA_FP8_NO_SATURATE what the format has for it: NaN (e4m3fn, fnuz) or Inf (e5m2). NaN stays NaN. -0 keeps its sign where
 *           the format has one. Nothing is flushed. The same bits on every backend.
 *   scale   From the largest |x| of the block, amax, which is bounded first: max(amax, eps), then min(.., amax_limit) where that is > 0.
 *               scale     = (fp8_max * 2^-margin) / amax                    f32, IEEE division; clamped to [2^-126, FLT_MAX]
 *               scale_inv = 2^(ceil(log2(amax / fp8_max)) + margin)         with CQSA_FP8_POW2, clamped to [2^-127, 2^126]; scale = 1 / scale_inv
 *           An amax of 0, or one that is not finite, gives scale 1. A side whose scale_inv is E8M0 has CQSA_FP8_POW2, whatever the other one has.
 *   block   so many rows and columns of x, 0: all. {0, 0} one scale for the tensor, {1, 0} one for each row (token), {0, 1} one for each
 *           column (channel), {1, g} and {g, 1} groups of any g >= 16, {128, 128}. The last block of a row or column may be short.
 *   scales  [block rows, block columns] of x, that is [ceil(rows / block[0]), ceil(cols / block[1])] with block 0 counting as all: two
 *           axes, or with one scale also one axis or none. See CQSA_FP8_SCALES_* for how they may lie.
 * ================================================================================================================ */

/* Where scales come from. */
enum {
  CQSA_FP8_CURRENT = 0, /* the amax of each block, found in this call */
  CQSA_FP8_STATIC = 1,  /* scale_in of each side */
  CQSA_FP8_RING = 2     /* block {0, 0} only: the scale that the ring has published; then this call's amax goes into the ring */
};

/* How scales lie. E8M0: the byte e stands for 2^(e - 127), 0xFF for NaN. */
enum {
  CQSA_FP8_SCALES_STRIDED = 0, /* F32 or E8M0FNU (or U8) [block rows, block columns], any strides. Row-major, column-major padded to 4
                                * floats (TMA, DeepGEMM, the 1x128 of cuBLASLt) and so on are strides */
  CQSA_FP8_SCALES_PACKED = 1,  /* I32 [block rows, ceil(block columns / 4)], any strides: E8M0 of four blocks of a row, the first one low; what
                                * is past the last is 0 (DeepGEMM) */
  CQSA_FP8_SCALES_TILED = 2    /* E8M0FNU or U8 [ceil(block rows / 128) * ceil(block columns / 4) * 512], compact: tiles of 128 rows and 4
                                * columns, tiles of a row of tiles one after the other; in a tile the scale of (r, c) is byte
                                * (r % 32) * 16 + (r / 32) * 4 + c; what is outside is 0 (cuBLASLt, MX) */
};

/* What a NaN or an infinity in x does to amax. Codes are not affected. */
enum {
  CQSA_FP8_NAN_PROPAGATE = 0, /* shows in amax: NaN, else Inf */
  CQSA_FP8_NAN_IGNORE = 1     /* does not count: amax is that of the finite elements */
};

/* Bits of cqsa_fp8_quantize_args.flags. */
enum {
  CQSA_FP8_POW2 = 1 << 0,
  CQSA_FP8_NO_SATURATE = 1 << 1,
  CQSA_FP8_RING_STAGE = 1 << 2, /* the amax joins the ring's staging amax; cqsa_fp8_ring_fold() takes it in, once for several calls */
  CQSA_FP8_SILU = 1 << 3        /* x counts as silu(x) * up, in f32: x / (1 + exp(-x)) * up. Within a few ulp the same on every backend */
};

/* History of the amaxes of a tensor, in memory of the caller on the context's device: delayed scaling. After each call
 *     history[index] = amax;  index = (index + 1) % hist_len;  scale from max(history), or from amax with MOST_RECENT
 * and that scale serves the next call. It advances on the device, so a captured call goes on with every replay. An amax that is not finite
 * or below 0 is not stored: the scale stays, the index too, and `refused` counts. Where max(history), or amax with MOST_RECENT, is 0 the scale stays. Calls on one ring must
 * follow each other (one stream); different rings are independent.
 *   This struct says what the memory is; it begins with the same numbers, and a call that finds others there, or a scale outside of [2^-126, FLT_MAX], leaves everything as it is: on the
 * CPU backend with CQSA_ERROR_INVALID_ARGUMENT, on a device by counters[3]. The memory may be copied, saved and restored as it is; what
 * is not finite or below 0 in a restored history does not count. */
typedef struct cqsa_fp8_ring {
  uint32_t struct_size;
  uint32_t flags;     /* CQSA_FP8_POW2 or 0 */
  void *state;        /* cqsa_fp8_ring_bytes(), aligned to CQSA_WORKSPACE_ALIGNMENT */
  uint64_t bytes;     /* that lie at state */
  int32_t hist_len;   /* 1..1024 */
  cqsa_dtype format;  /* E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ: of the codes made with it */
  int32_t margin;     /* -64..64 */
  int32_t algorithm;  /* CQSA_FP8_RING_* */
} cqsa_fp8_ring;
enum { CQSA_FP8_RING_MAX = 0, CQSA_FP8_RING_MOST_RECENT = 1 };
#define CQSA_FP8_RING_INIT { sizeof(cqsa_fp8_ring), 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_ring_struct_init(cqsa_fp8_ring *ring, uint64_t size);

/* Bytes of a ring's memory; state and bytes are not looked at. Errors: NULL_POINTER, INVALID_ARGUMENT, DTYPE. Thread class: free. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_ring_bytes(const cqsa_fp8_ring *ring, uint64_t *bytes_out);
/* Begins a ring: no history, and the scale that belongs to `amax` (0: scale 1). Queued on stream on a device. Errors: as above, WORKSPACE (too
 * small, misaligned), DEVICE, RUNTIME. Thread class: const (context), exclusive (ring). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_ring_init(cqsa_context *context, const cqsa_fp8_ring *ring, float amax, void *stream);
/* Takes amaxes into `count` rings at once, one launch: ring n gets amaxes[n], or with amaxes NULL its own staging amax, which is
 * empty afterwards; a ring with nothing staged stays as it is. amaxes: F32 [count] on the context's device, e.g. after an all-reduce; staging amaxes are then
 * dropped. Read them for that with cqsa_fp8_ring_staged(). rings: count structs one after the other. Errors: as above, INVALID_ARGUMENT for a ring named
 * twice. Thread class: const (context), exclusive (rings). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_ring_fold(cqsa_context *context, const cqsa_fp8_ring *rings, int64_t count, const cqsa_tensor *amaxes, void *stream);
/* Writes the staging amaxes of `count` rings to amaxes_out, F32 [count], 0 for none, one launch. Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_ring_staged(cqsa_context *context, const cqsa_fp8_ring *rings, int64_t count, const cqsa_tensor *amaxes_out, void *stream);

/* What a ring holds. */
typedef struct cqsa_fp8_ring_info {
  uint32_t struct_size;
  uint32_t flags;   /* none yet */
  int32_t index;    /* of the next amax in history */
  int32_t refused;  /* amaxes that were not finite or below 0, since the beginning */
  float staged;     /* largest staged amax; 0: none */
  float scale;      /* for the next call .. */
  float scale_inv;  /* .. and its reciprocal */
  float reserved;
} cqsa_fp8_ring_info;
#define CQSA_FP8_RING_INFO_INIT { sizeof(cqsa_fp8_ring_info), 0, 0, 0, 0.0f, 0.0f, 0.0f, 0.0f }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_ring_info_init(cqsa_fp8_ring_info *info, uint64_t size);
/* What a ring holds; waits for the stream. history_out: host memory, hist_len floats, or NULL. Errors: as above, INVALID_ARGUMENT when the memory
 * is not this ring, CAPTURE_UNSAFE. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_ring_read(cqsa_context *context, const cqsa_fp8_ring *ring, cqsa_fp8_ring_info *info_out, float *history_out, void *stream);

/* One output of a quantization: codes and their scales. */
typedef struct cqsa_fp8_side {
  const cqsa_tensor *out;       /* output, E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ; NULL: this side is not wanted */
  const cqsa_tensor *scale_in;  /* STATIC: F32, of the shape of the scales, every one in [2^-126, FLT_MAX], and with scale_inv as E8M0 a power of two;
                                 * else NULL */
  const cqsa_tensor *scale;     /* output: the scales that were used, F32 strided, or NULL */
  const cqsa_tensor *scale_inv; /* output: their reciprocals, see scale_layout, or NULL */
  int64_t block[2];             /* rows and columns of x that share a scale, see above */
  int32_t scale_layout;         /* CQSA_FP8_SCALES_* of scale_inv */
  int32_t reserved;
} cqsa_fp8_side;

/* What is quantized, how, and where to. */
typedef struct cqsa_fp8_quantize_args {
  uint32_t struct_size;
  uint32_t flags;      /* CQSA_FP8_*. POW2 is for CURRENT; STATIC takes it with E8M0 alone, RING where the ring has it */
  const cqsa_tensor *x; /* F32, F16, BF16 [rows, cols] or [batch, rows, cols], any strides; a batch counts as batch * rows rows. Or codes of a
                         * format with x_scale_inv: requantization */
  const cqsa_tensor *x_scale_inv; /* x of codes: F32 strided, of blocks x_block; otherwise NULL */
  int64_t x_block[2];  /* of x_scale_inv, else {0, 0} */
  const cqsa_tensor *up; /* with CQSA_FP8_SILU: x's type and shape; otherwise NULL */
  cqsa_fp8_side row;        /* out: x's shape */
  cqsa_fp8_side transposed; /* out: [cols, batch * rows]. Both from one reading of x */
  int32_t source;      /* CQSA_FP8_CURRENT, .. */
  int32_t nan_policy;  /* CQSA_FP8_NAN_* */
  int32_t margin;      /* CURRENT: -64..64. A ring has its own */
  float eps;           /* CURRENT, see above; >= 0 */
  float amax_limit;    /* likewise */
  float reserved;      /* 0, as every reserved field here */
  const cqsa_fp8_ring *ring; /* RING: of row.out's format; transposed.out of another format uses scale * (its fp8_max / fp8_max of the ring's), clamped
                              * to [2^-126, FLT_MAX]; as E8M0 that ratio must be a power of two */
  const cqsa_tensor *groups; /* NULL, or I32 or I64 [num_groups + 1] rows, never falling, from 0 to at most all: with block {0, 0} each group of rows has a
                              * scale of its own, scales [num_groups, 1]; {1, 0} and {1, g} are as without. Rows past the last are left as they are.
                              * Not with RING, and not with blocks that join rows otherwise */
  const cqsa_tensor *rng;    /* NULL: to nearest. I64 [2], seed and offset: round at random, up with the probability of what is cut off, by Philox 4x32-10 with
                              * key seed and counter offset + e / 4, word e % 4, e = row * cols + column */
  const cqsa_tensor *skip;   /* NULL, or I32, one element: not 0: everything stays as it is */
  const cqsa_tensor *amax;   /* output, F32, one element: the largest |x| of all, exact, neither bounded by eps nor amax_limit; or NULL */
  const cqsa_tensor *column_sum; /* output, F32 [cols]: sum of x over the rows, in a fixed order; or NULL */
  const cqsa_tensor *counters;   /* NULL, or I64 [4], to which is added: NaN, infinities, saturated finite elements (of row, else transposed), and
                                  * refusals: 1 when a ring, a workspace or a static scale turned out on the device to be wrong and nothing was
                                  * written; of several static scales of a side 1 for each wrong one, whose block is left as it is */
  void *workspace;           /* NULL: the library allocates (and clears) what is needed; else see cqsa_fp8_quantize_workspace() */
  uint64_t workspace_bytes;
} cqsa_fp8_quantize_args;
#define CQSA_FP8_SIDE_INIT { 0, 0, 0, 0, { 0, 0 }, 0, 0 }
#define CQSA_FP8_QUANTIZE_ARGS_INIT                                                                                              \
  { sizeof(cqsa_fp8_quantize_args), 0, 0, 0, { 0, 0 }, 0, CQSA_FP8_SIDE_INIT, CQSA_FP8_SIDE_INIT, 0, 0, 0, 0.0f, 0.0f, 0.0f, 0, 0, 0, \
    0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_quantize_args_init(cqsa_fp8_quantize_args *args, uint64_t size);

/* Quantizes as above, in one launch (CURRENT with a block {0, 0}: two). All tensors and the ring on the context's device. stream: on a
 * backend with memory of its own the work is queued (enqueue mode of section 9), and may be captured when it needs no workspace or was given
 * one; NULL on the CPU backend. Outputs may not overlap inputs or each other. Errors: NULL_POINTER (no output, ..), SHAPE, DTYPE, DEVICE,
 * STRIDES, OVERLAP, INVALID_ARGUMENT, UNKNOWN_FLAG, INDEX (groups, CPU backend), WORKSPACE, OUT_OF_*, CALLBACK, RUNTIME, CAPTURE_UNSAFE.
 * Thread class: const (context), each call with its own workspace and ring. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_quantize(cqsa_context *context, const cqsa_fp8_quantize_args *args, void *stream);
/* The same for `count` tensors, on a GPU in one launch for every three that have a known scale each, otherwise in as many launches as one
 * call for each takes. The workspace is that of args[0], large enough for all; the others' must be NULL. No two may share a ring or an
 * output. Errors: as above, the message names the entry. Thread class: as above. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_quantize_many(cqsa_context *context, const cqsa_fp8_quantize_args *const *args, int64_t count, void *stream);

/* Bytes of workspace with which the call above allocates nothing, aligned to CQSA_WORKSPACE_ALIGNMENT: host memory on the CPU backend, device
 * memory otherwise; may be 0. Exact: one byte less is refused. Looks at shapes, types and strides only. Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_quantize_workspace(const cqsa_context *context, const cqsa_fp8_quantize_args *const *args, int64_t count, uint64_t *bytes_out);
/* Prepares a workspace, once, before its first use by cqsa_fp8_quantize(), cqsa_fp8_amax() or cqsa_fp8_gemm(): every call leaves it as it found it. It
 * serves one stream. Queued on stream on a device. Errors: NULL_POINTER, WORKSPACE, DEVICE, RUNTIME. Thread class: const (context), exclusive (workspace).
 * Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_workspace_init(cqsa_context *context, void *workspace, uint64_t bytes, void *stream);

/* amax_out: F32 strided [block rows, block columns] of blocks block[2], the largest |x| of each by nan_policy. x: F32, F16, BF16, 2 or 3 axes. workspace: NULL, or
 * as for cqsa_fp8_quantize_workspace() of args with x, row.block = block and no output. stream and errors: as cqsa_fp8_quantize(). Thread class: const
 * (context), each call with its own workspace. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_amax(cqsa_context *context, const cqsa_tensor *x, const int64_t *block, int32_t nan_policy, const cqsa_tensor *amax_out, void *workspace,
                                   uint64_t workspace_bytes, void *stream);

/* The operands of cqsa_fp8_scale_from_amax(). */
typedef struct cqsa_fp8_scale_args {
  uint32_t struct_size;
  uint32_t flags;               /* CQSA_FP8_POW2 or 0 */
  const cqsa_tensor *amax;      /* F32 strided [block rows, block columns] */
  const cqsa_tensor *scale;     /* output, F32, or NULL */
  const cqsa_tensor *scale_inv; /* output, see scale_layout, or NULL */
  cqsa_dtype format;            /* of the codes */
  int32_t scale_layout;         /* CQSA_FP8_SCALES_* */
  int32_t margin;               /* -64..64 */
  float eps;                    /* amaxes below it count as it; >= 0 */
  float amax_limit;             /* amaxes above it count as it; 0: none */
  float reserved;
} cqsa_fp8_scale_args;
#define CQSA_FP8_SCALE_ARGS_INIT { sizeof(cqsa_fp8_scale_args), 0, 0, 0, 0, 0, 0, 0, 0.0f, 0.0f, 0.0f }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_scale_args_init(cqsa_fp8_scale_args *args, uint64_t size);
/* The scales that belong to amaxes, by the rule above. stream and errors: as cqsa_fp8_quantize(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_scale_from_amax(cqsa_context *context, const cqsa_fp8_scale_args *args, void *stream);

/* Scales [block_rows, block_columns] from one layout or type to another; F32 values that are not powers of two become the next larger one as E8M0. stream and
 * errors: as cqsa_fp8_quantize(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_scale_relayout(cqsa_context *context, const cqsa_tensor *scales, int32_t layout, const cqsa_tensor *scales_out, int32_t layout_out,
                                             int64_t block_rows, int64_t block_columns, void *stream);

/* The operands of cqsa_fp8_dequantize(). */
typedef struct cqsa_fp8_dequantize_args {
  uint32_t struct_size;
  uint32_t flags;               /* none yet */
  const cqsa_tensor *codes;     /* any of the four formats, [rows, cols] or [batch, rows, cols], any strides (transposed codes are such a view) */
  const cqsa_tensor *scale_inv; /* of blocks of codes */
  const cqsa_tensor *groups;    /* as in cqsa_fp8_quantize_args; rows past the last are left as they are */
  const cqsa_tensor *out;       /* output, F32, F16, BF16, shape of codes: f32(code) * scale_inv in f32, then rounded to out's type */
  int64_t block[2];             /* rows and columns of codes that share a scale */
  int32_t scale_layout;         /* CQSA_FP8_SCALES_* */
  int32_t reserved;
} cqsa_fp8_dequantize_args;
#define CQSA_FP8_DEQUANTIZE_ARGS_INIT { sizeof(cqsa_fp8_dequantize_args), 0, 0, 0, 0, 0, { 0, 0 }, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_dequantize_args_init(cqsa_fp8_dequantize_args *args, uint64_t size);
/* Codes back to numbers. stream and errors: as cqsa_fp8_quantize(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_dequantize(cqsa_context *context, const cqsa_fp8_dequantize_args *args, void *stream);

/* out[j, i] = x[i, j] for tensors of one-byte elements of one type, [rows, cols] and [cols, rows]. stream and errors: as
 * cqsa_fp8_quantize(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_transpose(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *out, void *stream);

/* ================================================================================================================
 * 14. FP8: matrix product
 *
 *     d[m, n] = alpha * sum_k a[m, k] * scale_inv_a * b[n, k] * scale_inv_b  +  beta * c[m, n]  +  bias[n]
 *
 * Sums in f32 or better, each the same in every run. Any m, n, k, 0 too (k = 0: beta * c + bias). With a batch, a or b may have batch size 1 or stride 0.
 * ================================================================================================================ */

/* How products are summed up. Hopper's matrix units keep some 14 bits of an FP8 sum. */
enum {
  CQSA_FP8_PROMOTE_128 = 0, /* into f32 at least every 128 of k */
  CQSA_FP8_FAST = 1         /* as the matrix unit does it */
};

/* The operands of cqsa_fp8_gemm(). */
typedef struct cqsa_fp8_gemm_args {
  uint32_t struct_size;
  uint32_t flags;                 /* none yet */
  const cqsa_tensor *a;           /* E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ [m, k] or [batch, m, k], any strides; fastest with k compact */
  const cqsa_tensor *b;           /* likewise [n, k] or [batch, n, k], of its own format */
  const cqsa_tensor *scale_inv_a; /* F32 strided, or NULL for 1: of blocks block_a of a: {0, 0}, {1, 0} (each row), {1, 128}. With a batch three axes,
                                   * the first of size batch or 1; or two, or one scale, for all of the batch */
  const cqsa_tensor *scale_inv_b; /* of blocks block_b of b: {0, 0}, {1, 0} (each n), {1, 128}, {128, 128} */
  int64_t block_a[2];             /* rows and columns of a that share a scale */
  int64_t block_b[2];             /* likewise, of b */
  const cqsa_tensor *c;           /* d's shape, F32, F16, BF16; NULL exactly when beta is 0. May be exactly d */
  const cqsa_tensor *bias;        /* F32, F16, BF16 [n], or NULL */
  const cqsa_tensor *d;           /* output, F32, F16, BF16, or a format: then codes of d * d_scale, saturated */
  const cqsa_tensor *d_scale;     /* F32, one element, for codes, finite and > 0 (a host backend looks); NULL: 1 */
  const cqsa_tensor *d_amax;      /* output, F32, one element: largest |d| before d_scale; or NULL */
  double alpha;                   /* 0 counts as 1: zeroed args mean d = a b^T */
  double beta;                    /* factor of c */
  int32_t accumulate;             /* CQSA_FP8_PROMOTE_128, .. */
  int32_t provider;               /* CQSA_FP8_PROVIDER_*: AUTO, or the only one to use */
  void *workspace;                /* NULL: the library allocates what is needed; else see cqsa_fp8_gemm_workspace() */
  uint64_t workspace_bytes;
} cqsa_fp8_gemm_args;
enum {
  CQSA_FP8_PROVIDER_AUTO = 0,
  CQSA_FP8_PROVIDER_OWN = 1,     /* kernels of this library */
  CQSA_FP8_PROVIDER_VENDOR = 2   /* cuBLASLt, loaded when it is there */
};
#define CQSA_FP8_GEMM_ARGS_INIT \
  { sizeof(cqsa_fp8_gemm_args), 0, 0, 0, 0, 0, { 0, 0 }, { 0, 0 }, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_fp8_gemm_args_init(cqsa_fp8_gemm_args *args, uint64_t size);

/* The product as above. All tensors on the context's device. The first implementation of the backend that takes it runs (cqsa_fp8_gemm_explain());
 * what a backend keeps for a shape (an algorithm of cuBLASLt) it finds at the first call of that shape. stream: on a backend with memory of its own the work is
 * queued, and may be captured when it needs no workspace or was given one; NULL on the CPU backend. Errors: NULL_POINTER, SHAPE (k of a and b, ..), DTYPE, DEVICE,
 * STRIDES, OVERLAP, INVALID_ARGUMENT, UNKNOWN_FLAG, UNSUPPORTED (with a provider asked for), WORKSPACE, OUT_OF_*, CALLBACK, RUNTIME, CAPTURE_UNSAFE. Thread class:
 * const (context), each call with its own workspace. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_gemm(cqsa_context *context, const cqsa_fp8_gemm_args *args, void *stream);
/* Bytes of workspace for it, as cqsa_fp8_quantize_workspace(); cqsa_fp8_workspace_init() prepares it. What is aligned otherwise may go to another implementation,
 * so the addresses of a, b, c and d count too where they are given. Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_gemm_workspace(const cqsa_context *context, const cqsa_fp8_gemm_args *args, uint64_t *bytes_out);
/* Which implementation runs it, and why each earlier one declined: text of several lines, the first "impl=NAME". Errors: as above. Thread class: const.
 * Since 0.1. */
CQSA_API cqsa_status cqsa_fp8_gemm_explain(const cqsa_context *context, const cqsa_fp8_gemm_args *args, char *buffer, uint64_t size, uint64_t *length_out);

/* ================================================================================================================
 * 15. Quantized matrices
 *
 * A row of a quantized matrix is a sequence of blocks of few bytes that stand for 32 to 256 elements each; docs/quant.md has the layout of
 * every format. A value that comes back is computed in f32, each operation rounded to nearest even, in the order of the public reference
 * decoder of the format: the bits are the same on every backend. A scale that is NaN gives NaN. An element that is only moved (F32 to F32, ..)
 * keeps its bits; any other NaN is the positive quiet one without payload.
 * ================================================================================================================ */

/* Formats of blocks. The numbers are ours, and pinned; `ggml` is the type id that a GGUF file has; then bytes and
 * elements of a block. */
typedef int32_t cqsa_quant_format;
enum {
  CQSA_QUANT_NONE = 0,
  CQSA_QUANT_F32 = 1,      /* ggml  0,   4/1 */
  CQSA_QUANT_F16 = 2,      /* ggml  1,   2/1 */
  CQSA_QUANT_BF16 = 3,     /* ggml 30,   2/1 */
  CQSA_QUANT_Q1_0 = 4,     /* ggml 41,  18/128 */
  CQSA_QUANT_Q2_0 = 5,     /* ggml 42,  18/64. Some files have blocks of 34/128 under this id: refused by their length */
  CQSA_QUANT_Q4_0 = 6,     /* ggml  2,  18/32 */
  CQSA_QUANT_Q4_1 = 7,     /* ggml  3,  20/32 */
  CQSA_QUANT_Q5_0 = 8,     /* ggml  6,  22/32 */
  CQSA_QUANT_Q5_1 = 9,     /* ggml  7,  24/32 */
  CQSA_QUANT_Q8_0 = 10,    /* ggml  8,  34/32 */
  CQSA_QUANT_Q2_K = 11,    /* ggml 10,  84/256 */
  CQSA_QUANT_Q3_K = 12,    /* ggml 11, 110/256 */
  CQSA_QUANT_Q4_K = 13,    /* ggml 12, 144/256 */
  CQSA_QUANT_Q5_K = 14,    /* ggml 13, 176/256 */
  CQSA_QUANT_Q6_K = 15,    /* ggml 14, 210/256 */
  CQSA_QUANT_IQ1_S = 16,   /* ggml 19,  50/256 */
  CQSA_QUANT_IQ1_M = 17,   /* ggml 29,  56/256 */
  CQSA_QUANT_IQ2_XXS = 18, /* ggml 16,  66/256 */
  CQSA_QUANT_IQ2_XS = 19,  /* ggml 17,  74/256 */
  CQSA_QUANT_IQ2_S = 20,   /* ggml 22,  82/256 */
  CQSA_QUANT_IQ3_XXS = 21, /* ggml 18,  98/256 */
  CQSA_QUANT_IQ3_S = 22,   /* ggml 21, 110/256 */
  CQSA_QUANT_IQ4_NL = 23,  /* ggml 20,  18/32 */
  CQSA_QUANT_IQ4_XS = 24,  /* ggml 23, 136/256 */
  CQSA_QUANT_TQ1_0 = 25,   /* ggml 34,  54/256 */
  CQSA_QUANT_TQ2_0 = 26,   /* ggml 35,  66/256 */
  CQSA_QUANT_MXFP4 = 27,   /* ggml 39,  17/32 */
  CQSA_QUANT_NVFP4 = 28    /* ggml 40,  36/64 */
};

/* What is known of a format. */
typedef struct cqsa_quant_format_info {
  uint32_t struct_size;
  uint32_t flags;         /* none yet */
  char name[16];          /* "Q4_K" */
  int32_t ggml_type;      /* its id in a GGUF file */
  int32_t block_elements; /* rows are a multiple of this long */
  int32_t block_bytes;    /* bytes of a block */
  int32_t can_quantize;   /* 1: cqsa_quantize_rows() takes it */
} cqsa_quant_format_info;
#define CQSA_QUANT_FORMAT_INFO_INIT { sizeof(cqsa_quant_format_info), 0, "", 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_quant_format_info_init(cqsa_quant_format_info *info, uint64_t size);
/* What a format is. The formats of this version are 1, 2, .. up to the first that is refused. Errors: UNKNOWN_FLAG, NULL_POINTER, STRUCT_SIZE.
 * Thread class: free. Since 0.1. */
CQSA_API cqsa_status cqsa_quant_format_query(cqsa_quant_format format, cqsa_quant_format_info *info_out);

/* A view of a matrix of blocks in the caller's memory. Row i is row_elements / block_elements blocks at data + i * row_bytes. data and
 * row_bytes are even where the bytes of a block are (all but MXFP4); nothing more is wanted of an address. */
typedef struct cqsa_quant_tensor {
  uint32_t struct_size;
  uint32_t flags;           /* none yet */
  cqsa_quant_format format; /* CQSA_QUANT_* */
  int32_t device_type;      /* CQSA_DEVICE_* */
  int32_t device_id;        /* index of the device */
  int32_t reserved;         /* 0 */
  void *data;               /* blocks, row by row */
  int64_t rows;             /* of the matrix */
  int64_t row_elements;     /* a multiple of the format's block_elements */
  uint64_t row_bytes;       /* from one row to the next, at least a row's own; 0: exactly that */
  uint64_t data_bytes;      /* that lie at data: what the rows need, to rows * row_bytes; anything else is refused. 0: not stated */
} cqsa_quant_tensor;
#define CQSA_QUANT_TENSOR_INIT { sizeof(cqsa_quant_tensor), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_quant_tensor_init(cqsa_quant_tensor *tensor, uint64_t size);

/* out[n, :] = the values of row row_ids[n] of w, or of row first_row + n where row_ids is NULL (with ids first_row is 0). out: F32, F16, BF16
 * [n, row_elements], any strides; values are rounded once, from f32. row_ids: I32 or I64 [n], any order, also one several times. An id outside the
 * matrix: refused on the CPU backend; zeros on a backend with memory of its own, where nobody has looked. All on the context's device. stream: on a
 * backend with memory of its own the work is queued, needs no memory and can be captured (section 9); NULL on the CPU backend. Errors: NULL_POINTER,
 * STRUCT_SIZE, SHAPE (a row that is no multiple of the block, bytes that are too few or too many, ..), DTYPE, DEVICE, STRIDES, OVERLAP, INDEX (rows
 * past the end), INVALID_ARGUMENT (an odd address, ..), UNKNOWN_FLAG (no such format, ..), UNSUPPORTED, CALLBACK, RUNTIME.
 * Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_dequantize_rows(cqsa_context *context, const cqsa_quant_tensor *w, int64_t first_row, const cqsa_tensor *row_ids,
                                          const cqsa_tensor *out, void *stream);

/* w = the blocks of x, F32, F16, BF16 [rows, row_elements], any strides. Formats: F32, F16, BF16, and, for each block of x in f32, with m its element
 * of largest magnitude, the first of equals, and f16() as in section 12:
 *
 *   Q8_0    d = |m| / 127   code = round(x * id)
 *   Q4_0    d = m / -8      code = min(15, trunc(x * id + 8.5)), the value is (code - 8) d
 *   Q2_0    d = |m|         code = clamp(round(x * id) + 1, 0, 3), the value is (code - 1) d
 *   IQ4_NL  d = m / -127    code of the value t nearest to x * id, the lower of two; then d = sum x t / sum t^2, in f64 and in order
 *   MXFP4   d = 2^(floor(log2 |m|) - 2), at least 2^-127   code of the value nearest to x, the first of two
 *
 * round() is to nearest, halves away from 0; id = 1 / d, or 0 where that is not finite; f16(d) is kept. A block with a NaN or an infinity gets the
 * scale NaN and the codes of zeros; in MXFP4, which has no NaN, the largest scale and code: all of it comes back as +Inf. Bytes between rows are
 * left as they are. stream and errors: as above; UNSUPPORTED: a format that can be read only. Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_quantize_rows(cqsa_context *context, const cqsa_tensor *x, const cqsa_quant_tensor *w, void *stream);

/* ================================================================================================================
 * 16. GGUF files: quantized matrices in place
 *
 * A file is mapped, and checked as a whole when it is opened: magic, version 2 or 3, little-endian; every count, length and offset against the
 * bytes that are there; names that stand twice; tensors that overlap or end past the file. After that nothing is read but what is asked for. The
 * file must not be cut short while it is open.
 * ================================================================================================================ */

/* An open GGUF file. */
typedef struct cqsa_gguf cqsa_gguf;

/* Opens and maps a file. gguf_out: close it with cqsa_gguf_close(). Errors: NULL_POINTER; IO: it cannot be opened or mapped, or is no valid GGUF
 * file, and the message says where; OUT_OF_HOST_MEMORY. Thread class: free. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_open(const char *path, cqsa_gguf **gguf_out);
/* Unmaps the file: its views, names and texts are gone. NULL is fine. Thread class: exclusive. Since 0.1. */
CQSA_API void cqsa_gguf_close(cqsa_gguf *gguf);

/* A tensor of a GGUF file. */
typedef struct cqsa_gguf_tensor_info {
  uint32_t struct_size;
  uint32_t flags;           /* none yet */
  const char *name;         /* lives as long as the file is open */
  int32_t ggml_type;        /* as in the file */
  cqsa_quant_format format; /* CQSA_QUANT_NONE: a type that this version does not know; bytes is 0 and data NULL */
  int32_t ndim;             /* 1 to 4 */
  int32_t reserved;
  int64_t shape[4];         /* slowest axis first, as everywhere here (the file has them the other way round); 1 past ndim */
  const void *data;         /* compact rows in the mapped file */
  uint64_t bytes;           /* that lie at data */
  uint64_t file_offset;     /* of data in the file */
} cqsa_gguf_tensor_info;
#define CQSA_GGUF_TENSOR_INFO_INIT { sizeof(cqsa_gguf_tensor_info), 0, 0, 0, 0, 0, 0, { 0, 0, 0, 0 }, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_gguf_tensor_info_init(cqsa_gguf_tensor_info *info, uint64_t size);

/* How many tensors a file has; 0 for NULL. Thread class: const. Since 0.1. */
CQSA_API int64_t cqsa_gguf_tensor_count(const cqsa_gguf *gguf);
/* The index of a tensor by its name, "blk.0.ffn_gate_exps.weight". Errors: NULL_POINTER, INDEX: there is none. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_find(const cqsa_gguf *gguf, const char *name, int64_t *index_out);
/* One tensor, in the order of the file. Errors: NULL_POINTER, INDEX, STRUCT_SIZE. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_tensor(const cqsa_gguf *gguf, int64_t index, cqsa_gguf_tensor_info *info_out);
/* One expert of a tensor of three axes [num_experts, rows, row_elements] as a view of the mapped file; of fewer axes: expert 0 is the whole (one
 * axis: one row). Read-only: nothing may be quantized into it. Errors: NULL_POINTER, STRUCT_SIZE, INDEX, SHAPE: more axes, UNSUPPORTED: of an
 * unknown type. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_matrix(const cqsa_gguf *gguf, int64_t index, int64_t expert, cqsa_quant_tensor *matrix_out);

/* How many metadata keys there are, and the index-th, NULL past the end. Thread class: const. Since 0.1. */
CQSA_API int64_t cqsa_gguf_key_count(const cqsa_gguf *gguf);
/* Lives as long as the file is open. Thread class: const. Since 0.1. */
CQSA_API const char *cqsa_gguf_key(const cqsa_gguf *gguf, int64_t index);
/* Value of a key: any integer type and bool; f32, f64 and integers; text. Text may hold zero bytes: length_out counts all. Errors: NULL_POINTER;
 * INDEX: no such key; DTYPE: of another type, or an integer past int64_t. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_integer(const cqsa_gguf *gguf, const char *key, int64_t *value_out);
/* As above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_number(const cqsa_gguf *gguf, const char *key, double *value_out);
/* As above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_gguf_text(const cqsa_gguf *gguf, const char *key, char *buffer, uint64_t size, uint64_t *length_out);

/* ================================================================================================================
 * 17. Mixture of experts: one layer straight from quantized weights
 *
 * Token t goes to the experts e = topk_ids[t, s], s = 0 .. k - 1. With g = w_gate[e] x[t], u = w_up[e] x[t], plus biases where there are:
 *
 *     h    = act(g, u)                              [inter], see CQSA_MOE_SWIGLU, ..
 *     y    = w_down[e] h + b_down[e]                [hidden]
 *     out  = sum_s topk_weights[t, s] * y           in the order of s, in f32; then the shared expert, then rounded to out's type
 *
 * Rules:
 *   - The id -1 contributes nothing. Any other id out of range is refused where the host sees the ids (CPU backend); elsewhere it is skipped
 *     and counted. An expert named twice by a token counts twice. A weight of 0 adds +0, whatever its expert holds.
 *   - An expert without tokens costs nothing and is never read: its data may be NULL.
 *   - A scale that is NaN poisons the tokens of its expert, and no other.
 *   - Weights are used as their formats decode them (section 15). Activations, x and h, are either taken as they are, or rounded once to Q8; what is
 *     summed in between is f32 or int32. See CQSA_MOE_PRECISION_*.
 *   - A call gives the same bits every time. With CQSA_MOE_BATCH_INVARIANT a token's bits do not depend on the other tokens either.
 *   - No tokens: nothing is done. Sizes may pass 2^31 elements.
 * ================================================================================================================ */

/* What becomes of g and u. Gated: */
enum {
  CQSA_MOE_SWIGLU = 0,      /* G = min(g, limit), U = min(max(u, -limit), limit): G * sigmoid(alpha * G) * (U + beta) */
  CQSA_MOE_GEGLU = 1,       /* g * (1 + erf(g / sqrt(2))) / 2 * u */
  CQSA_MOE_GEGLU_TANH = 2,  /* with erf(g / sqrt(2)) as tanh(sqrt(2/pi) * (g + 0.044715 g^3)) */
  /* Not gated: w_gate is absent, and w_up alone gives u. */
  CQSA_MOE_SILU = 3,        /* u * sigmoid(u) */
  CQSA_MOE_GELU = 4,        /* as GEGLU without its last factor */
  CQSA_MOE_GELU_TANH = 5,
  CQSA_MOE_RELU2 = 6        /* max(u, 0)^2 */
};

/* Where the rows of w_gate and w_up are. */
enum {
  CQSA_MOE_SEPARATE = 0,    /* each in its own [inter, hidden] */
  CQSA_MOE_CONCAT = 1,      /* both in w_gate, [2 * inter, hidden]: the rows of gate, then those of up; w_up is NULL. b_gate likewise */
  CQSA_MOE_INTERLEAVED = 2  /* likewise, even rows are gate's, odd rows up's */
};

enum {
  CQSA_MOE_PRECISION_AUTO = 0, /* Q8 */
  /* For weights of blocks: 32 activations become int8 and a scale, code = rint(x * (127 / a)), scale = a / 127, with a their largest magnitude (127 / a not
   * finite: all codes 0; a not finite: those too, and the scale NaN), and are multiplied as integers. The error is that of this rounding, some 1.1e-2 to 1.5e-2 of the result. Weights
   * that are F32, F16 or BF16 are multiplied as by F16. */
  CQSA_MOE_PRECISION_Q8 = 1,
  CQSA_MOE_PRECISION_F16 = 2   /* activations and weights at f16 precision or better, f32 sums */
};

enum {
  CQSA_MOE_COMBINED = 0, /* out [tokens, hidden] */
  CQSA_MOE_PER_SLOT = 1  /* out F32 [tokens * k, hidden]: y of each (t, s), not weighted; zeros where there is none. No shared expert */
};

/* Bits of cqsa_moe_matrix.flags. */
enum { CQSA_MOE_MAPPED = 1 << 0 }; /* host memory that is a mapped file */

/* The matrix of one expert. 64 bytes, frozen for ever, the same on the host and in the memory of a device. */
typedef struct cqsa_moe_matrix {
  const void *data;         /* NULL: not here; all else may be 0 then. Alignment as in section 15 */
  uint64_t data_bytes;      /* that lie at data: what the rows need; anything else is refused. 0: not stated */
  uint64_t row_bytes;       /* from one row to the next; 0: compact */
  const void *scale;        /* NULL: no format of this version has scales that lie apart */
  cqsa_quant_format format; /* CQSA_QUANT_* */
  int32_t device_type;      /* CQSA_DEVICE_* of data; 0: memory of the context's device */
  int32_t device_id;        /* index of the device */
  uint32_t flags;           /* CQSA_MOE_MAPPED */
  int64_t reserved[2];      /* 0 */
} cqsa_moe_matrix;

/* One projection of every expert. Formats may differ from expert to expert and between projections. The matrices are given in one of three ways. */
typedef struct cqsa_moe_weights {
  uint32_t struct_size;
  uint32_t flags;                        /* none yet */
  int64_t num_experts;                   /* 1..4096, the same for all projections */
  int64_t rows;                          /* of an expert */
  int64_t row_elements;                  /* a multiple of the format's block */
  const cqsa_moe_matrix *experts;        /* num_experts of them in host memory, read before the call returns; or NULL */
  const cqsa_moe_matrix *device_experts; /* num_experts of them in memory of the context's device (not on the CPU backend), or NULL. The kernels read them, so
                                          * a graph sees at each replay what has been written there since. Nobody checks them: all have the format all.format,
                                          * data there is NULL or whole */
  cqsa_moe_matrix all;                   /* both NULL: one block of memory with every expert, data_bytes those of all */
  uint64_t expert_bytes;                 /* .. from one expert to the next; 0: rows * row_bytes */
} cqsa_moe_weights;
#define CQSA_MOE_MATRIX_INIT { 0, 0, 0, 0, 0, 0, 0, 0, { 0, 0 } }
#define CQSA_MOE_WEIGHTS_INIT { sizeof(cqsa_moe_weights), 0, 0, 0, 0, 0, 0, CQSA_MOE_MATRIX_INIT, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_weights_init(cqsa_moe_weights *weights, uint64_t size);

/* An expert for every token: out += sigmoid(gate) * y. Activation and layout are those of the others; inter may be another. */
typedef struct cqsa_moe_shared {
  uint32_t struct_size;
  uint32_t flags;                 /* none yet */
  const cqsa_moe_weights *w_gate; /* num_experts 1 */
  const cqsa_moe_weights *w_up;   /* likewise */
  const cqsa_moe_weights *w_down; /* likewise */
  const cqsa_tensor *gate;        /* F32 [hidden]: the gate is its dot product with x[t]; or F32 [tokens, 1]: the gate itself; NULL: the factor is 1 */
} cqsa_moe_shared;
#define CQSA_MOE_SHARED_INIT { sizeof(cqsa_moe_shared), 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_shared_init(cqsa_moe_shared *shared, uint64_t size);

/* Bits of cqsa_moe_args.flags. */
enum { CQSA_MOE_BATCH_INVARIANT = 1 << 0 };

/* The operands of cqsa_moe_prefill(), and what is asked. */
typedef struct cqsa_moe_args {
  uint32_t struct_size;
  uint32_t flags;                  /* CQSA_MOE_BATCH_INVARIANT */
  const cqsa_tensor *x;            /* F32, F16, BF16 [tokens, hidden], any strides, as everywhere here */
  const cqsa_tensor *topk_ids;     /* I32, I64 [tokens, k], k 1..64 */
  const cqsa_tensor *topk_weights; /* F32 [tokens, k]; PER_SLOT: may be NULL, and does not count */
  const cqsa_moe_weights *w_gate;  /* see gate_up_layout; NULL where nothing is gated */
  const cqsa_moe_weights *w_up;    /* NULL where it is in w_gate */
  const cqsa_moe_weights *w_down;  /* [hidden, inter] */
  const cqsa_tensor *b_gate;       /* F32 [num_experts, rows of w_gate], or NULL */
  const cqsa_tensor *b_up;         /* likewise, of w_up */
  const cqsa_tensor *b_down;       /* likewise, of w_down */
  const cqsa_tensor *expert_map;   /* I32 [n]: ids are 0 .. n - 1, and the expert of id i is expert_map[i] of the weights, -1: not here, which contributes
                                    * nothing. For experts that are spread over several machines. NULL: the ids are those of the weights */
  const cqsa_moe_shared *shared;   /* or NULL */
  const cqsa_tensor *out;          /* output, see CQSA_MOE_COMBINED; F32, F16, BF16 */
  const cqsa_tensor *counters;     /* NULL, or I64 [2], to which is added: ids out of range, and ids of experts whose data is NULL; both skipped. A backend
                                    * whose ids the host sees refuses them instead */
  int32_t gate_up_layout;          /* CQSA_MOE_SEPARATE, .. */
  int32_t activation;              /* CQSA_MOE_SWIGLU, .. */
  float alpha;                     /* SWIGLU; 0 counts as 1 */
  float beta;                      /* SWIGLU */
  float limit;                     /* SWIGLU; 0: none */
  int32_t precision;               /* CQSA_MOE_PRECISION_* */
  int32_t output;                  /* CQSA_MOE_COMBINED, .. */
  int32_t reserved;                /* 0 */
  uint64_t max_bytes;              /* most workspace that the library may take, on a device its memory: tokens then go through in pieces. 0: no limit */
  void *workspace;                 /* NULL: the library allocates what is needed; else see cqsa_moe_workspace(). Its contents do not matter */
  uint64_t workspace_bytes;
} cqsa_moe_args;
#define CQSA_MOE_ARGS_INIT \
  { sizeof(cqsa_moe_args), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0f, 0.0f, 0.0f, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_args_init(cqsa_moe_args *args, uint64_t size);

/* The layer as above. All on the context's device; on the CPU backend weights may be in any host memory. stream: on a backend with memory of its own the
 * work is queued (enqueue mode of section 9), and may be captured when it needs no workspace or was given one; NULL on the CPU backend. Errors:
 * NULL_POINTER (also an expert without data that has tokens), STRUCT_SIZE, SHAPE (a row that is no multiple of the block, bytes too few or too many, counts of
 * experts that differ, ..), DTYPE, DEVICE, STRIDES, OVERLAP, INDEX (an id, an entry of expert_map), INVALID_ARGUMENT, UNKNOWN_FLAG (no such format, ..),
 * WORKSPACE, UNSUPPORTED, BUDGET_TOO_SMALL (the message says the least), OUT_OF_*, CALLBACK, RUNTIME, CAPTURE_UNSAFE. Thread class: const (context), each call
 * with its own workspace. Since 0.1. */
CQSA_API cqsa_status cqsa_moe_prefill(cqsa_context *context, const cqsa_moe_args *args, void *stream);
/* Bytes of workspace with which the call above allocates nothing, aligned to CQSA_WORKSPACE_ALIGNMENT: host memory on the CPU backend, device memory
 * otherwise. Exact: one byte less is refused. Looks at shapes, types and formats only, not at data. Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_moe_workspace(const cqsa_context *context, const cqsa_moe_args *args, uint64_t *bytes_out);
/* Which implementation runs it, how the activations of each projection are taken, in how many pieces, and why each earlier implementation declined: text of
 * several lines, the first "impl=NAME". Errors: as above. Thread class: const. Since 0.1. */
CQSA_API cqsa_status cqsa_moe_explain(const cqsa_context *context, const cqsa_moe_args *args, char *buffer, uint64_t size, uint64_t *length_out);

enum {
  CQSA_MOE_SOFTMAX = 0, /* score = softmax of the logits over all experts */
  CQSA_MOE_SIGMOID = 1  /* score = sigmoid(logit) */
};
enum {
  CQSA_MOE_GROUP_MAX = 0, /* a group is as good as its best expert */
  CQSA_MOE_GROUP_TOP2 = 1 /* .. as the sum of its best two */
};
/* Bits of cqsa_moe_route_args.flags. */
enum { CQSA_MOE_RENORMALISE = 1 << 0 }; /* the k weights are divided by their sum (a sum of 0 stays) */

/* Router. Experts are chosen by score + bias, the largest first, of equals the one of the lower id; their weights are the scores, without bias, in f32.
 * With groups, num_experts / num_groups neighbours each, only experts of the topk_groups best groups may be chosen (ties as above). Where neither a bias nor
 * GROUP_TOP2 adds to scores, logits are compared, which rounding has not made equal. A NaN logit is -Inf. */
typedef struct cqsa_moe_route_args {
  uint32_t struct_size;
  uint32_t flags;                  /* CQSA_MOE_RENORMALISE */
  const cqsa_tensor *logits;       /* F32, F16, BF16 [tokens, num_experts] */
  const cqsa_tensor *bias;         /* F32 [num_experts], or NULL */
  const cqsa_tensor *topk_ids;     /* output, I32, I64 [tokens, k], k up to 64 and the experts that may be chosen */
  const cqsa_tensor *topk_weights; /* output, F32 [tokens, k] */
  int32_t scoring;                 /* CQSA_MOE_SOFTMAX, .. */
  int32_t group_score;             /* CQSA_MOE_GROUP_MAX, .. */
  int32_t num_groups;              /* 0: no groups; otherwise it divides num_experts */
  int32_t topk_groups;             /* 1..num_groups; 0 without groups */
  float scale;                     /* a factor for the weights at the end; 0 counts as 1 */
  int32_t reserved;                /* 0 */
} cqsa_moe_route_args;
#define CQSA_MOE_ROUTE_ARGS_INIT { sizeof(cqsa_moe_route_args), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0f, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_route_args_init(cqsa_moe_route_args *args, uint64_t size);
/* The router as above. stream: on a backend with memory of its own the work is queued, needs no memory and can be captured (section 9); NULL on the CPU
 * backend. Errors: as cqsa_moe_prefill(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_moe_route(cqsa_context *context, const cqsa_moe_route_args *args, void *stream);

/* Slots t * k + s in the order of their experts, and within an expert in their own order. */
typedef struct cqsa_moe_group_args {
  uint32_t struct_size;
  uint32_t flags;                /* none yet */
  const cqsa_tensor *topk_ids;   /* I32, I64 [tokens, k] */
  const cqsa_tensor *expert_map; /* as in cqsa_moe_args */
  const cqsa_tensor *offsets;    /* output, I32, I64 [num_experts + 1]: expert e has entries offsets[e] .. offsets[e + 1] of order */
  const cqsa_tensor *order;      /* output, the same type [tokens * k]: slots; -1 past the last */
  const cqsa_tensor *counts;     /* output, the same type [num_experts], or NULL */
  const cqsa_tensor *places;     /* output, the same type [tokens, k]: where a slot is in order, -1: nowhere; or NULL */
  const cqsa_tensor *counters;   /* as in cqsa_moe_args; its second is left as it is */
} cqsa_moe_group_args;
#define CQSA_MOE_GROUP_ARGS_INIT { sizeof(cqsa_moe_group_args), 0, 0, 0, 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_group_args_init(cqsa_moe_group_args *args, uint64_t size);
/* Grouping as above. stream and errors: as cqsa_moe_route(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_moe_group(cqsa_context *context, const cqsa_moe_group_args *args, void *stream);

/* x, F32, F16, BF16 [rows, n], to codes, I8 [rows, n], and scales, F32 [rows, n / 32], as CQSA_MOE_PRECISION_Q8 has it; the same bits on every backend. n is
 * a multiple of 32. stream and errors: as cqsa_moe_route(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_moe_quantize_activations(cqsa_context *context, const cqsa_tensor *x, const cqsa_tensor *codes, const cqsa_tensor *scales, void *stream);

/* out[t] = sum_s topk_weights[t, s] * y[t * k + s], in f32 and in order: what CQSA_MOE_COMBINED makes of PER_SLOT. Where topk_ids is given and below 0, and where
 * the weight is 0, y is not looked at. */
typedef struct cqsa_moe_combine_args {
  uint32_t struct_size;
  uint32_t flags;                  /* none yet */
  const cqsa_tensor *y;            /* F32 [tokens * k, hidden] */
  const cqsa_tensor *topk_weights; /* F32 [tokens, k] */
  const cqsa_tensor *topk_ids;     /* I32, I64 [tokens, k], or NULL */
  const cqsa_tensor *out;          /* output, F32, F16, BF16 [tokens, hidden] */
} cqsa_moe_combine_args;
#define CQSA_MOE_COMBINE_ARGS_INIT { sizeof(cqsa_moe_combine_args), 0, 0, 0, 0, 0 }
/* See cqsa_backend_info_init(). Thread class: free. Since 0.1. */
CQSA_API void cqsa_moe_combine_args_init(cqsa_moe_combine_args *args, uint64_t size);
/* Combines as above. stream and errors: as cqsa_moe_route(). Thread class: const (context). Since 0.1. */
CQSA_API cqsa_status cqsa_moe_combine(cqsa_context *context, const cqsa_moe_combine_args *args, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* CQSA_H */
