// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/io_lane.h"

#include <algorithm>
#include <cstdio>

#include "ops/attention/mapped_piece.h"
#include "thread_pool.h"

namespace cqsa {
namespace {

constexpr uint64_t worth_a_thread = uint64_t{512} << 10;  // pushed bytes for which one more thread is started
constexpr uint64_t worth_waking = uint64_t{128} << 10;    // below it the caller moves them when it comes to need them

}  // namespace

io_lane::io_lane(const cqsa_context& context, direction way) : context_(context), backend_(*context.backend), way_(way) {}

cqsa_status io_lane::checked(cqsa_status status, const char* what) const {
  if (status == CQSA_OK) return CQSA_OK;
  return fail(status, "%s failed on backend %s: %s", what, backend_.name, backend_.last_error());
}

cqsa_status io_lane::open(void* stream, const io_ring& ring) {
  stream_ = stream;
  ring_ = ring;
  for (int i = 0; i < ring_.num_slots; ++i)
    CQSA_TRY(checked(backend_.event_create(context_.device, &slots_[i].event), "creating an event"));
  return CQSA_OK;
}

uint64_t io_lane::close() {
  {
    const hold lock(lock_);
    stop_ = true;
    work_.notify_all();
  }
  for (; started_ > 0; --started_) pthread_join(threads_[started_ - 1], nullptr);
  for (slot& s : slots_) {
    // A copy that was issued still uses the slot; a failure of the device changes nothing about freeing it.
    if (s.event && s.used) backend_.event_sync(context_.device, s.event);
    if (s.event) backend_.event_destroy(context_.device, s.event);
    s.event = nullptr;
  }
  const uint64_t bytes = bytes_;
  bytes_ = 0;
  return bytes;
}

// ---- the caller's side ------------------------------------------------------------------------------------------------------------

cqsa_status io_lane::copy(const host_tile& tile, int64_t begin, int64_t end, void* device) {
  if (begin >= end || tile.line_bytes() == 0) return CQSA_OK;
  entry e;
  e.direct = goes_directly(tile);
  e.tile = tile;
  e.begin = e.claimed = e.issued = begin;
  e.end = end;
  e.left = e.direct ? 0 : end - begin;
  e.device = static_cast<char*>(device);
  return push(e);
}

cqsa_status io_lane::wait(void* event) {
  entry e;
  e.what = kind::wait;
  e.event = event;
  return push(e);
}

cqsa_status io_lane::wait_behind(int64_t gate, void* event) {
  entry e;
  e.what = kind::wait;
  e.event = event;
  e.gate = gate;
  return push(e);
}

cqsa_status io_lane::open_gates(int64_t up_to) {
  hold lock(lock_);
  gates_ = up_to;
  pump(lock);
  return failure();
}

bool io_lane::has_room(int64_t count) {
  const hold lock(lock_);
  return pushed_ - (inward() ? issued_ : done_) + count <= capacity;
}

cqsa_status io_lane::record(void* event) {
  entry e;
  e.what = kind::record;
  e.event = event;
  return push(e);
}

cqsa_status io_lane::push(const entry& e) {
  hold lock(lock_);
  CQSA_TRY(make_room(lock));
  at(pushed_++) = e;
  if (e.left) {
    waiting_bytes_ += static_cast<uint64_t>(e.left * e.tile.line_bytes());
    start_threads();
    if (idle_ && waiting_bytes_ >= worth_waking) work_.notify_all();
  }
  pump(lock);
  return failure();
}

cqsa_status io_lane::make_room(hold& lock) {
  const int64_t oldest = inward() ? issued_ : done_;
  if (pushed_ - oldest < capacity) return failure();
  lock.unlock();
  const cqsa_status status = inward() ? await_issued(oldest + 1) : await_done(oldest + 1);
  lock.lock();
  return status;
}

void io_lane::start_threads() {
  const int most = std::min({ring_.num_threads, most_io_threads, ring_.num_slots});
  while (started_ < most && static_cast<uint64_t>(started_ + 1) * worth_a_thread <= waiting_bytes_) {
    if (!start_quiet_thread(threads_[started_], thread_main, this)) return;  // fewer do it as well
    ++started_;
  }
}

cqsa_status io_lane::await_issued(int64_t count) {
  hold lock(lock_);
  for (;;) {
    pump(lock);
    if (failed_ != CQSA_OK) return failure();
    if (issued_ >= count) return CQSA_OK;
    if (slot* mine = claim(count))
      work(*mine, lock);
    else
      moved_.wait(lock);
  }
}

cqsa_status io_lane::await_done(int64_t count) {
  CQSA_TRY(await_issued(count));
  hold lock(lock_);
  while (done_ < count) {
    if (failed_ != CQSA_OK) return failure();
    entry& e = at(done_);
    if (e.left) {
      if (slot* mine = claim(count))
        work(*mine, lock);
      else
        moved_.wait(lock);
      continue;
    }
    if (e.what == kind::record) {
      lock.unlock();
      const cqsa_status status = checked(backend_.event_sync(context_.device, e.event), "waiting for a copy from the device");
      lock.lock();
      if (status != CQSA_OK) return status;
    }
    ++done_;
  }
  return CQSA_OK;
}

cqsa_status io_lane::failure() const { return failed_ == CQSA_OK ? CQSA_OK : fail(failed_, "%s", reason_); }

// Under the lock, by the thread that has the sentence.
void io_lane::fail_with(cqsa_status status) {
  if (failed_ != CQSA_OK) return;
  failed_ = status;
  std::snprintf(reason_, sizeof reason_, "%s", last_error_text());
  work_.notify_all();
  moved_.notify_all();
}

// ---- the threads ------------------------------------------------------------------------------------------------------------------

void* io_lane::thread_main(void* self) {
  pthread_setname_np(pthread_self(), "cqsa-io");
  static_cast<io_lane*>(self)->serve();
  return nullptr;
}

void io_lane::serve() {
  hold lock(lock_);
  while (!stop_ && failed_ == CQSA_OK) {
    if (slot* mine = claim(INT64_MAX)) {
      work(*mine, lock);
      continue;
    }
    ++idle_;
    work_.wait(lock);
    --idle_;
  }
}

// A piece of one of the first `before` entries, in order; nullptr when there is none, or no slot for it.
io_lane::slot* io_lane::claim(int64_t before) {
  if (inward()) return claim_to_fill(before);
  if (pieces_claimed_ == pieces_issued_) return nullptr;
  slot& mine = slot_of(pieces_claimed_++);
  waiting_bytes_ -= static_cast<uint64_t>((mine.end - mine.begin) * mine.of->tile.line_bytes());
  return &mine;
}

io_lane::slot* io_lane::claim_to_fill(int64_t before) {
  // The copy that used the slot last must be in the stream; that it is complete is waited for outside the lock.
  if (pieces_claimed_ - pieces_issued_ >= ring_.num_slots) return nullptr;
  claiming_ = std::max(claiming_, issued_);
  while (claiming_ < pushed_ && (at(claiming_).left == 0 || at(claiming_).claimed == at(claiming_).end)) ++claiming_;
  if (claiming_ >= std::min(before, pushed_)) return nullptr;
  entry& e = at(claiming_);
  slot& mine = slot_of(pieces_claimed_++);
  mine.of = &e;
  mine.begin = e.claimed;
  mine.end = e.claimed = piece_end(e, e.claimed);
  waiting_bytes_ -= static_cast<uint64_t>((mine.end - mine.begin) * e.tile.line_bytes());
  return &mine;
}

int64_t io_lane::piece_end(const entry& e, int64_t begin) const {
  const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(ring_.slot_bytes) / e.tile.line_bytes());
  const int64_t end = std::min(begin + most, e.end);
  return e.tile.mapping.end ? begin + lines_within(e.tile, begin, end, resident_of_piece(ring_.slot_bytes)) : end;
}

