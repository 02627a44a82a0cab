// Wire: handshake frames over a socket, blocking within a deadline; for the side that connects. Reads never go past the
// frame, so the socket can become a lane afterwards.
#pragma once

#include <atomic>
#include <string>

#include "common/clock.h"
#include "common/status.h"
#include "rpc/frame.h"

namespace torch_mooncake::rpc {

class Wire {
 public:
  Wire(int fd, Deadline deadline, const std::atomic<bool>& stop) : fd_(fd), deadline_(deadline), stop_(stop) {}
  Status send(FrameType type, std::string_view body);
  // The body of the next frame, which must be of this type. A REJECT gives the other side's status.
  Result<std::string> expect(FrameType type, Stage stage);
  int peer_pid() const { return peer_pid_; }  // by SCM_CREDENTIALS, 0 if none came

 private:
  Result<size_t> read_some(char* out, size_t nbytes);
  const int fd_;
  const Deadline deadline_;
  const std::atomic<bool>& stop_;
  int peer_pid_ = 0;
};

// A handshake frame on a non-blocking socket that has room (its buffer is empty); false if it does not fit.
bool send_handshake_frame(int fd, FrameType type, std::string_view body);

}  // namespace torch_mooncake::rpc
