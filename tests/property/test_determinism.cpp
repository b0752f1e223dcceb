// SPDX-License-Identifier: Apache-2.0
// The same bits, always: over runs of one plan, one after the other and at once; over thread counts; and with batch_invariant
// over every company that a row can have. All element types, grouped heads, varlen, pages, single rows.
#include "fixture.h"

namespace {

struct types {
  cqsa_dtype q, kv;
};
constexpr types all_types[] = {{CQSA_DTYPE_F32, CQSA_DTYPE_F32},  {CQSA_DTYPE_F16, CQSA_DTYPE_F16},    {CQSA_DTYPE_BF16, CQSA_DTYPE_BF16},
                               {CQSA_DTYPE_F64, CQSA_DTYPE_F64},  {CQSA_DTYPE_F32, CQSA_DTYPE_I8},     {CQSA_DTYPE_BF16, CQSA_DTYPE_I8},
                               {CQSA_DTYPE_F16, CQSA_DTYPE_E4M3FN}, {CQSA_DTYPE_F32, CQSA_DTYPE_E5M2}};
enum layout { batched, varlen, paged, paged_varlen, num_layouts };

// A problem of these types in this layout; everything else is random. `rows` 1: decode.
problem problem_of(generator& random, const types& t, layout l, bool decode) {
  problem p;
  cqsa_attention_params& a = p.params;
  a.flags = CQSA_ATTENTION_LSE;
  a.dtype_q = a.dtype_out = t.q, a.dtype_kv = t.kv;
  if (t.kv == CQSA_DTYPE_I8) a.scale_k = a.scale_v = CQSA_SCALE_GROUP, a.kv_group = 32;
  else if (t.kv != t.q) a.scale_k = static_cast<int32_t>(random.integer(0, 3)), a.scale_v = static_cast<int32_t>(random.integer(0, 3));
  choose_sizes(a, random, {});
  a.batch = random.integer(2, 4);
  if (decode) a.seqlen_q = 1;
  const cqsa_dtype index = random.one_of({CQSA_DTYPE_I32, CQSA_DTYPE_I64});
  if (l == varlen || l == paged_varlen) {
    a.flags |= CQSA_ATTENTION_VARLEN;
    p.operands[CU_Q] = segments(random, index, a.batch, a.seqlen_q, &a.total_q);
    if (l == varlen) p.operands[CU_K] = segments(random, index, a.batch, a.seqlen_k, &a.total_k);
  }
  if (l == paged || l == paged_varlen) {
    a.flags |= CQSA_ATTENTION_PAGED | CQSA_ATTENTION_SEQUSED_K;
    a.page_size = random.one_of<int64_t>({1, 3, 16, 64});
    const int64_t columns = (a.seqlen_k + a.page_size - 1) / a.page_size;
    a.num_pages = columns * a.batch;
    p.operands[PAGES] = array(CQSA_DTYPE_I32, {a.batch, columns});
    for (int64_t n = 0; n < a.num_pages; ++n) p.operands[PAGES].set(n, static_cast<double>(random.chance(0.1) ? -1 : a.num_pages - 1 - n));
    p.operands[USED] = array(index, {a.batch});
    for (int64_t b = 0; b < a.batch; ++b) p.operands[USED].set(b, static_cast<double>(random.integer(0, a.seqlen_k)));
  }
  choose_logits(p, random, {});
  if (t.q == CQSA_DTYPE_F64 && p.has(CQSA_ATTENTION_BIAS)) a.flags &= ~CQSA_ATTENTION_BIAS, a.dtype_bias = CQSA_DTYPE_NONE, a.bias_broadcast = 0, p.operands[BIAS] = array();
  make_operands(p, random);
  return p;
}

// body(random, problem) for every type and layout, with and without decode: 64 problems for each seed.
void for_all(uint64_t count, const std::function<void(generator&, problem&)>& body) {
  for_seeds(count, [&](generator& random) {
    for (const types& t : all_types)
      for (int l = batched; l < num_layouts; ++l)
        for (const bool decode : {false, true}) {
          problem p = problem_of(random, t, static_cast<layout>(l), decode);
          INFO(describe(p) << ", layout " << l);
          body(random, p);
        }
  }, count);
}

cqsa_status execute(const cqsa_plan* plan, const problem& p, result& r) {
  const cqsa_attention_args args = p.args(r);
  return cqsa_attention_execute(plan, &args, nullptr);
}

// Batch item b of a problem as a problem of its own.
problem item_of(const problem& whole, int64_t b) {
  problem part = whole;
  cqsa_attention_params& a = part.params;
  a.batch = 1;
  const auto slice = [&](operand which, int64_t from, int64_t size) {
    array& t = part.operands[which];
    if (!t.present()) return;
    t.first += from * t.strides[0], t.shape[0] = size;
  };
  for (const auto& [which, cu, total] : {std::tuple{Q, CU_Q, &a.total_q}, {K, CU_K, &a.total_k}, {V, CU_K, nullptr}}) {
    const array& firsts = whole.operands[cu];
    if (!firsts.present()) {
      if (which == Q || !whole.has(CQSA_ATTENTION_PAGED)) slice(which, b, 1);
      continue;
    }
    const auto first = static_cast<int64_t>(firsts.get(b)), end = static_cast<int64_t>(firsts.get(b + 1));
    slice(which, first, end - first);
    if (total) *total = end - first;
    part.operands[cu] = array(firsts.dtype, {2});
    part.operands[cu].set(0, 0), part.operands[cu].set(1, static_cast<double>(end - first));
  }
  for (const auto& [which, kind] : {std::pair{K_SCALE, a.scale_k}, {V_SCALE, a.scale_v}}) {
    if (kind != CQSA_SCALE_TOKEN && kind != CQSA_SCALE_GROUP) continue;
    const array& firsts = whole.operands[CU_K];
    if (firsts.present()) slice(which, static_cast<int64_t>(firsts.get(b)), static_cast<int64_t>(firsts.get(b + 1) - firsts.get(b)));
    else if (!whole.has(CQSA_ATTENTION_PAGED)) slice(which, b, 1);
  }
  for (const operand which : {MASK, BIAS})
    if (part.operands[which].present() && part.operands[which].shape[0] > 1) slice(which, b, 1);
  if (part.operands[SLOPES].shape.size() == 2) slice(SLOPES, b, 1);
  slice(USED, b, 1);
  slice(PAGES, b, 1);
  return part;
}

// What the whole's result says of that item.
result item_of(const result& whole, const problem& p, int64_t b) {
  result part = whole;
  const array& firsts = p.operands[CU_Q];
  const int64_t first = firsts.present() ? static_cast<int64_t>(firsts.get(b)) : b;
  const int64_t size = firsts.present() ? static_cast<int64_t>(firsts.get(b + 1)) - first : 1;
  const size_t lse_axis = firsts.present() ? 1 : 0;
  part.out.first += first * part.out.strides[0], part.out.shape[0] = size;
  part.lse.first += first * part.lse.strides[lse_axis], part.lse.shape[lse_axis] = size;
  return part;
}

}  // namespace

