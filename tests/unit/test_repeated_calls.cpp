// SPDX-License-Identifier: Apache-2.0
// Enqueue mode: what a call takes from an earlier one of its thread, and what is looked at every time.
#include "enqueue_test.h"

using namespace device_test;

TEST_CASE("operands in one allocation are one question", "[enqueue]") {
  int64_t shape[] = {1, 2, 8, 16};
  constexpr uint64_t bytes = 2 * 8 * 16 * 4;
  const device_memory one(4 * bytes), other(bytes);
  const auto tensor = [&](const device_memory& memory, uint64_t offset) {
    return cqsa_tensor{memory.data, CQSA_DEVICE_EXT, 0, 4, CQSA_DTYPE_F32, shape, nullptr, offset};
  };
  const cqsa_tensor q = tensor(one, 0), k = tensor(one, bytes), v = tensor(one, 2 * bytes), out = tensor(one, 3 * bytes), far = tensor(other, 0);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  fake_config config{};
  config.no_work = 1;
  for (const cqsa_tensor* values : {&v, &far}) {
    args.q = &q, args.k = &k, args.v = values, args.out = &out;
    configure(config);
    REQUIRE(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_OK);
    fake().stream_sync(nullptr);
    CHECK(stats().pointer_queries == (values == &v ? 1 : 2));
  }
  // Not remembered from one call to the next.
  configure(config);
  fake().pretend(q.data, 0, 0);
  CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_DEVICE);
  fake().pretend(q.data, -1, 0);
  configure();
}

TEST_CASE("a plan's next run is checked for what has changed", "[enqueue]") {
  operands o = make(on_device(), 51);
  const operands wanted = reference(o);
  place(o);
  const own_plan plan(device_context(), params_of(device_context(), o));
  const cqsa_attention_args good = o.args();
  configure();
  const auto run = [&](const cqsa_attention_args& args) { return cqsa_attention_execute(plan.handle, &args, nullptr); };
  for (int i = 0; i < 2; ++i) REQUIRE(run(good) == CQSA_OK);
  fake().stream_sync(nullptr);
  int64_t sizes[4], steps[4] = {1, 1, 1, 1};
  const auto refused = [&](cqsa_status status, auto change) {
    cqsa_tensor k = *good.k;
    std::copy(k.shape, k.shape + 4, sizes);
    k.shape = sizes;
    change(k);
    cqsa_attention_args args = good;
    args.k = &k;
    CHECK(run(args) == status);
    if (status != CQSA_OK) CHECK(std::string(cqsa_last_error()).substr(0, 7) == (status == CQSA_ERROR_OVERLAP ? "args->o" : "args->k"));
  };
  refused(CQSA_ERROR_SHAPE, [&](cqsa_tensor&) { ++sizes[2]; });
  refused(CQSA_ERROR_SHAPE, [](cqsa_tensor& k) { k.ndim = 3; });
  refused(CQSA_ERROR_DTYPE, [](cqsa_tensor& k) { k.dtype = CQSA_DTYPE_F16; });
  refused(CQSA_ERROR_DEVICE, [](cqsa_tensor& k) { k.device_id = 1; });
  refused(CQSA_ERROR_DEVICE, [](cqsa_tensor& k) { k.device_type = CQSA_DEVICE_CPU; });
  refused(CQSA_ERROR_NULL_POINTER, [](cqsa_tensor& k) { k.data = nullptr; });
  refused(CQSA_ERROR_STRIDES, [](cqsa_tensor& k) { k.byte_offset = UINT64_MAX - 64; });
  refused(CQSA_ERROR_OVERLAP, [&](cqsa_tensor& k) { k.data = good.out->data; });
  refused(CQSA_OK, [&](cqsa_tensor& k) { k.strides = steps; });
  cqsa_attention_args lacking = good;
  lacking.k = nullptr;
  CHECK(run(lacking) == CQSA_ERROR_NULL_POINTER);
  lacking = good;
  lacking.lse = good.lse ? nullptr : good.out;
  CHECK(run(lacking) != CQSA_OK);
  fake().stream_sync(nullptr);
  clear_outputs(o);
  const device_memory moved(o.q.memory().size());  // the same operand elsewhere
  cqsa_tensor q = *good.q;
  q.data = moved.data;
  fake().write(moved.data, o.q.memory().data(), o.q.memory().size());
  cqsa_attention_args args = good;
  args.q = &q;
  CHECK(run(args) == CQSA_OK);
  fake().stream_sync(nullptr);
  compare(o, wanted);
  CHECK(std::string(stats().error).empty());
}

