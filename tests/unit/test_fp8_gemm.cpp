// SPDX-License-Identifier: Apache-2.0
// cqsa_fp8_gemm on the CPU backend against sums in fp64.
#include "context.h"
#include "fp8_oracle.h"

using namespace fp8_test;

namespace {

cqsa_context* cpu_context() {
  static cqsa_context* made = [] {
    cqsa_context* context = nullptr;
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "cpu", params.num_threads = 2;
    REQUIRE(cqsa_context_create(&params, &context) == CQSA_OK);
    return context;
  }();
  return made;
}

struct factor {
  box codes, scale_inv;
  int64_t block[2] = {0, 0};
  bool batched = false;  // has a batch axis of its own

  double value(int64_t b, int64_t i, int64_t k, int64_t rows, int64_t depth) const {
    const int64_t mine = batched ? b : 0;
    const double code = codes.get((mine * rows + i) * depth + k);
    if (!scale_inv.there()) return code;
    const int64_t r = blocks(rows, block[0]), c = blocks(depth, block[1]);
    const int64_t at = (block[0] ? i / block[0] : 0) * c + (block[1] ? k / block[1] : 0);
    return code * scale_inv.get((scale_inv.count() > r * c ? b * r * c : 0) + at);
  }
};

struct product {
  int64_t batch = 1, m = 1, n = 1, k = 1;
  bool three = false;
  factor a, b;
  box c, bias, d, d_scale, d_amax;
  cqsa_fp8_gemm_args args = CQSA_FP8_GEMM_ARGS_INIT;

