// SPDX-License-Identifier: Apache-2.0
// A device that is not there: its own memory, asynchronous streams, and leaves computed by the CPU backend. It trusts the core
// in nothing: every address that it is given is checked, and what no event orders runs in any order.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "fake_fp8.h"
#include "fake_leaf.h"
#include "fake_memory.h"
#include "fake_moe.h"
#include "fake_selected.h"
#include "fake_stream.h"

#if __has_include("cqsa_build_id.h")
#include "cqsa_build_id.h"
#endif
#ifndef CQSA_BUILD_ID
#define CQSA_BUILD_ID "dev"
#endif

namespace fake {
namespace {

// "The n-th from now fails, and so do the next ones."
class fuse {
 public:
  void set(int64_t first, int64_t count) {
    const std::lock_guard hold(lock_);
    first_ = first;
    last_ = first ? first + std::max<int64_t>(count, 1) - 1 : 0;
    seen_ = 0;
  }
  bool blows() {
    const std::lock_guard hold(lock_);
    ++seen_;
    return first_ && seen_ >= first_ && seen_ <= last_;
  }

 private:
  std::mutex lock_;
  int64_t first_ = 0, last_ = 0, seen_ = 0;
};

// When the device had a leaf to work on.
class timeline {
 public:
  void reset(uint32_t leaf_us, uint32_t copy_us) {
    const std::lock_guard hold(lock_);
    leaf_us_ = leaf_us, copy_us_per_mib_ = copy_us;
    leaves_ = 0;
    busy_ = idle_ = idle_late_ = {};
    copiers_.clear();
  }
  bool replaces_leaves() {
    const std::lock_guard hold(lock_);
    return leaf_us_ > 0;
  }
  void leaf() {
    const auto begin = clock::now();
    uint32_t lasts;
    {
      const std::lock_guard hold(lock_);
      lasts = leaf_us_;
      if (leaves_ > 0) idle_ += begin - end_;
      if (leaves_ > 3) idle_late_ += begin - end_;
    }
    std::this_thread::sleep_until(begin + std::chrono::microseconds(lasts));
    const std::lock_guard hold(lock_);
    end_ = clock::now();
    busy_ += end_ - begin;
    ++leaves_;
  }
  void copy(uint64_t bytes) {
    uint64_t us;
    {
      const std::lock_guard hold(lock_);
      us = bytes * copy_us_per_mib_ >> 20;
    }
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  void issued() {
    const std::lock_guard hold(lock_);
    copiers_.insert(std::this_thread::get_id());
  }
  void fill(fake_counters& out) {
    const std::lock_guard hold(lock_);
    const auto us = [](clock::duration d) { return std::chrono::duration_cast<std::chrono::microseconds>(d).count(); };
    out.leaf_busy_us = us(busy_), out.leaf_idle_us = us(idle_), out.leaf_idle_late_us = us(idle_late_);
    out.copiers = static_cast<int64_t>(copiers_.size());
  }

 private:
  using clock = std::chrono::steady_clock;
  std::mutex lock_;
  uint32_t leaf_us_ = 0, copy_us_per_mib_ = 0;
  int64_t leaves_ = 0;
  clock::time_point end_{};
  clock::duration busy_{}, idle_{}, idle_late_{};
  std::set<std::thread::id> copiers_;
};

struct device_state {
  std::mutex lock;  // of the delays
  delays pauses;
  timeline times;
  uint64_t streams_made = 0;
  std::atomic<int32_t> state{CQSA_BACKEND_READY};
  fuse alloc, launch, copy, execution;
  std::atomic<bool> no_work{false}, no_stream_memory{false};
  std::atomic<int64_t> objects{0}, copies{0}, launches{0}, allocations{0}, syncs{0}, objects_made{0}, stream_allocations{0},
      property_queries{0}, pointer_queries{0}, stream_queries{0}, workspaceless{0};
  std::atomic<int64_t> captures{0};  // streams that are being captured now
  std::mutex pretended_lock;
  std::map<uintptr_t, cqsa_pointer_info> pretended;
  std::atomic<uint64_t> bytes_in{0}, bytes_out{0};
};

device_state& device() {
  static device_state instance;
  return instance;
}

cqsa_status check_fault() {
  const std::string text = fault();
  return text.empty() ? CQSA_OK : fail(CQSA_ERROR_RUNTIME, "an earlier operation failed: " + text);
}

// The stream behind a handle. NULL is the default stream, which like that of a driver is made at its first use.
stream* stream_of(void* handle) {
  if (handle) return static_cast<stream*>(handle);
  static stream* const by_default = new stream({});
  return by_default;
}

// A call that a driver refuses while anything is captured.
void not_in_capture(const char* what) {
  if (device().captures > 0) report_fault(std::string(what) + " while a stream is captured");
}

using event_handle = std::shared_ptr<event>;

// ---- what the backend struct wants ------------------------------------------------------------------------------------------

int32_t state(char* reason, uint64_t size) {
  const int32_t now = device().state.load();
  if (size) std::snprintf(reason, size, "%s", now == CQSA_BACKEND_READY ? "" : "the fake device was told to be away");
  return now;
}

int32_t device_count() { return 1; }

cqsa_status device_properties(int32_t index, cqsa_device_properties* out) {
  if (index != 0) return fail(CQSA_ERROR_NO_DEVICE, "the fake backend has device 0 only");
  ++device().property_queries;
  *out = {};
  std::snprintf(out->name, sizeof out->name, "fake device");
  std::snprintf(out->arch, sizeof out->arch, "fake");
  out->total_bytes = the_memory().total_bytes();
  out->free_bytes = the_memory().free_bytes();
  out->chip.compute_units = 1;
  return CQSA_OK;
}

double compute_rate(int32_t, int64_t head_dim, cqsa_dtype, const cqsa_exec*) { return head_dim >= 128 ? 6e10 : 5e10; }

cqsa_status device_open(int32_t index, void** out) {
  if (index != 0) return fail(CQSA_ERROR_NO_DEVICE, "the fake backend has device 0 only");
  *out = &device();
  return CQSA_OK;
}

void device_close(void*) {}

cqsa_status device_alloc(void*, uint64_t bytes, void** out) {
  ++device().allocations;
  not_in_capture("device_alloc");
  if (device().alloc.blows()) return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "this allocation was told to fail");
  *out = the_memory().take(bytes, false, true);
  return *out ? CQSA_OK : fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, std::to_string(bytes) + " bytes are more than is left");
}

void device_free(void*, void* p) {
  not_in_capture("device_free");
  if (!the_memory().give(p, false)) report_fault("device_free of an address that is not alive");
}

cqsa_status pinned_alloc(void*, uint64_t bytes, void** out) {
  *out = the_memory().take(bytes, true, true);
  return *out ? CQSA_OK : fail(CQSA_ERROR_OUT_OF_PINNED_MEMORY, std::to_string(bytes) + " pinned bytes are more than is left");
}

void pinned_free(void*, void* p) {
  if (!the_memory().give(p, true)) report_fault("pinned_free of an address that is not alive");
}

cqsa_status stream_create(void*, void** out) {
  delays pauses;
  {
    const std::lock_guard hold(device().lock);
    pauses = device().pauses;
    pauses.seed = pauses.seed * 1000003 + device().streams_made++;
  }
  *out = new stream(pauses);
  ++device().objects;
  ++device().objects_made;
  return CQSA_OK;
}

void stream_destroy(void*, void* s) {
  if (!static_cast<stream*>(s)->idle()) report_fault("a stream was destroyed with work in it");
  delete static_cast<stream*>(s);
  --device().objects;
}

cqsa_status stream_sync(void*, void* s) {
  ++device().syncs;
  if (!stream_of(s)->sync()) {
    report_fault("stream_sync of a stream that is captured");
    return fail(CQSA_ERROR_RUNTIME, "the stream is captured");
  }
  return check_fault();
}

cqsa_status event_create(void*, void** out) {
  *out = new event_handle(std::make_shared<event>());
  ++device().objects;
  ++device().objects_made;
  return CQSA_OK;
}

void event_destroy(void*, void* e) {
  delete static_cast<event_handle*>(e);
  --device().objects;
}

cqsa_status event_record(void*, void* e, void* s) {
  const event_handle handle = *static_cast<event_handle*>(e);
  const int64_t record = handle->next_record();
  stream_of(s)->push([handle, record] { handle->complete(record); });
  return CQSA_OK;
}

cqsa_status event_sync(void*, void* e) {
  ++device().syncs;
  event& handle = **static_cast<event_handle*>(e);
  handle.wait(handle.latest_record());
  return check_fault();
}

cqsa_status stream_wait(void*, void* s, void* e) {
  const event_handle handle = *static_cast<event_handle*>(e);
  const int64_t record = handle->latest_record();
  stream_of(s)->push([handle, record] { handle->wait(record); });
  return CQSA_OK;
}

// ---- copies -------------------------------------------------------------------------------------------------------------------

bool side_is_valid(const void* p, uint64_t bytes, bool on_device) {
  return on_device ? the_memory().holds(p, bytes, false) : p != nullptr && !is_device(p);
}

cqsa_status copy(void*, void* to, const void* from, uint64_t bytes, int32_t direction, void* s) {
  const bool to_dev = direction != CQSA_COPY_TO_HOST, from_dev = direction != CQSA_COPY_TO_DEVICE;
  if (cqsa_status status = check_fault(); status != CQSA_OK) return status;
  if (device().copy.blows()) return fail(CQSA_ERROR_RUNTIME, "this copy was told to fail");
  if (!side_is_valid(to, bytes, to_dev)) return fail(CQSA_ERROR_RUNTIME, "a copy writes outside what is allocated");
  if (!side_is_valid(from, bytes, from_dev)) return fail(CQSA_ERROR_RUNTIME, "a copy reads outside what is allocated");
  ++device().copies;
  device().times.issued();
  if (direction == CQSA_COPY_TO_DEVICE) device().bytes_in += bytes;
  if (direction == CQSA_COPY_TO_HOST) device().bytes_out += bytes;
  // Pageable memory has been read when this returns; pinned memory is read late, so that reuse without waiting shows.
  const bool late = from_dev || the_memory().holds(from, bytes, true);
  const auto* bytes_now = static_cast<const char*>(from);
  std::shared_ptr<std::vector<char>> snapshot;
  if (!late) snapshot = std::make_shared<std::vector<char>>(bytes_now, bytes_now + bytes);
  stream_of(s)->push([=] {
    const bool alive = (!to_dev || the_memory().holds(to, bytes, false)) && (!from_dev || the_memory().holds(from, bytes, false)) &&
                       (snapshot || from_dev || the_memory().holds(from, bytes, true));
    if (!alive) return report_fault("a copy ran after its memory was freed");
    device().times.copy(bytes);
    std::memcpy(to_real(to), snapshot ? snapshot->data() : to_real(from), bytes);
  });
  return CQSA_OK;
}

// ---- leaves -------------------------------------------------------------------------------------------------------------------

// "f64 is computed by the reference" only: the first list of the CPU backend that is not the reference, and the reference.
const cqsa_attention_impl* fast_impl(const cqsa_attention_leaf* leaf, char* reason, uint64_t size, cqsa_status* status) {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  *status = CQSA_ERROR_UNSUPPORTED;
  for (int32_t i = 0; i + 1 < cpu.num_attention; ++i)
    if ((*status = cpu.attention[i].probe(leaf, reason, size)) == CQSA_OK) return &cpu.attention[i];
  return nullptr;
}

const cqsa_attention_impl* reference_impl() {
  const cqsa_backend_v1& cpu = *cqsa_cpu_backend();
  return &cpu.attention[cpu.num_attention - 1];
}

const cqsa_attention_impl* fast_of(const cqsa_attention_leaf* leaf) {
  char reason[128];
  cqsa_status status;
  const cqsa_attention_impl* impl = fast_impl(leaf, reason, sizeof reason, &status);
  return impl ? impl : reference_impl();
}

cqsa_status launch_on(const cqsa_attention_impl* impl, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes, void* s) {
  if (cqsa_status status = check_fault(); status != CQSA_OK) return status;
  if (device().launch.blows()) return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "this launch was told to find no memory");
  if (device().no_work) return CQSA_OK;
  const auto call = std::make_shared<leaf_call>();
  if (const std::string wrong = call->prepare(*leaf, workspace, bytes); !wrong.empty()) return fail(CQSA_ERROR_RUNTIME, wrong);
  ++device().launches;
  device().workspaceless += workspace == nullptr;
  const bool broken = device().execution.blows();
  stream_of(s)->push([call, impl, broken] {
    if (broken) return report_fault("this leaf was told to fail");
    if (!call->alive()) return report_fault("a leaf ran after its memory was freed");
    if (device().times.replaces_leaves()) return device().times.leaf();
    if (!call->run(*impl)) report_fault(std::string("a leaf failed: ") + cqsa_cpu_backend()->last_error());
  });
  return CQSA_OK;
}

