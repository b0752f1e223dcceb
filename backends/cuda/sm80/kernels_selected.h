// SPDX-License-Identifier: Apache-2.0
// X(name, threads per block, tier): the sm_80 kernels of selected-cell attention.
#pragma once

#define CQSA_SM80_SELECTED_KERNELS(X) \
  X(cqsa_sm80_selected_i8_d64_fast, 128, 80) \
  X(cqsa_sm80_selected_i8_d64_split, 128, 80) \
  X(cqsa_sm80_selected_i8_d128_fast, 128, 80) \
  X(cqsa_sm80_selected_i8_d128_split, 128, 80) \
  X(cqsa_sm80_selected_i8_d256_fast, 128, 80) \
  X(cqsa_sm80_selected_i8_d256_split, 128, 80) \
  X(cqsa_sm80_selected_f16_d64_fast, 128, 80) \
  X(cqsa_sm80_selected_f16_d64_split, 128, 80) \
  X(cqsa_sm80_selected_f16_d128_fast, 128, 80) \
  X(cqsa_sm80_selected_f16_d128_split, 128, 80) \
  X(cqsa_sm80_selected_f16_d256_fast, 128, 80) \
  X(cqsa_sm80_selected_f16_d256_split, 128, 80)
