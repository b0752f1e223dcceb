// SPDX-License-Identifier: Apache-2.0
// The FP8 calls as a program sees them: what is refused, with which sentence, and nothing is written then; what is empty.
#include "fp8_calls.h"

using namespace device_test;

namespace {

struct refusal {
  const char* what;
  change spoil;
  cqsa_status status;
  std::string sentence;
};

// Alone, and as the third of four, whose message names it.
void check_refusals(case_of_all& c, const args_type& from, const std::vector<refusal>& list) {
  case_of_all others[3];
  for (const refusal& r : list) {
    args_type args = from;
    r.spoil(args);
    const auto before = c.snapshot();
    const cqsa_status status = cqsa_fp8_quantize(cpu_context(), &args, nullptr);
    INFO(r.what << ": " << said());
    CHECK(status == r.status);
    CHECK(said().find(r.sentence) == 0);
    CHECK(c.snapshot() == before);
    const args_type* const many[] = {&others[0].bound(), &others[1].bound(), &args, &others[2].bound()};
    const auto before_others = others[0].snapshot();
    CHECK(cqsa_fp8_quantize_many(cpu_context(), many, 4, nullptr) == r.status);
    CHECK(said().find("args[2]->") == 0);
    CHECK((c.snapshot() == before && others[0].snapshot() == before_others));
  }
}

}  // namespace

