// SPDX-License-Identifier: Apache-2.0
// What the tests of FP8 calls share: a call that has every argument, on the host or on the fake device.
#pragma once
#include "device_problem.h"

#include <functional>

namespace device_test {


// A copy of a tensor that lasts, with something about it changed.
inline const cqsa_tensor* changed(const cqsa_tensor* from, const std::function<void(cqsa_tensor&)>& how) {
  static std::vector<std::unique_ptr<cqsa_tensor>> kept;
  kept.push_back(std::make_unique<cqsa_tensor>(*from));
  how(*kept.back());
  return kept.back().get();
}

inline const cqsa_tensor* shaped(const cqsa_tensor* from, sizes shape) {
  static std::vector<std::unique_ptr<sizes>> kept;
  kept.push_back(std::make_unique<sizes>(std::move(shape)));
  sizes& mine = *kept.back();
  return changed(from, [&](cqsa_tensor& t) { t.shape = mine.data(), t.ndim = static_cast<int32_t>(mine.size()), t.strides = nullptr; });
}

inline const cqsa_tensor* typed(const cqsa_tensor* from, cqsa_dtype dtype) {
  return changed(from, [&](cqsa_tensor& t) { t.dtype = dtype; });
}

inline std::string said() { return cqsa_last_error(); }

// Memory aligned as a workspace, on the host or on the device, with a canary behind it.
struct aligned {
  static constexpr size_t canary = 64;
  std::vector<char> host;
  void* device = nullptr;
  uint64_t bytes;
  explicit aligned(uint64_t size, bool on_device = false, int fill = 0) : host(size + 64 + canary, static_cast<char>(fill)), bytes(size) {
    if (on_device) device = fake().alloc(size + canary), fake().write(device, host.data(), size + canary);
  }
  ~aligned() {
    if (device) fake().free(device);
  }
  aligned(const aligned&) = delete;
  char* data() {
    if (device) return static_cast<char*>(device);
    return host.data() + (64 - reinterpret_cast<uintptr_t>(host.data()) % 64) % 64;
  }
  bool canary_is_whole(int fill) {
    std::vector<char> end(canary);
    if (device) fake().read(end.data(), static_cast<char*>(device) + bytes, canary);
    else std::memcpy(end.data(), data() + bytes, canary);
    return std::all_of(end.begin(), end.end(), [&](char c) { return c == static_cast<char>(fill); });
  }
};

// Both outputs, every small tensor, 1x128 blocks and a ring when asked for: 6 rows, 200 columns.
struct case_of_all {
  array x{CQSA_DTYPE_F16, {2, 3, 200}}, row{CQSA_DTYPE_E4M3FN, {2, 3, 200}}, turned{CQSA_DTYPE_E5M2, {200, 6}};
  array row_scale{CQSA_DTYPE_F32, {6, 2}}, row_inv{CQSA_DTYPE_F32, {6, 2}}, turned_scale{CQSA_DTYPE_F32, {1, 200}}, turned_inv{CQSA_DTYPE_F32, {1, 200}};
  array scale_in{CQSA_DTYPE_F32, {6, 2}}, turned_in{CQSA_DTYPE_F32, {1, 200}}, up{CQSA_DTYPE_F16, {2, 3, 200}}, rng{CQSA_DTYPE_I64, {2}};
  array skip{CQSA_DTYPE_I32, {1}}, amax{CQSA_DTYPE_F32, {1}}, sum{CQSA_DTYPE_F32, {200}}, counters{CQSA_DTYPE_I64, {4}}, groups{CQSA_DTYPE_I32, {3}};
  cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
  cqsa_fp8_ring ring = CQSA_FP8_RING_INIT;
  std::unique_ptr<aligned> ring_memory;

  case_of_all() {
    generator r(1);
    fill_normal(r, x), fill_normal(r, up);
    for (array* a : {&scale_in, &turned_in})
      for (int64_t i = 0; i < a->count(); ++i) a->set(i, 1.5);
    skip.set(0, 0);
    for (int64_t i = 0; i < 4; ++i) counters.set(i, 0);
    rng.set(0, 5), rng.set(1, 6);
    groups.set(0, 0), groups.set(1, 2), groups.set(2, 5);
  }
  std::vector<array*> all() {
    return {&x, &row, &turned, &row_scale, &row_inv, &turned_scale, &turned_inv, &scale_in, &turned_in, &up, &rng, &skip, &amax, &sum, &counters, &groups};
  }
  cqsa_fp8_quantize_args& bound() {
    args = CQSA_FP8_QUANTIZE_ARGS_INIT;
    args.x = x.tensor(), args.amax = amax.tensor(), args.column_sum = sum.tensor(), args.counters = counters.tensor(), args.skip = skip.tensor();
    args.row.out = row.tensor(), args.row.scale = row_scale.tensor(), args.row.scale_inv = row_inv.tensor();
    args.row.block[0] = 1, args.row.block[1] = 128;
    args.transposed.out = turned.tensor(), args.transposed.scale = turned_scale.tensor(), args.transposed.scale_inv = turned_inv.tensor();
    args.transposed.block[1] = 1;
    return args;
  }
  // One scale, row-major codes alone.
  cqsa_fp8_quantize_args& simple() {
    bound();
    args.row = CQSA_FP8_SIDE_INIT, args.transposed = CQSA_FP8_SIDE_INIT;
    args.row.out = row.tensor();
    return args;
  }
  cqsa_fp8_quantize_args& with_ring(bool on_device = false) {
    simple();
    ring = CQSA_FP8_RING_INIT;
    ring.hist_len = 3, ring.format = CQSA_DTYPE_E4M3FN;
    REQUIRE(cqsa_fp8_ring_bytes(&ring, &ring.bytes) == CQSA_OK);
    ring_memory = std::make_unique<aligned>(ring.bytes, on_device);
    ring.state = ring_memory->data();
    args.source = CQSA_FP8_RING, args.ring = &ring;
    REQUIRE(cqsa_fp8_ring_init(on_device ? device_context() : cpu_context(), &ring, 1.0f, nullptr) == CQSA_OK);
    if (on_device) fake().stream_sync(nullptr);
    return args;
  }
  void to_device() {
    for (array* a : all()) a->to_device();
  }
  std::vector<std::vector<char>> snapshot() {
    std::vector<std::vector<char>> out;
    for (array* a : all()) a->from_device(), out.push_back(a->memory());
    if (ring_memory && !ring_memory->device) out.emplace_back(ring_memory->data(), ring_memory->data() + ring.bytes);
    return out;
  }
};

using args_type = cqsa_fp8_quantize_args;
using change = std::function<void(args_type&)>;

}  // namespace device_test
