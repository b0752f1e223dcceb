// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>

#include "ops/attention/plan.h"

namespace cqsa {

cqsa_status describe_plan(const cqsa_plan&, cqsa_plan_info& info);
cqsa_status plan_line(const cqsa_plan&, const cqsa_run_info* run, std::string& out);
cqsa_status plan_json(const cqsa_plan&, std::string& out);
cqsa_status explain_plan(const cqsa_plan&, std::string& out);

// Whether the implementation must be able to begin and end with a state.
bool needs_state(const attention_problem&, const hardware_model&);

// The text rule of cqsa.h section 1.
cqsa_status copy_text(const std::string& text, char* buffer, uint64_t size, uint64_t* length_out);

}  // namespace cqsa
