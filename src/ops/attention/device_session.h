// SPDX-License-Identifier: Apache-2.0
// The streams, events and memory of one attempt at a device run, and the transfers through staging slots. Everything it
// created is drained and freed by its destructor.
#pragma once
#include "ops/attention/device_gather.h"
#include "ops/attention/device_layout.h"

namespace cqsa {

enum stream_id { stream_in, stream_compute, stream_back, num_streams };

// Record and wait order the streams. Waiting for an event that was never recorded is waiting for nothing.
struct device_event {
  void* handle = nullptr;
  bool recorded = false;
};

class device_session {
 public:
  // info collects peaks, bytes and leaf calls.
  device_session(const cqsa_context& context, cqsa_run_info& info) : context_(context), backend_(*context.backend), info_(info) {}
  ~device_session();
  device_session(const device_session&) = delete;
  device_session& operator=(const device_session&) = delete;

  cqsa_status open();
  // Carves all memory of a run. `workspace` stands in for the device arena when it is not NULL. Pinned staging that the driver
  // refuses is replaced by pageable staging within `limit`.
  cqsa_status allocate(const attention_problem&, const cqsa_attention_impl*, const schedule_choice&, const device_geometry&,
                       void* workspace, const budget& limit);

  device_layout device;
  device_host_layout host;

  cqsa_status record(device_event& event, stream_id stream);
  cqsa_status wait(stream_id stream, const device_event& event);
  cqsa_status sync(stream_id stream);
  // Waits for all streams; the first failure is returned.
  cqsa_status drain();

  // A tile of a host operand -> compact device memory, on stream_in.
  cqsa_status fetch(const host_tile& tile, void* to);
  // A small device array -> host memory, at once.
  cqsa_status read(void* to, const void* from, uint64_t bytes);
  // `lines` lines of compact device memory, on stream_back; take(begin, end, data) gets them in order, slot by slot.
  template <class F>
  cqsa_status collect(const void* from, int64_t lines, int64_t line_bytes, F&& take);
  // Compact device memory -> a tile of a host operand.
  cqsa_status store(const host_tile& tile, const void* from);

  cqsa_status launch(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf);

  const cqsa_context& context() const { return context_; }
  int64_t leaf_calls() const { return info_.tasks; }
  uint64_t device_bytes() const { return device_bytes_; }  // of the arena, allocated or asked for

  // Events of the schedules; which of them are used is theirs to say.
  device_event q_ready[2], q_free[2], window_ready[3], window_free[3], out_ready[3];

 private:
  cqsa_status checked(cqsa_status status, const char* what) const;
  cqsa_status allocate_device(uint64_t bytes, void* workspace);
  cqsa_status allocate_staging(bool pinned, uint64_t host_bytes, const budget& limit);
  cqsa_status allocate_host(const attention_problem&, const device_geometry&);
  // Whether the tile's runs are long enough to be copied one by one, without staging.
  static bool goes_directly(const host_tile& tile);
  cqsa_status copy_directly(const host_tile& tile, char* compact, int32_t direction, stream_id stream, uint64_t& counter);
  cqsa_status copy_piece(const void* from, uint64_t bytes, int slot);
  void count_host(uint64_t bytes);

  const cqsa_context& context_;
  const cqsa_backend_v1& backend_;
  cqsa_run_info& info_;
  void* streams_[num_streams] = {};
  void* device_memory_ = nullptr;  // NULL as well when the workspace is the caller's
  uint64_t device_bytes_ = 0;
  void *pinned_ = nullptr, *pageable_ = nullptr;  // staging, one of them
  uint64_t pageable_bytes_ = 0;
  void* host_memory_ = nullptr;
  uint64_t host_bytes_ = 0;
  staging_layout staging_;
  device_event in_done_[staging_slots], back_done_[staging_slots];
  int next_in_ = 0;
};

template <class F>
cqsa_status device_session::collect(const void* from, int64_t lines, int64_t line_bytes, F&& take) {
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(staging_.back_bytes) / line_bytes);
  // One slot is copied while the host empties the other.
  for (int64_t begin = -step, next = 0; begin < lines; begin = next, next += step) {
    if (next < lines) {
      const int slot = static_cast<int>(next / step % staging_slots);
      const int64_t count = std::min(step, lines - next);
      CQSA_TRY(copy_piece(static_cast<const char*>(from) + next * line_bytes, static_cast<uint64_t>(count * line_bytes), slot));
    }
    if (begin < 0) continue;
    const int slot = static_cast<int>(begin / step % staging_slots);
    CQSA_TRY(checked(backend_.event_sync(context_.device, back_done_[slot].handle), "waiting for a copy from the device"));
    CQSA_TRY(take(begin, std::min(begin + step, lines), staging_.back[slot]));
  }
  return CQSA_OK;
}

}  // namespace cqsa
