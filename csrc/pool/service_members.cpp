// Marks, and the leader's side of membership: who is in the view, and who has been silent for too long.
#include <algorithm>

#include "common/failpoint.h"
#include "common/log.h"
#include "common/random.h"
#include "pool/service_impl.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kReportItems = 8192;  // of one message: with the longest keys about half of what it may have

}  // namespace

// --- marks ---

// The extent was granted, not reserved.
Status NodeServiceImpl::bind(const Mark& mark) {
  const Binding& b = *mark.binding;
  ReserveRequest request;
  request.txn = mark.txn;
  request.key = b.key;
  request.kind = b.kind;
  request.nbytes = b.nbytes;
  request.meta = b.meta;
  request.label = b.label;
  request.writer = b.writer;
  request.parent = b.parent;
  return donor_->bind(mark.extent, request);
}

// `done` at once, or, if the disk has to say so first, later on the strand.
void NodeServiceImpl::apply_mark(const Mark& mark, std::function<void(const Status&)> done) {
  auto commit = [&]() -> Status {
    TM_TRY(failpoint("node.commit"));
    uint64_t ttl_ms = mark.ttl_ms;
    if (mark.copy) {
      TM_ASSIGN(ttl_ms, left_of_copy(mark));
    }
    if (mark.binding) TM_TRY(bind(mark));
    TM_TRY(donor_->commit(mark.extent, mark.version, mark.crc32c, ttl_ms, steady_ns(), mark.replicas, mark.pin));
    reserved_until_.erase(mark.txn);
    copies_expire_.erase(mark.txn);
    return failpoint("node.committed");
  };
  switch (mark.what) {
    case Mark::What::commit:
      return done(commit());
    case Mark::What::finalize:
      return done(donor_->finalize(mark.extent));
    case Mark::What::supersede:
      if (const Status s = failpoint("node.supersede"); !s.is_ok()) return done(s);
      donor_->remove(mark.extent, [done = std::move(done)](const Status& removed) {
        const Status s = failpoint("node.superseded");
        done(s.is_ok() ? removed : s);
      });
      return retry_reservations();
    case Mark::What::drop:
      donor_->drop_txn(mark.txn);
      reserved_until_.erase(mark.txn);
      copies_expire_.erase(mark.txn);
      retry_reservations();
      return done({});
    case Mark::What::pin:
      donor_->set_pin(mark.extent, mark.pin, std::move(done));
      return retry_reservations();
  }
  done({Code::internal, "unknown mark"});
}

void NodeServiceImpl::on_mark(const rpc::SessionPtr&, Mark mark, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok() && !draining_) return responder->fail(s);
  if (const uint64_t seen = std::max(view_.number, fence_); mark.view < seen)
    return responder->fail({Code::pool_unavailable, "a mark of view " + std::to_string(mark.view) +
                                                        ", this donor has seen " + std::to_string(seen)});
  apply_mark(mark, [responder](const Status& s) { respond(*responder, s); });
}

void NodeServiceImpl::send_mark(const SendMark& send) {
  if (send.node == self_.id) {
    apply_mark(send.mark, [this, id = send.id, reign = reign_](const Status& s) {
      if (!home_ || reign != reign_) return;
      home_->at(steady_ns());  // what flips now expires later than at its donors
      if (id) home_->mark_done(id, s);
    });
    return;
  }
  const auto member = members_.find(send.node);
  if (member == members_.end()) {
    if (send.id) home_->mark_done(send.id, {Code::pool_unavailable, "the donor has not come back"});
    return;
  }
  if (member->second.joining) {
    if (send.id == 0) return unheeded_.push_back(send);
    return home_->mark_done(send.id, {Code::pool_unavailable, "the donor is coming back"});  // sent again then
  }
  member->second.session->call(kMark, encode(send.mark), Deadline::after_ms(kLeaseMs),
                               [this, send, reign = reign_](Result<rpc::Message> answer) {
                                 Status s = answer.status();
                                 if (closing_ || (send.id == 0 && s.is_ok())) return;
                                 const bool silent = s.code() == Code::peer_lost || s.code() == Code::closed ||
                                                     s.code() == Code::deadline_exceeded;
                                 if (silent) s = Status(Code::pool_unavailable, s.message());
                                 strand_.run([this, send, s, reign] {
                                   still_leads();
                                   if (!home_ || reign != reign_) return;
                                   if (send.id == 0) {
                                     if (s.code() == Code::pool_unavailable) unheeded_.push_back(send);
                                     return;
                                   }
                                   home_->at(steady_ns());
                                   home_->mark_done(send.id, s);
                                   pump();
                                 });
                               });
}

