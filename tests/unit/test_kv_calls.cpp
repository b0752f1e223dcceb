// SPDX-License-Identifier: Apache-2.0
// cqsa_kv_append, cqsa_kv_gather and cqsa_hadamard as a program sees them: what is refused, with which sentence, and nothing is
// written then; what is left out; and how they are queued on a device.
#include "device_problem.h"

#include <functional>

using namespace device_test;

namespace {

// Rows, a pool of two pages of four rows, 80 channels in groups of 32.
struct cache {
  array x, pool, scale, table, cells;
  cqsa_kv_args args = CQSA_KV_ARGS_INIT;

  explicit cache(cqsa_dtype pool_type = CQSA_DTYPE_I8, cqsa_dtype x_type = CQSA_DTYPE_F16, int64_t dim = 80)
      : x(x_type, {5, 2, dim}), pool(pool_type, {2, 4, 2, pool_type == CQSA_DTYPE_U8 ? dim / 32 * 18 : dim}),
        table(CQSA_DTYPE_I32, {5, 3}), cells(CQSA_DTYPE_I64, {5}) {
    generator r(dim);
    fill_normal(r, x);
    const double ids[] = {1, 0, -1};
    for (int64_t i = 0; i < 15; ++i) table.set(i, ids[i % 3]);
    const double rows[] = {0, 6, -1, 9, 3};  // page 1 row 0; page 0 row 2; none; on page -1; page 1 row 3
    for (int64_t i = 0; i < 5; ++i) cells.set(i, rows[i]);
    if (pool_type == CQSA_DTYPE_I8) scale = array(CQSA_DTYPE_F16, {2, 4, 2, (dim + 31) / 32}), args.kv_group = 32;
    if (pool_type == CQSA_DTYPE_U8) args.format = CQSA_KV_FORMAT_Q4_0;
  }
  std::vector<array*> all() { return {&x, &pool, &scale, &table, &cells}; }
  const cqsa_kv_args& bound() {
    args.x = x.tensor(), args.pool = pool.tensor(), args.scale = scale.tensor();
    args.page_table = table.tensor(), args.cells = cells.tensor();
    return args;
  }
  void to_device() {
    for (array* a : all())
      if (a->there()) a->to_device();
  }
};

using change = std::function<void(cqsa_kv_args&)>;

struct refusal {
  const char* what;
  change spoil;
  cqsa_status status;
  const char* sentence;
};

// A copy of a tensor that lasts, with something about it changed.
const cqsa_tensor* changed(const cqsa_tensor* from, const std::function<void(cqsa_tensor&)>& how) {
  static std::vector<std::unique_ptr<cqsa_tensor>> kept;
  kept.push_back(std::make_unique<cqsa_tensor>(*from));
  how(*kept.back());
  return kept.back().get();
}

const cqsa_tensor* shaped(const cqsa_tensor* from, sizes shape) {
  static std::vector<std::unique_ptr<sizes>> kept;
  kept.push_back(std::make_unique<sizes>(std::move(shape)));
  sizes& mine = *kept.back();
  return changed(from, [&](cqsa_tensor& t) { t.shape = mine.data(), t.ndim = static_cast<int32_t>(mine.size()), t.strides = nullptr; });
}

const cqsa_tensor* typed(const cqsa_tensor* from, cqsa_dtype dtype) {
  return changed(from, [&](cqsa_tensor& t) { t.dtype = dtype; });
}

void check_refusals(cache& c, const std::vector<refusal>& list) {
  for (const refusal& r : list)
    for (const bool append : {true, false}) {
      cqsa_kv_args args = c.bound();
      r.spoil(args);
      std::vector<std::vector<char>> before;
      for (array* a : c.all()) before.push_back(a->memory());
      const cqsa_status status = append ? cqsa_kv_append(cpu_context(), &args, nullptr) : cqsa_kv_gather(cpu_context(), &args, nullptr);
      INFO(r.what << (append ? ", append: " : ", gather: ") << cqsa_last_error());
      CHECK(status == r.status);
      CHECK(std::string(cqsa_last_error()) == r.sentence);
      for (size_t i = 0; i < before.size(); ++i) CHECK(c.all()[i]->memory() == before[i]);
    }
}

}  // namespace

