// SPDX-License-Identifier: Apache-2.0
#include "problem.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <span>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "elements.h"
#include "options.h"
#include "problem_sets.h"
#include "sizes.h"

namespace tool {
namespace {

// Larger problems are surely a slip; it also keeps products of sizes within 64 bits.
constexpr int64_t kMostTokens = int64_t{1} << 24, kMostHeads = 4096;

[[noreturn]] void refuse(std::string_view key, std::string_view value, std::string_view wanted) {
  throw std::runtime_error(fmt::format("{}={}: {} is wanted", key, value, wanted));
}

int64_t integer(const std::string& key, const std::string& value, int64_t low, int64_t high) {
  int64_t number = 0;
  try {
    number = parse_count(value);
  } catch (const std::exception&) {
    refuse(key, value, fmt::format("a number from {} to {}", low, high));
  }
  if (number < low || number > high) refuse(key, value, fmt::format("a number from {} to {}", low, high));
  return number;
}

uint64_t whole_number(const std::string& key, const std::string& value) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) refuse(key, value, "a whole number below 2^64");
  return number;
}

double real(const std::string& key, const std::string& value) {
  std::size_t used = 0;
  double number = 0;
  try {
    number = std::stod(value, &used);
  } catch (const std::exception&) {
    used = std::string::npos;
  }
  if (used != value.size() || !std::isfinite(number)) refuse(key, value, "a finite number");
  return number;
}

bool truth(const std::string& key, const std::string& value) {
  if (value != "0" && value != "1") refuse(key, value, "0 or 1");
  return value == "1";
}

