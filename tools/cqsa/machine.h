// SPDX-License-Identifier: Apache-2.0
// Where and when something was measured.
#pragma once
#include <string>

#include <nlohmann/json.hpp>

#include "cqsa.h"

namespace tool {

std::string cpu_name();  // "AMD EPYC 9R45", "" where the system does not tell
int core_count();        // that this process may use
std::string utc_time();  // "2026-11-30T10:50:27Z"

// Date, machine, library and backend: the first record of every set of results.
nlohmann::ordered_json machine_json(const cqsa_context* context);
std::string machine_text(const cqsa_context* context);

}  // namespace tool