cqsa_status fast_probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  cqsa_status status;
  fast_impl(leaf, reason, size, &status);
  return status;
}
int32_t fast_tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  return fast_of(leaf)->tiles(leaf, out, capacity);
}
uint64_t fast_workspace(const cqsa_attention_leaf* leaf, int64_t) { return fast_of(leaf)->workspace(leaf, 1); }
cqsa_status fast_launch(void*, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  return launch_on(fast_of(leaf), leaf, workspace, bytes, s);
}

cqsa_status reference_probe(const cqsa_attention_leaf* leaf, char* reason, uint64_t size) {
  return reference_impl()->probe(leaf, reason, size);
}
int32_t reference_tiles(const cqsa_attention_leaf* leaf, cqsa_leaf_tile* out, int32_t capacity) {
  return reference_impl()->tiles(leaf, out, capacity);
}
uint64_t reference_workspace(const cqsa_attention_leaf* leaf, int64_t) { return reference_impl()->workspace(leaf, 1); }
cqsa_status reference_launch(void*, const cqsa_attention_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  return launch_on(reference_impl(), leaf, workspace, bytes, s);
}

cqsa_status merge(void*, const cqsa_merge_leaf* leaf, const cqsa_exec*, void* s) {
  if (device().no_work) return CQSA_OK;
  const cqsa_merge_leaf copy = *leaf;
  for (const void* p : {static_cast<const void*>(copy.out_a), static_cast<const void*>(copy.lse_a), static_cast<const void*>(copy.out_b),
                        static_cast<const void*>(copy.lse_b), static_cast<const void*>(copy.out), static_cast<const void*>(copy.lse)})
    if (p && !the_memory().holds(p, 1, false)) return fail(CQSA_ERROR_RUNTIME, "a merge is given an address that is not alive");
  const auto work = [copy] {
    cqsa_merge_leaf real = copy;
    for (const float** p : {&real.out_a, &real.lse_a, &real.out_b, &real.lse_b}) *p = static_cast<const float*>(to_real(*p));
    real.out = static_cast<float*>(to_real(copy.out));
    real.lse = static_cast<float*>(to_real(copy.lse));
    if (cqsa_cpu_backend()->merge(nullptr, &real, nullptr, nullptr) != CQSA_OK) report_fault("a merge failed");
  };
  ++device().launches;
  stream_of(s)->push(work);
  return CQSA_OK;
}

