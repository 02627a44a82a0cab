// The one implementation of Donor: ExtentTable (what is where, crash-proof) + Allocator (whose bytes) + Turnover (what
// goes first) + slot pages (who still reads) + SSD stores. donor.cpp has life cycle and verbs, donor_reclaim.cpp
// everything that takes memory back, donor_tiers.cpp what is on SSDs, donor_demote.cpp and donor_promote.cpp the ways
// there and back, donor_grants.cpp room in advance, donor_quotas.cpp limits, donor_check.cpp the invariants.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "pool/allocator.h"
#include "pool/donor.h"
#include "pool/eviction.h"
#include "pool/extent_table.h"
#include "pool/families.h"
#include "pool/tiers.h"

namespace torch_mooncake::pool {

Status check_request(const ReserveRequest& request);

class DonorImpl final : public Donor {
 public:
  // `data` was attached if the table has entries.
  DonorImpl(DonorOptions options, std::unique_ptr<ExtentTable> table, std::shared_ptr<Segment> data);
  ~DonorImpl() override;
  // Before restore(). With new memory a folder that cannot be used is an error, else it is done without.
  Status open_ssds(bool attached);
  Status restore(const std::vector<HeldSegment>& held, uint32_t dropped);

  std::vector<std::shared_ptr<Segment>> segments() const override { return {table_->table_segment(), data_}; }
  std::vector<HeldSegment> held() const override;
  void on_held_changed(std::function<void(const HeldSegment&, bool)> fn) override { held_changed_ = std::move(fn); }

  Result<Reservation> reserve(const ReserveRequest& request) override;
  Result<Reservation> grant(uint64_t nbytes, SessionId writer, const TxnId& txn) override;
  void end_grants() override;
  Status bind(ExtentRef extent, const ReserveRequest& request) override;
  Status commit(ExtentRef extent, Version version, std::optional<uint32_t> crc32c, uint64_t ttl_ms, int64_t now_ns,
                uint32_t replicas, Pin pin) override;
  void set_pin(ExtentRef extent, Pin pin, Done done) override;
  void set_quotas(const std::vector<Quota>& quotas) override;
  std::vector<Quota> quotas() const override;
  Status finalize(ExtentRef extent) override;
  Status supersede(ExtentRef extent) override;
  Status free(ExtentRef extent) override;
  void remove(ExtentRef extent, Done done) override;
  void drop_txn(const TxnId& txn) override;
  std::vector<std::pair<TxnId, std::string>> prepared() const override;
  void touch(ExtentRef extent) override;
  void set_evicted_callback(std::function<void(const Announcement&)> fn) override { evicted_ = std::move(fn); }

  Result<Announcement> describe(ExtentRef extent) const override;
  void peek(ExtentRef extent, std::function<void(Result<Announcement>)> done) const override;
  void promote(ExtentRef extent, Done done) override;
  std::optional<uint64_t> only_on_ssd(ExtentRef extent) const override;
  bool making_room() const override { return demoting_bytes() > 0 || room_soon(); }
  void set_tier_callback(std::function<void(const Announcement&)> fn) override { tier_changed_ = std::move(fn); }
  void set_wake(std::function<void()> wake) override { inbox_->set_wake(std::move(wake)); }
  void run_completions() override;
  using Donor::announce;
  void announce(const std::function<void(Announcement)>& fn) const override;
  std::vector<Announcement> announce_prepared() const override;
  std::vector<std::string> keys(std::string_view prefix, size_t limit, int64_t now_ns,
                                std::string_view after) const override;

  Status give_back(ExtentRef extent, SessionId session) override;
  void abandon(const TxnId& txn, SessionId session) override;
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
  void leave_eviction(uint32_t index);
  void keep(uint32_t index);
  void save_uses(uint32_t index);
  void close_prepared(uint32_t index);
  Result<Reservation> reserve_extent(const ReserveRequest& request);
  // An extent, PREPARED, of the record; if that fails its placement is free again.
  Result<Reservation> add_extent(const Record& record, uint64_t nbytes, SessionId writer, bool may_evict);
  // `place` gives the extent, which then keeps its parent, which is not evicted meanwhile.
  Result<uint32_t> with_parent(const ReserveRequest& request, const std::function<Result<uint32_t>()>& place);

  // Reclaim. A scan marks what is pinned: pinned(i) is about the last scan.
  void scan_pins() const;
  bool pinned(uint32_t index) const { return index < pin_mark_.size() && pin_mark_[index] == pin_epoch_; }
  bool fenced(uint32_t index) const;
  bool evictable(uint32_t index) const;
  bool has_children(uint32_t index) const { return families_.has_children(key_hash(index)); }
  KeyHash key_hash(uint32_t index) const { return {table_->at(index).key_hash[0], table_->at(index).key_hash[1]}; }
  void join_family(uint32_t index);
  void release_parents(const std::vector<uint32_t>& parents);
  template <typename Pred>
  void drop_hints(Pred over);
  // Nobody's bytes are where they are moved to or from a disk.
  bool in_io(uint32_t index) const { return in_io_.count(index) != 0; }
  // Changes the words, fences, scans once, then frees the extents or puts them into limbo.
  void retire(const std::vector<uint32_t>& extents);
  void destroy(uint32_t index);
  void sweep_limbo();
  void unpark();
  Status make_room(uint64_t nbytes);
  bool evict_one();
  void evict(const std::vector<uint32_t>& victims);
  std::vector<uint32_t> pick_victims(uint64_t nbytes, uint64_t deficit, uint8_t group = 0);

