// SPDX-License-Identifier: Apache-2.0
// The router: a block for each token, scores in shared memory, the best k one after the other.
#pragma once

#include "moe_small.cuh"

namespace cqsa::gpu {

// Shared memory: what a team of lanes found, then scores and ranks of all experts, then ranks of groups.
struct route_memory {
  float* words;
  int64_t num_experts;
  CQSA_DEVICE float* found() const { return words; }  // [2][8]
  CQSA_DEVICE float* score() const { return words + 16; }
  CQSA_DEVICE float* rank() const { return words + 16 + num_experts; }
  CQSA_DEVICE float* group() const { return words + 16 + 2 * num_experts; }
};

struct found_one {
  float value;
  int32_t index;
};
CQSA_DEVICE found_one better(const found_one& a, const found_one& b) {
  return b.index >= 0 && (a.index < 0 || b.value > a.value || (b.value == a.value && b.index < a.index)) ? b : a;
}

// The largest, of equals the first, of n values but those that are NaN, which are taken. For all threads; -1: all are.
template <int Lanes> CQSA_DEVICE int32_t best_index(const float* values, int64_t n, const route_memory& mem) {
  found_one best{0.0f, -1};
  for (int64_t i = thread_index(); i < n; i += block_threads())
    if (values[i] == values[i]) best = better(best, {values[i], int32_t(i)});
#pragma unroll
  for (int mask = Lanes / 2; mask > 0; mask /= 2) best = better(best, {shuffle_xor<Lanes>(best.value, mask), shuffle_xor<Lanes>(best.index, mask)});
  barrier();
  if (thread_index() % Lanes == 0) mem.found()[thread_index() / Lanes] = best.value, mem.found()[8 + thread_index() / Lanes] = float(best.index);
  barrier();
  best = {mem.found()[0], int32_t(mem.found()[8])};
  for (int i = 1; i < block_threads() / Lanes; ++i) best = better(best, {mem.found()[i], int32_t(mem.found()[8 + i])});
  return best.index;
}

CQSA_DEVICE float taken() { return float_of(0x7fc00000u); }
CQSA_DEVICE float number_or_least(float x) { return x != x ? -infinity() : x; }

template <int Lanes> CQSA_DEVICE void score_experts(const moe_route_params& p, int64_t t, const route_memory& mem) {
  float most = -infinity(), sum = 0;
  for (int64_t e = thread_index(); e < p.num_experts; e += block_threads()) {
    const float x = number_or_least(load_element(p.logits.data, p.logits.kind, t * p.logits.stride[0] + e * p.logits.stride[1]));
    mem.rank()[e] = x, mem.score()[e] = p.scoring == CQSA_MOE_SIGMOID ? sigmoid_f32(x) : x;
    most = x > most ? x : most;
  }
  if (p.scoring == CQSA_MOE_SOFTMAX) {
    most = over_block<Lanes>(most, mem.found(), [](float a, float b) { return a > b ? a : b; });
    for (int64_t e = thread_index(); e < p.num_experts; e += block_threads()) {
      const float x = mem.score()[e], y = x == most && most > -infinity() ? 1.0f : x == -infinity() ? 0.0f : exp_f32(x - most);
      mem.score()[e] = y, sum += y;
    }
    sum = over_block<Lanes>(sum, mem.found(), [](float a, float b) { return a + b; });
    for (int64_t e = thread_index(); e < p.num_experts; e += block_threads()) mem.score()[e] = sum > 0 ? mem.score()[e] / sum : 0.0f;
  }
  if (p.by_logits) return;
  for (int64_t e = thread_index(); e < p.num_experts; e += block_threads())
    mem.rank()[e] = number_or_least(p.bias ? mem.score()[e] + float_of(load_u32(p.bias + 4 * e * p.bias_stride)) : mem.score()[e]);
}

CQSA_DEVICE float rank_of_group(const moe_route_params& p, const float* rank, int64_t n) {
  float best = -infinity(), second = -infinity();
  for (int64_t i = 0; i < n; ++i) {
    if (rank[i] > best) second = best, best = rank[i];
    else second = rank[i] > second ? rank[i] : second;
  }
  return p.group_score == CQSA_MOE_GROUP_MAX || n == 1 ? best : best + second;
}

// Experts of groups that are not among the best are taken from the start.
template <int Lanes> CQSA_DEVICE void close_groups(const moe_route_params& p, const route_memory& mem) {
  const int64_t size = p.num_experts / p.num_groups;
  barrier();
  for (int64_t g = thread_index(); g < p.num_groups; g += block_threads()) mem.group()[g] = number_or_least(rank_of_group(p, mem.rank() + g * size, size));
  barrier();
  for (int32_t n = 0; n < p.topk_groups; ++n) {
    const int32_t best = best_index<Lanes>(mem.group(), p.num_groups, mem);
    barrier();
    if (thread_index() == 0) mem.group()[best] = taken();
    barrier();
  }
  for (int64_t e = thread_index(); e < p.num_experts; e += block_threads())
    if (mem.group()[e / size] == mem.group()[e / size]) mem.rank()[e] = taken();
}

template <int Lanes> CQSA_DEVICE void route_token(const moe_route_params& p, int64_t t, const route_memory& mem) {
  float sum = 0, mine[2] = {0.0f, 0.0f};  // thread s % threads has the score of choice s
  barrier();
  score_experts<Lanes>(p, t, mem);
  if (p.topk_groups < p.num_groups) close_groups<Lanes>(p, mem);
  for (int64_t s = 0; s < p.topk; ++s) {
    barrier();
    const int32_t e = best_index<Lanes>(mem.rank(), p.num_experts, mem);
    const float score = mem.score()[e < 0 ? 0 : e];
    barrier();
    sum += score;
    if (thread_index() != s % block_threads()) continue;
    mine[s / block_threads()] = score;
    mem.rank()[e < 0 ? 0 : e] = taken();
    store_index(p.ids.data, p.ids.kind, t * p.ids.stride[0] + s * p.ids.stride[1], e);
  }
  for (int64_t s = thread_index(); s < p.topk; s += block_threads()) {
    const float score = mine[s / block_threads()];
    store_element(p.weights.data, kind_f32, t * p.weights.stride[0] + s * p.weights.stride[1], (p.renormalise && sum != 0.0f ? score / sum : score) * p.scale);
  }
}

template <int Lanes> CQSA_DEVICE void route_block(const moe_route_params& p) {
  const route_memory mem{reinterpret_cast<float*>(shared_memory()), p.num_experts};
  for (int64_t t = block_index_x(); t < p.tokens; t += grid_size_x()) route_token<Lanes>(p, t, mem);
}

}  // namespace cqsa::gpu
