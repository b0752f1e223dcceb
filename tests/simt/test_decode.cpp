// SPDX-License-Identifier: Apache-2.0
// The decode kernels of sm_80 with their host part against the fp64 reference: random problems, the rules one by one, and proof
// that the tests bite.
#include "backends/cuda/sm80/decode_leaf.h"
#include "backends/cuda/tuned.h"
#include "apart.h"
#include "simt_leaf.h"
#include "tests/random_count.h"

#include <functional>
#include <thread>
#include <vector>

using namespace cqsa::simt;
using cqsa::gpu::sm80_decode;

namespace {

constexpr int32_t shared_bytes = 227 * 1024;

cqsa_attention_leaf decode_leaf(const problem& p, const tensor& out, const tensor& lse) {
  cqsa_attention_leaf x = device_leaf(p, out, lse);
  if (x.chip.tier == 0) x.chip = {80, 4, shared_bytes, 0};
  return x;
}

// Runs with a workspace of exactly the bytes asked for, full of NaN, between two guards. `splits`: instead of the leaf's own number.
cqsa_status launch_decode(cqsa::simt::device& device, const cqsa_attention_leaf& leaf, int splits) {
  auto cut = cqsa::gpu::decode::cut_of(leaf);
  uint64_t bytes = sm80_decode.workspace(&leaf, 1);
  if (splits > 0) {
    cut.splits = splits;
    bytes = 64 + uint64_t(splits) * uint64_t(leaf.batch * leaf.num_heads * leaf.seqlen_q) * uint64_t(leaf.head_dim_v + 2) * 4 + 3 * 64;
  }
  const uint64_t guard = 256;
  std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::aligned_alloc(64, size_t((bytes + 2 * guard + 63) / 64 * 64))),
                                                std::free);
  std::memset(memory.get(), 0xff, bytes + 2 * guard);
  std::memset(memory.get(), 0x5a, guard);
  std::memset(memory.get() + guard + bytes, 0x5a, guard);
  const cqsa_status status = splits > 0 ? cqsa::gpu::decode::launch_cut(&device, leaf, cut, memory.get() + guard, bytes, nullptr)
                                        : sm80_decode.launch(&device, &leaf, memory.get() + guard, bytes, nullptr, nullptr);
  for (uint64_t i = 0; i < guard; ++i)
    if (memory.get()[i] != 0x5a || memory.get()[guard + bytes + i] != 0x5a) FAIL("wrote outside the workspace");
  return status;
}

// Twice what rounding p to q's type explains; codes are multiplied with p in two parts.
double tolerance_of(const problem& p) {
  const bool narrow = bytes_of(p.v.view.dtype) == 1;
  return 1e-4 + largest_value(p) * (narrow ? 1e-4 : 2 * rounding(p.q.view.dtype));
}

std::string decode_mistake(problem& p, uint64_t seed, int splits = 0) {
  cqsa::simt::device device = device_with(32, seed);
  guarded out(p.out), lse(p.lse);
  const cqsa_attention_leaf leaf = decode_leaf(p, p.out, p.lse);
  device.facts.shared_bytes = leaf.chip.shared_bytes;
  char reason[256] = "";
  if (sm80_decode.probe(&leaf, reason, sizeof reason) != CQSA_OK) return std::string("declined: ") + reason;
  if (launch_decode(device, leaf, splits) != CQSA_OK) return last_error();
  const std::string a = differs(p.out, p.exact_out, tolerance_of(p)), b = differs(p.lse, p.exact_lse, 2e-4);
  if (!a.empty()) return "out " + a;
  if (!b.empty()) return "lse " + b;
  return out.intact() && lse.intact() ? "" : "wrote beside an output";
}

void check_decode(problem& p, int splits = 0, uint64_t seed = 1) {
  run_reference(p);
  const std::string text = decode_mistake(p, seed, splits);
  if (!text.empty()) FAIL(text);
}

// ---- random problems

