#include "pool/donor.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "common/failpoint.h"
#include "common/log.h"
#include "pool/donor_impl.h"

namespace torch_mooncake::pool {
namespace {

Status not_found(ExtentRef extent) {
  return {Code::key_not_found, "extent " + std::to_string(extent.index) + " does not have that generation any more"};
}

Status wrong_state(const char* verb, uint32_t index, ExtentState state) {
  static constexpr const char* kNames[] = {"free", "prepared", "committed", "final", "superseded", "limbo"};
  return {Code::invalid_argument, std::string(verb) + " of extent " + std::to_string(index) + ", which is " +
                                      kNames[static_cast<uint32_t>(state)]};
}

int64_t expires_ns(const ExtentEntry& e) {
  return e.ttl_ms ? e.committed_ns + static_cast<int64_t>(e.ttl_ms) * 1'000'000 : INT64_MAX;
}

Pin pin_of(const ExtentEntry& e) { return static_cast<Pin>(e.pin); }

}  // namespace

Status check_request(const ReserveRequest& r) {
  if (r.key.empty() || r.key.size() > kMaxKeyBytes)
    return {Code::invalid_argument,
            "a key has 1 to " + std::to_string(kMaxKeyBytes) + " bytes, not " + std::to_string(r.key.size())};
  if (r.meta.size() > kMaxMetaBytes || r.label.size() > kMaxMetaBytes)
    return {Code::invalid_argument, "metadata and label have at most " + std::to_string(kMaxMetaBytes) + " bytes"};
  if (r.parent.size() > kMaxKeyBytes) return {Code::invalid_argument, "a parent is a key"};
  if (r.parts == 0 || r.parts > kMaxParts || r.part >= r.parts)
    return {Code::invalid_argument, "part " + std::to_string(r.part) + " of " + std::to_string(r.parts)};
  return {};
}

Result<std::unique_ptr<Donor>> Donor::create(DonorOptions options) {
  options.limit_bytes = options.limit_bytes / kPageBytes * kPageBytes;
  if (options.limit_bytes == 0 || options.max_extents > (1u << 30))
    return {Code::invalid_argument, "a donor needs a page of memory, and has 2^30 extents at most"};
  if (options.max_extents == 0)
    options.max_extents = static_cast<uint32_t>(std::clamp<uint64_t>(options.limit_bytes / 1024, 1u << 20, 1u << 28));
  TM_ASSIGN(auto table, ExtentTable::create(options.max_extents));
  TM_ASSIGN(auto data, Segment::create("tm-pool", 0, options.limit_bytes));
  auto donor = std::make_unique<DonorImpl>(std::move(options), std::move(table), std::move(data));
  TM_TRY(donor->open_ssds(false));
  return std::unique_ptr<Donor>(std::move(donor));
}

Result<std::unique_ptr<Donor>> Donor::attach(DonorOptions options, std::vector<HeldSegment> held) {
  std::shared_ptr<Segment> table_segment, records, data;
  for (const HeldSegment& h : held) {
    auto* slot = h.role == SegmentRole::table     ? &table_segment
                 : h.role == SegmentRole::records ? &records
                 : h.role == SegmentRole::data    ? &data
                                                  : nullptr;
    if (slot && *slot) return {Code::invalid_argument, "attach: two segments of one role"};
    if (slot) *slot = h.segment;
  }
  if (!table_segment || !records || !data) return {Code::invalid_argument, "attach: a segment is missing"};
  uint32_t dropped = 0;
  TM_ASSIGN(auto table, ExtentTable::attach(table_segment, records, data->size(), &dropped));
  options.limit_bytes = data->capacity();
  options.max_extents = table->max_extents();
  auto donor = std::make_unique<DonorImpl>(std::move(options), std::move(table), std::move(data));
  TM_TRY(donor->open_ssds(true));
  TM_TRY(donor->restore(held, dropped));
  return std::unique_ptr<Donor>(std::move(donor));
}

DonorImpl::DonorImpl(DonorOptions options, std::unique_ptr<ExtentTable> table, std::shared_ptr<Segment> data)
    : options_(std::move(options)),
      table_(std::move(table)),
      data_(std::move(data)),
      space_({options_.limit_bytes, data_->size(), options_.grow_step_bytes,
              [d = data_](uint64_t size) { return d->grow(size); }}),
      lru_(options_.limit_bytes, options_.max_extents) {}

Status DonorImpl::restore(const std::vector<HeldSegment>& held, uint32_t dropped) {
  if (dropped) log::warning("pool", std::to_string(dropped) + " damaged extent(s) dropped when attaching");
  for (const HeldSegment& h : held) {
    if (h.role != SegmentRole::slots) continue;
    TM_ASSIGN(auto map, h.segment->map(Protection::read_only));
    sessions_[h.tag] = {h.segment, std::move(map), true};
  }
  std::vector<uint32_t> ready;
  std::vector<Placement> placements;
  std::vector<Allocator::Claim> claims;
  placements.reserve(table_->entries());
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (state == ExtentState::free) continue;
    ExtentEntry& e = table_->at(i);
    if (!sessions_.count(e.writer)) e.writer = 0;
    const Record record = table_->record(i);
    placements.push_back(record.placement);
    claims.push_back({i, &placements.back()});
    // A changed word, or a state behind it, says that the extent was on its way out; so is a copy of what is no more.
    const bool stored = valid(i) && (state == ExtentState::committed || state == ExtentState::final);
    const bool open = valid(i) && state == ExtentState::prepared && !e.promoted && !record.key.empty();
    if (!open && !(stored && link_copy(i))) {
      if (valid(i)) table_->invalidate(i);
      table_->set_state(i, ExtentState::limbo);
      limbo_.push_back(i);
    } else if (open) {
      open_[record.txn].push_back(i);
      join_family(i);
    } else {
      ready.push_back(i);
      join_family(i);
    }
  }
  TM_TRY(space_.rebuild(claims));
  set_quotas(table_->quotas());
  std::sort(ready.begin(), ready.end(),
            [this](uint32_t a, uint32_t b) { return table_->at(a).last_use < table_->at(b).last_use; });
  for (uint32_t i : ready) {
    const ExtentEntry& e = table_->at(i);
    if (pin_of(e) == Pin::hard)
      keep(i);
    else
      lru_.restore(i, footprint(i), e.uses, e.last_use, pin_of(e) == Pin::soft, counted(i));
  }
  sweep_limbo();
  return {};
}

