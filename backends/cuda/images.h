// SPDX-License-Identifier: Apache-2.0
// The device code inside libcqsa_cuda.so, as the build embeds it (backends/cuda/CMakeLists.txt generates the definitions).
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One file of kernels for every architecture of the build that is of its tier: a fatbin (or a cubin, or PTX text that ends with a NUL), aligned to 16.
typedef struct cqsa_cuda_image {
  const char* name;  // of the source file, for messages
  const void* data;
  uint64_t bytes;
  int32_t tier;      // as in cqsa_chip; 0: portable
  const char* code;  // the architectures it has code for, in the form of cqsa_cuda_code_list
} cqsa_cuda_image;

// Hidden, so that the linker resolves them inside the plugin and its only export stays the entry point.
#define CQSA_CUDA_IMAGES_HIDDEN __attribute__((visibility("hidden")))

extern CQSA_CUDA_IMAGES_HIDDEN const cqsa_cuda_image cqsa_cuda_images[];
extern CQSA_CUDA_IMAGES_HIDDEN const int cqsa_cuda_num_images;

// The architectures that every portable image has code for, separated by spaces. sm_XY is machine code: it runs on devices of the same
// major number and at least this minor one; with an "a" on this very architecture only. sm_XY(PTX) and compute_XY are PTX,
// which the driver compiles for any device from XY on: "sm_70(PTX) sm_75 sm_80 sm_86 sm_89 sm_90a compute_90".
extern CQSA_CUDA_IMAGES_HIDDEN const char cqsa_cuda_code_list[];

#ifdef __cplusplus
}
#endif
