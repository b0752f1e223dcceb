// SPDX-License-Identifier: Apache-2.0
#include "gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>

#include "abi_struct.h"
#include "ops/attention/describe.h"
#include "quant_format.h"
#include "tensor.h"

namespace cqsa {

mapped_bytes::~mapped_bytes() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

namespace {

struct descriptor {
  int fd = -1;
  ~descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

cqsa_status mapped_bytes::map(const char* path) {
  const descriptor file{::open(path, O_RDONLY | O_CLOEXEC)};
  struct stat facts {};
  if (file.fd < 0 || ::fstat(file.fd, &facts) != 0) return fail(CQSA_ERROR_IO, "%.300s cannot be opened: %s", path, std::strerror(errno));
  if (!S_ISREG(facts.st_mode)) return fail(CQSA_ERROR_IO, "%.300s is not a regular file", path);
  if (facts.st_size == 0) return fail(CQSA_ERROR_IO, "%.300s is empty, wanted a GGUF file", path);
  const size_t size = static_cast<size_t>(facts.st_size);
  void* const memory = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd, 0);
  if (memory == MAP_FAILED) return fail(CQSA_ERROR_IO, "%.300s cannot be mapped: %s", path, std::strerror(errno));
  bytes_ = {static_cast<const std::byte*>(memory), size};
  return CQSA_OK;
}

namespace {

enum value_type : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64, value_types };

// Bytes of a value of a type; 0: it says itself how long it is.
constexpr uint64_t value_bytes[value_types] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

constexpr int deepest_array = 8;
constexpr uint64_t longest_name = 65535;          // of a key, as the format says; and here of a tensor
constexpr uint64_t least_key = 8 + 4 + 1, least_tensor = 8 + 4 + 8 + 4 + 8;

template <class T> T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// A name of a file as printable text.
struct printable {
  char text[64];
  explicit printable(std::string_view name) {
    const size_t n = std::min(name.size(), sizeof text - 1);
    for (size_t i = 0; i < n; ++i) text[i] = name[i] >= 32 && name[i] < 127 ? name[i] : '?';
    text[n] = 0;
  }
};

}  // namespace
}  // namespace cqsa

using namespace cqsa;

// Reads a file from front to back. at_ is never past the end.
class gguf_reader {
 public:
  gguf_reader(cqsa_gguf& out, const char* name) : out_(out), name_(name), file_(out.file_) {}

  cqsa_status read() {
    uint64_t tensors = 0, keys = 0;
    CQSA_TRY(read_header(tensors, keys));
    CQSA_TRY(read_values(keys));
    CQSA_TRY(read_tensors(tensors));
    CQSA_TRY(place_tensors());
    return check_overlaps();
  }

 private:
  uint64_t left() const { return file_.size() - at_; }

  cqsa_status truncated(const char* what) {
    return fail(CQSA_ERROR_IO, "%.200s: the file ends in %s, at byte %zu of %zu", name_, what, at_, file_.size());
  }
  template <class T> cqsa_status take(T& value, const char* what) {
    if (left() < sizeof value) return truncated(what);
    value = load<T>(file_.data() + at_);
    at_ += sizeof value;
    return CQSA_OK;
  }
  cqsa_status take_bytes(uint64_t count, std::span<const std::byte>& bytes, const char* what) {
    if (left() < count) return truncated(what);
    bytes = file_.subspan(at_, static_cast<size_t>(count));
    at_ += static_cast<size_t>(count);
    return CQSA_OK;
  }
  cqsa_status take_name(std::string& name, const char* what) {
    uint64_t length = 0;
    std::span<const std::byte> bytes;
    CQSA_TRY(take(length, what));
    if (length > longest_name) return fail(CQSA_ERROR_IO, "%.200s: %s has %" PRIu64 " bytes, wanted at most %" PRIu64, name_, what, length, longest_name);
    CQSA_TRY(take_bytes(length, bytes, what));
    name.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (name.find('\0') == std::string::npos) return CQSA_OK;
    return fail(CQSA_ERROR_IO, "%.200s: %s \"%s\" has a zero byte in it", name_, what, printable(name).text);
  }

