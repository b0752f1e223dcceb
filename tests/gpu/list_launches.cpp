// SPDX-License-Identifier: Apache-2.0
// How the host parts of the CUDA kernels launch them: prints "kernel least most", bytes of dynamic shared memory of a block, over
// problems of all sizes and types. Their port (backends/gpu/port.h) only takes down what it is asked for, so nothing is read.
#include "backends/cuda/tuned.h"
#include "backends/gpu/combine_leaf.h"
#include "backends/gpu/fp8.h"
#include "backends/gpu/fp8_gemm.h"
#include "backends/gpu/gather.h"
#include "backends/gpu/kv.h"
#include "backends/gpu/moe.h"
#include "backends/gpu/port.h"
#include "backends/gpu/quant.h"
#include "dtype.h"

#include <algorithm>
#include <cstdio>

namespace cqsa::gpu {
namespace {

struct launched {
  bool ever = false;
  uint32_t least = UINT32_MAX, most = 0;
} seen[int32_t(kernel_id::count)];

constexpr const char* names[] = {
#define CQSA_GPU_KERNEL_NAME(name, threads, tier) #name,
    CQSA_ALL_KERNELS(CQSA_GPU_KERNEL_NAME)
#undef CQSA_GPU_KERNEL_NAME
};

}  // namespace

cqsa_status launch(void*, kernel_id kernel, const launch_shape& shape, const void*, size_t, void*) {
  launched& x = seen[int32_t(kernel)];
  x = {true, std::min(x.least, shape.shared_bytes), std::max(x.most, shape.shared_bytes)};
  return CQSA_OK;
}
cqsa_status upload(void*, void*, const void*, uint64_t, void*) { return CQSA_OK; }
cqsa_status encode_tensor(void*, const tensor_box&, tensor_map*) { return CQSA_OK; }
const device_facts& facts_of(void* device) { return *static_cast<device_facts*>(device); }
cqsa_status fail(cqsa_status status, const char*, ...) { return status; }
float f16_to_f32(uint16_t bits) { return cqsa::f16_to_f32(bits); }
uint16_t f32_to_f16(float value) { return cqsa::f32_to_f16(value); }

namespace {

alignas(64) char somewhere[64];
constexpr uint64_t plenty = uint64_t(1) << 60;  // of workspace

struct chip_case {
  int32_t tier, shared_bytes;
};
constexpr chip_case chips[] = {{70, 96 << 10}, {75, 64 << 10}, {80, 99 << 10}, {80, 163 << 10}, {90, 227 << 10}};
constexpr int64_t dims[][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {512, 512}};
constexpr cqsa_dtype query_types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
constexpr int32_t precisions[] = {CQSA_PRECISION_DEFAULT, CQSA_PRECISION_FAST, CQSA_PRECISION_SPLIT, CQSA_PRECISION_F32};

cqsa_view view(cqsa_dtype type, int64_t channels) { return {somewhere, type, 0, {64 * channels, 64 * channels, channels, 1}}; }

// Calls f with the chip, its facts, the type of q and of keys and values, the channels, and the precision.
template <class F> void each_case(const F& f) {
  for (const chip_case& c : chips) {
    device_facts facts{32, 8, c.shared_bytes, c.tier, c.tier};
    for (const auto& d : dims)
      for (const cqsa_dtype q : query_types)
        for (const cqsa_dtype kv : {q, cqsa_dtype(CQSA_DTYPE_F16), cqsa_dtype(CQSA_DTYPE_I8)})
          for (const int32_t precision : precisions) f(cqsa_chip{c.tier, 8, c.shared_bytes, 0}, &facts, q, kv, d, precision);
  }
}

void list_attention() {
  const cqsa_attention_impl* all[] = {&portable_attention, &sm70_attention_impl, &sm75_attention, &sm80_attention, &sm80_decode, &sm90_attention};
  each_case([&](const cqsa_chip& chip, device_facts* facts, cqsa_dtype q, cqsa_dtype kv, const int64_t (&d)[2], int32_t precision) {
    for (const int64_t queries : {1, 8, 5000, 10000})
      for (const double softcap : {0.0, 1.0}) {
        cqsa_attention_leaf a{};
        a.struct_size = sizeof a, a.flags = CQSA_LEAF_CLEAR_TAIL, a.chip = chip, a.precision = precision;
        a.batch = 1, a.num_heads = 8, a.num_kv_heads = 1, a.head_dim = d[0], a.head_dim_v = d[1];
        a.seqlen_q = a.total_q = queries, a.seqlen_k = queries < 5000 ? 5000 : queries, a.softmax_scale = 1, a.softcap = softcap, a.window_left = a.window_right = -1;
        a.cu_seqlens_q = somewhere, a.index_dtype = CQSA_DTYPE_I32;  // for the kernel that clears what is behind the last query
        a.q = view(q, d[0]), a.k = view(kv, d[0]), a.v = view(kv, d[1]), a.out = view(q, d[1]), a.lse = view(CQSA_DTYPE_F32, 1);
        if (kv == CQSA_DTYPE_I8) a.scale_k = a.scale_v = CQSA_SCALE_GROUP, a.kv_group = 32, a.k_scale = a.v_scale = view(CQSA_DTYPE_F16, 16);
        for (const cqsa_attention_impl* x : all)
          if (x->probe(&a, nullptr, 0) == CQSA_OK) x->launch(facts, &a, somewhere, plenty, nullptr, nullptr);
      }
  });
}

void list_selected() {
  const cqsa_selected_impl* all[] = {&portable_selected, &sm70_selected_impl, &sm80_selected};
  each_case([&](const cqsa_chip& chip, device_facts* facts, cqsa_dtype q, cqsa_dtype kv, const int64_t (&d)[2], int32_t precision) {
    cqsa_selected_leaf a{};
    a.struct_size = sizeof a, a.chip = chip, a.precision = precision, a.softmax_scale = 1;
    a.total_q = 4, a.num_heads = 8, a.num_kv_heads = 1, a.head_dim = d[0], a.head_dim_v = d[1];
    a.num_pages = a.pages = 4, a.page_size = 64, a.capacity = 64, a.kv_group = kv == CQSA_DTYPE_I8 ? 64 : 0;
    a.q = view(q, d[0]), a.k = view(kv, d[0]), a.v = view(kv, d[1]), a.out = view(q, d[1]), a.lse = view(CQSA_DTYPE_F32, 1);
    for (const cqsa_selected_impl* x : all)
      if (x->probe(&a, nullptr, 0) == CQSA_OK) x->launch(facts, &a, somewhere, plenty, nullptr, nullptr);
  });
}

constexpr cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ};

void list_fp8_gemm() {
  const cqsa_fp8_gemm_impl* all[] = {&sm90_fp8_gemm, &sm80_fp8_gemm, &portable_fp8_gemm};
  static float scale = 1;
  for (const chip_case& c : chips)
    for (const cqsa_dtype a : formats)
      for (const cqsa_dtype b : formats)
        for (const int64_t m : {1, 200, 4096})
          for (const int64_t block : {0, 1, 128})
            for (const int32_t accumulate : {CQSA_FP8_PROMOTE_128, CQSA_FP8_FAST}) {
              device_facts facts{32, 8, c.shared_bytes, c.tier, c.tier};
              cqsa_fp8_gemm_leaf x{};
              x.struct_size = sizeof x, x.chip = {c.tier, 8, c.shared_bytes, 0}, x.accumulate = accumulate;
              x.batch = 1, x.m = m, x.n = 512, x.k = 512, x.alpha = 1;
              x.a = {somewhere, a, 0, {0, 512, 1}}, x.b = {somewhere, b, 0, {0, 512, 1}}, x.d = {somewhere, CQSA_DTYPE_F32, 0, {0, 512, 1}};
              if (block) x.scale_inv_a = {&scale, CQSA_DTYPE_F32, 0, {4, 1}, m, 4, {1, 128}}, x.scale_inv_b = {&scale, CQSA_DTYPE_F32, 0, {4, 1}, 512, 4, {block, 128}};
              for (const cqsa_fp8_gemm_impl* i : all)
                if (i->probe(&facts, &x, nullptr, 0) == CQSA_OK) i->launch(&facts, &x, somewhere, plenty, nullptr, nullptr);
            }
}

// Jobs for each kernel of FP8: outputs, scales' blocks and types.
// Square, n a side, in blocks of b; sides: 1 as it is, 2 transposed.
void list_fp8_quantize(device_facts& facts, int64_t n, cqsa_dtype type, int sides, const int64_t (&b)[2], float* amax) {
  cqsa_fp8_job j{};
  j.batch = 1, j.rows = j.columns = n, j.x = {somewhere, type, 0, {n * n, n, 1}}, j.amax = amax;
  const auto side = [&](bool turned) {
    const int64_t r = turned && b[0] != b[1] ? b[1] : b[0], c = turned && b[0] != b[1] ? b[0] : b[1];
    const cqsa_scale_grid grid{somewhere, CQSA_DTYPE_F32, 0, {(n + c - 1) / c, 1}, (n + r - 1) / r, (n + c - 1) / c, {r, c}};
    return cqsa_fp8_output{{somewhere, CQSA_DTYPE_E4M3FN, 0, {n * n, turned ? 1 : n, turned ? n : 1}}, grid, grid, grid, 1.0f, 0};
  };
  if (sides & 1) j.row = side(false);
  if (sides & 2) j.transposed = side(true);
  const cqsa_fp8_job jobs[2] = {j, j};
  for (const int64_t count : {1, 2}) {
    const cqsa_fp8_quantize_leaf leaf{sizeof leaf, 0, jobs, count, {}};
    portable_fp8_quantize(&facts, &leaf, somewhere, plenty, nullptr, nullptr);
  }
}
void list_fp8() {
  device_facts facts{32, 8, 64 << 10, 70, 0};
  constexpr int64_t n = 2048;
  const int64_t blocks[][2] = {{n, n}, {1, n}, {n, 1}, {1, 128}, {128, 128}, {1, 17}};
  for (const cqsa_dtype type : query_types)
    for (int sides = 0; sides < 4; ++sides)
      for (const auto& b : blocks)
        for (float* const amax : {static_cast<float*>(nullptr), reinterpret_cast<float*>(somewhere)}) list_fp8_quantize(facts, n, type, sides, b, amax);
  portable_fp8_workspace_init(&facts, somewhere, 4096, nullptr);
  const cqsa_matrix codes{somewhere, CQSA_DTYPE_E4M3FN, 0, {n * n, n, 1}}, out{somewhere, CQSA_DTYPE_BF16, 0, {n * n, n, 1}};
  const cqsa_scale_grid one{somewhere, CQSA_DTYPE_F32, 0, {1, 1}, 1, 1, {n, n}};
  const cqsa_fp8_dequantize_leaf decode{1, n, n, codes, out, one, nullptr, 0, 0, 0, 0};
  portable_fp8_dequantize(&facts, &decode, nullptr, nullptr);
  const cqsa_fp8_scale_leaf scale{one, {}, one, one, CQSA_DTYPE_E4M3FN, 0, 0, 0, 0, 0};
  portable_fp8_scale(&facts, &scale, nullptr, nullptr);
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(somewhere);
  const cqsa_fp8_transpose_leaf turn{n, n, bytes, bytes, {n, 1}, {1, n}};
  portable_fp8_transpose(&facts, &turn, nullptr, nullptr);
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  ring.state = somewhere, ring.hist_len = 16, ring.format = CQSA_DTYPE_E4M3FN;
  const cqsa_fp8_ring_leaf rings{CQSA_FP8_RINGS_FOLD, 0, &ring, 1, nullptr, 0, 0, 0};
  portable_fp8_rings(&facts, &rings, nullptr, nullptr);
}

// Layers of every way that a product may be made, and each part by itself.
cqsa_moe_set moe_set(cqsa_quant_format format, int64_t experts, int64_t rows, int64_t elements, const cqsa_moe_matrix* list) {
  cqsa_moe_set s{};
  s.num_experts = experts, s.rows = rows, s.row_elements = elements, s.format = format, s.all.data = somewhere, s.all.format = format, s.all.row_bytes = 64;
  s.experts = list;
  return s;
}
void list_moe_layers(const chip_case& c, cqsa_quant_format format, int64_t tokens, int32_t precision) {
  const cqsa_moe_impl* all[] = {&sm90_moe, &sm80_moe, &portable_moe};
  static cqsa_moe_matrix list[8];
  for (cqsa_moe_matrix& m : list) m.data = nullptr, m.format = format;
  device_facts facts{32, 8, c.shared_bytes, c.tier, c.tier};
  cqsa_moe_leaf a{};
  a.struct_size = sizeof a, a.chip = {c.tier, 8, c.shared_bytes, 0}, a.tokens = a.chunk = tokens, a.topk = 4, a.hidden = a.inter = 1024, a.num_experts = a.num_ids = 8;
  a.precision = precision, a.x = a.out = {somewhere, CQSA_DTYPE_F16, 0, {1024, 1}}, a.ids = {somewhere, CQSA_DTYPE_I32, 0, {4, 1}};
  a.weights = {somewhere, CQSA_DTYPE_F32, 0, {4, 1}};
  a.gate = a.up = moe_set(format, 8, 1024, 1024, nullptr), a.down = moe_set(format, 8, 1024, 1024, list);
  for (const cqsa_moe_impl* i : all)
    if (i->probe(&facts, &a, nullptr, 0) == CQSA_OK) i->launch(&facts, &a, somewhere, plenty, nullptr, nullptr);
}
void list_moe() {
  for (const chip_case& c : chips)
    for (const cqsa_quant_format format : {CQSA_QUANT_F16, CQSA_QUANT_Q2_0, CQSA_QUANT_Q4_K})
      for (const int64_t tokens : {1, 20, 60, 320, 4000})
        for (const int32_t precision : {CQSA_MOE_PRECISION_Q8, CQSA_MOE_PRECISION_F16}) list_moe_layers(c, format, tokens, precision);
  device_facts facts{32, 8, 64 << 10, 70, 0};
  const cqsa_moe_rows f32{somewhere, CQSA_DTYPE_F32, 0, {64, 1}}, i32{somewhere, CQSA_DTYPE_I32, 0, {64, 1}}, i8{somewhere, CQSA_DTYPE_I8, 0, {64, 1}};
  for (const int64_t experts : {8, 4096}) {
    const cqsa_moe_route_leaf route{1, experts, 2, f32, i32, f32, nullptr, 0, 0, 0, 1, 1, 0, 1.0f};
    portable_moe_route(&facts, &route, nullptr, nullptr);
    cqsa_moe_group_leaf group{};
    group.tokens = 1, group.topk = 2, group.num_experts = group.num_ids = experts, group.ids = i32, group.dtype = CQSA_DTYPE_I32;
    group.offsets = group.order = somewhere;
    portable_moe_group(&facts, &group, nullptr, nullptr);
  }
  const cqsa_moe_quantize_leaf quantize{1, 64, f32, i8, f32};
  portable_moe_quantize(&facts, &quantize, nullptr, nullptr);
  const cqsa_moe_combine_leaf combine{1, 2, 64, f32, f32, i32, f32};
  portable_moe_combine(&facts, &combine, nullptr, nullptr);
}

void list_others() {
  device_facts facts{32, 8, 64 << 10, 70, 0};
  for (cqsa_quant_format format = CQSA_QUANT_F32; format <= CQSA_QUANT_NVFP4; ++format) {
    cqsa_dequantize_leaf rows{};
    rows.format = format, rows.count = 1, rows.row_elements = 256, rows.out = somewhere, rows.out_dtype = CQSA_DTYPE_F32;
    portable_dequantize_rows(&facts, &rows, nullptr, nullptr);
  }
  cqsa_merge_leaf merge{{1, 1, 1, 1}, 64, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, {}, {}};
  portable_merge(&facts, &merge, nullptr, nullptr);
  gather_leaf gather{};
  gather.from = view(CQSA_DTYPE_F16, 64), gather.to = somewhere, gather.batch = gather.heads = gather.rows = 1, gather.channels = 64;
  portable_gather(&facts, gather, nullptr, 0, nullptr);
  for (int64_t n = 1; n <= 4096; n *= 2) {
    const cqsa_hadamard_leaf turn{{1, 1, 1}, n, somewhere, somewhere, CQSA_DTYPE_F32, CQSA_DTYPE_F32, {}, {}};
    portable_hadamard(&facts, &turn, nullptr, nullptr);
    cqsa_kv_leaf kv{};
    kv.rows = kv.num_kv_heads = kv.num_pages = kv.page_size = kv.pages = 1, kv.head_dim = n;
    kv.x = kv.pool = view(CQSA_DTYPE_F16, n), kv.cells_dtype = CQSA_DTYPE_I32;
    portable_kv_append(&facts, &kv, nullptr, nullptr), portable_kv_gather(&facts, &kv, nullptr, nullptr);
    kv.format = CQSA_KV_FORMAT_Q4_0;
    if (n >= 32) portable_kv_append(&facts, &kv, nullptr, nullptr);
  }
}

}  // namespace
}  // namespace cqsa::gpu

int main() {
  using namespace cqsa::gpu;
  list_attention(), list_selected(), list_fp8(), list_fp8_gemm(), list_moe(), list_others();
  for (int32_t i = 0; i < int32_t(kernel_id::count); ++i)
    if (seen[i].ever) std::printf("%s %u %u\n", names[i], seen[i].least, seen[i].most);
}
