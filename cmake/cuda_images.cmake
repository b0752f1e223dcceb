# SPDX-License-Identifier: Apache-2.0
# cqsa_cuda_images(<variable> KERNEL.cu ..): device code for every architecture of CQSA_CUDA_CODE, one fatbin per kernel file,
# (a tuned one only for its tier), and a source file that embeds them all and defines what backends/cuda/images.h declares; its name goes into <variable>.
#
# Each image, and each PTX that images share, is a command of its own, so that make and ninja run them side by side. What ptxas says of
# registers and spills stays in ${CMAKE_BINARY_DIR}/cuda/*.log, which tools/ptxas_report.py reads; logs.txt lists those of this build.

# The compiler for one of CQSA_CUDA_CODE, as a command without its output, and its name and release.
function(cqsa_cuda_compiler code command_out name_out)
  string(REGEX MATCH "[0-9]+" base ${code})
  if(code MATCHES "PTX")
    cqsa_clang_ptx_command(${CQSA_CUDA_CLANG} command)
    set(name clang-${CQSA_CUDA_CLANG_VERSION})
  elseif(CQSA_CUDA12_NVCC AND NOT base IN_LIST CQSA_NVCC_ARCHITECTURES)
    set(command ${CQSA_CUDA12_NVCC})
    set(name nvcc-${CQSA_CUDA12_NVCC_VERSION})
  else()
    set(command ${CQSA_NVCC})
    set(name nvcc-${CQSA_NVCC_VERSION})
  endif()
  set(${command_out} ${command} PARENT_SCOPE)
  set(${name_out} ${name} PARENT_SCOPE)
endfunction()

# The PTX that the machine code for `code` is made of. The front end is half of an image's time, so since sm_80 chips share it: those
# of one major number the PTX of the oldest of them in `codes`, but sm_89, which can more; and sm_90a that of compute_90, unless the kernel is
# one for sm_90a.
function(cqsa_cuda_ptx_of code codes tier out)
  string(REGEX MATCH "[0-9]+" number ${code})
  set(ptx ${number})
  string(REGEX REPLACE "[0-9]$" "" major ${number})
  if(code MATCHES "a$")
    if(tier EQUAL number)
      string(APPEND ptx a)
    endif()
  elseif(number GREATER_EQUAL 80 AND NOT number EQUAL 89)
    set(same ${codes})
    list(FILTER same INCLUDE REGEX "^sm_${major}[0-9]$")
    list(SORT same COMPARE NATURAL)
    list(GET same 0 oldest)
    string(REGEX MATCH "[0-9]+" ptx ${oldest})
  endif()
  set(${out} compute_${ptx} PARENT_SCOPE)
endfunction()

# The tier of a kernel file, by its folder (0: portable), and for which of CQSA_CUDA_CODE it is compiled: a tuned one for what runs on
# the chips of its tier, and not for later minors where machine code of the first one is there. So are portable ones, which came out the
# same for all of them; but sm_89 has the conversions of FP8.
function(cqsa_cuda_tier source tier_out code_out)
  set(tier 0)
  set(chosen ${CQSA_CUDA_CODE})
  if("sm_80" IN_LIST chosen)
    if(source MATCHES "/fp8_[^/]*$")
      list(FILTER chosen EXCLUDE REGEX "^sm_8[6-8]$")
    else()
      list(FILTER chosen EXCLUDE REGEX "^sm_8[6-9]$")
    endif()
  endif()
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

# What is the same for every command of one kernel file, in the function that makes them.
macro(cqsa_cuda_file_names source)
  file(RELATIVE_PATH shown ${PROJECT_SOURCE_DIR} ${source})
  string(REGEX REPLACE "\\.cu$" "" stem ${shown})
  string(REGEX REPLACE "^backends/" "" stem ${stem})
  string(REPLACE "/" "_" stem ${stem})
  set(stem ${CMAKE_BINARY_DIR}/cuda/${stem})
  set(defines -DCQSA_LANES=32 -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/include)
  set(logged ${CMAKE_COMMAND})
  set(run -P ${PROJECT_SOURCE_DIR}/cmake/run_logged.cmake --)
endmacro()