std::vector<HeldSegment> DonorImpl::held() const {
  std::vector<HeldSegment> held{{SegmentRole::table, 0, table_->table_segment()},
                                {SegmentRole::records, 0, table_->records_segment()},
                                {SegmentRole::data, 0, data_}};
  for (const auto& [id, session] : sessions_)
    if (session.slots) held.push_back({SegmentRole::slots, id, session.slots});
  return held;
}

Result<uint32_t> DonorImpl::find(ExtentRef extent) const {
  if (extent.index >= table_->entries() || table_->state(extent.index) == ExtentState::free ||
      table_->at(extent.index).content_generation != extent.generation)
    return not_found(extent);
  return extent.index;
}

Result<Reservation> DonorImpl::reserve(const ReserveRequest& request) {
  TM_TRY(check_request(request));
  if (request.nbytes > space_.limit_bytes()) return full(request.nbytes, "larger than the pool");
  Result<Reservation> reserved(Code::internal, "not reserved");
  const auto placed = with_parent(request, [&]() -> Result<uint32_t> {
    reserved = reserve_extent(request);
    if (!reserved.is_ok()) return reserved.status();
    return reserved->extent.index;
  });
  return placed.is_ok() ? std::move(reserved) : placed.status();
}

Result<uint32_t> DonorImpl::with_parent(const ReserveRequest& request, const std::function<Result<uint32_t>()>& place) {
  if (request.parent.empty()) return place();
  const KeyHash key = table_->key_hash(request.key), parent = table_->key_hash(request.parent);
  if (families_.comes_before(key, parent))
    return {Code::invalid_argument, "'" + request.parent + "' comes after '" + request.key + "', not before it"};
  families_.hold(parent);  // it is not evicted for its own child
  const auto placed = place();
  if (placed.is_ok()) join_family(*placed);
  release_parents(families_.let_go(parent));
  return placed;
}

