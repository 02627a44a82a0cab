// Regions inside shared segments: the access record, and this process' maps of other processes' segments (each mapped
// once, whoever asks, until its last user is gone).
#pragma once

#include "memory/segment.h"
#include "transfer/region_table.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

// Body: segment id, u64 offset of the region in it.
AccessRecord segment_record(const RegionImpl& region);
struct SegmentPlace {
  Id128 segment{};
  uint64_t offset = 0;
};
Result<SegmentPlace> parse_segment_record(const std::string& body);

struct SegmentMemory final : RemoteMemory {
  std::shared_ptr<Segment> segment;
  MappingPtr mapping;
  std::byte* data = nullptr;  // the region's first byte
  std::shared_ptr<const std::byte> mapped() const override { return {mapping, data}; }
};

// Segments of other processes that this one has open, by id and by whether it may write.
class SegmentCache {
 public:
  static SegmentCache& instance();  // never destroyed
  std::shared_ptr<Segment> find(const Id128& id, bool writable);
  // Takes `fd` over, unless the segment is known already.
  Result<std::shared_ptr<Segment>> adopt(UniqueFd fd, const Id128& id, bool writable);

 private:
  struct Impl;
  SegmentCache();
  Impl* impl_;
};

}  // namespace torch_mooncake::transfer
