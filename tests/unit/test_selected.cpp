// SPDX-License-Identifier: Apache-2.0
// Attention over selected cells on the CPU: every implementation against an f64 oracle on random problems, closed forms, what is
// skipped and what CQSA_SELECTED_CHECK refuses, workspaces, threads, and every refusal of the arguments.
#include "selected_problem.h"

#include <cstdlib>
#include <functional>
#include <thread>

#include "backends/cpu/selected_job.h"
#include "check_fails.h"
#include "context.h"
#include "ops/sparse/selected.h"

using namespace selected_test;

namespace {

struct own_context {
  cqsa_context* handle = nullptr;
  explicit own_context(int32_t threads = 2) {
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "cpu";
    params.num_threads = threads;
    REQUIRE(cqsa_context_create(&params, &handle) == CQSA_OK);
  }
  ~own_context() { cqsa_context_destroy(handle); }
  operator cqsa_context*() const { return handle; }
};

const cqsa_context& shared_context() {
  static const own_context context;
  return *context.handle;
}

void run(const problem& p, uint32_t flags = 0) {
  auto a = p.args();
  a.flags = flags;
  const cqsa_status status = cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
}

void check(problem& p, double error = 2e-6) {
  p.solve();
  run(p);
  const std::string wrong = p.compare(error);
  if (!wrong.empty()) FAIL(wrong);
}

// Memory between two zones that nobody may write to.
struct guarded {
  static constexpr size_t zone = 256;
  std::vector<char> memory;
  uint64_t bytes;
  explicit guarded(uint64_t size) : memory(static_cast<size_t>(size) + 2 * zone + 64, static_cast<char>(0xA5)), bytes(size) {}
  char* data() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + zone + 63) / 64 * 64); }
  bool intact() {
    const char* begin = data();
    const auto fresh = [](char c) { return c == static_cast<char>(0xA5); };
    const char *first = memory.data(), *end = first + memory.size();
    return std::all_of(first, begin, fresh) && std::all_of(begin + bytes, end, fresh);
  }
};

uint64_t workspace_of(const cqsa_attention_selected_args& a) {
  uint64_t bytes = 12345;
  const cqsa_status status = cqsa_attention_selected_workspace(&shared_context(), &a, &bytes);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  return bytes;
}

void launch(const cqsa_selected_impl& impl, const problem& p) {
  cqsa_selected_leaf leaf;
  REQUIRE(cqsa::bind_selected(shared_context(), p.args(), false, leaf) == CQSA_OK);
  guarded memory(impl.workspace(&leaf, 1));
  const cqsa_status status = impl.launch(nullptr, &leaf, memory.data(), memory.bytes, nullptr, nullptr);
  INFO(impl.name);
  REQUIRE(status == CQSA_OK);
  REQUIRE(memory.intact());
}

std::vector<const cqsa_selected_impl*> entries(const problem& p) {
  int32_t count = 0;
  const cqsa_selected_impl* list = cqsa::cpu::selected_impls(&count);
  cqsa_selected_leaf leaf;
  REQUIRE(cqsa::bind_selected(shared_context(), p.args(), true, leaf) == CQSA_OK);
  std::vector<const cqsa_selected_impl*> out;
  for (int32_t i = 0; i < count; ++i)
    if (list[i].probe(&leaf, nullptr, 0) == CQSA_OK) out.push_back(&list[i]);
  return out;
}

// A list of all cells in order, over pages that are not in order.
void select_all(problem& p) {
  for (int64_t i = 0; i < p.n.total_q; ++i) {
    p.counts.write({i}, static_cast<double>(p.n.capacity));
    for (int64_t c = 0; c < p.n.capacity; ++c) p.cells.write({i, c}, static_cast<double>(c));
  }
  for (int64_t e = 0; e < p.n.pages; ++e) p.page_table.write({e}, static_cast<double>((e * 3 + 1) % p.n.num_pages));
}

problem small(cqsa_dtype kv = CQSA_DTYPE_F32) {
  sizes n;
  n.kv = kv;
  problem p(n);
  dice d(3);
  draw_values(p, d, 1.0);
  select_all(p);
  return p;
}

}  // namespace

