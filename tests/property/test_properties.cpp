// SPDX-License-Identifier: Apache-2.0
// Random problems against what cqsa.h promises. Every failure prints the seed of its problem:
//
//     CQSA_SEED=<seed> CQSA_PROPERTY_COUNT=1 test_properties "<test case>"
#include "fixture.h"

#include <atomic>
#include <functional>
#include <thread>

// ----------------------------------------------------------------------------------------------- budgets and schedules

TEST_CASE("any schedule in any budget gives the same answer and stays within it") {
  library with_1(1), with_2(2), with_3(3), with_8(8);
  library* const libraries[] = {&with_1, &with_2, &with_3, &with_8};
  for_seeds(600, [&](generator& random) {
    problem p = random_problem(random);
    const truth exact(with_2, p);
    for (int i = 0; i < 6; ++i) {
      library& lib = *libraries[random.integer(0, 3)];
      choose_schedule(p, random);
      choose_budget(lib, p, random);
      INFO(describe(p));
      plan planned(lib, p.params);
      result r = p.empty_result();
      cqsa_attention_args args = p.args(r);
      cqsa_run_info info = CQSA_RUN_INFO_INIT;
      args.info = &info;
      const int64_t before = lib.memory.bytes;
      lib.memory.restart();
      const cqsa_status status = cqsa_attention_execute(planned.handle, &args, nullptr);
      INFO(cqsa_last_error());
      REQUIRE(status == CQSA_OK);
      const auto used = static_cast<uint64_t>(lib.memory.highest - before);
      CHECK(used <= planned.info.peak_host_bytes);
      CHECK(info.peak_host_bytes == used);
      CHECK(info.peak_device_bytes == 0);
      CHECK(info.peak_pinned_bytes == 0);
      if (p.params.max_host_bytes) CHECK(planned.info.peak_host_bytes <= p.params.max_host_bytes);
      if (p.params.schedule) CHECK(planned.info.schedule == p.params.schedule);
      CHECK(lib.memory.bytes == before);
      check_close(p, r, exact);
    }
  });
}

TEST_CASE("the error does not grow with the number of CQS chunks") {
  library lib;
  for_seeds(8, [&](generator& random) {
    problem p = random_problem(random, {true, true, true, true, true});
    p.params.causal = random.one_of({CQSA_CAUSAL_NONE, CQSA_CAUSAL_BOTTOM_RIGHT});
    p.params.flags = CQSA_ATTENTION_LSE;
    p.params.window_left = p.params.window_right = 0;
    p.params.softcap = 0;
    p.operands[SLOPES] = array();
    const truth exact(lib, p);
    const auto rms = [&](int32_t c, int32_t itr) {
      p.params.schedule = c ? CQSA_SCHEDULE_CQS : CQSA_SCHEDULE_DIRECT;
      p.params.cqs_c = c, p.params.cqs_itr = itr;
      const result r = run(lib, p);
      double sum = 0;
      for (int64_t n = 0; n < r.out.count(); ++n) sum += std::pow(r.out.get(n) - exact.exact.out.get(n), 2);
      return std::sqrt(sum / static_cast<double>(r.out.count()));
    };
    const double direct = rms(0, 0);
    for (const auto& [c, itr] : {std::pair{3, 1}, {7, 1}, {13, 1}, {31, 1}, {73, 1}, {133, 1}, {3, 3}, {13, 2}}) {
      INFO(describe(p));
      const double error = rms(c, itr);
      INFO("rms error " << error << ", direct " << direct);
      CHECK(error <= 1.5 * direct + 1e-8);
    }
  });
}

