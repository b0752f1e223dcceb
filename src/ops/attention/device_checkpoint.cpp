// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/device_checkpoint.h"

#include <cstring>

#include "tensor.h"

namespace cqsa {

void device_checkpoint::measure(const device_run& run) {
  const auto groups = [](int64_t all, int64_t step) { return (all + step - 1) / step; };
  const auto& p = run.problem.p;
  items_ = run.g.items, heads_ = run.g.heads, rows_ = run.g.rows;
  item_groups_ = groups(p.batch, items_);
  head_groups_ = groups(p.num_kv_heads, heads_);
  row_tiles_ = groups(std::max<int64_t>(1, p.seqlen_q), rows_);
}

cqsa_status device_checkpoint::open(device_run& run, query_tile& first_out, bool& all_done) {
  const cqsa_attention_args& args = *run.run.args;
  if (*args.checkpoint == 0) return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->checkpoint is an empty path");
  if (run.g.cqs)
    return fail(CQSA_ERROR_UNSUPPORTED, "args->checkpoint is given, but the plan's schedule is cqs, which keeps partial results; "
                                        "direct and stream take a checkpoint");
  mapped_range outputs[2];
  CQSA_TRY(find_shared_outputs(run.problem, run.whole, outputs));
  measure(run);
  fingerprint shape;
  attention_problem unbounded = run.problem;  // another budget that leads to the same plan is fine
  unbounded.p.max_host_bytes = unbounded.p.max_device_bytes = unbounded.p.max_pinned_bytes = 0;
  shape.add(&unbounded.p, sizeof unbounded.p);
  const schedule_choice& c = run.choice;
  const int64_t plan[] = {c.schedule, items_, heads_, rows_, run.g.keys, c.leaf_tile_q, c.leaf_tile_k};
  shape.add(plan, sizeof plan);
  shape.add(run.impl->name, std::strlen(run.impl->name));
  const int64_t total = item_groups_ * head_groups_ * row_tiles_;
  CQSA_TRY(saved_.open(args.checkpoint, shape.value(), fingerprint_of_operands(run.problem, run.whole), total, outputs));
  open_ = true;
  all_done = saved_.done() == total;
  return check_finished(run, first_out);
}

// What the file says is finished must be in the outputs. Leaves behind the first tile that is not.
cqsa_status device_checkpoint::check_finished(device_run& run, query_tile& first_out) {
  const auto& p = run.problem.p;
  fingerprint seen;
  for (int64_t index = 0; index < saved_.done(); index += row_tiles_) {
    const int64_t group = index / row_tiles_, item = group / head_groups_ * items_, head = group % head_groups_ * heads_;
    device_group g;
    CQSA_TRY(run.make_group(item, std::min(items_, p.batch - item), head, std::min(heads_, p.num_kv_heads - head), g));
    for (int64_t q = 0, tile = index; q < g.seqlen_q && tile < saved_.done(); q += rows_, ++tile) {
      const query_tile finished{g, q, std::min(rows_, g.seqlen_q - q)};
      add_tile(run, finished, seen);
      CQSA_TRY(run.done(g, finished.rows));
    }
  }
  const int64_t group = saved_.done() / row_tiles_;
  first_out = {};
  first_out.group.item = group / head_groups_ * items_;
  first_out.group.items = items_;
  first_out.group.head = group % head_groups_ * heads_;
  first_out.group.heads = heads_;
  first_out.q = saved_.done() % row_tiles_ * rows_;
  return saved_.check_outputs(seen);
}

// Rows are read in small pieces, whose pages are let go where they count.
void device_checkpoint::add_tile(device_run& run, const query_tile& tile, fingerprint& to) {
  constexpr int64_t piece_bytes = 64 << 10;
  const int64_t channels = run.problem.p.head_dim_v, rows = std::max<int64_t>(1, piece_bytes / run.problem.out_row_bytes());
  const cqsa_view out = run.out_of(run.whole.out, tile.group), lse = run.out_of(run.whole.lse, tile.group);
  cqsa_attention_leaf one = run.whole;
  one.num_heads = one.num_kv_heads = 1;
  for (int64_t item = 0; item < tile.group.items; ++item)
    for (int64_t head = 0; head < tile.group.q_heads; ++head) {
      one.out = moved(out, item, head, 0, 0);
      one.lse = moved(lse, item, head, 0, 0);
      one.q = {};
      for (int64_t row = tile.q, end = tile.q + tile.rows; row < end; row += rows) {
        const int64_t count = std::min(rows, end - row);
        to.add_rows(one.out, one.lse, 1, row, count, channels);
        if (run.session.mapped) run.pages.drop_rows(one, {row, count, 0, 0});
      }
    }
}

cqsa_status device_checkpoint::finished(device_run& run, const query_tile& tile) {
  if (!open_ || frozen_) return CQSA_OK;
  add_tile(run, tile, saved_.outputs());
  const bool last_of_group = tile.q + tile.rows >= tile.group.seqlen_q;
  return saved_.finished(last_of_group ? (group_of(tile) + 1) * row_tiles_ : tiles_before(tile) + 1);
}

}  // namespace cqsa