void decode_sizes(dice& d, problem& p) {
  cqsa_attention_leaf& x = p.leaf;
  x.num_kv_heads = 1 + d.upto(1);
  x.num_heads = x.num_kv_heads * d.pick({1, 2, 4, 5, 8, 12});
  x.batch = 1 + d.upto(2);
  x.head_dim = d.pick({16, 33, 40, 64, 64, 96, 128, 128}), x.head_dim_v = d.once_in(2) ? x.head_dim : d.pick({8, 13, 32, 64, 80, 128});
  if (d.once_in(8)) x.head_dim = d.pick({192, 256, 256, 136}), x.head_dim_v = d.pick({128, 256, 200});
  const int64_t most = std::min<int64_t>(16, 64 / (x.num_heads / x.num_kv_heads));
  x.seqlen_q = d.once_in(2) ? 1 : 1 + d.upto(most - 1);
  x.seqlen_k = d.once_in(20) ? 0 : d.upto(d.once_in(3) ? 700 : 150);
  x.softmax_scale = 1.0 / std::sqrt(double(x.head_dim));
  x.window_left = x.window_right = -1;
  x.q.dtype = d.pick({CQSA_DTYPE_F16, CQSA_DTYPE_F16, CQSA_DTYPE_BF16});
  const int32_t shared = d.pick({shared_bytes, shared_bytes, 163 * 1024, 99 * 1024});
  x.chip = {80, int32_t(1 + d.upto(7)), x.head_dim > 128 ? shared_bytes : shared, 0};
}

void decode_pages(dice& d, problem& p) {
  cqsa_attention_leaf& x = p.leaf;
  x.page_size = d.pick({1, 3, 16, 16, 64});
  const int64_t each = (x.seqlen_k + x.page_size - 1) / x.page_size, pool = x.batch * each + 1;
  for (int64_t i = 0; i < x.batch * each + 1; ++i) p.pages.push_back(d.once_in(8) ? -1 : int32_t(d.upto(pool - 1)));
  x.page_table_stride[0] = each, x.page_table_stride[1] = 1;
  random_kv_types(d, p, pool, x.page_size);
}

