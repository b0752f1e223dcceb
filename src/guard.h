// SPDX-License-Identifier: Apache-2.0
// The wall between C++ and C: no exception crosses it.
#pragma once
#include <exception>
#include <new>

#include "error.h"

namespace cqsa {

template <class F>
cqsa_status guard(F&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "out of host memory for the library's own bookkeeping");
  } catch (const std::exception& error) {
    return fail(CQSA_ERROR_INTERNAL, "internal error: %s", error.what());
  } catch (...) {
    return fail(CQSA_ERROR_INTERNAL, "internal error of unknown kind");
  }
}

}  // namespace cqsa
