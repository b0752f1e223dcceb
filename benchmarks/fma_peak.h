// SPDX-License-Identifier: Apache-2.0
#pragma once

// FLOP/s of fused multiply-adds that one run of `threads` threads reaches with the widest vectors of this CPU, measured for
// about `seconds`. The yardstick of the CPU kernels, taken in the same run as the kernels.
double fma_peak(int threads, double seconds);
const char* fma_peak_isa();
