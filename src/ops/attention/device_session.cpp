// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_session.h"

#include <cinttypes>
#include <utility>

#include "ops/attention/mapped_piece.h"

namespace cqsa {

template <class F>
void device_session::for_events(F&& act) {
  for (device_event* list : {q_ready, q_free})
    for (int i = 0; i < 2; ++i) act(list[i]);
  for (device_event* list : {window_free, out_ready})
    for (int i = 0; i < 3; ++i) act(list[i]);
  for (device_event& event : window_ready) act(event);
  for (device_event& event : out_done) act(event);
  for (device_event& event : paced) act(event);
}

device_session::~device_session() {
  // The memory may still be in use by what was queued; a failure of the device changes nothing about freeing it.
  info_.bytes_in += in_.close();
  info_.bytes_out += back_.close();
  bool calm = true;
  for (void* stream : streams_)
    if (stream && backend_.stream_sync(context_.device, stream) != CQSA_OK) calm = false;
  for_events([this](device_event& event) {
    if (event.handle) backend_.event_destroy(context_.device, event.handle);
  });
  for (void* stream : streams_)
    if (stream) backend_.stream_destroy(context_.device, stream);
  if (reading_) backend_.stream_destroy(context_.device, reading_);
  if (device_memory_) backend_.device_free(context_.device, device_memory_);
  if (pinned_ && !(calm && context_.staging.keep(pinned_, pinned_bytes_))) backend_.pinned_free(context_.device, pinned_);
  if (pageable_) host_release(context_, pageable_, pageable_bytes_);
  if (host_memory_) host_release(context_, host_memory_, host_bytes_);
}

cqsa_status device_session::checked(cqsa_status status, const char* what) const {
  if (status == CQSA_OK) return CQSA_OK;
  return fail(status, "%s failed on backend %s: %s", what, backend_.name, backend_.last_error());
}

cqsa_status device_session::open() {
  for (void*& stream : streams_)
    CQSA_TRY(checked(backend_.stream_create(context_.device, &stream), "creating a stream"));
  return CQSA_OK;
}

// ---- memory -------------------------------------------------------------------------------------------------------------------

cqsa_status device_session::allocate(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice,
                                     const device_geometry& g, void* workspace, const budget& limit) {
  fit_kept_staging(limit);
  arena counting;
  device.carve(problem, impl, choice, g, counting);
  CQSA_TRY(allocate_device(counting.used(), workspace));
  arena memory(workspace ? workspace : device_memory_);
  device.carve(problem, impl, choice, g, memory);
  mapped_bytes_ = resident_bytes_of_staging(problem, choice.staging);
  CQSA_TRY(allocate_host(problem, g));
  return allocate_staging(choice.staging, host_bytes_, limit);
}

// What an earlier run left pinned may be more than this one is allowed to have.
void device_session::fit_kept_staging(const budget& limit) {
  uint64_t bytes = 0;
  if (limit.pinned == UINT64_MAX) return;
  void* const kept = context_.staging.take(bytes);
  if (kept && !(bytes <= limit.pinned && context_.staging.keep(kept, bytes))) backend_.pinned_free(context_.device, kept);
}

cqsa_status device_session::allocate_device(uint64_t bytes, void* workspace) {
  device_bytes_ = bytes;
  if (!workspace) {
    cqsa_status status = backend_.device_alloc(context_.device, bytes, &device_memory_);
    // Where device and host share their memory the kept staging may be what is missing.
    if (status != CQSA_OK && give_back_staging(context_)) status = backend_.device_alloc(context_.device, bytes, &device_memory_);
    if (status != CQSA_OK)
      return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", bytes, backend_.name,
                  backend_.last_error());
  }
  info_.peak_device_bytes = std::max(info_.peak_device_bytes, bytes);
  return CQSA_OK;
}

void device_session::count_host(uint64_t bytes) { info_.peak_host_bytes = std::max(info_.peak_host_bytes, bytes + mapped_bytes_); }