Result<Reservation> DonorImpl::reserve_extent(const ReserveRequest& request) {
  TM_TRY(make_quota_room(request));
  Placement placement;
  for (;;) {
    TM_TRY(make_room(request.nbytes));
    auto taken = space_.allocate(request.nbytes, table_->next_index());
    if (taken.is_ok()) {
      placement = std::move(taken).value();
      break;
    }
    // The host has less memory than the limit says: make_room now works below the lower ceiling.
    if (taken.status().code() != Code::pool_full) return taken.status();
  }
  const Record record{request.txn, request.part,  request.parts, request.kind,  std::move(placement),
                      request.key, request.label, request.meta,  request.parent};
  auto reserved = add_extent(record, request.nbytes, request.writer, true);
  if (!reserved.is_ok()) return reserved;
  open_[request.txn].push_back(reserved->extent.index);
  count(reserved->extent.index);
  return reserved;
}

Result<Reservation> DonorImpl::add_extent(const Record& record, uint64_t nbytes, SessionId writer, bool may_evict) {
  auto added = table_->add(record);
  while (!added.is_ok() && added.status().code() == Code::pool_full && may_evict && evict_one())
    added = table_->add(record);
  if (!added.is_ok()) {
    space_.free(record.placement);
    return added.status();
  }
  const uint32_t index = *added;
  auto generation = table_->publish(index, nbytes, writer, ExtentState::prepared);
  if (!generation.is_ok()) {
    table_->remove(index);
    space_.free(record.placement);
    return generation.status();
  }
  if (writer != 0) sessions_.try_emplace(writer);
  return Reservation{{index, *generation}, record.placement.pieces};
}

void DonorImpl::join_family(uint32_t index) {
  const Record record = table_->record(index);
  if (!record.parent.empty()) families_.add(index, key_hash(index), table_->key_hash(record.parent));
}

// Their last children have gone: they may go, too.
void DonorImpl::release_parents(const std::vector<uint32_t>& parents) {
  for (uint32_t i : parents)
    if (lru_.contains(i) && lru_.parked(i) && !clean_bytes_of_.count(i) && !in_io(i)) lru_.unpark(i);
}

void DonorImpl::close_prepared(uint32_t index) {
  if (grants_.erase(index)) {
    granted_bytes_ -= footprint(index);
    return;
  }
  const auto txn = open_.find(table_->record(index).txn);
  std::erase(txn->second, index);
  if (txn->second.empty()) open_.erase(txn);
}

Status DonorImpl::commit(ExtentRef extent, Version version, std::optional<uint32_t> crc32c, uint64_t ttl_ms,
                         int64_t now_ns, uint32_t replicas, Pin pin) {
  if (const Tiered* t = tiered(extent); t && t->record.version == version) return {};  // told twice
  TM_ASSIGN(const uint32_t index, find(extent));
  ExtentEntry& e = table_->at(index);
  const ExtentState state = table_->state(index);
  if (state == ExtentState::committed || state == ExtentState::final) {
    if (Version{e.version_view, e.version_counter} == version) return {};  // told twice
    return wrong_state("commit", index, state);
  }
  if (state != ExtentState::prepared) return not_found(extent);
  e.version_view = version.view;
  e.version_counter = version.counter;
  e.crc32c = crc32c.value_or(0);
  e.has_crc = crc32c.has_value();
  e.replicas = static_cast<uint16_t>(replicas);
  e.pin = static_cast<uint8_t>(pin);
  e.ttl_ms = ttl_ms;
  e.committed_ns = ttl_ms ? now_ns : 0;
  TM_TRY(failpoint("donor.commit.fields"));
  close_prepared(index);
  enter_eviction(index);
  e.writer = 0;  // who asks for the commit has written
  table_->set_state(index, ExtentState::committed);
  TM_TRY(failpoint("donor.commit.done"));
  return {};
}

