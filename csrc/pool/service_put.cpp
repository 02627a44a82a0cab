// Puts of one object, as donor (reserve, give back) and as home (begin, commit). Batches: service_batch.cpp.
#include "common/failpoint.h"
#include "common/random.h"
#include "pool/service_impl.h"

namespace torch_mooncake::pool {
namespace {

int64_t deadline_of(uint32_t timeout_ms) { return steady_ns() + int64_t{timeout_ms} * 1'000'000; }

// A writer may be late for its own deadline; then its reservation is dropped, and fenced until it lets go.
constexpr int64_t kReserveGraceNs = 2'000'000'000;

// How long a writer that would rather go elsewhere than wait does wait for what is being written to an SSD.
constexpr uint32_t kSoonMs = 200;

}  // namespace

Result<Reservation> NodeServiceImpl::reserve(const ReserveCall& call) {
  const PutHead& head = call.head;
  ReserveRequest request;
  request.txn = head.txn;
  request.key = head.key;
  request.kind = head.kind;
  request.nbytes = call.nbytes;
  request.part = head.part;
  request.parts = head.parts;
  request.meta = call.meta;
  request.label = call.label;
  request.writer = call.session;
  request.parent = call.parent;
  auto reservation = reserve(request);
  if (reservation.is_ok()) {
    int64_t& until = reserved_until_[head.txn];
    until = std::max(until, deadline_of(head.timeout_ms) + kReserveGraceNs);
  }
  return reservation;
}

Result<Reservation> NodeServiceImpl::reserve(const ReserveRequest& request) {
  auto reservation = donor_->reserve(request);
  done_.refusals += reservation.status().code() == Code::pool_full;
  done_.reservations += reservation.is_ok();
  return reservation;
}

void NodeServiceImpl::on_reserve(const rpc::SessionPtr& session, ReserveCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok()) return responder->fail(s);
  if (!call.head.sound()) return responder->fail({Code::invalid_argument, "no key, or a part that is not there"});
  const auto client = clients_.find(call.session);
  if (client == clients_.end() || client->second.session.lock() != session)
    return responder->fail({Code::peer_lost, "this node does not know the session: attach again"});
  if (call.wait && !waiting_.empty()) {  // in order of arrival
    waiting_.push_back({std::move(call), std::move(responder), 0});
    waiting_.back().deadline_ns = deadline_of(waiting_.back().call.head.timeout_ms);
    return;
  }
  auto reservation = reserve(call);
  if (reservation.is_ok()) return responder->ok(encode(ReserveAnswer{reservation->extent, reservation->pieces}));
  const bool hopeless = call.nbytes > donor_->stats().limit_bytes || Donor::over_quota(reservation.status());
  const bool soon = donor_->making_room();
  if (reservation.status().code() != Code::pool_full || !(call.wait || soon) || hopeless)
    return responder->fail(reservation.status());
  int64_t deadline = deadline_of(call.head.timeout_ms);
  if (!call.wait) deadline = std::min(deadline, deadline_of(kSoonMs));
  waiting_.push_back({std::move(call), std::move(responder), deadline});
  arm_soon();
}

void NodeServiceImpl::retry_reservations() {
  while (!waiting_.empty()) {
    WaitingReserve& first = waiting_.front();
    if (!clients_.count(first.call.session)) {  // its writer is gone
      waiting_.pop_front();
      continue;
    }
    const ReserveCall& call = first.call;
    auto reservation = reserve(call);
    const Status& refused = reservation.status();
    if (refused.code() == Code::pool_full && !Donor::over_quota(refused)) return;
    if (reservation.is_ok()) {
      first.responder->ok(encode(ReserveAnswer{reservation->extent, reservation->pieces}));
    } else {
      first.responder->fail(reservation.status());
    }
    waiting_.pop_front();
  }
}

