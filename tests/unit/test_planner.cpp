// SPDX-License-Identifier: Apache-2.0
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "ops/attention/decompose.h"
#include "ops/attention/describe.h"
#include "ops/attention/positions.h"
#include "workspace.h"

using namespace cqsa;

namespace {

const char* const card_8gb =
    R"({"name":"card","backend":"cuda","pinned":true,"device_bytes":8e9,"flops_64":3e13,"flops_128":4e13,
        "copy_in":2.5e10,"copy_out":2.5e10,"host_copy":2e10,"launch_seconds":1e-5,"note":"test"})";

cqsa_attention_params self_attention(int64_t seqlen, int64_t heads = 8, int64_t dim = 64) {
  cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  p.batch = 1;
  p.num_heads = p.num_kv_heads = heads;
  p.head_dim = p.head_dim_v = dim;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.dtype_q = p.dtype_kv = CQSA_DTYPE_F32;
  return p;
}

struct owned_plan {
  cqsa_plan* plan = nullptr;
  ~owned_plan() { cqsa_plan_destroy(plan); }
  cqsa_plan_info info() const {
    cqsa_plan_info i = CQSA_PLAN_INFO_INIT;
    REQUIRE(cqsa_plan_describe(plan, &i) == CQSA_OK);
    return i;
  }
};

struct owned_context {
  cqsa_context* context = nullptr;
  explicit owned_context(int threads = 2) {
    cqsa_context_params p = CQSA_CONTEXT_PARAMS_INIT;
    p.backend = "cpu";
    p.num_threads = threads;
    REQUIRE(cqsa_context_create(&p, &context) == CQSA_OK);
  }
  ~owned_context() { cqsa_context_destroy(context); }
};

template <class F>
std::string text_of(F fill) {
  uint64_t length = 0;
  REQUIRE(fill(nullptr, uint64_t{0}, &length) == CQSA_OK);
  std::string text(length + 1, '\0');
  REQUIRE(fill(text.data(), length + 1, &length) == CQSA_OK);
  text.resize(length);
  return text;
}

uint64_t least_from_message() {
  const std::string message = cqsa_last_error();
  const size_t at = message.rfind(' ');
  return std::stoull(message.substr(at + 1));
}

}  // namespace

TEST_CASE("visible pairs and key ranges equal a count by hand") {
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
    p.causal = static_cast<int32_t>(random() % 3);
    p.window_left = static_cast<int64_t>(random() % 12) - 1;
    p.window_right = static_cast<int64_t>(random() % 12) - 1;
    const int64_t nq = static_cast<int64_t>(random() % 20), nk = static_cast<int64_t>(random() % 20);
    const key_band band = key_band::of(p, nq, nk);
    const int64_t off = p.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : nk - nq;
    int64_t pairs = 0, first = nk, last = -1;
    const int64_t q0 = nq ? static_cast<int64_t>(random()) % nq : 0, qn = nq - q0 ? 1 + static_cast<int64_t>(random()) % (nq - q0) : 0;
    for (int64_t i = 0; i < nq; ++i)
      for (int64_t j = 0; j < nk; ++j) {
        const bool seen = (p.causal == CQSA_CAUSAL_NONE || j <= i + off) && (p.window_left < 0 || j >= i + off - p.window_left) &&
                          (p.window_right < 0 || j <= i + off + p.window_right);
        pairs += seen;
        if (seen && i >= q0 && i < q0 + qn) first = std::min(first, j), last = std::max(last, j);
      }
    INFO("round " << round << " causal " << p.causal << " window " << p.window_left << "," << p.window_right << " " << nq << "x" << nk);
    REQUIRE(visible_pairs(band, nq, nk) == static_cast<double>(pairs));
    const key_range range = band.of_rows(q0, qn, nk);
    if (last >= 0) {
      REQUIRE(range.begin == first);
      REQUIRE(range.end == last + 1);
    } else {
      REQUIRE(range.length() == 0);
    }
  }
}

TEST_CASE("an arena counts and carves alike, and saturates") {
  alignas(64) char memory[512];
  const auto layout = [](arena& a) {
    float* x = a.take<float>(3);
    double* y = a.take<double>(20);
    return std::pair<void*, void*>(x, y);
  };
  arena counting, carving(memory);
  REQUIRE(layout(counting).first == nullptr);
  const auto [x, y] = layout(carving);
  REQUIRE(counting.used() == carving.used());
  REQUIRE(x == static_cast<void*>(memory));
  REQUIRE(y == static_cast<void*>(memory + 64));
  arena huge;
  huge.take<double>(INT64_MAX);
  huge.take<double>(INT64_MAX);
  REQUIRE(huge.used() == arena::limit);
}