void io_lane::work(slot& mine, hold& lock) {
  entry& e = *mine.of;
  const int64_t lines = mine.end - mine.begin;
  lock.unlock();
  const cqsa_status status = move(mine);
  lock.lock();
  if (status != CQSA_OK) return fail_with(status);
  mine.full = inward();
  if (!inward()) e.left -= lines;
  pump(lock);
  moved_.notify_all();
}

cqsa_status io_lane::move(slot& mine) {
  const entry& e = *mine.of;
  char* memory = slot_memory(static_cast<int>(&mine - slots_));
  const char* const what = inward() ? "waiting for a copy to the device" : "waiting for a copy from the device";
  if (mine.used) CQSA_TRY(checked(backend_.event_sync(context_.device, mine.event), what));
  const bool mapped = e.tile.mapping.end != 0;
  if (mapped && inward() && read_lines(e.tile, mine.begin, mine.end, memory)) return CQSA_OK;
  if (mapped && inward()) want_lines(e.tile, mine.begin, mine.end);
  inward() ? gather_piece(e.tile, mine.begin, mine.end, memory) : scatter_piece(e.tile, mine.begin, mine.end, memory);
  if (mapped) drop_lines(e.tile, mine.begin, mine.end, !inward());
  return CQSA_OK;
}

// ---- the stream, in order -----------------------------------------------------------------------------------------------------

