// SPDX-License-Identifier: Apache-2.0
// Host part of quantization: what a job is to its kernels, which of them takes it, and how many blocks it gets.
#include "fp8.h"

#include "backends/fp8_rules.h"
#include "fp8_fill.h"

#include <initializer_list>

namespace cqsa::gpu {
namespace {

constexpr int64_t threads = 256;
constexpr uint64_t words_at = 128;  // behind the header and the ticket

enum class way { general, stream, tile, group, row, columns, quick_stream, quick_row, quick_group, quick_tile };

const cqsa_fp8_output& side_of(const cqsa_fp8_job& job, int s) { return s == 0 ? job.row : job.transposed; }
// Data may be missing: of what is empty, and where only the workspace is asked for.
bool is_wanted(const cqsa_fp8_output& o) { return o.codes.dtype != CQSA_DTYPE_NONE; }
bool is_single(const cqsa_fp8_output& o) { return !o.per_group && o.scale.rows == 1 && o.scale.columns == 1; }
bool single_amax(const cqsa_fp8_job& job) { return job.block_amax.data && job.block_amax.rows == 1 && job.block_amax.columns == 1; }

// Whether a side's scales come from an amax that only a whole launch can find.
bool is_late(const cqsa_fp8_job& job) {
  if (job.source != CQSA_FP8_CURRENT) return false;
  for (int s = 0; s < 2; ++s)
    if (const cqsa_fp8_output& o = side_of(job, s); is_wanted(o) && (is_single(o) || o.per_group)) return true;
  return false;
}
bool any_per_group(const cqsa_fp8_job& job) {
  return (is_wanted(job.row) && job.row.per_group) || (is_wanted(job.transposed) && job.transposed.per_group);
}

// 32-bit words of a job in the workspace.
int64_t words_of(const cqsa_fp8_job& job) {
  if (!job.amax && !job.ring.state && !single_amax(job) && !is_late(job)) return 0;
  return 1 + (is_late(job) && any_per_group(job) ? job.num_groups : 0);
}

fp8_side make_side(const cqsa_fp8_job& job, int s, int first) {
  const cqsa_fp8_output& o = side_of(job, s);
  fp8_side out{};
  if (!is_wanted(o)) return out;
  static char nowhere[16];  // stands for codes that are none: nothing is written there
  out.codes = matrix_of(o.codes);
  if (!out.codes.data) out.codes.data = nowhere;
  out.scale_in = grid_of(o.scale_in.data ? o.scale_in : side_of(job, first).scale_in);
  out.scale = grid_of(o.scale), out.scale_inv = grid_of(o.scale_inv);
  out.rows = o.scale.rows, out.columns = o.scale.columns;
  out.block[0] = o.scale.block[0], out.block[1] = o.scale.block[1];
  out.format = o.codes.dtype;
  out.pow2 = (job.flags & CQSA_FP8_POW2) || powers_only(o.scale_inv);
  out.ratio = job.source == CQSA_FP8_STATIC && o.scale_in.data ? 1.0f : o.ratio;
  out.single = is_single(o), out.per_group = o.per_group;
  return out;
}

fp8_job make_job(const cqsa_fp8_job& a) {
  fp8_job j{};
  j.batch = a.batch, j.rows = a.rows, j.columns = a.columns;
  j.x = matrix_of(a.x), j.up = matrix_of(a.up);
  j.x_scale_inv = grid_of(a.x_scale_inv);
  j.x_block[0] = larger(a.x_scale_inv.block[0], 1), j.x_block[1] = larger(a.x_scale_inv.block[1], 1);
  j.first_side = is_wanted(a.row) ? 0 : is_wanted(a.transposed) ? 1 : 3;
  for (int s = 0; s < 2; ++s) j.side[s] = make_side(a, s, j.first_side == 3 ? 0 : j.first_side);
  j.amax = a.amax;
  if (single_amax(a)) {
    j.amax = static_cast<float*>(a.block_amax.data);
  } else if (a.block_amax.data) {
    fp8_side& m = j.side[amax_side];
    m.scale = grid_of(a.block_amax), m.rows = a.block_amax.rows, m.columns = a.block_amax.columns;
    m.block[0] = a.block_amax.block[0], m.block[1] = a.block_amax.block[1];
  }
  j.source = a.source, j.ignore_nan = a.nan_policy == CQSA_FP8_NAN_IGNORE, j.margin = a.margin;
  j.saturate = !(a.flags & CQSA_FP8_NO_SATURATE);
  j.eps = a.eps, j.amax_limit = a.amax_limit;
  j.column_sum = a.column_sum, j.column_sum_stride = a.column_sum_stride;
  j.counters = a.counters, j.counters_stride = a.counters_stride;
  j.skip = a.skip, j.rng = a.rng, j.rng_stride = a.rng_stride;
  j.groups = a.groups, j.groups_stride = a.groups_stride, j.num_groups = a.num_groups;
  j.groups_bytes = a.groups_dtype == CQSA_DTYPE_I64 ? 8 : 4, j.per_group = words_of(a) > 1;
  j.ring = ring_place_of(a.ring, (a.flags & CQSA_FP8_RING_STAGE) != 0);
  return j;
}

// Vectors of 16 bytes are counted with 32 bits.
constexpr int64_t most_in_row = int64_t(1) << 32;
constexpr int64_t most_in_shared = int64_t(1) << 22;
int64_t numbers_of(const fp8_job& j) { return j.x.kind == kind_f32 ? 4 : 8; }
int64_t number_bytes(const fp8_matrix& x) { return x.kind == kind_f32 ? 4 : x.kind <= kind_bf16 ? 2 : 1; }
bool plain_format(int32_t format) { return format == CQSA_DTYPE_E4M3FN || format == CQSA_DTYPE_E5M2; }

// The batch as more rows, where all operands allow it.
bool fold_batch(fp8_job& j) {
  if (j.batch == 1) return true;
  const auto folds = [&](const fp8_matrix& m) { return !m.data || m.stride[0] == j.rows * m.stride[1]; };
  if (!folds(j.x) || !folds(j.side[0].codes) || !folds(j.side[1].codes)) return false;
  j.rows *= j.batch, j.batch = 1;
  return true;
}

// What only the general kernel does.
bool is_special(const fp8_job& j) {
  return j.up.data || j.x_scale_inv.data || j.rng || j.column_sum || j.side[amax_side].scale.data || j.x.kind > kind_bf16 || j.per_group;
}

bool unit_strides(const fp8_job& j) {
  const fp8_side& r = j.side[0];
  return j.columns <= 1 || (j.x.stride[2] == 1 && (!r.codes.data || r.codes.stride[2] == 1));
}
void align_rows(fp8_job& j) {
  const int64_t step = j.rows > 1 ? 1 : 0;
  j.x.aligned = aligned_to(j.x.data, 16) && step * j.x.stride[1] * number_bytes(j.x) % 16 == 0;
  j.side[0].codes.aligned = aligned_to(j.side[0].codes.data, 8) && step * j.side[0].codes.stride[1] % 8 == 0;
  j.side[1].codes.aligned = aligned_to(j.side[1].codes.data, 16) && j.side[1].codes.stride[2] % 16 == 0;
}
// All rows as one, where nothing lies between them.
bool make_one_row(fp8_job& j) {
  const fp8_matrix& codes = j.side[0].codes;
  if (j.rows > 1 && (j.x.stride[1] != j.columns || (codes.data && codes.stride[1] != j.columns))) return false;
  if (j.rows * j.columns >= most_in_row) return false;
  j.columns *= j.rows, j.rows = 1;
  return true;
}

// Row-major or the amax alone, by kernels that know one job and no groups of rows.
bool is_plain_row(fp8_job& j) {
  const fp8_side& side = j.side[0];
  if (is_special(j) || j.groups || j.side[1].codes.data || !fold_batch(j) || !unit_strides(j) || j.columns >= most_in_row) return false;
  return !side.codes.data || plain_format(side.format);
}
bool knows_scale(const fp8_job& j, int32_t phase) {
  const fp8_side& side = j.side[0];
  return !side.codes.data || (side.single && (j.source != CQSA_FP8_CURRENT || phase == phase_codes));
}

bool streams(fp8_job& j, int32_t phase) {
  if (!is_plain_row(j) || !knows_scale(j, phase) || !make_one_row(j)) return false;
  align_rows(j);
  return true;
}

// Whether a tile of 128 x 128 holds the side's scale blocks, or one scale is known.
bool fits_tile(const fp8_job& j, const fp8_side& side, bool known, bool turned) {
  if (!side.codes.data) return true;
  if (!plain_format(side.format)) return false;
  if (known && side.single) return true;
  if (j.source != CQSA_FP8_CURRENT || side.single) return false;
  const int64_t high = fp8_tile_size < j.rows ? fp8_tile_size : j.rows, wide = fp8_tile_size < j.columns ? fp8_tile_size : j.columns;
  return (side.block[0] == high || (!turned && side.block[0] == 1)) && (side.block[1] == wide || (turned && side.block[1] == 1)) &&
         (side.block[0] > 1 || !turned) && (side.block[1] > 1 || turned);
}

bool tiles(fp8_job& j, int32_t phase) {
  if (is_special(j) || j.groups || !fold_batch(j) || !unit_strides(j)) return false;
  const bool known = j.source != CQSA_FP8_CURRENT || phase == phase_codes;
  if (!j.side[1].codes.data && (!j.side[0].codes.data || j.side[0].block[0] == 1)) return false;  // better in rows
  if (j.side[1].codes.data && j.rows > 1 && j.side[1].codes.stride[1] != 1) return false;
  if (!fits_tile(j, j.side[0], known, false) || !fits_tile(j, j.side[1], known, true)) return false;
  align_rows(j);
  return true;
}

// Pieces of rows, with scales of this launch or a known one.
bool by_rows(fp8_job& j, int32_t phase, way* how) {
  const fp8_side& side = j.side[0];
  const bool known = knows_scale(j, phase);
  if (!is_plain_row(j) || (!known && (j.source != CQSA_FP8_CURRENT || side.single || side.block[0] != 1))) return false;
  const int64_t g = known ? j.columns : side.block[1], numbers = numbers_of(j);
  if (g < 32 || j.rows * divide_up(j.columns, g) >= int64_t(1) << 30) return false;
  align_rows(j);
  *how = way::row;
  if (known || side.columns == 1) return true;
  j.x.aligned = j.x.aligned && g % 8 == 0;
  if (j.x.aligned && side.codes.aligned && j.columns % numbers == 0 && (g & (g - 1)) == 0 && g <= 32 * numbers) {
    *how = way::group;
    if (j.columns % g == 0) make_one_row(j);
  }
  return true;
}

// Scales of columns, of all rows or of blocks of them; whole vectors alone.
bool by_columns(fp8_job& j) {
  const fp8_side& side = j.side[0];
  if (!is_plain_row(j) || j.source != CQSA_FP8_CURRENT || !side.codes.data || side.single || side.block[1] != 1 || side.block[0] < 2) return false;
  align_rows(j);
  return j.x.aligned && side.codes.aligned && j.columns % numbers_of(j) == 0 && j.rows > 0 && side.rows * j.columns < int64_t(1) << 31 && j.rows < int64_t(1) << 30;
}

// f16 or bf16 in whole aligned vectors, and nothing to be counted, left out or kept infinite: what fp8_quick.cuh takes.
bool is_quick(const fp8_job& j) {
  if (!j.x.aligned || j.x.kind == kind_f32 || j.counters || j.ignore_nan || !j.saturate || j.columns % 8 != 0 || j.rows * j.columns == 0) return false;
  for (int s = 0; s < 2; ++s) {
    const fp8_side& side = j.side[s];
    if (side.codes.data && (!side.codes.aligned || side.scale.layout != CQSA_FP8_SCALES_STRIDED || side.scale_inv.layout != CQSA_FP8_SCALES_STRIDED)) return false;
  }
  return true;
}
bool quick_row_fits(const fp8_job& j, int32_t phase) {
  return !j.words && !knows_scale(j, phase) && j.side[0].columns == 1 && j.columns >= 2048 && j.columns <= 16384;
}
// Whether both outputs have the same codes.
bool same_codes(const fp8_side& a, const fp8_side& b) {
  return a.single && a.format == b.format && a.pow2 == b.pow2 && a.ratio == b.ratio && a.scale_in.data == b.scale_in.data && a.scale_in.bytes == b.scale_in.bytes;
}
bool quick_tile_fits(const fp8_job& j, int32_t phase) {
  const bool known = j.source != CQSA_FP8_CURRENT || phase == phase_codes;
  if (!known || !j.side[1].codes.data || !j.side[1].single || (j.side[0].codes.data && !same_codes(j.side[0], j.side[1]))) return false;
  return j.rows % fp8_tile_size == 0 && j.columns % fp8_tile_size == 0 && j.rows / fp8_tile_size * (j.columns / fp8_tile_size) < int64_t(1) << 30;
}
// The kernel that has a block for each piece of the work, where there is one.
way quick_way(const device_facts& facts, const fp8_job& j, int32_t phase, way how) {
  if (!is_quick(j)) return how;
  const bool whole = j.columns % (32 * facts.lanes) == 0;  // teams of lanes
  switch (how) {
    case way::stream: return whole ? way::quick_stream : how;
    case way::row: return whole && quick_row_fits(j, phase) ? way::quick_row : how;
    case way::group: return whole && !j.words && j.rows == 1 ? way::quick_group : how;
    case way::tile: return quick_tile_fits(j, phase) ? way::quick_tile : how;
    default: return how;
  }
}

way way_of(fp8_job& j, int32_t phase) {
  way how = way::general;
  fp8_job copy = j;
  if (streams(copy, phase)) how = way::stream;
  else if (copy = j; by_rows(copy, phase, &how)) {}
  else if (copy = j; tiles(copy, phase)) how = way::tile;
  else if (copy = j; by_columns(copy)) how = way::columns;
  else copy = j;
  j = copy;
  return how;
}

// How long a piece is that a block has at a time, and with how many threads.
int64_t length_of(const fp8_job& j, int32_t phase, way how) { return how == way::group || knows_scale(j, phase) ? j.columns : j.side[0].block[1]; }
int64_t threads_of(const device_facts& facts, const fp8_job& j, int32_t phase, way how) {
  switch (how) {
    case way::columns: return fp8_columns_threads;
    case way::quick_stream: return j.words && j.columns > 1024 * 32 * threads ? 2 * threads : threads;  // fewer tickets
    case way::quick_row: return j.columns / 32;
    case way::group:
    case way::row: {
      const int64_t wanted = divide_up(length_of(j, phase, how), numbers_of(j) * 4);
      return smaller(divide_up(larger(wanted, 1), facts.lanes) * facts.lanes, threads);
    }
    default: return threads;
  }
}

// A ticket costs its block a fence that waits for the codes.
int64_t quick_stream_blocks(const device_facts& facts, int64_t pieces, bool words) { return words ? smaller(pieces, larger(facts.compute_units, 1) * int64_t(9)) : pieces; }
int64_t tiles_of(const fp8_job& j) { return divide_up(j.rows, fp8_tile_size) * divide_up(j.columns, fp8_tile_size); }
int64_t blocks_of(const device_facts& facts, const fp8_job& j, int32_t phase, way how) {
  const int64_t n = j.batch * j.rows * j.columns, mine = threads_of(facts, j, phase, how), length = larger(length_of(j, phase, how), 1);
  const auto of_unit = [&](int64_t full) { return full * threads / mine; };
  switch (how) {
    case way::stream: return fp8_blocks(facts, divide_up(n, numbers_of(j)), mine * 4, fp8_stream_blocks);
    case way::tile: return fp8_blocks(facts, tiles_of(j), 1, fp8_tile_blocks(j.x.kind != kind_f32 && facts.arch >= 80));
    case way::group: return fp8_blocks(facts, j.rows * divide_up(length, numbers_of(j) * 4 * mine), 1, of_unit(fp8_group_blocks));
    case way::columns: return fp8_blocks(facts, j.side[0].rows * divide_up(j.columns, 8 * numbers_of(j)), 1, 1);
    case way::row: return fp8_blocks(facts, j.rows * divide_up(j.columns, length), 1, of_unit(fp8_row_blocks));
    case way::quick_stream: return quick_stream_blocks(facts, divide_up(j.columns, 32 * mine), j.words);
    case way::quick_group: return divide_up(j.columns, 32 * mine);
    case way::quick_row: return j.rows;
    case way::quick_tile: return tiles_of(j);
    default: return fp8_blocks(facts, n, threads, 8);
  }
}

// The kernels for one job are the faster ones; those for many are the stream and the general one.
bool takes_many(way how) { return how == way::general || how == way::stream; }

kernel_id kernel_of(way how, const fp8_params& p) {
  switch (how) {
    case way::stream: return p.count > 1 ? kernel_id::cqsa_fp8_stream_many : kernel_id::cqsa_fp8_stream;
    case way::tile: return p.jobs[0].x.kind == kind_f32 ? kernel_id::cqsa_fp8_tile_f32 : kernel_id::cqsa_fp8_tile_half;
    case way::group: return kernel_id::cqsa_fp8_group;
    case way::row: return kernel_id::cqsa_fp8_row;
    case way::columns: return kernel_id::cqsa_fp8_columns;
    case way::quick_stream: return kernel_id::cqsa_fp8_quick_stream;
    case way::quick_row: return kernel_id::cqsa_fp8_quick_row;
    case way::quick_group: return kernel_id::cqsa_fp8_quick_group;
    case way::quick_tile: return kernel_id::cqsa_fp8_quick_tile;
    default: return kernel_id::cqsa_fp8_general;
  }
}
int32_t shared_of(way how) {
  switch (how) {
    case way::general: return int32_t(threads) * 4;
    case way::tile: return fp8_tile_bytes;
    case way::columns: return fp8_columns_bytes;
    case way::quick_tile: return fp8_quick_tile_bytes;
    default: return 0;
  }
}

// Jobs of one kernel that stand one after the other.
struct batch_of_jobs {
  fp8_params p{};
  way how = way::general;
};

cqsa_status launch_kernel(void* device, kernel_id kernel, const launch_shape& shape, const fp8_params& p, void* stream) {
  if (kernel == kernel_id::cqsa_fp8_general || kernel == kernel_id::cqsa_fp8_stream_many) return launch(device, kernel, shape, &p, sizeof p, stream);
  const fp8_one_params one{{p.jobs[0]}, p.workspace, p.ticket, 1, p.phase};
  return launch(device, kernel, shape, &one, sizeof one, stream);
}

cqsa_status launch_jobs(void* device, batch_of_jobs& b, void* stream) {
  fp8_params& p = b.p;
  if (p.count == 0) return CQSA_OK;
  int64_t blocks = 0;
  bool words = false;
  for (int32_t i = 0; i < p.count; ++i) {
    fp8_job& j = p.jobs[i];
    j.first_block = blocks, j.blocks = blocks_of(facts_of(device), j, p.phase, b.how), blocks += j.blocks;
    words = words || j.words;
  }
  if (!words) p.workspace = nullptr;
  // The launch behind one that looks for an amax alone finds its word.
  p.ticket = words && p.phase != phase_amax ? reinterpret_cast<uint32_t*>(p.workspace + sizeof(fp8::workspace_header)) : nullptr;
  const launch_shape shape{{uint32_t(blocks), 1, 1}, uint32_t(threads_of(facts_of(device), p.jobs[0], p.phase, b.how)), uint32_t(fp8_control_bytes + shared_of(b.how))};
  const cqsa_status status = launch_kernel(device, kernel_of(b.how, p), shape, p, stream);
  p.count = 0;
  return status;
}

// The job as one phase has it: where its amax is looked for first, nothing else is.
fp8_job job_in_phase(const cqsa_fp8_job& a, int32_t phase) {
  fp8_job j = make_job(a);
  if (phase == phase_amax) j.side[0].codes.data = j.side[1].codes.data = j.side[amax_side].scale.data = nullptr, j.column_sum = nullptr;
  return j;
}

cqsa_status launch_phase(void* device, const cqsa_fp8_quantize_leaf& leaf, char* workspace, int32_t phase, void* stream) {
  batch_of_jobs b;
  b.p.phase = phase;
  uint32_t* words = reinterpret_cast<uint32_t*>(workspace + (workspace ? words_at : 0));
  for (int64_t i = 0; i < leaf.count; ++i) {
    const int64_t count = words_of(leaf.jobs[i]);
    uint32_t* const mine = count ? words : nullptr;
    words += count;
    if (is_late(leaf.jobs[i]) != (phase != phase_all)) continue;
    fp8_job j = job_in_phase(leaf.jobs[i], phase);
    j.words = mine, j.backward = phase == phase_codes;
    way how = way_of(j, phase);
    // Small streams of a call share launches.
    if (how != way::stream || leaf.count == 1 || j.columns > most_in_shared) how = quick_way(facts_of(device), j, phase, how);
    if (b.p.count == (takes_many(b.how) ? most_fp8_jobs : 1) || (b.p.count && how != b.how))
      if (const cqsa_status status = launch_jobs(device, b, stream); status != CQSA_OK) return status;
    b.p.workspace = workspace, b.how = how;
    b.p.jobs[b.p.count++] = j;
  }
  return launch_jobs(device, b, stream);
}

}  // namespace

uint64_t portable_fp8_quantize_workspace(const cqsa_fp8_quantize_leaf* leaf, int64_t) {
  int64_t words = 0;
  for (int64_t i = 0; i < leaf->count; ++i) words += words_of(leaf->jobs[i]);
  return words ? words_at + uint64_t(divide_up(words * 4, 64)) * 64 : 0;
}

cqsa_status portable_fp8_quantize(void* device, const cqsa_fp8_quantize_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* stream) {
  const uint64_t needed = portable_fp8_quantize_workspace(leaf, 1);
  if (bytes < needed || (needed && !workspace)) return fail(CQSA_ERROR_WORKSPACE, "a workspace of %llu bytes where %llu are needed", (unsigned long long)bytes, (unsigned long long)needed);
  char* const memory = needed ? static_cast<char*>(workspace) : nullptr;
  for (const int32_t phase : {phase_all, phase_amax, phase_codes})
    if (const cqsa_status status = launch_phase(device, *leaf, memory, phase, stream); status != CQSA_OK) return status;
  return CQSA_OK;
}

}  // namespace cqsa::gpu
