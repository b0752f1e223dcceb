// SPDX-License-Identifier: Apache-2.0
// FP8 on the fake device: workspaces, the queue, capture, and what a driver says of addresses.
#include "fp8_calls.h"

using namespace device_test;

// ---- workspaces -------------------------------------------------------------------------------------------------------------

TEST_CASE("fp8 calls: a workspace is exact, prepared once, and left as it was", "[fp8]") {
  for (const bool on_device : {false, true}) {
    cqsa_context* const context = on_device ? device_context() : cpu_context();
    case_of_all c, expected;
    REQUIRE(cqsa_fp8_quantize(cpu_context(), &expected.simple(), nullptr) == CQSA_OK);
    if (on_device) c.to_device();
    configure();
    args_type args = c.simple();
    args.column_sum = c.sum.tensor();
    const args_type* const list[] = {&args};
    uint64_t bytes = 0;
    REQUIRE(cqsa_fp8_quantize_workspace(context, list, 1, &bytes) == CQSA_OK);
    if (bytes == 0) continue;  // a backend that needs none has nothing to refuse
    CHECK(bytes >= 64);
    aligned memory(bytes, on_device, 0xFF);
    const auto run = [&](const change& spoil) {
      args_type mine = args;
      mine.workspace = memory.data(), mine.workspace_bytes = bytes;
      spoil(mine);
      const cqsa_status status = cqsa_fp8_quantize(context, &mine, nullptr);
      if (on_device) fake().stream_sync(nullptr);
      return status;
    };
    const auto says = [](const char* text) { return said().find(text) == 0; };
    CHECK((run([](args_type& a) { --a.workspace_bytes; }) == CQSA_ERROR_WORKSPACE && says("args->workspace_bytes is ")));
    CHECK((run([](args_type& a) { a.workspace = static_cast<char*>(a.workspace) + 32; }) ==
           CQSA_ERROR_WORKSPACE && says("args->workspace is not aligned to 64 bytes")));
    CHECK((run([](args_type& a) { a.workspace = nullptr; }) == CQSA_ERROR_NULL_POINTER && says("args->workspace is NULL with workspace_bytes ")));
    CHECK((run([](args_type& a) { a.workspace_bytes = UINT64_MAX; }) == CQSA_ERROR_WORKSPACE && says("args->workspace with workspace_bytes ")));
    // Never prepared: told on the host, counted on a device; nothing is written either way.
    const auto before = c.snapshot();
    if (on_device) {
      CHECK(run([](args_type&) {}) == CQSA_OK);
      c.counters.from_device(), c.row.from_device();
      CHECK((c.counters.get(3) == 1 && c.row.memory() == before[1]));
    } else {
      CHECK((run([](args_type&) {}) == CQSA_ERROR_WORKSPACE && says("args->workspace was not prepared by cqsa_fp8_workspace_init()")));
      CHECK(c.snapshot() == before);
    }
    CHECK((cqsa_fp8_workspace_init(context, nullptr, bytes, nullptr) == CQSA_ERROR_NULL_POINTER &&
           cqsa_fp8_workspace_init(context, nullptr, 0, nullptr) == CQSA_OK));
    CHECK((cqsa_fp8_workspace_init(context, memory.data() + 4, bytes - 4, nullptr) == CQSA_ERROR_WORKSPACE && says("workspace is not aligned to 64 bytes")));
    CHECK((cqsa_fp8_workspace_init(context, memory.data(), 63, nullptr) == CQSA_ERROR_WORKSPACE && says("bytes is 63, wanted 0 or at least 64")));
    REQUIRE(cqsa_fp8_workspace_init(context, memory.data(), bytes, nullptr) == CQSA_OK);
    if (on_device) fake().stream_sync(nullptr);
    for (int times = 0; times < 3; ++times) CHECK(run([](args_type&) {}) == CQSA_OK);
    CHECK(memory.canary_is_whole(0xFF));
    c.row.from_device(), c.amax.from_device();
    CHECK((c.row.memory() == expected.row.memory() && c.amax.memory() == expected.amax.memory()));
    CHECK((run([&](args_type& a) { a.row.out = changed(a.row.out, [&](cqsa_tensor& t) { t.data = memory.data(), t.byte_offset = 0; }); }) != CQSA_OK));
  }
}

