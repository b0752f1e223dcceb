// SPDX-License-Identifier: Apache-2.0
// The product of FP8 matrices by SIMD: tiles of d for workers. Codes of both operands become f32 a piece of k at a time, b turned so that
// columns of d stand side by side. Scales of blocks of k go into the operands, others into the sums. The order of a sum depends on k alone.
#include "cpu_features.h"
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "fp8_job.h"
#include "fp8_lines.h"

#include <algorithm>
#include <atomic>
#include <cstdio>

namespace cqsa::cpu {
namespace {

constexpr int64_t depth = 256;       // of k at a time: a panel of b stays in the first cache
constexpr int64_t tile_rows = 192;   // a multiple of every kernel's rows; with depth, what the second cache holds
constexpr int64_t tile_columns = 256;
constexpr int64_t lda = depth + 16;  // rows of a in different cache sets
constexpr scalar_ops conversions = {[](uint16_t x) { return f16_to_f32(x); }, [](float x) { return f32_to_f16(x); }};

// The scratch of one worker.
struct gemm_scratch {
  float a[tile_rows * lda];
  float b[depth * tile_columns];
  float sums[tile_rows * tile_columns];
  float column_scale[tile_columns], bias[tile_columns], line[tile_columns], c[tile_columns];
  char raw[4 * depth];
  uint8_t codes[64 * depth], turned[64 * depth];  // of a panel of b
};
static_assert(sizeof(gemm_scratch) % 64 == 0);

struct product {
  const fp8_gemm_target& target;
  const cqsa_fp8_gemm_leaf& leaf;
  gemm_scratch* scratch;
  int64_t rows, columns;  // of a tile
  std::atomic<int64_t> next{0};
  std::atomic<uint32_t> amax{0};
};

struct tile {
  int64_t batch, top, left, rows, columns;
};

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t tile_count(const product& p) { return p.leaf.batch * parts(p.leaf.m, p.rows) * parts(p.leaf.n, p.columns); }

const char* at(const cqsa_matrix& x, int64_t b, int64_t i, int64_t j) {
  return static_cast<const char*>(x.data) + bytes_of(x.dtype) * (b * x.stride[0] + i * x.stride[1] + j * x.stride[2]);
}

// ---- scales -----------------------------------------------------------------------------------------------------------------

float scale_at(const cqsa_scale_grid& g, int64_t batch_stride, int64_t b, int64_t i, int64_t k) {
  if (!g.data) return 1;
  return load_as<float>(static_cast<const char*>(g.data) + 4 * (b * batch_stride + i / g.block[0] * g.stride[0] + k / g.block[1] * g.stride[1]));
}

// Scales that change along k go into the operand.
bool along_k(const cqsa_scale_grid& g) { return g.data && g.columns > 1; }

void scale_row_of_a(const product& p, int64_t b, int64_t i, int64_t k0, int64_t n, float* row) {
  const cqsa_scale_grid& g = p.leaf.scale_inv_a;
  for (int64_t k = 0; k < n;) {
    const int64_t end = std::min(n, ((k0 + k) / g.block[1] + 1) * g.block[1] - k0);
    p.target.lines->multiply(row + k, scale_at(g, p.leaf.scale_batch_stride_a, b, i, k0 + k), end - k);
    k = end;
  }
}

void scale_panel_of_b(const product& p, int64_t b, int64_t j, int64_t columns, int64_t k0, int64_t n, float* panel) {
  const cqsa_scale_grid& g = p.leaf.scale_inv_b;
  const int64_t width = p.target.kernel->columns;
  float scales[64] = {};
  for (int64_t k = 0; k < n;) {
    const int64_t end = std::min(n, ((k0 + k) / g.block[1] + 1) * g.block[1] - k0);
    for (int64_t c = 0; c < columns; ++c) scales[c] = scale_at(g, p.leaf.scale_batch_stride_b, b, j + c, k0 + k);
    for (; k < end; ++k)
      for (int64_t c = 0; c < width; ++c) panel[k * width + c] *= scales[c];
  }
}

// ---- operands ---------------------------------------------------------------------------------------------------------------

void pack_a(const product& p, const tile& t, int64_t k0, int64_t n, gemm_scratch* mem) {
  const cqsa_matrix& a = p.leaf.a;
  const int64_t padded = parts(t.rows, p.target.kernel->rows) * p.target.kernel->rows;
  for (int64_t i = 0; i < t.rows; ++i) {
    float* const row = mem->a + i * lda;
    p.target.lines->load(at(a, t.batch, t.top + i, k0), a.dtype, a.stride[2], n, mem->raw, row);
    if (along_k(p.leaf.scale_inv_a)) scale_row_of_a(p, t.batch, t.top + i, k0, n, row);
  }
  for (int64_t i = t.rows; i < padded; ++i) std::fill_n(mem->a + i * lda, n, 0.0f);
}

// `columns` columns of d from j on, to [k][width].
void pack_panel(const product& p, int64_t batch, int64_t j, int64_t columns, int64_t k0, int64_t n, gemm_scratch* mem, float* panel) {
  const cqsa_matrix& b = p.leaf.b;
  const int64_t width = p.target.kernel->columns, step = b.stride[2];
  auto* from = reinterpret_cast<const uint8_t*>(at(b, batch, j, k0));
  int64_t stride = b.stride[1];
  if (step != 1) {
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t k = 0; k < n; ++k) mem->codes[c * depth + k] = from[c * stride + k * step];
    from = mem->codes, stride = depth;
  }
  if (columns < width) std::memset(mem->turned, 0, size_t(n * width));
  p.target.lines->transpose(from, stride, columns, n, false, mem->turned, width);
  p.target.lines->load(reinterpret_cast<const char*>(mem->turned), b.dtype, 1, n * width, mem->raw, panel);
  if (along_k(p.leaf.scale_inv_b)) scale_panel_of_b(p, batch, j, columns, k0, n, panel);
}

void multiply_piece(const product& p, const tile& t, int64_t k0, int64_t n, gemm_scratch* mem) {
  const fp8_gemm_kernel& kernel = *p.target.kernel;
  pack_a(p, t, k0, n, mem);
  for (int64_t j = 0; j < t.columns; j += kernel.columns) {
    pack_panel(p, t.batch, t.left + j, std::min<int64_t>(kernel.columns, t.columns - j), k0, n, mem, mem->b);
    for (int64_t i = 0; i < t.rows; i += kernel.rows) kernel.multiply(mem->a + i * lda, lda, mem->b, n, mem->sums + i * tile_columns + j, tile_columns);
  }
}

// ---- results ----------------------------------------------------------------------------------------------------------------

void prepare_columns(const product& p, const tile& t, gemm_scratch* mem) {
  const cqsa_fp8_gemm_leaf& x = p.leaf;
  for (int64_t j = 0; j < t.columns; ++j)
    mem->column_scale[j] = along_k(x.scale_inv_b) ? 1.0f : scale_at(x.scale_inv_b, x.scale_batch_stride_b, t.batch, t.left + j, 0);
  if (!x.bias) return;
  const char* const from = static_cast<const char*>(x.bias) + bytes_of(x.bias_dtype) * t.left * x.bias_stride;
  p.target.lines->load(from, x.bias_dtype, x.bias_stride, t.columns, mem->raw, mem->bias);
}

// Row i of a tile: sums to numbers.
void finish_sums(const product& p, const tile& t, int64_t i, gemm_scratch* mem) {
  const cqsa_fp8_gemm_leaf& x = p.leaf;
  const float* const sums = mem->sums + i * tile_columns;
  const float scale = along_k(x.scale_inv_a) ? 1.0f : scale_at(x.scale_inv_a, x.scale_batch_stride_a, t.batch, t.top + i, 0);
  const float factor = float(x.alpha * double(scale)), beta = float(x.beta);
  float* const line = mem->line;
  for (int64_t j = 0; j < t.columns; ++j) line[j] = x.k > 0 ? sums[j] * factor * mem->column_scale[j] : 0.0f;
  if (x.c.data && beta != 0) {
    p.target.lines->load(at(x.c, t.batch, t.top + i, t.left), x.c.dtype, x.c.stride[2], t.columns, mem->raw, mem->c);
    for (int64_t j = 0; j < t.columns; ++j) line[j] += beta * mem->c[j];
  }
  for (int64_t j = 0; x.bias && j < t.columns; ++j) line[j] += mem->bias[j];
  for (int64_t j = 0; j < t.columns; ++j) line[j] = plain_nan(line[j]);
}

void store_codes(const product& p, float* line, int64_t n, char* raw, int64_t step, char* to) {
  const float scale = p.leaf.d_scale ? load_as<float>(reinterpret_cast<const char*>(p.leaf.d_scale)) : 1.0f;
  const fp8_coding how{p.leaf.d.dtype, true, false, false};
  auto* const codes = reinterpret_cast<uint8_t*>(raw);
  p.target.lines->encode(line, CQSA_DTYPE_F32, n, n, &scale, &how, codes, nullptr);
  for (int64_t j = 0; j < n; ++j) to[j * step] = static_cast<char>(codes[j]);
}

void finish_row(const product& p, const tile& t, int64_t i, gemm_scratch* mem, uint32_t* most) {
  const cqsa_matrix& d = p.leaf.d;
  finish_sums(p, t, i, mem);
  p.target.lines->largest(mem->line, CQSA_DTYPE_F32, t.columns, t.columns, false, most);
  char* const to = const_cast<char*>(at(d, t.batch, t.top + i, t.left));
  if (fp8::is_format(d.dtype)) store_codes(p, mem->line, t.columns, mem->raw, d.stride[2], to);
  else p.target.lines->save(mem->line, d.dtype, d.stride[2], t.columns, &conversions, mem->raw, to);
}

// ---- tiles ------------------------------------------------------------------------------------------------------------------

void compute_tile(const product& p, const tile& t, gemm_scratch* mem, uint32_t* most) {
  const int64_t padded = parts(t.rows, p.target.kernel->rows) * p.target.kernel->rows;
  std::fill_n(mem->sums, padded * tile_columns, 0.0f);
  for (int64_t k = 0; k < p.leaf.k; k += depth) multiply_piece(p, t, k, std::min(depth, p.leaf.k - k), mem);
  prepare_columns(p, t, mem);
  for (int64_t i = 0; i < t.rows; ++i) finish_row(p, t, i, mem, most);
}

void work(void* data, int64_t index) {
  const plain_floats mode;
  product& p = *static_cast<product*>(data);
  gemm_scratch* const mem = p.scratch + index;
  const int64_t down = parts(p.leaf.m, p.rows), across = parts(p.leaf.n, p.columns);
  uint32_t most = 0;
  for (int64_t n; (n = p.next.fetch_add(1, std::memory_order_relaxed)) < p.leaf.batch * down * across;) {
    tile t{n / across / down, n / across % down * p.rows, n % across * p.columns, 0, 0};
    t.rows = std::min(p.rows, p.leaf.m - t.top);
    t.columns = std::min(p.columns, p.leaf.n - t.left);
    compute_tile(p, t, mem, &most);
  }
  uint32_t seen = p.amax.load(std::memory_order_relaxed);
  while (most > seen && !p.amax.compare_exchange_weak(seen, most, std::memory_order_relaxed)) {}
}

// Several tiles for each worker, while they are large enough to be worth their packing.
void choose_tile(product* p, int64_t workers) {
  while (workers > 1 && tile_count(*p) < 3 * workers)
    if (p->columns > 64) p->columns /= 2;
    else if (p->rows > 48) p->rows /= 2;
    else return;
}

uint64_t workspace_for(const cqsa_fp8_gemm_leaf*, int64_t workers) {
  return sizeof(fp8::workspace_header) + sizeof(gemm_scratch) * uint64_t(workers > 1 ? workers : 1);
}

}  // namespace

