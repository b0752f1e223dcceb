// SPDX-License-Identifier: Apache-2.0
// Runs every conformance vector with every schedule, at several budgets down to the least, in every way to call the library.
//
//     run_vectors FOLDER [--case NAME] [--backend NAME] [--threads N] [--verbose]
//
// README.md describes the vectors. Exit status: 0 all passed, 1 something failed, 2 the vectors could not be read.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "cqsa.h"
#include "elements.h"

using nlohmann::json;

namespace {

using vectors::element_type;
using vectors::type_named;

// --------------------------------------------------------------------------------------------------------------- memory

// Bytes in front of a page that must not be touched (an over-read ends the program), or aligned to 64 between guard zones.
class buffer {
 public:
  static constexpr size_t guard = 256;

  buffer(size_t bytes, bool at_page_end) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t body = (bytes + 2 * guard + page - 1) / page * page;
    mapped_ = body + page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(memory);
    mprotect(base_ + body, page, PROT_NONE);
    data_ = at_page_end ? base_ + body - bytes : base_ + guard;
    end_ = base_ + body;
    std::memset(base_, 0xFF, body);
  }
  ~buffer() { munmap(base_, mapped_); }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;

  unsigned char* data() { return data_; }
  size_t size() const { return bytes_; }
  bool guards_intact() const {
    for (const unsigned char* p = base_; p < end_; ++p)
      if ((p < data_ || p >= data_ + bytes_) && *p != 0xFF) return false;
    return true;
  }

 private:
  unsigned char *base_, *data_, *end_;
  size_t bytes_, mapped_;
};

struct operand {
  const element_type* type;
  std::vector<int64_t> shape, strides;
  int64_t first;
  std::vector<unsigned char> content;  // of the whole buffer, as it must be before a run
  std::unique_ptr<buffer> memory;
  cqsa_tensor tensor;

  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }
  // Byte offset, in the buffer, of element n in row-major order.
  size_t offset(int64_t n) const {
    int64_t at = first;
    for (size_t i = shape.size(); i-- > 0; n /= shape[i]) at += n % shape[i] * strides[i];
    return static_cast<size_t>(at * type->bytes);
  }
  void place(bool at_page_end, int32_t device_type) {
    memory = std::make_unique<buffer>(content.size(), at_page_end);
    if (!content.empty()) std::memcpy(memory->data(), content.data(), content.size());
    tensor = {memory->data(), device_type, 0, static_cast<int32_t>(shape.size()), type->dtype, shape.data(), strides.data(),
              static_cast<uint64_t>(first * type->bytes)};
  }
};

void fill_random(operand& o, const json& record) {
  const auto seed = record.at("seed").get<uint64_t>();
  const auto scale = record.value("scale", 1.0f), shift = record.value("shift", 0.0f);
  const auto bytes = static_cast<size_t>(o.type->bytes);
  for (size_t n = 0; n * bytes < o.content.size(); ++n) {
    const uint64_t z = vectors::splitmix64(seed, n);
    unsigned char* at = o.content.data() + n * bytes;
    if (o.type->dtype == CQSA_DTYPE_I8) *at = static_cast<unsigned char>(z >> 56);
    else vectors::store(at, *o.type, vectors::uniform(z) * scale + shift);
  }
}

operand read_operand(const json& record, const std::vector<unsigned char>& file) {
  operand o{};
  o.type = &type_named(record.at("dtype"));
  o.shape = record.at("shape").get<std::vector<int64_t>>();
  o.strides = record.at("strides").get<std::vector<int64_t>>();
  o.first = record.value("first", int64_t{0});
  o.content.assign(record.at("elements").get<size_t>() * static_cast<size_t>(o.type->bytes), 0xFF);
  if (record.contains("seed")) fill_random(o, record);
  if (record.contains("at")) {
    const auto at = record.at("at").get<size_t>();
    if (at > file.size() || o.content.size() > file.size() - at) throw std::runtime_error("a tensor reaches past its file");
    std::memcpy(o.content.data(), file.data() + at, o.content.size());
  }
  return o;
}

// ---------------------------------------------------------------------------------------------------------------- cases

