// SPDX-License-Identifier: Apache-2.0
// Operands in mapped files and checkpoints, through the API: the same bits as in memory, the budget, and every refusal.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cqsa.h"

namespace {

// A shared mapping of a file without a name.
struct mapping {
  void* data;
  size_t bytes;
  explicit mapping(size_t size) : bytes(size) {
    const int file = memfd_create("cqsa", MFD_CLOEXEC);
    REQUIRE(ftruncate(file, static_cast<off_t>(size)) == 0);
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    REQUIRE(data != MAP_FAILED);
  }
  ~mapping() { munmap(data, bytes); }
  mapping(const mapping&) = delete;
};

struct tensor {
  std::vector<int64_t> shape;
  mapping memory;
  cqsa_tensor view{};
  tensor(std::vector<int64_t> sizes, cqsa_dtype dtype = CQSA_DTYPE_F32) : shape(std::move(sizes)), memory(bytes_of(shape)) {
    view = {memory.data, CQSA_DEVICE_CPU, 0, static_cast<int32_t>(shape.size()), dtype, shape.data(), nullptr, 0};
  }
  static size_t bytes_of(const std::vector<int64_t>& sizes) {
    size_t bytes = 4;
    for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
    return bytes;
  }
  float* begin() { return static_cast<float*>(memory.data); }
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < memory.bytes / 4; ++i) begin()[i] = normal(random);
  }
  void set(std::vector<int32_t> values) { std::memcpy(memory.data, values.data(), values.size() * 4); }
  bool equals(const tensor& other) const { return std::memcmp(memory.data, other.memory.data, memory.bytes) == 0; }
};

struct owned_context {
  cqsa_context* context = nullptr;
  owned_context() {
    cqsa_context_params p = CQSA_CONTEXT_PARAMS_INIT;
    p.backend = "cpu";
    p.num_threads = 2;
    REQUIRE(cqsa_context_create(&p, &context) == CQSA_OK);
  }
  ~owned_context() { cqsa_context_destroy(context); }
};

struct stop_at {
  int64_t tile = -1, first = -1, last = -1, total = 0;
  static int32_t step(void* user, int64_t done, int64_t total) {
    auto& self = *static_cast<stop_at*>(user);
    if (self.first < 0) self.first = done;
    if (done < self.last) return 1;  // it never falls
    self.last = done;
    self.total = total;
    return self.tile >= 0 && done >= self.tile;
  }
};

// A private mapping of a file with these bytes, read-only in the end, of which page `written` was written again before (-1: none).
struct private_mapping {
  void* data;
  size_t bytes;
  private_mapping(const mapping& from, int written) : bytes(from.bytes) {
    const int file = memfd_create("cqsa", MFD_CLOEXEC);
    REQUIRE(write(file, from.data, bytes) == static_cast<ssize_t>(bytes));
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    REQUIRE(data != MAP_FAILED);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (written >= 0) {
      char* const at = static_cast<char*>(data) + static_cast<size_t>(written) * page;
      const std::vector<char> same(at, at + page), none(page);
      REQUIRE(pwrite(file, none.data(), page, static_cast<off_t>(static_cast<size_t>(written) * page)) == static_cast<ssize_t>(page));
      std::memcpy(at, same.data(), page);
    }
    close(file);
    REQUIRE(mprotect(data, bytes, PROT_READ) == 0);
  }
  ~private_mapping() { munmap(data, bytes); }
  private_mapping(const private_mapping&) = delete;
};

// A problem with all its tensors, and runs of it.
struct problem {
  owned_context owner;
  tensor q, k, v, out, lse;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  std::string state = "/tmp/cqsa_test_state." + std::to_string(getpid());

  problem(std::vector<int64_t> q_shape, std::vector<int64_t> kv_shape, std::vector<int64_t> lse_shape)
      : q(q_shape), k(kv_shape), v(kv_shape), out(q_shape), lse(lse_shape) {
    q.fill(1), k.fill(2), v.fill(3);
    args.q = &q.view, args.k = &k.view, args.v = &v.view, args.out = &out.view, args.lse = &lse.view;
    args.info = &info;
  }
  ~problem() { unlink(state.c_str()); }