TEST_CASE("selected: every entry agrees with the oracle on random problems", "[selected]") {
  const char* repeat = std::getenv("CQSA_TEST_SEED");
  const uint64_t first = repeat ? static_cast<uint64_t>(std::atoi(repeat)) : 1;
  const char* few = std::getenv("CQSA_PROPERTY_COUNT");  // where each takes long, under a sanitizer
  const uint64_t count = few ? 3 * std::strtoull(few, nullptr, 10) : 250;
  for (uint64_t seed = first; seed < first + (repeat ? 1 : count); ++seed) {
    INFO("CQSA_TEST_SEED=" << seed);
    problem p = random_problem(seed);
    const auto all = entries(p);
    REQUIRE(all.size() >= 2);
    for (const cqsa_selected_impl* impl : all) {
      std::fill(p.out.memory.begin(), p.out.memory.end(), static_cast<char>(0xFF));
      std::fill(p.lse.memory.begin(), p.lse.memory.end(), static_cast<char>(0xFF));
      launch(*impl, p);
      const bool exact = impl == all.back();  // the reference
      const std::string wrong = p.compare(exact ? 1.2e-7 : 8e-6);
      INFO(impl->name);
      if (!wrong.empty()) FAIL(wrong);
    }
    run(p);
    REQUIRE(p.compare(8e-6).empty());
  }
}

TEST_CASE("selected: closed forms", "[selected]") {
  SECTION("one cell: its value") {
    problem p = small();
    for (int64_t i = 0; i < p.n.total_q; ++i) p.counts.write({i}, 1), p.cells.write({i, 0}, static_cast<double>(5 + i));
    run(p);
    for (int64_t i = 0; i < p.n.total_q; ++i)
      for (int64_t c = 0; c < p.n.dim_v; ++c) {
        const auto page = static_cast<int64_t>(p.page_table.read({(5 + i) / 4}));
        REQUIRE(p.out.read({i, 3, c}) == p.v.read({page, (5 + i) % 4, 1, c}));
      }
  }
  SECTION("equal logits: the mean, and the logarithm of how many") {
    problem p = small();
    p.q.fill([] { return 0.0; });
    run(p);
    for (int64_t c = 0; c < p.n.dim_v; ++c) {
      double sum = 0;
      for (int64_t cell = 0; cell < 8; ++cell) sum += p.v.read({static_cast<int64_t>(p.page_table.read({cell / 4})), cell % 4, 0, c});
      REQUIRE(p.out.read({1, 0, c}) == Approx(sum / 8).margin(1e-7));
    }
    REQUIRE(p.lse.read({2, 1}) == Approx(std::log(8.0)));
  }
  SECTION("an empty list: zeros and -inf") {
    problem p = small();
    p.counts.write({1}, 0);
    std::fill(p.out.memory.begin(), p.out.memory.end(), static_cast<char>(0xFF));
    check(p);
    for (int64_t h = 0; h < p.n.heads; ++h) {
      REQUIRE(p.lse.read({h, 1}) == -inf);
      for (int64_t c = 0; c < p.n.dim_v; ++c) REQUIRE(p.out.read({1, h, c}) == 0);
    }
  }
  SECTION("all pages away: the same") {
    problem p = small();
    p.page_table.fill([] { return -1.0; });
    run(p, CQSA_SELECTED_CHECK);
    for (int64_t at = 0; at < p.out.size(); ++at) REQUIRE(p.out.read(p.out.index(at)) == 0);
    for (int64_t at = 0; at < p.lse.size(); ++at) REQUIRE(p.lse.read(p.lse.index(at)) == -inf);
  }
  SECTION("a NaN in q spoils its own row") {
    problem p = small();
    p.solve();
    const auto before = p.exact_out;
    p.q.write({1, 2, 3}, nan64);
    run(p);
    for (int64_t at = 0; at < p.out.size(); ++at) {
      const auto i = p.out.index(at);
      if (i[0] == 1 && i[1] == 2) REQUIRE(std::isnan(p.out.read(i)));
      else REQUIRE(p.out.read(i) == Approx(before[static_cast<size_t>(at)]).margin(1e-5));
    }
  }
  SECTION("logits of +-1e4 neither overflow nor vanish") {
    problem p = small();
    p.q.fill([] { return 1e4; });
    check(p, 1e-5);
  }
}

