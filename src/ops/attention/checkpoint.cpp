// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/checkpoint.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>

#include "tensor.h"

namespace cqsa {

namespace {

constexpr char magic[9] = "cqsaCKPT";
constexpr uint32_t format_version = 1;
constexpr int64_t samples = 32;          // rows of an operand that are looked at
constexpr int64_t sampled_columns = 64;  // .. of a mask or bias
// Saving may cost a fiftieth of the time: rarely on a slow disk, often where it is cheap. A crash loses at most this much work.
constexpr int cost_factor = 50;
constexpr auto longest_wait = std::chrono::seconds(5);

uint64_t mixed(uint64_t value, uint64_t word) {
  value = (value ^ word) * 0x9fb21c651e98df25u;
  return value ^ value >> 32;
}

struct descriptor {
  int fd;
  ~descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

cqsa_status io_error(const char* path, const char* what) {
  return fail(CQSA_ERROR_IO, "checkpoint %.300s %s: %s", path, what, std::strerror(errno));
}

}  // namespace

void fingerprint::add(const void* bytes, size_t count) {
  const auto* from = static_cast<const unsigned char*>(bytes);
  uint64_t word;
  for (; count >= sizeof word; from += sizeof word, count -= sizeof word) {
    std::memcpy(&word, from, sizeof word);
    value_ = mixed(value_, word);
  }
  word = 0;
  std::memcpy(&word, from, count);
  value_ = mixed(value_, word ^ static_cast<uint64_t>(count) << 56);
}

void fingerprint::add_row(const cqsa_view& view, int64_t batch, int64_t head, int64_t row, int64_t channels) {
  const int64_t bytes = dtype_bytes(view.dtype);
  const char* from = static_cast<const char*>(view.data) +
                     (batch * view.stride[0] + head * view.stride[1] + row * view.stride[2]) * bytes;
  if (view.stride[3] == 1) return add(from, static_cast<size_t>(channels * bytes));
  for (int64_t c = 0; c < channels; ++c) add(from + c * view.stride[3] * bytes, static_cast<size_t>(bytes));
}

void fingerprint::add_rows(const cqsa_view& out, const cqsa_view& lse, int64_t heads, int64_t row, int64_t rows, int64_t channels) {
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t i = row; i < row + rows; ++i) {
      add_row(out, 0, head, i, channels);
      if (lse.data) add_row(lse, 0, head, i, 1);
    }
}

uint64_t fingerprint_of_operands(const attention_problem& problem, const cqsa_attention_leaf& whole) {
  const auto& p = problem.p;
  fingerprint print;
  const auto sample = [&](const cqsa_view& view, int64_t items, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t all = items * heads * rows;
    if (view.data == nullptr || all <= 0 || columns <= 0) return;
    for (int64_t i = 0, n = std::min(all, samples); i < n; ++i) {
      const int64_t at = n == 1 ? 0 : static_cast<int64_t>(static_cast<double>(all - 1) / static_cast<double>(n - 1) * static_cast<double>(i));
      print.add_row(view, at / rows / heads, at / rows % heads, at % rows, columns);
    }
  };
  const int64_t q_items = problem.varlen() ? 1 : p.batch, q_rows = problem.varlen() ? p.total_q : p.seqlen_q;
  const int64_t k_items = problem.paged() ? p.num_pages : q_items;
  const int64_t k_rows = problem.paged() ? p.page_size : problem.varlen() ? p.total_k : p.seqlen_k;
  const bool q_here = p.memory_q != CQSA_MEMORY_DEVICE;
  if (q_here) sample(whole.q, q_items, p.num_heads, q_rows, p.head_dim);
  if (p.memory_kv != CQSA_MEMORY_DEVICE) {
    sample(whole.k, k_items, p.num_kv_heads, k_rows, p.head_dim);
    sample(whole.v, k_items, p.num_kv_heads, k_rows, p.head_dim_v);
    sample(whole.k_scale, k_items, p.num_kv_heads, k_rows, 1);
    sample(whole.v_scale, k_items, p.num_kv_heads, k_rows, 1);
  }
  if (!q_here) return print.value();
  for (const cqsa_view* plane : {&whole.mask, &whole.bias})
    sample(*plane, p.batch, p.num_heads, p.seqlen_q, std::min(p.seqlen_k, sampled_columns));
  for (const cqsa_view* small : {&whole.slopes, &whole.sinks}) sample(*small, p.batch, p.num_heads, 1, 1);
  const auto all_of = [&](const void* array, int64_t bytes, int64_t count) {
    if (array) print.add(array, static_cast<size_t>(bytes * count));
  };
  all_of(whole.cu_seqlens_q, dtype_bytes(whole.index_dtype), p.batch + 1);
  all_of(whole.cu_seqlens_k, dtype_bytes(whole.index_dtype), p.batch + 1);
  all_of(whole.seqused_k, dtype_bytes(whole.seqused_dtype), p.batch);
  if (whole.page_table)
    for (int64_t b = 0, pages = (p.seqlen_k + p.page_size - 1) / p.page_size; b < p.batch; ++b)
      for (int64_t i = 0; i < pages; ++i)
        print.add(whole.page_table + b * whole.page_table_stride[0] + i * whole.page_table_stride[1], sizeof(int32_t));
  return print.value();
}

uint64_t checkpoint::checksum_of(const record& r) {
  fingerprint sum;
  sum.add(&r, offsetof(record, checksum));
  return sum.value();
}

cqsa_status checkpoint::open(const char* path, uint64_t problem, uint64_t operands, int64_t total, const mapped_range outputs[2]) {
  path_ = path;
  ranges_[0] = outputs[0], ranges_[1] = outputs[1];
  std::memcpy(record_.magic, magic, sizeof record_.magic);
  record_.version = format_version;
  record_.bytes = sizeof(record);
  record_.problem = problem;
  record_.operands = operands;
  record_.total = total;
  const descriptor file{::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0 && errno == ENOENT) return save();
  if (file.fd < 0) return io_error(path, "cannot be opened");
  record found;
  CQSA_TRY(read(file.fd, found));
  CQSA_TRY(check(found));
  record_.done = saved_ = found.done;
  outputs_.set(found.outputs);
  return CQSA_OK;
}

cqsa_status checkpoint::read(int file, record& out) const {
  struct stat status;
  if (::fstat(file, &status) != 0) return io_error(path_, "cannot be examined");
  if (!S_ISREG(status.st_mode)) return fail(CQSA_ERROR_IO, "checkpoint %.300s is not a regular file", path_);
  const ssize_t got = ::read(file, &out, sizeof out);
  if (got < 0) return io_error(path_, "cannot be read");
  const bool ours = got >= 16 && std::memcmp(out.magic, magic, sizeof out.magic) == 0;
  if (!ours) return fail(CQSA_ERROR_CHECKPOINT, "checkpoint %.300s is not one of this library", path_);
  if (out.version != format_version)
    return fail(CQSA_ERROR_CHECKPOINT, "checkpoint %.300s has format %u, this library reads %u", path_, out.version, format_version);
  if (got != sizeof out || status.st_size != sizeof out || out.checksum != checksum_of(out))
    return fail(CQSA_ERROR_CHECKPOINT, "checkpoint %.300s is damaged: %lld bytes of %zu, or the checksum is wrong", path_,
                static_cast<long long>(status.st_size), sizeof out);
  return CQSA_OK;
}

cqsa_status checkpoint::check(const record& found) const {
  if (found.problem != record_.problem || found.total != record_.total || found.done < 0 || found.done > found.total)
    return fail(CQSA_ERROR_CHECKPOINT,
                "checkpoint %.300s belongs to another problem or plan (other sizes, options, number of threads or budget)", path_);
  if (found.operands != record_.operands)
    return fail(CQSA_ERROR_CHECKPOINT, "checkpoint %.300s belongs to other inputs: their values have changed since", path_);
  return CQSA_OK;
}

cqsa_status checkpoint::check_outputs(const fingerprint& seen) const {
  if (seen.value() == outputs_.value()) return CQSA_OK;
  return fail(CQSA_ERROR_CHECKPOINT, "checkpoint %.300s says that %" PRId64 " of %" PRId64
                                     " tiles are finished, but the outputs do not have their values",
              path_, record_.done, record_.total);
}

cqsa_status checkpoint::sync_outputs() const {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (const mapped_range& r : ranges_) {
    if (r.begin == r.end) continue;
    const uintptr_t from = r.begin / page * page;
    if (::msync(reinterpret_cast<void*>(from), r.end - from, MS_SYNC) != 0)
      return fail(CQSA_ERROR_IO, "an output cannot be written to its file: %s", std::strerror(errno));
  }
  return CQSA_OK;
}

cqsa_status checkpoint::write_temporary(const char* name) const {
  const descriptor file{::open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
  if (file.fd < 0) return io_error(name, "cannot be created");
  errno = 0;
  const ssize_t wrote = ::write(file.fd, &record_, sizeof record_);
  if (wrote != sizeof record_ && errno == 0) errno = ENOSPC;
  if (wrote != sizeof record_ || ::fsync(file.fd) != 0) return io_error(name, "cannot be written");
  return CQSA_OK;
}

cqsa_status checkpoint::save() {
  if (saved_ == record_.done) return CQSA_OK;
  char temporary[4096];
  if (std::snprintf(temporary, sizeof temporary, "%s.tmp", path_) >= static_cast<int>(sizeof temporary))
    return fail(CQSA_ERROR_INVALID_ARGUMENT, "args->checkpoint is a path of %zu bytes, wanted at most %zu", std::strlen(path_),
                sizeof temporary - 5);
  const auto start = clock::now();
  record_.outputs = outputs_.value();
  record_.checksum = checksum_of(record_);
  CQSA_TRY(sync_outputs());
  const cqsa_status status = write_temporary(temporary);
  if (status != CQSA_OK) {
    ::unlink(temporary);
    return status;
  }
  if (std::rename(temporary, path_) != 0) return io_error(path_, "cannot be replaced");
  saved_ = record_.done;
  const auto now = clock::now();
  next_ = now + std::min<clock::duration>(cost_factor * (now - start), longest_wait);
  return CQSA_OK;
}

cqsa_status checkpoint::finished(int64_t done) {
  record_.done = done;
  return clock::now() < next_ ? CQSA_OK : save();
}

void checkpoint::save_quietly() {
  char kept[512];
  std::snprintf(kept, sizeof kept, "%s", cqsa_last_error());
  if (save() != CQSA_OK) fail(CQSA_ERROR_IO, "%s", kept);
}

cqsa_status checkpoint::remove() {
  CQSA_TRY(sync_outputs());
  if (::unlink(path_) != 0 && errno != ENOENT) return io_error(path_, "cannot be removed");
  return CQSA_OK;
}

}  // namespace cqsa
