// SPDX-License-Identifier: Apache-2.0
// What the tests of enqueue mode share.
#pragma once
#include "device_problem.h"

namespace device_test {

struct device_memory {
  void* data;
  uint64_t bytes;
  explicit device_memory(uint64_t size) : data(fake().alloc(size)), bytes(size) {}
  ~device_memory() { fake().free(data); }
};

struct own_plan {
  cqsa_plan* handle = nullptr;
  uint64_t workspace = 0;
  own_plan(cqsa_context* context, const cqsa_attention_params& p) {
    const cqsa_status status = cqsa_attention_plan_create(context, &p, &handle);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    REQUIRE(cqsa_workspace_query(handle, &workspace) == CQSA_OK);
  }
  ~own_plan() { cqsa_plan_destroy(handle); }
};

inline spec on_device(spec s = {}) {
  s.q_device = s.kv_device = s.out_device = true;
  return s;
}

inline void clear_outputs(operands& o) {
  for (array* a : {&o.out, &o.lse})
    if (a->there()) a->fill(0xFF), a->upload_again();
}

}  // namespace device_test