TEST_CASE("kv calls: what is refused, and how", "[kv]") {
  cache c;
  c.bound();
  check_refusals(c, {
      {"no x", [](cqsa_kv_args& a) { a.x = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->x is NULL"},
      {"no pool", [](cqsa_kv_args& a) { a.pool = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->pool is NULL"},
      {"no scale", [](cqsa_kv_args& a) { a.scale = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->scale is NULL"},
      {"no pages", [](cqsa_kv_args& a) { a.page_table = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->page_table is NULL"},
      {"no cells", [](cqsa_kv_args& a) { a.cells = nullptr; }, CQSA_ERROR_NULL_POINTER, "args->cells is NULL"},
      {"no data", [](cqsa_kv_args& a) { a.pool = changed(a.pool, [](cqsa_tensor& t) { t.data = nullptr; }); },
       CQSA_ERROR_NULL_POINTER, "args->pool->data is NULL, but its shape is [2, 4, 2, 80]"},
      {"format", [](cqsa_kv_args& a) { a.format = 2; }, CQSA_ERROR_UNKNOWN_FLAG, "args->format is 2, wanted one of CQSA_KV_FORMAT_*"},
      {"flags", [](cqsa_kv_args& a) { a.flags = 4; }, CQSA_ERROR_UNKNOWN_FLAG, "args->flags has the unknown bits 0x4"},
      {"group", [](cqsa_kv_args& a) { a.kv_group = 48; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->kv_group is 48, wanted 32, 64, 128, or 0 for 64"},
      {"another group", [](cqsa_kv_args& a) { a.kv_group = 0; }, CQSA_ERROR_SHAPE,
       "args->scale has shape [2, 4, 2, 3], wanted [2, 4, 2, 2] (num_pages, page_size, num_kv_heads, ceil(head_dim / kv_group))"},
      {"x axes", [](cqsa_kv_args& a) { a.x = shaped(a.x, {10, 80}); }, CQSA_ERROR_SHAPE, "args->x has 2 axes, wanted 3"},
      {"x type", [](cqsa_kv_args& a) { a.x = typed(a.x, CQSA_DTYPE_I8); }, CQSA_ERROR_DTYPE, "args->x is i8, wanted f32, f16 or bf16"},
      {"pool type", [](cqsa_kv_args& a) { a.pool = typed(a.pool, CQSA_DTYPE_E4M3FN); }, CQSA_ERROR_DTYPE,
       "args->pool is e4m3fn, wanted f32, f16, bf16 or i8 for CQSA_KV_FORMAT_ELEMENTS"},
      {"pool heads", [](cqsa_kv_args& a) { a.x = shaped(a.x, {5, 1, 160}); }, CQSA_ERROR_SHAPE,
       "args->pool has shape [2, 4, 2, 80], wanted [2, 4, 1, 160] (num_pages, page_size, num_kv_heads, head_dim)"},
      {"pool axes", [](cqsa_kv_args& a) { a.pool = shaped(a.pool, {8, 2, 80}); }, CQSA_ERROR_SHAPE, "args->pool has 3 axes, wanted 4"},
      {"scale type", [](cqsa_kv_args& a) { a.scale = typed(a.scale, CQSA_DTYPE_BF16); }, CQSA_ERROR_DTYPE,
       "args->scale is bf16, wanted f16"},
      {"table type", [](cqsa_kv_args& a) { a.page_table = typed(a.page_table, CQSA_DTYPE_F32); }, CQSA_ERROR_DTYPE,
       "args->page_table is f32, wanted i32"},
      {"table rows", [](cqsa_kv_args& a) { a.page_table = shaped(a.page_table, {3, 5}); }, CQSA_ERROR_SHAPE,
       "args->page_table has shape [3, 5], wanted [5, 5] (rows, pages)"},
      {"cells type", [](cqsa_kv_args& a) { a.cells = typed(a.cells, CQSA_DTYPE_U8); }, CQSA_ERROR_DTYPE,
       "args->cells is u8, wanted i32 or i64"},
      {"cells length", [](cqsa_kv_args& a) { a.cells = shaped(a.cells, {4}); }, CQSA_ERROR_SHAPE,
       "args->cells has shape [4], wanted [5] (rows)"},
      {"device", [](cqsa_kv_args& a) { a.cells = changed(a.cells, [](cqsa_tensor& t) { t.device_type = CQSA_DEVICE_CUDA; }); },
       CQSA_ERROR_DEVICE, "args->cells is on device type 2, wanted 1 (backend cpu)"},
      {"q4 type", [](cqsa_kv_args& a) { a.format = CQSA_KV_FORMAT_Q4_0; }, CQSA_ERROR_DTYPE,
       "args->pool is i8, wanted u8 for CQSA_KV_FORMAT_Q4_0"},
  });
}

TEST_CASE("kv calls: what only some formats refuse", "[kv]") {
  cache half(CQSA_DTYPE_F16);
  half.bound();
  array scales(CQSA_DTYPE_F16, {2, 4, 2, 3});
  check_refusals(half, {
      {"scale", [&](cqsa_kv_args& a) { a.scale = scales.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->scale is given, but args->pool is f16, which has no scales: wanted NULL"},
      {"group", [](cqsa_kv_args& a) { a.kv_group = 64; }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->kv_group is 64, but args->pool is f16, which has no scales: wanted 0"},
  });
  cache blocks(CQSA_DTYPE_U8, CQSA_DTYPE_F32, 64);
  blocks.bound();
  array turned(CQSA_DTYPE_U8, {2, 4, 2, 36}, {0, 1, 3, 2});
  check_refusals(blocks, {
      {"head_dim", [](cqsa_kv_args& a) { a.x = shaped(a.x, {5, 2, 63}); }, CQSA_ERROR_SHAPE,
       "args->x has head_dim 63, wanted a power of two, 32 to 4096, for CQSA_KV_FORMAT_Q4_0"},
      {"small head_dim", [](cqsa_kv_args& a) { a.x = shaped(a.x, {5, 8, 16}); }, CQSA_ERROR_SHAPE,
       "args->x has head_dim 16, wanted a power of two, 32 to 4096, for CQSA_KV_FORMAT_Q4_0"},
      {"bytes", [](cqsa_kv_args& a) { a.x = shaped(a.x, {5, 2, 32}); }, CQSA_ERROR_SHAPE,
       "args->pool has shape [2, 4, 2, 36], wanted [2, 4, 2, 18] (num_pages, page_size, num_kv_heads, head_dim / 32 * 18)"},
      {"stride", [&](cqsa_kv_args& a) { a.pool = turned.tensor(); }, CQSA_ERROR_STRIDES,
       "args->pool has stride 2 along its last axis, wanted 1 for CQSA_KV_FORMAT_Q4_0"},
      {"scale", [&](cqsa_kv_args& a) { a.scale = scales.tensor(); }, CQSA_ERROR_INVALID_ARGUMENT,
       "args->scale is given, but args->pool is q4_0, which has no scales: wanted NULL"},
  });
  CHECK(cqsa_kv_append(nullptr, &blocks.bound(), nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_kv_gather(cpu_context(), nullptr, nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_kv_append(cpu_context(), &blocks.bound(), &blocks) == CQSA_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("kv calls: outputs stand apart from everything else", "[kv]") {
  cache c;
  const auto status_of = [&](bool append, const change& spoil) {
    cqsa_kv_args args = c.bound();
    spoil(args);
    std::vector<std::vector<char>> before;
    for (array* a : c.all()) before.push_back(a->memory());
    const cqsa_status status = append ? cqsa_kv_append(cpu_context(), &args, nullptr) : cqsa_kv_gather(cpu_context(), &args, nullptr);
    for (size_t i = 0; i < before.size(); ++i) CHECK(c.all()[i]->memory() == before[i]);
    return status;
  };
  const auto to_pool = [&](const cqsa_tensor*& t) { t = changed(t, [&](cqsa_tensor& x) { x.data = c.args.pool->data; }); };
  const auto to_x = [&](const cqsa_tensor*& t) { t = changed(t, [&](cqsa_tensor& x) { x.data = c.args.x->data; }); };
  const auto to_scale = [&](const cqsa_tensor*& t) { t = changed(t, [&](cqsa_tensor& x) { x.data = c.args.scale->data; }); };
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_pool(a.x); }) == CQSA_ERROR_OVERLAP);
  CHECK(std::string(cqsa_last_error()).rfind("args->pool overlaps args->x: ", 0) == 0);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_pool(a.scale); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_pool(a.page_table); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_pool(a.cells); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_scale(a.cells); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { to_scale(a.page_table); }) == CQSA_ERROR_OVERLAP);
  CHECK(std::string(cqsa_last_error()).rfind("args->scale overlaps args->page_table: ", 0) == 0);
  CHECK(status_of(false, [&](cqsa_kv_args& a) { to_x(a.scale); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(false, [&](cqsa_kv_args& a) { to_x(a.cells); }) == CQSA_ERROR_OVERLAP);
  CHECK(status_of(false, [&](cqsa_kv_args& a) { to_x(a.page_table); }) == CQSA_ERROR_OVERLAP);
  CHECK(std::string(cqsa_last_error()).rfind("args->x overlaps args->page_table: ", 0) == 0);
  int64_t same_row[4] = {0, 160, 80, 1}, same_x[3] = {0, 80, 1}, same_scale[4] = {24, 0, 3, 1};
  const auto laid = [](const cqsa_tensor*& t, int64_t* strides) { t = changed(t, [&](cqsa_tensor& x) { x.strides = strides; }); };
  CHECK(status_of(true, [&](cqsa_kv_args& a) { laid(a.pool, same_row); }) == CQSA_ERROR_STRIDES);
  CHECK(status_of(true, [&](cqsa_kv_args& a) { laid(a.scale, same_scale); }) == CQSA_ERROR_STRIDES);
  CHECK(status_of(false, [&](cqsa_kv_args& a) { laid(a.x, same_x); }) == CQSA_ERROR_STRIDES);
}

TEST_CASE("kv calls: rows without a place are left out, and read as zeros", "[kv]") {
  for (const cqsa_dtype pool : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16, CQSA_DTYPE_I8, CQSA_DTYPE_U8}) {
    INFO("pool 0x" << std::hex << pool);
    cache c(pool, CQSA_DTYPE_F32, 64);
    const bool blocks = pool == CQSA_DTYPE_U8;
    REQUIRE(cqsa_kv_append(cpu_context(), &c.bound(), nullptr) == CQSA_OK);
    const int64_t row_bytes = static_cast<int64_t>(c.pool.memory().size()) / 8;
    const std::vector<char> untouched(static_cast<size_t>(row_bytes), static_cast<char>(0xFF));
    for (int64_t row = 0; row < 8; ++row) {  // rows 2, 4 and 7 of the two pages are named
      const char* const at = c.pool.memory().data() + row * row_bytes;
      CHECK((std::memcmp(at, untouched.data(), untouched.size()) != 0) == (row == 2 || row == 4 || row == 7));
    }
    const std::vector<char> wanted = c.x.memory();
    array original(CQSA_DTYPE_F32, {5, 2, 64});
    for (int64_t i = 0; i < 640; ++i) original.set(i, c.x.get(i));
    c.x.fill(0xFF);
    REQUIRE(cqsa_kv_gather(cpu_context(), &c.bound(), nullptr) == CQSA_OK);
    if (blocks) REQUIRE(cqsa_hadamard(cpu_context(), c.x.tensor(), c.x.tensor(), nullptr) == CQSA_OK);
    const double most = blocks ? 0.6 : pool == CQSA_DTYPE_I8 ? 0.03 : pool == CQSA_DTYPE_BF16 ? 0.02 : pool == CQSA_DTYPE_F16 ? 0.002 : 0;
    for (int64_t i = 0; i < 640; ++i) {
      const bool there = i / 128 != 2 && i / 128 != 3;
      CHECK(std::fabs(c.x.get(i) - (there ? original.get(i) : 0)) <= most);
    }
  }
}

TEST_CASE("kv calls: nothing to do is fine", "[kv]") {
  cache c;
  cqsa_kv_args args = c.bound();
  args.x = shaped(args.x, {0, 2, 80}), args.cells = shaped(args.cells, {0}), args.page_table = shaped(args.page_table, {0, 3});
  CHECK(cqsa_kv_append(cpu_context(), &args, nullptr) == CQSA_OK);
  CHECK(cqsa_kv_gather(cpu_context(), &args, nullptr) == CQSA_OK);
  args = c.bound();  // a pool without pages, and one whose pages have no rows: all cells read as zeros
  for (const sizes& none : {sizes{0, 4, 2}, sizes{2, 0, 2}}) {
    const auto with = [&](int64_t last) { return sizes{none[0], none[1], none[2], last}; };
    args.pool = shaped(args.pool, with(80)), args.scale = shaped(args.scale, with(3));
    CHECK(cqsa_kv_append(cpu_context(), &args, nullptr) == CQSA_OK);
    c.x.fill(0xFF);
    CHECK(cqsa_kv_gather(cpu_context(), &args, nullptr) == CQSA_OK);
    for (int64_t i = 0; i < c.x.count(); ++i) REQUIRE(c.x.get(i) == 0);
  }
  args = c.bound(), args.page_table = shaped(args.page_table, {0});  // a sequence without pages
  c.x.fill(0xFF);
  CHECK(cqsa_kv_gather(cpu_context(), &args, nullptr) == CQSA_OK);
  for (int64_t i = 0; i < c.x.count(); ++i) REQUIRE(c.x.get(i) == 0);
}

TEST_CASE("hadamard calls: what is refused", "[kv]") {
  array x(CQSA_DTYPE_F16, {3, 8}), out(CQSA_DTYPE_F16, {3, 8}), wide(CQSA_DTYPE_F32, {3, 8}), more(CQSA_DTYPE_F16, {3, 12});
  for (int64_t i = 0; i < 24; ++i) x.set(i, static_cast<double>(i));
  const auto call = [&](const cqsa_tensor* a, const cqsa_tensor* b) {
    const std::vector<char> before = x.memory(), after = out.memory();
    const cqsa_status status = cqsa_hadamard(cpu_context(), a, b, nullptr);
    if (status != CQSA_OK) CHECK((x.memory() == before && out.memory() == after));
    return status;
  };
  const auto says = [](const char* text) { return std::string(cqsa_last_error()) == text; };
  CHECK(call(nullptr, out.tensor()) == CQSA_ERROR_NULL_POINTER);
  CHECK(call(x.tensor(), nullptr) == CQSA_ERROR_NULL_POINTER);
  CHECK(call(more.tensor(), more.tensor()) == CQSA_ERROR_SHAPE);
  CHECK(says("x has 12 elements along its last axis, wanted a power of two, 1 to 4096"));
  CHECK(call(shaped(x.tensor(), {3, 8192}), out.tensor()) == CQSA_ERROR_SHAPE);
  CHECK(says("x has 8192 elements along its last axis, wanted a power of two, 1 to 4096"));
  CHECK((call(shaped(x.tensor(), {3, 0}), out.tensor()) == CQSA_ERROR_SHAPE));
  CHECK((call(shaped(x.tensor(), {1, 1, 1, 3, 8}), out.tensor()) == CQSA_ERROR_SHAPE && says("x has 5 axes, wanted 1 to 4")));
  CHECK((call(x.tensor(), shaped(out.tensor(), {2, 8})) == CQSA_ERROR_SHAPE && says("out has shape [2, 8], wanted [3, 8]")));
  CHECK((call(typed(x.tensor(), CQSA_DTYPE_I8), out.tensor()) == CQSA_ERROR_DTYPE && says("x is i8, wanted f32, f16 or bf16")));
  CHECK((call(x.tensor(), typed(out.tensor(), CQSA_DTYPE_U8)) == CQSA_ERROR_DTYPE && says("out is u8, wanted f32, f16 or bf16")));
  const cqsa_tensor* const moved = changed(x.tensor(), [](cqsa_tensor& t) { t.byte_offset = 2; });
  CHECK(call(shaped(x.tensor(), {2, 8}), shaped(moved, {2, 8})) == CQSA_ERROR_OVERLAP);
  CHECK(std::string(cqsa_last_error()).rfind("out overlaps x without being the same view: ", 0) == 0);
  CHECK(call(x.tensor(), typed(x.tensor(), CQSA_DTYPE_BF16)) == CQSA_ERROR_OVERLAP);
  CHECK(call(shaped(x.tensor(), {0, 8}), shaped(out.tensor(), {0, 8})) == CQSA_OK);
  REQUIRE(call(x.tensor(), wide.tensor()) == CQSA_OK);
  CHECK(std::fabs(wide.get(1) + 4 / std::sqrt(8.0)) < 1e-6);
  REQUIRE(call(x.tensor(), x.tensor()) == CQSA_OK);
  CHECK(x.get(8) == cqsa::f16_to_f64(cqsa::f64_to_f16(wide.get(8))));
}

TEST_CASE("kv calls are queued, ordered and captured", "[kv]") {
  void* const stream = fake().stream_create(0);
  for (const cqsa_dtype pool : {CQSA_DTYPE_BF16, CQSA_DTYPE_I8, CQSA_DTYPE_U8}) {
    cache host(pool, CQSA_DTYPE_F32, 64), device(pool, CQSA_DTYPE_F32, 64);
    REQUIRE(cqsa_kv_append(cpu_context(), &host.bound(), nullptr) == CQSA_OK);
    array back(CQSA_DTYPE_F16, {5, 2, 64}), device_back(CQSA_DTYPE_F16, {5, 2, 64});
    device.to_device(), device_back.to_device();
    configure();
    fake().capture_begin(stream);
    CHECK(cqsa_kv_append(device_context(), &device.bound(), stream) == CQSA_OK);
    cqsa_kv_args reading = device.args;
    reading.x = device_back.tensor();
    CHECK(cqsa_kv_gather(device_context(), &reading, stream) == CQSA_OK);
    CHECK(cqsa_hadamard(device_context(), device_back.tensor(), device_back.tensor(), stream) == CQSA_OK);
    void* const graph = fake().capture_end(stream);
    const fake_counters c = stats();
    CHECK(std::string(c.error).empty());
    CHECK((c.syncs == 0 && c.copies == 0 && c.allocations == 0 && c.stream_allocations == 0 && c.launches == 3));
    CHECK(fake().graph_size(graph) == 3);
    device.pool.from_device();
    CHECK(device.pool.memory() == std::vector<char>(device.pool.memory().size(), static_cast<char>(0xFF)));
    fake().graph_launch(graph, stream);
    fake().stream_sync(stream);
    fake().graph_destroy(graph);
    device.pool.from_device(), device_back.from_device();
    CHECK(device.pool.memory() == host.pool.memory());
    cqsa_kv_args args = host.args;
    args.x = back.tensor();
    REQUIRE(cqsa_kv_gather(cpu_context(), &args, nullptr) == CQSA_OK);
    REQUIRE(cqsa_hadamard(cpu_context(), back.tensor(), back.tensor(), nullptr) == CQSA_OK);
    CHECK(device_back.memory() == back.memory());
  }
  fake().stream_destroy(stream);
}

TEST_CASE("kv calls: memory of elsewhere is refused", "[kv]") {
  cache c;
  c.to_device();
  configure();
  cqsa_kv_args args = c.bound();
  fake().pretend(args.page_table->data, 0, 0);
  CHECK(cqsa_kv_append(device_context(), &args, nullptr) == CQSA_ERROR_DEVICE);
  CHECK(std::string(cqsa_last_error()) == "args->page_table is declared on fake device 0, but its pointer is ordinary host memory");
  fake().pretend(args.page_table->data, -1, 0);
  args.scale = changed(args.scale, [](cqsa_tensor& t) { t.device_id = 1; });
  CHECK(cqsa_kv_append(device_context(), &args, nullptr) == CQSA_ERROR_DEVICE);
  CHECK(std::string(cqsa_last_error()) == "args->scale is on device 1, the context is for device 0");
  array host(CQSA_DTYPE_F32, {4, 8});
  CHECK(cqsa_hadamard(device_context(), host.tensor(), host.tensor(), nullptr) == CQSA_ERROR_DEVICE);
  void* const other = fake().stream_create(1);
  CHECK(cqsa_kv_gather(device_context(), &c.bound(), other) == CQSA_ERROR_DEVICE);
  CHECK(std::strstr(cqsa_last_error(), "stream of device 1"));
  fake().stream_destroy(other);
  CHECK(stats().launches == 0);
}
