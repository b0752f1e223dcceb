// SPDX-License-Identifier: Apache-2.0
// Every allocation of every sequence of calls fails in turn, alone and with all that follow: the status says so or the call
// does without, nothing leaks, outputs stay as they were, and the next call is right.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "context.h"
#include "cqsa.h"
#include "failing_memory.h"
#include "gguf_bytes.h"

namespace {

constexpr int64_t most_allocations = 20000;
char text[1 << 16];  // for what the library says: no allocation of the test's own

// A call sequence that gives back what it makes. On failure it returns the first status that was not OK.
using sequence = std::function<cqsa_status()>;

// Fails allocation 1, 2, 3, .. of the sequence until it needs no more. Returns how many there were.
int64_t exhaust(const char* name, const sequence& body) {
  REQUIRE(body() == CQSA_OK);  // what is kept for good is made now
  int64_t most = 0;
  for (const bool forever : {false, true})
    for (int64_t nth = 1;; ++nth) {
      const int64_t before = failing::live.load();
      failing::arm(nth, forever);
      const cqsa_status status = body();
      const bool hit = failing::disarm();
      const int64_t after = failing::live.load();
      const cqsa_status next = hit ? body() : CQSA_OK;
      INFO(name << ": allocation " << nth << (forever ? " and all later ones" : "") << ", status " << status << ": " << cqsa_last_error());
      if (hit) CHECK((status == CQSA_OK || status == CQSA_ERROR_OUT_OF_HOST_MEMORY));
      else CHECK(status == CQSA_OK);
      CHECK(after == before);
      CHECK(next == CQSA_OK);
      if (!hit) break;
      most = std::max(most, nth);
      REQUIRE(nth < most_allocations);
    }
  return most;
}

cqsa_context* make_context(const char* backend, int32_t threads, const cqsa_allocator* allocator = nullptr) {
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = backend;
  params.num_threads = threads;
  params.allocator = allocator;
  params.backend_path = CQSA_TEST_PLUGIN_DIR;
  cqsa_context* context = nullptr;
  return cqsa_context_create(&params, &context) == CQSA_OK ? context : nullptr;
}

cqsa_status create_and_destroy(const char* backend, int32_t threads) {
  cqsa_context* const context = make_context(backend, threads);
  if (context == nullptr) {
    // The status went with make_context(); out of memory is the one failure that may be.
    return std::strstr(cqsa_last_error(), "memory") ? CQSA_ERROR_OUT_OF_HOST_MEMORY : CQSA_ERROR_INTERNAL;
  }
  cqsa_context_destroy(context);
  return CQSA_OK;
}

// A small self-attention whose every output is known: the keys are 0, so a row is the mean of the values.
struct small_problem {
  static constexpr int64_t heads = 2, length = 48, dim = 16, count = heads * length * dim;
  std::vector<float> q, k, v, out, lse;
  int64_t shape[4] = {1, heads, length, dim}, lse_shape[3] = {1, heads, length};
  cqsa_tensor tensors[5];
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;