  void complete() { REQUIRE(cqsa_attention_params_of(owner.context, &args, &params) == CQSA_OK); }
  void map(bool kv = true) {
    params.memory_q = params.memory_out = CQSA_MEMORY_MAPPED;
    params.memory_kv = kv ? CQSA_MEMORY_MAPPED : CQSA_MEMORY_HOST;
  }
  cqsa_status run() {
    cqsa_plan* plan = nullptr;
    cqsa_status status = cqsa_attention_plan_create(owner.context, &params, &plan);
    cqsa_plan_info described = CQSA_PLAN_INFO_INIT;
    if (status == CQSA_OK) {
      REQUIRE(cqsa_plan_describe(plan, &described) == CQSA_OK);
      status = cqsa_attention_execute(plan, &args, nullptr);
    }
    if (status == CQSA_OK) CHECK(info.peak_host_bytes <= described.peak_host_bytes);
    if (status == CQSA_OK && params.max_host_bytes) CHECK(described.peak_host_bytes <= params.max_host_bytes);
    cqsa_plan_destroy(plan);
    return status;
  }
  cqsa_status run_until(stop_at& stop) {
    args.progress = stop_at::step;
    args.progress_user = &stop;
    const cqsa_status status = run();
    args.progress = nullptr;
    return status;
  }
  void expect_like_memory(tensor& want_out, tensor& want_lse) {
    CHECK(out.equals(want_out));
    CHECK(lse.equals(want_lse));
  }
};

uint64_t least_from_message() {
  const std::string message = cqsa_last_error();
  return std::stoull(message.substr(message.rfind(' ') + 1));
}

// Stops after about a third, goes on, and compares with a run that was not stopped. Every tile is one leaf call.
void stop_and_go_on(problem& p) {
  REQUIRE(p.run() == CQSA_OK);
  tensor out(p.out.shape), lse(p.lse.shape);
  std::memcpy(out.memory.data, p.out.memory.data, out.memory.bytes);
  std::memcpy(lse.memory.data, p.lse.memory.data, lse.memory.bytes);
  std::memset(p.out.memory.data, 0x55, out.memory.bytes);
  std::memset(p.lse.memory.data, 0x55, lse.memory.bytes);
  p.args.checkpoint = p.state.c_str();
  stop_at third, rest;
  third.tile = 3;
  REQUIRE(p.run_until(third) == CQSA_ERROR_CANCELLED);
  REQUIRE(third.total > 6);
  REQUIRE(p.run_until(rest) == CQSA_OK);
  CHECK((rest.first >= 3 && rest.first < rest.total && rest.last == rest.total));
  CHECK(access(p.state.c_str(), F_OK) != 0);
  p.expect_like_memory(out, lse);
}

}  // namespace

TEST_CASE("mapped operands give the bits of the same tiles in memory, at every budget from the least on") {
  for (const bool causal : {false, true}) {
    problem p({2, 4, 700, 64}, {2, 2, 900, 64}, {2, 4, 700});
    p.params.causal = causal ? CQSA_CAUSAL_BOTTOM_RIGHT : CQSA_CAUSAL_NONE;
    p.complete();
    p.params.flags |= CQSA_ATTENTION_BATCH_INVARIANT;  // bits do not depend on the budget
    REQUIRE(p.run() == CQSA_OK);
    tensor out(p.out.shape), lse(p.lse.shape);
    std::memcpy(out.memory.data, p.out.memory.data, out.memory.bytes);
    std::memcpy(lse.memory.data, p.lse.memory.data, lse.memory.bytes);
    p.map();
    p.params.max_host_bytes = 1;
    REQUIRE(p.run() == CQSA_ERROR_BUDGET_TOO_SMALL);
    const uint64_t least = least_from_message();
    p.params.max_host_bytes = least - 1;
    REQUIRE(p.run() == CQSA_ERROR_BUDGET_TOO_SMALL);
    for (const uint64_t budget : {least, least + least / 8, least * 3 / 2, least * 3, uint64_t{0}}) {
      std::memset(p.out.memory.data, 0x55, out.memory.bytes);
      p.params.max_host_bytes = budget;
      INFO("budget " << budget << " of at least " << least);
      REQUIRE(p.run() == CQSA_OK);
      p.expect_like_memory(out, lse);
    }
  }
}

