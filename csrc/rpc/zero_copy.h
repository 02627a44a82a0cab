// ZeroCopy: MSG_ZEROCOPY on one TCP lane. Whether large payloads are given to the kernel without a copy, by rule for
// the link and by what the kernel then reports, and which of the sends it has done with.
//
// Rule: off where both ends are one host, because the kernel copies such pages on loopback when it delivers them, and
// its notification costs on top. Elsewhere on, for messages of kLeastBytes and more in pieces of kLeastPiece and more,
// until the kernel reports that it copied one after all (veth, a NIC without scatter/gather): then off for good. The
// failpoint "rpc.zero_copy=error" turns it on everywhere (tests).
//
// Sends are numbered by the kernel from 0, each that took bytes. A frame's memory is the kernel's until is_over(number
// of its last send): data it has in its queue, or on the way to the NIC, is read from there.
//
// Threads: wants() and describe() from any thread, the rest under the lane's mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

namespace torch_mooncake::rpc {

class ZeroCopy {
 public:
  static constexpr uint64_t kLeastBytes = 256 << 10;
  static constexpr uint64_t kLeastPiece = 32 << 10;

  void choose(int fd, bool one_host);  // of a connected TCP socket
  bool wants(uint64_t payload_bytes, size_t pieces) const;
  uint32_t sent() { return next_++; }  // a send took bytes: its number
  void collect(int fd);                // takes the kernel's notifications (EPOLLERR tells of them)
  // Wrap around after 2^32 sends, of which far fewer are under way.
  bool is_over(uint32_t number) const { return static_cast<int32_t>(over_below_ - number) > 0; }
  bool all_over() const { return static_cast<int32_t>(over_below_ - next_) >= 0; }
  std::string describe() const;

 private:
  enum class State : uint8_t { not_tcp, one_host, refused, on, copied };
  std::atomic<State> state_{State::not_tcp};
  uint32_t next_ = 0;
  uint32_t over_below_ = 0;  // may be ahead of next_: a notification can come before its send returns
  std::set<uint32_t> over_;  // above it
};

}  // namespace torch_mooncake::rpc