// Issues what comes next until something is not ready. One thread at a time: the others leave it to that one.
void io_lane::pump(hold& lock) {
  if (pumping_) return;
  pumping_ = true;
  while (failed_ == CQSA_OK && !stop_ && issued_ < pushed_ && issue_next(lock)) {}
  pumping_ = false;
}

void io_lane::next_entry() {
  ++issued_;
  moved_.notify_all();
}

bool io_lane::issue_next(hold& lock) {
  entry& e = at(issued_);
  if (e.what == kind::copy && !e.direct) return issue_piece(e, lock);
  if (e.gate > gates_) return false;
  uint64_t bytes = 0;
  lock.unlock();
  cqsa_status status = CQSA_OK;
  if (e.what == kind::wait) status = checked(backend_.stream_wait(context_.device, stream_, e.event), "ordering two streams");
  if (e.what == kind::record) status = checked(backend_.event_record(context_.device, e.event, stream_), "recording an event");
  if (e.what == kind::copy) status = copy_directly(e, bytes);
  lock.lock();
  bytes_ += bytes;
  if (status != CQSA_OK) return fail_with(status), false;
  next_entry();
  return true;
}

bool io_lane::issue_piece(entry& e, hold& lock) {
  if (e.issued == e.end) return next_entry(), true;
  slot& s = slot_of(pieces_issued_);
  if (s.full != inward()) return false;
  if (!inward()) {
    s.of = &e;
    s.begin = e.issued;
    s.end = piece_end(e, e.issued);
  }
  lock.unlock();
  const cqsa_status status = copy_piece(e, s);
  lock.lock();
  if (status != CQSA_OK) return fail_with(status), false;
  s.used = true;
  s.full = !inward();
  e.issued = s.end;
  bytes_ += static_cast<uint64_t>((s.end - s.begin) * e.tile.line_bytes());
  ++pieces_issued_;
  if (waiting_bytes_ >= worth_waking || !inward()) work_.notify_one();
  moved_.notify_all();
  return true;
}

cqsa_status io_lane::copy_piece(const entry& e, slot& s) {
  const int64_t line = e.tile.line_bytes();
  char* device = e.device + (s.begin - e.begin) * line;
  char* memory = slot_memory(static_cast<int>(&s - slots_));
  const auto bytes = static_cast<uint64_t>((s.end - s.begin) * line);
  if (inward())
    CQSA_TRY(checked(backend_.copy(context_.device, device, memory, bytes, CQSA_COPY_TO_DEVICE, stream_), "a copy to the device"));
  else
    CQSA_TRY(checked(backend_.copy(context_.device, memory, device, bytes, CQSA_COPY_TO_HOST, stream_), "a copy from the device"));
  return checked(backend_.event_record(context_.device, s.event, stream_), "recording an event");
}

// Rows that hidden pages leave out stay as they are: no rectangle names them.
cqsa_status io_lane::copy_directly(const entry& e, uint64_t& bytes_out) {
  const int64_t line_bytes = e.tile.line_bytes();
  for (int64_t line = e.begin; line < e.end;) {
    line_run run = contiguous_lines(e.tile, line);
    run.lines = std::min(run.lines, e.end - line);
    const auto bytes = static_cast<uint64_t>(run.lines * line_bytes);
    char* device = e.device + (line - e.begin) * line_bytes;
    line += run.lines;
    if (!run.data) continue;
    if (inward())
      CQSA_TRY(checked(backend_.copy(context_.device, device, run.data, bytes, CQSA_COPY_TO_DEVICE, stream_), "a copy to the device"));
    else
      CQSA_TRY(checked(backend_.copy(context_.device, run.data, device, bytes, CQSA_COPY_TO_HOST, stream_), "a copy from the device"));
    bytes_out += bytes;
  }
  return CQSA_OK;
}

// ---- by hand ------------------------------------------------------------------------------------------------------------------

cqsa_status io_lane::copy_to_slot(int slot, const void* from, uint64_t bytes) {
  io_lane::slot& s = slots_[slot];
  CQSA_TRY(checked(backend_.copy(context_.device, slot_memory(slot), from, bytes, CQSA_COPY_TO_HOST, stream_), "a copy from the device"));
  bytes_ += bytes;
  s.used = true;
  return checked(backend_.event_record(context_.device, s.event, stream_), "recording an event");
}

cqsa_status io_lane::sync_slot(int slot) {
  return checked(backend_.event_sync(context_.device, slots_[slot].event), "waiting for a copy from the device");
}

}  // namespace cqsa
