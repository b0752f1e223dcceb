// SPDX-License-Identifier: Apache-2.0
// cqsa_dequantize_rows on the fake device: queued, captured, without memory; what is refused there, and rows that are not there.
#include "device_problem.h"

#include "quant_format.h"

using namespace device_test;

namespace {

constexpr int64_t rows = 6, columns = 512, count = 4;

// A matrix, numbers of rows and an output, on the host and on the device.
struct matrix {
  cqsa_quant_tensor w = CQSA_QUANT_TENSOR_INIT;
  array blocks, ids, out;

  matrix(cqsa_quant_format format, cqsa_dtype type, bool on_device)
      : blocks(CQSA_DTYPE_U8, {rows, columns / cqsa::quant_formats[format].block_elements * cqsa::quant_formats[format].block_bytes}),
        ids(CQSA_DTYPE_I32, {count}), out(type, {count, columns}) {
    generator r(format);
    const int64_t bytes = rows * columns / cqsa::quant_formats[format].block_elements * cqsa::quant_formats[format].block_bytes;
    for (int64_t i = 0; i < bytes; ++i) blocks.set(i, static_cast<double>(r() % 256));
    const double numbers[] = {5, 0, 2, 5};
    for (int64_t i = 0; i < count; ++i) ids.set(i, numbers[i]);
    if (on_device) blocks.to_device(), ids.to_device(), out.to_device();
    const cqsa_tensor& t = *blocks.tensor();
    w.format = format, w.data = static_cast<char*>(t.data) + t.byte_offset, w.device_type = t.device_type, w.device_id = t.device_id;
    w.rows = rows, w.row_elements = columns;
  }
  cqsa_status run(cqsa_context* context, int64_t first_row, bool with_ids, void* stream = nullptr) {
    return cqsa_dequantize_rows(context, &w, first_row, with_ids ? ids.tensor() : nullptr, out.tensor(), stream);
  }
};

}  // namespace

TEST_CASE("quant device: every format, in a graph, the bits of the CPU", "[quant]") {
  void* const stream = fake().stream_create(0);
  for (cqsa_quant_format format = 1; format < cqsa::quant_format_count; ++format)
    for (const bool with_ids : {false, true}) {
      const cqsa_dtype type = format % 2 ? CQSA_DTYPE_F32 : CQSA_DTYPE_BF16;
      matrix here(format, type, false), there(format, type, true);
      const int64_t first = with_ids ? 0 : 2;
      REQUIRE(here.run(cpu_context(), first, with_ids) == CQSA_OK);
      configure();
      fake().capture_begin(stream);
      REQUIRE(there.run(device_context(), first, with_ids, stream) == CQSA_OK);
      void* const graph = fake().capture_end(stream);
      CHECK((fake().graph_size(graph) == 1 && stats().launches == 1 && stats().stream_allocations == 0 && stats().syncs == 0));
      fake().graph_launch(graph, stream);
      fake().stream_sync(stream);
      there.out.from_device();
      INFO(cqsa::quant_formats[format].name);
      CHECK(there.out.memory() == here.out.memory());
      CHECK(std::string(stats().error).empty());
      fake().graph_destroy(graph);
    }
  fake().stream_destroy(stream);
}

TEST_CASE("quant device: rows that are not there become zeros", "[quant]") {
  matrix m(CQSA_QUANT_Q4_K, CQSA_DTYPE_F32, false);
  m.ids.set(1, rows), m.ids.set(2, -1);
  for (int64_t i = 0; i < count * columns; ++i) m.out.set(i, 7);
  m.blocks.to_device(), m.ids.to_device(), m.out.to_device();
  const cqsa_tensor& t = *m.blocks.tensor();
  m.w.data = static_cast<char*>(t.data) + t.byte_offset, m.w.device_type = t.device_type, m.w.device_id = t.device_id;
  configure();
  REQUIRE(m.run(device_context(), 0, true) == CQSA_OK);
  fake().stream_sync(nullptr);
  m.out.from_device();
  for (int64_t i = columns; i < 3 * columns; ++i) REQUIRE(m.out.get(i) == 0);
  CHECK(m.out.get(0) != 7);
}

TEST_CASE("quant device: what is refused there", "[quant]") {
  matrix here(CQSA_QUANT_Q6_K, CQSA_DTYPE_F16, false), there(CQSA_QUANT_Q6_K, CQSA_DTYPE_F16, true);
  configure();
  CHECK(here.run(device_context(), 0, false) == CQSA_ERROR_DEVICE);
  CHECK(there.run(cpu_context(), 0, false) == CQSA_ERROR_DEVICE);
  CHECK(there.run(device_context(), rows - count + 1, false) == CQSA_ERROR_INDEX);
  CHECK(cqsa_dequantize_rows(device_context(), &there.w, 0, here.ids.tensor(), there.out.tensor(), nullptr) == CQSA_ERROR_DEVICE);
  CHECK(cqsa_dequantize_rows(device_context(), &here.w, 0, nullptr, there.out.tensor(), nullptr) == CQSA_ERROR_DEVICE);
  CHECK(cqsa_quantize_rows(device_context(), there.out.tensor(), &there.w, nullptr) != CQSA_OK);
  void* const elsewhere = fake().stream_create(1);
  CHECK(there.run(device_context(), 0, false, elsewhere) == CQSA_ERROR_DEVICE);
  fake().stream_destroy(elsewhere);
  CHECK(stats().launches == 0);
}
