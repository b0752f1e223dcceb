# SPDX-License-Identifier: Apache-2.0
# The portable tier: kernel files (one instantiation each) and the host code that a plugin compiles in.
file(GLOB CQSA_GPU_KERNELS CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
file(GLOB CQSA_GPU_HOST CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cpp)