  const cqsa_fp8_gemm_args& bound() {
    args.a = a.codes.tensor(), args.b = b.codes.tensor(), args.scale_inv_a = a.scale_inv.tensor(), args.scale_inv_b = b.scale_inv.tensor();
    std::copy_n(a.block, 2, args.block_a), std::copy_n(b.block, 2, args.block_b);
    args.c = c.tensor(), args.bias = bias.tensor(), args.d = d.tensor(), args.d_scale = d_scale.tensor(), args.d_amax = d_amax.tensor();
    return args;
  }
  // The exact result, and what its error is measured by.
  double exact(int64_t q, int64_t i, int64_t j, double& size) const {
    double sum = 0;
    size = 0;
    for (int64_t x = 0; x < k; ++x) {
      const double term = a.value(q, i, x, m, k) * b.value(q, j, x, n, k);
      sum += term, size += std::fabs(term);
    }
    const double alpha = args.alpha == 0 ? 1 : args.alpha, old = c.there() ? args.beta * c.get((q * m + i) * n + j) : 0;
    size = std::fabs(alpha) * size + std::fabs(old) + (bias.there() ? std::fabs(bias.get(j)) : 0);
    return alpha * sum + old + (bias.there() ? bias.get(j) : 0);
  }
};

void draw_factor(dice& d, factor& f, int64_t rows, const product& p, bool squares) {
  f.batched = p.three && chance(d, 70);
  std::vector<int64_t> shape = {rows, p.k};
  if (p.three && (f.batched || chance(d, 50))) shape.insert(shape.begin(), f.batched ? p.batch : 1);
  f.batched = f.batched && p.batch != 1;
  f.codes = box(formats[between(d, 0, 3)], shape, d);
  for (int64_t n = 0; n < f.codes.count(); ++n) f.codes.set(n, draw_value(d, 0, 4));
  const int64_t choices[][2] = {{0, 0}, {1, 0}, {1, 128}, {128, 128}};
  std::copy_n(choices[between(d, 0, squares ? 3 : 2)], 2, f.block);
  if (chance(d, 15)) return;
  shape = {blocks(rows, f.block[0]), blocks(p.k, f.block[1])};
  if (p.three) shape.insert(shape.begin(), chance(d, 50) ? p.batch : 1);
  if (f.block[0] == 0 && chance(d, 50)) shape = {};
  f.scale_inv = box(CQSA_DTYPE_F32, shape, d);
  for (int64_t n = 0; n < f.scale_inv.count(); ++n) f.scale_inv.set(n, std::exp2(static_cast<double>(between(d, -5, 5))) * 1.1);
}

product random_product(uint64_t seed) {
  dice d(seed);
  product p;
  p.three = chance(d, 35);
  const auto size = [&](int64_t most) { return chance(d, 4) ? 0 : between(d, 1, most); };
  p.batch = p.three ? between(d, chance(d, 5) ? 0 : 1, 3) : 1, p.m = size(20), p.n = size(20), p.k = chance(d, 30) ? size(400) : size(40);
  draw_factor(d, p.a, p.m, p, false), draw_factor(d, p.b, p.n, p, true);
  std::vector<int64_t> shape = {p.m, p.n};
  if (p.three) shape.insert(shape.begin(), p.batch);
  const bool codes = chance(d, 25);
  p.d = box(codes ? formats[between(d, 0, 3)] : one_of(d, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), shape, d);
  const auto fill = [&](box& b, double most) {
    for (int64_t n = 0; n < b.count(); ++n) b.set(n, draw_value(d, 0, most));
    b.freeze();
  };
  if (chance(d, 30)) p.args.beta = 0.75, p.c = box(one_of(d, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), shape, d), fill(p.c, 3);
  if (chance(d, 30)) p.args.alpha = -0.3;
  if (chance(d, 40)) p.bias = box(one_of(d, {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}), {p.n}, d), fill(p.bias, 2);
  if (codes && chance(d, 60)) p.d_scale = box(CQSA_DTYPE_F32, {1}, d), p.d_scale.set(0, 0.03);
  if (chance(d, 40)) p.d_amax = box(CQSA_DTYPE_F32, {}, d);
  p.args.accumulate = static_cast<int32_t>(between(d, 0, 1));
  for (box* b : {&p.a.codes, &p.a.scale_inv, &p.b.codes, &p.b.scale_inv, &p.d_scale}) b->freeze();
  return p;
}

double ulp_of(cqsa_dtype t, double x) {
  const int bits = t == CQSA_DTYPE_F32 ? 24 : t == CQSA_DTYPE_F16 ? 11 : t == CQSA_DTYPE_BF16 ? 8 : t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E4M3FNUZ ? 4 : 3;
  const bool fnuz = t == CQSA_DTYPE_E4M3FNUZ || t == CQSA_DTYPE_E5M2FNUZ;
  const int least = t == CQSA_DTYPE_F16 ? -24 : bits == 4 ? -9 - fnuz : bits == 3 ? -16 - fnuz : -149;
  return std::max(std::ldexp(1.0, std::ilogb(std::max(std::fabs(x), 1e-300)) - bits + 1), std::ldexp(1.0, least));
}

std::string compare(product& p) {
  double amax = 0, size = 0, largest_size = 0;
  const bool codes = is_format(p.d.dtype);
  for (int64_t at = 0; at < p.batch * p.m * p.n; ++at) {
    double wanted = p.exact(at / (p.m * p.n), at / p.n % p.m, at % p.n, size);
    amax = std::max(amax, std::fabs(wanted)), largest_size = std::max(largest_size, size);
    if (codes) {
      const double by = p.d_scale.there() ? p.d_scale.get(0) : 1;
      wanted = std::clamp(wanted * by, -fp8_max(p.d.dtype), fp8_max(p.d.dtype)), size *= by;
    }
    const double got = p.d.get(at), allowed = 2e-6 * size + 0.51 * ulp_of(p.d.dtype, wanted);
    if (p.d.dtype == CQSA_DTYPE_F16 && std::fabs(wanted) > 65000) continue;
    if (!(std::fabs(got - wanted) <= allowed)) return "element " + std::to_string(at) + " is " + std::to_string(got) + " wanted " + std::to_string(wanted);
  }
  if (p.d_amax.there() && !(std::fabs(p.d_amax.get(0) - amax) <= 2e-6 * largest_size + 1e-6 * amax)) return "amax is " + std::to_string(p.d_amax.get(0)) + " wanted " + std::to_string(amax);
  for (box* b : {&p.a.codes, &p.b.codes, &p.a.scale_inv, &p.b.scale_inv, &p.c, &p.bias, &p.d_scale})
    if (!b->unchanged()) return "an input was written";
  return p.d.padding_is_whole() ? "" : "something beside d was written";
}

}  // namespace