cqsa_status device_session::allocate_host(const attention_problem& problem, const device_geometry& g) {
  arena counting;
  host.carve(problem, g, counting);
  host_bytes_ = counting.used();
  host_memory_ = allocate_on_host(host_bytes_);
  if (!host_memory_)
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory failed", host_bytes_);
  count_host(host_bytes_);
  arena memory(host_memory_);
  host.carve(problem, g, memory);
  return CQSA_OK;
}

void* device_session::allocate_on_host(uint64_t bytes) {
  void* const memory = host_allocate(context_, bytes);
  return memory || !give_back_staging(context_) ? memory : host_allocate(context_, bytes);
}

// What an earlier run left, if it is large enough. It counts as far as it is used: the rest is the context's.
cqsa_status device_session::pin(uint64_t bytes) {
  pinned_ = context_.staging.take(pinned_bytes_);
  if (pinned_ && pinned_bytes_ < bytes) backend_.pinned_free(context_.device, std::exchange(pinned_, nullptr));
  if (!pinned_) CQSA_TRY(backend_.pinned_alloc(context_.device, pinned_bytes_ = bytes, &pinned_));
  info_.peak_pinned_bytes = std::max(info_.peak_pinned_bytes, bytes);
  return CQSA_OK;
}

cqsa_status device_session::allocate_staging(const staging_choice& wanted, uint64_t host_bytes, const budget& limit) {
  staging_choice staging = wanted;
  arena counting;
  staging_layout().carve(staging, counting);
  uint64_t bytes = counting.used();
  if (bytes > 0 && staging.pinned) {
    const cqsa_status status = pin(bytes);
    if (status != CQSA_OK) {
      // A small re-plan: the same schedule with pageable staging. More than two slots each way gain nothing there.
      staging.pinned = false;
      staging.in_slots = std::min(staging.in_slots, 2);
      staging.back_slots = std::min(staging.back_slots, 2);
      arena fewer;
      staging_layout().carve(staging, fewer);
      if (fewer.used() > limit.host || host_bytes > limit.host - fewer.used())
        return fail(status, "the allocation of %" PRIu64 " bytes of pinned host memory failed on backend %s (%s), and max_host_bytes "
                    "does not admit pageable memory instead", bytes, backend_.name, backend_.last_error());
      bytes = fewer.used();
      ++info_.retries;
    }
  }
  if (bytes > 0 && !staging.pinned) {
    pageable_bytes_ = bytes;
    pageable_ = allocate_on_host(bytes);
    if (!pageable_) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory for staging failed", bytes);
    count_host(host_bytes + bytes);
  }
  return open_lanes(staging, static_cast<char*>(pinned_ ? pinned_ : pageable_));
}

cqsa_status device_session::open_lanes(const staging_choice& staging, char* memory_begin) {
  arena memory(memory_begin);
  staging_layout layout;
  layout.carve(staging, memory);
  // With one thread for everything the calling thread moves what it comes to need. Pages of mapped operands are counted for each
  // thread, that one included.
  const int threads = context_.num_threads == 1 ? 0 : mapped ? staging.threads - 1 : staging.threads;
  CQSA_TRY(in_.open(streams_[stream_in], {layout.in, staging.in_bytes, layout.in_stride, staging.in_slots, threads}));
  return back_.open(streams_[stream_back], {layout.back, staging.back_bytes, layout.back_stride, staging.back_slots, threads});
}

// ---- order --------------------------------------------------------------------------------------------------------------------

// Events are made at their first use: few runs need them all.
cqsa_status device_session::make(device_event& event) {
  return event.handle ? CQSA_OK : checked(backend_.event_create(context_.device, &event.handle), "creating an event");
}

cqsa_status device_session::wait_behind(int64_t calls, device_event& event) {
  CQSA_TRY(make(event));
  return in_.wait_behind(calls, event.handle);
}

