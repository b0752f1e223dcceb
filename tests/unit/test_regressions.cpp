// SPDX-License-Identifier: Apache-2.0
// Faults that were found by trying to break the library, each kept from coming back.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cqsa.h"

namespace {

const char* const device = R"({"flops_64":1e12,"copy_in":1e10,"copy_out":1e10})";

cqsa_attention_params self_attention(int64_t seqlen, cqsa_dtype dtype = CQSA_DTYPE_F32) {
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  p.batch = p.num_heads = p.num_kv_heads = 1;
  p.head_dim = p.head_dim_v = 64;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.dtype_q = p.dtype_kv = dtype;
  return p;
}

cqsa_context* cpu() {
  static cqsa_context* context = [] {
    cqsa_context_params p = CQSA_CONTEXT_PARAMS_INIT;
    p.backend = "cpu";
    cqsa_context* c = nullptr;
    REQUIRE(cqsa_context_create(&p, &c) == CQSA_OK);
    return c;
  }();
  return context;
}

cqsa_status plan_for(const std::string& json, const cqsa_attention_params& p, cqsa_plan_info* info = nullptr) {
  cqsa_plan* plan = nullptr;
  const cqsa_status status = cqsa_attention_plan_create_for(json.c_str(), &p, &plan);
  if (status == CQSA_OK && info) REQUIRE(cqsa_plan_describe(plan, info) == CQSA_OK);
  cqsa_plan_destroy(plan);
  return status;
}

// One head of `keys` keys, all operands zero but v, which counts 0, 1, 2, .. in its first channel.
struct small_problem {
  static constexpr int64_t dim = 4;
  int64_t q_shape[4] = {1, 1, 1, dim}, k_shape[4];
  std::vector<float> q, k, v, out;
  cqsa_tensor tq, tk, tv, to;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;

  explicit small_problem(int64_t keys)
      : k_shape{1, 1, keys, dim}, q(dim), k(static_cast<size_t>(keys * dim)), v(static_cast<size_t>(keys * dim)), out(dim, -7) {
    for (int64_t j = 0; j < keys; ++j) v[static_cast<size_t>(j * dim)] = static_cast<float>(j);
    const auto view = [](std::vector<float>& data, int64_t* shape) {
      return cqsa_tensor{data.data(), CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, shape, nullptr, 0};
    };
    tq = view(q, q_shape), tk = view(k, k_shape), tv = view(v, k_shape), to = view(out, q_shape);
    args.q = &tq, args.k = &tk, args.v = &tv, args.out = &to;
  }
};

}  // namespace

TEST_CASE("hardware JSON that nests deeply is refused, not followed") {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string json = "{\"flops_64\":";
    for (int i = 0; i < 300000; ++i) json += open;
    CHECK(plan_for(json, self_attention(1000)) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(std::strlen(cqsa_last_error()) > 10);
  }
}

