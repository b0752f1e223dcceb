// SPDX-License-Identifier: Apache-2.0
#include "safetensors.h"

#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tool {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // as in the format's own reader
constexpr int kDeepest = 8;                       // a header needs 3 levels

template <class... Args> [[noreturn]] void refuse(const std::string& path, fmt::format_string<Args...> text, Args&&... args) {
  throw std::runtime_error(path + ": " + fmt::format(text, std::forward<Args>(args)...));
}

// A name from a file as printable text.
std::string quoted(const std::string& name) {
  return json(name.substr(0, 80)).dump(-1, ' ', true, json::error_handler_t::replace);
}

uint64_t little_endian_64(std::span<const std::byte> bytes) {
  uint64_t value = 0;
  for (int i = 8; i-- > 0;) value = value << 8 | std::to_integer<uint64_t>(bytes[i]);
  return value;
}

std::span<const std::byte> header_bytes(std::span<const std::byte> file, const std::string& path) {
  if (file.size() < kLengthBytes)
    refuse(path, "not a .safetensors file: {} bytes, and at least {} are wanted", file.size(), kLengthBytes);
  const uint64_t length = little_endian_64(file);
  const uint64_t rest = file.size() - kLengthBytes;
  if (length > rest)
    refuse(path, "truncated, or not a .safetensors file: the header should have {} bytes, but only {} follow", length, rest);
  if (length > kLongestHeader) refuse(path, "the header has {} bytes; at most {} are read", length, kLongestHeader);
  return file.subspan(kLengthBytes, length);
}

// A JSON parser keeps the last of two equal keys; here they are an error, and so is deep nesting.
class key_guard {
 public:
  explicit key_guard(const std::string& path) : path_(path) {}

  bool operator()(int depth, json::parse_event_t event, json& value) {
    if (depth > kDeepest) refuse(path_, "the header nests deeper than {} levels", kDeepest);
    if (event == json::parse_event_t::object_start) keys_.emplace_back();
    if (event == json::parse_event_t::object_end && !keys_.empty()) keys_.pop_back();
    if (event == json::parse_event_t::key && !keys_.back().insert(value.get<std::string>()).second)
      refuse(path_, "the header names {} twice", quoted(value.get<std::string>()));
    return true;
  }

 private:
  const std::string& path_;
  std::vector<std::set<std::string>> keys_;
};

json parse_header(std::span<const std::byte> bytes, const std::string& path) {
  const char* text = reinterpret_cast<const char*>(bytes.data());
  json header;
  try {
    key_guard guard(path);
    header = json::parse(text, text + bytes.size(), [&](int depth, json::parse_event_t event, json& value) {
      return guard(depth, event, value);
    });
  } catch (const json::exception& error) {
    refuse(path, "the header is not JSON: {}", quoted(error.what()));
  }
  if (!header.is_object()) refuse(path, "the header is a JSON {}; an object is wanted", header.type_name());
  return header;
}

// Non-negative integers that fit in int64_t.
std::vector<int64_t> integers(const json& list, const std::string& what) {
  constexpr uint64_t most = std::numeric_limits<int64_t>::max();
  if (!list.is_array()) throw std::runtime_error(what + " is not a list of integers");
  std::vector<int64_t> out;
  for (const json& item : list) {
    if (!item.is_number_unsigned() || item.get<uint64_t>() > most)
      throw std::runtime_error(what + " holds something other than integers from 0 to 2^63-1");
    out.push_back(static_cast<int64_t>(item.get<uint64_t>()));
  }
  return out;
}

const json& member(const json& entry, const char* key, const std::string& what) {
  const auto found = entry.find(key);
  if (found == entry.end()) throw std::runtime_error(fmt::format("{} has no \"{}\"", what, key));
  return *found;
}

struct entry {
  file_array array;
  int64_t begin, end;
};