template <class T>
T one_of(const std::string& key, const std::string& value, std::initializer_list<std::pair<const char*, T>> list) {
  std::string names;
  for (const auto& [name, meaning] : list) {
    if (value == name) return meaning;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  refuse(key, value, "one of " + names);
}

// The axes along which a mask or a bias differs, as letters of "bhqk"; "1": along none.
uint32_t broadcast_of(const std::string& key, const std::string& value) {
  constexpr std::string_view axes = "bhqk";
  uint32_t bits = 0;
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (value.find(axes[i]) == std::string::npos) bits |= 1u << i;
  if (value.empty() || (value != "1" && value.find_first_not_of(axes) != std::string::npos))
    refuse(key, value, "letters of \"bhqk\", the axes along which it differs, or 1");
  return bits;
}

schedule_choice schedule_of(const std::string& value) {
  const std::vector<std::string> parts = split(value, ':');
  schedule_choice choice{value,
                         one_of<int32_t>("schedule", parts[0],
                                         {{"auto", CQSA_SCHEDULE_AUTO}, {"direct", CQSA_SCHEDULE_DIRECT},
                                          {"stream", CQSA_SCHEDULE_STREAM}, {"cqs", CQSA_SCHEDULE_CQS}}),
                         0, 0, false};
  if (parts.size() == 1) return choice;
  if (choice.schedule != CQSA_SCHEDULE_CQS || parts.size() != 3)
    refuse("schedule", value, "cqs:C:ITR, for example cqs:7:1,");
  choice.cqs_c = static_cast<int32_t>(integer("schedule", parts[1], 0, 1000));
  choice.cqs_itr = static_cast<int32_t>(integer("schedule", parts[2], 0, 3));
  return choice;
}

std::vector<memory_choice> memories_of(const std::string& key, const std::string& value) {
  std::vector<memory_choice> choices;
  const memory_choice device{"device", memory_place::device, true}, pinned{"pinned", memory_place::pinned, true}, pageable;
  const memory_choice kv_pinned{"kv_pinned", memory_place::kv_pinned, true}, kv_pageable{"kv_pageable", memory_place::kv_pageable, true};
  for (const std::string& name : split(value, ',')) {
    if (name == "all") choices.insert(choices.end(), {device, pinned, pageable});
    if (name == "all_kv") choices.insert(choices.end(), {kv_pinned, kv_pageable, pageable});
    if (name == "all" || name == "all_kv") continue;
    choices.push_back({name, one_of<memory_place>(key, name, {{"pageable", memory_place::pageable}, {"pinned", memory_place::pinned},
                                                              {"device", memory_place::device}, {"kv_pageable", memory_place::kv_pageable},
                                                              {"kv_pinned", memory_place::kv_pinned}}),
                       false});
  }
  return choices;
}

void set_window(const std::string&, const std::string& value, problem_spec& spec) {
  const auto [left, right] = parse_pair(value);
  spec.params.flags |= CQSA_ATTENTION_WINDOW;
  spec.params.window_left = left;
  spec.params.window_right = right;
}

int32_t scale_of(const std::string& key, const std::string& value) {
  return one_of<int32_t>(key, value, {{"none", CQSA_SCALE_NONE}, {"tensor", CQSA_SCALE_TENSOR}, {"head", CQSA_SCALE_HEAD},
                                      {"token", CQSA_SCALE_TOKEN}, {"group", CQSA_SCALE_GROUP}});
}

cqsa_dtype dtype_of(const std::string& key, const std::string& value) {
  return one_of<cqsa_dtype>(key, value, {{"f32", CQSA_DTYPE_F32}, {"f16", CQSA_DTYPE_F16}, {"bf16", CQSA_DTYPE_BF16},
                                         {"f64", CQSA_DTYPE_F64}, {"i8", CQSA_DTYPE_I8}, {"e4m3fn", CQSA_DTYPE_E4M3FN},
                                         {"e5m2", CQSA_DTYPE_E5M2}});
}

using text = const std::string&;
struct key_meaning {
  const char* name;
  void (*apply)(text key, text value, problem_spec& spec);
};

constexpr key_meaning kKeys[] = {
    {"batch", [](text k, text v, problem_spec& s) { s.params.batch = integer(k, v, 0, kMostHeads); }},
    {"heads", [](text k, text v, problem_spec& s) { s.params.num_heads = integer(k, v, 1, kMostHeads); }},
    {"kv_heads", [](text k, text v, problem_spec& s) { s.params.num_kv_heads = integer(k, v, 1, kMostHeads); }},
    {"seqlen", [](text k, text v, problem_spec& s) { s.params.seqlen_q = s.params.seqlen_k = integer(k, v, 0, kMostTokens); }},
    {"seqlen_q", [](text k, text v, problem_spec& s) { s.params.seqlen_q = integer(k, v, 0, kMostTokens); }},
    {"seqlen_k", [](text k, text v, problem_spec& s) { s.params.seqlen_k = integer(k, v, 0, kMostTokens); }},
    {"head_dim", [](text k, text v, problem_spec& s) { s.params.head_dim = integer(k, v, 1, 576); }},
    {"head_dim_v", [](text k, text v, problem_spec& s) { s.params.head_dim_v = integer(k, v, 1, 512); }},
    {"dtype", [](text k, text v, problem_spec& s) { s.params.dtype_q = dtype_of(k, v); }},
    {"dtype_kv", [](text k, text v, problem_spec& s) { s.params.dtype_kv = dtype_of(k, v); }},
    {"dtype_out", [](text k, text v, problem_spec& s) { s.params.dtype_out = dtype_of(k, v); }},
    {"dtype_bias", [](text k, text v, problem_spec& s) { s.params.dtype_bias = dtype_of(k, v); }},
    {"scale", [](text k, text v, problem_spec& s) { s.params.scale_k = s.params.scale_v = scale_of(k, v); }},
    {"scale_k", [](text k, text v, problem_spec& s) { s.params.scale_k = scale_of(k, v); }},
    {"scale_v", [](text k, text v, problem_spec& s) { s.params.scale_v = scale_of(k, v); }},
    {"kv_group", [](text k, text v, problem_spec& s) { s.params.kv_group = integer(k, v, 1, 1024); }},
    {"causal",
     [](text k, text v, problem_spec& s) {
       s.params.causal = one_of<int32_t>(k, v, {{"none", CQSA_CAUSAL_NONE}, {"top_left", CQSA_CAUSAL_TOP_LEFT},
                                                {"bottom_right", CQSA_CAUSAL_BOTTOM_RIGHT}});
     }},
    {"window", set_window},
    {"softmax_scale", [](text k, text v, problem_spec& s) { s.params.softmax_scale = real(k, v); }},
    {"precision",
     [](text k, text v, problem_spec& s) {
       s.params.precision = one_of<int32_t>(k, v, {{"default", CQSA_PRECISION_DEFAULT}, {"fast", CQSA_PRECISION_FAST},
                                                   {"split", CQSA_PRECISION_SPLIT}, {"f32", CQSA_PRECISION_F32}});
     }},
    {"softcap", [](text k, text v, problem_spec& s) { s.params.softcap = real(k, v); }},
    {"mask", [](text k, text v, problem_spec& s) { s.mask = true, s.mask_broadcast = broadcast_of(k, v); }},
    {"bias", [](text k, text v, problem_spec& s) { s.bias = true, s.bias_broadcast = broadcast_of(k, v); }},
    {"alibi",
     [](text k, text v, problem_spec& s) {
       s.alibi = true;
       s.alibi_per_sequence = one_of<bool>(k, v, {{"head", false}, {"batch", true}});
     }},
    {"sinks", [](text k, text v, problem_spec& s) { s.sinks = truth(k, v); }},
    {"lse", [](text k, text v, problem_spec& s) { s.lse = truth(k, v); }},
    {"varlen", [](text k, text v, problem_spec& s) { s.varlen = truth(k, v); }},
    {"page", [](text k, text v, problem_spec& s) { s.params.page_size = integer(k, v, 1, kMostTokens); }},
    {"seqused", [](text k, text v, problem_spec& s) { s.seqused = truth(k, v); }},
    {"index",
     [](text k, text v, problem_spec& s) {
       s.index = one_of<cqsa_dtype>(k, v, {{"i32", CQSA_DTYPE_I32}, {"i64", CQSA_DTYPE_I64}});
     }},
    {"layout",
     [](text k, text v, problem_spec& s) {
       s.layout = one_of<memory_layout>(k, v, {{"packed", memory_layout::packed}, {"bshd", memory_layout::bshd},
                                               {"gapped", memory_layout::gapped}, {"reversed", memory_layout::reversed},
                                               {"transposed", memory_layout::transposed}});
     }},
    {"range", [](text k, text v, problem_spec& s) { s.range = real(k, v); }},
    {"batch_invariant",
     [](text k, text v, problem_spec& s) {
       if (truth(k, v)) s.params.flags |= CQSA_ATTENTION_BATCH_INVARIANT;
     }},
    {"tile_q", [](text k, text v, problem_spec& s) { s.params.tile_q = integer(k, v, 0, kMostTokens); }},
    {"tile_k", [](text k, text v, problem_spec& s) { s.params.tile_k = integer(k, v, 0, kMostTokens); }},
    {"schedule",
     [](text, text v, problem_spec& s) {
       for (const std::string& name : split(v, ','))
         if (name != "all") s.schedules.push_back(schedule_of(name));
     }},
    {"budget",
     [](text k, text v, problem_spec& s) {
       s.budgets = split(v, ',');
       for (const std::string& budget : s.budgets)
         if (budget != "none" && budget != "least" && budget != "half" && parse_bytes(budget) == 0)
           refuse(k, v, "none, least, half or a size");
     }},
    {"memory", [](text k, text v, problem_spec& s) { s.memories = memories_of(k, v); }},
    {"rows", [](text k, text v, problem_spec& s) { s.rows = integer(k, v, 0, kMostTokens); }},
    {"seed", [](text k, text v, problem_spec& s) { s.seed = whole_number(k, v); }},
    {"tolerance", [](text k, text v, problem_spec& s) { s.tolerance = real(k, v); }},
};

const key_meaning* meaning_of(std::string_view key) {
  for (const key_meaning& meaning : kKeys)
    if (key == meaning.name) return &meaning;
  return nullptr;
}

// What cqs can do: self-attention of whole sequences (cqsa.h), and f64 is left to the direct reference.
bool takes_cqs(const problem_spec& s) {
  return s.params.seqlen_q == s.params.seqlen_k && s.params.seqlen_q > 0 && s.params.dtype_q != CQSA_DTYPE_F64 && !s.varlen &&
         !s.seqused && s.params.page_size == 0 && !(s.params.flags & CQSA_ATTENTION_BATCH_INVARIANT);
}

// Everything that a line left out, from what it has.
void complete(problem_spec& s, const problem_line& line) {
  cqsa_attention_params& p = s.params;
  if (p.num_kv_heads == 0) p.num_kv_heads = p.num_heads;
  if (p.head_dim_v == 0) p.head_dim_v = std::min<int64_t>(p.head_dim, 512);
  if (p.dtype_kv == CQSA_DTYPE_NONE) p.dtype_kv = p.dtype_q;
  if (p.dtype_out == CQSA_DTYPE_NONE) p.dtype_out = p.dtype_q;
  if (s.bias && p.dtype_bias == CQSA_DTYPE_NONE) p.dtype_bias = p.dtype_q;
  if (p.dtype_kv == CQSA_DTYPE_I8) {
    p.scale_k = p.scale_v = CQSA_SCALE_GROUP;
    if (p.kv_group == 0) p.kv_group = 64;
  }
  const std::string* schedule = line.find("schedule");
  const std::vector<std::string> names = schedule ? split(*schedule, ',') : std::vector<std::string>();
  if (std::find(names.begin(), names.end(), "all") != names.end()) {
    for (const char* name : {"direct", "stream", "cqs"}) {
      if (name == std::string_view("cqs") && !takes_cqs(s)) continue;
      s.schedules.push_back(schedule_of(name));
      s.schedules.back().optional = true;
    }
  }
  if (s.schedules.empty()) s.schedules.push_back({});
  if (s.budgets.empty()) s.budgets.push_back("none");
  if (s.memories.empty()) s.memories.push_back({});
}

// What would stop the generator; all else the library checks.
void check(const problem_spec& s, const problem_line& line) {
  const cqsa_attention_params& p = s.params;
  if (!line.find("seqlen") && !(line.find("seqlen_q") && line.find("seqlen_k")))
    throw std::runtime_error("seqlen, or seqlen_q and seqlen_k, is wanted");
  if (p.num_heads % p.num_kv_heads != 0)
    throw std::runtime_error(fmt::format("heads={} is no multiple of kv_heads={}", p.num_heads, p.num_kv_heads));
  if ((p.scale_k == CQSA_SCALE_GROUP || p.scale_v == CQSA_SCALE_GROUP) && p.kv_group == 0)
    throw std::runtime_error("scale=group wants kv_group");
  if (!(s.range > 0)) throw std::runtime_error("range: a number above 0 is wanted");
  if (!(s.tolerance >= 0)) throw std::runtime_error("tolerance: a number of at least 0 is wanted");
}

}  // namespace

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

