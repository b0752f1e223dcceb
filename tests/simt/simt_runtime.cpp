// SPDX-License-Identifier: Apache-2.0
// The scheduler of the SIMT harness: threads, barriers, operations of all lanes. A block is one OS thread's work; which of its
// threads goes on at a switch point is drawn from the seed.
#include "simt_runtime.h"

#include "block.h"
#include "dtype.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>

#if defined(CQSA_SIMT_TSAN)
#include <sanitizer/tsan_interface.h>
#else
#define __tsan_acquire(key) ((void)(key))
#define __tsan_release(key) ((void)(key))
#endif

int cqsa_simt_mutant = 0;

namespace cqsa::simt {

__thread const thread_place* here = nullptr;

namespace {

__thread block* running = nullptr;

// What unwinds a thread of a run that has failed.
struct abandoned {};

struct kernel_entry {
  int threads;
  size_t params_bytes;
  void (*body)(const void*);
};
// A function: registered_kernel objects of other files need it before main.
std::map<std::pair<std::string, int>, kernel_entry>& kernels() {
  static std::map<std::pair<std::string, int>, kernel_entry> all;
  return all;
}

const char* without_folders(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash ? slash + 1 : file;
}
std::string describe(const place_in_code& at) {
  return std::string(at.what) + " at " + without_folders(at.file) + ":" + std::to_string(at.line);
}

// ---- sites that may be left out

struct site_book {
  std::mutex mutex;
  std::map<std::string, call_site> seen;
  std::set<std::tuple<const char*, const char*, int>> known;  // by address: no text is made for a place that is known
  bool recording = false, leaving_out = false;
  call_site left_out;
} sites;

// Whether the running thread must pass by.
bool passes_by(const place_in_code& at) {
  if (sites.recording) {
    std::lock_guard lock(sites.mutex);
    if (sites.known.insert({at.what, at.file, at.line}).second) sites.seen.insert({describe(at), {at.what, without_folders(at.file), at.line}});
  }
  return sites.leaving_out && sites.left_out.line == at.line && sites.left_out.what == at.what && sites.left_out.file == without_folders(at.file);
}

}  // namespace

registered_kernel::registered_kernel(const char* name, int lanes, int threads, size_t params_bytes, void (*body)(const void*)) {
  kernels()[{name, lanes}] = {threads, params_bytes, body};
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  running->blame(text);
  throw abandoned{};
}

void record_sites(bool on) {
  sites.seen.clear(), sites.known.clear();
  sites.recording = on;
}
std::vector<call_site> recorded_sites() {
  std::vector<call_site> out;
  for (const auto& [text, site] : sites.seen) out.push_back(site);
  return out;
}
void leave_out(const call_site* site) {
  sites.leaving_out = site;
  if (site) sites.left_out = *site;
}

void block_barrier(const char* file, int line) {
  const place_in_code at{"barrier", file, line};
  if (!passes_by(at)) running->wait_block(at);
}
void meet_lanes(const char* what, int lanes, const lane_operand& mine, lanes_function function, const char* file, int line) {
  const place_in_code at{what, file, line};
  if (!passes_by(at)) running->wait_lanes(at, lanes, mine, function);
}
void check_shared(const char* what, const void* p, int64_t bytes, int64_t alignment) {
  const unsigned char* at = static_cast<const unsigned char*>(p);
  if (at < here->shared || at + bytes > here->shared + here->shared_bytes)
    fail("%s: %lld bytes at offset %lld of %lld bytes of shared memory", what, static_cast<long long>(bytes),
         static_cast<long long>(at - here->shared), static_cast<long long>(here->shared_bytes));
  if (reinterpret_cast<uintptr_t>(p) % uintptr_t(alignment)) fail("%s: shared memory address not aligned to %d", what, int(alignment));
}
void issue_copy(void* shared, const void* global, int bytes, int read_bytes) {
  check_shared("cp_async", shared, bytes, bytes);
  if (reinterpret_cast<uintptr_t>(global) % uintptr_t(bytes)) fail("cp_async: source not aligned to %d", bytes);
  if (read_bytes < 0 || read_bytes > bytes) fail("cp_async: %d of %d bytes", read_bytes, bytes);
  running->current().copies.issue(shared, global, bytes, read_bytes, running->random());
}
void commit_copies() { running->current().copies.commit(); }
void wait_copies(int most_pending, const char* file, int line) {
  if (passes_by({"cp_async_wait", file, line})) return;
  running->yield();
  running->current().copies.wait(most_pending);
}

// ---- threads of a block

block::block(const launch& of, uint64_t seed) : launch_(of), random_{seed}, shared_(of.shared_bytes) {
  threads_ = std::vector<thread>(size_t(of.threads));
  warps_ = std::vector<meeting>(size_t(of.threads / of.lanes));
  for (thread& t : threads_) t.stack = stack_pool::instance().take();
}
block::~block() {
  for (thread& t : threads_) stack_pool::instance().give(t.stack);
}

std::string block::run(const int64_t index[3]) {
  shared_.fill();
  const uint64_t draw = random() % 4;
  policy_ = draw == 0 ? policy::anyone : draw == 1 ? policy::favourite_threads : policy::favourite_warps;
  ready_.clear(), ready_.reserve(threads_.size()), whole_ = {}, unfinished_ = launch_.threads, blame_.clear();
  for (meeting& w : warps_) w = {};
  uint32_t warp_favour = 0;
  for (int i = 0; i < launch_.threads; ++i) {
    thread& t = threads_[size_t(i)];
    t.place = {i, launch_.threads, launch_.lanes, {index[0], index[1], index[2]}, {launch_.grid[0], launch_.grid[1], launch_.grid[2]},
               shared_.data(), launch_.shared_bytes};
    t.waits = {}, t.done = t.started = false, t.copies.clear();
    if (i % launch_.lanes == 0) warp_favour = uint32_t(random());
    t.favour = policy_ == policy::favourite_warps ? warp_favour : uint32_t(random());
    t.stack_of.prepare(t.stack, stack_pool::bytes, enter, &t);
    ready_.push_back(i);
  }
  running = this;
  __tsan_release(&begin_);
  go_on();
  if (blame_.empty() && unfinished_ > 0) blame_ = explain_deadlock();
  if (unfinished_ > 0) unwind();
  __tsan_acquire(&end_);
  if (blame_.empty()) blame_ = shared_.damage();
  running = nullptr, here = nullptr;
  return blame_;
}

// From the caller's stack until nobody can go on.
void block::go_on() {
  thread* next = pick();
  if (next) main_.switch_to(next->stack_of);
}

void block::enter(void* argument) {
  thread& t = *static_cast<thread*>(argument);
  block& b = *running;
  b.arrive(t);
  __tsan_acquire(&b.begin_);
  try {
    if (b.blame_.empty()) b.launch_.body(b.launch_.params);
    if (t.copies.any()) b.blame("a thread ended with a copy that it never waited for");
  } catch (const abandoned&) {
  } catch (...) {
    b.blame("an exception in a kernel");
  }
  t.done = true, --b.unfinished_;
  __tsan_release(&b.end_);
  thread* next = b.blame_.empty() ? b.pick() : nullptr;
  t.stack_of.leave(next ? next->stack_of : b.main_);
}

void block::arrive(thread& t) {
  current_ = &t;
  here = &t.place;
  t.started = true;
}

// Takes a thread that can go on, nullptr if there is none.
block::thread* block::pick() {
  if (ready_.empty()) return nullptr;
  size_t at = 0;
  if (policy_ == policy::anyone) at = size_t(random() % ready_.size());
  else
    for (size_t i = 1; i < ready_.size(); ++i)
      if (threads_[size_t(ready_[i])].favour > threads_[size_t(ready_[at])].favour) at = i;
  const int chosen = ready_[at];
  ready_[at] = ready_.back();
  ready_.pop_back();
  return &threads_[size_t(chosen)];
}

// The running thread is already where it can be found again: in ready_ or in a meeting.
void block::pause() {
  thread& me = *current_;
  thread* next = pick();
  if (next != &me) me.stack_of.switch_to(next ? next->stack_of : main_);
  arrive(me);
  if (!blame_.empty()) throw abandoned{};
  me.copies.think(random());
}

void block::yield() {
  ready_.push_back(current_->place.index);
  pause();
}

void block::join(meeting& m, const place_in_code& at, const thread& me) {
  if (m.arrived > 0 && !(m.at == at))
    fail("thread %d came to %s while others of its %s wait for %s", me.place.index, describe(at).c_str(), &m == &whole_ ? "block" : "lanes",
         describe(m.at).c_str());
  m.at = at;
  ++m.arrived;
}

void block::wait_block(const place_in_code& at) {
  thread& me = *current_;
  join(whole_, at, me);
  me.waits = at;
  void* const key = whole_.key();
  __tsan_release(key);
  if (whole_.arrived == launch_.threads) {
    whole_.next();
    for (thread& t : threads_) t.waits = {}, ready_.push_back(t.place.index);
  }
  pause();
  __tsan_acquire(key);
}

void block::wait_lanes(const place_in_code& at, int lanes, const lane_operand& mine, lanes_function function) {
  thread& me = *current_;
  if (lanes != launch_.lanes) fail("%s for %d lanes where %d run together", describe(at).c_str(), lanes, launch_.lanes);
  const int first = me.place.index / lanes * lanes;
  meeting& m = warps_[size_t(first / lanes)];
  join(m, at, me);
  me.waits = at, me.operand = mine;
  void* const key = m.key();
  __tsan_release(key);
  if (m.arrived == lanes) {
    m.next();
    __tsan_acquire(key);
    if (function) {
      lane_operand operands[most_lanes];
      for (int i = 0; i < lanes; ++i) operands[i] = threads_[size_t(first + i)].operand;
      function(operands, lanes);
    }
    __tsan_release(key);
    for (int i = first; i < first + lanes; ++i) threads_[size_t(i)].waits = {}, ready_.push_back(i);
  }
  pause();
  __tsan_acquire(key);
}

void block::blame(const std::string& text) {
  if (!blame_.empty()) return;
  char where[160];
  std::snprintf(where, sizeof where, "block %lld,%lld,%lld thread %d: ", static_cast<long long>(current_->place.block[0]),
                static_cast<long long>(current_->place.block[1]), static_cast<long long>(current_->place.block[2]), current_->place.index);
  blame_ = where + text;
}

std::string block::explain_deadlock() const {
  std::map<std::string, std::pair<int, int>> groups;  // where -> how many, first thread
  for (const thread& t : threads_) {
    const std::string where = t.done ? "has ended" : "waits for " + describe(t.waits);
    ++groups.insert({where, {0, t.place.index}}).first->second.first;
  }
  std::string out = "nobody can go on:";
  for (const auto& [where, who] : groups)
    out.append(" ").append(std::to_string(who.first)).append(" threads (first ").append(std::to_string(who.second)).append(") ").append(where).append(";");
  return out;
}

// Lets every thread that has begun leave its stack by an exception, so that destructors run and the stack is clean.
void block::unwind() {
  for (thread& t : threads_)
    if (t.started && !t.done) main_.switch_to(t.stack_of);
}

// ---- a grid

std::string run(void (*body)(const void*), int lanes, const run_shape& shape, const void* params, size_t params_bytes, uint64_t seed, int workers) {
  if (lanes != 32 && lanes != 64) return "lanes are 32 or 64";
  if (shape.threads <= 0 || shape.threads > 1024 || shape.threads % lanes) return "threads of a block: a multiple of the lanes, at most 1024";
  std::vector<std::max_align_t> copy(params_bytes / sizeof(std::max_align_t) + 1);
  if (params_bytes) std::memcpy(copy.data(), params, params_bytes);
  const launch l{body, copy.data(), lanes, shape.threads, shape.shared_bytes, {shape.grid[0], shape.grid[1], shape.grid[2]}};

  const int64_t blocks = shape.grid[0] * shape.grid[1] * shape.grid[2];
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) order[size_t(i)] = i;
  splitmix shuffler{seed};
  for (int64_t i = blocks - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(shuffler() % uint64_t(i + 1))]);

  stack_pool::instance();  // made before there are threads
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::string error;
  std::atomic<bool> failed{false};
  auto work = [&] {
    for (int64_t n; !failed && (n = next++) < blocks;) {
      const int64_t i = order[size_t(n)];
      const int64_t index[3] = {i % shape.grid[0], i / shape.grid[0] % shape.grid[1], i / shape.grid[0] / shape.grid[1]};
      block b(l, splitmix{seed ^ (uint64_t(i) * 0x9e3779b97f4a7c15ull + 1)}());
      const std::string text = b.run(index);
      if (text.empty()) continue;
      std::lock_guard lock(mutex);
      if (!failed.exchange(true)) error = text;
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(workers, blocks); ++i) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  return error;
}

std::string run(const char* kernel, int lanes, const run_shape& shape, const void* params, size_t params_bytes, uint64_t seed, int workers) {
  const auto it = kernels().find({kernel, lanes});
  if (it == kernels().end()) return std::string("no kernel ") + kernel + " for " + std::to_string(lanes) + " lanes";
  if (params_bytes != it->second.params_bytes)
    return std::string(kernel) + " takes " + std::to_string(it->second.params_bytes) + " bytes, got " + std::to_string(params_bytes);
  run_shape s = shape;
  if (s.threads == 0) s.threads = it->second.threads;
  if (s.threads > it->second.threads) return std::string(kernel) + " is compiled for " + std::to_string(it->second.threads) + " threads";
  return run(it->second.body, lanes, s, params, params_bytes, seed, workers);
}

}  // namespace cqsa::simt

namespace cqsa::gpu {
float f16_to_f32(uint16_t bits) { return cqsa::f16_to_f32(bits); }
uint16_t f32_to_f16(float value) { return cqsa::f32_to_f16(value); }
}  // namespace cqsa::gpu
