#include "pool/home.h"

#include <array>

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kMs = 1'000'000;

}  // namespace

void Home::set_view(uint64_t view) { view_ = std::max(view_, view); }

std::optional<uint32_t> Home::donor_index(const NodeId& id) const {
  for (uint32_t i = 0; i < donors_.size(); ++i)
    if (donors_[i].id == id) return i;
  return std::nullopt;
}

bool Home::knows(const NodeId& node) const {
  const auto index = donor_index(node);
  return index && donors_[*index].state == DonorState::State::here;
}

bool Home::whole(const std::vector<Spot>& spots, uint32_t parts) {
  if (parts == 1) return !spots.empty();
  std::vector<bool> have(parts);
  uint32_t n = 0;
  for (const Spot& spot : spots) {
    if (spot.part >= parts || have[spot.part]) continue;
    have[spot.part] = true;
    ++n;
  }
  return n == parts;
}

// --- what is asked ---

bool Home::between(const KeyHash& hash) const {
  const auto busy = busy_.find(hash);
  if (busy == busy_.end()) return false;
  const Op::What what = busy->second.op.what;
  const bool flipping = busy->second.phase == Phase::superseding && what != Op::What::expire;
  const bool repairing = busy->second.phase != Phase::idle && what == Op::What::repair;
  return flipping || repairing;
}