// A donor that has joined a moment ago may not know it yet, nor the newest view. One that has left or restarted since
// is compared when it announces.
void NodeServiceImpl::repeat_marks() {
  for (SendMark& send : std::exchange(unheeded_, {})) {
    send.mark.view = home_->view();
    send_mark(send);
  }
}

// In as many messages as they need. If one does not arrive the session is over, and all is announced anew.
template <typename Report, typename Item>
void NodeServiceImpl::tell_leader(Method method, const std::vector<Item>& items) {
  for (size_t at = 0; at < items.size() && leader_session_; at += kReportItems) {
    const auto first = items.begin() + static_cast<ptrdiff_t>(at);
    const auto n = static_cast<ptrdiff_t>(std::min(kReportItems, items.size() - at));
    const Report report{view_.number, self_.id, std::vector<Item>(first, first + n)};
    if (const Status s = leader_session_->post(method, encode(report)); !s.is_ok()) return leader_session_->close(s);
  }
}

void NodeServiceImpl::pump() {
  if (pumping_) return;
  pumping_ = true;
  for (;;) {
    const auto evicted = std::exchange(evicted_, {});
    const auto moved = std::exchange(moved_, {});
    if (!leader_) {
      tell_leader<TierReport>(kTiers, moved);
      tell_leader<EvictedReport>(kEvicted, evicted);
      break;
    }
    for (const TierChange& c : moved) home_->moved(self_.id, c.key, c.extent, c.tier);
    for (const EvictedExtent& e : evicted) home_->evicted(self_.id, e.key, e.extent);
    auto actions = home_->take_actions();
    if (actions.empty() && evicted.empty()) break;
    for (HomeAction& action : actions) {
      if (auto* send = std::get_if<SendMark>(&action)) {
        send_mark(*send);
      } else if (auto* done = std::get_if<CommitDone>(&action)) {
        if (auto node = commits_.extract(done->request))
          node.mapped()(done->result);
        else
          batch_done(*done);
      } else if (auto* removed = std::get_if<RemoveDone>(&action)) {
        batch_done(*removed);
      } else {
        const RequestId request = std::get<Ready>(action).request;
        home_->unwatch(request);
        look_up(request);
      }
    }
  }
  pumping_ = false;
  gather_events();
}

void NodeServiceImpl::on_evicted(const rpc::SessionPtr&, EvictedReport report, ResponderPtr responder) {
  if (const auto member = members_.find(report.node); leader_ && member != members_.end()) {
    for (const EvictedExtent& e : report.extents) home_->evicted(report.node, e.key, e.extent);
    if (member->second.joining)
      member->second.evicted.insert(member->second.evicted.end(), report.extents.begin(), report.extents.end());
  }
  responder->ok();
}

// --- members ---

View NodeServiceImpl::make_view() const {
  View view;
  view.number = home_->view();
  view.seed = seed_;
  view.lineage = election_ ? lineage_ : self_.id;
  view.home = self_.id;
  view.nodes.push_back(self_);
  view.nodes[0].used_bytes = donor_->stats().used_bytes;
  for (const auto& [id, member] : members_)
    if (member.announced) view.nodes.push_back(member.info);
  return view;
}

void NodeServiceImpl::next_view(uint64_t at_least) {
  home_->set_view(std::max(home_->view() + 1, at_least));
  ViewRecord record{home_->view(), {}, true};
  for (const auto& [id, member] : members_)
    if (member.announced) record.members.push_back(id);
  for (const auto& [id, until] : expected_until_) record.members.push_back(id);
  write_view_record(*table_map_, record);
}

