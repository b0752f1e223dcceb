// SPDX-License-Identifier: Apache-2.0
// Which functions of the driver a call in enqueue mode calls, in which order: each costs host time on every call of a program, so none
// may come to it unnoticed. The core, and the plugin with its own leaves, on the stand-in for the driver. Usage:
//   test_cuda_calls <libcqsa.so> <folder of the plugin>      (the stand-in is the libcuda.so.1 that the process finds)
#include <string>
#include <vector>

#include "cqsa.h"
#include "tests/device/driver.h"

namespace {

void* library = nullptr;
const char* folder = nullptr;

template <class Function> Function* core(const char* name) {
  Function* out = nullptr;
  find_symbol(library, name, out);
  return out;
}
#define CQSA(name) core<decltype(::name)>(#name)

void must(cqsa_status status) {
  if (status == CQSA_OK) return;
  std::printf("%s\n", CQSA(cqsa_last_error)());
  std::exit(1);
}

// The names of the calls without the two letters "cu", each with a space behind it.
template <class Call> std::string calls_of(Call&& call) {
  char text[4096] = "";
  cu().fake_cuda_note_calls(nullptr, 0);
  call();
  cu().fake_cuda_note_calls(text, sizeof text);
  std::string names = text;
  for (size_t at = 0; at < names.size(); at = names.find(' ', at) + 1) names.erase(at, 2);
  return names;
}

template <class Call> void expect(const char* what, const std::string& wanted, Call&& call) {
  for (const char* which : {"the first", "a later"}) {
    const std::string found = calls_of(call);
    CHECK(found == wanted, "%s: %s call is\n  %s, wanted\n  %s", what, which, found.c_str(), wanted.c_str());
  }
}

CUdeviceptr allocate(size_t bytes) {
  CUdeviceptr memory = 0;
  CHECK(cu().cuMemAlloc_v2(&memory, bytes) == CUDA_SUCCESS, "no memory");
  return memory;
}

// f16 [1, 8, queries or keys, 64], every operand an allocation of its own or all of them in one.
struct operands {
  int64_t q_shape[4], k_shape[4];
  std::vector<CUdeviceptr> blocks;
  cqsa_tensor q, k, v, out;
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;

  operands(int64_t queries, int64_t keys, bool together) : q_shape{1, 8, queries, 64}, k_shape{1, 8, keys, 64} {
    const size_t q_bytes = size_t(1024 * queries), k_bytes = size_t(1024 * keys);
    size_t next = 0;
    if (together) blocks.push_back(allocate(2 * (q_bytes + k_bytes)));
    const auto tensor = [&](int64_t* shape, size_t bytes) {
      if (!together) blocks.push_back(allocate(bytes));
      const CUdeviceptr at = blocks.back() + (together ? next : 0);
      next += bytes;
      return cqsa_tensor{reinterpret_cast<void*>(at), CQSA_DEVICE_CUDA, 0, 4, CQSA_DTYPE_F16, shape, nullptr, 0};
    };
    q = tensor(q_shape, q_bytes), k = tensor(k_shape, k_bytes), v = tensor(k_shape, k_bytes), out = tensor(q_shape, q_bytes);
    args.q = &q, args.k = &k, args.v = &v, args.out = &out;
  }
  ~operands() {
    for (const CUdeviceptr b : blocks) cu().cuMemFree_v2(b);
  }
  operands(const operands&) = delete;
};

struct session {
  CUcontext primary = nullptr;
  CUstream stream = nullptr;
  cqsa_context* context = nullptr;

  session() {
    cu().cuInit(0);
    cu().cuDevicePrimaryCtxRetain(&primary, 0);
    cu().cuCtxSetCurrent(primary);
    cu().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
    params.backend = "cuda", params.backend_path = folder;
    must(CQSA(cqsa_context_create)(&params, &context));
  }
  ~session() {
    CQSA(cqsa_context_destroy)(context);
    cu().cuStreamDestroy_v2(stream);
  }
  session(const session&) = delete;
};

struct planned {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  cqsa_plan* plan = nullptr;
  uint64_t bytes = 0;

