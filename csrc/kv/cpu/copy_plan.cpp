#include "kv/cpu/copy_plan.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kv/cpu/stream.h"

namespace torch_mooncake::kv {
namespace {

constexpr int64_t kPartNbytes = 1 << 20;          // a page larger than this is shared out between threads
constexpr int64_t kGrainNbytes = 256 << 10;       // what one thread must have to do to be worth its wake-up
constexpr int64_t kNonTemporalNbytes = 32 << 20;  // below, the copy may well be read again from a cache
constexpr int64_t kStridedPartNbytes = 16 << 10;  // small enough to be fetched while the one before is copied
constexpr int64_t kTurnNbytes = 256;              // of a region, before the next one of its bundle has its turn
constexpr int64_t kDenseTurnNbytes = 1024;
constexpr size_t kBundle = 16;
constexpr int64_t kLine = 64;

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

template <typename T>
void copy_elements(std::byte* dst, const std::byte* src, const CopyDim& dim) {
  for (int64_t i = 0; i < dim.size; ++i) std::memcpy(dst + i * dim.dst_stride, src + i * dim.src_stride, sizeof(T));
}

}  // namespace

CopyPlan::CopyPlan(const PageCopy& copy)
    : copy_(copy), page_(copy.page), non_temporal_(copy.nbytes() >= kNonTemporalNbytes) {
  if (strided()) {
    plan_strided();
  } else {
    parts_ = (page_.run_nbytes + kPartNbytes - 1) / kPartNbytes;
    part_nbytes_ = std::min(page_.run_nbytes, kPartNbytes);
  }
}

// Non-temporal rows of whole lines are copied in the order of the source: it is read line after line, and the several
// rows of the destination that are written in turn are what non-temporal stores like. Anything else is copied in the
// order of the destination, where neighbouring rows share lines.
void CopyPlan::plan_strided() {
  bool whole_lines = page_.run_nbytes % kLine == 0 && copy_.dst_page_stride % kLine == 0;
  for (int d = 0; d < page_.num_dims; ++d) whole_lines &= page_.dims[d].dst_stride % kLine == 0;
  for (const CopyRegion& region : copy_.regions) whole_lines &= reinterpret_cast<uintptr_t>(region.dst) % kLine == 0;
  non_temporal_ = non_temporal_ && whole_lines && can_stream_rows();
  if (non_temporal_)
    std::stable_sort(page_.dims, page_.dims + page_.num_dims, [](const CopyDim& a, const CopyDim& b) {
      return std::abs(a.src_stride) > std::abs(b.src_stride);
    });
  bundle();
  part_nbytes_ = page_.page_nbytes();
  while (part_nbytes_ > kStridedPartNbytes && outer_dims_ + 1 < page_.num_dims) {
    parts_ *= page_.dims[outer_dims_].size;
    part_nbytes_ /= page_.dims[outer_dims_++].size;
  }
}

void CopyPlan::bundle() {
  int64_t reach = page_.run_nbytes;
  for (int d = 0; d < page_.num_dims; ++d) reach += (page_.dims[d].size - 1) * std::abs(page_.dims[d].src_stride);
  regions_.assign(copy_.regions.begin(), copy_.regions.end());
  std::stable_sort(regions_.begin(), regions_.end(),
                   [](const CopyRegion& a, const CopyRegion& b) { return a.src < b.src; });
  for (size_t first = 0; first < regions_.size();) {
    size_t end = first + 1;
    while (end < regions_.size() && end - first < kBundle && regions_[end].src < regions_[first].src + reach) ++end;
    bundles_.emplace_back(regions_.data() + first, end - first);
    first = end;
  }
}

int64_t CopyPlan::grain() const { return std::max<int64_t>(1, kGrainNbytes / part_nbytes_); }

void CopyPlan::run(int64_t begin, int64_t end) const {
  strided() ? run_strided(begin, end) : run_contiguous(begin, end);
}

CopyPlan::Offset CopyPlan::page(int64_t i) const {
  return {copy_.dst_ids[i] * copy_.dst_page_stride, copy_.src_ids[i] * copy_.src_page_stride};
}

CopyPlan::Offset CopyPlan::part(int64_t index) const {
  Offset at{0, 0};
  for (int d = outer_dims_ - 1; d >= 0; --d) {
    const CopyDim& dim = page_.dims[d];
    at.src += index % dim.size * dim.src_stride;
    at.dst += index % dim.size * dim.dst_stride;
    index /= dim.size;
  }
  return at;
}

void CopyPlan::run_contiguous(int64_t begin, int64_t end) const {
  Batch batch(non_temporal_);
  int64_t part = begin % parts_, i = begin / parts_ % copy_.count(), region = begin / parts_ / copy_.count();
  for (int64_t unit = begin; unit < end; ++unit) {
    const Offset at = page(i);
    const int64_t offset = part * kPartNbytes, nbytes = std::min(kPartNbytes, page_.run_nbytes - offset);
    batch.add(copy_.regions[region].dst + at.dst + offset, copy_.regions[region].src + at.src + offset, nbytes);
    if (++part < parts_) continue;
    part = 0;
    if (++i < copy_.count()) continue;
    i = 0;
    ++region;
  }
}

void CopyPlan::run_strided(int64_t begin, int64_t end) const {
  auto offset = [&](int64_t unit) {
    const Offset of_page = page(unit / parts_ % copy_.count()), of_part = part(unit % parts_);
    return Offset{of_page.dst + of_part.dst, of_page.src + of_part.src};
  };
  Offset at = offset(begin);
  for (int64_t unit = begin; unit < end; ++unit) {
    const Offset next = unit + 1 < end ? offset(unit + 1) : at;
    copy_dims(outer_dims_, bundles_[unit / parts_ / copy_.count()], at, next.src - at.src);
    at = next;
  }
  if (non_temporal_) fence();
}

void CopyPlan::copy_dims(int first_dim, const Bundle& bundle, Offset at, int64_t ahead) const {
  const CopyDim& dim = page_.dims[first_dim];
  if (first_dim + 1 < page_.num_dims) {
    for (int64_t i = 0; i < dim.size; ++i, at.dst += dim.dst_stride, at.src += dim.src_stride)
      copy_dims(first_dim + 1, bundle, at, ahead);
    return;
  }
  // One region's rows go on while they are one piece of the source.
  const int64_t turn = dim.src_stride == page_.run_nbytes ? kDenseTurnNbytes : kTurnNbytes;
  const int64_t step = bundle.size() == 1 ? dim.size : std::max<int64_t>(1, turn / page_.run_nbytes);
  for (int64_t i = 0; i < dim.size; i += step, at.dst += step * dim.dst_stride, at.src += step * dim.src_stride) {
    const CopyDim rows{std::min(step, dim.size - i), dim.src_stride, dim.dst_stride};
    for (const CopyRegion& region : bundle) copy_rows(rows, region.dst + at.dst, region.src + at.src, ahead);
  }
}

void CopyPlan::copy_rows(const CopyDim& rows, std::byte* dst, const std::byte* src, int64_t ahead) const {
  if (non_temporal_) return stream_rows(dst, rows.dst_stride, src, rows.src_stride, rows.size, page_.run_nbytes, ahead);
  switch (page_.run_nbytes) {
    case 1:
      return copy_elements<uint8_t>(dst, src, rows);
    case 2:
      return copy_elements<uint16_t>(dst, src, rows);
    case 4:
      return copy_elements<uint32_t>(dst, src, rows);
    case 8:
      return copy_elements<uint64_t>(dst, src, rows);
    default:
      for (int64_t i = 0; i < rows.size; ++i)
        std::memcpy(dst + i * rows.dst_stride, src + i * rows.src_stride, static_cast<size_t>(page_.run_nbytes));
  }
}

}  // namespace torch_mooncake::kv