# PTX by nvcc. What it depends on is written by the preprocessor in passing; nvcc's own -MD would run another one for it. By relative
# names, since nvcc does not quote what it passes on.
function(cqsa_cuda_add_ptx source code)
  cqsa_cuda_file_names(${source})
  set(ptx ${stem}.${code}.ptx)
  file(RELATIVE_PATH relative ${CMAKE_CURRENT_BINARY_DIR} ${ptx})
  cqsa_cuda_compiler(${code} compiler name)
  add_custom_command(OUTPUT ${ptx}
    COMMAND ${logged} "-DHEADER=source ${shown}, code ${code}, compiler ${name}" -DLOG=${ptx}.log ${run}
      ${compiler} -ptx -arch=${code} -std=c++17 -O3 ${CQSA_CUDA_FLAGS} ${defines} -Xcompiler -MD,-MF,${relative}.d,-MT,${relative} ${source} -o ${ptx}
    DEPENDS ${source} DEPFILE ${ptx}.d COMMENT "Device code ${shown} for ${code}" VERBATIM)
endfunction()

# Machine code of PTX.
function(cqsa_cuda_add_elf source code ptx_code)
  cqsa_cuda_file_names(${source})
  set(elf ${stem}.${code}.elf)
  cqsa_cuda_compiler(${code} compiler name)
  add_custom_command(OUTPUT ${elf}
    COMMAND ${logged} "-DHEADER=source ${shown}, code ${code}, compiler ${name}" -DLOG=${elf}.log ${run}
      ${compiler} -cubin -arch=${code} -Xptxas -v ${CQSA_CUDA_FLAGS} ${stem}.${ptx_code}.ptx -o ${elf}
    DEPENDS ${stem}.${ptx_code}.ptx COMMENT "Device code ${shown} for ${code}" VERBATIM)
endfunction()

# PTX by clang, for a chip that no nvcc here knows. Nobody here assembles it before a driver does. The oldest architecture that ptxas
# knows takes all that .target sm_70 allows, and refuses what is above it.
function(cqsa_cuda_add_clang_ptx source code ptx)
  cqsa_cuda_file_names(${source})
  cqsa_cuda_compiler(${code} compiler name)
  list(APPEND logged "-DHEADER=source ${shown}, code ${code}, compiler ${name}")
  list(GET CQSA_NVCC_ARCHITECTURES 0 oldest)
  add_custom_command(OUTPUT ${ptx}
    COMMAND ${logged} -DLOG=${ptx}.clang.log ${run} ${compiler} ${defines} -MD -MF ${ptx}.d ${source} -o ${ptx}
    COMMAND ${logged} -DLOG=${ptx}.log ${run} ${CQSA_PTXAS} -arch=sm_${oldest} -O3 -v ${ptx} -o ${ptx}.gate
    DEPENDS ${source} DEPFILE ${ptx}.d COMMENT "Device code ${shown} for ${code}" VERBATIM)
endfunction()

function(cqsa_cuda_kernel_fatbin source codes tier fatbin_out logs_out)
  cqsa_cuda_file_names(${source})
  set(images)
  set(logs)
  set(specs)
  set(ptx_codes)
  foreach(code IN LISTS codes)
    string(REGEX MATCH "[0-9]+a?" number ${code})
    set(kind ptx)
    set(image ${stem}.${code}.ptx)
    if(code MATCHES "PTX")
      set(image ${stem}.sm_${number}.ptx)
      cqsa_cuda_add_clang_ptx(${source} ${code} ${image})
    elseif(code MATCHES "^compute_")
      list(APPEND ptx_codes ${code})
    else()
      set(kind elf)
      set(image ${stem}.${code}.elf)
      cqsa_cuda_ptx_of(${code} "${codes}" ${tier} ptx_code)
      list(APPEND ptx_codes ${ptx_code})
      cqsa_cuda_add_elf(${source} ${code} ${ptx_code})
    endif()
    if(NOT code MATCHES "^compute_")
      get_filename_component(log ${image}.log NAME)
      list(APPEND logs ${log})
    endif()
    list(APPEND images ${image})
    list(APPEND specs --image3=kind=${kind},sm=${number},file=${image})
  endforeach()
  list(REMOVE_DUPLICATES ptx_codes)
  foreach(code IN LISTS ptx_codes)
    cqsa_cuda_add_ptx(${source} ${code})
  endforeach()
  add_custom_command(OUTPUT ${stem}.fatbin COMMAND ${CQSA_FATBINARY} --64 --create=${stem}.fatbin ${specs} DEPENDS ${images}
    COMMENT "Device code ${shown}" VERBATIM)
  set(${fatbin_out} ${stem}.fatbin PARENT_SCOPE)
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
    cqsa_cuda_kernel_fatbin(${source} "${codes}" ${tier} fatbin logs)
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