cqsa_status launch_selected(void*, const cqsa_selected_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  if (cqsa_status status = check_fault(); status != CQSA_OK) return status;
  if (device().launch.blows()) return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "this launch was told to find no memory");
  if (device().no_work) return CQSA_OK;
  std::function<void()> work;
  if (const std::string wrong = prepare_selected(*leaf, workspace, bytes, work); !wrong.empty()) return fail(CQSA_ERROR_RUNTIME, wrong);
  ++device().launches;
  device().workspaceless += workspace == nullptr;
  stream_of(s)->push(work);
  return CQSA_OK;
}

// A leaf of a cache: the CPU backend's, at its turn, on the addresses that the device's stand for.
template <class Leaf, class Translate, class Work>
cqsa_status queue_leaf(const Leaf& leaf, const std::vector<const void*>& addresses, const Translate& translate, const Work& work, void* s) {
  if (device().no_work) return CQSA_OK;
  for (const void* p : addresses)
    if (p && !the_memory().holds(p, 1, false)) return fail(CQSA_ERROR_RUNTIME, "a leaf of a cache is given an address that is not alive");
  ++device().launches;
  stream_of(s)->push([leaf, translate, work] {
    Leaf real = leaf;
    translate(real);
    if (work(nullptr, &real, nullptr, nullptr) != CQSA_OK) report_fault("a leaf of a cache failed");
  });
  return CQSA_OK;
}

