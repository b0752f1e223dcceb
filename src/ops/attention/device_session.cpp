// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_session.h"

#include <cinttypes>

namespace cqsa {

device_session::~device_session() {
  // The memory may still be in use by what was queued; a failure of the device changes nothing about freeing it.
  for (void* stream : streams_)
    if (stream) backend_.stream_sync(context_.device, stream);
  for (device_event* list : {q_ready, q_free, in_done_, back_done_})
    for (int i = 0; i < 2; ++i)
      if (list[i].handle) backend_.event_destroy(context_.device, list[i].handle);
  for (device_event* list : {window_ready, window_free, out_ready})
    for (int i = 0; i < 3; ++i)
      if (list[i].handle) backend_.event_destroy(context_.device, list[i].handle);
  for (void* stream : streams_)
    if (stream) backend_.stream_destroy(context_.device, stream);
  if (device_memory_) backend_.device_free(context_.device, device_memory_);
  if (pinned_) backend_.pinned_free(context_.device, pinned_);
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
  const auto create = [&](device_event* list, int count) -> cqsa_status {
    for (int i = 0; i < count; ++i)
      CQSA_TRY(checked(backend_.event_create(context_.device, &list[i].handle), "creating an event"));
    return CQSA_OK;
  };
  for (device_event* list : {q_ready, q_free, in_done_, back_done_}) CQSA_TRY(create(list, 2));
  for (device_event* list : {window_ready, window_free, out_ready}) CQSA_TRY(create(list, 3));
  return CQSA_OK;
}

// ---- memory -------------------------------------------------------------------------------------------------------------------

cqsa_status device_session::allocate(const attention_problem& problem, const cqsa_attention_impl* impl, const schedule_choice& choice,
                                     const device_geometry& g, void* workspace, const budget& limit) {
  arena counting;
  device.carve(problem, impl, choice, g, counting);
  CQSA_TRY(allocate_device(counting.used(), workspace));
  arena memory(workspace ? workspace : device_memory_);
  device.carve(problem, impl, choice, g, memory);
  CQSA_TRY(allocate_host(problem, g));
  return allocate_staging(choice.staging_pinned, host_bytes_, limit);
}

cqsa_status device_session::allocate_device(uint64_t bytes, void* workspace) {
  device_bytes_ = bytes;
  if (!workspace) {
    const cqsa_status status = backend_.device_alloc(context_.device, bytes, &device_memory_);
    if (status != CQSA_OK)
      return fail(status, "the allocation of %" PRIu64 " bytes of device memory failed on backend %s: %s", bytes, backend_.name,
                  backend_.last_error());
  }
  info_.peak_device_bytes = std::max(info_.peak_device_bytes, bytes);
  return CQSA_OK;
}

void device_session::count_host(uint64_t bytes) { info_.peak_host_bytes = std::max(info_.peak_host_bytes, bytes); }

cqsa_status device_session::allocate_host(const attention_problem& problem, const device_geometry& g) {
  arena counting;
  host.carve(problem, g, counting);
  host_bytes_ = counting.used();
  host_memory_ = host_allocate(context_, host_bytes_);
  if (!host_memory_)
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory failed", host_bytes_);
  count_host(host_bytes_);
  arena memory(host_memory_);
  host.carve(problem, g, memory);
  return CQSA_OK;
}

cqsa_status device_session::allocate_staging(bool pinned, uint64_t host_bytes, const budget& limit) {
  arena counting;
  staging_.carve(device, counting);
  const uint64_t bytes = counting.used();
  if (bytes == 0) return CQSA_OK;
  if (pinned) {
    const cqsa_status status = backend_.pinned_alloc(context_.device, bytes, &pinned_);
    const bool pageable_fits = bytes <= limit.host && host_bytes <= limit.host - bytes;
    if (status != CQSA_OK && !pageable_fits)
      return fail(status, "the allocation of %" PRIu64 " bytes of pinned host memory failed on backend %s (%s), and max_host_bytes "
                  "does not admit as many of pageable memory instead", bytes, backend_.name, backend_.last_error());
    if (status != CQSA_OK) ++info_.retries;  // a small re-plan: the same schedule with pageable staging
  }
  if (pinned_) {
    info_.peak_pinned_bytes = std::max(info_.peak_pinned_bytes, bytes);
  } else {
    pageable_bytes_ = bytes;
    pageable_ = host_allocate(context_, bytes);
    if (!pageable_) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRIu64 " bytes of host memory for staging failed", bytes);
    count_host(host_bytes + bytes);
  }
  arena memory(pinned_ ? pinned_ : pageable_);
  staging_.carve(device, memory);
  return CQSA_OK;
}

// ---- order --------------------------------------------------------------------------------------------------------------------

cqsa_status device_session::record(device_event& event, stream_id stream) {
  event.recorded = true;
  return checked(backend_.event_record(context_.device, event.handle, streams_[stream]), "recording an event");
}

