// Batches: many keys in one message, each with an outcome of its own. A batch is answered when its last item is.
#include <algorithm>

#include "common/crc32c.h"
#include "common/failpoint.h"
#include "memory/copy.h"
#include "pool/service_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kReserveGraceNs = 2'000'000'000;  // a writer may be late for its own deadline
constexpr size_t kAnswerBytes = 8 << 20;

int64_t deadline_of(uint32_t timeout_ms) { return steady_ns() + int64_t{timeout_ms} * 1'000'000; }

Status check_item(uint32_t shard, std::string_view key) {
  if (key.empty() || shard >= kShards) return {Code::invalid_argument, "no key, or no shard"};
  return {};
}

template <typename Outcome>
void fail(Outcome& outcome, const Status& why) {
  outcome.code = why.code();
  outcome.message = why.message().substr(0, kMaxTextBytes);
}

// In a full pool every refusal looks at all pins: of one message, the least that did not fit speaks for what is longer.
class Refused {
 public:
  const Status* of(uint64_t nbytes) const { return !why_.is_ok() && nbytes >= nbytes_ ? &why_ : nullptr; }
  void note(uint64_t nbytes, const Status& s) {
    if (s.code() != Code::pool_full || of(nbytes) || Donor::over_quota(s)) return;
    why_ = s;
    nbytes_ = nbytes;
  }

 private:
  Status why_;
  uint64_t nbytes_ = 0;
};

}  // namespace

void NodeServiceImpl::on_reserve_many(const rpc::SessionPtr& session, ReserveManyCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok()) return responder->fail(s);
  const auto client = clients_.find(call.session);
  if (client == clients_.end() || client->second.session.lock() != session)
    return responder->fail({Code::peer_lost, "this node does not know the session: attach again"});
  ReserveManyAnswer answer;
  answer.items.reserve(call.items.size());
  ReserveRequest request;
  request.kind = call.head.kind;
  request.label = call.head.label;
  request.parent = call.head.parent;
  request.writer = call.session;
  Refused refused;
  size_t bytes = 0;
  for (uint32_t i = 0; i < call.items.size() && bytes < kAnswerBytes; ++i) {
    const ReserveItem& item = call.items[i];
    Reserved& out = answer.items.emplace_back();
    Status s = check_item(item.shard, item.key);
    if (s.is_ok()) {
      request.txn = txn_of(call.head.txn, i);
      request.key.assign(item.key);
      request.meta.assign(item.meta);
      request.nbytes = item.nbytes;
      const Status* full = refused.of(item.nbytes);
      auto reservation = full ? Result<Reservation>(*full) : reserve(request);
      s = reservation.status();
      refused.note(item.nbytes, s);
      if (reservation.is_ok()) out.place = {reservation->extent, std::move(reservation->pieces)};
    }
    if (!s.is_ok()) fail(out, s);
    bytes += 32 + out.message.size() + 20 * out.place.pieces.size();
  }
  reserved_batches_.push_back(
      {call.head.txn, static_cast<uint32_t>(answer.items.size()), deadline_of(call.head.timeout_ms) + kReserveGraceNs});
  responder->ok(encode(answer));
}