cqsa_status queue_kv(const cqsa_kv_leaf& leaf, decltype(cqsa_backend_v1::kv_append) work, void* s) {
  const auto translate = [](cqsa_kv_leaf& real) {
    for (cqsa_view* view : {&real.x, &real.pool, &real.scale}) view->data = view->data ? to_real(view->data) : nullptr;
    if (real.page_table) real.page_table = static_cast<const int32_t*>(to_real(real.page_table));
    if (real.cells) real.cells = to_real(real.cells);
  };
  return queue_leaf(leaf, {leaf.x.data, leaf.pool.data, leaf.scale.data, leaf.page_table, leaf.cells}, translate, work, s);
}

cqsa_status kv_append(void*, const cqsa_kv_leaf* leaf, const cqsa_exec*, void* s) { return queue_kv(*leaf, cqsa_cpu_backend()->kv_append, s); }
cqsa_status kv_gather(void*, const cqsa_kv_leaf* leaf, const cqsa_exec*, void* s) { return queue_kv(*leaf, cqsa_cpu_backend()->kv_gather, s); }

cqsa_status hadamard(void*, const cqsa_hadamard_leaf* leaf, const cqsa_exec*, void* s) {
  const auto translate = [](cqsa_hadamard_leaf& real) { real.x = to_real(real.x), real.out = to_real(real.out); };
  return queue_leaf(*leaf, {leaf->x, leaf->out}, translate, cqsa_cpu_backend()->hadamard, s);
}

