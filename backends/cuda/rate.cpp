// SPDX-License-Identifier: Apache-2.0
#include "rate.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "device.h"
#include "error.h"
#include "memory.h"
#include "plugin.h"
#include "stream.h"

namespace cqsa::cuda {

namespace {

constexpr double enough_seconds = 0.03;
constexpr int most_runs = 10;
// Less than the 32 MiB that cqsa.h promises: a device rounds allocations up.
constexpr int64_t most_bytes = int64_t{28} << 20;

// What the measurement holds; given back on every way out.
class trial {
 public:
  explicit trial(void* handle) : handle_(handle) {}
  trial(const trial&) = delete;
  trial& operator=(const trial&) = delete;
  ~trial() {
    if (stream_ != nullptr) stream_sync(handle_, stream_);
    event_destroy(handle_, start_);
    event_destroy(handle_, end_);
    stream_destroy(handle_, stream_);
    device_free(handle_, operands_);
    device_free(handle_, workspace_);
  }

  cqsa_status prepare(int64_t head_dim, cqsa_dtype dtype);
  // Seconds of one launch, the best of a few; 0: it failed.
  double seconds();
  double flop() const {
    const double pairs = static_cast<double>(leaf_.num_heads) * static_cast<double>(leaf_.seqlen_q) * static_cast<double>(leaf_.seqlen_k);
    return 2.0 * static_cast<double>(leaf_.head_dim + leaf_.head_dim_v) * pairs;
  }

 private:
  void describe_problem(int64_t head_dim);
  cqsa_status place_operands(cqsa_dtype dtype);
  cqsa_status choose();
  cqsa_status create_events();
  double run_once();

