// SPDX-License-Identifier: Apache-2.0
// cqsa attention: files in, files out, within the budget.
#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "array.h"
#include "check.h"
#include "interrupt.h"
#include "library.h"
#include "mapped_file.h"
#include "npy.h"
#include "options.h"
#include "progress.h"
#include "safetensors.h"
#include "sizes.h"

namespace tool {
namespace {

using nlohmann::ordered_json;

struct run_options {
  attention_options attention;
  std::string input, q, k, v, output, out_dtype, resume, layout = "bhsd";
  double softmax_scale = 0, softcap = 0;
  int32_t threads = 0;
  int64_t check_rows = 0;
  bool lse = false, json = false, quiet = false;
};

// Names of tensors in a .safetensors file, and where they go. Other names are left alone.
struct operand {
  const char* name;
  const cqsa_tensor* cqsa_attention_args::*field;
};
constexpr operand kOperands[] = {
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
};

// The operands: mapped files and views into them.
class inputs {
 public:
  explicit inputs(const run_options& options) {
    const bool separate = !options.q.empty() || !options.k.empty() || !options.v.empty();
    if (separate == !options.input.empty() || (separate && (options.q.empty() || options.k.empty() || options.v.empty())))
      throw std::runtime_error("one .safetensors file, or all of --q, --k and --v, is wanted");
    if (separate)
      open_npy(options);
    else
      open_safetensors(options.input);
    check_axes(options);
    if (options.layout == "bshd") swap_layout();
  }

  void bind(cqsa_attention_args& args) const {
    for (std::size_t i = 0; i < views_.size(); ++i)
      if (views_[i].present()) args.*kOperands[i].field = views_[i].get();
  }
  bool has(const char* name) const { return views_[index_of(name)].present(); }
  const file_array& array(const char* name) const { return arrays_[index_of(name)]; }
  void drop_pages() const {
    for (const mapped_file& file : files_) file.drop_pages();
  }
  void require_unchanged() const {
    for (const mapped_file& file : files_) file.require_unchanged();
  }
  bool is_one_of_them(const struct stat& status) const {
    return std::any_of(files_.begin(), files_.end(), [&](const mapped_file& file) { return file.is_file(status); });
  }

 private:
  static std::size_t index_of(const std::string& name) {
    std::size_t i = 0;
    while (i < std::size(kOperands) && name != kOperands[i].name) ++i;
    return i;
  }

  void take(const file_array& array, std::size_t index) {
    if (array.type->dtype == CQSA_DTYPE_NONE)
      throw std::runtime_error(fmt::format("tensor \"{}\" has elements {}, which no operand can have", kOperands[index].name,
                                           array.type->safetensors));
    arrays_[index] = array;
    views_[index].set(array.data, array.type->dtype, array.shape);
  }

  void open_npy(const run_options& options) {
    for (const std::string* path : {&options.q, &options.k, &options.v}) {
      files_.emplace_back(*path);
      take(read_npy(files_.back().bytes(), *path), files_.size() - 1);
    }
  }

  void open_safetensors(const std::string& path) {
    files_.emplace_back(path);
    std::string names;
    for (const file_array& array : read_safetensors(files_.back().bytes(), path)) {
      const std::size_t index = index_of(array.name);
      if (index < std::size(kOperands)) take(array, index);
      if (names.size() < 200) names += (names.empty() ? "" : ", ") + array.name;
    }
    for (const char* name : {"q", "k", "v"})
      if (!has(name)) throw std::runtime_error(fmt::format("{}: there is no tensor \"{}\"; it has: {}", path, name, names));
  }

  static const char* axes_text(bool pool, bool varlen, bool bshd) {
    if (pool) return "4 axes [pages, page_size, heads, dim]";
    if (varlen) return "3 axes [total, heads, dim]";
    return bshd ? "4 axes [batch, seq, heads, dim]" : "4 axes [batch, heads, seq, dim]";
  }

  void check_axes(const run_options& options) const {
    if (options.layout != "bhsd" && options.layout != "bshd")
      throw std::runtime_error(fmt::format("--layout \"{}\": bhsd or bshd is wanted", options.layout));
    const bool varlen = has("cu_seqlens_q");
    for (const char* name : {"q", "k", "v"}) {
      const bool pool = has("page_table") && name[0] != 'q';
      if (array(name).shape.size() != (varlen && !pool ? 3 : 4))
        throw std::runtime_error(fmt::format("\"{}\" has shape {}; {} are wanted", name, shape_text(array(name).shape),
                                             axes_text(pool, varlen, options.layout == "bshd")));
    }
  }

