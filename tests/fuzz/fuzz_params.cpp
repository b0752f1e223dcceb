// SPDX-License-Identifier: Apache-2.0
// Sequences of calls with structs and tensors that are nearly right: contexts, plans, workspaces, runs and merges, made and
// destroyed in any order. The oracle: no sanitizer finding, no INTERNAL, a sentence for every refusal, a refused run changes
// no output.
#include <cstdlib>
#include <optional>

#include "tensors.h"

namespace {

using fuzz::bytes;
using fuzz::tensor;

constexpr int num_operands = 15;
constexpr const cqsa_tensor* cqsa_attention_args::* slots[num_operands] = {
    &cqsa_attention_args::q,       &cqsa_attention_args::k,    &cqsa_attention_args::v,    &cqsa_attention_args::k_scale,
    &cqsa_attention_args::v_scale, &cqsa_attention_args::mask, &cqsa_attention_args::bias, &cqsa_attention_args::alibi_slopes,
    &cqsa_attention_args::sinks,   &cqsa_attention_args::cu_seqlens_q, &cqsa_attention_args::cu_seqlens_k,
    &cqsa_attention_args::seqused_k, &cqsa_attention_args::page_table, &cqsa_attention_args::out, &cqsa_attention_args::lse};
enum { Q, K, V, K_SCALE, V_SCALE, MASK, BIAS, SLOPES, SINKS, CU_Q, CU_K, USED, PAGES, OUT, LSE };

constexpr uint64_t most_memory = 4 << 20;

// Refuses what would only cost time.
void* allocate(void*, uint64_t size, uint64_t alignment) {
  return size > most_memory ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void release(void*, void* memory, uint64_t) { std::free(memory); }

cqsa_context* make_context(int32_t threads) {
  cqsa_allocator allocator = CQSA_ALLOCATOR_INIT;
  allocator.allocate = allocate;
  allocator.release = release;
  cqsa_context_params params = CQSA_CONTEXT_PARAMS_INIT;
  params.backend = "cpu";
  params.num_threads = threads;
  params.allocator = &allocator;
  cqsa_context* context = nullptr;
  if (cqsa_context_create(&params, &context) != CQSA_OK) std::abort();
  return context;
}

bool passed(cqsa_status status) {
  if (status == CQSA_ERROR_INTERNAL || (status != CQSA_OK && *cqsa_last_error() == '\0')) std::abort();
  return status == CQSA_OK;
}

struct problem {
  cqsa_attention_params params = CQSA_ATTENTION_PARAMS_INIT;
  std::optional<tensor> operands[num_operands];

  void sizes(bytes& in) {
    auto& p = params;
    p.flags = static_cast<uint32_t>(in.byte()) | static_cast<uint32_t>(in.byte()) << 8;
    p.flags &= 0x7FF;
    p.batch = 1 + in.upto(1), p.num_kv_heads = 1 + in.upto(1), p.num_heads = p.num_kv_heads * (1 + in.upto(1));
    p.head_dim = 1 + in.upto(8), p.head_dim_v = 1 + in.upto(8);
    p.seqlen_q = in.upto(9), p.seqlen_k = in.upto(9);
    p.dtype_q = p.dtype_kv = in.one_of<cqsa_dtype>({CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16, CQSA_DTYPE_F64});
    p.dtype_out = p.dtype_q;
    if (in.byte() % 4 == 0) p.dtype_kv = in.one_of<cqsa_dtype>({CQSA_DTYPE_I8, CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2});
    if (p.dtype_kv == CQSA_DTYPE_I8) p.scale_k = p.scale_v = CQSA_SCALE_GROUP, p.kv_group = 32;
    else if (p.dtype_kv != p.dtype_q) p.scale_k = in.byte() % 4, p.scale_v = in.byte() % 4;
    if (p.flags & CQSA_ATTENTION_BIAS) p.dtype_bias = p.dtype_q;
    p.causal = in.byte() % 3;
    if (p.flags & CQSA_ATTENTION_WINDOW) p.window_left = in.upto(5) - 1, p.window_right = in.upto(5) - 1;
    if (p.flags & CQSA_ATTENTION_VARLEN) p.total_q = in.upto(12), p.total_k = p.flags & CQSA_ATTENTION_PAGED ? 0 : in.upto(12);
    if (p.flags & CQSA_ATTENTION_PAGED) p.page_size = 1 + in.upto(3), p.num_pages = 1 + in.upto(3);
    p.schedule = in.byte() % 4;
    if (p.schedule == CQSA_SCHEDULE_CQS) p.cqs_c = 3 * in.upto(1), p.cqs_itr = p.cqs_c ? 1 : 0, p.seqlen_k = p.seqlen_q;
    p.max_host_bytes = in.byte() % 2 ? 0 : static_cast<uint64_t>(in.byte()) << 7;
  }

  void tensors(bytes& in) {
    const auto& p = params;
    const bool varlen = p.flags & CQSA_ATTENTION_VARLEN, paged = p.flags & CQSA_ATTENTION_PAGED;
    const auto with = [](std::vector<int64_t> axes, int64_t last) { return axes.push_back(last), axes; };
    std::vector<int64_t> queries = {p.batch, p.num_heads, p.seqlen_q}, keys = {p.batch, p.num_kv_heads, p.seqlen_k};
    if (varlen) queries = {p.total_q, p.num_heads}, keys = {p.total_k, p.num_kv_heads};
    if (paged) keys = {p.num_pages, p.page_size, p.num_kv_heads};
    const cqsa_dtype lse = p.dtype_q == CQSA_DTYPE_F64 ? CQSA_DTYPE_F64 : CQSA_DTYPE_F32;
    const cqsa_dtype index = in.byte() % 2 ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64;
    const std::vector<int64_t> plane = {p.batch, p.num_heads, p.seqlen_q, p.seqlen_k};
    const auto add = [&](int which, bool wanted, cqsa_dtype dtype, const std::vector<int64_t>& shape) {
      if (wanted) operands[which].emplace().make(in, dtype, shape);
    };
    const auto add_index = [&](int which, bool wanted, cqsa_dtype dtype, const std::vector<int64_t>& shape, int64_t step) {
      if (wanted) operands[which].emplace().make_index(in, dtype, shape, step);
    };
    add(Q, true, p.dtype_q, with(queries, p.head_dim));
    add(K, true, p.dtype_kv, with(keys, p.head_dim));
    add(V, true, p.dtype_kv, with(keys, p.head_dim_v));
    for (const auto& [which, kind] : {std::pair{K_SCALE, p.scale_k}, {V_SCALE, p.scale_v}}) {
      add(which, kind == CQSA_SCALE_TENSOR, CQSA_DTYPE_F32, {1});
      add(which, kind == CQSA_SCALE_HEAD, CQSA_DTYPE_F32, {p.num_kv_heads});
      add(which, kind == CQSA_SCALE_TOKEN, CQSA_DTYPE_F32, keys);
      add(which, kind == CQSA_SCALE_GROUP, CQSA_DTYPE_F16, with(keys, 1));
    }
    add(MASK, p.flags & CQSA_ATTENTION_MASK, CQSA_DTYPE_BOOL, plane);
    add(BIAS, p.flags & CQSA_ATTENTION_BIAS, p.dtype_bias, plane);
    add(SLOPES, p.flags & CQSA_ATTENTION_ALIBI, CQSA_DTYPE_F32, {p.num_heads});
    add(SINKS, p.flags & CQSA_ATTENTION_SINKS, CQSA_DTYPE_F32, {p.num_heads});
    add_index(CU_Q, varlen, index, {p.batch + 1}, std::min(p.total_q, p.seqlen_q) / p.batch);
    add_index(CU_K, varlen && !paged, index, {p.batch + 1}, std::min(p.total_k, p.seqlen_k) / p.batch);
    add_index(USED, p.flags & CQSA_ATTENTION_SEQUSED_K, index, {p.batch}, 1);
    add_index(PAGES, paged, CQSA_DTYPE_I32, {p.batch, (p.seqlen_k + std::max<int64_t>(p.page_size, 1) - 1) / std::max<int64_t>(p.page_size, 1)}, 0);
    add(OUT, true, p.dtype_out, with(queries, p.head_dim_v));
    add(LSE, p.flags & CQSA_ATTENTION_LSE, lse, varlen ? std::vector<int64_t>{p.num_heads, p.total_q} : queries);
  }

  void make(bytes& in) {
    sizes(in);
    tensors(in);
    // Sometimes one tensor or one field is not what it should be.
    if (in.byte() % 4 == 0)
      if (auto& one = operands[in.byte() % num_operands]) one->spoil(in);
    if (in.byte() % 6 == 0) spoil_field(in);
  }

  // Any aligned 4 bytes but those of the struct's size.
  void spoil_field(bytes& in) {
    const size_t at = 4 + 4 * (in.byte() % ((sizeof params - 4) / 4));
    const auto value = static_cast<uint32_t>(in.number());
    std::memcpy(reinterpret_cast<char*>(&params) + at, &value, sizeof value);
  }

  bool honest() const {
    return std::all_of(std::begin(operands), std::end(operands), [](const auto& t) { return !t || t->honest(); });
  }
  cqsa_attention_args args() {
    cqsa_attention_args a = CQSA_ATTENTION_ARGS_INIT;
    for (int i = 0; i < num_operands; ++i)
      if (operands[i]) a.*slots[i] = &operands[i]->view;
    return a;
  }
  std::vector<char> outputs() const {
    std::vector<char> all;
    for (const int which : {OUT, LSE})
      if (operands[which]) all.insert(all.end(), operands[which]->memory.get(), operands[which]->memory.get() + operands[which]->memory_bytes);
    return all;
  }
};

int32_t stop_after(void* user, int64_t, int64_t) { return --*static_cast<int32_t*>(user) < 0; }

struct session {
  static constexpr int num_plans = 3;
  // Describing measures the machine once for each context, so the plans that are described have one that lives on.
  cqsa_context* lasting;
  cqsa_context* passing = nullptr;
  cqsa_plan* plans[num_plans] = {};
  bool lasts[num_plans] = {};
  problem problems[num_plans];

  explicit session(cqsa_context* context) : lasting(context) {}
  ~session() {
    cqsa_context_destroy(passing);
    for (cqsa_plan* plan : plans) cqsa_plan_destroy(plan);
  }

  void create(bytes& in, int at, bool raw) {
    cqsa_plan_destroy(plans[at]);
    plans[at] = nullptr;
    problems[at] = problem();
    if (raw) in.fill(&problems[at].params, sizeof(cqsa_attention_params)), problems[at].params.struct_size = sizeof(cqsa_attention_params);
    else problems[at].make(in);
    lasts[at] = in.byte() % 2;
    if (!lasts[at] && !passing) passing = make_context(1);
    cqsa_context* const context = lasts[at] ? lasting : passing;
    const bool possible = passed(cqsa_attention_query(context, &problems[at].params));
    if (passed(cqsa_attention_plan_create(context, &problems[at].params, &plans[at])) != possible) std::abort();
  }

  void plan_elsewhere(bytes& in, int at) {
    const char* const machine = in.byte() % 2 ? "{\"host\": true, \"flops_64\": 1e11, \"workers\": 4}"
                                              : "{\"flops_64\": 1e13, \"copy_in\": 1e10, \"copy_out\": 1e10, \"device_bytes\": 1e9}";
    cqsa_plan* plan = nullptr;
    if (passed(cqsa_attention_plan_create_for(machine, &problems[at].params, &plan))) describe(in, plan);
    cqsa_plan_destroy(plan);
  }

  void describe(bytes& in, const cqsa_plan* plan) {
    char text[300];
    const uint64_t size = in.byte();
    uint64_t length = 0;
    cqsa_plan_info info = CQSA_PLAN_INFO_INIT;
    passed(cqsa_plan_describe(plan, &info));
    passed(cqsa_plan_line(plan, nullptr, text, size, &length));
    passed(cqsa_plan_json(plan, text, size, &length));
    passed(cqsa_plan_explain(plan, text, size, &length));
  }

  // Only with operands that a caller could have: see tensor::honest().
  void run(bytes& in, int at, bool planned) {
    problem& p = problems[at];
    if (!p.honest() || (planned && !plans[at])) return;
    cqsa_attention_args args = p.args();
    int32_t countdown = in.byte() % 4;
    if (in.byte() % 4 == 0) args.progress = stop_after, args.progress_user = &countdown;
    cqsa_run_info info = CQSA_RUN_INFO_INIT;
    if (in.byte() % 2) args.info = &info;
    void* workspace = nullptr;
    if (planned && in.byte() % 2) workspace = provide(plans[at], args);
    if (in.byte() % 16 == 0) p.params.num_heads = 0;
    const std::vector<char> before = p.outputs();
    const cqsa_status status = planned ? cqsa_attention_execute(plans[at], &args, nullptr) : cqsa_attention(lasting, &p.params, &args, nullptr);
    const bool refused = !passed(status) && status < CQSA_ERROR_CANCELLED;
    if (refused && p.outputs() != before) std::abort();
    std::free(workspace);
  }

  void* provide(const cqsa_plan* plan, cqsa_attention_args& args) {
    uint64_t size = 0;
    if (!passed(cqsa_workspace_query(plan, &size)) || size > most_memory) return nullptr;
    void* const workspace = std::aligned_alloc(64, (size + 63) / 64 * 64);
    passed(cqsa_workspace_init(plan, workspace, size));
    args.workspace = workspace, args.workspace_bytes = size;
    return workspace;
  }

  void complete(int at) {
    const cqsa_attention_args args = problems[at].args();
    if (problems[at].honest()) passed(cqsa_attention_params_of(lasting, &args, &problems[at].params));
  }

  void merge(bytes& in) {
    tensor t[6];
    std::vector<int64_t> shape;
    for (int64_t axes = 1 + in.upto(3); axes > 0; --axes) shape.push_back(in.upto(3));
    for (int i = 0; i < 6; ++i) {
      std::vector<int64_t> sizes = shape;
      if (i % 2 == 0) sizes.push_back(1 + in.upto(7));
      t[i].make(in, CQSA_DTYPE_F32, sizes);
    }
    if (in.byte() % 2) t[in.byte() % 6].spoil(in);
    for (const tensor& one : t)
      if (!one.honest()) return;
    cqsa_attention_merge_args args = CQSA_ATTENTION_MERGE_ARGS_INIT;
    args.out_a = &t[0].view, args.lse_a = &t[1].view, args.out_b = &t[2].view, args.lse_b = &t[3].view;
    args.out = in.byte() % 2 ? &t[0].view : &t[4].view, args.lse = in.byte() % 2 ? &t[3].view : &t[5].view;
    passed(cqsa_attention_merge(lasting, &args, nullptr));
  }

  // Formats, types and shapes that mostly fit; cells and pages are whatever the bytes say.
  void cache(bytes& in) {
    const int kind = in.byte() % 5;
    const cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
    const cqsa_dtype pool = kind < 3 ? floats[kind] : kind == 3 ? CQSA_DTYPE_I8 : CQSA_DTYPE_U8;
    const int64_t rows = in.upto(3), heads = in.upto(2), dim = kind == 4 ? 32 << in.upto(2) : in.upto(70);
    const int64_t pages = in.upto(3), size = in.upto(3), columns = in.upto(3);
    tensor x, cells, table, pool_tensor, scale;
    x.make(in, floats[in.byte() % 3], {rows, heads, dim});
    pool_tensor.make(in, pool, {pages, size, heads, kind == 4 ? dim / 32 * 18 : dim});
    scale.make(in, CQSA_DTYPE_F16, {pages, size, heads, (dim + 63) / 64});
    cells.make(in, in.byte() % 2 ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64, {rows});
    table.make(in, CQSA_DTYPE_I32, in.byte() % 2 ? std::vector<int64_t>{columns} : std::vector<int64_t>{rows, columns});
    for (tensor* one : {&x, &pool_tensor, &scale, &cells, &table}) {
      if (in.byte() % 16 == 0) one->spoil(in);
      if (!one->honest()) return;
    }
    cqsa_kv_args args = CQSA_KV_ARGS_INIT;
    args.x = &x.view, args.pool = &pool_tensor.view, args.page_table = &table.view, args.cells = &cells.view;
    args.scale = kind == 3 ? &scale.view : nullptr, args.format = kind == 4;
    if (in.byte() % 16 == 0) args.kv_group = in.byte(), args.format = in.byte();
    passed(in.byte() % 2 ? cqsa_kv_append(lasting, &args, nullptr) : cqsa_kv_gather(lasting, &args, nullptr));
    passed(cqsa_hadamard(lasting, &x.view, in.byte() % 2 ? &x.view : &scale.view, nullptr));
  }

  // Formats and shapes that mostly fit; the blocks and the row numbers are whatever the bytes say.
  void quant(bytes& in) {
    const cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
    cqsa_quant_format_info info = CQSA_QUANT_FORMAT_INFO_INIT;
    const cqsa_quant_format format = in.byte() % 30;
    if (!passed(cqsa_quant_format_query(format, &info))) info.block_elements = info.block_bytes = 1;
    const int64_t rows = in.upto(3), blocks = in.upto(2), count = in.byte() % 4 ? rows : in.upto(3);
    tensor data, values, ids;
    data.make(in, CQSA_DTYPE_U8, {rows, blocks * info.block_bytes});
    values.make(in, floats[in.byte() % 3], {count, blocks * info.block_elements});
    ids.make_index(in, in.byte() % 2 ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64, {count}, 1);
    if (in.byte() % 4 == 0) values.spoil(in);
    if (in.byte() % 8 == 0) ids.spoil(in);
    if (!data.honest() || !values.honest() || !ids.honest()) return;
    cqsa_quant_tensor w = CQSA_QUANT_TENSOR_INIT;
    w.format = format, w.device_type = CQSA_DEVICE_CPU, w.data = data.view.data, w.rows = rows, w.row_elements = blocks * info.block_elements;
    w.data_bytes = static_cast<uint64_t>(data.memory_bytes);  // so that larger sizes are refused
    if (in.byte() % 4 == 0) w.row_elements = in.number();
    if (in.byte() % 4 == 0) w.rows = in.number();
    if (in.byte() % 4 == 0) w.row_bytes = static_cast<uint64_t>(in.number());
    if (w.data_bytes == 0 && w.rows != 0 && w.row_elements != 0) return;  // 0 is "not stated"
    if (in.byte() % 16 == 0) w.device_type = in.byte() % 16, w.reserved = in.byte() % 2, w.flags = in.byte() % 2;
    passed(cqsa_dequantize_rows(lasting, &w, in.byte() % 4 ? 0 : in.number(), in.byte() % 2 ? &ids.view : nullptr, &values.view, nullptr));
    passed(cqsa_quantize_rows(lasting, &values.view, &w, nullptr));
  }

  // One block of experts whose size is stated, so that larger sizes are refused; numbers and blocks are whatever the bytes say.
  static bool weights(bytes& in, tensor& data, int64_t experts, int64_t rows, int64_t elements, cqsa_moe_weights& w) {
    cqsa_quant_format_info info = CQSA_QUANT_FORMAT_INFO_INIT;
    const cqsa_quant_format format = in.one_of<cqsa_quant_format>({CQSA_QUANT_F32, CQSA_QUANT_BF16, CQSA_QUANT_Q4_0, CQSA_QUANT_Q5_1, CQSA_QUANT_Q8_0, CQSA_QUANT_MXFP4});
    if (!passed(cqsa_quant_format_query(format, &info))) std::abort();
    data.make(in, CQSA_DTYPE_U8, {experts, rows, elements / info.block_elements * info.block_bytes});
    w.num_experts = experts, w.rows = rows, w.row_elements = elements;
    w.all.format = in.byte() % 16 ? format : in.byte() % 30, w.all.data = data.view.data, w.all.data_bytes = static_cast<uint64_t>(data.memory_bytes);
    if (in.byte() % 16 == 0) w.num_experts = in.number();
    if (in.byte() % 16 == 0) w.rows = in.number();
    if (in.byte() % 16 == 0) w.all.row_bytes = static_cast<uint64_t>(in.number());
    if (in.byte() % 16 == 0) w.expert_bytes = static_cast<uint64_t>(in.number());
    if (in.byte() % 16 == 0) w.all.device_type = in.byte() % 16, w.all.flags = in.byte() % 4;
    return w.all.data_bytes != 0;
  }

  void moe(bytes& in) {
    const cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
    const int64_t tokens = in.upto(3), k = in.upto(3), experts = 1 + in.upto(3), hidden = 32 * in.upto(2), inter = 32 * (1 + in.upto(1));
    const cqsa_dtype index = in.byte() % 2 ? CQSA_DTYPE_I32 : CQSA_DTYPE_I64;
    const int32_t layout = in.byte() % 4, activation = in.byte() % 8;
    tensor t[9], data[3];  // x, ids, weights, out, map, codes, scales, offsets, order
    cqsa_moe_weights w[3] = {CQSA_MOE_WEIGHTS_INIT, CQSA_MOE_WEIGHTS_INIT, CQSA_MOE_WEIGHTS_INIT};
    t[0].make(in, floats[in.byte() % 3], {tokens, hidden});
    t[1].make_index(in, index, {tokens, k}, 1);
    t[2].make(in, CQSA_DTYPE_F32, {tokens, k});
    t[3].make(in, CQSA_DTYPE_F32, {in.byte() % 2 ? tokens : tokens * k, hidden});
    t[4].make_index(in, CQSA_DTYPE_I32, {1 + in.upto(5)}, 1);
    t[5].make(in, CQSA_DTYPE_I8, {tokens, hidden});
    t[6].make(in, CQSA_DTYPE_F32, {tokens, hidden / 32});
    t[7].make(in, index, {experts + 1});
    t[8].make(in, index, {tokens * k});
    if (in.byte() % 2) t[in.byte() % 9].spoil(in);
    for (const tensor& one : t)
      if (!one.honest()) return;
    if (!weights(in, data[0], experts, layout == 0 ? inter : 2 * inter, hidden, w[0]) || !weights(in, data[1], experts, inter, hidden, w[1]) ||
        !weights(in, data[2], experts, hidden, inter, w[2]))
      return;
    cqsa_moe_args args = CQSA_MOE_ARGS_INIT;
    args.x = &t[0].view, args.topk_ids = &t[1].view, args.topk_weights = &t[2].view, args.out = &t[3].view;
    args.w_gate = activation < 3 ? &w[0] : nullptr, args.w_up = layout == 0 ? &w[1] : nullptr, args.w_down = &w[2];
    args.gate_up_layout = layout, args.activation = activation, args.precision = in.byte() % 4, args.output = in.byte() % 3;
    if (in.byte() % 2) args.expert_map = &t[4].view;
    if (in.byte() % 4 == 0) args.max_bytes = static_cast<uint64_t>(in.number());
    uint64_t bytes_needed = 0;
    char text[100];
    passed(cqsa_moe_workspace(lasting, &args, &bytes_needed));
    passed(cqsa_moe_explain(lasting, &args, text, sizeof text, nullptr));
    passed(cqsa_moe_prefill(lasting, &args, nullptr));
    passed(cqsa_moe_quantize_activations(lasting, &t[0].view, &t[5].view, &t[6].view, nullptr));
    cqsa_moe_group_args group = CQSA_MOE_GROUP_ARGS_INIT;
    group.topk_ids = &t[1].view, group.offsets = &t[7].view, group.order = &t[8].view, group.expert_map = args.expert_map;
    passed(cqsa_moe_group(lasting, &group, nullptr));
    cqsa_moe_combine_args combine = CQSA_MOE_COMBINE_ARGS_INIT;
    combine.y = &t[3].view, combine.topk_weights = &t[2].view, combine.topk_ids = &t[1].view, combine.out = &t[0].view;
    passed(cqsa_moe_combine(lasting, &combine, nullptr));
    cqsa_moe_route_args route = CQSA_MOE_ROUTE_ARGS_INIT;
    route.logits = &t[0].view, route.topk_ids = &t[1].view, route.topk_weights = &t[2].view, route.scoring = in.byte() % 3, route.flags = in.byte() % 2;
    if (in.byte() % 2) route.num_groups = in.byte() % 9, route.topk_groups = in.byte() % 9, route.group_score = in.byte() % 3;
    passed(cqsa_moe_route(lasting, &route, nullptr));
  }

  // Lists are whatever the bytes say: without CHECK what is wrong in them is skipped.
  void selected(bytes& in) {
    const cqsa_dtype floats[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16};
    const cqsa_dtype q = floats[in.byte() % 3], kv = in.one_of<cqsa_dtype>({q, CQSA_DTYPE_F16, CQSA_DTYPE_I8});
    const int64_t rows = in.upto(3), kv_heads = in.upto(2), heads = kv_heads * in.upto(3), dim = 1 + in.upto(9), dim_v = 1 + in.upto(9);
    const int64_t pages = in.upto(3), size = in.upto(3), columns = in.upto(4), capacity = in.upto(20);
    tensor t[10];  // q, k, v, k_scale, v_scale, page_table, cells, counts, out, lse
    t[0].make(in, q, {rows, heads, dim});
    t[1].make(in, kv, {pages, size, kv_heads, dim});
    t[2].make(in, kv, {pages, size, kv_heads, dim_v});
    t[3].make(in, CQSA_DTYPE_F16, {pages, size, kv_heads, 1});
    t[4].make(in, CQSA_DTYPE_F16, {pages, size, kv_heads, 1});
    t[5].make_index(in, CQSA_DTYPE_I32, in.byte() % 2 ? std::vector<int64_t>{columns} : std::vector<int64_t>{rows, columns}, 1);
    t[6].make_index(in, CQSA_DTYPE_I32, {rows, capacity}, 1);
    t[7].make_index(in, CQSA_DTYPE_I32, {rows}, 3);
    t[8].make(in, floats[in.byte() % 3], {rows, heads, dim_v});
    t[9].make(in, CQSA_DTYPE_F32, {heads, rows});
    if (in.byte() % 2) t[in.byte() % 10].spoil(in);
    for (const tensor& one : t)
      if (!one.honest()) return;
    cqsa_attention_selected_args args = CQSA_ATTENTION_SELECTED_ARGS_INIT;
    args.q = &t[0].view, args.k = &t[1].view, args.v = &t[2].view;
    if (kv == CQSA_DTYPE_I8) args.k_scale = &t[3].view, args.v_scale = &t[4].view;
    args.page_table = &t[5].view, args.cells = &t[6].view, args.counts = &t[7].view;
    args.out = &t[8].view, args.lse = in.byte() % 4 ? &t[9].view : nullptr;
    args.flags = in.byte() % 2 ? CQSA_SELECTED_CHECK : 0, args.precision = in.byte() % 5;
    if (in.byte() % 16 == 0) args.kv_group = in.byte(), args.softmax_scale = static_cast<double>(in.number());
    uint64_t bytes_needed = 0;
    passed(cqsa_attention_selected_workspace(lasting, &args, &bytes_needed));
    passed(cqsa_attention_selected(lasting, &args, nullptr));
  }

  // Blocks, types and layouts that mostly fit; groups, scales and the ring hold whatever the bytes say.
  void fp8(bytes& in) {
    const cqsa_dtype formats[] = {CQSA_DTYPE_E4M3FN, CQSA_DTYPE_E5M2, CQSA_DTYPE_E4M3FNUZ, CQSA_DTYPE_E5M2FNUZ};
    const cqsa_dtype types[] = {CQSA_DTYPE_F32, CQSA_DTYPE_F16, CQSA_DTYPE_BF16, CQSA_DTYPE_E4M3FN};
    const int64_t blocks[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 16}, {16, 1}, {128, 128}};
    const int64_t rows = in.upto(20), cols = in.upto(20);
    const auto count = [](int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; };
    const int64_t* const block = blocks[in.byte() % 6];
    const int64_t r = count(rows, block[0]), c = count(cols, block[1]);
    const int layout = in.byte() % 3;
    tensor t[8];  // x, out, transposed, scale_in, scale, scale_inv, groups, amax
    t[0].make(in, types[in.byte() % 4], {rows, cols});
    t[1].make(in, formats[in.byte() % 4], {rows, cols});
    t[2].make(in, formats[in.byte() % 4], {cols, rows});
    t[3].make(in, CQSA_DTYPE_F32, {r, c});
    t[4].make(in, CQSA_DTYPE_F32, {r, c});
    if (layout == 0) t[5].make(in, in.byte() % 2 ? CQSA_DTYPE_F32 : CQSA_DTYPE_U8, {r, c});
    if (layout == 1) t[5].make(in, CQSA_DTYPE_I32, {r, (c + 3) / 4});
    if (layout == 2) t[5].make(in, CQSA_DTYPE_E8M0FNU, {(r + 127) / 128 * ((c + 3) / 4) * 512});
    t[6].make_index(in, CQSA_DTYPE_I32, {1 + in.upto(3)}, 1);
    t[7].make(in, CQSA_DTYPE_F32, {1});
    if (in.byte() % 2) t[in.byte() % 8].spoil(in);
    for (const tensor& one : t)
      if (!one.honest()) return;
    cqsa_fp8_quantize_args args = CQSA_FP8_QUANTIZE_ARGS_INIT;
    args.x = &t[0].view, args.source = in.byte() % 2, args.nan_policy = in.byte() % 2, args.flags = in.byte() % 4, args.margin = in.byte() % 9 - 4;
    if (t[0].view.dtype == CQSA_DTYPE_E4M3FN) args.x_scale_inv = &t[3].view, args.x_block[0] = block[0], args.x_block[1] = block[1];
    for (cqsa_fp8_side* side : {&args.row, &args.transposed}) {
      if (in.byte() % 4 == 0) continue;
      side->out = side == &args.row ? &t[1].view : &t[2].view, side->block[0] = block[0], side->block[1] = block[1];
      if (args.source == CQSA_FP8_STATIC) side->scale_in = &t[3].view;
    }
    if (args.row.out) args.row.scale = &t[4].view, args.row.scale_inv = &t[5].view, args.row.scale_layout = layout;
    args.amax = &t[7].view;
    if (in.byte() % 4 == 0) args.groups = &t[6].view;
    const cqsa_fp8_quantize_args* const list[] = {&args};
    uint64_t bytes_needed = 0;
    passed(cqsa_fp8_quantize_workspace(lasting, list, 1, &bytes_needed));
    passed(cqsa_fp8_quantize(lasting, &args, nullptr));
    cqsa_fp8_dequantize_args back = CQSA_FP8_DEQUANTIZE_ARGS_INIT;
    back.codes = &t[1].view, back.scale_inv = &t[5].view, back.scale_layout = layout, back.out = &t[0].view, back.groups = args.groups;
    back.block[0] = block[0], back.block[1] = block[1];
    passed(cqsa_fp8_dequantize(lasting, &back, nullptr));
    passed(cqsa_fp8_transpose(lasting, &t[1].view, &t[2].view, nullptr));
    passed(cqsa_fp8_scale_relayout(lasting, &t[5].view, layout, &t[4].view, 0, r, c, nullptr));
    cqsa_fp8_gemm_args product = CQSA_FP8_GEMM_ARGS_INIT;
    product.a = &t[1].view, product.b = &t[2].view, product.d = &t[4].view;
    passed(cqsa_fp8_gemm(lasting, &product, nullptr));
  }

  void step(bytes& in) {
    const int at = in.byte() % num_plans;
    switch (in.byte() % 15) {
      case 0: case 1: create(in, at, false); break;
      case 2: create(in, at, true); break;
      case 3: case 4: run(in, at, true); break;
      case 5: case 6: run(in, at, false); break;
      case 7: merge(in); break;
      case 8: complete(at); break;
      case 9: plan_elsewhere(in, at); break;
      case 11: cache(in); break;
      case 12: selected(in); break;
      case 13: fp8(in); break;
      case 10:
        if (plans[at] && lasts[at]) describe(in, plans[at]);
        break;
      case 14: in.byte() % 2 ? quant(in) : moe(in); break;
      default: cqsa_context_destroy(passing), passing = nullptr; break;
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static cqsa_context* const context = make_context(2);
  bytes in(data, size);
  session s(context);
  for (int steps = 0; steps < 24 && !in.empty(); ++steps) s.step(in);
  return 0;
}
