// Acceptor: the listening sockets of an endpoint, and the connections that have not proven themselves yet. Everything
// runs on one I/O thread and never waits; a connection has 2 s to become a lane, and at most 64 of them have proven
// nothing: when one more comes, the oldest goes, a silent one before one that has said hello (younger than 100 ms it
// may be honest, and the newcomer waits in the kernel's queue).
#pragma once

#include <list>
#include <map>
#include <memory>
#include <vector>

#include "common/log.h"
#include "rpc/core.h"
#include "rpc/frame.h"
#include "rpc/socket.h"

namespace torch_mooncake::rpc {

class Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  static constexpr size_t kMaxPending = 64;
  static constexpr int64_t kHandshakeMs = 2000;
  static constexpr int64_t kYoungMs = 100;

  explicit Acceptor(std::shared_ptr<Core> core);
  // Any thread. The listener accepts from now on.
  Status add(Listener listener);
  // Any thread; returns when nothing is accepted any more and every unproven connection is closed.
  void close();

 private:
  struct Door;     // a listening socket
  struct Visitor;  // a connection on its way to become a lane
  struct Candidate {
    Digest key;
    Visitor* first;              // the connection that proved the token
    Visitor* control = nullptr;  // a Unix connection that may take over control
  };

  void accept_from(Door& door);
  bool make_room();  // false: all are young
  void admit(Door& door, UniqueFd fd);
  void pause();
  void resume();
  void on_frame(Visitor& visitor, FrameType type, std::string body);
  Status greet(Visitor& visitor, const std::string& body);
  Status verify(Visitor& visitor, const std::string& body);
  Status begin_session(Visitor& visitor, const std::string& body);
  void turn_away(Visitor& visitor, const Status& why, bool tell);
  UniqueFd release(Visitor& visitor);  // forgets it, gives its socket
  void close_now();

  const std::shared_ptr<Core> core_;
  Reactor& reactor_;
  log::Once complaints_{10'000};

  // I/O thread only, but for add().
  std::mutex doors_mutex_;
  std::vector<std::shared_ptr<Door>> doors_;
  std::list<std::shared_ptr<Visitor>> visitors_;  // have proven nothing; oldest first
  std::list<std::shared_ptr<Visitor>> proven_;    // wait for READY
  std::map<Id128, Candidate> candidates_;
  bool paused_ = false;
  bool closed_ = false;
};

}  // namespace torch_mooncake::rpc