  explicit small_problem(int32_t schedule = CQSA_SCHEDULE_AUTO) : q(count, 1), k(count, 0), v(count), out(count), lse(heads * length) {
    for (int64_t i = 0; i < count; ++i) v[static_cast<size_t>(i)] = static_cast<float>(i / dim % length);
    std::vector<float>* const data[] = {&q, &k, &v, &out, &lse};
    for (int i = 0; i < 5; ++i)
      tensors[i] = {data[i]->data(), CQSA_DEVICE_CPU, 0, i < 4 ? 4 : 3, CQSA_DTYPE_F32, i < 4 ? shape : lse_shape, nullptr, 0};
    params.flags = CQSA_ATTENTION_LSE;
    params.batch = 1, params.num_heads = params.num_kv_heads = heads;
    params.head_dim = params.head_dim_v = dim;
    params.seqlen_q = params.seqlen_k = length;
    params.dtype_q = params.dtype_kv = params.dtype_out = CQSA_DTYPE_F32;
    params.schedule = schedule;
    if (schedule == CQSA_SCHEDULE_CQS) params.cqs_c = 3, params.cqs_itr = 1;
    clear();
  }
  void clear() {
    std::fill(out.begin(), out.end(), -1.0f);
    std::fill(lse.begin(), lse.end(), -1.0f);
  }
  cqsa_attention_args args() const {
    cqsa_attention_args a = CQSA_ATTENTION_ARGS_INIT;
    a.q = &tensors[0], a.k = &tensors[1], a.v = &tensors[2], a.out = &tensors[3], a.lse = &tensors[4];
    return a;
  }
  bool is(float wanted_out, float wanted_lse) const {
    const auto near = [](float wanted) { return [wanted](float x) { return std::fabs(x - wanted) < 1e-4f; }; };
    return std::all_of(out.begin(), out.end(), near(wanted_out)) && std::all_of(lse.begin(), lse.end(), near(wanted_lse));
  }
  bool right() const { return is((length - 1) / 2.0f, std::log(static_cast<float>(length))); }
  bool untouched() const { return is(-1, -1); }
};

cqsa_status checked(const small_problem& p, cqsa_status status) {
  const failing::pause ours;
  if (status == CQSA_OK) return p.right() ? CQSA_OK : CQSA_ERROR_INTERNAL;
  return p.untouched() ? status : CQSA_ERROR_INTERNAL;
}

// Plan, every text, and a run with the library's memory.
cqsa_status plan_and_run(cqsa_context* context, small_problem& p, bool run = true) {
  cqsa_plan* plan = nullptr;
  p.clear();
  cqsa_status status = cqsa_attention_plan_create(context, &p.params, &plan);
  if (status != CQSA_OK) return plan == nullptr ? status : CQSA_ERROR_INTERNAL;
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  uint64_t length = 0;
  status = cqsa_plan_describe(plan, &info);
  if (status == CQSA_OK) status = cqsa_plan_line(plan, nullptr, text, sizeof text, &length);
  if (status == CQSA_OK) status = cqsa_plan_explain(plan, text, sizeof text, &length);
  if (status == CQSA_OK) status = cqsa_plan_json(plan, text, sizeof text, &length);
  const cqsa_attention_args args = p.args();
  if (status == CQSA_OK && run) status = checked(p, cqsa_attention_execute(plan, &args, nullptr));
  cqsa_plan_destroy(plan);
  return status;
}

cqsa_status one_call(cqsa_context* context, small_problem& p) {
  p.clear();
  const cqsa_attention_args args = p.args();
  return checked(p, cqsa_attention(context, &p.params, &args, nullptr));
}

}  // namespace

// ---- the library's own allocations ---------------------------------------------------------------------------------------------

TEST_CASE("contexts and queries survive every failing allocation") {
  CHECK(exhaust("context", [] { return create_and_destroy("cpu", 1); }) >= 1);
  CHECK(exhaust("context with threads", [] { return create_and_destroy("cpu", 3); }) >= 2);
  CHECK(exhaust("context of the best backend", [] { return create_and_destroy(nullptr, 2); }) >= 2);
  exhaust("backend query", []() -> cqsa_status {
    cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
    for (const char* name : {"cpu", "cuda", "nobody"})
      if (const cqsa_status status = cqsa_backend_query(name, "/nowhere/at/all", &info); status != CQSA_OK) return status;
    return CQSA_OK;
  });
}

