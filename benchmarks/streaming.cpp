// SPDX-License-Identifier: Apache-2.0
// Streaming from host memory on a device: transfers alone, with leaves that do nothing (libcqsa_nop.so), against the link; then a
// long sequence within a small budget against the same work on resident operands.
//   bench_streaming [--backend cuda] [--path FOLDER] [--threads N] [--tokens N] [--budget MiB] [--keys MiB] [--file FOLDER] [--only 1|2]
//                   [--precision 0..3] [--whole 0|1]
// --precision 3 is the portable kernel where there are matrix units; --whole 1 runs all queries instead of the first 5 % of the work.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "backends/cqsa_backend.h"
#include "cqsa_build_id.h"

namespace {

using clock_type = std::chrono::steady_clock;
double seconds_since(clock_type::time_point start) { return std::chrono::duration<double>(clock_type::now() - start).count(); }

struct options {
  std::string backend = "cuda", path, folder = "/tmp";
  int threads = 0, only = 0, precision = 0, whole = 0;
  int64_t tokens = 1 << 20, budget = int64_t{512} << 20, keys = int64_t{2048} << 20;
} opt;

[[noreturn]] void stop(const std::string& what) {
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}
void must(cqsa_status status, const char* what) {
  if (status != CQSA_OK) stop(std::string(what) + ": " + cqsa_last_error());
}

// ---- the plugin, for memory and plain copies -----------------------------------------------------------------------------------------

struct device {
  const cqsa_backend_v1* b = nullptr;
  void* handle = nullptr;

  void open() {
    void* library = dlopen((opt.path + "/libcqsa_" + opt.backend + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) stop(dlerror());
    const auto entry = reinterpret_cast<cqsa_backend_entry_fn>(dlsym(library, CQSA_BACKEND_ENTRY));
    const cqsa_host_v1 host{sizeof(cqsa_host_v1), CQSA_ABI_VERSION, CQSA_BUILD_ID};
    if (!entry || entry(&host, &b) != CQSA_OK) stop("the plugin does not belong to this build");
    check(b->device_open(0, &handle));
  }
  void check(cqsa_status status) const {
    if (status != CQSA_OK) stop(b->last_error());
  }
  void* on_device(uint64_t bytes) const {
    void* p = nullptr;
    check(b->device_alloc(handle, bytes, &p));
    return p;
  }
  void* pinned(uint64_t bytes) const {
    void* p = nullptr;
    check(b->pinned_alloc(handle, bytes, &p));
    return p;
  }
  void upload(void* to, const void* from, uint64_t bytes) const {
    void* stream = nullptr;
    check(b->stream_create(handle, &stream));
    check(b->copy(handle, to, from, bytes, CQSA_COPY_TO_DEVICE, stream));
    check(b->stream_sync(handle, stream));
    b->stream_destroy(handle, stream);
  }
  uint64_t free_bytes() const {
    cqsa_device_properties p{};
    b->device_properties(0, &p);
    return p.free_bytes;
  }
} gpu;

// GB/s of the link: one copy of 256 MiB from pinned memory, the best of ten.
double link_rate() {
  constexpr uint64_t bytes = uint64_t{256} << 20;
  void *host = gpu.pinned(bytes), *there = gpu.on_device(bytes);
  double best = 0;
  for (int i = 0; i < 10; ++i) {
    const auto start = clock_type::now();
    gpu.upload(there, host, bytes);
    best = std::max(best, static_cast<double>(bytes) / seconds_since(start) * 1e-9);
  }
  gpu.b->device_free(gpu.handle, there);
  gpu.b->pinned_free(gpu.handle, host);
  return best;
}

// ---- operands ----------------------------------------------------------------------------------------------------------------------

void in_parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t parts = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < parts; ++i) threads.emplace_back(body, count * i / parts, count * (i + 1) / parts);
  for (std::thread& t : threads) t.join();
}

uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// f16 bits of n / 256, n an integer of up to 11 bits with a sign: exact.
uint16_t half_of(int n) {
  if (n == 0) return 0;
  const int m = n < 0 ? -n : n, exponent = 31 - __builtin_clz(static_cast<unsigned>(m));
  return static_cast<uint16_t>((n < 0 ? 0x8000 : 0) | (exponent - 8 + 15) << 10 | ((m << (10 - exponent)) & 0x3FF));
}
double value_of(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 0x3FF;
  const double x = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return h & 0x8000 ? -x : x;
}

