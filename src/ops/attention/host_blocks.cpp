// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/host_blocks.h"

#include <cinttypes>
#include <cstring>

#include "ops/attention/checkpoint.h"
#include "ops/attention/host_mapped.h"
#include "ops/attention/positions.h"
#include "tensor.h"

namespace cqsa {

namespace {

struct block_sizes {
  int64_t heads, rows, keys;  // key heads, query rows, keys of a window
};

// Without windows a block has work for all threads several times over, so that waiting for the last of them costs little.
// Pages of keys are looked up by item, not by rectangle: there a block is all rows of an item.
block_sizes sizes_of(const attention_problem& problem, const schedule_choice& choice) {
  const auto& p = problem.p;
  const int64_t all_rows = std::max<int64_t>(1, p.seqlen_q), all_keys = std::max<int64_t>(1, p.seqlen_k);
  block_sizes sizes{1, std::min(all_rows, choice.leaf_tile_q * 8 * choice.workers), all_keys};
  if (in_windows(problem, choice)) sizes = {choice.group_heads, choice.tile_q, choice.tile_k};
  if (problem.paged()) sizes.rows = all_rows, sizes.keys = all_keys;
  return sizes;
}

// ---- one batch item ---------------------------------------------------------------------------------------------------------

int64_t index_at(const void* array, cqsa_dtype type, int64_t i) {
  return type == CQSA_DTYPE_I64 ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

void skip_rows(cqsa_view& view, int64_t rows) {
  if (view.data) view.data = static_cast<char*>(view.data) + rows * view.stride[2] * dtype_bytes(view.dtype);
}

const void* entry_of(const void* array, cqsa_dtype type, int64_t i) {
  return array ? static_cast<const char*>(array) + i * dtype_bytes(type) : nullptr;
}

// Paged: the lengths and pages of the item alone.
void select_pages(const cqsa_attention_leaf& whole, int64_t item, cqsa_attention_leaf& leaf) {
  for (cqsa_view* view : {&leaf.k, &leaf.v, &leaf.k_scale, &leaf.v_scale})  // axis 0 of a pool is the page, not the item
    if (view->data) view->data = static_cast<char*>(view->data) - item * view->stride[0] * dtype_bytes(view->dtype);
  leaf.page_table = whole.page_table + item * whole.page_table_stride[0];
  leaf.cu_seqlens_q = entry_of(whole.cu_seqlens_q, whole.index_dtype, item);
  leaf.seqused_k = entry_of(whole.seqused_k, static_cast<cqsa_dtype>(whole.seqused_dtype), item);
}

// The item as a problem without lengths of its own, which is the form that rectangles need.
void select_segment(const cqsa_attention_leaf& whole, int64_t item, cqsa_attention_leaf& leaf) {
  const auto segment = [&](const void* starts, int64_t& length) {
    if (!starts) return int64_t{0};
    const int64_t first = index_at(starts, whole.index_dtype, item);
    length = index_at(starts, whole.index_dtype, item + 1) - first;
    return first;
  };
  const int64_t first_row = segment(whole.cu_seqlens_q, leaf.seqlen_q);
  const int64_t first_key = segment(whole.cu_seqlens_k, leaf.seqlen_k);
  for (cqsa_view* view : {&leaf.q, &leaf.out, &leaf.lse}) skip_rows(*view, first_row);
  for (cqsa_view* view : {&leaf.k, &leaf.v, &leaf.k_scale, &leaf.v_scale}) skip_rows(*view, first_key);
  if (whole.seqused_k) leaf.seqlen_k = index_at(whole.seqused_k, static_cast<cqsa_dtype>(whole.seqused_dtype), item);
  leaf.cu_seqlens_q = leaf.cu_seqlens_k = leaf.seqused_k = nullptr;
}

// ---- the run ------------------------------------------------------------------------------------------------------------------

class block_runner {
 public:
  block_runner(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout)
      : run_(run), problem_(run.plan->problem), choice_(run.plan->choice), whole_(whole), layout_(layout),
        windows_(in_windows(problem_, choice_)), sizes_(sizes_of(problem_, choice_)), pages_(problem_) {}

  cqsa_status go() {
    if (windows_) CQSA_TRY(prepare_windows());
    head_groups_ = divided_up(problem_.p.num_kv_heads, sizes_.heads);
    row_blocks_ = divided_up(std::max<int64_t>(1, problem_.p.seqlen_q), sizes_.rows);
    run_.total = problem_.p.batch * head_groups_ * row_blocks_;
    const char* path = run_.args->checkpoint;
    if (path == nullptr) {
      clear_tail();
      return go_from(0, nullptr);
    }
    checkpoint saved;
    CQSA_TRY(open_checkpoint(path, saved));
    clear_tail();
    const cqsa_status status = go_from(saved.done(), &saved);
    if (status == CQSA_OK) return saved.remove();
    saved.save_quietly();  // the reason of the failure is already written
    return status;
  }

 private:
  // A block: its leaf and rows.
  struct block {
    cqsa_attention_leaf leaf;
    int64_t row, rows;
  };

  block block_at(int64_t index) const {
    const int64_t rows_before = index % row_blocks_ * sizes_.rows;
    const int64_t group = index / row_blocks_ % head_groups_, item = index / row_blocks_ / head_groups_;
    const int64_t head = group * sizes_.heads;
    block b{group_leaf(whole_, choice_, item, head, std::min(sizes_.heads, problem_.p.num_kv_heads - head)), rows_before, 0};
    problem_.paged() ? select_pages(whole_, item, b.leaf) : select_segment(whole_, item, b.leaf);
    b.rows = std::max<int64_t>(0, std::min(sizes_.rows, b.leaf.seqlen_q - b.row));
    return b;
  }

  // The plan counted compact operands. Strides that spread what is touched over more pages get smaller blocks instead; no
  // bit depends on their size, since windows begin at multiples of the leaf's tile.
  cqsa_status prepare_windows() {
    CQSA_TRY(pages_.find(whole_));
    mapped_budget_ = run_.plan->cost.host - run_.plan->cost.workspace;
    while (resident(sizes_) > mapped_budget_)
      if (!shrink(sizes_))
        return fail(CQSA_ERROR_BUDGET_TOO_SMALL,
                    "params->max_host_bytes leaves %" PRIu64 " bytes for pages of mapped operands, but with the strides they have "
                    "the smallest block touches %" PRIu64,
                    mapped_budget_, resident(sizes_));
    run_.info.tile_q = sizes_.rows;
    run_.info.tile_k = sizes_.keys;
    return CQSA_OK;
  }

  // Rows and keys in turn, so that neither is passed over needlessly often.
  bool shrink(block_sizes& sizes) const {
    const auto halve = [](int64_t& size, int64_t step) {
      if (size <= step) return false;
      size = std::max(step, divided_up(size / 2, step) * step);
      return true;
    };
    if (problem_.paged()) return halve(sizes.heads, 1);
    const bool keys_first = choice_.window_state && sizes.keys > sizes.rows;
    if (keys_first && halve(sizes.keys, choice_.leaf_tile_k)) return true;
    return halve(sizes.rows, choice_.leaf_tile_q) || (choice_.window_state && halve(sizes.keys, choice_.leaf_tile_k)) ||
           halve(sizes.heads, 1);
  }

  void clear_tail() const {
    if (!problem_.varlen()) return;
    clear_rows_past_segments(problem_, whole_);
    const int64_t last = index_at(whole_.cu_seqlens_q, whole_.index_dtype, whole_.batch);
    if (windows_) pages_.drop_rows(whole_, {last, problem_.p.total_q - last, 0, 0});
  }

  uint64_t resident(const block_sizes& sizes) const {
    cqsa_attention_leaf leaf = whole_;
    leaf.num_kv_heads = sizes.heads;
    leaf.num_heads = sizes.heads * problem_.ratio();
    return resident_bytes(problem_, leaf, sizes.rows, std::min(sizes.keys, most_keys_of_rows(problem_, sizes.rows, choice_.leaf_tile_k)));
  }

  cqsa_status open_checkpoint(const char* path, checkpoint& saved) {
    const schedule_choice& c = choice_;
    fingerprint shape;
    attention_problem unbounded = problem_;  // another budget that leads to the same plan is fine
    unbounded.p.max_host_bytes = unbounded.p.max_device_bytes = unbounded.p.max_pinned_bytes = 0;
    shape.add(&unbounded.p, sizeof unbounded.p);
    const int64_t plan[] = {c.schedule, sizes_.heads, sizes_.rows, sizes_.keys, c.leaf_tile_q, c.leaf_tile_k};
    shape.add(plan, sizeof plan);
    shape.add(run_.plan->impl->name, std::strlen(run_.plan->impl->name));
    mapped_range outputs[2];
    CQSA_TRY(find_shared_outputs(problem_, whole_, outputs));
    CQSA_TRY(saved.open(path, shape.value(), fingerprint_of_operands(problem_, whole_), run_.total, outputs));
    run_.done = saved.done();
    return check_outputs(saved);
  }

  // What the checkpoint says is finished must be in the outputs.
  cqsa_status check_outputs(const checkpoint& saved) const {
    fingerprint seen;
    for (int64_t i = 0; i < saved.done(); ++i) {
      const block b = block_at(i);
      seen.add_rows(b.leaf.out, b.leaf.lse, b.leaf.num_heads, b.row, b.rows, b.leaf.head_dim_v);
      drop_rows(b);
      CQSA_TRY(poll_run(run_, 0));
    }
    return saved.check_outputs(seen);
  }

  cqsa_status go_from(int64_t first, checkpoint* saved) {
    for (int64_t i = first; i < run_.total; ++i) {
      const block b = block_at(i);
      if (b.rows > 0) CQSA_TRY(compute(b));
      if (saved) saved->outputs().add_rows(b.leaf.out, b.leaf.lse, b.leaf.num_heads, b.row, b.rows, b.leaf.head_dim_v);
      drop_rows(b);
      if (saved) CQSA_TRY(saved->finished(i + 1));
      CQSA_TRY(poll_run(run_, 1));
    }
    return CQSA_OK;
  }

  void drop_rows(const block& b) const {
    if (windows_) pages_.drop_rows(b.leaf, {b.row, b.rows, 0, 0});
  }

  cqsa_status compute(const block& b) {
    if (problem_.paged()) {
      count_resident(b, 0);
      return launch_host(run_, b.leaf, layout_, false);
    }
    const key_range seen = key_band::of(problem_.p, b.leaf.seqlen_q, b.leaf.seqlen_k).of_rows(b.row, b.rows, b.leaf.seqlen_k);
    // Tiles of the leaf begin at the same keys however the rows are cut into blocks and the keys into windows.
    const int64_t begin = seen.begin / choice_.leaf_tile_k * choice_.leaf_tile_k;
    if (seen.length() == 0) return compute_window(b, 0, 0, true, true);
    for (int64_t key = begin; key < seen.end;) {
      const int64_t keys = std::min(sizes_.keys, seen.end - key), next = key + keys;
      if (windows_ && next < seen.end) pages_.want_keys(b.leaf, {b.row, 0, next, std::min(sizes_.keys, seen.end - next)});
      CQSA_TRY(compute_window(b, key, keys, key == begin, next >= seen.end));
      key = next;
    }
    return CQSA_OK;
  }

  cqsa_status compute_window(const block& b, int64_t key, int64_t keys, bool first, bool last) {
    cqsa_attention_leaf leaf = b.leaf;
    const cqsa_rect rect{b.row, key, b.rows, keys, b.row, key, 0};
    leaf.rects = &rect;
    leaf.num_rects = 1;
    leaf.flags = (first ? 0 : CQSA_LEAF_STATE_IN) | (last ? 0 : CQSA_LEAF_STATE_OUT);
    leaf.state_acc = layout_.acc;
    leaf.state_m = layout_.m;
    leaf.state_l = layout_.l;
    leaf.state_rows = b.rows;
    count_resident(b, keys);
    const cqsa_status status = launch_host(run_, leaf, layout_, false);
    if (windows_) pages_.drop_keys(b.leaf, {b.row, b.rows, key, keys});
    return status;
  }

  void count_resident(const block& b, int64_t keys) {
    if (!windows_) return;
    const uint64_t bytes = run_.plan->cost.workspace + resident_bytes(problem_, b.leaf, b.rows, keys);
    run_.info.peak_host_bytes = std::max(run_.info.peak_host_bytes, bytes);
  }

  run_state& run_;
  const attention_problem& problem_;
  const schedule_choice& choice_;
  const cqsa_attention_leaf& whole_;
  const host_layout& layout_;
  const bool windows_;
  block_sizes sizes_;
  mapped_pages pages_;
  uint64_t mapped_budget_ = 0;
  int64_t head_groups_ = 1, row_blocks_ = 1;
};

}  // namespace

bool in_windows(const attention_problem& problem, const schedule_choice& choice) {
  return problem.mapped() && choice.schedule == CQSA_SCHEDULE_STREAM;
}

int64_t most_keys_of_rows(const attention_problem& problem, int64_t rows, int64_t step) {
  const key_band band = key_band::of(problem.p, problem.p.seqlen_q, problem.p.seqlen_k);
  if (band.low == -key_band::far || band.high == key_band::far) return problem.p.seqlen_k;
  return std::clamp<int64_t>(rows + band.high - band.low + step, 0, problem.p.seqlen_k);
}

bool has_several_windows(const attention_problem& problem, const schedule_choice& choice) {
  return in_windows(problem, choice) && choice.tile_k < most_keys_of_rows(problem, choice.tile_q, choice.leaf_tile_k);
}

int64_t window_tasks(const attention_problem& problem, const schedule_choice& choice) {
  const auto& p = problem.p;
  const int64_t groups = p.batch * divided_up(p.num_kv_heads, choice.group_heads);
  const int64_t row_blocks = divided_up(std::max<int64_t>(1, p.seqlen_q), choice.tile_q);
  if (!has_several_windows(problem, choice)) return groups * row_blocks;
  const key_band band = key_band::of(p, p.seqlen_q, p.seqlen_k);
  // Exact up to some thousands of blocks; beyond, from evenly spaced ones, so that planning takes no time.
  constexpr int64_t looked_at = 4096;
  const int64_t every = divided_up(row_blocks, looked_at);
  int64_t windows = 0;
  for (int64_t row = 0; row < p.seqlen_q; row += choice.tile_q * every) {
    const key_range seen = band.of_rows(row, std::min(choice.tile_q, p.seqlen_q - row), p.seqlen_k);
    windows += std::max<int64_t>(1, divided_up(seen.end - seen.begin / choice.leaf_tile_k * choice.leaf_tile_k, choice.tile_k));
  }
  return groups * windows * every;
}

cqsa_status run_blocks(run_state& run, const cqsa_attention_leaf& whole, const host_layout& layout) {
  return block_runner(run, whole, layout).go();
}

}  // namespace cqsa