TEST_CASE("plans and runs survive every failing allocation") {
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  for (const int32_t schedule : {CQSA_SCHEDULE_AUTO, CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
    INFO("schedule " << schedule);
    small_problem p(schedule);
    CHECK(exhaust("plan and run", [&] { return plan_and_run(context, p); }) >= 3);
    CHECK(exhaust("one call", [&] { return one_call(context, p); }) >= 1);
  }
  cqsa_context_destroy(context);
}

TEST_CASE("threads that cannot start are done without, and start when they can") {
  small_problem p;
  exhaust("a context, its first run, its end", [&] {
    cqsa_context* const context = make_context("cpu", 4);
    if (context == nullptr) return create_and_destroy("cpu", 4);
    const cqsa_status status = one_call(context, p);
    cqsa_context_destroy(context);
    return status;
  });
}

TEST_CASE("a run in the caller's workspace allocates nothing") {
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  for (const int32_t schedule : {CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
    small_problem p(schedule);
    cqsa_plan* plan = nullptr;
    REQUIRE(cqsa_attention_plan_create(context, &p.params, &plan) == CQSA_OK);
    uint64_t bytes = 0;
    REQUIRE(cqsa_workspace_query(plan, &bytes) == CQSA_OK);
    void* const workspace = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    cqsa_attention_args args = p.args();
    args.workspace = workspace, args.workspace_bytes = bytes;
    failing::arm(1, true);
    const cqsa_status prepared = cqsa_workspace_init(plan, workspace, bytes);
    const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
    const bool hit = failing::disarm();
    CHECK(prepared == CQSA_OK);
    CHECK(status == CQSA_OK);
    CHECK_FALSE(hit);
    CHECK(p.right());
    std::free(workspace);
    cqsa_plan_destroy(plan);
  }
  cqsa_context_destroy(context);
}

TEST_CASE("merge allocates nothing") {
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  small_problem a, b;
  REQUIRE(one_call(context, a) == CQSA_OK);
  cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
  args.out_a = args.out_b = &a.tensors[3], args.lse_a = args.lse_b = &a.tensors[4];
  args.out = &b.tensors[3], args.lse = &b.tensors[4];
  REQUIRE(cqsa_attention_merge(context, &args, nullptr) == CQSA_OK);  // the threads start here
  b.clear();
  failing::arm(1, true);
  const cqsa_status status = cqsa_attention_merge(context, &args, nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK(status == CQSA_OK);
  CHECK(b.is((small_problem::length - 1) / 2.0f, std::log(2.0f * small_problem::length)));
  cqsa_context_destroy(context);
}

// A query over one cell, by the library's own memory and then by the caller's.
TEST_CASE("attention over selected cells survives every failing allocation") {
  static float data[] = {1, 2, 3, 4}, out_data[4];
  static int32_t cell = 0, count = 1;
  static int64_t row[] = {1, 1, 4}, pool[] = {1, 1, 1, 4}, list[] = {1, 1};
  static const cqsa_tensor q{data, CQSA_DEVICE_CPU, 0, 3, CQSA_DTYPE_F32, row, nullptr, 0}, k{data, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, pool, nullptr, 0},
      out{out_data, CQSA_DEVICE_CPU, 0, 3, CQSA_DTYPE_F32, row, nullptr, 0}, cells{&cell, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_I32, list, nullptr, 0},
      counts{&count, CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_I32, list, nullptr, 0}, table{&cell, CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_I32, list, nullptr, 0};
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  cqsa_attention_selected_args args = CQSA_ATTENTION_SELECTED_ARGS_INIT;
  args.q = &q, args.k = args.v = &k, args.page_table = &table, args.cells = &cells, args.counts = &counts, args.out = &out;
  args.flags = CQSA_SELECTED_CHECK;
  exhaust("attention over selected cells", [&] { return cqsa_attention_selected(context, &args, nullptr); });
  uint64_t bytes = 0;
  REQUIRE(cqsa_attention_selected_workspace(context, &args, &bytes) == CQSA_OK);
  void* const memory = std::aligned_alloc(64, bytes);
  args.workspace = memory, args.workspace_bytes = bytes;
  out_data[3] = 0;
  failing::arm(1, true);
  const cqsa_status status = cqsa_attention_selected(context, &args, nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK(status == CQSA_OK);
  CHECK(out_data[3] == 4);
  std::free(memory);
  cqsa_context_destroy(context);
}

TEST_CASE("key-value caches allocate nothing") {
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  std::vector<float> rows(600 * 128, 1.5f), back(rows.size());
  std::vector<uint8_t> pool(600 * 72);
  std::vector<int32_t> cells(600), table(600);
  for (int32_t i = 0; i < 600; ++i) cells[size_t(i)] = table[size_t(i)] = i;
  int64_t x_shape[3] = {600, 1, 128}, pool_shape[4] = {600, 1, 1, 72}, list[1] = {600};
  const auto view = [](void* data, int32_t axes, cqsa_dtype type, int64_t* shape) {
    return cqsa_tensor{data, CQSA_DEVICE_CPU, 0, axes, type, shape, nullptr, 0};
  };
  const cqsa_tensor x = view(rows.data(), 3, CQSA_DTYPE_F32, x_shape), to = view(back.data(), 3, CQSA_DTYPE_F32, x_shape);
  const cqsa_tensor blocks = view(pool.data(), 4, CQSA_DTYPE_U8, pool_shape);
  const cqsa_tensor places = view(cells.data(), 1, CQSA_DTYPE_I32, list), pages = view(table.data(), 1, CQSA_DTYPE_I32, list);
  cqsa_kv_args args = CQSA_KV_ARGS_INIT;
  args.x = &x, args.pool = &blocks, args.cells = &places, args.page_table = &pages, args.format = CQSA_KV_FORMAT_Q4_0;
  cqsa_kv_args reading = args;
  reading.x = &to;
  REQUIRE(cqsa_kv_append(context, &args, nullptr) == CQSA_OK);  // the threads start here
  failing::arm(1, true);
  const cqsa_status appended = cqsa_kv_append(context, &args, nullptr), gathered = cqsa_kv_gather(context, &reading, nullptr);
  const cqsa_status rotated = cqsa_hadamard(context, &to, &to, nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK((appended == CQSA_OK && gathered == CQSA_OK && rotated == CQSA_OK));
  for (const float value : back) REQUIRE(std::fabs(value - 1.5f) < 0.001f);
  cqsa_context_destroy(context);
}

// One tensor allocates at most its workspace, and many of them a list; a refusal of many is told in memory of its own too.
TEST_CASE("fp8 survives every failing allocation, and one tensor with a workspace allocates nothing") {
  cqsa_context* const context = make_context("cpu", 3);
  REQUIRE(context);
  constexpr int64_t rows = 200, cols = 300, count = 9;
  std::vector<float> numbers(rows * cols, 1.5f), sums(cols);
  std::vector<std::vector<uint8_t>> codes(count, std::vector<uint8_t>(rows * cols));
  int64_t shape[2] = {rows, cols}, list[1] = {cols};
  const cqsa_tensor x{numbers.data(), CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_F32, shape, nullptr, 0}, sum{sums.data(), CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_F32, list, nullptr, 0};
  std::vector<cqsa_tensor> outs(count, x);
  std::vector<cqsa_fp8_quantize_args> args(count, CQSA_FP8_QUANTIZE_ARGS_INIT);
  std::vector<const cqsa_fp8_quantize_args*> all;
  for (size_t i = 0; i < count; ++i) {
    outs[i].data = codes[i].data(), outs[i].dtype = CQSA_DTYPE_E4M3FN;
    args[i].x = &x, args[i].row.out = &outs[i], all.push_back(&args[i]);
  }
  args[0].column_sum = &sum;
  CHECK(exhaust("fp8_quantize_many", [&] { return cqsa_fp8_quantize_many(context, all.data(), count, nullptr); }) >= 2);
  exhaust("fp8_quantize", [&] { return cqsa_fp8_quantize(context, &args[0], nullptr); });
  exhaust("fp8_gemm", [&] {
    int64_t small[2] = {8, 64};
    static float result[64];
    int64_t square[2] = {8, 8};
    const cqsa_tensor a{codes[0].data(), CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_E4M3FN, small, nullptr, 0}, d{result, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_F32, square, nullptr, 0};
    cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
    g.a = g.b = &a, g.d = &d;
    return cqsa_fp8_gemm(context, &g, nullptr);
  });
  uint64_t bytes = 0;
  REQUIRE(cqsa_fp8_quantize_workspace(context, all.data(), 1, &bytes) == CQSA_OK);
  void* const memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  REQUIRE(cqsa_fp8_workspace_init(context, memory, bytes, nullptr) == CQSA_OK);
  args[0].workspace = memory, args[0].workspace_bytes = bytes;
  failing::arm(1, true);
  const cqsa_status status = cqsa_fp8_quantize(context, &args[0], nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK((status == CQSA_OK && sums[cols - 1] == 1.5f * rows));
  std::free(memory);
  cqsa_context_destroy(context);
}

TEST_CASE("quantized matrices allocate nothing") {
  cqsa_context* const context = make_context("cpu", 2);
  REQUIRE(context);
  std::vector<float> values(500 * 128, 1.5f), back(values.size());
  std::vector<uint8_t> blocks(500 * 4 * 34);
  int64_t shape[] = {500, 128};
  const cqsa_tensor x = {values.data(), CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_F32, shape, nullptr, 0};
  cqsa_tensor to = x;
  to.data = back.data();
  cqsa_quant_tensor w = CQSA_QUANT_TENSOR_INIT;
  w.format = CQSA_QUANT_Q8_0, w.device_type = CQSA_DEVICE_CPU, w.data = blocks.data(), w.rows = 500, w.row_elements = 128;
  REQUIRE(cqsa_quantize_rows(context, &x, &w, nullptr) == CQSA_OK);  // the threads start here
  failing::arm(1, true);
  const cqsa_status made = cqsa_quantize_rows(context, &x, &w, nullptr), read = cqsa_dequantize_rows(context, &w, 0, nullptr, &to, nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK((made == CQSA_OK && read == CQSA_OK));
  for (const float value : back) REQUIRE(std::fabs(value - 1.5f) < 0.001f);
  cqsa_context_destroy(context);
}

// Its workspace, and the text of explain.
TEST_CASE("a mixture of experts survives every failing allocation, and with a workspace allocates nothing") {
  cqsa_context* const context = make_context("cpu", 2);
  REQUIRE(context);
  std::vector<float> x(100 * 64, 1.0f), out(x.size(), -1.0f), weights(100, 0.5f), logits(100 * 3, 0.0f), blocks(3 * 64 * 64, 0.125f), scales(200);
  std::vector<int32_t> ids(100, 2), offsets(4), order(100);
  std::vector<int8_t> codes(x.size());
  int64_t shape[] = {100, 64}, slots[] = {100, 1}, routes[] = {100, 3}, groups[] = {100, 2}, four[] = {4}, all[] = {100};
  const auto tensor = [](void* data, cqsa_dtype dtype, int64_t* sizes, int32_t axes) { return cqsa_tensor{data, CQSA_DEVICE_CPU, 0, axes, dtype, sizes, nullptr, 0}; };
  const cqsa_tensor tx = tensor(x.data(), CQSA_DTYPE_F32, shape, 2), to = tensor(out.data(), CQSA_DTYPE_F32, shape, 2), ti = tensor(ids.data(), CQSA_DTYPE_I32, slots, 2);
  const cqsa_tensor tw = tensor(weights.data(), CQSA_DTYPE_F32, slots, 2), tl = tensor(logits.data(), CQSA_DTYPE_F32, routes, 2);
  const cqsa_tensor toffsets = tensor(offsets.data(), CQSA_DTYPE_I32, four, 1), torder = tensor(order.data(), CQSA_DTYPE_I32, all, 1);
  const cqsa_tensor tcodes = tensor(codes.data(), CQSA_DTYPE_I8, shape, 2), tscales = tensor(scales.data(), CQSA_DTYPE_F32, groups, 2);
  cqsa_moe_weights w = CQSA_MOE_WEIGHTS_INIT;
  w.num_experts = 3, w.rows = w.row_elements = 64, w.all.data = blocks.data(), w.all.format = CQSA_QUANT_F32, w.all.data_bytes = blocks.size() * 4;
  cqsa_moe_args args = CQSA_MOE_ARGS_INIT;
  args.x = &tx, args.topk_ids = &ti, args.topk_weights = &tw, args.w_gate = args.w_up = args.w_down = &w, args.out = &to;
  CHECK(exhaust("moe_prefill", [&] {
          std::fill(out.begin(), out.end(), -1.0f);
          const cqsa_status status = cqsa_moe_prefill(context, &args, nullptr);
          return (out[0] == -1.0f) == (status != CQSA_OK) ? status : CQSA_ERROR_INTERNAL;
        }) >= failing::with_malloc);
  exhaust("moe_explain", [&] { return cqsa_moe_explain(context, &args, text, sizeof text, nullptr); });
  uint64_t bytes = 0;
  REQUIRE(cqsa_moe_workspace(context, &args, &bytes) == CQSA_OK);
  void* const memory = std::aligned_alloc(64, bytes);
  args.workspace = memory, args.workspace_bytes = bytes;
  cqsa_moe_route_args route = CQSA_MOE_ROUTE_ARGS_INIT;
  route.logits = &tl, route.topk_ids = &ti, route.topk_weights = &tw;
  cqsa_moe_group_args group = CQSA_MOE_GROUP_ARGS_INIT;
  group.topk_ids = &ti, group.offsets = &toffsets, group.order = &torder;
  cqsa_moe_combine_args combine = CQSA_MOE_COMBINE_ARGS_INIT;
  combine.y = &tx, combine.topk_weights = &tw, combine.out = &to;
  failing::arm(1, true);
  const cqsa_status run = cqsa_moe_prefill(context, &args, nullptr), routed = cqsa_moe_route(context, &route, nullptr), grouped = cqsa_moe_group(context, &group, nullptr);
  const cqsa_status rounded = cqsa_moe_quantize_activations(context, &tx, &tcodes, &tscales, nullptr), combined = cqsa_moe_combine(context, &combine, nullptr);
  CHECK_FALSE(failing::disarm());
  CHECK((run == CQSA_OK && routed == CQSA_OK && grouped == CQSA_OK && rounded == CQSA_OK && combined == CQSA_OK));
  std::free(memory);
  cqsa_context_destroy(context);
}

TEST_CASE("GGUF files survive every failing allocation") {
  char path[] = "/tmp/cqsa_gguf_XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  cqsa::test::gguf_bytes b;
  b.header(1, 1).key("general.a key of more bytes than a string keeps in itself", 8).name("a text of more bytes than a string keeps in itself");
  b.tensor("blk.0.ffn_gate_exps.weight", {32, 2, 3}, 8, 0).pad(32).data(204);
  REQUIRE(::write(fd, b.bytes.data(), b.bytes.size()) == static_cast<ssize_t>(b.bytes.size()));
  ::close(fd);
  exhaust("open a GGUF file, read a text", [&]() -> cqsa_status {
    cqsa_gguf* file = nullptr;
    char text[8];
    uint64_t length = 0;
    cqsa_status status = cqsa_gguf_open(path, &file);
    if (status == CQSA_OK) status = cqsa_gguf_text(file, cqsa_gguf_key(file, 0), text, sizeof text, &length);
    cqsa_gguf_close(file);
    return status;
  });
  std::remove(path);
}

TEST_CASE("hardware as JSON survives every failing allocation") {
  exhaust("plan for another machine", [] {
    small_problem* const p = [] {
      const failing::pause ours;
      static small_problem one;
      return &one;
    }();
    cqsa_plan* plan = nullptr;
    const char* const json = "{\"name\": \"a machine\", \"device_bytes\": 1e10, \"flops_64\": 1e13, \"copy_in\": 1e10, \"copy_out\": 1e10, \"note\": \"long enough to need memory of its own\"}";
    const cqsa_status status = cqsa_attention_plan_create_for(json, &p->params, &plan);
    cqsa_plan_destroy(plan);
    return status;
  });
  // Measuring takes a tenth of a second, so one context for all: what it knows it measures no more. A first failure must not
  // be what it keeps.
  for (int64_t nth = 1; nth <= 12; nth += 3) {
    cqsa_context* const context = make_context("cpu", 2);
    REQUIRE(context);
    uint64_t length = 0;
    failing::arm(nth, true);
    const cqsa_status status = cqsa_context_hardware(context, text, sizeof text, &length);
    const bool hit = failing::disarm();
    INFO("allocation " << nth << ": " << cqsa_last_error());
    CHECK(status == (hit ? CQSA_ERROR_OUT_OF_HOST_MEMORY : CQSA_OK));
    REQUIRE(cqsa_context_hardware(context, text, sizeof text, &length) == CQSA_OK);
    // Nominal rates are round: 50 GFLOP/s for each thread. Measured ones are not.
    CHECK(std::strstr(text, "\"flops_64\": 100000000000,") == nullptr);
    CHECK(std::strstr(text, "\"host_copy\": 10000000000,") == nullptr);
    cqsa_context_destroy(context);
  }
}

// ---- the context's allocator -----------------------------------------------------------------------------------------------------

namespace {

struct failing_allocator {
  int64_t left = -1, live = 0, asked = 0;
  cqsa_allocator callbacks = CQSA_ALLOCATOR_INIT;

  failing_allocator() {
    callbacks.user = this;
    callbacks.allocate = [](void* user, uint64_t bytes, uint64_t alignment) -> void* {
      auto& self = *static_cast<failing_allocator*>(user);
      ++self.asked;
      if (self.left >= 0 && self.left-- == 0) return nullptr;
      ++self.live;
      return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    };
    callbacks.release = [](void* user, void* memory, uint64_t) {
      --static_cast<failing_allocator*>(user)->live;
      std::free(memory);
    };
  }
};

void exhaust_allocator(cqsa_context* context, failing_allocator& memory, small_problem& p) {
  for (int64_t nth = 0;; ++nth) {
    memory.left = nth, memory.asked = 0;
    const cqsa_status status = one_call(context, p);
    const bool hit = memory.asked > nth;
    memory.left = -1;
    INFO("allocation " << nth + 1 << ", status " << status << ": " << cqsa_last_error());
    CHECK(status == (hit ? CQSA_ERROR_OUT_OF_HOST_MEMORY : CQSA_OK));
    CHECK(memory.live == 0);
    CHECK(one_call(context, p) == CQSA_OK);
    if (!hit) return;
  }
}

}  // namespace

TEST_CASE("the context's allocator may fail at every call") {
  for (const char* backend : {"cpu", "fake"})
    for (const int32_t schedule : {CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
      INFO(backend << ", schedule " << schedule);
      failing_allocator memory;
      cqsa_context* const context = make_context(backend, 2, &memory.callbacks);
      REQUIRE(context);
      small_problem p(schedule);
      exhaust_allocator(context, memory, p);
      cqsa_context_destroy(context);
    }
}

// ---- a device ----------------------------------------------------------------------------------------------------------------------

namespace {

const cqsa_backend_v1* real_backend;

// The plugin's function with memory that does not fail: only the core is under test here.
template <auto slot>
struct calm;
template <class R, class... A, R (*cqsa_backend_v1::*slot)(A...)>
struct calm<slot> {
  static R call(A... arguments) {
    const failing::pause ours;
    return (real_backend->*slot)(arguments...);
  }
};
template <int impl, auto slot>
struct calm_impl;
template <int impl, class R, class... A, R (*cqsa_attention_impl::*slot)(A...)>
struct calm_impl<impl, slot> {
  static R call(A... arguments) {
    const failing::pause ours;
    return (real_backend->attention[impl].*slot)(arguments...);
  }
};

template <int impl>
cqsa_attention_impl calm_implementation() {
  cqsa_attention_impl out = real_backend->attention[impl];
  out.probe = calm_impl<impl, &cqsa_attention_impl::probe>::call;
  out.tiles = calm_impl<impl, &cqsa_attention_impl::tiles>::call;
  out.workspace = calm_impl<impl, &cqsa_attention_impl::workspace>::call;
  out.launch = calm_impl<impl, &cqsa_attention_impl::launch>::call;
  return out;
}

cqsa_backend_v1 calm_backend() {
  cqsa_backend_v1 out = *real_backend;
#define CALM(name) out.name = calm<&cqsa_backend_v1::name>::call
  CALM(device_properties), CALM(device_alloc), CALM(device_free), CALM(pinned_alloc), CALM(pinned_free);
  CALM(stream_create), CALM(stream_destroy), CALM(stream_sync), CALM(event_create), CALM(event_destroy);
  CALM(event_record), CALM(event_sync), CALM(stream_wait), CALM(copy), CALM(merge);
  CALM(stream_query), CALM(stream_alloc), CALM(stream_free), CALM(pointer_query);
#undef CALM
  return out;
}

}  // namespace

TEST_CASE("plans and runs of a device survive every failing allocation") {
  cqsa_context* const context = make_context("fake", 2);
  REQUIRE(context);
  real_backend = context->backend;
  const cqsa_attention_impl impls[] = {calm_implementation<0>(), calm_implementation<1>()};
  cqsa_backend_v1 backend = calm_backend();
  backend.attention = impls;
  context->backend = &backend;
  for (const int32_t schedule : {CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
    INFO("schedule " << schedule);
    small_problem p(schedule);
    exhaust("plan and run on a device", [&] {
      const cqsa_status status = plan_and_run(context, p);
      cqsa::give_back_staging(*context);  // which the context keeps, unless memory was short
      return status;
    });
  }
  context->backend = real_backend;
  cqsa_context_destroy(context);
}

TEST_CASE("a queued run on a device allocates no host memory") {
  cqsa_context* const context = make_context("fake", 2);
  REQUIRE(context);
  real_backend = context->backend;
  const cqsa_attention_impl impls[] = {calm_implementation<0>(), calm_implementation<1>()};
  cqsa_backend_v1 backend = calm_backend();
  backend.attention = impls;
  context->backend = &backend;
  small_problem p;
  std::vector<float>* const data[] = {&p.q, &p.k, &p.v, &p.out, &p.lse};
  for (int i = 0; i < 5; ++i) {
    const uint64_t bytes = data[i]->size() * sizeof(float);
    REQUIRE(backend.device_alloc(context->device, bytes, &p.tensors[i].data) == CQSA_OK);
    p.tensors[i].device_type = backend.device_type;
    REQUIRE(backend.copy(context->device, p.tensors[i].data, data[i]->data(), bytes, CQSA_COPY_TO_DEVICE, nullptr) == CQSA_OK);
  }
  p.params.memory_q = p.params.memory_kv = p.params.memory_out = CQSA_MEMORY_DEVICE;
  cqsa_plan* plan = nullptr;
  REQUIRE(cqsa_attention_plan_create(context, &p.params, &plan) == CQSA_OK);
  const cqsa_attention_args args = p.args();
  failing::arm(1, true);
  const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
  const bool hit = failing::disarm();
  CHECK(status == CQSA_OK);
  CHECK(!hit);
  REQUIRE(backend.copy(context->device, p.out.data(), p.tensors[3].data, p.out.size() * sizeof(float), CQSA_COPY_TO_HOST, nullptr) == CQSA_OK);
  REQUIRE(backend.copy(context->device, p.lse.data(), p.tensors[4].data, p.lse.size() * sizeof(float), CQSA_COPY_TO_HOST, nullptr) == CQSA_OK);
  CHECK(backend.stream_sync(context->device, nullptr) == CQSA_OK);
  CHECK(p.right());
  for (const cqsa_tensor& t : p.tensors) backend.device_free(context->device, t.data);
  cqsa_plan_destroy(plan);
  context->backend = real_backend;
  cqsa_context_destroy(context);
}

// ---- the library's first use -----------------------------------------------------------------------------------------------------

namespace {

// In a child, where nothing was used before: the sequence fails at allocation nth, then must work. 0: it did not get that far.
int first_use(const sequence& body, int64_t nth) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    failing::arm(nth, false);
    const cqsa_status status = body();
    const bool hit = failing::disarm();
    if (status != CQSA_OK && status != CQSA_ERROR_OUT_OF_HOST_MEMORY) std::printf("status %d: %s\n", status, cqsa_last_error()), std::fflush(nullptr), _exit(2);
    if (const cqsa_status next = body(); next != CQSA_OK) std::printf("then %d: %s\n", next, cqsa_last_error()), std::fflush(nullptr), _exit(3);
    _exit(hit ? 1 : 0);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void exhaust_first_use(const char* name, const sequence& body) {
  for (int64_t nth = 1; nth < 500; ++nth) {
    const int outcome = first_use(body, nth);
    INFO(name << ": allocation " << nth);
    CHECK((outcome == 0 || outcome == 1));
    if (outcome != 1) return;
  }
}

}  // namespace

TEST_CASE("a first use without memory is forgotten") {
  exhaust_first_use("context", [] { return create_and_destroy("cpu", 2); });
  exhaust_first_use("context of the best backend", [] { return create_and_destroy(nullptr, 2); });
  exhaust_first_use("query of a plugin", []() -> cqsa_status {
    cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
    const cqsa_status status = cqsa_backend_query("fake", CQSA_TEST_PLUGIN_DIR, &info);
    if (status != CQSA_OK || info.state == CQSA_BACKEND_READY) return status;
    // A loader without memory says so in the reason; the query itself has not failed.
    return std::strstr(info.reason, "emory") ? CQSA_ERROR_OUT_OF_HOST_MEMORY : CQSA_ERROR_INTERNAL;
  });
}
