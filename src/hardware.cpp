// SPDX-License-Identifier: Apache-2.0
// The planner's model of a machine: nominal, measured, or read from JSON.
#include <cmath>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "ops/attention/plan.h"

namespace cqsa {

namespace {

// Rates that decide nothing on a host backend (its candidates are compared by ratios) and stand in until measured.
constexpr double nominal_host_flops = 5e10;  // per thread
constexpr double nominal_device_flops = 1e13;
constexpr double nominal_copy = 1.2e10;
constexpr double nominal_memcpy = 1e10;

cqsa_status run_on_context(void* user, int64_t num_tasks, task_fn task, void* data) {
  return run_tasks(*static_cast<const cqsa_context*>(user), num_tasks, task, data);
}

double memcpy_rate() {
  constexpr size_t bytes = size_t{8} << 20;
  const std::unique_ptr<char[]> from(new char[bytes]), to(new char[bytes]);
  std::memset(from.get(), 1, bytes);
  std::memset(to.get(), 2, bytes);
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(to.get(), from.get(), bytes);
    asm volatile("" : : "r"(to.get()) : "memory");
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, bytes / std::max(1e-9, took.count()));
  }
  return best;
}

// Bytes per second of one large copy each way, from pinned memory when the backend has it.
cqsa_status copy_rate(const cqsa_context& context, int32_t direction, double& rate_out) {
  const cqsa_backend_v1& backend = *context.backend;
  constexpr uint64_t bytes = uint64_t{32} << 20;
  void *device = nullptr, *host = nullptr, *stream = nullptr;
  cqsa_status status = backend.device_alloc(context.device, bytes, &device);
  if (status == CQSA_OK) status = backend.pinned_alloc(context.device, bytes, &host);
  if (status == CQSA_OK) status = backend.stream_create(context.device, &stream);
  double best = 0;
  for (int i = 0; i < 3 && status == CQSA_OK; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const bool in = direction == CQSA_COPY_TO_DEVICE;
    status = backend.copy(context.device, in ? device : host, in ? host : device, bytes, direction, stream);
    if (status == CQSA_OK) status = backend.stream_sync(context.device, stream);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::max(best, bytes / std::max(1e-9, took.count()));
  }
  if (stream) backend.stream_destroy(context.device, stream);
  if (host) backend.pinned_free(context.device, host);
  if (device) backend.device_free(context.device, device);
  if (status == CQSA_OK) rate_out = best;
  return status;
}

void measure_compute(const cqsa_context& context, hardware_model& model) {
  if (context.backend->compute_rate == nullptr) return;
  const cqsa_exec exec{const_cast<cqsa_context*>(&context), run_on_context, nullptr, model.workers};
  const double at64 = context.backend->compute_rate(context.device_index, 64, CQSA_DTYPE_F32, &exec);
  const double at128 = context.backend->compute_rate(context.device_index, 128, CQSA_DTYPE_F32, &exec);
  if (at64 > 0) model.flops_64 = at64;
  if (at128 > 0) model.flops_128 = at128;
}

void measure_copies(const cqsa_context& context, hardware_model& model) {
  model.host_copy = memcpy_rate();
  if (model.host) return;
  // A rate that cannot be measured now (the device is full) keeps its nominal value.
  copy_rate(context, CQSA_COPY_TO_DEVICE, model.copy_in);
  copy_rate(context, CQSA_COPY_TO_HOST, model.copy_out);
}

void nominal(const cqsa_context& context, hardware_model& model) {
  std::snprintf(model.backend, sizeof model.backend, "%s", context.backend->name);
  model.host = context.is_host();
  model.pinned = !model.host && context.backend->pinned_alloc != nullptr;
  model.workers = context.num_threads;
  model.flops_64 = model.flops_128 = model.host ? nominal_host_flops * context.num_threads : nominal_device_flops;
  model.copy_in = model.copy_out = nominal_copy;
  model.host_copy = nominal_memcpy;
  model.launch_seconds = model.host ? 2e-6 : 1e-5;
}

cqsa_status capacities(const cqsa_context& context, hardware_model& model) {
  cqsa_device_properties properties{};
  CQSA_TRY(context.backend->device_properties(context.device_index, &properties));
  std::snprintf(model.name, sizeof model.name, "%s", properties.name);
  (model.host ? model.host_bytes : model.device_bytes) = model.host ? properties.total_bytes : properties.free_bytes;
  return CQSA_OK;
}

}  // namespace

double hardware_model::flops(int64_t head_dim) const {
  if (head_dim >= 128) return flops_128;
  if (head_dim >= 64) return flops_64 + (flops_128 - flops_64) * static_cast<double>(head_dim - 64) / 64.0;
  return flops_64 * std::max(0.125, static_cast<double>(head_dim) / 64.0);
}