Status DonorImpl::finalize(ExtentRef extent) {
  if (tiered(extent)) return {};  // only what is FINAL goes there
  TM_ASSIGN(const uint32_t index, find(extent));
  const ExtentState state = table_->state(index);
  if (state == ExtentState::final) return {};
  if (state != ExtentState::committed) return wrong_state("finalize", index, state);
  table_->set_state(index, ExtentState::final);
  clean_ahead();
  return {};
}

Status DonorImpl::supersede(ExtentRef extent) {
  if (tiered(extent)) {
    remove(extent, [](const Status&) {});
    return {};
  }
  TM_ASSIGN(const uint32_t index, find(extent));
  const ExtentState state = table_->state(index);
  if (state == ExtentState::superseded || state == ExtentState::limbo) return {};
  if (state == ExtentState::prepared) return wrong_state("supersede", index, state);
  table_->invalidate(index);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  TM_TRY(failpoint("donor.supersede.word"));
  table_->set_state(index, ExtentState::superseded);
  leave_eviction(index);
  return {};
}

Status DonorImpl::free(ExtentRef extent) {
  if (tiered(extent)) return supersede(extent);
  TM_ASSIGN(const uint32_t index, find(extent));
  if (table_->state(index) != ExtentState::limbo) retire({index});
  return {};
}

void DonorImpl::drop_txn(const TxnId& txn) {
  if (auto it = open_.find(txn); it != open_.end()) retire(std::vector<uint32_t>(it->second));
}

std::vector<std::pair<TxnId, std::string>> DonorImpl::prepared() const {
  std::vector<std::pair<TxnId, std::string>> out;
  for (const auto& [txn, extents] : open_) {
    std::set<std::string_view> keys;
    for (uint32_t i : extents)
      if (!table_->at(i).promoted) keys.insert(table_->record(i).key);
    for (std::string_view key : keys) out.emplace_back(txn, key);
  }
  return out;
}

void DonorImpl::touch(ExtentRef extent) {
  if (Tiered* t = tiered(extent)) ++t->hits;
  const auto found = resident(extent);
  if (!found.is_ok() || !lru_.contains(*found)) return;  // gone meanwhile: nothing to prolong
  lru_.touch(*found);
  save_uses(*found);
}

void DonorImpl::refresh(std::span<const ExtentRef> last_first) {
  uint32_t uses = 0;  // of those after it
  for (ExtentRef extent : last_first) {
    const auto found = resident(extent);
    if (!found.is_ok() || !lru_.contains(*found)) continue;
    lru_.refresh(*found, uses);
    save_uses(*found);
    if (in_io(*found)) lru_.park(*found);
    uses = lru_.uses(*found);
  }
}

void DonorImpl::enter_eviction(uint32_t index) {
  const ExtentEntry& e = table_->at(index);
  if (pin_of(e) == Pin::hard) return keep(index);
  lru_.insert(index, e.key_hash[0], footprint(index), pin_of(e) == Pin::soft, counted(index));
  save_uses(index);
}

void DonorImpl::keep(uint32_t index) {
  if (kept_.insert(index).second) kept_bytes_ += footprint(index);
}

void DonorImpl::leave_eviction(uint32_t index) {
  if (lru_.contains(index)) lru_.remove(index);
  if (kept_.erase(index)) kept_bytes_ -= footprint(index);
}

