// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts on the fake device: the queue, graphs, matrices that are replaced between replays, what is counted because nobody looks, and addresses.
#include "device_problem.h"

#include <functional>
#include <random>

using namespace device_test;

namespace {

std::string said() { return cqsa_last_error(); }

// 5 tokens, k 2, 3 experts of F32, hidden 24, inter 16, each matrix in memory of its own.
struct layer {
  static constexpr int64_t tokens = 5, k = 2, experts = 3, hidden = 24, inter = 16;
  array x{CQSA_DTYPE_F32, {tokens, hidden}}, ids{CQSA_DTYPE_I32, {tokens, k}}, weights{CQSA_DTYPE_F32, {tokens, k}}, out{CQSA_DTYPE_F32, {tokens, hidden}};
  array counters{CQSA_DTYPE_I64, {2}};
  std::vector<array> blocks;  // gate, up, down of each expert
  cqsa_moe_matrix list[3][experts] = {};
  cqsa_moe_weights w[3] = {CQSA_MOE_WEIGHTS_INIT, CQSA_MOE_WEIGHTS_INIT, CQSA_MOE_WEIGHTS_INIT};
  cqsa_moe_args args = CQSA_MOE_ARGS_INIT;

  layer() {
    std::mt19937 r(1);
    const auto fill = [&](array& a) {
      for (int64_t i = 0; i < a.count(); ++i) a.set(i, double(r() % 2001) / 1000 - 1);
    };
    for (int64_t i = 0; i < 3 * experts; ++i) blocks.push_back(array(CQSA_DTYPE_F32, i / experts == 2 ? sizes{hidden, inter} : sizes{inter, hidden})), fill(blocks.back());
    fill(x), fill(weights);
    for (int64_t i = 0; i < tokens * k; ++i) ids.set(i, double(i % experts));
    counters.set(0, 0), counters.set(1, 0);
  }
  std::vector<array*> all() {
    std::vector<array*> list_of_all{&x, &ids, &weights, &out, &counters};
    for (array& b : blocks) list_of_all.push_back(&b);
    return list_of_all;
  }
  void to_device() {
    for (array* a : all()) a->to_device();
  }
  cqsa_moe_args& bound() {
    args = CQSA_MOE_ARGS_INIT;
    args.x = x.tensor(), args.topk_ids = ids.tensor(), args.topk_weights = weights.tensor(), args.out = out.tensor();
    for (int i = 0; i < 3; ++i) {
      w[i] = CQSA_MOE_WEIGHTS_INIT;
      for (int64_t e = 0; e < experts; ++e) {
        const cqsa_tensor& t = *blocks[size_t(i * experts + e)].tensor();
        list[i][e] = CQSA_MOE_MATRIX_INIT;
        list[i][e].data = t.data, list[i][e].format = CQSA_QUANT_F32, list[i][e].device_type = t.device_type, list[i][e].data_bytes = hidden * inter * 4;
      }
      w[i].num_experts = experts, w[i].rows = i == 2 ? hidden : inter, w[i].row_elements = i == 2 ? inter : hidden, w[i].experts = list[i];
    }
    args.w_gate = &w[0], args.w_up = &w[1], args.w_down = &w[2];
    return args;
  }
};

cqsa_moe_args& with_counters(layer& c) {
  c.bound().counters = c.counters.tensor();
  return c.args;
}

struct device_memory {
  void* at;
  explicit device_memory(uint64_t bytes) : at(fake().alloc(bytes)) {}
  ~device_memory() { fake().free(at); }
  device_memory(const device_memory&) = delete;
};

uint64_t workspace_of(const cqsa_moe_args& args) {
  uint64_t bytes = 0;
  REQUIRE(cqsa_moe_workspace(device_context(), &args, &bytes) == CQSA_OK);
  return bytes;
}

}  // namespace

