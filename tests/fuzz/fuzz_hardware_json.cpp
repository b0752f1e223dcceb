// SPDX-License-Identifier: Apache-2.0
// Machines from anywhere: a plan for one of a few problems is refused with a sentence, or can be described in every way.
#include <cstdlib>
#include <cstring>
#include <string>

#include "cqsa.h"

namespace {

cqsa_attention_params problem_of(uint8_t kind) {
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  p.batch = 1 + kind % 2;
  p.num_heads = 8;
  p.num_kv_heads = 2;
  p.head_dim = p.head_dim_v = kind & 2 ? 128 : 64;
  p.seqlen_q = p.seqlen_k = kind & 4 ? 1 << 20 : 1000;
  p.dtype_q = p.dtype_kv = p.dtype_out = kind & 8 ? CQSA_DTYPE_F16 : CQSA_DTYPE_F32;
  p.causal = kind & 16 ? CQSA_CAUSAL_BOTTOM_RIGHT : CQSA_CAUSAL_NONE;
  if (kind & 32) p.max_device_bytes = p.max_host_bytes = p.max_pinned_bytes = uint64_t{1} << 26;
  if (kind & 64) p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_DEVICE;
  return p;
}

void describe(const cqsa_plan* plan) {
  char text[2048];
  uint64_t length = 0;
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  if (cqsa_plan_describe(plan, &info) != CQSA_OK) std::abort();
  if (!(info.seconds >= 0)) std::abort();
  if (cqsa_plan_line(plan, nullptr, text, sizeof text, &length) != CQSA_OK) std::abort();
  if (cqsa_plan_json(plan, text, sizeof text, &length) != CQSA_OK) std::abort();
  if (cqsa_plan_explain(plan, text, sizeof text, &length) != CQSA_OK) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const cqsa_attention_params params = problem_of(data[0]);
  const std::string json(reinterpret_cast<const char*>(data) + 1, size - 1);
  cqsa_plan* plan = nullptr;
  const cqsa_status status = cqsa_attention_plan_create_for(json.c_str(), &params, &plan);
  if (status == CQSA_ERROR_INTERNAL || (status != CQSA_OK) != (plan == nullptr)) std::abort();
  if (status != CQSA_OK && *cqsa_last_error() == '\0') std::abort();
  if (plan) describe(plan);
  cqsa_plan_destroy(plan);
  return 0;
}
