// SPDX-License-Identifier: Apache-2.0
// The thread pool, run_tasks() with a caller's parallel_for, and the number of cores.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "context.h"
#include "error.h"
#include "thread_pool.h"

namespace cqsa {
int cgroup_cores(const char* membership_file, const char* root);  // in thread_pool.cpp, for this test
}

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define THREAD_SANITIZER 1
#endif
#endif

namespace {

// Plain ints on purpose: under TSan they prove that run() orders the tasks' writes before its return.
struct counted {
  std::vector<int> times;
  explicit counted(int64_t n) : times(static_cast<size_t>(n), 0) {}
  static void task(void* self, int64_t i) { ++static_cast<counted*>(self)->times[static_cast<size_t>(i)]; }
  bool each_once() const {
    for (const int t : times)
      if (t != 1) return false;
    return true;
  }
};

int threads_of_process() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count;
}

// Blocks its thread until `wanted` tasks are inside at the same time, or until open() is called.
struct gate {
  std::mutex lock;
  std::condition_variable changed;
  int inside = 0;
  bool opened = false;

  void wait_for(int wanted) {
    std::unique_lock<std::mutex> hold(lock);
    ++inside;
    changed.notify_all();
    changed.wait(hold, [&] { return opened || inside >= wanted; });
  }
  void open() {
    std::lock_guard<std::mutex> hold(lock);
    opened = true;
    changed.notify_all();
  }
};

// Of a process in which nothing begins or ends: join() comes back a moment before the kernel has taken the thread off its list.
int threads_at_rest() {
  int n = threads_of_process();
  for (int same = 0, tries = 0; same < 10 && tries < 1000; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int now = threads_of_process();
    same = now == n ? same + 1 : 0, n = now;
  }
  return n;
}

}  // namespace

TEST_CASE("every task runs once", "[thread_pool]") {
  for (const int threads : {-1, 0, 1, 2, 3, 8}) {
    cqsa::thread_pool pool(threads);
    CHECK(pool.size() == (threads < 1 ? 1 : threads));
    for (const int64_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      counted work(tasks);
      pool.run(tasks, counted::task, &work);
      CAPTURE(threads, tasks);
      CHECK(work.each_once());
    }
  }
}

TEST_CASE("threads start at the first need and end with the pool", "[thread_pool]") {
  const int before = threads_at_rest();
  {
    cqsa::thread_pool pool(4);
    CHECK(threads_of_process() == before);
    counted one(1);
    pool.run(1, counted::task, &one);
    CHECK(threads_of_process() == before);
    counted two(2);
    pool.run(2, counted::task, &two);
    CHECK(threads_of_process() == before + 3);
    pool.start();
    CHECK(threads_of_process() == before + 3);
  }
  CHECK(threads_at_rest() == before);
  {
    cqsa::thread_pool pool(3);
    pool.start();
    CHECK(threads_of_process() == before + 2);
  }
  CHECK(threads_at_rest() == before);
}

TEST_CASE("tasks really run at once", "[thread_pool]") {
  cqsa::thread_pool pool(4);
  gate all;  // passes only when 4 threads are inside
  pool.run(4, [](void* data, int64_t) { static_cast<gate*>(data)->wait_for(4); }, &all);
  CHECK(all.inside == 4);
}

TEST_CASE("a run does not wait for threads that are busy elsewhere", "[thread_pool]") {
  cqsa::thread_pool pool(2);
  gate blocked;
  std::thread other([&] { pool.run(2, [](void* data, int64_t) { static_cast<gate*>(data)->wait_for(1000); }, &blocked); });
  for (bool both = false; !both;) {  // the caller and the only pool thread are now stuck
    std::lock_guard<std::mutex> hold(blocked.lock);
    both = blocked.inside == 2;
  }
  counted work(50);
  pool.run(50, counted::task, &work);
  CHECK(work.each_once());
  blocked.open();
  other.join();
}

TEST_CASE("several callers and nested runs", "[thread_pool]") {
  cqsa::thread_pool pool(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        counted work(round % 9);
        pool.run(round % 9, counted::task, &work);
        if (!work.each_once()) ++wrong;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0);

  struct nest {
    cqsa::thread_pool* pool;
    std::atomic<int> leaves{0};
  } outer{&pool};
  pool.run(5, [](void* data, int64_t) {
    static_cast<nest*>(data)->pool->run(4, [](void* inner, int64_t) { ++static_cast<nest*>(inner)->leaves; }, data);
  }, &outer);
  CHECK(outer.leaves == 20);
}

