// Exchange: messages of a collective, started together and awaited together, or some of them first while the others go
// on. If one fails, the others are called back and their buffers are at rest before the wait returns.
#pragma once

#include <vector>

#include "collectives/collectives.h"

namespace torch_mooncake::coll {

class Exchange {
 public:
  explicit Exchange(const Call& call) : call_(call) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange();  // calls back what was not awaited

  // To and from members of the call's team. Between two of them messages arrive in the order they were sent.
  RequestPtr send(int to, const void* data, uint64_t nbytes);
  RequestPtr receive(int from, void* data, uint64_t nbytes);
  Status wait();
  Status wait_for(std::span<const RequestPtr> some);  // of this exchange's
  Status wait_for(const RequestPtr& one) { return wait_for({&one, 1}); }

  static Status send_receive(const Call& call, int to, ConstPiece out, int from, Piece in);

 private:
  void call_back(const Status& why);

  const Call& call_;
  std::vector<RequestPtr> requests_;
};

}  // namespace torch_mooncake::coll
