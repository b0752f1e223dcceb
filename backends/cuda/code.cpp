// SPDX-License-Identifier: Apache-2.0
#include "code.h"

#include <cinttypes>
#include <cstdio>

#include "code_list.h"
#include "error.h"
#include "images.h"

namespace cqsa::cuda {

namespace {

constexpr const char* kernel_names[] = {
#define CQSA_CUDA_KERNEL_NAME(name, threads, tier) #name,
    CQSA_ALL_KERNELS(CQSA_CUDA_KERNEL_NAME)
#undef CQSA_CUDA_KERNEL_NAME
};
static_assert(sizeof kernel_names / sizeof *kernel_names == most_kernels);
constexpr int32_t kernel_tiers[] = {
#define CQSA_CUDA_KERNEL_TIER(name, threads, tier) tier,
    CQSA_ALL_KERNELS(CQSA_CUDA_KERNEL_TIER)
#undef CQSA_CUDA_KERNEL_TIER
};
constexpr int most_images = most_kernels;  // a file has at least one kernel

// A library of the driver belongs to the process, not to a context: loaded once, it serves every device, also one whose
// context was destroyed and made anew. It stays.
struct process_code {
  std::mutex lock;
  bool loaded[most_images];
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

// Whether the kernels of this tier are what the device is to use.
bool is_used(int32_t tier, const gpu::device_facts& facts) { return tier <= facts.tier && gpu::tier_is_for(tier, facts.arch); }

cqsa_status load_images(const gpu::device_facts& facts) {
  const std::lock_guard hold(code.lock);
  for (int i = 0; i < cqsa_cuda_num_images; ++i) {
    if (code.loaded[i] || !is_used(cqsa_cuda_images[i].tier, facts)) continue;
    CQSA_CUDA_TRY(load_image(cqsa_cuda_images[i]));
    code.loaded[i] = true;
  }
  for (int i = 0; i < most_kernels; ++i)
    if (code.kernel[i] == nullptr && is_used(kernel_tiers[i], facts))
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

int32_t best_tier(int32_t arch) {
  int32_t best = 0;
  for (int i = 0; i < cqsa_cuda_num_images; ++i) {
    const cqsa_cuda_image& image = cqsa_cuda_images[i];
    if (image.tier > best && gpu::tier_is_for(image.tier, arch) && list_has_code(image.code, arch)) best = image.tier;
  }
  return best;
}

cqsa_status load_code(device& d) {
  if (cqsa_cuda_num_images > most_images) return fail(CQSA_ERROR_INTERNAL, "this build has %d images of device code", cqsa_cuda_num_images);
  CQSA_CUDA_TRY(load_images(d.facts));
  for (int i = 0; i < most_kernels; ++i)
    if (is_used(kernel_tiers[i], d.facts)) CQSA_CUDA_TRY(load_function(d, i));
  return CQSA_OK;
}

const char* kernel_name(gpu::kernel_id kernel) { return kernel_names[static_cast<int>(kernel)]; }

}  // namespace cqsa::cuda