std::vector<Found::State> Home::states(std::span<const std::string_view> keys) const {
  std::vector<Found::State> out(keys.size());
  if (!complete()) {
    for (size_t i = 0; i < keys.size(); ++i) out[i] = find(keys[i]).state;
    return out;
  }
  constexpr size_t kTogether = 32;  // their slots are on the way from memory at once
  std::array<KeyHash, kTogether> hashes;
  for (size_t begin = 0; begin < keys.size(); begin += kTogether) {
    const size_t n = std::min(kTogether, keys.size() - begin);
    for (size_t i = 0; i < n; ++i) {
      hashes[i] = hash(keys[begin + i]);
      entries_.prefetch(hashes[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      const Index::Ref e = entries_.find(hashes[i]);
      out[begin + i] = !busy_.empty() && between(hashes[i]) ? Found::State::later
                       : !e || expired(e)                   ? Found::State::missing
                                                            : Found::State::found;
    }
  }
  return out;
}

Found Home::find(std::string_view key) const {
  const KeyHash h = hash(key);
  if (!complete()) {
    const auto it = candidates_.find(h);
    return it == candidates_.end() ? Found::not_yet() : served_early(it->second);
  }
  if (between(h)) return Found::not_yet();
  const Index::Ref e = entries_.find(h);
  if (!e || expired(e)) return {};
  Found found{Found::State::found, e.kind(), e.version(), e.parts(), e.expires_ns(), e.pin(), {}};
  found.places.reserve(e.spots());
  for (size_t i = 0; i < e.spots(); ++i) {
    const Spot spot = e.spot(i);
    found.places.push_back({spot.part, {donors_[spot.donor].id, spot.extent, spot.tier}});
  }
  return found;
}

void Home::watch(RequestId request, std::string_view key, bool present) {
  const KeyHash h = hash(key);
  watches_[h].emplace_back(request, present);
  watched_[request].push_back(h);
}

void Home::unwatch(RequestId request) {
  const auto it = watched_.find(request);
  if (it == watched_.end()) return;
  for (const KeyHash& h : it->second) {
    const auto list = watches_.find(h);
    if (list == watches_.end()) continue;
    std::erase_if(list->second, [request](const auto& w) { return w.first == request; });
    if (list->second.empty()) watches_.erase(list);
  }
  watched_.erase(it);
}

void Home::wake(const KeyHash& hash) {
  const auto it = watches_.find(hash);
  if (it == watches_.end()) return;
  const bool present = static_cast<bool>(entries_.find(hash));
  std::vector<RequestId> ready;
  std::erase_if(it->second, [&](const auto& watch) {
    if (watch.second && !present) return false;
    ready.push_back(watch.first);
    return true;
  });
  if (it->second.empty()) watches_.erase(it);
  for (RequestId request : ready) {
    const auto mine = watched_.find(request);
    if (mine != watched_.end()) {
      if (const auto at = std::find(mine->second.begin(), mine->second.end(), hash); at != mine->second.end())
        mine->second.erase(at);
      if (mine->second.empty()) watched_.erase(mine);
    }
    actions_.emplace_back(Ready{request});
  }
}

void Home::wake_all() {
  std::vector<KeyHash> all;
  for (const auto& [h, list] : watches_) all.push_back(h);
  for (const KeyHash& h : all) wake(h);
}

Result<TxnId> Home::begin(std::string_view key, std::string_view label, uint32_t parts, int64_t deadline_ns,
                          const TxnId& fresh) {
  const KeyHash h = hash(key);
  for (auto& [txn, group] : groups_) {
    if (group.hash != h || group.label != label) continue;
    if (group.parts != parts)
      return {Code::invalid_argument, "another writer of this object says it has " + std::to_string(group.parts) +
                                          " parts, not " + std::to_string(parts)};
    group.deadline_ns = std::max(group.deadline_ns, deadline_ns);
    return txn;
  }
  Group& group = groups_[fresh];
  group.hash = h;
  group.label = label;
  group.parts = parts;
  group.deadline_ns = deadline_ns;
  return fresh;
}

void Home::commit(RequestId request, const CommitCall& call, int64_t deadline_ns) {
  const KeyHash h = hash(call.head.key);
  auto refuse = [&](Status why) { actions_.emplace_back(CommitDone{request, std::move(why)}); };
  if (!call.head.sound() || call.replicas.empty())
    return refuse({Code::invalid_argument, "commit of no replica or of a part that is not there"});
  if (call.head.view > view_)
    return refuse({Code::pool_unavailable, "this directory node knows view " + std::to_string(view_) +
                                               ", the request is of view " + std::to_string(call.head.view)});
  if (call.binding && (call.head.parts != 1 || call.replicas.size() != 1 || call.binding->key != call.head.key ||
                       call.binding->kind != call.head.kind))
    return refuse({Code::invalid_argument, "what was granted becomes one object, of one replica and one writer"});
  std::vector<NewSpot> spots;
  for (const ReplicaRef& replica : call.replicas) {
    const auto index = donor_index(replica.node);
    if (!index || gone(*index)) return refuse({Code::peer_lost, "a donor of this object has left the pool"});
    NewSpot spot;
    spot.donor = *index;
    spot.part = call.head.part;
    spot.extent = replica.extent;
    spot.crc32c = call.crc32c;
    spots.push_back(spot);
  }
  if (call.head.parts == 1) {
    Op op;
    if (observed_) op.key = call.head.key;
    op.requests = {request};
    op.kind = call.head.kind;
    op.if_exists = call.if_exists;
    op.txn = call.head.txn;
    op.spots = std::move(spots);
    op.deadline_ns = deadline_ns;
    op.ttl_ms = call.ttl_ms;
    op.pin = call.pin;
    if (call.binding) op.binding = std::make_shared<const Binding>(*call.binding);
    op.replicas = static_cast<uint32_t>(call.replicas.size());
    return enqueue(h, std::move(op));
  }
  const auto it = groups_.find(call.head.txn);
  if (it == groups_.end() || it->second.hash != h)
    return refuse({Code::deadline_exceeded, "the other writers of this object have given up: nothing was stored"});
  Group& group = it->second;
  if (call.head.parts != group.parts) return refuse({Code::invalid_argument, "writers differ in the number of parts"});
  if (group.have.count(call.head.part))
    return refuse({Code::key_exists, "part " + std::to_string(call.head.part) + " was written by another writer"});
  if (group.have.empty()) {
    if (observed_) group.op.key = call.head.key;
    group.op.kind = call.head.kind;
    group.op.if_exists = call.if_exists;
    group.op.txn = call.head.txn;
    group.op.parts = group.parts;
    group.op.ttl_ms = call.ttl_ms;
    group.op.pin = call.pin;
  } else if (group.op.kind != call.head.kind || group.op.if_exists != call.if_exists ||
             group.op.ttl_ms != call.ttl_ms || group.op.pin != call.pin) {
    return refuse({Code::invalid_argument, "writers of one object differ in their options"});
  }
  group.have.insert(call.head.part);
  group.op.replicas = std::max(group.op.replicas, static_cast<uint32_t>(call.replicas.size()));
  group.op.requests.push_back(request);
  group.op.spots.insert(group.op.spots.end(), spots.begin(), spots.end());
  group.op.deadline_ns = std::min(group.op.deadline_ns, deadline_ns);
  if (group.have.size() < group.parts) return;
  Op op = std::move(group.op);
  groups_.erase(it);
  enqueue(h, std::move(op));
}

void Home::remove(RequestId request, std::string_view key, int64_t deadline_ns, std::optional<Version> only) {
  Op op;
  op.what = Op::What::remove;
  op.requests = {request};
  op.only = only;
  op.deadline_ns = deadline_ns;
  enqueue(hash(key), std::move(op));
}

void Home::pin(RequestId request, std::string_view key, Pin pin, int64_t deadline_ns) {
  Op op;
  op.what = Op::What::pin;
  op.requests = {request};
  op.pin = pin;
  op.deadline_ns = deadline_ns;
  enqueue(hash(key), std::move(op));
}

// --- one operation after the other ---

void Home::enqueue(const KeyHash& hash, Op op) {
  busy_[hash].queue.push_back(std::move(op));
  advance(hash);
}

void Home::advance(const KeyHash& hash) {
  for (auto it = busy_.find(hash); it != busy_.end(); it = busy_.find(hash)) {
    Busy& busy = it->second;
    if (busy.phase != Phase::idle) return;
    if (busy.queue.empty()) {
      busy_.erase(it);
      return;
    }
    if (!complete()) return;
    Op op = std::move(busy.queue.front());
    busy.queue.pop_front();
    start(hash, busy, std::move(op));
  }
}

void Home::start(const KeyHash& hash, Busy& busy, Op op) {
  const Index::Ref existing = entries_.find(hash);
  const bool there = static_cast<bool>(existing);
  if (op.what == Op::What::expire) {
    if (!there || existing.version() != op.only) return;  // replaced or lost meanwhile
    busy.op = std::move(op);
    return start_superseding(hash, busy);
  }
  const bool exists = there && !expired(existing);
  if (op.what == Op::What::pin && exists) {
    op.version = existing.version();
    busy.op = std::move(op);
    busy.phase = Phase::pinning;
    return start_pinning(hash, busy, busy.op.pin);
  }
  if (op.what == Op::What::remove || op.what == Op::What::pin) {
    if (!exists || (op.only && existing.version() != *op.only)) {
      actions_.emplace_back(RemoveDone{op.requests[0], false});
      return;
    }
    busy.op = std::move(op);
    return start_superseding(hash, busy);
  }
  for (const NewSpot& spot : op.spots)
    if (gone(spot.donor)) return fail_op(hash, op, {Code::peer_lost, "a donor of this object has left the pool"});
  if (op.what == Op::What::copy) return start_copy(hash, busy, std::move(op));
  if (exists) {
    if (existing.kind() != op.kind)
      return fail_op(
          hash, op,
          {Code::invalid_argument, existing.kind() == Kind::sealed ? "this key is sealed: remove it first"
                                                                   : "this key is named, so it cannot be sealed"});
    if (op.if_exists == IfExists::error) return fail_op(hash, op, {Code::key_exists, "the key exists"});
    if (op.kind == Kind::sealed || op.if_exists == IfExists::keep) {
      drop(hash, op);
      return answer(op, {}, false, existing.version());
    }
  }
  op.version = {view_, ++counter_};
  busy.op = std::move(op);
  start_marking(hash, busy);
}

void Home::start_marking(const KeyHash& hash, Busy& busy) {
  busy.phase = Phase::marking;
  busy.failure = {};
  busy.outstanding = 0;
  for (const NewSpot& spot : busy.op.spots) {
    if (spot.state != NewSpot::State::prepared) continue;
    Mark mark = make_mark(Mark::What::commit, hash, spot.extent);
    mark.version = busy.op.version;
    mark.crc32c = spot.crc32c;
    mark.txn = busy.op.txn;
    if (busy.op.binding) mark.binding = *busy.op.binding;
    mark.ttl_ms = busy.op.ttl_ms;
    mark.replicas = busy.op.replicas;
    mark.pin = busy.op.pin;
    mark.copy = busy.op.what == Op::What::copy;
    if (busy.op.expires_ns != INT64_MAX)  // completed in a rebuild: what is left of it
      mark.ttl_ms = static_cast<uint64_t>(std::max<int64_t>(1, (busy.op.expires_ns - now_ns_) / kMs));
    send(hash, spot.donor, mark, true);
    ++busy.outstanding;
  }
  if (busy.outstanding == 0) step_over(hash, busy);
}

void Home::start_superseding(const KeyHash& hash, Busy& busy) {
  busy.phase = Phase::superseding;
  busy.outstanding = 0;
  if (const Index::Ref e = entries_.find(hash))
    for (size_t i = 0; i < e.spots(); ++i) busy.olds.push_back(e.spot(i));
  for (const Spot& old : busy.olds) {
    if (gone(old.donor)) continue;
    send(hash, old.donor, make_mark(Mark::What::supersede, hash, old.extent), true);
    ++busy.outstanding;
  }
  if (busy.outstanding == 0) step_over(hash, busy);
}

void Home::step_over(const KeyHash& hash, Busy& busy) {
  const bool copied = busy.phase == Phase::marking && busy.failure.is_ok() && busy.op.what == Op::What::copy;
  if (busy.phase == Phase::marking && busy.failure.is_ok() && !copied) return start_superseding(hash, busy);
  if (busy.phase == Phase::marking && !copied) {  // undo before anybody is told
    busy.phase = Phase::aborting;
    drop(hash, busy.op);
    for (const NewSpot& spot : busy.op.spots) {
      if (spot.state != NewSpot::State::committed || gone(spot.donor)) continue;
      send(hash, spot.donor, make_mark(Mark::What::supersede, hash, spot.extent), true);
      ++busy.outstanding;
    }
    if (busy.outstanding != 0) return;
  }
  const bool refused = busy.phase == Phase::pinning && !busy.failure.is_ok();
  if (const Index::Ref e = entries_.find(hash); refused && e && e.version() == busy.op.version) {
    busy.phase = Phase::unpinning;  // as before, wherever it was done
    return start_pinning(hash, busy, e.pin());
  }
  Candidates fallback;
  if (busy.phase == Phase::pinning || busy.phase == Phase::unpinning) {
    join_pin(hash, busy);
  } else if (copied) {
    join_copy(hash, busy);
  } else if (busy.phase == Phase::superseding) {
    flip(hash, busy);
  } else {
    answer(busy.op, busy.failure, false, {});
    fallback = std::move(busy.op.rest);
  }
  if (busy.op.strays || (busy.op.what == Op::What::put && busy.op.parts > 1)) drop_everywhere(hash, busy.op.txn);
  busy.phase = Phase::idle;
  busy.op = {};
  busy.olds.clear();
  busy.failure = {};
  judge(hash, std::move(fallback));
  wake(hash);
  advance(hash);
}

void Home::flip(const KeyHash& hash, Busy& busy) {
  Op& op = busy.op;
  if (op.what == Op::What::remove || op.what == Op::What::expire) {
    erase_entry(hash);
    for (RequestId request : op.requests) actions_.emplace_back(RemoveDone{request, true});
    return;
  }
  IndexEntry entry{op.version, op.kind, op.parts, op.expires_ns, {}, op.replicas, op.pin};
  if (op.ttl_ms != 0) entry.expires_ns = now_ns_ + static_cast<int64_t>(op.ttl_ms) * kMs;
  for (const NewSpot& spot : op.spots)
    if (spot.state == NewSpot::State::committed && !gone(spot.donor)) entry.spots.push_back(spot);
  const bool is_whole = whole(entry.spots, entry.parts);
  for (const Spot& spot : entry.spots)
    send(hash, spot.donor, make_mark(is_whole ? Mark::What::finalize : Mark::What::supersede, hash, spot.extent),
         false);
  if (is_whole) {
    if (entry.spots.size() < size_t{entry.replicas} * entry.parts) short_.insert(hash);
    set_entry(hash, entry, std::move(op.key));
  } else {
    erase_entry(hash);  // evicted already, or lost with its donor
  }
  answer(op, is_whole ? Status{} : busy.failure, true, op.version);
}

// --- pins ---

void Home::start_pinning(const KeyHash& hash, Busy& busy, Pin pin) {
  const IndexEntry entry = entries_.find(hash).entry();
  busy.outstanding = static_cast<uint32_t>(entry.spots.size());
  for (const Spot& spot : entry.spots) send_pin(hash, spot.donor, spot.extent, pin, true);
}

void Home::send_pin(const KeyHash& hash, uint32_t donor, ExtentRef extent, Pin pin, bool wait) {
  Mark mark = make_mark(Mark::What::pin, hash, extent);
  mark.pin = pin;
  send(hash, donor, mark, wait);
}

void Home::join_pin(const KeyHash& hash, Busy& busy) {
  const Index::Ref existing = entries_.find(hash);
  const bool there = existing && existing.version() == busy.op.version;  // not lost meanwhile
  if (there && busy.failure.is_ok()) {
    IndexEntry entry = existing.entry();
    entry.pin = busy.op.pin;
    entries_.set(hash, entry);
  }
  const Result<bool> result = busy.failure.is_ok() ? Result<bool>(there) : Result<bool>(busy.failure);
  for (RequestId request : busy.op.requests) actions_.emplace_back(RemoveDone{request, result});
}

void Home::answer(const Op& op, const Status& failure, bool stored, Version version) {
  for (RequestId request : op.requests) {
    if (failure.is_ok()) {
      actions_.emplace_back(CommitDone{request, CommitAnswer{version, stored}});
    } else {
      actions_.emplace_back(CommitDone{request, failure});
    }
  }
}

void Home::fail_op(const KeyHash& hash, const Op& op, const Status& why) {
  if (op.what == Op::What::remove || op.what == Op::What::pin) {
    for (RequestId request : op.requests) actions_.emplace_back(RemoveDone{request, why});
    return;
  }
  drop(hash, op);
  answer(op, why, false, {});
}

void Home::drop(const KeyHash& hash, const Op& op) {
  if (op.parts > 1 || op.strays) return drop_everywhere(hash, op.txn);
  std::set<uint32_t> donors;
  for (const NewSpot& spot : op.spots) {
    if (gone(spot.donor) || !donors.insert(spot.donor).second) continue;
    Mark mark = make_mark(Mark::What::drop, hash, spot.extent);
    mark.txn = op.txn;
    send(hash, spot.donor, mark, false);
  }
}

// Of several writers: also what one has reserved who never came, or whom another replaced. Of one: also what it has
// reserved at a donor that died before it could say so, for which the writer took another.
void Home::drop_everywhere(const KeyHash& hash, const TxnId& txn) {
  for (uint32_t i = 0; i < donors_.size(); ++i) {
    if (donors_[i].state != DonorState::State::here) continue;
    Mark mark = make_mark(Mark::What::drop, hash, {});
    mark.txn = txn;
    send(hash, i, mark, false);
  }
}

// --- marks ---

Mark Home::make_mark(Mark::What what, const KeyHash& hash, ExtentRef extent) const {
  Mark mark;
  mark.what = what;
  mark.view = view_;
  mark.shard = shard_of(hash);
  mark.extent = extent;
  return mark;
}

void Home::send(const KeyHash& hash, uint32_t donor, Mark mark, bool wait) {
  MarkId id = 0;
  if (wait) {
    id = next_mark_++;
    outstanding_[id] = {hash, donor, mark};
  }
  actions_.emplace_back(SendMark{id, donors_[donor].id, std::move(mark)});
}

void Home::mark_done(MarkId id, const Status& status) {
  const auto it = outstanding_.find(id);
  if (it == outstanding_.end()) return;
  const bool undoing = it->second.mark.what != Mark::What::commit && it->second.mark.what != Mark::What::pin;
  // What is not there has certainly lost its word; anything else that is no final refusal is asked again.
  const bool settled =
      status.is_ok() || status.code() == Code::key_not_found || (!undoing && status.code() != Code::pool_unavailable);
  if (!settled) {
    it->second.again = true;
    return;
  }
  const Outstanding done = std::move(it->second);
  outstanding_.erase(it);
  resolve_mark(done.hash, done.donor, done.mark, undoing ? Status{} : status);
}

void Home::resolve_mark(const KeyHash& hash, uint32_t donor, const Mark& mark, const Status& status) {
  const auto it = busy_.find(hash);
  if (it == busy_.end() || it->second.outstanding == 0) return;
  Busy& busy = it->second;
  if (mark.what == Mark::What::commit) {
    for (NewSpot& spot : busy.op.spots) {
      if (!(spot == Spot{donor, 0, mark.extent, {}}) || spot.state != NewSpot::State::prepared) continue;
      spot.state = status.is_ok() ? NewSpot::State::committed : NewSpot::State::gone;
    }
    if (!status.is_ok()) busy.failure = status;
  }
  const bool failed = !status.is_ok() && status.code() != Code::key_not_found;
  if (busy.phase == Phase::pinning && failed) busy.failure = status;
  if (--busy.outstanding == 0) step_over(hash, busy);
}

// --- losses ---

void Home::evicted(const NodeId& node, std::string_view key, ExtentRef extent) {
  if (const auto index = donor_index(node)) forget_spot(hash(key), *index, extent);
}

void Home::moved(const NodeId& node, std::string_view key, ExtentRef extent, Tier tier) {
  const auto index = donor_index(node);
  const KeyHash h = hash(key);
  const Index::Ref known = entries_.find(h);
  if (!index || !known) return;
  IndexEntry entry = known.entry();
  for (Spot& spot : entry.spots)
    if (spot == Spot{*index, 0, extent, tier}) spot.tier = tier;
  update_entry(h, entry, key);
}

void Home::forget_spot(const KeyHash& hash, uint32_t donor, ExtentRef extent) {
  const Spot gone_spot{donor, 0, extent, {}};
  if (const auto it = candidates_.find(hash); it != candidates_.end())
    std::erase_if(it->second, [&](const Candidate& c) { return c == gone_spot; });
  if (const auto it = busy_.find(hash); it != busy_.end()) {
    for (NewSpot& spot : it->second.op.spots)
      if (spot == gone_spot) spot.state = NewSpot::State::gone;
    std::erase_if(it->second.op.rest, [&](const Candidate& c) { return c == gone_spot; });
  }
  const Index::Ref known = entries_.find(hash);
  if (!known) return;
  IndexEntry entry = known.entry();
  if (std::erase(entry.spots, gone_spot) == 0) return;
  update_entry(hash, entry);
  if (!whole(entry.spots, entry.parts)) lost(hash);
}

// Some part of the key is nowhere: the key is gone, never its own past. What is left of it can be served by nobody.
void Home::lost(const KeyHash& hash) {
  for (const Spot& spot : entries_.find(hash).entry().spots)
    if (!gone(spot.donor)) send(hash, spot.donor, make_mark(Mark::What::supersede, hash, spot.extent), false);
  erase_entry(hash);
}

// --- entries ---

void Home::observe(bool on) {
  observed_ = on;
  if (!on) changes_.clear();
}

void Home::set_entry(const KeyHash& hash, const IndexEntry& entry, std::string key) {
  const Index::Ref old = entries_.find(hash);
  if (old && old.expires_ns() != INT64_MAX) expiries_.erase({old.expires_ns(), hash});
  if (observed_)
    changes_.push_back(
        {hash, std::move(key), KeyChange::stored, entry.kind, entry.version, tier_of(entry.spots, entry.parts)});
  if (entry.expires_ns != INT64_MAX) expiries_.emplace(entry.expires_ns, hash);
  entries_.set(hash, entry);
}

void Home::update_entry(const KeyHash& hash, const IndexEntry& entry, std::string_view key) {
  const Tier tier = tier_of(entry.spots, entry.parts);
  if (observed_ && whole(entry.spots, entry.parts) && entries_.find(hash).tier() != tier)
    changes_.push_back({hash, std::string(key), KeyChange::moved, entry.kind, entry.version, tier});
  entries_.set(hash, entry);
}

void Home::erase_entry(const KeyHash& hash) {
  if (forget_entry(hash) && observed_) changes_.push_back({hash, {}, KeyChange::removed, {}, {}, {}});
}

bool Home::forget_entry(const KeyHash& hash) {
  const Index::Ref old = entries_.find(hash);
  if (!old) return false;
  if (old.expires_ns() != INT64_MAX) expiries_.erase({old.expires_ns(), hash});
  entries_.erase(hash);
  return true;
}

void Home::expire() {
  while (!expiries_.empty() && expiries_.begin()->first <= now_ns_) {
    const KeyHash hash = expiries_.begin()->second;
    expiries_.erase(expiries_.begin());  // its operation takes it from here
    Op op;
    op.what = Op::What::expire;
    op.only = entries_.find(hash).version();
    enqueue(hash, std::move(op));
  }
}

void Home::expel(const NodeId& node) {
  const auto index = donor_index(node);
  if (!index || gone(*index)) return;
  DonorState& state = donors_[*index];
  if (state.state == DonorState::State::expected) --expected_;
  state.state = DonorState::State::gone;
  forget_donor(*index);
  std::vector<Outstanding> over;
  for (auto it = outstanding_.begin(); it != outstanding_.end();) {
    if (it->second.donor != *index) {
      ++it;
      continue;
    }
    over.push_back(std::move(it->second));
    it = outstanding_.erase(it);
  }
  const Status why(Code::peer_lost, "a donor was lost during the commit");
  for (const Outstanding& o : over)
    resolve_mark(o.hash, o.donor, o.mark, o.mark.what == Mark::What::commit ? why : Status{});
  judge_all({});
}

void Home::forget_donor(uint32_t donor) {
  for (auto& [hash, candidates] : candidates_)
    std::erase_if(candidates, [donor](const Candidate& c) { return c.donor == donor; });
  std::vector<KeyHash> had;
  entries_.for_each([&](const KeyHash& hash, const Index::Ref& e) {
    for (size_t i = 0; i < e.spots(); ++i)
      if (e.spot(i).donor == donor) return had.push_back(hash);
  });
  for (const KeyHash& hash : had) {
    IndexEntry entry = entries_.find(hash).entry();
    std::erase_if(entry.spots, [donor](const Spot& s) { return s.donor == donor; });
    update_entry(hash, entry);
    if (!whole(entry.spots, entry.parts)) {
      lost(hash);
    } else if (entry.replicas > 1) {
      short_.insert(hash);
    }
  }
  for (auto& [hash, busy] : busy_) {
    std::erase_if(busy.op.rest, [donor](const Candidate& c) { return c.donor == donor; });
    if (busy.phase == Phase::marking) std::erase_if(busy.olds, [donor](const Spot& s) { return s.donor == donor; });
    for (NewSpot& spot : busy.op.spots) {
      if (spot.donor != donor || spot.state != NewSpot::State::committed) continue;
      spot.state = NewSpot::State::gone;
      busy.failure = {Code::peer_lost, "a donor was lost during the commit"};
    }
  }
}

// --- time ---

void Home::tick(int64_t now_ns) {
  at(now_ns);
  expire();
  const Status why(Code::deadline_exceeded, "the commit had not begun: nothing was stored");
  std::vector<KeyHash> touched;
  for (auto& [hash, busy] : busy_) {
    const size_t before = busy.queue.size();
    std::erase_if(busy.queue, [&, h = hash](const Op& op) {
      if (op.deadline_ns > now_ns) return false;
      fail_op(h, op, why);
      return true;
    });
    if (busy.queue.size() != before) touched.push_back(hash);
  }
  for (const KeyHash& hash : touched) advance(hash);
  std::erase_if(groups_, [&](const auto& item) {
    const Group& group = item.second;
    if (std::min(group.op.deadline_ns, group.deadline_ns) > now_ns) return false;
    fail_op(group.hash, group.op,
            {Code::deadline_exceeded, std::to_string(group.have.size()) + " of " + std::to_string(group.parts) +
                                          " parts came in time: nothing was stored"});
    if (group.have.empty()) drop_everywhere(group.hash, item.first);
    return true;
  });
  for (auto& [id, out] : outstanding_) {
    if (!out.again) continue;
    out.again = false;
    out.mark.view = view_;
    actions_.emplace_back(SendMark{id, donors_[out.donor].id, out.mark});
  }
}

Status Home::check() const {
  for (const auto& [expires_ns, hash] : expiries_) {
    const Index::Ref e = entries_.find(hash);
    if (!e || e.expires_ns() != expires_ns) return {Code::corrupt, "something that is not there is to expire"};
  }
  Status wrong;
  entries_.for_each([&](const KeyHash& hash, const Index::Ref& e) {
    const IndexEntry entry = e.entry();
    if (!whole(entry.spots, entry.parts)) wrong = {Code::corrupt, "an entry lacks a part"};
    for (const Spot& spot : entry.spots)
      if (gone(spot.donor)) wrong = {Code::corrupt, "an entry points at a donor that is gone"};
    if (entries_.find(hash).version() != entry.version) wrong = {Code::corrupt, "an entry is not found"};
  });
  TM_TRY(wrong);
  std::map<uint64_t, uint64_t> marks;
  for (const auto& [id, out] : outstanding_) {
    if (!busy_.count(out.hash)) return {Code::corrupt, "a mark is outstanding without an operation"};
    ++marks[out.hash[0]];
  }
  for (const auto& [hash, busy] : busy_)
    if (marks[hash[0]] != busy.outstanding) return {Code::corrupt, "an operation waits for no mark"};
  return {};
}

}  // namespace torch_mooncake::pool