// Commits, as home; what rides inside is first stored here, as donor.
void NodeServiceImpl::on_put_many(const rpc::SessionPtr&, PutManyCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.head.view); !s.is_ok()) return responder->fail(s);
  if (const Status s = check_ttl(call.head.ttl_ms); !s.is_ok()) return responder->fail(s);
  if (const Status s = failpoint("home.commit"); !s.is_ok()) return responder->fail(s);
  const Status can_store = usable();
  const int64_t deadline_ns = deadline_of(call.head.timeout_ms);
  const RequestId first = next_request_;
  next_request_ += call.items.size();
  auto& batch = put_batches_[first];
  batch.answer.items.resize(call.items.size());
  batch.left = call.items.size();
  batch.responder = std::move(responder);

  CommitCall commit;
  commit.head.view = call.head.view;
  commit.head.kind = call.head.kind;
  commit.head.timeout_ms = call.head.timeout_ms;
  commit.if_exists = call.head.if_exists;
  commit.ttl_ms = call.head.ttl_ms;
  commit.pin = call.head.pin;
  ReserveRequest request;
  request.kind = call.head.kind;
  request.label = call.head.label;
  request.parent = call.head.parent;
  Refused refused;
  for (uint32_t i = 0; i < call.items.size(); ++i) {
    PutItem& item = call.items[i];
    Status s = check_item(item.shard, item.key);
    commit.head.shard = item.shard;
    commit.head.key.assign(item.key);
    commit.head.txn = txn_of(call.head.txn, item.index);
    commit.crc32c = item.crc32c;
    if (s.is_ok() && item.replicas.empty()) {
      s = can_store;
      request.txn = commit.head.txn;
      request.key.assign(item.key);
      request.meta.assign(item.meta);
      request.nbytes = item.data.size();
      if (const Status* full = refused.of(request.nbytes); full && s.is_ok()) s = *full;
      auto reservation = s.is_ok() ? reserve(request) : Result<Reservation>(s);
      s = reservation.status();
      refused.note(request.nbytes, s);
      if (s.is_ok()) {
        const char* from = item.data.data();
        for (const Piece& piece : reservation->pieces) {
          copy_bytes(data_maps_[piece.segment]->data + piece.offset, from, piece.nbytes);
          from += piece.nbytes;
        }
        if (call.head.checksum) commit.crc32c = crc32c(item.data.data(), item.data.size());
        commit.replicas.assign(1, {self_.id, reservation->extent});
      }
    } else if (s.is_ok()) {
      commit.replicas = std::move(item.replicas);
    }
    if (s.is_ok()) {
      home_->commit(first + i, commit, deadline_ns);
      pump();  // one after the other: what is in the works stays little, and in the caches
    } else {
      batch_done(CommitDone{first + i, s});
    }
  }
  if (call.items.empty()) put_batches_.extract(first).mapped().responder->ok(encode(PutManyAnswer{}));
}

void NodeServiceImpl::batch_done(const CommitDone& done) {
  const auto it = std::prev(put_batches_.upper_bound(done.request));
  auto& [first, batch] = *it;
  PutManyOutcome& outcome = batch.answer.items[done.request - first];
  if (done.result.is_ok()) {
    outcome.answer = *done.result;
    done_.commits += done.result->stored;
  } else {
    fail(outcome, done.result.status());
  }
  if (--batch.left > 0) return;
  batch.responder->ok(encode(batch.answer));
  put_batches_.erase(it);
}

void NodeServiceImpl::on_remove_many(const rpc::SessionPtr&, RemoveManyCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  if (call.items.empty()) return responder->ok(encode(RemoveManyAnswer{}));
  const int64_t deadline_ns = deadline_of(call.timeout_ms);
  const RequestId first = next_request_;
  next_request_ += call.items.size();
  auto& batch = remove_batches_[first];
  batch.answer.items.resize(call.items.size());
  batch.left = call.items.size();
  batch.pins = call.pin.has_value();
  batch.responder = std::move(responder);
  for (uint32_t i = 0; i < call.items.size(); ++i) {
    const RemoveItem& item = call.items[i];
    if (const Status s = check_item(item.shard, item.key); s.is_ok()) {
      if (call.pin)
        home_->pin(first + i, item.key, *call.pin, deadline_ns);
      else
        home_->remove(first + i, item.key, deadline_ns, item.only);
      pump();
    } else {
      batch_done(RemoveDone{first + i, s});
    }
  }
}

void NodeServiceImpl::batch_done(const RemoveDone& done) {
  const auto it = std::prev(remove_batches_.upper_bound(done.request));
  auto& [first, batch] = *it;
  RemoveOutcome& outcome = batch.answer.items[done.request - first];
  if (done.result.is_ok()) {
    outcome.removed = *done.result;
    done_.removals += *done.result && !batch.pins;
  } else {
    fail(outcome, done.result.status());
  }
  if (--batch.left > 0) return;
  batch.responder->ok(encode(batch.answer));
  remove_batches_.erase(it);
}

void NodeServiceImpl::on_exists(const rpc::SessionPtr&, ExistsCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  ExistsAnswer answer;
  answer.there.resize(call.keys.size());
  const auto states = home_->states(call.keys);
  bool decided = !call.tiers;
  for (size_t i = 0; i < states.size(); ++i) {
    decided = decided && states[i] != Found::State::later;
    answer.there[i] = states[i] == Found::State::found;
  }
  if (decided) {
    done_.lookups += call.keys.size();
    done_.misses += static_cast<uint64_t>(std::count(answer.there.begin(), answer.there.end(), 0));
    return responder->ok(encode(answer));
  }
  const RequestId request = next_request_++;
  LookupCall lookup;
  for (std::string_view key : call.keys) lookup.keys.push_back({0, std::string(key)});
  lookups_[request] = {std::move(lookup), true, std::move(responder), deadline_of(call.timeout_ms)};
  look_up(request);
}

}  // namespace torch_mooncake::pool
