// SPDX-License-Identifier: Apache-2.0
// One block of a SIMT run: its threads, its shared memory, its copies under way. Used by simt_runtime.cpp only.
#pragma once

#include "fiber.h"
#include "simt_device.h"

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace cqsa::simt {

constexpr int most_lanes = 64;

// Sebastiano Vigna's generator: enough here, and the same everywhere.
struct splitmix {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
};

struct place_in_code {
  const char* what = "nothing";
  const char* file = "";
  int line = 0;
  bool operator==(const place_in_code& o) const { return line == o.line && !std::strcmp(what, o.what) && !std::strcmp(file, o.file); }
};

// Shared memory of exactly the bytes asked for between two red zones: poisoned under ASan, otherwise a pattern that is looked at
// when the block has ended. Both the memory and the pattern read as NaN in f16, bf16 and f32.
class shared_block {
 public:
  explicit shared_block(int64_t bytes);
  ~shared_block();
  shared_block(const shared_block&) = delete;
  unsigned char* data() { return memory_ + zone; }
  void fill();
  std::string damage() const;  // "" when the red zones are whole

 private:
  static constexpr size_t zone = 4096;
  size_t bytes_;
  unsigned char* memory_;
};

// Asynchronous copies of one thread. What hardware leaves open is drawn or made visible: the source is read at any moment from
// the issue to the wait; the destination holds NaN from the issue on and its data only after the wait.
class async_copies {
 public:
  void issue(void* to, const void* from, int bytes, int read_bytes, uint64_t random);
  void commit();
  void wait(int most_pending);
  void think(uint64_t random);  // at a switch point: some of the sources are read now
  bool any() const { return !pending_.empty(); }
  void clear() { pending_.clear(), committed_ = 0; }

 private:
  struct copy {
    unsigned char* to;
    const unsigned char* from;
    int bytes, read_bytes;
    int64_t group;
    bool read;
    unsigned char data[16];
    void take();
  };
  std::deque<copy> pending_;
  int64_t committed_ = 0;  // groups so far
};

struct launch {
  void (*body)(const void*);
  const void* params;
  int lanes, threads;
  int64_t shared_bytes;
  int64_t grid[3];
};

class block {
 public:
  struct thread {
    thread_place place{};
    fiber stack_of;
    void* stack = nullptr;
    place_in_code waits;
    lane_operand operand{};
    async_copies copies;
    uint32_t favour = 0;
    bool done = false, started = false;
  };

  block(const launch& of, uint64_t seed);
  ~block();
  block(const block&) = delete;
  std::string run(const int64_t index[3]);

  // From the running thread.
  thread& current() { return *current_; }
  uint64_t random() { return random_(); }
  void yield();
  void wait_block(const place_in_code& at);
  void wait_lanes(const place_in_code& at, int lanes, const lane_operand& mine, lanes_function function);
  void blame(const std::string& text);

 private:
  struct meeting {
    place_in_code at;
    int arrived = 0;
    // For TSan: what happened before one turn of a meeting is known to those who leave it. Nobody is two turns ahead of others.
    int turn = 0;
    char keys[2] = {0, 0};
    void* key() { return &keys[turn % 2]; }
    void next() { at = {}, arrived = 0, ++turn; }
  };
    // Who goes on at a switch point: anyone, the same threads or the same warps whenever they can. The last is nearest to hardware and
  // finds what a warp may do before the others.
  enum class policy { anyone, favourite_threads, favourite_warps };

  static void enter(void* argument);
  void go_on();
  void arrive(thread& t);
  thread* pick();
  void pause();
  void join(meeting& m, const place_in_code& at, const thread& me);
  std::string explain_deadlock() const;
  void unwind();

  const launch& launch_;
  splitmix random_;
  policy policy_ = policy::anyone;
  shared_block shared_;
  std::vector<thread> threads_;
  std::vector<meeting> warps_;
  meeting whole_;
  char begin_ = 0, end_ = 0;  // keys as in meeting
  std::vector<int> ready_;
  fiber main_;
  thread* current_ = nullptr;
  int unfinished_ = 0;
  std::string blame_;
};

}  // namespace cqsa::simt