  // [batch, seq, heads, ..]: only q, k, v and scales that have these axes too.
  void swap_layout() {
    if (has("cu_seqlens_q")) throw std::runtime_error("--layout has no meaning for [total, heads, dim] operands");
    views_[index_of("q")].swap_middle_axes();
    for (const char* name : {"k", "v", "k_scale", "v_scale"})
      if (has(name) && !has("page_table") && array(name).shape.size() >= 3) views_[index_of(name)].swap_middle_axes();
  }

  std::vector<mapped_file> files_;
  std::array<file_array, std::size(kOperands)> arrays_;
  std::array<tensor_view, std::size(kOperands)> views_;
};

bool ends_with(const std::string& path, const char* ending) { return path.ends_with(ending); }

// out.npy -> out.lse.npy
std::string lse_path(const std::string& output) { return output.substr(0, output.size() - 4) + ".lse.npy"; }

// The results: one .safetensors file with out and lse, or one .npy file for each.
class outputs {
 public:
  outputs(const run_options& options, const inputs& in) : mode_(mode_of(options, in)) {
    const file_array& q = in.array("q");
    const cqsa_dtype dtype = options.out_dtype.empty() ? q.type->dtype : dtype_by_name(options.out_dtype);
    output_array out{"out", dtype, q.shape};
    out.shape.back() = in.array("v").shape.back();
    output_array lse{"lse", dtype == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32, q.shape};
    lse.shape.pop_back();
    // lse is [batch, heads, seq] in either layout, [heads, total] for varlen.
    if (in.has("cu_seqlens_q") || options.layout == "bshd") std::swap(lse.shape[lse.shape.size() - 2], lse.shape.back());

    text_ = fmt::format("{} {}", type_of(dtype).name, shape_text(out.shape));
    if (ends_with(options.output, ".npy")) {
      place(out_, out, options.output, npy_header(out), 0, byte_size(out));
      if (options.lse) place(lse_, lse, lse_path(options.output), npy_header(lse), 0, byte_size(lse));
    } else if (ends_with(options.output, ".safetensors")) {
      // The larger elements first, so that both are aligned.
      std::vector<output_array> arrays{out};
      if (options.lse) arrays.insert(arrays.begin(), lse);
      const int64_t before = options.lse ? byte_size(lse) : 0;
      place(out_, out, options.output, safetensors_header(arrays), before, before + byte_size(out));
      if (options.lse) lse_.set(files_[0].bytes().data() + header_size_, lse.dtype, lse.shape);
    } else {
      throw std::runtime_error(fmt::format("-o {}: a name that ends with .safetensors or .npy is wanted", options.output));
    }
    if (options.layout == "bshd") out_.swap_middle_axes();
  }

  void bind(cqsa_attention_args& args) const {
    args.out = out_.get();
    if (lse_.present()) args.lse = lse_.get();
  }
  // Disk space, then the headers; nothing is written before.
  void prepare() {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      files_[i].reserve();
      std::memcpy(files_[i].bytes().data(), headers_[i].data(), headers_[i].size());
    }
  }
  void commit() {
    for (output_file& file : files_) file.commit();
  }
  void drop_pages() const {
    for (const output_file& file : files_) file.drop_pages();
  }
  const std::string& text() const { return text_; }

 private:
  // With a state to go on from, the output that was begun is wanted; without one yet, a new file that stays.
  static output_mode mode_of(const run_options& options, const inputs& in) {
    // By any name or link: the tensors in it would be lost.
    for (const std::string& path : {options.output, ends_with(options.output, ".npy") ? lse_path(options.output) : options.output}) {
      struct stat status;
      if (::stat(path.c_str(), &status) == 0 && in.is_one_of_them(status))
        throw std::runtime_error(fmt::format("-o {}: is an input, which it would overwrite", path));
    }
    if (options.resume.empty()) return output_mode::temporary;
    std::error_code error;
    return std::filesystem::exists(options.resume, error) ? output_mode::continued : output_mode::kept;
  }

  static int64_t byte_size(const output_array& array) {
    return byte_count(array.shape, type_of(array.dtype).bytes, array.name);
  }

  // A new file of a header and `data_bytes`, and a view of the array that begins `offset` bytes into the data.
  void place(tensor_view& view, const output_array& array, const std::string& path, std::string header, int64_t offset,
             int64_t data_bytes) {
    header_size_ = header.size();
    files_.emplace_back(path, header.size() + static_cast<std::size_t>(data_bytes), mode_);
    view.set(files_.back().bytes().data() + header.size() + offset, array.dtype, array.shape);
    headers_.push_back(std::move(header));
  }

