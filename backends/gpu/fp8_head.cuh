// SPDX-License-Identifier: Apache-2.0
// Begin and end of every kernel that quantizes: which job a block has, whether it may go on, its scales; and in the last block of the
// grid what is done once: amaxes out, rings, the workspace as it was found.
#pragma once

#include "fp8_element.cuh"

namespace cqsa::gpu {

struct fp8_head {
  bool go;
  int64_t rows;  // that count: those of all groups
  float scale[2];
};

// What is rare goes to shared memory at once, so that loops need no registers for it.
struct fp8_control {
  uint32_t part[32];  // of each team of lanes
  uint32_t amax;      // of what went the slow way
  uint32_t nan, infinite, saturated;
  float scale;        // fp8_quick.cuh: of the whole launch; 0: it may not go on
};
static_assert(sizeof(fp8_control) <= fp8_control_bytes);
CQSA_DEVICE fp8_control& control() { return *reinterpret_cast<fp8_control*>(shared_memory()); }

// The job of this block. A kernel for one job finds all about it in constant memory; which of many it is would cost registers.
template <bool Many, class P> CQSA_DEVICE const fp8_job& job_of(const P& p) {
  if constexpr (!Many) return p.jobs[0];
  int j = 0;
  while (j + 1 < p.count && block_index_x() >= p.jobs[j + 1].first_block) ++j;
  return p.jobs[j];
}

// The same job for what is seldom done.
CQSA_DEVICE const fp8_job& job_again(const fp8_job& job) { return (&job)[hidden_zero()]; }

template <class P> CQSA_DEVICE bool workspace_is_sound(const P& p) {
  return !p.workspace || reinterpret_cast<const fp8::workspace_header*>(p.workspace)->magic == fp8::workspace_magic;
}
// Without a way out before the end, so that all of it is on its way at once.
CQSA_DEVICE bool ring_is_sound(const fp8_ring_place& r) {
  const fp8::ring_state& s = *reinterpret_cast<const fp8::ring_state*>(r.state);
  bool sound = (s.magic == fp8::ring_magic) & (s.version == fp8::ring_version) & (s.hist_len == r.hist_len) & (s.format == r.format) & (s.margin == r.margin);
  sound = sound & (s.algorithm == r.algorithm) & (s.pow2 == r.pow2) & (s.index >= 0) & (s.index < s.hist_len);
  return sound & (bits_of(s.scale) >= 0x00800000u) & (bits_of(s.scale) < inf_bits);
}
// Of a static scale. As E8M0 another one would be published than the codes were made with.
CQSA_DEVICE bool scale_is_sound(const fp8_side& side, float x) {
  return side.scale_inv.data && has_bytes(side.scale_inv) ? fp8::is_power_of_two(x) : fp8::is_scale(x);
}

CQSA_DEVICE fp8::scale_rule rule_of(const fp8_job& job, const fp8_side& side) {
  return {side.format, job.margin, side.pow2, job.eps, job.amax_limit};
}

CQSA_DEVICE float plain_amax(uint32_t bits) { return plain_nan(float_of(bits)); }

// The pair of block (r, c) where it does not depend on this launch's data: static, 0 where that is wrong, or from the amaxes of the launch before.
CQSA_DEVICE fp8::scale_pair known_scale(const fp8_job& job, const fp8_side& side, int64_t r, int64_t c) {
  if (job.source == CQSA_FP8_STATIC) {
    const float scale = load_scale(side.scale_in, r, c, side.columns);
    if (!scale_is_sound(side, scale)) return {0.0f, 0.0f, 0};
    return fp8::scale_times(scale, side.ratio);
  }
  return fp8::scale_of(plain_amax(job.words[side.per_group ? 1 + r : 0]), rule_of(job, side));
}
CQSA_DEVICE fp8::scale_pair single_scale(const fp8_job& job, const fp8_side& side) {
  if (job.source != CQSA_FP8_RING) return known_scale(job, side, 0, 0);
  const fp8::ring_state& s = *reinterpret_cast<const fp8::ring_state*>(job.ring.state);
  if (side.ratio == 1.0f) return {s.scale, s.scale_inv, 0};
  return fp8::scale_times(s.scale, side.ratio);
}

// Codes of this launch have scales that are known at its begin.
template <class P> CQSA_DEVICE bool is_known(const P& p, const fp8_job& job, const fp8_side& side) {
  return job.source != CQSA_FP8_CURRENT || (p.phase == phase_codes && (side.single || side.per_group));
}

// The same for all threads of the block. They have to meet before one of them comes upon something rare: control() is cleared here. What is
// read does not wait for each other; a kernel asks for its first numbers before it comes here. Special: batches and groups of rows, scales of
// blocks that are known. Sides: those that may have codes.
template <bool Special = false, int Sides = 2, class P> CQSA_DEVICE fp8_head head_of(const P& p, const fp8_job& job) {
  if (thread_index() == 0) control().amax = control().nan = control().infinite = control().saturated = 0;
  fp8_head head{};
  head.rows = Special ? job.batch * job.rows : job.rows;
  const uint32_t skip = job.skip ? load_u32(reinterpret_cast<const char*>(job.skip)) : 0;
  bool sound = workspace_is_sound(p);
  if (job.ring.state) sound = sound & ring_is_sound(job.ring);
  if (p.phase != phase_amax)
#pragma unroll
    for (int s = 0; s < Sides; ++s) {
      const fp8_side& side = job.side[s];
      if (!side.codes.data || !side.single || !is_known(p, job, side)) continue;
      head.scale[s] = single_scale(job, side).scale;
      sound = sound & fp8::is_scale(head.scale[s]);
    }
  if (Special && job.groups) head.rows = group_begin(job.groups, job.groups_bytes, job.groups_stride, job.num_groups, head.rows);
  head.go = sound & (skip == 0);
  const bool first = block_index_x() == job.first_block && thread_index() == 0;
  if (!sound && skip == 0 && first && job.counters && p.phase != phase_amax) atomic_add_i64(job.counters + 3 * job.counters_stride, 1);
  return head;
}

// Scales that were known, and padding of all; a share of it for every block of the job.
template <bool Special = false, int Sides = 2, class P> CQSA_DEVICE void publish(const P& p, const fp8_job& job, const fp8_head& head) {
  if (p.phase == phase_amax) return;
  const int64_t first = (block_index_x() - job.first_block) * block_threads() + thread_index(), step = job.blocks * block_threads();
#pragma unroll 1
  for (int s = 0; s < Sides; ++s) {
    const fp8_side& side = job.side[s];
    if (!side.codes.data) continue;
    clear_padding(side.scale_inv, side.rows, side.columns, first, step);
    const bool counts = job.counters && job.source == CQSA_FP8_STATIC && !side.single;
    if (!is_known(p, job, side) || (!side.scale.data && !side.scale_inv.data && !counts)) continue;
    if (side.single || !Special) {
      if (first != 0 || (Special && job.groups && head.rows == 0)) continue;
      const fp8::scale_pair pair = single_scale(job, side);
      store_scales(side, 0, 0, pair.scale, pair.scale_inv);
      continue;
    }
    const int64_t rows = job.groups && !side.per_group ? min_i64(side.rows, head.rows) : side.rows;  // others are in no group
#pragma unroll 1
    for (int64_t i = first; i < rows * side.columns; i += step) {
      const int64_t r = i / side.columns, c = i - r * side.columns;
      const fp8::scale_pair pair = known_scale(job, side, r, c);
      if (!fp8::is_scale(pair.scale)) {
        if (counts) atomic_add_i64(job.counters + 3 * job.counters_stride, 1);
        continue;
      }
      store_scales(side, r, c, pair.scale, pair.scale_inv);
    }
  }
}

// ---- end --------------------------------------------------------------------------------------------------------------------

template <int Lanes> CQSA_DEVICE uint32_t most_of_lanes(uint32_t value, int lanes = Lanes) {
  for (int mask = 1; mask < lanes; mask *= 2) value = larger_u32(value, shuffle_xor<Lanes>(value, mask));
  return value;
}

// Of all threads of the block, to all; a barrier on both sides. The caller's shared words do not overlap with control().
template <int Lanes> CQSA_DEVICE uint32_t most_of_block(uint32_t value) {
  value = most_of_lanes<Lanes>(value);
  if (thread_index() % Lanes == 0) control().part[thread_index() / Lanes] = value;
  barrier();
  value = 0;
  for (int i = 0; i < block_threads() / Lanes; ++i) value = larger_u32(value, control().part[i]);
  barrier();
  return value;
}

CQSA_DEVICE void count(uint32_t* to, uint32_t n) {
  if (n) atomic_add(to, n);
}
CQSA_DEVICE void take_counts(const fp8_counts& c) { count(&control().nan, c.nan), count(&control().infinite, c.infinite), count(&control().saturated, c.saturated); }

// One thread of the block, when all have counted.
CQSA_DEVICE void add_counts(const fp8_job& job) {
  const uint32_t n[3] = {control().nan, control().infinite, control().saturated};
  for (int i = 0; i < 3; ++i)
    if (n[i]) atomic_add_i64(job.counters + i * job.counters_stride, n[i]);
}

// The largest amax of a ring's history but for the one that goes next, for all lanes of a team. It needs no amax of this call, so that
// both are read at the same time.
template <int Lanes> CQSA_DEVICE uint32_t ring_most(const char* state, int hist_len) {
  const int index = reinterpret_cast<const fp8::ring_state*>(state)->index;
  const float* const history = reinterpret_cast<const float*>(state + sizeof(fp8::ring_state));
  uint32_t most = 0;
#pragma unroll 1
  for (int i = thread_index() % Lanes; i < hist_len; i += Lanes) {
    const uint32_t bits = fp8::amax_bits(history[i]);
    most = larger_u32(most, i != index ? bits : 0);
  }
  return most_of_lanes<Lanes>(most);
}

// An amax into a ring, with what ring_most() has found; one thread.
CQSA_DEVICE void ring_take(char* state, float amax, uint32_t most) {
  fp8::ring_state& s = *reinterpret_cast<fp8::ring_state*>(state);
  float* const history = reinterpret_cast<float*>(state + sizeof(fp8::ring_state));
  if (!fp8::is_amax(amax)) {
    ++s.refused;
    return;
  }
  most = larger_u32(most, fp8::amax_bits(amax));
  history[s.index] = amax;
  s.index = s.index + 1 < s.hist_len ? s.index + 1 : 0;
  const float from = s.algorithm == CQSA_FP8_RING_MOST_RECENT ? amax : float_of(most);
  if (!(from > 0)) return;
  const fp8::scale_pair pair = fp8::scale_of(from, {s.format, s.margin, s.pow2, 0.0f, 0.0f});
  s.scale = pair.scale, s.scale_inv = pair.scale_inv;
}

CQSA_DEVICE void ring_stage(char* state, float amax) {
  fp8::ring_state& s = *reinterpret_cast<fp8::ring_state*>(state);
  if (!fp8::is_amax(amax)) ++s.refused;
  else if (amax > s.staged) s.staged = amax;
}

// What the word of a job holds that was not done; no magnitude is as large.
constexpr uint32_t refused_bits = 0xffffffffu;

// Of a job whose blocks have all ended; a team of lanes.
template <int Lanes, class P> CQSA_DEVICE void end_job(const P& p, const fp8_job& job) {
  const int lane = thread_index() % Lanes;
  const uint32_t bits = job.words[0];
  const bool folds = p.phase != phase_amax && job.ring.state && !job.ring.stage;
  const uint32_t most = folds ? ring_most<Lanes>(job.ring.state, job.ring.hist_len) : 0;
  const float amax = plain_amax(bits);
  lanes_barrier<Lanes>();  // before the word is cleared
  if (p.phase == phase_amax) return;
  if (bits != refused_bits && lane == 0) {
    if (job.amax) store_u32(reinterpret_cast<char*>(job.amax), bits_of(amax));
    if (folds) ring_take(job.ring.state, amax, most);
    if (job.ring.state && job.ring.stage) ring_stage(job.ring.state, amax);
  }
#pragma unroll 1
  for (int64_t i = lane; i < 1 + (job.per_group ? job.num_groups : 0); i += Lanes) job.words[i] = 0;
}

template <class P> CQSA_DEVICE bool has_words(const P& p) { return p.workspace && workspace_is_sound(p); }

// The amax of what a thread has seen, for block_amax() of the first team behind a barrier.
template <int Lanes> CQSA_DEVICE void leave_amax(uint32_t amax) {
  amax = most_of_lanes<Lanes>(amax);
  if (thread_index() % Lanes == 0) control().part[thread_index() / Lanes] = amax;
}
template <int Lanes> CQSA_DEVICE uint32_t block_amax() {
  const int lane = thread_index() % Lanes;
  return larger_u32(most_of_lanes<Lanes>(lane < block_threads() / Lanes ? control().part[lane] : 0), control().amax);
}

// Every block comes here once, with the amax of what its threads have seen; behind the barrier only its first team of lanes goes on. The
// ticket counts all blocks of the grid; the last one finds what the others have left, and leaves the workspace as it was. The launch that
// looks for an amax alone has no ticket: the one behind it finds the word.
template <int Lanes, bool Many, class P> CQSA_DEVICE void end_block(const P& p, const fp8_job& job, bool go, uint32_t amax) {
  const bool words = has_words(p);
  if (!words && !job.counters) return;
  leave_amax<Lanes>(amax);
  barrier();
  if (thread_index() >= Lanes) return;
  const int lane = thread_index();
  if (lane == 0 && job.counters && p.phase != phase_amax) add_counts(job);
  if (!words) return;
  amax = go ? block_amax<Lanes>() : refused_bits;
  uint32_t last = 0;
  if (lane == 0) {
    if (job.words && amax) atomic_max(job.words, amax);
    if (p.ticket) {
      const uint32_t taken = CQSA_MUTANT(31) ? atomic_add(p.ticket, 1) : atomic_add_release(p.ticket, 1);
      last = taken + 1 == uint32_t(grid_size_x()) - (CQSA_MUTANT(32) ? 1u : 0u);
      if (last) device_fence();
    }
  }
  if (!shuffle<Lanes>(last, 0)) return;
  lanes_barrier<Lanes>();
#pragma unroll 1
  for (int j = 0; j < (Many ? p.count : 1); ++j)
    if ((Many ? p.jobs[j] : job).words) end_job<Lanes>(p, Many ? p.jobs[j] : job);
  if (lane == 0 && !CQSA_MUTANT(33)) *p.ticket = 0;
}

}  // namespace cqsa::gpu
