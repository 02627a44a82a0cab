// An IP address with the length of its network's prefix: what an interface has, and what CIDR filters are.
#pragma once

#include <sys/socket.h>

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake {

struct TM_API IpAddress {
  std::array<uint8_t, 16> bytes{};  // IPv4 in the first four
  bool is_v6 = false;
  uint8_t prefix_bits = 0;

  // "10.0.0.1", "10.0.0.1/24", "fe80::1/64"; without a prefix the whole address counts.
  static Result<IpAddress> parse(std::string_view text);
  // Of AF_INET or AF_INET6; anything else gives false.
  static bool from_socket(const sockaddr* address, const sockaddr* netmask, IpAddress& out);

  std::string host() const;       // "10.0.0.1"
  std::string to_string() const;  // "10.0.0.1/24"
  int bits() const { return is_v6 ? 128 : 32; }
  bool contains(const IpAddress& other) const;  // in the network of this one
  bool same_host(const IpAddress& other) const { return is_v6 == other.is_v6 && bytes == other.bytes; }
  bool is_loopback() const;
  bool is_link_local() const;
  auto operator<=>(const IpAddress&) const = default;
};

}  // namespace torch_mooncake