// ---- quantized matrices -----------------------------------------------------------------------------------------------------

// Row by row, since nobody has looked at the numbers of the rows: those that are not there become zeros.
cqsa_status dequantize_each(void*, const cqsa_dequantize_leaf* leaf, const cqsa_exec*, void*) {
  std::vector<uint32_t> nothing(static_cast<size_t>(leaf->row_elements));
  for (int64_t n = 0; n < leaf->count; ++n) {
    cqsa_dequantize_leaf one = *leaf;
    one.count = 1, one.first_row += n, one.row_ids = nullptr;
    one.out = static_cast<char*>(leaf->out) + n * leaf->out_stride[0] * (leaf->out_dtype == CQSA_DTYPE_F32 ? 4 : 2);
    if (leaf->row_ids) {
      const void* const id = static_cast<const char*>(leaf->row_ids) + n * leaf->row_ids_stride * (leaf->row_ids_dtype == CQSA_DTYPE_I64 ? 8 : 4);
      one.first_row = leaf->row_ids_dtype == CQSA_DTYPE_I64 ? *static_cast<const int64_t*>(id) : *static_cast<const int32_t*>(id);
    }
    if (one.first_row < 0 || one.first_row >= leaf->rows)
      one.first_row = 0, one.rows = 1, one.data = nothing.data(), one.format = CQSA_QUANT_F32, one.row_bytes = 4 * leaf->row_elements;
    if (const cqsa_status status = cqsa_cpu_backend()->dequantize_rows(nullptr, &one, nullptr, nullptr); status != CQSA_OK) return status;
  }
  return CQSA_OK;
}

cqsa_status dequantize_rows(void*, const cqsa_dequantize_leaf* leaf, const cqsa_exec*, void* s) {
  const auto translate = [](cqsa_dequantize_leaf& real) {
    real.data = to_real(real.data), real.out = to_real(real.out);
    if (real.row_ids) real.row_ids = to_real(real.row_ids);
  };
  return queue_leaf(*leaf, {leaf->data, leaf->row_ids, leaf->out}, translate, dequantize_each, s);
}

// ---- FP8 --------------------------------------------------------------------------------------------------------------------