// Values in (-range, range), of which one in 1/256.
void fill(void* memory, int64_t elements, uint64_t seed, int range) {
  std::vector<uint16_t> table(static_cast<size_t>(2 * range * 256));
  for (size_t i = 0; i < table.size(); ++i) table[i] = half_of(static_cast<int>(i) - range * 256);
  in_parallel(elements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      static_cast<uint16_t*>(memory)[i] = table[mixed(seed + static_cast<uint64_t>(i)) % table.size()];
  });
}

enum class place { device, pinned, pageable, file };
const char* name_of(place p) { return p == place::pinned ? "pinned" : p == place::pageable ? "pageable" : p == place::file ? "file" : "device"; }

struct memory {
  place where;
  uint64_t bytes;
  void* data = nullptr;
  std::string path;  // of a file, while it is there: the library reads by it

  memory(place w, uint64_t n) : where(w), bytes(n) {
    if (where == place::device) data = gpu.on_device(bytes);
    if (where == place::pinned) data = gpu.pinned(bytes);
    if (where == place::pageable) data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (where == place::file) map_file();
    if (!data || data == MAP_FAILED) stop(std::string("no memory: ") + name_of(where));
  }
  ~memory() {
    if (where == place::device) gpu.b->device_free(gpu.handle, data);
    else if (where == place::pinned) gpu.b->pinned_free(gpu.handle, data);
    else munmap(data, bytes);
    if (!path.empty()) unlink(path.c_str());
  }
  memory(const memory&) = delete;
  void map_file() {
    path = opt.folder + "/cqsa_streaming_XXXXXX";
    const int fd = mkstemp(path.data());
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) stop("no file in " + opt.folder);
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
  }
};

// [1, heads, rows, 64] in f16.
struct tensor {
  int64_t shape[4];
  cqsa_tensor view;
  tensor(void* data, place where, int64_t heads, int64_t rows) : shape{1, heads, rows, 64} {
    const int32_t type = where == place::device ? gpu.b->device_type : where == place::pinned ? gpu.b->pinned_type : CQSA_DEVICE_CPU;
    view = {data, type, 0, 4, CQSA_DTYPE_F16, shape, nullptr, 0};
  }
  tensor(const tensor&) = delete;
};

cqsa_context* context_of(const char* backend) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = backend;
  params.backend_path = opt.path.c_str();
  params.num_threads = opt.threads;
  cqsa_context* context = nullptr;
  must(cqsa_context_create(&params, &context), "context");
  return context;
}

// ---- the device's memory, seen from beside the library ----------------------------------------------------------------------------

class watcher {
 public:
  watcher() : before_(gpu.free_bytes()), least_(before_), thread_([this] { run(); }) {}
  uint64_t finish() {
    stop_ = true;
    thread_.join();
    return before_ - std::min(before_, least_);
  }

