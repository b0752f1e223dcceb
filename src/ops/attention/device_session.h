// SPDX-License-Identifier: Apache-2.0
// The streams, events and memory of one attempt at a device run, and its transfers. Everything it created is drained and freed
// by its destructor.
#pragma once
#include "ops/attention/device_layout.h"
#include "ops/attention/host_mapped.h"
#include "ops/attention/io_lane.h"

namespace cqsa {

// What is done on stream_in and stream_back waits its turn in a lane; the compute stream gets it at once.
enum stream_id { stream_in, stream_compute, stream_back, num_streams };

// Record and wait order the streams. Waiting for an event that was never recorded is waiting for nothing.
struct device_event {
  void* handle = nullptr;
  bool recorded = false;
  io_lane* lane = nullptr;  // in which the record is number `place`; nullptr: it was made at once
  int64_t place = 0;
};

class device_session {
 public:
  // info collects peaks, bytes and leaf calls.
  device_session(const cqsa_context& context, cqsa_run_info& info)
      : context_(context), backend_(*context.backend), info_(info), in_(context, io_lane::direction::to_device),
        back_(context, io_lane::direction::to_host) {}
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
  // Where operands in mapped files lie; nullptr: there are none. Their pages go behind each transfer.
  const mapped_pages* mapped = nullptr;

  cqsa_status record(device_event& event, stream_id stream);
  // Where a lane records the event, the calling thread first waits until that is in the stream.
  cqsa_status wait(stream_id stream, const device_event& event);
  // The lane of stream_in waits for a record of the compute stream that is made when `calls` steps are launched.
  cqsa_status wait_behind(int64_t calls, device_event& event);
  cqsa_status launched(int64_t calls);
  bool may_fetch(int64_t entries) { return in_.has_room(entries); }
  cqsa_status sync(const device_event& event);  // the host waits
  // Waits for all streams; the first failure is returned. What the lanes have not issued is theirs.
  cqsa_status drain();

  // A tile of a host operand -> compact device memory, in the lane of stream_in: returns before anything has moved.
  cqsa_status fetch(const host_tile& tile, void* to) { return fetch(tile, 0, tile.lines(), to); }
  cqsa_status fetch(const host_tile& tile, int64_t begin, int64_t end, void* to);
  // Compact device memory -> a tile of a host operand, in the lane of stream_back, likewise.
  cqsa_status store(const host_tile& tile, const void* from);
  // The place in the lane behind what was stored so far, and waiting until it is all in the host's memory. What is stored before
  // the place must end with a record on stream_back.
  int64_t stored() const { return back_.pushed(); }
  cqsa_status await_stored(int64_t place) { return back_.await_done(place); }
  // Gives up what was fetched and is not yet in the stream.
  void abandon_fetches();

  // A small device array -> host memory, at once.
  cqsa_status read(void* to, const void* from, uint64_t bytes);
  // `lines` lines of compact device memory, on stream_back; take(begin, end, data) gets them in order, slot by slot. Nothing is
  // being stored meanwhile.
  template <class F>
  cqsa_status collect(const void* from, int64_t lines, int64_t line_bytes, F&& take);

  cqsa_status launch(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf);

  const cqsa_context& context() const { return context_; }
  int64_t leaf_calls() const { return info_.tasks; }
  uint64_t device_bytes() const { return device_bytes_; }  // of the arena, allocated or asked for

  // Events of the schedules; which of them are used is theirs to say.
  static constexpr int out_events = 4;  // more than there are slots: the host may look at an older one
  static constexpr int fetched_events = 8;  // of windows that came and are not yet read
  device_event q_ready[2], q_free[2], window_ready[fetched_events], window_free[3], out_ready[3], out_done[out_events];
  static constexpr int paced_events = 16;
  device_event paced[paced_events];  // of the last leaf calls, for a host that must not run too far ahead

 private:
  cqsa_status checked(cqsa_status status, const char* what) const;
  cqsa_status make(device_event& event);
  cqsa_status allocate_device(uint64_t bytes, void* workspace);
  void* allocate_on_host(uint64_t bytes);
  void fit_kept_staging(const budget& limit);
  cqsa_status pin(uint64_t bytes);
  cqsa_status allocate_staging(const staging_choice& staging, uint64_t host_bytes, const budget& limit);
  cqsa_status find_pages(host_tile& tile, const io_lane& lane);
  cqsa_status open_lanes(const staging_choice& staging, char* memory);
  cqsa_status allocate_host(const attention_problem&, const device_geometry&);
  io_lane* lane_of(stream_id stream) { return stream == stream_in ? &in_ : stream == stream_back ? &back_ : nullptr; }
  template <class F>
  void for_events(F&& act);
  void count_host(uint64_t bytes);

  const cqsa_context& context_;
  const cqsa_backend_v1& backend_;
  cqsa_run_info& info_;
  void* streams_[num_streams] = {};
  void* device_memory_ = nullptr;  // NULL as well when the workspace is the caller's
  uint64_t device_bytes_ = 0;
  void *pinned_ = nullptr, *pageable_ = nullptr;  // staging, one of them
  uint64_t pinned_bytes_ = 0, pageable_bytes_ = 0;
  void* host_memory_ = nullptr;
  uint64_t host_bytes_ = 0;
  uint64_t mapped_bytes_ = 0;  // pages of mapped operands that may be resident
  void* reading_ = nullptr;  // a stream for read(), made when it is needed: stream_back may have much to do
  io_lane in_, back_;
};

template <class F>
cqsa_status device_session::collect(const void* from, int64_t lines, int64_t line_bytes, F&& take) {
  const int slots = back_.ring().num_slots;
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(back_.ring().slot_bytes) / line_bytes);
  const auto slot_of = [&](int64_t line) { return static_cast<int>(line / step % slots); };
  // The slots ahead are being copied while the host empties one.
  for (int64_t begin = 0, next = 0; begin < lines; begin += step) {
    for (; next < lines && next < begin + slots * step; next += step)
      CQSA_TRY(back_.copy_to_slot(slot_of(next), static_cast<const char*>(from) + next * line_bytes,
                                  static_cast<uint64_t>(std::min(step, lines - next) * line_bytes)));
    CQSA_TRY(back_.sync_slot(slot_of(begin)));
    CQSA_TRY(take(begin, std::min(begin + step, lines), back_.slot_memory(slot_of(begin))));
  }
  return CQSA_OK;
}

}  // namespace cqsa
