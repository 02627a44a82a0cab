// How memory comes back: retirement, limbo, eviction, sessions and their slot pages.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "common/failpoint.h"
#include "common/log.h"
#include "pool/donor_impl.h"
#include "pool/pin_slots.h"

namespace torch_mooncake::pool {
namespace {

// For fault tests that kill or stop the process here; there is no way to fail from here.
void crash_point(std::string_view name) {
  if (!failpoint(name)) std::abort();
}

}  // namespace

void DonorImpl::scan_pins() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  ++pin_epoch_;
  pins_.clear();
  pin_mark_.resize(table_->entries());
  for (const auto& [id, session] : sessions_) {
    if (!session.map) continue;
    scan_slots(session.map->data, [this](uint32_t extent, uint64_t generation) {
      if (extent >= table_->entries() || table_->at(extent).content_generation != generation) return;
      if (table_->state(extent) == ExtentState::free || pinned(extent)) return;
      pin_mark_[extent] = pin_epoch_;
      pins_.push_back(extent);
    });
  }
}

bool DonorImpl::fenced(uint32_t index) const {
  const SessionId writer = table_->at(index).writer;
  return writer != 0 && sessions_.count(writer) != 0;
}

bool DonorImpl::evictable(uint32_t index) const {
  const bool set_aside = lru_.contains(index) && lru_.parked(index) && !clean_bytes_of_.count(index);
  return lru_.contains(index) && !set_aside && !pinned(index) && !hints_.count(index) && !has_children(index);
}

void DonorImpl::retire(const std::vector<uint32_t>& extents) {
  for (uint32_t i : extents) {
    leave_eviction(i);
    take_off_clean(i);
    release_parents(families_.remove(i));
    uncount(i);
    if (table_->state(i) == ExtentState::prepared) close_prepared(i);
    if (valid(i)) table_->invalidate(i);
  }
  crash_point("donor.retire.word");
  scan_pins();  // begins with the fence
  for (uint32_t i : extents) {
    table_->set_state(i, ExtentState::limbo);
    crash_point("donor.retire.limbo");
    if (pinned(i) || fenced(i) || in_io(i)) {
      limbo_.push_back(i);
    } else {
      destroy(i);
    }
  }
}

void DonorImpl::destroy(uint32_t index) {
  const Placement placement = table_->record(index).placement;
  hints_.erase(index);
  table_->remove(index);
  space_.free(placement);
}

void DonorImpl::sweep_limbo() {
  if (limbo_.empty()) return;
  scan_pins();
  std::vector<uint32_t> waiting;
  for (uint32_t i : limbo_) {
    if (pinned(i) || fenced(i) || in_io(i)) {
      waiting.push_back(i);
    } else {
      destroy(i);
    }
  }
  limbo_ = std::move(waiting);
}

// Those that were pinned when eviction came by and are not any more get their old place back.
void DonorImpl::unpark() {
  if (parked_.empty()) return;
  scan_pins();
  std::vector<uint32_t> back, still;
  for (uint32_t i : parked_) {
    // Deleted meanwhile; or, after that, another extent of that number which has stepped aside for the disk.
    if (!lru_.contains(i) || !lru_.parked(i) || clean_bytes_of_.count(i) || in_io(i)) continue;
    (pinned(i) || hints_.count(i) ? still : back).push_back(i);
  }
  std::sort(back.begin(), back.end(), [this](uint32_t a, uint32_t b) { return lru_.last_use(a) > lru_.last_use(b); });
  for (uint32_t i : back)
    if (lru_.parked(i)) lru_.unpark(i);  // it may be there twice
  parked_ = std::move(still);
}