TEST_CASE("a workspace of the caller is exact") {
  library lib(3);
  for_seeds(200, [&](generator& random) {
    problem p = random_problem(random);
    choose_schedule(p, random);
    choose_budget(lib, p, random);
    INFO(describe(p));
    const result wanted = run(lib, p);
    plan planned(lib, p.params);
    uint64_t bytes = 0;
    REQUIRE(cqsa_workspace_query(planned.handle, &bytes) == CQSA_OK);
    CHECK(bytes == planned.info.workspace_bytes);
    canaries memory(bytes);
    result r = p.empty_result();
    const result untouched = r;
    cqsa_attention_args args = p.args(r);
    const auto execute_in = [&](void* workspace, uint64_t size) {
      args.workspace = workspace;
      args.workspace_bytes = size;
      return cqsa_attention_execute(planned.handle, &args, nullptr);
    };
    CHECK(execute_in(memory.data, bytes) == CQSA_ERROR_WORKSPACE);  // not initialised: all NaN
    CHECK(cqsa_workspace_init(planned.handle, memory.data, bytes - 1) == CQSA_ERROR_WORKSPACE);
    CHECK(cqsa_workspace_init(planned.handle, memory.data + 8, bytes) == CQSA_ERROR_WORKSPACE);
    REQUIRE(cqsa_workspace_init(planned.handle, memory.data, bytes) == CQSA_OK);
    CHECK(execute_in(memory.data, bytes - 1) == CQSA_ERROR_WORKSPACE);
    CHECK(execute_in(memory.data + 8, bytes) == CQSA_ERROR_WORKSPACE);
    CHECK(same_bits(r, untouched));
    const int64_t allocations = lib.memory.allocations;
    for (int i = 0; i < 2; ++i) {  // once initialised, it serves any number of runs
      r = untouched;
      args = p.args(r);
      REQUIRE(execute_in(memory.data, bytes) == CQSA_OK);
      CHECK(same_bits(r, wanted));
    }
    CHECK(lib.memory.allocations == allocations);
    CHECK(memory.intact());
  });
}

// ------------------------------------------------------------------------------------------------------------- operands

TEST_CASE("hidden keys and values may hold anything") {
  library lib;
  for_seeds(400, [&](generator& random) {
    problem p = random_problem(random);
    auto& a = p.params;
    // Some keys are hidden from every query: by a mask of all of them, in all layouts but the pools of pages.
    if (p.has(CQSA_ATTENTION_PAGED)) return;
    a.flags |= CQSA_ATTENTION_MASK;
    a.mask_broadcast = CQSA_BROADCAST_HEAD | CQSA_BROADCAST_QUERY;
    array& mask = p.operands[MASK] = array(CQSA_DTYPE_BOOL, {a.batch, 1, 1, a.seqlen_k});
    for (int64_t n = 0; n < mask.count(); ++n) mask.set(n, random.chance(0.6));
    choose_schedule(p, random);
    problem poisoned = p;
    const bool varlen = p.has(CQSA_ATTENTION_VARLEN);
    const double poison = a.dtype_kv == CQSA_DTYPE_I8 ? 127 : std::nan("");
    for (int64_t b = 0; b < a.batch; ++b) {
      const int64_t first = varlen ? static_cast<int64_t>(p.operands[CU_K].get(b)) : 0;
      const int64_t length = varlen ? static_cast<int64_t>(p.operands[CU_K].get(b + 1)) - first : a.seqlen_k;
      const int64_t used = p.operands[USED].present() ? static_cast<int64_t>(p.operands[USED].get(b)) : length;
      for (int64_t j = 0; j < length; ++j)
        for (int64_t g = 0; g < a.num_kv_heads; ++g) {
          if (j < used && mask.get(b * a.seqlen_k + j) != 0) continue;
          const int64_t row = varlen ? (first + j) * a.num_kv_heads + g : (b * a.num_kv_heads + g) * a.seqlen_k + j;
          for (const operand which : {K, V, K_SCALE, V_SCALE}) {
            const int32_t kind = which == K_SCALE ? a.scale_k : a.scale_v;
            const bool scale = which == K_SCALE || which == V_SCALE;
            if (scale && kind != CQSA_SCALE_TOKEN && kind != CQSA_SCALE_GROUP) continue;
            const int64_t dim = scale && kind == CQSA_SCALE_TOKEN ? 1 : p.operands[which].shape.back();
            for (int64_t c = 0; c < dim; ++c) {
              p.operands[which].set(row * dim + c, 0);
              poisoned.operands[which].set(row * dim + c, scale ? std::nan("") : poison);
            }
          }
        }
    }
    INFO(describe(p));
    CHECK(same_bits(run(lib, p), run(lib, poisoned)));
  });
}