  cqsa_status read_header(uint64_t& tensors, uint64_t& keys) {
    uint32_t magic = 0, version = 0;
    CQSA_TRY(take(magic, "its magic"));
    if (magic != 0x46554747u) return fail(CQSA_ERROR_IO, "%.200s begins with 0x%08" PRIx32 ", wanted the bytes GGUF", name_, magic);
    CQSA_TRY(take(version, "its version"));
    if (version != 0 && (version & 0xffff) == 0) return fail(CQSA_ERROR_IO, "%.200s is a big-endian GGUF file, wanted little-endian", name_);
    if (version != 2 && version != 3) return fail(CQSA_ERROR_IO, "%.200s has GGUF version %" PRIu32 ", wanted 2 or 3", name_, version);
    CQSA_TRY(take(tensors, "its number of tensors"));
    CQSA_TRY(take(keys, "its number of keys"));
    // What follows for each is at least this long: no count makes us reserve more than a multiple of the file.
    if (keys > left() / least_key) return fail(CQSA_ERROR_IO, "%.200s claims %" PRIu64 " keys, more than its %zu bytes can hold", name_, keys, file_.size());
    if (tensors > left() / least_tensor)
      return fail(CQSA_ERROR_IO, "%.200s claims %" PRIu64 " tensors, more than its %zu bytes can hold", name_, tensors, file_.size());
    return CQSA_OK;
  }

  cqsa_status read_values(uint64_t count) {
    out_.values_.reserve(static_cast<size_t>(count));
    for (uint64_t i = 0; i < count; ++i) {
      gguf_value& value = out_.values_.emplace_back();
      CQSA_TRY(take_name(value.key, "a key"));
      CQSA_TRY(take(value.type, "the type of a key"));
      CQSA_TRY(take_value(value.type, value.bytes, 0));
      if (!out_.value_index_.emplace(value.key, i).second)
        return fail(CQSA_ERROR_IO, "%.200s has the key \"%s\" twice", name_, printable(value.key).text);
    }
    return CQSA_OK;
  }

  cqsa_status take_value(uint32_t type, std::span<const std::byte>& bytes, int depth) {
    if (type >= value_types) return fail(CQSA_ERROR_IO, "%.200s has a value of the unknown type %" PRIu32 ", at byte %zu", name_, type, at_);
    if (type == array) return take_array(depth + 1);
    uint64_t length = value_bytes[type];
    if (type == text) CQSA_TRY(take(length, "the length of a text"));
    return take_bytes(length, bytes, "a value");
  }

  // Arrays are passed over.
  cqsa_status take_array(int depth) {
    uint32_t type = 0;
    uint64_t count = 0;
    std::span<const std::byte> ignored;
    if (depth > deepest_array) return fail(CQSA_ERROR_IO, "%.200s has arrays in more than %d arrays, at byte %zu", name_, deepest_array, at_);
    CQSA_TRY(take(type, "the type of an array"));
    CQSA_TRY(take(count, "the length of an array"));
    if (type < value_types && value_bytes[type] != 0) {
      if (count > left() / value_bytes[type]) return truncated("an array");
      return take_bytes(count * value_bytes[type], ignored, "an array");
    }
    for (uint64_t i = 0; i < count; ++i) CQSA_TRY(take_value(type, ignored, depth));  // each takes 8 bytes at least
    return CQSA_OK;
  }

  cqsa_status read_tensors(uint64_t count) {
    out_.tensors_.reserve(static_cast<size_t>(count));
    for (uint64_t i = 0; i < count; ++i) {
      gguf_tensor& tensor = out_.tensors_.emplace_back();
      CQSA_TRY(read_tensor(tensor));
      if (!out_.tensor_index_.emplace(tensor.name, i).second)
        return fail(CQSA_ERROR_IO, "%.200s has the tensor \"%s\" twice", name_, printable(tensor.name).text);
    }
    return CQSA_OK;
  }