Status DonorImpl::make_room(uint64_t nbytes) {
  if (!table_->has_free_entry()) sweep_limbo();
  if (!table_->has_free_entry()) unpark();
  if (!table_->has_free_entry() && !evict_one()) return full(nbytes, "no extent of the table is free");
  if (space_.fits(nbytes)) return {};
  sweep_limbo();
  if (space_.fits(nbytes)) return {};
  unpark();
  scan_pins();

  // Could it fit if all that may go went? If not, nothing is evicted.
  uint64_t held = 0;
  for (uint32_t i : pins_)
    if (lru_.contains(i)) held += footprint(i);
  for (const auto& [i, owners] : hints_)
    if (lru_.contains(i) && !pinned(i)) held += footprint(i);
  const uint64_t want = Allocator::footprint(nbytes);
  if (space_.ceiling_bytes() - space_.used_bytes() + lru_.nbytes() - held < want)
    return full(nbytes, kept_bytes_ == 0 ? "what may be evicted is not enough"
                                         : "what may be evicted is not enough: " + std::to_string(kept_bytes_) +
                                               " bytes are pinned hard");

  uint64_t gone = 0;  // on suspicion
  while (!space_.fits(nbytes)) {
    const uint64_t free = space_.free_bytes();
    std::vector<uint32_t> victims;
    if (free < want || nbytes < kSlabLimit) victims = pick_victims(nbytes, want - std::min(want, free));
    if (victims.empty() && making_room()) return being_written(nbytes);
    if (victims.empty()) {
      victims = beside_a_run();
      bool waits = false;
      for (uint32_t i : victims) {
        if (droppable_now(i)) continue;
        const Fate what = fate(i);
        ssd_counts_.dropped += what == Fate::dropped_unwritten;
        if (what == Fate::wait) lru_.park(i);
        waits = waits || what == Fate::wait || what == Fate::later;
      }
      if (waits) return being_written(nbytes);
    }
    if (victims.empty() && !families_.empty() && gone < want) {  // perhaps the last children of what is beside a run
      victims = pick_victims(nbytes, 1);
      for (uint32_t i : victims) gone += footprint(i);
    }
    if (victims.empty()) return full(nbytes, "what is free is in too many pieces between pinned extents");
    evict(victims);
  }
  return {};
}

// The least valuable extents, until their bytes make up the deficit. A slab's page comes back only when all of its
// cells are free, so where pages are needed the victim's slab mates go with it (at most 256 KiB). With a group: of that
// quota alone, whose bytes count, not the pages.
std::vector<uint32_t> DonorImpl::pick_victims(uint64_t nbytes, uint64_t deficit, uint8_t for_group) {
  std::vector<uint32_t> victims;
  uint64_t sum = 0;
  const auto coming = [&] {
    if (for_group == 0) return demoting_bytes();
    uint64_t bytes = 0;
    for (const auto& [i, generation] : in_io_)
      if (counted(i) == for_group) bytes += footprint(i);
    return bytes;
  };
  do {
    const auto victim = next_victim(for_group);
    if (!victim) break;
    if (!evictable(*victim)) {
      lru_.park(*victim);
      if (has_children(*victim))
        families_.wait_for_children(key_hash(*victim), *victim);
      else
        parked_.push_back(*victim);
      continue;
    }
    // Room that is being made already is not made twice.
    if ((!droppable_now(*victim) || lru_.soft(*victim)) && sum + coming() >= std::max<uint64_t>(deficit, 1)) break;
    const Fate what = fate(*victim);
    if (what == Fate::later) break;
    if (what == Fate::wait) {
      lru_.park(*victim);
      continue;
    }
    ssd_counts_.refused += what == Fate::refused;
    ssd_counts_.dropped += what == Fate::dropped_unwritten;
    std::vector<uint32_t> group{*victim};
    const Placement placement = table_->record(*victim).placement;
    const bool same_cell = nbytes < kSlabLimit && Allocator::footprint(placement) == Allocator::footprint(nbytes);
    if (placement.slab != kNoSlab && !same_cell && for_group == 0) {
      auto mates = space_.owners_at(placement.slab / kPageBytes);
      const bool soft = lru_.soft(*victim);
      if (std::all_of(mates.begin(), mates.end(),
                      [&](uint32_t i) { return evictable(i) && droppable_now(i) && (soft || !lru_.soft(i)); }))
        group = std::move(mates);
    }
    for (uint32_t i : group) {
      sum += footprint(i);
      victims.push_back(i);
      take_off_clean(i);
      if (!lru_.parked(i)) lru_.park(i);  // so that the next victim is another one; evict() takes it from there
    }
  } while (victims.empty() || sum < deficit);
  return victims;
}

// There are bytes enough, but in too many runs: the extent beside the largest run that can be widened.
std::vector<uint32_t> DonorImpl::beside_a_run() const {
  std::vector<uint32_t> found;
  for (const bool soft_too : {false, true}) {
    const auto may_go = [&](uint32_t i) { return evictable(i) && (soft_too || !lru_.soft(i)); };
    space_.for_each_run([&](uint32_t first, uint32_t pages) {
      for (uint64_t page : {uint64_t{first} + pages, uint64_t{first} - 1}) {
        auto owners = space_.owners_at(page);
        if (owners.empty() || !std::all_of(owners.begin(), owners.end(), may_go)) continue;
        found = std::move(owners);
        return false;
      }
      return true;
    });
    if (!found.empty()) break;
  }
  return found;
}

