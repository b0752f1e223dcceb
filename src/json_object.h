// SPDX-License-Identifier: Apache-2.0
// Writes a flat JSON object. By hand, because nlohmann's values allocate in their destructors, and a failing allocation there
// ends the process; this way it is an exception that the guard turns into a status.
#pragma once
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <string>

namespace cqsa {

class json_object {
 public:
  json_object& add(const char* key, const char* text) { return raw(key, quoted(text)); }
  json_object& add(const char* key, bool value) { return raw(key, value ? "true" : "false"); }
  json_object& add(const char* key, int32_t value) { return raw(key, std::to_string(value)); }
  json_object& add(const char* key, int64_t value) { return raw(key, std::to_string(value)); }
  json_object& add(const char* key, uint64_t value) { return raw(key, std::to_string(value)); }
  json_object& add(const char* key, double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.17g", value);
    return raw(key, std::isfinite(value) ? digits : "null");  // JSON has no infinity
  }

  std::string text() const { return "{" + members_ + "}"; }

 private:
  json_object& raw(const char* key, const std::string& value) {
    if (!members_.empty()) members_ += ", ";
    members_ += quoted(key) + ": " + value;
    return *this;
  }

  // Text is UTF-8 already; only what JSON forbids is escaped.
  static std::string quoted(const char* text) {
    std::string out = "\"";
    for (; *text; ++text) {
      char escaped[8];
      const unsigned char c = static_cast<unsigned char>(*text);
      if (c == '"' || c == '\\') out += '\\';
      if (c >= 0x20) {
        out += *text;
      } else {
        std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
        out += escaped;
      }
    }
    return out + "\"";
  }

  std::string members_;
};

}  // namespace cqsa
