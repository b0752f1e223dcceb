// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace cqsa {

namespace {

// One run(), on its caller's stack: open to helpers while it is in the list, gone once unlinked and left by every helper.
struct job {
  task_fn task;
  void* data;
  int64_t num_tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int> helpers{0};  // threads inside work(), the caller not counted; rises under the lock only
  job* next_open = nullptr;

  job(task_fn task_, void* data_, int64_t num_tasks_) : task(task_), data(data_), num_tasks(num_tasks_) {}

  bool has_tasks() const { return next.load(std::memory_order_relaxed) < num_tasks; }

  void work() {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_tasks) return;
      task(data, i);
    }
  }
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits a few microseconds without sleeping: calls follow each other closely, and waking a sleeper costs more than that.
template <class F>
bool spin_until(F&& ready) {
  for (int i = 0; i < 200; ++i) {
    if (ready()) return true;
    pause();
  }
  return ready();
}

// A signal of the host program must not land on our threads. Faults stay deliverable: they belong to the thread that made
// them, and the host may handle them (a mapped file that shrank).
void block_signals(sigset_t* before) {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, before);
}

}  // namespace

bool start_quiet_thread(pthread_t& thread_out, void* (*body)(void*), void* data) {
  sigset_t before;
  block_signals(&before);
  const bool started = pthread_create(&thread_out, nullptr, body, data) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

struct thread_pool::shared {
  const pid_t owner = getpid();
  std::mutex lock;
  std::condition_variable work;  // a job was opened, or stop
  std::condition_variable done;  // the last helper left some job
  std::atomic<int> open{0};      // length of the list, for those who spin
  job* first = nullptr;
  int idle = 0;
  bool started = false;
  bool stop = false;
  pthread_t* threads = nullptr;
  int num_started = 0;

  // The pool's state in this process. A forked child makes its own and leaves the inherited one alone: the lock in it may be
  // held by a thread that does not exist here. nullptr: out of memory.
  static shared* of(shared*& slot_memory) {
    std::atomic_ref<shared*> slot(slot_memory);
    shared* found = slot.load(std::memory_order_acquire);
    if (found != nullptr && found->owner == getpid()) return found;
    auto* fresh = new (std::nothrow) shared;
    if (fresh == nullptr || slot.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;
    return found;
  }

  ~shared() { delete[] threads; }

  // Under the lock; the new threads wait for it.
  void start(int count) {
    if (started) return;
    threads = new (std::nothrow) pthread_t[static_cast<size_t>(count)];
    if (threads == nullptr) return;  // tried again at the next job
    started = true;
    while (num_started < count && start_quiet_thread(threads[num_started], thread_main, this)) ++num_started;
  }

  static void* thread_main(void* self) {
    pthread_setname_np(pthread_self(), "cqsa");
    static_cast<shared*>(self)->serve();
    return nullptr;
  }

  void serve() {
    std::unique_lock<std::mutex> hold(lock);
    bool warm = false;
    while (!stop) {
      if (job* mine = claim()) {
        help(*mine, hold);
        warm = true;
      } else if (warm) {
        warm = false;
        hold.unlock();
        spin_until([this] { return open.load(std::memory_order_relaxed) != 0; });
        hold.lock();
      } else {
        ++idle;
        work.wait(hold);
        --idle;
      }
    }
  }

  job* claim() {
    for (job* candidate = first; candidate != nullptr; candidate = candidate->next_open) {
      if (!candidate->has_tasks()) continue;
      candidate->helpers.fetch_add(1, std::memory_order_relaxed);
      return candidate;
    }
    return nullptr;
  }

  // The decrement is the last touch of the job: its caller may be spinning on it and return at once.
  void help(job& mine, std::unique_lock<std::mutex>& hold) {
    hold.unlock();
    mine.work();
    hold.lock();
    if (mine.helpers.fetch_sub(1, std::memory_order_release) == 1) done.notify_all();
  }

  void run(job& mine, int threads_wanted) {
    open_job(mine, threads_wanted);
    mine.work();
    close_job(mine);
  }

  void open_job(job& mine, int threads_wanted) {
    std::lock_guard<std::mutex> hold(lock);
    start(threads_wanted);
    mine.next_open = first;
    first = &mine;
    open.fetch_add(1, std::memory_order_relaxed);
    const int64_t useful = mine.num_tasks - 1;
    if (useful >= idle) {
      work.notify_all();
    } else {
      for (int64_t i = 0; i < useful; ++i) work.notify_one();
    }
  }

  void close_job(job& mine) {
    {
      std::lock_guard<std::mutex> hold(lock);
      unlink(mine);
    }
    const auto left = [&mine] { return mine.helpers.load(std::memory_order_acquire) == 0; };
    if (spin_until(left)) return;
    std::unique_lock<std::mutex> hold(lock);
    done.wait(hold, left);
  }

  void unlink(job& mine) {
    job** link = &first;
    while (*link != &mine) link = &(*link)->next_open;
    *link = mine.next_open;
    open.fetch_sub(1, std::memory_order_relaxed);
  }

  void join() {
    {
      std::lock_guard<std::mutex> hold(lock);
      stop = true;
      work.notify_all();
    }
    for (int i = 0; i < num_started; ++i) pthread_join(threads[i], nullptr);
  }
};

thread_pool::thread_pool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}

// What a child inherited is leaked on purpose, see shared::of().
thread_pool::~thread_pool() {
  if (shared_ == nullptr || shared_->owner != getpid()) return;
  shared_->join();
  delete shared_;
}

void thread_pool::start() {
  if (num_threads_ == 1) return;
  shared* const state = shared::of(shared_);
  if (state == nullptr) return;
  std::lock_guard<std::mutex> hold(state->lock);
  state->start(num_threads_ - 1);
}

void thread_pool::run(int64_t num_tasks, task_fn task, void* data) {
  job mine(task, data, num_tasks);
  shared* const state = num_tasks > 1 && num_threads_ > 1 ? shared::of(shared_) : nullptr;
  if (state == nullptr) return mine.work();
  state->run(mine, num_threads_ - 1);
}

namespace {

// Reads up to two numbers from a small file; "max" and a missing file read as none.
int read_numbers(const char* folder, const char* file, long long* a, long long* b) {
  char path[PATH_MAX];
  if (std::snprintf(path, sizeof path, "%s/%s", folder, file) >= static_cast<int>(sizeof path)) return 0;
  FILE* const stream = std::fopen(path, "re");
  if (stream == nullptr) return 0;
  const int got = std::fscanf(stream, "%lld %lld", a, b);
  std::fclose(stream);
  return got < 0 ? 0 : got;
}

// Cores that the quota of one cgroup folder allows, rounded up; INT_MAX without a quota.
int quota_of(const char* folder) {
  long long quota = 0, period = 0, ignored = 0;
  const bool v2 = read_numbers(folder, "cpu.max", &quota, &period) == 2;
  const bool v1 = !v2 && read_numbers(folder, "cpu.cfs_quota_us", &quota, &ignored) >= 1 &&
                  read_numbers(folder, "cpu.cfs_period_us", &period, &ignored) >= 1;
  if (!(v1 || v2) || quota <= 0 || period <= 0) return INT_MAX;
  const long long cores = quota / period + (quota % period != 0);
  return cores > INT_MAX ? INT_MAX : static_cast<int>(cores);
}

// The tightest quota of mount + path and of every folder above it. In a container the path may name a folder that only the
// host sees; the mount itself is then the container's own.
int tightest_quota(const char* mount, const char* path) {
  char folder[PATH_MAX];
  if (std::snprintf(folder, sizeof folder, "%s%s", mount, path) >= static_cast<int>(sizeof folder)) return quota_of(mount);
  const size_t top = std::strlen(mount);
  int cores = quota_of(mount);
  while (std::strlen(folder) > top) {
    const int here = quota_of(folder);
    if (here < cores) cores = here;
    *std::strrchr(folder, '/') = '\0';
  }
  return cores;
}

bool names_controller(const char* list, const char* wanted) {
  const size_t length = std::strlen(wanted);
  for (const char* item = list; *item != '\0'; item += std::strcspn(item, ","), item += *item == ',') {
    if (std::strncmp(item, wanted, length) == 0 && (item[length] == ',' || item[length] == '\0')) return true;
  }
  return false;
}

// One line of /proc/self/cgroup: "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1).
int quota_of_line(char* line, const char* root) {
  line[std::strcspn(line, "\n")] = '\0';
  char* const controllers = std::strchr(line, ':');
  char* const path = controllers ? std::strchr(controllers + 1, ':') : nullptr;
  if (path == nullptr || path[1] != '/') return INT_MAX;
  *path = '\0';
  const bool v2 = controllers[1] == '\0';
  if (!v2 && !names_controller(controllers + 1, "cpu")) return INT_MAX;
  char mount[PATH_MAX];
  std::snprintf(mount, sizeof mount, "%s%s", root, v2 ? "" : "/cpu");
  return tightest_quota(mount, path + 1);
}

int affinity_cores() {
  for (int wanted = 1024; wanted <= 1 << 20; wanted *= 4) {  // a machine with more CPUs than the set is EINVAL
    cpu_set_t* const set = CPU_ALLOC(static_cast<size_t>(wanted));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(wanted));
    CPU_ZERO_S(bytes, set);
    const int cores = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (cores > 0) return cores;
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

}  // namespace

// Not in the header: tests call it on a made-up tree.
int cgroup_cores(const char* membership_file, const char* root) {
  FILE* const stream = std::fopen(membership_file, "re");
  if (stream == nullptr) return INT_MAX;
  int cores = INT_MAX;
  char line[PATH_MAX + 256];
  while (std::fgets(line, sizeof line, stream) != nullptr) {
    const int here = quota_of_line(line, root);
    if (here < cores) cores = here;
  }
  std::fclose(stream);
  return cores;
}

int available_cores() {
  const int affinity = affinity_cores();
  const int quota = cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  const int cores = quota < affinity ? quota : affinity;
  return cores < 1 ? 1 : cores;
}

}  // namespace cqsa
