// SPDX-License-Identifier: Apache-2.0
// Streaming from host memory on the fake device: that compute is never kept waiting for what could have been fetched before, and
// that rings of every size move the right bytes.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "device_problem.h"

using namespace device_test;

namespace {

// Under a sanitizer the host is ten times slower and the device is not: there is nothing to measure, and much to wait for.
#ifdef CQSA_SANITIZED
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

cqsa_context* context_with(int32_t threads) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = "fake";
  params.backend_path = CQSA_TEST_PLUGIN_DIR;
  params.num_threads = threads;
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  return context;
}

// 8 windows of 4 MiB of keys and values for each of 8 tiles.
spec long_spec() {
  spec s;
  s.heads = s.kv_heads = 2, s.dim = s.dim_v = 64, s.nq = 512, s.nk = 32768, s.lse = false;
  return s;
}

cqsa_attention_params long_params(cqsa_context* context, operands& o) {
  cqsa_attention_params p = params_of(context, o);
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_q = 64, p.tile_k = 4096;
  return p;
}

cqsa_run_info run_on(cqsa_context* context, operands& o, const cqsa_attention_params& p, cqsa_plan_info* described = nullptr) {
  cqsa_plan* plan = nullptr;
  cqsa_status status = cqsa_attention_plan_create(context, &p, &plan);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  REQUIRE(cqsa_plan_describe(plan, &info) == CQSA_OK);
  if (described) *described = info;
  cqsa_run_info done = CQSA_RUN_INFO_INIT;
  cqsa_attention_args args = o.args();
  args.info = &done;
  status = cqsa_attention_execute(plan, &args, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  cqsa_plan_destroy(plan);
  CHECK(std::string(stats().error).empty());
  CHECK(leaked() == 0);
  CHECK(stats().live_objects == 0);
  CHECK(stats().pinned_peak_bytes == std::max(stats().pinned_before, done.peak_pinned_bytes));
  CHECK(done.peak_pinned_bytes == info.peak_pinned_bytes);
  return done;
}

int io_threads() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/task");
  while (const dirent* entry = readdir(folder)) {
    std::ifstream file(std::string("/proc/self/task/") + entry->d_name + "/comm");
    std::string name;
    if (std::getline(file, name)) count += name == "cqsa-io";
  }
  closedir(folder);
  return count;
}

}  // namespace

namespace {

// How long the device had no leaf to work on, against how long it had one.
double idle_share(cqsa_context* context, operands& o) {
  const cqsa_attention_params p = long_params(context, o);
  fake_config config{};
  config.leaf_us = 6000;
  config.copy_us_per_mib = 1500;
  configure(config);
  const cqsa_run_info done = run_on(context, o, p);
  const fake_counters c = stats();
  CHECK(done.tasks == 128);
  CHECK(c.bytes_in == done.bytes_in);
  std::printf("  %lld ms of leaves, idle %.1f ms (%.1f before the fourth leaf), %lld threads copied\n",
              static_cast<long long>(c.leaf_busy_us / 1000), 1e-3 * static_cast<double>(c.leaf_idle_us),
              1e-3 * static_cast<double>(c.leaf_idle_us - c.leaf_idle_late_us), static_cast<long long>(c.copiers));
  return static_cast<double>(c.leaf_idle_late_us) / static_cast<double>(c.leaf_busy_us);
}

}  // namespace

// Leaves of 6 ms, copies of 3 ms for each window: all but the first can be hidden behind the leaves, where one after the other
// would leave the device idle for half as long as it computes. Quiet machines measure 1 %; others run here too, so the best of
// three counts, and it may be more.
TEST_CASE("compute does not wait for what could have been fetched before", "[streaming]") {
  for (const int32_t threads : {1, 4})
    for (const bool pinned : {false, true})
      for (const bool inside : {false, true}) {
        spec s = long_spec();
        s.heads_inside = inside;
        operands o = make(s, 5);
        if (pinned)
          for (array* a : {&o.q, &o.k, &o.v, &o.out}) a->to_pinned();
        cqsa_context* context = context_with(threads);
        double share = 1;
        for (int attempt = 0; attempt < (sanitized ? 1 : 3) && share > 0.2; ++attempt) share = std::min(share, idle_share(context, o));
        INFO("threads " << threads << " pinned " << pinned << " heads inside " << inside);
        if (!sanitized) CHECK(share <= 0.2);
        cqsa_context_destroy(context);
      }
}

