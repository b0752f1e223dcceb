// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells through the public API and the fake device: queued without a wait, captured, checked on request,
// and refused before the stream is touched.
#include "enqueue_test.h"
#include "selected_problem.h"

using device_test::device_memory;
using device_test::fake;
using namespace selected_test;

namespace {

struct own_context {
  cqsa_context* handle = nullptr;
  own_context() {
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "fake", params.backend_path = CQSA_TEST_PLUGIN_DIR, params.num_threads = 1;
    const cqsa_status status = cqsa_context_create(&params, &handle);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
  }
  ~own_context() { cqsa_context_destroy(handle); }
};

struct own_stream {
  void* handle = fake().stream_create(0);
  ~own_stream() { fake().stream_destroy(handle); }
};

// A problem whose tensors are on the device.
struct device_problem {
  problem p;
  std::vector<std::unique_ptr<device_memory>> memory;
  explicit device_problem(problem&& from) : p(std::move(from)) {
    for (box* x : all()) {
      if (x->memory.empty()) continue;
      memory.push_back(std::make_unique<device_memory>(x->memory.size()));
      x->t.data = memory.back()->data;
      x->t.device_type = CQSA_DEVICE_EXT;
    }
    upload();
  }
  std::vector<box*> all() {
    return {&p.q, &p.k, &p.v, &p.k_scale, &p.v_scale, &p.page_table, &p.cells, &p.counts, &p.out, &p.lse};
  }
  // Reads and writes of the boxes go to the host's copy meanwhile.
  template <class F> auto with_host(const F& f) {
    std::vector<void*> device;
    for (box* x : all()) device.push_back(std::exchange(x->t.data, x->memory.data()));
    const auto result = f();
    size_t i = 0;
    for (box* x : all()) x->t.data = device[i++];
    return result;
  }
  void upload() {
    for (box* x : all())
      if (!x->memory.empty()) fake().write(x->t.data, x->memory.data(), x->memory.size());
  }
  void clear() {
    for (box* x : {&p.out, &p.lse}) std::fill(x->memory.begin(), x->memory.end(), static_cast<char>(0x5A));
    upload();
  }
  // Out and lse, from where the host can read them.
  std::string compare() {
    fetch();
    return with_host([&] { return p.compare(8e-6); });
  }
  bool untouched() {
    fetch();
    return std::all_of(p.out.memory.begin(), p.out.memory.end(), [](char c) { return c == 0x5A; });
  }
  void fetch() {
    for (box* x : {&p.out, &p.lse})
      if (!x->memory.empty()) fake().read(x->memory.data(), x->t.data, x->memory.size());
  }
  void edit(const std::function<void(problem&)>& change) {
    with_host([&] { return change(p), p.solve(), 0; });
    upload();
  }
};

cqsa_status run(const own_context& context, const cqsa_attention_selected_args& a, void* stream) {
  return cqsa_attention_selected(context.handle, &a, stream);
}

fake_counters counters() {
  fake_counters c;
  fake().stats(&c);
  return c;
}

void configure(fake_config config = {}) { fake().configure(&config); }

problem middle(cqsa_dtype kv = CQSA_DTYPE_I8, layout lists = compact) {
  sizes n;
  n.total_q = 6, n.heads = 6, n.dim = 40, n.dim_v = 24, n.capacity = 14, n.kv = kv, n.how_lists = lists,
  n.table_per_query = lists != compact;
  problem p(n);
  dice d(21);
  draw_lists(p, d, false);
  draw_values(p, d, 1.0);
  p.solve();
  return p;
}

}  // namespace

TEST_CASE("selected on a device: queued, not waited for, and right", "[selected]") {
  const own_context context;
  const own_stream stream;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    INFO("seed " << seed);
    device_problem on(random_problem(seed));
    const auto a = on.p.args();
    configure();
    const cqsa_status status = run(context, a, stream.handle);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    fake().stream_sync(stream.handle);
    const fake_counters c = counters();
    REQUIRE(std::string(c.error).empty());
    REQUIRE((c.syncs == 0 && c.copies == 0 && c.allocations == 0 && c.objects_made == 0 && c.launches == 1 && c.live_bytes == 0));
    REQUIRE(on.compare().empty());
  }
}

TEST_CASE("selected on a device: CHECK looks at lists of any layout", "[selected]") {
  const own_context context;
  const own_stream stream;
  for (const layout lists : {compact, spread, backwards, misaligned}) {
    configure();
    device_problem on(middle(CQSA_DTYPE_F16, lists));
    on.clear();
    auto a = on.p.args();
    a.flags = CQSA_SELECTED_CHECK;
    REQUIRE(run(context, a, stream.handle) == CQSA_OK);
    fake().stream_sync(stream.handle);
    REQUIRE(on.compare().empty());
    REQUIRE(counters().copies >= 3);
    on.clear();
    on.edit([](problem& p) { p.counts.write({5}, 2), p.cells.write({5, 0}, 7), p.cells.write({5, 1}, 7); });
    REQUIRE(run(context, a, stream.handle) == CQSA_ERROR_INDEX);
    REQUIRE(std::string(cqsa_last_error()).find("args->cells[5][1] is 7") != std::string::npos);
    fake().stream_sync(stream.handle);
    REQUIRE(on.untouched());
    a.flags = 0;
    REQUIRE(run(context, a, stream.handle) == CQSA_OK);
    fake().stream_sync(stream.handle);
    REQUIRE(on.compare().empty());
    REQUIRE(counters().live_bytes == 0);
  }
}

