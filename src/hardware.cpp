// SPDX-License-Identifier: Apache-2.0
// The planner's model of a machine: nominal, measured, or read from JSON.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <nlohmann/json.hpp>

#include "json_object.h"
#include "ops/attention/plan.h"

namespace cqsa {

namespace {

// Rates that decide nothing on a host backend (its candidates are compared by ratios) and stand in until measured. Of a device
// they are those of a fast one behind a fast link: a plan made for more arithmetic to the byte than there is keeps more rows on
// the device than it has to, which costs some memory; one made for less would wait for copies.
constexpr double nominal_host_flops = 5e10;  // per thread
constexpr double nominal_device_flops = 6e14;
constexpr double nominal_copy = 5e10;
constexpr double nominal_memcpy = 1e10;

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

// What is needed to measure a device: some memory of it and of the host, pinned where the backend has that, and a stream. All of
// it goes back at once.
class device_bench {
 public:
  static constexpr uint64_t bytes = uint64_t{32} << 20;

  explicit device_bench(const cqsa_context& context) : backend_(*context.backend), handle_(context.device) {}
  ~device_bench() {
    if (event_) backend_.event_destroy(handle_, event_);
    if (stream_) backend_.stream_destroy(handle_, stream_);
    if (pinned_) backend_.pinned_free(handle_, pinned_);
    if (memory_) backend_.device_free(handle_, memory_);
  }
  device_bench(const device_bench&) = delete;

  // False: the device is full. Nothing can be measured now.
  bool open() {
    if (backend_.device_alloc(handle_, bytes, &memory_) != CQSA_OK) return false;
    if (backend_.pinned_alloc == nullptr || backend_.pinned_alloc(handle_, bytes, &pinned_) != CQSA_OK) pinned_ = nullptr;
    if (!pinned_) pageable_.reset(new char[bytes]());
    return backend_.stream_create(handle_, &stream_) == CQSA_OK && backend_.event_create(handle_, &event_) == CQSA_OK;
  }

  // Bytes per second of one large copy; 0: it failed.
  double copy_rate(int32_t direction) {
    char* const host = pinned_ ? static_cast<char*>(pinned_) : pageable_.get();
    const bool in = direction == CQSA_COPY_TO_DEVICE;
    return best_rate(bytes, 1, [&] { return backend_.copy(handle_, in ? memory_ : host, in ? host : memory_, bytes, direction, stream_); });
  }
  // .. read and written within the device's memory.
  double device_rate() {
    char* const half = static_cast<char*>(memory_) + bytes / 2;
    return best_rate(bytes, 16, [&] { return backend_.copy(handle_, half, memory_, bytes / 2, CQSA_COPY_ON_DEVICE, stream_); });
  }
  // Seconds that the driver takes for what goes with one leaf call: a small operation, and the events around it. 0: it failed.
  double call_seconds() {
    char* const to = static_cast<char*>(memory_) + 256;
    const double rate = best_rate(1, 64, [&] {
      CQSA_TRY(backend_.copy(handle_, to, memory_, 64, CQSA_COPY_ON_DEVICE, stream_));
      CQSA_TRY(backend_.event_record(handle_, event_, stream_));
      return backend_.stream_wait(handle_, stream_, event_);
    });
    return rate > 0 ? 1 / rate : 0;
  }

 private:
  // The best of three times `count` operations of so much, after one that warms up.
  template <class F>
  double best_rate(uint64_t amount, int count, F&& operation) {
    double best = 0;
    for (int i = 0; i < 4; ++i) {
      const auto start = std::chrono::steady_clock::now();
      for (int k = 0; k < (i == 0 ? 1 : count); ++k)
        if (operation() != CQSA_OK) return 0;
      if (backend_.stream_sync(handle_, stream_) != CQSA_OK) return 0;
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (i > 0) best = std::max(best, static_cast<double>(amount) * count / std::max(1e-9, took.count()));
    }
    return best;
  }

