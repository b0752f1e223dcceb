// SPDX-License-Identifier: Apache-2.0
// A plan in numbers, as one line, as JSON, and with its losers.
#include "ops/attention/describe.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstring>

#include "json_object.h"

namespace cqsa {

namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  char text[768];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 5; ++unit) bytes /= 1024;
  return format(unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return format("%.1f us", seconds * 1e6);
  if (seconds < 1) return format("%.2f ms", seconds * 1e3);
  return format("%.2f s", seconds);
}

const char* memory_name(int32_t memory) {
  const char* const names[] = {"host", "pinned", "device", "tile", "mapped"};
  return memory >= 0 && memory < 5 ? names[memory] : "?";
}

const char* schedule_name(int32_t schedule) {
  const char* const names[] = {"auto", "direct", "stream", "cqs"};
  return schedule >= 0 && schedule < 4 ? names[schedule] : "?";
}

// Where an operand is while the kernels work.
int32_t place(const cqsa_plan& plan, int32_t memory, bool whole_on_device) {
  if (plan.hardware.host) return memory == CQSA_MEMORY_MAPPED ? memory : CQSA_MEMORY_HOST;
  return memory == CQSA_MEMORY_DEVICE || whole_on_device ? CQSA_MEMORY_DEVICE : CQSA_MEMORY_TILE;
}

int32_t accumulator_place(const schedule_choice& choice, bool host) {
  if (choice.schedule != CQSA_SCHEDULE_CQS) return CQSA_MEMORY_TILE;
  return host || choice.accumulator_on_host ? CQSA_MEMORY_HOST : CQSA_MEMORY_DEVICE;
}

int32_t in_flight(const schedule_choice& choice, bool host) { return host ? choice.workers : choice.buffers; }

// The plan's numbers with those of a run in their place.
void replace_by_run(const cqsa_run_info& run, cqsa_plan_info& info) {
  info.tasks = run.tasks;
  info.peak_host_bytes = run.peak_host_bytes;
  info.peak_device_bytes = run.peak_device_bytes;
  info.peak_pinned_bytes = run.peak_pinned_bytes;
  info.bytes_in = run.bytes_in;
  info.bytes_out = run.bytes_out;
  info.schedule = run.schedule;
  info.cqs_c = run.cqs_c;
  info.cqs_itr = run.cqs_itr;
  info.in_flight = run.in_flight;
  info.place_acc = run.place_acc;
  info.tile_q = run.tile_q;
  info.tile_k = run.tile_k;
}

std::string candidate_text(const candidate_note& note, bool host) {
  const schedule_choice& c = note.choice;
  std::string text = format("  %-6s", schedule_name(c.schedule));
  if (c.schedule == CQSA_SCHEDULE_CQS)
    text += format(" c=%d itr=%d %s%s", c.c, c.itr, c.operands_resident ? "operands resident " : "",
                   c.accumulator_on_host ? "accumulator on host" : "");
  text += format(" tile %" PRId64 "x%" PRId64 " group %" PRId64 "x%" PRId64, c.tile_q, c.tile_k, c.group_batch, c.group_heads);
  text += host ? format(" threads %d", c.workers) : format(" buffers %d%s", c.buffers, c.staging.pinned ? " pinned" : "");
  return text + ": " + seconds_text(note.seconds) + ", peak " +
         bytes_text(static_cast<double>(host ? note.cost.host : note.cost.device)) + ": " + note.verdict + "\n";
}

// The chosen and its best rivals; a list of thousands explains nothing.
std::string candidates_text(const std::vector<candidate_note>& notes, bool host) {
  constexpr size_t shown = 40;
  std::vector<const candidate_note*> order;
  for (const candidate_note& note : notes) order.push_back(&note);
  std::stable_sort(order.begin(), order.end(), [](const candidate_note* a, const candidate_note* b) {
    const auto rank = [](const candidate_note* n) { return n->verdict == "chosen" ? 0 : n->verdict.starts_with("does not fit") ? 2 : 1; };
    return rank(a) != rank(b) ? rank(a) < rank(b) : a->seconds < b->seconds;
  });
  std::string text = format("candidates (%zu; the chosen one, those that fit, those that do not, each fastest first):\n", order.size());
  for (size_t i = 0; i < order.size() && i < shown; ++i) text += candidate_text(*order[i], host);
  if (order.size() > shown) text += format("  .. and %zu slower ones\n", order.size() - shown);
  return text;
}

