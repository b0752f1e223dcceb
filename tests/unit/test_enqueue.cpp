// SPDX-License-Identifier: Apache-2.0
// Enqueue mode through the public API and the fake device: what is queued, what is not waited for, what is refused before the
// stream is touched, and that results are those of the f64 reference.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "enqueue_test.h"

using namespace device_test;

namespace {

// ---- streams of the caller -------------------------------------------------------------------------------------------------------

struct own_stream {
  void* handle;
  explicit own_stream(int32_t device = 0) : handle(fake().stream_create(device)) {}
  ~own_stream() { fake().stream_destroy(handle); }
  void sync() const { fake().stream_sync(handle); }
  void call(std::function<void()>& task) const {
    fake().stream_call(handle, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &task);
  }
};

// Holds a stream until it is opened.
class gate {
 public:
  explicit gate(const own_stream& stream) { stream.call(task_); }
  void open() {
    const std::lock_guard hold(lock_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool open_ = false;
  std::function<void()> task_ = [this] {
    std::unique_lock hold(lock_);
    changed_.wait(hold, [this] { return open_; });
  };
};

// ---- problems --------------------------------------------------------------------------------------------------------------------

spec random_spec(generator& r) {
  spec s;
  s.batch = between(r, 1, 3), s.kv_heads = between(r, 1, 3), s.heads = s.kv_heads * between(r, 1, 3);
  s.dim = between(r, 1, 40), s.dim_v = between(r, 1, 40), s.nq = between(r, 1, 90), s.nk = between(r, 1, 120);
  s.causal = static_cast<int32_t>(between(r, 0, 2));
  if (chance(r, 20)) s.q = s.kv = s.out = CQSA_DTYPE_F16;
  if (chance(r, 20)) s.kv = CQSA_DTYPE_I8, s.scale_k = s.scale_v = CQSA_SCALE_GROUP, s.kv_group = 32;
  if (chance(r, 20)) s.mask = static_cast<int>(between(r, 0, 15));
  if (chance(r, 20)) s.bias = static_cast<int>(between(r, 0, 15));
  s.alibi = chance(r, 20), s.sinks = chance(r, 20), s.lse = chance(r, 80), s.heads_inside = chance(r, 50);
  s.varlen = chance(r, 40), s.paged = chance(r, 25), s.seqused = chance(r, 25), s.wide_index = chance(r, 50);
  if (s.varlen) s.tail = between(r, 0, 3);
  if (s.paged) s.page_size = chance(r, 50) ? 5 : 16, s.nk = (s.nk + s.page_size - 1) / s.page_size * s.page_size;
  return on_device(s);
}

bool untouched(array& a) {
  a.from_device();
  return !a.there() || a.memory() == std::vector<char>(a.memory().size(), static_cast<char>(0xFF));
}
bool untouched(operands& o) { return untouched(o.out) && untouched(o.lse); }

void rewrite(array& a, double factor) {
  for (int64_t i = 0; i < a.count(); ++i) a.set(i, a.get(i) * factor);
}

// Nothing was waited for, copied, made or asked that enqueue mode can do without.
void check_quiet(const fake_counters& c) {
  CHECK(std::string(c.error).empty());
  CHECK(c.syncs == 0);
  CHECK(c.copies == 0);
  CHECK(c.allocations == 0);
  CHECK(c.objects_made == 0);
  CHECK(c.property_queries == 0);
  CHECK(c.stream_queries == 1);
}

}  // namespace

TEST_CASE("a direct plan on the device is queued and not waited for", "[enqueue]") {
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    generator r(seed * 6700417);
    operands o = make(random_spec(r), seed);
    if (o.q.count() == 0) continue;
    const operands wanted = reference(o);
    place(o);
    cqsa_attention_params p = params_of(device_context(), o);
    if (chance(r, 50)) p.schedule = CQSA_SCHEDULE_DIRECT;
    const own_plan plan(device_context(), p);
    const device_memory workspace(plan.workspace + 64);
    cqsa_attention_args args = o.args();
    cqsa_run_info info = CQSA_RUN_INFO_INIT;
    args.info = &info;
    const bool one_call = chance(r, 50), lent = chance(r, 50);
    if (lent) args.workspace = workspace.data, args.workspace_bytes = plan.workspace;
    INFO("seed " << seed << (one_call ? ", one call" : ", plan") << (lent ? ", with a workspace of " : ", which needs ") << plan.workspace);
    configure();
    const own_stream stream;
    gate closed(stream);
    const cqsa_status status = one_call ? cqsa_attention(device_context(), &p, &args, stream.handle)
                                        : cqsa_attention_execute(plan.handle, &args, stream.handle);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    const fake_counters queued = stats();
    check_quiet(queued);
    CHECK(queued.launches == 1);
    CHECK(queued.stream_allocations == (!lent && plan.workspace > 0));
    CHECK(queued.workspaceless == (plan.workspace == 0 && !lent));
    CHECK(queued.live_bytes == (lent ? 0 : plan.workspace));
    CHECK(info.tasks == 1);
    CHECK(info.peak_device_bytes == plan.workspace);
    CHECK((info.bytes_in == 0 && info.bytes_out == 0 && info.peak_host_bytes == 0 && info.peak_pinned_bytes == 0));
    CHECK(untouched(o));
    closed.open();
    stream.sync();
    compare(o, wanted);
    CHECK(leaked() == 0);
    CHECK(std::string(stats().error).empty());
  }
}

TEST_CASE("an implementation that needs no memory gets none", "[enqueue]") {
  spec s = on_device();
  s.q = s.kv = s.out = CQSA_DTYPE_F64;  // the reference
  operands o = make(s, 5);
  const operands wanted = reference(o);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  const own_plan plan(device_context(), p);
  REQUIRE(plan.workspace == 0);
  configure();
  const cqsa_attention_args args = o.args();
  REQUIRE(cqsa_attention_execute(plan.handle, &args, nullptr) == CQSA_OK);
  CHECK(stats().stream_allocations == 0);
  CHECK(stats().workspaceless == 1);
  CHECK(cqsa_workspace_init(plan.handle, nullptr, 0) == CQSA_OK);
  fake().stream_sync(nullptr);
  compare(o, wanted);
}

TEST_CASE("runs are in the order of the caller's stream", "[enqueue]") {
  // direct: queued. The others block, after what was queued before them; with keys on the host, which work of the stream writes.
  struct { int32_t schedule; bool host_keys; uint64_t budget; } const cases[] = {
      {CQSA_SCHEDULE_DIRECT, false, 0}, {CQSA_SCHEDULE_STREAM, false, 0}, {CQSA_SCHEDULE_STREAM, true, 0}, {CQSA_SCHEDULE_CQS, false, 0},
      {CQSA_SCHEDULE_DIRECT, true, 0}};
  for (const auto& c : cases)
    for (const bool by_default : {false, true}) {
      spec s = on_device();
      s.nq = s.nk = 70;
      s.kv_device = !c.host_keys;
      operands o = make(s, 17);
      const operands wanted = reference(o);
      // The stream brings the right values; before that they are something else.
      place(o);
      const std::vector<char> right_q = o.q.memory(), right_v = o.v.memory();
      const cqsa_tensor q = *o.q.tensor(), v = *o.v.tensor();
      rewrite(o.q, -3), rewrite(o.v, 5);
      o.q.upload_again(), o.v.upload_again();
      cqsa_attention_params p = params_of(device_context(), o);
      p.schedule = c.schedule;
      if (c.schedule == CQSA_SCHEDULE_STREAM) p.tile_q = 32, p.tile_k = 24;
      if (c.schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 7, p.cqs_itr = 1;
      INFO("schedule " << c.schedule << ", keys on the host " << c.host_keys << ", default stream " << by_default);
      configure();
      const own_stream own;
      void* const stream = by_default ? nullptr : own.handle;
      std::function<void()> write = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        fake().write(q.data, right_q.data(), right_q.size());
        c.host_keys ? void(std::memcpy(v.data, right_v.data(), right_v.size())) : fake().write(v.data, right_v.data(), right_v.size());
      };
      const auto call = [](void* data) { (*static_cast<std::function<void()>*>(data))(); };
      fake().stream_call(stream, call, &write);
      const cqsa_attention_args args = o.args();
      const cqsa_status status = cqsa_attention(device_context(), &p, &args, stream);
      INFO(cqsa_last_error());
      REQUIRE(status == CQSA_OK);
      // Work that follows on the stream sees the result.
      array seen(o.out.dtype(), o.out.shape());
      std::vector<char> copy(o.out.memory().size());
      const void* const out = o.out.tensor()->data;
      std::function<void()> read = [&] { fake().read(copy.data(), out, copy.size()); };
      fake().stream_call(stream, call, &read);
      fake().stream_sync(stream);
      compare(o, wanted);
      CHECK(copy == o.out.memory());
      CHECK(std::string(stats().error).empty());
      CHECK(leaked() == 0);
      CHECK(stats().live_objects == 0);
    }
}

// ---- graphs ----------------------------------------------------------------------------------------------------------------------

TEST_CASE("a captured run computes at every replay", "[enqueue]") {
  for (const bool varlen : {false, true})
    for (const bool one_call : {false, true}) {
      spec s = on_device();
      s.varlen = varlen, s.tail = varlen ? 2 : 0, s.batch = 2;
      operands o = make(s, 23);
      place(o);
      const cqsa_attention_params p = params_of(device_context(), o);
      const own_plan plan(device_context(), p);
      const device_memory workspace(plan.workspace + 64);
      cqsa_attention_args args = o.args();
      args.workspace = workspace.data, args.workspace_bytes = plan.workspace;
      configure();
      const own_stream stream;
      fake().capture_begin(stream.handle);
      const cqsa_status status = one_call ? cqsa_attention(device_context(), &p, &args, stream.handle)
                                          : cqsa_attention_execute(plan.handle, &args, stream.handle);
      INFO(cqsa_last_error());
      void* const graph = fake().capture_end(stream.handle);
      REQUIRE(status == CQSA_OK);
      check_quiet(stats());
      CHECK(stats().stream_allocations == 0);
      CHECK(fake().graph_size(graph) == 1);
      CHECK(untouched(o));
      for (const double factor : {1.0, -0.5, 2.0}) {
        rewrite(o.q, factor);
        o.q.upload_again();
        clear_outputs(o);
        fake().graph_launch(graph, stream.handle);
        stream.sync();
        compare(o, reference(o));
      }
      fake().graph_destroy(graph);
      CHECK(std::string(stats().error).empty());
    }
}

TEST_CASE("what cannot be captured is refused before anything is touched", "[enqueue]") {
  struct { const char* name; int32_t schedule; bool q_host, kv_host, out_host, lend; } const cases[] = {
      {"no workspace", CQSA_SCHEDULE_AUTO, false, false, false, false},
      {"stream", CQSA_SCHEDULE_STREAM, false, false, false, true},
      {"cqs", CQSA_SCHEDULE_CQS, false, false, false, true},
      {"q on the host", CQSA_SCHEDULE_AUTO, true, false, false, true},
      {"keys on the host, direct", CQSA_SCHEDULE_DIRECT, false, true, false, true},
      {"out on the host", CQSA_SCHEDULE_AUTO, false, false, true, true}};
  for (const auto& c : cases)
    for (const bool one_call : {false, true}) {
      spec s = on_device();
      s.q_device = !c.q_host, s.kv_device = !c.kv_host, s.out_device = !c.out_host;
      operands o = make(s, 29);
      place(o);
      cqsa_attention_params p = params_of(device_context(), o);
      p.schedule = c.schedule;
      if (c.schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 3, p.cqs_itr = 1;
      const own_plan plan(device_context(), p);
      REQUIRE(plan.workspace > 0);
      const device_memory workspace(plan.workspace + 64);
      cqsa_attention_args args = o.args();
      if (c.lend) args.workspace = workspace.data, args.workspace_bytes = plan.workspace;
      cqsa_run_info info = CQSA_RUN_INFO_INIT;
      info.tasks = 77;
      args.info = &info;
      configure();
      const own_stream stream;
      fake().capture_begin(stream.handle);
      const cqsa_status status = one_call ? cqsa_attention(device_context(), &p, &args, stream.handle)
                                          : cqsa_attention_execute(plan.handle, &args, stream.handle);
      const std::string error = cqsa_last_error();
      void* const graph = fake().capture_end(stream.handle);
      INFO(c.name << ": " << error);
      CHECK(status == CQSA_ERROR_CAPTURE_UNSAFE);
      CHECK(error.find("captured into a graph") != std::string::npos);
      CHECK(fake().graph_size(graph) == 0);
      fake().graph_destroy(graph);
      const fake_counters after = stats();
      CHECK(std::string(after.error).empty());
      CHECK((after.syncs == 0 && after.copies == 0 && after.allocations == 0 && after.objects_made == 0 && after.launches == 0));
      CHECK((after.stream_allocations == 0 && after.live_objects == 0 && leaked() == 0));
      CHECK(info.tasks == 77);
      CHECK(untouched(o));
    }
  CHECK(std::string(cqsa_status_string(65)) == "CQSA_ERROR_CAPTURE_UNSAFE");
}

TEST_CASE("an empty problem can be captured, and queues nothing", "[enqueue]") {
  spec s = on_device();
  s.batch = 0;
  operands o = make(s, 3);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  const cqsa_attention_args args = o.args();
  configure();
  const own_stream stream;
  fake().capture_begin(stream.handle);
  CHECK(cqsa_attention(device_context(), &p, &args, stream.handle) == CQSA_OK);
  void* const graph = fake().capture_end(stream.handle);
  CHECK(fake().graph_size(graph) == 0);
  fake().graph_destroy(graph);
}

// A process of its own runs only this: nothing of the library was used before the capture but the context and the plan.
TEST_CASE("the first run of a process can be captured", "[.][first]") {
  operands o = make(on_device(), 31);
  place(o);
  const device_memory workspace(1 << 20);
  cqsa_attention_args args = o.args();
  args.workspace = workspace.data, args.workspace_bytes = workspace.bytes;
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  configure();
  const own_stream stream;
  fake().capture_begin(stream.handle);
  const cqsa_status status = cqsa_attention(device_context(), &p, &args, stream.handle);
  void* const graph = fake().capture_end(stream.handle);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  const fake_counters after = stats();
  CHECK((after.syncs == 0 && after.allocations == 0 && after.objects_made == 0 && after.stream_allocations == 0));
  fake().graph_launch(graph, stream.handle);
  stream.sync();
  compare(o, reference(o));
  fake().graph_destroy(graph);
  CHECK(std::string(stats().error).empty());
}

// ---- what is refused, and what is not --------------------------------------------------------------------------------------------

TEST_CASE("a stream of another device is refused", "[enqueue]") {
  operands o = make(on_device(), 37);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  const own_plan plan(device_context(), p);
  const cqsa_attention_args args = o.args();
  const own_stream stream(1);
  configure();
  const auto refused = [&](cqsa_status status) {
    INFO(cqsa_last_error());
    CHECK(status == CQSA_ERROR_DEVICE);
    CHECK(std::strstr(cqsa_last_error(), "stream of device 1"));
    CHECK((stats().launches == 0 && stats().syncs == 0 && stats().stream_allocations == 0));
    CHECK(untouched(o));
  };
  refused(cqsa_attention(device_context(), &p, &args, stream.handle));
  refused(cqsa_attention_execute(plan.handle, &args, stream.handle));
  const cqsa_attention_merge_args none = CQSA_ATTENTION_MERGE_ARGS_INIT;
  refused(cqsa_attention_merge(device_context(), &none, stream.handle));
  // The CPU has no streams at all.
  operands on_host = make(spec{}, 37);
  const cqsa_attention_params host_params = params_of(cpu_context(), on_host);
  const cqsa_attention_args host_args = on_host.args();
  CHECK(cqsa_attention(cpu_context(), &host_params, &host_args, stream.handle) == CQSA_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("pointers must be what their tensors say", "[enqueue]") {
  enum : int32_t { ordinary, device, pinned, managed };  // CQSA_POINTER_*
  struct { int32_t kind, on; const char* error; } const cases[] = {
      {ordinary, 0, "is declared on fake device 0, but its pointer is ordinary host memory"},
      {pinned, 0, "is declared on fake device 0, but its pointer is pinned host memory"},
      {device, 1, "is declared on fake device 0, but its pointer is memory of device 1"},
      {managed, 0, nullptr},
      {device, 0, nullptr}};
  spec s = on_device();
  s.mask = 0, s.bias = 0, s.alibi = s.sinks = true;
  s.kv = CQSA_DTYPE_I8, s.scale_k = s.scale_v = CQSA_SCALE_GROUP, s.kv_group = 32;
  spec indexed = on_device();
  indexed.paged = indexed.varlen = indexed.seqused = true, indexed.page_size = 5, indexed.nk = 40;
  for (const spec& which : {s, indexed}) {
    operands o = make(which, 41);
    place(o);
    const cqsa_attention_params p = params_of(device_context(), o);
    const own_plan plan(device_context(), p);
    const cqsa_attention_args args = o.args();
    const std::pair<const char*, array*> arrays[] = {
        {"args->q", &o.q},           {"args->k", &o.k},          {"args->v", &o.v},           {"args->k_scale", &o.k_scale},
        {"args->v_scale", &o.v_scale}, {"args->mask", &o.mask},  {"args->bias", &o.bias},     {"args->alibi_slopes", &o.slopes},
        {"args->sinks", &o.sinks},   {"args->out", &o.out},      {"args->lse", &o.lse},       {"args->cu_seqlens_q", &o.cu_q},
        {"args->seqused_k", &o.used}, {"args->page_table", &o.pages}};
    for (const auto& [name, a] : arrays)
      for (const auto& c : cases)
        for (const bool one_call : {false, true}) {
          if (!a->there()) continue;
          const void* const pointer = a->tensor()->data;
          clear_outputs(o);
          configure();
          fake().pretend(pointer, c.kind, c.on);
          const cqsa_status status = one_call ? cqsa_attention(device_context(), &p, &args, nullptr)
                                              : cqsa_attention_execute(plan.handle, &args, nullptr);
          fake().pretend(pointer, -1, 0);
          INFO(name << ": " << cqsa_last_error());
          if (c.error) {
            CHECK(status == CQSA_ERROR_DEVICE);
            CHECK(std::string(cqsa_last_error()) == std::string(name) + " " + c.error);
            CHECK((stats().launches == 0 && stats().syncs == 0 && stats().stream_allocations == 0));
            CHECK(untouched(o));
          } else {
            CHECK(status == CQSA_OK);
          }
          fake().stream_sync(nullptr);
        }
  }
}

TEST_CASE("operands that lie about their place are refused before they are followed", "[enqueue]") {
  operands o = make(on_device(), 43);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  cqsa_attention_args args = o.args();
  configure();
  // Host memory as device memory.
  cqsa_tensor lie = *args.k;
  lie.data = const_cast<char*>(o.k.memory().data());
  args.k = &lie;
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_DEVICE);
  CHECK(std::string(cqsa_last_error()) == "args->k is declared on fake device 0, but its pointer is ordinary host memory");
  // Device memory as host memory, plain and pinned: the host would crash.
  for (const int32_t declared : {CQSA_DEVICE_CPU, CQSA_DEVICE_CUDA_HOST}) {
    args = o.args();
    cqsa_tensor k = *args.k, v = *args.v;
    k.device_type = v.device_type = declared;
    args.k = &k, args.v = &v;
    const cqsa_attention_params any = CQSA_ATTENTION_PARAMS_INIT;
    CHECK(cqsa_attention(device_context(), &any, &args, nullptr) == CQSA_ERROR_DEVICE);
    CHECK(std::string(cqsa_last_error()) == "args->k is declared in host memory, but its pointer is memory of fake device 0");
  }
  // Two devices.
  args = o.args();
  lie = *args.v;
  lie.device_id = 1;
  args.v = &lie;
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_DEVICE);
  // A workspace that the device cannot reach.
  const own_plan plan(device_context(), p);
  args = o.args();
  alignas(64) static char host_memory[1 << 16];
  args.workspace = host_memory, args.workspace_bytes = sizeof host_memory;
  REQUIRE(plan.workspace <= sizeof host_memory);
  CHECK(cqsa_attention_execute(plan.handle, &args, nullptr) == CQSA_ERROR_WORKSPACE);
  CHECK(std::string(cqsa_last_error()) == "args->workspace is not memory of fake device 0");
  CHECK((stats().launches == 0 && stats().syncs == 0));
  CHECK(untouched(o));
}

TEST_CASE("memory declared pinned that is pageable is only slower", "[enqueue]") {
  spec s;
  s.nq = s.nk = 1100, s.dim = s.dim_v = 32;  // long enough to be copied without staging
  operands o = make(s, 47);
  const operands wanted = reference(o);
  cqsa_attention_args args = o.args();
  cqsa_tensor tensors[] = {*args.q, *args.k, *args.v, *args.out, *args.lse};
  for (cqsa_tensor& t : tensors) t.device_type = CQSA_DEVICE_CUDA_HOST;
  args.q = &tensors[0], args.k = &tensors[1], args.v = &tensors[2], args.out = &tensors[3], args.lse = &tensors[4];
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  configure();
  const cqsa_status status = cqsa_attention(device_context(), &p, &args, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  compare(o, wanted);
}

TEST_CASE("cancel and progress of a queued run", "[enqueue]") {
  operands o = make(on_device(), 53);
  const operands wanted = reference(o);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  const own_plan plan(device_context(), p);
  cqsa_attention_args args = o.args();
  int32_t cancel = 1;
  args.cancel = &cancel;
  configure();
  CHECK(cqsa_attention_execute(plan.handle, &args, nullptr) == CQSA_ERROR_CANCELLED);
  CHECK((stats().launches == 0 && stats().stream_allocations == 0));
  cancel = 0;
  std::vector<std::pair<int64_t, int64_t>> calls;
  args.progress = [](void* user, int64_t done, int64_t total) -> int32_t {
    static_cast<decltype(calls)*>(user)->push_back({done, total});
    return 0;
  };
  args.progress_user = &calls;
  CHECK(cqsa_attention_execute(plan.handle, &args, nullptr) == CQSA_OK);
  CHECK(calls == std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 1}});
  fake().stream_sync(nullptr);
  compare(o, wanted);
  clear_outputs(o);
  configure();
  args.progress = [](void*, int64_t, int64_t) -> int32_t { return 1; };
  CHECK(cqsa_attention_execute(plan.handle, &args, nullptr) == CQSA_ERROR_CANCELLED);
  CHECK((stats().launches == 0 && stats().stream_allocations == 0));
  CHECK(untouched(o));
}

TEST_CASE("values of index arrays on the device are clamped, never read back", "[enqueue]") {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    generator r(seed * 2147483629);
    spec s = random_spec(r);
    s.varlen = chance(r, 70), s.paged = chance(r, 40), s.seqused = !s.varlen || chance(r, 50);
    if (s.paged && s.page_size == 0) s.page_size = 5, s.nk = (s.nk + 4) / 5 * 5;
    operands o = make(s, seed);
    cqsa_attention_params p{};
    {
      place(o);
      p = params_of(device_context(), o);
    }
    for (array* a : {&o.cu_q, &o.cu_k, &o.used, &o.pages})
      if (a->there()) {
        for (int64_t i = 0; i < a->count(); ++i)
          if (chance(r, 60)) a->set(i, static_cast<double>(between(r, -2000000000, 2000000000)));
        a->upload_again();
      }
    configure();
    const own_stream stream;
    const cqsa_attention_args args = o.args();
    const cqsa_status status = cqsa_attention(device_context(), &p, &args, stream.handle);
    stream.sync();
    INFO("seed " << seed << ": " << cqsa_last_error());
    CHECK(status == CQSA_OK);
    CHECK(stats().copies == 0);
    CHECK(std::string(stats().error).empty());
    o.out.from_device();
    check_gaps(o);
  }
}

