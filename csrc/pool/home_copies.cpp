// Copies: which keys have fewer replicas than they should, and how another one becomes theirs.
//
// A copy has the version of what it is a copy of: step 2 of a commit (its donor marks it COMMITTED) with that version,
// then the index has it too. Like everything that is done to a key it waits for its turn, so that whatever supersedes
// the version afterwards supersedes the copy; if the version has been superseded before its turn came, it is dropped.
// When it expires its donor knows from the copied one: a mark may arrive late, and a rebuilt home goes by the donors.
#include "pool/home.h"

namespace torch_mooncake::pool {

std::vector<KeyHash> Home::take_short(size_t limit) {
  std::vector<KeyHash> out;
  while (complete() && !short_.empty() && out.size() < limit) out.push_back(short_.extract(short_.begin()).value());
  return out;
}

std::vector<MissingCopy> Home::missing(const KeyHash& hash, const std::set<NodeId>& leaving) const {
  std::vector<MissingCopy> out;
  const Index::Ref e = entries_.find(hash);
  if (!e || expired(e) || (leaving.empty() && e.replicas() <= 1)) return out;
  std::map<uint32_t, MissingCopy> parts;
  std::map<uint32_t, size_t> stays;
  for (size_t i = 0; i < e.spots(); ++i) {
    const Spot spot = e.spot(i);
    const NodeId& node = donors_[spot.donor].id;
    parts[spot.part].from.push_back({node, spot.extent, spot.tier});
    stays[spot.part] += !leaving.count(node);
  }
  for (auto& [part, missing] : parts) {
    if (stays[part] >= (leaving.empty() ? e.replicas() : 1)) continue;
    missing.hash = hash;
    missing.version = e.version();
    missing.part = part;
    out.push_back(std::move(missing));
  }
  return out;
}

std::vector<KeyHash> Home::only_on(const NodeId& node, const std::set<NodeId>& leaving) const {
  std::vector<KeyHash> out;
  const auto donor = donor_index(node);
  if (!donor) return out;
  entries_.for_each([&](const KeyHash& hash, const Index::Ref& e) {
    for (size_t i = 0; i < e.spots(); ++i) {
      if (e.spot(i).donor != *donor) continue;
      if (!missing(hash, leaving).empty()) out.push_back(hash);
      return;
    }
  });
  return out;
}

void Home::look_for_short() {
  entries_.for_each([&](const KeyHash& hash, const Index::Ref& e) {
    if (e.replicas() > 1 && e.spots() < size_t{e.replicas()} * e.parts()) short_.insert(hash);
  });
}

void Home::add_copy(RequestId request, const MissingCopy& of, const ReplicaRef& copy, const TxnId& txn,
                    std::optional<uint32_t> crc32c) {
  const auto donor = donor_index(copy.node);
  if (!donor || gone(*donor)) {
    actions_.emplace_back(CommitDone{request, Status(Code::peer_lost, "the donor of the copy has left the pool")});
    return;
  }
  Op op;
  op.what = Op::What::copy;
  op.requests = {request};
  op.only = of.version;
  op.txn = txn;
  NewSpot spot;
  spot.donor = *donor;
  spot.part = of.part;
  spot.extent = copy.extent;
  spot.crc32c = crc32c;
  op.spots = {spot};
  enqueue(of.hash, std::move(op));
}

void Home::start_copy(const KeyHash& hash, Busy& busy, Op op) {
  const Index::Ref existing = entries_.find(hash);
  if (!existing || expired(existing) || existing.version() != *op.only)
    return fail_op(hash, op, {Code::key_not_found, "replaced or gone while it was copied"});
  for (size_t i = 0; i < existing.spots(); ++i)
    if (const Spot spot = existing.spot(i); spot.donor == op.spots[0].donor && spot.part == op.spots[0].part)
      return fail_op(hash, op, {Code::key_exists, "the donor has this already"});
  op.version = existing.version();
  op.kind = existing.kind();
  op.replicas = existing.replicas();
  op.pin = existing.pin();
  busy.op = std::move(op);
  start_marking(hash, busy);
}

void Home::join_copy(const KeyHash& hash, Busy& busy) {
  const NewSpot& copy = busy.op.spots[0];
  const Index::Ref existing = entries_.find(hash);
  const bool here = copy.state == NewSpot::State::committed && !gone(copy.donor);
  const bool joins = here && existing && existing.version() == busy.op.version;
  if (joins) {
    IndexEntry entry = existing.entry();
    entry.spots.push_back(copy);
    update_entry(hash, entry);
  }
  if (here)
    send(hash, copy.donor, make_mark(joins ? Mark::What::finalize : Mark::What::supersede, hash, copy.extent), false);
  answer(busy.op, joins ? Status{} : Status(Code::key_not_found, "lost while it was copied"), true, busy.op.version);
}

}  // namespace torch_mooncake::pool