  void* const handle_;
  void *stream_ = nullptr, *start_ = nullptr, *end_ = nullptr, *operands_ = nullptr, *workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  const cqsa_attention_impl* impl_ = nullptr;
  cqsa_attention_leaf leaf_ = {};
};

// Four tiles of 64 query rows for each multiprocessor, so that none is idle. All heads read the same queries and keys; each
// writes results of its own, and their memory is what limits the heads on a large device or with a large head_dim.
void trial::describe_problem(int64_t head_dim) {
  const int64_t units = device_of(handle_).facts.compute_units;
  leaf_.struct_size = sizeof leaf_;
  leaf_.batch = 1;
  leaf_.num_kv_heads = 1;
  leaf_.head_dim = head_dim;
  leaf_.head_dim_v = head_dim < 512 ? head_dim : 512;
  leaf_.seqlen_q = 1024;
  leaf_.seqlen_k = head_dim <= 64 ? 4096 : 2048;  // a millisecond on an H200
  leaf_.softmax_scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  leaf_.window_left = leaf_.window_right = -1;
  leaf_.chip = {device_of(handle_).facts.tier, device_of(handle_).facts.compute_units, device_of(handle_).facts.shared_bytes, 0};
  const int64_t shared = 4 * (leaf_.seqlen_q * leaf_.head_dim + leaf_.seqlen_k * (leaf_.head_dim + leaf_.head_dim_v));
  const int64_t most_heads = (most_bytes - shared) / (4 * leaf_.seqlen_q * leaf_.head_dim_v);
  leaf_.num_heads = std::min(std::max<int64_t>(units / 4, 4), most_heads);
}

// One allocation. Its pattern is a small positive number in f32, f16 and bf16; a NaN would be computed another way.
cqsa_status trial::place_operands(cqsa_dtype dtype) {
  constexpr unsigned pattern = 0x3c003c00;
  struct operand {
    cqsa_view* view;
    int64_t heads, rows, channels;
  } const operands[] = {{&leaf_.q, 1, leaf_.seqlen_q, leaf_.head_dim},
                        {&leaf_.k, 1, leaf_.seqlen_k, leaf_.head_dim},
                        {&leaf_.v, 1, leaf_.seqlen_k, leaf_.head_dim_v},
                        {&leaf_.out, leaf_.num_heads, leaf_.seqlen_q, leaf_.head_dim_v}};
  uint64_t offset[5] = {};
  for (int i = 0; i < 4; ++i)
    offset[i + 1] = offset[i] + static_cast<uint64_t>(operands[i].heads * operands[i].rows * operands[i].channels) * 4;
  CQSA_CUDA_TRY(device_alloc(handle_, offset[4], &operands_));
  for (int i = 0; i < 4; ++i) {
    const operand& o = operands[i];
    *o.view = {static_cast<char*>(operands_) + offset[i], dtype, 0, {0, o.heads > 1 ? o.rows * o.channels : 0, o.channels, 1}};
  }
  leaf_.out.dtype = CQSA_DTYPE_F32;
  const scope here(device_of(handle_));
  CQSA_CUDA_TRY(here.status());
  return check(driver().cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(operands_), pattern, offset[4] / 4, static_cast<CUstream>(stream_)),
               "filling the operands of a measurement");
}

cqsa_status trial::choose() {
  cqsa_backend_v1 leaves = {};
  add_leaves(leaves);
  char reason[256] = "";
  for (int32_t i = 0; i < leaves.num_attention && impl_ == nullptr; ++i)
    if (leaves.attention[i].probe(&leaf_, reason, sizeof reason) == CQSA_OK) impl_ = &leaves.attention[i];
  if (impl_ == nullptr) return fail(CQSA_ERROR_UNSUPPORTED, "no implementation takes the problem of a measurement: %s", reason);
  cqsa_leaf_tile tile = {};
  if (impl_->tiles(&leaf_, &tile, 1) < 1) return fail(CQSA_ERROR_INTERNAL, "%s offers no tile", impl_->name);
  leaf_.tile_q = tile.tile_q;
  leaf_.tile_k = tile.tile_k;
  workspace_bytes_ = impl_->workspace(&leaf_, 1);
  return device_alloc(handle_, workspace_bytes_, &workspace_);
}

cqsa_status trial::create_events() {
  const scope here(device_of(handle_));
  CQSA_CUDA_TRY(here.status());
  for (void** event : {&start_, &end_}) {
    CUevent made = nullptr;
    CQSA_CUDA_TRY(check(driver().cuEventCreate(&made, CU_EVENT_DEFAULT), "creating an event"));
    *event = made;
  }
  return CQSA_OK;
}

cqsa_status trial::prepare(int64_t head_dim, cqsa_dtype dtype) {
  describe_problem(head_dim);
  CQSA_CUDA_TRY(stream_create(handle_, &stream_));
  CQSA_CUDA_TRY(create_events());
  CQSA_CUDA_TRY(place_operands(dtype));
  return choose();
}

double trial::run_once() {
  if (event_record(handle_, start_, stream_) != CQSA_OK) return 0;
  if (impl_->launch(handle_, &leaf_, workspace_, workspace_bytes_, nullptr, stream_) != CQSA_OK) return 0;
  if (event_record(handle_, end_, stream_) != CQSA_OK || event_sync(handle_, end_) != CQSA_OK) return 0;
  const scope here(device_of(handle_));
  float milliseconds = 0;
  const bool timed = here.status() == CQSA_OK && driver().cuEventElapsedTime(&milliseconds, static_cast<CUevent>(start_),
                                                                            static_cast<CUevent>(end_)) == CUDA_SUCCESS;
  return timed ? static_cast<double>(milliseconds) * 1e-3 : 0;
}

// The first run warms up, and counts only on a device so slow that it is the only one.
double trial::seconds() {
  using clock = std::chrono::steady_clock;
  const clock::time_point begin = clock::now();
  double best = 0;
  for (int i = 0; i < most_runs; ++i) {
    const double now = run_once();
    if (now <= 0) return 0;
    if (i <= 1 || now < best) best = now;
    if (std::chrono::duration<double>(clock::now() - begin).count() > enough_seconds) break;
  }
  return best;
}

}  // namespace

double compute_rate(int32_t index, int64_t head_dim, cqsa_dtype dtype, const cqsa_exec*) {
  const bool known = dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16;
  if (!known || head_dim < 1 || head_dim > 576) return 0;
  void* handle = nullptr;
  if (device_open(index, &handle) != CQSA_OK) return 0;
  double rate = 0;
  {
    trial measured(handle);
    if (measured.prepare(head_dim, dtype) == CQSA_OK) {
      const double seconds = measured.seconds();
      rate = seconds > 0 ? measured.flop() / seconds : 0;
    }
  }
  device_close(handle);
  return rate;
}

}  // namespace cqsa::cuda
