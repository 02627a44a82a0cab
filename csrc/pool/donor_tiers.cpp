// What is on SSDs: stores, names, and how something there comes to an end.
//
// A name is said to be gone (evicted, superseded) only when no start can find it again: its segment is no more, or its
// spots are marked, or its disk is out of service, which the table remembers as long as the memory lives.
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>

#include "common/clock.h"
#include "common/log.h"
#include "pool/donor_impl.h"

namespace torch_mooncake::pool {
namespace {

// Steady clocks of two boots do not compare.
Id128 boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  const KeyHash h = hash_key(text);
  Id128 id{};
  std::memcpy(id.data(), h.data(), sizeof id);
  return id;
}

}  // namespace

Id128 this_boot() {
  static const Id128 id = boot_id();
  return id;
}

TxnId txn_of(ExtentRef name) {
  TxnId txn{};
  std::memcpy(txn.data(), &name.generation, 8);
  std::memcpy(txn.data() + 8, &name.index, 4);
  return txn;
}

ExtentRef name_of(const TxnId& txn) {
  ExtentRef name;
  std::memcpy(&name.generation, txn.data(), 8);
  std::memcpy(&name.index, txn.data() + 8, 4);
  return name;
}

DonorImpl::~DonorImpl() { stores_.clear(); }

Status DonorImpl::open_ssds(bool attached) {
  if (options_.ssd.empty()) return {};
  TM_ASSIGN(data_map_, data_->map(Protection::read_write));
  io_ = transfer::IoQueue::shared();
  copier_ = std::make_shared<ssd::Worker>();
  for (const SsdOptions& o : options_.ssd) {
    const uint64_t path_hash = hash_key(o.path)[0];
    if (table_->ssd_is_dead(path_hash)) {
      ++unopened_ssds_;
      continue;
    }
    ssd::StoreOptions options;
    options.path = o.path;
    options.limit_bytes = o.limit_bytes;
    options.segment_bytes = o.segment_bytes;
    options.queue_bytes = std::clamp<uint64_t>(options_.limit_bytes / 4, 8 << 20, 256 << 20);
    options.inbox = inbox_;
    options.queue = io_;
    auto owner = std::make_unique<StoreOwner>(*this, stores_.size());
    owner->path_hash = path_hash;
    auto store = ssd::Store::open(options, *owner);
    if (!store.is_ok()) {
      if (!attached) return store.status();
      // What it holds may be superseded from now on, and cannot be marked: it is not to come back with this memory.
      log::error("pool", store.status().with("going on without an SSD").to_string());
      table_->set_ssd_dead(path_hash);
      ++unopened_ssds_;
      continue;
    }
    owner->store = std::move(store).value();
    stores_.push_back(std::move(owner));
    take_found(stores_.size() - 1);
  }
  return {};
}

void DonorImpl::take_found(size_t number) {
  ssd::Store& store = *stores_[number]->store;
  const Id128& memory = table_->table_segment()->id();
  for (ssd::Head& h : store.take_found()) {
    ssd::Record& r = h.record;
    const bool same = r.memory == memory;
    if (!same && r.kind == Kind::named) continue;  // its past may have been somebody else's
    if (r.ttl_ms != 0 && r.boot != this_boot()) continue;
    if (!same) r.name = {UINT32_MAX, table_->next_generation()};
    const uint64_t generation = r.name.generation;
    store.adopt(generation, h.spot);
    Tiered& t = tiers_[generation];
    const DiskSpot spot{number, h.spot};
    t.record = std::move(r);
    set_at(t, spot);  // segments come oldest first: of two copies the later counts, both are known
    t.spots.push_back(spot);
  }
}

// While attaching: an extent that is COMMITTED or FINAL. False: a second copy of something.
bool DonorImpl::link_copy(uint32_t index) {
  const ExtentEntry& e = table_->at(index);
  const Record r = table_->record(index);
  const ExtentRef name = e.promoted ? name_of(r.txn) : ExtentRef{index, e.content_generation};
  Tiered* known = tiered(name);
  if (!e.promoted && !known) return true;
  if (known && known->dram) return false;
  Tiered& t = known ? *known : tiers_[name.generation];
  if (!known) {  // its record on the disk is no more
    t.record.name = name;
    t.record.key = r.key;
    t.record.kind = r.kind;
    t.record.version = {e.version_view, e.version_counter};
    t.record.part = r.part;
    t.record.parts = r.parts;
    t.record.nbytes = e.nbytes;
    if (e.has_crc) t.record.crc32c = e.crc32c;
    t.record.ttl_ms = e.ttl_ms;
    t.record.committed_ns = e.committed_ns;
  }
  t.record.pin = static_cast<Pin>(e.pin);
  t.dram = index;
  tier_of_[index] = name.generation;
  return true;
}

