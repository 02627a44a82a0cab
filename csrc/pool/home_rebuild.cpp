// What donors announce: the first time (the directory is rebuilt from it) and again (it is compared with what is
// known).
#include <algorithm>
#include <tuple>

#include "pool/home.h"

namespace torch_mooncake::pool {
namespace {

bool is_stored(ExtentState state) { return state == ExtentState::committed || state == ExtentState::final; }

}  // namespace

void Home::expect(const NodeId& node) {
  if (donor_index(node)) return;
  donors_.push_back({node, DonorState::State::expected, true});
  ++expected_;
}

void Home::announce(const NodeId& node, const std::vector<Announced>& extents) {
  auto index = donor_index(node);
  for (const Announced& a : extents) {
    highest_version_view_ = std::max(highest_version_view_, a.version.view);
    if (a.version.view == view_) counter_ = std::max(counter_, a.version.counter);
  }
  const bool was_complete = complete();
  if (!index) {
    index = static_cast<uint32_t>(donors_.size());
    donors_.push_back({node, DonorState::State::here, false});
  }
  DonorState& state = donors_[*index];
  if (state.state == DonorState::State::expected) --expected_;
  if (state.state == DonorState::State::gone) state.trusted = false;
  state.state = DonorState::State::here;
  if (was_complete) return compare(*index, extents);

  for (auto& [hash, candidates] : candidates_)  // it may have announced before, and restarted
    std::erase_if(candidates, [&](const Candidate& c) { return c.donor == *index; });
  Heard heard;
  heard.reserve(extents.size());
  for (const Announced& a : extents) {
    const KeyHash h = hash(a.key);
    // Only a donor of the last view can know what has become of its named keys.
    if (!state.trusted && a.kind == Kind::named) {
      if (!is_stored(a.state)) {
        drop_prepared(h, *index, a);
      } else {
        send(h, *index, make_mark(Mark::What::supersede, h, a.extent), false);
      }
      continue;
    }
    Candidate c;
    c.donor = *index;
    c.part = a.part;
    c.extent = a.extent;
    c.tier = a.tier;
    c.version = a.version;
    c.txn = a.txn;
    c.kind = a.kind;
    c.state = a.state;
    c.parts = a.parts;
    c.replicas = a.replicas;
    c.pin = a.pin;
    if (a.left_ms) c.expires_ns = now_ns_ + static_cast<int64_t>(*a.left_ms) * 1'000'000;
    heard.emplace_back(h, c);
  }
  if (complete()) return judge_all(heard);
  candidates_.reserve(candidates_.size() + heard.size());
  for (const auto& [h, candidate] : heard) candidates_[h].push_back(candidate);
  wake_all();  // what is FINAL or sealed is served already
}

// Complete entries that are sealed or FINAL: their steps were over, so nobody has seen a newer one.
Found Home::served_early(const Candidates& candidates) const {
  std::map<Version, std::vector<const Candidate*>, std::greater<>> versions;
  for (const Candidate& c : candidates)
    if (c.expires_ns > now_ns_ && (c.state == ExtentState::final || (c.kind == Kind::sealed && is_stored(c.state))))
      versions[c.version].push_back(&c);
  for (const auto& [version, list] : versions) {
    std::vector<Spot> spots;
    Found found{Found::State::found, list[0]->kind, version, list[0]->parts, INT64_MAX, list[0]->pin, {}};
    for (const Candidate* c : list) {
      found.expires_ns = std::min(found.expires_ns, c->expires_ns);
      spots.push_back(*c);
      found.places.push_back({c->part, {donors_[c->donor].id, c->extent, c->tier}});
    }
    if (whole(spots, found.parts)) return found;
  }
  return Found::not_yet();
}

// What the last donor said is not put beside what others have: a table of everything, filled and read in a random
// order, takes longer than all the rest. Its keys are gone through in the order of the index instead.
void Home::judge_all(const Heard& heard) {
  if (!complete()) return;
  auto others = std::exchange(candidates_, {});
  const bool any = !others.empty() || !heard.empty();
  struct Place {
    uint64_t shard, at;
    size_t i;
  };
  std::vector<Place> order;
  order.reserve(heard.size());
  for (size_t i = 0; i < heard.size(); ++i) order.push_back({heard[i].first[0] % kShards, heard[i].first[1], i});
  std::sort(order.begin(), order.end(), [&](const Place& a, const Place& b) {
    return std::tie(a.shard, a.at, heard[a.i].first[0], a.i) < std::tie(b.shard, b.at, heard[b.i].first[0], b.i);
  });
  constexpr size_t kAhead = 16;  // what was said lies where it was said
  for (size_t at = 0; at < order.size();) {
    if (at + kAhead < order.size()) {
      const auto* next = reinterpret_cast<const std::byte*>(&heard[order[at + kAhead].i]);
      for (size_t line = 0; line < sizeof heard[0]; line += 64) __builtin_prefetch(next + line);
    }
    const KeyHash& hash = heard[order[at].i].first;
    Candidates candidates;
    if (auto of_others = others.extract(hash)) candidates = std::move(of_others.mapped());
    for (; at < order.size() && heard[order[at].i].first == hash; ++at) candidates.push_back(heard[order[at].i].second);
    judge(hash, std::move(candidates));
  }
  for (auto& [hash, candidates] : others) judge(hash, std::move(candidates));
  if (any) look_for_short();
  std::vector<KeyHash> waiting;
  for (const auto& [hash, busy] : busy_)
    if (busy.phase == Phase::idle) waiting.push_back(hash);
  for (const KeyHash& hash : waiting) advance(hash);
  wake_all();
}

// Was that PREPARED extent written before the commit that had begun? One writer's certainly. The parts of several
// writers share a transaction, and one that was replaced may have left what it had half written: such an object is
// dropped. It was never acknowledged, nor has anything been superseded for it, as a part of it is not COMMITTED
// anywhere.
bool Home::completes(const Candidate& prepared, const Op& op) { return op.parts == 1 && prepared.txn == op.txn; }

void Home::judge(const KeyHash& hash, Candidates candidates) {
  if (candidates.empty()) return;
  // As almost all are: one copy, of one writer.
  if (const Candidate& only = candidates[0]; candidates.size() == 1 && only.parts == 1 && is_stored(only.state)) {
    const uint32_t replicas = std::max<uint32_t>(1, only.replicas);
    set_entry(hash, {only.version, only.kind, 1, only.expires_ns, {only}, replicas, only.pin});
    if (only.state != ExtentState::final)
      send(hash, only.donor, make_mark(Mark::What::finalize, hash, only.extent), false);
    return;
  }
  std::map<Version, Candidates, std::greater<>> versions;
  Candidates prepared;
  for (const Candidate& c : candidates) (is_stored(c.state) ? versions[c.version] : prepared).push_back(c);

  // The highest version that is whole, or will be once the PREPARED parts of its transaction are completed.
  auto chosen = versions.begin();
  Op op;
  for (; chosen != versions.end(); ++chosen) {
    op = {};
    op.what = Op::What::repair;
    op.version = chosen->first;
    op.txn = chosen->second[0].txn;
    op.kind = chosen->second[0].kind;
    op.parts = chosen->second[0].parts;
    std::vector<Spot> spots;
    auto add = [&](const Candidate& c, NewSpot::State state) {
      NewSpot spot;
      static_cast<Spot&>(spot) = c;
      spot.state = state;
      op.spots.push_back(spot);
      spots.push_back(c);
    };
    for (const Candidate& c : chosen->second) {
      add(c, NewSpot::State::committed);
      op.expires_ns = std::min(op.expires_ns, c.expires_ns);
      op.replicas = std::max(op.replicas, c.replicas);
      op.pin = std::max(op.pin, c.pin);
    }
    for (const Candidate& c : prepared)
      if (completes(c, op)) add(c, NewSpot::State::prepared);
    if (whole(spots, op.parts)) break;
  }
  const bool found = chosen != versions.end();
  for (const Candidate& c : prepared) {
    if (found && completes(c, op)) continue;
    Mark mark = make_mark(Mark::What::drop, hash, c.extent);
    mark.txn = c.txn;
    send(hash, c.donor, mark, false);
  }

  std::vector<Spot> olds;
  for (const auto& [version, list] : versions) {
    for (const Candidate& c : list) {
      if (found && version == chosen->first) continue;
      if (found && op.kind == Kind::sealed && c.kind == Kind::sealed && op.parts == 1 && c.parts == 1) {
        NewSpot copy;  // any copy of a sealed key is valid
        static_cast<Spot&>(copy) = c;
        copy.state = NewSpot::State::committed;
        op.spots.push_back(copy);
      } else {
        olds.push_back(c);
        if (found && op.spots.size() > chosen->second.size()) op.rest.push_back(c);
      }
    }
  }
  if (!found) {  // never whole: nobody can have seen it, or its last replica is lost
    for (const Spot& spot : olds) send(hash, spot.donor, make_mark(Mark::What::supersede, hash, spot.extent), false);
    return;
  }
  const bool all_marked = std::all_of(op.spots.begin(), op.spots.end(),
                                      [](const NewSpot& s) { return s.state == NewSpot::State::committed; });
  if (all_marked && olds.empty()) {
    IndexEntry entry{op.version, op.kind, op.parts, op.expires_ns, {}, op.replicas, op.pin};
    for (const NewSpot& spot : op.spots) entry.spots.push_back(spot);
    set_entry(hash, entry);
    for (const Candidate& c : chosen->second)
      if (c.state != ExtentState::final) send(hash, c.donor, make_mark(Mark::What::finalize, hash, c.extent), false);
    return;
  }
  Busy& busy = busy_[hash];
  busy.op = std::move(op);
  busy.olds = std::move(olds);
  start_marking(hash, busy);
}

Home::Op* Home::open_op(const KeyHash& hash, const TxnId& txn) {
  const auto it = busy_.find(hash);
  if (it == busy_.end()) return nullptr;
  Busy& busy = it->second;
  if (busy.phase != Phase::idle && busy.op.txn == txn) return &busy.op;
  const auto op = std::find_if(busy.queue.begin(), busy.queue.end(), [&](const Op& o) { return o.txn == txn; });
  return op == busy.queue.end() ? nullptr : &*op;
}

// Its writer may be unknown to a worker that has restarted, which waits for our word then, however long. So whatever
// is under way either counts on the extent or says, once it is over, that it can go.
void Home::drop_prepared(const KeyHash& hash, uint32_t donor, const Announced& a) {
  if (groups_.count(a.txn)) return;
  if (Op* op = open_op(hash, a.txn)) {
    const Spot spot{donor, a.part, a.extent, a.tier};
    op->strays |= std::none_of(op->spots.begin(), op->spots.end(),
                               [&](const NewSpot& s) { return s == spot && s.state != NewSpot::State::gone; });
    return;
  }
  Mark mark = make_mark(Mark::What::drop, hash, a.extent);
  mark.txn = a.txn;
  send(hash, donor, mark, false);
}

// Does the operation under way count on this extent, though no mark is out for it?
bool Home::needs(const Busy& busy, const Spot& spot) {
  const auto is_it = [&](const Spot& other) { return other == spot; };
  const bool will_be_asked = busy.phase == Phase::marking;
  return std::any_of(busy.op.spots.begin(), busy.op.spots.end(),
                     [&](const NewSpot& s) { return s == spot && s.state == NewSpot::State::committed; }) ||
         std::any_of(busy.op.rest.begin(), busy.op.rest.end(), is_it) ||
         (will_be_asked && std::any_of(busy.olds.begin(), busy.olds.end(), is_it));
}

void Home::compare(uint32_t donor, const std::vector<Announced>& extents) {
  std::vector<std::pair<uint32_t, uint64_t>> there;
  for (const Announced& a : extents)
    if (is_stored(a.state)) there.emplace_back(a.extent.index, a.extent.generation);
  std::sort(there.begin(), there.end());
  const auto is_there = [&](ExtentRef e) {
    return std::binary_search(there.begin(), there.end(), std::pair(e.index, e.generation));
  };
  std::vector<std::pair<KeyHash, ExtentRef>> missing;
  entries_.for_each([&](const KeyHash& hash, const Index::Ref& e) {
    for (size_t i = 0; i < e.spots(); ++i)
      if (const Spot spot = e.spot(i); spot.donor == donor && !is_there(spot.extent))
        missing.emplace_back(hash, spot.extent);
  });
  for (const auto& [hash, busy] : busy_) {
    auto check = [&, h = hash](const Spot& spot, bool stored) {
      if (spot.donor == donor && stored && !is_there(spot.extent)) missing.emplace_back(h, spot.extent);
    };
    for (const NewSpot& spot : busy.op.spots) check(spot, spot.state == NewSpot::State::committed);
    for (const Candidate& c : busy.op.rest) check(c, true);
  }
  for (const auto& [hash, extent] : missing) forget_spot(hash, donor, extent);

  std::set<std::pair<uint32_t, uint64_t>> asked;  // what a mark is out for, to be sent again
  for (const auto& [id, out] : outstanding_)
    if (out.donor == donor) asked.emplace(out.mark.extent.index, out.mark.extent.generation);
  for (const Announced& a : extents) {
    const KeyHash h = hash(a.key);
    Spot spot{donor, a.part, a.extent, a.tier};
    if (!is_stored(a.state)) {
      drop_prepared(h, donor, a);
      continue;
    }
    const Index::Ref known = entries_.find(h);
    bool as_known = false;
    for (size_t i = 0; known && !as_known && i < known.spots(); ++i)
      as_known = known.spot(i) == spot && known.spot(i).tier == a.tier;
    if (as_known && known.pin() == a.pin) continue;
    IndexEntry entry = known ? known.entry() : IndexEntry{};
    if (const auto same = std::find(entry.spots.begin(), entry.spots.end(), spot); same != entry.spots.end()) {
      if (same->tier != a.tier) {
        same->tier = a.tier;
        update_entry(h, entry, a.key);
      }
      if (a.pin != entry.pin) send_pin(h, donor, a.extent, entry.pin, false);  // its SSD has remembered another
      continue;
    }
    if (asked.count({a.extent.index, a.extent.generation})) continue;
    const auto busy = busy_.find(h);
    if (busy != busy_.end() && needs(busy->second, spot)) continue;
    // The directory is complete: it knows every named extent that counts.
    const bool free_key = !known && busy == busy_.end();
    const bool copy = known && entry.kind == Kind::sealed && entry.parts == 1;
    if (a.kind != Kind::sealed || a.parts != 1 || !(free_key || copy)) {
      send(h, donor, make_mark(Mark::What::supersede, h, a.extent), false);
    } else if (copy) {
      entry.spots.push_back(spot);
      update_entry(h, entry, a.key);
      if (a.pin != entry.pin) send_pin(h, donor, a.extent, entry.pin, false);
    } else {
      const int64_t expires_ns = a.left_ms ? now_ns_ + static_cast<int64_t>(*a.left_ms) * 1'000'000 : INT64_MAX;
      set_entry(h, {a.version, a.kind, 1, expires_ns, {spot}, a.replicas, a.pin});
      wake(h);
    }
  }
  for (auto& [id, out] : outstanding_) {
    if (out.donor != donor) continue;
    out.again = false;
    out.mark.view = view_;
    actions_.emplace_back(SendMark{id, donors_[donor].id, out.mark});
  }
}

}  // namespace torch_mooncake::pool