TEST_CASE("one plan gives the same bits in every run, also in runs at once") {
  library lib(3);
  for_all(2, [&](generator& random, problem& p) {
    if (p.params.dtype_q != CQSA_DTYPE_F64) choose_schedule(p, random);
    choose_budget(lib, p, random);
    INFO(describe(p));
    const plan planned(lib, p.params);
    result first = p.empty_result();
    REQUIRE(execute(planned.handle, p, first) == CQSA_OK);
    constexpr int at_once = 3;
    result others[at_once] = {p.empty_result(), p.empty_result(), p.empty_result()};
    cqsa_status statuses[at_once];
    {
      // Operands keep their tensors inside, so every thread has its own view of them.
      std::vector<problem> copies(at_once, p);
      std::vector<std::thread> threads;
      for (int i = 0; i < at_once; ++i) threads.emplace_back([&, i] { statuses[i] = execute(planned.handle, copies[static_cast<size_t>(i)], others[i]); });
      for (std::thread& thread : threads) thread.join();
    }
    for (int i = 0; i < at_once; ++i) {
      CHECK(statuses[i] == CQSA_OK);
      CHECK(same_bits(others[i], first));
    }
  });
}

TEST_CASE("with batch_invariant the number of threads and the budget change no bit") {
  library with_1(1), with_2(2), with_5(5);
  for_all(2, [&](generator& random, problem& p) {
    p.params.flags |= CQSA_ATTENTION_BATCH_INVARIANT;
    const result wanted = run(with_2, p);
    for (library* lib : {&with_1, &with_5}) {
      problem other = p;
      if (random.chance(0.5)) choose_budget(*lib, other, random);
      if (random.chance(0.5)) other.params.schedule = random.one_of({CQSA_SCHEDULE_DIRECT, CQSA_SCHEDULE_STREAM});
      if (cqsa_attention_query(*lib, &other.params) != CQSA_OK) continue;
      INFO(describe(other));
      CHECK(same_bits(run(*lib, other), wanted));
    }
  });
}

TEST_CASE("with batch_invariant a batch item's bits are those of the item alone") {
  library lib(2), other(3);
  for_all(3, [&](generator& random, problem& p) {
    p.params.flags |= CQSA_ATTENTION_BATCH_INVARIANT;
    const result whole = run(lib, p);
    for (int64_t b = 0; b < p.params.batch; ++b) {
      INFO("item " << b);
      const result alone = run(random.chance(0.5) ? other : lib, item_of(p, b));
      CHECK(same_bits(alone, item_of(whole, p, b)));
    }
  });
}
