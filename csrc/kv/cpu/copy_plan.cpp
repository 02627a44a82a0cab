#include "kv/cpu/copy_plan.h"

#include <algorithm>
#include <cstring>

#include "kv/cpu/stream.h"

namespace torch_mooncake::kv {
namespace {

constexpr int64_t kPartNbytes = 1 << 20;          // a page larger than this is shared out between threads
constexpr int64_t kGrainNbytes = 256 << 10;       // what one thread must have to do to be worth its wake-up
constexpr int64_t kNonTemporalNbytes = 32 << 20;  // below, the copy may well be read again from a cache
constexpr int64_t kPieceNbytes = 64;              // shorter runs are copied element by element

// Collects pieces and copies them a batch at a time.
class Batch {
 public:
  explicit Batch(bool non_temporal) : non_temporal_(non_temporal) {}
  ~Batch() { flush(); }
  void add(std::byte* dst, const std::byte* src, int64_t nbytes) {
    pieces_[filled_++] = {dst, src, static_cast<size_t>(nbytes)};
    if (filled_ == kBatch) flush();
  }

 private:
  void flush() {
    copy_pieces({pieces_, filled_}, non_temporal_);
    filled_ = 0;
  }
  static constexpr size_t kBatch = 64;
  Piece pieces_[kBatch];
  size_t filled_ = 0;
  bool non_temporal_;
};

// One run of a strided page for every step of its innermost dimension.
template <typename T>
void copy_row(std::byte* dst, const std::byte* src, const CopyDim& dim) {
  for (int64_t i = 0; i < dim.size; ++i) std::memcpy(dst + i * dim.dst_stride, src + i * dim.src_stride, sizeof(T));
}

void copy_row(std::byte* dst, const std::byte* src, const CopyDim& dim, int64_t nbytes) {
  switch (nbytes) {
    case 1:
      return copy_row<uint8_t>(dst, src, dim);
    case 2:
      return copy_row<uint16_t>(dst, src, dim);
    case 4:
      return copy_row<uint32_t>(dst, src, dim);
    case 8:
      return copy_row<uint64_t>(dst, src, dim);
    case 16:
      return copy_row<std::pair<uint64_t, uint64_t>>(dst, src, dim);
    default:
      for (int64_t i = 0; i < dim.size; ++i)
        std::memcpy(dst + i * dim.dst_stride, src + i * dim.src_stride, static_cast<size_t>(nbytes));
  }
}

// fn(dst, src) for every index of the dimensions.
template <typename Fn>
void for_each(const CopyDim* dims, int num_dims, std::byte* dst, const std::byte* src, const Fn& fn) {
  if (num_dims == 0) return fn(dst, src);
  for (int64_t i = 0; i < dims->size; ++i)
    for_each(dims + 1, num_dims - 1, dst + i * dims->dst_stride, src + i * dims->src_stride, fn);
}

}  // namespace

CopyPlan::CopyPlan(const PageCopy& copy)
    : copy_(copy), page_(copy.page), non_temporal_(copy.nbytes() >= kNonTemporalNbytes) {
  if (page_.num_dims == 0) {
    parts_ = (page_.run_nbytes + kPartNbytes - 1) / kPartNbytes;
    part_nbytes_ = std::min(page_.run_nbytes, kPartNbytes);
    return;
  }
  part_nbytes_ = page_.page_nbytes();
  while (part_nbytes_ > kPartNbytes && outer_dims_ + 1 < page_.num_dims) {
    parts_ *= page_.dims[outer_dims_].size;
    part_nbytes_ /= page_.dims[outer_dims_++].size;
  }
}

int64_t CopyPlan::grain() const { return std::max<int64_t>(1, kGrainNbytes / part_nbytes_); }

void CopyPlan::run(int64_t begin, int64_t end) const {
  page_.num_dims == 0 ? run_contiguous(begin, end) : run_strided(begin, end);
}

CopyPlan::Place CopyPlan::place(int64_t region, int64_t i) const {
  return {copy_.regions[region].src + copy_.src_ids[i] * copy_.src_page_stride,
          copy_.regions[region].dst + copy_.dst_ids[i] * copy_.dst_page_stride};
}

CopyPlan::Place CopyPlan::part(Place page, int64_t index) const {
  for (int d = outer_dims_ - 1; d >= 0; --d) {
    const CopyDim& dim = page_.dims[d];
    page.src += index % dim.size * dim.src_stride;
    page.dst += index % dim.size * dim.dst_stride;
    index /= dim.size;
  }
  return page;
}

void CopyPlan::run_contiguous(int64_t begin, int64_t end) const {
  Batch batch(non_temporal_);
  int64_t part = begin % parts_, i = begin / parts_ % copy_.count(), region = begin / parts_ / copy_.count();
  for (int64_t unit = begin; unit < end; ++unit) {
    Place page = place(region, i);
    int64_t offset = part * kPartNbytes;
    batch.add(page.dst + offset, page.src + offset, std::min(kPartNbytes, page_.run_nbytes - offset));
    if (++part < parts_) continue;
    part = 0;
    if (++i < copy_.count()) continue;
    i = 0;
    ++region;
  }
}

void CopyPlan::run_strided(int64_t begin, int64_t end) const {
  Batch batch(non_temporal_);
  const CopyDim* inner = page_.dims + outer_dims_;
  const int inner_dims = page_.num_dims - outer_dims_;
  for (int64_t unit = begin; unit < end; ++unit) {
    int64_t page_index = unit / parts_;
    Place at = part(place(page_index / copy_.count(), page_index % copy_.count()), unit % parts_);
    if (page_.run_nbytes >= kPieceNbytes) {
      for_each(inner, inner_dims, at.dst, at.src,
               [&](std::byte* dst, const std::byte* src) { batch.add(dst, src, page_.run_nbytes); });
    } else {
      for_each(inner, inner_dims - 1, at.dst, at.src, [&](std::byte* dst, const std::byte* src) {
        copy_row(dst, src, inner[inner_dims - 1], page_.run_nbytes);
      });
    }
  }
}

}  // namespace torch_mooncake::kv