entry read_entry(const std::string& name, const json& value, std::span<const std::byte> data, const std::string& path) {
  const std::string what = fmt::format("{}: tensor {}", path, quoted(name));
  if (!value.is_object()) throw std::runtime_error(what + " is not described by an object");
  const json& dtype = member(value, "dtype", what);
  const element_type* type = dtype.is_string() ? type_by_safetensors(dtype.get<std::string>()) : nullptr;
  if (!type) throw std::runtime_error(fmt::format("{} has the unknown dtype {}", what, quoted(dtype.dump())));

  entry out{{name, type, integers(member(value, "shape", what), what + ": \"shape\""), nullptr}, 0, 0};
  const std::vector<int64_t> offsets = integers(member(value, "data_offsets", what), what + ": \"data_offsets\"");
  if (offsets.size() != 2) throw std::runtime_error(fmt::format("{} has {} data_offsets; 2 are wanted", what, offsets.size()));
  out.begin = offsets[0];
  out.end = offsets[1];
  if (out.begin > out.end || static_cast<uint64_t>(out.end) > data.size())
    throw std::runtime_error(fmt::format("{} lies at bytes {} to {} of a data part of {} bytes", what, out.begin, out.end,
                                         data.size()));
  const int64_t wanted = byte_count(out.array.shape, type->bytes, what);
  if (out.end - out.begin != wanted)
    throw std::runtime_error(fmt::format("{} has {} bytes; {} of shape {} has {}", what, out.end - out.begin,
                                         type->safetensors, shape_text(out.array.shape), wanted));
  out.array.data = data.data() + out.begin;
  return out;
}

// The format wants the data part covered exactly: no overlap, no hole, nothing after the last tensor.
void check_coverage(std::vector<entry>& entries, std::size_t data_bytes, const std::string& path) {
  std::sort(entries.begin(), entries.end(),
            [](const entry& a, const entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  int64_t covered = 0;
  for (const entry& item : entries) {
    if (item.begin < covered)
      refuse(path, "tensor {} begins at byte {}, inside another one that ends at {}", quoted(item.array.name), item.begin,
             covered);
    if (item.begin > covered) refuse(path, "bytes {} to {} of the data belong to no tensor", covered, item.begin);
    covered = item.end;
  }
  if (static_cast<std::size_t>(covered) != data_bytes)
    refuse(path, "the data part has {} bytes, but the tensors end at {}", data_bytes, covered);
}

}  // namespace

std::vector<file_array> read_safetensors(std::span<const std::byte> file, const std::string& path) {
  const std::span<const std::byte> head = header_bytes(file, path);
  const std::span<const std::byte> data = file.subspan(kLengthBytes + head.size());
  const json header = parse_header(head, path);

  std::vector<entry> entries;
  for (const auto& [name, value] : header.items())
    if (name != "__metadata__") entries.push_back(read_entry(name, value, data, path));
  check_coverage(entries, data.size(), path);

  std::vector<file_array> arrays;
  for (entry& item : entries) arrays.push_back(std::move(item.array));
  return arrays;
}

std::map<std::string, std::string> safetensors_metadata(std::span<const std::byte> file, const std::string& path) {
  std::map<std::string, std::string> out;
  const json header = parse_header(header_bytes(file, path), path);
  const auto found = header.find("__metadata__");
  if (found == header.end() || !found->is_object()) return out;
  for (const auto& [key, value] : found->items())
    if (value.is_string()) out[key] = value.get<std::string>();
  return out;
}

std::string safetensors_header(const std::vector<output_array>& arrays, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header;
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  header["__metadata__"]["made_by"] = fmt::format("cqsa {}", cqsa_version_string());
  int64_t offset = 0;
  for (const output_array& array : arrays) {
    const element_type& type = array.type ? *array.type : type_of(array.dtype);
    const int64_t end = offset + byte_count(array.shape, type.bytes, array.name);
    if (header.contains(array.name)) throw std::runtime_error(fmt::format("there would be two tensors named {} in one file", array.name));
    header[array.name] = {{"dtype", type.safetensors}, {"shape", array.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((kLengthBytes + text.size() + 63) / 64 * 64 - kLengthBytes, ' ');
  std::string out;
  for (unsigned i = 0; i < kLengthBytes; ++i) out.push_back(static_cast<char>(text.size() >> 8 * i & 0xFF));
  return out + text;
}

}  // namespace tool
