// The one implementation of Donor: ExtentTable (what is where, crash-proof) + Allocator (whose bytes) + Turnover (what
// goes first) + slot pages (who still reads). donor.cpp has life cycle and verbs, donor_reclaim.cpp everything that
// takes memory back, donor_check.cpp the invariants.
#pragma once

#include <map>
#include <unordered_map>

#include "pool/allocator.h"
#include "pool/donor.h"
#include "pool/eviction.h"
#include "pool/extent_table.h"

namespace torch_mooncake::pool {

class DonorImpl final : public Donor {
 public:
  // `data` was attached if the table has entries.
  DonorImpl(DonorOptions options, std::unique_ptr<ExtentTable> table, std::shared_ptr<Segment> data);
  Status restore(const std::vector<HeldSegment>& held, uint32_t dropped);

  std::vector<std::shared_ptr<Segment>> segments() const override { return {table_->table_segment(), data_}; }
  std::vector<HeldSegment> held() const override;
  void on_held_changed(std::function<void(const HeldSegment&, bool)> fn) override { held_changed_ = std::move(fn); }

  Result<Reservation> reserve(const ReserveRequest& request) override;
  Status commit(ExtentRef extent, Version version, std::optional<uint32_t> crc32c, uint64_t ttl_ms,
                int64_t now_ns) override;
  Status finalize(ExtentRef extent) override;
  Status supersede(ExtentRef extent) override;
  Status free(ExtentRef extent) override;
  void drop_txn(const TxnId& txn) override;
  std::vector<std::pair<TxnId, std::string>> prepared() const override;
  void touch(ExtentRef extent) override;
  void set_evicted_callback(std::function<void(const Announcement&)> fn) override { evicted_ = std::move(fn); }

  Result<Announcement> describe(ExtentRef extent) const override;
  std::vector<Announcement> announce() const override;
  std::vector<Announcement> announce_prepared() const override;
  std::vector<std::string> keys(std::string_view prefix, size_t limit, int64_t now_ns) const override;

  Status give_back(ExtentRef extent, SessionId session) override;
  Result<std::shared_ptr<Segment>> open_slots(SessionId session) override;
  Result<UniqueFd> slots_for_client(SessionId session) override;
  void end_session(SessionId session) override;
  void lose_session(SessionId session) override;
  void refresh(std::span<const ExtentRef> last_first) override;
  bool hint_pin(ExtentRef extent, int64_t until_ns, SessionId owner) override;
  void unpin(ExtentRef extent, SessionId owner) override;
  void sweep(int64_t now_ns) override;

  DonorStats stats() const override;
  Status check() const override;

 private:
  struct SessionState {
    std::shared_ptr<Segment> slots;  // null: it only writes
    MappingPtr map;
    bool orphan = false;  // of a previous worker: alive while its client holds the slot page's lock
  };

  static bool released(const SessionState& session);

  // The extent's index if the ref is (still) its identity, in any state but free.
  Result<uint32_t> find(ExtentRef extent) const;
  bool valid(uint32_t index) const { return table_->generation(index) == table_->at(index).content_generation; }
  uint64_t footprint(uint32_t index) const { return Allocator::footprint(table_->record(index).placement); }
  Announcement announcement(uint32_t index) const;
  void enter_eviction(uint32_t index);
  void save_uses(uint32_t index);
  void close_prepared(uint32_t index);

  // Reclaim. A scan marks what is pinned: pinned(i) is about the last scan.
  void scan_pins() const;
  bool pinned(uint32_t index) const { return index < pin_mark_.size() && pin_mark_[index] == pin_epoch_; }
  bool fenced(uint32_t index) const;
  bool evictable(uint32_t index) const;
  template <typename Pred>
  void drop_hints(Pred over);
  // Changes the words, fences, scans once, then frees the extents or puts them into limbo.
  void retire(const std::vector<uint32_t>& extents);
  void destroy(uint32_t index);
  void sweep_limbo();
  void unpark();
  Status make_room(uint64_t nbytes);
  bool evict_one();
  void evict(const std::vector<uint32_t>& victims);
  std::vector<uint32_t> pick_victims(uint64_t nbytes, uint64_t deficit);
  std::vector<uint32_t> beside_a_run() const;
  Status full(uint64_t nbytes, const std::string& why) const;

  const DonorOptions options_;
  std::unique_ptr<ExtentTable> table_;
  std::shared_ptr<Segment> data_;
  Allocator space_;
  Turnover lru_;
  std::map<SessionId, SessionState> sessions_;
  std::map<TxnId, std::vector<uint32_t>> open_;  // PREPARED extents by transaction
  std::vector<uint32_t> limbo_;
  std::vector<uint32_t> parked_;                                      // pinned when eviction came by
  std::unordered_map<uint32_t, std::map<SessionId, int64_t>> hints_;  // by extent and owner: until when
  mutable std::vector<uint32_t> pin_mark_;
  mutable std::vector<uint32_t> pins_;  // indices marked by the last scan
  mutable uint32_t pin_epoch_ = 1;
  uint64_t evictions_ = 0;
  std::function<void(const HeldSegment&, bool)> held_changed_;
  std::function<void(const Announcement&)> evicted_;
};

}  // namespace torch_mooncake::pool