TEST_CASE("any strides give the bits of packed operands") {
  library lib;
  for_seeds(400, [&](generator& random) {
    problem p = random_problem(random);
    choose_schedule(p, random);
    choose_budget(lib, p, random);
    INFO(describe(p));
    const result wanted = run(lib, p);
    problem scattered = p;
    for (const operand which : {Q, K, V, K_SCALE, V_SCALE, MASK, BIAS, SLOPES, SINKS, PAGES})
      if (p.operands[which].present()) scattered.operands[which] = p.operands[which].scattered(random);
    result r = p.empty_result();
    r = {r.out.scattered(random), r.lse.scattered(random)};
    const result before = r;
    const cqsa_attention_args args = scattered.args(r);
    const cqsa_status status = cqsa_attention(lib, &scattered.params, &args, nullptr);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    CHECK(same_bits(r, wanted));
    for (array* out : {&r.out, &r.lse})  // the gaps keep their bytes
      for (int64_t n = 0; n < out->count(); ++n) std::memset(out->bytes.data() + out->offset(n), 0xFF, static_cast<size_t>(out->type_bytes()));
    CHECK(r.out.bytes == before.out.bytes);
    CHECK(r.lse.bytes == before.lse.bytes);
  });
}

// --------------------------------------------------------------------------------------------------- threads and bits

namespace {

// A caller's own way to run tasks.
struct lent_threads {
  enum { forwards, backwards, scattered, failing, skipping, repeating, inventing } manner = forwards;
  int64_t calls = 0;

  static int32_t run(void* user, int64_t num_tasks, void (*task)(void*, int64_t), void* data) {
    auto& self = *static_cast<lent_threads*>(user);
    ++self.calls;
    if (self.manner == failing) return 7;
    if (self.manner == inventing) task(data, num_tasks);
    const int64_t end = self.manner == skipping ? num_tasks - 1 : num_tasks;
    if (self.manner == scattered) {
      std::vector<std::thread> threads;
      for (int64_t i = 0; i < end; ++i) threads.emplace_back(task, data, i);
      for (std::thread& thread : threads) thread.join();
      return 0;
    }
    for (int64_t i = 0; i < end; ++i) task(data, self.manner == backwards ? end - 1 - i : i);
    if (self.manner == repeating) task(data, 0);
    return 0;
  }
};

}  // namespace

TEST_CASE("the bits do not depend on threads, nor on who lends them") {
  lent_threads forwards{lent_threads::forwards}, backwards{lent_threads::backwards}, scattered{lent_threads::scattered};
  library with_1(1), with_2(2), with_3(3), with_8(8), with_4(4);
  library serial(4, lent_threads::run, &forwards), reversed(4, lent_threads::run, &backwards), threaded(4, lent_threads::run, &scattered);
  for_seeds(200, [&](generator& random) {
    wishes wish;
    wish.large = random.chance(0.5);
    problem p = random_problem(random, wish);
    choose_schedule(p, random);
    INFO(describe(p));
    const result wanted = run(with_4, p);
    const int64_t tile_k = plan(with_4, p.params).info.tile_k;
    for (library* lib : {&with_4, &serial, &reversed, &threaded}) CHECK(same_bits(run(*lib, p), wanted));
    for (library* lib : {&with_1, &with_2, &with_3, &with_8}) {
      // Another number of threads is another plan. One pass over everything is the same one; the other schedules may choose
      // another tile, which is another order of the sums.
      if (p.params.schedule == CQSA_SCHEDULE_CQS) continue;
      const plan here(*lib, p.params);
      INFO("threads " << here.info.in_flight);
      if (p.params.schedule != CQSA_SCHEDULE_STREAM) CHECK(here.info.tile_k == tile_k);
      if (here.info.tile_k == tile_k) CHECK(same_bits(run(*lib, p), wanted));
    }
  });
  if (from_environment("CQSA_PROPERTY_COUNT", 200) < 50) return;
  CHECK(forwards.calls > 0);
  CHECK(backwards.calls > 0);
  CHECK(scattered.calls > 0);
}