 private:
  void run() {
    while (!stop_) {
      least_ = std::min(least_, gpu.free_bytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  uint64_t before_, least_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// ---- 1. transfers alone --------------------------------------------------------------------------------------------------------------

double staging_rate(cqsa_context* context, place where, double link) {
  const int64_t heads = 8, rows = opt.keys / 2 / heads / 128, queries = 8192;
  const auto bytes = static_cast<uint64_t>(heads * rows * 128);
  memory k(where, bytes), v(where, bytes), q(place::pageable, static_cast<uint64_t>(heads * queries * 128)), o(place::pageable, q.bytes);
  for (const memory* m : {&k, &v, &q}) fill(m->data, static_cast<int64_t>(m->bytes / 2), m->bytes, 1);
  std::memset(o.data, 0, o.bytes);
  tensor tq(q.data, place::pageable, heads, queries), tk(k.data, where, heads, rows), tv(v.data, where, heads, rows),
      to(o.data, place::pageable, heads, queries);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tq.view, args.k = &tk.view, args.v = &tv.view, args.out = &to.view;
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  must(cqsa_attention_params_of(context, &args, &p), "params");
  if (where == place::file) p.memory_kv = CQSA_MEMORY_MAPPED;
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_q = 128;  // so that all keys come 64 times
  p.tile_k = 65536;
  p.max_device_bytes = static_cast<uint64_t>(opt.budget);
  double best = 0;
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  args.info = &info;
  for (int i = 0; i < 3; ++i) {
    must(cqsa_attention(context, &p, &args, nullptr), "transfers");
    best = std::max(best, static_cast<double>(info.bytes_in) / info.seconds * 1e-9);
  }
  std::printf("  %-8s %6.2f GB/s in whole runs, %5.1f %% of the link; %.1f GB in %.2f s, %lld calls, pinned %.0f MiB, host %.1f MiB, device %.0f MiB\n",
              name_of(where), best, 100 * best / link, static_cast<double>(info.bytes_in) * 1e-9, info.seconds,
              static_cast<long long>(info.tasks), static_cast<double>(info.peak_pinned_bytes) / 1048576.0,
              static_cast<double>(info.peak_host_bytes) / 1048576.0, static_cast<double>(info.peak_device_bytes) / 1048576.0);
  std::fflush(stdout);
  return best;
}

// ---- 2. a long sequence --------------------------------------------------------------------------------------------------------------

constexpr int64_t heads = 8, dim = 64;
double pairs_of(double rows) { return rows * (rows + 1) / 2; }
// The queries that hold the first 5 % of a causal problem, those of the first 22 % of the tokens, in whole tiles.
int64_t first_rows(int64_t tile) {
  const double rows = std::sqrt(0.05) * static_cast<double>(opt.tokens);
  return std::min(opt.tokens, static_cast<int64_t>(std::ceil(rows / static_cast<double>(tile))) * tile);
}

double worst_error(const memory& q, const memory& k, const memory& v, const memory& o, int64_t rows, double& scale_out) {
  const auto row_of = [](const memory& m, int64_t head, int64_t row) {
    const int64_t stride = static_cast<int64_t>(m.bytes) / (heads * dim * 2);
    return static_cast<const uint16_t*>(m.data) + (head * stride + row) * dim;
  };
  std::atomic<double> worst{0}, largest{0};
  constexpr int64_t samples = 64;
  in_parallel(samples, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = static_cast<int64_t>(mixed(static_cast<uint64_t>(i)) % uint64_t{heads});
      const int64_t row = static_cast<int64_t>(mixed(static_cast<uint64_t>(i) + 1000) % static_cast<uint64_t>(rows));
      std::vector<double> logits(static_cast<size_t>(row + 1));
      double m = -HUGE_VAL, l = 0, acc[dim] = {};
      for (int64_t j = 0; j <= row; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < dim; ++c) dot += value_of(row_of(q, head, row)[c]) * value_of(row_of(k, head, j)[c]);
        m = std::max(m, logits[static_cast<size_t>(j)] = dot / 8);
      }
      for (int64_t j = 0; j <= row; ++j) {
        const double p = std::exp(logits[static_cast<size_t>(j)] - m);
        l += p;
        for (int64_t c = 0; c < dim; ++c) acc[c] += p * value_of(row_of(v, head, j)[c]);
      }
      for (int64_t c = 0; c < dim; ++c) {
        const double error = std::fabs(value_of(row_of(o, head, row)[c]) - acc[c] / l);
        for (double w = worst; error > w && !worst.compare_exchange_weak(w, error);) {}
        for (double w = largest; std::fabs(acc[c] / l) > w && !largest.compare_exchange_weak(w, std::fabs(acc[c] / l));) {}
      }
    }
  });
  scale_out = largest;
  return worst;
}

// FLOP/s of the same queries with everything on the device, keys that none of them sees left out.
double resident_rate(cqsa_context* context, const memory& from_q, const memory& from_k, const memory& from_v, int64_t rows) {
  const auto bytes = static_cast<uint64_t>(heads * rows * dim * 2);
  memory q(place::device, bytes), k(place::device, bytes), v(place::device, bytes), o(place::device, bytes);
  const memory* from[3] = {&from_q, &from_k, &from_v};
  void* to[3] = {q.data, k.data, v.data};
  const auto line = static_cast<uint64_t>(rows * dim * 2);
  for (int i = 0; i < 3; ++i)
    for (uint64_t h = 0; h < heads; ++h)
      gpu.upload(static_cast<char*>(to[i]) + h * line, static_cast<const char*>(from[i]->data) + h * (from[i]->bytes / heads), line);
  tensor tq(q.data, place::device, heads, rows), tk(k.data, place::device, heads, rows), tv(v.data, place::device, heads, rows),
      to_(o.data, place::device, heads, rows);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tq.view, args.k = &tk.view, args.v = &tv.view, args.out = &to_.view;
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  p.causal = CQSA_CAUSAL_TOP_LEFT;
  p.precision = opt.precision;
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    void* stream = nullptr;
    gpu.check(gpu.b->stream_create(gpu.handle, &stream));
    const auto start = clock_type::now();
    must(cqsa_attention(context, &p, &args, stream), "resident");
    gpu.check(gpu.b->stream_sync(gpu.handle, stream));
    best = std::max(best, 4.0 * dim * static_cast<double>(heads) * pairs_of(static_cast<double>(rows)) / seconds_since(start));
    gpu.b->stream_destroy(gpu.handle, stream);
  }
  return best;
}

