// SPDX-License-Identifier: Apache-2.0
// What the property tests stand on: seeds, a counting allocator, contexts and plans that clean up, canaries, and the fp64 truth.
#pragma once
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_test_macros.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "problem.h"

namespace property {

constexpr uint64_t alignment = CQSA_WORKSPACE_ALIGNMENT;
constexpr double inf = std::numeric_limits<double>::infinity();

// ------------------------------------------------------------------------------------------------------------- seeds

inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// body(random) for `count` seeds, which follow one another. `most`: no more than that, whatever the environment says.
inline void for_seeds(uint64_t count, const std::function<void(generator&)>& body, uint64_t most = UINT64_MAX) {
  const uint64_t first = from_environment("CQSA_SEED", 1);
  const uint64_t wanted = std::min(most, from_environment("CQSA_PROPERTY_COUNT", count));
  for (uint64_t seed = first; seed < first + wanted; ++seed) {
    INFO("CQSA_SEED=" << seed << " CQSA_PROPERTY_COUNT=1");
    generator random(seed * 0x9E3779B97F4A7C15u);
    body(random);
  }
}

// ------------------------------------------------------------------------------------------- contexts and their memory

// Counts what the library has of it, and can refuse.
struct counting_memory {
  std::mutex lock;
  int64_t bytes = 0, highest = 0, blocks = 0, allocations = 0, wrong_sizes = 0;
  bool refuse = false;
  cqsa_allocator callbacks = CQSA_ALLOCATOR_INIT;

  counting_memory() {
    callbacks.user = this;
    callbacks.allocate = [](void* user, uint64_t bytes, uint64_t align) { return static_cast<counting_memory*>(user)->take(bytes, align); };
    callbacks.release = [](void* user, void* memory, uint64_t bytes) { static_cast<counting_memory*>(user)->give(memory, bytes); };
  }
  void* take(uint64_t size, uint64_t align) {
    const std::lock_guard<std::mutex> hold(lock);
    ++allocations;
    if (refuse) return nullptr;
    // The size is noted in front, to compare with what release() says.
    const uint64_t room = std::max<uint64_t>(align, 64);
    void* memory = std::aligned_alloc(room, room + (size + room - 1) / room * room);
    std::memset(memory, 0xFF, room + size);
    std::memcpy(memory, &size, sizeof size);
    bytes += static_cast<int64_t>(size);
    highest = std::max(highest, bytes);
    ++blocks;
    rooms_.push_back({static_cast<char*>(memory) + room, memory});
    return rooms_.back().first;
  }
  void give(void* memory, uint64_t size) {
    const std::lock_guard<std::mutex> hold(lock);
    for (auto& room : rooms_)
      if (room.first == memory) {
        uint64_t noted;
        std::memcpy(&noted, room.second, sizeof noted);
        wrong_sizes += noted != size;
        std::free(room.second);
        room = rooms_.back();
        rooms_.pop_back();
        bytes -= static_cast<int64_t>(size);
        --blocks;
        return;
      }
    ++wrong_sizes;
  }
  void restart() { highest = bytes; }

 private:
  std::vector<std::pair<void*, void*>> rooms_;
};

class library {
 public:
  explicit library(int32_t threads = 2, cqsa_parallel_for_fn parallel_for = nullptr, void* user = nullptr) {
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "cpu";
    params.num_threads = threads;
    params.allocator = &memory.callbacks;
    params.parallel_for = parallel_for;
    params.parallel_for_user = user;
    if (cqsa_context_create(&params, &context_) != CQSA_OK) FAIL("no context: " << cqsa_last_error());
  }
  ~library() {
    cqsa_context_destroy(context_);
    CHECK(memory.blocks == 0);
    CHECK(memory.wrong_sizes == 0);
  }
  library(const library&) = delete;
  operator cqsa_context*() const { return context_; }

  counting_memory memory;

 private:
  cqsa_context* context_ = nullptr;
};

struct plan {
  cqsa_plan* handle = nullptr;
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;

  plan(cqsa_context* context, const cqsa_attention_params& params) {
    if (cqsa_attention_plan_create(context, &params, &handle) != CQSA_OK) FAIL("no plan: " << cqsa_last_error());
    REQUIRE(cqsa_plan_describe(handle, &info) == CQSA_OK);
  }
  ~plan() { cqsa_plan_destroy(handle); }
  plan(const plan&) = delete;
};

// Memory between canaries that a write past either end would change.
struct canaries {
  static constexpr size_t zone = 256;
  std::vector<unsigned char> room;
  unsigned char* data;
  size_t size;

  explicit canaries(uint64_t bytes) : room(bytes + 2 * zone + alignment, 0xCB), size(bytes) {
    const auto address = reinterpret_cast<uintptr_t>(room.data()) + zone;
    data = room.data() + zone + (alignment - address % alignment) % alignment;
    std::memset(data, 0xFF, bytes);
  }
  bool intact() const {
    for (const unsigned char& c : room)
      if ((&c < data || &c >= data + size) && c != 0xCB) return false;
    return true;
  }
};

// ------------------------------------------------------------------------------------------------------------ running

inline std::string describe(const problem& p) {
  const auto& a = p.params;
  char text[400];
  std::snprintf(text, sizeof text,
                "flags 0x%x batch %lld heads %lld/%lld head_dim %lld/%lld seqlen %lld x %lld dtypes %x %x %x scales %d %d causal %d window %lld %lld "
                "page %lld schedule %d cqs %d^%d budget %llu",
                a.flags, static_cast<long long>(a.batch), static_cast<long long>(a.num_heads), static_cast<long long>(a.num_kv_heads),
                static_cast<long long>(a.head_dim), static_cast<long long>(a.head_dim_v), static_cast<long long>(a.seqlen_q),
                static_cast<long long>(a.seqlen_k), a.dtype_q, a.dtype_kv, a.dtype_out, a.scale_k, a.scale_v, a.causal,
                static_cast<long long>(a.window_left), static_cast<long long>(a.window_right), static_cast<long long>(a.page_size), a.schedule,
                a.cqs_c, a.cqs_itr, static_cast<unsigned long long>(a.max_host_bytes));
  return text;
}

inline result run(cqsa_context* context, const problem& p) {
  INFO(describe(p));
  result r = p.empty_result();
  const cqsa_attention_args args = p.args(r);
  const cqsa_status status = cqsa_attention(context, &p.params, &args, nullptr);
  INFO(cqsa_last_error());
  REQUIRE(status == CQSA_OK);
  return r;
}

// The answer of the f64 reference.
struct truth {
  result exact;
  double largest_value = 0, largest_logit = 0;  // bounds for the tolerance

