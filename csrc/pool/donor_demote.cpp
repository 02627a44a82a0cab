// From memory to SSD. Who is evicted is turnover's choice; whether it is written first is decided here:
//
//   * While the log has room that nobody has, everything is: nothing is displaced by it (as TinyLFU admits until the
//     cache is full, Einziger et al., 2017).
//   * Afterwards what was used at least twice, its put counted and the uses that turnover remembers of evicted keys too
//     ("cache on second hit", Maggs and Sitaraman, Algorithmic Nuggets in Content Delivery, 2015). So a scan, which
//     uses everything once, displaces nothing. What comes from the disk is there already and is not written again.
//
// The least valuable eighth of a full memory is written ahead and set aside as clean, so that room can mostly be had at
// once. Where it cannot, the reservation waits for writes under way; a queue that is full, or a disk that does not
// answer for a second, is not waited for: the victim is dropped, and counted.
#include <algorithm>

#include "pool/donor_impl.h"

namespace torch_mooncake::pool {

uint64_t DonorImpl::demoting_bytes() const {
  uint64_t sum = 0;
  for (const auto& s : stores_)
    if (!s->store->stalled()) sum += s->demoting_bytes;
  return sum;
}

bool DonorImpl::room_soon() const {
  return std::any_of(stores_.begin(), stores_.end(), [](const auto& s) { return s->store->room_soon(); });
}

// None: it is not to be written.
std::optional<size_t> DonorImpl::store_for(uint32_t index) const {
  if (table_->state(index) != ExtentState::final) return {};
  ssd::Record size;
  const Record r = table_->record(index);
  size.key = r.key;
  size.label = r.label;
  size.meta = r.meta;
  size.nbytes = table_->at(index).nbytes;
  std::optional<size_t> best;
  for (size_t i = 0; i < stores_.size(); ++i) {
    const ssd::Store& store = *stores_[i]->store;
    if (store.out_of_service() || !store.fits(size)) continue;
    if (!store.has_free_space() && lru_.uses(index) < 2 && !lru_.soft(index)) continue;
    const auto load = [this](size_t n) {
      const ssd::Store& s = *stores_[n]->store;
      return std::pair(s.full(), s.stats().writing_bytes);
    };
    if (!best || load(i) < load(*best)) best = i;
  }
  return best;
}

// Of a victim: does its memory go now? `wait`: its write has begun; `later`: it can begin soon, when the log has its
// next segment.
DonorImpl::Fate DonorImpl::fate(uint32_t index) {
  if (stores_.empty()) return Fate::drop;
  const Tiered* t = tier_of(index);
  if (t && t->at) return Fate::drop;
  if (!store_for(index)) return Fate::refused;
  if (demote(index)) return Fate::wait;
  return room_soon() ? Fate::later : Fate::dropped_unwritten;
}

bool DonorImpl::droppable_now(uint32_t index) const {
  const Tiered* t = tier_of(index);
  return stores_.empty() || (t && t->at) || (!in_io(index) && !store_for(index));
}

bool DonorImpl::demote(uint32_t index) {
  const auto store = store_for(index);
  Tiered* known = tier_of(index);  // a promoted copy whose record was reclaimed is written again
  if (!store || in_io(index) || (known && (known->at || known->writing))) return false;
  const ExtentEntry& e = table_->at(index);
  const Record r = table_->record(index);
  ssd::Record record;
  record.name = known ? known->name() : ExtentRef{index, e.content_generation};
  record.memory = table_->table_segment()->id();
  record.boot = this_boot();
  record.key = r.key;
  record.label = r.label;
  record.meta = r.meta;
  record.kind = r.kind;
  record.version = {e.version_view, e.version_counter};
  record.pin = static_cast<Pin>(e.pin);
  record.part = r.part;
  record.parts = r.parts;
  record.nbytes = e.nbytes;
  if (e.has_crc) record.crc32c = e.crc32c;
  record.ttl_ms = e.ttl_ms;
  record.committed_ns = e.committed_ns;
  std::vector<iovec> data;
  for (const Piece& p : r.placement.pieces) {
    const uint64_t n = e.nbytes < kSlabLimit ? p.nbytes : (p.nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    data.push_back({data_map_->data + p.offset, n});
  }
  Tiered fresh;
  fresh.record = record;
  fresh.record.label.clear();
  fresh.record.meta.clear();
  const uint64_t generation = record.name.generation;
  auto where = std::make_shared<DiskSpot>();
  const auto spot = stores_[*store]->store->write(
      generation, std::move(record), std::move(data), data_map_,
      [this, generation, index, where](const Status& s) { demoted(generation, index, *where, s); });
  if (!spot) return false;
  *where = {*store, *spot};
  Tiered& t = known ? *known : tiers_[generation];
  if (!known) t = std::move(fresh);
  t.spots.push_back(*where);
  t.writing = true;
  t.hits = 0;
  t.dram = index;
  tier_of_[index] = generation;
  in_io_[index] = generation;
  stores_[*store]->demoting_bytes += footprint(index);
  return true;
}

void DonorImpl::demoted(uint64_t generation, uint32_t index, const DiskSpot& spot, const Status& status) {
  stores_[spot.store]->demoting_bytes -= footprint(index);  // its memory stayed: it was in_io
  in_io_.erase(index);
  const auto it = tiers_.find(generation);
  if (it == tiers_.end()) {  // removed meanwhile, and marked
    sweep_limbo();
    return;
  }
  Tiered& t = it->second;
  t.writing = false;
  if (!status.is_ok()) {
    ++ssd_counts_.dropped;
    if (lru_.contains(index) && lru_.parked(index)) lru_.unpark(index);
    return bad_spot(generation, spot);
  }
  set_at(t, spot);
  ++ssd_counts_.demotions;
  if (!lru_.contains(index) || !lru_.parked(index)) return;
  if (lru_.soft(index))
    lru_.unpark(index);  // what is set aside goes before what is not pinned
  else
    set_clean(index);
}

void DonorImpl::set_clean(uint32_t index) {
  clean_[lru_.group(index)].push_back({index, table_->at(index).content_generation, lru_.last_use(index)});
  clean_bytes_of_[index] = footprint(index);
  clean_bytes_ += footprint(index);
}

bool DonorImpl::take_off_clean(uint32_t index) {
  const auto it = clean_bytes_of_.find(index);
  if (it == clean_bytes_of_.end()) return false;
  clean_bytes_ -= it->second;
  clean_bytes_of_.erase(it);
  return true;
}

void DonorImpl::clean_ahead() {
  if (stores_.empty()) return;
  const uint64_t enough = options_.limit_bytes / 8;
  while (space_.free_bytes() + clean_bytes_ + demoting_bytes() < enough) {
    const auto next = lru_.victim();
    if (!next || lru_.soft(*next)) return;
    const Tiered* t = tier_of(*next);
    if (t && t->at) {
      lru_.park(*next);
      set_clean(*next);
      continue;
    }
    if (!demote(*next)) return;
    lru_.park(*next);
  }
}

// The least valuable, of all or of a group: what was set aside comes first, unless it was used since. Clean ones are
// taken off their list.
std::optional<uint32_t> DonorImpl::next_victim(uint8_t group) {
  for (;;) {
    std::deque<CleanExtent>* first = nullptr;
    for (auto& [g, list] : clean_)
      if (!list.empty() && (group == 0 || g == group) && (!first || list.front().last_use < first->front().last_use))
        first = &list;
    if (!first) return group == 0 ? lru_.victim() : lru_.victim(group);
    const CleanExtent c = first->front();
    first->pop_front();
    if (table_->at(c.index).content_generation != c.generation || !take_off_clean(c.index)) continue;
    if (lru_.parked(c.index)) lru_.unpark(c.index);
    if (lru_.last_use(c.index) == c.last_use) return c.index;
  }
}

}  // namespace torch_mooncake::pool
