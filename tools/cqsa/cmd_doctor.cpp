// SPDX-License-Identifier: Apache-2.0
// cqsa doctor: what works on this machine, how much it can do, and whether it computes right.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "array.h"
#include "device_memory.h"
#include "elements.h"
#include "library.h"
#include "options.h"
#include "sizes.h"

namespace tool {
namespace {

using nlohmann::ordered_json;

const char* state_name(int32_t state) {
  static const char* const names[] = {"ready",     "not found", "load failed",       "abi mismatch",
                                      "no driver", "no device", "no code for device"};
  return state >= 0 && state < 7 ? names[state] : "unknown";
}

ordered_json backend_states() {
  ordered_json list = ordered_json::array();
  for (int32_t i = 0; const char* name = cqsa_backend_name(i); ++i) {
    cqsa_backend_info info = CQSA_BACKEND_INFO_INIT;
    require(cqsa_backend_query(name, nullptr, &info));
    list.push_back({{"name", name}, {"state", state_name(info.state)}, {"reason", info.reason}, {"devices", info.device_count},
                    {"device", info.device}});
  }
  return list;
}

// ---------------------------------------------------------------------------------------------------------------- capacity

constexpr int64_t kHeads = 8, kHeadDim = 64;
constexpr int64_t kFarthest = int64_t{1} << 34;  // tokens; no one has asked for more
constexpr std::array<int64_t, 3> kLengths{int64_t{1} << 16, int64_t{1} << 20, int64_t{1} << 24};
constexpr std::array<uint64_t, 3> kBudgets{uint64_t{64} << 20, uint64_t{1} << 30, uint64_t{8} << 30};

// Causal self-attention of f16 operands in host memory.
cqsa_attention_params typical(int64_t seqlen) {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  params.batch = 1;
  params.num_heads = params.num_kv_heads = kHeads;
  params.head_dim = params.head_dim_v = kHeadDim;
  params.seqlen_q = params.seqlen_k = seqlen;
  params.dtype_q = params.dtype_kv = params.dtype_out = CQSA_DTYPE_F16;
  params.causal = CQSA_CAUSAL_TOP_LEFT;
  return params;
}

int64_t largest_length(const cqsa_context* context, uint64_t bytes) {
  return first_true(0, kFarthest + 1, [&](int64_t n) { return !fits(context, typical(n), bytes); }) - 1;
}

// Predicted seconds within a budget; null where it does not fit.
ordered_json predicted(cqsa_context* context, int64_t seqlen, uint64_t bytes) {
  cqsa_attention_params params = typical(seqlen);
  set_budget(context, params, bytes);
  if (cqsa_attention_query(context, &params) != CQSA_OK) return nullptr;
  return describe(make_plan(context, params).get()).seconds;
}

ordered_json capacity(cqsa_context* context) {
  ordered_json out;
  out["problem"] = fmt::format("causal f16 self-attention, {} heads of {}, operands in host memory", kHeads, kHeadDim);
  for (const uint64_t budget : kBudgets) {
    const int64_t n = largest_length(context, budget);
    out["largest_seqlen"].push_back(
        {{"budget", budget}, {"seqlen", n >= kFarthest ? ordered_json(nullptr) : ordered_json(n)}});
  }
  for (const int64_t n : kLengths) {
    ordered_json row = {{"seqlen", n},
                        {"operand_bytes", 4 * n * kHeads * kHeadDim * 2},
                        {"least_budget", least_budget(context, typical(n))}};
    for (const uint64_t budget : kBudgets) row["seconds"].push_back(predicted(context, n, budget));
    out["lengths"].push_back(row);
  }
  return out;
}

// ------------------------------------------------------------------------------------------------------------------- check

constexpr int64_t kTokens = 192, kQueryHeads = 4, kKeyHeads = 2;

// Multiples of 1/64 below 2 in size: the same number in every type.
std::vector<double> random_values(std::size_t count, uint64_t seed) {
  std::vector<double> values(count);
  for (double& value : values) {
    seed = seed * 6364136223846793005 + 1442695040888963407;
    value = (static_cast<double>(seed >> 56) - 128) / 64;
  }
  return values;
}

// Bytes of such a value; all that the small types need is the float's bits with a shorter tail.
void store(cqsa_dtype dtype, double value, std::byte* to) {
  const auto f = static_cast<float>(value);
  const auto bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 31 << 15;
  const auto f16 = static_cast<uint16_t>(f == 0 ? sign : sign | (((bits >> 13) & 0x3FFFF) - (112 << 10)));
  const auto bf16 = static_cast<uint16_t>(bits >> 16);
  if (dtype == CQSA_DTYPE_F64) std::memcpy(to, &value, 8);
  if (dtype == CQSA_DTYPE_F32) std::memcpy(to, &f, 4);
  if (dtype == CQSA_DTYPE_F16) std::memcpy(to, &f16, 2);
  if (dtype == CQSA_DTYPE_BF16) std::memcpy(to, &bf16, 2);
}

// A [1, heads, kTokens, kHeadDim] operand of the check.
struct check_tensor {
  std::vector<std::byte> bytes;
  tensor_view view;
  device_buffer buffer;
  cqsa_tensor tensor;

