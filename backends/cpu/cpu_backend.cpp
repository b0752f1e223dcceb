// SPDX-License-Identifier: Apache-2.0
// The CPU backend behind the struct of cqsa_backend.h: what machine this is, how fast it is, and the tables of the rest.
#include "attention_job.h"
#include "selected_job.h"
#include "kv_job.h"
#include "fp8_job.h"
#include "quant_job.h"
#include "moe_job.h"

#include "dtype.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(CQSA_CPU_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif
#include <unistd.h>

#if __has_include("cqsa_build_id.h")
#include "cqsa_build_id.h"
#endif
#if !defined(CQSA_BUILD_ID)
#define CQSA_BUILD_ID "dev"
#endif

namespace cqsa::cpu {
namespace {

thread_local char error_text[256];

const char* last_error() { return error_text; }

int32_t state(char* reason, uint64_t size) {
  if (reason && size) *reason = 0;
  return CQSA_BACKEND_READY;
}

int32_t device_count() { return 1; }

// ------------------------------------------------------------------------------------------------------- the machine

void cpu_name(char* out, size_t size) {
  std::snprintf(out, size, "CPU");
#if defined(CQSA_CPU_X86)
  unsigned words[12];
  if (unsigned(__get_cpuid_max(0x80000000u, nullptr)) < 0x80000004u) return;
  for (unsigned i = 0; i < 3; ++i)
    __get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
  char text[49];
  std::memcpy(text, words, 48);
  text[48] = 0;
  const char* from = text;
  while (*from == ' ') ++from;
  size_t length = std::strlen(from);
  while (length && from[length - 1] == ' ') --length;
  if (length) std::snprintf(out, size, "%.*s", int(length), from);
#endif
}

int32_t core_count() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? int32_t(online) : 1;
}

// What can still be had without swapping: the kernel's own estimate where it gives one.
uint64_t free_bytes(uint64_t total) {
  std::FILE* file = std::fopen("/proc/meminfo", "r");
  if (!file) return total;
  char line[128];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof line, file))
    if (std::sscanf(line, "MemAvailable: %llu", &kib) == 1) break;
  std::fclose(file);
  return kib ? kib * 1024 : total;
}

// The first entry that takes a plain problem of a type.
const cqsa_attention_impl* default_impl(cqsa_dtype type) {
  cqsa_attention_leaf leaf{};
  leaf.head_dim = leaf.head_dim_v = 64;
  leaf.q.dtype = leaf.k.dtype = leaf.v.dtype = leaf.out.dtype = type;
  int32_t count = 0;
  const cqsa_attention_impl* list = attention_impls(&count);
  for (int32_t i = 0; i < count; ++i)
    if (list[i].probe(&leaf, nullptr, 0) == CQSA_OK) return &list[i];
  return &list[count - 1];
}

cqsa_status device_properties(int32_t device, cqsa_device_properties* out) {
  if (device != 0) return fail(CQSA_ERROR_NO_DEVICE, "the CPU backend has device 0 only");
  *out = cqsa_device_properties{};
  cpu_name(out->name, sizeof out->name);
  std::snprintf(out->arch, sizeof out->arch, "%s", default_impl(CQSA_DTYPE_F32)->name + 4);  // without "cpu_"
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  out->total_bytes = pages > 0 && page > 0 ? uint64_t(pages) * uint64_t(page) : 0;
  out->free_bytes = free_bytes(out->total_bytes);
  out->chip.compute_units = core_count();
  return CQSA_OK;
}

cqsa_status device_open(int32_t device, void** out) {
  if (device != 0) return fail(CQSA_ERROR_NO_DEVICE, "the CPU backend has device 0 only");
  *out = nullptr;
  return CQSA_OK;
}

void device_close(void*) {}

// --------------------------------------------------------------------------------------------------------------- rates

struct block {
  void* memory;
  explicit block(uint64_t bytes) : memory(std::aligned_alloc(64, size_t((bytes + 63) / 64 * 64 + 64))) {}
  ~block() { std::free(memory); }
  block(const block&) = delete;
  block& operator=(const block&) = delete;
};

void fill(void* memory, cqsa_dtype type, int64_t n) {
  uint32_t seed = 1;
  for (int64_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const float x = float(seed >> 8) * 0x1p-23f - 1.0f;
    if (type == CQSA_DTYPE_F32) static_cast<float*>(memory)[i] = x;
    else static_cast<uint16_t*>(memory)[i] = type == CQSA_DTYPE_F16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
}

cqsa_view dense(void* memory, cqsa_dtype type, int64_t rows, int64_t channels) {
  return {memory, type, 0, {0, rows * channels, channels, 1}};
}

// Best of the runs that fit into a few tens of milliseconds.
double time_leaf(const cqsa_attention_impl& impl, const cqsa_attention_leaf& leaf, void* workspace, uint64_t bytes,
                 const cqsa_exec* exec) {
  using clock = std::chrono::steady_clock;
  const clock::time_point start = clock::now();
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const clock::time_point begin = clock::now();
    if (impl.launch(nullptr, &leaf, workspace, bytes, exec, nullptr) != CQSA_OK) return 0;
    const clock::time_point end = clock::now();
    const double seconds = std::chrono::duration<double>(end - begin).count();
    if (i > 0 && (best == 0 || seconds < best)) best = seconds;  // the first one warms up
    if (i > 1 && std::chrono::duration<double>(end - start).count() > 0.03) break;
  }
  return best;
}

