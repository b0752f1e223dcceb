// SPDX-License-Identifier: Apache-2.0
// One direction of the transfers between host and device: everything that goes to one stream, in order, through a ring of
// staging slots that several threads fill (to the device) or empty (from it), each a slot of its own. The schedule pushes
// transfers ahead and waits only for what it needs next; nothing that is pushed waits for the caller.
#pragma once
#include <pthread.h>

#include <condition_variable>
#include <mutex>

#include "ops/attention/device_gather.h"

namespace cqsa {

inline constexpr int most_copy_threads = 8;     // 4 MiB slots filled by 8 threads saturate a 55 GB/s link, more gain nothing ..
inline constexpr int most_mapping_threads = 12;  // .. unless they map and unmap the pages of files too, a fifth of their time
inline constexpr int most_io_threads = most_mapping_threads;
inline constexpr int most_io_slots = 4 * most_copy_threads;

struct io_ring {
  char* memory = nullptr;  // num_slots slots, `stride` bytes apart
  uint64_t slot_bytes = 0, stride = 0;
  int num_slots = 0;
  int num_threads = 0;  // beside the caller's; they start when there is work for them
};

class io_lane {
 public:
  enum class direction { to_device, to_host };

  io_lane(const cqsa_context& context, direction way);
  ~io_lane() { close(); }
  io_lane(const io_lane&) = delete;
  io_lane& operator=(const io_lane&) = delete;

  cqsa_status open(void* stream, const io_ring& ring);

  // Lines [begin, end) of a tile from or to compact device memory, where line `begin` is at `device`. The tile's index maps
  // stay as they are until the transfer is issued (to the device) or done.
  cqsa_status copy(const host_tile& tile, int64_t begin, int64_t end, void* device);
  cqsa_status wait(void* event);    // the stream waits
  cqsa_status record(void* event);  // .. and records
  // The stream waits for a record that will be made when gate number `gate` opens. Until then nothing behind it is issued, but
  // the threads fill slots with it: the copies to the device have to wait, the host's half of the work does not.
  cqsa_status wait_behind(int64_t gate, void* event);
  cqsa_status open_gates(int64_t up_to);
  // Whether so many more can be pushed at once. One who has closed gates before it must not wait for room: it opens them.
  bool has_room(int64_t count);

  int64_t pushed() const { return pushed_; }
  // Until the first `count` of what was pushed are in the stream. The calling thread helps: without threads it does it all.
  cqsa_status await_issued(int64_t count);
  // .. and complete, the host's memory included. To the host only; what is awaited ends with a record.
  cqsa_status await_done(int64_t count);

  // Gives up what is not issued and ends the threads. Bytes that were copied.
  uint64_t close();

  // For those who move lines themselves, while nothing that was pushed is pending: the slots, and moves through them.
  const io_ring& ring() const { return ring_; }
  char* slot_memory(int slot) const { return ring_.memory + static_cast<uint64_t>(slot) * ring_.stride; }
  cqsa_status copy_to_slot(int slot, const void* from, uint64_t bytes);
  cqsa_status sync_slot(int slot);

 private:
  enum class kind { copy, wait, record };
  struct entry {
    kind what = kind::copy;
    bool direct = false;  // without staging
    host_tile tile;
    int64_t begin = 0, end = 0;            // lines
    int64_t claimed = 0, issued = 0, left = 0;  // lines claimed up to, issued up to, and not yet done
    char* device = nullptr;
    void* event = nullptr;
    int64_t gate = 0;
  };
  struct slot {
    void* event = nullptr;   // after the last copy from or into it
    bool used = false;       // the event was recorded
    bool full = false;       // holds lines that are still to be copied to the device, or to their host tile
    entry* of = nullptr;
    int64_t begin = 0, end = 0;
  };
  using hold = std::unique_lock<std::mutex>;

  entry& at(int64_t index) { return entries_[index % capacity]; }
  slot& slot_of(int64_t piece) { return slots_[piece % ring_.num_slots]; }
  bool inward() const { return way_ == direction::to_device; }

  cqsa_status push(const entry& e);
  cqsa_status make_room(hold& lock);
  void start_threads();
  static void* thread_main(void* self);
  void serve();
  slot* claim(int64_t before);
  slot* claim_to_fill(int64_t before);
  void work(slot& mine, hold& lock);
  cqsa_status move(slot& mine);
  void pump(hold& lock);
  bool issue_next(hold& lock);
  bool issue_piece(entry& e, hold& lock);
  cqsa_status copy_piece(const entry& e, slot& s);
  cqsa_status copy_directly(const entry& e, uint64_t& bytes);
  void next_entry();
  int64_t piece_end(const entry& e, int64_t begin) const;
  void fail_with(cqsa_status status);
  cqsa_status failure() const;
  cqsa_status checked(cqsa_status status, const char* what) const;

  static constexpr int capacity = 96;
  const cqsa_context& context_;
  const cqsa_backend_v1& backend_;
  const direction way_;
  void* stream_ = nullptr;
  io_ring ring_;
  slot slots_[most_io_slots];

  std::mutex lock_;
  std::condition_variable work_;   // for the threads: something can be claimed
  std::condition_variable moved_;  // for the caller: something was issued or done, or can be claimed
  entry entries_[capacity];        // a ring: [done_, pushed_) are alive
  int64_t pushed_ = 0, claiming_ = 0, issued_ = 0, done_ = 0;  // entries
  int64_t pieces_claimed_ = 0, pieces_issued_ = 0;
  int64_t gates_ = 0;  // up to which they are open
  uint64_t waiting_bytes_ = 0;  // pushed and not claimed
  uint64_t bytes_ = 0;
  int idle_ = 0;
  bool pumping_ = false, stop_ = false;
  cqsa_status failed_ = CQSA_OK;
  char reason_[400] = "";
  pthread_t threads_[most_io_threads];
  int started_ = 0;
};

}  // namespace cqsa
