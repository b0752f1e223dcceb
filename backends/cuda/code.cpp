// SPDX-License-Identifier: Apache-2.0
#include "code.h"

#include <cinttypes>
#include <cstdio>

#include "error.h"
#include "images.h"

namespace cqsa::cuda {

namespace {

constexpr const char* kernel_names[] = {
#define CQSA_CUDA_KERNEL_NAME(name, threads) #name,
    CQSA_GPU_KERNELS(CQSA_CUDA_KERNEL_NAME)
#undef CQSA_CUDA_KERNEL_NAME
};
static_assert(sizeof kernel_names / sizeof *kernel_names == most_kernels);

// A library of the driver belongs to the process, not to a context: loaded once, it serves every device, also one whose
// context was destroyed and made anew. It stays.
struct process_code {
  std::mutex lock;
  int images;  // loaded so far
  CUkernel kernel[most_kernels];
};
constinit process_code code = {};

cqsa_status load_image(const cqsa_cuda_image& image) {
  CUlibrary library = nullptr;
  char what[160];
  std::snprintf(what, sizeof what, "loading the device code of %.100s", image.name);
  CQSA_CUDA_TRY(check(driver().cuLibraryLoadData(&library, image.data, nullptr, nullptr, 0, nullptr, nullptr, 0), what));
  for (int i = 0; i < most_kernels; ++i)
    if (code.kernel[i] == nullptr && driver().cuLibraryGetKernel(&code.kernel[i], library, kernel_names[i]) != CUDA_SUCCESS)
      code.kernel[i] = nullptr;
  return CQSA_OK;
}

cqsa_status load_images() {
  const std::lock_guard hold(code.lock);
  for (; code.images < cqsa_cuda_num_images; ++code.images) CQSA_CUDA_TRY(load_image(cqsa_cuda_images[code.images]));
  for (int i = 0; i < most_kernels; ++i)
    if (code.kernel[i] == nullptr)
      return fail(CQSA_ERROR_INTERNAL, "the kernel %s is in none of the %d images of device code in this build", kernel_names[i],
                  cqsa_cuda_num_images);
  return CQSA_OK;
}

cqsa_status load_function(device& d, int i) {
  char what[160];
  std::snprintf(what, sizeof what, "loading the kernel %s for sm_%" PRId32, kernel_names[i], d.facts.arch);
  CUfunction& function = d.function[i];
  CQSA_CUDA_TRY(check(driver().cuKernelGetFunction(&function, code.kernel[i]), what));
  if (driver().cuFuncLoad != nullptr) CQSA_CUDA_TRY(check(driver().cuFuncLoad(function), what));
  int fixed = 0;  // also what makes older drivers load it
  CQSA_CUDA_TRY(check(driver().cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), what));
  d.most_shared_bytes[i] = d.facts.shared_bytes - fixed;
  CQSA_CUDA_TRY(check(driver().cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, d.most_shared_bytes[i]), what));
  size_t offset = 0, bytes = 0;
  const bool told = driver().cuFuncGetParamInfo != nullptr && driver().cuFuncGetParamInfo(function, 0, &offset, &bytes) == CUDA_SUCCESS;
  d.params_bytes[i] = told ? bytes : 0;
  return CQSA_OK;
}

}  // namespace

cqsa_status load_code(device& d) {
  CQSA_CUDA_TRY(load_images());
  for (int i = 0; i < most_kernels; ++i) CQSA_CUDA_TRY(load_function(d, i));
  return CQSA_OK;
}

const char* kernel_name(gpu::kernel_id kernel) { return kernel_names[static_cast<int>(kernel)]; }

}  // namespace cqsa::cuda
