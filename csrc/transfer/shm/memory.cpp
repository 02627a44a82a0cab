#include "transfer/shm/memory.h"

#include <map>
#include <mutex>

namespace torch_mooncake::transfer {

AccessRecord segment_record(const RegionImpl& region) {
  ByteWriter out;
  out.put(region.segment()->id()).put(region.segment_offset());
  return {AccessKind::segment, out.take()};
}

Result<SegmentPlace> parse_segment_record(const std::string& body) {
  ByteReader in(body);
  SegmentPlace place;
  place.segment = in.get_id();
  place.offset = in.get<uint64_t>();
  if (!in.done()) return Status(Code::invalid_argument, "malformed segment record in a descriptor");
  return place;
}

struct SegmentCache::Impl {
  std::mutex mutex;
  std::map<std::pair<Id128, bool>, std::weak_ptr<Segment>> segments;
};

SegmentCache::SegmentCache() : impl_(new Impl) {}

SegmentCache& SegmentCache::instance() {
  static auto* cache = new SegmentCache;
  return *cache;
}

std::shared_ptr<Segment> SegmentCache::find(const Id128& id, bool writable) {
  std::lock_guard lock(impl_->mutex);
  auto it = impl_->segments.find({id, writable});
  return it == impl_->segments.end() ? nullptr : it->second.lock();
}

Result<std::shared_ptr<Segment>> SegmentCache::adopt(UniqueFd fd, const Id128& id, bool writable) {
  std::lock_guard lock(impl_->mutex);
  std::erase_if(impl_->segments, [](auto& entry) { return entry.second.expired(); });
  auto& slot = impl_->segments[{id, writable}];
  if (auto known = slot.lock()) return known;
  TM_ASSIGN(auto segment, Segment::adopt(std::move(fd), id));
  slot = segment;
  return segment;
}

}  // namespace torch_mooncake::transfer