TEST_CASE("a smaller budget gives a smaller plan, down to the least that the refusal states") {
  const owned_context c;
  cqsa_attention_params p = self_attention(4096);
  owned_plan unlimited;
  REQUIRE(cqsa_attention_plan_create(c.context, &p, &unlimited.plan) == CQSA_OK);
  REQUIRE(unlimited.info().schedule == CQSA_SCHEDULE_DIRECT);

  p.max_host_bytes = 1;
  owned_plan none;
  REQUIRE(cqsa_attention_plan_create(c.context, &p, &none.plan) == CQSA_ERROR_BUDGET_TOO_SMALL);
  const uint64_t least = least_from_message();
  REQUIRE(least < 64 * 1024);
  p.max_host_bytes = least - 1;
  REQUIRE(cqsa_attention_query(c.context, &p) == CQSA_ERROR_BUDGET_TOO_SMALL);
  double seconds = HUGE_VAL;
  for (uint64_t budget = least; budget < 4 * unlimited.info().peak_host_bytes; budget += budget / 7 + 1) {
    p.max_host_bytes = budget;
    owned_plan plan;
    REQUIRE(cqsa_attention_plan_create(c.context, &p, &plan.plan) == CQSA_OK);
    REQUIRE(plan.info().peak_host_bytes <= budget);
    REQUIRE(plan.info().seconds <= seconds * 1.02);  // more memory is never slower, up to the tie rule
    seconds = plan.info().seconds;
  }
}

TEST_CASE("every quorum set and depth can be asked for") {
  const owned_context c;
  for (int index = 0; index < num_quorum_sets; ++index)
    for (int32_t itr = 1; itr <= 3; ++itr) {
      cqsa_attention_params p = self_attention(5000);
      p.schedule = CQSA_SCHEDULE_CQS;
      p.cqs_c = quorum_set_at(index).c;
      p.cqs_itr = itr;
      owned_plan plan;
      REQUIRE(cqsa_attention_plan_create(c.context, &p, &plan.plan) == CQSA_OK);
      const cqsa_plan_info i = plan.info();
      CHECK(i.schedule == CQSA_SCHEDULE_CQS);
      CHECK(i.cqs_c == p.cqs_c);
      CHECK(i.cqs_itr == itr);
      CHECK(i.place_acc == CQSA_MEMORY_HOST);
    }
}

TEST_CASE("a plan is deterministic and says everything in one line and in JSON") {
  const owned_context c;
  cqsa_attention_params p = self_attention(1000);
  p.max_host_bytes = 100000;
  std::string lines[2];
  for (std::string& line : lines) {
    owned_plan plan;
    REQUIRE(cqsa_attention_plan_create(c.context, &p, &plan.plan) == CQSA_OK);
    line = text_of([&](char* b, uint64_t s, uint64_t* n) { return cqsa_plan_line(plan.plan, nullptr, b, s, n); });
    const auto json = nlohmann::json::parse(text_of([&](char* b, uint64_t s, uint64_t* n) { return cqsa_plan_json(plan.plan, b, s, n); }));
    for (const char* key : {"schedule", "implementation", "c", "itr", "tasks", "tile_q", "tile_k", "peak_device_bytes", "peak_host_bytes",
                            "peak_pinned_bytes", "workspace_bytes", "bytes_in", "bytes_out", "flops", "seconds"})
      CHECK(json.contains(key));
    const std::string why = text_of([&](char* b, uint64_t s, uint64_t* n) { return cqsa_plan_explain(plan.plan, b, s, n); });
    const size_t chosen = why.find(": chosen");
    CHECK(chosen != std::string::npos);
    CHECK(why.find(": chosen", chosen + 1) == std::string::npos);
  }
  CHECK(lines[0] == lines[1]);
  for (const char* word : {"schedule=", "c=", "itr=", "tasks=", "tile=", "q=", "kv=", "acc=", "out=", "in_flight=", "backend=", "impl=", "peak_host="})
    CHECK(lines[0].find(word) != std::string::npos);
}