cqsa_status fp8_gemm_on(const fp8_gemm_target& target, const cqsa_fp8_gemm_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec) {
  fp8::workspace_header header{};
  if (workspace && bytes >= workspace_for(leaf, 1)) std::memcpy(&header, workspace, sizeof header);
  if (header.magic != fp8::workspace_magic) return fail(CQSA_ERROR_WORKSPACE, "the workspace of the product is too small, or was not prepared by cqsa_fp8_workspace_init()");
  auto* const scratch = reinterpret_cast<gemm_scratch*>(static_cast<char*>(workspace) + sizeof header);
  product p{target, *leaf, scratch, tile_rows, tile_columns};
  const int64_t room = int64_t((bytes - sizeof header) / sizeof(gemm_scratch));
  const bool tiny = double(leaf->batch) * double(leaf->m) * double(leaf->n) * double(leaf->k + 16) < 1e6;
  int64_t workers = exec && exec->run && !tiny ? std::min(exec->num_workers, room) : 1;
  choose_tile(&p, workers);
  workers = std::min(workers, tile_count(p));
  const cqsa_status status = workers > 1 ? exec->run(exec->user, workers, work, &p) : (work(&p, 0), CQSA_OK);
  const float amax = amax_of(p.amax.load());
  if (status == CQSA_OK && leaf->d_amax) std::memcpy(leaf->d_amax, &amax, sizeof amax);
  return status;
}