TEST_CASE("moe device: queued, with memory in the order of the stream, and captured with a workspace", "[moe]") {
  void* const stream = fake().stream_create(0);
  layer c, host;
  REQUIRE(cqsa_moe_prefill(cpu_context(), &host.bound(), nullptr) == CQSA_OK);
  c.to_device();
  configure();
  REQUIRE(cqsa_moe_prefill(device_context(), &c.bound(), stream) == CQSA_OK);
  fake().stream_sync(stream);
  fake_counters counted = stats();
  CHECK((std::string(counted.error).empty() && counted.launches == 1 && counted.stream_allocations == 1 && counted.syncs == 0 && counted.copies == 0));
  c.out.from_device();
  CHECK(c.out.memory() == host.out.memory());
  fake().capture_begin(stream);
  CHECK(cqsa_moe_prefill(device_context(), &c.bound(), stream) == CQSA_ERROR_CAPTURE_UNSAFE);
  CHECK(said().find("pass them as args->workspace") != std::string::npos);
  const uint64_t bytes = workspace_of(c.bound());
  device_memory memory(bytes);
  c.args.workspace = memory.at, c.args.workspace_bytes = bytes - 1;
  CHECK(cqsa_moe_prefill(device_context(), &c.args, stream) == CQSA_ERROR_WORKSPACE);
  c.args.workspace_bytes = bytes;
  CHECK(cqsa_moe_prefill(device_context(), &c.args, stream) == CQSA_OK);
  void* const graph = fake().capture_end(stream);
  CHECK(fake().graph_size(graph) == 1);
  c.out.fill(0), c.out.upload_again();
  for (int64_t e = 0; e < 3; ++e) c.list[0][e].data = nullptr;  // the list of the host has been read
  fake().graph_launch(graph, stream), fake().graph_launch(graph, stream);
  fake().stream_sync(stream);
  c.out.from_device();
  CHECK(c.out.memory() == host.out.memory());
  CHECK(std::string(stats().error).empty());
  fake().graph_destroy(graph);
  fake().stream_destroy(stream);
}

TEST_CASE("moe device: a graph sees the matrices that are in the list at each replay", "[moe]") {
  void* const stream = fake().stream_create(0);
  layer c, other;
  c.to_device();
  configure();
  c.bound();
  device_memory list(sizeof c.list[2]);
  fake().write(list.at, c.list[2], sizeof c.list[2]);
  c.w[2].experts = nullptr, c.w[2].device_experts = static_cast<const cqsa_moe_matrix*>(list.at), c.w[2].all.format = CQSA_QUANT_F32;
  const uint64_t bytes = workspace_of(c.args);
  device_memory memory(bytes);
  c.args.workspace = memory.at, c.args.workspace_bytes = bytes;
  fake().capture_begin(stream);
  REQUIRE(cqsa_moe_prefill(device_context(), &c.args, stream) == CQSA_OK);
  void* const graph = fake().capture_end(stream);
  for (const bool swapped : {false, true}) {
    if (swapped) std::swap(c.list[2][0], c.list[2][1]), std::swap(other.blocks[6], other.blocks[7]);
    fake().write(list.at, c.list[2], sizeof c.list[2]);
    REQUIRE(cqsa_moe_prefill(cpu_context(), &other.bound(), nullptr) == CQSA_OK);
    fake().graph_launch(graph, stream);
    fake().stream_sync(stream);
    c.out.from_device();
    CHECK(c.out.memory() == other.out.memory());
  }
  CHECK(std::string(stats().error).empty());
  c.w[2].all.format = CQSA_QUANT_NONE;
  CHECK(cqsa_moe_prefill(device_context(), &c.args, stream) == CQSA_ERROR_UNKNOWN_FLAG);
  CHECK(said().find("args->w_down->all.format is 0, wanted") == 0);
  fake().graph_destroy(graph);
  fake().stream_destroy(stream);
}

TEST_CASE("moe device: ids that nobody looked at are skipped and counted", "[moe]") {
  layer c, host;
  for (layer* l : {&c, &host}) l->ids.set(1, -1), l->ids.set(4, -1);
  REQUIRE(cqsa_moe_prefill(cpu_context(), &host.bound(), nullptr) == CQSA_OK);
  c.ids.set(1, 3), c.ids.set(4, -7);
  CHECK(cqsa_moe_prefill(cpu_context(), &c.bound(), nullptr) == CQSA_ERROR_INDEX);
  c.to_device();
  configure();
  CHECK(cqsa_moe_prefill(device_context(), &with_counters(c), nullptr) == CQSA_OK);
  fake().stream_sync(nullptr);
  c.out.from_device(), c.counters.from_device();
  CHECK(c.out.memory() == host.out.memory());
  CHECK((c.counters.get(0) == 2 && c.counters.get(1) == 0));
  with_counters(c);
  c.list[1][2].data = nullptr;
  CHECK(cqsa_moe_prefill(device_context(), &c.args, nullptr) == CQSA_OK);
  fake().stream_sync(nullptr);
  c.counters.from_device();
  CHECK((c.counters.get(0) == 4 && c.counters.get(1) == 3));
  CHECK(std::string(stats().error).empty());
}