using args_member = const cqsa_tensor* cqsa_attention_args::*;
const std::pair<const char*, args_member> members[] = {
    {"q", &cqsa_attention_args::q},
    {"k", &cqsa_attention_args::k},
    {"v", &cqsa_attention_args::v},
    {"k_scale", &cqsa_attention_args::k_scale},
    {"v_scale", &cqsa_attention_args::v_scale},
    {"mask", &cqsa_attention_args::mask},
    {"bias", &cqsa_attention_args::bias},
    {"alibi_slopes", &cqsa_attention_args::alibi_slopes},
    {"sinks", &cqsa_attention_args::sinks},
    {"cu_seqlens_q", &cqsa_attention_args::cu_seqlens_q},
    {"cu_seqlens_k", &cqsa_attention_args::cu_seqlens_k},
    {"seqused_k", &cqsa_attention_args::seqused_k},
    {"page_table", &cqsa_attention_args::page_table},
    {"out", &cqsa_attention_args::out},
    {"lse", &cqsa_attention_args::lse},
};

struct vector_case {
  std::string name;
  cqsa_attention_params params;
  std::vector<std::pair<std::string, operand>> inputs, outputs;
  std::vector<double> expected_out, expected_lse;
  double out_tolerance, lse_tolerance;
};

int32_t index_in(const json& params, const char* key, std::initializer_list<const char*> names) {
  const std::string wanted = params.value(key, "none");
  int32_t index = 0;
  for (const char* name : names) {
    if (wanted == name) return index;
    ++index;
  }
  throw std::runtime_error("unknown " + std::string(key) + " " + wanted);
}

cqsa_attention_params read_params(const json& p) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  const char* const flags[] = {"window", "varlen", "paged", "seqused_k", "mask", "bias", "alibi", "sinks", "lse"};
  for (const std::string name : p.at("flags"))
    for (uint32_t bit = 0; bit < 9; ++bit)
      if (name == flags[bit]) params.flags |= 1u << bit;
  const std::pair<const char*, int64_t*> sizes[] = {
      {"batch", &params.batch},         {"num_heads", &params.num_heads},   {"num_kv_heads", &params.num_kv_heads},
      {"head_dim", &params.head_dim},   {"head_dim_v", &params.head_dim_v}, {"seqlen_q", &params.seqlen_q},
      {"seqlen_k", &params.seqlen_k},   {"total_q", &params.total_q},       {"total_k", &params.total_k},
      {"page_size", &params.page_size}, {"num_pages", &params.num_pages},   {"kv_group", &params.kv_group},
      {"window_left", &params.window_left}, {"window_right", &params.window_right}};
  for (const auto& [key, field] : sizes) *field = p.value(key, int64_t{0});
  const std::pair<const char*, cqsa_dtype*> dtypes[] = {{"dtype_q", &params.dtype_q}, {"dtype_kv", &params.dtype_kv},
                                                        {"dtype_out", &params.dtype_out}, {"dtype_bias", &params.dtype_bias}};
  for (const auto& [key, field] : dtypes)
    if (p.contains(key)) *field = type_named(p.at(key)).dtype;
  params.scale_k = index_in(p, "scale_k", {"none", "tensor", "head", "token", "group"});
  params.scale_v = index_in(p, "scale_v", {"none", "tensor", "head", "token", "group"});
  params.causal = index_in(p, "causal", {"none", "top_left", "bottom_right"});
  params.softmax_scale = p.value("softmax_scale", 0.0);
  params.softcap = p.value("softcap", 0.0);
  params.mask_broadcast = p.value("mask_broadcast", 0u);
  params.bias_broadcast = p.value("bias_broadcast", 0u);
  return params;
}

std::vector<double> read_expected(const std::vector<unsigned char>& file, size_t at, int64_t count, const element_type& type) {
  const auto bytes = static_cast<size_t>(count * type.bytes);
  if (at > file.size() || bytes > file.size() - at) throw std::runtime_error("expected values reach past the file");
  std::vector<double> values;
  for (size_t n = 0; n < bytes; n += static_cast<size_t>(type.bytes)) values.push_back(vectors::load(file.data() + at + n, type));
  return values;
}