// With all cells selected in order it is attention over the whole paged cache.
TEST_CASE("selected: the list of all cells is dense attention", "[selected]") {
  for (const cqsa_dtype kv : {CQSA_DTYPE_F32, CQSA_DTYPE_I8}) {
    sizes n;
    n.total_q = 7, n.heads = 24, n.kv_heads = 2, n.dim = n.dim_v = 256, n.page_size = 16, n.num_pages = n.pages = 8, n.capacity = 121;
    n.kv = kv, n.kv_group = kv == CQSA_DTYPE_I8 ? 64 : 0;
    problem p(n);
    dice d(11);
    draw_values(p, d, 1.0);
    select_all(p);
    run(p);
    box out(CQSA_DTYPE_F32, {1, n.heads, n.total_q, n.dim_v}), lse(CQSA_DTYPE_F32, {1, n.heads, n.total_q}), used(CQSA_DTYPE_I32, {1});
    used.write({0}, 121);
    int64_t q_shape[] = {1, n.heads, n.total_q, n.dim}, q_strides[] = {0, n.dim, n.heads * n.dim, 1}, table_shape[] = {1, n.pages};
    cqsa_tensor q = p.q.t, table = p.page_table.t;
    q.ndim = 4, q.shape = q_shape, q.strides = q_strides;
    table.ndim = 2, table.shape = table_shape, table.strides = nullptr;
    cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
    cqsa_attention_args a = CQSA_ATTENTION_ARGS_INIT;
    a.q = &q, a.k = &p.k.t, a.v = &p.v.t, a.page_table = &table, a.seqused_k = &used.t, a.out = &out.t, a.lse = &lse.t;
    if (kv == CQSA_DTYPE_I8) a.k_scale = &p.k_scale.t, a.v_scale = &p.v_scale.t;
    const cqsa_status status = cqsa_attention(const_cast<cqsa_context*>(&shared_context()), &params, &a, nullptr);
    INFO(cqsa_last_error());
    REQUIRE(status == CQSA_OK);
    for (int64_t i = 0; i < n.total_q; ++i)
      for (int64_t h = 0; h < n.heads; ++h) {
        REQUIRE(p.lse.read({h, i}) == Approx(lse.read({0, h, i})).margin(1e-5));
        for (int64_t c = 0; c < n.dim_v; ++c) REQUIRE(p.out.read({i, h, c}) == Approx(out.read({0, h, i, c})).margin(2e-6));
      }
  }
}

TEST_CASE("selected: wrong lists are skipped, or refused with CHECK", "[selected]") {
  problem p = small();
  const auto refuse = [&](const parts& texts) {
    std::fill(p.out.memory.begin(), p.out.memory.end(), static_cast<char>(0x5A));
    auto a = p.args();
    a.flags = CQSA_SELECTED_CHECK;
    check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr), CQSA_ERROR_INDEX, texts);
    CHECK(std::all_of(p.out.memory.begin(), p.out.memory.end(), [](char c) { return c == 0x5A; }));
    check(p);  // and skipped without it
  };
  run(p, CQSA_SELECTED_CHECK);
  SECTION("a count above the capacity") { p.counts.write({1}, 9), refuse({"args->counts[1] is 9", "0 to 8"}); }
  SECTION("a negative count") { p.counts.write({2}, -1), refuse({"args->counts[2] is -1", "0 to 8"}); }
  SECTION("a negative id") { p.cells.write({1, 0}, -4), refuse({"args->cells[1][0] is -4"}); }
  SECTION("an id twice") { p.cells.write({1, 4}, 3), refuse({"args->cells[1][4] is 3", "more than the entry before it, 3"}); }
  SECTION("ids that fall") { p.cells.write({0, 6}, 2), refuse({"args->cells[0][6] is 2", "before it, 5"}); }
  SECTION("an id past the table") { p.cells.write({2, 7}, 16), refuse({"args->cells[2][7] is 16", "page 4", "4 pages of 4 cells"}); }
  SECTION("the largest id") { p.cells.write({2, 7}, 2147483647), refuse({"args->cells[2][7] is 2147483647"}); }
  SECTION("a page past the pool") { p.page_table.write({1}, 4), refuse({"args->page_table has page 4 as entry 1 for query 0", "-1 to 3"}); }
  SECTION("a page below -1") { p.page_table.write({0}, -2), refuse({"page -2 as entry 0", "-1 to 3"}); }
  SECTION("what nobody uses is not looked at") {
    p.page_table.write({3}, 99);
    for (int64_t i = 0; i < 3; ++i) p.counts.write({i}, 4), p.cells.write({i, 6}, -9);
    run(p, CQSA_SELECTED_CHECK);
  }
}

