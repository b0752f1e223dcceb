# SPDX-License-Identifier: Apache-2.0
# check_portable_hip: the portable GPU kernels as HIP device code, for a chip of 64 lanes and for one of 32. There is no HIP
# backend yet, and no AMD chip here: this keeps the one source compilable by both vendors' compilers.
#
# Debian's packages (clang-19, lld-19, rocm-device-libs, libamdhip64-dev), or a ROCm installation whose clang++ and library
# folder CQSA_HIP_CLANG and CQSA_HIP_DEVICE_LIBS name. Debian's device libraries are of ROCm 5.2 and lack the
# version constants of newer chips and code objects; they are laid beside links to the others in the build tree.
set(CQSA_CHECK_PORTABLE_HIP AUTO CACHE STRING "Compile the portable kernels for AMD chips: AUTO (when there is a compiler), ON, OFF")
set_property(CACHE CQSA_CHECK_PORTABLE_HIP PROPERTY STRINGS AUTO ON OFF)
set(CQSA_HIP_CHIPS "gfx90a:64;gfx1100:32" CACHE STRING "Chips and their lanes for check_portable_hip")

find_program(CQSA_HIP_CLANG clang++-19 PATHS /usr/lib/llvm-19/bin)
find_path(CQSA_HIP_DEVICE_LIBS ocml.bc PATH_SUFFIXES amdgcn/bitcode PATHS /usr/lib/${CMAKE_LIBRARY_ARCHITECTURE} /opt/rocm)
find_path(CQSA_HIP_INCLUDE hip/hip_runtime.h PATHS /opt/rocm/include)
mark_as_advanced(CQSA_HIP_CLANG CQSA_HIP_DEVICE_LIBS CQSA_HIP_INCLUDE)

function(cqsa_hip_device_constant folder name symbol value)
  if(NOT EXISTS ${folder}/${name}.bc)
    file(WRITE ${folder}/${name}.ll "target triple = \"amdgcn-amd-amdhsa\"\n@${symbol} = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 ${value}, align 4\n")
    execute_process(COMMAND ${CQSA_HIP_CLANG} --target=amdgcn-amd-amdhsa -nogpulib -x ir -emit-llvm -c ${folder}/${name}.ll -o ${folder}/${name}.bc
      COMMAND_ERROR_IS_FATAL ANY)
  endif()
endfunction()

function(cqsa_hip_device_libs out)
  set(folder ${CMAKE_BINARY_DIR}/hip/bitcode)
  file(MAKE_DIRECTORY ${folder})
  file(GLOB libraries ${CQSA_HIP_DEVICE_LIBS}/*.bc)
  foreach(library IN LISTS libraries)
    get_filename_component(name ${library} NAME)
    file(CREATE_LINK ${library} ${folder}/${name} SYMBOLIC)
  endforeach()
  cqsa_hip_device_constant(${folder} oclc_isa_version_1100 __oclc_ISA_version 11000)
  cqsa_hip_device_constant(${folder} oclc_abi_version_500 __oclc_ABI_version 500)
  set(${out} ${folder} PARENT_SCOPE)
endfunction()

# check_portable_hip(KERNEL.cu ..)
function(cqsa_check_portable_hip)
  if(NOT CQSA_CHECK_PORTABLE_HIP OR NOT ARGN OR (CQSA_SANITIZE AND CQSA_CHECK_PORTABLE_HIP STREQUAL "AUTO"))
    return()
  elseif(NOT CQSA_HIP_CLANG OR NOT CQSA_HIP_DEVICE_LIBS OR NOT CQSA_HIP_INCLUDE)
    set(missing "clang++-19, AMD's device libraries or HIP's headers are missing (tools/setup.sh gpu)")
    if(CQSA_CHECK_PORTABLE_HIP STREQUAL "AUTO")
      message(STATUS "check_portable_hip is left out: ${missing}")
      return()
    endif()
    message(FATAL_ERROR "CQSA_CHECK_PORTABLE_HIP is ON, but ${missing}")
  endif()
  cqsa_hip_device_libs(device_libs)
  get_filename_component(rocm ${CQSA_HIP_INCLUDE} DIRECTORY)
  set(objects)
  set(list)
  foreach(source IN LISTS ARGN)
    get_filename_component(name ${source} NAME_WE)
    file(RELATIVE_PATH shown ${PROJECT_SOURCE_DIR} ${source})
    foreach(chip_and_lanes IN LISTS CQSA_HIP_CHIPS)
      string(REPLACE ":" ";" pair ${chip_and_lanes})
      list(GET pair 0 chip)
      list(GET pair 1 lanes)
      set(object ${CMAKE_BINARY_DIR}/hip/${name}.${chip}.co)
      # The remarks of the resource analysis say where they are only with line tables.
      add_custom_command(OUTPUT ${object}
        COMMAND ${CMAKE_COMMAND} "-DHEADER=source ${shown}, code ${chip}, lanes ${lanes}" -DLOG=${object}.log
          -P ${PROJECT_SOURCE_DIR}/cmake/run_logged.cmake --
          ${CQSA_HIP_CLANG} -x hip --offload-arch=${chip} --cuda-device-only --no-gpu-bundle-output -mcode-object-version=5 -O3 -std=c++17
          -gline-tables-only -Rpass-analysis=kernel-resource-usage -D__HIP_PLATFORM_AMD__ -DCQSA_LANES=${lanes}
          -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include --rocm-path=${rocm} --rocm-device-lib-path=${device_libs}
          -MD -MF ${object}.d -c ${source} -o ${object}
        DEPENDS ${source} DEPFILE ${object}.d COMMENT "HIP device code ${shown} for ${chip}" VERBATIM)
      list(APPEND objects ${object})
      string(APPEND list "${name}.${chip}.co\n")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/hip/objects.txt CONTENT "${list}")
  add_custom_target(check_portable_hip ALL DEPENDS ${objects})
endfunction()