Tiered* DonorImpl::tiered(ExtentRef name) {
  const auto it = tiers_.find(name.generation);
  return it != tiers_.end() && it->second.name().index == name.index ? &it->second : nullptr;
}

Result<uint32_t> DonorImpl::resident(ExtentRef name) const {
  const Tiered* t = tiered(name);
  if (!t) return find(name);
  if (t->dram) return *t->dram;
  return {Code::busy, "extent " + std::to_string(name.index) + " is on an SSD"};
}

Tiered* DonorImpl::tier_of(uint32_t index) {
  const auto it = tier_of_.find(index);
  return it == tier_of_.end() ? nullptr : &tiers_.at(it->second);
}

Announcement DonorImpl::announcement(const Tiered& t) const {
  if (t.dram) return announcement(*t.dram);
  const ssd::Record& r = t.record;
  return {r.key,
          r.kind,
          r.version,
          ExtentState::final,
          r.nbytes,
          "",
          "",
          r.part,
          r.parts,
          {},
          r.name,
          {},
          r.crc32c.value_or(0),
          r.crc32c.has_value(),
          r.ttl_ms,
          r.committed_ns,
          Tier::ssd,
          {},
          1,
          r.pin};
}

void DonorImpl::peek(ExtentRef extent, std::function<void(Result<Announcement>)> done) const {
  const Tiered* t = tiered(extent);
  if (!t || t->dram || !t->at) return done(describe(extent));
  const DiskSpot from = *t->at;
  stores_[from.store]->store->read_head(from.spot, [this, extent, from, done](Result<ssd::Head> head) {
    const Tiered* now = tiered(extent);
    if (!now || now->dram || !now->at) return done(describe(extent));
    if (!head.is_ok()) return *now->at == from ? done(head.status()) : peek(extent, done);  // it was moved
    Announcement a = announcement(*now);
    a.meta = std::move(head->record.meta);
    a.label = std::move(head->record.label);
    done(std::move(a));
  });
}

std::optional<uint64_t> DonorImpl::only_on_ssd(ExtentRef extent) const {
  const Tiered* t = tiered(extent);
  return t && !t->dram && t->at ? std::optional(t->record.nbytes) : std::nullopt;
}

void DonorImpl::unlink_copy(Tiered& t) {
  if (!t.dram) return;
  tier_of_.erase(*t.dram);
  t.dram.reset();
}

void DonorImpl::set_at(Tiered& t, std::optional<DiskSpot> at) {
  for (const bool adding : {false, true}) {
    const auto& spot = adding ? at : t.at;
    if (!spot) continue;
    ssd_counts_.records += adding ? 1 : -1;
    ssd_counts_.record_bytes += adding ? spot->spot.nbytes() : -spot->spot.nbytes();
  }
  t.at = at;
}

void DonorImpl::fire(Tiered& t, const Status& status) {
  t.reading = false;
  take_coming_pins(t);
  for (Done& done : std::exchange(t.waiters, {})) inbox_->put([done = std::move(done), status] { done(status); });
}

std::map<SessionId, int64_t> DonorImpl::take_coming_pins(const Tiered& t) {
  auto pins = coming_pins_.extract(t.name().generation);
  if (!pins) return {};
  coming_bytes_ -= t.record.nbytes;
  return std::move(pins.mapped());
}

// Has it become an extent like any other, or nothing at all?
void DonorImpl::settle(uint64_t generation) {
  const auto it = tiers_.find(generation);
  if (it == tiers_.end()) return;
  Tiered& t = it->second;
  if (t.at || t.writing || !t.spots.empty()) return;
  if (t.dram) {
    if (*t.dram != t.name().index || table_->at(*t.dram).content_generation != generation) return;  // promoted
    unlink_copy(t);
    tiers_.erase(it);
    return;
  }
  fire(t, {Code::key_not_found, "it is not on the disk any more"});
  const Announcement gone = announcement(t);
  tiers_.erase(it);
  ++evictions_;
  if (evicted_) evicted_(gone);
}