TEST_CASE("selected: the caller's workspace is enough to the byte", "[selected]") {
  for (uint64_t seed : {5, 17, 40, 41}) {
    problem p = random_problem(seed);
    auto a = p.args();
    const uint64_t bytes = workspace_of(a);
    REQUIRE(bytes > 0);
    guarded memory(bytes);
    a.workspace = memory.data(), a.workspace_bytes = bytes;
    REQUIRE(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr) == CQSA_OK);
    REQUIRE(memory.intact());
    REQUIRE(p.compare(8e-6).empty());
    a.workspace_bytes = bytes - 1;
    const std::string less = std::to_string(bytes - 1), all = std::to_string(bytes);
    check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr), CQSA_ERROR_WORKSPACE,
                {"args->workspace_bytes is ", less.c_str(), all.c_str()});
    a.workspace = memory.data() + 8, a.workspace_bytes = bytes;
    check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr), CQSA_ERROR_WORKSPACE, {"aligned to 64"});
  }
}

TEST_CASE("selected: the workspace is a matter of shapes", "[selected]") {
  problem p = small(CQSA_DTYPE_I8);
  auto a = p.args();
  const uint64_t bytes = workspace_of(a);
  for (box* x : {&p.q, &p.k, &p.v, &p.k_scale, &p.v_scale, &p.page_table, &p.cells, &p.counts, &p.out, &p.lse})
    x->t.data = nullptr, x->t.byte_offset = 7, x->t.device_type = CQSA_DEVICE_CUDA;
  REQUIRE(workspace_of(a) == bytes);
  check_fails(cqsa_attention_selected_workspace(&shared_context(), &a, nullptr), CQSA_ERROR_NULL_POINTER, {"bytes_out is NULL"});
  a.q = nullptr;
  uint64_t untouched = 77;
  check_fails(cqsa_attention_selected_workspace(&shared_context(), &a, &untouched), CQSA_ERROR_NULL_POINTER, {"args->q is NULL"});
  REQUIRE(untouched == 77);
}

TEST_CASE("selected: no bit depends on threads, precision or company", "[selected]") {
  sizes n;
  n.total_q = 40, n.heads = 24, n.kv_heads = 2, n.dim = n.dim_v = 64, n.num_pages = n.pages = 20, n.page_size = 16, n.capacity = 200;
  n.kv = CQSA_DTYPE_F16;
  problem p(n);
  dice d(9);
  draw_lists(p, d, false);
  draw_values(p, d, 1.0);
  check(p);
  const auto bits = p.out.memory;
  for (const int32_t threads : {1, 3, 8})
    for (const int32_t precision : {CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT, CQSA_PRECISION_F32}) {
      const own_context context(threads);
      p.precision = precision;
      const auto a = p.args();
      REQUIRE(cqsa_attention_selected(context, &a, nullptr) == CQSA_OK);
      REQUIRE(p.out.memory == bits);
    }
  std::vector<std::thread> callers;
  std::vector<std::vector<float>> results(4, std::vector<float>(static_cast<size_t>(p.out.size())));
  for (auto& result : results)
    callers.emplace_back([&] {
      auto a = p.args();
      cqsa_tensor out = p.out.t;
      out.data = result.data(), a.out = &out, a.lse = nullptr;
      for (int times = 0; times < 5; ++times) cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr);
    });
  for (auto& caller : callers) caller.join();
  for (const auto& result : results) REQUIRE(std::memcmp(result.data(), bits.data(), bits.size()) == 0);
}