std::vector<unsigned char> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

vector_case read_case(const json& record, const std::string& folder) {
  vector_case c{};
  c.name = record.at("name");
  const auto file = read_file(folder + "/" + record.at("file").get<std::string>());
  if (file.size() != record.at("bytes").get<size_t>()) throw std::runtime_error(c.name + ".bin has another size than the manifest says");
  c.params = read_params(record.at("params"));
  for (const auto& [key, tensor] : record.at("inputs").items()) c.inputs.emplace_back(key, read_operand(tensor, file));
  for (const auto& [key, tensor] : record.at("outputs").items()) c.outputs.emplace_back(key, read_operand(tensor, file));
  const json& expected = record.at("expected");
  const element_type& type = type_named(expected.at("dtype"));
  const int64_t out_count = c.outputs.back().second.count();  // "lse" sorts before "out"
  c.expected_out = read_expected(file, expected.at("out_at"), out_count, type);
  c.expected_lse = read_expected(file, expected.at("lse_at"), out_count / c.params.head_dim_v, type);
  c.out_tolerance = expected.at("out_tolerance");
  c.lse_tolerance = expected.at("lse_tolerance");
  return c;
}

// ----------------------------------------------------------------------------------------------------------------- runs

// One way to call the library.
struct variant {
  std::string name;
  std::function<void(cqsa_attention_params&)> change;
  bool one_shot = false;      // cqsa_attention() with everything taken from the tensors
  bool at_page_end = false;   // operands end where readable memory ends
  bool own_workspace = false; // memory of the caller, full of NaN
  int32_t device_type = CQSA_DEVICE_CPU;
};

struct failure : std::runtime_error {
  using runtime_error::runtime_error;
};

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char line[1024];
  va_list list;
  va_start(list, format);
  std::vsnprintf(line, sizeof line, format, list);
  va_end(list);
  return line;
}

void must(cqsa_status status, const char* what) {
  if (status != CQSA_OK) throw failure(text("%s: %s: %s", what, cqsa_status_string(status), cqsa_last_error()));
}

struct plan_handle {
  cqsa_plan* plan = nullptr;
  ~plan_handle() { cqsa_plan_destroy(plan); }
};

struct error_record {
  double out = 0, lse = 0;  // largest error as a share of its tolerance
};

// lse of row n of the output in row-major order [.., num_heads, ..]; in varlen out is [row, head] and lse [head, row].
int64_t lse_index(const vector_case& c, int64_t row) {
  if (!(c.params.flags & CQSA_ATTENTION_VARLEN)) return row;
  return row % c.params.num_heads * c.params.total_q + row / c.params.num_heads;
}

double compare(const operand& o, const std::vector<double>& expected, double tolerance, const char* name) {
  double worst = 0;
  for (int64_t n = 0; n < o.count(); ++n) {
    const double got = vectors::load(o.memory->data() + o.offset(n), *o.type), want = expected[static_cast<size_t>(n)];
    const double error = got == want ? 0 : std::fabs(got - want) / std::max(1.0, std::fabs(want));
    if (!(error <= tolerance))
      throw failure(text("%s[%lld] is %.9g, wanted %.9g within %.3g x max(1, |wanted|)", name, static_cast<long long>(n), got, want, tolerance));
    worst = std::max(worst, error / tolerance);
  }
  return worst;
}

void check_empty_rows(const vector_case& c, const operand& out) {
  for (int64_t n = 0; n < out.count(); ++n) {
    const int64_t row = n / c.params.head_dim_v;
    if (c.expected_lse[static_cast<size_t>(lse_index(c, row))] != -HUGE_VAL) continue;
    if (vectors::load(out.memory->data() + out.offset(n), *out.type) != 0)
      throw failure(text("out[%lld] is not 0, although its row sees no key", static_cast<long long>(n)));
  }
}