TEST_CASE("with batch_invariant a row's bits do not depend on its company nor on the budget") {
  library lib(2), other(5);
  for_seeds(500, [&](generator& random) {
    wishes wish;
    wish.batched = true;
    problem p = random_problem(random, wish);
    auto& a = p.params;
    a.flags |= CQSA_ATTENTION_BATCH_INVARIANT;
    INFO(describe(p));
    const result whole = run(lib, p);
    {
      problem small = p;
      choose_budget(other, small, random);
      small.params.schedule = random.one_of({CQSA_SCHEDULE_AUTO, CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM});
      INFO(describe(small));
      if (cqsa_attention_query(other, &small.params) == CQSA_OK) CHECK(same_bits(run(other, small), whole));
    }
    // Some rows of one batch item and of the query heads of one key head.
    problem part = p;
    const int64_t b = random.integer(0, a.batch - 1), g = random.integer(0, a.num_kv_heads - 1), ratio = a.num_heads / a.num_kv_heads;
    const int64_t rows = random.integer(1, a.seqlen_q);
    // Where positions matter they count from the last row, or from the first one in the top-left rule.
    const bool positions = a.causal != CQSA_CAUSAL_NONE || p.has(CQSA_ATTENTION_WINDOW | CQSA_ATTENTION_ALIBI);
    const int64_t first = a.causal == CQSA_CAUSAL_TOP_LEFT ? 0 : positions ? a.seqlen_q - rows : random.integer(0, a.seqlen_q - rows);
    const bool all_heads = random.chance(0.5);
    const int64_t head = all_heads ? 0 : g * ratio;
    part.params.batch = 1;
    part.params.seqlen_q = rows;
    part.params.num_kv_heads = all_heads ? a.num_kv_heads : 1;
    part.params.num_heads = part.params.num_kv_heads * ratio;
    const auto cut = [&](operand which, int64_t head_from, int64_t row_from, int64_t heads, int64_t length) {
      array& t = part.operands[which];
      if (!t.present() || t.shape.size() < 3) return;
      t.first += b * t.strides[0] + head_from * t.strides[1] + row_from * t.strides[2];
      t.shape[0] = 1, t.shape[1] = heads, t.shape[2] = length;
    };
    cut(Q, head, first, part.params.num_heads, rows);
    for (const operand which : {K, V, K_SCALE, V_SCALE}) cut(which, all_heads ? 0 : g, 0, part.params.num_kv_heads, a.seqlen_k);
    for (const operand which : {MASK, BIAS}) {
      array& t = part.operands[which];
      const int64_t from[] = {b, head, first}, size[] = {1, part.params.num_heads, rows};
      for (size_t axis = 0; t.present() && axis < 3; ++axis)
        if (t.shape[axis] > 1) t.first += from[axis] * t.strides[axis], t.shape[axis] = size[axis];
    }
    for (const operand which : {SLOPES, SINKS}) {
      array& t = part.operands[which];
      if (!t.present()) continue;
      if (t.shape.size() == 2) t.first += b * t.strides[0], t.shape[0] = 1;
      t.first += head, t.shape.back() = part.params.num_heads;
    }
    for (const auto& [which, kind] : {std::pair{K_SCALE, a.scale_k}, {V_SCALE, a.scale_v}})
      if (kind == CQSA_SCALE_HEAD && !all_heads) part.operands[which].first += g, part.operands[which].shape[0] = 1;
    INFO("part: " << describe(part) << " from row " << first);
    const result some = run(other, part);
    array expected_out = whole.out, expected_lse = whole.lse;
    expected_out.first += b * expected_out.strides[0] + head * expected_out.strides[1] + first * expected_out.strides[2];
    expected_lse.first += b * expected_lse.strides[0] + head * expected_lse.strides[1] + first;
    for (array* t : {&expected_out, &expected_lse}) t->shape[0] = 1, t->shape[1] = part.params.num_heads, t->shape[2] = rows;
    CHECK(packed(some.out) == packed(expected_out));
    CHECK(packed(some.lse) == packed(expected_lse));
  });
}

