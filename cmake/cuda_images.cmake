# SPDX-License-Identifier: Apache-2.0
# cqsa_cuda_images(<variable> KERNEL.cu ..): device code for every architecture of CQSA_CUDA_CODE, one fatbin per kernel file,
# (a tuned one only for its tier), and a source file that embeds them all and defines what backends/cuda/images.h declares; its name goes into <variable>.
#
# Each architecture of each file is a command of its own, so that make and ninja run them side by side. What ptxas says of
# registers and spills stays in ${CMAKE_BINARY_DIR}/cuda/*.log, which tools/ptxas_report.py reads; logs.txt lists those of this build.

# The command that makes one image and the kind that fatbinary wants to hear. kind: elf or ptx.
function(cqsa_cuda_image_command code command_out compiler_out kind_out number_out)
  string(REGEX MATCH "[0-9]+a?" number ${code})
  string(REGEX MATCH "[0-9]+" base ${code})
  set(nvcc ${CQSA_NVCC})
  set(compiler nvcc-${CQSA_NVCC_VERSION})
  if(CQSA_CUDA12_NVCC AND NOT base IN_LIST CQSA_NVCC_ARCHITECTURES)
    set(nvcc ${CQSA_CUDA12_NVCC})
    set(compiler nvcc-${CQSA_CUDA12_NVCC_VERSION})
  endif()
  set(nvcc_flags -std=c++17 -O3 -Xptxas -v ${CQSA_CUDA_FLAGS})
  set(kind elf)
  if(code MATCHES "PTX")
    cqsa_clang_ptx_command(${CQSA_CUDA_CLANG} command)
    set(compiler clang-${CQSA_CUDA_CLANG_VERSION})
    set(kind ptx)
  elseif(code MATCHES "^compute_")
    set(command ${nvcc} -ptx -arch=${code} ${nvcc_flags})
    set(kind ptx)
  else()
    set(command ${nvcc} -cubin -arch=${code} ${nvcc_flags})
  endif()
  set(${command_out} ${command} PARENT_SCOPE)
  set(${compiler_out} ${compiler} PARENT_SCOPE)
  set(${kind_out} ${kind} PARENT_SCOPE)
  set(${number_out} ${number} PARENT_SCOPE)
endfunction()

# The tier of a kernel file, by its folder (0: portable), and for which of CQSA_CUDA_CODE it is compiled: a tuned one for what runs on
# the chips of its tier, and not for later minors where machine code of the first one is there.
function(cqsa_cuda_tier source tier_out code_out)
  set(tier 0)
  set(chosen ${CQSA_CUDA_CODE})
  if(source MATCHES "/sm([0-9]+)/[^/]*$")
    set(tier ${CMAKE_MATCH_1})
    math(EXPR end "${tier} + 5")
    set(chosen)
    set(first FALSE)
    set(sorted ${CQSA_CUDA_CODE})
    list(SORT sorted COMPARE NATURAL)  # the oldest machine code first, whatever order was asked for
    foreach(code IN LISTS sorted)
      string(REGEX MATCH "[0-9]+" number ${code})
      if(tier EQUAL 90)
        if(code MATCHES "^sm_90a$")
          list(APPEND chosen ${code})
        endif()
      elseif(number LESS tier OR (NOT tier EQUAL 80 AND NOT number LESS end))
        continue()
      elseif(number LESS 90 AND tier EQUAL 80 AND code MATCHES "^sm_[0-9]+$")
        if(NOT first)
          list(APPEND chosen ${code})
          set(first TRUE)
        endif()
      else()
        list(APPEND chosen ${code})
      endif()
    endforeach()
  endif()
  set(${tier_out} ${tier} PARENT_SCOPE)
  set(${code_out} ${chosen} PARENT_SCOPE)
endfunction()