TEST_CASE("a stopped run goes on with the same bits") {
  SECTION("in memory") {
    problem p({2, 4, 300, 32}, {2, 2, 300, 32}, {2, 4, 300});
    p.params.causal = CQSA_CAUSAL_TOP_LEFT;
    p.complete();
    p.params.tile_q = 16;
    stop_and_go_on(p);
  }
  SECTION("mapped") {
    problem p({1, 4, 900, 64}, {1, 2, 900, 64}, {1, 4, 900});
    p.complete();
    p.map();
    p.params.schedule = CQSA_SCHEDULE_STREAM;
    p.params.tile_q = 128;
    p.params.tile_k = 256;
    stop_and_go_on(p);
    CHECK(p.info.tasks > 4 * 4);  // several windows each
  }
  SECTION("varlen, with rows past the last segment") {
    problem p({600, 4, 32}, {500, 2, 32}, {4, 600});
    tensor starts_q({4}, CQSA_DTYPE_I32), starts_k({4}, CQSA_DTYPE_I32), used({3}, CQSA_DTYPE_I32);
    starts_q.set({0, 200, 200, 580});
    starts_k.set({0, 100, 300, 500});
    used.set({100, 7, 150});
    p.args.cu_seqlens_q = &starts_q.view, p.args.cu_seqlens_k = &starts_k.view, p.args.seqused_k = &used.view;
    p.params.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    p.complete();
    p.params.tile_q = 16;
    stop_and_go_on(p);
  }
  SECTION("paged, q and out mapped") {
    problem p({4, 4, 50, 32}, {40, 16, 2, 32}, {4, 4, 50});
    tensor pages({4, 8}, CQSA_DTYPE_I32), used({4}, CQSA_DTYPE_I32);
    std::vector<int32_t> ids;
    for (int i = 0; i < 32; ++i) ids.push_back(i * 7 % 40);
    ids[5] = -1;
    pages.set(ids);
    used.set({128, 100, 0, 77});
    p.args.page_table = &pages.view, p.args.seqused_k = &used.view;
    p.params.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
    p.complete();
    stop_and_go_on(p);
    p.map(false);
    p.params.schedule = CQSA_SCHEDULE_STREAM;
    p.args.checkpoint = nullptr;
    CHECK(p.run() == CQSA_OK);
  }
}

TEST_CASE("what cannot be mapped or resumed is refused before anything is written") {
  problem p({1, 2, 64, 16}, {1, 2, 64, 16}, {1, 2, 64});
  p.complete();
  const auto refuse = [&](cqsa_status wanted, const char* word) {
    std::memset(p.out.memory.data, 0x55, p.out.memory.bytes);
    CHECK(p.run() == wanted);
    INFO(cqsa_last_error());
    CHECK(std::strstr(cqsa_last_error(), word) != nullptr);
    CHECK(p.out.begin()[0] == p.out.begin()[p.out.memory.bytes / 4 - 1]);
    CHECK(access(p.state.c_str(), F_OK) != 0);
  };
  std::vector<float> ordinary(2 * 64 * 16);
  SECTION("an operand in ordinary memory is not mapped") {
    p.map();
    p.params.schedule = CQSA_SCHEDULE_STREAM;
    p.k.view.data = ordinary.data();
    refuse(CQSA_ERROR_INVALID_ARGUMENT, "args->k is at");
  }
  SECTION("a private mapping that may have been written is not taken: its changes would be lost") {
    p.map();
    p.params.schedule = CQSA_SCHEDULE_STREAM;
    void* copy = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    p.v.view.data = copy;
    refuse(CQSA_ERROR_INVALID_ARGUMENT, "args->v is at");
    munmap(copy, 8192);
  }
  SECTION("nor one that is read-only now and was written before, whichever page it was") {
    p.map();
    p.params.schedule = CQSA_SCHEDULE_STREAM;
    const int pages = static_cast<int>(p.v.memory.bytes / static_cast<size_t>(sysconf(_SC_PAGESIZE)));
    for (const int written : {0, pages - 1}) {
      const private_mapping copy(p.v.memory, written);
      p.v.view.data = copy.data;
      refuse(CQSA_ERROR_INVALID_ARGUMENT, "args->v is at");
      CHECK(std::strstr(cqsa_last_error(), "were changed") != nullptr);
      CHECK(std::memcmp(copy.data, p.v.memory.data, copy.bytes) == 0);
    }
  }
  SECTION("outputs that would be lost with the process need no checkpoint") {
    p.args.checkpoint = p.state.c_str();
    p.args.out = nullptr;
    cqsa_tensor lost = p.out.view;
    lost.data = ordinary.data();
    p.args.out = &lost;
    refuse(CQSA_ERROR_INVALID_ARGUMENT, "args->out is at");
  }
  SECTION("an empty path") {
    p.args.checkpoint = "";
    refuse(CQSA_ERROR_INVALID_ARGUMENT, "empty path");
  }
  SECTION("a folder that is not there") {
    p.args.checkpoint = "/tmp/no such folder of cqsa/state";
    refuse(CQSA_ERROR_IO, "No such file");
  }
  SECTION("a state that cannot be written") {
    p.args.checkpoint = p.state.c_str();
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit tiny{16, before.rlim_max};
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &tiny);
    const cqsa_status status = p.run();
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    CHECK(status == CQSA_ERROR_IO);
    CHECK(std::strstr(cqsa_last_error(), "cannot be written") != nullptr);
    CHECK(access((p.state + ".tmp").c_str(), F_OK) != 0);
  }
  SECTION("cqs keeps partial results") {
    p.args.checkpoint = p.state.c_str();
    p.params.schedule = CQSA_SCHEDULE_CQS;
    refuse(CQSA_ERROR_UNSUPPORTED, "cqs");
  }
}

