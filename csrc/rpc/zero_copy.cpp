#include "rpc/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "common/failpoint.h"

namespace torch_mooncake::rpc {

void ZeroCopy::choose(int fd, bool one_host) {
  if (one_host && failpoint("rpc.zero_copy").is_ok()) {
    state_ = State::one_host;
    return;
  }
  int on = 1;
  state_ = ::setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0 ? State::on : State::refused;
}

bool ZeroCopy::wants(uint64_t payload_bytes, size_t pieces) const {
  return payload_bytes >= kLeastBytes && payload_bytes / kLeastPiece >= pieces &&
         state_.load(std::memory_order_relaxed) == State::on;
}

void ZeroCopy::collect(int fd) {
  if (auto state = state_.load(); state != State::on && state != State::copied) return;
  while (true) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(sock_extended_err) + sizeof(sockaddr_in6))];
    msghdr message{};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      break;
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      bool is_error = (header->cmsg_level == SOL_IP && header->cmsg_type == IP_RECVERR) ||
                      (header->cmsg_level == SOL_IPV6 && header->cmsg_type == IPV6_RECVERR);
      if (!is_error) continue;
      sock_extended_err told;
      std::memcpy(&told, CMSG_DATA(header), sizeof told);
      if (told.ee_errno != 0 || told.ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
      if (told.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) state_ = State::copied;
      for (uint32_t number = told.ee_info; static_cast<int32_t>(told.ee_data - number) >= 0; ++number)
        over_.insert(number);
    }
  }
  while (over_.erase(over_below_) > 0) ++over_below_;
}

std::string ZeroCopy::describe() const {
  switch (state_.load(std::memory_order_relaxed)) {
    case State::on:
      return "on, for 256 KiB and more in pieces of 32 KiB and more";
    case State::copied:
      return "off: it was tried, and the kernel reported that it copied all the same";
    case State::refused:
      return "off: the kernel refuses SO_ZEROCOPY";
    case State::one_host:
      return "off: both ends are one host, where the kernel would copy all the same";
    case State::not_tcp:
      break;
  }
  return "off: no TCP";
}

}  // namespace torch_mooncake::rpc