  // donor_quotas.cpp
  uint8_t group_of(std::string_view key) const;
  uint8_t counted(uint32_t index) const { return index < counted_.size() ? counted_[index] : 0; }
  void count(uint32_t index);
  void uncount(uint32_t index);
  Status make_quota_room(const ReserveRequest& request);
  std::vector<uint32_t> beside_a_run() const;
  Status full(uint64_t nbytes, const std::string& why) const;
  Status being_written(uint64_t nbytes) const;

  // donor_tiers.cpp
  friend struct StoreOwner;
  // The extent in memory that has the bytes of what is known by that name.
  Result<uint32_t> resident(ExtentRef name) const;
  Tiered* tiered(ExtentRef name);
  const Tiered* tiered(ExtentRef name) const { return const_cast<DonorImpl*>(this)->tiered(name); }
  Tiered* tier_of(uint32_t index);
  const Tiered* tier_of(uint32_t index) const { return const_cast<DonorImpl*>(this)->tier_of(index); }
  void take_found(size_t store);
  bool link_copy(uint32_t index);
  Announcement announcement(const Tiered& t) const;
  void settle(uint64_t generation);
  void unlink_copy(Tiered& t);
  void set_at(Tiered& t, std::optional<DiskSpot> at);
  void fire(Tiered& t, const Status& status);
  std::map<SessionId, int64_t> take_coming_pins(const Tiered& t);
  void mark(std::vector<DiskSpot> spots, Done done);
  void bad_spot(uint64_t generation, const DiskSpot& spot);
  void store_destroyed(size_t store, uint64_t segment, const std::vector<uint64_t>& ids);
  void store_failed(size_t store);
  Status check_tiers() const;
  SsdStats ssd_stats() const;

  // donor_demote.cpp
  enum class Fate { drop, wait, later, dropped_unwritten, refused };
  std::optional<size_t> store_for(uint32_t index) const;
  Fate fate(uint32_t index);
  bool droppable_now(uint32_t index) const;
  bool demote(uint32_t index);
  void demoted(uint64_t generation, uint32_t index, const DiskSpot& spot, const Status& status);
  void clean_ahead();
  void set_clean(uint32_t index);
  bool take_off_clean(uint32_t index);
  uint64_t demoting_bytes() const;  // on disks that answer
  bool room_soon() const;
  std::optional<uint32_t> next_victim(uint8_t group);

  // donor_promote.cpp
  void loaded(uint64_t generation, const DiskSpot& from, Result<ssd::Loaded> loaded);
  void place(uint64_t generation, std::shared_ptr<ssd::Loaded> loaded);
  void placed(uint64_t generation, ExtentRef extent);
  void retry_promotions(int64_t now_ns);
  void read_from_disk(uint64_t generation);

  const DonorOptions options_;
  std::unique_ptr<ExtentTable> table_;
  std::shared_ptr<Segment> data_;
  Allocator space_;
  Turnover lru_;
  std::map<SessionId, SessionState> sessions_;
  std::map<TxnId, std::vector<uint32_t>> open_;  // PREPARED extents by transaction
  std::set<uint32_t> grants_;                    // PREPARED, for whatever their writers want
  uint64_t granted_bytes_ = 0;
  std::vector<uint32_t> limbo_;
  Families families_;
  struct LiveQuota {
    Quota quota;             // used_bytes: elsewhere
    uint64_t used_here = 0;  // of extents that are not in limbo
  };
  std::vector<LiveQuota> quotas_;      // group g's is quotas_[g - 1]
  std::vector<uint8_t> counted_;       // by extent: the group it is counted in
  std::unordered_set<uint32_t> kept_;  // pinned hard: in no eviction list
  uint64_t kept_bytes_ = 0;
  std::vector<uint32_t> parked_;                                      // pinned when eviction came by
  std::unordered_map<uint32_t, std::map<SessionId, int64_t>> hints_;  // by extent and owner: until when
  mutable std::vector<uint32_t> pin_mark_;
  mutable std::vector<uint32_t> pins_;  // indices marked by the last scan
  mutable uint32_t pin_epoch_ = 1;
  uint64_t evictions_ = 0;

  std::shared_ptr<ssd::Inbox> inbox_ = std::make_shared<ssd::Inbox>();
  std::shared_ptr<transfer::IoQueue> io_;
  std::shared_ptr<ssd::Worker> copier_;  // of big objects
  MappingPtr data_map_;                  // with SSDs only
  std::vector<std::unique_ptr<StoreOwner>> stores_;
  uint64_t unopened_ssds_ = 0;
  std::unordered_map<uint64_t, Tiered> tiers_;        // by the name's generation
  std::unordered_map<uint32_t, uint64_t> tier_of_;    // by the extent that has the bytes
  std::map<uint64_t, std::vector<Done>> removing_;    // names whose marks are under way
  std::unordered_map<uint32_t, uint64_t> in_io_;      // extent -> its generation
  std::map<uint8_t, std::deque<CleanExtent>> clean_;  // by group: written ahead, least valuable first
  std::unordered_map<uint32_t, uint64_t> clean_bytes_of_;
  uint64_t clean_bytes_ = 0;
  std::deque<WaitingPromotion> waiting_promotions_;
  uint64_t waiting_bytes_ = 0;   // of theirs
  std::deque<uint64_t> unread_;  // names that are to be read when those have found room
  std::unordered_map<uint64_t, std::map<SessionId, int64_t>> coming_pins_;  // by name: hints on what is on its way
  uint64_t coming_bytes_ = 0;                                               // of theirs
  SsdStats ssd_counts_;
  std::function<void(const Announcement&)> tier_changed_;
  std::function<void(const HeldSegment&, bool)> held_changed_;
  std::function<void(const Announcement&)> evicted_;
};

}  // namespace torch_mooncake::pool