cqsa_status device_session::wait(stream_id stream, const device_event& event) {
  if (!event.recorded) return CQSA_OK;
  return checked(backend_.stream_wait(context_.device, streams_[stream], event.handle), "ordering two streams");
}

cqsa_status device_session::sync(stream_id stream) {
  return checked(backend_.stream_sync(context_.device, streams_[stream]), "waiting for the device");
}

cqsa_status device_session::drain() {
  cqsa_status first = CQSA_OK;
  for (int stream = 0; stream < num_streams; ++stream) {
    const cqsa_status status = sync(static_cast<stream_id>(stream));
    if (first == CQSA_OK) first = status;
  }
  return first;
}

// ---- transfers ------------------------------------------------------------------------------------------------------------------

bool device_session::goes_directly(const host_tile& tile) {
  constexpr int64_t shortest = 64 << 10;  // below it the cost of a copy call exceeds that of a pass through the cache
  return tile.pinned && contiguous_lines(tile, 0).lines * tile.line_bytes() >= shortest;
}

// Rows that hidden pages leave out stay as they are: no rectangle names them.
cqsa_status device_session::copy_directly(const host_tile& tile, char* compact, int32_t direction, stream_id stream, uint64_t& counter) {
  const int64_t lines = tile.lines(), line_bytes = tile.line_bytes();
  for (int64_t line = 0; line < lines;) {
    const line_run run = contiguous_lines(tile, line);
    const uint64_t bytes = static_cast<uint64_t>(run.lines * line_bytes);
    char* at = compact + line * line_bytes;
    const bool in = direction == CQSA_COPY_TO_DEVICE;
    line += run.lines;
    if (!run.data) continue;
    CQSA_TRY(checked(backend_.copy(context_.device, in ? at : run.data, in ? run.data : at, bytes, direction, streams_[stream]),
                     in ? "a copy to the device" : "a copy from the device"));
    counter += bytes;
  }
  return CQSA_OK;
}

cqsa_status device_session::fetch(const host_tile& tile, void* to) {
  const int64_t lines = tile.lines(), line_bytes = tile.line_bytes();
  if (lines == 0 || line_bytes == 0) return CQSA_OK;
  if (goes_directly(tile)) return copy_directly(tile, static_cast<char*>(to), CQSA_COPY_TO_DEVICE, stream_in, info_.bytes_in);
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(staging_.in_bytes) / line_bytes);
  for (int64_t begin = 0; begin < lines; begin += step) {
    const int slot = next_in_;
    next_in_ = (next_in_ + 1) % staging_slots;
    device_event& done = in_done_[slot];
    if (done.recorded) CQSA_TRY(checked(backend_.event_sync(context_.device, done.handle), "waiting for a copy to the device"));
    const int64_t end = std::min(begin + step, lines);
    const uint64_t bytes = static_cast<uint64_t>((end - begin) * line_bytes);
    CQSA_TRY(gather_lines(context_, tile, begin, end, staging_.in[slot]));
    CQSA_TRY(checked(backend_.copy(context_.device, static_cast<char*>(to) + begin * line_bytes, staging_.in[slot], bytes,
                                   CQSA_COPY_TO_DEVICE, streams_[stream_in]),
                     "a copy to the device"));
    CQSA_TRY(record(done, stream_in));
    info_.bytes_in += bytes;
  }
  return CQSA_OK;
}

cqsa_status device_session::copy_piece(const void* from, uint64_t bytes, int slot) {
  CQSA_TRY(checked(backend_.copy(context_.device, staging_.back[slot], from, bytes, CQSA_COPY_TO_HOST, streams_[stream_back]),
                   "a copy from the device"));
  info_.bytes_out += bytes;
  return record(back_done_[slot], stream_back);
}

cqsa_status device_session::store(const host_tile& tile, const void* from) {
  if (tile.lines() > 0 && goes_directly(tile)) {
    char* compact = const_cast<char*>(static_cast<const char*>(from));
    CQSA_TRY(copy_directly(tile, compact, CQSA_COPY_TO_HOST, stream_back, info_.bytes_out));
    return sync(stream_back);
  }
  return collect(from, tile.lines(), tile.line_bytes(), [&](int64_t begin, int64_t end, const char* data) {
    return scatter_lines(context_, tile, begin, end, data);
  });
}

cqsa_status device_session::read(void* to, const void* from, uint64_t bytes) {
  if (bytes == 0) return CQSA_OK;
  CQSA_TRY(checked(backend_.copy(context_.device, to, from, bytes, CQSA_COPY_TO_HOST, streams_[stream_back]), "a copy from the device"));
  info_.bytes_out += bytes;
  return sync(stream_back);
}

cqsa_status device_session::launch(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf) {
  const cqsa_status status = impl.launch(context_.device, &leaf, device.leaf, device.leaf_bytes, nullptr, streams_[stream_compute]);
  if (status != CQSA_OK) return checked(status, impl.name);
  ++info_.tasks;
  return CQSA_OK;
}

}  // namespace cqsa
