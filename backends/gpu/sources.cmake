# SPDX-License-Identifier: Apache-2.0
# The portable tier: kernel files, one instantiation each, and the host code that a plugin compiles in.
set(CQSA_GPU_KERNELS
  attention_d64.cu
  attention_d128.cu
  attention_d256.cu
  attention_d512.cu
  attention_tail.cu
  combine.cu
  fp8_decode.cu
  fp8_gemm.cu
  fp8_general.cu
  fp8_group.cu
  fp8_init.cu
  fp8_rings.cu
  fp8_row.cu
  fp8_scale.cu
  fp8_stream.cu
  fp8_stream_many.cu
  fp8_tile_f32.cu
  fp8_tile_half.cu
  fp8_turn.cu
  gather.cu
  hadamard.cu
  kv_append.cu
  kv_append_q4.cu
  kv_gather.cu
  merge.cu
  selected_d64.cu
  selected_d128.cu
  selected_d256.cu
  selected_d512.cu)
set(CQSA_GPU_HOST
  attention_fill.cpp
  attention_leaf.cpp
  combine_leaf.cpp
  fp8_gemm_leaf.cpp
  fp8_leaf.cpp
  fp8_small_leaf.cpp
  gather_leaf.cpp
  kv_leaf.cpp
  merge_leaf.cpp
  selected_leaf.cpp)
list(TRANSFORM CQSA_GPU_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM CQSA_GPU_HOST PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
