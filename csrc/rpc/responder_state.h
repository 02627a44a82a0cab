#pragma once

#include <cstdint>
#include <memory>

#include "rpc/session.h"

namespace torch_mooncake::rpc {

class SessionImpl;

struct Responder::State {
  std::weak_ptr<SessionImpl> session;
  uint64_t id = 0;
};

}  // namespace torch_mooncake::rpc