TEST_CASE("fp8 calls: asking for a workspace looks at no data", "[fp8]") {
  case_of_all c;
  args_type args = c.bound();
  const auto bare = [](const cqsa_tensor*& t) { t = changed(t, [](cqsa_tensor& x) { x.data = nullptr, x.device_type = 77; }); };
  const args_type* const list[] = {&args, &args};
  uint64_t with_data = 1, without = 2, two = 3;
  for (cqsa_context* context : {cpu_context(), device_context()}) {
    args = c.bound();
    REQUIRE(cqsa_fp8_quantize_workspace(context, list, 1, &with_data) == CQSA_OK);
    for (const cqsa_tensor** t : {&args.x, &args.row.out, &args.row.scale, &args.transposed.out, &args.amax, &args.counters, &args.skip}) bare(*t);
    const cqsa_status status = cqsa_fp8_quantize_workspace(context, list, 1, &without);
    INFO(said());
    CHECK((status == CQSA_OK && without == with_data));
    CHECK((cqsa_fp8_quantize_workspace(context, list, 2, &two) == CQSA_OK && two >= without));
    CHECK((cqsa_fp8_quantize_workspace(context, nullptr, 0, &two) == CQSA_OK && two == 0));
    args.row.block[1] = 3;
    CHECK(cqsa_fp8_quantize_workspace(context, list, 1, &without) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(cqsa_fp8_quantize_workspace(context, list, 1, nullptr) == CQSA_ERROR_NULL_POINTER);
    args_type of_amax = CQSA_FP8_QUANTIZE_ARGS_INIT;  // x and a block
    of_amax.x = c.x.tensor();
    const args_type* const amax_list[] = {&of_amax};
    CHECK(cqsa_fp8_quantize_workspace(context, amax_list, 1, &without) == CQSA_OK);
  }
}

// ---- a device -----------------------------------------------------------------------------------------------------------------

TEST_CASE("fp8 calls: queued on a device, captured with a workspace, else refused", "[fp8]") {
  void* const stream = fake().stream_create(0);
  case_of_all c, host;
  REQUIRE(cqsa_fp8_quantize(cpu_context(), &host.bound(), nullptr) == CQSA_OK);
  c.to_device();
  configure();
  REQUIRE(cqsa_fp8_quantize(device_context(), &c.bound(), stream) == CQSA_OK);  // with memory in the order of the stream
  fake().stream_sync(stream);
  fake_counters counted = stats();
  CHECK((std::string(counted.error).empty() && counted.launches == 1 && counted.stream_allocations == 1 && counted.syncs == 0 &&
         counted.live_allocations == 0));
  for (array* a : {&c.row, &c.turned, &c.amax, &c.sum, &c.row_inv, &c.turned_inv}) a->from_device();
  CHECK((c.row.memory() == host.row.memory() && c.turned.memory() == host.turned.memory() && c.sum.memory() == host.sum.memory()));
  fake().capture_begin(stream);
  CHECK(cqsa_fp8_quantize(device_context(), &c.bound(), stream) == CQSA_ERROR_CAPTURE_UNSAFE);
  CHECK(said().find("pass them as args->workspace") != std::string::npos);
  const args_type* const list[] = {&c.args};
  CHECK(cqsa_fp8_quantize_many(device_context(), list, 1, stream) == CQSA_ERROR_CAPTURE_UNSAFE);
  CHECK(said().find("pass them as args[0]->workspace") != std::string::npos);
  fake().graph_destroy(fake().capture_end(stream));
  uint64_t bytes = 0;
  REQUIRE(cqsa_fp8_quantize_workspace(device_context(), list, 1, &bytes) == CQSA_OK);
  aligned memory(bytes, true, 0xFF);
  REQUIRE(cqsa_fp8_workspace_init(device_context(), memory.data(), bytes, stream) == CQSA_OK);
  fake().stream_sync(stream);
  configure();
  fake().capture_begin(stream);
  c.args.workspace = memory.data(), c.args.workspace_bytes = bytes;
  CHECK(cqsa_fp8_quantize(device_context(), &c.args, stream) == CQSA_OK);
  void* const graph = fake().capture_end(stream);
  counted = stats();
  CHECK((std::string(counted.error).empty() && counted.launches == 1 && counted.stream_allocations == 0 && counted.allocations == 0 && counted.copies == 0));
  CHECK(fake().graph_size(graph) == 1);
  c.row.fill(0), c.row.upload_again();
  fake().graph_launch(graph, stream), fake().graph_launch(graph, stream);
  fake().stream_sync(stream);
  c.row.from_device();
  CHECK(c.row.memory() == host.row.memory());
  CHECK((memory.canary_is_whole(0xFF) && std::string(stats().error).empty()));
  fake().graph_destroy(graph);
  fake().stream_destroy(stream);
}

TEST_CASE("fp8 calls: a ring on a device goes on with every replay", "[fp8]") {
  void* const stream = fake().stream_create(0);
  case_of_all c;
  c.to_device();
  configure();
  c.with_ring(true);
  const args_type* const list[] = {&c.args};
  uint64_t bytes = 0;
  REQUIRE(cqsa_fp8_quantize_workspace(device_context(), list, 1, &bytes) == CQSA_OK);
  aligned memory(bytes, true);
  REQUIRE(cqsa_fp8_workspace_init(device_context(), memory.data(), bytes, stream) == CQSA_OK);
  c.args.workspace = memory.data(), c.args.workspace_bytes = bytes;
  fake().stream_sync(stream);
  fake().capture_begin(stream);
  REQUIRE(cqsa_fp8_quantize(device_context(), &c.args, stream) == CQSA_OK);
  cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
  CHECK(cqsa_fp8_ring_read(device_context(), &c.ring, &info, nullptr, stream) == CQSA_ERROR_CAPTURE_UNSAFE);
  CHECK(cqsa_fp8_ring_fold(device_context(), &c.ring, 1, nullptr, stream) == CQSA_OK);
  void* const graph = fake().capture_end(stream);
  CHECK(fake().graph_size(graph) == 2);
  for (int times = 0; times < 4; ++times) fake().graph_launch(graph, stream);
  float history[3] = {};
  REQUIRE(cqsa_fp8_ring_read(device_context(), &c.ring, &info, history, stream) == CQSA_OK);
  c.amax.from_device();
  const auto amax = static_cast<float>(c.amax.get(0));
  CHECK((info.index == 1 && info.refused == 0 && history[0] == amax && history[2] == amax && info.scale == 448 / amax));
  // Another ring in that memory: nobody can tell the host, so it is counted.
  cqsa_fp8_ring other = c.ring;
  other.margin = 1;
  c.args.ring = &other;
  CHECK(cqsa_fp8_quantize(device_context(), &c.args, stream) == CQSA_OK);
  fake().stream_sync(stream);
  c.counters.from_device();
  CHECK(c.counters.get(3) == 1);
  CHECK(cqsa_fp8_ring_read(device_context(), &other, &info, nullptr, stream) == CQSA_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(stats().error).empty());
  fake().graph_destroy(graph);
  fake().stream_destroy(stream);
}

TEST_CASE("fp8 calls: failures on a device are reported and leave nothing behind", "[fp8]") {
  case_of_all c;
  c.to_device();
  const auto expect = [&](fake_config config, cqsa_status wanted) {
    configure(config);
    CHECK(cqsa_fp8_quantize(device_context(), &c.bound(), nullptr) == wanted);
    INFO(said());
    fake().stream_sync(nullptr);
    CHECK(stats().live_allocations == 0);
  };
  fake_config config{};
  config.fail_alloc = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  config.no_stream_memory = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  config.fail_alloc = 0;
  expect(config, CQSA_OK);
  CHECK(stats().syncs == 1);
  config.no_stream_memory = 0, config.fail_launch = 1;
  expect(config, CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
  CHECK(said().find("fp8_quantize failed on backend fake: this launch was told to find no memory") == 0);
  expect({}, CQSA_OK);
}

TEST_CASE("fp8 calls: nothing to do on a device", "[fp8]") {
  configure();
  for (const sizes& shape : {sizes{0, 5}, sizes{5, 0}}) {
    array x(CQSA_DTYPE_F16, shape), out(CQSA_DTYPE_E4M3FN, shape), scale(CQSA_DTYPE_F32, {1}), amax(CQSA_DTYPE_F32, {1});
    for (array* a : {&x, &out, &scale, &amax}) a->to_device();
    cqsa_fp8_quantize_args a = CQSA_FP8_QUANTIZE_ARGS_INIT;
    a.x = x.tensor(), a.row.out = changed(out.tensor(), [](cqsa_tensor& t) { t.data = nullptr; }), a.row.scale = scale.tensor(), a.amax = amax.tensor();
    CHECK(cqsa_fp8_quantize(device_context(), &a, nullptr) == CQSA_OK);
    fake().stream_sync(nullptr);
    scale.from_device(), amax.from_device();
    CHECK((scale.get(0) == 1 && amax.get(0) == 0 && std::string(stats().error).empty()));
  }
}

TEST_CASE("fp8 calls: tensors, rings and workspaces are where they say", "[fp8]") {
  case_of_all c;
  c.to_device();
  configure();
  const auto refuse = [&](const args_type& a, cqsa_status wanted, const char* text) {
    CHECK(cqsa_fp8_quantize(device_context(), &a, nullptr) == wanted);
    INFO(said());
    CHECK(said().find(text) == 0);
  };
  args_type a = c.bound();
  fake().pretend(c.skip.tensor()->data, 0, 0);
  refuse(a, CQSA_ERROR_DEVICE, "args->skip is declared on fake device 0, but its pointer is ordinary host memory");
  fake().pretend(c.skip.tensor()->data, -1, 0);
  a.x = changed(a.x, [](cqsa_tensor& t) { t.device_id = 1; });
  refuse(a, CQSA_ERROR_DEVICE, "args->x is on device 1, the context is for device 0");
  aligned host(1 << 12);
  a = c.bound(), a.workspace = host.data(), a.workspace_bytes = 1 << 12;
  refuse(a, CQSA_ERROR_WORKSPACE, "args->workspace is not memory of fake device 0");
  CHECK(cqsa_fp8_workspace_init(device_context(), host.data(), 1 << 12, nullptr) == CQSA_ERROR_WORKSPACE);
  c.with_ring(true);
  cqsa_fp8_ring ring = c.ring;
  ring.state = host.data(), a = c.args, a.ring = &ring;
  refuse(a, CQSA_ERROR_DEVICE, "args->ring is not memory of fake device 0");
  void* const elsewhere = fake().stream_create(1);
  CHECK(cqsa_fp8_quantize(device_context(), &c.bound(), elsewhere) == CQSA_ERROR_DEVICE);
  fake().stream_destroy(elsewhere);
  CHECK(stats().launches == 1);  // that of cqsa_fp8_ring_init()
}

TEST_CASE("fp8 calls: the other calls are queued, one launch each", "[fp8]") {
  void* const stream = fake().stream_create(0);
  case_of_all c, host;
  for (int64_t i = 0; i < 12; ++i) c.row_scale.set(i, 0.5 + 0.1 * static_cast<double>(i)), host.row_scale.set(i, c.row_scale.get(i));
  for (int64_t i = 0; i < 1200; ++i) c.row.set(i, static_cast<double>(i % 17) - 8), host.row.set(i, c.row.get(i));
  array turned(CQSA_DTYPE_E4M3FN, {200, 6}), device_turned(CQSA_DTYPE_E4M3FN, {200, 6});
  c.to_device(), device_turned.to_device();
  const int64_t block[2] = {1, 128};
  const auto call = [&](cqsa_context* context, case_of_all& x, array& t, void* s) {
    cqsa_fp8_dequantize_args d = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
    d.codes = x.row.tensor(), d.scale_inv = x.row_scale.tensor(), d.out = x.up.tensor(), d.block[0] = 1, d.block[1] = 128;
    CHECK(cqsa_fp8_dequantize(context, &d, s) == CQSA_OK);
    cqsa_fp8_scale_args a = CQSA_FP8_SCALE_ARGS_INIT;
    a.amax = x.row_scale.tensor(), a.scale = x.row_inv.tensor(), a.format = CQSA_DTYPE_E5M2;
    CHECK(cqsa_fp8_scale_from_amax(context, &a, s) == CQSA_OK);
    CHECK(cqsa_fp8_scale_relayout(context, x.row_scale.tensor(), 0, x.scale_in.tensor(), 0, 6, 2, s) == CQSA_OK);
    CHECK(cqsa_fp8_transpose(context, shaped(x.row.tensor(), {6, 200}), t.tensor(), s) == CQSA_OK);
    CHECK(cqsa_fp8_amax(context, x.x.tensor(), block, 0, x.row_inv.tensor(), nullptr, 0, s) == CQSA_OK);
  };
  call(cpu_context(), host, turned, nullptr);
  configure();
  fake().capture_begin(stream);
  call(device_context(), c, device_turned, stream);
  void* const graph = fake().capture_end(stream);
  CHECK((fake().graph_size(graph) == 5 && stats().launches == 5 && stats().stream_allocations == 0 && stats().syncs == 0));
  fake().graph_launch(graph, stream);
  fake().stream_sync(stream);
  for (array* x : {&c.up, &c.row_inv, &c.scale_in, &device_turned}) x->from_device();
  CHECK((c.up.memory() == host.up.memory() && c.row_inv.memory() == host.row_inv.memory() && c.scale_in.memory() == host.scale_in.memory()));
  CHECK(device_turned.memory() == turned.memory());
  CHECK(std::string(stats().error).empty());
  fake().graph_destroy(graph);
  fake().stream_destroy(stream);
}

TEST_CASE("fp8 calls: a product goes to the first implementation that takes it", "[fp8]") {
  for (const int64_t k : {3, 16, 64, 70}) {
    array a(CQSA_DTYPE_E4M3FN, {5, k}), b(CQSA_DTYPE_E4M3FN, {7, k}), d(CQSA_DTYPE_F32, {5, 7});
    for (array* x : {&a, &b})
      for (int64_t i = 0; i < x->count(); ++i) x->set(i, 1);
    for (array* x : {&a, &b, &d}) x->to_device();
    cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
    g.a = a.tensor(), g.b = b.tensor(), g.d = d.tensor();
    configure();
    char text[300];
    REQUIRE(cqsa_fp8_gemm_explain(device_context(), &g, text, sizeof text, nullptr) == CQSA_OK);
    const std::string wanted = k % 16 ? "impl=fake_own\nrequirement: none\nfake_vendor declined: k is " + std::to_string(k) + ", wanted a multiple of 16\n"
                                      : "impl=fake_vendor\nrequirement: k of 16\n";
    CHECK(text == wanted);
    g.provider = CQSA_FP8_PROVIDER_OWN;
    REQUIRE(cqsa_fp8_gemm_explain(device_context(), &g, text, sizeof text, nullptr) == CQSA_OK);
    CHECK(std::string(text) == "impl=fake_own\nrequirement: none\nfake_vendor declined: args->provider does not admit it\n");
    g.provider = CQSA_FP8_PROVIDER_VENDOR;
    CHECK(cqsa_fp8_gemm(device_context(), &g, nullptr) == (k % 16 ? CQSA_ERROR_UNSUPPORTED : CQSA_OK));
    g.provider = 0;
    uint64_t bytes = 1;
    REQUIRE(cqsa_fp8_gemm_workspace(device_context(), &g, &bytes) == CQSA_OK);
    CHECK(bytes == (k >= 64 ? 256u : 0u));
    CHECK(cqsa_fp8_gemm(device_context(), &g, nullptr) == CQSA_OK);
    if (bytes) {
      aligned memory(bytes, true, 0xFF);
      REQUIRE(cqsa_fp8_workspace_init(device_context(), memory.data(), bytes, nullptr) == CQSA_OK);
      g.workspace = memory.data(), g.workspace_bytes = bytes - 1;
      CHECK((cqsa_fp8_gemm(device_context(), &g, nullptr) == CQSA_ERROR_WORKSPACE && said() == "args->workspace_bytes is 255, this call needs 256"));
      g.workspace_bytes = bytes;
      CHECK(cqsa_fp8_gemm(device_context(), &g, nullptr) == CQSA_OK);
      fake().stream_sync(nullptr);
      CHECK(memory.canary_is_whole(0xFF));
      g.workspace = nullptr, g.workspace_bytes = 0;
    }
    void* const stream = fake().stream_create(0);
    fake().stream_sync(nullptr);
    fake().capture_begin(stream);
    CHECK(cqsa_fp8_gemm(device_context(), &g, stream) == (k >= 64 ? CQSA_ERROR_CAPTURE_UNSAFE : CQSA_OK));
    fake().graph_destroy(fake().capture_end(stream));
    fake().stream_destroy(stream);
    d.from_device();
    CHECK((d.get(34) == static_cast<double>(k) && std::string(stats().error).empty()));
  }
}