void DonorImpl::mark(std::vector<DiskSpot> spots, Done done) {
  std::map<size_t, std::vector<ssd::Spot>> by_store;
  for (const DiskSpot& s : spots) by_store[s.store].push_back(s.spot);
  if (by_store.empty()) return done({});
  auto left = std::make_shared<size_t>(by_store.size());
  for (auto& [store, list] : by_store)
    stores_[store]->store->mark(std::move(list), [left, done](const Status& s) {
      if (--*left == 0) done(s);
    });
}

// It could not be written or read: never to be found again.
void DonorImpl::bad_spot(uint64_t generation, const DiskSpot& spot) {
  mark({spot}, [this, generation, spot](const Status&) {
    const auto it = tiers_.find(generation);
    if (it == tiers_.end()) return;
    std::erase(it->second.spots, spot);
    settle(generation);
  });
}

void DonorImpl::remove(ExtentRef extent, Done done) {
  if (const auto it = removing_.find(extent.generation); it != removing_.end()) {
    it->second.push_back(std::move(done));  // asked twice
    return;
  }
  Tiered* t = tiered(extent);
  if (!t) {
    Status s = supersede(extent);
    if (s.is_ok()) s = free(extent);
    return done(s);
  }
  std::vector<uint32_t> copies;
  if (t->dram) copies.push_back(*t->dram);
  unlink_copy(*t);
  fire(*t, {Code::key_not_found, "superseded"});
  auto spots = std::move(t->spots);
  set_at(*t, {});
  tiers_.erase(extent.generation);
  if (!copies.empty()) retire(copies);
  removing_[extent.generation].push_back(std::move(done));
  mark(std::move(spots), [this, generation = extent.generation](const Status& s) {
    auto waiting = std::move(removing_.extract(generation).mapped());
    for (Done& d : waiting) d(s);
  });
}

// --- what a store says ---

std::optional<ssd::Spot> StoreOwner::worth_moving(uint64_t id, uint64_t segment) {
  const auto it = donor.tiers_.find(id);
  if (it == donor.tiers_.end()) return {};
  Tiered& t = it->second;
  if (!t.at || t.at->store != number || t.at->spot.segment != segment || t.dram ||
      (t.hits == 0 && t.record.pin == Pin::none))
    return {};
  t.hits = 0;
  return t.at->spot;
}

void StoreOwner::moving(uint64_t id, const ssd::Spot&, const ssd::Spot& to) {
  if (const auto it = donor.tiers_.find(id); it != donor.tiers_.end()) {
    it->second.spots.push_back({number, to});
    return;
  }
  donor.mark({{number, to}}, [](const Status&) {});  // it was removed while it was read
}

void StoreOwner::moved(uint64_t id, const ssd::Spot& to, const Status& status) {
  const auto it = donor.tiers_.find(id);
  if (it == donor.tiers_.end()) return;  // removed, and marked
  if (!status.is_ok()) return donor.bad_spot(id, {number, to});
  donor.set_at(it->second, DiskSpot{number, to});
}

void StoreOwner::destroyed(uint64_t segment, const std::vector<uint64_t>& ids) {
  donor.store_destroyed(number, segment, ids);
}

void StoreOwner::out_of_service() { donor.store_failed(number); }

void DonorImpl::store_destroyed(size_t store, uint64_t segment, const std::vector<uint64_t>& ids) {
  for (uint64_t id : ids) {
    const auto it = tiers_.find(id);
    if (it == tiers_.end()) continue;
    Tiered& t = it->second;
    auto in_it = [&](const DiskSpot& s) { return s.store == store && s.spot.segment == segment; };
    std::erase_if(t.spots, in_it);
    if (t.at && in_it(*t.at)) {
      set_at(t, {});
      if (!t.dram) ++ssd_counts_.reclaimed;
      if (t.dram && take_off_clean(*t.dram)) lru_.unpark(*t.dram);  // its memory cannot be had for nothing now
    }
    settle(id);
  }
}