problem decode_problem(uint32_t seed) {
  dice d(seed);
  problem p;
  cqsa_attention_leaf& x = p.leaf;
  decode_sizes(d, p);
  bool paged = false;
  random_lengths(d, p, &paged);
  const bool varlen = !p.cu_q.empty() || !p.cu_q64.empty();
  const int64_t items = varlen ? 1 : x.batch;
  p.q = tensor(x.q.dtype, {items, x.num_heads, p.total_q, x.head_dim}, layout(d.upto(num_layouts - 1)));
  p.q.fill([&](auto...) { return d.normal(); });
  if (paged) decode_pages(d, p);
  else random_kv_types(d, p, items, p.total_k);
  random_extras(d, p);
  p.mask = {}, p.bias = {};
  p.out = tensor(d.pick({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {items, x.num_heads, p.total_q, x.head_dim_v},
                 layout(d.upto(num_layouts - 1)));
  p.lse = tensor(CQSA_DTYPE_F32, {items, x.num_heads, p.total_q, 1});
  p.exact_out = tensor(CQSA_DTYPE_F64, {items, x.num_heads, p.total_q, x.head_dim_v});
  p.exact_lse = tensor(CQSA_DTYPE_F64, {items, x.num_heads, p.total_q, 1});
  return p;
}

// ---- the rules

problem step(cqsa_dtype type, int64_t heads, int64_t queries, int64_t keys, int64_t dim) {
  return plain(1, heads, 1, queries, keys, dim, dim, type, 3);
}

// Bits of one row of out.
std::vector<double> row_of(const problem& p, int64_t b, int64_t h, int64_t r) {
  std::vector<double> x;
  for (int64_t c = 0; c < p.out.shape[3]; ++c) x.push_back(p.out.read(b, h, r, c));
  return x;
}

void run_decode(problem& p, int splits = 0) {
  cqsa::simt::device device = device_with(32, 5);
  const cqsa_attention_leaf leaf = decode_leaf(p, p.out, p.lse);
  device.facts.shared_bytes = leaf.chip.shared_bytes;
  REQUIRE(launch_decode(device, leaf, splits) == CQSA_OK);
}

void codes(problem& p, cqsa_dtype type, int32_t kind) {
  cqsa_attention_leaf& x = p.leaf;
  dice d(9);
  const int64_t n = x.head_dim, rows = x.seqlen_k;
  p.k = tensor(type, {x.batch, x.num_kv_heads, rows, n}), p.v = tensor(type, {x.batch, x.num_kv_heads, rows, n});
  const auto draw = [&](auto...) { return type == CQSA_DTYPE_I8 ? double(d.upto(255) - 128) : d.normal(); };
  p.k.fill(draw), p.v.fill(draw);
  x.scale_k = x.scale_v = kind, x.kv_group = 32;
  for (tensor* scale : {&p.k_scale, &p.v_scale}) {
    *scale = kind == CQSA_SCALE_GROUP ? tensor(CQSA_DTYPE_F16, {x.batch, x.num_kv_heads, rows, n / 32})
                                      : tensor(CQSA_DTYPE_F32, {x.batch, x.num_kv_heads, rows, 1});
    scale->fill([&](auto...) { return (0.5 + double(d.upto(10)) / 10) * (type == CQSA_DTYPE_I8 ? 0.01 : 1); });
  }
}

// ---- what must be noticed

using check_function = std::function<std::string(uint64_t seed)>;

check_function whole(problem p, int splits) {
  auto shared = std::make_shared<problem>(std::move(p));
  run_reference(*shared);
  return [shared, splits](uint64_t seed) { return decode_mistake(*shared, seed, splits); };
}

std::vector<check_function> small_decodes() {
  std::vector<check_function> all;
  problem causal = step(CQSA_DTYPE_F16, 4, 3, 500, 64);
  causal.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT, causal.leaf.chip = {80, 4, 99 * 1024, 0};
  all.push_back(whole(std::move(causal), 1));
  problem many = step(CQSA_DTYPE_BF16, 5, 12, 300, 64);
  many.leaf.causal = CQSA_CAUSAL_TOP_LEFT;
  all.push_back(whole(std::move(many), 2));
  problem two = step(CQSA_DTYPE_F16, 6, 5, 200, 33);  // rows of any length, element by element
  all.push_back(whole(std::move(two), 1));
  problem wide = step(CQSA_DTYPE_F16, 3, 2, 250, 256);
  all.push_back(whole(std::move(wide), 1));
  problem bytes = step(CQSA_DTYPE_F16, 4, 2, 700, 64);
  codes(bytes, CQSA_DTYPE_I8, CQSA_SCALE_GROUP);
  bytes.leaf.chip = {80, 4, 70 * 1024, 0};
  all.push_back(whole(std::move(bytes), 1));
  problem few = step(CQSA_DTYPE_F16, 4, 2, 3, 64);  // every weight counts
  codes(few, CQSA_DTYPE_I8, CQSA_SCALE_GROUP);
  all.push_back(whole(std::move(few), 1));
  problem code = step(CQSA_DTYPE_F16, 4, 4, 130, 64);
  codes(code, CQSA_DTYPE_E4M3FN, CQSA_SCALE_TOKEN);
  code.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  code.v.write(0, 0, 127, 7, nan64);
  all.push_back(whole(std::move(code), 1));
  problem nan = step(CQSA_DTYPE_F16, 2, 4, 130, 16);
  nan.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  for (int64_t c = 0; c < 16; ++c) nan.v.write(0, 0, 127, c, nan64), nan.k.write(0, 0, 127, c, nan64);
  all.push_back(whole(std::move(nan), 1));
  problem paged = step(CQSA_DTYPE_F16, 2, 1, 512, 64);
  paged.leaf.page_size = 16, paged.leaf.page_table_stride[0] = 32, paged.leaf.page_table_stride[1] = 1;
  dice d(4);
  paged.k = tensor(CQSA_DTYPE_F16, {40, 1, 16, 64}), paged.v = tensor(CQSA_DTYPE_F16, {40, 1, 16, 64});
  paged.k.fill([&](auto...) { return d.normal(); }), paged.v.fill([&](auto...) { return d.normal(); });
  for (int i = 0; i < 32; ++i) paged.pages.push_back(i % 7 == 3 ? -1 : int32_t(d.upto(39)));
  paged.used = {509};
  all.push_back(whole(std::move(paged), 2));
  return all;
}

bool any_fails(const std::vector<check_function>& checks) {
  for (uint64_t seed = 1; seed <= 5; ++seed)
    for (const check_function& check : checks)
      if (!check(seed).empty()) return true;
  return false;
}

}  // namespace

TEST_CASE("simt decode: random problems") {
  const char* text = std::getenv("CQSA_SEED");
  const uint32_t first = text ? uint32_t(std::atoi(text)) : 1;
  for (uint32_t seed = first; seed < first + cqsa::test::random_count(120, 4); ++seed) {
    INFO("seed " << seed);
    problem p = decode_problem(seed);
    check_decode(p, seed % 3 ? 0 : int(1 + seed % 7), seed);
  }
}

TEST_CASE("simt decode: every type of codes, every kind of scale") {
  for (const cqsa_dtype query : {CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
    for (const cqsa_dtype type : {CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2})
      for (const int64_t dim : {64, 128, 256}) {
        INFO(query << " " << type << " " << dim);
        problem p = step(query, 4, 2, 200, dim);
        codes(p, type, type == CQSA_DTYPE_I8 ? CQSA_SCALE_GROUP : CQSA_SCALE_TOKEN);
        check_decode(p, 2);
      }
}

TEST_CASE("simt decode: every code has its value") {
  for (const cqsa_dtype query : {CQSA_DTYPE_F16, CQSA_DTYPE_BF16})
    for (const cqsa_dtype type : {CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2})
      for (const bool in_k : {true, false}) {
        // Codes of k meet queries that pick one channel; codes of v are all of what one key gives.
        problem p = step(query, 2, 1, 256, 64);
        codes(p, type, CQSA_SCALE_TENSOR);
        p.k_scale = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1}), p.v_scale = tensor(CQSA_DTYPE_F32, {1, 1, 1, 1});
        p.k_scale.fill([&](auto...) { return type == CQSA_DTYPE_E5M2 ? 1e-3 : 0.01; }), p.v_scale.fill([](auto...) { return 1e-5; });
        const auto code = [&](tensor& t, int64_t row, int64_t c, int x) {
          const bool finite = type == CQSA_DTYPE_I8 || (type == CQSA_DTYPE_E4M3FN ? (x & 0x7f) != 0x7f : (x & 0x7f) < 0x7c);
          *t.at(0, 0, row, c) = char(finite ? x : 0);
        };
        p.q.fill([](int64_t, int64_t, int64_t, int64_t c) { return c == 7 ? 1.0 : 0.0; });
        for (int x = 0; x < 256; ++x)
          for (int64_t c = 0; c < 64; ++c) code(in_k ? p.k : p.v, x, c, int(x + c) & 255);
        INFO(query << " " << type << " " << in_k);
        check_decode(p, 1);
      }
}

TEST_CASE("simt decode: NaN and Inf that nobody sees change nothing") {
  for (const cqsa_dtype type : {CQSA_DTYPE_F16, CQSA_DTYPE_BF16, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_I8}) {
    const bool narrow = bytes_of(type) == 1;
    problem p = step(narrow ? CQSA_DTYPE_F16 : type, 3, 5, 140, 64);
    if (narrow) codes(p, type, type == CQSA_DTYPE_I8 ? CQSA_SCALE_GROUP : CQSA_SCALE_TOKEN);
    p.leaf.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    for (int64_t r = 137; r < 140; ++r)
      for (int64_t c = 0; c < 64; ++c) {
        if (type != CQSA_DTYPE_I8) p.k.write(0, 0, r, c, c % 2 ? nan64 : inf), p.v.write(0, 0, r, c, r % 2 ? nan64 : -inf);
        if (narrow) p.v_scale.write(0, 0, r, 0, nan64), p.k_scale.write(0, 0, r, 0, nan64);
      }
    INFO(type);
    check_decode(p, 1);
    check_decode(p, 2);
  }
}

TEST_CASE("simt decode: an odd number of scales of 32 channels, over more stages than there are tables") {
  for (const int64_t dim : {32, 96, 160}) {
    problem p = step(CQSA_DTYPE_F16, 4, 1, 900, dim);
    codes(p, CQSA_DTYPE_I8, CQSA_SCALE_GROUP);
    INFO(dim);
    check_decode(p, 1);
  }
}

TEST_CASE("simt decode: a query of NaN spoils only itself") {
  problem p = step(CQSA_DTYPE_F16, 4, 2, 100, 64);
  p.q.write(0, 2, 1, 5, nan64);
  for (const int splits : {1, 2}) check_decode(p, splits);
}

TEST_CASE("simt decode: what is declined") {
  const auto reason_of = [](const std::function<void(cqsa_attention_leaf&)>& change) {
    problem p = step(CQSA_DTYPE_F16, 4, 2, 100, 64);
    cqsa_attention_leaf leaf = decode_leaf(p, p.out, p.lse);
    change(leaf);
    char reason[256] = "";
    return sm80_decode.probe(&leaf, reason, sizeof reason) == CQSA_OK ? std::string() : std::string(reason);
  };
  CHECK(reason_of([](auto&) {}) == "");
  CHECK(reason_of([](auto& x) { x.chip.tier = 75; }) == "the device has no sm_80 code");
  CHECK(reason_of([](auto& x) { x.chip.tier = 90; }) == "");
  CHECK(reason_of([](auto& x) { x.q.dtype = CQSA_DTYPE_F32; }) == "q must be f16 or bf16");
  CHECK(reason_of([](auto& x) { x.k.dtype = CQSA_DTYPE_BF16; }).find("both") != std::string::npos);
  CHECK(reason_of([](auto& x) { x.seqlen_q = 17; }).find("seqlen_q must be 1..16") == 0);
  CHECK(reason_of([](auto& x) { x.seqlen_q = 0; }).find("seqlen_q must be 1..16") == 0);
  CHECK(reason_of([](auto& x) { x.num_heads = 33; }).find("seqlen_q must be 1..16") == 0);
  CHECK(reason_of([](auto& x) { x.num_heads = 32; }) == "");
  CHECK(reason_of([](auto& x) { x.head_dim = 264; }) == "head_dim and head_dim_v are at most 256");
  CHECK(reason_of([](auto& x) { x.mask.data = &x; }) == "there is a mask or a bias");
  CHECK(reason_of([](auto& x) { x.batch_invariant = 1; }) == "bits are to be the same in any batch");
  CHECK(reason_of([](auto& x) { x.flags = CQSA_LEAF_STATE_IN; }) == "a state goes from call to call");
  CHECK(reason_of([](auto& x) { x.seqlen_k = INT64_MAX; }) == "seqlen_k is below 2^31");
  CHECK(reason_of([](auto& x) { x.precision = CQSA_PRECISION_F32; }) == "probabilities are rounded to q's type");
  CHECK(reason_of([](auto& x) { x.head_dim = 256, x.chip.shared_bytes = 99 * 1024; }) == "a block has too little shared memory");
}

TEST_CASE("simt decode: how keys are split") {
  using cqsa::gpu::decode::splits_for;
  CHECK(splits_for(1, 264, 1) == 1);         // nothing to split
  CHECK(splits_for(100000, 264, 512) == 1);  // enough blocks without
  CHECK(splits_for(8, 264, 512) > 16);       // one sequence: most of the device
  CHECK(splits_for(8, 264, 512) <= 128);
  CHECK(splits_for(133, 132, 512) > 1);      // one block more than there is room for
}

// More questions than are kept, twice and in another order, get the same answers, also from another thread.
TEST_CASE("simt decode: how keys are split is the same when it is asked again") {
  using cqsa::gpu::decode::splits_for;
  std::vector<int32_t> first, again;
  for (int64_t stages = 8; stages <= 512; stages *= 2) first.push_back(splits_for(8, 264, stages));
  for (int64_t stages = 512; stages >= 8; stages /= 2) again.insert(again.begin(), splits_for(8, 264, stages));
  CHECK(first == again);
  std::thread([&] {
    again.clear();
    for (int64_t stages = 8; stages <= 512; stages *= 2) again.push_back(splits_for(8, 264, stages));
  }).join();
  CHECK(first == again);
  CHECK(splits_for(16, 264, 512) != splits_for(8, 264, 512));
}

TEST_CASE("simt decode: too little workspace is refused, rectangles go to the portable kernel") {
  problem p = step(CQSA_DTYPE_F16, 4, 1, 3000, 64);
  cqsa::simt::device device = device_with(32, 1);
  cqsa_attention_leaf leaf = decode_leaf(p, p.out, p.lse);
  device.facts.shared_bytes = leaf.chip.shared_bytes;
  const uint64_t bytes = sm80_decode.workspace(&leaf, 1);
  REQUIRE(bytes > 0);
  std::vector<char> memory(bytes + 64);
  guarded out(p.out);
  CHECK(sm80_decode.launch(&device, &leaf, memory.data(), bytes - 1, nullptr, nullptr) == CQSA_ERROR_WORKSPACE);
  CHECK(device.launches == 0);
  run_reference(p);
  const cqsa_rect rects[] = {{0, 0, 1, 3000, 0, 0, 0}};
  leaf.rects = rects, leaf.num_rects = 1;
  REQUIRE(sm80_decode.workspace(&leaf, 1) == 0);
  REQUIRE(sm80_decode.launch(&device, &leaf, nullptr, 0, nullptr, nullptr) == CQSA_OK);
  CHECK(differs(p.out, p.exact_out, 2e-5) == "");
}

TEST_CASE("simt decode: every mutant and every meeting place is noticed") {
  const std::vector<check_function> checks = small_decodes();
  for (size_t i = 0; i < checks.size(); ++i) {
    INFO("check " << i);
    REQUIRE(checks[i](1) == "");
  }
  for (int mutant = 1; mutant <= 6; ++mutant) {
    INFO("CQSA_MUTANT(" << mutant << ")");
    cqsa_simt_mutant = mutant;
    CHECK(fails_apart([&] { return any_fails(checks); }));
    cqsa_simt_mutant = 0;
  }
  record_sites(true);
  REQUIRE_FALSE(any_fails(checks));
  const std::vector<call_site> sites = recorded_sites();
  record_sites(false);
  CHECK(sites.size() > 20);
  for (const call_site& site : sites) {
    if (site.file.find("decode") == std::string::npos) continue;
    leave_out(&site);
    INFO(site.what << " at " << site.file << ":" << site.line);
    CHECK(fails_apart([&] { return any_fails(checks); }));
    leave_out(nullptr);
  }
}