TEST_CASE("selected on a device: long lists are checked in pieces", "[selected]") {
  const own_context context;
  const own_stream stream;
  sizes n;
  n.total_q = 3, n.heads = n.kv_heads = 1, n.dim = n.dim_v = 2, n.page_size = 64, n.num_pages = 2, n.pages = 5000, n.capacity = 300000;
  problem p(n);
  p.page_table.fill([] { return 1.0; });
  for (int64_t i = 0; i < 3; ++i) {
    p.counts.write({i}, 300000);
    for (int64_t c = 0; c < n.capacity; ++c) p.cells.write({i, c}, static_cast<double>(c));
  }
  p.cells.write({2, 299998}, 5);
  device_problem on(std::move(p));
  configure();
  auto a = on.p.args();
  a.flags = CQSA_SELECTED_CHECK;
  REQUIRE(run(context, a, stream.handle) == CQSA_ERROR_INDEX);
  REQUIRE(std::string(cqsa_last_error()).find("args->cells[2][299998] is 5") != std::string::npos);
  REQUIRE(counters().copies < 12);
}

TEST_CASE("selected on a device: captured with a workspace, else refused", "[selected]") {
  const own_context context;
  const own_stream stream;
  configure();
  device_problem on(middle());
  auto a = on.p.args();
  uint64_t bytes = 0;
  REQUIRE(cqsa_attention_selected_workspace(context.handle, &a, &bytes) == CQSA_OK);
  REQUIRE(bytes > 0);
  device_memory workspace(bytes);
  fake().capture_begin(stream.handle);
  REQUIRE(run(context, a, stream.handle) == CQSA_ERROR_CAPTURE_UNSAFE);
  REQUIRE(std::string(cqsa_last_error()).find("pass them as args->workspace") != std::string::npos);
  a.workspace = workspace.data, a.workspace_bytes = bytes, a.flags = CQSA_SELECTED_CHECK;
  REQUIRE(run(context, a, stream.handle) == CQSA_ERROR_CAPTURE_UNSAFE);
  REQUIRE(std::string(cqsa_last_error()).find("CQSA_SELECTED_CHECK") != std::string::npos);
  a.flags = 0;
  REQUIRE(run(context, a, stream.handle) == CQSA_OK);
  void* graph = fake().capture_end(stream.handle);
  REQUIRE(fake().graph_size(graph) == 1);
  for (int times = 0; times < 2; ++times) {
    on.clear();
    // The graph sees what the lists hold when it runs.
    on.edit([&](problem& p) { p.counts.write({0}, times); });
    fake().graph_launch(graph, stream.handle);
    fake().stream_sync(stream.handle);
    REQUIRE(on.compare().empty());
  }
  fake().graph_destroy(graph);
  REQUIRE(std::string(counters().error).empty());
}

TEST_CASE("selected on a device: failures are reported and leave nothing behind", "[selected]") {
  const own_context context;
  const own_stream stream;
  device_problem on(middle());
  const auto a = on.p.args();
  const auto expect = [&](fake_config config, cqsa_status wanted, uint32_t flags = 0) {
    configure(config);
    auto b = a;
    b.flags = flags;
    REQUIRE(run(context, b, stream.handle) == wanted);
    fake().stream_sync(stream.handle);
    const fake_counters c = counters();
    REQUIRE((c.live_bytes == 0 && c.live_allocations == 0));
  };
  fake_config config{};
  config.fail_alloc = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  config.no_stream_memory = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  config.fail_alloc = 0;
  expect(config, CQSA_OK);
  config.fail_launch = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  config = {};
  config.fail_copy = 2;
  expect(config, CQSA_ERROR_RUNTIME, CQSA_SELECTED_CHECK);
  expect({}, CQSA_OK);
  REQUIRE(on.compare().empty());
}

TEST_CASE("selected on a device: tensors are where they say", "[selected]") {
  const own_context context;
  const own_stream stream;
  configure();
  device_problem on(middle());
  const auto refuse = [&](const cqsa_attention_selected_args& a, cqsa_status wanted, const char* text) {
    REQUIRE(run(context, a, stream.handle) == wanted);
    INFO(cqsa_last_error());
    REQUIRE(std::string(cqsa_last_error()).find(text) != std::string::npos);
  };
  const auto a = on.p.args();
  on.p.cells.t.device_type = CQSA_DEVICE_CPU;
  refuse(a, CQSA_ERROR_DEVICE, "args->cells is on device type 1, wanted 12");
  on.p.cells.t.device_type = CQSA_DEVICE_EXT, on.p.cells.t.device_id = 1;
  refuse(a, CQSA_ERROR_DEVICE, "args->cells is on device 1, the context is for device 0");
  on.p.cells.t.device_id = 0;
  fake().pretend(on.p.q.t.data, 2, 0);  // CQSA_POINTER_PINNED
  refuse(a, CQSA_ERROR_DEVICE, "args->q is declared on fake device 0");
  fake().pretend(on.p.q.t.data, -1, 0);
  auto b = a;
  alignas(64) static char host[1 << 16];
  b.workspace = host, b.workspace_bytes = sizeof host;
  refuse(b, CQSA_ERROR_WORKSPACE, "args->workspace is not memory of fake device 0");
  void* elsewhere = fake().stream_create(1);
  REQUIRE(run(context, a, elsewhere) == CQSA_ERROR_DEVICE);
  fake().stream_destroy(elsewhere);
  REQUIRE(run(context, a, nullptr) == CQSA_OK);  // the default stream
  fake().stream_sync(nullptr);
  REQUIRE(on.compare().empty());
}