cqsa_status device_session::launched(int64_t calls) { return in_.open_gates(calls); }

cqsa_status device_session::record(device_event& event, stream_id stream) {
  CQSA_TRY(make(event));
  event.recorded = true;
  event.lane = lane_of(stream);
  if (!event.lane) return checked(backend_.event_record(context_.device, event.handle, streams_[stream]), "recording an event");
  CQSA_TRY(event.lane->record(event.handle));
  event.place = event.lane->pushed();
  return CQSA_OK;
}

cqsa_status device_session::wait(stream_id stream, const device_event& event) {
  if (!event.recorded) return CQSA_OK;
  io_lane* const lane = lane_of(stream);
  if (event.lane && event.lane != lane) CQSA_TRY(event.lane->await_issued(event.place));
  if (lane) return lane->wait(event.handle);
  return checked(backend_.stream_wait(context_.device, streams_[stream], event.handle), "ordering two streams");
}

cqsa_status device_session::sync(const device_event& event) {
  if (!event.recorded) return CQSA_OK;
  if (event.lane) CQSA_TRY(event.lane->await_issued(event.place));
  return checked(backend_.event_sync(context_.device, event.handle), "waiting for the device");
}

cqsa_status device_session::drain() {
  cqsa_status first = CQSA_OK;
  for (int stream = 0; stream < num_streams; ++stream) {
    const cqsa_status status = checked(backend_.stream_sync(context_.device, streams_[stream]), "waiting for the device");
    if (first == CQSA_OK) first = status;
  }
  return first;
}

// ---- transfers ------------------------------------------------------------------------------------------------------------------

// Strides may spread one line over more pages than the plan, which does not know them, has allowed a piece.
cqsa_status device_session::find_pages(host_tile& tile, const io_lane& lane) {
  if (!mapped || tile.lines() == 0) return CQSA_OK;
  tile.mapping = mapped->range_of(tile.data);
  if (!tile.mapping.end) return CQSA_OK;
  const uint64_t planned = resident_of_piece(lane.ring().slot_bytes), line = touched_bytes(tile, 0, 1);
  if (line <= planned) return CQSA_OK;
  return fail(CQSA_ERROR_BUDGET_TOO_SMALL, "a row of a mapped operand touches pages of %" PRIu64 " bytes with the strides it has, and the "
              "plan allows %" PRIu64 "; CQSA_MEMORY_HOST does not count pages", line, planned);
}

cqsa_status device_session::fetch(const host_tile& from, int64_t begin, int64_t end, void* to) {
  host_tile tile = from;
  CQSA_TRY(find_pages(tile, in_));
  return in_.copy(tile, begin, end, static_cast<char*>(to) + begin * tile.line_bytes());
}

cqsa_status device_session::store(const host_tile& to, const void* from) {
  host_tile tile = to;
  CQSA_TRY(find_pages(tile, back_));
  return back_.copy(tile, 0, tile.lines(), const_cast<void*>(from));
}

void device_session::abandon_fetches() { info_.bytes_in += in_.close(); }

cqsa_status device_session::read(void* to, const void* from, uint64_t bytes) {
  if (bytes == 0) return CQSA_OK;
  if (!reading_) CQSA_TRY(checked(backend_.stream_create(context_.device, &reading_), "creating a stream"));
  CQSA_TRY(checked(backend_.copy(context_.device, to, from, bytes, CQSA_COPY_TO_HOST, reading_), "a copy from the device"));
  info_.bytes_out += bytes;
  return checked(backend_.stream_sync(context_.device, reading_), "waiting for the device");
}

cqsa_status device_session::launch(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf) {
  const cqsa_status status = impl.launch(context_.device, &leaf, device.leaf, device.leaf_bytes, nullptr, streams_[stream_compute]);
  if (status != CQSA_OK) return checked(status, impl.name);
  ++info_.tasks;
  return CQSA_OK;
}

}  // namespace cqsa