// Who waits for room has it first.
void NodeServiceImpl::on_grant(const rpc::SessionPtr& session, GrantCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok()) return responder->fail(s);
  const auto client = clients_.find(call.session);
  if (client == clients_.end() || client->second.session.lock() != session)
    return responder->fail({Code::peer_lost, "this node does not know the session: attach again"});
  GrantAnswer answer;
  Status refused(Code::pool_full, "writers are waiting for room");
  while (waiting_.empty() && answer.places.size() < call.count) {
    auto granted = donor_->grant(call.nbytes, call.session, call.txn);
    refused = granted.status();
    if (!granted.is_ok()) break;
    answer.places.push_back({granted->extent, std::move(granted->pieces)});
  }
  if (answer.places.empty()) return responder->fail(refused);
  done_.reservations += answer.places.size();
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_give_back(const rpc::SessionPtr& session, GiveBackCall call, ResponderPtr responder) {
  const auto client = clients_.find(call.session);
  if (client == clients_.end() || client->second.session.lock() != session)
    return responder->fail({Code::invalid_argument, "not a session of this connection"});
  Status last;
  for (const ExtentRef& extent : call.extents) {
    const Status s = donor_->give_back(extent, call.session);
    // Gone, or committed meanwhile: nothing of it is the writer's any more.
    if (!s.is_ok() && s.code() != Code::key_not_found && s.code() != Code::invalid_argument) last = s;
  }
  for (uint32_t i = 0; i < call.txns; ++i) {
    const TxnId txn = txn_of(call.txn, i);
    donor_->abandon(txn, call.session);
    std::erase_if(waiting_, [&](const WaitingReserve& w) {
      if (w.call.session != call.session || w.call.head.txn != txn) return false;
      w.responder->fail({Code::cancelled, "given up by its writer"});
      return true;
    });
  }
  retry_reservations();
  respond(*responder, last);
}

Status NodeServiceImpl::check_ttl(uint64_t ttl_ms) {
  if (ttl_ms <= kMaxTtlMs) return {};
  return {Code::invalid_argument, "a time to live of " + std::to_string(ttl_ms) + " ms is too long"};
}

Status NodeServiceImpl::need_home(uint64_t view) const {
  if (!leader_) return {Code::pool_unavailable, "this node is not a directory node"};
  if (view > home_->view())
    return {Code::pool_unavailable, "this directory node knows view " + std::to_string(home_->view()) +
                                        ", the request is of view " + std::to_string(view)};
  if (view != 0 && view >> kTermBits != home_->view() >> kTermBits)
    return {Code::pool_unavailable, "the request is of view " + std::to_string(view) + ", of an earlier leader"};
  return {};
}

void NodeServiceImpl::on_begin(const rpc::SessionPtr&, BeginCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.head.view); !s.is_ok()) return responder->fail(s);
  if (!call.head.sound()) return responder->fail({Code::invalid_argument, "a part that is not there"});
  auto txn = home_->begin(call.head.key, call.label, call.head.parts, deadline_of(call.head.timeout_ms), random_id());
  if (!txn.is_ok()) return responder->fail(txn.status());
  responder->ok(encode(BeginAnswer{*txn}));
}

void NodeServiceImpl::commit(const CommitCall& call, std::function<void(const Result<CommitAnswer>&)> done) {
  const RequestId request = next_request_++;
  commits_[request] = [this, done = std::move(done)](const Result<CommitAnswer>& result) {
    done_.commits += result.is_ok() && result->stored;
    done(result);
  };
  home_->commit(request, call, deadline_of(call.head.timeout_ms));
}

void NodeServiceImpl::on_commit(const rpc::SessionPtr&, CommitCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.head.view); !s.is_ok()) return responder->fail(s);
  if (const Status s = check_ttl(call.ttl_ms); !s.is_ok()) return responder->fail(s);
  if (const Status s = failpoint("home.commit"); !s.is_ok()) return responder->fail(s);
  if (call.head.parts > 1) arm_at(deadline_of(call.head.timeout_ms));  // its writers are told in time
  commit(call, [responder](const Result<CommitAnswer>& result) {
    if (result.is_ok()) return responder->ok(encode(*result));
    responder->fail(result.status());
  });
}

}  // namespace torch_mooncake::pool