TEST_CASE("selected: nothing to do is no error", "[selected]") {
  sizes n;
  SECTION("no query") { n.total_q = 0; }
  SECTION("no room for cells") { n.capacity = 0; }
  SECTION("an empty pool") { n.num_pages = 0; }
  SECTION("an empty page table") { n.pages = 0; }
  problem p(n);
  for (int64_t i = 0; i < n.total_q; ++i) p.counts.write({i}, static_cast<double>(n.capacity));
  check(p);
  for (box* x : {&p.q, &p.k, &p.v, &p.page_table, &p.cells, &p.counts, &p.out, &p.lse})
    if (x->size() == 0) x->t.data = nullptr;
  check(p);
}

TEST_CASE("selected: memory that is not to be had", "[selected]") {
  cqsa_allocator none = CQSA_ALLOCATOR_INIT;
  none.allocate = [](void*, uint64_t, uint64_t) -> void* { return nullptr; };
  none.release = [](void*, void*, uint64_t) {};
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = "cpu", params.allocator = &none, params.num_threads = 1;
  cqsa_context* context = nullptr;
  REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
  problem p = small();
  auto a = p.args();
  uint64_t bytes = 0;
  REQUIRE(cqsa_attention_selected_workspace(context, &a, &bytes) == CQSA_OK);
  const std::string text = std::to_string(bytes);
  check_fails(cqsa_attention_selected(context, &a, nullptr), CQSA_ERROR_OUT_OF_HOST_MEMORY, {text.c_str(), "host memory"});
  guarded memory(bytes);
  a.workspace = memory.data(), a.workspace_bytes = bytes;
  REQUIRE(cqsa_attention_selected(context, &a, nullptr) == CQSA_OK);
  cqsa_context_destroy(context);
}

