// Grants: room at a client's own node that it has in advance, so that a put writes at once and asks only for the
// commit.
//
// All of one size, that of the puts lately: the second such put in a row asks for some, later ones for more when half
// are used up. What is not used for a second goes back, as does everything when another size comes or the pool is full.
// Nothing here waits. Ownership: the link's; calls and timers hold it weakly or keep it, never the link.
// Threads: safe from any.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "pool/messages.h"
#include "rpc/endpoint.h"

namespace torch_mooncake::pool {

class Grants : public std::enable_shared_from_this<Grants> {
 public:
  Grants(rpc::Endpoint& endpoint, const rpc::SessionPtr& session, SessionId id)
      : endpoint_(endpoint), session_(session), id_(id) {}
  // An extent of that size, the caller's from now on. `txn` is one that nobody has had, in case more are asked for.
  std::optional<ReserveAnswer> take(uint64_t nbytes, const TxnId& txn);
  void give_back();

 private:
  void ask(uint64_t nbytes, uint32_t count, const TxnId& txn);
  void granted(uint64_t nbytes, const TxnId& txn, const Result<rpc::Message>& reply);
  void watch();
  void give_back(std::vector<ReserveAnswer> places);
  void call(Method method, std::string body, std::function<void(const Result<rpc::Message>&)> done);

  rpc::Endpoint& endpoint_;  // outlives the session
  const std::weak_ptr<rpc::Session> session_;
  const SessionId id_;
  std::mutex mutex_;
  uint64_t nbytes_ = 0;
  int64_t used_ns_ = 0, refused_ns_ = 0;
  bool asking_ = false, watching_ = false;
  std::vector<ReserveAnswer> places_;
};

}  // namespace torch_mooncake::pool
