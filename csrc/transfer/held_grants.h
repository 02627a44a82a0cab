// Maps of shared segments that outlive their session.
//
// As the owner: a mapped grant whose session is over stays a use of its region until the peer says, in a later session,
// that it touches nothing of the old one any more, or until its process is seen dead. Never until a timeout.
// As the peer: sessions of ours that are over and in which no copy is under way, until their owners have been told.
// Safe from any thread.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "transfer/grant.h"

namespace torch_mooncake::transfer {

class EngineImpl;
class PeerImpl;
using PeerImplPtr = std::shared_ptr<PeerImpl>;

class HeldGrants {
 public:
  explicit HeldGrants(EngineImpl& engine) : engine_(engine) {}

  // The owner's side: a session is over; these were its mapped grants.
  void hold(std::vector<HeldGrant> grants, const PeerImplPtr& peer);
  // kReleaseOld: u64 number that the peer gave the session that is over.
  void on_release_old(PeerImpl& peer, rpc::Message request, rpc::Responder responder);

  // The peer's side: a session with that owner, to which we had given that number, is over and quiet.
  void quiet(const Id128& owner, uint64_t session);
  // There is a session with an owner again.
  void tell(const PeerImplPtr& peer);

 private:
  void check();  // whose process is dead
  void release(std::vector<HeldGrant> grants);

  EngineImpl& engine_;
  std::mutex mutex_;
  std::vector<HeldGrant> held_;
  bool watching_ = false;
  // (engine, session) that were released before we knew that they are over.
  std::deque<std::pair<Id128, uint64_t>> released_early_;
  std::map<Id128, std::vector<uint64_t>> quiet_;  // by owner
};

}  // namespace torch_mooncake::transfer
