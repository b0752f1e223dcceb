// SPDX-License-Identifier: Apache-2.0
// cqsa plan: what would be done, on this machine or on one that is described in a file.
#include <memory>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "elements.h"
#include "library.h"
#include "mapped_file.h"
#include "options.h"
#include "sizes.h"

namespace tool {
namespace {

struct plan_options {
  attention_options attention;
  std::string seqlen, dtype = "f16", hardware;
  int64_t heads = 0, kv_heads = 0, head_dim = 0, head_dim_v = 0, batch = 1;
  bool explain = false, json = false;
};

cqsa_attention_params params_of(const plan_options& options) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  options.attention.apply(params);
  params.batch = options.batch;
  params.num_heads = options.heads;
  params.num_kv_heads = options.kv_heads ? options.kv_heads : options.heads;
  params.head_dim = options.head_dim;
  params.head_dim_v = options.head_dim_v ? options.head_dim_v : options.head_dim;
  params.seqlen_q = params.seqlen_k = parse_count(options.seqlen);
  params.dtype_q = params.dtype_kv = params.dtype_out = dtype_by_name(options.dtype);
  return params;
}

std::string read_text(const std::string& path) {
  const mapped_file file(path);
  if (file.bytes().size() > 1'000'000) throw std::runtime_error(path + ": is too large for a description of hardware");
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// Whether the described machine computes in host memory; the library reads a missing "host" as false. What is wrong with the
// description otherwise, the library says.
bool described_as_host(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  return json.is_object() && json.value("host", nlohmann::json()) == true;
}

plan_ptr plan_of(const plan_options& options) {
  cqsa_attention_params params = params_of(options);
  if (options.hardware.empty()) {
    const context_ptr context = make_context(options.attention.backend);
    options.attention.apply_budget(params, is_host_backend(cqsa_context_backend(context.get())));
    return make_plan(context.get(), params);
  }
  if (options.attention.backend != "auto")
    throw std::runtime_error("--backend has no meaning with --hardware, whose file names the backend");
  const std::string text = read_text(options.hardware);
  options.attention.apply_budget(params, described_as_host(text));
  try {
    return make_plan_for(text, params);
  } catch (const library_error& error) {
    if (error.status >= 20) throw;
    throw std::runtime_error(fmt::format("with {}: {}", options.hardware, error.what()));
  }
}

const char* schedule_name(int32_t schedule) {
  switch (schedule) {
    case CQSA_SCHEDULE_DIRECT: return "direct";
    case CQSA_SCHEDULE_STREAM: return "stream";
    case CQSA_SCHEDULE_CQS: return "cqs";
    default: return "auto";
  }
}

const char* place_name(int32_t memory) {
  switch (memory) {
    case CQSA_MEMORY_HOST: return "host";
    case CQSA_MEMORY_PINNED: return "pinned host";
    case CQSA_MEMORY_DEVICE: return "device";
    case CQSA_MEMORY_MAPPED: return "mapped file";
    default: return "working memory, a tile at a time";
  }
}

void print_plan(const cqsa_plan_info& info) {
  const auto row = [](const char* name, const std::string& value) { fmt::print("  {:<16}{}\n", name, value); };
  row("backend", fmt::format("{} ({})", info.backend, info.implementation));
  if (info.schedule == CQSA_SCHEDULE_CQS)
    row("schedule", fmt::format("cqs, {} chunks, depth {}", info.cqs_c, info.cqs_itr));
  else
    row("schedule", schedule_name(info.schedule));
  row("tasks", fmt::format("{}, {} in flight", info.tasks, info.in_flight));
  row("tiles", fmt::format("{} queries x {} keys", info.tile_q, info.tile_k));
  row("places", fmt::format("q {}; k, v {}; accumulator {}; out {}", place_name(info.place_q), place_name(info.place_kv),
                            place_name(info.place_acc), place_name(info.place_out)));
  const auto bytes = [](uint64_t n) { return bytes_text(static_cast<double>(n)); };
  row("peak memory", fmt::format("device {}, host {}, pinned {}", bytes(info.peak_device_bytes),
                                 bytes(info.peak_host_bytes), bytes(info.peak_pinned_bytes)));
  row("workspace", bytes(info.workspace_bytes));
  row("copied", fmt::format("{} in, {} out", bytes(info.bytes_in), bytes(info.bytes_out)));
  row("work", flops_text(info.flops));
  row("predicted", seconds_text(info.seconds));
}

void run_plan(const plan_options& options) {
  const plan_ptr plan = plan_of(options);
  if (options.json) {
    fmt::print("{}\n", plan_json(plan.get()));
    return;
  }
  fmt::print("{}\n\n", plan_line(plan.get()));
  print_plan(describe(plan.get()));
  if (options.explain) fmt::print("\n{}\n", plan_explanation(plan.get()));
}

}  // namespace

void add_plan(CLI::App& app, int& status) {
  const auto options = std::make_shared<plan_options>();
  CLI::App& command = *app.add_subcommand("plan", "Show how an attention would be computed, and what it needs");
  command.add_option("--seqlen", options->seqlen, "tokens: 4096, 64K, 1M")->required()->type_name("N");
  command.add_option("--heads", options->heads, "query heads")->required()->type_name("H");
  command.add_option("--kv-heads", options->kv_heads, "key heads; default: as --heads")->type_name("G");
  command.add_option("--head-dim", options->head_dim, "channels of q and k")->required()->type_name("D");
  command.add_option("--head-dim-v", options->head_dim_v, "channels of v; default: as --head-dim")->type_name("D");
  command.add_option("--batch", options->batch, "sequences; default 1")->type_name("B");
  command.add_option("--dtype", options->dtype, "f16 (default), bf16, f32 or f64")->type_name("TYPE");
  options->attention.add_to(command);
  command.add_option("--host-memory", options->attention.host_memory, "pageable host memory")->type_name("SIZE");
  command.add_option("--pinned-memory", options->attention.pinned_memory, "page-locked host memory")->type_name("SIZE");
  command.add_option("--hardware", options->hardware, "JSON file that describes the machine to plan for")->type_name("FILE");
  command.add_flag("--explain", options->explain, "also show every candidate and why it lost");
  command.add_flag("--json", options->json, "print the plan as JSON only");
  command.callback([options, &status] {
    run_plan(*options);
    status = kExitOk;
  });
}

}  // namespace tool
