// SPDX-License-Identifier: Apache-2.0
// FP8, one scale for a tensor that is one row: a stream of vectors through the whole device, as a copy does it. Also the amax of a tensor alone.
#pragma once

#include "fp8_vector.cuh"

namespace cqsa::gpu {

// The vectors of a thread: at, at + step, .. In the second of two launches they go backwards, since the cache has the end of x.
struct fp8_walk {
  uint32_t vectors, threads, at, step;
  uint32_t shift;  // of a round to its bit among 32
};
CQSA_DEVICE fp8_walk walk_of(const fp8_job& job) {
  const bool whole = job.x.aligned && (!job.side[0].codes.data || job.side[0].codes.aligned);
  fp8_walk w{};
  w.vectors = whole ? uint32_t(job.columns >> shift_of(job.x.kind)) : 0;
  w.threads = uint32_t(block_threads()) * uint32_t(job.blocks);
  const uint32_t mine = uint32_t(block_index_x() - job.first_block) * uint32_t(block_threads()) + uint32_t(thread_index());
  w.at = job.backward ? w.vectors - 1 - mine : mine, w.step = job.backward ? 0 - w.threads : w.threads;
  while (w.vectors >> w.shift >= 32 * fp8_each * uint64_t(w.threads)) ++w.shift;
  return w;
}

// Magnitudes above this need the slow way. Four units in the last place are more than the roundings of the quotient and of the product.
CQSA_DEVICE uint32_t slow_limit(const fp8_job& job, const fp8_side& side, float scale) {
  const uint32_t limit = strange_limit(job);
  if (!side.codes.data || !is_strict(job)) return limit;
  const uint32_t most = bits_of(largest_quick(side.format) / scale), safe = most < 4 ? 0 : most - 4;
  return safe < limit ? safe : limit;
}

// The loop that the time goes into. The next vectors are asked for as soon as registers are free. Rounds with something strange give a bit.
CQSA_DEVICE uint32_t stream_rounds(const fp8_job& job, const fp8_walk& w, float scale, uint32_t limit, fp8_vectors& v, uint32_t* most) {
  const fp8_side& side = job.side[0];
  const fp8_fast f = fast_of(side.format);
  const int kind = job.x.kind;
  uint32_t slow = 0;
#pragma unroll 1
  for (uint32_t at = w.at, round = 0; at < w.vectors; ++round) {
    uint32_t m[fp8_each];
    const uint32_t these = most_of_vectors(v, kind == kind_f32, m);
    const bool strange = most_bits(these, kind) > limit;
    slow |= uint32_t(strange) << (round >> w.shift);
    *most = most_of_two(*most, strange ? 0 : these, kind == kind_f32);
    if (side.codes.data) {
      fp8_codes c;
      encode_vectors(v, kind, scale, f, c);
      store_vectors(side.codes.data, kind == kind_f32, at, w.step, w.vectors, c);
    }
    at += fp8_each * w.step;
    if (at < w.vectors) load_vectors(job.x.data, at, w.step, w.vectors, v);
  }
  return slow;
}

// Vectors of rounds with a bit again, and the elements that are in no vector.
CQSA_DEVICE void stream_again(const fp8_job& job, const fp8_walk& w, float scale, uint32_t limit, uint32_t slow, uint32_t* most) {
  const int kind = job.x.kind, numbers = numbers_of(kind);
  const int64_t rest = int64_t(w.vectors) * numbers + (block_index_x() - job.first_block) * block_threads() + thread_index();
  if (!slow && rest >= job.columns) return;
#pragma unroll 1
  for (uint32_t at = w.at, v = 0;; at += w.step, ++v) {
    const bool there = slow && at < w.vectors;
    if (there && !(slow >> (v / fp8_each >> w.shift) & 1)) continue;
    if (there) {
      const uint32_t these = most_of_vector(load_once(job.x.data + int64_t(at) * 16), kind == kind_f32);
      if (most_bits(these, kind) <= limit) {
        *most = most_of_two(*most, these, kind == kind_f32);
        continue;
      }
    }
    if (there) slow_run(job, scale, 0, int64_t(at) * numbers, numbers, 1);
    else if (rest < job.columns) slow_run(job, scale, 0, rest, (job.columns - 1 - rest) / w.threads + 1, w.threads);
    if (!there) return;
  }
}

template <int Lanes, bool Many, class P> CQSA_DEVICE void fp8_stream_block(const P& p) {
  const fp8_job& job = job_of<Many>(p);
  const fp8_walk w = walk_of(job);
  fp8_vectors v;
  clear_vectors(v);
  if (w.at < w.vectors) load_vectors(job.x.data, w.at, w.step, w.vectors, v);
  const fp8_head head = head_of<false, 1>(p, job);
  uint32_t most = 0;
  if (head.go) {
    const uint32_t limit = slow_limit(job, job.side[0], head.scale[0]), slow = stream_rounds(job, w, head.scale[0], limit, v, &most);
    barrier();  // control() is cleared
    stream_again(job_again(job), w, head.scale[0], limit, slow, &most);
    most = most_bits(most, job.x.kind);
    publish<false, 1>(p, job, head);
  }
  end_block<Lanes, Many>(p, job, head.go, most);
}

}  // namespace cqsa::gpu
