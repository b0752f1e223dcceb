// SPDX-License-Identifier: Apache-2.0
// The attention kernels for products of bf16 by AMX; CMakeLists.txt gives this file its flags. The tests compile it a second
// time with a model of the tile instructions.
#define HWY_COMPILE_ONLY_STATIC
#define CQSA_PAIRS
#define CQSA_TILES
#include "unit-inl.h"

namespace cqsa::cpu {

#if defined(CQSA_TILE_MODEL)
extern const kernel_target target_amx_model;
const kernel_target target_amx_model
#else
const kernel_target target_amx
#endif
    = {HWY_NAMESPACE::lanes,    HWY_NAMESPACE::block_rows, products::tiles, 512,
       HWY_NAMESPACE::run_unit, HWY_NAMESPACE::exp_array,  HWY_NAMESPACE::tanh_array};

#if defined(CQSA_TILE_MODEL)
bool model_tiles_released();
bool model_tiles_released() { return !HWY_NAMESPACE::tiles.configured; }  // of this thread
#endif

}  // namespace cqsa::cpu