void NodeServiceImpl::on_join(const rpc::SessionPtr& session, JoinRequest request, ResponderPtr responder) {
  if (!leader_) return responder->fail({Code::unsupported, "this node is not the leader"});
  if (request.node.id == self_.id || session->peer().role != "node")
    return responder->fail({Code::invalid_argument, "only another node can join"});
  if (leaving_.count(request.node.id))
    return responder->fail({Code::pool_unavailable, "this node is being expelled: join again"});
  const auto known = members_.find(request.node.id);
  const bool of_last_view = expected_until_.count(request.node.id) != 0;
  Member& member = members_[request.node.id];
  const bool was_in = known != members_.end() && member.announced;
  member.info = request.node;
  member.session = session;
  if (known == members_.end() || !member.joining) member.heard_ns = steady_ns();  // who only joins is not heard
  member.incoming.clear();
  member.evicted.clear();
  member.moved.clear();
  member.joining = true;
  ++member.joins;
  going_.erase(request.node.id);
  if (request.view >= home_->view()) next_view(request.view + 1);
  JoinAnswer answer;
  answer.view = make_view();
  // The id is that of its memory: a node that is in the view has been told of every version that counts, or will be.
  answer.keep_named = was_in || of_last_view;
  answer.lease_ms = kLeaseMs;
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_announce(const rpc::SessionPtr& session, AnnounceRequest request, ResponderPtr responder) {
  const auto it = leader_ ? members_.find(request.node) : members_.end();
  if (it == members_.end() || it->second.session != session)
    return responder->fail({Code::key_not_found, "this node has not joined"});
  if (leaving_.count(request.node))  // it would be recorded as one whose objects count
    return responder->fail({Code::pool_unavailable, "this node is being expelled: join again"});
  Member& member = it->second;
  if (request.first) member.incoming.clear();
  std::move(request.extents.begin(), request.extents.end(), std::back_inserter(member.incoming));
  member.heard_ns = steady_ns();
  if (!request.last) return responder->ok(encode(make_view()));
  auto admit = [this, session, id = request.node, joins = member.joins, responder] {
    const auto joined = members_.find(id);
    if (joined == members_.end() && counting_.erase(id)) ask_to_note();
    if (joined == members_.end() || joined->second.session != session || joined->second.joins != joins ||
        !joined->second.joining)  // it has joined anew while this waited, and announces all anew
      return responder->fail({Code::key_not_found, "this node has not joined"});
    Member& member = joined->second;
    expected_until_.erase(id);
    member.announced = true;
    member.joining = false;
    // Decided anew by what it announces; an old pin would undo one that comes now.
    std::erase_if(unheeded_, [&](const SendMark& s) { return s.node == id && s.mark.what != Mark::What::finalize; });
    home_->announce(id, std::exchange(member.incoming, {}));
    for (const TierChange& c : std::exchange(member.moved, {})) home_->moved(id, c.key, c.extent, c.tier);
    for (const EvictedExtent& e : std::exchange(member.evicted, {})) home_->evicted(id, e.key, e.extent);
    retry_copies();  // it may have the room
    next_view(0);
    responder->ok(encode(make_view()));
  };
  const bool recorded =
      !counting_.insert(request.node).second && (unnoted_.empty() || recorded_.count(request.node) != 0);
  recorded ? admit() : when_noted(std::move(admit));
}

void NodeServiceImpl::on_beat(const rpc::SessionPtr& session, BeatRequest request, ResponderPtr responder) {
  const auto it = leader_ ? members_.find(request.node) : members_.end();
  if (it == members_.end() || it->second.session != session || leaving_.count(request.node))
    return responder->fail({Code::key_not_found, "this node has not joined, or was expelled"});
  it->second.heard_ns = steady_ns();
  it->second.info.used_bytes = request.used_bytes;
  it->second.quotas = std::move(request.quotas);
  knows_quotas(request.node, it->second.quotas);
  share_quotas();
  BeatAnswer answer;
  answer.quotas = quotas_without(request.node);
  if (request.view < home_->view()) answer.view = make_view();
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_leave(const rpc::SessionPtr& session, LeaveRequest request, ResponderPtr responder) {
  const auto it = leader_ ? members_.find(request.node) : members_.end();
  if (it == members_.end() || it->second.session != session)
    return responder->fail({Code::key_not_found, "this node has not joined"});
  expel(request.node, nullptr);
  when_noted([responder] { responder->ok(); });
}

void NodeServiceImpl::expel(const NodeId& id, const char* why) {
  if (const Status s = failpoint("home.expel"); !s.is_ok()) return log::error("pool", s.to_string());
  if (!leaving_.insert(id).second) return;
  if (why) log::warning("pool", "node " + to_hex(id) + " is expelled: " + why);
  counting_.erase(id);
  when_noted([this, id] {
    leaving_.erase(id);
    going_.erase(id);
    members_.erase(id);
    expected_until_.erase(id);
    home_->expel(id);
    tell_quota_sets();
    next_view(0);
  });
}

void NodeServiceImpl::watch_members(int64_t now_ns) {
  // If it is this node that was stopped, nobody else was silent.
  const int64_t away_ns = std::exchange(watched_ns_, now_ns) + 4 * kBeatMs * 1'000'000;
  if (now_ns > away_ns) {
    for (auto& [id, member] : members_) member.heard_ns = std::min(now_ns, member.heard_ns + now_ns - away_ns);
    for (auto& [id, until] : expected_until_) until += now_ns - away_ns;
  }
  std::vector<NodeId> silent;
  for (const auto& [id, member] : members_)
    if (now_ns - member.heard_ns > kExpelMs * 1'000'000) silent.push_back(id);
  for (const NodeId& id : silent) expel(id, "silent for longer than its lease");
  silent.clear();
  for (const auto& [id, until] : expected_until_)
    if (now_ns > until && !members_.count(id)) silent.push_back(id);
  for (const NodeId& id : silent) expel(id, "did not come back after the leader's restart");
}

}  // namespace torch_mooncake::pool