cqsa_status hardware_of(const cqsa_context& context, rates needed, hardware_model& out) {
  // A host backend's choice goes by ratios, and must not change once something was measured.
  if (context.is_host() && needed == rates::known) return nominal(context, out), CQSA_OK;
  const std::lock_guard lock(context.hardware_lock);
  if (!context.hardware || context.hardware->measured < needed) {
    auto model = std::make_shared<hardware_model>();
    nominal(context, *model);
    CQSA_TRY(capacities(context, *model));
    if (needed >= rates::compute) measure_compute(context, *model);
    if (needed >= rates::all) measure_copies(context, *model);
    model->measured = needed;
    context.hardware = model;
  }
  out = *context.hardware;
  // Free device memory changes from call to call; the rates do not.
  return out.host ? CQSA_OK : capacities(context, out);
}

std::string hardware_to_json(const hardware_model& m) {
  return nlohmann::ordered_json{{"name", m.name},
                                {"backend", m.backend},
                                {"host", m.host},
                                {"pinned", m.pinned},
                                {"device_bytes", m.device_bytes},
                                {"host_bytes", m.host_bytes},
                                {"workers", m.workers},
                                {"flops_64", m.flops_64},
                                {"flops_128", m.flops_128},
                                {"copy_in", m.copy_in},
                                {"copy_out", m.copy_out},
                                {"host_copy", m.host_copy},
                                {"device_copy", m.device_copy},
                                {"launch_seconds", m.launch_seconds}}
      .dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

namespace {

cqsa_status read_text(const nlohmann::json& value, const char* key, char* out, size_t size) {
  if (!value.is_string()) return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: \"%s\" must be a string", key);
  std::snprintf(out, size, "%s", value.get_ref<const std::string&>().c_str());
  return CQSA_OK;
}

cqsa_status read_bool(const nlohmann::json& value, const char* key, bool& out) {
  if (!value.is_boolean()) return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: \"%s\" must be true or false", key);
  out = value.get<bool>();
  return CQSA_OK;
}

cqsa_status read_number(const nlohmann::json& value, const char* key, double& out) {
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0 || value.get<double>() > 1e18)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: \"%s\" is %s, wanted a number from 0 to 1e18", key,
                value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 60).c_str());
  out = value.get<double>();
  return CQSA_OK;
}

cqsa_status read_field(const std::string& key, const nlohmann::json& value, hardware_model& m) {
  if (key == "note") return CQSA_OK;
  if (key == "name") return read_text(value, "name", m.name, sizeof m.name);
  if (key == "backend") return read_text(value, "backend", m.backend, sizeof m.backend);
  if (key == "host") return read_bool(value, "host", m.host);
  if (key == "pinned") return read_bool(value, "pinned", m.pinned);
  double number = 0;
  const struct { const char* key; double* to; } rates[] = {
      {"flops_64", &m.flops_64},   {"flops_128", &m.flops_128}, {"copy_in", &m.copy_in},
      {"copy_out", &m.copy_out},   {"host_copy", &m.host_copy}, {"device_copy", &m.device_copy},
      {"launch_seconds", &m.launch_seconds}};
  for (const auto& rate : rates)
    if (key == rate.key) return read_number(value, rate.key, *rate.to);
  if (key == "device_bytes" || key == "host_bytes" || key == "workers") {
    CQSA_TRY(read_number(value, key.c_str(), number));
    if (key == "device_bytes") m.device_bytes = static_cast<uint64_t>(number);
    if (key == "host_bytes") m.host_bytes = static_cast<uint64_t>(number);
    if (key == "workers") m.workers = static_cast<int32_t>(std::clamp(number, 1.0, 4096.0));
    return CQSA_OK;
  }
  return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: unknown key \"%.60s\" (see docs/planning.md)", key.c_str());
}

}  // namespace

cqsa_status hardware_from_json(const char* json, hardware_model& out) {
  if (json == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "hardware_json is NULL");
  const nlohmann::json document = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json is not a JSON object");
  hardware_model model;
  model.host = false;
  for (const auto& [key, value] : document.items()) CQSA_TRY(read_field(key, value, model));
  if (model.flops_64 <= 0 && model.flops_128 <= 0)
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json gives no compute rate: flops_64 or flops_128 must be above 0");
  if (model.flops_64 <= 0) model.flops_64 = model.flops_128;
  if (model.flops_128 <= 0) model.flops_128 = model.flops_64;
  if (!model.host && (model.copy_in <= 0 || model.copy_out <= 0))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: copy_in and copy_out must be above 0 for a device");
  if (model.host_copy <= 0) model.host_copy = nominal_memcpy;
  out = model;
  return CQSA_OK;
}

}  // namespace cqsa