// --------------------------------------------------------------------------------------------------------------- merge

namespace {

result merged(cqsa_context* context, const result& a, const result& b) {
  result r{array(CQSA_DTYPE_F32, a.out.shape), array(CQSA_DTYPE_F32, a.lse.shape)};
  cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
  args.out_a = a.out.view(), args.lse_a = a.lse.view();
  args.out_b = b.out.view(), args.lse_b = b.lse.view();
  args.out = r.out.view(), args.lse = r.lse.view();
  const cqsa_status status = cqsa_attention_merge(context, &args, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  return r;
}

// The keys [begin, end) of a problem in which positions do not matter.
problem keys_of(const problem& p, int64_t begin, int64_t end) {
  problem part = p;
  for (const operand which : {K, V}) {
    part.operands[which].first += begin * part.operands[which].strides[2];
    part.operands[which].shape[2] = end - begin;
  }
  part.params.seqlen_k = end - begin;
  return part;
}

}  // namespace

TEST_CASE("parts over disjoint keys merge to the whole, in any order") {
  library lib;
  for_seeds(120, [&](generator& random) {
    problem p = random_problem(random, {true, true, false, true, false});
    p.params.causal = CQSA_CAUSAL_NONE;
    p.params.flags = CQSA_ATTENTION_LSE;
    p.params.window_left = p.params.window_right = 0;
    p.operands[SLOPES] = array();
    INFO(describe(p));
    const truth exact(lib, p);
    std::vector<result> parts;
    for (int64_t begin = 0; begin < p.params.seqlen_k;) {
      const int64_t end = std::min(p.params.seqlen_k, begin + random.integer(0, 60));  // an empty part now and then
      parts.push_back(run(lib, keys_of(p, begin, end)));
      begin = end;
    }
    while (parts.size() > 1) {  // a random tree
      const auto pick = [&] {
        const auto i = static_cast<size_t>(random.integer(0, static_cast<int64_t>(parts.size()) - 1));
        result r = std::move(parts[i]);
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(i));
        return r;
      };
      const result a = pick(), b = pick();
      const result ab = merged(lib, a, b);
      CHECK(same_bits(ab, merged(lib, b, a)));
      parts.push_back(ab);
    }
    check_close(p, parts[0], exact);
  });
}