// Each row changes one thing of a call that is right.
TEST_CASE("selected: every refusal names what is wrong", "[selected]") {
  using args_type = cqsa_attention_selected_args;
  struct row {
    const char* what;
    cqsa_dtype kv;
    std::function<void(args_type&, problem&)> change;
    cqsa_status status;
    parts texts;
  };
  const auto reshape = [](box& x, std::vector<int64_t> to) { x.shape = std::move(to), x.t.shape = x.shape.data(), x.t.ndim = static_cast<int32_t>(x.shape.size()), x.t.strides = nullptr; };
  const auto f32 = CQSA_DTYPE_F32, i8 = CQSA_DTYPE_I8;
  const row rows[] = {
      {"q NULL", f32, [](args_type& a, problem&) { a.q = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->q is NULL"}},
      {"k NULL", f32, [](args_type& a, problem&) { a.k = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->k is NULL"}},
      {"v NULL", f32, [](args_type& a, problem&) { a.v = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->v is NULL"}},
      {"table NULL", f32, [](args_type& a, problem&) { a.page_table = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->page_table is NULL"}},
      {"cells NULL", f32, [](args_type& a, problem&) { a.cells = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->cells is NULL"}},
      {"counts NULL", f32, [](args_type& a, problem&) { a.counts = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->counts is NULL"}},
      {"out NULL", f32, [](args_type& a, problem&) { a.out = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->out is NULL"}},
      {"q data NULL", f32, [](args_type&, problem& p) { p.q.t.data = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->q->data is NULL"}},
      {"q of 4 axes", f32, [&](args_type&, problem& p) { reshape(p.q, {1, 3, 4, 16}); }, CQSA_ERROR_SHAPE, {"args->q has 4 axes, wanted 3"}},
      {"table of 3 axes", f32, [&](args_type&, problem& p) { reshape(p.page_table, {1, 1, 4}); }, CQSA_ERROR_SHAPE, {"args->page_table has 3 axes", "1 to 2"}},
      {"q of i8", f32, [](args_type&, problem& p) { p.q.t.dtype = CQSA_DTYPE_I8; }, CQSA_ERROR_DTYPE, {"args->q is i8", "f32, f16 or bf16"}},
      {"q of f64", f32, [](args_type&, problem& p) { p.q.t.dtype = CQSA_DTYPE_F64; }, CQSA_ERROR_DTYPE, {"args->q is f64"}},
      {"k of another float", f32, [](args_type&, problem& p) { p.k.t.dtype = CQSA_DTYPE_BF16; }, CQSA_ERROR_DTYPE, {"args->k is bf16", "f32, or f16 or i8"}},
      {"v unlike k", f32, [](args_type&, problem& p) { p.v.t.dtype = CQSA_DTYPE_F16; }, CQSA_ERROR_DTYPE, {"args->v is f16", "args->k, f32"}},
      {"cells of f32", f32, [](args_type&, problem& p) { p.cells.t.dtype = f32; }, CQSA_ERROR_DTYPE, {"args->cells is f32, wanted i32"}},
      {"counts of f32", f32, [](args_type&, problem& p) { p.counts.t.dtype = f32; }, CQSA_ERROR_DTYPE, {"args->counts is f32, wanted i32"}},
      {"table of f32", f32, [](args_type&, problem& p) { p.page_table.t.dtype = f32; }, CQSA_ERROR_DTYPE, {"args->page_table is f32, wanted i32"}},
      {"out of i32", f32, [](args_type&, problem& p) { p.out.t.dtype = CQSA_DTYPE_I32; }, CQSA_ERROR_DTYPE, {"args->out is i32"}},
      {"lse of i32", f32, [](args_type&, problem& p) { p.lse.t.dtype = CQSA_DTYPE_I32; }, CQSA_ERROR_DTYPE, {"args->lse is i32, wanted f32"}},
      {"unknown type", f32, [](args_type&, problem& p) { p.k.t.dtype = 0x123; }, CQSA_ERROR_DTYPE, {"args->k has dtype 0x00000123"}},
      {"scale missing", i8, [](args_type& a, problem&) { a.v_scale = nullptr; }, CQSA_ERROR_NULL_POINTER, {"args->v_scale is NULL", "i8"}},
      {"scale too many", f32, [](args_type& a, problem& p) { a.k_scale = &p.k.t; }, CQSA_ERROR_INVALID_ARGUMENT, {"args->k_scale is given, wanted NULL", "f32"}},
      {"scale of f32", i8, [](args_type&, problem& p) { p.k_scale.t.dtype = f32; }, CQSA_ERROR_DTYPE, {"args->k_scale is f32, wanted f16"}},
      {"group of 48", i8, [](args_type& a, problem&) { a.kv_group = 48; }, CQSA_ERROR_INVALID_ARGUMENT, {"args->kv_group is 48", "32, 64 or 128"}},
      {"group without i8", f32, [](args_type& a, problem&) { a.kv_group = 64; }, CQSA_ERROR_INVALID_ARGUMENT, {"args->kv_group is 64, wanted 0", "f32"}},
      {"scales of another group", i8, [&](args_type&, problem& p) { reshape(p.k_scale, {4, 4, 2, 3}); }, CQSA_ERROR_SHAPE, {"args->k_scale has shape [4, 4, 2, 3], wanted [4, 4, 2, 1]"}},
      {"heads", f32, [&](args_type&, problem& p) { reshape(p.q, {3, 5, 16}); }, CQSA_ERROR_SHAPE, {"is 5, wanted a multiple", "which is 2"}},
      {"no heads", f32, [&](args_type&, problem& p) { reshape(p.q, {3, 0, 16}); }, CQSA_ERROR_SHAPE, {"num_heads", "is 0, wanted at least 1"}},
      {"no key heads", f32, [&](args_type&, problem& p) { reshape(p.k, {4, 4, 0, 16}); }, CQSA_ERROR_SHAPE, {"num_kv_heads", "is 0, wanted at least 1"}},
      {"page size 0", f32, [&](args_type&, problem& p) { reshape(p.k, {4, 0, 2, 16}); }, CQSA_ERROR_SHAPE, {"page_size", "is 0, wanted at least 1"}},
      {"head_dim 577", f32, [&](args_type&, problem& p) { reshape(p.q, {0, 4, 577}); }, CQSA_ERROR_SHAPE, {"head_dim", "is 577, wanted 1 to 576"}},
      {"head_dim_v 513", f32, [&](args_type&, problem& p) { reshape(p.v, {0, 4, 2, 513}); }, CQSA_ERROR_SHAPE, {"head_dim_v", "is 513, wanted 1 to 512"}},
      {"k of another depth", f32, [&](args_type&, problem& p) { reshape(p.k, {4, 4, 2, 8}); }, CQSA_ERROR_SHAPE, {"args->k has shape [4, 4, 2, 8]", "head_dim"}},
      {"v of another pool", f32, [&](args_type&, problem& p) { reshape(p.v, {3, 4, 2, 16}); }, CQSA_ERROR_SHAPE, {"args->v has shape [3, 4, 2, 16], wanted [4, 4, 2, 16]"}},
      {"cells of another count", f32, [&](args_type&, problem& p) { reshape(p.cells, {2, 8}); }, CQSA_ERROR_SHAPE, {"args->cells has shape [2, 8], wanted [3, 8]"}},
      {"counts of another count", f32, [&](args_type&, problem& p) { reshape(p.counts, {2}); }, CQSA_ERROR_SHAPE, {"args->counts has shape [2], wanted [3]"}},
      {"table of another count", f32, [&](args_type&, problem& p) { reshape(p.page_table, {2, 2}); }, CQSA_ERROR_SHAPE, {"args->page_table has shape [2, 2], wanted [3, 2]"}},
      {"out of another shape", f32, [&](args_type&, problem& p) { reshape(p.out, {3, 4, 8}); }, CQSA_ERROR_SHAPE, {"args->out has shape [3, 4, 8], wanted [3, 4, 16]"}},
      {"lse turned", f32, [&](args_type&, problem& p) { reshape(p.lse, {3, 4}); }, CQSA_ERROR_SHAPE, {"args->lse has shape [3, 4], wanted [4, 3]"}},
      {"a negative size", f32, [&](args_type&, problem& p) { reshape(p.q, {-1, 4, 16}); }, CQSA_ERROR_SHAPE, {"args->q has shape [-1, 4, 16]"}},
      {"scale NaN", f32, [](args_type& a, problem&) { a.softmax_scale = nan64; }, CQSA_ERROR_INVALID_ARGUMENT, {"args->softmax_scale is nan"}},
      {"scale 1e39", f32, [](args_type& a, problem&) { a.softmax_scale = 1e39; }, CQSA_ERROR_INVALID_ARGUMENT, {"args->softmax_scale is 1e+39"}},
      {"precision 4", f32, [](args_type& a, problem&) { a.precision = 4; }, CQSA_ERROR_UNKNOWN_FLAG, {"args->precision is 4"}},
      {"precision -1", f32, [](args_type& a, problem&) { a.precision = -1; }, CQSA_ERROR_UNKNOWN_FLAG, {"args->precision is -1"}},
      {"flag", f32, [](args_type& a, problem&) { a.flags = 2; }, CQSA_ERROR_UNKNOWN_FLAG, {"args->flags has the unknown bits 0x2"}},
      {"size", f32, [](args_type& a, problem&) { a.struct_size = 8; }, CQSA_ERROR_STRUCT_SIZE, {"args->struct_size is 8"}},
      {"device", f32, [](args_type&, problem& p) { p.cells.t.device_type = CQSA_DEVICE_CUDA; }, CQSA_ERROR_DEVICE, {"args->cells is on device type 2, wanted 1", "cpu"}},
      {"out on q", f32, [](args_type& a, problem&) { a.out = a.q; }, CQSA_ERROR_OVERLAP, {"args->out overlaps args->q"}},
      {"lse in v", f32, [](args_type&, problem& p) { p.lse.t.data = p.v.t.data; }, CQSA_ERROR_OVERLAP, {"args->lse overlaps args->v"}},
      {"out on cells", f32, [](args_type&, problem& p) { p.cells.t.data = p.out.t.data; }, CQSA_ERROR_OVERLAP, {"args->out overlaps args->cells"}},
      {"lse in out", f32, [](args_type&, problem& p) { p.lse.t.data = p.out.t.data; }, CQSA_ERROR_OVERLAP, {"args->out overlaps args->lse"}},
      {"out in itself", f32, [](args_type&, problem& p) { p.out.strides[1] = 0, p.out.t.strides = p.out.strides.data(); }, CQSA_ERROR_STRIDES, {"args->out is an output"}},
      {"strides too far", f32, [](args_type&, problem& p) { p.k.strides[0] = INT64_MAX / 2; }, CQSA_ERROR_STRIDES, {"args->k"}},
      {"workspace without memory", f32, [](args_type& a, problem&) { a.workspace_bytes = 64; }, CQSA_ERROR_NULL_POINTER, {"args->workspace is NULL with workspace_bytes 64"}},
      {"workspace without end", f32, [](args_type& a, problem&) { a.workspace = reinterpret_cast<void*>(uintptr_t{64}), a.workspace_bytes = UINT64_MAX; }, CQSA_ERROR_WORKSPACE, {"past the end of the address space"}},
      {"workspace over k", f32, [](args_type& a, problem& p) { a.workspace = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p.k.t.data) / 64 * 64), a.workspace_bytes = 1 << 20; }, CQSA_ERROR_OVERLAP, {"args->workspace overlaps args->"}},
  };
  for (const row& r : rows) {
    INFO(r.what);
    problem p = small(r.kv);
    std::fill(p.out.memory.begin(), p.out.memory.end(), static_cast<char>(0x5A));
    auto a = p.args();
    r.change(a, p);
    check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, nullptr), r.status, r.texts);
    CHECK(std::all_of(p.out.memory.begin(), p.out.memory.end(), [](char c) { return c == 0x5A; }));
  }
  problem p = small();
  auto a = p.args();
  int something = 0;
  check_fails(cqsa_attention_selected(nullptr, &a, nullptr), CQSA_ERROR_NULL_POINTER, {"context is NULL"});
  check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), nullptr, nullptr), CQSA_ERROR_NULL_POINTER, {"args is NULL"});
  check_fails(cqsa_attention_selected(const_cast<cqsa_context*>(&shared_context()), &a, &something), CQSA_ERROR_INVALID_ARGUMENT, {"stream is not NULL"});
}

// bf16 is nothing that Volta's tensor cores multiply. A context of a made-up chip, which no launch is reached with.
TEST_CASE("selected: bf16 at FAST is refused where the tensor cores lack it", "[selected]") {
  cqsa_context volta;
  cqsa_backend_v1 backend = *cqsa_cpu_backend();
  backend.selected = nullptr, backend.num_selected = 0;
  volta.backend = &backend;
  volta.chip.tier = 70;
  sizes n;
  n.q = CQSA_DTYPE_BF16, n.kv = CQSA_DTYPE_F16;
  problem p(n);
  auto a = p.args();
  a.precision = CQSA_PRECISION_FAST;
  uint64_t bytes = 0;
  check_fails(cqsa_attention_selected_workspace(&volta, &a, &bytes), CQSA_ERROR_UNSUPPORTED, {"CQSA_PRECISION_FAST", "bf16", "sm_70"});
  a.precision = CQSA_PRECISION_SPLIT;
  check_fails(cqsa_attention_selected_workspace(&volta, &a, &bytes), CQSA_ERROR_UNSUPPORTED, {"backend cpu has no attention over selected cells"});
}