TEST_CASE("pool threads take no signal of the host program", "[thread_pool]") {
  cqsa::thread_pool pool(3);
  struct masks {
    gate together;
    std::atomic<int> open_to_term{0}, closed_to_fault{0};
    pthread_t caller = pthread_self();
  } seen;
  pool.run(3, [](void* data, int64_t) {
    auto& m = *static_cast<masks*>(data);
    m.together.wait_for(3);
    if (pthread_equal(pthread_self(), m.caller)) return;
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    m.open_to_term += !sigismember(&now, SIGTERM) || !sigismember(&now, SIGUSR1);
    m.closed_to_fault += sigismember(&now, SIGBUS) || sigismember(&now, SIGSEGV);
  }, &seen);
  CHECK(seen.open_to_term == 0);
  CHECK(seen.closed_to_fault == 0);
  sigset_t mine;
  pthread_sigmask(SIG_SETMASK, nullptr, &mine);
  CHECK(sigismember(&mine, SIGTERM) == 0);
}

#ifndef THREAD_SANITIZER  // it allows no new threads in the child of a process that has some
namespace {

int child_status(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

bool counts(cqsa::thread_pool& pool) {
  gate all;
  pool.run(pool.size(), [](void* data, int64_t) { static_cast<gate*>(data)->wait_for(3); }, &all);
  counted work(100);
  pool.run(100, counted::task, &work);
  return work.each_once();
}

}  // namespace

TEST_CASE("a forked child gets threads of its own", "[thread_pool]") {
  {
    cqsa::thread_pool unused(3);
    CHECK(child_status([&] { return counts(unused); }) == 0);
    CHECK(counts(unused));
  }
  auto used = std::make_unique<cqsa::thread_pool>(3);
  CHECK(counts(*used));
  CHECK(child_status([&] { return counts(*used) && (used.reset(), true); }) == 0);
  CHECK(child_status([&] { used.reset(); return true; }) == 0);  // destroyed without a run: must not join
  CHECK(counts(*used));
}

TEST_CASE("fork while another thread is inside a run", "[thread_pool]") {
  cqsa::thread_pool pool(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      counted work(16);
      pool.run(16, counted::task, &work);
    }
  });
  for (int i = 0; i < 20; ++i) CHECK(child_status([&] { return counts(pool); }) == 0);
  stop = true;
  busy.join();
}
#endif

namespace {

struct lender {
  int32_t result = 0;
  std::vector<int64_t> calls;  // the indices it runs, in order; empty: all of them, once
  int asked = 0;

  static int32_t run(void* self, int64_t num_tasks, void (*task)(void*, int64_t), void* data) {
    auto& me = *static_cast<lender*>(self);
    ++me.asked;
    if (me.calls.empty())
      for (int64_t i = 0; i < num_tasks; ++i) task(data, i);
    for (const int64_t i : me.calls) task(data, i);
    return me.result;
  }
};

cqsa_status run_lent(lender& lend, counted& work) {
  cqsa_context context;
  context.parallel_for = lender::run;
  context.parallel_for_user = &lend;
  return cqsa::run_tasks(context, static_cast<int64_t>(work.times.size()), counted::task, &work);
}

}  // namespace

TEST_CASE("run_tasks without threads, with a pool, with nothing to do", "[run_tasks]") {
  cqsa_context context;
  counted serial(5);
  CHECK(cqsa::run_tasks(context, 5, counted::task, &serial) == CQSA_OK);
  CHECK(serial.each_once());
  context.pool = std::make_unique<cqsa::thread_pool>(2);
  counted pooled(5);
  CHECK(cqsa::run_tasks(context, 5, counted::task, &pooled) == CQSA_OK);
  CHECK(pooled.each_once());
  CHECK(cqsa::run_tasks(context, 0, nullptr, nullptr) == CQSA_OK);
}

TEST_CASE("a caller's parallel_for is used and checked", "[run_tasks]") {
  for (const int64_t tasks : {1, 2, 63, 64, 65, 4096, 4097, 10000}) {
    lender lend;
    counted work(tasks);
    CHECK(run_lent(lend, work) == CQSA_OK);
    CHECK(work.each_once());
    CHECK(lend.asked == 1);
  }
  lender idle;
  counted none(0);
  CHECK(run_lent(idle, none) == CQSA_OK);
  CHECK(idle.asked == 0);
}

TEST_CASE("a parallel_for that fails or miscounts is an error with numbers", "[run_tasks]") {
  const auto text = [] { return std::string(cqsa::last_error_text()); };
  {
    lender lend{7, {}};
    counted work(3);
    CHECK(run_lent(lend, work) == CQSA_ERROR_CALLBACK);
    CHECK(text() == "parallel_for returned 7 after 3 of 3 tasks, wanted 0");
  }
  {
    lender lend{0, {0, 2}};  // one left out
    counted work(3);
    CHECK(run_lent(lend, work) == CQSA_ERROR_CALLBACK);
    CHECK(text().find("but 2 of 3 tasks had ended and 0 calls") != std::string::npos);
  }
  {
    lender lend{0, {0, 2, 2}};  // the count alone would look right
    counted work(3);
    CHECK(run_lent(lend, work) == CQSA_ERROR_CALLBACK);
    CHECK(text().find("but 2 of 3 tasks had ended and 1 calls") != std::string::npos);
    CHECK(work.times == std::vector<int>{1, 0, 1});  // a task is never run twice
  }
  {
    lender lend{0, {0, 1, 2, 3, -1, INT64_MAX}};
    counted work(3);
    CHECK(run_lent(lend, work) == CQSA_ERROR_CALLBACK);
    CHECK(text().find("but 3 of 3 tasks had ended and 3 calls") != std::string::npos);
    CHECK(work.each_once());
  }
}