namespace {

#if defined(CQSA_CPU_X86)
constexpr fp8_gemm_target with_avx512{&fp8_avx512, &fp8_gemm_avx512}, with_avx2{&fp8_avx2, &fp8_gemm_avx2};

cqsa_status decline(char* reason, uint64_t size, const char* text) {
  if (reason && size) std::snprintf(reason, size, "%s", text);
  return CQSA_ERROR_UNSUPPORTED;
}
cqsa_status probe_avx512(void*, const cqsa_fp8_gemm_leaf*, char* reason, uint64_t size) {
  return this_cpu().avx512 ? CQSA_OK : decline(reason, size, "this CPU lacks AVX-512 F/BW/DQ/VL");
}
cqsa_status probe_avx2(void*, const cqsa_fp8_gemm_leaf*, char* reason, uint64_t size) {
  return this_cpu().avx2 ? CQSA_OK : decline(reason, size, "this CPU lacks AVX2, FMA, F16C or BMI2");
}
#endif
constexpr fp8_gemm_target with_baseline{&fp8_baseline, &fp8_gemm_baseline};
cqsa_status probe_any(void*, const cqsa_fp8_gemm_leaf*, char*, uint64_t) { return CQSA_OK; }

template <const fp8_gemm_target& target>
cqsa_status launch(void*, const cqsa_fp8_gemm_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec* exec, void*) {
  return fp8_gemm_on(target, leaf, workspace, bytes, exec);
}

}  // namespace

const cqsa_fp8_gemm_impl* fp8_gemm_impls(int32_t* count) {
  static const cqsa_fp8_gemm_impl list[] = {
#if defined(CQSA_CPU_X86)
      {"cpu_avx512", "x86 with AVX-512 F, BW, DQ, VL", CQSA_FP8_PROVIDER_OWN, 0, probe_avx512, workspace_for, launch<with_avx512>},
      {"cpu_avx2", "x86 with AVX2, FMA, F16C, BMI2", CQSA_FP8_PROVIDER_OWN, 0, probe_avx2, workspace_for, launch<with_avx2>},
#endif
      {"cpu_baseline", "any CPU", CQSA_FP8_PROVIDER_OWN, 0, probe_any, workspace_for, launch<with_baseline>},
      fp8_gemm_reference_impl,
  };
  *count = int32_t(sizeof list / sizeof *list);
  return list;
}

}  // namespace cqsa::cpu
