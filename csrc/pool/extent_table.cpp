#include "pool/extent_table.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "common/crc32c.h"
#include "common/failpoint.h"
#include "common/random.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint32_t kLayout = 2;
constexpr size_t kTableStep = 256 << 10;
constexpr size_t kRecordsStep = 1 << 20;
constexpr uint32_t kRecordMagic = 0x72636531;

struct RecordHeader {
  uint32_t magic;
  uint32_t crc;          // of all that follows
  uint64_t record_slab;  // kNoSlab, or the slab that this record is a cell of
  uint64_t data_slab;    // the same of the extent's bytes
  TxnId txn;
  uint16_t part, parts;
  uint32_t parent_nbytes;
  uint32_t key_nbytes, label_nbytes, meta_nbytes;
  uint16_t pieces;
  uint8_t kind, zero;
};
static_assert(sizeof(RecordHeader) == 64);
static_assert(kMaxParts <= UINT16_MAX);
constexpr size_t kCrcFrom = offsetof(RecordHeader, record_slab);

// Two copies, the older of which is written over.
struct StoredQuotas {
  uint32_t crc, count;
  uint64_t number;
  struct {
    uint64_t limit_bytes, prefix_nbytes;
    char prefix[kMaxQuotaPrefix];
  } quotas[kMaxQuotas];
};
constexpr size_t kQuotasOffset = 4096;  // in the table segment, behind what view_record.h has
static_assert(kQuotasOffset + 2 * sizeof(StoredQuotas) <= kTableHeaderBytes);
constexpr size_t kQuotasCrcFrom = offsetof(StoredQuotas, count);

StoredQuotas* quota_copies(std::byte* table) { return reinterpret_cast<StoredQuotas*>(table + kQuotasOffset); }

bool sound(const StoredQuotas& s) {
  if (s.count > kMaxQuotas || s.number == 0) return false;
  for (uint32_t i = 0; i < s.count; ++i)
    if (s.quotas[i].prefix_nbytes > kMaxQuotaPrefix) return false;
  return s.crc == crc32c(reinterpret_cast<const std::byte*>(&s) + kQuotasCrcFrom, sizeof s - kQuotasCrcFrom);
}

uint64_t record_nbytes(const RecordHeader& h) {
  return sizeof h + uint64_t{h.pieces} * sizeof(Piece) + h.key_nbytes + h.label_nbytes + h.meta_nbytes +
         h.parent_nbytes;
}

size_t records_capacity(uint32_t max_extents) { return (size_t{64} << 20) + size_t{max_extents} * 512; }

}  // namespace

Result<std::unique_ptr<ExtentTable>> ExtentTable::create(uint32_t max_extents) {
  std::unique_ptr<ExtentTable> t(new ExtentTable);
  const size_t capacity = kTableHeaderBytes + size_t{max_extents} * sizeof(ExtentEntry);
  TM_ASSIGN(t->table_, Segment::create("tm-table", std::min(capacity, kTableStep), capacity));
  TM_ASSIGN(t->records_, Segment::create("tm-records", kRecordsStep, records_capacity(max_extents)));
  TM_TRY(t->map());
  t->header_->layout = kLayout;
  t->header_->max_extents = max_extents;
  t->header_->next_generation = random_u64();
  t->header_->hash_seed = random_u64();
  std::atomic_ref(t->header_->magic).store(TableHeader::kMagic, std::memory_order_release);
  return t;
}

Status ExtentTable::map() {
  TM_ASSIGN(table_map_, table_->map(Protection::read_write));
  TM_ASSIGN(records_map_, records_->map(Protection::read_write));
  header_ = reinterpret_cast<TableHeader*>(table_map_->data);
  entries_ = reinterpret_cast<ExtentEntry*>(table_map_->data + kTableHeaderBytes);
  record_space_ = std::make_unique<Allocator>(Allocator::Options{
      records_->capacity(), records_->size(), kRecordsStep, [r = records_](uint64_t size) { return r->grow(size); }});
  return {};
}