  cqsa_status read_tensor(gguf_tensor& tensor) {
    uint32_t ndim = 0;
    CQSA_TRY(take_name(tensor.name, "a tensor's name"));
    CQSA_TRY(take(ndim, "a tensor's axes"));
    if (ndim < 1 || ndim > 4)
      return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has %" PRIu32 " axes, wanted 1 to 4", name_, printable(tensor.name).text, ndim);
    tensor.ndim = static_cast<int32_t>(ndim);
    for (uint32_t axis = ndim; axis-- > 0;) {
      uint64_t size = 0;
      CQSA_TRY(take(size, "a tensor's shape"));
      if (size > INT64_MAX)
        return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has an axis of %" PRIu64 ", wanted less than 2^63", name_, printable(tensor.name).text, size);
      tensor.shape[axis] = static_cast<int64_t>(size);
    }
    CQSA_TRY(take(tensor.ggml_type, "a tensor's type"));
    CQSA_TRY(take(tensor.offset, "a tensor's offset"));
    tensor.format = quant_format_of_ggml(tensor.ggml_type);
    return size_tensor(tensor);
  }

  cqsa_status size_tensor(gguf_tensor& tensor) {
    int64_t elements = 1, bytes = 0;
    for (int64_t size : tensor.shape)
      if (multiply_overflows(elements, size, &elements))
        return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has 2^63 elements or more", name_, printable(tensor.name).text);
    const quant_format* const format = find_quant_format(tensor.format);
    if (format == nullptr) return CQSA_OK;
    const int64_t row = tensor.shape[tensor.ndim - 1];
    if (row % format->block_elements != 0)
      return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has rows of %" PRId64 " elements, wanted a multiple of %d for %s", name_, printable(tensor.name).text,
                  row, format->block_elements, format->name);
    if (multiply_overflows(elements / format->block_elements, format->block_bytes, &bytes))
      return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has 2^63 bytes or more", name_, printable(tensor.name).text);
    tensor.bytes = static_cast<uint64_t>(bytes);
    return CQSA_OK;
  }

  cqsa_status read_alignment(uint64_t& alignment) {
    alignment = 32;
    const auto found = out_.value_index_.find("general.alignment");
    if (found == out_.value_index_.end()) return CQSA_OK;
    const gguf_value& value = out_.values_[found->second];
    alignment = value.type == u32 ? load<uint32_t>(value.bytes.data()) : 0;
    if (alignment != 0 && (alignment & (alignment - 1)) == 0) return CQSA_OK;
    return fail(CQSA_ERROR_IO, "%.200s: general.alignment is %" PRIu64 " of value type %" PRIu32 ", wanted a power of two of type 4", name_, alignment, value.type);
  }

  // Offsets in the file count from the end of the table of contents, rounded up.
  cqsa_status place_tensors() {
    uint64_t alignment = 0;
    CQSA_TRY(read_alignment(alignment));
    const uint64_t start = (at_ + alignment - 1) / alignment * alignment;  // at_ < 2^63, alignment < 2^32
    for (gguf_tensor& tensor : out_.tensors_) {
      if (tensor.offset % alignment != 0)
        return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has offset %" PRIu64 ", wanted a multiple of %" PRIu64, name_, printable(tensor.name).text,
                    tensor.offset, alignment);
      if (start > file_.size() || tensor.offset > file_.size() - start || tensor.bytes > file_.size() - start - tensor.offset)
        return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has %" PRIu64 " bytes at offset %" PRIu64 ", but the data of the file are %" PRIu64 " bytes", name_,
                    printable(tensor.name).text, tensor.bytes, tensor.offset, start > file_.size() ? 0 : file_.size() - start);
      tensor.offset += start;
    }
    return CQSA_OK;
  }

  // Blocks of another size than a type's have, as in files with a Q2_0 of their own, show here or past the end.
  cqsa_status check_overlaps() {
    std::vector<const gguf_tensor*> order;
    for (const gguf_tensor& tensor : out_.tensors_)
      if (tensor.bytes != 0) order.push_back(&tensor);
    std::sort(order.begin(), order.end(), [](const gguf_tensor* a, const gguf_tensor* b) { return a->offset < b->offset; });
    for (size_t i = 1; i < order.size(); ++i) {
      const gguf_tensor &before = *order[i - 1], &after = *order[i];
      if (after.offset - before.offset < before.bytes)
        return fail(CQSA_ERROR_IO, "%.200s: tensor \"%s\" has %" PRIu64 " bytes, but \"%s\" begins %" PRIu64 " bytes after it", name_, printable(before.name).text,
                    before.bytes, printable(after.name).text, after.offset - before.offset);
    }
    return CQSA_OK;
  }

  cqsa_gguf& out_;
  const char* name_;
  std::span<const std::byte> file_;
  size_t at_ = 0;
};