// prepare(work) says what is wrong, or "" with the work in hand.
template <class Prepare>
cqsa_status queue_fp8(const Prepare& prepare, bool is_launch, void* s) {
  if (cqsa_status status = check_fault(); status != CQSA_OK) return status;
  if (is_launch && device().launch.blows()) return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "this launch was told to find no memory");
  if (device().no_work) return CQSA_OK;
  std::function<void()> work;
  if (const std::string wrong = prepare(work); !wrong.empty()) return fail(CQSA_ERROR_RUNTIME, wrong);
  device().launches += is_launch;
  stream_of(s)->push(work);
  return CQSA_OK;
}

cqsa_status fp8_quantize(void*, const cqsa_fp8_quantize_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  device().workspaceless += workspace == nullptr;
  return queue_fp8([&](auto& work) { return prepare_fp8(*leaf, workspace, bytes, work); }, true, s);
}
cqsa_status fp8_gemm(void*, const cqsa_fp8_gemm_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  device().workspaceless += workspace == nullptr;
  return queue_fp8([&](auto& work) { return prepare_fp8(*leaf, workspace, bytes, work); }, true, s);
}
cqsa_status fp8_workspace_init(void*, void* workspace, uint64_t bytes, void* s) {
  return queue_fp8([&](auto& work) { return prepare_fp8_workspace(workspace, bytes, work); }, false, s);
}
template <class Leaf>
cqsa_status fp8_plain(void*, const Leaf* leaf, const cqsa_exec*, void* s) {
  return queue_fp8([&](auto& work) { return prepare_fp8(*leaf, work); }, true, s);
}

constexpr cqsa_fp8_gemm_impl fp8_gemm_impls[] = {
    {"fake_vendor", "k of 16", CQSA_FP8_PROVIDER_VENDOR, 0, fp8_vendor_probe, fp8_gemm_workspace_of, fp8_gemm},
    {"fake_own", "none", CQSA_FP8_PROVIDER_OWN, 0, fp8_own_probe, fp8_gemm_workspace_of, fp8_gemm}};

// ---- experts ----------------------------------------------------------------------------------------------------------------

cqsa_status moe_launch(void*, const cqsa_moe_leaf* leaf, void* workspace, uint64_t bytes, const cqsa_exec*, void* s) {
  return queue_fp8([&](auto& work) { return prepare_moe(*leaf, workspace, bytes, work); }, true, s);
}
template <class Leaf>
cqsa_status moe_plain(void*, const Leaf* leaf, const cqsa_exec*, void* s) {
  return queue_fp8([&](auto& work) { return prepare_moe(*leaf, work); }, true, s);
}
cqsa_status moe_probe(void*, const cqsa_moe_leaf*, char*, uint64_t) { return CQSA_OK; }

constexpr cqsa_moe_impl moe_impls[] = {{"fake_moe", "none", moe_probe, moe_workspace_of, moe_launch}};

// ---- enqueue mode -----------------------------------------------------------------------------------------------------------

cqsa_status stream_query(void*, void* s, int32_t* capturing) {
  ++device().stream_queries;
  *capturing = 0;
  if (!s) return CQSA_OK;
  if (static_cast<stream*>(s)->device() != 0)
    return fail(CQSA_ERROR_DEVICE, "it is a stream of device " + std::to_string(static_cast<stream*>(s)->device()));
  *capturing = static_cast<stream*>(s)->capturing();
  return CQSA_OK;
}

cqsa_status stream_alloc(void*, uint64_t bytes, void* s, void** out) {
  ++device().stream_allocations;
  if (stream_of(s)->capturing()) report_fault("stream_alloc on a stream that is captured");
  if (device().no_stream_memory) return fail(CQSA_ERROR_UNSUPPORTED, "the device has no memory in stream order");
  if (device().alloc.blows()) return fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, "this allocation was told to fail");
  *out = the_memory().take(bytes, false, true);
  return *out ? CQSA_OK : fail(CQSA_ERROR_OUT_OF_DEVICE_MEMORY, std::to_string(bytes) + " bytes are more than is left");
}