void DonorImpl::evict(const std::vector<uint32_t>& victims) {
  std::vector<Announcement> gone;
  std::vector<uint64_t> names;
  for (uint32_t i : victims) {
    if (Tiered* t = tier_of(i)) {
      names.push_back(t->name().generation);
      unlink_copy(*t);
    } else {
      ++evictions_;
      if (evicted_) gone.push_back(announcement(i));
    }
    lru_.evict(i, table_->at(i).key_hash[0]);
  }
  retire(victims);
  for (const Announcement& a : gone) evicted_(a);
  for (uint64_t name : names) {
    if (const Tiered& t = tiers_.at(name); t.at && tier_changed_) tier_changed_(announcement(t));
    settle(name);
  }
}

bool DonorImpl::evict_one() {
  scan_pins();
  const auto victims = pick_victims(1, 0);
  if (victims.empty()) return false;
  evict(victims);
  return true;
}

// No word in the log: it passes.
Status DonorImpl::being_written(uint64_t nbytes) const {
  return {Code::pool_full, std::to_string(nbytes) + " bytes asked, " + std::to_string(demoting_bytes()) +
                               " are being written to the SSD to make room"};
}

Status DonorImpl::full(uint64_t nbytes, const std::string& why) const {
  const DonorStats s = stats();
  Status status(Code::pool_full, std::to_string(nbytes) + " bytes asked, " + std::to_string(space_.free_bytes()) +
                                     " free of " + std::to_string(s.limit_bytes) + " (" + std::to_string(s.used_bytes) +
                                     " used, " + std::to_string(s.pinned_extents) + " extents pinned, " +
                                     std::to_string(s.prepared_bytes) + " bytes being written, " +
                                     std::to_string(s.granted_bytes) + " granted, " + std::to_string(s.limbo_bytes) +
                                     " in limbo, of these " + std::to_string(s.fenced_bytes) + " fenced): " + why);
  static log::Once once(60'000);
  if (once.pass()) log::warning("pool", status.to_string());
  return status;
}

Status DonorImpl::give_back(ExtentRef extent, SessionId session) {
  TM_ASSIGN(const uint32_t index, find(extent));
  ExtentEntry& e = table_->at(index);
  if (session == 0 || e.writer != session)
    return {Code::invalid_argument, "extent " + std::to_string(index) + " is not being written by that session"};
  e.writer = 0;
  if (table_->state(index) == ExtentState::prepared) {
    retire({index});
  } else {
    sweep_limbo();
  }
  return {};
}

void DonorImpl::abandon(const TxnId& txn, SessionId session) {
  if (session == 0) return;
  std::vector<uint32_t> dropped;
  auto let_go = [&](uint32_t i) {
    if (table_->at(i).writer != session) return false;
    table_->at(i).writer = 0;
    return true;
  };
  if (const auto it = open_.find(txn); it != open_.end())
    for (uint32_t i : it->second)
      if (let_go(i)) dropped.push_back(i);
  for (uint32_t i : grants_)
    if (table_->record(i).txn == txn && let_go(i)) dropped.push_back(i);
  bool fenced_no_more = false;  // dropped before: it was late
  for (uint32_t i : limbo_)
    if (table_->record(i).txn == txn && let_go(i)) fenced_no_more = true;
  if (!dropped.empty()) retire(dropped);
  if (fenced_no_more) sweep_limbo();
}

Result<std::shared_ptr<Segment>> DonorImpl::open_slots(SessionId session) {
  if (session == 0) return {Code::invalid_argument, "session 0"};
  if (auto it = sessions_.find(session); it != sessions_.end() && it->second.slots) return it->second.slots;
  constexpr size_t kBytes = kPinSlots * sizeof(PinSlot);
  TM_ASSIGN(auto slots, Segment::create("tm-slots", kBytes, kBytes));
  TM_ASSIGN(auto map, slots->map(Protection::read_only));
  sessions_[session] = {slots, std::move(map), false};
  if (held_changed_) held_changed_({SegmentRole::slots, session, slots}, true);
  return slots;
}

Result<UniqueFd> DonorImpl::slots_for_client(SessionId session) {
  TM_ASSIGN(auto slots, open_slots(session));
  const std::string path = "/proc/self/fd/" + std::to_string(slots->fd());
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) return Status::from_errno("opening a slot page anew", errno);
  if (::flock(fd.get(), LOCK_SH | LOCK_NB) != 0) return Status::from_errno("flock of a slot page", errno);
  return fd;
}