TEST_CASE("a page table without columns is not read", "[enqueue]") {
  spec s = on_device();
  s.paged = true, s.page_size = 4;
  for (const bool seqused : {false, true}) {
    s.seqused = seqused;
    operands o = make(s, 61);
    place(o);
    const device_memory nothing(1);
    int64_t no_columns[2] = {s.batch, 0};
    cqsa_attention_args args = o.args();
    cqsa_tensor table = *args.page_table;
    table.data = nothing.data, table.shape = no_columns, table.strides = nullptr;
    args.page_table = &table;
    configure();
    const own_stream stream;
    const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
    const cqsa_status status = cqsa_attention(device_context(), &p, &args, stream.handle);
    stream.sync();
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    CHECK(std::string(stats().error).empty());
    o.out.from_device();
    for (int64_t i = 0; i < o.out.count(); ++i) REQUIRE(o.out.get(i) == 0);
  }
}

// ---- memory ----------------------------------------------------------------------------------------------------------------------

TEST_CASE("operands on the device with less memory than one leaf call wants", "[enqueue]") {
  for (const int32_t schedule : {CQSA_SCHEDULE_AUTO, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS})
    for (const int varlen : {0, 1})
      for (const int factor : {1, 3}) {
        if (varlen && schedule == CQSA_SCHEDULE_CQS) continue;
        spec s = on_device();
        s.batch = 2, s.heads = 4, s.kv_heads = 2, s.nq = s.nk = 90, s.dim = 24, s.dim_v = 20, s.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
        s.varlen = varlen, s.tail = varlen ? 3 : 0;
        operands o = make(s, 59);
        const operands wanted = reference(o);
        place(o);
        cqsa_attention_params p = params_of(device_context(), o);
        p.schedule = schedule;
        p.max_device_bytes = 1;
        REQUIRE(cqsa_attention_query(device_context(), &p) == CQSA_ERROR_BUDGET_TOO_SMALL);
        const std::string text = cqsa_last_error();
        p.max_device_bytes = std::strtoull(text.c_str() + text.rfind(' '), nullptr, 10) * static_cast<uint64_t>(factor);
        INFO("schedule " << schedule << ", varlen " << varlen << ", budget " << p.max_device_bytes);
        configure();
        const own_stream stream;
        cqsa_attention_args args = o.args();
        cqsa_run_info info = CQSA_RUN_INFO_INIT;
        args.info = &info;
        const cqsa_status status = cqsa_attention(device_context(), &p, &args, stream.handle);
        INFO(cqsa_last_error());
        REQUIRE(status == CQSA_OK);
        stream.sync();
        compare(o, wanted);
        CHECK(info.peak_device_bytes <= p.max_device_bytes);
        CHECK(stats().peak_bytes <= p.max_device_bytes);
        CHECK(leaked() == 0);
        CHECK(std::string(stats().error).empty());
      }
}

