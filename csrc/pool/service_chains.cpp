// Chains of keys: as home, how much of one is there; as donor, what keeps its beginning longest.
#include "pool/service_impl.h"

namespace torch_mooncake::pool {

// The session that pins are held for, if it is one of this connection; else nobody's, which ends by time alone.
SessionId NodeServiceImpl::owner(const rpc::SessionPtr& session, SessionId claimed) const {
  const auto it = clients_.find(claimed);
  return it != clients_.end() && it->second.session.lock() == session ? claimed : 0;
}

// A key that is being replaced, or not known yet in a rebuild, ends the chain like one that is not there.
void NodeServiceImpl::on_prefix(const rpc::SessionPtr& session, PrefixCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  const SessionId pinner = owner(session, call.session);
  const int64_t until_ns = steady_ns() + static_cast<int64_t>(std::min(call.pin_ms, kMaxPinMs)) * 1'000'000;
  PrefixAnswer answer;
  answer.view = home_->view();
  for (const LookupKey& key : call.keys) {
    ++done_.lookups;
    const Found found = home_->find(key.key);
    if (found.state != Found::State::found) {
      ++done_.misses;
      break;
    }
    Replicas replicas;
    bool held = true;
    for (const auto& [part, at] : found.places) {
      if (call.pin_ms && at.node == self_.id) held = donor_->hint_pin(at.extent, until_ns, pinner) && held;
      replicas.at.push_back(at);
    }
    if (!held) break;  // what cannot be kept in memory is not promised
    answer.found.push_back(std::move(replicas));
  }
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_refresh(const rpc::SessionPtr& session, RefreshCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok() && !draining_) return responder->fail(s);
  const SessionId pinner = owner(session, call.session);
  RefreshAnswer answer;
  if (call.pins == RefreshCall::Pins::pin) {
    const int64_t until_ns = steady_ns() + static_cast<int64_t>(std::min(call.pin_ms, kMaxPinMs)) * 1'000'000;
    for (uint32_t i = 0; i < call.extents.size(); ++i)
      if (!donor_->hint_pin(call.extents[i], until_ns, pinner)) answer.gone.push_back(i);
  } else {
    donor_->refresh(call.extents);
    if (call.pins == RefreshCall::Pins::unpin)
      for (ExtentRef extent : call.extents) donor_->unpin(extent, pinner);
    retry_reservations();
  }
  responder->ok(encode(answer));
}

}  // namespace torch_mooncake::pool
