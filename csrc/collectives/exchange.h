// Exchange: the messages of one step of a collective, started together and awaited together. If one fails, the others
// are called back and their buffers are at rest before wait() returns.
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

  void send(int to, const void* data, uint64_t nbytes);
  void receive(int from, void* data, uint64_t nbytes);
  Status wait();

  static Status send_receive(const Call& call, int to, ConstPiece out, int from, Piece in);

 private:
  void call_back(const Status& why);

  const Call& call_;
  std::vector<RequestPtr> requests_;
};

}  // namespace torch_mooncake::coll