namespace {

struct fake_cgroups {
  std::string root;
  fake_cgroups() {
    char name[] = "/tmp/cqsa-cgroup-XXXXXX";
    root = mkdtemp(name);
  }
  ~fake_cgroups() { (void)!std::system(("rm -r '" + root + "'").c_str()); }
  void put(const std::string& file, const std::string& text) const {
    for (size_t at = root.size() + 1; (at = (root + "/" + file).find('/', at)) != std::string::npos; ++at)
      mkdir((root + "/" + file).substr(0, at).c_str(), 0777);
    std::ofstream(root + "/" + file) << text;
  }
  int cores(const std::string& membership) const {
    put("self", membership);
    return cqsa::cgroup_cores((root + "/self").c_str(), root.c_str());
  }
};

}  // namespace

TEST_CASE("cores: a cgroup's quota, rounded up", "[cores]") {
  CHECK(cqsa::available_cores() >= 1);
  CHECK(cqsa::available_cores() <= static_cast<int>(std::thread::hardware_concurrency()));
  CHECK(cqsa::cgroup_cores("/no/such/file", "/no/such/folder") == INT_MAX);

  fake_cgroups v2;
  CHECK(v2.cores("0::/\n") == INT_MAX);
  v2.put("a/b/cpu.max", "max 100000\n");
  CHECK(v2.cores("0::/a/b\n") == INT_MAX);
  v2.put("a/cpu.max", "250000 100000\n");
  CHECK(v2.cores("0::/a/b\n") == 3);  // the tightest one above counts
  v2.put("a/b/cpu.max", "50000 100000\n");
  CHECK(v2.cores("0::/a/b\n") == 1);
  v2.put("cpu.max", "400000 100000\n");
  CHECK(v2.cores("0::/only/the/host/sees/this\n") == 4);
  CHECK(v2.cores("nonsense\n\n0::\n0\n") == INT_MAX);

  fake_cgroups v1;
  v1.put("cpu/docker/x/cpu.cfs_quota_us", "-1\n");
  v1.put("cpu/docker/x/cpu.cfs_period_us", "100000\n");
  const std::string lines = "5:memory:/docker/x\n4:cpuset:/tight\n3:cpuacct,cpu:/docker/x\n0::/\n";
  CHECK(v1.cores(lines) == INT_MAX);
  v1.put("cpu/docker/x/cpu.cfs_quota_us", "150000\n");
  CHECK(v1.cores(lines) == 2);
  v1.put("cpu/tight/cpu.cfs_quota_us", "100000\n");
  v1.put("cpu/tight/cpu.cfs_period_us", "100000\n");
  CHECK(v1.cores("4:cpuset:/tight\n") == INT_MAX);  // cpuset is not cpu
}

TEST_CASE("kept staging: one block, not too large, in one pair of hands") {
  cqsa::kept_staging kept;
  uint64_t bytes = 0;
  char block[4];
  CHECK(kept.take(bytes) == nullptr);
  CHECK(!kept.keep(block, cqsa::kept_staging::most + 1));
  CHECK(kept.take(bytes) == nullptr);
  CHECK(kept.keep(block, cqsa::kept_staging::most));
  CHECK(!kept.keep(block + 1, 1));
  CHECK(kept.take(bytes) == block);
  CHECK(bytes == cqsa::kept_staging::most);
  CHECK(kept.take(bytes) == nullptr);
  // Four threads pass four blocks around: each is in one pair of hands at a time, and none gets lost.
  std::atomic<int> owners[4] = {{1}, {1}, {1}, {1}}, lost{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      char* mine = block + t;
      for (int i = 0; i < 20000; ++i) {
        uint64_t size = 0;
        if (mine) {
          const int at = static_cast<int>(mine - block);
          --owners[at];
          if (kept.keep(mine, static_cast<uint64_t>(at + 1))) mine = nullptr;
          else ++owners[at];
        } else if ((mine = static_cast<char*>(kept.take(size)))) {
          const int at = static_cast<int>(mine - block);
          lost += size != static_cast<uint64_t>(at + 1) || ++owners[at] != 1;
        }
      }
      if (mine) --owners[mine - block];
    });
  for (std::thread& t : threads) t.join();
  CHECK(lost == 0);
  for (const auto& o : owners) CHECK(o == 0);
}