void DonorImpl::set_pin(ExtentRef extent, Pin pin, Done done) {
  Tiered* t = tiered(extent);
  if (t && !t->dram) {
    const Pin before = std::exchange(t->record.pin, pin);
    if (pin != Pin::hard) return done({});
    return promote(extent, [this, extent, before, done](const Status& s) {  // which makes it an extent that is kept
      if (Tiered* now = tiered(extent); now && !now->dram && !s.is_ok()) now->record.pin = before;
      done(s);
    });
  }
  const auto found = resident(extent);
  if (!found.is_ok() || !valid(*found) || table_->state(*found) == ExtentState::prepared)
    return done(not_found(extent));
  if (t) t->record.pin = pin;
  ExtentEntry& e = table_->at(*found);
  if (pin_of(e) == pin) return done({});
  const uint32_t uses = e.uses;
  leave_eviction(*found);
  take_off_clean(*found);
  e.pin = static_cast<uint8_t>(pin);
  enter_eviction(*found);
  if (lru_.contains(*found)) {
    lru_.refresh(*found, uses);
    save_uses(*found);
  }
  done({});
}

void DonorImpl::save_uses(uint32_t index) {
  table_->at(index).last_use = lru_.last_use(index);
  table_->at(index).uses = lru_.uses(index);
}

Announcement DonorImpl::announcement(uint32_t index) const {
  const ExtentEntry& e = table_->at(index);
  Record r = table_->record(index);
  const ExtentRef own{index, e.content_generation};
  const Tiered* t = e.promoted ? tier_of(index) : nullptr;
  return {std::string(r.key),
          r.kind,
          {e.version_view, e.version_counter},
          table_->state(index),
          e.nbytes,
          std::string(r.meta),
          std::string(r.label),
          r.part,
          r.parts,
          r.txn,
          t ? t->name() : own,
          std::move(r.placement.pieces),
          e.crc32c,
          e.has_crc != 0,
          e.ttl_ms,
          e.committed_ns,
          Tier::dram,
          t ? std::optional(own) : std::nullopt,
          std::max<uint32_t>(1, e.replicas),
          pin_of(e),
          std::string(r.parent)};
}

Result<Announcement> DonorImpl::describe(ExtentRef extent) const {
  if (const Tiered* t = tiered(extent)) {
    if (!t->dram) return {Code::busy, "extent " + std::to_string(extent.index) + " is on an SSD"};
    return announcement(*t->dram);
  }
  TM_ASSIGN(const uint32_t index, find(extent));
  if (!valid(index) || table_->at(index).promoted) return not_found(extent);
  return announcement(index);
}

std::vector<Announcement> Donor::announce() const {
  std::vector<Announcement> out;
  announce([&out](Announcement a) { out.push_back(std::move(a)); });
  return out;
}

void DonorImpl::announce(const std::function<void(Announcement)>& fn) const {
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (state == ExtentState::committed || state == ExtentState::final) fn(announcement(i));
  }
  for (const auto& [generation, t] : tiers_)
    if (!t.dram && t.at) fn(announcement(t));
}

std::vector<Announcement> DonorImpl::announce_prepared() const {
  std::vector<Announcement> out;
  for (const auto& [txn, extents] : open_)
    for (uint32_t i : extents)
      if (!table_->at(i).promoted) out.push_back(announcement(i));
  return out;
}

std::vector<std::string> DonorImpl::keys(std::string_view prefix, size_t limit, int64_t now_ns,
                                         std::string_view after) const {
  std::vector<std::string_view> found;
  std::string_view bound;  // from it on nothing is among the first
  auto cut = [&] {
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    if (found.size() < limit) return;
    found.resize(limit);
    bound = found.back();
  };
  auto add = [&](std::string_view key) {
    if (!key.starts_with(prefix) || key <= after || (!bound.empty() && key >= bound)) return;
    found.push_back(key);
    if (found.size() / 2 >= limit) cut();
  };
  for (const auto& [generation, t] : tiers_) {
    const ssd::Record& r = t.record;
    const bool over = r.ttl_ms && r.committed_ns + static_cast<int64_t>(r.ttl_ms) * 1'000'000 <= now_ns;
    if (!t.dram && t.at && !over) add(r.key);
  }
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (state != ExtentState::committed && state != ExtentState::final) continue;
    if (expires_ns(table_->at(i)) > now_ns) add(table_->key(i));
  }
  cut();
  return {found.begin(), found.end()};
}

}  // namespace torch_mooncake::pool
