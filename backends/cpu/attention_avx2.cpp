// SPDX-License-Identifier: Apache-2.0
// The attention kernels for one instruction set; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#include "unit-inl.h"

namespace cqsa::cpu {

const kernel_target target_avx2 = {HWY_NAMESPACE::lanes,    HWY_NAMESPACE::block_rows, products::f32, 128,
                                   HWY_NAMESPACE::run_unit, HWY_NAMESPACE::exp_array,  HWY_NAMESPACE::tanh_array};

}  // namespace cqsa::cpu
