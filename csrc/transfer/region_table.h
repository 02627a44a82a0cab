// The regions of one engine.
//
// Slices name regions by object, and the wire by id, so regions may overlap, repeat and contain one another.
// A region is live from add() to remove(), then quarantined until its last user is gone (counted, its memory kept),
// then forgotten: its `keep` is dropped by the caller's `forget`. Safe from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "transfer/backing.h"
#include "transfer/descriptor.h"
#include "transfer/engine.h"
#include "transfer/region_index.h"
#include "transfer/transport.h"
#include "transfer/usage.h"

namespace torch_mooncake::transfer {

namespace rdma {
class RegionKeys;
}

class RegionImpl final : public Region {
 public:
  MemoryKind kind() const override { return kind_; }
  bool shared() const override { return segment_ != nullptr; }
  std::byte* data() const override { return data_; }
  uint64_t nbytes() const override { return nbytes_; }
  uint64_t id() const override { return id_; }
  uint64_t generation() const override { return generation_; }
  std::string descriptor() const override { return descriptor_; }

  bool readable() const { return options_.readable; }
  bool writable() const { return options_.writable; }
  // "region 3 'kv'", for errors.
  std::string name() const;
  Usage& usage() { return usage_; }
  // One-sided readers compare this word, in our memory, with the descriptor's generation after they have read. It
  // differs from it from deregistration on, and no other region's word ever equals it.
  const std::atomic<uint64_t>* generation_word() const { return &word_; }
  const std::shared_ptr<Backing>& backing() const { return backing_; }  // null: host memory
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  uint64_t segment_offset() const { return segment_offset_; }
  const Id128& engine() const { return engine_; }
  // With RDMA: how NICs reach it; null before they do. Gone when the region is forgotten, which fences them.
  std::shared_ptr<rdma::RegionKeys> nic_keys() const;
  // Makes them, once, by `make`, for a region that was registered without (lazily).
  Status ensure_nic_keys(const std::function<Result<std::shared_ptr<rdma::RegionKeys>>()>& make);
  LocalKind local_kind() const { return local_kind_; }

 private:
  friend class RegionTable;
  std::byte* data_ = nullptr;
  uint64_t nbytes_ = 0, id_ = 0, generation_ = 0;
  RegionOptions options_;
  MemoryKind kind_ = MemoryKind::host;
  LocalKind local_kind_ = LocalKind::host;
  std::shared_ptr<Backing> backing_;
  std::shared_ptr<Segment> segment_;
  uint64_t segment_offset_ = 0;
  mutable std::mutex keys_mutex_;  // held for moments, and never with the table's
  std::condition_variable keys_made_;
  bool making_keys_ = false;
  std::shared_ptr<rdma::RegionKeys> nic_keys_;
  bool forgotten_ = false;  // no keys are made any more
  Id128 engine_{};
  std::string descriptor_;
  std::atomic<uint64_t> word_{0};
  Usage usage_;
};
using RegionImplPtr = std::shared_ptr<RegionImpl>;

class RegionTable {
 public:
  explicit RegionTable(const Id128& engine);

  struct Place {
    void* data = nullptr;
    uint64_t nbytes = 0;
    std::shared_ptr<Segment> segment{};  // null: private memory
    uint64_t segment_offset = 0;
    MemoryKind kind = MemoryKind::host;
    std::shared_ptr<Backing> backing{};  // of other kinds than host
    std::shared_ptr<rdma::RegionKeys> nic_keys{};
  };
  // `records` makes the access records of the new region.
  RegionImplPtr add(Place place, RegionOptions options,
                    const std::function<std::vector<AccessRecord>(const RegionImpl&)>& records);
  // Null unless that region is live with that generation.
  RegionImplPtr find(uint64_t id, uint64_t generation) const;
  RegionImplPtr at(const void* address, uint64_t nbytes) const;  // see Engine::region_at
  void forget_address(const RegionImpl& region);
  // Changes the generation word and moves the region to quarantine; false if it is not live here (any more).
  bool remove(const RegionImplPtr& region);
  // Out of quarantine; returns its `keep`, for the caller to drop where that is right.
  std::shared_ptr<void> forget(const RegionImplPtr& region);
  std::vector<RegionImplPtr> live() const;
  std::vector<RegionImplPtr> quarantined() const;
  uint64_t live_count() const;
  uint64_t quarantined_count() const;

 private:
  const Id128 engine_;
  mutable std::mutex mutex_;
  uint64_t next_id_ = 1, next_generation_;
  std::unordered_map<uint64_t, RegionImplPtr> live_, quarantined_;
  RegionIndex index_;  // of the live ones that have an address
};

}  // namespace torch_mooncake::transfer
