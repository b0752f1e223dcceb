// SPDX-License-Identifier: Apache-2.0
// Runs on a device with its own memory, through the public API and the fake backend: results against the f64 reference of the
// CPU backend, memory against plan and budget, and what happens when the device refuses.
#include "device_problem.h"
#include "tests/random_count.h"

#include <thread>

using namespace device_test;

namespace {

// ---- runs ---------------------------------------------------------------------------------------------------------------------------------

struct outcome {
  cqsa_status status = CQSA_OK;
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  cqsa_plan_info plan = CQSA_PLAN_INFO_INIT;
  std::string error;
};

bool batched(const spec& s) { return !s.varlen && !s.paged && !s.seqused; }

void check_accounts(const outcome& r, const cqsa_attention_params& p, const spec& s) {
  const fake_counters c = stats();
  CHECK(std::string(c.error).empty());
  CHECK(leaked() == 0);
  CHECK(c.live_objects == 0);
  CHECK(c.bytes_in == r.info.bytes_in);
  CHECK(c.bytes_out == r.info.bytes_out);
  CHECK(c.peak_bytes <= r.info.peak_device_bytes);  // equal, but for a workspace of the caller
  CHECK(c.pinned_peak_bytes == std::max(c.pinned_before, r.info.peak_pinned_bytes));
  CHECK(r.info.peak_device_bytes <= r.plan.peak_device_bytes);
  if (p.max_device_bytes) CHECK(r.plan.peak_device_bytes <= p.max_device_bytes);
  if (p.max_pinned_bytes) CHECK(r.plan.peak_pinned_bytes <= p.max_pinned_bytes);
  if (p.max_host_bytes) CHECK(r.plan.peak_host_bytes <= p.max_host_bytes);
  if (r.info.retries || r.info.tasks == 0) return;
  CHECK(r.info.peak_device_bytes == r.plan.peak_device_bytes);
  CHECK(r.info.peak_host_bytes == r.plan.peak_host_bytes);
  CHECK(r.info.peak_pinned_bytes == r.plan.peak_pinned_bytes);
  if (batched(s)) {
    CHECK(r.info.bytes_in == r.plan.bytes_in);
    CHECK(r.info.bytes_out == r.plan.bytes_out);
    CHECK(r.info.tasks == r.plan.tasks);
  }
  CHECK(r.info.bytes_in <= r.plan.bytes_in);
  CHECK(r.info.bytes_out <= r.plan.bytes_out);
  CHECK(r.info.tasks <= r.plan.tasks);
}

outcome run(operands& o, const cqsa_attention_params& p, cqsa_attention_args* own_args = nullptr) {
  outcome r;
  cqsa_plan* plan = nullptr;
  r.status = cqsa_attention_plan_create(device_context(), &p, &plan);
  if (r.status == CQSA_OK) {
    REQUIRE(cqsa_plan_describe(plan, &r.plan) == CQSA_OK);
    cqsa_attention_args args = own_args ? *own_args : o.args();
    args.info = &r.info;
    r.status = cqsa_attention_execute(plan, &args, nullptr);
    fake().stream_sync(nullptr);  // enqueue mode does not wait
  }
  if (r.status != CQSA_OK) r.error = cqsa_last_error();
  cqsa_plan_destroy(plan);
  return r;
}

// The number after "is" at the end of the message of a budget that is too small; 1 where nothing is needed.
uint64_t least_budget(const cqsa_attention_params& wanted) {
  cqsa_attention_params p = wanted;
  p.max_device_bytes = 1;
  const cqsa_status status = cqsa_attention_query(device_context(), &p);
  if (status == CQSA_OK) return 1;
  REQUIRE(status == CQSA_ERROR_BUDGET_TOO_SMALL);
  const std::string text = cqsa_last_error();
  return std::strtoull(text.c_str() + text.rfind(' '), nullptr, 10);
}

std::string describe(const spec& s, const cqsa_attention_params& p) {
  char text[600];
  std::snprintf(text, sizeof text,
                "batch %" PRId64 " heads %" PRId64 "/%" PRId64 " dim %" PRId64 "/%" PRId64 " nq %" PRId64 " nk %" PRId64
                " q %x kv %x out %x scales %d %d causal %d window %d %" PRId64 " %" PRId64 " cap %g mask %d bias %d alibi %d sinks %d"
                " varlen %d paged %d (%" PRId64 ") seqused %d device %d%d%d inside %d gap %" PRId64 " | schedule %d c %d itr %d tiles %" PRId64
                " %" PRId64 " budget %" PRIu64,
                s.batch, s.heads, s.kv_heads, s.dim, s.dim_v, s.nq, s.nk, s.q, s.kv, s.out, s.scale_k, s.scale_v, s.causal, s.window, s.left,
                s.right, s.softcap, s.mask, s.bias, s.alibi, s.sinks, s.varlen, s.paged, s.page_size, s.seqused, s.q_device, s.kv_device,
                s.out_device, s.heads_inside, s.gap, p.schedule, p.cqs_c, p.cqs_itr, p.tile_q, p.tile_k, p.max_device_bytes);
  return text;
}

template <class T, size_t n>
T pick(generator& r, const T (&from)[n]) {
  return from[r() % n];
}

void random_types(generator& r, spec& s) {
  s.q = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  s.kv = s.q;
  s.out = pick(r, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  if (chance(r, 25)) {
    s.kv = pick(r, {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2});
    s.scale_k = pick(r, {CQSA_SCALE_NONE, CQSA_SCALE_TENSOR, CQSA_SCALE_HEAD, CQSA_SCALE_TOKEN});
    s.scale_v = pick(r, {CQSA_SCALE_NONE, CQSA_SCALE_TENSOR, CQSA_SCALE_HEAD, CQSA_SCALE_TOKEN});
  } else if (chance(r, 20)) {
    s.kv = CQSA_DTYPE_I8;
    s.scale_k = s.scale_v = CQSA_SCALE_GROUP;
    s.kv_group = 32;
  }
}

spec random_spec(generator& r, bool self = false) {
  spec s;
  s.batch = between(r, 1, 3);
  s.kv_heads = between(r, 1, 3);
  s.heads = s.kv_heads * between(r, 1, 3);
  s.dim = between(r, 1, 40);
  s.dim_v = between(r, 1, 40);
  s.nq = between(r, 1, 150);
  s.nk = self ? s.nq : between(r, 0, 200);
  random_types(r, s);
  s.causal = static_cast<int32_t>(between(r, 0, 2));
  if (chance(r, 25)) s.window = true, s.left = between(r, -1, 60), s.right = between(r, -1, 60);
  if (chance(r, 15)) s.softcap = 3;
  if (chance(r, 20)) s.mask = static_cast<int>(between(r, 0, 15));
  if (chance(r, 20)) s.bias = static_cast<int>(between(r, 0, 15));
  s.alibi = chance(r, 20), s.alibi_per_item = chance(r, 50), s.sinks = chance(r, 20), s.lse = chance(r, 80);
  s.q_device = chance(r, 40), s.kv_device = chance(r, 40), s.out_device = chance(r, 40);
  s.heads_inside = chance(r, 50);
  s.gap = chance(r, 30) ? 3 : 0;
  if (self) return s;
  s.nk = std::max<int64_t>(s.nk, 1);
  s.varlen = chance(r, 30), s.paged = chance(r, 25), s.seqused = chance(r, 20), s.wide_index = chance(r, 50);
  if (s.varlen) s.tail = between(r, 0, 3);
  if (s.paged) s.page_size = pick(r, {int64_t{1}, int64_t{5}, int64_t{16}});
  if (s.paged) s.nk = (s.nk + s.page_size - 1) / s.page_size * s.page_size;
  return s;
}

void random_delays(generator& r) {
  fake_config config{};
  config.seed = r();
  if (chance(r, 20)) config.delay_max_us = 200;
  configure(config);
}

void run_and_check(const spec& s, uint64_t seed, cqsa_attention_params (*shape)(generator&, cqsa_attention_params)) {
  generator r(seed);
  operands o = make(s, seed);
  const operands wanted = reference(o);
  place(o);
  const cqsa_attention_params p = shape(r, params_of(device_context(), o));
  INFO("seed " << seed << ": " << describe(s, p));
  random_delays(r);
  const outcome result = run(o, p);
  INFO(result.error);
  if (result.status == CQSA_ERROR_UNSUPPORTED) return;  // direct, where there is none
  REQUIRE(result.status == CQSA_OK);
  compare(o, wanted);
  check_gaps(o);
  check_accounts(result, p, s);
}

}  // namespace

TEST_CASE("stream and direct agree with the f64 reference", "[device]") {
  for (uint64_t seed = 1; seed <= cqsa::test::random_count(250, 6); ++seed) {
    generator r(seed * 7919);
    run_and_check(random_spec(r), seed, [](generator& g, cqsa_attention_params p) {
      p.schedule = chance(g, 20) ? CQSA_SCHEDULE_DIRECT : CQSA_SCHEDULE_STREAM;
      if (p.schedule == CQSA_SCHEDULE_STREAM && chance(g, 80)) p.tile_q = between(g, 1, 70);
      if (p.schedule == CQSA_SCHEDULE_STREAM && chance(g, 80)) p.tile_k = between(g, 1, 70);
      return p;
    });
  }
}

TEST_CASE("CQS agrees with the f64 reference", "[device]") {
  for (uint64_t seed = 1; seed <= cqsa::test::random_count(120, 6); ++seed) {
    generator r(seed * 104729);
    run_and_check(random_spec(r, true), seed, [](generator& g, cqsa_attention_params p) {
      p.schedule = CQSA_SCHEDULE_CQS;
      p.cqs_c = pick(g, {3, 3, 7, 7, 13, 21});
      p.cqs_itr = p.cqs_c > 7 ? 1 : static_cast<int32_t>(between(g, 1, 2));
      // Less memory means other residencies.
      const uint64_t least = least_budget(p);
      p.max_device_bytes = chance(g, 50) ? least + g() % (2 * least) : 0;
      return p;
    });
  }
}

TEST_CASE("any budget gives the same answer and is kept", "[device]") {
  for (uint64_t seed = 1; seed <= cqsa::test::random_count(150, 6); ++seed) {
    generator r(seed * 15485863);
    run_and_check(random_spec(r, chance(r, 30)), seed, [](generator& g, cqsa_attention_params p) {
      const uint64_t least = least_budget(p);
      p.max_device_bytes = chance(g, 30) ? least : least + g() % (4 * least);
      if (chance(g, 20)) p.max_pinned_bytes = 64;  // forces pageable staging
      return p;
    });
  }
}

TEST_CASE("the least budget that a refusal states is the least", "[device]") {
  for (uint64_t seed = 1; seed <= cqsa::test::random_count(120, 6); ++seed) {
    generator r(seed * 32452843);
    const bool square = chance(r, 50);
    operands o = make(random_spec(r, square), seed);
    cqsa_attention_params p = params_of(device_context(), o);
    p.schedule = square && chance(r, 50) ? CQSA_SCHEDULE_CQS : pick(r, {CQSA_SCHEDULE_AUTO, CQSA_SCHEDULE_STREAM});
    p.max_device_bytes = least_budget(p);
    INFO("seed " << seed << " schedule " << p.schedule << " least " << p.max_device_bytes);
    CHECK(cqsa_attention_query(device_context(), &p) == CQSA_OK);
    if (--p.max_device_bytes == 0) continue;
    CHECK(cqsa_attention_query(device_context(), &p) == CQSA_ERROR_BUDGET_TOO_SMALL);
  }
}

TEST_CASE("the first call of a context stays within its budgets, planning included", "[device]") {
  cqsa_context* fresh = make_context("fake");
  operands o = make(spec{}, 6);
  cqsa_attention_params p = params_of(fresh, o);
  p.max_device_bytes = least_budget(p);
  configure();
  cqsa_plan* plan = nullptr;
  REQUIRE(cqsa_attention_plan_create(fresh, &p, &plan) == CQSA_OK);
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  REQUIRE(cqsa_plan_describe(plan, &info) == CQSA_OK);
  REQUIRE(cqsa_plan_explain(plan, nullptr, 0, nullptr) == CQSA_OK);
  cqsa_attention_args args = o.args();
  REQUIRE(cqsa_attention_execute(plan, &args, nullptr) == CQSA_OK);
  CHECK(stats().peak_bytes <= info.peak_device_bytes);
  CHECK(info.peak_device_bytes <= p.max_device_bytes);
  cqsa_plan_destroy(plan);
  cqsa_context_destroy(fresh);
}

namespace {

spec stream_spec() {
  spec s;
  s.batch = 2, s.heads = 4, s.kv_heads = 2, s.nq = 90, s.nk = 130, s.dim = 24, s.dim_v = 20, s.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  return s;
}

spec cqs_spec() {
  spec s = stream_spec();
  s.nk = s.nq;
  return s;
}

cqsa_attention_params tiled(operands& o, int32_t schedule) {
  cqsa_attention_params p = params_of(device_context(), o);
  p.schedule = schedule;
  if (schedule == CQSA_SCHEDULE_STREAM) p.tile_q = 32, p.tile_k = 24;
  if (schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 7, p.cqs_itr = 1;
  return p;
}

}  // namespace

TEST_CASE("delays and their order change no bit", "[device]") {
  for (const int32_t schedule : {CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
    operands o = make(schedule == CQSA_SCHEDULE_CQS ? cqs_spec() : stream_spec(), 11);
    cqsa_attention_params p = tiled(o, schedule);
    if (schedule == CQSA_SCHEDULE_CQS) p.max_device_bytes = least_budget(p) * 3 / 2;
    std::vector<char> first;
    for (uint64_t seed = 0; seed < 8; ++seed) {
      fake_config config{};
      config.seed = seed;
      config.delay_max_us = seed == 0 ? 0 : 400;
      configure(config);
      o.out.fill(0xFF);
      const outcome r = run(o, p);
      INFO(r.error);
      REQUIRE(r.status == CQSA_OK);
      if (seed == 0) first = o.out.memory();
      CHECK(o.out.memory() == first);
      check_accounts(r, p, o.s);
    }
  }
}

namespace {

// A run that may pin next to nothing, so that the context gives up what it keeps.
void drop_kept_staging() {
  operands o = make(stream_spec(), 20);
  cqsa_attention_params p = params_of(device_context(), o);
  p.max_pinned_bytes = 64;
  configure();
  REQUIRE(run(o, p).status == CQSA_OK);
  REQUIRE(stats().live_pinned == 0);
}

}  // namespace

TEST_CASE("a refused allocation is planned around", "[device]") {
  operands o = make(stream_spec(), 21);
  const operands wanted = reference(o);
  cqsa_attention_params p = params_of(device_context(), o);
  for (int64_t refusals = 1; refusals <= 6; ++refusals) {
    drop_kept_staging();
    fake_config config{};
    config.fail_alloc = 1;
    config.fail_allocs = refusals;
    configure(config);
    o.out.fill(0xFF);
    const outcome r = run(o, p);
    INFO(refusals << " " << r.error);
    if (r.status == CQSA_OK) {
      CHECK(r.info.retries == refusals);
      compare(o, wanted);
    } else {
      CHECK(r.status == CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
      CHECK(!r.error.empty());
    }
    if (refusals <= 2) CHECK(r.status == CQSA_OK);
    if (refusals > 4) CHECK(r.status == CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
    check_accounts(r, p, o.s);
  }
}

TEST_CASE("memory that runs out in the middle costs only what was not done", "[device]") {
  for (const int32_t schedule : {CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS, CQSA_SCHEDULE_AUTO})
    for (const bool on_device : {false, true}) {
      spec s = schedule == CQSA_SCHEDULE_STREAM ? stream_spec() : cqs_spec();
      s.out_device = on_device;
      operands o = make(s, 31);
      const operands wanted = reference(o);
      place(o);
      cqsa_attention_params p = params_of(device_context(), o);
      p.schedule = schedule;
      if (schedule == CQSA_SCHEDULE_STREAM) p.tile_q = 16, p.tile_k = 24;
      const uint64_t least = least_budget(p);
      p.max_device_bytes = least * 4;
      configure();
      const int64_t launches = run(o, p).info.tasks;
      for (int64_t at = 1; at <= launches; at += 1 + launches / 25) {
        fake_config config{};
        config.fail_launch = at;
        config.delay_max_us = 50;
        config.seed = static_cast<uint64_t>(at);
        configure(config);
        o.out.fill(0xFF), o.lse.fill(0xFF);
        o.out.upload_again(), o.lse.upload_again();
        const outcome r = run(o, p);
        INFO("schedule " << schedule << ", launch " << at << " of " << launches << " fails; device " << on_device << ": " << r.error);
        CHECK(r.info.retries == 1);
        if (r.plan.peak_device_bytes / 2 < least) {
          CHECK(r.status == CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
          CHECK(r.error.find(std::to_string(least)) != std::string::npos);
          continue;
        }
        REQUIRE(r.status == CQSA_OK);
        // Every row leaves the device once: what had been finished before the failure is not done again.
        if (schedule == CQSA_SCHEDULE_STREAM && !on_device) CHECK(r.info.bytes_out == r.plan.bytes_out);
        compare(o, wanted);
        check_accounts(r, p, s);
      }
    }
}

TEST_CASE("failures of the device are reported and nothing leaks", "[device]") {
  operands o = make(stream_spec(), 41);
  const cqsa_attention_params p = tiled(o, CQSA_SCHEDULE_STREAM);
  configure();
  REQUIRE(run(o, p).status == CQSA_OK);
  const fake_counters whole = stats();
  for (const bool in_copy : {true, false})
    for (int64_t at = 1; at <= (in_copy ? whole.copies : whole.launches); ++at) {
      fake_config config{};
      (in_copy ? config.fail_copy : config.fail_execution) = at;
      configure(config);
      const outcome r = run(o, p);
      INFO(at << " " << in_copy << " " << r.error);
      CHECK(r.status == CQSA_ERROR_RUNTIME);
      CHECK(r.error.find("told to fail") != std::string::npos);
      CHECK(leaked() == 0);
      CHECK(stats().live_objects == 0);
    }
  configure();
  CHECK(run(o, p).status == CQSA_OK);
}

TEST_CASE("pinned memory that is refused is replaced by pageable staging", "[device]") {
  operands o = make(stream_spec(), 51);
  const operands wanted = reference(o);
  cqsa_attention_params p = tiled(o, CQSA_SCHEDULE_STREAM);
  drop_kept_staging();
  fake_config config{};
  config.pinned_limit = 1;
  configure(config);
  outcome r = run(o, p);
  INFO(r.error);
  REQUIRE(r.status == CQSA_OK);
  CHECK(r.info.peak_pinned_bytes == 0);
  CHECK(r.info.peak_host_bytes > r.plan.peak_host_bytes);  // of another plan: one retry, within the caller's budget
  CHECK(r.info.retries == 1);
  compare(o, wanted);
  p.max_host_bytes = r.plan.peak_host_bytes;
  r = run(o, p);
  CHECK(r.status == CQSA_ERROR_OUT_OF_PINNED_MEMORY);
  CHECK(leaked() == 0);
}

TEST_CASE("operands in pinned memory go without staging where their rows are together", "[device]") {
  for (const bool inside : {false, true})
    for (const int32_t schedule : {CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
      spec s;
      s.batch = 2, s.heads = 2, s.kv_heads = 1, s.nq = s.nk = 700, s.dim = s.dim_v = 32;
      s.heads_inside = inside;
      s.lse = schedule == CQSA_SCHEDULE_CQS;  // its copy would wait for that of out
      operands o = make(s, 53);
      const operands wanted = reference(o);
      for (array* a : {&o.q, &o.k, &o.v, &o.out, &o.lse})
        if (a->there()) a->to_pinned();
      cqsa_attention_params p = params_of(device_context(), o);
      CHECK(p.memory_kv == CQSA_MEMORY_PINNED);
      p.schedule = schedule;
      if (schedule == CQSA_SCHEDULE_STREAM) p.tile_q = 400, p.tile_k = 350;
      if (schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 3, p.cqs_itr = 1;
      for (uint64_t seed = 0; seed < 4; ++seed) {
        fake_config config{};
        config.seed = seed;
        config.delay_max_us = seed == 3 ? 20000 : 300;  // longer than a leaf takes
        configure(config);
        o.out.fill(0xFF);
        o.out.upload_again();
        const outcome r = run(o, p);
        INFO(r.error);
        REQUIRE(r.status == CQSA_OK);
        compare(o, wanted);
        check_accounts(r, p, s);
      }
    }
}

namespace {

struct watcher {
  int64_t calls = 0, last = -1, total = -1, stop_at = -1;
  bool fell = false, changed = false;

  static int32_t progress(void* user, int64_t done, int64_t total) {
    auto& w = *static_cast<watcher*>(user);
    w.fell |= done < w.last || done < 0 || done > total;
    w.changed |= w.total >= 0 && w.total != total;
    w.last = done, w.total = total;
    return ++w.calls == w.stop_at;
  }
};

}  // namespace

TEST_CASE("progress rises to the end and can cancel anywhere", "[device]") {
  for (const int32_t schedule : {CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS, CQSA_SCHEDULE_DIRECT}) {
    operands o = make(schedule == CQSA_SCHEDULE_CQS ? cqs_spec() : stream_spec(), 61);
    const cqsa_attention_params p = tiled(o, schedule);
    cqsa_attention_args args = o.args();
    watcher all;
    args.progress = watcher::progress;
    args.progress_user = &all;
    configure();
    REQUIRE(run(o, p, &args).status == CQSA_OK);
    CHECK(!all.fell);
    CHECK(!all.changed);
    CHECK(all.last == all.total);
    for (int64_t stop = 1; stop <= all.calls; ++stop) {
      watcher some;
      some.stop_at = stop;
      args.progress_user = &some;
      const outcome r = run(o, p, &args);
      CHECK(r.status == CQSA_ERROR_CANCELLED);
      CHECK(std::string(stats().error).empty());
      CHECK(leaked() == 0);
      CHECK(stats().live_objects == 0);
    }
  }
}

TEST_CASE("the cancel flag stops a run", "[device]") {
  operands o = make(stream_spec(), 71);
  const cqsa_attention_params p = tiled(o, CQSA_SCHEDULE_STREAM);
  cqsa_attention_args args = o.args();
  const int32_t cancel = 1;
  args.cancel = &cancel;
  configure();
  CHECK(run(o, p, &args).status == CQSA_ERROR_CANCELLED);
  CHECK(leaked() == 0);
}

TEST_CASE("a workspace on the device replaces every allocation there", "[device]") {
  for (const int32_t schedule : {CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM, CQSA_SCHEDULE_CQS}) {
    operands o = make(schedule == CQSA_SCHEDULE_CQS ? cqs_spec() : stream_spec(), 81);
    const operands wanted = reference(o);
    const cqsa_attention_params p = tiled(o, schedule);
    cqsa_plan* plan = nullptr;
    REQUIRE(cqsa_attention_plan_create(device_context(), &p, &plan) == CQSA_OK);
    uint64_t bytes = 0;
    REQUIRE(cqsa_workspace_query(plan, &bytes) == CQSA_OK);
    std::vector<char> canary(bytes + 512, '\x5A'), after(canary);
    void* memory = fake().alloc(canary.size());
    fake().write(memory, canary.data(), canary.size());
    void* workspace = static_cast<char*>(memory) + 256;
    configure();
    CHECK(cqsa_workspace_init(plan, workspace, bytes) == CQSA_OK);
    cqsa_attention_args args = o.args();
    args.workspace = workspace;
    args.workspace_bytes = bytes - 1;
    CHECK(cqsa_attention_execute(plan, &args, nullptr) == CQSA_ERROR_WORKSPACE);
    args.workspace_bytes = bytes;
    const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
    INFO(cqsa_last_error());
    CHECK(status == CQSA_OK);
    compare(o, wanted);
    CHECK(stats().allocations == 0);
    fake().read(after.data(), memory, after.size());
    CHECK(std::memcmp(after.data(), canary.data(), 256) == 0);
    CHECK(std::memcmp(after.data() + 256 + bytes, canary.data(), 256) == 0);
    fake_config config{};
    config.fail_launch = 1;
    configure(config);
    CHECK(cqsa_attention_execute(plan, &args, nullptr) == CQSA_ERROR_OUT_OF_DEVICE_MEMORY);
    fake().free(memory);
    cqsa_plan_destroy(plan);
  }
}

TEST_CASE("f64 is computed by the reference where no state is carried", "[device]") {
  spec s = stream_spec();
  s.q = s.kv = s.out = CQSA_DTYPE_F64;
  operands o = make(s, 91);
  const operands wanted = reference(o);
  cqsa_attention_params p = params_of(device_context(), o);
  for (const int32_t schedule : {CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_AUTO}) {
    p.schedule = schedule;
    configure();
    const outcome r = run(o, p);
    INFO(r.error);
    REQUIRE(r.status == CQSA_OK);
    CHECK(error_of(o.out, wanted.out) < 1e-14);
  }
}

// ---- staging that the context keeps ------------------------------------------------------------------------------------------------

namespace {

struct kept_context {
  cqsa_context* context = make_context("fake");
  ~kept_context() { cqsa_context_destroy(context); }

  cqsa_run_info run(operands& o, const cqsa_attention_params& p, cqsa_progress_fn progress = nullptr, void* user = nullptr) const {
    cqsa_run_info info = CQSA_RUN_INFO_INIT;
    cqsa_attention_args args = o.args();
    args.info = &info;
    args.progress = progress;
    args.progress_user = user;
    const cqsa_status status = cqsa_attention(context, &p, &args, nullptr);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    return info;
  }
};

int32_t see_pinned(void* most, int64_t, int64_t) {
  auto& bytes = *static_cast<uint64_t*>(most);
  bytes = std::max(bytes, stats().pinned_live_bytes);
  return 0;
}

}  // namespace

TEST_CASE("a context keeps the pinned staging of a run, and no budget is broken by it", "[device]") {
  drop_kept_staging();
  operands o = make(stream_spec(), 81);
  const operands wanted = reference(o);
  const cqsa_attention_params p = tiled(o, CQSA_SCHEDULE_STREAM);
  configure();
  {
    const kept_context c;
    const cqsa_run_info first = c.run(o, p);
    REQUIRE(first.peak_pinned_bytes > 0);
    CHECK(stats().pinned_live_bytes == first.peak_pinned_bytes);
    const cqsa_run_info second = c.run(o, p);
    CHECK(second.peak_pinned_bytes == first.peak_pinned_bytes);
    CHECK(stats().pinned_peak_bytes == first.peak_pinned_bytes);  // never two rings
    CHECK(stats().pinned_live_bytes == first.peak_pinned_bytes);
    // Less than is kept: it goes back before the run begins.
    cqsa_attention_params less = p;
    less.max_pinned_bytes = first.peak_pinned_bytes - 1;
    uint64_t most = 0;
    o.out.fill(0xFF);
    const cqsa_run_info small = c.run(o, less, see_pinned, &most);
    CHECK(small.peak_pinned_bytes < first.peak_pinned_bytes);
    CHECK(most == small.peak_pinned_bytes);
    CHECK(stats().pinned_live_bytes == small.peak_pinned_bytes);
    compare(o, wanted);
    // More than is kept: it is replaced, and there are not two at any time.
    configure();
    c.run(o, p);
    CHECK(stats().pinned_peak_bytes == first.peak_pinned_bytes);
    // More than is needed serves as well, within the budget.
    less.max_pinned_bytes = 0;
    less.tile_q = less.tile_k = 8;
    o.out.fill(0xFF);
    CHECK(c.run(o, less).peak_pinned_bytes < first.peak_pinned_bytes);
    CHECK(stats().pinned_live_bytes == first.peak_pinned_bytes);
    compare(o, wanted);
  }
  CHECK(stats().live_pinned == 0);
  CHECK(stats().live_allocations == 0);
}

TEST_CASE("kept staging goes back where memory is short", "[device]") {
  drop_kept_staging();
  operands o = make(stream_spec(), 82);
  const operands wanted = reference(o);
  const cqsa_attention_params p = tiled(o, CQSA_SCHEDULE_STREAM);
  configure();
  const kept_context c;
  const uint64_t bytes = c.run(o, p).peak_pinned_bytes;
  fake_config config{};
  config.fail_alloc = 1;
  configure(config);
  o.out.fill(0xFF);
  CHECK(c.run(o, p).retries == 0);  // the second try had it
  CHECK(stats().pinned_live_bytes == bytes);
  compare(o, wanted);
  // A larger ring than is kept, where both together would not fit.
  cqsa_attention_params small = p;
  small.max_pinned_bytes = bytes / 2;
  const uint64_t half = c.run(o, small).peak_pinned_bytes;
  REQUIRE(half > 0);
  config = {};
  config.pinned_limit = bytes;
  configure(config);
  CHECK(c.run(o, p).retries == 0);
  CHECK(stats().pinned_live_bytes == bytes);
}

TEST_CASE("runs at the same time share a context's kept staging", "[device]") {
  drop_kept_staging();
  configure();
  const kept_context c;
  constexpr int threads = 4;
  std::atomic<int> wrong{0};
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&c, &wrong, t] {
      operands o = make(stream_spec(), 90 + static_cast<uint64_t>(t));
      cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
      cqsa_attention_args args = o.args();
      wrong += cqsa_attention_params_of(c.context, &args, &p) != CQSA_OK;
      p.schedule = CQSA_SCHEDULE_STREAM;
      p.tile_q = 32, p.tile_k = 24;
      std::vector<char> first;
      for (int round = 0; round < 12; ++round) {
        o.out.fill(0xFF);
        wrong += cqsa_attention(c.context, &p, &args, nullptr) != CQSA_OK;
        const char* out = static_cast<const char*>(static_cast<const void*>(o.out.memory().data()));
        const std::vector<char> now(out, out + o.out.memory().size());
        if (round == 0) first = now;
        wrong += now != first;
      }
    });
  for (std::thread& w : workers) w.join();
  CHECK(wrong == 0);
  CHECK(std::string(stats().error).empty());
  CHECK(stats().live_pinned == 1);
  CHECK(leaked() == 0);
}