TEST_CASE("moe device: memory that is not the device's", "[moe]") {
  layer c, host;
  c.to_device();
  configure();
  const auto refused = [&](const std::function<void(layer&)>& spoil, cqsa_status status, const char* sentence) {
    c.bound(), host.bound();
    spoil(c);
    CHECK(cqsa_moe_prefill(device_context(), &c.args, nullptr) == status);
    INFO(said());
    CHECK(said().find(sentence) == 0);
  };
  refused([&](layer& l) { l.args.x = host.x.tensor(); }, CQSA_ERROR_DEVICE, "args->x is on device type 1, wanted 12 (backend fake)");
  refused([&](layer& l) { l.list[1][2] = host.list[1][2]; }, CQSA_ERROR_UNSUPPORTED, "args->w_up->experts[2] is in host memory (device type 1)");
  refused([&](layer& l) { l.list[1][2].data = host.list[1][2].data; }, CQSA_ERROR_DEVICE, "args->w_up is not memory of fake device 0");
  refused([&](layer& l) { l.list[1][2].device_id = 1; }, CQSA_ERROR_DEVICE, "args->w_up->experts[2] is on device 1, the context is for device 0");
  refused([&](layer& l) { l.w[0].experts = nullptr, l.w[0].device_experts = host.list[0], l.w[0].all.format = CQSA_QUANT_F32; }, CQSA_ERROR_DEVICE,
          "args->w_gate is not memory of fake device 0");
  refused([&](layer& l) { l.args.max_bytes = 10; }, CQSA_ERROR_BUDGET_TOO_SMALL, "args->max_bytes is 10, and the least that works is 64, for one token at a time");
  fake_config config{};
  config.fail_launch = 1;
  configure(config);
  refused([](layer&) {}, CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "fake_moe failed on backend fake: this launch was told to find no memory");
  fake().stream_sync(nullptr);
  CHECK(std::string(stats().error).empty());
}

TEST_CASE("moe device: the parts are queued too", "[moe]") {
  array logits(CQSA_DTYPE_F32, {6, 4}), ids(CQSA_DTYPE_I32, {6, 2}), weights(CQSA_DTYPE_F32, {6, 2}), offsets(CQSA_DTYPE_I32, {5}), order(CQSA_DTYPE_I32, {12});
  array x(CQSA_DTYPE_F32, {12, 32}), codes(CQSA_DTYPE_I8, {12, 32}), scales(CQSA_DTYPE_F32, {12, 1}), out(CQSA_DTYPE_F32, {6, 32});
  for (int64_t i = 0; i < logits.count(); ++i) logits.set(i, double(i * 7 % 11));
  for (int64_t i = 0; i < x.count(); ++i) x.set(i, double(i % 32) - 10);
  for (array* a : {&logits, &ids, &weights, &offsets, &order, &x, &codes, &scales, &out}) a->to_device();
  configure();
  cqsa_moe_route_args route = CQSA_MOE_ROUTE_ARGS_INIT;
  route.logits = logits.tensor(), route.topk_ids = ids.tensor(), route.topk_weights = weights.tensor(), route.flags = CQSA_MOE_RENORMALISE;
  cqsa_moe_group_args group = CQSA_MOE_GROUP_ARGS_INIT;
  group.topk_ids = ids.tensor(), group.offsets = offsets.tensor(), group.order = order.tensor();
  cqsa_moe_combine_args combine = CQSA_MOE_COMBINE_ARGS_INIT;
  combine.y = x.tensor(), combine.topk_weights = weights.tensor(), combine.topk_ids = ids.tensor(), combine.out = out.tensor();
  CHECK((cqsa_moe_route(device_context(), &route, nullptr) == CQSA_OK && cqsa_moe_group(device_context(), &group, nullptr) == CQSA_OK));
  CHECK(cqsa_moe_quantize_activations(device_context(), x.tensor(), codes.tensor(), scales.tensor(), nullptr) == CQSA_OK);
  CHECK(cqsa_moe_combine(device_context(), &combine, nullptr) == CQSA_OK);
  fake().stream_sync(nullptr);
  const fake_counters counted = stats();
  CHECK((std::string(counted.error).empty() && counted.launches == 4 && counted.syncs == 0));
  for (array* a : {&offsets, &codes, &out, &weights}) a->from_device();
  CHECK((offsets.get(4) == 12 && codes.get(31) == 127));
  CHECK(weights.get(0) + weights.get(1) == Approx(1));
  CHECK(out.get(10) == Approx(0).margin(1e-6));
}