TEST_CASE("one-shot calls of several kinds in turn", "[enqueue]") {
  std::vector<operands> problems, wanted;
  for (uint64_t seed = 1; seed <= 7; ++seed) {  // more than the plans that a thread keeps
    spec s = on_device();
    s.nq = s.nk = 20 + static_cast<int64_t>(seed / 2);
    s.causal = static_cast<int32_t>(seed % 2);
    problems.push_back(make(s, seed));
    wanted.push_back(reference(problems.back()));
    place(problems.back());
  }
  configure();
  for (int round = 0; round < 4; ++round) {
    cqsa_context* const context = make_context("fake");  // at an address that may have been another one's
    for (size_t i = 0; i < problems.size(); ++i)
      for (int again = 0; again < 2; ++again) {
        cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
        p.causal = static_cast<int32_t>((i + 1) % 2);
        const cqsa_attention_args args = problems[i].args();
        clear_outputs(problems[i]);
        const cqsa_status status = cqsa_attention(context, &p, &args, nullptr);
        INFO(cqsa_last_error());
        REQUIRE(status == CQSA_OK);
        fake().stream_sync(nullptr);
        compare(problems[i], wanted[i]);
      }
    cqsa_context_destroy(context);
  }
  CHECK(std::string(stats().error).empty());
}

TEST_CASE("a workspace that overlaps an operand is refused at every run", "[enqueue]") {
  operands o = make(on_device(), 53);
  place(o);
  const cqsa_attention_params p = params_of(device_context(), o), from_tensors = CQSA_ATTENTION_PARAMS_INIT;
  const own_plan plan(device_context(), p);
  REQUIRE(plan.workspace > 0);
  const uint64_t q_bytes = o.q.memory().size();
  const device_memory memory(plan.workspace + q_bytes + 64);
  cqsa_tensor q = *o.q.tensor();
  cqsa_attention_args args = o.args();
  args.q = &q;
  args.workspace = memory.data, args.workspace_bytes = plan.workspace;
  for (const bool one_call : {false, true}) {
    configure();
    const auto run = [&](uint64_t q_at) {
      q.data = static_cast<char*>(memory.data) + q_at;
      return one_call ? cqsa_attention(device_context(), &from_tensors, &args, nullptr) : cqsa_attention_execute(plan.handle, &args, nullptr);
    };
    CHECK(run(plan.workspace - 4) == CQSA_ERROR_OVERLAP);
    for (int i = 0; i < 3; ++i) {  // bound anew, then as before
      REQUIRE(run(plan.workspace) == CQSA_OK);
      fake().stream_sync(nullptr);
      const int64_t launches = stats().launches;
      CHECK(run(plan.workspace - 4) == CQSA_ERROR_OVERLAP);
      CHECK(std::string(cqsa_last_error()).find("args->workspace overlaps args->q:") == 0);
      CHECK(stats().launches == launches);
    }
  }
}

TEST_CASE("messages name the operand that is elsewhere", "[enqueue]") {
  operands o = make(on_device(), 54);
  place(o);
  const cqsa_attention_params p = CQSA_ATTENTION_PARAMS_INIT;
  configure();
  const auto refused = [&](const cqsa_tensor* cqsa_attention_args::*which, auto change, const char* message) {
    cqsa_attention_args args = o.args();
    cqsa_tensor t = *(args.*which);
    change(t);
    args.*which = &t;
    CHECK(cqsa_attention(device_context(), &p, &args, nullptr) == CQSA_ERROR_DEVICE);
    CHECK(std::string(cqsa_last_error()) == message);
  };
  refused(&cqsa_attention_args::q, [](cqsa_tensor& t) { t.device_id = 1; }, "args->q is on device 1, the context is for device 0");
  refused(&cqsa_attention_args::v, [](cqsa_tensor& t) { t.device_id = 1; }, "args->v is on device 1, the context is for device 0");
  refused(&cqsa_attention_args::k, [](cqsa_tensor& t) { t.device_type = CQSA_DEVICE_CPU; },
          "args->v is on device type 12 (ext), that is CQSA_MEMORY_DEVICE, but args->k is on device type 1 (cpu), that is "
          "CQSA_MEMORY_HOST; wanted both in one place");
}
