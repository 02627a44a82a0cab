// Stream sockets: made, tuned, connected and bound. All are close-on-exec and non-blocking.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/fd.h"
#include "common/status.h"
#include "rpc/address.h"

namespace torch_mooncake::rpc {

// Connects within the deadline. Refused, unreachable or no such socket: peer_lost; not allowed: auth; silence:
// deadline_exceeded; `stop` turned true: closed. All name the address.
// `from` and `device` bind our end first (see LaneTarget); a host or NIC that we do not have: invalid_argument.
struct DialFrom {
  std::string host{}, device{};
};
Result<UniqueFd> dial(const Address& address, Deadline deadline, const std::atomic<bool>& stop,
                      const DialFrom& from = {});

// Waits until fd is ready for `events` (POLLIN, POLLOUT).
Status wait_ready(int fd, short events, Deadline deadline, const std::atomic<bool>& stop);

struct Listener {
  UniqueFd fd;
  std::string dialable;                 // what to tell people
  std::vector<std::string> advertised;  // every way in
  // A socket file to remove at the end, if it is still this one.
  std::string path;
  dev_t device = 0;
  ino_t inode = 0;
  bool is_unix = false;
  bool is_loopback = false;  // Unix sockets count
  void remove_path() const;
};
// `with_token`: whether strangers will be asked for a token; without, only Unix and loopback may be bound (else auth).
Result<Listener> open_listener(const Address& address, bool with_token);
Result<Listener> adopt_listener(UniqueFd fd, const Address& address, bool with_token);

// Latency and throughput settings of a connected socket of either kind.
//
// Congestion control, by rule: reno where both ends are one host (bbr's pacing halves loopback), else the host's own.
// For MSG_ZEROCOPY see zero_copy.h.
void tune(int fd);
bool is_one_host(int fd);  // a TCP connection whose ends are one host
// A peer that takes nothing for this long, or does not answer keepalives, is gone (TCP only).
void limit_silence(int fd, int limit_ms);
std::vector<std::pair<std::string, std::string>> describe_tuning(int fd);

struct Credentials {
  pid_t pid = 0;
  uid_t uid = static_cast<uid_t>(-1);
};
// Who connected to us (accepting side). On the connecting side the kernel names who called listen(), which may be
// another process than the one that accepted.
Credentials peer_credentials(int fd);
// A pidfd of process `pid`; where that is 0 (another pid namespace), of the one that the kernel names for the socket.
// Invalid if there is neither.
UniqueFd open_peer_process(int fd, int pid);

}  // namespace torch_mooncake::rpc