cqsa_status stream_free(void*, void* p, void* s) {
  stream_of(s)->push([p] {
    if (!the_memory().give(p, false)) report_fault("stream_free of an address that is not alive");
  });
  return CQSA_OK;
}

cqsa_status pointer_query(void*, const void* p, cqsa_pointer_info* out) {
  ++device().pointer_queries;
  const std::lock_guard hold(device().pretended_lock);
  const auto found = device().pretended.find(reinterpret_cast<uintptr_t>(p));
  if (found != device().pretended.end()) return *out = found->second, CQSA_OK;
  if (is_device(p)) return *out = the_memory().find(p), CQSA_OK;
  *out = {the_memory().holds(p, 1, true) ? CQSA_POINTER_PINNED : CQSA_POINTER_UNKNOWN, 0, 0, 0};
  return CQSA_OK;
}

constexpr cqsa_attention_impl impls[] = {
    {"fake_fast", "none", fast_probe, fast_tiles, fast_workspace, fast_launch, nullptr},
    {"fake_reference", "none", reference_probe, reference_tiles, reference_workspace, reference_launch, nullptr}};

constexpr cqsa_selected_impl selected_impls[] = {{"fake_selected", "none", probe_selected, workspace_of_selected, launch_selected}};

constexpr cqsa_backend_v1 backend = {sizeof(cqsa_backend_v1),
                                     0,
                                     "fake",
                                     CQSA_BUILD_ID,
                                     CQSA_DEVICE_EXT,
                                     CQSA_DEVICE_CUDA_HOST,
                                     last_error,
                                     state,
                                     device_count,
                                     device_properties,
                                     compute_rate,
                                     device_open,
                                     device_close,
                                     device_alloc,
                                     device_free,
                                     pinned_alloc,
                                     pinned_free,
                                     stream_create,
                                     stream_destroy,
                                     stream_sync,
                                     event_create,
                                     event_destroy,
                                     event_record,
                                     event_sync,
                                     stream_wait,
                                     copy,
                                     impls,
                                     2,
                                     merge,
                                     stream_query,
                                     stream_alloc,
                                     stream_free,
                                     pointer_query,
                                     "fake",
                                     selected_impls,
                                     1,
                                     kv_append,
                                     kv_gather,
                                     hadamard,
                                     fp8_workspace_of,
                                     fp8_quantize,
                                     fp8_workspace_init,
                                     fp8_plain<cqsa_fp8_dequantize_leaf>,
                                     fp8_plain<cqsa_fp8_scale_leaf>,
                                     fp8_plain<cqsa_fp8_transpose_leaf>,
                                     fp8_plain<cqsa_fp8_ring_leaf>,
                                     fp8_gemm_impls,
                                     2,
                                     dequantize_rows,
                                     nullptr,
                                     moe_impls,
                                     1,
                                     moe_plain<cqsa_moe_route_leaf>,
                                     moe_plain<cqsa_moe_group_leaf>,
                                     moe_plain<cqsa_moe_quantize_leaf>,
                                     moe_plain<cqsa_moe_combine_leaf>};

}  // namespace
}  // namespace fake

#define FAKE_API extern "C" __attribute__((visibility("default")))

// A copy of the file named libcqsa_cuda.so is the backend "cuda", for what asks for backends by the names that it knows.
FAKE_API cqsa_status cqsa_backend_entry_v1(const cqsa_host_v1* host, const cqsa_backend_v1** out) {
  static const cqsa_backend_v1 renamed = [] {
    cqsa_backend_v1 b = fake::backend;
    b.name = "cuda";
    return b;
  }();
  Dl_info self{};
  const bool as_cuda = dladdr(reinterpret_cast<const void*>(&cqsa_backend_entry_v1), &self) && std::strstr(self.dli_fname, "libcqsa_cuda.so");
  *out = as_cuda ? &renamed : &fake::backend;
  return std::strcmp(host->build_id, CQSA_BUILD_ID) == 0 ? CQSA_OK : CQSA_ERROR_ABI_MISMATCH;
}

