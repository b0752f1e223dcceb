// SPDX-License-Identifier: Apache-2.0
// How far a stream run on a device has come, tile by tile of the plan, in the file that host runs use too.
#pragma once
#include "ops/attention/checkpoint.h"
#include "ops/attention/device_run.h"

namespace cqsa {

class device_checkpoint final : public tile_listener {
 public:
  // Reads the file or begins one. Fills where the run goes on; false: every tile is finished.
  cqsa_status open(device_run& run, query_tile& first_out, bool& all_done);
  bool is_open() const { return open_; }

  cqsa_status finished(device_run& run, const query_tile& tile) override;
  // Tiles of another plan follow, which the file cannot tell from the rest: what it says stays true.
  void freeze() { frozen_ = true; }
  void save_quietly() {
    if (open_) saved_.save_quietly();
  }
  cqsa_status remove() { return open_ ? saved_.remove() : CQSA_OK; }

 private:
  void measure(const device_run& run);
  int64_t group_of(const query_tile& tile) const { return tile.group.item / items_ * head_groups_ + tile.group.head / heads_; }
  int64_t tiles_before(const query_tile& tile) const { return group_of(tile) * row_tiles_ + tile.q / rows_; }
  cqsa_status check_finished(device_run& run, query_tile& first_out);
  static void add_tile(device_run& run, const query_tile& tile, fingerprint& to);

  checkpoint saved_;
  bool open_ = false, frozen_ = false;
  int64_t items_ = 1, heads_ = 1, rows_ = 1;  // of a tile
  int64_t item_groups_ = 1, head_groups_ = 1, row_tiles_ = 1;
};

}  // namespace cqsa