Result<std::unique_ptr<ExtentTable>> ExtentTable::attach(std::shared_ptr<Segment> table,
                                                         std::shared_ptr<Segment> records, uint64_t data_bytes,
                                                         uint32_t* dropped) {
  std::unique_ptr<ExtentTable> t(new ExtentTable);
  t->table_ = std::move(table);
  t->records_ = std::move(records);
  TM_TRY(t->map());
  const TableHeader& header = *t->header_;
  if (header.magic != TableHeader::kMagic || header.layout != kLayout)
    return {Code::version_mismatch, "extent table of another layout (" + std::to_string(header.layout) + ")"};
  if (kTableHeaderBytes + uint64_t{header.entries} * sizeof(ExtentEntry) > t->table_->size())
    return {Code::corrupt, "extent table is shorter than its header says"};

  const uint64_t records_bytes = t->records_->size();
  auto whole = [&](const ExtentEntry& e) {
    if (e.record_nbytes < sizeof(RecordHeader) || e.record_nbytes > records_bytes ||
        e.record_offset > records_bytes - e.record_nbytes)
      return false;
    const std::byte* at = t->records_map_->data + e.record_offset;
    const auto& h = *reinterpret_cast<const RecordHeader*>(at);
    if (h.magic != kRecordMagic || record_nbytes(h) != e.record_nbytes || h.pieces != e.piece_count ||
        h.crc != crc32c(at + kCrcFrom, e.record_nbytes - kCrcFrom))
      return false;
    uint64_t sum = 0;
    const auto* pieces = reinterpret_cast<const Piece*>(&h + 1);
    for (uint32_t i = 0; i < h.pieces; ++i) {
      if (pieces[i].nbytes > data_bytes || pieces[i].offset > data_bytes - pieces[i].nbytes) return false;
      sum += pieces[i].nbytes;
    }
    return sum == e.nbytes;
  };
  std::vector<Placement> placements;
  std::vector<uint32_t> owners;
  for (uint32_t i = header.entries; i-- > 0;) {
    ExtentEntry& e = t->entries_[i];
    if (t->state(i) != ExtentState::free && (e.state > static_cast<uint32_t>(ExtentState::limbo) || !whole(e))) {
      t->set_state(i, ExtentState::free);
      ++*dropped;
    }
    if (t->state(i) == ExtentState::free) {
      t->free_.push_back(i);
      continue;
    }
    const auto& h = *reinterpret_cast<const RecordHeader*>(t->records_map_->data + e.record_offset);
    placements.push_back({{{0, e.record_offset, e.record_nbytes}}, h.record_slab});
    owners.push_back(i);
  }
  std::vector<Allocator::Claim> claims;
  for (size_t i = 0; i < owners.size(); ++i) claims.push_back({owners[i], &placements[i]});
  TM_TRY(t->record_space_->rebuild(claims));
  return t;
}

Result<uint32_t> ExtentTable::add(const Record& record) {
  uint32_t index = header_->entries;
  if (!free_.empty()) {
    index = free_.back();
  } else if (index >= header_->max_extents) {
    return {Code::pool_full, "all " + std::to_string(index) + " extents of the table are in use"};
  } else if (const size_t end = kTableHeaderBytes + (size_t{index} + 1) * sizeof(ExtentEntry); end > table_->size()) {
    TM_TRY(table_->grow(std::min(table_->capacity(), table_->size() + kTableStep)));
  }
  TM_TRY(write_record(index, record));
  if (free_.empty()) {
    header_->entries = index + 1;
  } else {
    free_.pop_back();
  }
  return index;
}

// Of an entry that is free, or becomes so while the fields change.
Status ExtentTable::write_record(uint32_t index, const Record& record) {
  RecordHeader h{};
  h.magic = kRecordMagic;
  h.data_slab = record.placement.slab;
  h.txn = record.txn;
  h.part = static_cast<uint16_t>(record.part);
  h.parts = static_cast<uint16_t>(record.parts);
  h.key_nbytes = static_cast<uint32_t>(record.key.size());
  h.label_nbytes = static_cast<uint32_t>(record.label.size());
  h.meta_nbytes = static_cast<uint32_t>(record.meta.size());
  h.parent_nbytes = static_cast<uint32_t>(record.parent.size());
  h.pieces = static_cast<uint16_t>(record.placement.pieces.size());
  h.kind = static_cast<uint8_t>(record.kind);
  TM_ASSIGN(Placement place, record_space_->allocate(record_nbytes(h), index, 1));
  h.record_slab = place.slab;
  std::byte* at = records_map_->data + place.pieces[0].offset;
  std::byte* out = at;
  auto append = [&](const void* data, size_t n) {
    if (n) std::memcpy(out, data, n);
    out += n;
  };
  append(&h, sizeof h);
  append(record.placement.pieces.data(), record.placement.pieces.size() * sizeof(Piece));
  append(record.key.data(), record.key.size());
  append(record.label.data(), record.label.size());
  append(record.meta.data(), record.meta.size());
  append(record.parent.data(), record.parent.size());
  reinterpret_cast<RecordHeader*>(at)->crc = crc32c(at + kCrcFrom, static_cast<size_t>(out - at) - kCrcFrom);

  ExtentEntry& e = entries_[index];
  set_state(index, ExtentState::free);
  e.record_segment = 0;
  e.record_offset = place.pieces[0].offset;
  e.record_nbytes = static_cast<uint32_t>(place.pieces[0].nbytes);
  e.piece_count = h.pieces;
  return {};
}