FAKE_API void fake_configure(const fake_config* config) {
  auto& d = fake::device();
  {
    const std::lock_guard hold(d.lock);
    d.pauses = {config->delay_min_us, config->delay_max_us, config->seed};
    d.streams_made = 0;
  }
  d.times.reset(config->leaf_us, config->copy_us_per_mib);
  fake::the_memory().limit(config->memory_limit, config->pinned_limit);
  d.state = config->state;
  d.alloc.set(config->fail_alloc, config->fail_allocs);
  d.launch.set(config->fail_launch, config->fail_launches);
  d.copy.set(config->fail_copy, 1);
  d.execution.set(config->fail_execution, 1);
  d.copies = d.launches = d.allocations = d.syncs = d.objects_made = d.stream_allocations = 0;
  d.property_queries = d.pointer_queries = d.stream_queries = d.workspaceless = 0;
  d.no_work = config->no_work;
  d.no_stream_memory = config->no_stream_memory;
  d.bytes_in = d.bytes_out = 0;
  fake::clear_fault();
}

FAKE_API void fake_stats(fake_counters* out) {
  auto& d = fake::device();
  *out = {};
  fake::the_memory().fill(*out);
  out->live_objects = d.objects;
  out->bytes_in = d.bytes_in;
  out->bytes_out = d.bytes_out;
  out->copies = d.copies;
  out->launches = d.launches;
  out->allocations = d.allocations;
  out->syncs = d.syncs;
  out->objects_made = d.objects_made;
  out->stream_allocations = d.stream_allocations;
  out->property_queries = d.property_queries;
  out->pointer_queries = d.pointer_queries;
  out->stream_queries = d.stream_queries;
  out->workspaceless = d.workspaceless;
  d.times.fill(*out);
  std::snprintf(out->error, sizeof out->error, "%s", fake::fault().c_str());
}

FAKE_API void* fake_alloc(uint64_t bytes) { return fake::the_memory().take(bytes, false, false); }
FAKE_API void fake_free(void* memory) { fake::the_memory().give(memory, false); }
FAKE_API void* fake_pinned_alloc(uint64_t bytes) { return fake::the_memory().take(bytes, true, false); }
FAKE_API void fake_pinned_free(void* memory) { fake::the_memory().give(memory, true); }
FAKE_API void* fake_stream_create(int32_t device) {
  fake::delays pauses;
  {
    const std::lock_guard hold(fake::device().lock);
    pauses = fake::device().pauses;
  }
  return new fake::stream(pauses, device);
}
FAKE_API void fake_stream_destroy(void* stream) { delete static_cast<fake::stream*>(stream); }
FAKE_API void fake_stream_sync(void* stream) { fake::stream_of(stream)->sync(); }
FAKE_API void fake_stream_call(void* stream, void (*task)(void*), void* data) {
  fake::stream_of(stream)->push([task, data] { task(data); });
}
FAKE_API void fake_capture_begin(void* stream) {
  ++fake::device().captures;
  fake::stream_of(stream)->begin_capture();
}
FAKE_API void* fake_capture_end(void* stream) {
  --fake::device().captures;
  return new fake::graph(fake::stream_of(stream)->end_capture());
}
FAKE_API int64_t fake_graph_size(void* graph) { return static_cast<int64_t>(static_cast<fake::graph*>(graph)->size()); }
FAKE_API void fake_graph_launch(void* graph, void* stream) {
  for (const auto& operation : *static_cast<fake::graph*>(graph)) fake::stream_of(stream)->push(operation);
}
FAKE_API void fake_graph_destroy(void* graph) { delete static_cast<fake::graph*>(graph); }
FAKE_API void fake_pretend(const void* pointer, int32_t kind, int32_t device) {
  auto& d = fake::device();
  const std::lock_guard hold(d.pretended_lock);
  if (kind < 0)
    d.pretended.erase(reinterpret_cast<uintptr_t>(pointer));
  else
    d.pretended[reinterpret_cast<uintptr_t>(pointer)] = {kind, device, 0, 0};
}
FAKE_API void fake_write(void* to_device, const void* from, uint64_t bytes) { std::memcpy(fake::to_real(to_device), from, bytes); }
FAKE_API void fake_read(void* to, const void* from_device, uint64_t bytes) { std::memcpy(to, fake::to_real(from_device), bytes); }
