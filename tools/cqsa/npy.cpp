// SPDX-License-Identifier: Apache-2.0
#include "npy.h"

#include <charconv>
#include <stdexcept>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tool {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kLongestHeader = 65536;  // an array of a few axes needs about 100

template <class... Args> [[noreturn]] void refuse(const std::string& path, fmt::format_string<Args...> text, Args&&... args) {
  throw std::runtime_error(path + ": " + fmt::format(text, std::forward<Args>(args)...));
}

// Reads the header, which is a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }.
class header_parser {
 public:
  header_parser(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  void parse() {
    expect('{');
    while (!take('}')) {
      read_member(string());
      if (take(',')) continue;
      expect('}');
      break;
    }
    skip_space();
    if (!rest_.empty()) refuse(path_, "the header goes on after its closing brace");
    if (descr.empty() || !order_seen_ || !shape_seen_)
      refuse(path_, "the header lacks one of 'descr', 'fortran_order' and 'shape'");
  }

  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;

 private:
  void read_member(const std::string& key) {
    expect(':');
    if (key == "descr" && descr.empty()) return void(descr = description());
    if (key == "fortran_order" && !order_seen_) return void(fortran_order = boolean());
    if (key == "shape" && !shape_seen_) return read_shape();
    refuse(path_, "the header has an unknown or repeated key \"{}\"", printable(key));
  }

  std::string description() {
    skip_space();
    if (!rest_.empty() && rest_.front() != '\'' && rest_.front() != '"')
      refuse(path_, "the elements are records; plain numbers are wanted");
    std::string text = string();
    if (text.empty()) refuse(path_, "the header's 'descr' is empty");
    return text;
  }

  bool boolean() {
    order_seen_ = true;
    skip_space();
    for (const std::string_view word : {"True", "False"})
      if (rest_.starts_with(word)) {
        rest_.remove_prefix(word.size());
        return word == "True";
      }
    refuse(path_, "the header's 'fortran_order' is neither True nor False");
  }

  void read_shape() {
    shape_seen_ = true;
    expect('(');
    while (!take(')')) {
      shape.push_back(integer());
      if (shape.size() > 32) refuse(path_, "the array has more than 32 axes");
      if (take(',')) continue;
      expect(')');
      break;
    }
  }

  int64_t integer() {
    skip_space();
    int64_t value = -1;
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc() || value < 0) refuse(path_, "the header's 'shape' holds something other than sizes");
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    take('L');  // written by Python 2
    return value;
  }

  std::string string() {
    skip_space();
    const char quote = rest_.empty() ? 0 : rest_.front();
    const std::size_t end = quote == '\'' || quote == '"' ? rest_.find(quote, 1) : std::string_view::npos;
    if (end == std::string_view::npos) refuse(path_, "the header is not a dictionary of numpy: a quoted text is missing");
    std::string text(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    return text;
  }

  bool take(char wanted) {
    skip_space();
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) refuse(path_, "the header is not a dictionary of numpy: '{}' is missing", wanted);
  }

  void skip_space() {
    while (!rest_.empty() && (rest_.front() == ' ' || rest_.front() == '\n' || rest_.front() == '\t')) rest_.remove_prefix(1);
  }

 public:
  static std::string printable(std::string_view text) {
    std::string out(text.substr(0, 40));
    for (char& c : out)
      if (c < ' ' || c > '~') c = '?';
    return out;
  }

 private:
  std::string_view rest_;
  const std::string& path_;
  bool order_seen_ = false, shape_seen_ = false;
};

// The header's text; the data begins where it ends.
std::string_view header_text(std::string_view file, const std::string& path) {
  if (!file.starts_with(kMagic)) refuse(path, "not an .npy file: it does not begin with \\x93NUMPY");
  if (file.size() < 12) refuse(path, "truncated: {} bytes are not even a header", file.size());
  const auto byte = [&](std::size_t at) { return static_cast<std::size_t>(static_cast<unsigned char>(file[at])); };
  const std::size_t major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0) refuse(path, "has .npy version {}.{}; 1.0, 2.0 or 3.0 is wanted", major, minor);
  const std::size_t begin = major == 1 ? 10 : 12;
  const std::size_t length = byte(8) | byte(9) << 8 | (major == 1 ? 0 : byte(10) << 16 | byte(11) << 24);
  if (length > file.size() - begin)
    refuse(path, "truncated: the header should have {} bytes, but only {} follow", length, file.size() - begin);
  if (length > kLongestHeader) refuse(path, "the header has {} bytes; at most {} are read", length, kLongestHeader);
  return file.substr(begin, length);
}

const element_type& element_of(const std::string& descr, const std::string& path) {
  // numpy writes one-byte types with '|', some writers with '<' or '='.
  std::string wanted = descr;
  if (wanted.size() == 3 && wanted[2] == '1' && (wanted[0] == '<' || wanted[0] == '=')) wanted[0] = '|';
  if (const element_type* type = type_by_npy(wanted)) return *type;
  const std::string shown = header_parser::printable(descr);
  if (descr.starts_with('>')) refuse(path, "is big-endian ('{}'); little-endian is wanted", shown);
  refuse(path, "has elements '{}'; one of <f2 <f4 <f8 <i4 <i8 |i1 |u1 |b1 is wanted (bfloat16, fp8: use .safetensors)",
         shown);
}

}  // namespace

file_array read_npy(std::span<const std::byte> file, const std::string& path) {
  const std::string_view all(reinterpret_cast<const char*>(file.data()), file.size());
  const std::string_view text = header_text(all, path);
  header_parser header(text, path);
  header.parse();
  if (header.fortran_order) refuse(path, "is in Fortran order; C order is wanted");

  const element_type& type = element_of(header.descr, path);
  const std::span<const std::byte> data = file.subspan(static_cast<std::size_t>(text.data() - all.data()) + text.size());
  const int64_t wanted = byte_count(header.shape, type.bytes, path);
  if (static_cast<uint64_t>(wanted) != data.size())
    refuse(path, "has {} bytes of data; {} of shape {} has {}", data.size(), header_parser::printable(header.descr),
           shape_text(header.shape), wanted);
  return {path, &type, header.shape, data.data()};
}

std::string npy_header(const output_array& array) {
  const element_type& type = type_of(array.dtype);
  if (!type.npy)
    throw std::runtime_error(
        fmt::format(".npy has no {}: write a .safetensors file, or choose another --out-dtype", type.name));
  const char* comma = array.shape.size() == 1 ? "," : "";
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", type.npy,
                                 fmt::join(array.shape, ", "), comma);
  text.resize((10 + text.size() + 1 + 63) / 64 * 64 - 10, ' ');
  text.back() = '\n';
  std::string out(kMagic);
  out.append({1, 0, static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)});
  return out + text;
}

}  // namespace tool