  const cqsa_backend_v1& backend_;
  void* const handle_;
  void *memory_ = nullptr, *pinned_ = nullptr, *stream_ = nullptr, *event_ = nullptr;
  std::unique_ptr<char[]> pageable_;
};

// On a host a rate of 0 means that there was no memory for the measurement; on a device, that the backend does not measure.
cqsa_status measure_compute(const cqsa_context& context, hardware_model& model) {
  if (context.backend->compute_rate == nullptr) return CQSA_OK;
  const cqsa_exec exec = plain_exec(context);
  const double at64 = context.backend->compute_rate(context.device_index, 64, CQSA_DTYPE_F32, &exec);
  const double at128 = context.backend->compute_rate(context.device_index, 128, CQSA_DTYPE_F32, &exec);
  if (at64 > 0) model.flops_64 = at64;
  if (at128 > 0) model.flops_128 = at128;
  if (!model.host) {
    model.flops_64_f16 = context.backend->compute_rate(context.device_index, 64, CQSA_DTYPE_F16, &exec);
    model.flops_128_f16 = context.backend->compute_rate(context.device_index, 128, CQSA_DTYPE_F16, &exec);
  }
  if (model.host && (at64 <= 0 || at128 <= 0))
    return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "out of host memory for measuring the compute rate");
  return CQSA_OK;
}

// False: the device is full. Its rates keep their nominal values, and are measured another time.
bool measure_copies(const cqsa_context& context, hardware_model& model) {
  model.host_copy = memcpy_rate();
  if (model.host) return true;
  device_bench bench(context);
  if (!bench.open()) return false;
  const auto keep = [](double measured, double& rate) {
    if (measured > 0) rate = measured;
  };
  keep(bench.copy_rate(CQSA_COPY_TO_DEVICE), model.copy_in);
  keep(bench.copy_rate(CQSA_COPY_TO_HOST), model.copy_out);
  keep(bench.device_rate(), model.device_copy);
  keep(bench.call_seconds(), model.launch_seconds);
  return true;
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

}  // namespace

// Kernels are written for two blocks on each unit, so that one computes while the other loads.
double parallel_blocks_of(const cqsa_device_properties& properties) {
  return properties.chip.compute_units > 1 ? 2.0 * properties.chip.compute_units : 0;
}

cqsa_status add_capacities(const cqsa_context& context, hardware_model& model) {
  cqsa_device_properties properties{};
  CQSA_TRY(context.backend->device_properties(context.device_index, &properties));
  std::snprintf(model.name, sizeof model.name, "%s", properties.name);
  (model.host ? model.host_bytes : model.device_bytes) = model.host ? properties.total_bytes : properties.free_bytes;
  model.device_total_bytes = model.host ? 0 : properties.total_bytes;
  if (!model.host) model.parallel_blocks = parallel_blocks_of(properties);
  return CQSA_OK;
}

// What was measured of devices in this process, newest first: another context of the same device takes it over. Never freed: a
// device's plugin stays loaded, and with it this library, and another thread may be reading.
struct measured_device {
  const cqsa_backend_v1* backend;
  int32_t device;
  hardware_model model;
  const measured_device* next;
};
std::atomic<const measured_device*> measured_devices{nullptr};

const hardware_model* measured_before(const cqsa_context& context, rates needed) {
  for (const measured_device* m = measured_devices.load(std::memory_order_acquire); m; m = m->next)
    if (m->backend == context.backend && m->device == context.device_index && m->model.measured >= needed) return &m->model;
  return nullptr;
}

void remember(const cqsa_context& context, const hardware_model& model) {
  auto* node = new measured_device{context.backend, context.device_index, model, measured_devices.load(std::memory_order_relaxed)};
  node->model.previous = nullptr;
  while (!measured_devices.compare_exchange_weak(node->next, node, std::memory_order_acq_rel)) {}
}

cqsa_status measure(const cqsa_context& context, rates needed, hardware_model& model) {
  nominal(context, model);
  CQSA_TRY(add_capacities(context, model));
  if (const hardware_model* before = model.host ? nullptr : measured_before(context, needed)) return model.take_rates(*before), CQSA_OK;
  if (needed >= rates::compute) CQSA_TRY(measure_compute(context, model));
  if (needed >= rates::all && !measure_copies(context, model)) return CQSA_OK;
  model.measured = needed;
  if (!model.host && needed > rates::known) remember(context, model);
  return CQSA_OK;
}

double hardware_model::flops(int64_t head_dim, cqsa_dtype dtype_q) const {
  const bool half = dtype_q == CQSA_DTYPE_F16 || dtype_q == CQSA_DTYPE_BF16;
  const double at64 = half && flops_64_f16 > 0 ? flops_64_f16 : flops_64;
  const double at128 = half && flops_128_f16 > 0 ? flops_128_f16 : flops_128;
  if (head_dim >= 128) return at128;
  if (head_dim >= 64) return at64 + (at128 - at64) * static_cast<double>(head_dim - 64) / 64.0;
  return at64 * std::max(0.125, static_cast<double>(head_dim) / 64.0);
}

cqsa_status hardware_of(const cqsa_context& context, rates needed, hardware_model& out) {
  const hardware_model* known = context.hardware.load(std::memory_order_acquire);
  // A host backend's choice goes by ratios, and must not change once something was measured.
  if (needed == rates::known && (context.is_host() || !known)) {
    nominal(context, out);
    const hardware_model* before = context.is_host() ? nullptr : measured_before(context, rates::compute);
    if (before) out.take_rates(*before);
    return CQSA_OK;
  }
  if (!known || known->measured < needed) {
    auto model = std::make_unique<hardware_model>();
    CQSA_TRY(measure(context, needed, *model));
    // Two threads may measure at once; both results are good, and the later one stays.
    model->previous = context.hardware.load(std::memory_order_relaxed);
    while (!context.hardware.compare_exchange_weak(model->previous, model.get(), std::memory_order_acq_rel)) {}
    known = model.release();
  }
  out = *known;
  // Free device memory changes from call to call; the rates do not.
  if (out.host) return CQSA_OK;
  if (needed != rates::known) return add_capacities(context, out);
  out.device_bytes = 0;
  return CQSA_OK;
}

void forget_hardware(const hardware_model* newest) {
  while (newest) delete std::exchange(newest, newest->previous);
}

std::string hardware_to_json(const hardware_model& m) {
  return json_object()
      .add("name", m.name)
      .add("backend", m.backend)
      .add("host", m.host)
      .add("pinned", m.pinned)
      .add("device_bytes", m.device_bytes)
      .add("device_total_bytes", m.device_total_bytes)
      .add("host_bytes", m.host_bytes)
      .add("workers", m.workers)
      .add("flops_64", m.flops_64)
      .add("flops_128", m.flops_128)
      .add("flops_64_f16", m.flops_64_f16)
      .add("flops_128_f16", m.flops_128_f16)
      .add("copy_in", m.copy_in)
      .add("copy_out", m.copy_out)
      .add("host_copy", m.host_copy)
      .add("device_copy", m.device_copy)
      .add("launch_seconds", m.launch_seconds)
      .add("parallel_blocks", m.parallel_blocks)
      .text();
}

namespace {

// One flat object of numbers, texts and booleans, read event by event: nothing nests, so nothing can overflow a stack.
class hardware_reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit hardware_reader(hardware_model& model) : m_(model) {}
  cqsa_status status() const { return status_; }