  truth(cqsa_context* context, const problem& p) {
    const problem wide = in_f64(p);
    exact = run(context, wide);
    double q = 0, k = 0, bias = 0;
    const auto largest = [](const array& a, double& into) {
      for (int64_t n = 0; n < a.count(); ++n)
        if (std::isfinite(a.get(n))) into = std::max(into, std::fabs(a.get(n)));
    };
    largest(wide.operands[Q], q);
    largest(wide.operands[K], k);
    largest(wide.operands[V], largest_value);
    if (p.operands[BIAS].present()) largest(wide.operands[BIAS], bias);
    if (p.operands[SLOPES].present()) bias += 0.5 * static_cast<double>(p.params.seqlen_k + p.params.seqlen_q);
    const double dim = static_cast<double>(p.params.head_dim);
    largest_logit = (p.params.softmax_scale != 0 ? std::fabs(p.params.softmax_scale) : 1 / std::sqrt(dim)) * dim * q * k + bias;
  }
};

inline double ulp_of(cqsa_dtype dtype) { return dtype == CQSA_DTYPE_F16 ? 0x1p-10 : dtype == CQSA_DTYPE_BF16 ? 0x1p-7 : 0x1p-23; }

// Logits carry an error of some ulp of the largest one, and exp() makes it a relative error of p. Rounding to 16 bits on top.
inline void check_close(const problem& p, const result& got, const truth& t) {
  INFO(describe(p));
  const double logit_error = 0x1p-23 * (8 + 2 * t.largest_logit);
  const double out_error = t.largest_value * (2 * logit_error + (p.params.dtype_q == CQSA_DTYPE_F32 ? 0x1p-22 : ulp_of(p.params.dtype_q)) +
                                              ulp_of(p.params.dtype_out));
  for (int64_t n = 0; n < got.out.count(); ++n)
    if (!(std::fabs(got.out.get(n) - t.exact.out.get(n)) <= out_error)) {
      INFO("out[" << n << "] is " << got.out.get(n) << ", exact " << t.exact.out.get(n) << ", allowed error " << out_error);
      FAIL();
    }
  for (int64_t n = 0; n < got.lse.count(); ++n) {
    const double a = got.lse.get(n), b = t.exact.lse.get(n);
    if (!(a == b || std::fabs(a - b) <= 2 * logit_error + 0x1p-22 * std::fabs(b))) {
      INFO("lse[" << n << "] is " << a << ", exact " << b);
      FAIL();
    }
  }
}

inline bool same_bits(const result& a, const result& b) { return a == b; }

// What the refusal of one byte states.
inline uint64_t least_budget(cqsa_context* context, cqsa_attention_params params) {
  params.max_host_bytes = 1;
  REQUIRE(cqsa_attention_query(context, &params) == CQSA_ERROR_BUDGET_TOO_SMALL);
  const std::string message = cqsa_last_error();
  const size_t end = message.find_last_of("0123456789");
  const size_t begin = message.find_last_not_of("0123456789", end) + 1;
  const uint64_t least = std::stoull(message.substr(begin, end - begin + 1));
  params.max_host_bytes = least - 1;
  REQUIRE(cqsa_attention_query(context, &params) == CQSA_ERROR_BUDGET_TOO_SMALL);
  params.max_host_bytes = least;
  REQUIRE(cqsa_attention_query(context, &params) == CQSA_OK);
  return least;
}

inline void choose_schedule(problem& p, generator& random) {
  auto& a = p.params;
  a.schedule = static_cast<int32_t>(random.integer(CQSA_SCHEDULE_AUTO, p.takes_cqs() ? CQSA_SCHEDULE_CQS : CQSA_SCHEDULE_STREAM));
  a.cqs_c = a.cqs_itr = 0;
  a.tile_q = random.chance(0.2) ? random.integer(1, 200) : 0;
  a.tile_k = random.chance(0.2) ? random.integer(1, 200) : 0;
  if (a.schedule != CQSA_SCHEDULE_CQS || random.chance(0.2)) return;
  a.cqs_c = random.one_of({3, 7, 13, 21, 31, 57, 73, 91, 133});
  a.cqs_itr = a.cqs_c == 3 ? static_cast<int32_t>(random.integer(1, 3)) : a.cqs_c < 14 ? static_cast<int32_t>(random.integer(1, 2)) : 1;
}

// Some budget that works, the least one often.
inline void choose_budget(cqsa_context* context, problem& p, generator& random) {
  p.params.max_host_bytes = 0;
  if (random.chance(0.15)) return;
  const uint64_t least = least_budget(context, p.params);
  const uint64_t most = plan(context, p.params).info.peak_host_bytes;
  const double share = random.chance(0.3) ? 0 : random.real(0, 1.1);
  p.params.max_host_bytes = least + static_cast<uint64_t>(share * static_cast<double>(most - std::min(most, least)));
}

}  // namespace property

using namespace property;
