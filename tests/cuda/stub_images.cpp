// SPDX-License-Identifier: Apache-2.0
// Images of device code that no driver would take, for plugins that are only tried on the stand-in for the driver: of every tier, so
// that the plugin offers its tuned leaves.
#include "backends/cuda/images.h"

#define STUB_CODE_LIST "sm_70(PTX) sm_75 sm_80 sm_90a compute_90"

extern "C" {
const cqsa_cuda_image cqsa_cuda_images[] = {{"portable.cu", "portable", 9, 0, STUB_CODE_LIST},
                                            {"sm70.cu", "sm70", 5, 70, "sm_70(PTX)"},
                                            {"sm75.cu", "sm75", 5, 75, "sm_75"},
                                            {"sm80.cu", "sm80", 5, 80, "sm_80 compute_90"}};
const int cqsa_cuda_num_images = 4;
const char cqsa_cuda_code_list[] = STUB_CODE_LIST;
}
