// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cqsa::cuda {

// Whether one of the architectures of a list as in images.h runs on a device of this one (10 * major + minor). Machine code
// runs within its major version on its own and later minors, that of an "a" on its own only, that of an "f" as without it;
// PTX runs on its own and everything later. Words that are none of these count for nothing.
bool list_has_code(const char* list, int arch);

}  // namespace cqsa::cuda