TEST_CASE("I/O threads start when there is work for them and end with the run", "[streaming]") {
  struct watch {
    int most = 0;
    static int32_t progress(void* self, int64_t, int64_t) {
      static_cast<watch*>(self)->most = std::max(static_cast<watch*>(self)->most, io_threads());
      return 0;
    }
  };
  for (const int32_t threads : {1, 3}) {
    operands o = make(long_spec(), 6);
    cqsa_context* context = context_with(threads);
    const cqsa_attention_params p = long_params(context, o);
    fake_config config{};
    config.leaf_us = 1000;
    configure(config);
    watch seen;
    cqsa_attention_args args = o.args();
    args.progress = watch::progress;
    args.progress_user = &seen;
    REQUIRE(cqsa_attention(context, &p, &args, nullptr) == CQSA_OK);
    CHECK(io_threads() == 0);
    if (threads == 1) CHECK(seen.most == 0);
    if (threads > 1) CHECK((seen.most >= 1 && seen.most <= 2 * threads));
    cqsa_context_destroy(context);
  }
}

TEST_CASE("any pinned budget gives the same bits", "[streaming]") {
  spec s;
  s.batch = 1, s.heads = 4, s.kv_heads = 2, s.nq = 700, s.nk = 5000, s.dim = s.dim_v = 64, s.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  operands o = make(s, 7);
  std::vector<char> first;
  for (const int32_t threads : {1, 2, 7})
    for (const uint64_t pinned : {uint64_t{0}, uint64_t{64} << 20, uint64_t{3} << 20, uint64_t{700} << 10, uint64_t{200} << 10, uint64_t{64}}) {
      cqsa_context* context = context_with(threads);
      cqsa_attention_params p = params_of(context, o);
      p.schedule = CQSA_SCHEDULE_STREAM;
      p.tile_q = 128, p.tile_k = 1024;
      p.max_pinned_bytes = pinned;
      fake_config config{};
      config.seed = pinned + static_cast<uint64_t>(threads);
      config.delay_max_us = 100;
      configure(config);
      o.out.fill(0xFF);
      INFO("threads " << threads << " pinned " << pinned);
      const cqsa_run_info done = run_on(context, o, p);
      if (pinned) CHECK(done.peak_pinned_bytes <= pinned);
      CHECK((done.peak_pinned_bytes > 0) == (pinned != 64));  // below the least slot the staging is pageable
      if (first.empty()) first = o.out.memory();
      CHECK((o.out.memory() == first));
      cqsa_context_destroy(context);
    }
}

// ---- mapped files ------------------------------------------------------------------------------------------------------------------

namespace {

// A tensor's bytes in a shared mapping of a file.
class mapping {
 public:
  // What has become of the file's name meanwhile: the device's threads read by it, if it still leads to the file.
  enum class name { removed, kept, replaced };

  explicit mapping(const std::vector<char>& bytes, name fate = name::removed) : size_(bytes.size()) {
    // In memory where there is such a folder: its folios are pages.
    std::string path = access("/dev/shm", W_OK) == 0 ? "/dev/shm/cqsa streaming_XXXXXX" : "/tmp/cqsa streaming_XXXXXX";
    const int fd = mkstemp(path.data());
    REQUIRE(fd >= 0);
    if (fate != name::kept) unlink(path.c_str());
    if (fate == name::replaced) std::ofstream(path) << std::string(size_, 'x');
    if (fate != name::removed) path_ = path;
    REQUIRE(write(fd, bytes.data(), size_) == static_cast<ssize_t>(size_));
    data_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(data_ != MAP_FAILED);
    close(fd);
  }
  ~mapping() {
    munmap(data_, size_);
    if (!path_.empty()) unlink(path_.c_str());
  }
  mapping(const mapping&) = delete;
  void* data() const { return data_; }
  bool equals(const std::vector<char>& other) const { return std::memcmp(data_, other.data(), size_) == 0; }
  float distance(const std::vector<char>& other) const {
    float most = 0;
    for (size_t i = 0; i < size_ / 4; ++i) {
      const float d = std::fabs(static_cast<const float*>(data_)[i] - reinterpret_cast<const float*>(other.data())[i]);
      most = d <= most ? most : d;  // a NaN too
    }
    return most;
  }
  void drop() const { madvise(data_, size_, MADV_DONTNEED); }
  // Resident bytes, by the kernel.
  uint64_t resident() const {
    std::ifstream maps("/proc/self/smaps");
    std::string line;
    uint64_t bytes = 0;
    bool inside = false;
    while (std::getline(maps, line)) {
      unsigned long from, to;
      unsigned long long kib;
      if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2)
        inside = from < reinterpret_cast<uintptr_t>(data_) + size_ && to > reinterpret_cast<uintptr_t>(data_);
      else if (inside && std::sscanf(line.c_str(), "Rss: %llu kB", &kib) == 1)
        bytes += kib << 10;
    }
    return bytes;
  }