TEST_CASE("memory that cannot be had is planned around, and then the run blocks", "[enqueue]") {
  spec s = on_device();
  s.nq = s.nk = 200, s.batch = 2, s.varlen = true, s.dim = s.dim_v = 128;
  // At the measured rate of this slow device a large tile pays; at the nominal one of a fast device the smallest would do as well.
  char machine[1024];
  REQUIRE(cqsa_context_hardware(device_context(), machine, sizeof machine, nullptr) == CQSA_OK);
  operands o = make(s, 61);
  const operands wanted = reference(o);
  place(o);
  cqsa_attention_params p = params_of(device_context(), o);
  const own_plan plan(device_context(), p);
  cqsa_attention_params least = p;
  least.schedule = CQSA_SCHEDULE_STREAM, least.max_device_bytes = 1;
  REQUIRE(cqsa_attention_query(device_context(), &least) == CQSA_ERROR_BUDGET_TOO_SMALL);
  const std::string text = cqsa_last_error();
  INFO("workspace " << plan.workspace << "; " << text);
  REQUIRE(std::strtoull(text.c_str() + text.rfind(' '), nullptr, 10) <= plan.workspace / 2);
  for (const bool in_launch : {false, true}) {
    clear_outputs(o);
    fake_config config{};
    (in_launch ? config.fail_launch : config.fail_alloc) = 1;
    configure(config);
    cqsa_attention_args args = o.args();
    cqsa_run_info info = CQSA_RUN_INFO_INIT;
    args.info = &info;
    const own_stream stream;
    const cqsa_status status = cqsa_attention_execute(plan.handle, &args, stream.handle);
    const std::string error = cqsa_last_error();
    stream.sync();
    INFO("in launch " << in_launch << ": " << error);
    CHECK(leaked() == 0);
    CHECK(std::string(stats().error).empty());
    CHECK(status == CQSA_OK);
    CHECK(info.retries == 1);
    CHECK(info.schedule == CQSA_SCHEDULE_STREAM);
    CHECK(info.peak_device_bytes <= plan.workspace / 2);
    compare(o, wanted);
    // Asked for direct, there is nothing else to do.
    p.schedule = CQSA_SCHEDULE_DIRECT;
    clear_outputs(o);
    configure(config);
    CHECK(cqsa_attention(device_context(), &p, &args, stream.handle) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
    CHECK(std::strstr(cqsa_last_error(), "told to"));
    stream.sync();
    CHECK(leaked() == 0);
    CHECK(untouched(o));
  }
}

TEST_CASE("a device without memory in stream order waits, unless it is lent a workspace", "[enqueue]") {
  operands o = make(on_device(), 79);
  const operands wanted = reference(o);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o);
  const own_plan plan(device_context(), p);
  REQUIRE(plan.workspace > 0);
  const device_memory workspace(plan.workspace);
  for (const bool lent : {false, true}) {
    clear_outputs(o);
    fake_config config{};
    config.no_stream_memory = 1;
    configure(config);
    cqsa_attention_args args = o.args();
    if (lent) args.workspace = workspace.data, args.workspace_bytes = workspace.bytes;
    const cqsa_status status = cqsa_attention_execute(plan.handle, &args, nullptr);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    CHECK(stats().syncs == !lent);
    CHECK(stats().allocations == !lent);
    CHECK(leaked() == 0);
    fake().stream_sync(nullptr);
    compare(o, wanted);
    CHECK(std::string(stats().error).empty());
  }
}