void DonorImpl::store_failed(size_t store) {
  table_->set_ssd_dead(stores_[store]->path_hash);
  std::vector<uint64_t> concerned;
  for (auto& [generation, t] : tiers_) {
    const bool here = std::erase_if(t.spots, [&](const DiskSpot& s) { return s.store == store; }) != 0;
    if (t.at && t.at->store == store) set_at(t, {});
    if (here) concerned.push_back(generation);
  }
  for (uint64_t generation : concerned) {
    const auto it = tiers_.find(generation);
    if (it == tiers_.end()) continue;
    if (it->second.dram && take_off_clean(*it->second.dram)) lru_.unpark(*it->second.dram);
    settle(generation);
  }
}

void DonorImpl::run_completions() {
  while (inbox_->run() > 0) {
  }
  if (stores_.empty()) return;
  retry_promotions(steady_ns());
  clean_ahead();
}

SsdStats DonorImpl::ssd_stats() const {
  SsdStats s = ssd_counts_;
  s.out_of_service = unopened_ssds_;
  for (const auto& owner : stores_) {
    const ssd::StoreStats one = owner->store->stats();
    s.limit_bytes += one.limit_bytes;
    s.used_bytes += one.used_bytes;
    s.errors += one.errors;
    s.corrupt += one.corrupt;
    s.out_of_service += one.out_of_service;
  }
  return s;
}

Status DonorImpl::check_tiers() const {
  auto wrong = [](uint64_t generation, const char* what) {
    return Status(Code::corrupt, "donor: name " + std::to_string(generation) + ": " + what);
  };
  for (const auto& owner : stores_) TM_TRY(owner->store->check());
  size_t copies = 0;
  uint64_t records = 0, record_bytes = 0;
  for (const auto& [generation, t] : tiers_) {
    records += t.at.has_value();
    if (t.at) record_bytes += t.at->spot.nbytes();
    if (t.name().generation != generation) return wrong(generation, "listed under another");
    if (!t.at && !t.dram && t.spots.empty()) return wrong(generation, "is nowhere");
    if (t.at && std::count(t.spots.begin(), t.spots.end(), *t.at) != 1)
      return wrong(generation, "its spot is not kept");
    if (t.at && stores_[t.at->store]->store->out_of_service()) return wrong(generation, "on a disk out of service");
    if (!t.waiters.empty() && !t.reading) return wrong(generation, "somebody waits for nothing");
    if (!t.dram) continue;
    ++copies;
    const auto it = tier_of_.find(*t.dram);
    if (it == tier_of_.end() || it->second != generation) return wrong(generation, "its copy does not know it");
    const ExtentState state = table_->state(*t.dram);
    if (state != ExtentState::committed && state != ExtentState::final)
      return wrong(generation, "its copy is not valid");
    const bool own = *t.dram == t.name().index && table_->at(*t.dram).content_generation == generation;
    if (own == (table_->at(*t.dram).promoted != 0)) return wrong(generation, "promoted exactly when in another extent");
  }
  if (records != ssd_counts_.records || record_bytes != ssd_counts_.record_bytes)
    return {Code::corrupt, "donor: records on SSDs do not add up"};
  uint64_t coming = 0;
  for (const auto& [generation, owners] : coming_pins_) {
    const auto it = tiers_.find(generation);
    if (it == tiers_.end() || !it->second.reading)
      return wrong(generation, "pinned for when it comes, and does not come");
    coming += it->second.record.nbytes;
  }
  if (coming != coming_bytes_) return {Code::corrupt, "donor: what is to be pinned when it comes does not add up"};
  if (copies != tier_of_.size()) return {Code::corrupt, "donor: copies without a name"};
  uint64_t clean = 0;
  for (const auto& [index, nbytes] : clean_bytes_of_) {
    const Tiered* t = tier_of(index);
    if (!t || !t->at || !lru_.contains(index) || !lru_.parked(index))
      return {Code::corrupt, "donor: extent " + std::to_string(index) + " is called clean and is not"};
    clean += nbytes;
  }
  if (clean != clean_bytes_) return {Code::corrupt, "donor: clean bytes do not add up"};
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (table_->at(i).promoted && (state == ExtentState::committed || state == ExtentState::final) && !tier_of(i))
      return {Code::corrupt, "donor: extent " + std::to_string(i) + " is a copy of nothing"};
  }
  return {};
}

}  // namespace torch_mooncake::pool
