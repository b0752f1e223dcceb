// SPDX-License-Identifier: Apache-2.0
// The calls of mixtures of experts as a program sees them: what is refused, with which sentence, and nothing is written then; memory that ends right behind what
// is read; the router, grouping, rounding and combination by themselves.
#include "moe_problem.h"

#include <functional>

#include <sys/mman.h>

using namespace moe_test;

namespace {

std::string said() { return cqsa_last_error(); }

// A copy of a tensor that lasts, with something about it changed.
const cqsa_tensor* changed(const cqsa_tensor* from, const std::function<void(cqsa_tensor&)>& how) {
  static std::vector<std::unique_ptr<cqsa_tensor>> kept;
  kept.push_back(std::make_unique<cqsa_tensor>(*from));
  how(*kept.back());
  return kept.back().get();
}
const cqsa_tensor* shaped(const cqsa_tensor* from, std::vector<int64_t> shape) {
  static std::vector<std::unique_ptr<std::vector<int64_t>>> kept;
  kept.push_back(std::make_unique<std::vector<int64_t>>(std::move(shape)));
  std::vector<int64_t>& mine = *kept.back();
  return changed(from, [&](cqsa_tensor& t) { t.shape = mine.data(), t.ndim = static_cast<int32_t>(mine.size()), t.strides = nullptr; });
}
const cqsa_tensor* typed(const cqsa_tensor* from, cqsa_dtype dtype) {
  return changed(from, [&](cqsa_tensor& t) { t.dtype = dtype; });
}

struct refusal {
  const char* what;
  std::function<void(problem&, cqsa_moe_args&)> spoil;
  cqsa_status status;
  std::string sentence;
};

// 8 tokens, k 2, 4 experts of Q4_K, hidden 256, inter 512; each refusal on a problem of its own.
void check_refusals(const std::vector<refusal>& list) {
  for (const refusal& r : list) {
    problem p;
    p.inter = 512, p.gate_formats = p.down_formats = {CQSA_QUANT_Q4_K}, p.biases = true, p.mapped = true, p.shared_inter = 256, p.shared_gate = 1;
    p.make(1);
    p.counters = array(CQSA_DTYPE_I64, {2});
    p.args.counters = p.counters.tensor();
    REQUIRE(run(p) == CQSA_OK);
    const std::vector<char> before = p.out.memory, counted = p.counters.memory;
    r.spoil(p, p.args);
    INFO(r.what);
    const cqsa_status status = run(p);
    INFO(said());
    CHECK(status == r.status);
    CHECK(said().find(r.sentence) == 0);
    CHECK((p.out.memory == before && p.counters.memory == counted));
  }
}

}  // namespace