  // device nullptr: used where it is.
  check_tensor(cqsa_dtype dtype, int64_t heads, uint64_t seed, device_memory* device) {
    const std::vector<double> values = random_values(static_cast<std::size_t>(heads * kTokens * kHeadDim), seed);
    const auto size = static_cast<std::size_t>(type_of(dtype).bytes);
    bytes.resize(values.size() * size);
    for (std::size_t i = 0; i < values.size(); ++i) store(dtype, values[i], &bytes[i * size]);
    view.set(bytes.data(), dtype, {1, heads, kTokens, kHeadDim});
    tensor = *view.get();
    if (!device) return;
    buffer = device_buffer(*device, bytes.size(), false);
    buffer.write(bytes.data());
    tensor.data = buffer.address();
    tensor.device_type = device->device_type();
  }
  void bring_back() {
    if (buffer.address()) buffer.read(bytes.data());
  }
};

enum class budget_choice { unlimited, least };

std::vector<double> attention_of(cqsa_context* context, cqsa_dtype dtype, budget_choice budget, device_memory* device = nullptr) {
  const check_tensor q(dtype, kQueryHeads, 1, device), k(dtype, kKeyHeads, 2, device), v(dtype, kKeyHeads, 3, device);
  check_tensor out(dtype, kQueryHeads, 4, device);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  args.q = &q.tensor;
  args.k = &k.tensor;
  args.v = &v.tensor;
  args.out = &out.tensor;
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  params.causal = CQSA_CAUSAL_BOTTOM_RIGHT;
  require(cqsa_attention_params_of(context, &args, &params));
  if (budget == budget_choice::least) set_budget(context, params, least_budget(context, params));
  require(cqsa_attention(context, &params, &args, device ? device->stream() : nullptr));
  if (device) device->wait();
  out.bring_back();
  std::vector<double> values(static_cast<std::size_t>(kQueryHeads * kTokens * kHeadDim));
  decode_row(dtype, out.bytes.data(), 1, static_cast<int64_t>(values.size()), values.data());
  return values;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;  // NaN stays
    if (std::isnan(largest)) break;
  }
  return largest;
}

// The device's memory, nullptr on a host backend and where this command has no way to it.
std::unique_ptr<device_memory> memory_of(const cqsa_context* context) {
  const std::string backend = cqsa_context_backend(context);
  if (is_host_backend(backend)) return nullptr;
  try {
    return open_device_memory(backend);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Each type against the fp64 reference, without a limit and within the least budget that works; on a device also with operands
// that are there. Results lie below 2.
ordered_json exactness(cqsa_context* context) {
  const std::unique_ptr<device_memory> device = memory_of(context);
  const context_ptr cpu = make_context("cpu");
  const std::vector<double> exact = attention_of(cpu.get(), CQSA_DTYPE_F64, budget_choice::unlimited);
  ordered_json list = ordered_json::array();
  for (const cqsa_dtype dtype : {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16}) {
    const double unlimited = largest_difference(attention_of(context, dtype, budget_choice::unlimited), exact);
    const double least = largest_difference(attention_of(context, dtype, budget_choice::least), exact);
    const double allowed = 16 * ulp(CQSA_DTYPE_F32, 1) + 2 * ulp(dtype, 1);
    ordered_json check = {{"dtype", type_of(dtype).name}, {"max_abs", unlimited}, {"max_abs_least_budget", least}};
    bool pass = unlimited <= allowed && least <= allowed;
    if (device) {
      const double resident = largest_difference(attention_of(context, dtype, budget_choice::unlimited, device.get()), exact);
      check["max_abs_resident"] = resident;
      pass = pass && resident <= allowed;
    }
    check["allowed"] = allowed;
    check["pass"] = pass;
    list.push_back(check);
  }
  return list;
}

// ------------------------------------------------------------------------------------------------------------------ report

ordered_json examine() {
  ordered_json report = {{"version", cqsa_version_string()},
                         {"abi_version", cqsa_abi_version()},
                         {"build", ordered_json::parse(cqsa_build_info(), nullptr, false)},
                         {"backends", backend_states()}};
  bool pass = true;
  for (ordered_json& backend : report["backends"]) {
    if (backend["state"] != "ready") continue;
    const context_ptr context = make_context(backend["name"].get<std::string>());
    backend["hardware"] = ordered_json::parse(hardware_json(context.get()), nullptr, false);
    backend["capacity"] = capacity(context.get());
    backend["check"] = exactness(context.get());
    for (const ordered_json& check : backend["check"]) pass = pass && check["pass"].get<bool>();
  }
  report["pass"] = pass;
  return report;
}

std::string value_text(const std::string& key, const ordered_json& value) {
  if (!value.is_number()) return value.is_string() ? value.get<std::string>() : value.dump();
  const double number = value.get<double>();
  if (key.ends_with("_bytes")) return bytes_text(number);
  if (key.starts_with("flops_")) return fmt::format("{:.1f} GFLOP/s", number / 1e9);
  if (key.starts_with("copy_") || key == "host_copy") return fmt::format("{:.1f} GB/s", number / 1e9);
  if (key.ends_with("_seconds")) return seconds_text(number);
  return value.dump();
}

void print_capacity(const ordered_json& capacity) {
  fmt::print("  {}\n", capacity["problem"].get<std::string>());
  for (const ordered_json& row : capacity["largest_seqlen"]) {
    const std::string none = fmt::format("no limit (tried up to {})", count_text(kFarthest));
    fmt::print("    largest N within {:<10} {}\n", bytes_text(row["budget"].get<double>()),
               row["seqlen"].is_null() ? none : count_text(row["seqlen"].get<int64_t>()));
  }
  fmt::print("    {:>6} {:>12} {:>13}   predicted time within\n", "N", "operands", "least budget");
  fmt::print("    {:>33}", "");
  for (const uint64_t budget : kBudgets) fmt::print(" {:>12}", bytes_text(static_cast<double>(budget)));
  fmt::print("\n");
  for (const ordered_json& row : capacity["lengths"]) {
    fmt::print("    {:>6} {:>12} {:>13}", count_text(row["seqlen"].get<int64_t>()),
               bytes_text(row["operand_bytes"].get<double>()), bytes_text(row["least_budget"].get<double>()));
    for (const ordered_json& seconds : row["seconds"])
      fmt::print(" {:>12}", seconds.is_null() ? "does not fit" : seconds_text(seconds.get<double>()));
    fmt::print("\n");
  }
}

void print_backend(const ordered_json& backend) {
  const std::string device = backend["device"].get<std::string>();
  const int devices = backend["devices"].get<int>();
  fmt::print("\nbackend {}: {}{}{}\n", backend["name"].get<std::string>(), backend["state"].get<std::string>(),
             device.empty() ? "" : ", " + device, devices > 1 ? fmt::format(" (1 of {})", devices) : "");
  if (backend["state"] != "ready") {
    fmt::print("  {}\n", backend["reason"].get<std::string>());
    return;
  }
  const bool host = backend["hardware"]["host"] == true;
  for (const auto& [key, value] : backend["hardware"].items()) {
    // Rates of a device's link mean nothing where nothing is copied.
    if (host && (key.starts_with("copy_") || key.starts_with("device_") || key == "launch_seconds" || key == "pinned")) continue;
    fmt::print("  {:<16}{}\n", key, value_text(key, value));
  }
  print_capacity(backend["capacity"]);
  fmt::print("  exactness against fp64, without a limit and within the least budget\n");
  for (const ordered_json& check : backend["check"]) {
    const std::string resident = check.contains("max_abs_resident")
                                     ? fmt::format(", {:.2e} with operands on the device", check["max_abs_resident"].get<double>())
                                     : "";
    fmt::print("    {:<5} max error {:.2e} and {:.2e}{}, allowed {:.2e}: {}\n", check["dtype"].get<std::string>(),
               check["max_abs"].get<double>(), check["max_abs_least_budget"].get<double>(), resident, check["allowed"].get<double>(),
               check["pass"].get<bool>() ? "PASS" : "FAIL");
  }
}

int run_doctor(bool json) {
  const ordered_json report = examine();
  const bool pass = report["pass"].get<bool>();
  if (json) {
    fmt::print("{}\n", report.dump(2, ' ', false, ordered_json::error_handler_t::replace));
  } else {
    fmt::print("cqsa {}, ABI {}\n", report["version"].get<std::string>(), report["abi_version"].get<int>());
    for (const auto& [key, value] : report["build"].items()) fmt::print("  {:<16}{}\n", key, value_text("", value));
    for (const ordered_json& backend : report["backends"]) print_backend(backend);
    fmt::print("\n{}\n", pass ? "PASS" : "FAIL");
  }
  return pass ? kExitOk : kExitCheckFailed;
}

}  // namespace

void add_doctor(CLI::App& app, int& status) {
  const auto json = std::make_shared<bool>(false);
  CLI::App& command = *app.add_subcommand("doctor", "Show what works on this machine, and check that it computes right");
  command.add_flag("--json", *json, "print one JSON object");
  command.callback([json, &status] { status = run_doctor(*json); });
}

}  // namespace tool
