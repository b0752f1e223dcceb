// SPDX-License-Identifier: Apache-2.0
// CQSA_SELECTED_CHECK: looks at the lists before anything is computed.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "ops/sparse/selected.h"

namespace cqsa {

namespace {

constexpr int64_t piece_bytes = int64_t{1} << 20;  // of a list, in host memory at a time

// A list of int32 by query and entry, read in order or nearly so. In host memory it is read in place; in device memory a piece of it
// is copied when what is asked for is not in the piece that is here.
class list_reader {
 public:
  list_reader(const cqsa_context& context, const int32_t* data, int64_t rows, int64_t row_stride, int64_t columns, int64_t stride,
              void* stream)
      : context_(context), first_(reinterpret_cast<const char*>(data)), row_stride_(row_stride), stride_(stride), stream_(stream) {
    if (rows == 0 || columns == 0) return;  // nobody reads, and its strides may be anything
    for (const int64_t reach : {(rows - 1) * row_stride, (columns - 1) * stride}) (reach < 0 ? low_ : high_) += 4 * reach;
    high_ += 4;
  }
  ~list_reader() { host_release(context_, piece_, uint64_t(size_)); }
  list_reader(const list_reader&) = delete;
  list_reader& operator=(const list_reader&) = delete;

  cqsa_status read(int64_t row, int64_t column, int32_t& value_out) {
    const int64_t at = 4 * (row * row_stride_ + column * stride_);
    if (context_.is_host()) return std::memcpy(&value_out, first_ + at, 4), CQSA_OK;
    if (at < begin_ || at + 4 > end_) CQSA_TRY(bring(at));
    return std::memcpy(&value_out, static_cast<const char*>(piece_) + (at - begin_), 4), CQSA_OK;
  }

 private:
  // The piece that begins with the entry, or where the list runs backwards ends with it.
  cqsa_status bring(int64_t at) {
    const cqsa_backend_v1& backend = *context_.backend;
    size_ = std::min(piece_bytes, high_ - low_);
    if (piece_ == nullptr) piece_ = host_allocate(context_, uint64_t(size_));
    if (piece_ == nullptr) return fail(CQSA_ERROR_OUT_OF_HOST_MEMORY, "the allocation of %" PRId64 " bytes of host memory failed", size_);
    const int64_t begin = stride_ < 0 ? std::max(low_, at + 4 - size_) : std::min(at, high_ - size_);
    begin_ = end_ = 0;  // nothing is here until it has come
    cqsa_status status = backend.copy(context_.device, piece_, first_ + begin, uint64_t(size_), CQSA_COPY_TO_HOST, stream_);
    if (status == CQSA_OK) status = backend.stream_sync(context_.device, stream_);
    if (status != CQSA_OK)
      return fail(status, "copying the lists to the host failed on backend %s: %s", backend.name, backend.last_error());
    begin_ = begin;
    end_ = begin + size_;
    return CQSA_OK;
  }

  const cqsa_context& context_;
  const char* first_;
  int64_t row_stride_, stride_;
  void* stream_;
  int64_t low_ = 0, high_ = 0;  // bytes from the first to one past the last of the list, counted from first_
  void* piece_ = nullptr;
  int64_t size_ = 0, begin_ = 0, end_ = 0;  // what of the list is in piece_
};

struct lists {
  const cqsa_selected_leaf& leaf;
  list_reader counts, cells, pages;

  cqsa_status check_page(int64_t i, int64_t entry) {
    int32_t page = 0;
    CQSA_TRY(pages.read(i, entry, page));
    if (page >= -1 && page < leaf.num_pages) return CQSA_OK;
    return fail(CQSA_ERROR_INDEX, "args->page_table has page %" PRId32 " as entry %" PRId64 " for query %" PRId64 ", wanted -1 to %" PRId64
                                  " (num_pages - 1)", page, entry, i, leaf.num_pages - 1);
  }

  cqsa_status check_cell(int64_t i, int64_t n, int64_t before, int64_t& cell_out) {
    int32_t cell = 0;
    CQSA_TRY(cells.read(i, n, cell));
    cell_out = cell;
    if (cell < 0) return fail(CQSA_ERROR_INDEX, "args->cells[%" PRId64 "][%" PRId64 "] is %" PRId32 ", wanted at least 0", i, n, cell);
    if (cell <= before)
      return fail(CQSA_ERROR_INDEX, "args->cells[%" PRId64 "][%" PRId64 "] is %" PRId32 ", wanted more than the entry before it, %" PRId64,
                  i, n, cell, before);
    if (cell / leaf.page_size < leaf.pages) return CQSA_OK;
    return fail(CQSA_ERROR_INDEX,
                "args->cells[%" PRId64 "][%" PRId64 "] is %" PRId32 ", which is in page %" PRId64
                " of the sequence, but "
                "args->page_table has %" PRId64 " pages of %" PRId64 " cells",
                i, n, cell, cell / leaf.page_size, leaf.pages, leaf.page_size);
  }

  cqsa_status check_query(int64_t i) {
    int32_t count = 0;
    CQSA_TRY(counts.read(i, 0, count));
    if (count < 0 || count > leaf.capacity)
      return fail(CQSA_ERROR_INDEX, "args->counts[%" PRId64 "] is %" PRId32 ", wanted 0 to %" PRId64 ", the capacity of args->cells", i,
                  count, leaf.capacity);
    int64_t cell = -1, entry = -1;
    for (int64_t n = 0; n < count; ++n) {
      CQSA_TRY(check_cell(i, n, cell, cell));
      if (cell / leaf.page_size == entry) continue;
      entry = cell / leaf.page_size;
      CQSA_TRY(check_page(i, entry));
    }
    return CQSA_OK;
  }
};

}  // namespace

cqsa_status check_selection(const cqsa_context& context, const cqsa_selected_leaf& a, void* stream) {
  lists all{a,
            {context, a.counts, a.total_q, a.counts_stride, 1, 1, stream},
            {context, a.cells, a.total_q, a.cells_stride[0], a.capacity, a.cells_stride[1], stream},
            {context, a.page_table, a.total_q, a.page_table_stride[0], a.pages, a.page_table_stride[1], stream}};
  for (int64_t i = 0; i < a.total_q; ++i) CQSA_TRY(all.check_query(i));
  return CQSA_OK;
}

}  // namespace cqsa
