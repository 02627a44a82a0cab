// KeeperLink: the socketpair between keeper and worker. One datagram a message; segments travel as fds, and what the
// worker has sent arrives even if it dies right after.
//
// Ownership: each side owns its end. Threads: send() from any; receive() from one. A failed send to a keeper that is
// gone needs no care: the kernel kills the worker with the keeper.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"
#include "common/fd.h"
#include "common/status.h"
#include "pool/donor.h"

namespace torch_mooncake::pool {

struct LinkMessage {
  enum class Type : uint8_t {
    ready = 1,  // worker: serves; text is its addresses, separated by spaces
    failed,     // worker: cannot serve; text says why
    clients,    // worker: number is how many there are
    hold,       // worker: keep these fds for the next worker
    release,    // worker: let go of segments[0]
    fresh,      // worker: let go of all, what follows is new memory
    stop,       // keeper: drain and exit
    leave,      // worker: somebody asked this node to leave; the keeper answers with stop
  };
  struct SegmentName {
    SegmentRole role{};
    uint64_t tag = 0;
    Id128 id{};
  };
  Type type{};
  uint32_t number = 0;
  std::string text;
  std::vector<SegmentName> segments;
  std::vector<UniqueFd> fds;  // received with hold, one a segment
};

class TM_API KeeperLink {
 public:
  explicit KeeperLink(UniqueFd fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }

  // `fds` are duplicated into the message.
  Status send(const LinkMessage& message, const std::vector<int>& fds = {});
  // Waits. peer_lost: the other side is gone. With `wait` false, busy: nothing there.
  Result<LinkMessage> receive(bool wait);

  // The worker's words.
  Status ready(const std::string& addresses) { return send({LinkMessage::Type::ready, 0, addresses, {}, {}}); }
  Status failed(const Status& why) { return send({LinkMessage::Type::failed, 0, why.to_string(), {}, {}}); }
  Status leave() { return send({LinkMessage::Type::leave, 0, {}, {}, {}}); }
  Status clients(uint32_t number) { return send({LinkMessage::Type::clients, number, {}, {}, {}}); }
  Status fresh() { return send({LinkMessage::Type::fresh, 0, {}, {}, {}}); }
  Status hold(const std::vector<HeldSegment>& segments);
  Status release(const HeldSegment& segment);
  // Returns when the keeper says stop (ok) or is gone (peer_lost).
  Status wait_for_stop();

 private:
  UniqueFd fd_;
};

}  // namespace torch_mooncake::pool