// Nothing outside the views may have changed.
void check_untouched(operand& o, const std::string& name, bool is_output) {
  if (!o.memory->guards_intact()) throw failure("memory around " + name + " was written");
  std::vector<unsigned char> now(o.memory->data(), o.memory->data() + o.memory->size());
  if (is_output)
    for (int64_t n = 0; n < o.count(); ++n)
      std::memset(now.data() + o.offset(n), 0xFF, static_cast<size_t>(o.type->bytes));
  if (now != o.content) throw failure(name + (is_output ? " was written between its elements" : " was changed"));
}

cqsa_attention_args bind(vector_case& c, const variant& way) {
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  for (auto* list : {&c.inputs, &c.outputs})
    for (auto& [key, o] : *list) {
      o.place(way.at_page_end, way.device_type);
      for (const auto& [name, member] : members)
        if (key == name) args.*member = &o.tensor;
    }
  return args;
}

void check_taken_params(cqsa_context* context, const vector_case& c, const cqsa_attention_args& args) {
  cqsa_attention_params taken = CQSA_ATTENTION_PARAMS_INIT;
  const cqsa_attention_params& p = c.params;
  taken.flags = p.flags & CQSA_ATTENTION_WINDOW;
  taken.causal = p.causal;
  taken.window_left = p.window_left, taken.window_right = p.window_right;
  taken.softmax_scale = p.softmax_scale, taken.softcap = p.softcap;
  taken.kv_group = p.kv_group;
  must(cqsa_attention_params_of(context, &args, &taken), "cqsa_attention_params_of");
  if (taken.flags != p.flags) throw failure(text("params_of gives flags 0x%x, wanted 0x%x", taken.flags, p.flags));
  const auto same = [](const char* name, int64_t got, int64_t want) {
    if (got != want) throw failure(text("params_of gives %s = %lld, wanted %lld", name, static_cast<long long>(got), static_cast<long long>(want)));
  };
#define SAME(field) same(#field, taken.field, p.field)
  SAME(batch), SAME(num_heads), SAME(num_kv_heads), SAME(head_dim), SAME(head_dim_v), SAME(seqlen_q), SAME(seqlen_k), SAME(total_q);
  SAME(total_k), SAME(page_size), SAME(num_pages), SAME(dtype_q), SAME(dtype_kv), SAME(dtype_out), SAME(dtype_bias), SAME(kv_group);
  SAME(memory_q), SAME(memory_kv), SAME(memory_out), SAME(mask_broadcast), SAME(bias_broadcast);
  // One scale for one key head is both kinds.
  if (p.num_kv_heads > 1) SAME(scale_k), SAME(scale_v);
#undef SAME
}

void execute(cqsa_context* context, const vector_case& c, const variant& way, cqsa_attention_args& args) {
  cqsa_attention_params params = c.params;
  cqsa_run_info run = CQSA_RUN_INFO_INIT;
  args.info = &run;
  if (way.one_shot) {
    check_taken_params(context, c, args);
    params.num_heads = 0;
    must(cqsa_attention(context, &params, &args, nullptr), "cqsa_attention");
    return;
  }
  if (way.change) way.change(params);
  plan_handle handle;
  must(cqsa_attention_plan_create(context, &params, &handle.plan), "cqsa_attention_plan_create");
  cqsa_plan_info plan = CQSA_PLAN_INFO_INIT;
  must(cqsa_plan_describe(handle.plan, &plan), "cqsa_plan_describe");
  std::unique_ptr<buffer> workspace;
  if (way.own_workspace) {
    workspace = std::make_unique<buffer>(plan.workspace_bytes, false);
    args.workspace = workspace->data();
    args.workspace_bytes = plan.workspace_bytes;
    must(cqsa_workspace_init(handle.plan, args.workspace, args.workspace_bytes), "cqsa_workspace_init");
  }
  must(cqsa_attention_execute(handle.plan, &args, nullptr), "cqsa_attention_execute");
  if (workspace && !workspace->guards_intact()) throw failure("memory around the workspace was written");
  if (params.max_host_bytes && plan.peak_host_bytes > params.max_host_bytes)
    throw failure(text("the plan's peak of %llu bytes exceeds the budget of %llu", static_cast<unsigned long long>(plan.peak_host_bytes),
                       static_cast<unsigned long long>(params.max_host_bytes)));
  if (run.peak_host_bytes > plan.peak_host_bytes || run.peak_device_bytes > plan.peak_device_bytes ||
      run.peak_pinned_bytes > plan.peak_pinned_bytes)
    throw failure("the run's peak exceeds the plan's");
}

