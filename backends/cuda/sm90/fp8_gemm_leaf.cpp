// SPDX-License-Identifier: Apache-2.0
// Host part of the Hopper FP8 product: what it takes, which tile, the operands as the copy engine knows them.
#include "backends/cuda/tuned.h"
#include "backends/gpu/fp8_gemm.h"
#include "fp8_gemm_shape.h"

#include <cstdio>

namespace cqsa::gpu {
namespace {

using sm90::gemm_form;

constexpr int64_t most_size = int64_t(1) << 30;  // kernels and the copy engine count in 32 bits

// ------------------------------------------------------------------------------------------------------- instantiations

// By the one of a and b that is e5m2: none, b, a.
using kernel_table = kernel_id[3];
#define CQSA_SM90_FP8_TABLE(size, form)                                                                              \
  {kernel_id::cqsa_sm90_fp8_e4m3fn_e4m3fn_##size##_##form, kernel_id::cqsa_sm90_fp8_e4m3fn_e5m2_##size##_##form,      \
   kernel_id::cqsa_sm90_fp8_e5m2_e4m3fn_##size##_##form}
constexpr kernel_table large_fast = CQSA_SM90_FP8_TABLE(large, fast), large_plain = CQSA_SM90_FP8_TABLE(large, plain),
                       large_blocks = CQSA_SM90_FP8_TABLE(large, blocks), large_columns = CQSA_SM90_FP8_TABLE(large, columns),
                       medium_plain = CQSA_SM90_FP8_TABLE(medium, plain), medium_columns = CQSA_SM90_FP8_TABLE(medium, columns),
                       small_plain = CQSA_SM90_FP8_TABLE(small, plain), small_columns = CQSA_SM90_FP8_TABLE(small, columns);
#undef CQSA_SM90_FP8_TABLE

struct tile {
  int32_t rows, columns, cluster, shared_bytes, group;
  double time;  // of a tile, in that of a large one
};
template <class S> constexpr tile tile_of(int32_t group, double time) { return {S::rows, S::columns, S::cluster, S::shared_bytes, group, time}; }
// The wide ones are large ones to this part, with more shared memory.
constexpr tile large_tile(int32_t group) {
  tile t = tile_of<sm90::gemm_large>(group, 1.0);
  if (sm90::gemm_wide::shared_bytes > t.shared_bytes) t.shared_bytes = sm90::gemm_wide::shared_bytes;
  return t;
}
// What small ones lose: their operands are read more often, and their ends are longer.
constexpr tile tiles[] = {large_tile(8), tile_of<sm90::gemm_medium>(16, 0.65), tile_of<sm90::gemm_small>(16, 0.42)};
enum { size_large = 0, size_medium = 1, size_small = 2, num_sizes = 3 };

int64_t count_of(const cqsa_fp8_gemm_leaf& a, const tile& t) {
  return a.batch * divide_up(a.m, t.rows) * divide_up(a.n, int64_t(t.columns) * t.cluster);
}

// The one with which the last block is done first.
int choose(const cqsa_fp8_gemm_leaf& a, int64_t units) {
  int best = size_large;
  double least = 0;
  for (int i = 0; i < num_sizes; ++i) {
    const int64_t clusters = larger(1, units / tiles[i].cluster);
    const double time = double(divide_up(count_of(a, tiles[i]), clusters)) * tiles[i].time;
    if (i == 0 || time < least) best = i, least = time;
  }
  return best;
}

bool goes_by_k(const gemm_scales& s) { return s.data && s.stride[2] != 0; }

gemm_form form_of(const cqsa_fp8_gemm_leaf& a, const gemm_params& p) {
  if (!goes_by_k(p.scale_a) && !goes_by_k(p.scale_b)) return a.accumulate == CQSA_FP8_FAST ? gemm_form::fast : gemm_form::plain;
  return !p.scale_b.data || p.scale_b.stride[1] == 0 || p.scale_b.rows % 128 == 0 ? gemm_form::blocks : gemm_form::columns;
}

kernel_id kernel_of(const cqsa_fp8_gemm_leaf& a, int size, gemm_form form) {
  const bool plain = form == gemm_form::fast || form == gemm_form::plain;
  const kernel_table& large = form == gemm_form::fast ? large_fast : plain ? large_plain : form == gemm_form::blocks ? large_blocks : large_columns;
  const kernel_table& table = size == size_large    ? large
                              : size == size_medium ? plain ? medium_plain : medium_columns
                                                    : plain ? small_plain : small_columns;
  return table[a.a.dtype == CQSA_DTYPE_E5M2 ? 2 : a.b.dtype == CQSA_DTYPE_E5M2];
}

// ------------------------------------------------------------------------------------------------------------- accepting

bool is_code(cqsa_dtype t) { return t == CQSA_DTYPE_E4M3FN || t == CQSA_DTYPE_E5M2; }

const char* why_not_operand(const cqsa_matrix& x, int64_t rows, int64_t k, int64_t batch) {
  if (k > 1 && x.stride[2] != 1) return "k is not contiguous";
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) return "codes are not aligned to 16";
  const auto copied = [](int64_t size, int64_t stride, int64_t least) {
    return size <= 1 || (stride % 16 == 0 && stride >= least && stride < int64_t(1) << 40);
  };
  if (!copied(rows, x.stride[1], 16) || !copied(batch, x.stride[0], 0)) return "rows or batch items are not multiples of 16 bytes apart";
  return nullptr;
}

const char* why_not(const cqsa_fp8_gemm_leaf& a) {
  if (a.chip.tier != 90) return "the device has no sm_90a code";
  if (!is_code(a.a.dtype) || !is_code(a.b.dtype)) return "a and b must be e4m3fn or e5m2";
  if (a.a.dtype == CQSA_DTYPE_E5M2 && a.b.dtype == CQSA_DTYPE_E5M2) return "a and b are both e5m2, which no network multiplies";
  if (!is_gemm_output(a)) return "d must be f32, f16, bf16 or codes of FP8, c and bias f32, f16 or bf16";
  if (a.batch < 1 || a.m < 1 || a.n < 1 || a.k < 1) return "there is nothing to multiply";
  if (a.m > most_size || a.n > most_size || a.k > most_size || count_of(a, tiles[size_small]) > most_size / 16) return "m, n and k are at most 2^30";
  if (a.chip.shared_bytes > 0 && a.chip.shared_bytes < tiles[size_large].shared_bytes) return "the device has too little shared memory";
  if (const char* text = why_not_operand(a.a, a.m, a.k, a.batch)) return text;
  return why_not_operand(a.b, a.n, a.k, a.batch);
}

cqsa_status probe(void*, const cqsa_fp8_gemm_leaf* leaf, char* reason, uint64_t size) {
  const char* text = why_not(*leaf);
  if (text && reason && size) std::snprintf(reason, size, "%s", text);
  return text ? CQSA_ERROR_UNSUPPORTED : CQSA_OK;
}

uint64_t workspace(const cqsa_fp8_gemm_leaf* leaf, int64_t) { return gemm_ticket_bytes(*leaf); }

// --------------------------------------------------------------------------------------------------------------- launch

// Codes as the copy engine knows them: 128 of k and `box_rows` rows at a time. *item: coordinates from one batch item to the next.
cqsa_status map_of(void* device, const cqsa_matrix& x, int64_t rows, int64_t k, int64_t batch, int32_t box_rows, tensor_map* out, int32_t* item) {
  tensor_box b{x.data, kind_u8, {uint64_t(k), uint64_t(rows), 1, 1}, {16, 16, 16}, {128, uint32_t(box_rows), 1, 1}};
  if (rows > 1) b.stride[0] = uint64_t(x.stride[1]);
  *item = batch > 1 && x.stride[0] != 0;
  if (*item) b.size[2] = uint64_t(batch), b.stride[1] = uint64_t(x.stride[0]);
  return encode_tensor(device, b, out);
}

cqsa_status launch_leaf(void* device, const cqsa_fp8_gemm_leaf* leaf, void* memory, uint64_t bytes, const cqsa_exec* exec, void* stream) {
  const cqsa_fp8_gemm_leaf& a = *leaf;
  if (why_not(a)) return portable_fp8_gemm.launch(device, leaf, memory, bytes, exec, stream);
  sm90::gemm_launch p{};
  static_assert(sizeof p <= most_params_bytes);
  if (!fill_gemm(a, memory, bytes, &p.g)) return fail(CQSA_ERROR_WORKSPACE, "d_amax needs a workspace of %d bytes", int(gemm_ticket_bytes(a)));
  const int64_t units = larger(facts_of(device).compute_units, 2);
  const int size = choose(a, units);
  const tile& t = tiles[size];
  p.g.row_tiles = divide_up(a.m, t.rows), p.g.column_tiles = divide_up(a.n, int64_t(t.columns) * t.cluster);
  p.group = t.group, p.clusters = int32_t(smaller(count_of(a, t), units / t.cluster));
  cqsa_status status = map_of(device, a.a, a.m, a.k, a.batch, 128, &p.map_a, &p.a_item);
  if (status == CQSA_OK) status = map_of(device, a.b, a.n, a.k, a.batch, t.columns, &p.map_b, &p.b_item);
  if (status != CQSA_OK) return portable_fp8_gemm.launch(device, leaf, memory, bytes, exec, stream);
  const launch_shape shape{{uint32_t(p.clusters * t.cluster), 1, 1}, 384, uint32_t(t.shared_bytes)};
  return launch(device, kernel_of(a, size, form_of(a, p.g)), shape, &p, sizeof p, stream);
}

}  // namespace

extern const cqsa_fp8_gemm_impl sm90_fp8_gemm = {
    "cuda_sm90", "Hopper; e4m3fn and e5m2 but not e5m2 twice, k contiguous, rows a multiple of 16 bytes apart", CQSA_FP8_PROVIDER_OWN, 0, probe, workspace, launch_leaf};

}  // namespace cqsa::gpu