 private:
  size_t size_;
  void* data_;
  std::string path_;  // to be removed
};

struct mapped_operands {
  mapping q, k, v, out;
  cqsa_tensor tensors[4];
  uint64_t most = 0;

  explicit mapped_operands(operands& o, mapping::name fate = mapping::name::removed)
      : q(o.q.memory(), fate), k(o.k.memory(), fate), v(o.v.memory(), fate), out(o.out.memory(), fate),
        tensors{*o.q.tensor(), *o.k.tensor(), *o.v.tensor(), *o.out.tensor()} {
    void* data[] = {q.data(), k.data(), v.data(), out.data()};
    for (int i = 0; i < 4; ++i) tensors[i].data = data[i];
  }
  void drop() const {
    for (const mapping* m : {&q, &k, &v, &out}) m->drop();
  }
  void into(cqsa_attention_args& args) const { args.q = tensors, args.k = tensors + 1, args.v = tensors + 2, args.out = tensors + 3; }
  static int32_t progress(void* self, int64_t, int64_t) {
    auto& m = *static_cast<mapped_operands*>(self);
    uint64_t now = 0;
    for (const mapping* one : {&m.q, &m.k, &m.v, &m.out}) now += one->resident();
    m.most = std::max(m.most, now);
    return 0;
  }
};

}  // namespace