problem_line::problem_line(std::string_view line) {
  constexpr std::string_view space = " \t\r\n";
  for (std::size_t at; (at = line.find_first_not_of(space)) != std::string_view::npos;) {
    line.remove_prefix(at);
    const std::string_view word = line.substr(0, line.find_first_of(space));
    line.remove_prefix(word.size());
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos) throw std::runtime_error(fmt::format("\"{}\": key=value is wanted", word));
    const std::string_view key = word.substr(0, equals);
    if (!meaning_of(key)) {
      std::vector<const char*> names;
      for (const key_meaning& meaning : kKeys) names.push_back(meaning.name);
      throw std::runtime_error(fmt::format("\"{}\" is no key of a problem; they are: {}", key, fmt::join(names, ", ")));
    }
    if (find(key)) throw std::runtime_error(fmt::format("the key {} is there twice", key));
    pairs_.emplace_back(key, word.substr(equals + 1));
  }
}

const std::string* problem_line::find(std::string_view key) const {
  for (const auto& [name, value] : pairs_)
    if (name == key) return &value;
  return nullptr;
}

void problem_line::set(std::string_view key, std::string value) {
  for (auto& [name, old] : pairs_)
    if (name == key) {
      old = std::move(value);
      return;
    }
  pairs_.emplace_back(key, std::move(value));
}