// For predictions: a host backend's compute rate is measured. A device is not touched for a description, and a plan for an
// absent machine keeps what it was given.
cqsa_status machine_of(const cqsa_plan& plan, hardware_model& out) {
  out = plan.hardware;
  return plan.context && plan.hardware.host ? hardware_of(*plan.context, rates::compute, out) : CQSA_OK;
}

// A plan for sizes that nobody has may move more bytes than a number can say; converting that is undefined.
uint64_t whole_bytes(double bytes) { return bytes < 0x1p64 ? static_cast<uint64_t>(bytes) : UINT64_MAX; }

}  // namespace

cqsa_status describe_plan(const cqsa_plan& plan, cqsa_plan_info& info) {
  hardware_model machine;
  CQSA_TRY(machine_of(plan, machine));
  const schedule_choice& c = plan.choice;
  const auto& p = plan.problem.p;
  info = {};
  info.struct_size = sizeof info;
  info.schedule = c.schedule;
  info.cqs_c = c.c;
  info.cqs_itr = c.itr;
  info.in_flight = in_flight(c, plan.hardware.host);
  info.tasks = plan.cost.tasks;
  info.tile_q = c.tile_q;
  info.tile_k = c.tile_k;
  info.peak_device_bytes = plan.cost.device;
  info.peak_host_bytes = plan.cost.host;
  info.peak_pinned_bytes = plan.cost.pinned;
  info.workspace_bytes = plan.cost.workspace;
  info.bytes_in = whole_bytes(plan.cost.bytes_in);
  info.bytes_out = whole_bytes(plan.cost.bytes_out);
  info.flops = problem_flops(plan.problem);
  info.seconds = plan.problem.empty() ? 0 : predicted_seconds(plan.problem, machine, c, plan.cost);
  const bool whole = c.schedule == CQSA_SCHEDULE_DIRECT || c.operands_resident;
  info.place_q = place(plan, p.memory_q, whole);
  info.place_kv = place(plan, p.memory_kv, whole);
  info.place_acc = accumulator_place(c, plan.hardware.host);
  info.place_out = plan.hardware.host ? place(plan, p.memory_out, false) : p.memory_out;
  std::snprintf(info.implementation, sizeof info.implementation, "%s", plan.impl ? plan.impl->name : "model");
  std::snprintf(info.backend, sizeof info.backend, "%s", plan.hardware.backend);
  return CQSA_OK;
}

void report_choice(const schedule_choice& choice, bool host, cqsa_run_info& info) {
  info.schedule = choice.schedule;
  info.cqs_c = choice.c;
  info.cqs_itr = choice.itr;
  info.in_flight = in_flight(choice, host);
  info.place_acc = accumulator_place(choice, host);
  info.tile_q = choice.tile_q;
  info.tile_k = choice.tile_k;
}

cqsa_status plan_line(const cqsa_plan& plan, const cqsa_run_info* run, std::string& out) {
  cqsa_plan_info i{};
  CQSA_TRY(describe_plan(plan, i));
  if (run) replace_by_run(*run, i);
  const auto number = [](int64_t value) { return value ? std::to_string(value) : std::string("-"); };
  out = format("schedule=%s c=%s itr=%s tasks=%" PRId64 " tile=%" PRId64 "x%" PRId64
               " q=%s kv=%s acc=%s out=%s in_flight=%d backend=%s impl=%s",
               schedule_name(i.schedule), number(i.cqs_c).c_str(), number(i.cqs_itr).c_str(), i.tasks, i.tile_q,
               i.tile_k, memory_name(i.place_q), memory_name(i.place_kv), memory_name(i.place_acc), memory_name(i.place_out),
               i.in_flight, i.backend, i.implementation);
  out += " peak_host=" + bytes_text(static_cast<double>(i.peak_host_bytes));
  if (!plan.hardware.host) {
    out += " peak_device=" + bytes_text(static_cast<double>(i.peak_device_bytes));
    out += " peak_pinned=" + bytes_text(static_cast<double>(i.peak_pinned_bytes));
    out += " in=" + bytes_text(static_cast<double>(i.bytes_in));
    out += " out_bytes=" + bytes_text(static_cast<double>(i.bytes_out));
  }
  if (!run) {
    out += " predicted=" + seconds_text(i.seconds);
    return CQSA_OK;
  }
  out += " took=" + seconds_text(run->seconds);
  if (run->seconds > 0) out += format(" rate=%.1f GFLOP/s", i.flops / run->seconds * 1e-9);
  out += format(" retries=%d", run->retries);
  return CQSA_OK;
}