  bool null() override { return refuse("null"); }
  bool boolean(bool value) override {
    bool* const to = key_ == "host" ? &m_.host : key_ == "pinned" ? &m_.pinned : nullptr;
    if (key_ == "note") return true;
    if (!to) return refuse(value ? "true" : "false");
    *to = value;
    return true;
  }
  bool number_integer(int64_t value) override { return number(static_cast<double>(value)); }
  bool number_unsigned(uint64_t value) override { return number(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) override { return number(value); }
  bool string(std::string& value) override {
    if (key_ == "note") return true;
    if (key_ == "name") return copy(value, m_.name, sizeof m_.name);
    if (key_ == "backend") return copy(value, m_.backend, sizeof m_.backend);
    return refuse("a text");
  }
  bool binary(nlohmann::json::binary_t&) override { return refuse("binary"); }
  bool start_object(size_t) override { return depth_++ == 0 || refuse("an object"); }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return depth_ == 0 ? no_object() : refuse("an array"); }
  bool end_array() override { return true; }
  bool key(std::string& value) override {
    key_ = value;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override { return no_object(); }

 private:
  bool stop(cqsa_status status) {
    status_ = status;
    return false;
  }

  bool no_object() { return stop(fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json is not a JSON object")); }

  // A value of the wrong kind, or a key that means nothing.
  bool refuse(const char* what) {
    if (depth_ == 0) return no_object();
    const char* wanted = nullptr;
    for (const char* k : {"host", "pinned"}) if (key_ == k) wanted = "true or false";
    for (const char* k : {"name", "backend", "note"}) if (key_ == k) wanted = "a text";
    if (number_of(key_)) wanted = "a number from 0 to 1e18";
    if (wanted) return stop(fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: \"%s\" is %s, wanted %s", key_.c_str(), what, wanted));
    return stop(fail(CQSA_ERROR_INVALID_ARGUMENT, "hardware_json: unknown key \"%.60s\" (see docs/planning.md)", key_.c_str()));
  }

  struct field {
    const char* key;
    double* rate;
    uint64_t* bytes;
  };

  const field* number_of(const std::string& key) const {
    for (const field& f : fields_)
      if (key == f.key) return &f;
    return nullptr;
  }

  bool number(double value) {
    char text[40];
    std::snprintf(text, sizeof text, "%g", value);
    if (key_ == "note") return true;
    const field* to = number_of(key_);
    if (depth_ == 0 || !to || !std::isfinite(value) || value < 0 || value > 1e18) return refuse(text);
    if (to->rate) *to->rate = value;
    else if (to->bytes) *to->bytes = static_cast<uint64_t>(value);
    else m_.workers = static_cast<int32_t>(std::clamp(value, 1.0, 4096.0));
    return true;
  }

  // Cut between characters, not inside one; a control character would break the one line that prints it.
  bool copy(const std::string& from, char* to, size_t size) {
    for (const char c : from)
      if (static_cast<unsigned char>(c) < 0x20) return refuse("a text with a control character");
    size_t length = std::min(from.size(), size - 1);
    while (length < from.size() && length > 0 && (from[length] & 0xC0) == 0x80) --length;
    std::memcpy(to, from.data(), length);
    to[length] = '\0';
    return true;
  }

  hardware_model& m_;
  const field fields_[14] = {{"flops_64", &m_.flops_64, nullptr},       {"flops_128", &m_.flops_128, nullptr},
                            {"flops_64_f16", &m_.flops_64_f16, nullptr}, {"flops_128_f16", &m_.flops_128_f16, nullptr},
                            {"copy_in", &m_.copy_in, nullptr},         {"copy_out", &m_.copy_out, nullptr},
                            {"host_copy", &m_.host_copy, nullptr},     {"device_copy", &m_.device_copy, nullptr},
                            {"launch_seconds", &m_.launch_seconds, nullptr}, {"parallel_blocks", &m_.parallel_blocks, nullptr},
                            {"device_bytes", nullptr, &m_.device_bytes},
                            {"device_total_bytes", nullptr, &m_.device_total_bytes},
                            {"host_bytes", nullptr, &m_.host_bytes},     {"workers", nullptr, nullptr}};
  std::string key_;
  int depth_ = 0;
  cqsa_status status_ = CQSA_OK;
};

}  // namespace

cqsa_status hardware_from_json(const char* json, hardware_model& out) {
  if (json == nullptr) return fail(CQSA_ERROR_NULL_POINTER, "hardware_json is NULL");
  hardware_model model;
  model.host = false;
  hardware_reader reader(model);
  nlohmann::json::sax_parse(json, &reader);
  CQSA_TRY(reader.status());
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
