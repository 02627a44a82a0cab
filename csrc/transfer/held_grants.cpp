#include "transfer/held_grants.h"

#include <algorithm>

#include "transfer/engine_impl.h"
#include "transfer/shm/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

constexpr size_t kMostRemembered = 1024;  // sessions; what is forgotten is held until a process is dead

// Those for which `leaves` is true are taken out of `held`.
template <typename Fn>
std::vector<HeldGrant> take_if(std::vector<HeldGrant>& held, Fn leaves) {
  std::vector<HeldGrant> taken;
  auto first = std::stable_partition(held.begin(), held.end(), [&](auto& grant) { return !leaves(grant); });
  std::move(first, held.end(), std::back_inserter(taken));
  held.erase(first, held.end());
  return taken;
}

}  // namespace

void HeldGrants::release(std::vector<HeldGrant> grants) {
  for (auto& grant : grants) grant.region->usage().release(grant.peer->name());
}

void HeldGrants::hold(std::vector<HeldGrant> grants, const PeerImplPtr& peer) {
  if (grants.empty()) return;
  for (auto& grant : grants) grant.peer = peer;
  {
    std::lock_guard lock(mutex_);
    auto early = std::find(released_early_.begin(), released_early_.end(),
                           std::pair(peer->identity().engine, peer->features().session));
    if (early == released_early_.end()) {
      std::move(grants.begin(), grants.end(), std::back_inserter(held_));
      grants.clear();
    } else {
      released_early_.erase(early);
    }
  }
  release(std::move(grants));
  check();
}

void HeldGrants::check() {
  std::vector<HeldGrant> dead;
  {
    std::lock_guard lock(mutex_);
    dead = take_if(held_, [](auto& grant) { return grant.process && process_is_dead(grant.process->get()); });
    bool watchable = std::any_of(held_.begin(), held_.end(), [](auto& grant) { return grant.process != nullptr; });
    if (watchable && !watching_ && engine_.usable()) {
      watching_ = true;
      engine_.rpc().add_timer(Deadline::after_ms(50), [this] {
        {
          std::lock_guard relock(mutex_);
          watching_ = false;
        }
        check();
      });
    }
  }
  release(std::move(dead));
}

void HeldGrants::on_release_old(PeerImpl& from, rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto session = in.get<uint64_t>();
  if (!in.done()) return responder.fail({Code::invalid_argument, "malformed release of an old session"});
  auto& engine = from.identity().engine;
  std::vector<HeldGrant> released;
  {
    std::lock_guard lock(mutex_);
    released = take_if(held_, [&](auto& grant) {
      return grant.peer->identity().engine == engine && grant.peer->features().session == session;
    });
    if (released.empty()) {  // the end of that session may not have come to us yet
      released_early_.emplace_back(engine, session);
      if (released_early_.size() > kMostRemembered) released_early_.pop_front();
    }
  }
  release(std::move(released));
  responder.ok();
}

void HeldGrants::quiet(const Id128& owner, uint64_t session) {
  {
    std::lock_guard lock(mutex_);
    if (quiet_.size() >= kMostRemembered && !quiet_.count(owner)) quiet_.erase(quiet_.begin());
    quiet_[owner].push_back(session);
  }
  for (auto& peer : engine_.peers())
    if (peer->identity().engine == owner && peer->features().known) tell(peer);
}

void HeldGrants::tell(const PeerImplPtr& peer) {
  std::vector<uint64_t> sessions;
  {
    std::lock_guard lock(mutex_);
    auto it = quiet_.find(peer->identity().engine);
    if (it != quiet_.end()) sessions = it->second;
  }
  for (uint64_t session : sessions)
    peer->session()->call(kReleaseOld, ByteWriter().put(session).take(), Deadline::never(),
                          [this, peer, session](Result<rpc::Message> answer) {
                            if (!answer) return;  // the next session will do
                            std::lock_guard lock(mutex_);
                            auto it = quiet_.find(peer->identity().engine);
                            if (it == quiet_.end()) return;
                            std::erase(it->second, session);
                            if (it->second.empty()) quiet_.erase(it);
                          });
}

}  // namespace torch_mooncake::transfer