template <typename Pred>
void DonorImpl::drop_hints(Pred over) {
  for (auto it = hints_.begin(); it != hints_.end();) {
    std::erase_if(it->second, over);
    it = it->second.empty() ? hints_.erase(it) : std::next(it);
  }
}

void DonorImpl::end_session(SessionId session) {
  drop_hints([session](const auto& hint) { return hint.first == session; });
  for (auto& [generation, owners] : coming_pins_) owners.erase(session);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  const HeldSegment slots{SegmentRole::slots, session, it->second.slots};
  sessions_.erase(it);  // from here on its pins and its fence count no more
  std::vector<uint32_t> dropped;
  for (const auto& [txn, extents] : open_)
    for (uint32_t i : extents)
      if (table_->at(i).writer == session) dropped.push_back(i);
  for (uint32_t i : grants_)
    if (table_->at(i).writer == session) dropped.push_back(i);
  if (!dropped.empty()) retire(dropped);
  sweep_limbo();
  if (slots.segment && held_changed_) held_changed_(slots, false);
}

void DonorImpl::lose_session(SessionId session) {
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return;
  if (!it->second.slots || released(it->second)) return end_session(session);
  it->second.orphan = true;
}

// Our own open file has no lock, so an exclusive one fails exactly while a client's has one.
bool DonorImpl::released(const SessionState& session) {
  if (::flock(session.slots->fd(), LOCK_EX | LOCK_NB) != 0) return false;
  ::flock(session.slots->fd(), LOCK_UN);
  return true;
}

bool DonorImpl::hint_pin(ExtentRef extent, int64_t until_ns, SessionId owner) {
  if (Tiered* t = tiered(extent); t && !t->dram) {  // brought into memory, and pinned there
    if (!t->at) return false;
    if (!coming_pins_.count(extent.generation)) {
      if (coming_bytes_ + t->record.nbytes > options_.limit_bytes / 4) return false;
      coming_bytes_ += t->record.nbytes;
    }
    int64_t& until = coming_pins_[extent.generation][owner];
    until = std::max(until, until_ns);
    promote(extent, [](const Status&) {});
    return true;
  }
  auto found = resident(extent);
  if (!found.is_ok() || !valid(*found)) return false;
  int64_t& until = hints_[*found][owner];
  until = std::max(until, until_ns);
  return true;
}

void DonorImpl::unpin(ExtentRef extent, SessionId owner) {
  if (const auto coming = coming_pins_.find(extent.generation); coming != coming_pins_.end())
    coming->second.erase(owner);
  const auto found = resident(extent);
  const auto it = found.is_ok() ? hints_.find(*found) : hints_.end();
  if (it == hints_.end()) return;
  it->second.erase(owner);
  if (it->second.empty()) hints_.erase(it);
}

void DonorImpl::sweep(int64_t now_ns) {
  drop_hints([now_ns](const auto& hint) { return hint.second <= now_ns; });
  std::vector<SessionId> over;
  for (const auto& [id, session] : sessions_)
    if (session.orphan && released(session)) over.push_back(id);
  for (SessionId id : over) end_session(id);
  sweep_limbo();
  unpark();
  space_.lift_ceiling();
  for (const auto& owner : stores_) owner->store->tick(now_ns);
  retry_promotions(now_ns);
  clean_ahead();
}

DonorStats DonorImpl::stats() const {
  DonorStats s;
  s.limit_bytes = space_.limit_bytes();
  s.allocated_bytes = space_.size_bytes();
  s.used_bytes = space_.used_bytes() - granted_bytes_;
  s.granted_bytes = granted_bytes_;
  s.extents = table_->live() - grants_.size();
  for (uint32_t i : limbo_) {
    s.limbo_bytes += footprint(i);
    if (fenced(i)) s.fenced_bytes += footprint(i);
  }
  s.limbo_extents = limbo_.size();
  for (const auto& [txn, extents] : open_) {
    s.prepared_extents += extents.size();
    for (uint32_t i : extents) s.prepared_bytes += footprint(i);
  }
  scan_pins();
  s.pinned_extents = pins_.size();
  s.evictions = evictions_;
  s.soft_pinned_bytes = lru_.soft_nbytes();
  s.hard_pinned_bytes = kept_bytes_;
  s.ssd = ssd_stats();
  return s;
}

}  // namespace torch_mooncake::pool