TEST_CASE("merge: empty sides are neutral to the bit, in place and with any strides") {
  library lib(3);
  for_seeds(60, [&](generator& random) {
    std::vector<int64_t> shape;
    for (int64_t axes = random.integer(1, 4); axes > 0; --axes) shape.push_back(random.integer(0, axes == 1 ? 300 : 5));
    const array lse(CQSA_DTYPE_F32, shape);
    shape.push_back(random.integer(1, 70));
    const array out(CQSA_DTYPE_F32, shape);
    result a{out, lse}, b{out, lse};
    for (result* side : {&a, &b}) {
      fill(side->out, random, -3, 3);
      fill(side->lse, random, -90, 90);
    }
    const int64_t dim = shape.back();
    result expected = merged(lib, a, b);
    for (int64_t row = 0; row < lse.count(); ++row) {
      if (!random.chance(0.5)) continue;
      // One side is empty, or both; what its out holds does not matter.
      const bool a_empty = random.chance(0.6), b_empty = !a_empty || random.chance(0.3);
      for (const auto& [side, empty] : {std::pair{&a, a_empty}, {&b, b_empty}}) {
        if (!empty) continue;
        side->lse.set(row, random.one_of({-inf, inf, std::nan("")}));
        for (int64_t c = 0; c < dim; ++c) side->out.set(row * dim + c, random.chance(0.5) ? std::nan("") : 1e30);
      }
      const result& full = a_empty ? b : a;
      const bool none = a_empty && b_empty;
      expected.lse.set(row, none ? -inf : full.lse.get(row));
      for (int64_t c = 0; c < dim; ++c) expected.out.set(row * dim + c, none ? 0 : full.out.get(row * dim + c));
    }
    CHECK(same_bits(merged(lib, a, b), expected));
    CHECK(same_bits(merged(lib, b, a), expected));
    const result a_apart{a.out.scattered(random), a.lse.scattered(random)}, b_apart{b.out.scattered(random), b.lse.scattered(random)};
    CHECK(same_bits(merged(lib, a_apart, b_apart), expected));
    result into = random.chance(0.5) ? a_apart : b_apart;
    cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
    const bool into_a = random.chance(0.5);
    into = into_a ? a_apart : b_apart;
    args.out_a = into_a ? into.out.view() : a_apart.out.view();
    args.lse_a = into_a ? into.lse.view() : a_apart.lse.view();
    args.out_b = into_a ? b_apart.out.view() : into.out.view();
    args.lse_b = into_a ? b_apart.lse.view() : into.lse.view();
    args.out = into.out.view(), args.lse = into.lse.view();
    REQUIRE(cqsa_attention_merge(lib, &args, nullptr) == CQSA_OK);
    CHECK(same_bits(into, expected));
  });
}

// -------------------------------------------------------------------------------------------------- things that go wrong

namespace {

problem large_problem(generator& random) {
  problem p = random_problem(random, {true, true, false, true, true});
  p.params.flags = CQSA_ATTENTION_LSE;
  p.params.causal = CQSA_CAUSAL_NONE;
  p.params.window_left = p.params.window_right = 0;
  p.operands[SLOPES] = array();
  return p;
}

cqsa_status try_run(cqsa_context* context, const problem& p, const std::function<void(cqsa_attention_args&)>& change = nullptr) {
  result r = p.empty_result();
  cqsa_attention_args args = p.args(r);
  if (change) change(args);
  return cqsa_attention(context, &p.params, &args, nullptr);
}

}  // namespace

TEST_CASE("a parallel_for that fails is an error, and the next call works") {
  for_seeds(40, [&](generator& random) {
    problem p = large_problem(random);
    if (random.chance(0.4)) p.params.seqlen_q = p.params.seqlen_k, p = random_problem(random, {true, true, true, true, true});
    if (p.takes_cqs() && random.chance(0.7)) p.params.schedule = CQSA_SCHEDULE_CQS, p.params.cqs_c = 7, p.params.cqs_itr = 1;
    INFO(describe(p));
    lent_threads threads;
    library lib(4, lent_threads::run, &threads), own(4);
    const result wanted = run(own, p);
    for (const auto manner : {lent_threads::failing, lent_threads::skipping, lent_threads::repeating, lent_threads::inventing}) {
      INFO("manner " << manner);
      threads.manner = manner;
      threads.calls = 0;
      const cqsa_status status = try_run(lib, p);
      if (threads.calls > 0) CHECK(status == CQSA_ERROR_CALLBACK);
      else CHECK(status == CQSA_OK);
      CHECK(lib.memory.bytes == 0);
      threads.manner = lent_threads::forwards;
      CHECK(same_bits(run(lib, p), wanted));
      CHECK(threads.calls > 0);
    }
  });
}