TEST_CASE("a private mapping that is read-only and was never written is taken") {
  problem p({1, 2, 64, 16}, {1, 2, 64, 16}, {1, 2, 64});
  p.complete();
  p.map();
  p.params.schedule = CQSA_SCHEDULE_STREAM;
  REQUIRE(p.run() == CQSA_OK);
  const std::vector<float> wanted(p.out.begin(), p.out.begin() + 2 * 64 * 16);
  const private_mapping k(p.k.memory, -1), v(p.v.memory, -1);
  p.k.view.data = k.data, p.v.view.data = v.data;
  std::memset(p.out.memory.data, 0x55, p.out.memory.bytes);
  const cqsa_status status = p.run();
  INFO(cqsa_last_error());
  CHECK(status == CQSA_OK);
  CHECK(std::memcmp(p.out.memory.data, wanted.data(), p.out.memory.bytes) == 0);
}

TEST_CASE("mapped operands are planned on every kind of backend, but not with pages of keys") {
  problem p({1, 2, 64, 16}, {1, 2, 64, 16}, {1, 2, 64});
  p.complete();
  p.map();
  cqsa_plan* plan = nullptr;
  CHECK(cqsa_attention_plan_create_for(R"({"flops_64": 1e13, "copy_in": 1e10, "copy_out": 1e10})", &p.params, &plan) ==
        CQSA_OK);
  cqsa_plan_destroy(plan);
  CHECK(cqsa_attention_plan_create_for(R"({"host": true, "flops_64": 1e11, "workers": 4})", &p.params, &plan) == CQSA_OK);
  cqsa_plan_destroy(plan);
  p.params.flags |= CQSA_ATTENTION_PAGED;
  p.params.page_size = 16;
  p.params.num_pages = 4;
  CHECK(cqsa_attention_query(p.owner.context, &p.params) == CQSA_ERROR_UNSUPPORTED);
  CHECK(std::strstr(cqsa_last_error(), "CQSA_ATTENTION_PAGED") != nullptr);
}

TEST_CASE("one call that takes its params from the tensors can be told of mapped files") {
  problem p({1, 2, 300, 32}, {1, 2, 4000, 32}, {1, 2, 300});
  uint64_t peak[3];
  for (const int stated : {0, 1, 2}) {  // nothing; mapped; all params, mapped
    p.params = CQSA_ATTENTION_PARAMS_INIT;
    if (stated == 2) p.complete();
    if (stated) p.map();
    REQUIRE(cqsa_attention(p.owner.context, &p.params, &p.args, nullptr) == CQSA_OK);
    peak[stated] = p.info.peak_host_bytes;
  }
  CHECK(peak[1] == peak[2]);
  CHECK(peak[1] != peak[0]);
}
