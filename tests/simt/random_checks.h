// SPDX-License-Identifier: Apache-2.0
// The random problems of benchmarks/gpu_leaf_random.h in the harness, for the tests of each tier's attention, and the proof that they
// bite: mutants, and the places where threads meet, left out in turn.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "apart.h"
#include "benchmarks/gpu_leaf_random.h"
#include "simt_port.h"
#include "simt_runtime.h"
#include "tests/random_count.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

using namespace cqsa;

class heap {
 public:
  heap() : memory_{[this](size_t n) { return take(n); }, [this] { clear(); }} {}
  ~heap() { clear(); }
  random_leaf::memory& memory() { return memory_; }

 private:
  void* take(size_t n) {
    all_.push_back(std::aligned_alloc(64, (n + 63) / 64 * 64));
    return all_.back();
  }
  void clear() {
    for (void* p : all_) std::free(p);
    all_.clear();
  }
  std::vector<void*> all_;
  random_leaf::memory memory_;
};

// Checks take it into the seed of the device: other schedules of the same problems.
uint64_t schedule = 0;

// "" where problem `seed` comes out right, "declined" where it is not for the kernels, or what is wrong.
using random_check = std::string (*)(heap&, uint64_t seed);

inline uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// `count` problems from CQSA_SEED on, or `each` for one of CQSA_PROPERTY_COUNT. The kernels must take one of `share` of them.
inline void check_random(random_check check, uint32_t count, uint64_t share, uint32_t each) {
  const uint64_t begin = number_from("CQSA_SEED", 1);
  count = test::random_count(count, each);
  heap h;
  uint64_t taken = 0;
  for (uint64_t seed = begin; seed < begin + count; ++seed) {
    const std::string wrong = check(h, seed);
    if (wrong == "declined") continue;
    ++taken;
    CHECK(wrong == "");
  }
  CHECK((taken * share >= count || count < 100));  // few may be any
}

// -------------------------------------------------------------------------------------------------------- what must be noticed

// A place where threads meet.
using place = simt::call_site;

// Problems that come out right, quickest first, and what each of them comes by in files whose names begin with a prefix.
struct known_problem {
  uint64_t seed;
  double seconds;
  std::vector<place> places;
};
inline std::vector<known_problem> find_problems(random_check check, uint64_t count, const std::string& prefix) {
  heap h;
  std::vector<known_problem> out;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    known_problem x{seed, 0, {}};
    simt::record_sites(true);
    const auto start = std::chrono::steady_clock::now();
    const bool right = check(h, seed) == "";
    x.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (const place& at : simt::recorded_sites())
      if (at.file.compare(0, prefix.size(), prefix) == 0) x.places.push_back(at);
    simt::record_sites(false);
    if (right) out.push_back(x);
  }
  std::sort(out.begin(), out.end(), [](const known_problem& a, const known_problem& b) { return a.seconds < b.seconds; });
  return out;
}

inline bool same(const place& a, const place& b) { return a.what == b.what && a.file == b.file && a.line == b.line; }

// Whether one of the problems fails, of those that come by a place where one is given: only they can, under three schedules.
inline bool any_fails(random_check check, const std::vector<known_problem>& problems, const place* at = nullptr) {
  const auto comes_by = [&](const known_problem& x) {
    return !at || std::any_of(x.places.begin(), x.places.end(), [&](const place& other) { return same(*at, other); });
  };
  return simt::fails_apart([&] {
    heap h;
    for (schedule = 0; schedule < (at ? 3u : 1u); ++schedule)
      for (const known_problem& x : problems)
        if (comes_by(x) && !check(h, x.seed).empty()) return true;
    return false;
  });
}

// The numbers of mutants that no problem notices.
inline std::string unnoticed_mutants(random_check check, const std::vector<known_problem>& problems, int first, int last) {
  std::string missed;
  for (int mutant = first; mutant <= last; ++mutant) {
    cqsa_simt_mutant = mutant;
    if (!any_fails(check, problems)) missed.append(" ").append(std::to_string(mutant));
    cqsa_simt_mutant = 0;
  }
  return missed;
}

// The meeting places that can be left out with no problem failing. excused: "ballot at file.cuh" and the like.
inline std::string needless_places(random_check check, const std::vector<known_problem>& problems, const std::vector<std::string>& excused,
                                   size_t* count) {
  std::map<std::string, place> all;
  for (const known_problem& x : problems)
    for (const place& at : x.places) all.insert({at.what + " at " + at.file + ":" + std::to_string(at.line), at});
  *count = all.size();
  std::string missed;
  for (const auto& [name, at] : all) {
    if (std::find(excused.begin(), excused.end(), at.what + " at " + at.file) != excused.end()) continue;
    simt::leave_out(&at);
    if (!any_fails(check, problems, &at)) missed.append(" ").append(name);
    simt::leave_out(nullptr);
  }
  return missed;
}

}  // namespace