// ---- merge -----------------------------------------------------------------------------------------------------------------------

TEST_CASE("a merge is queued, ordered and captured like a run", "[enqueue]") {
  const sizes out_shape = {2, 3, 17, 8}, lse_shape = {2, 3, 17};
  generator r(67);
  const auto filled = [&](const sizes& shape) {
    array a(CQSA_DTYPE_F32, shape);
    fill_normal(r, a);
    return a;
  };
  array out_a = filled(out_shape), out_b = filled(out_shape), lse_a = filled(lse_shape), lse_b = filled(lse_shape);
  array out(CQSA_DTYPE_F32, out_shape), lse(CQSA_DTYPE_F32, lse_shape);
  const auto args_of = [&] {
    cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
    args.out_a = out_a.tensor(), args.lse_a = lse_a.tensor(), args.out_b = out_b.tensor(), args.lse_b = lse_b.tensor();
    args.out = out.tensor(), args.lse = lse.tensor();
    return args;
  };
  cqsa_attention_merge_args args = args_of();
  REQUIRE(cqsa_attention_merge(cpu_context(), &args, nullptr) == CQSA_OK);
  const std::vector<char> wanted = out.memory(), wanted_lse = lse.memory();
  out.fill(0xFF), lse.fill(0xFF);
  for (array* a : {&out_a, &out_b, &lse_a, &lse_b, &out, &lse}) a->to_device();
  args = args_of();

  const own_stream stream;
  configure();
  {
    gate closed(stream);
    REQUIRE(cqsa_attention_merge(device_context(), &args, stream.handle) == CQSA_OK);
    check_quiet(stats());
    CHECK(untouched(out));
    closed.open();
    stream.sync();
  }
  out.from_device(), lse.from_device();
  CHECK(out.memory() == wanted);
  CHECK(lse.memory() == wanted_lse);

  out.fill(0xFF), out.upload_again();
  configure();
  fake().capture_begin(stream.handle);
  CHECK(cqsa_attention_merge(device_context(), &args, stream.handle) == CQSA_OK);
  void* const graph = fake().capture_end(stream.handle);
  check_quiet(stats());
  CHECK(fake().graph_size(graph) == 1);
  CHECK(untouched(out));
  fake().graph_launch(graph, stream.handle);
  stream.sync();
  fake().graph_destroy(graph);
  out.from_device();
  CHECK(out.memory() == wanted);

  out.fill(0xFF), out.upload_again();
  fake().pretend(args.lse_b->data, 0, 0);
  CHECK(cqsa_attention_merge(device_context(), &args, stream.handle) == CQSA_ERROR_DEVICE);
  CHECK(std::string(cqsa_last_error()) == "args->lse_b is declared on fake device 0, but its pointer is ordinary host memory");
  fake().pretend(args.lse_b->data, -1, 0);
  cqsa_tensor elsewhere = *args.out_b;
  elsewhere.device_id = 1;
  args.out_b = &elsewhere;
  CHECK(cqsa_attention_merge(device_context(), &args, stream.handle) == CQSA_ERROR_DEVICE);
  CHECK(untouched(out));
}