TEST_CASE("plans for a card that is not here") {
  cqsa_attention_params p = self_attention(1 << 20, 12, 32);
  p.dtype_q = p.dtype_kv = CQSA_DTYPE_F16;
  p.causal = CQSA_CAUSAL_TOP_LEFT;
  double bytes = 0;
  for (const uint64_t budget : {uint64_t{0}, uint64_t{1} << 30, uint64_t{1} << 27}) {
    p.max_device_bytes = budget;
    owned_plan plan;
    INFO(cqsa_last_error());
    REQUIRE(cqsa_attention_plan_create_for(card_8gb, &p, &plan.plan) == CQSA_OK);
    const cqsa_plan_info i = plan.info();
    CHECK(i.peak_device_bytes <= (budget ? budget : uint64_t{8000000000}));
    CHECK(static_cast<double>(i.bytes_in) >= bytes);  // less memory, more traffic
    CHECK(i.seconds > 0);
    bytes = static_cast<double>(i.bytes_in);
    cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
    CHECK(cqsa_attention_execute(plan.plan, &args, nullptr) == CQSA_ERROR_UNSUPPORTED);
  }
}

// 132 multiprocessors with two blocks each; rates as measured.
TEST_CASE("a plan fills the device it is for") {
  const std::string rates = R"({"backend":"cuda","pinned":true,"device_bytes":150e9,"workers":16,"flops_64":3.27e13,"flops_128":3.27e13,
      "copy_in":5.5e10,"copy_out":5.5e10,"host_copy":8e9,"launch_seconds":5e-6)";
  cqsa_attention_params p = self_attention(1 << 20);
  p.dtype_q = p.dtype_kv = p.dtype_out = CQSA_DTYPE_F16;
  p.causal = CQSA_CAUSAL_TOP_LEFT;
  p.max_device_bytes = uint64_t{512} << 20;
  for (const int64_t rows : {int64_t{1} << 20, int64_t{234468}})
    for (const int32_t place : {CQSA_MEMORY_PINNED, CQSA_MEMORY_HOST}) {
      p.seqlen_q = rows;
      p.memory_q = p.memory_kv = p.memory_out = place;
      owned_plan plan;
      REQUIRE(cqsa_attention_plan_create_for((rates + ",\"parallel_blocks\":264}").c_str(), &p, &plan.plan) == CQSA_OK);
      const cqsa_plan_info i = plan.info();
      const int64_t blocks = (i.tile_q + 127) / 128 * plan.plan->choice.group_heads;
      INFO(i.tile_q << " x " << i.tile_k << ", heads " << plan.plan->choice.group_heads << ", " << i.in_flight << " buffers, "
                    << i.peak_device_bytes << " bytes, " << static_cast<double>(i.flops) / i.seconds * 1e-12 << " TFLOP/s, blocks " << blocks);
      std::printf("  %lld rows: %lld x %lld, heads %lld, %d buffers, %.1f MiB, %.3f of the resident time\n", static_cast<long long>(rows), static_cast<long long>(i.tile_q),
                  static_cast<long long>(i.tile_k), static_cast<long long>(plan.plan->choice.group_heads), i.in_flight,
                  static_cast<double>(i.peak_device_bytes) / 1048576.0, i.seconds / (i.flops / 3.27e13));
      CHECK(i.in_flight == 2);
      CHECK(blocks >= 8 * 264);
      CHECK(i.seconds <= 1.03 * i.flops / 3.27e13);
      owned_plan unknown;
      REQUIRE(cqsa_attention_plan_create_for((rates + "}").c_str(), &p, &unknown.plan) == CQSA_OK);
      CHECK(unknown.info().seconds <= i.seconds);
    }
}

namespace {

double told_blocks_per_unit = 0;
int32_t one_tile(const cqsa_attention_leaf*, cqsa_leaf_tile* out, int32_t) { return *out = {128, 128, 1.0, told_blocks_per_unit}, 1; }
uint64_t no_workspace(const cqsa_attention_leaf*, int64_t) { return 0; }

}  // namespace