TEST_CASE("names in hardware JSON stay one line of UTF-8") {
  std::string json = R"({"flops_64":1e12,"copy_in":1e10,"copy_out":1e10,"backend":")";
  for (int i = 0; i < 20; ++i) json += "\xC3\xA9";
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  REQUIRE(plan_for(json + "\"}", self_attention(1000), &info) == CQSA_OK);
  CHECK(std::strlen(info.backend) == 30);  // whole characters only
  CHECK(plan_for(R"({"flops_64":1e12,"copy_in":1e10,"copy_out":1e10,"backend":"a\nb"})", self_attention(1000)) ==
        CQSA_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("plans for more tokens than anyone has are made at once and count without wrapping") {
  for (const int64_t seqlen : {int64_t{1} << 30, int64_t{1} << 40}) {
    cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
    REQUIRE(plan_for(device, self_attention(seqlen), &info) == CQSA_OK);
    CHECK(info.tasks > 0);
    CHECK(info.seconds > 0);
  }
  cqsa_attention_params p = self_attention(1 << 20);
  p.batch = 1 << 25;
  p.head_dim = p.head_dim_v = p.tile_q = p.tile_k = 1;
  p.schedule = CQSA_SCHEDULE_STREAM;
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  REQUIRE(plan_for(device, p, &info) == CQSA_OK);
  CHECK(info.tasks > 0);
}

TEST_CASE("a tile longer than the sequence is the sequence") {
  cqsa_attention_params p = self_attention(1024);
  p.flags = CQSA_ATTENTION_BATCH_INVARIANT;
  p.schedule = CQSA_SCHEDULE_STREAM;
  p.tile_k = p.tile_q = INT64_MAX;
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  REQUIRE(plan_for(device, p, &info) == CQSA_OK);
  CHECK(info.tile_k == 1024);
}

TEST_CASE("a cap above every f32 caps nothing; a scale above every f32 is refused") {
  for (const double cap : {1e39, 1e300, 1e-44, 1e-300}) {
    small_problem x(5);
    cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
    p.softcap = cap;
    REQUIRE(cqsa_attention(cpu(), &p, &x.args, nullptr) == CQSA_OK);
    CHECK(x.out[0] == 2.0f);
  }
  small_problem x(5);
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  p.softmax_scale = 1e39;
  CHECK(cqsa_attention(cpu(), &p, &x.args, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
  CHECK(x.out[0] == -7.0f);
}

TEST_CASE("an astronomically large empty problem is empty at once") {
  int64_t q_shape[4] = {int64_t{1} << 40, 1, 0, 4}, pool_shape[4] = {1, 1, 1, 4}, table_shape[2] = {int64_t{1} << 40, 1}, zero[2] = {0, 0};
  float data[4] = {};
  int32_t page = 0;
  cqsa_tensor q{data, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, q_shape, nullptr, 0};
  cqsa_tensor pool{data, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, pool_shape, nullptr, 0};
  cqsa_tensor table{&page, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_I32, table_shape, zero, 0};
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &q, args.k = &pool, args.v = &pool, args.page_table = &table, args.out = &q;
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  CHECK(cqsa_attention(cpu(), &p, &args, nullptr) == CQSA_OK);
}

TEST_CASE("a single long row of the f64 reference can be cancelled") {
  double q[4] = {}, k[4] = {}, out[4] = {};
  int64_t q_shape[4] = {1, 1, 1, 4}, k_shape[4] = {1, 1, int64_t{1} << 36, 4}, k_stride[4] = {0, 0, 0, 1};
  cqsa_tensor tq{q, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F64, q_shape, nullptr, 0}, to = tq;
  cqsa_tensor tk{k, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F64, k_shape, k_stride, 0};
  to.data = out;
  int32_t cancel = 0;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &tq, args.k = &tk, args.v = &tk, args.out = &to, args.cancel = &cancel;
  std::thread canceller([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    __atomic_store_n(&cancel, 1, __ATOMIC_RELAXED);
  });
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  CHECK(cqsa_attention(cpu(), &p, &args, nullptr) == CQSA_ERROR_CANCELLED);  // the whole row would take hours
  canceller.join();
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CQSA_UNDER_TSAN 1
#endif
#endif
#if !defined(__SANITIZE_THREAD__) && !defined(CQSA_UNDER_TSAN)  // which has no threads in a child of a process with threads
TEST_CASE("a child forked while another thread measures can measure") {
  for (int round = 0; round < 3; ++round) {
    cqsa_context* context = nullptr;
    REQUIRE(cqsa_context_create(nullptr, &context) == CQSA_OK);
    std::atomic<bool> begun{false};
    std::thread measuring([&] {
      begun = true;
      uint64_t length = 0;
      cqsa_context_hardware(context, nullptr, 0, &length);
    });
    while (!begun) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      uint64_t length = 0;
      _exit(cqsa_context_hardware(context, nullptr, 0, &length) == CQSA_OK ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    measuring.join();
    cqsa_context_destroy(context);
  }
}
#endif

TEST_CASE("operands of merge and index arrays may stand at odd addresses") {
  alignas(8) char memory[256] = {};
  const auto at = [&](int offset, std::initializer_list<float> values) {
    std::memcpy(memory + offset, values.begin(), values.size() * sizeof(float));
    return memory + offset;
  };
  int64_t out_shape[2] = {1, 2}, lse_shape[1] = {1};
  const auto tensor = [&](void* data, int ndim) {
    return cqsa_tensor{data, CQSA_DEVICE_CPU, 0, ndim, CQSA_DTYPE_F32, ndim == 2 ? out_shape : lse_shape, nullptr, 0};
  };
  const cqsa_tensor a = tensor(at(1, {1, 3}), 2), la = tensor(at(11, {0}), 1), b = tensor(at(21, {3, 5}), 2), lb = tensor(at(31, {0}), 1);
  const cqsa_tensor out = tensor(at(41, {0, 0}), 2), lse = tensor(at(51, {0}), 1);
  cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
  args.out_a = &a, args.lse_a = &la, args.out_b = &b, args.lse_b = &lb, args.out = &out, args.lse = &lse;
  REQUIRE(cqsa_attention_merge(cpu(), &args, nullptr) == CQSA_OK);
  float result[2];
  std::memcpy(result, memory + 41, sizeof result);
  CHECK(result[0] == 2.0f);
  CHECK(result[1] == 4.0f);
}

TEST_CASE("one call: what is stated beside the tensors must agree with them") {
  small_problem x(5);
  const auto status = [&](auto change) {
    cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
    change(p);
    return cqsa_attention(cpu(), &p, &x.args, nullptr);
  };
  CHECK(status([](cqsa_attention_params& p) { p.flags = CQSA_ATTENTION_MASK; }) == CQSA_ERROR_NULL_POINTER);
  CHECK(status([](cqsa_attention_params& p) { p.seqlen_k = 6; }) == CQSA_ERROR_SHAPE);
  CHECK(status([](cqsa_attention_params& p) { p.dtype_q = CQSA_DTYPE_F16; }) == CQSA_ERROR_DTYPE);
  CHECK(x.out[0] == -7.0f);
  CHECK(status([](cqsa_attention_params& p) { p.seqlen_k = 5, p.dtype_q = CQSA_DTYPE_F32; }) == CQSA_OK);
}

TEST_CASE("one call: no value that is stated beside the tensors is dropped") {
  using params = cqsa_attention_params;
  small_problem x(5);
  uint8_t keys[5 * small_problem::dim] = {};
  int64_t one[1] = {1}, plane_shape[4] = {1, 1, 1, 5}, page_shape[4] = {5, 1, 1, small_problem::dim}, table_shape[2] = {1, 5};
  float scale[5] = {1, 1, 1, 1, 1};
  int32_t pages[5] = {0, 1, 2, 3, 4};
  const cqsa_tensor fp8{keys, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_E4M3FN, x.k_shape, nullptr, 0};
  const cqsa_tensor single{scale, CQSA_DEVICE_CPU, 0, 1, CQSA_DTYPE_F32, one, nullptr, 0};
  int64_t token_shape[3] = {1, 1, 5};
  const cqsa_tensor tokens{scale, CQSA_DEVICE_CPU, 0, 3, CQSA_DTYPE_F32, token_shape, nullptr, 0};
  const cqsa_tensor bias{scale, CQSA_DEVICE_CPU, 0, 4, CQSA_DTYPE_F32, plane_shape, nullptr, 0};
  const cqsa_tensor table{pages, CQSA_DEVICE_CPU, 0, 2, CQSA_DTYPE_I32, table_shape, nullptr, 0};
  cqsa_tensor pool_k = x.tk, pool_v = x.tv;
  pool_k.shape = pool_v.shape = page_shape;
  cqsa_attention_args with_fp8 = x.args, with_scale = x.args, with_scales = x.args, with_bias = x.args, paged = x.args;
  with_fp8.k = with_fp8.v = with_scale.k = with_scale.v = with_scales.k = with_scales.v = &fp8;
  with_scale.k_scale = &single, with_scales.k_scale = &tokens;
  with_bias.bias = &bias;
  paged.k = &pool_k, paged.v = &pool_v, paged.page_table = &table;

  const struct {
    const cqsa_attention_args& args;
    void (*state)(params&);
    cqsa_status wanted;
    const char* message;
  } cases[] = {
      {with_fp8, [](params& p) { p.scale_k = CQSA_SCALE_TENSOR; }, CQSA_ERROR_NULL_POINTER, "args->k_scale is NULL"},
      {with_fp8, [](params& p) { p.scale_v = CQSA_SCALE_TOKEN; }, CQSA_ERROR_NULL_POINTER, "args->v_scale is NULL"},
      {with_fp8, [](params& p) { p.scale_k = 77; }, CQSA_ERROR_UNKNOWN_FLAG, "params->scale_k is 77"},
      {with_fp8, [](params& p) { p.kv_group = 64; }, CQSA_ERROR_INVALID_ARGUMENT, "params->kv_group is 64"},
      {with_scale, [](params& p) { p.scale_k = CQSA_SCALE_TOKEN; }, CQSA_ERROR_SHAPE, "args->k_scale has shape [1]"},
      {with_scales, [](params& p) { p.scale_k = CQSA_SCALE_TENSOR; }, CQSA_ERROR_SHAPE, "params->scale_k is 1 (CQSA_SCALE_*), the tensors say 3"},
      {with_scale, [](params& p) { p.scale_k = CQSA_SCALE_HEAD; }, CQSA_OK, ""},  // of one head
      {with_bias, [](params& p) { p.dtype_bias = CQSA_DTYPE_F16; }, CQSA_ERROR_DTYPE, "params->dtype_bias is f16, the tensors say f32"},
      {with_bias, [](params& p) { p.bias_broadcast = CQSA_BROADCAST_KEY; }, CQSA_ERROR_SHAPE, "params->bias_broadcast (0x8)"},
      {with_bias, [](params& p) { p.bias_broadcast = CQSA_BROADCAST_HEAD; }, CQSA_OK, ""},
      {x.args, [](params& p) { p.dtype_bias = CQSA_DTYPE_F16; }, CQSA_ERROR_INVALID_ARGUMENT, "params->dtype_bias is f16"},
      {x.args, [](params& p) { p.dtype_q = 7; }, CQSA_ERROR_UNKNOWN_FLAG, "params->dtype_q is 0x00000007"},
      {x.args, [](params& p) { p.mask_broadcast = 1u << 31; }, CQSA_ERROR_UNKNOWN_FLAG, "params->mask_broadcast has the unknown bits 0x80000000"},
      {x.args, [](params& p) { p.mask_broadcast = 1; }, CQSA_ERROR_INVALID_ARGUMENT, "params->mask_broadcast is 1"},
      {x.args, [](params& p) { p.total_q = -1; }, CQSA_ERROR_INVALID_ARGUMENT, "params->total_q is -1"},
      {x.args, [](params& p) { p.total_k = 5; }, CQSA_ERROR_INVALID_ARGUMENT, "params->total_k is 5"},
      {x.args, [](params& p) { p.page_size = 16; }, CQSA_ERROR_INVALID_ARGUMENT, "params->page_size is 16"},
      {x.args, [](params& p) { p.batch = -1; }, CQSA_ERROR_INVALID_ARGUMENT, "params->batch is -1"},
      {x.args, [](params& p) { p.memory_kv = -5; }, CQSA_ERROR_UNKNOWN_FLAG, "params->memory_kv is -5"},
      {x.args, [](params& p) { p.memory_q = CQSA_MEMORY_TILE; }, CQSA_ERROR_INVALID_ARGUMENT, "params->memory_q is CQSA_MEMORY_TILE"},
      {x.args, [](params& p) { p.memory_out = CQSA_MEMORY_DEVICE; }, CQSA_ERROR_DEVICE, "params->memory_out is CQSA_MEMORY_DEVICE (2)"},
      {x.args, [](params& p) { p.memory_q = CQSA_MEMORY_PINNED; }, CQSA_ERROR_DEVICE, "params->memory_q is CQSA_MEMORY_PINNED (1)"},
      {paged, [](params& p) { p.page_size = 2; }, CQSA_ERROR_SHAPE, "params->page_size is 2, the tensors say 1"},
      {paged, [](params& p) { p.num_pages = 6; }, CQSA_ERROR_SHAPE, "params->num_pages is 6, the tensors say 5"},
      {paged, [](params& p) { p.seqlen_q = 2; }, CQSA_ERROR_SHAPE, "params->seqlen_q is 2, the tensors say 1"},
      {paged, [](params& p) { p.seqlen_k = 6; }, CQSA_ERROR_SHAPE, "args->page_table has 5 pages"},
      {paged, [](params& p) { p.memory_kv = CQSA_MEMORY_MAPPED; }, CQSA_ERROR_UNSUPPORTED, "params->memory_kv is CQSA_MEMORY_MAPPED"}};
  for (const auto& c : cases) {
    params p = CQSA_ATTENTION_PARAMS_INIT;
    c.state(p);
    x.out.assign(x.out.size(), -7.0f);
    const cqsa_status status = cqsa_attention(cpu(), &p, &c.args, nullptr);
    const std::string message = cqsa_last_error();
    INFO(c.message << ": " << message);
    CHECK(status == c.wanted);
    if (c.wanted == CQSA_OK) continue;
    CHECK(message.find(c.message) != std::string::npos);
    CHECK(x.out[0] == -7.0f);
  }
  // The length of paged keys without seqused_k is the caller's to say.
  params p = CQSA_ATTENTION_PARAMS_INIT;
  p.seqlen_k = 3;
  REQUIRE(cqsa_attention(cpu(), &p, &paged, nullptr) == CQSA_OK);
  CHECK(x.out[0] == 1.0f);
  // params_of fills in what it can see; that host memory is a mapped file it is told.
  p.memory_kv = CQSA_MEMORY_MAPPED, p.memory_q = 77;
  REQUIRE(cqsa_attention_params_of(cpu(), &x.args, &p) == CQSA_OK);
  CHECK((p.memory_kv == CQSA_MEMORY_MAPPED && p.memory_q == CQSA_MEMORY_HOST));
}

TEST_CASE("a workspace that overlaps an operand or the end of memory is refused") {
  small_problem x(600);
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  REQUIRE(cqsa_attention_params_of(cpu(), &x.args, &p) == CQSA_OK);
  cqsa_plan* plan = nullptr;
  uint64_t bytes = 0;
  REQUIRE(cqsa_attention_plan_create(cpu(), &p, &plan) == CQSA_OK);
  REQUIRE(cqsa_workspace_query(plan, &bytes) == CQSA_OK);
  // The workspace, then room for k; the last 64 bytes of one are the first of the other where they meet.
  const uint64_t k_bytes = x.k.size() * sizeof(float);
  std::vector<char> memory(bytes + k_bytes + 128);
  const auto begin = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
  x.args.workspace = reinterpret_cast<void*>(begin), x.args.workspace_bytes = bytes;
  const auto run = [&] {
    REQUIRE(cqsa_workspace_init(plan, x.args.workspace, bytes) == CQSA_OK);
    x.out.assign(x.out.size(), -7.0f);
    return cqsa_attention_execute(plan, &x.args, nullptr);
  };
  for (cqsa_tensor* t : {&x.tq, &x.tk, &x.tv, &x.to}) {
    const cqsa_tensor kept = *t;
    const char* const name = t == &x.tq ? "args->q" : t == &x.tk ? "args->k" : t == &x.tv ? "args->v" : "args->out";
    t->data = reinterpret_cast<void*>(begin + bytes - 4);
    CHECK(run() == CQSA_ERROR_OVERLAP);
    CHECK(std::string(cqsa_last_error()).find(std::string("args->workspace overlaps ") + name + ":") == 0);
    CHECK(x.out[0] == -7.0f);
    t->data = reinterpret_cast<void*>(begin + bytes);
    CHECK(run() == CQSA_OK);
    *t = kept;
  }
  x.args.workspace_bytes = UINT64_MAX;
  CHECK(run() == CQSA_ERROR_WORKSPACE);
  CHECK(std::string(cqsa_last_error()).find("past the end of the address space") != std::string::npos);
  CHECK(cqsa_workspace_init(plan, x.args.workspace, UINT64_MAX) == CQSA_ERROR_WORKSPACE);
  cqsa_plan_destroy(plan);
}

TEST_CASE("bits of flags that no version knows are refused in output structs too") {
  small_problem x(5);
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_run_info run = CQSA_RUN_INFO_INIT;
  x.args.info = &run;
  run.flags = 4;
  CHECK(cqsa_attention(cpu(), &p, &x.args, nullptr) == CQSA_ERROR_UNKNOWN_FLAG);
  CHECK(std::string(cqsa_last_error()) == "args->info->flags has the unknown bits 0x4");
  CHECK(x.out[0] == -7.0f);
  run.flags = 0;
  CHECK(cqsa_attention(cpu(), &p, &x.args, nullptr) == CQSA_OK);
  cqsa_plan_info plan = CQSA_PLAN_INFO_INIT;
  plan.flags = 0xff;
  cqsa_plan* made = nullptr;
  p = self_attention(8);
  REQUIRE(cqsa_attention_plan_create(cpu(), &p, &made) == CQSA_OK);
  CHECK(cqsa_plan_describe(made, &plan) == CQSA_ERROR_UNKNOWN_FLAG);
  cqsa_plan_destroy(made);
  cqsa_backend_info backend = CQSA_BACKEND_INFO_INIT;
  backend.flags = 1;
  CHECK(cqsa_backend_query("cpu", nullptr, &backend) == CQSA_ERROR_UNKNOWN_FLAG);
}
