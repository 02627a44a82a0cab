// A leader goes on while etcd does not answer, as long as every node whose named objects count vouches for it.
//
// The rules
//  1. A leader that has had no renewal for two beats asks all members that etcd may have recorded. Who follows it
//     promises to follow and to be no other leader for kVouchMs and a tenth, by its own clock; the promise is kept in
//     its memory's header page, and outlives its worker. If all have promised, the leader goes on for kVouchMs from
//     when it asked, by its clock: without a gap, and for bridge_ms after its last renewal at most.
//  2. Who has promised takes the lead, and joins another leader, only when that is over. Until then it comes back to
//     the leader it has promised to follow, at the address that one gave.
//  3. Who is not recorded, while others are, takes the lead only if nobody has led for bridge_ms and a tenth: it saw
//     that the key was gone, and then who had written the record, and the same has still.
//  4. A leader adds a member to the record only while it leads by its lease, and goes by that alone until the new one
//     has vouched, too.
//  5. Nobody leads before the record has its term. A leader whose lease has run out meanwhile may take the key again
//     and go on, by its members' word; its new lease counts once the record has the new term.
//
// Why there are never two that act. Claim: when a reign writes the record, all earlier ones are over. Let W be the one
// whose record N replaces. N holds the key, so the lease of W is over, and W leads by vouches if it leads at all.
// Is N recorded? Then W needs N's vouch: it counts as recorded all that it has tried to write since the last time that
// it knows of (what etcd carries out late is refused, see note()), and led by its lease when it tried (4). N has no
// promise open (2), so W is over, as rates of clocks differ by a tenth at most. Is it not? Then W had its last renewal
// that counts before N saw that the key was gone, and bridge_ms ago (3), so W is over (1). Those before W were over
// when W wrote. So nobody but the record's writer leads, and who comes next begins when that is over.
//
// All have to vouch, not a majority, so that any one of the recorded that survives can take over at once, as the old
// leader needed it, too. With majorities a pool that loses most of its nodes would have to wait for them.
//
// The record cannot change while etcd is silent: nobody is admitted or expelled. What needs a member that is lost
// waits, and the leader stands down when that one's vouch is over.
#include "common/log.h"
#include "pool/service_impl.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kMsNs = 1'000'000;
// Less than what a new leader waits for members (kExpelMs): one that has promised later than it did comes in time.
constexpr int64_t kVouchMs = 4000;
constexpr int64_t kPromiseMs = kVouchMs + kVouchMs / 10;

Leader with_room(Leader leader) {
  std::erase_if(leader.addresses, [](const std::string& a) { return a.starts_with("unix://"); });  // its host's
  while (encode(leader).size() > kVouchBytes) leader.addresses.pop_back();
  return leader;
}

}  // namespace

// --- the leader's ---

void NodeServiceImpl::ask_vouches(int64_t now_ns) {
  if (!election_ || now_ns < renewed_ns_ + 2 * kBeatMs * kMsNs) return;
  const std::string request = encode(with_room({self_.id, self_.incarnation, self_.addresses}));
  for (const NodeId& id : may_be_recorded_) {
    const auto member = members_.find(id);
    if (member == members_.end()) continue;
    member->second.session->call(kVouch, request, Deadline::after_ms(kVouchMs),
                                 [this, id, now_ns, reign = reign_](const Result<rpc::Message>& answer) {
                                   if (closing_ || !answer.is_ok()) return;
                                   strand_.run([this, id, now_ns, reign] {
                                     still_leads();
                                     if (!leader_ || reign != reign_) return;
                                     int64_t& vouched_ns = vouched_ns_[id];
                                     vouched_ns = std::max(vouched_ns, now_ns);
                                     lead_by_vouches();
                                   });
                                 });
  }
  lead_by_vouches();  // alone it has nobody to ask
}

void NodeServiceImpl::lead_by_vouches() {
  int64_t all_ns = steady_ns();
  for (const NodeId& id : may_be_recorded_) {
    if (id == self_.id) continue;
    const auto vouched = vouched_ns_.find(id);
    if (vouched == vouched_ns_.end()) return;
    all_ns = std::min(all_ns, vouched->second);
  }
  if (all_ns + kVouchMs * kMsNs <= steady_ns()) return;  // of an earlier silence
  const int64_t end_ns = renewed_ns_ + options_.bridge_ms * kMsNs;
  vouched_until_ns_ = std::min(all_ns + kVouchMs * kMsNs, end_ns);
  lead_until(vouched_until_ns_, std::min(all_ns, end_ns - kLeaseMs * kMsNs));
}

void NodeServiceImpl::about_to_record(const std::vector<NodeId>& members) {
  const size_t before = may_be_recorded_.size();
  may_be_recorded_.insert(members.begin(), members.end());
  if (may_be_recorded_.size() == before) return;
  vouched_until_ns_ = 0;
  lead_until_ns_ = std::min(lead_until_ns_, leased_until());
}

// The lease has run out in etcd. If nobody else has taken the key, and all have vouched meanwhile, it is ours again.
// Not ok: the reign is over.
Status NodeServiceImpl::lead_again() {
  const Status over(Code::key_not_found, "its lease has run out");
  const auto by_vouches = [this] {
    bool so = false;
    strand_.run_and_wait([&] {
      still_leads();
      so = leader_ && steady_ns() < vouched_until_ns_;
    });
    return so;
  };
  if (!by_vouches()) return over;
  const auto found = election_->leader(Deadline::after_ms(kAskMs));
  if (!found.is_ok()) return {};  // again with the next beat
  if (*found && (*found)->node != self_.id) return over.with("another node was elected");
  if (*found) (void)election_->end_seen(Deadline::after_ms(kAskMs));  // ours, of which we have not heard
  const auto last = election_->last_view(Deadline::after_ms(kAskMs));
  if (!last.is_ok()) return {};
  if (last->leader != self_.id || last->lineage != lineage_) return over.with("etcd knows this pool no more");
  const auto won = election_->campaign({self_.id, self_.incarnation, self_.addresses}, Deadline::after_ms(kAskMs));
  if (!won.is_ok() || !*won) return {};
  term_noted_ = false;
  strand_.run_and_wait([&] { term_ = (*won)->term; });
  ask_to_note();
  log::info("pool", "etcd answers again: this node goes on leading");
  return {};
}

// --- a member's ---

void NodeServiceImpl::on_vouch(const rpc::SessionPtr& session, Leader leader, ResponderPtr responder) {
  if (!follows_ || follows_ != session)
    return responder->fail({Code::key_not_found, "this node follows another leader, or none"});
  write_vouch(*table_map_, {steady_ns() + kPromiseMs * kMsNs, encode(leader)});
  responder->ok();
}

std::optional<Leader> NodeServiceImpl::vouched_for() {
  Vouch vouch;
  strand_.run_and_wait([&] { vouch = read_vouch(*table_map_); });
  if (steady_ns() >= vouch.until_ns) return std::nullopt;
  const auto leader = decode<Leader>(vouch.leader);
  return leader.is_ok() ? std::optional<Leader>(*leader) : std::nullopt;
}

bool NodeServiceImpl::may_lead(const LastView& last) {
  if (last.members.empty() || last.has(self_.id)) return true;
  const int64_t now = steady_ns();
  if (std::exchange(outwaited_term_, last.term) != last.term) {
    outwaited_since_ns_ = now;
    log::warning("pool", "nobody leads, and this node is not one of the last view: it waits for those");
  }
  return now - outwaited_since_ns_ >= (options_.bridge_ms + options_.bridge_ms / 10) * kMsNs;
}

}  // namespace torch_mooncake::pool