TEST_CASE("fp8 gemm: random products", "[fp8]") {
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    product p = random_product(seed);
    const cqsa_status status = cqsa_fp8_gemm(cpu_context(), &p.bound(), nullptr);
    const std::string wrong = status == CQSA_OK ? compare(p) : cqsa_last_error();
    INFO("seed " << seed << ": " << wrong);
    REQUIRE(wrong.empty());
  }
}

TEST_CASE("fp8 gemm: into c itself, the same in every run, and with strides of 0", "[fp8]") {
  dice d(5);
  product p;
  p.three = true, p.batch = 3, p.m = 33, p.n = 47, p.k = 300;
  p.a.codes = box(CQSA_DTYPE_E4M3FN, {1, 33, 300}, d, how::compact), p.b.codes = box(CQSA_DTYPE_E5M2, {3, 47, 300}, d), p.b.batched = true;
  for (box* b : {&p.a.codes, &p.b.codes})
    for (int64_t n = 0; n < b->count(); ++n) b->set(n, draw_value(d, 0, 2));
  p.d = box(CQSA_DTYPE_F32, {3, 33, 47}, d);
  for (int64_t n = 0; n < p.d.count(); ++n) p.d.set(n, draw_value(d, 0, 2));
  for (box* b : {&p.a.codes, &p.b.codes, &p.d}) b->freeze();
  p.a.codes.shape[0] = 3, p.a.codes.strides[0] = 0;
  product in_place = p;
  in_place.args.beta = 2, in_place.bound(), in_place.args.c = in_place.args.d;
  REQUIRE(cqsa_fp8_gemm(cpu_context(), &in_place.args, nullptr) == CQSA_OK);
  p.args.beta = 2, p.c = p.d;
  REQUIRE(cqsa_fp8_gemm(cpu_context(), &p.bound(), nullptr) == CQSA_OK);
  CHECK(p.d.memory == in_place.d.memory);
  const std::string wrong = compare(p);
  INFO(wrong);
  CHECK(wrong.empty());
  for (int times = 0; times < 5; ++times) {
    box again = p.d;
    std::swap(again, p.d);
    REQUIRE(cqsa_fp8_gemm(cpu_context(), &p.bound(), nullptr) == CQSA_OK);
    CHECK(p.d.memory == again.memory);
  }
}

TEST_CASE("fp8 gemm: a long k keeps its accuracy", "[fp8]") {
  dice d(9);
  product p;
  p.m = 4, p.n = 5, p.k = 16384;
  p.a.codes = box(CQSA_DTYPE_E4M3FN, {4, 16384}, d, how::compact), p.b.codes = box(CQSA_DTYPE_E4M3FN, {5, 16384}, d, how::compact);
  for (box* b : {&p.a.codes, &p.b.codes})
    for (int64_t n = 0; n < b->count(); ++n) b->set(n, draw_value(d, 0, 2));
  p.d = box(CQSA_DTYPE_F32, {4, 5}, d);
  REQUIRE(cqsa_fp8_gemm(cpu_context(), &p.bound(), nullptr) == CQSA_OK);
  double errors = 0, all = 0, size = 0;
  for (int64_t at = 0; at < 20; ++at) {
    const double wanted = p.exact(0, at / 5, at % 5, size);
    errors += std::pow(p.d.get(at) - wanted, 2), all += wanted * wanted;
  }
  CHECK(std::sqrt(errors / all) <= 1.5e-4);
}

