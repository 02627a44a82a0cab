// Addresses as text and as the kernel wants them: "tcp://host:port", "tcp://[v6]:port", "host:port",
// "unix:///path", "unix://@abstract".
#pragma once

#include <sys/socket.h>

#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "common/status.h"

namespace torch_mooncake::rpc {

struct Address {
  enum class Kind { tcp, unix } kind = Kind::tcp;
  std::string host;  // tcp: without brackets
  uint16_t port = 0;
  std::string path;  // unix: a leading '@' means abstract
  std::string to_string() const;
};

// Unknown scheme: unsupported; malformed: invalid_argument. Both name the text.
Result<Address> parse_address(std::string_view text);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  bool is_loopback() const;  // Unix sockets count
  bool is_wildcard() const;
  bool same_ip(const SocketAddress& other) const;
  std::string to_string() const;  // as parse_address takes it
  std::string host() const;       // numeric, with the scope of a link-local address; empty for a Unix socket
};

// Numeric hosts at once; names by the resolver on a helper thread, so that the deadline holds.
Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline);

// Of family 0 if the socket is not connected (any more).
SocketAddress local_address(int fd);
SocketAddress remote_address(int fd);
// The host's own addresses, non-loopback first, IPv4 before IPv6; link-local ones left out.
std::vector<std::string> interface_hosts();

}  // namespace torch_mooncake::rpc
