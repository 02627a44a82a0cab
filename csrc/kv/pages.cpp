#include "kv/pages.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kv/cpu/stream.h"

namespace torch_mooncake::kv {
namespace {

constexpr int64_t kChunkNbytes = 1 << 20;         // a page larger than this is shared out between threads
constexpr int64_t kGrainNbytes = 256 << 10;       // what one thread must have to do to be worth its wake-up
constexpr int64_t kNonTemporalNbytes = 32 << 20;  // below, the list may well be read again from a cache

enum class Direction { gather, scatter };

// The work, cut into units of at most kChunkNbytes: unit = (layer, place, chunk of the page).
class Plan {
 public:
  Plan(std::span<const PageLayer> layers, const PageIds& ids, int64_t page_nbytes, Direction direction)
      : layers_(layers),
        ids_(ids),
        page_nbytes_(page_nbytes),
        chunks_(std::max<int64_t>(1, (page_nbytes + kChunkNbytes - 1) / kChunkNbytes)),
        gather_(direction == Direction::gather),
        non_temporal_(total_nbytes() >= kNonTemporalNbytes) {}

  int64_t units() const { return static_cast<int64_t>(layers_.size()) * ids_.count * chunks_; }
  int64_t grain() const { return std::max<int64_t>(1, kGrainNbytes / std::min(page_nbytes_, kChunkNbytes)); }

  void run(int64_t begin, int64_t end) const {
    constexpr size_t kBatch = 64;
    Piece batch[kBatch];
    size_t filled = 0;
    int64_t chunk = begin % chunks_, place = begin / chunks_ % ids_.count, layer = begin / chunks_ / ids_.count;
    for (int64_t unit = begin; unit < end; ++unit) {
      batch[filled++] = piece(layers_[layer], place, chunk * kChunkNbytes);
      if (filled == kBatch || unit + 1 == end) {
        copy_pieces({batch, filled}, non_temporal_);
        filled = 0;
      }
      if (++chunk < chunks_) continue;
      chunk = 0;
      if (++place < ids_.count) continue;
      place = 0;
      ++layer;
    }
  }

 private:
  int64_t total_nbytes() const { return static_cast<int64_t>(layers_.size()) * ids_.count * page_nbytes_; }

  Piece piece(const PageLayer& layer, int64_t place, int64_t offset) const {
    std::byte* in_pool = layer.pool + ids_[place] * layer.pool_stride_nbytes + offset;
    std::byte* in_list = layer.pages + place * layer.pages_stride_nbytes + offset;
    auto nbytes = static_cast<size_t>(std::min(kChunkNbytes, page_nbytes_ - offset));
    return gather_ ? Piece{in_list, in_pool, nbytes} : Piece{in_pool, in_list, nbytes};
  }

  std::span<const PageLayer> layers_;
  const PageIds& ids_;
  int64_t page_nbytes_;
  int64_t chunks_;
  bool gather_;
  bool non_temporal_;
};

Status copy(std::span<const PageLayer> layers, const PageIds& ids, int64_t num_pages, int64_t page_nbytes,
            Direction direction, const ParallelFor& parallel_for) {
  bool scatter = direction == Direction::scatter;
  if (page_nbytes < 0) return {Code::invalid_argument, "page_nbytes is negative: " + std::to_string(page_nbytes)};
  TM_TRY(check_page_ids(ids, num_pages, scatter));
  for (size_t i = 0; i < layers.size(); ++i) {
    int64_t stride = scatter ? layers[i].pool_stride_nbytes : layers[i].pages_stride_nbytes;
    if (std::abs(stride) < page_nbytes && (scatter ? num_pages : ids.count) > 1)
      return {Code::invalid_argument, "pages to be written overlap in layer " + std::to_string(i) + ": stride " +
                                          std::to_string(stride) + " bytes, page " + std::to_string(page_nbytes) +
                                          " bytes"};
  }
  if (page_nbytes == 0 || ids.count == 0 || layers.empty()) return {};
  Plan plan(layers, ids, page_nbytes, direction);
  parallel_for(plan.units(), plan.grain(), [&plan](int64_t begin, int64_t end) { plan.run(begin, end); });
  return {};
}

}  // namespace

void serial_for(int64_t n, int64_t, const ParallelBody& fn) { fn(0, n); }

Status check_page_ids(const PageIds& ids, int64_t num_pages, bool unique) {
  for (int64_t i = 0; i < ids.count; ++i) {
    if (int64_t id = ids[i]; id < 0 || id >= num_pages)
      return {Code::out_of_bounds, "page_ids[" + std::to_string(i) + "] is " + std::to_string(id) + ", not in [0, " +
                                       std::to_string(num_pages) + ")"};
  }
  if (!unique) return {};
  std::vector<bool> seen(static_cast<size_t>(ids.count == 0 ? 0 : num_pages));
  for (int64_t i = 0; i < ids.count; ++i) {
    if (seen[ids[i]]) {
      int64_t first = 0;
      while (ids[first] != ids[i]) ++first;
      return {Code::invalid_argument, "page_ids has " + std::to_string(ids[i]) + " twice, at positions " +
                                          std::to_string(first) + " and " + std::to_string(i) +
                                          ": a page can be written once"};
    }
    seen[ids[i]] = true;
  }
  return {};
}

Status gather_pages(std::span<const PageLayer> layers, const PageIds& ids, int64_t num_pages, int64_t page_nbytes,
                    const ParallelFor& parallel_for) {
  return copy(layers, ids, num_pages, page_nbytes, Direction::gather, parallel_for);
}

Status scatter_pages(std::span<const PageLayer> layers, const PageIds& ids, int64_t num_pages, int64_t page_nbytes,
                     const ParallelFor& parallel_for) {
  return copy(layers, ids, num_pages, page_nbytes, Direction::scatter, parallel_for);
}

}  // namespace torch_mooncake::kv
