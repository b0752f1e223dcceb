// SPDX-License-Identifier: Apache-2.0
#include "code_list.h"

#include <cstring>

namespace cqsa::cuda {

namespace {

bool take(const char*& at, const char* word) {
  const size_t length = std::strlen(word);
  if (std::strncmp(at, word, length) != 0) return false;
  at += length;
  return true;
}

int take_number(const char*& at) {
  int number = 0;
  for (; *at >= '0' && *at <= '9'; ++at) number = number < 100000 ? number * 10 + (*at - '0') : number;
  return number;
}

bool entry_has_code(const char* at, int arch) {
  const bool virtual_only = take(at, "compute_");
  if (!virtual_only && !take(at, "sm_")) return false;
  const int number = take_number(at);
  const bool exact = take(at, "a");
  const bool family = !exact && take(at, "f");
  const bool ptx = take(at, "(PTX)") || virtual_only;
  if ((*at != '\0' && *at != ' ') || number < 10) return false;
  if (exact || arch < number) return arch == number;
  return (ptx && !family) || arch / 10 == number / 10;
}

}  // namespace

bool list_has_code(const char* list, int arch) {
  for (const char* at = list; *at != '\0';) {
    at += std::strspn(at, " ");
    if (entry_has_code(at, arch)) return true;
    at += std::strcspn(at, " ");
  }
  return false;
}

}  // namespace cqsa::cuda