cqsa_status plan_json(const cqsa_plan& plan, std::string& out) {
  cqsa_plan_info i{};
  CQSA_TRY(describe_plan(plan, i));
  out = json_object()
            .add("schedule", schedule_name(i.schedule))
            .add("implementation", i.implementation)
            .add("backend", i.backend)
            .add("c", i.cqs_c)
            .add("itr", i.cqs_itr)
            .add("tasks", i.tasks)
            .add("tile_q", i.tile_q)
            .add("tile_k", i.tile_k)
            .add("in_flight", i.in_flight)
            .add("peak_device_bytes", i.peak_device_bytes)
            .add("peak_host_bytes", i.peak_host_bytes)
            .add("peak_pinned_bytes", i.peak_pinned_bytes)
            .add("workspace_bytes", i.workspace_bytes)
            .add("bytes_in", i.bytes_in)
            .add("bytes_out", i.bytes_out)
            .add("flops", i.flops)
            .add("seconds", i.seconds)
            .add("place_q", memory_name(i.place_q))
            .add("place_kv", memory_name(i.place_kv))
            .add("place_acc", memory_name(i.place_acc))
            .add("place_out", memory_name(i.place_out))
            .text();
  return CQSA_OK;
}

cqsa_status explain_plan(const cqsa_plan& plan, std::string& out) {
  CQSA_TRY(plan_line(plan, nullptr, out));
  out += "\n";
  const budget limit = budget_of(plan.problem, plan.hardware);
  const auto limit_text = [](uint64_t b) { return b == UINT64_MAX ? std::string("none") : bytes_text(static_cast<double>(b)); };
  out += "budget: host " + limit_text(limit.host);
  if (!plan.hardware.host) out += ", device " + limit_text(limit.device) + ", pinned " + limit_text(limit.pinned);
  out += "\n";
  if (plan.context) {
    const cqsa_attention_impl* impl = nullptr;
    std::string declined;
    const bool state = needs_state(plan.problem, plan.hardware) && !is_one_launch(plan.problem, plan.choice);
    CQSA_TRY(choose_implementation(*plan.context->backend, plan.problem, state, impl, &declined));
    out += "implementation: " + std::string(impl->name) + " (" + impl->requirement + ")\n" + declined;
  }
  if (plan.problem.empty()) return CQSA_OK;
  hardware_model machine;
  CQSA_TRY(machine_of(plan, machine));
  out += candidates_text(explain_schedule(plan.problem, machine, plan.impl, limit, plan.choice), plan.hardware.host);
  return CQSA_OK;
}

bool needs_state(const attention_problem& problem, const hardware_model& machine) {
  return problem.p.schedule == CQSA_SCHEDULE_CQS || (!machine.host && problem.p.schedule != CQSA_SCHEDULE_DIRECT);
}

cqsa_status copy_text(const std::string& text, char* buffer, uint64_t size, uint64_t* length_out) {
  if (buffer == nullptr && size != 0) return fail(CQSA_ERROR_NULL_POINTER, "buffer is NULL with size %" PRIu64, size);
  if (length_out) *length_out = text.size();
  if (size == 0) return CQSA_OK;
  const uint64_t count = std::min<uint64_t>(size - 1, text.size());
  std::memcpy(buffer, text.data(), count);
  buffer[count] = '\0';
  return CQSA_OK;
}

}  // namespace cqsa