  output_mode mode_;
  std::vector<output_file> files_;
  std::vector<std::string> headers_;
  std::size_t header_size_ = 0;
  tensor_view out_, lse_;
  std::string text_;
};

// What happens between tiles.
struct run_watch {
  progress_bar bar;

  static int32_t step(void* user, int64_t done, int64_t total) {
    static_cast<run_watch*>(user)->bar.show(done, total);
    return 0;
  }
};

cqsa_run_info execute(const cqsa_plan* plan, cqsa_attention_args args, const run_options& options) {
  run_watch watch{progress_bar(!options.quiet)};
  cqsa_run_info info = CQSA_RUN_INFO_INIT;
  args.info = &info;
  args.cancel = interrupt_flag();
  args.progress = run_watch::step;
  args.progress_user = &watch;
  args.checkpoint = options.resume.empty() ? nullptr : options.resume.c_str();
  const cqsa_status status = cqsa_attention_execute(plan, &args, nullptr);
  if (status == CQSA_ERROR_CANCELLED) throw interrupted_error(options.resume);
  require(status);
  return info;
}

// The files' resident pages count in the budget. A budget below that of the smallest blocks is still one for the library's own
// memory; the plan's line then says q=host instead of q=mapped.
plan_ptr plan_for_files(cqsa_context* context, const inputs& in, cqsa_attention_params& params) {
  if (!is_host_backend(cqsa_context_backend(context)) || params.max_host_bytes == 0) return make_plan(context, params);
  cqsa_attention_params mapped = params;
  mapped.memory_q = mapped.memory_out = CQSA_MEMORY_MAPPED;
  mapped.memory_kv = in.has("page_table") ? CQSA_MEMORY_HOST : CQSA_MEMORY_MAPPED;
  try {
    plan_ptr plan = make_plan(context, mapped);
    params = mapped;
    return plan;
  } catch (const library_error& error) {
    if (error.status != CQSA_ERROR_BUDGET_TOO_SMALL) throw;
  }
  return make_plan(context, params);
}

std::string peaks_text(const cqsa_run_info& run, const cqsa_attention_params& params) {
  std::string text = "peak";
  const auto add = [&](const char* name, uint64_t peak, uint64_t budget) {
    if (peak == 0 && budget == 0) return;
    text += fmt::format("{} {} {}", text == "peak" ? "" : ",", name, bytes_text(static_cast<double>(peak)));
    if (budget) text += fmt::format(" of {}", bytes_text(static_cast<double>(budget)));
  };
  add("device", run.peak_device_bytes, params.max_device_bytes);
  add("host", run.peak_host_bytes, params.max_host_bytes);
  add("pinned", run.peak_pinned_bytes, params.max_pinned_bytes);
  return text == "peak" ? "peak 0 B" : text;
}

ordered_json run_json(const cqsa_run_info& run, const cqsa_attention_params& params) {
  return {{"seconds", run.seconds},
          {"tasks", run.tasks},
          {"retries", run.retries},
          {"bytes_in", run.bytes_in},
          {"bytes_out", run.bytes_out},
          {"peak_device_bytes", run.peak_device_bytes},
          {"peak_host_bytes", run.peak_host_bytes},
          {"peak_pinned_bytes", run.peak_pinned_bytes},
          {"max_device_bytes", params.max_device_bytes},
          {"max_host_bytes", params.max_host_bytes},
          {"max_pinned_bytes", params.max_pinned_bytes}};
}

std::string check_text(const check_report& r) {
  std::string text = fmt::format(
      "check {} rows: max abs {:.3g} (naive {:.3g}, allowed {:.3g}), relative RMS {:.3g} (allowed {:.3g}), cosine {:.9f}",
      r.rows, r.max_abs, r.naive_max_abs, r.allowed_max_abs, r.relative_rms, r.allowed_relative_rms, r.cosine);
  if (r.has_lse) text += fmt::format(", lse max abs {:.3g} (allowed {:.3g})", r.lse_max_abs, r.lse_allowed);
  return text + (r.pass ? ": PASS" : ": FAIL");
}

ordered_json check_json(const check_report& r) {
  ordered_json json = {{"rows", r.rows},
                       {"max_abs", r.max_abs},
                       {"relative_rms", r.relative_rms},
                       {"cosine", r.cosine},
                       {"naive_max_abs", r.naive_max_abs},
                       {"naive_relative_rms", r.naive_relative_rms},
                       {"allowed_max_abs", r.allowed_max_abs},
                       {"allowed_relative_rms", r.allowed_relative_rms}};
  if (r.has_lse) json.update({{"lse_max_abs", r.lse_max_abs}, {"lse_allowed", r.lse_allowed}});
  json["pass"] = r.pass;
  return json;
}

int check_threads(int32_t asked) { return asked > 0 ? asked : std::max(1u, std::thread::hardware_concurrency()); }

int run_attention(const run_options& options) {
  const bool talk = !options.json && !options.quiet;
  if (options.check_rows < 0) throw std::runtime_error("--check wants a number of rows above 0");
  catch_signals();
  const inputs in(options);
  const context_ptr context = make_context(options.attention.backend, options.threads);

  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  options.attention.apply(params);
  options.attention.apply_budget(params, is_host_backend(cqsa_context_backend(context.get())));
  params.softmax_scale = options.softmax_scale;
  params.softcap = options.softcap;

  outputs out(options, in);
  cqsa_attention_args args = CQSA_ATTENTION_ARGS_INIT;
  in.bind(args);
  out.bind(args);
  require(cqsa_attention_params_of(context.get(), &args, &params));
  const plan_ptr plan = plan_for_files(context.get(), in, params);
  if (talk) fmt::print("{}\n", plan_line(plan.get()));
  std::fflush(stdout);

  out.prepare();
  const cqsa_run_info run = execute(plan.get(), args, options);
  if (talk) fmt::print("{}\n{}\n", plan_line(plan.get(), &run), peaks_text(run, params));
  std::fflush(stdout);

  check_report check;
  if (options.check_rows > 0)
    check = check_rows(params, args, options.check_rows, 1, check_threads(options.threads), [&] {
      if (params.memory_q == CQSA_MEMORY_MAPPED) in.drop_pages(), out.drop_pages();
    });
  if (interrupted()) throw interrupted_error();
  in.require_unchanged();
  out.commit();
  if (talk && options.check_rows > 0) fmt::print("{}\n", check_text(check));
  if (talk) fmt::print("wrote {}: out {}\n", options.output, out.text());

  if (options.json) {
    ordered_json json = {{"plan", ordered_json::parse(plan_json(plan.get()))}, {"run", run_json(run, params)}};
    if (options.check_rows > 0) json["check"] = check_json(check);
    json["output"] = options.output;
    fmt::print("{}\n", json.dump(2, ' ', false, ordered_json::error_handler_t::replace));
  }
  if (options.check_rows <= 0 || check.pass) return kExitOk;
  if (options.quiet && !options.json) fmt::print(stderr, "cqsa: {}\n", check_text(check));
  return kExitCheckFailed;
}

}  // namespace