double compute_rate(int32_t device, int64_t head_dim, cqsa_dtype dtype, const cqsa_exec* exec) {
  const bool known = dtype == CQSA_DTYPE_F32 || dtype == CQSA_DTYPE_F16 || dtype == CQSA_DTYPE_BF16;
  if (device != 0 || !known || head_dim < 1 || head_dim > 576) return 0;
  const int64_t dv = head_dim < 512 ? head_dim : 512;
  const cqsa_attention_impl& impl = *default_impl(dtype);
  const int64_t workers = exec && exec->num_workers > 1 ? exec->num_workers : 1;
  const int64_t rows = 256, keys = head_dim > 128 ? 256 : 512, heads = workers;
  const int64_t bytes = dtype == CQSA_DTYPE_F32 ? 4 : 2;
  block q(uint64_t(heads * rows * head_dim * bytes)), k(uint64_t(keys * head_dim * bytes));
  block v(uint64_t(keys * dv * bytes)), out(uint64_t(heads * rows * dv * 4));
  if (!q.memory || !k.memory || !v.memory || !out.memory) return 0;
  fill(q.memory, dtype, heads * rows * head_dim);
  fill(k.memory, dtype, keys * head_dim);
  fill(v.memory, dtype, keys * dv);
  cqsa_attention_leaf leaf{};
  leaf.struct_size = sizeof leaf;
  leaf.batch = 1;
  leaf.num_heads = heads;
  leaf.num_kv_heads = 1;
  leaf.head_dim = head_dim;
  leaf.head_dim_v = dv;
  leaf.seqlen_q = rows;
  leaf.seqlen_k = keys;
  leaf.q = dense(q.memory, dtype, rows, head_dim);
  leaf.k = dense(k.memory, dtype, keys, head_dim);
  leaf.v = dense(v.memory, dtype, keys, dv);
  leaf.out = dense(out.memory, CQSA_DTYPE_F32, rows, dv);
  leaf.softmax_scale = 1.0 / std::sqrt(double(head_dim));
  leaf.window_left = leaf.window_right = -1;
  cqsa_leaf_tile tile{};
  if (impl.probe(&leaf, nullptr, 0) != CQSA_OK || impl.tiles(&leaf, &tile, 1) < 1) return 0;
  leaf.tile_q = tile.tile_q;
  leaf.tile_k = tile.tile_k;
  const uint64_t size = impl.workspace(&leaf, workers);
  block workspace(size);
  if (!workspace.memory) return 0;
  const double seconds = time_leaf(impl, leaf, workspace.memory, size, exec);
  return seconds > 0 ? 2.0 * double(head_dim + dv) * double(heads * rows) * double(keys) / seconds : 0;
}

cqsa_backend_v1 make_backend() {
  cqsa_backend_v1 b{};
  b.struct_size = sizeof b;
  b.flags = CQSA_BACKEND_HOST;
  b.name = "cpu";
  b.build_id = CQSA_BUILD_ID;
  b.device_type = CQSA_DEVICE_CPU;
  b.last_error = last_error;
  b.state = state;
  b.device_count = device_count;
  b.device_properties = device_properties;
  b.compute_rate = compute_rate;
  b.device_open = device_open;
  b.device_close = device_close;
  b.attention = attention_impls(&b.num_attention);
  b.merge = merge;
  b.selected = selected_impls(&b.num_selected);
  b.kv_append = kv_append;
  b.kv_gather = kv_gather;
  b.hadamard = hadamard;
  b.fp8_quantize_workspace = fp8_quantize_workspace;
  b.fp8_quantize = fp8_quantize;
  b.fp8_workspace_init = fp8_workspace_init;
  b.fp8_dequantize = fp8_dequantize;
  b.fp8_scale = fp8_scale;
  b.fp8_transpose = fp8_transpose;
  b.fp8_rings = fp8_rings;
  b.fp8_gemm = fp8_gemm_impls(&b.num_fp8_gemm);
  b.dequantize_rows = dequantize_rows;
  b.quantize_rows = quantize_rows;
  b.moe = moe_impls(&b.num_moe);
  b.moe_route = moe_route;
  b.moe_group = moe_group;
  b.moe_quantize = moe_quantize;
  b.moe_combine = moe_combine;
  return b;
}

}  // namespace

cqsa_status fail(cqsa_status status, const char* text) {
  std::snprintf(error_text, sizeof error_text, "%s", text);
  return status;
}

}  // namespace cqsa::cpu

extern "C" const cqsa_backend_v1* cqsa_cpu_backend(void) {
  static const cqsa_backend_v1 backend = cqsa::cpu::make_backend();
  return &backend;
}