function(cqsa_cuda_kernel_fatbin source codes fatbin_out logs_out)
  file(RELATIVE_PATH shown ${PROJECT_SOURCE_DIR} ${source})
  string(REGEX REPLACE "\\.cu$" "" stem ${shown})
  string(REGEX REPLACE "^backends/" "" stem ${stem})
  string(REPLACE "/" "_" stem ${stem})
  set(folder ${CMAKE_BINARY_DIR}/cuda)
  set(images)
  set(logs)
  set(specs)
  foreach(code IN LISTS codes)
    cqsa_cuda_image_command(${code} command compiler kind number)
    string(REGEX REPLACE "[^a-z0-9_]" "" name ${code})  # sm_70(PTX) without its brackets
    set(image ${folder}/${stem}.${name}.${kind})
    set(logged ${CMAKE_COMMAND} "-DHEADER=source ${shown}, code ${code}, compiler ${compiler}")
    set(run -P ${PROJECT_SOURCE_DIR}/cmake/run_logged.cmake --)
    set(gate)
    set(log ${image}.log)
    if(code MATCHES "PTX")
      # Nobody here assembles this PTX before a driver does. The oldest architecture that ptxas knows takes all that .target
      # sm_70 allows, and refuses what is above it.
      list(GET CQSA_NVCC_ARCHITECTURES 0 oldest)
      set(log ${image}.clang.log)
      set(gate COMMAND ${logged} -DLOG=${image}.log ${run} ${CQSA_PTXAS} -arch=sm_${oldest} -O3 -v ${image} -o ${image}.gate)
    endif()
    add_custom_command(OUTPUT ${image}
      COMMAND ${logged} -DLOG=${log} ${run} ${command} -DCQSA_LANES=32 -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include
        -MD -MF ${image}.d ${source} -o ${image}
      ${gate}
      DEPENDS ${source} DEPFILE ${image}.d COMMENT "Device code ${shown} for ${code}" VERBATIM)
    list(APPEND images ${image})
    if(NOT code MATCHES "^compute_")
      get_filename_component(log ${image}.log NAME)
      list(APPEND logs ${log})
    endif()
    list(APPEND specs --image3=kind=${kind},sm=${number},file=${image})
  endforeach()
  set(fatbin ${folder}/${stem}.fatbin)
  add_custom_command(OUTPUT ${fatbin} COMMAND ${CQSA_FATBINARY} --64 --create=${fatbin} ${specs} DEPENDS ${images}
    COMMENT "Device code ${shown}" VERBATIM)
  set(${fatbin_out} ${fatbin} PARENT_SCOPE)
  set(${logs_out} ${logs} PARENT_SCOPE)
endfunction()

function(cqsa_cuda_images out)
  set(blobs)
  set(declared)
  set(rows)
  set(fatbins)
  set(all_logs)
  set(index 0)
  foreach(source IN LISTS ARGN)
    cqsa_cuda_tier(${source} tier codes)
    if(NOT codes)
      continue()
    endif()
    cqsa_cuda_kernel_fatbin(${source} "${codes}" fatbin logs)
    list(JOIN codes " " code)
    list(APPEND fatbins ${fatbin})
    list(APPEND all_logs ${logs})
    get_filename_component(name ${source} NAME_WE)
    string(APPEND blobs "    \".balign 16\\ncqsa_image_${index}: .incbin \\\"${fatbin}\\\"\\ncqsa_image_end_${index}:\\n\"\n")
    string(APPEND declared "extern const char cqsa_image_${index}[] HIDDEN, cqsa_image_end_${index}[] HIDDEN;\n")
    string(APPEND rows "    {\"${name}\", cqsa_image_${index}, uint64_t(cqsa_image_end_${index} - cqsa_image_${index}), ${tier}, \"${code}\"},\n")
    math(EXPR index "${index} + 1")
  endforeach()
  list(JOIN all_logs "\n" text)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/cuda/logs.txt CONTENT "${text}\n")
  list(JOIN CQSA_CUDA_CODE " " code)
  set(file ${CMAKE_BINARY_DIR}/cuda/images.cpp)
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT "// Generated by cmake/cuda_images.cmake.
#include \"backends/cuda/images.h\"
#define HIDDEN __attribute__((visibility(\"hidden\")))
asm(\".pushsection .rodata.cqsa_images,\\\"a\\\",%progbits\\n\"
@blobs@    \".popsection\\n\");
extern \"C\" {
@declared@const cqsa_cuda_image cqsa_cuda_images[] = {
@rows@};
const int cqsa_cuda_num_images = @index@;
const char cqsa_cuda_code_list[] = \"@code@\";
}
")
  set_source_files_properties(${file} PROPERTIES OBJECT_DEPENDS "${fatbins}")
  set(${out} ${file} PARENT_SCOPE)
endfunction()