// A small run first: kernels are loaded at their first use, and their code is not the library's memory.
void warm_up(cqsa_context* context) {
  constexpr int64_t rows = 1024;
  std::vector<uint16_t> data(static_cast<size_t>(heads * rows * dim));
  tensor t(data.data(), place::pageable, heads, rows), out(data.data(), place::pageable, heads, rows);
  std::vector<uint16_t> result(data.size());
  out.view.data = result.data();
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = args.k = args.v = &t.view, args.out = &out.view;
  for (const int64_t keys : {rows, rows / 4}) {
    cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
    p.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    p.schedule = CQSA_SCHEDULE_STREAM;
    p.tile_q = p.tile_k = keys;
    must(cqsa_attention(context, &p, &args, nullptr), "a small run");
  }
}

// The plan of the whole, and of that the queries of the first 5 % of the work with the same tiles: a run from its first byte to its
// last, since a run that is stopped says which tiles have left it, not what the device was doing meanwhile.
void long_sequence(cqsa_context* context, place where, double& resident) {
  const auto bytes = static_cast<uint64_t>(heads * opt.tokens * dim * 2);
  memory q(where, bytes), k(where, bytes), v(where, bytes), o(where, bytes);
  fill(q.data, static_cast<int64_t>(bytes / 2), 1, 4);
  fill(k.data, static_cast<int64_t>(bytes / 2), uint64_t{1} << 40, 1);
  fill(v.data, static_cast<int64_t>(bytes / 2), uint64_t{2} << 40, 1);
  in_parallel(static_cast<int64_t>(bytes), [&](int64_t begin, int64_t end) { std::memset(static_cast<char*>(o.data) + begin, 0xFF, static_cast<size_t>(end - begin)); });
  tensor tq(q.data, where, heads, opt.tokens), tk(k.data, where, heads, opt.tokens), tv(v.data, where, heads, opt.tokens), to(o.data, where, heads, opt.tokens);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tq.view, args.k = &tk.view, args.v = &tv.view, args.out = &to.view;
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  must(cqsa_attention_params_of(context, &args, &p), "params");
  if (where == place::file) p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_MAPPED;
  p.causal = CQSA_CAUSAL_TOP_LEFT;
  p.precision = opt.precision;
  p.max_device_bytes = static_cast<uint64_t>(opt.budget);
  const auto planned_for = [&](cqsa_plan*& plan) {
    must(cqsa_attention_plan_create(context, &p, &plan), "plan");
    cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
    must(cqsa_plan_describe(plan, &info), "describe");
    return info;
  };
  cqsa_plan *whole = nullptr, *plan = nullptr;
  cqsa_plan_info planned = planned_for(whole);
  const double predicted = planned.seconds;
  cqsa_plan_destroy(whole);
  p.tile_q = planned.tile_q;
  p.tile_k = planned.tile_k;
  const int64_t rows = p.seqlen_q = tq.shape[2] = to.shape[2] = opt.whole ? opt.tokens : first_rows(planned.tile_q);
  int64_t strides[4] = {heads * opt.tokens * dim, opt.tokens * dim, dim, 1};
  tq.view.strides = to.view.strides = strides;
  planned = planned_for(plan);
  char line[1024] = "";
  must(cqsa_plan_line(plan, nullptr, line, sizeof line, nullptr), "line");
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  args.info = &info;
  watcher memory_watch;
  double best = HUGE_VAL;
  for (int i = 0; i < 3; ++i) {
    const auto start = clock_type::now();
    must(cqsa_attention_execute(plan, &args, nullptr), "the long run");
    best = std::min(best, seconds_since(start));
  }
  const uint64_t seen = memory_watch.finish();
  const double rate = 4.0 * dim * static_cast<double>(heads) * pairs_of(static_cast<double>(rows)) / best;
  if (resident == 0) resident = resident_rate(context, q, k, v, rows);
  double largest = 0;
  const double error = worst_error(q, k, v, o, rows, largest);
  std::printf("  %-8s %7.2f TFLOP/s, %.3f of the resident time; %.2f s; tiles %lld x %lld, %d buffers, %lld calls\n"
              "           device %.1f MiB planned, %.1f used, %.1f seen from outside, budget %.0f; pinned %.1f; %.1f GB in; error %.2e of %.2e\n"
              "           %s\n           the whole: predicted %.1f s\n",
              name_of(where), rate * 1e-12, resident / rate, best, static_cast<long long>(planned.tile_q), static_cast<long long>(planned.tile_k),
              planned.in_flight, static_cast<long long>(info.tasks), static_cast<double>(planned.peak_device_bytes) / 1048576.0,
              static_cast<double>(info.peak_device_bytes) / 1048576.0, static_cast<double>(seen) / 1048576.0,
              static_cast<double>(opt.budget) / 1048576.0, static_cast<double>(info.peak_pinned_bytes) / 1048576.0,
              static_cast<double>(info.bytes_in) * 1e-9, error, largest, line, predicted);
  std::fflush(stdout);
  cqsa_plan_destroy(plan);
}