void add_attention(CLI::App& app, int& status) {
  const auto options = std::make_shared<run_options>();
  CLI::App& command = *app.add_subcommand("attention", "Compute exact attention of the tensors in a file");
  command.add_option("input", options->input, "a .safetensors file with tensors q, k, v")->type_name("IN.safetensors");
  command.add_option("--q", options->q, "q as .npy, instead of IN.safetensors")->type_name("FILE");
  command.add_option("--k", options->k, "k as .npy")->type_name("FILE");
  command.add_option("--v", options->v, "v as .npy")->type_name("FILE");
  command.add_option("-o,--output", options->output, "result: .safetensors or .npy")->required()->type_name("FILE");
  options->attention.add_to(command);
  command.add_option("--softmax-scale", options->softmax_scale, "default: 1/sqrt(head_dim)");
  command.add_option("--softcap", options->softcap, "logits become c*tanh(logit/c)");
  command.add_option("--layout", options->layout, "axes of 4-D operands: bhsd (default) or bshd")->type_name("NAME");
  command.add_option("--threads", options->threads, "host threads; default: one per core")->check(CLI::Range(0, 4096));
  command.add_option("--out-dtype", options->out_dtype, "f16, bf16, f32 or f64; default: as q")->type_name("TYPE");
  command.add_flag("--lse", options->lse, "also write the logarithms of the softmax sums: tensor lse, or OUT.lse.npy beside OUT.npy");
  command.add_flag("--check{64}", options->check_rows, "compare so many rows (default 64) with an fp64 computation");
  command.add_option("--resume", options->resume,
                     "keep how far the run has come in this file, and go on from there when it exists")
      ->type_name("STATE");
  command.add_flag("--json", options->json, "print one JSON object with plan, run and check");
  command.add_flag("--quiet", options->quiet, "print errors only");
  command.callback([options, &status] { status = run_attention(*options); });
}

}  // namespace tool
