// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 without a GPU: the functions that the CUDA backend and its tests use, over host memory. What it is, the
// environment says when it is loaded:
//   FAKE_CUDA_DEVICES     compute capabilities, "90,75" (the default); "" for none
//   FAKE_CUDA_VERSION     13000 by default
//   FAKE_CUDA_INIT        what cuInit returns, 0 by default
//   FAKE_CUDA_MEMORY      bytes of each device and of pinned memory, 1 GiB by default
//   FAKE_CUDA_UNITS       multiprocessors of each device, 20 by default
//   FAKE_CUDA_NO_POOLS    1: no memory in stream order
//   FAKE_CUDA_LOAD        what cuLibraryLoadData returns, 0 by default
//   FAKE_CUDA_NO_KERNEL   the name of a kernel that no image has
// It is strict where the real driver is, or may be: a call without a current context, or with a stream, an event or a function of
// another context, is refused; work in a stream runs as late as it may; device memory cannot be touched by the host.
#pragma once

#include <stdint.h>

typedef struct fake_launch {
  char kernel[64];
  unsigned grid[3], threads, shared_bytes;
  void* stream;
  int captured;
  unsigned char params[64];  // the first bytes
} fake_launch;

typedef struct fake_counts {
  int64_t launches, pushes, pops, contexts, streams, events, libraries, device_bytes, pinned_bytes;
  int64_t calls_without_context;  // refused for want of one, or of the right one
  int64_t most_device_bytes;      // at any time
  int64_t broken_captures;        // a capture that a call from outside invalidated
} fake_counts;

#ifdef __cplusplus
extern "C" {
#endif
void fake_cuda_counts(fake_counts* out);
void fake_cuda_last_launch(fake_launch* out);
// The n-th call from now of an allocating function (device, pinned, stream order) fails; 0: none.
void fake_cuda_fail_allocation(int64_t n);
// With NULL: the names of all calls are kept from now on. Otherwise: writes them, a space behind each, and keeps no more.
void fake_cuda_note_calls(char* out, uint64_t size);
#ifdef __cplusplus
}
#endif
