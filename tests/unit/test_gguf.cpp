// SPDX-License-Identifier: Apache-2.0
// The reader of GGUF files: what is in one, and every lie that a file may tell.
#include "gguf.h"
#include "gguf_bytes.h"
#include "quant_format.h"

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <functional>

using cqsa::test::gguf_bytes;

namespace {

// A memory of exactly its size, so that ASan sees a byte too far.
struct parsed {
  std::vector<uint8_t> memory;
  std::unique_ptr<cqsa_gguf> file;
  cqsa_status status;
  explicit parsed(const gguf_bytes& source) : memory(source.bytes) {
    memory.shrink_to_fit();
    status = cqsa_gguf::parse(std::as_bytes(std::span(memory)), "test.gguf", file);
  }
};

// Two tensors: 3 experts of 2 x 256 Q4_K (864 bytes), a row of 5 F32.
gguf_bytes good() {
  gguf_bytes b;
  b.header(2, 6);
  b.key("general.architecture", 8).name("test");
  b.key("test.expert_count", 4).put<uint32_t>(3);
  b.key("test.eps", 6).put(0.5f);
  b.key("test.big", 10).put<uint64_t>(~uint64_t{0});
  b.key("test.list", 9).put<uint32_t>(8).put<uint64_t>(2).name("a").name("bc");
  b.key("test.negative", 11).put<int64_t>(-5);
  b.tensor("blk.0.ffn_gate_exps.weight", {256, 2, 3}, 12, 0);
  b.tensor("norm", {5}, 0, 864);
  return b.pad(32).data(864 + 20);
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("gguf: what is in a file", "[gguf]") {
  const parsed p(good());
  INFO(cqsa_last_error());
  REQUIRE(p.status == CQSA_OK);
  const cqsa_gguf* const file = p.file.get();
  CHECK(cqsa_gguf_tensor_count(file) == 2);
  CHECK(cqsa_gguf_key_count(file) == 6);
  CHECK(std::string(cqsa_gguf_key(file, 1)) == "test.expert_count");
  CHECK(cqsa_gguf_key(file, 6) == nullptr);
  CHECK(cqsa_gguf_key(file, -1) == nullptr);
  int64_t index = -1;
  REQUIRE(cqsa_gguf_find(file, "blk.0.ffn_gate_exps.weight", &index) == CQSA_OK);
  cqsa_gguf_tensor_info info = CQSA_GGUF_TENSOR_INFO_INIT;
  REQUIRE(cqsa_gguf_tensor(file, index, &info) == CQSA_OK);
  CHECK((info.format == CQSA_QUANT_Q4_K && info.ggml_type == 12 && info.ndim == 3 && info.bytes == 864));
  CHECK((info.shape[0] == 3 && info.shape[1] == 2 && info.shape[2] == 256 && info.shape[3] == 1));
  CHECK(static_cast<const uint8_t*>(info.data) == p.memory.data() + info.file_offset);
  cqsa_quant_tensor expert = CQSA_QUANT_TENSOR_INIT;
  for (int64_t e = 0; e < 3; ++e) {
    REQUIRE(cqsa_gguf_matrix(file, index, e, &expert) == CQSA_OK);
    CHECK((expert.rows == 2 && expert.row_elements == 256 && expert.data_bytes == 288 && expert.format == CQSA_QUANT_Q4_K));
    CHECK(static_cast<const uint8_t*>(expert.data) == static_cast<const uint8_t*>(info.data) + e * 288);
    cqsa::quant_matrix checked;
    CHECK(checked.read(&expert, "expert") == CQSA_OK);
  }
  CHECK(cqsa_gguf_matrix(file, index, 3, &expert) == CQSA_ERROR_INDEX);
  CHECK(contains(cqsa_last_error(), "expert is 3, wanted 0 to 2"));
  REQUIRE(cqsa_gguf_matrix(file, 1, 0, &expert) == CQSA_OK);
  CHECK((expert.rows == 1 && expert.row_elements == 5 && expert.data_bytes == 20));
  CHECK(cqsa_gguf_matrix(file, 2, 0, &expert) == CQSA_ERROR_INDEX);
  CHECK(cqsa_gguf_tensor(file, -1, &info) == CQSA_ERROR_INDEX);
  CHECK(cqsa_gguf_find(file, "nobody", &index) == CQSA_ERROR_INDEX);
}

TEST_CASE("gguf: values of keys", "[gguf]") {
  const parsed p(good());
  const cqsa_gguf* const file = p.file.get();
  int64_t whole = 0;
  double number = 0;
  char text[3];
  uint64_t length = 0;
  CHECK((cqsa_gguf_integer(file, "test.expert_count", &whole) == CQSA_OK && whole == 3));
  CHECK((cqsa_gguf_integer(file, "test.negative", &whole) == CQSA_OK && whole == -5));
  CHECK((cqsa_gguf_number(file, "test.eps", &number) == CQSA_OK && number == 0.5));
  CHECK((cqsa_gguf_number(file, "test.expert_count", &number) == CQSA_OK && number == 3));
  CHECK(cqsa_gguf_text(file, "general.architecture", text, sizeof text, &length) == CQSA_OK);
  CHECK((std::string(text) == "te" && length == 4));
  CHECK(cqsa_gguf_integer(file, "test.big", &whole) == CQSA_ERROR_DTYPE);
  CHECK(cqsa_gguf_integer(file, "test.eps", &whole) == CQSA_ERROR_DTYPE);
  CHECK(cqsa_gguf_text(file, "test.list", text, sizeof text, &length) == CQSA_ERROR_DTYPE);
  CHECK(cqsa_gguf_integer(file, "nothing", &whole) == CQSA_ERROR_INDEX);
  CHECK(cqsa_gguf_integer(file, nullptr, &whole) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_gguf_integer(nullptr, "a", &whole) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_gguf_tensor_count(nullptr) == 0);
  CHECK((whole == -5 && number == 3));
}

TEST_CASE("gguf: lies", "[gguf]") {
  struct lie {
    const char* name;
    std::function<gguf_bytes()> make;
    const char* text;
  };
  const auto one = [](const std::vector<uint64_t>& shape, uint32_t type, uint64_t offset, size_t bytes) {
    return gguf_bytes().header(1, 0).tensor("t", shape, type, offset).pad(32).data(bytes);
  };
  const auto key = [](uint32_t type) { return gguf_bytes().header(0, 1).key("k", type); };
  const auto aligned = [](uint32_t type, uint32_t value) { return gguf_bytes().header(0, 1).key("general.alignment", type).put(value); };
  const lie all[] = {
      {"magic", [] { return gguf_bytes().put<uint64_t>(5).data(40); }, "wanted the bytes GGUF"},
      {"version 1", [] { return gguf_bytes().header(0, 0, 1); }, "version 1, wanted 2 or 3"},
      {"big-endian", [] { return gguf_bytes().header(0, 0, 0x03000000); }, "big-endian"},
      {"too many keys", [] { return gguf_bytes().header(0, ~uint64_t{0}).data(40); }, "18446744073709551615 keys"},
      {"too many tensors", [] { return gguf_bytes().header(1u << 31, 0).data(40); }, "2147483648 tensors"},
      {"long key", [] { return gguf_bytes().header(0, 1).put<uint64_t>(~uint64_t{0} - 7).data(40); }, "a key has"},
      {"zero in a key", [] { return gguf_bytes().header(0, 1).key(std::string("a\0b", 3), 4).data(8); }, "zero byte"},
      {"two keys", [] { return gguf_bytes().header(0, 2).key("k", 0).put('a').key("k", 0).put('a'); }, "the key \"k\" twice"},
      {"type of a key", [=] { return key(13).data(9); }, "unknown type 13"},
      {"long text", [=] { return key(8).put(~uint64_t{0}).data(9); }, "the file ends in a value"},
      {"long array", [=] { return key(9).put<uint32_t>(10).put<uint64_t>(uint64_t{1} << 61).data(9); }, "the file ends in an array"},
      {"long array of texts", [=] { return key(9).put<uint32_t>(8).put<uint64_t>(uint64_t{1} << 61).data(9); }, "the file ends in"},
      {"type of an array", [=] { return key(9).put<uint32_t>(77).put<uint64_t>(1).data(9); }, "unknown type 77"},
      {"alignment 0", [=] { return aligned(4, 0); }, "general.alignment is 0"},
      {"alignment 24", [=] { return aligned(4, 24); }, "general.alignment is 24"},
      {"alignment of another type", [=] { return aligned(5, 32); }, "general.alignment"},
      {"no axes", [=] { return one({}, 0, 0, 40); }, "0 axes, wanted 1 to 4"},
      {"five axes", [=] { return one({1, 1, 1, 1, 1}, 0, 0, 40); }, "5 axes"},
      {"axis", [=] { return one({~uint64_t{0}}, 0, 0, 40); }, "less than 2^63"},
      {"elements", [=] { return one({1ull << 32, 1ull << 31}, 0, 0, 40); }, "2^63 elements"},
      {"bytes", [=] { return one({1ull << 62}, 0, 0, 40); }, "2^63 bytes"},
      {"row", [=] { return one({100}, 12, 0, 400); }, "rows of 100 elements, wanted a multiple of 256 for Q4_K"},
      {"offset", [=] { return one({4}, 0, 33, 400); }, "offset 33, wanted a multiple of 32"},
      {"far offset", [=] { return one({4}, 0, 64, 72); }, "16 bytes at offset 64, but the data of the file are 72 bytes"},
      {"offset that wraps", [=] { return one({4}, 0, ~uint64_t{31}, 72); }, "but the data of the file are 72 bytes"},
      {"Q2_0 of 34 bytes", [=] { return one({128}, 42, 0, 34); }, "36 bytes at offset 0, but the data of the file are 34 bytes"},
      {"two of a name", [] { return gguf_bytes().header(2, 0).tensor("t", {1}, 0, 0).tensor("t", {1}, 0, 32).pad(32).data(64); }, "tensor \"t\" twice"},
      {"overlap", [] { return gguf_bytes().header(2, 0).tensor("t", {9}, 0, 0).tensor("u", {1}, 0, 32).pad(32).data(64); }, "\"u\" begins 32 bytes after it"},
  };
  for (const lie& it : all) {
    const parsed p(it.make());
    INFO(it.name << ": " << cqsa_last_error());
    CHECK(p.status == CQSA_ERROR_IO);
    CHECK(p.file == nullptr);
    CHECK(contains(cqsa_last_error(), it.text));
  }
}

TEST_CASE("gguf: arrays in arrays, to a depth", "[gguf]") {
  const auto nested = [](int depth) {
    gguf_bytes b = gguf_bytes().header(0, 1).key("k", 9);
    for (int i = 1; i < depth; ++i) b.put<uint32_t>(9).put<uint64_t>(1);
    return b.put<uint32_t>(0).put<uint64_t>(1).put('a');
  };
  CHECK(parsed(nested(8)).status == CQSA_OK);
  CHECK(parsed(nested(9)).status == CQSA_ERROR_IO);
  CHECK(parsed(nested(1000)).status == CQSA_ERROR_IO);
}

TEST_CASE("gguf: a file cut anywhere is refused", "[gguf]") {
  const gguf_bytes whole = good();
  for (size_t size = 0; size < whole.bytes.size(); ++size) {
    gguf_bytes cut;
    cut.bytes.assign(whole.bytes.begin(), whole.bytes.begin() + static_cast<std::ptrdiff_t>(size));
    const parsed p(cut);
    REQUIRE(p.status == CQSA_ERROR_IO);
  }
}

TEST_CASE("gguf: unknown types are seen, and not more", "[gguf]") {
  const parsed p(gguf_bytes().header(1, 0).tensor("t", {7, 3}, 26, 0).pad(32).data(84));
  REQUIRE(p.status == CQSA_OK);
  cqsa_gguf_tensor_info info = CQSA_GGUF_TENSOR_INFO_INIT;
  REQUIRE(cqsa_gguf_tensor(p.file.get(), 0, &info) == CQSA_OK);
  CHECK((info.format == CQSA_QUANT_NONE && info.data == nullptr && info.bytes == 0 && info.ggml_type == 26));
  cqsa_quant_tensor matrix = CQSA_QUANT_TENSOR_INIT;
  CHECK(cqsa_gguf_matrix(p.file.get(), 0, 0, &matrix) == CQSA_ERROR_UNSUPPORTED);
}

TEST_CASE("gguf: files", "[gguf]") {
  cqsa_gguf* file = nullptr;
  CHECK(cqsa_gguf_open("/nowhere/a.gguf", &file) == CQSA_ERROR_IO);
  CHECK(contains(cqsa_last_error(), "/nowhere/a.gguf cannot be opened"));
  CHECK(cqsa_gguf_open("/", &file) == CQSA_ERROR_IO);
  CHECK(cqsa_gguf_open("/dev/null", &file) == CQSA_ERROR_IO);
  CHECK(cqsa_gguf_open(nullptr, &file) == CQSA_ERROR_NULL_POINTER);
  CHECK(cqsa_gguf_open("a", nullptr) == CQSA_ERROR_NULL_POINTER);
  char path[] = "/tmp/cqsa_gguf_XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  CHECK(cqsa_gguf_open(path, &file) == CQSA_ERROR_IO);
  CHECK(contains(cqsa_last_error(), "is empty"));
  const gguf_bytes source = good();
  REQUIRE(::write(fd, source.bytes.data(), source.bytes.size()) == static_cast<ssize_t>(source.bytes.size()));
  REQUIRE(cqsa_gguf_open(path, &file) == CQSA_OK);
  ::close(fd);
  std::remove(path);
  cqsa_gguf_tensor_info info = CQSA_GGUF_TENSOR_INFO_INIT;
  REQUIRE(cqsa_gguf_tensor(file, 1, &info) == CQSA_OK);
  CHECK(std::memcmp(info.data, source.bytes.data() + info.file_offset, 20) == 0);
  cqsa_gguf_close(file);
  cqsa_gguf_close(nullptr);
}