TEST_CASE("operands in mapped files give the same bits, and their pages stay within the budget", "[streaming]") {
  for (const bool inside : {false, true})
    for (const int32_t schedule : {CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
      spec s;
      s.batch = 1, s.heads = 4, s.kv_heads = 2, s.dim = s.dim_v = 64, s.lse = false, s.heads_inside = inside;
      s.nq = s.nk = 6000, s.causal = CQSA_CAUSAL_BOTTOM_RIGHT, s.window = true, s.left = 300;
      if (schedule == CQSA_SCHEDULE_CQS) s.nq = s.nk = 1500;
      operands o = make(s, 17);
      for (const int32_t threads : sanitized ? std::vector<int32_t>{3} : std::vector<int32_t>{1, 3}) {
        cqsa_context* context = context_with(threads);
        cqsa_attention_params p = params_of(context, o);
        p.schedule = schedule;
        if (schedule == CQSA_SCHEDULE_STREAM) p.tile_q = 500, p.tile_k = 1000;
        if (schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 7, p.cqs_itr = 1;
        configure();
        o.out.fill(0xFF);
        cqsa_plan_info unmapped;
        run_on(context, o, p, &unmapped);
        const std::vector<char> wanted = o.out.memory();
        o.out.fill(0xFF);
        mapped_operands m(o);
        m.drop();
        p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_MAPPED;
        for (const uint64_t host : {uint64_t{0}, uint64_t{2} << 20, uint64_t{900} << 10}) {
          p.max_host_bytes = host;
          cqsa_plan* plan = nullptr;
          const cqsa_status made = cqsa_attention_plan_create(context, &p, &plan);
          INFO("inside " << inside << " schedule " << schedule << " threads " << threads << " host " << host << ": " << cqsa_last_error());
          REQUIRE(made == CQSA_OK);
          cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
          REQUIRE(cqsa_plan_describe(plan, &info) == CQSA_OK);
          cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
          cqsa_run_info done = CQSA_RUN_INFO_INIT;
          m.into(args);
          m.most = 0;
          args.info = &done;
          args.progress = mapped_operands::progress;
          args.progress_user = &m;
          const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
          INFO(cqsa_last_error());
          REQUIRE(status == CQSA_OK);
          // Fewer threads may make another plan of CQS the better one, with other leaf tiles.
          if (info.tasks == unmapped.tasks) CHECK(m.out.equals(wanted));
          else CHECK((schedule == CQSA_SCHEDULE_CQS && m.out.distance(wanted) < 1e-5f));
          CHECK(done.peak_host_bytes <= info.peak_host_bytes);
          if (host) CHECK(info.peak_host_bytes <= host);
          CHECK(m.most <= info.peak_host_bytes);
          m.drop();
          cqsa_plan_destroy(plan);
        }
        cqsa_context_destroy(context);
      }
    }
}

TEST_CASE("mapped files are read by their names, where those still lead to them", "[streaming]") {
  spec s;
  s.batch = 1, s.heads = 4, s.kv_heads = 2, s.dim = s.dim_v = 64, s.nq = s.nk = 6000, s.lse = false;
  operands o = make(s, 29);
  cqsa_context* const context = context_with(2);
  cqsa_attention_params p = params_of(context, o);
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_q = 512, p.tile_k = 2048;
  configure();
  const cqsa_attention_args plain = o.args();
  REQUIRE(cqsa_attention(context, &p, &plain, nullptr) == CQSA_OK);
  p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_MAPPED;
  for (const mapping::name fate : {mapping::name::removed, mapping::name::kept, mapping::name::replaced}) {
    mapped_operands m(o, fate);
    std::memset(m.out.data(), 0xFF, o.out.memory().size());
    m.drop();
    cqsa_attention_args args = o.args();
    m.into(args);
    // Operands of which no page becomes resident were read, not mapped.
    struct seen {
      mapped_operands& m;
      uint64_t most = 0;
      static int32_t progress(void* self, int64_t, int64_t) {
        auto& w = *static_cast<seen*>(self);
        w.most = std::max(w.most, w.m.q.resident() + w.m.k.resident() + w.m.v.resident());
        return 0;
      }
    } w{m};
    args.progress = seen::progress;
    args.progress_user = &w;
    const cqsa_status status = cqsa_attention(context, &p, &args, nullptr);
    INFO("name " << static_cast<int>(fate) << ": " << cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    CHECK(m.out.equals(o.out.memory()));
    if (fate == mapping::name::kept) CHECK(w.most == 0);
    CHECK(std::string(stats().error).empty());
    CHECK(leaked() == 0);
  }
  cqsa_context_destroy(context);
}

// Pages of the operands that are touched tell what was copied. The device has two buffers for windows of 1 MiB, and is busy; the
// ring has 16 slots of 512 KiB, which are to be filled all the same, by eight threads.
TEST_CASE("slots are filled behind the device's buffers", "[streaming]") {
  constexpr uint64_t wanted = uint64_t{8} << 20;  // what is in the buffers, and was, is 4 MiB
  spec s = long_spec();
  s.nq = 1024;  // so much is moved that the ring is worth pinning
  operands o = make(s, 8);
  const mapping k(o.k.memory()), v(o.v.memory());
  cqsa_tensor tk = *o.k.tensor(), tv = *o.v.tensor();
  tk.data = k.data(), tv.data = v.data();
  struct watch {
    const mapping &k, &v;
    int64_t calls = 0;
    int threads = 0;
    uint64_t touched = 0;
    static int32_t progress(void* self, int64_t, int64_t) {
      auto& w = *static_cast<watch*>(self);
      if (++w.calls < 3) return 0;  // two leaves are launched
      for (int i = 0; i < 500 && w.touched < wanted; ++i) {
        w.touched = w.k.resident() + w.v.resident();
        w.threads = std::max(w.threads, io_threads());
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return 1;
    }
  };
  cqsa_context* context = context_with(8);
  cqsa_attention_params p = long_params(context, o);
  p.tile_k = 2048;
  fake_config config{};
  config.leaf_us = 20000;
  configure(config);
  k.drop(), v.drop();
  watch seen{k, v};
  cqsa_attention_args args = o.args();
  args.k = &tk, args.v = &tv;
  args.progress = watch::progress;
  args.progress_user = &seen;
  REQUIRE(cqsa_attention(context, &p, &args, nullptr) == CQSA_ERROR_CANCELLED);
  CHECK(seen.touched >= wanted);
  CHECK(seen.threads == 8);
  CHECK(std::string(stats().error).empty());
  CHECK(leaked() == 0);
  CHECK(stats().live_objects == 0);
  cqsa_context_destroy(context);
}

TEST_CASE("what is called mapped and is not, is refused", "[streaming]") {
  operands o = make(spec{}, 19);
  cqsa_attention_params p = params_of(device_context(), o);
  p.memory_kv = CQSA_MEMORY_MAPPED;
  const cqsa_attention_args args = o.args();
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(cqsa_last_error()).find("which is not in a mapping of a file") != std::string::npos);
  CHECK(leaked() == 0);
}

TEST_CASE("a private mapping is taken as mapped only if it was never written", "[streaming]") {
  spec s;
  s.dim = s.dim_v = 64, s.nq = 64, s.nk = 8192;
  operands o = make(s, 23);
  cqsa_attention_params p = params_of(device_context(), o);
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_k = 512;
  const cqsa_attention_args first = o.args();
  REQUIRE(cqsa_attention(device_context(), &p, &first, nullptr) == CQSA_OK);
  const std::vector<char> wanted = o.out.memory(), keys = o.k.memory();
  p.memory_kv = CQSA_MEMORY_MAPPED;
  const mapping v(o.v.memory());
  for (const bool written : {false, true}) {
    const int fd = memfd_create("cqsa", MFD_CLOEXEC);
    REQUIRE(write(fd, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()));
    char* const k = static_cast<char*>(mmap(nullptr, keys.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0));
    REQUIRE(k != MAP_FAILED);
    if (written) {
      std::memset(k, 0, keys.size());  // the file keeps zeros, the process has the keys
      REQUIRE(pwrite(fd, k, keys.size(), 0) == static_cast<ssize_t>(keys.size()));
      std::memcpy(k, keys.data(), keys.size());
    }
    close(fd);
    REQUIRE(mprotect(k, keys.size(), PROT_READ) == 0);
    cqsa_attention_args args = o.args();
    cqsa_tensor k_tensor = *args.k, v_tensor = *args.v;
    k_tensor.data = k, v_tensor.data = v.data();
    args.k = &k_tensor, args.v = &v_tensor;
    for (int64_t i = 0; i < o.out.count(); ++i) o.out.set(i, 77);
    const std::vector<char> before = o.out.memory();
    const cqsa_status status = cqsa_attention(device_context(), &p, &args, nullptr);
    INFO("written " << written << ": " << cqsa_last_error());
    CHECK(status == (written ? CQSA_ERROR_INVALID_ARGUMENT : CQSA_OK));
    if (written) CHECK(std::string(cqsa_last_error()).find("args->k is at") == 0);
    CHECK(o.out.memory() == (written ? before : wanted));
    CHECK(std::memcmp(k, keys.data(), keys.size()) == 0);
    CHECK(std::string(stats().error).empty());
    CHECK(leaked() == 0);
    munmap(k, keys.size());
  }
}

// ---- checkpoints -------------------------------------------------------------------------------------------------------------------

namespace {

// Cancels a run after so many calls of progress.
struct canceller {
  int64_t left;
  static int32_t progress(void* self, int64_t, int64_t) { return --static_cast<canceller*>(self)->left <= 0; }
};

std::string state_path() { return "/tmp/cqsa_streaming_state_" + std::to_string(getpid()); }

}  // namespace

TEST_CASE("a run on the device goes on where its checkpoint says", "[streaming]") {
  const std::string path = state_path();
  for (const bool kv_device : {false, true})
    for (const bool varlen : {false, true}) {
      spec s;
      s.batch = 3, s.heads = 4, s.kv_heads = 2, s.nq = 130, s.nk = 150, s.dim = 24, s.dim_v = 20, s.lse = false;
      s.causal = CQSA_CAUSAL_BOTTOM_RIGHT, s.kv_device = kv_device, s.varlen = varlen, s.tail = varlen ? 7 : 0;
      operands o = make(s, 31);
      place(o);
      cqsa_attention_params p = params_of(device_context(), o);
      p.schedule = CQSA_SCHEDULE_STREAM;
      p.tile_q = 32, p.tile_k = 48;
      configure();
      run_on(device_context(), o, p);
      const std::vector<char> wanted = o.out.memory();
      o.out.fill(0xFF);
      const mapping out(o.out.memory());
      cqsa_tensor tensor = *o.out.tensor();
      tensor.data = out.data();
      cqsa_attention_args args = o.args();
      args.out = &tensor;
      args.checkpoint = path.c_str();
      // Every life does a little more than the one before.
      int64_t tasks = 0, lives = 0;
      cqsa_run_info whole = CQSA_RUN_INFO_INIT, done = CQSA_RUN_INFO_INIT;
      args.info = &whole;
      REQUIRE(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_OK);
      CHECK(out.equals(wanted));
      CHECK(access(path.c_str(), F_OK) != 0);
      std::memset(out.data(), 0xFF, wanted.size());
      args.info = &done;
      cqsa_status status = CQSA_ERROR_CANCELLED;
      for (int64_t calls = 4; status == CQSA_ERROR_CANCELLED && lives < 200; ++calls, ++lives) {
        canceller c{calls};
        args.progress = canceller::progress;
        args.progress_user = &c;
        status = cqsa_attention(device_context(), &p, &args, nullptr);
        tasks += done.tasks;
        CHECK(leaked() == 0);
        CHECK(std::string(stats().error).empty());
      }
      INFO("kv on device " << kv_device << " varlen " << varlen << ", lives " << lives << ": " << cqsa_last_error());
      REQUIRE(status == CQSA_OK);
      CHECK(lives > 2);
      CHECK(out.equals(wanted));
      CHECK(tasks <= whole.tasks + 12 * lives);  // what was in flight is lost with each life, no more
      CHECK(access(path.c_str(), F_OK) != 0);
    }
}

TEST_CASE("a checkpoint of the device survives a re-plan, and is refused where it cannot be", "[streaming]") {
  const std::string path = state_path();
  spec s;
  s.batch = 1, s.heads = 4, s.kv_heads = 2, s.nq = 300, s.nk = 400, s.dim = 24, s.dim_v = 20, s.lse = false;
  operands o = make(s, 29);
  cqsa_attention_params p = params_of(device_context(), o);
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_q = 32, p.tile_k = 48;
  const mapping out(o.out.memory());
  cqsa_tensor tensor = *o.out.tensor();
  tensor.data = out.data();
  cqsa_attention_args args = o.args();
  args.checkpoint = path.c_str();
  configure();
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);  // out is not in a file
  CHECK(std::string(cqsa_last_error()).find("shared mapping") != std::string::npos);
  args.out = &tensor;
  fake_config config{};
  config.fail_launch = 40;
  configure(config);
  cqsa_run_info done = CQSA_RUN_INFO_INIT;
  args.info = &done;
  REQUIRE(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_OK);
  CHECK(done.retries == 1);
  CHECK(access(path.c_str(), F_OK) != 0);
  // Killed after the re-plan: what was finished before it is kept, the rest is done again.
  configure(config);
  canceller c{20};
  args.progress = canceller::progress;
  args.progress_user = &c;
  REQUIRE(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_CANCELLED);
  CHECK(access(path.c_str(), F_OK) == 0);
  args.progress = nullptr;
  configure();
  REQUIRE(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_OK);
  run_on(device_context(), o, p);
  CHECK(out.equals(o.out.memory()));
  p.schedule = CQSA_SCHEDULE_CQS;
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) != CQSA_OK);  // nq is not nk
}

// ---- the machine -------------------------------------------------------------------------------------------------------------------

TEST_CASE("a device is measured once in a process", "[streaming]") {
  const auto hardware = [](cqsa_context* context) {
    char text[2048];
    REQUIRE(cqsa_context_hardware(context, text, sizeof text, nullptr) == CQSA_OK);
    CHECK(leaked() == 0);
    CHECK(stats().live_objects == 0);
    return std::string(text);
  };
  const auto without_workers = [](std::string text) { return text.erase(text.find("\"workers\""), text.find("\"flops_64\"") - text.find("\"workers\"")); };
  cqsa_context *first = context_with(2), *second = context_with(3);
  // Not while it is full.
  fake_config full{};
  full.memory_limit = 1 << 20;
  configure(full);
  hardware(first);
  CHECK(stats().copies == 0);
  configure();
  const std::string once = hardware(first);
  CHECK(stats().copies > 0);
  configure();
  const std::string again = hardware(second);
  CHECK(stats().copies == 0);
  CHECK(without_workers(once) == without_workers(again));
  CHECK(once.find("\"workers\": 2") != std::string::npos);
  CHECK(again.find("\"workers\": 3") != std::string::npos);
  cqsa_context_destroy(first);
  cqsa_context_destroy(second);
}
