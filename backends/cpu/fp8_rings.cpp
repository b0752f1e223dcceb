// SPDX-License-Identifier: Apache-2.0
// Rings of amaxes, scales from amaxes, layouts of scales, workspaces: what of FP8 is small.
#include "fp8_element.h"
#include "fp8_float_mode.h"
#include "fp8_job.h"

#include <algorithm>

namespace cqsa::cpu {
namespace {

using fp8::ring_state;

ring_state& state_of(const cqsa_fp8_ring& ring) { return *static_cast<ring_state*>(ring.state); }
float* history_of(const cqsa_fp8_ring& ring) { return reinterpret_cast<float*>(static_cast<char*>(ring.state) + sizeof(ring_state)); }

void publish(ring_state& state, float amax) {
  const fp8::scale_pair pair = fp8::scale_of(amax, {state.format, state.margin, state.pow2, 0.0f, 0.0f});
  state.scale = pair.scale;
  state.scale_inv = pair.scale_inv;
}

void begin_ring(const cqsa_fp8_ring& ring, float amax) {
  ring_state& state = state_of(ring);
  state = ring_state{};
  state.magic = fp8::ring_magic;
  state.version = fp8::ring_version;
  state.hist_len = ring.hist_len;
  state.format = ring.format;
  state.margin = ring.margin;
  state.algorithm = ring.algorithm;
  state.pow2 = (ring.flags & CQSA_FP8_POW2) ? 1 : 0;
  publish(state, amax);
  std::memset(history_of(ring), 0, sizeof(float) * size_t(ring.hist_len));
}

float largest_in_history(const cqsa_fp8_ring& ring) {
  const float* const history = history_of(ring);
  uint32_t most = 0;
  for (int32_t n = 0; n < ring.hist_len; ++n) most = std::max(most, fp8::amax_bits(history[n]));
  return fp8::float_of(most);
}

void fold(const cqsa_fp8_ring_leaf& leaf, int64_t n) {
  const cqsa_fp8_ring& ring = leaf.rings[n];
  ring_state& state = state_of(ring);
  const float amax = leaf.amaxes ? load_as<float>(reinterpret_cast<const char*>(leaf.amaxes + n * leaf.amaxes_stride)) : state.staged;
  if (leaf.amaxes || state.staged != 0) fp8_ring_take(ring, amax);
  state.staged = 0;
}

void store_amax(float* at, float amax) { std::memcpy(at, &amax, sizeof amax); }

}  // namespace

bool fp8_ring_is_sound(const cqsa_fp8_ring& ring) { return fp8::is_ring(state_of(ring), ring); }

void fp8_ring_take(const cqsa_fp8_ring& ring, float amax) {
  ring_state& state = state_of(ring);
  if (!fp8::is_amax(amax)) {
    ++state.refused;
    return;
  }
  history_of(ring)[state.index] = amax;
  state.index = (state.index + 1) % state.hist_len;
  const float from = state.algorithm == CQSA_FP8_RING_MOST_RECENT ? amax : largest_in_history(ring);
  if (from > 0) publish(state, from);
}

void fp8_ring_stage(const cqsa_fp8_ring& ring, float amax) {
  ring_state& state = state_of(ring);
  if (!fp8::is_amax(amax)) ++state.refused;
  else if (amax > state.staged) state.staged = amax;
}

cqsa_status fp8_rings(void*, const cqsa_fp8_ring_leaf* leaf, const cqsa_exec*, void*) {
  const plain_floats mode;
  for (int64_t n = 0; n < leaf->count && leaf->what != CQSA_FP8_RINGS_INIT; ++n)
    if (!fp8_ring_is_sound(leaf->rings[n])) return fail(CQSA_ERROR_INVALID_ARGUMENT, "the memory of a ring holds another ring, or none");
  for (int64_t n = 0; n < leaf->count; ++n) {
    if (leaf->what == CQSA_FP8_RINGS_INIT) begin_ring(leaf->rings[n], leaf->amax);
    else if (leaf->what == CQSA_FP8_RINGS_FOLD) fold(*leaf, n);
    else store_amax(leaf->amaxes + n * leaf->amaxes_stride, state_of(leaf->rings[n]).staged);
  }
  return CQSA_OK;
}

cqsa_status fp8_scale(void*, const cqsa_fp8_scale_leaf* leaf, const cqsa_exec*, void*) {
  const plain_floats mode;
  const cqsa_scale_grid& from = leaf->amax.data ? leaf->amax : leaf->scale_inv_in;
  const bool pow2 = leaf->pow2 || has_power_scales(leaf->scale_inv);
  const fp8::scale_rule rule{leaf->format, leaf->margin, pow2, leaf->eps, leaf->amax_limit};
  for (int64_t r = 0; r < from.rows; ++r)
    for (int64_t c = 0; c < from.columns; ++c) {
      const float x = load_scale(from, r, c);
      const fp8::scale_pair pair = leaf->amax.data ? fp8::scale_of(x, rule) : fp8::scale_pair{1.0f, x, 0};
      store_scale(leaf->scale, r, c, pair.scale);
      store_scale(leaf->scale_inv, r, c, pair.scale_inv);
    }
  clear_padding(leaf->scale_inv);
  return CQSA_OK;
}

cqsa_status fp8_workspace_init(void*, void* workspace, uint64_t bytes, void*) {
  if (bytes < sizeof(fp8::workspace_header)) return CQSA_OK;  // nothing on this backend needs so little
  std::memset(workspace, 0, size_t(bytes));
  fp8::workspace_header header{};
  header.magic = fp8::workspace_magic;
  header.version = 1;
  header.bytes = bytes;
  std::memcpy(workspace, &header, sizeof header);
  return CQSA_OK;
}

}  // namespace cqsa::cpu