cqsa_status cqsa_gguf::open(const char* path, cqsa_gguf** out) {
  std::unique_ptr<cqsa_gguf> made(new cqsa_gguf);
  CQSA_TRY(made->mapping_.map(path));
  made->file_ = made->mapping_.bytes();
  CQSA_TRY(gguf_reader(*made, path).read());
  *out = made.release();
  return CQSA_OK;
}

cqsa_status cqsa_gguf::parse(std::span<const std::byte> file, const char* name, std::unique_ptr<cqsa_gguf>& out) {
  std::unique_ptr<cqsa_gguf> made(new cqsa_gguf);
  made->file_ = file;
  CQSA_TRY(gguf_reader(*made, name).read());
  out = std::move(made);
  return CQSA_OK;
}

const char* cqsa_gguf::key(int64_t index) const {
  return index >= 0 && index < key_count() ? values_[static_cast<size_t>(index)].key.c_str() : nullptr;
}

cqsa_status cqsa_gguf::find(std::string_view name, int64_t& index_out) const {
  const auto found = tensor_index_.find(name);
  if (found == tensor_index_.end()) return fail(CQSA_ERROR_INDEX, "the file has no tensor \"%s\"", printable(name).text);
  index_out = static_cast<int64_t>(found->second);
  return CQSA_OK;
}

cqsa_status cqsa_gguf::check_index(int64_t index) const {
  if (index >= 0 && index < tensor_count()) return CQSA_OK;
  return fail(CQSA_ERROR_INDEX, "index is %" PRId64 ", wanted 0 to %" PRId64 ": the file has %" PRId64 " tensors", index, tensor_count() - 1, tensor_count());
}

cqsa_status cqsa_gguf::describe(int64_t index, cqsa_gguf_tensor_info* info_out) const {
  CQSA_TRY(check_out_struct(info_out, "info_out", sizeof(cqsa_gguf_tensor_info)));
  CQSA_TRY(check_index(index));
  const gguf_tensor& tensor = tensors_[static_cast<size_t>(index)];
  cqsa_gguf_tensor_info info{};
  info.name = tensor.name.c_str();
  info.ggml_type = static_cast<int32_t>(tensor.ggml_type), info.format = tensor.format;
  info.ndim = tensor.ndim;
  std::copy(std::begin(tensor.shape), std::end(tensor.shape), info.shape);
  info.data = tensor.bytes ? file_.data() + tensor.offset : nullptr;
  info.bytes = tensor.bytes, info.file_offset = tensor.offset;
  write_struct(info, info_out);
  return CQSA_OK;
}

