#pragma once

#include <string>
#include <vector>

#include "rpc/session.h"

namespace torch_mooncake::rpc {

// Where the answer to one call goes. One of the two is called, once, on any thread.
struct Responder::State {
  virtual ~State() = default;
  virtual void ok(std::string body, std::vector<UniqueFd> fds) = 0;
  virtual void fail(const Status& status) = 0;
};

}  // namespace torch_mooncake::rpc