TEST_CASE("moe calls: arguments that are refused", "[moe]") {
  check_refusals({
      {"no x", [](problem&, cqsa_moe_args& a) { a.x = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->x is NULL"},
      {"struct size", [](problem&, cqsa_moe_args& a) { a.struct_size = 8; }, CQSA_ERROR_STRUCT_SIZE, "args->struct_size is 8, wanted"},
      {"flag", [](problem&, cqsa_moe_args& a) { a.flags = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->flags has the unknown bits 0x2"},
      {"x type", [](problem&, cqsa_moe_args& a) { a.x = typed(a.x, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE, "args->x is i32, wanted f32, f16 or bf16"},
      {"x axes", [](problem&, cqsa_moe_args& a) { a.x = shaped(a.x, {2048}); }, CQSA_ERROR_SHAPE, "args->x has 1 axes, wanted 2"},
      {"no hidden", [](problem&, cqsa_moe_args& a) { a.x = shaped(a.x, {8, 0}); }, CQSA_ERROR_SHAPE, "args->x has shape [8, 0], wanted [tokens, hidden]"},
      {"activation", [](problem&, cqsa_moe_args& a) { a.activation = 7; }, CQSA_ERROR_UNKNOWN_FLAG, "args->activation is 7, wanted one of CQSA_MOE_SWIGLU, .., 0 to 6"},
      {"layout", [](problem&, cqsa_moe_args& a) { a.gate_up_layout = -1; }, CQSA_ERROR_UNKNOWN_FLAG, "args->gate_up_layout is -1, wanted"},
      {"precision", [](problem&, cqsa_moe_args& a) { a.precision = 3; }, CQSA_ERROR_UNKNOWN_FLAG, "args->precision is 3, wanted"},
      {"output", [](problem&, cqsa_moe_args& a) { a.output = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->output is 2, wanted"},
      {"alpha", [](problem&, cqsa_moe_args& a) { a.alpha = INFINITY; }, CQSA_ERROR_INVALID_ARGUMENT, "args->alpha is inf, wanted a finite number"},
      {"limit", [](problem&, cqsa_moe_args& a) { a.limit = -1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->limit is -1, wanted a number above 0, or 0 for none"},
      {"beta of geglu", [](problem&, cqsa_moe_args& a) { a.activation = CQSA_MOE_GEGLU, a.beta = 1; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->beta is 1, wanted 0: only CQSA_MOE_SWIGLU has it, and args->activation is CQSA_MOE_GEGLU"},
      {"reserved", [](problem&, cqsa_moe_args& a) { a.reserved = 1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->reserved is 1, wanted 0"},
      {"gate of silu", [](problem&, cqsa_moe_args& a) { a.activation = CQSA_MOE_SILU; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->w_gate is given, wanted NULL: CQSA_MOE_SILU has no gate"},
      {"layout of silu", [](problem&, cqsa_moe_args& a) { a.activation = CQSA_MOE_SILU, a.gate_up_layout = 1, a.w_gate = nullptr; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->gate_up_layout is 1, wanted CQSA_MOE_SEPARATE: CQSA_MOE_SILU has no gate"},
      {"no gate", [](problem&, cqsa_moe_args& a) { a.w_gate = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->w_gate is NULL"},
      {"no up", [](problem&, cqsa_moe_args& a) { a.w_up = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->w_up is NULL"},
      {"no down", [](problem&, cqsa_moe_args& a) { a.w_down = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->w_down is NULL"},
      {"up with concat", [](problem&, cqsa_moe_args& a) { a.gate_up_layout = CQSA_MOE_CONCAT; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->w_up is given, wanted NULL: with args->gate_up_layout 1 its rows are in args->w_gate"},
      {"rows of concat", [](problem&, cqsa_moe_args& a) { a.gate_up_layout = CQSA_MOE_CONCAT, a.w_up = nullptr, a.b_up = nullptr; }, CQSA_ERROR_SHAPE,
       "args->w_gate->rows is 512, wanted 1024 (2 * inter)"},
      {"ids type", [](problem&, cqsa_moe_args& a) { a.topk_ids = typed(a.topk_ids, CQSA_DTYPE_F32); }, CQSA_ERROR_DTYPE, "args->topk_ids is f32, wanted i32 or i64"},
      {"ids shape", [](problem&, cqsa_moe_args& a) { a.topk_ids = shaped(a.topk_ids, {7, 2}); }, CQSA_ERROR_SHAPE,
       "args->topk_ids has shape [7, 2], wanted [8, k] (tokens of args->x)"},
      {"k of 0", [](problem&, cqsa_moe_args& a) { a.topk_ids = shaped(a.topk_ids, {8, 0}); }, CQSA_ERROR_SHAPE,
       "args->topk_ids has shape [8, 0], wanted [tokens, k] with k of 1 to 64"},
      {"k of 65", [](problem&, cqsa_moe_args& a) { a.topk_ids = shaped(a.topk_ids, {8, 65}); }, CQSA_ERROR_SHAPE, "args->topk_ids has shape [8, 65]"},
      {"no weights", [](problem&, cqsa_moe_args& a) { a.topk_weights = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->topk_weights is NULL"},
      {"weights shape", [](problem&, cqsa_moe_args& a) { a.topk_weights = shaped(a.topk_weights, {8, 1}); }, CQSA_ERROR_SHAPE,
       "args->topk_weights has shape [8, 1], wanted [8, 2] (tokens, k)"},
      {"out shape", [](problem&, cqsa_moe_args& a) { a.out = shaped(a.out, {8, 255}); }, CQSA_ERROR_SHAPE, "args->out has shape [8, 255], wanted [8, 256] (tokens, hidden)"},
      {"slots with a shared expert", [](problem&, cqsa_moe_args& a) { a.output = CQSA_MOE_PER_SLOT; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->shared is given, but args->output is CQSA_MOE_PER_SLOT"},
      {"out is x", [](problem&, cqsa_moe_args& a) { a.out = a.x; }, CQSA_ERROR_OVERLAP, "args->out"},
      {"out type", [](problem&, cqsa_moe_args& a) { a.out = typed(a.out, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE, "args->out is i32, wanted f32, f16 or bf16"},
      {"bias shape", [](problem&, cqsa_moe_args& a) { a.b_down = shaped(a.b_down, {4, 255}); }, CQSA_ERROR_SHAPE,
       "args->b_down has shape [4, 255], wanted [4, 256] (num_experts, rows)"},
      {"counters", [](problem&, cqsa_moe_args& a) { a.counters = shaped(a.counters, {1}); }, CQSA_ERROR_SHAPE, "args->counters has shape [1], wanted [2]"},
      {"device of x", [](problem&, cqsa_moe_args& a) { a.x = changed(a.x, [](cqsa_tensor& t) { t.device_type = CQSA_DEVICE_CUDA; }); }, CQSA_ERROR_DEVICE,
       "args->x is on device type 2, wanted 1 (backend cpu)"},
      {"workspace alone", [](problem&, cqsa_moe_args& a) { a.workspace_bytes = 64; }, CQSA_ERROR_NULL_POINTER, "args->workspace is NULL with workspace_bytes 64"},
      {"shared gate", [](problem& p, cqsa_moe_args&) { p.shared_args.gate = shaped(p.shared_args.gate, {255}); }, CQSA_ERROR_SHAPE,
       "args->shared->gate has shape [255], wanted [256] (hidden)"},
  });
}

TEST_CASE("moe calls: weights that are refused", "[moe]") {
  check_refusals({
      {"unknown format", [](problem& p, cqsa_moe_args&) { p.own.gate.list[2].format = 29; }, CQSA_ERROR_UNKNOWN_FLAG,
       "args->w_gate->experts[2].format is 29, wanted one of CQSA_QUANT_*, 1 to 28"},
      {"hidden and the block", [](problem& p, cqsa_moe_args&) { p.own.gate.weights.row_elements = 200; }, CQSA_ERROR_SHAPE,
       "args->w_gate->row_elements is 200, wanted a multiple of 256, the block of Q4_K, which is the format of args->w_gate->experts[0]"},
      {"one byte short", [](problem& p, cqsa_moe_args&) { p.own.down.list[3].data_bytes -= 1; }, CQSA_ERROR_SHAPE,
       "args->w_down->experts[3].data_bytes is 73727, wanted 73728 for 1 x 256 rows of 512 elements of Q4_K"},
      {"one byte long", [](problem& p, cqsa_moe_args&) { p.own.down.list[3].data_bytes += 1; }, CQSA_ERROR_SHAPE, "args->w_down->experts[3].data_bytes is 73729, wanted 73728"},
      {"fewer experts", [](problem& p, cqsa_moe_args&) { p.own.up.weights.num_experts = 3; }, CQSA_ERROR_SHAPE,
       "args->w_up->num_experts is 3, wanted 4 as the other projections have"},
      {"no experts", [](problem& p, cqsa_moe_args&) { p.own.up.weights.num_experts = 0; }, CQSA_ERROR_SHAPE, "args->w_up->num_experts is 0, wanted 1 to 4096"},
      {"too many experts", [](problem& p, cqsa_moe_args&) { p.own.up.weights.num_experts = 4097; }, CQSA_ERROR_SHAPE, "args->w_up->num_experts is 4097, wanted 1 to 4096"},
      {"rows", [](problem& p, cqsa_moe_args&) { p.own.up.weights.rows = 0; }, CQSA_ERROR_SHAPE, "args->w_up->rows is 0, wanted at least 1"},
      {"other hidden", [](problem& p, cqsa_moe_args&) { p.own.down.weights.rows = 128; for (auto& m : p.own.down.list) m.data_bytes = 0; }, CQSA_ERROR_SHAPE,
       "args->w_down->rows is 128, wanted 256 (hidden, axis 1 of args->x)"},
      {"odd address", [](problem& p, cqsa_moe_args&) { p.own.up.list[1].data = p.own.up.blobs[1].data() + 1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->w_up->experts[1].data is "},
      {"odd rows", [](problem& p, cqsa_moe_args&) { p.own.up.list[1].row_bytes = 145; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->w_up->experts[1].row_bytes is 145, wanted an even number for Q4_K"},
      {"short rows", [](problem& p, cqsa_moe_args&) { p.own.up.list[1].row_bytes = 142; }, CQSA_ERROR_SHAPE,
       "args->w_up->experts[1].row_bytes is 142, wanted at least 144 for 256 elements of Q4_K"},
      {"rows past 2^63", [](problem& p, cqsa_moe_args&) { p.own.up.list[1].row_bytes = uint64_t{1} << 60; }, CQSA_ERROR_SHAPE, "args->w_up->experts[1] has 512 rows of "},
      {"scale", [](problem& p, cqsa_moe_args&) { p.own.up.list[1].scale = &p; }, CQSA_ERROR_INVALID_ARGUMENT, "args->w_up->experts[1].scale is "},
      {"reserved", [](problem& p, cqsa_moe_args&) { p.own.up.list[0].reserved[1] = 1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->w_up->experts[0].reserved is not 0"},
      {"matrix flag", [](problem& p, cqsa_moe_args&) { p.own.up.list[0].flags = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->w_up->experts[0].flags has the unknown bits 0x2"},
      {"another device", [](problem& p, cqsa_moe_args&) { p.own.up.list[3].device_type = CQSA_DEVICE_CUDA; }, CQSA_ERROR_DEVICE,
       "args->w_up->experts[3] is on device type 2, wanted 1 (backend cpu)"},
      {"lists of a device", [](problem& p, cqsa_moe_args&) { p.own.up.weights.device_experts = p.own.up.list.data(), p.own.up.weights.experts = nullptr; },
       CQSA_ERROR_INVALID_ARGUMENT, "args->w_up->device_experts is given, but backend cpu has no memory of its own"},
      {"both lists", [](problem& p, cqsa_moe_args&) { p.own.up.weights.device_experts = p.own.up.list.data(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->w_up->experts and args->w_up->device_experts are both given"},
      {"expert_bytes", [](problem& p, cqsa_moe_args&) {
         p.own.up.weights.experts = nullptr, p.own.up.weights.all = p.own.up.list[0], p.own.up.weights.expert_bytes = 100; }, CQSA_ERROR_SHAPE,
       "args->w_up->expert_bytes is 100, wanted at least 73728 for 512 rows of 144 bytes"},
      {"out in the weights", [](problem& p, cqsa_moe_args& a) { a.out = changed(a.out, [&](cqsa_tensor& t) { t.data = p.own.up.blobs[1].data() + 4; }); },
       CQSA_ERROR_OVERLAP, "args->out overlaps args->w_up->experts[1]"},
      {"two shared experts", [](problem& p, cqsa_moe_args&) { p.shared_args.w_gate = p.shared_args.w_up = &p.own.up.weights, p.shared_args.w_down = &p.own.down.weights; },
       CQSA_ERROR_SHAPE, "args->shared->w_down->num_experts is 4, wanted 1"},
      {"no shared data", [](problem& p, cqsa_moe_args&) { p.shared.up.list[0].data = nullptr; }, CQSA_ERROR_NULL_POINTER,
       "args->shared->w_up: the data of the shared expert is NULL"},
  });
}

TEST_CASE("moe calls: ids that are refused", "[moe]") {
  check_refusals({
      {"too large", [](problem& p, cqsa_moe_args&) { p.ids.set(5, 1, 7); }, CQSA_ERROR_INDEX, "args->topk_ids[5, 1] is 7, wanted -1 to 6: the length of args->expert_map is 7"},
      {"negative", [](problem& p, cqsa_moe_args&) { p.ids.set(7, 0, -2); }, CQSA_ERROR_INDEX, "args->topk_ids[7, 0] is -2, wanted -1 to 6"},
      {"no map", [](problem& p, cqsa_moe_args& a) { a.expert_map = nullptr, p.ids.set(0, 0, 4); }, CQSA_ERROR_INDEX,
       "args->topk_ids[0, 0] is 4, wanted -1 to 3: num_experts is 4"},
      {"map", [](problem& p, cqsa_moe_args&) { p.map.set(4, 0, 4); }, CQSA_ERROR_INDEX, "args->expert_map[4] is 4, wanted -1 to 3: there are 4 experts"},
      {"map type", [](problem&, cqsa_moe_args& a) { a.expert_map = typed(a.expert_map, CQSA_DTYPE_I64); }, CQSA_ERROR_DTYPE, "args->expert_map is i64, wanted i32"},
      {"empty map", [](problem&, cqsa_moe_args& a) { a.expert_map = shaped(a.expert_map, {0}); }, CQSA_ERROR_SHAPE, "args->expert_map has shape [0]"},
      {"no data", [](problem& p, cqsa_moe_args&) { p.ids.set(0, 0, 3), p.own.down.list[3].data = nullptr; }, CQSA_ERROR_NULL_POINTER,
       "args->w_down: the data of expert 3 is NULL, but args->topk_ids["},
  });
}

TEST_CASE("moe calls: a descriptor of zeros is an expert that is not here", "[moe]") {
  problem p;
  p.make(1);
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t s = 0; s < p.topk; ++s) p.ids.set(t, s, double(1 + t % 2));
  REQUIRE(run(p) == CQSA_OK);
  const std::vector<char> wanted = p.out.memory;
  for (projection* w : {&p.own.gate, &p.own.up, &p.own.down}) w->list[0] = w->list[3] = CQSA_MOE_MATRIX_INIT;
  REQUIRE(run(p) == CQSA_OK);
  CHECK(p.out.memory == wanted);
  p.ids.set(0, 0, 3);
  CHECK(run(p) == CQSA_ERROR_NULL_POINTER);
  for (projection* w : {&p.own.gate, &p.own.up, &p.own.down}) w->list[1] = w->list[2] = CQSA_MOE_MATRIX_INIT;
  for (int64_t t = 0; t < p.tokens; ++t)
    for (int64_t s = 0; s < p.topk; ++s) p.ids.set(t, s, -1);
  REQUIRE(run(p) == CQSA_OK);
  for (const double x : p.result()) REQUIRE(x == 0);
}

TEST_CASE("moe calls: sizes past 2^31 are counted in 64 bits", "[moe]") {
  problem p;
  p.topk = 8;
  p.make(1);
  uint64_t usual = 0, large = 0;
  const auto with_tokens = [&](int64_t tokens) {
    cqsa_moe_args a = p.args;
    a.x = shaped(a.x, {tokens, 256}), a.topk_ids = shaped(a.topk_ids, {tokens, 8}), a.topk_weights = shaped(a.topk_weights, {tokens, 8}), a.out = shaped(a.out, {tokens, 256});
    return a;
  };
  cqsa_moe_args a = with_tokens(int64_t{1} << 40);
  REQUIRE(cqsa_moe_workspace(cpu_context(), &a, &usual) == CQSA_OK);
  CHECK((usual > uint64_t{1} << 29 && usual <= uint64_t{1} << 30));
  a.max_bytes = uint64_t{1} << 50;
  REQUIRE(cqsa_moe_workspace(cpu_context(), &a, &large) == CQSA_OK);
  CHECK((large > uint64_t{1} << 40 && large < uint64_t{1} << 43));  // a piece has fewer than 2^31 slots
  a = with_tokens(int64_t{1} << 57);
  CHECK(cqsa_moe_workspace(cpu_context(), &a, &large) == CQSA_ERROR_SHAPE);
}

// ---- memory that ends where the operand does --------------------------------------------------------------------------------

namespace {

// n bytes whose last is the last of a page, with nothing behind it.
struct at_the_edge {
  char* pages;
  size_t bytes, whole;
  explicit at_the_edge(size_t n) : bytes(n), whole((n + 4095) / 4096 * 4096 + 4096) {
    pages = static_cast<char*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(pages != MAP_FAILED);
    mprotect(pages + whole - 4096, 4096, PROT_NONE);
  }
  ~at_the_edge() { munmap(pages, whole); }
  at_the_edge(const at_the_edge&) = delete;
  char* data() { return pages + whole - 4096 - bytes; }
  void* take(const void* from) { return std::memcpy(data(), from, bytes); }
};

}  // namespace

TEST_CASE("moe calls: nothing is read behind x, ids, weights and blocks", "[moe]") {
  for (cqsa_quant_format format = 1; format < quant_format_count; ++format) {
    INFO(quant_formats[format].name);
    problem p;
    p.tokens = 3, p.experts = 2, p.gate_formats = p.down_formats = {format};
    p.make(uint32_t(format));
    REQUIRE(run(p) == CQSA_OK);
    const std::vector<char> wanted = p.out.memory;
    std::vector<std::unique_ptr<at_the_edge>> edges;
    for (array* a : {&p.x, &p.ids, &p.weights}) {
      edges.push_back(std::make_unique<at_the_edge>(a->memory.size()));
      a->view.data = edges.back()->take(a->memory.data());
    }
    for (projection* w : {&p.own.gate, &p.own.up, &p.own.down})
      for (size_t e = 0; e < w->list.size(); ++e) {
        edges.push_back(std::make_unique<at_the_edge>(w->list[e].data_bytes));
        w->list[e].data = edges.back()->take(w->blobs[e].data() + 2);
      }
    for (const cqsa_moe_impl* impl : implementations()) REQUIRE(run_on(*impl, p) == CQSA_OK);
    REQUIRE(run(p) == CQSA_OK);
    CHECK(p.out.memory == wanted);
  }
}

// ---- router -----------------------------------------------------------------------------------------------------------------

namespace {

struct routing {
  array logits, bias, ids, weights;
  cqsa_moe_route_args args = CQSA_MOE_ROUTE_ARGS_INIT;
  routing(int64_t tokens, int64_t experts, int64_t k, uint32_t seed, cqsa_dtype dtype = CQSA_DTYPE_F32) {
    engine r(seed);
    logits = array(dtype, {tokens, experts}), bias = array(CQSA_DTYPE_F32, {experts});
    ids = array(CQSA_DTYPE_I32, {tokens, k}), weights = array(CQSA_DTYPE_F32, {tokens, k});
    for (int64_t e = 0; e < experts; ++e) bias.set(e, 0, 0.3 * normal(r));
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t e = 0; e < experts; ++e) logits.set(t, e, std::round(4 * normal(r)) / 4);  // many ties
    args.logits = logits.tensor(), args.topk_ids = ids.tensor(), args.topk_weights = weights.tensor();
  }
  std::vector<double> scores(int64_t t) {
    std::vector<double> s;
    double most = -INFINITY, sum = 0;
    for (int64_t e = 0; e < logits.columns(); ++e) s.push_back(logits.get(t, e)), most = std::max(most, s.back());
    for (double& x : s) x = args.scoring == CQSA_MOE_SIGMOID ? 1 / (1 + std::exp(-x)) : std::exp(x - most), sum += x;
    for (double& x : s) x = args.scoring == CQSA_MOE_SIGMOID ? x : x / sum;
    return s;
  }
  // Ids by sorting; float scores, since ties are those of f32.
  std::vector<int64_t> chosen(int64_t t) {
    const std::vector<double> s = scores(t);
    std::vector<float> rank(s.begin(), s.end());
    const int64_t groups = std::max(args.num_groups, 1), size = logits.columns() / groups;
    for (size_t e = 0; args.bias && e < rank.size(); ++e) rank[e] += static_cast<float>(bias.get(int64_t(e)));
    std::vector<std::pair<float, int64_t>> of_groups;
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<float> in(rank.begin() + g * size, rank.begin() + (g + 1) * size);
      std::sort(in.rbegin(), in.rend());
      of_groups.push_back({args.group_score == CQSA_MOE_GROUP_TOP2 && size > 1 ? in[0] + in[1] : in[0], g});
    }
    const auto better = [](const auto& a, const auto& b) { return a.first > b.first || (a.first == b.first && a.second < b.second); };
    std::sort(of_groups.begin(), of_groups.end(), better);
    std::vector<std::pair<float, int64_t>> open;
    for (int64_t n = 0; n < std::max(args.topk_groups, 1); ++n)
      for (int64_t e = of_groups[size_t(n)].second * size; e < (of_groups[size_t(n)].second + 1) * size; ++e) open.push_back({rank[size_t(e)], e});
    std::sort(open.begin(), open.end(), better);
    std::vector<int64_t> out;
    for (int64_t k = 0; k < ids.columns(); ++k) out.push_back(open[size_t(k)].second);
    return out;
  }
};

}  // namespace

TEST_CASE("moe calls: the router", "[moe]") {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    engine r(seed);
    INFO("seed " << seed);
    const int64_t groups = std::vector<int64_t>{1, 2, 4, 8}[size_t(below(r, 4))];
    routing c(5, 32, 1 + below(r, 4), seed, seed % 3 ? CQSA_DTYPE_F32 : CQSA_DTYPE_BF16);
    c.args.scoring = int32_t(below(r, 2)), c.args.flags = uint32_t(below(r, 2)), c.args.scale = below(r, 2) ? 2.5f : 0.0f;
    if (groups > 1) c.args.num_groups = int32_t(groups), c.args.topk_groups = int32_t(1 + below(r, groups)), c.args.group_score = int32_t(below(r, 2));
    if (below(r, 2)) c.args.bias = c.bias.tensor();
    REQUIRE(cqsa_moe_route(cpu_context(), &c.args, nullptr) == CQSA_OK);
    for (int64_t t = 0; t < 5; ++t) {
      const std::vector<double> s = c.scores(t);
      const std::vector<int64_t> ids = c.chosen(t);
      double sum = 0;
      for (const int64_t e : ids) sum += s[size_t(e)];
      for (int64_t k = 0; k < c.ids.columns(); ++k) {
        CHECK(c.ids.get(t, k) == double(ids[size_t(k)]));
        const double wanted = s[size_t(ids[size_t(k)])] / (c.args.flags ? sum : 1) * (c.args.scale != 0 ? double(c.args.scale) : 1);
        CHECK(c.weights.get(t, k) == Approx(wanted).epsilon(1e-5));
      }
    }
  }
}

TEST_CASE("moe calls: the router with NaN and infinities, and what it refuses", "[moe]") {
  routing c(3, 4, 2, 1);
  for (int64_t e = 0; e < 4; ++e) c.logits.set(0, e, e == 2 ? 1.0 : NAN), c.logits.set(1, e, -INFINITY), c.logits.set(2, e, e == 3 ? INFINITY : 0);
  REQUIRE(cqsa_moe_route(cpu_context(), &c.args, nullptr) == CQSA_OK);
  CHECK((c.ids.get(0, 0) == 2 && c.weights.get(0, 0) == 1 && c.ids.get(0, 1) == 0 && c.weights.get(0, 1) == 0));
  CHECK((c.ids.get(1, 0) == 0 && c.ids.get(1, 1) == 1 && c.weights.get(1, 0) == 0));
  CHECK((c.ids.get(2, 0) == 3 && c.weights.get(2, 0) == 1 && c.weights.get(2, 1) == 0));
  const auto refused = [&](const std::function<void(cqsa_moe_route_args&)>& spoil, cqsa_status status, const char* sentence) {
    cqsa_moe_route_args a = c.args;
    spoil(a);
    CHECK(cqsa_moe_route(cpu_context(), &a, nullptr) == status);
    INFO(said());
    CHECK(said().find(sentence) == 0);
  };
  refused([](auto& a) { a.scoring = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->scoring is 2, wanted");
  refused([](auto& a) { a.num_groups = 3; }, CQSA_ERROR_INVALID_ARGUMENT, "args->num_groups is 3, wanted a divisor of num_experts, which is 4");
  refused([](auto& a) { a.num_groups = 2, a.topk_groups = 3; }, CQSA_ERROR_INVALID_ARGUMENT, "args->topk_groups is 3, wanted 1 to 2 (num_groups)");
  refused([](auto& a) { a.num_groups = 4, a.topk_groups = 1; }, CQSA_ERROR_SHAPE, "args->topk_ids has shape [3, 2], wanted [3, k] with k of 1 to 1: 1 experts may be chosen");
  refused([](auto& a) { a.scale = NAN; }, CQSA_ERROR_INVALID_ARGUMENT, "args->scale is nan, wanted a finite number");
  refused([](auto& a) { a.logits = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->logits is NULL");
  refused([](auto& a) { a.topk_weights = a.topk_ids; }, CQSA_ERROR_DTYPE, "args->topk_weights is i32, wanted f32");
}

// ---- grouping ---------------------------------------------------------------------------------------------------------------

TEST_CASE("moe calls: grouping is stable", "[moe]") {
  for (const cqsa_dtype dtype : {CQSA_DTYPE_I32, CQSA_DTYPE_I64}) {
    problem p;
    p.tokens = 37, p.topk = 3, p.experts = 6, p.mapped = dtype == CQSA_DTYPE_I64, p.id_dtype = dtype;
    p.make(9);
    array offsets(dtype, {7}), order(dtype, {37 * 3}), counts(dtype, {6}), places(dtype, {37, 3});
    cqsa_moe_group_args a = CQSA_MOE_GROUP_ARGS_INIT;
    a.topk_ids = p.ids.tensor(), a.expert_map = p.map.tensor(), a.offsets = offsets.tensor(), a.order = order.tensor(), a.counts = counts.tensor(), a.places = places.tensor();
    REQUIRE(cqsa_moe_group(cpu_context(), &a, nullptr) == CQSA_OK);
    int64_t at = 0;
    for (int64_t e = 0; e < 6; ++e) {
      CHECK(offsets.get(e) == double(at));
      const int64_t begin = at;
      for (int64_t slot = 0; slot < 37 * 3; ++slot)
        if (p.expert_at(slot / 3, slot % 3) == e) {
          CHECK(order.get(at) == double(slot));
          CHECK(places.get(slot / 3, slot % 3) == double(at++));
        }
      CHECK(counts.get(e) == double(at - begin));
    }
    CHECK(offsets.get(6) == double(at));
    for (; at < 37 * 3; ++at) CHECK(order.get(at) == -1);
    p.ids.set(36, 2, 99);
    CHECK(cqsa_moe_group(cpu_context(), &a, nullptr) == CQSA_ERROR_INDEX);
    CHECK(said().find("args->topk_ids[36, 2] is 99, wanted -1 to ") == 0);
    a.order = shaped(a.order, {5});
    CHECK(cqsa_moe_group(cpu_context(), &a, nullptr) == CQSA_ERROR_SHAPE);
  }
}

// ---- rounding, combination --------------------------------------------------------------------------------------------------

TEST_CASE("moe calls: activations to int8, to the bit", "[moe]") {
  for (const cqsa_dtype dtype : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
    engine r(1);
    array x(dtype, {9, 2080}, 3), codes(CQSA_DTYPE_I8, {9, 2080}, 1), scales(CQSA_DTYPE_F32, {9, 65}, 2);
    for (int64_t i = 0; i < 9; ++i)
      for (int64_t j = 0; j < 2080; ++j) x.set(i, j, i == 1 ? 0 : i == 2 && dtype == CQSA_DTYPE_F32 ? 1e-40 * normal(r) : normal(r));
    x.set(3, 40, NAN), x.set(3, 70, -INFINITY);
    REQUIRE(cqsa_moe_quantize_activations(cpu_context(), x.tensor(), codes.tensor(), scales.tensor(), nullptr) == CQSA_OK);
    for (int64_t i = 0; i < 9; ++i)
      for (int64_t g = 0; g < 65; ++g) {
        float a = 0;
        bool finite = true;
        for (int64_t j = 32 * g; j < 32 * g + 32; ++j) finite = finite && std::isfinite(x.get(i, j)), a = std::max(a, std::fabs(float(x.get(i, j))));
        const float id = 127.0f / a;
        CHECK((finite ? float(scales.get(i, g)) == a / 127.0f : scales.get(i, g) != scales.get(i, g)));
        for (int64_t j = 32 * g; j < 32 * g + 32; ++j)
          CHECK(codes.get(i, j) == (finite && std::isfinite(id) ? double(std::nearbyint(float(x.get(i, j)) * id)) : 0));
      }
    CHECK(cqsa_moe_quantize_activations(cpu_context(), shaped(x.tensor(), {9, 2081}), codes.tensor(), scales.tensor(), nullptr) == CQSA_ERROR_SHAPE);
    CHECK(said() == "x has shape [9, 2081], wanted rows of a multiple of 32");
  }
}

TEST_CASE("moe calls: combining slots makes what the layer makes", "[moe]") {
  for (const cqsa_dtype dtype : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
    problem p;
    p.out_dtype = dtype, p.topk = 4;
    p.make(3);
    REQUIRE(run(p) == CQSA_OK);
    array y(CQSA_DTYPE_F32, {p.tokens * p.topk, p.hidden}, 2), out(dtype, {p.tokens, p.hidden});
    cqsa_moe_args slots = p.args;
    slots.output = CQSA_MOE_PER_SLOT, slots.out = y.tensor(), slots.topk_weights = nullptr;
    REQUIRE(cqsa_moe_prefill(cpu_context(), &slots, nullptr) == CQSA_OK);
    cqsa_moe_combine_args a = CQSA_MOE_COMBINE_ARGS_INIT;
    a.y = y.tensor(), a.topk_weights = p.weights.tensor(), a.topk_ids = p.ids.tensor(), a.out = out.tensor();
    REQUIRE(cqsa_moe_combine(cpu_context(), &a, nullptr) == CQSA_OK);
    CHECK(out.memory == p.out.memory);
    a.topk_ids = nullptr;
    REQUIRE(cqsa_moe_combine(cpu_context(), &a, nullptr) == CQSA_OK);  // slots of nobody are zeros
    CHECK(out.memory == p.out.memory);
    a.y = shaped(a.y, {p.tokens * p.topk - 1, p.hidden});
    CHECK(cqsa_moe_combine(cpu_context(), &a, nullptr) == CQSA_ERROR_SHAPE);
    CHECK(said() == "args->y has shape [31, 256], wanted [32, 256] (tokens * k, hidden)");
  }
}