// A backend without FP8: every call says so, once its arguments are right.
TEST_CASE("fp8 on a backend that has none", "[fp8]") {
  cqsa_backend_v1 backend = *cqsa_cpu_backend();
  backend.name = "bare";
  backend.fp8_quantize_workspace = nullptr, backend.fp8_quantize = nullptr, backend.fp8_workspace_init = nullptr, backend.fp8_dequantize = nullptr;
  backend.fp8_scale = nullptr, backend.fp8_transpose = nullptr, backend.fp8_rings = nullptr, backend.fp8_gemm = nullptr, backend.num_fp8_gemm = 0;
  cqsa_context context;
  context.backend = &backend;
  dice d(1);
  box x(CQSA_DTYPE_F32, {2, 2}, d), out(CQSA_DTYPE_E4M3FN, {2, 2}, d), turned(CQSA_DTYPE_E4M3FN, {2, 2}, d), scale(CQSA_DTYPE_F32, {}, d), other(CQSA_DTYPE_F32, {}, d);
  const auto none = [](cqsa_status status, const char* what) {
    INFO(cqsa_last_error());
    CHECK((status == CQSA_ERROR_UNSUPPORTED && cqsa_last_error() == std::string("backend bare has no ") + what));
  };
  cqsa_fp8_quantize_args q = CQSA_FP8_QUANTIZE_ARGS_INIT;
  q.x = x.tensor(), q.row.out = out.tensor();
  const cqsa_fp8_quantize_args* const list[] = {&q};
  const int64_t block[2] = {0, 0};
  uint64_t bytes = 0;
  none(cqsa_fp8_quantize(&context, &q, nullptr), "fp8_quantize");
  none(cqsa_fp8_quantize_workspace(&context, list, 1, &bytes), "fp8_quantize");
  none(cqsa_fp8_amax(&context, x.tensor(), block, 0, scale.tensor(), nullptr, 0, nullptr), "fp8_amax");
  alignas(64) char memory[128] = {};
  none(cqsa_fp8_workspace_init(&context, memory, sizeof memory, nullptr), "fp8_workspace_init");
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  ring.hist_len = 4, ring.format = CQSA_DTYPE_E4M3FN, ring.state = memory, ring.bytes = sizeof memory;
  none(cqsa_fp8_ring_init(&context, &ring, 0, nullptr), "fp8_ring_init");
  cqsa_fp8_dequantize_args b = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
  b.codes = out.tensor(), b.scale_inv = scale.tensor(), b.out = x.tensor();
  none(cqsa_fp8_dequantize(&context, &b, nullptr), "fp8_dequantize");
  cqsa_fp8_scale_args s = CQSA_FP8_SCALE_ARGS_INIT;
  s.amax = scale.tensor(), s.scale = other.tensor(), s.format = CQSA_DTYPE_E4M3FN;
  none(cqsa_fp8_scale_from_amax(&context, &s, nullptr), "fp8_scale_from_amax");
  none(cqsa_fp8_scale_relayout(&context, scale.tensor(), 0, other.tensor(), 0, 1, 1, nullptr), "fp8_scale_relayout");
  none(cqsa_fp8_transpose(&context, out.tensor(), turned.tensor(), nullptr), "fp8_transpose");
  cqsa_fp8_gemm_args g = CQSA_FP8_GEMM_ARGS_INIT;
  g.a = g.b = out.tensor(), g.d = x.tensor();
  none(cqsa_fp8_gemm(&context, &g, nullptr), "fp8_gemm");
  none(cqsa_fp8_gemm_workspace(&context, &g, &bytes), "fp8_gemm");
  none(cqsa_fp8_gemm_explain(&context, &g, nullptr, 0, nullptr), "fp8_gemm");
  CHECK((x.unchanged() && out.unchanged() && turned.unchanged() && other.unchanged()));
}