TEST_CASE("an allocator without memory is an error, and the next call works") {
  library lib(3);
  for_seeds(20, [&](generator& random) {
    problem p = random_problem(random);
    choose_schedule(p, random);
    INFO(describe(p));
    const result wanted = run(lib, p);
    result r = p.empty_result();
    const result untouched = r;
    const cqsa_attention_args args = p.args(r);
    lib.memory.refuse = true;
    CHECK(cqsa_attention(lib, &p.params, &args, nullptr) == CQSA_ERROR_OUT_OF_HOST_MEMORY);
    lib.memory.refuse = false;
    CHECK(same_bits(r, untouched));
    CHECK(same_bits(run(lib, p), wanted));
  });
}

namespace {

struct watch {
  std::thread::id caller = std::this_thread::get_id();
  int64_t calls = 0, last = 0, total = -1, cancel_at = -1;
  bool wrong = false;
  std::function<void()> at_first;

  static int32_t progress(void* user, int64_t done, int64_t total) {
    auto& self = *static_cast<watch*>(user);
    if (self.calls++ == 0 && self.at_first) self.at_first();
    self.wrong |= done < self.last || done > total || std::this_thread::get_id() != self.caller || (self.total >= 0 && total != self.total);
    self.last = done;
    self.total = total;
    return self.cancel_at >= 0 && self.calls > self.cancel_at;
  }
};

}  // namespace

TEST_CASE("progress is orderly and can cancel, and so can a flag set by another thread") {
  library lib(3);
  for_seeds(80, [&](generator& random) {
    problem p = random.chance(0.5) ? large_problem(random) : random_problem(random, {false, false, false, false, true});
    choose_schedule(p, random);
    INFO(describe(p));
    const result wanted = run(lib, p);
    watch seen;
    result r = p.empty_result();
    cqsa_attention_args args = p.args(r);
    args.progress = watch::progress;
    args.progress_user = &seen;
    REQUIRE(cqsa_attention(lib, &p.params, &args, nullptr) == CQSA_OK);
    CHECK_FALSE(seen.wrong);
    CHECK(seen.calls > 0);
    CHECK(seen.last == seen.total);
    CHECK(same_bits(r, wanted));

    watch stop;
    stop.cancel_at = random.integer(0, 1);
    args.progress_user = &stop;
    // How often progress is called depends on the threads: it may end before the call at which it would have stopped.
    const cqsa_status status = cqsa_attention(lib, &p.params, &args, nullptr);
    CHECK(status == (stop.calls > stop.cancel_at ? CQSA_ERROR_CANCELLED : CQSA_OK));

    int32_t cancel = 0;
    watch start;
    start.at_first = [&] { std::thread([&] { __atomic_store_n(&cancel, 1, __ATOMIC_RELAXED); }).join(); };
    args.progress_user = &start;
    args.cancel = &cancel;
    if (seen.total > 1) {
      const cqsa_status flagged = cqsa_attention(lib, &p.params, &args, nullptr);
      // The first call may also be the last one.
      CHECK((flagged == CQSA_ERROR_CANCELLED || (flagged == CQSA_OK && start.calls == 1)));
    }
    cancel = 1;
    args.progress = nullptr;
    CHECK(cqsa_attention(lib, &p.params, &args, nullptr) == CQSA_ERROR_CANCELLED);
    CHECK(lib.memory.bytes == 0);
    CHECK(same_bits(run(lib, p), wanted));
  });
}