TEST_CASE("fp8 calls: what quantize refuses, and how", "[fp8]") {
  case_of_all c;
  check_refusals(c, c.bound(), {
      {"no outputs", [](args_type& a) { a.row.out = a.transposed.out = nullptr; }, CQSA_ERROR_NULL_POINTER,
       "args->row.out and args->transposed.out are both NULL, wanted an output"},
      {"no x", [](args_type& a) { a.x = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->x is NULL"},
      {"no data", [](args_type& a) { a.x = changed(a.x, [](cqsa_tensor& t) { t.data = nullptr; }); }, CQSA_ERROR_NULL_POINTER,
       "args->x->data is NULL, but its shape is [2, 3, 200]"},
      {"x type", [](args_type& a) { a.x = typed(a.x, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE,
       "args->x is i32, wanted f32, f16, bf16, or a format with args->x_scale_inv"},
      {"x axes", [](args_type& a) { a.x = shaped(a.x, {1200}); }, CQSA_ERROR_SHAPE, "args->x has 1 axes, wanted 2 to 3"},
      {"codes without scales", [](args_type& a) { a.x = typed(a.x, CQSA_DTYPE_E5M2); }, CQSA_ERROR_NULL_POINTER,
       "args->x_scale_inv is NULL, but args->x is e5m2"},
      {"scales without codes", [&](args_type& a) { a.x_scale_inv = c.scale_in.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->x_scale_inv is given, but args->x is f16, which has no scales: wanted NULL"},
      {"format", [](args_type& a) { a.row.out = typed(a.row.out, CQSA_DTYPE_U8); }, CQSA_ERROR_DTYPE,
       "args->row.out is u8, wanted e4m3fn, e5m2, e4m3fnuz or e5m2fnuz"},
      {"unknown type", [](args_type& a) { a.row.out = typed(a.row.out, 0x00010811); }, CQSA_ERROR_DTYPE,
       "args->row.out has dtype 0x00010811, which this version does not know"},
      {"out shape", [](args_type& a) { a.row.out = shaped(a.row.out, {3, 2, 200}); }, CQSA_ERROR_SHAPE,
       "args->row.out has shape [3, 2, 200], wanted [2, 3, 200]"},
      {"transposed shape", [](args_type& a) { a.transposed.out = shaped(a.transposed.out, {6, 200}); }, CQSA_ERROR_SHAPE,
       "args->transposed.out has shape [6, 200], wanted [200, 6] (cols, batch * rows)"},
      {"block", [](args_type& a) { a.row.block[1] = 8; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->row.block is {1, 8}, wanted {0, 0}, {1, 0}, {0, 1}, {128, 128}, or {1, g} or {g, 1} with g of at least 16"},
      {"negative block", [](args_type& a) { a.transposed.block[0] = -1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->transposed.block is {-1, 1}, wanted"},
      {"scale shape", [](args_type& a) { a.row.scale = shaped(a.row.scale, {3, 4}); }, CQSA_ERROR_SHAPE,
       "args->row.scale has shape [3, 4], wanted [6, 2] (block rows, block columns)"},
      {"scale type", [](args_type& a) { a.row.scale = typed(a.row.scale, CQSA_DTYPE_F16); }, CQSA_ERROR_DTYPE, "args->row.scale is f16, wanted f32"},
      {"scale_inv type", [](args_type& a) { a.row.scale_inv = typed(a.row.scale_inv, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE,
       "args->row.scale_inv is i32, wanted f32, e8m0fnu or u8 for CQSA_FP8_SCALES_STRIDED"},
      {"layout", [](args_type& a) { a.row.scale_layout = 3; }, CQSA_ERROR_UNKNOWN_FLAG, "args->row.scale_layout is 3, wanted one of CQSA_FP8_SCALES_*"},
      {"packed type", [](args_type& a) { a.row.scale_layout = CQSA_FP8_SCALES_PACKED; }, CQSA_ERROR_DTYPE,
       "args->row.scale_inv is f32, wanted i32 for CQSA_FP8_SCALES_PACKED"},
      {"packed shape", [](args_type& a) { a.row.scale_layout = 1, a.row.scale_inv = typed(a.row.scale_inv, CQSA_DTYPE_I32); }, CQSA_ERROR_SHAPE,
       "args->row.scale_inv has shape [6, 2], wanted [6, 1] (block rows, ceil(block columns / 4))"},
      {"tiled shape", [](args_type& a) { a.row.scale_layout = 2, a.row.scale_inv = typed(shaped(a.row.scale_inv, {48}), CQSA_DTYPE_U8); }, CQSA_ERROR_SHAPE,
       "args->row.scale_inv has shape [48], wanted [512] (ceil(block rows / 128) * ceil(block columns / 4) * 512)"},
      {"scales of no side", [](args_type& a) { a.row.out = nullptr; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->row.scale is given, but args->row.out is NULL: wanted NULL"},
      {"source", [](args_type& a) { a.source = 3; }, CQSA_ERROR_UNKNOWN_FLAG, "args->source is 3, wanted CQSA_FP8_CURRENT, _STATIC or _RING"},
      {"no static scale", [](args_type& a) { a.source = CQSA_FP8_STATIC; }, CQSA_ERROR_NULL_POINTER,
       "args->row.scale_in is NULL, but args->source is CQSA_FP8_STATIC"},
      {"static powers of two", [&](args_type& a) {
         a.source = CQSA_FP8_STATIC, a.flags = CQSA_FP8_POW2, a.row.scale_in = c.scale_in.tensor(), a.transposed.scale_in = c.turned_in.tensor();
       }, CQSA_ERROR_INVALID_ARGUMENT, "args->flags has CQSA_FP8_POW2, but the scales of args->row.out are those of args->row.scale_in: wanted E8M0 in"},
      {"needless static scale", [&](args_type& a) { a.row.scale_in = c.scale_in.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->row.scale_in is given, but args->source is not CQSA_FP8_STATIC: wanted NULL"},
      {"reserved", [](args_type& a) { a.reserved = 1; }, CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is 1, wanted 0"},
      {"reserved of a side", [](args_type& a) { a.row.reserved = 1; }, CQSA_ERROR_UNKNOWN_FLAG, "args->row.reserved is 1, wanted 0"},
      {"reserved of no side", [](args_type& a) { a.transposed = CQSA_FP8_SIDE_INIT, a.transposed.reserved = 2; }, CQSA_ERROR_UNKNOWN_FLAG,
       "args->transposed.reserved is 2, wanted 0"},
      {"blocks of no scales", [](args_type& a) { a.x_block[0] = 1; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->x_block is {1, 0}, but args->x is f16, which has no scales: wanted {0, 0}"},
      {"no ring", [](args_type& a) { a.source = CQSA_FP8_RING; }, CQSA_ERROR_NULL_POINTER, "args->ring is NULL, but args->source is CQSA_FP8_RING"},
      {"policy", [](args_type& a) { a.nan_policy = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->nan_policy is 2, wanted one of CQSA_FP8_NAN_*"},
      {"flags", [](args_type& a) { a.flags = 16; }, CQSA_ERROR_UNKNOWN_FLAG, "args->flags has the unknown bits 0x10"},
      {"margin", [](args_type& a) { a.margin = 65; }, CQSA_ERROR_INVALID_ARGUMENT, "args->margin is 65, wanted -64 to 64"},
      {"eps", [](args_type& a) { a.eps = -1; }, CQSA_ERROR_INVALID_ARGUMENT, "args->eps is -1, wanted a finite number of at least 0"},
      {"limit", [](args_type& a) { a.amax_limit = NAN; }, CQSA_ERROR_INVALID_ARGUMENT, "args->amax_limit is nan, wanted a finite number above 0"},
      {"stage", [](args_type& a) { a.flags = CQSA_FP8_RING_STAGE; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->flags has CQSA_FP8_RING_STAGE, but args->source is not CQSA_FP8_RING"},
      {"silu without up", [](args_type& a) { a.flags = CQSA_FP8_SILU; }, CQSA_ERROR_NULL_POINTER, "args->up is NULL"},
      {"up without silu", [&](args_type& a) { a.up = c.up.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->up is given, but args->flags has no CQSA_FP8_SILU: wanted NULL"},
      {"up shape", [&](args_type& a) { a.flags = CQSA_FP8_SILU, a.up = shaped(c.up.tensor(), {6, 1, 200}); }, CQSA_ERROR_SHAPE,
       "args->up has shape [6, 1, 200], wanted [2, 3, 200]"},
      {"up type", [&](args_type& a) { a.flags = CQSA_FP8_SILU, a.up = typed(c.up.tensor(), CQSA_DTYPE_BF16); }, CQSA_ERROR_DTYPE,
       "args->up is bf16, wanted f16"},
      {"amax", [](args_type& a) { a.amax = shaped(a.column_sum, {2}); }, CQSA_ERROR_SHAPE, "args->amax has shape [2], wanted one element"},
      {"amax type", [](args_type& a) { a.amax = typed(a.amax, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE, "args->amax is i32, wanted f32"},
      {"skip type", [](args_type& a) { a.skip = typed(a.skip, CQSA_DTYPE_F32); }, CQSA_ERROR_DTYPE, "args->skip is f32, wanted i32"},
      {"sum", [](args_type& a) { a.column_sum = shaped(a.column_sum, {6}); }, CQSA_ERROR_SHAPE, "args->column_sum has shape [6], wanted [200] (cols)"},
      {"counters", [](args_type& a) { a.counters = shaped(a.counters, {3}); }, CQSA_ERROR_SHAPE, "args->counters has shape [3], wanted [4]"},
      {"rng", [&](args_type& a) { a.rng = shaped(c.rng.tensor(), {1}); }, CQSA_ERROR_SHAPE, "args->rng has shape [1], wanted [2] (seed, offset)"},
      {"groups and blocks", [&](args_type& a) { a.groups = c.groups.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->transposed.block is {0, 1}, wanted {0, 0}, {1, 0} or {1, g} with args->groups"},
      {"no groups", [&](args_type& a) { a.groups = shaped(c.groups.tensor(), {0}); }, CQSA_ERROR_SHAPE, "args->groups has shape [0], wanted [num_groups + 1]"},
      {"device", [](args_type& a) { a.skip = changed(a.skip, [](cqsa_tensor& t) { t.device_type = CQSA_DEVICE_CUDA; }); }, CQSA_ERROR_DEVICE,
       "args->skip is on device type 2, wanted 1 (backend cpu)"},
  });
  CHECK(cqsa_fp8_quantize(nullptr, &c.bound(), nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK((cqsa_fp8_quantize(cpu_context(), nullptr, nullptr) == CQSA_ERROR_NULL_POINTER && said() == "args is NULL"));
  CHECK(cqsa_fp8_quantize(cpu_context(), &c.bound(), &c) == CQSA_ERROR_INVALID_ARGUMENT);
  const args_type* const with_hole[] = {&c.bound(), nullptr};
  CHECK((cqsa_fp8_quantize_many(cpu_context(), with_hole, 2, nullptr) == CQSA_ERROR_NULL_POINTER && said() == "args[1] is NULL"));
  CHECK((cqsa_fp8_quantize_many(cpu_context(), nullptr, 2, nullptr) == CQSA_ERROR_NULL_POINTER && said() == "args is NULL"));
  CHECK(cqsa_fp8_quantize_many(cpu_context(), nullptr, -1, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("fp8 calls: values that a host can look at", "[fp8]") {
  case_of_all c;
  c.bound();
  c.args.source = CQSA_FP8_STATIC, c.args.row.scale_in = c.scale_in.tensor(), c.args.transposed.scale_in = c.turned_in.tensor();
  const args_type good = c.args;
  REQUIRE(cqsa_fp8_quantize(cpu_context(), &good, nullptr) == CQSA_OK);
  for (const double bad : {0.0, -1.5, HUGE_VAL, std::nan(""), 1e-39}) {
    c.scale_in.set(3, bad);
    const auto before = c.snapshot();
    CHECK(cqsa_fp8_quantize(cpu_context(), &good, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
    INFO(said());
    CHECK((said().find("args->row.scale_in is ") == 0 && said().find("at [1, 1], wanted a number from 2^-126 to FLT_MAX") != std::string::npos));
    CHECK(c.snapshot() == before);
    const args_type* const many[] = {&good};
    CHECK(cqsa_fp8_quantize_many(cpu_context(), many, 1, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
    CHECK(said().find("args[0]->row.scale_in is ") == 0);
  }
  c.scale_in.set(3, 1.5);
  array bytes(CQSA_DTYPE_E8M0FNU, {6, 2});
  args_type powers = good;
  powers.row.scale_inv = bytes.tensor();
  CHECK(cqsa_fp8_quantize(cpu_context(), &powers, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
  CHECK(said() == "args->row.scale_in is 1.5 at [0, 0], wanted a power of two, as args->row.scale_inv holds powers of two");
  for (int64_t i = 0; i < 12; ++i) c.scale_in.set(i, i % 2 ? 0x1p-126 : 0x1p127);
  CHECK(cqsa_fp8_quantize(cpu_context(), &powers, nullptr) == CQSA_OK);
  CHECK((bytes.memory()[0] == 0 && static_cast<uint8_t>(bytes.memory()[1]) == 253));
  c.skip.set(0, 1);
  const auto before = c.snapshot();
  CHECK(cqsa_fp8_quantize(cpu_context(), &good, nullptr) == CQSA_OK);
  CHECK(c.snapshot() == before);
  c.skip.set(0, 0);
  c.simple();
  c.args.groups = c.groups.tensor();
  REQUIRE(cqsa_fp8_quantize(cpu_context(), &c.args, nullptr) == CQSA_OK);
  const double wrong[][3] = {{0, 2, 7}, {0, 3, 2}, {1, 2, 3}, {0, -1, 2}};
  for (const auto& ends : wrong) {
    for (int i = 0; i < 3; ++i) c.groups.set(i, ends[i]);
    CHECK(cqsa_fp8_quantize(cpu_context(), &c.args, nullptr) == CQSA_ERROR_INDEX);
    INFO(said());
    CHECK(said().find("args->groups[") == 0);
  }
}

TEST_CASE("fp8 calls: what rings refuse", "[fp8]") {
  case_of_all c;
  const auto refuse = [&](const std::function<void(args_type&, cqsa_fp8_ring&)>& spoil, cqsa_status wanted, const char* text) {
    args_type args = c.with_ring();
    cqsa_fp8_ring ring = c.ring;
    args.ring = &ring;
    spoil(args, ring);
    const auto before = c.snapshot();
    const cqsa_status status = cqsa_fp8_quantize(cpu_context(), &args, nullptr);
    INFO(said());
    CHECK(status == wanted);
    CHECK(said().find(text) == 0);
    CHECK(c.snapshot() == before);
  };
  using r = cqsa_fp8_ring;
  using a = args_type;
  const cqsa_status bad = CQSA_ERROR_INVALID_ARGUMENT;
  refuse([](a&, r& x) { x.hist_len = 0; }, bad, "args->ring->hist_len is 0, wanted 1 to 1024");
  refuse([](a&, r& x) { x.hist_len = 1025; }, bad, "args->ring->hist_len is 1025, wanted 1 to 1024");
  refuse([](a&, r& x) { x.hist_len = 2; }, bad,
         "args->ring->state is a ring of hist_len 3, format e4m3fn, margin 0, algorithm 0, pow2 0, index 0, wanted 2, e4m3fn, 0, 0, 0");
  refuse([](a&, r& x) { x.margin = 1; }, bad, "args->ring->state is a ring of hist_len 3");
  refuse([](a&, r& x) { x.flags = CQSA_FP8_POW2; }, bad, "args->ring->state is a ring of hist_len 3");
  refuse([](a&, r& x) { x.algorithm = 1; }, bad, "args->ring->state is a ring of hist_len 3");
  refuse([](a&, r& x) { x.margin = 100; }, bad, "args->ring->margin is 100, wanted -64 to 64");
  refuse([](a&, r& x) { x.algorithm = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->ring->algorithm is 2, wanted one of CQSA_FP8_RING_*");
  refuse([](a&, r& x) { x.flags = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->ring->flags has the unknown bits 0x2");
  refuse([](a&, r& x) { x.struct_size = 8; }, CQSA_ERROR_STRUCT_SIZE, "args->ring->struct_size is 8");
  refuse([](a&, r& x) { x.format = CQSA_DTYPE_E5M2; }, bad, "args->ring->format is e5m2, wanted e4m3fn, as args->row.out");
  refuse([](a&, r& x) { x.format = CQSA_DTYPE_F16; }, CQSA_ERROR_DTYPE, "args->ring->format is 0x00011002 (f16), wanted e4m3fn");
  refuse([](a&, r& x) { x.state = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->ring->state is NULL");
  refuse([](a&, r& x) { x.state = static_cast<char*>(x.state) + 4; }, CQSA_ERROR_WORKSPACE, "args->ring->state is not aligned to 64 bytes");
  refuse([](a&, r& x) { --x.bytes; }, CQSA_ERROR_WORKSPACE, "args->ring->bytes is 75, this ring needs 76");
  refuse([](a&, r& x) { *static_cast<char*>(x.state) = 1; }, bad, "args->ring->state is not a ring: it begins with 0x");
  refuse([](a& x, r&) { x.flags = CQSA_FP8_POW2; }, bad, "args->flags has CQSA_FP8_POW2, but args->ring has not");
  refuse([](a& x, r&) { x.row.block[0] = 1; }, bad, "args->row.block is {1, 0}, wanted {0, 0} with CQSA_FP8_RING");
  refuse([&](a& x, r&) { x.groups = c.groups.tensor(); }, bad, "args->groups is given, but args->source is CQSA_FP8_RING");
  refuse([](a& x, r&) { x.source = CQSA_FP8_CURRENT; }, bad, "args->ring is given, but args->source is not CQSA_FP8_RING: wanted NULL");
  refuse([&](a& x, r&) { x.row.scale_inv = typed(c.amax.tensor(), CQSA_DTYPE_E8M0FNU), x.amax = nullptr; }, bad,
         "args->row.scale_inv holds powers of two, but args->ring has no CQSA_FP8_POW2");
  refuse([&](a& x, r& y) {
    y.flags = CQSA_FP8_POW2, x.transposed.out = typed(c.turned.tensor(), CQSA_DTYPE_E4M3FNUZ);
    x.transposed.scale_inv = typed(c.amax.tensor(), CQSA_DTYPE_E8M0FNU), x.amax = nullptr;
  }, bad, "args->transposed.scale_inv holds powers of two, but args->transposed.out is e4m3fnuz, whose scale is 0.535714 times that of args->ring's e4m3fn");
  refuse([&](a& x, r& y) { x.row.out = changed(x.row.out, [&](cqsa_tensor& t) { t.data = y.state; }); }, CQSA_ERROR_OVERLAP,
         "args->row.out overlaps args->ring: bytes 0x");
}

TEST_CASE("fp8 calls: rings alone", "[fp8]") {
  case_of_all c, other;
  c.with_ring(), other.with_ring();
  array amaxes(CQSA_DTYPE_F32, {2}), one(CQSA_DTYPE_F32, {1});
  for (int64_t i = 0; i < 2; ++i) amaxes.set(i, 2);
  cqsa_fp8_ring rings[2] = {c.ring, other.ring};
  const auto fold = [&](int64_t count, const cqsa_tensor* t) { return cqsa_fp8_ring_fold(cpu_context(), rings, count, t, nullptr); };
  uint64_t bytes = 0;
  CHECK(cqsa_fp8_ring_bytes(nullptr, &bytes) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_fp8_ring_bytes(rings, nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK((cqsa_fp8_ring_init(cpu_context(), rings, -1.0f, nullptr) == CQSA_ERROR_INVALID_ARGUMENT &&
         said() == "amax is -1, wanted a finite number of at least 0"));
  CHECK(cqsa_fp8_ring_init(cpu_context(), rings, NAN, nullptr) == CQSA_ERROR_INVALID_ARGUMENT);
  CHECK((fold(2, nullptr) == CQSA_OK && fold(2, amaxes.tensor()) == CQSA_OK && fold(0, nullptr) == CQSA_OK));
  CHECK((fold(2, one.tensor()) == CQSA_ERROR_SHAPE && said() == "amaxes has shape [1], wanted [2] (count)"));
  CHECK((fold(-1, nullptr) == CQSA_ERROR_INVALID_ARGUMENT && said() == "count is -1, wanted at least 0"));
  CHECK(cqsa_fp8_ring_staged(cpu_context(), rings, 2, nullptr, nullptr) == CQSA_ERROR_NULL_POINTER);
  rings[1] = rings[0];
  CHECK((fold(2, nullptr) == CQSA_ERROR_INVALID_ARGUMENT && said().find("share memory, wanted each ring once") != std::string::npos));
  rings[1] = other.ring, rings[1].hist_len = 2;
  CHECK((fold(2, amaxes.tensor()) == CQSA_ERROR_INVALID_ARGUMENT && said().find("rings[1]->state is a ring of hist_len 3") == 0));
  cqsa_fp8_ring_info info = CQSA_FP8_RING_INFO_INIT;
  CHECK(cqsa_fp8_ring_read(cpu_context(), rings, nullptr, nullptr, nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK((cqsa_fp8_ring_read(cpu_context(), rings + 1, &info, nullptr, nullptr) == CQSA_ERROR_INVALID_ARGUMENT && info.index == 0));
  CHECK((cqsa_fp8_ring_read(cpu_context(), rings, &info, nullptr, nullptr) == CQSA_OK && info.index == 1 && info.scale == 224));
  array overlapping(CQSA_DTYPE_F32, {1});
  const cqsa_tensor* const inside = changed(overlapping.tensor(), [&](cqsa_tensor& t) { t.data = static_cast<char*>(rings[0].state) + 64; });
  CHECK(cqsa_fp8_ring_staged(cpu_context(), rings, 1, inside, nullptr) == CQSA_ERROR_OVERLAP);
}

TEST_CASE("fp8 calls: outputs stand apart from everything else", "[fp8]") {
  case_of_all c;
  c.bound();
  const auto at = [](const cqsa_tensor* t, const cqsa_tensor* where) { return changed(t, [&](cqsa_tensor& x) { x.data = where->data; }); };
  const auto refuse = [&](const change& spoil, cqsa_status wanted, const char* text) {
    args_type args = c.bound();
    spoil(args);
    const auto before = c.snapshot();
    const cqsa_status status = cqsa_fp8_quantize(cpu_context(), &args, nullptr);
    INFO(said());
    CHECK((status == wanted && said().find(text) == 0));
    CHECK(c.snapshot() == before);
  };
  refuse([&](args_type& a) { a.row.out = at(a.row.out, a.x); }, CQSA_ERROR_OVERLAP, "args->row.out overlaps args->x: bytes 0x");
  refuse([&](args_type& a) { a.transposed.out = at(a.transposed.out, a.row.out); }, CQSA_ERROR_OVERLAP, "args->row.out overlaps args->transposed.out");
  refuse([&](args_type& a) { a.row.scale = at(a.row.scale, a.row.scale_inv); }, CQSA_ERROR_OVERLAP, "args->row.scale overlaps args->row.scale_inv");
  refuse([&](args_type& a) { a.amax = at(a.amax, a.skip); }, CQSA_ERROR_OVERLAP, "args->amax overlaps args->skip");
  refuse([&](args_type& a) { a.column_sum = at(a.column_sum, a.x); }, CQSA_ERROR_OVERLAP, "args->column_sum overlaps args->x");
  refuse([&](args_type& a) { a.counters = at(a.counters, a.row.out); }, CQSA_ERROR_OVERLAP, "args->row.out overlaps args->counters");
  int64_t same_row[3] = {600, 0, 1};
  refuse([&](args_type& a) { a.row.out = changed(a.row.out, [&](cqsa_tensor& t) { t.strides = same_row; }); }, CQSA_ERROR_STRIDES,
         "args->row.out is an output, but");
  case_of_all other;
  args_type second = other.bound();
  const args_type* const both[] = {&c.bound(), &second};
  REQUIRE(cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_OK);
  second.row.out = c.args.row.out;
  CHECK(cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_ERROR_OVERLAP);
  CHECK(said().find("args[0]->row.out overlaps args[1]->row.out: bytes 0x") != std::string::npos);
  second = other.bound(), second.amax = c.args.amax;
  CHECK((cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_ERROR_OVERLAP && said().find("->amax overlaps args[") != std::string::npos));
  second = other.bound(), second.row.out = at(second.row.out, c.args.x);
  CHECK((cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_ERROR_OVERLAP && said().find("args[1]->row.out overlaps args[0]->x") == 0));
  second = other.bound(), second.x = c.args.x, second.skip = c.args.skip;  // inputs may be shared
  CHECK(cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_OK);
  c.with_ring();
  args_type same_ring = other.simple();
  same_ring.source = CQSA_FP8_RING, same_ring.ring = c.args.ring;
  const args_type* const twice[] = {&c.args, &same_ring};
  CHECK((cqsa_fp8_quantize_many(cpu_context(), twice, 2, nullptr) == CQSA_ERROR_OVERLAP && said().find("args[0]->ring overlaps args[1]->ring") == 0));
  const args_type* const workspaces[] = {&c.args, &second};
  second.workspace = &second, second.workspace_bytes = 64;
  CHECK((cqsa_fp8_quantize_many(cpu_context(), workspaces, 2, nullptr) == CQSA_ERROR_INVALID_ARGUMENT &&
         said().find("args[1]->workspace is given, wanted NULL") == 0));
}

// Columns of one buffer are outputs of different tensors: their bytes interleave and do not overlap.
TEST_CASE("fp8 calls: outputs may be interleaved", "[fp8]") {
  array x(CQSA_DTYPE_F32, {4, 8}), buffer(CQSA_DTYPE_E4M3FN, {4, 16});
  generator r(1);
  fill_normal(r, x);
  int64_t strides[2] = {16, 1};
  const auto half = [&](uint64_t offset) {
    return changed(shaped(buffer.tensor(), {4, 8}), [&](cqsa_tensor& t) { t.strides = strides, t.byte_offset = offset; });
  };
  cqsa_fp8_quantize_args a = CQSA_FP8_QUANTIZE_ARGS_INIT, b = CQSA_FP8_QUANTIZE_ARGS_INIT;
  a.x = b.x = x.tensor(), a.row.out = half(0), b.row.out = half(8);
  const args_type* const both[] = {&a, &b};
  CHECK(cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_OK);
  b.row.out = half(7);
  CHECK(cqsa_fp8_quantize_many(cpu_context(), both, 2, nullptr) == CQSA_ERROR_OVERLAP);
}

TEST_CASE("fp8 calls: nothing to do is fine", "[fp8]") {
  const auto number = [](array& a, int64_t i) { return a.get(i); };
  for (const sizes& shape : {sizes{0, 5}, sizes{5, 0}, sizes{0, 0}, sizes{0, 3, 4}, sizes{3, 0, 4}}) {
    const int64_t rows = shape.size() == 3 ? shape[0] * shape[1] : shape[0], cols = shape.back();
    array x(CQSA_DTYPE_F16, shape), out(CQSA_DTYPE_E4M3FN, shape), turned(CQSA_DTYPE_E4M3FN, {cols, rows});
    array scale(CQSA_DTYPE_F32, {1, 1}), inv(CQSA_DTYPE_F32, {}), amax(CQSA_DTYPE_F32, {}), sum(CQSA_DTYPE_F32, {cols}), per_row(CQSA_DTYPE_F32, {rows, 1});
    cqsa_fp8_quantize_args a = CQSA_FP8_QUANTIZE_ARGS_INIT;
    a.x = changed(x.tensor(), [](cqsa_tensor& t) { t.data = nullptr; }), a.row.out = out.tensor(), a.row.scale = scale.tensor(), a.row.scale_inv = inv.tensor();
    a.transposed.out = turned.tensor(), a.transposed.block[0] = 1, a.transposed.scale = per_row.tensor(), a.amax = amax.tensor(), a.column_sum = sum.tensor();
    const cqsa_status status = cqsa_fp8_quantize(cpu_context(), &a, nullptr);
    INFO(shape.size() << " axes, " << rows << " x " << cols << ": " << said());
    CHECK(status == CQSA_OK);
    CHECK((number(amax, 0) == 0 && number(scale, 0) == 1 && number(inv, 0) == 1));
    for (int64_t j = 0; j < cols; ++j) CHECK(number(sum, j) == 0);
    for (int64_t i = 0; i < rows; ++i) CHECK(number(per_row, i) == 1);
    amax.set(0, 7);
    const int64_t whole[2] = {0, 0};
    CHECK((cqsa_fp8_amax(cpu_context(), x.tensor(), whole, 0, amax.tensor(), nullptr, 0, nullptr) == CQSA_OK && number(amax, 0) == 0));
    cqsa_fp8_dequantize_args d = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
    d.codes = out.tensor(), d.scale_inv = inv.tensor(), d.out = x.tensor();
    CHECK(cqsa_fp8_dequantize(cpu_context(), &d, nullptr) == CQSA_OK);
  }
  CHECK(cqsa_fp8_quantize_many(cpu_context(), nullptr, 0, nullptr) == CQSA_OK);
  array a(CQSA_DTYPE_E4M3FN, {0, 4}), b(CQSA_DTYPE_E4M3FN, {3, 4}), d(CQSA_DTYPE_F32, {0, 3}), amax(CQSA_DTYPE_F32, {});
  cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
  g.a = a.tensor(), g.b = b.tensor(), g.d = d.tensor(), g.d_amax = amax.tensor();
  amax.set(0, 7);
  CHECK((cqsa_fp8_gemm(cpu_context(), &g, nullptr) == CQSA_OK && number(amax, 0) == 0));
}

// One axis is 0, the others are larger than anybody can count, strides too.
TEST_CASE("fp8 calls: nothing, of any size", "[fp8]") {
  const int64_t large = int64_t{1} << 50, far = int64_t{1} << 60;
  array none(CQSA_DTYPE_F32, {0, 1}), codes(CQSA_DTYPE_E4M3FN, {0, 1}), amax(CQSA_DTYPE_F32, {}), one(CQSA_DTYPE_F32, {}), counters(CQSA_DTYPE_I64, {4});
  int64_t strides[] = {far, far, far};
  const auto spread = [&](const cqsa_tensor* t) { return changed(t, [&](cqsa_tensor& x) { x.strides = strides; }); };
  for (int64_t n = 0; n < 4; ++n) counters.set(n, 0);
  for (const int64_t block : {0, 1}) {
    cqsa_fp8_quantize_args a = CQSA_FP8_QUANTIZE_ARGS_INIT;
    amax.set(0, 7);
    a.x = spread(shaped(none.tensor(), {4, large, 0})), a.row.out = spread(shaped(codes.tensor(), {4, large, 0})), a.row.block[0] = block;
    a.transposed.out = spread(shaped(codes.tensor(), {0, 4 * large})), a.transposed.block[0] = block, a.amax = amax.tensor(), a.counters = counters.tensor();
    if (block == 0) a.row.scale = one.tensor();
    CHECK(cqsa_fp8_quantize(cpu_context(), &a, nullptr) == CQSA_OK);
    CHECK((amax.get(0) == 0 && (block || one.get(0) == 1) && counters.get(0) == 0));
  }
  array b(CQSA_DTYPE_E4M3FN, {0, 4}), d(CQSA_DTYPE_F32, {0, 1});
  cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
  amax.set(0, 7);
  const int64_t rows = int64_t{1} << 33;
  int64_t same[] = {0, 0, 0};
  const auto repeated = [&](const cqsa_tensor* t) { return changed(t, [&](cqsa_tensor& x) { x.strides = same; }); };
  array codes4(CQSA_DTYPE_E4M3FN, {1, 4});
  g.a = repeated(shaped(codes4.tensor(), {rows, 4})), g.b = b.tensor(), g.d = shaped(d.tensor(), {rows, 0}), g.d_amax = amax.tensor();
  CHECK((cqsa_fp8_gemm(cpu_context(), &g, nullptr) == CQSA_OK && amax.get(0) == 0));
}

TEST_CASE("fp8 calls: what amax, scales, dequantize and transpose refuse", "[fp8]") {
  case_of_all c;
  const int64_t block[2] = {1, 128}, wrong_block[2] = {3, 3};
  const auto expect = [](cqsa_status got, cqsa_status wanted, const char* text) {
    INFO(said());
    CHECK((got == wanted && said().find(text) == 0));
  };
  const auto amax = [&](const cqsa_tensor* x, const int64_t* b, int32_t policy, const cqsa_tensor* out) {
    return cqsa_fp8_amax(cpu_context(), x, b, policy, out, nullptr, 0, nullptr);
  };
  const cqsa_tensor* const x = c.x.tensor();
  const cqsa_tensor* const grid = c.row_scale.tensor();
  expect(amax(x, block, 0, grid), CQSA_OK, "");
  expect(amax(nullptr, block, 0, grid), CQSA_ERROR_NULL_POINTER, "x is NULL");
  expect(amax(x, nullptr, 0, grid), CQSA_ERROR_NULL_POINTER, "block is NULL");
  expect(amax(x, block, 0, nullptr), CQSA_ERROR_NULL_POINTER, "amax_out is NULL");
  expect(amax(x, wrong_block, 0, grid), CQSA_ERROR_INVALID_ARGUMENT, "block is {3, 3}, wanted");
  expect(amax(x, block, 4, grid), CQSA_ERROR_UNKNOWN_FLAG, "nan_policy is 4, wanted");
  expect(amax(typed(x, CQSA_DTYPE_E4M3FN), block, 0, grid), CQSA_ERROR_DTYPE, "x is e4m3fn, wanted f32, f16 or bf16");
  expect(amax(x, block, 0, shaped(grid, {2, 6})), CQSA_ERROR_SHAPE, "amax_out has shape [2, 6], wanted [6, 2] (block rows, block columns)");
  expect(amax(x, block, 0, changed(grid, [&](cqsa_tensor& t) { t.data = x->data; })), CQSA_ERROR_OVERLAP, "amax_out overlaps x: bytes 0x");

  cqsa_fp8_scale_args s = CQSA_FP8_SCALE_ARGS_INIT;
  s.amax = c.row_scale.tensor(), s.scale = c.row_inv.tensor(), s.format = CQSA_DTYPE_E4M3FN;
  const auto scale = [&](const std::function<void(cqsa_fp8_scale_args&)>& spoil) {
    cqsa_fp8_scale_args mine = s;
    spoil(mine);
    return cqsa_fp8_scale_from_amax(cpu_context(), &mine, nullptr);
  };
  using sa = cqsa_fp8_scale_args;
  expect(scale([](sa&) {}), CQSA_OK, "");
  expect(scale([](sa& a) { a.scale = nullptr; }), CQSA_ERROR_NULL_POINTER, "args->scale and args->scale_inv are both NULL, wanted an output");
  expect(scale([](sa& a) { a.amax = nullptr; }), CQSA_ERROR_NULL_POINTER, "args->amax is NULL");
  expect(scale([](sa& a) { a.format = 0; }), CQSA_ERROR_DTYPE, "args->format is 0x00000000 (unknown), wanted e4m3fn");
  expect(scale([](sa& a) { a.margin = -65; }), CQSA_ERROR_INVALID_ARGUMENT, "args->margin is -65");
  expect(scale([](sa& a) { a.scale = shaped(a.scale, {12, 1}); }), CQSA_ERROR_SHAPE, "args->scale has shape [12, 1], wanted [6, 2]");
  expect(scale([](sa& a) { a.scale = a.amax; }), CQSA_ERROR_OVERLAP, "args->scale overlaps args->amax");
  expect(scale([](sa& a) { a.reserved = 2; }), CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is 2, wanted 0");
  expect(scale([](sa& a) { a.flags = 2; }), CQSA_ERROR_UNKNOWN_FLAG, "args->flags has the unknown bits 0x2");

  const auto relayout = [&](const cqsa_tensor* a, int32_t la, const cqsa_tensor* b, int32_t lb, int64_t r, int64_t q) {
    return cqsa_fp8_scale_relayout(cpu_context(), a, la, b, lb, r, q, nullptr);
  };
  const cqsa_tensor* const to = c.row_inv.tensor();
  expect(relayout(grid, 0, to, 0, 6, 2), CQSA_OK, "");
  expect(relayout(nullptr, 0, to, 0, 6, 2), CQSA_ERROR_NULL_POINTER, "scales is NULL");
  expect(relayout(grid, 0, nullptr, 0, 6, 2), CQSA_ERROR_NULL_POINTER, "scales_out is NULL");
  expect(relayout(grid, 5, to, 0, 6, 2), CQSA_ERROR_UNKNOWN_FLAG, "layout is 5");
  expect(relayout(grid, 0, to, 5, 6, 2), CQSA_ERROR_UNKNOWN_FLAG, "layout_out is 5");
  expect(relayout(grid, 0, to, 0, -6, 2), CQSA_ERROR_INVALID_ARGUMENT, "block_rows is -6, wanted at least 0");
  expect(relayout(grid, 0, to, 0, 6, 3), CQSA_ERROR_SHAPE, "scales has shape [6, 2], wanted [6, 3] (block rows, block columns)");

  cqsa_fp8_dequantize_args d = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
  d.codes = c.row.tensor(), d.scale_inv = grid, d.out = c.up.tensor(), d.block[0] = 1, d.block[1] = 128;
  using da = cqsa_fp8_dequantize_args;
  const auto decode = [&](const std::function<void(da&)>& spoil) {
    da mine = d;
    spoil(mine);
    return cqsa_fp8_dequantize(cpu_context(), &mine, nullptr);
  };
  expect(decode([](da&) {}), CQSA_OK, "");
  expect(decode([](da& a) { a.codes = nullptr; }), CQSA_ERROR_NULL_POINTER, "args->codes is NULL");
  expect(decode([](da& a) { a.scale_inv = nullptr; }), CQSA_ERROR_NULL_POINTER, "args->scale_inv is NULL");
  expect(decode([](da& a) { a.codes = typed(a.codes, CQSA_DTYPE_U8); }), CQSA_ERROR_DTYPE, "args->codes is u8, wanted e4m3fn, e5m2, e4m3fnuz or e5m2fnuz");
  expect(decode([](da& a) { a.out = typed(a.out, CQSA_DTYPE_I8); }), CQSA_ERROR_DTYPE, "args->out is i8, wanted f32, f16 or bf16");
  expect(decode([](da& a) { a.out = shaped(a.out, {2, 3, 100}); }), CQSA_ERROR_SHAPE, "args->out has shape [2, 3, 100], wanted [2, 3, 200]");
  expect(decode([](da& a) { a.block[1] = 64; }), CQSA_ERROR_SHAPE, "args->scale_inv has shape [6, 2], wanted [6, 4] (block rows, block columns)");
  expect(decode([](da& a) { a.block[0] = 2; }), CQSA_ERROR_INVALID_ARGUMENT, "args->block is {2, 128}, wanted");
  expect(decode([](da& a) { a.reserved = 2; }), CQSA_ERROR_UNKNOWN_FLAG, "args->reserved is 2, wanted 0");
  expect(decode([](da& a) { a.out = changed(a.out, [&](cqsa_tensor& t) { t.data = a.codes->data; }); }), CQSA_ERROR_OVERLAP, "args->out overlaps args->codes");

  array bytes(CQSA_DTYPE_E4M3FN, {3, 5}), turned(CQSA_DTYPE_E4M3FN, {5, 3});
  const auto turn = [&](const cqsa_tensor* a, const cqsa_tensor* b) { return cqsa_fp8_transpose(cpu_context(), a, b, nullptr); };
  expect(turn(bytes.tensor(), turned.tensor()), CQSA_OK, "");
  expect(turn(bytes.tensor(), bytes.tensor()), CQSA_ERROR_SHAPE, "out has shape [3, 5], wanted [5, 3] (cols of x, rows of x)");
  expect(turn(c.x.tensor(), turned.tensor()), CQSA_ERROR_SHAPE, "x has 3 axes, wanted 2");
  expect(turn(typed(bytes.tensor(), CQSA_DTYPE_F16), turned.tensor()), CQSA_ERROR_DTYPE, "x is f16, wanted a type of one byte");
  expect(turn(bytes.tensor(), typed(turned.tensor(), CQSA_DTYPE_U8)), CQSA_ERROR_DTYPE, "out is u8, wanted e4m3fn");
  expect(turn(bytes.tensor(), nullptr), CQSA_ERROR_NULL_POINTER, "out is NULL");
}

TEST_CASE("fp8 calls: what gemm refuses", "[fp8]") {
  array a(CQSA_DTYPE_E4M3FN, {2, 5, 130}), b(CQSA_DTYPE_E5M2, {7, 130}), d(CQSA_DTYPE_BF16, {2, 5, 7}), c(CQSA_DTYPE_F32, {2, 5, 7}), bias(CQSA_DTYPE_F16, {7});
  array sa(CQSA_DTYPE_F32, {2, 5, 2}), sb(CQSA_DTYPE_F32, {1, 1, 2}), one(CQSA_DTYPE_F32, {1}), amax(CQSA_DTYPE_F32, {});
  for (array* x : {&a, &b, &c, &bias, &sa, &sb, &one})
    for (int64_t i = 0; i < x->count(); ++i) x->set(i, 1);
  cqsa_fp8_gemm_args good = CQSA_FP8_GEMM_ARGS_INIT;
  good.a = a.tensor(), good.b = b.tensor(), good.d = d.tensor(), good.c = c.tensor(), good.beta = 1, good.bias = bias.tensor();
  good.scale_inv_a = sa.tensor(), good.scale_inv_b = sb.tensor(), good.d_amax = amax.tensor();
  good.block_a[0] = 1, good.block_a[1] = 128, good.block_b[0] = good.block_b[1] = 128;
  REQUIRE(cqsa_fp8_gemm(cpu_context(), &good, nullptr) == CQSA_OK);
  CHECK(d.get(0) == 132);
  using ga = cqsa_fp8_gemm_args;
  const auto refuse = [&](const std::function<void(ga&)>& spoil, cqsa_status wanted, const char* text) {
    ga mine = good;
    spoil(mine);
    const std::vector<char> before = d.memory();
    const cqsa_status status = cqsa_fp8_gemm(cpu_context(), &mine, nullptr);
    INFO(said());
    CHECK((status == wanted && said().find(text) == 0));
    CHECK(d.memory() == before);
  };
  refuse([](ga& x) { x.a = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->a is NULL");
  refuse([](ga& x) { x.b = shaped(x.b, {7, 129}); }, CQSA_ERROR_SHAPE,
         "args->b has shape [7, 129], wanted k = 130 along its last axis, as args->a of shape [2, 5, 130]");
  refuse([](ga& x) { x.a = typed(x.a, CQSA_DTYPE_U8); }, CQSA_ERROR_DTYPE, "args->a is u8, wanted e4m3fn");
  refuse([](ga& x) { x.d = shaped(x.d, {2, 7, 5}); }, CQSA_ERROR_SHAPE, "args->d has shape [2, 7, 5], wanted [2, 5, 7] (batch, m, n)");
  refuse([](ga& x) { x.d = shaped(x.d, {5, 7}); }, CQSA_ERROR_SHAPE, "args->d has shape [5, 7], wanted [2, 5, 7] (batch, m, n)");
  refuse([](ga& x) { x.d = shaped(x.d, {1, 5, 7}), x.c = shaped(x.c, {1, 5, 7}); }, CQSA_ERROR_SHAPE,
         "args->a has shape [2, 5, 130], wanted a batch of 1 as args->d, or of 1");
  refuse([](ga& x) { x.d = typed(x.d, CQSA_DTYPE_I8); }, CQSA_ERROR_DTYPE, "args->d is i8, wanted f32, f16, bf16 or a format");
  refuse([](ga& x) { x.beta = 0; }, CQSA_ERROR_INVALID_ARGUMENT, "args->c is given, but args->beta is 0: wanted NULL");
  refuse([](ga& x) { x.c = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->c is NULL, but args->beta is 1");
  refuse([](ga& x) { x.c = shaped(x.c, {1, 5, 7}); }, CQSA_ERROR_SHAPE, "args->c has shape [1, 5, 7], wanted [2, 5, 7]");
  refuse([](ga& x) { x.alpha = NAN; }, CQSA_ERROR_INVALID_ARGUMENT, "args->alpha is nan, wanted");
  refuse([](ga& x) { x.beta = 1e300; }, CQSA_ERROR_INVALID_ARGUMENT, "args->beta is 1e+300, wanted");
  refuse([](ga& x) { x.bias = shaped(x.bias, {5}); }, CQSA_ERROR_SHAPE, "args->bias has shape [5], wanted [7] (n)");
  refuse([](ga& x) { x.block_a[0] = 128; }, CQSA_ERROR_INVALID_ARGUMENT, "args->block_a is {128, 128}, wanted {0, 0}, {1, 0} or {1, 128}");
  refuse([](ga& x) { x.block_b[1] = 64; }, CQSA_ERROR_INVALID_ARGUMENT, "args->block_b is {128, 64}, wanted {0, 0}, {1, 0}, {1, 128} or {128, 128}");
  refuse([](ga& x) { x.scale_inv_a = shaped(x.scale_inv_a, {2, 2, 5}); }, CQSA_ERROR_SHAPE,
         "args->scale_inv_a has shape [2, 2, 5], wanted [2, 5, 2] (batch or 1, block rows, block columns)");
  refuse([](ga& x) { x.scale_inv_b = typed(x.scale_inv_b, CQSA_DTYPE_I32); }, CQSA_ERROR_DTYPE, "args->scale_inv_b is i32, wanted f32");
  refuse([&](ga& x) { x.d_scale = one.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT, "args->d_scale is given, but args->d is bf16, which has no scale: wanted NULL");
  for (const double bad : {0.0, -1.0, HUGE_VAL, std::nan("")}) {
    array codes(CQSA_DTYPE_E4M3FN, {2, 5, 7});
    one.set(0, bad);
    refuse([&](ga& x) { x.d = codes.tensor(), x.d_scale = one.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT, "args->d_scale is ");
  }
  refuse([](ga& x) { x.accumulate = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->accumulate is 2, wanted");
  refuse([](ga& x) { x.provider = 3; }, CQSA_ERROR_UNKNOWN_FLAG, "args->provider is 3, wanted");
  refuse([](ga& x) { x.provider = CQSA_FP8_PROVIDER_VENDOR; }, CQSA_ERROR_UNSUPPORTED,
         "no implementation of backend cpu that args->provider, CQSA_FP8_PROVIDER_VENDOR, admits takes this product");
  refuse([](ga& x) { x.d = changed(x.d, [&](cqsa_tensor& t) { t.data = x.a->data; }); }, CQSA_ERROR_OVERLAP, "args->d overlaps args->a");
  refuse([](ga& x) { x.d = changed(x.d, [&](cqsa_tensor& t) { t.data = x.c->data; }); }, CQSA_ERROR_OVERLAP, "args->d overlaps args->c");
  char text[300];
  uint64_t length = 0;
  CHECK(cqsa_fp8_gemm_explain(cpu_context(), &good, text, sizeof text, &length) == CQSA_OK);
  CHECK((std::string(text).find("impl=cpu") == 0 && length == std::strlen(text)));
}
