/* SPDX-License-Identifier: Apache-2.0
 * Controls of the fake device backend for tests: found with dlsym in libcqsa_fake.so. */
#ifndef CQSA_FAKE_BACKEND_H
#define CQSA_FAKE_BACKEND_H

#include <stdint.h>

typedef struct fake_config {
  uint64_t memory_limit;   /* bytes of device memory; 0: 1 GiB */
  uint64_t pinned_limit;   /* bytes of pinned host memory; 0: 1 GiB, 1: none at all */
  int64_t fail_alloc;      /* this device_alloc from now on (1: the next) fails, 0: none .. */
  int64_t fail_allocs;     /* .. and so do as many in a row; 0: one */
  int64_t fail_launch;     /* the same for leaf launches, with OUT_OF_DEVICE_MEMORY */
  int64_t fail_launches;
  int64_t fail_copy;       /* this copy fails with RUNTIME, 0: none */
  int64_t fail_execution;  /* this leaf fails after its launch was accepted, 0: none */
  uint32_t delay_min_us, delay_max_us; /* before every operation of a stream */
  uint64_t seed;
  int32_t state;           /* CQSA_BACKEND_*, what state() reports */
  int32_t no_stream_memory; /* stream_alloc is UNSUPPORTED */
  int32_t no_work;         /* launches and merges are accepted and do nothing at all: for timing the core */
  /* A timeline instead of results: a leaf computes nothing and lasts leaf_us, a copy lasts as long as its size says. */
  uint32_t leaf_us;        /* 0: leaves are computed */
  uint32_t copy_us_per_mib;
} fake_config;

/* Counted since the last fake_configure(), memory of fake_alloc() left out. */
typedef struct fake_counters {
  uint64_t live_bytes, peak_bytes, pinned_live_bytes, pinned_peak_bytes;
  int64_t live_allocations; /* device and pinned */
  int64_t live_pinned;      /* allocations .. */
  uint64_t pinned_before;   /* .. and bytes of them at the last fake_configure() */
  int64_t live_objects;     /* streams and events */
  uint64_t bytes_in, bytes_out;
  int64_t copies, launches, allocations; /* allocations: of device memory */
  int64_t syncs;            /* of streams and of events, by the host */
  int64_t objects_made;     /* streams and events */
  int64_t stream_allocations, property_queries, pointer_queries, stream_queries;
  int64_t workspaceless;    /* launches with no workspace */
  /* Leaves of leaf_us: how long they lasted together, and how long the device had none between the first and the last of them,
   * of which the part that began after the fourth: the first ones have nothing to hide behind. */
  int64_t leaf_busy_us, leaf_idle_us, leaf_idle_late_us;
  int64_t copiers;          /* threads that ever issued a copy */
  char error[256];          /* first fault that an operation found while it ran, "" without one */
} fake_counters;

#ifdef __cplusplus
extern "C" {
#endif

void fake_configure(const fake_config *config);
void fake_stats(fake_counters *counters_out);
/* Device memory of the caller, outside limits and counts. Addresses crash when the host follows them. */
void *fake_alloc(uint64_t bytes);
void fake_free(void *memory);
/* Pinned host memory of the caller (CQSA_DEVICE_CUDA_HOST), likewise. */
void *fake_pinned_alloc(uint64_t bytes);
void fake_pinned_free(void *memory);
/* Streams of the caller, outside the counts. `device` other than 0: one that the backend cannot use. */
void *fake_stream_create(int32_t device);
void fake_stream_destroy(void *stream);
void fake_stream_sync(void *stream); /* NULL: the default stream */
/* Runs task(data) in stream order, for work of the caller. */
void fake_stream_call(void *stream, void (*task)(void *data), void *data);
/* While a stream is captured nothing on it runs, and whatever would wait or allocate is a fault. */
void fake_capture_begin(void *stream);
void *fake_capture_end(void *stream); /* a graph */
int64_t fake_graph_size(void *graph);
void fake_graph_launch(void *graph, void *stream);
void fake_graph_destroy(void *graph);
/* What pointer_query says of an address from now on: CQSA_POINTER_* of `device`; -1: the truth again. */
void fake_pretend(const void *pointer, int32_t kind, int32_t device);
void fake_write(void *to_device, const void *from, uint64_t bytes);
void fake_read(void *to, const void *from_device, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
