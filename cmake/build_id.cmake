# SPDX-License-Identifier: Apache-2.0
# The build id that core and plugins must share, and the JSON that cqsa_build_info() returns, in a generated header.
set(CQSA_GENERATED_DIR ${CMAKE_BINARY_DIR}/generated)

set(CQSA_GIT_ID "unknown")
find_package(Git QUIET)
if(GIT_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${PROJECT_SOURCE_DIR} describe --always --dirty --abbrev=12
    OUTPUT_VARIABLE git_id OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE git_status)
  if(git_status EQUAL 0)
    set(CQSA_GIT_ID ${git_id})
  endif()
endif()

# The interface between core and plugin is these two headers; their hash makes a stale plugin visible between commits too.
file(SHA256 ${PROJECT_SOURCE_DIR}/include/cqsa.h public_hash)
file(SHA256 ${PROJECT_SOURCE_DIR}/backends/cqsa_backend.h backend_hash)
string(SHA256 interface_hash "${public_hash}${backend_hash}")
string(SUBSTRING ${interface_hash} 0 12 interface_hash)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/include/cqsa.h ${PROJECT_SOURCE_DIR}/backends/cqsa_backend.h)
set(CQSA_BUILD_ID "${PROJECT_VERSION}-${CQSA_GIT_ID}-${interface_hash}")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(cpu_targets "[\\\"amx\\\",\\\"avx512_bf16\\\",\\\"avx512\\\",\\\"avx2\\\",\\\"baseline\\\",\\\"reference\\\"]")
else()
  set(cpu_targets "[\\\"baseline\\\",\\\"reference\\\"]")
endif()
set(cuda_targets)
if(CQSA_HAVE_CUDA)
  list(JOIN CQSA_CUDA_CODE "\\\",\\\"" cuda_targets)
  set(cuda_targets "\\\"${cuda_targets}\\\"")
endif()
string(CONCAT CQSA_BUILD_INFO_JSON
  "{\\\"version\\\":\\\"${PROJECT_VERSION}\\\",\\\"abi\\\":0,\\\"git\\\":\\\"${CQSA_GIT_ID}\\\",\\\"build_id\\\":\\\"${CQSA_BUILD_ID}\\\","
  "\\\"compiler\\\":\\\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\\\",\\\"build_type\\\":\\\"${CMAKE_BUILD_TYPE}\\\","
  "\\\"sanitize\\\":\\\"${CQSA_SANITIZE}\\\",\\\"cpu\\\":${cpu_targets},\\\"cuda\\\":[${cuda_targets}],\\\"hip\\\":[]}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/cqsa_build_id.h.in ${CQSA_GENERATED_DIR}/cqsa_build_id.h @ONLY)