Result<uint64_t> ExtentTable::publish(uint32_t index, uint64_t nbytes, SessionId writer, ExtentState state) {
  TM_TRY(failpoint("donor.publish.record"));
  ExtentEntry& e = entries_[index];
  const KeyHash hash = key_hash(record(index).key);
  e.nbytes = nbytes;
  e.key_hash[0] = hash[0];
  e.key_hash[1] = hash[1];
  e.version_view = e.version_counter = 0;
  e.writer = writer;
  e.last_use = 0;
  e.uses = 0;
  e.crc32c = 0;
  e.has_crc = e.pin = 0;
  e.replicas = 0;
  e.ttl_ms = 0;
  e.committed_ns = 0;
  e.promoted = 0;
  TM_TRY(failpoint("donor.publish.fields"));
  const uint64_t generation = next_generation();
  e.content_generation = generation;
  std::atomic_ref(e.generation).store(generation, std::memory_order_release);
  TM_TRY(failpoint("donor.publish.generation"));
  set_state(index, state);
  return generation;
}

Status ExtentTable::rebind(uint32_t index, const Record& record) {
  TM_TRY(failpoint("donor.rebind"));
  ExtentEntry& e = entries_[index];
  const auto& h = *reinterpret_cast<const RecordHeader*>(records_map_->data + e.record_offset);
  const Placement before{{{0, e.record_offset, e.record_nbytes}}, h.record_slab};
  TM_TRY(write_record(index, record));
  const KeyHash hash = key_hash(record.key);
  e.key_hash[0] = hash[0];
  e.key_hash[1] = hash[1];
  if (!failpoint("donor.rebind.record")) std::abort();  // for tests that kill it here; there is no way back
  set_state(index, ExtentState::prepared);
  record_space_->free(before);
  return {};
}

void ExtentTable::remove(uint32_t index) {
  const ExtentEntry& e = entries_[index];
  const auto& h = *reinterpret_cast<const RecordHeader*>(records_map_->data + e.record_offset);
  const Placement place{{{0, e.record_offset, e.record_nbytes}}, h.record_slab};
  set_state(index, ExtentState::free);
  record_space_->free(place);
  free_.push_back(index);
}

void ExtentTable::invalidate(uint32_t index) {
  std::atomic_ref(entries_[index].generation).store(next_generation(), std::memory_order_release);
}

uint64_t ExtentTable::next_generation() {
  std::atomic_ref next(header_->next_generation);
  uint64_t g = next.fetch_add(1, std::memory_order_relaxed);
  if (g == 0) g = next.fetch_add(1, std::memory_order_relaxed);  // 0 means "no pin" in a slot
  return g;
}

std::vector<Quota> ExtentTable::quotas() const {
  const StoredQuotas* both = quota_copies(table_map_->data);
  const StoredQuotas* last = nullptr;
  for (const StoredQuotas* s : {both, both + 1})
    if (sound(*s) && (!last || s->number > last->number)) last = s;
  std::vector<Quota> out;
  for (uint32_t i = 0; last && i < last->count; ++i)
    out.push_back({std::string(last->quotas[i].prefix, last->quotas[i].prefix_nbytes), last->quotas[i].limit_bytes, 0});
  return out;
}

