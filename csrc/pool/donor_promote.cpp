// From SSD to memory. A record is read into memory of our own, checked, and then copied into a new extent: a disk that
// hangs may write into what it was given long after this process is dead, and the pool's memory outlives it.
#include <algorithm>

#include "common/clock.h"
#include "memory/copy.h"
#include "pool/donor_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kRoomNs = 5'000'000'000;  // how long a promotion waits for room
constexpr uint64_t kWaitingBytes = 64 << 20;
constexpr uint64_t kCopyInline = 1 << 20;  // longer ones are copied beside

}  // namespace

void DonorImpl::promote(ExtentRef extent, Done done) {
  Tiered* t = tiered(extent);
  if (!t) {
    const auto found = find(extent);
    return done(found.is_ok() && valid(*found) ? Status{} : Status(Code::key_not_found, "not there any more"));
  }
  if (t->dram) return done({});
  if (!t->at) return done({Code::key_not_found, "it is not on the disk any more"});
  ++t->hits;
  t->waiters.push_back(std::move(done));
  if (std::exchange(t->reading, true)) return;
  // What has been read and finds no room is held in memory that nobody lent: not much of it.
  if (waiting_bytes_ < kWaitingBytes) return read_from_disk(extent.generation);
  unread_.push_back(extent.generation);
}

void DonorImpl::read_from_disk(uint64_t generation) {
  const auto it = tiers_.find(generation);
  if (it == tiers_.end() || !it->second.reading) return;
  if (!it->second.at) return fire(it->second, {Code::key_not_found, "it is not on the disk any more"});
  const DiskSpot from = *it->second.at;
  stores_[from.store]->store->read(
      from.spot, [this, generation, from](Result<ssd::Loaded> l) { loaded(generation, from, std::move(l)); });
}

void DonorImpl::loaded(uint64_t generation, const DiskSpot& from, Result<ssd::Loaded> loaded) {
  const auto it = tiers_.find(generation);
  if (it == tiers_.end()) return;  // removed meanwhile; who waited has been told
  Tiered& t = it->second;
  if (loaded.is_ok()) return place(generation, std::make_shared<ssd::Loaded>(std::move(loaded).value()));
  fire(t, {Code::key_not_found, loaded.status().message()});
  // Its segment is going (told then), or its disk is given up, or it was moved meanwhile.
  if (loaded.status().code() == Code::key_not_found || t.at != from) return;
  set_at(t, {});
  bad_spot(generation, from);
}

void DonorImpl::place(uint64_t generation, std::shared_ptr<ssd::Loaded> loaded) {
  const auto it = tiers_.find(generation);
  if (it == tiers_.end()) return;
  Tiered& t = it->second;
  const ssd::Record& r = loaded->head.record;
  if (!t.at) {  // its segment was reclaimed, or its disk given up
    fire(t, {Code::key_not_found, "it is not on the disk any more"});
    return settle(generation);
  }
  ReserveRequest request;
  request.txn = txn_of(t.name());
  request.key = r.key;
  request.kind = r.kind;
  request.nbytes = r.nbytes;
  request.part = r.part;
  request.parts = r.parts;
  request.meta = r.meta;
  request.label = r.label;
  auto reserved = reserve(request);
  if (!reserved.is_ok()) {
    if (reserved.status().code() != Code::pool_full || over_quota(reserved.status())) return fire(t, reserved.status());
    waiting_bytes_ += r.nbytes;
    waiting_promotions_.push_back({generation, std::move(loaded), steady_ns() + kRoomNs});
    return;
  }
  const uint32_t index = reserved->extent.index;
  table_->at(index).promoted = 1;
  in_io_[index] = reserved->extent.generation;
  auto copy = [map = data_map_, pieces = reserved->pieces, loaded] {
    const std::byte* from = loaded->data;
    for (const Piece& p : pieces) {
      copy_bytes(map->data + p.offset, from, p.nbytes);
      from += p.nbytes;
    }
  };
  if (r.nbytes <= kCopyInline) {
    copy();
    return placed(generation, reserved->extent);
  }
  copier_->run([this, copy, generation, extent = reserved->extent, inbox = inbox_] {
    copy();
    inbox->put([this, generation, extent] { placed(generation, extent); });
  });
}

void DonorImpl::placed(uint64_t generation, ExtentRef extent) {
  in_io_.erase(extent.index);
  const auto it = tiers_.find(generation);
  const bool still = table_->state(extent.index) == ExtentState::prepared &&
                     table_->at(extent.index).content_generation == extent.generation;
  if (it == tiers_.end() || !still) {  // removed meanwhile
    if (still) retire({extent.index});
    sweep_limbo();
    if (it != tiers_.end()) fire(it->second, {Code::key_not_found, "not there any more"});
    return;
  }
  Tiered& t = it->second;
  const ssd::Record& r = t.record;
  ExtentEntry& e = table_->at(extent.index);
  e.version_view = r.version.view;
  e.version_counter = r.version.counter;
  e.crc32c = r.crc32c.value_or(0);
  e.has_crc = r.crc32c.has_value();
  e.pin = static_cast<uint8_t>(r.pin);
  e.ttl_ms = r.ttl_ms;
  e.committed_ns = r.committed_ns;
  close_prepared(extent.index);
  enter_eviction(extent.index);
  table_->set_state(extent.index, ExtentState::final);
  if (auto coming = take_coming_pins(t); !coming.empty()) hints_[extent.index] = std::move(coming);
  t.dram = extent.index;
  tier_of_[extent.index] = generation;
  ++ssd_counts_.promotions;
  if (tier_changed_) tier_changed_(announcement(t));
  fire(t, {});
}

void DonorImpl::retry_promotions(int64_t now_ns) {
  auto waiting = std::exchange(waiting_promotions_, {});
  while (!waiting.empty()) {
    WaitingPromotion w = std::move(waiting.front());
    waiting.pop_front();
    waiting_bytes_ -= w.loaded->head.record.nbytes;
    const auto it = tiers_.find(w.generation);
    if (it == tiers_.end()) continue;
    if (now_ns >= w.until_ns) {
      fire(it->second, full(w.loaded->head.record.nbytes, "no room to bring it back from the SSD"));
      continue;
    }
    const size_t before = waiting_promotions_.size();
    const int64_t until = w.until_ns;
    place(w.generation, std::move(w.loaded));
    if (waiting_promotions_.size() == before) continue;
    waiting_promotions_.back().until_ns = until;  // as long as it was; those behind it wait their turn
    std::move(waiting.begin(), waiting.end(), std::back_inserter(waiting_promotions_));
    break;
  }
  while (!unread_.empty() && waiting_bytes_ < kWaitingBytes) {
    const uint64_t next = unread_.front();
    unread_.pop_front();
    read_from_disk(next);
  }
}

}  // namespace torch_mooncake::pool
