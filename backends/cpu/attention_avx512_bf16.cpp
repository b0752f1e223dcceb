// SPDX-License-Identifier: Apache-2.0
// The attention kernels for products of bf16 by AVX-512 BF16; CMakeLists.txt gives this file its flags.
#define HWY_COMPILE_ONLY_STATIC
#define CQSA_PAIRS
#include "unit-inl.h"

namespace cqsa::cpu {

const kernel_target target_avx512_bf16 = {HWY_NAMESPACE::lanes,     HWY_NAMESPACE::block_rows, products::pairs, 512,
                                          HWY_NAMESPACE::run_unit,  HWY_NAMESPACE::exp_array,  HWY_NAMESPACE::tanh_array};

}  // namespace cqsa::cpu