cqsa_status cqsa_gguf::matrix(int64_t index, int64_t expert, cqsa_quant_tensor* matrix_out) const {
  CQSA_TRY(check_out_struct(matrix_out, "matrix_out", sizeof(cqsa_quant_tensor)));
  CQSA_TRY(check_index(index));
  const gguf_tensor& tensor = tensors_[static_cast<size_t>(index)];
  if (tensor.format == CQSA_QUANT_NONE)
    return fail(CQSA_ERROR_UNSUPPORTED, "tensor \"%s\" has the type %" PRIu32 ", which this version does not know", printable(tensor.name).text, tensor.ggml_type);
  if (tensor.ndim > 3) return fail(CQSA_ERROR_SHAPE, "tensor \"%s\" has %d axes, wanted 1 to 3", printable(tensor.name).text, tensor.ndim);
  const int64_t experts = tensor.ndim == 3 ? tensor.shape[0] : 1;
  if (expert < 0 || expert >= experts)
    return fail(CQSA_ERROR_INDEX, "expert is %" PRId64 ", wanted 0 to %" PRId64 ": tensor \"%s\" has %" PRId64, expert, experts - 1, printable(tensor.name).text, experts);
  cqsa_quant_tensor matrix = CQSA_QUANT_TENSOR_INIT;
  matrix.format = tensor.format;
  matrix.device_type = CQSA_DEVICE_CPU;
  matrix.row_elements = tensor.shape[tensor.ndim - 1];
  matrix.rows = tensor.ndim == 1 ? 1 : tensor.shape[tensor.ndim - 2];
  matrix.data_bytes = tensor.bytes / static_cast<uint64_t>(experts);
  const std::byte* const first = file_.data() + tensor.offset + static_cast<uint64_t>(expert) * matrix.data_bytes;
  matrix.data = tensor.bytes ? const_cast<std::byte*>(first) : nullptr;
  write_struct(matrix, matrix_out);
  return CQSA_OK;
}

cqsa_status cqsa_gguf::find_value(std::string_view key, const gguf_value*& out) const {
  const auto found = value_index_.find(key);
  if (found == value_index_.end()) return fail(CQSA_ERROR_INDEX, "the file has no key \"%s\"", printable(key).text);
  out = &values_[found->second];
  return CQSA_OK;
}

namespace {

cqsa_status wrong_type(const gguf_value& value, const char* wanted) {
  return fail(CQSA_ERROR_DTYPE, "the key \"%s\" has a value of GGUF type %" PRIu32 ", wanted %s", printable(value.key).text, value.type, wanted);
}

bool read_integer(const gguf_value& value, int64_t& out) {
  const std::byte* const at = value.bytes.data();
  switch (value.type) {
    case u8: return out = load<uint8_t>(at), true;
    case i8: return out = load<int8_t>(at), true;
    case u16: return out = load<uint16_t>(at), true;
    case i16: return out = load<int16_t>(at), true;
    case u32: return out = load<uint32_t>(at), true;
    case i32: return out = load<int32_t>(at), true;
    case boolean: return out = load<uint8_t>(at) != 0, true;
    case i64: return out = load<int64_t>(at), true;
    case u64: return out = static_cast<int64_t>(load<uint64_t>(at)), out >= 0;
    default: return false;
  }
}

}  // namespace

cqsa_status cqsa_gguf::integer(std::string_view key, int64_t& out) const {
  const gguf_value* value = nullptr;
  int64_t number = 0;
  CQSA_TRY(find_value(key, value));
  if (!read_integer(*value, number)) return wrong_type(*value, "an integer below 2^63");
  out = number;
  return CQSA_OK;
}

cqsa_status cqsa_gguf::number(std::string_view key, double& out) const {
  const gguf_value* value = nullptr;
  int64_t whole = 0;
  CQSA_TRY(find_value(key, value));
  if (value->type == f32) return out = static_cast<double>(load<float>(value->bytes.data())), CQSA_OK;
  if (value->type == f64) return out = load<double>(value->bytes.data()), CQSA_OK;
  if (!read_integer(*value, whole)) return wrong_type(*value, "a number");
  out = static_cast<double>(whole);
  return CQSA_OK;
}

cqsa_status cqsa_gguf::text(std::string_view key, char* buffer, uint64_t size, uint64_t* length_out) const {
  const gguf_value* value = nullptr;
  CQSA_TRY(find_value(key, value));
  if (value->type != cqsa::text) return wrong_type(*value, "text");
  return copy_text(std::string(reinterpret_cast<const char*>(value->bytes.data()), value->bytes.size()), buffer, size, length_out);
}