error_record run(cqsa_context* context, vector_case& c, const variant& way) {
  cqsa_attention_args args = bind(c, way);
  execute(context, c, way, args);
  error_record worst;
  for (auto& [key, o] : c.inputs) check_untouched(o, key, false);
  for (auto& [key, o] : c.outputs) {
    check_untouched(o, key, true);
    if (key == "out") check_empty_rows(c, o);
    const bool out = key == "out";
    (out ? worst.out : worst.lse) =
        compare(o, out ? c.expected_out : c.expected_lse, out ? c.out_tolerance : c.lse_tolerance, key.c_str());
  }
  return worst;
}

// The least host bytes with which these params work, as the refusal of a budget of one byte states it.
uint64_t least_budget(cqsa_context* context, cqsa_attention_params params) {
  params.max_host_bytes = 1;
  const cqsa_status status = cqsa_attention_query(context, &params);
  if (status != CQSA_ERROR_BUDGET_TOO_SMALL)
    throw failure(text("a budget of one byte gives %s, wanted CQSA_ERROR_BUDGET_TOO_SMALL: %s", cqsa_status_string(status), cqsa_last_error()));
  const std::string message = cqsa_last_error();
  const size_t end = message.find_last_of("0123456789");
  const size_t begin = message.find_last_not_of("0123456789", end) + 1;
  const uint64_t least = std::stoull(message.substr(begin, end - begin + 1));
  params.max_host_bytes = least - 1;
  if (cqsa_attention_query(context, &params) != CQSA_ERROR_BUDGET_TOO_SMALL) throw failure("less than the stated least budget is taken");
  return least;
}

uint64_t unlimited_peak(cqsa_context* context, const cqsa_attention_params& params) {
  plan_handle handle;
  must(cqsa_attention_plan_create(context, &params, &handle.plan), "cqsa_attention_plan_create");
  cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
  must(cqsa_plan_describe(handle.plan, &info), "cqsa_plan_describe");
  return info.peak_host_bytes;
}

// `change` with no limit, the least, and two budgets between.
void add_budgets(cqsa_context* context, const vector_case& c, const std::string& name,
                 const std::function<void(cqsa_attention_params&)>& change, std::vector<variant>& out) {
  cqsa_attention_params params = c.params;
  change(params);
  const uint64_t least = least_budget(context, params), most = unlimited_peak(context, params);
  for (const uint64_t budget : {uint64_t{0}, least, least + (most - least) / 4, least + (most - least) / 2}) {
    if (budget > least && budget == most) continue;
    out.push_back({name + (budget ? " in " + std::to_string(budget) + " bytes" : ""), [=](cqsa_attention_params& p) {
                     change(p);
                     p.max_host_bytes = budget;
                   }});
  }
}

bool takes_cqs(const cqsa_attention_params& p) {
  return p.seqlen_q == p.seqlen_k && !(p.flags & (CQSA_ATTENTION_VARLEN | CQSA_ATTENTION_PAGED | CQSA_ATTENTION_SEQUSED_K)) &&
         p.dtype_q != CQSA_DTYPE_F64;
}