// Of kernels ten times as fast, whose implementation says how many blocks of theirs a multiprocessor holds.
TEST_CASE("a plan for a fast kernel hides its copies, and goes by the kernel's own tile") {
  const char* const machine = R"({"backend":"cuda","pinned":true,"device_bytes":150e9,"workers":16,"flops_64":3e13,"flops_128":3e13,
      "flops_64_f16":3e14,"flops_128_f16":6e14,"copy_in":5.45e10,"copy_out":5.45e10,"host_copy":1.2e10,"device_copy":4.7e12,"launch_seconds":5e-6,
      "parallel_blocks":264})";
  cqsa_attention_params p = self_attention(1 << 20);
  p.dtype_q = p.dtype_kv = p.dtype_out = CQSA_DTYPE_F16;
  p.causal = CQSA_CAUSAL_TOP_LEFT;
  p.max_device_bytes = uint64_t{512} << 20;
  p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_PINNED;
  owned_plan model;
  REQUIRE(cqsa_attention_plan_create_for(machine, &p, &model.plan) == CQSA_OK);
  attention_problem problem = model.plan->problem;
  problem.chip.compute_units = 132;
  cqsa_attention_impl impl{};
  impl.tiles = one_tile;
  impl.workspace = no_workspace;
  for (const double per_unit : {0.0, 1.0, 2.0, 3.0}) {
    told_blocks_per_unit = per_unit;
    schedule_choice choice;
    footprint cost;
    const budget limit = budget_of(problem, model.plan->hardware);
    REQUIRE(choose_schedule(problem, model.plan->hardware, &impl, limit, choice, cost) == CQSA_OK);
    const double at_once = per_unit > 0 ? 132 * per_unit : 264, seconds = predicted_seconds(problem, model.plan->hardware, choice, cost);
    const int64_t blocks = (choice.tile_q + 127) / 128 * choice.group_heads;
    INFO(per_unit << ": " << choice.tile_q << " x " << choice.tile_k << ", heads " << choice.group_heads << ", " << blocks << " blocks, " << seconds << " s");
    CHECK(choice.parallel_blocks == at_once);
    CHECK(limit.admits(cost));
    CHECK(choice.buffers == 2);
    CHECK(std::fmod(static_cast<double>(blocks), at_once) == 0);  // whole waves
    CHECK(seconds <= 1.04 * problem_flops(problem) / 3e14);
    // State and tails cost more the shorter the windows are: the model must see it, or it would not have chosen these.
    schedule_choice shorter = choice;
    shorter.tile_k = 2048;
    const footprint more = device_footprint(problem, &impl, limit, 16, shorter);
    CHECK(predicted_seconds(problem, model.plan->hardware, shorter, more) > 1.05 * seconds);
  }
}

TEST_CASE("the largest tile of whole waves within the budget is among the candidates") {
  const char* const machine = R"({"backend":"cuda","pinned":true,"device_bytes":150e9,"workers":16,"flops_64":3.27e13,"copy_in":5.5e10,
      "copy_out":5.5e10,"launch_seconds":5e-6,"parallel_blocks":264})";
  cqsa_attention_params p = self_attention(1 << 20);
  p.dtype_q = p.dtype_kv = p.dtype_out = CQSA_DTYPE_F16;
  p.memory_q = p.memory_kv = p.memory_out = CQSA_MEMORY_PINNED;
  p.tile_k = 2048;
  for (uint64_t mib = 300; mib <= 700; mib += 50) {
    p.max_device_bytes = mib << 20;
    owned_plan plan;
    REQUIRE(cqsa_attention_plan_create_for(machine, &p, &plan.plan) == CQSA_OK);
    schedule_choice choice = plan.plan->choice;
    const int64_t step = 128 * 264 / choice.group_heads;
    INFO(mib << " MiB: " << choice.tile_q << " x " << choice.tile_k << ", heads " << choice.group_heads);
    CHECK(choice.tile_q % step == 0);
    // What has more waves and fits would gain less than the tie.
    const attention_problem& problem = plan.plan->problem;
    const budget limit = budget_of(problem, plan.plan->hardware);
    for (choice.tile_q += step;; choice.tile_q += step) {
      const footprint cost = device_footprint(problem, nullptr, limit, 16, choice);
      if (!limit.admits(cost)) break;
      CHECK(plan.info().seconds <= 1.001 * predicted_seconds(problem, plan.plan->hardware, choice, cost));
    }
  }
}