void read_options(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--backend") opt.backend = value;
    else if (name == "--path") opt.path = value;
    else if (name == "--file") opt.folder = value;
    else if (name == "--threads") opt.threads = std::atoi(value.c_str());
    else if (name == "--tokens") opt.tokens = std::atoll(value.c_str());
    else if (name == "--budget") opt.budget = std::atoll(value.c_str()) << 20;
    else if (name == "--keys") opt.keys = std::atoll(value.c_str()) << 20;
    else if (name == "--only") opt.only = std::atoi(value.c_str());
    else if (name == "--precision") opt.precision = std::atoi(value.c_str());
    else if (name == "--whole") opt.whole = std::atoi(value.c_str());
    else stop("unknown option " + name);
  }
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&cqsa_version), &self);
  if (opt.path.empty()) opt.path = std::string(self.dli_fname).substr(0, std::string(self.dli_fname).find_last_of('/'));
  char real[4096];
  if (!realpath(opt.path.c_str(), real)) stop("no folder " + opt.path);
  opt.path = real;
}

}  // namespace

int main(int argc, char** argv) {
  read_options(argc, argv);
  setenv("CQSA_NOP_OF", opt.backend.c_str(), 1);
  gpu.open();
  if (opt.only != 2) {
    const double link = link_rate();
    std::printf("1. transfers alone; the link from pinned memory: %.2f GB/s\n", link);
    cqsa_context* nop = context_of("nop");
    for (const place where : {place::pinned, place::pageable, place::file}) staging_rate(nop, where, link);
    cqsa_context_destroy(nop);
    std::printf("  the link again: %.2f GB/s\n", link_rate());
  }
  if (opt.only != 1) {
    cqsa_context* context = context_of(opt.backend.c_str());
    std::printf("2. %lld tokens, 8 heads, head_dim 64, f16, causal%s\n", static_cast<long long>(opt.tokens), opt.whole ? "" : ", the first 5 %");
    double resident = 0;
    warm_up(context);
    char machine[2048] = "";
    must(cqsa_context_hardware(context, machine, sizeof machine, nullptr), "measuring the machine");  // plans go by it from now on
    std::printf("  %s\n", machine);
    for (const place where : {place::pinned, place::pageable, place::file}) long_sequence(context, where, resident);
    std::printf("  resident: %.2f TFLOP/s\n", resident * 1e-12);
    cqsa_context_destroy(context);
  }
  return 0;
}