// ---- threads ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("eight threads with a stream each, on one context and on two", "[enqueue]") {
  cqsa_context* const second = make_context("fake");
  constexpr int threads = 8, rounds = 12;
  std::vector<operands> problems;
  std::vector<operands> wanted;
  std::vector<cqsa_attention_params> params;
  for (int t = 0; t < threads; ++t) {
    generator r(static_cast<uint64_t>(t) * 71 + 1);
    problems.push_back(make(random_spec(r), static_cast<uint64_t>(t) + 1));
    wanted.push_back(reference(problems.back()));
    place(problems.back());
    params.push_back(params_of(device_context(), problems.back()));
  }
  for (const bool two : {false, true}) {
    fake_config config{};
    config.delay_max_us = 300;
    configure(config);
    std::atomic<int> failures{0};
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t)
      workers.emplace_back([&, t] {
        const own_stream stream;
        cqsa_context* const context = two && t % 2 ? second : device_context();
        const auto at = static_cast<size_t>(t);
        const cqsa_attention_args args = problems[at].args();
        for (int i = 0; i < rounds; ++i)
          failures += cqsa_attention(context, &params[at], &args, stream.handle) != CQSA_OK;
        stream.sync();
      });
    for (std::thread& w : workers) w.join();
    CHECK(failures == 0);
    CHECK(stats().syncs == 0);
    CHECK(stats().launches == threads * rounds);
    CHECK(leaked() == 0);
    CHECK(std::string(stats().error).empty());
    for (int t = 0; t < threads; ++t) {
      compare(problems[static_cast<size_t>(t)], wanted[static_cast<size_t>(t)]);
      clear_outputs(problems[static_cast<size_t>(t)]);
    }
  }
  cqsa_context_destroy(second);
}

TEST_CASE("free memory is asked for only where the plan depends on it", "[enqueue]") {
  operands o = make(on_device(), 73), host = make(spec{}, 73);
  place(o);
  cqsa_attention_params p = params_of(device_context(), o), q = params_of(device_context(), host);
  configure();
  CHECK(cqsa_attention_query(device_context(), &p) == CQSA_OK);
  CHECK(stats().property_queries == 0);
  p.max_device_bytes = 1 << 20;
  CHECK(cqsa_attention_query(device_context(), &p) == CQSA_OK);
  CHECK(stats().property_queries == 0);
  CHECK(cqsa_attention_query(device_context(), &q) == CQSA_OK);
  CHECK(stats().property_queries == 1);
}