TEST_CASE("hardware files that are not what they should be") {
  const cqsa_attention_params p = self_attention(1000);
  const struct { const char* json; const char* word; } cases[] = {
      {"", "not a JSON object"}, {"[]", "not a JSON object"}, {"{", "not a JSON object"},
      {"{}", "flops_64"},
      {R"({"flops_64":-1})", "flops_64"},
      {R"({"flops_64":"fast"})", "flops_64"},
      {R"({"flops_64":1e12})", "copy_in"},
      {R"({"flops_64":1e12,"host":1})", "host"},
      {R"({"flops_64":1e12,"name":3,"host":true})", "name"},
      {R"({"flops_64":1e12,"host":true,"speed":3})", "speed"}};
  for (const auto& c : cases) {
    owned_plan plan;
    INFO(c.json);
    CHECK(cqsa_attention_plan_create_for(c.json, &p, &plan.plan) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(cqsa_last_error()).find(c.word) != std::string::npos);
    CHECK(plan.plan == nullptr);
  }
  owned_plan plan;
  CHECK(cqsa_attention_plan_create_for(nullptr, &p, &plan.plan) == CQSA_ERROR_NULL_POINTER);
}

TEST_CASE("the machine prints a hardware file that it reads itself") {
  const owned_context c;
  const std::string json = text_of([&](char* b, uint64_t s, uint64_t* n) { return cqsa_context_hardware(c.context, b, s, n); });
  const cqsa_attention_params p = self_attention(1000);
  owned_plan plan;
  INFO(json << cqsa_last_error());
  REQUIRE(cqsa_attention_plan_create_for(json.c_str(), &p, &plan.plan) == CQSA_OK);
  CHECK(plan.info().schedule == CQSA_SCHEDULE_DIRECT);
}

TEST_CASE("text buffers: truncated and terminated, the length always told") {
  const owned_context c;
  const cqsa_attention_params p = self_attention(100);
  owned_plan plan;
  REQUIRE(cqsa_attention_plan_create(c.context, &p, &plan.plan) == CQSA_OK);
  char small[8];
  std::memset(small, 'x', sizeof small);
  uint64_t length = 0;
  REQUIRE(cqsa_plan_line(plan.plan, nullptr, small, 5, &length) == CQSA_OK);
  CHECK(std::string(small) == "sche");
  CHECK(small[5] == 'x');
  CHECK(length > 100);
  CHECK(cqsa_plan_line(plan.plan, nullptr, nullptr, 5, &length) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_plan_line(plan.plan, nullptr, nullptr, 0, nullptr) == CQSA_OK);
}

TEST_CASE("cqs and batch invariance exclude each other; so do cqs and shapes it does not cut") {
  const owned_context c;
  cqsa_attention_params p = self_attention(1000);
  p.schedule = CQSA_SCHEDULE_CQS;
  p.flags = CQSA_ATTENTION_BATCH_INVARIANT;
  CHECK(cqsa_attention_query(c.context, &p) == CQSA_ERROR_UNSUPPORTED);
  p.flags = 0;
  p.seqlen_k = 999;
  CHECK(cqsa_attention_query(c.context, &p) != CQSA_OK);
}

TEST_CASE("empty problems are plans like any other") {
  const owned_context c;
  for (const int64_t batch : {0, 1}) {
    cqsa_attention_params p = self_attention(0);
    p.batch = batch;
    owned_plan plan;
    REQUIRE(cqsa_attention_plan_create(c.context, &p, &plan.plan) == CQSA_OK);
    CHECK(plan.info().flops == 0);
  }
}

// Reading is not recursive, and neither may the message be: this deep, writing the value would overflow the stack.
TEST_CASE("hardware as JSON may nest to any depth and is refused") {
  const cqsa_attention_params p = self_attention(1000);
  constexpr size_t depth = 1000000;
  for (const char* bracket : {"[]", "{}"}) {
    std::string nested;
    for (size_t i = 0; i < depth; ++i) nested += *bracket == '[' ? "[" : "{\"a\":";
    nested += "1" + std::string(depth, bracket[1]);
    owned_plan plan;
    CHECK(cqsa_attention_plan_create_for(("{\"flops_64\": " + nested + "}").c_str(), &p, &plan.plan) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(std::string(cqsa_last_error()).find("flops_64") != std::string::npos);
    CHECK(cqsa_attention_plan_create_for(("{\"note\": " + nested + "}").c_str(), &p, &plan.plan) == CQSA_ERROR_INVALID_ARGUMENT);
  }
}
