// SPDX-License-Identifier: Apache-2.0
// The reader of GGUF files: it refuses, or every tensor lies inside the file and can be decoded.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "backends/cpu/quant_job.h"
#include "gguf.h"
#include "quant_format.h"

namespace {

void check_inside(const void* data, uint64_t bytes, std::span<const std::byte> file) {
  const auto* const at = static_cast<const std::byte*>(data);
  if (bytes != 0 && (at < file.data() || at > file.data() + file.size() || bytes > static_cast<uint64_t>(file.data() + file.size() - at))) std::abort();
}

// The first row, at most a piece of it: whatever the bytes are.
void decode(const cqsa_quant_tensor& matrix) {
  static float out[cqsa::cpu::quant_piece];
  cqsa_dequantize_leaf leaf{};
  leaf.struct_size = sizeof leaf, leaf.format = matrix.format, leaf.data = matrix.data, leaf.rows = leaf.count = 1;
  leaf.row_elements = std::min<int64_t>(matrix.row_elements, cqsa::cpu::quant_piece);
  leaf.out = out, leaf.out_dtype = CQSA_DTYPE_F32, leaf.out_stride[0] = leaf.row_elements, leaf.out_stride[1] = 1;
  cqsa::cpu::dequantize_rows(nullptr, &leaf, nullptr, nullptr);
}

void look_at(const cqsa_gguf& gguf, int64_t index, std::span<const std::byte> file) {
  cqsa_gguf_tensor_info info = CQSA_GGUF_TENSOR_INFO_INIT;
  if (cqsa_gguf_tensor(&gguf, index, &info) != CQSA_OK) std::abort();
  check_inside(info.data, info.bytes, file);
  for (int64_t expert : {int64_t{0}, info.shape[0] - 1, info.shape[0]}) {
    cqsa_quant_tensor matrix = CQSA_QUANT_TENSOR_INIT;
    if (cqsa_gguf_matrix(&gguf, index, expert, &matrix) != CQSA_OK) continue;
    check_inside(matrix.data, matrix.data_bytes, file);
    cqsa::quant_matrix checked;
    const cqsa_status status = checked.read(&matrix, "matrix");
    if (status == CQSA_OK && matrix.rows > 0 && matrix.row_elements > 0) decode(matrix);
  }
}

void look_at_key(const cqsa_gguf& gguf, const char* key) {
  int64_t whole;
  double number;
  char text[8];
  uint64_t length;
  cqsa_gguf_integer(&gguf, key, &whole);
  cqsa_gguf_number(&gguf, key, &number);
  cqsa_gguf_text(&gguf, key, text, sizeof text, &length);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[size]);  // on an even address, with the heap's guards right behind it
  if (size) std::memcpy(copy.get(), data, size);
  const std::span file(reinterpret_cast<const std::byte*>(copy.get()), size);
  std::unique_ptr<cqsa_gguf> gguf;
  if (cqsa_gguf::parse(file, "fuzz.gguf", gguf) != CQSA_OK) return 0;
  for (int64_t i = 0; i < gguf->tensor_count(); ++i) look_at(*gguf, i, file);
  for (int64_t i = 0; i < gguf->key_count(); ++i) look_at_key(*gguf, cqsa_gguf_key(gguf.get(), i));
  return 0;
}