void ExtentTable::set_quotas(const std::vector<Quota>& quotas) {
  StoredQuotas* both = quota_copies(table_map_->data);
  const bool second = sound(both[0]) && (!sound(both[1]) || both[1].number < both[0].number);
  StoredQuotas fresh{};
  fresh.number = (sound(both[!second]) ? both[!second].number : 0) + 1;
  for (const Quota& q : quotas) {
    auto& to = fresh.quotas[fresh.count++];
    to.limit_bytes = q.limit_bytes;
    to.prefix_nbytes = q.prefix.copy(to.prefix, kMaxQuotaPrefix);
  }
  fresh.crc = crc32c(reinterpret_cast<const std::byte*>(&fresh) + kQuotasCrcFrom, sizeof fresh - kQuotasCrcFrom);
  std::memcpy(&both[second], &fresh, sizeof fresh);
  std::atomic_thread_fence(std::memory_order_release);
}

bool ExtentTable::ssd_is_dead(uint64_t path_hash) const {
  const uint32_t n = std::min(header_->dead_ssds, TableHeader::kDeadSsds);
  return header_->dead_ssds > n || std::count(header_->dead_ssd, header_->dead_ssd + n, path_hash) != 0;
}

void ExtentTable::set_ssd_dead(uint64_t path_hash) {
  if (ssd_is_dead(path_hash)) return;
  if (header_->dead_ssds < TableHeader::kDeadSsds) header_->dead_ssd[header_->dead_ssds] = path_hash;
  std::atomic_ref(header_->dead_ssds).fetch_add(1, std::memory_order_release);
}

ExtentState ExtentTable::state(uint32_t index) const {
  return static_cast<ExtentState>(
      std::atomic_ref(const_cast<uint32_t&>(entries_[index].state)).load(std::memory_order_acquire));
}

void ExtentTable::set_state(uint32_t index, ExtentState state) {
  std::atomic_ref(entries_[index].state).store(static_cast<uint32_t>(state), std::memory_order_release);
}

uint64_t ExtentTable::generation(uint32_t index) const {
  return std::atomic_ref(const_cast<uint64_t&>(entries_[index].generation)).load(std::memory_order_acquire);
}

Record ExtentTable::record(uint32_t index) const {
  const std::byte* at = records_map_->data + entries_[index].record_offset;
  const auto& h = *reinterpret_cast<const RecordHeader*>(at);
  const auto* pieces = reinterpret_cast<const Piece*>(&h + 1);
  const char* text = reinterpret_cast<const char*>(pieces + h.pieces);
  Record r;
  r.txn = h.txn;
  r.part = h.part;
  r.parts = h.parts;
  r.kind = static_cast<Kind>(h.kind);
  r.placement.pieces.assign(pieces, pieces + h.pieces);
  r.placement.slab = h.data_slab;
  r.key = {text, h.key_nbytes};
  r.label = {text + h.key_nbytes, h.label_nbytes};
  r.meta = {text + h.key_nbytes + h.label_nbytes, h.meta_nbytes};
  r.parent = {r.meta.data() + h.meta_nbytes, h.parent_nbytes};
  return r;
}

std::string_view ExtentTable::key(uint32_t index) const {
  const auto& h = *reinterpret_cast<const RecordHeader*>(records_map_->data + entries_[index].record_offset);
  return {reinterpret_cast<const char*>(&h + 1) + h.pieces * sizeof(Piece), h.key_nbytes};
}

Status ExtentTable::check() const {
  TM_TRY(record_space_->check());
  std::vector<bool> listed(header_->entries);
  for (uint32_t i : free_) {
    if (i >= header_->entries || listed[i]) return {Code::corrupt, "extent table: bad free list"};
    listed[i] = true;
  }
  uint64_t record_bytes = 0;
  for (uint32_t i = 0; i < header_->entries; ++i) {
    const std::string where = " of extent " + std::to_string(i);
    if ((state(i) == ExtentState::free) != listed[i]) return {Code::corrupt, "extent table: state" + where};
    if (listed[i]) continue;
    const ExtentEntry& e = entries_[i];
    const std::byte* at = records_map_->data + e.record_offset;
    const auto& h = *reinterpret_cast<const RecordHeader*>(at);
    if (h.magic != kRecordMagic || h.crc != crc32c(at + kCrcFrom, e.record_nbytes - kCrcFrom))
      return {Code::corrupt, "extent table: record" + where};
    record_bytes += Allocator::footprint(e.record_nbytes);
  }
  if (record_bytes != record_space_->used_bytes())
    return {Code::corrupt, "extent table: records take " + std::to_string(record_bytes) + " bytes, counted " +
                               std::to_string(record_space_->used_bytes())};
  return {};
}

}  // namespace torch_mooncake::pool