TEST_CASE("a refused call changes no output and says why") {
  library lib;
  for_seeds(60, [&](generator& random) {
    problem p = random_problem(random);
    INFO(describe(p));
    const result wanted = run(lib, p);
    int which = 0;
    const auto refused = [&](cqsa_status status, const std::function<void(problem&)>& spoil,
                             const std::function<void(cqsa_attention_args&, result&)>& spoil_args = nullptr, void* stream = nullptr) {
      INFO("spoiled in way " << which++);
      problem bad = p;
      if (spoil) spoil(bad);
      result r = p.empty_result();
      const auto out = r.out.bytes, lse = r.lse.bytes;
      cqsa_attention_args args = bad.args(r);
      if (spoil_args) spoil_args(args, r);
      const cqsa_status got = cqsa_attention(lib, &bad.params, &args, stream);
      INFO(cqsa_status_string(got) << ": " << cqsa_last_error());
      CHECK(got == status);
      CHECK(*cqsa_last_error() != '\0');
      CHECK(r.out.bytes == out);
      CHECK(r.lse.bytes == lse);
    };
    refused(CQSA_ERROR_BUDGET_TOO_SMALL, [](problem& b) { b.params.max_host_bytes = 1; });
    refused(CQSA_ERROR_UNSUPPORTED, [](problem& b) { b.params.dropout = 0.5; });
    refused(CQSA_ERROR_UNKNOWN_FLAG, [](problem& b) { b.params.flags |= 1u << 30; });
    refused(CQSA_ERROR_UNKNOWN_FLAG, [](problem& b) { b.params.causal = 9; });
    refused(CQSA_ERROR_STRUCT_SIZE, [](problem& b) { b.params.struct_size = 12; });
    refused(CQSA_ERROR_INVALID_ARGUMENT, [](problem& b) { b.params.softcap = -1; });
    refused(CQSA_ERROR_INVALID_ARGUMENT, [](problem& b) { b.params.schedule = CQSA_SCHEDULE_CQS, b.params.cqs_c = 5, b.params.cqs_itr = 1; });
    refused(CQSA_ERROR_NULL_POINTER, nullptr, [](cqsa_attention_args& a, result&) { a.q = nullptr; });
    refused(CQSA_ERROR_NULL_POINTER, nullptr, [](cqsa_attention_args& a, result&) { a.workspace_bytes = 64; });
    refused(CQSA_ERROR_INVALID_ARGUMENT, nullptr, nullptr, &lib);
    refused(CQSA_ERROR_DTYPE, nullptr, [](cqsa_attention_args&, result& r) { r.out.tensor.dtype = CQSA_DTYPE_I64; });
    refused(CQSA_ERROR_DEVICE, nullptr, [](cqsa_attention_args&, result& r) { r.lse.tensor.device_type = CQSA_DEVICE_CUDA; });
    refused(CQSA_ERROR_SHAPE, nullptr, [](cqsa_attention_args&, result& r) { r.lse.tensor.ndim -= 1; });
    refused(CQSA_ERROR_SHAPE, [](problem& b) { b.operands[K].shape.back() += 1; });
    if (p.empty_result().out.count() > 1) {
      refused(CQSA_ERROR_STRIDES, nullptr, [](cqsa_attention_args&, result& r) {
        static int64_t zero[4] = {0, 0, 0, 0};
        r.out.tensor.strides = zero;
      });
    }
    refused(CQSA_ERROR_OVERLAP, nullptr, [](cqsa_attention_args&, result& r) {
      r.lse.tensor.data = r.out.tensor.data;
      static int64_t strides[4];
      for (int i = 0; i < r.lse.tensor.ndim; ++i) strides[i] = r.lse.strides[static_cast<size_t>(i)];
      r.lse.tensor.strides = strides;
    });
    if (p.has(CQSA_ATTENTION_VARLEN)) refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[CU_Q].set(0, 1); });
    if (p.has(CQSA_ATTENTION_VARLEN)) refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[CU_Q].set(b.params.batch, 1e6); });
    if (p.has(CQSA_ATTENTION_SEQUSED_K)) refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[USED].set(0, -1); });
    if (p.has(CQSA_ATTENTION_SEQUSED_K)) refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[USED].set(0, 1e6); });
    const bool first_page_used = !p.operands[USED].present() || p.operands[USED].get(0) > 0;
    if (p.has(CQSA_ATTENTION_PAGED) && first_page_used) {
      refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[PAGES].set(0, -2); });
      refused(CQSA_ERROR_INDEX, [](problem& b) { b.operands[PAGES].set(0, static_cast<double>(b.params.num_pages)); });
    }
    CHECK(same_bits(run(lib, p), wanted));
  });
}