std::string problem_line::text() const {
  std::string out;
  for (const auto& [name, value] : pairs_) out += (out.empty() ? "" : " ") + name + "=" + value;
  return out;
}

problem_spec parse_problem(const problem_line& line) {
  problem_spec spec;
  spec.params.batch = 1;
  spec.params.num_heads = 2;
  spec.params.head_dim = 64;
  spec.params.dtype_q = CQSA_DTYPE_F32;
  // In the order of the table, so that seqlen comes before seqlen_q whatever the line's order is.
  for (const key_meaning& meaning : kKeys)
    if (const std::string* value = line.find(meaning.name)) meaning.apply(meaning.name, *value, spec);
  complete(spec, line);
  check(spec, line);
  return spec;
}

std::vector<problem_line> parse_problem_file(std::string_view text, const std::string& name) {
  std::vector<problem_line> lines;
  int number = 0;
  for (const std::string& raw : split(text, '\n')) {
    ++number;
    try {
      problem_line line(std::string_view(raw).substr(0, raw.find('#')));
      if (line.empty()) continue;
      parse_problem(line);
      lines.push_back(std::move(line));
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("{}:{}: {}", name, number, error.what()));
    }
  }
  if (lines.empty()) throw std::runtime_error(name + ": there is no problem in it");
  return lines;
}

const std::string* problem_set(const std::string& name) {
  static const std::string smoke = kSmokeProblems, ci = kCiProblems, gpu = kGpuProblems, all = smoke + ci + gpu;
  if (name == "smoke") return &smoke;
  if (name == "ci") return &ci;
  if (name == "gpu") return &gpu;
  return name == "all" ? &all : nullptr;
}

}  // namespace tool
