// SPDX-License-Identifier: Apache-2.0
// The memory of the fake device: addresses that no host code can follow, a limit, and a register of what is alive.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "backends/cqsa_backend.h"
#include "fake_backend.h"

namespace fake {

// Bit 62 makes an address non-canonical on x86-64 and arm64: the host faults when it follows one.
inline constexpr uintptr_t device_bit = uintptr_t{1} << 62;
inline bool is_device(const void* p) { return reinterpret_cast<uintptr_t>(p) & device_bit; }
inline void* to_real(const void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) & ~device_bit); }
inline void* to_device(const void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) | device_bit); }

class memory {
 public:
  // NULL when the limit does not admit it. `counted`: for the core; else for the test itself.
  void* take(uint64_t bytes, bool pinned, bool counted);
  // False when it is not a live allocation of that kind.
  bool give(void* p, bool pinned);
  // Whether [p, p + bytes) lies in one live allocation of that kind.
  bool holds(const void* p, uint64_t bytes, bool pinned);
  // The live allocation on the device that p lies in; bytes 0 when there is none.
  cqsa_pointer_info find(const void* p);
  void limit(uint64_t device, uint64_t pinned);
  void fill(fake_counters& out);
  uint64_t free_bytes();
  uint64_t total_bytes();

 private:
  struct block {
    uint64_t bytes;
    bool counted;
  };
  std::mutex lock_;
  std::map<uintptr_t, block> blocks_[2];  // real addresses: device, pinned
  uint64_t limit_[2] = {uint64_t{1} << 30, uint64_t{1} << 30}, live_[2] = {}, peak_[2] = {}, before_[2] = {};
};

memory& the_memory();

// Thread-local text of the last failure.
cqsa_status fail(cqsa_status status, const std::string& text);
const char* last_error();

// What went wrong while a stream ran; the first one is kept, and every later call reports it.
void report_fault(const std::string& text);
std::string fault();
void clear_fault();

}  // namespace fake
