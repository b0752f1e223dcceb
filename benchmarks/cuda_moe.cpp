// SPDX-License-Identifier: Apache-2.0
// The mixtures of experts of the CUDA plugin by themselves on a device, for benchmarks/cuda_moe.py: no core. Kernels come from a folder of cubins.
// docs/kernels/NOTES-moe.md says how to build and run.
#include "backends/cuda/tuned.h"
#include "backends/gpu/moe.h"
#include "backends/gpu/quant.h"

#include "benchmarks/cuda_cubins.h"

#include <cstring>

using namespace cqsa;
using namespace cqsa::gpu;

using bench::this_device;

namespace {
char fake_device[64];  // the handle: nobody here looks into it
}

extern "C" {

// Kernels of every cubin of the folder, in place of those of the same name that were there. tier: which tuned ones may run.
void bench_load(const char* folder, int tell, int tier) {
  if (this_device.arch == 0) bench::open_device(tier);
  this_device.tier = tier;
  bench::load_folder(folder, tell != 0);
}

// A call, as benchmarks/cuda_moe.py lays it out. Types: 0 f32, 1 f16, 2 bf16. Weights: one block of memory for all experts, or lists of data by expert.
struct bench_call {
  int64_t tokens, topk, hidden, inter, experts;
  void *x, *ids, *weights, *out;
  void* matrix[3];  // gate, up, down
  void* lists[3];   // cqsa_moe_matrix in memory of the device, or NULL
  int32_t format[3], row_bytes[3];
  int32_t x_type, out_type, layout, activation, precision, output, flags, reserved;
  void* workspace;
  uint64_t workspace_bytes;
};

static cqsa_dtype type_of(int32_t kind) { return kind == 0 ? CQSA_DTYPE_F32 : kind == 1 ? CQSA_DTYPE_F16 : CQSA_DTYPE_BF16; }
static cqsa_moe_set set_of(const bench_call& c, int i, int64_t rows, int64_t elements) {
  cqsa_moe_set s{};
  if (!c.matrix[i] && !c.lists[i]) return s;
  s.num_experts = c.experts, s.rows = rows, s.row_elements = elements, s.format = c.format[i];
  s.device_experts = static_cast<const cqsa_moe_matrix*>(c.lists[i]);
  s.all.data = c.matrix[i], s.all.row_bytes = uint64_t(c.row_bytes[i]), s.all.format = c.format[i], s.expert_bytes = rows * c.row_bytes[i];
  return s;
}
static cqsa_moe_leaf leaf_of(const bench_call& c) {
  cqsa_moe_leaf x{};
  const bool slots = c.output == CQSA_MOE_PER_SLOT;
  x.struct_size = sizeof x, x.flags = uint32_t(c.flags), x.tokens = x.chunk = c.tokens, x.topk = c.topk, x.hidden = c.hidden, x.inter = c.inter;
  x.num_experts = x.num_ids = c.experts;
  x.x = {c.x, type_of(c.x_type), 0, {c.hidden, 1}}, x.ids = {c.ids, CQSA_DTYPE_I32, 0, {c.topk, 1}}, x.weights = {c.weights, CQSA_DTYPE_F32, 0, {c.topk, 1}};
  x.out = {c.out, slots ? CQSA_DTYPE_F32 : type_of(c.out_type), 0, {c.hidden, 1}};
  x.gate = set_of(c, 0, c.layout ? 2 * c.inter : c.inter, c.hidden), x.up = set_of(c, 1, c.inter, c.hidden), x.down = set_of(c, 2, c.hidden, c.inter);
  x.layout = c.layout, x.activation = c.activation, x.output = c.output, x.alpha = 1, x.limit = __builtin_inff(), x.precision = c.precision;
  x.chip = {this_device.tier, this_device.compute_units, this_device.shared_bytes, 0};
  return x;
}
static const cqsa_moe_impl* impl_of(const char* name) {
  if (std::strcmp(name, "portable") == 0) return &portable_moe;
#if defined(CQSA_BENCH_TUNED)
  if (std::strcmp(name, "sm80") == 0) return &sm80_moe;
#endif
#if defined(CQSA_BENCH_SM90)
  if (std::strcmp(name, "sm90") == 0) return &sm90_moe;
#endif
  return nullptr;
}

// Bytes of workspace; 0: there is no such implementation, or it declines, with the reason.
uint64_t bench_workspace(const char* name, const bench_call* call, char* reason, uint64_t size) {
  const cqsa_moe_impl* impl = impl_of(name);
  const cqsa_moe_leaf x = leaf_of(*call);
  if (!impl || impl->probe(fake_device, &x, reason, size) != CQSA_OK) return 0;
  return impl->workspace(&x, 1);
}
int bench_moe(const char* name, const bench_call* call, void* stream) {
  const cqsa_moe_leaf x = leaf_of(*call);
  return impl_of(name)->launch(fake_device, &x, call->workspace, call->workspace_bytes, nullptr, stream);
}
// Rows of a matrix as f32.
int bench_dequantize(int32_t format, const void* data, int64_t rows, int64_t elements, int64_t row_bytes, void* out, void* stream) {
  cqsa_dequantize_leaf x{};
  x.struct_size = sizeof x, x.format = format, x.data = data, x.rows = x.count = rows, x.row_elements = elements, x.row_bytes = row_bytes;
  x.out = out, x.out_dtype = CQSA_DTYPE_F32, x.out_stride[0] = elements, x.out_stride[1] = 1;
  return portable_dequantize_rows(fake_device, &x, nullptr, stream);
}

}  // extern "C"
