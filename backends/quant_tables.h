// SPDX-License-Identifier: Apache-2.0
// The codebooks of 16 entries, apart from the grids so that kernels without those do not carry them. The first is of ggml, as said in
// quant_codebooks.h; the second that of the OCP Microscaling Formats specification.
#pragma once

#include <stdint.h>

// A table that the code which includes this can index: one in device memory for kernels.
#if defined(__CUDACC__) || defined(__HIP__)
#define CQSA_CODEBOOK(type, name, count) static __device__ constexpr type name[count]
#else
#define CQSA_CODEBOOK(type, name, count) static constexpr type name[count]
#endif

namespace cqsa::quant {

// IQ4_NL and IQ4_XS.
CQSA_CODEBOOK(int8_t, iq4_values, 16) = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// MXFP4 and NVFP4: e2m1, doubled so that they are integers.
CQSA_CODEBOOK(int8_t, e2m1_values, 16) = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace cqsa::quant