  planned(const session& s, const operands& o) {
    must(CQSA(cqsa_attention_params_of)(s.context, &o.args, &params));
    must(CQSA(cqsa_attention_plan_create)(s.context, &params, &plan));
    must(CQSA(cqsa_workspace_query)(plan, &bytes));
  }
  ~planned() { CQSA(cqsa_plan_destroy)(plan); }
  planned(const planned&) = delete;
};

const std::string at_default = "CtxGetCurrent StreamIsCapturing ", at_stream = "CtxGetCurrent StreamGetCtx StreamIsCapturing ";
const std::string pointer = "CtxGetCurrent PointerGetAttributes ", one_launch = "CtxGetCurrent LaunchKernel ";

void case_one_launch(const session& s) {
  const auto execute = CQSA(cqsa_attention_execute);
  const auto attention = CQSA(cqsa_attention);
  const cqsa_attention_params bare = CQSA_ATTENTION_PARAMS_INIT;
  operands one(128, 128, true), four(128, 128, false);
  const planned p(s, one);
  CHECK(p.bytes == 0, "%d bytes of workspace", int(p.bytes));
  expect("execute, one allocation", at_default + pointer + one_launch, [&] { must(execute(p.plan, &one.args, nullptr)); });
  expect("execute, one allocation, a stream", at_stream + pointer + one_launch, [&] { must(execute(p.plan, &one.args, s.stream)); });
  expect("execute, four allocations", at_default + pointer + pointer + pointer + pointer + one_launch, [&] { must(execute(p.plan, &four.args, nullptr)); });
  expect("one call", at_stream + pointer + one_launch, [&] { must(attention(s.context, &p.params, &one.args, s.stream)); });
  expect("one call, shapes from the tensors", at_stream + pointer + one_launch, [&] { must(attention(s.context, &bare, &one.args, s.stream)); });
}

// Keys over several blocks, and a second launch that brings them together.
void case_split_keys(const session& s) {
  const auto execute = CQSA(cqsa_attention_execute);
  operands o(1, 8192, true);
  const planned p(s, o);
  CHECK(p.bytes > 0, "keys were not split");
  const std::string begin = at_stream + pointer;
  const std::string take = "CtxGetCurrent ThreadExchangeStreamCaptureMode MemAllocAsync ThreadExchangeStreamCaptureMode ";
  const std::string give = "CtxGetCurrent ThreadExchangeStreamCaptureMode MemFreeAsync ThreadExchangeStreamCaptureMode ";
  expect("decode, no workspace", begin + take + one_launch + one_launch + give, [&] { must(execute(p.plan, &o.args, s.stream)); });
  const CUdeviceptr workspace = allocate(p.bytes);
  cqsa_attention_args given = o.args;
  given.workspace = reinterpret_cast<void*>(workspace), given.workspace_bytes = p.bytes;
  expect("decode, workspace given", begin + pointer + one_launch + one_launch, [&] { must(execute(p.plan, &given, s.stream)); });
  cu().cuMemFree_v2(workspace);
}

// So few keys that one block takes them all: no states, nothing to bring together, nothing to allocate.
void case_few_keys(const session& s) {
  const auto execute = CQSA(cqsa_attention_execute);
  operands o(1, 128, true);
  const planned p(s, o);
  CHECK(p.bytes == 0, "%d bytes of workspace", int(p.bytes));
  expect("decode of few keys", at_stream + pointer + one_launch, [&] { must(execute(p.plan, &o.args, s.stream)); });
}

void case_no_current_context(const session& s) {
  operands o(128, 128, true);
  const planned p(s, o);
  const auto inside = [](const std::string& call) { return "CtxGetCurrent CtxPushCurrent_v2 " + call + " CtxPopCurrent_v2 "; };
  cu().cuCtxSetCurrent(nullptr);
  expect("no current context", inside("StreamIsCapturing") + inside("PointerGetAttributes") + inside("LaunchKernel"),
         [&] { must(CQSA(cqsa_attention_execute)(p.plan, &o.args, nullptr)); });
  cu().cuCtxSetCurrent(s.primary);
}

// A workspace that shares memory with an operand is refused however often the operands were taken before, and before the stream is touched.
void case_workspace_inside(const session& s) {
  operands o(1, 8192, true);
  const planned p(s, o);
  const auto execute = CQSA(cqsa_attention_execute);
  must(execute(p.plan, &o.args, s.stream));
  for (const cqsa_tensor* t : {&o.q, &o.k, &o.v, &o.out}) {
    cqsa_attention_args given = o.args;
    given.workspace = t->data, given.workspace_bytes = p.bytes;
    const std::string calls = calls_of([&] { CHECK(execute(p.plan, &given, s.stream) != CQSA_OK, "the workspace was taken"); });
    CHECK(calls.find("Launch") == std::string::npos && calls.find("Alloc") == std::string::npos, "%s", calls.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 || !is_fake()) {
    std::printf("usage: test_cuda_calls <libcqsa.so> <folder of the plugin>, on the stand-in for the driver\n");
    return 2;
  }
  library = dlopen(argv[1], RTLD_NOW), folder = argv[2];
  if (library == nullptr) std::printf("%s\n", dlerror());
  if (library == nullptr) return 2;
  const session s;
  for (const auto run : {case_one_launch, case_split_keys, case_few_keys, case_no_current_context, case_workspace_inside}) run(s);
  return failures != 0;
}