std::vector<variant> variants_of(cqsa_context* context, const vector_case& c) {
  std::vector<variant> out;
  variant once{"one call", nullptr};
  once.one_shot = true;
  out.push_back(once);
  variant guarded{"operands at the end of memory", nullptr};
  guarded.at_page_end = true;
  out.push_back(guarded);
  variant workspace{"workspace of the caller", nullptr};
  workspace.own_workspace = true;
  out.push_back(workspace);
  if (std::string(cqsa_context_backend(context)) == "cpu")
    for (const int32_t device_type : {CQSA_DEVICE_CUDA_HOST, CQSA_DEVICE_ROCM_HOST}) {
      variant pinned{"memory that device type " + std::to_string(device_type) + " pinned", nullptr};
      pinned.device_type = device_type;
      out.push_back(pinned);
    }
  add_budgets(context, c, "auto", [](cqsa_attention_params&) {}, out);
  add_budgets(context, c, "direct", [](cqsa_attention_params& p) { p.schedule = CQSA_SCHEDULE_DIRECT; }, out);
  add_budgets(context, c, "stream", [](cqsa_attention_params& p) { p.schedule = CQSA_SCHEDULE_STREAM; }, out);
  add_budgets(context, c, "batch invariant", [](cqsa_attention_params& p) { p.flags |= CQSA_ATTENTION_BATCH_INVARIANT; }, out);
  if (!takes_cqs(c.params)) return out;
  const std::pair<int32_t, int32_t> shapes[] = {{0, 0}, {3, 1}, {7, 1}, {13, 1}, {3, 2}, {7, 2}, {3, 3}};
  for (const auto& [chunks, depth] : shapes)
    add_budgets(context, c, "cqs " + std::to_string(chunks) + "^" + std::to_string(depth),
                [chunks = chunks, depth = depth](cqsa_attention_params& p) {
                  p.schedule = CQSA_SCHEDULE_CQS;
                  p.cqs_c = chunks;
                  p.cqs_itr = depth;
                }, out);
  return out;
}

// ----------------------------------------------------------------------------------------------------------------- main

struct options {
  std::string folder, only, backend = "cpu";
  int32_t threads = 2;
  bool verbose = false;
};

options read_options(int argc, char** argv) {
  options o;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string(); };
    if (word == "--case") o.only = value();
    else if (word == "--backend") o.backend = value();
    else if (word == "--threads") o.threads = std::atoi(value().c_str());
    else if (word == "--verbose") o.verbose = true;
    else o.folder = word;
  }
  if (o.folder.empty()) throw std::runtime_error("usage: run_vectors FOLDER [--case NAME] [--backend NAME] [--threads N] [--verbose]");
  return o;
}

struct counts {
  int cases = 0, runs = 0, failed = 0;
};

void run_case(cqsa_context* context, vector_case& c, const options& o, counts& total) {
  ++total.cases;
  std::vector<variant> ways;
  try {
    ways = variants_of(context, c);
  } catch (const failure& reason) {
    ++total.failed;
    std::printf("FAILED %s, making plans: %s\n", c.name.c_str(), reason.what());
    ways = {{"auto", nullptr}};
  }
  error_record worst;
  for (const variant& way : ways) {
    ++total.runs;
    try {
      const error_record e = run(context, c, way);
      worst = {std::max(worst.out, e.out), std::max(worst.lse, e.lse)};
    } catch (const failure& reason) {
      ++total.failed;
      std::printf("FAILED %s, %s: %s\n", c.name.c_str(), way.name.c_str(), reason.what());
    }
  }
  if (o.verbose)
    std::printf("%-34s %3zu ways, largest error / tolerance: out %.2f, lse %.2f\n", c.name.c_str(), ways.size(), worst.out, worst.lse);
}

int run_all(const options& o) {
  const auto manifest_bytes = read_file(o.folder + "/manifest.json");
  const json manifest = json::parse(manifest_bytes);
  if (manifest.at("format") != 1) throw std::runtime_error("the manifest has another format than 1");
  cqsa_context_params context_params = CQSA_CONTEXT_PARAMS_INIT;
  context_params.backend = o.backend.c_str();
  context_params.num_threads = o.threads;
  cqsa_context* context = nullptr;
  must(cqsa_context_create(&context_params, &context), "cqsa_context_create");
  counts total;
  for (const json& record : manifest.at("cases")) {
    if (!o.only.empty() && record.at("name") != o.only) continue;
    vector_case c = read_case(record, o.folder);
    run_case(context, c, o, total);
  }
  cqsa_context_destroy(context);
  std::printf("%d cases, %d runs, %d failed\n", total.cases, total.runs, total.failed);
  return total.failed || !total.cases;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run_all(read_options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "run_vectors: %s\n", error.what());
    return 2;
  }
}
