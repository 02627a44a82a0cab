#include "topology/ip.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>

namespace torch_mooncake {

Result<IpAddress> IpAddress::parse(std::string_view text) {
  auto malformed = [&] { return Status(Code::invalid_argument, "not an IP address: \"" + std::string(text) + "\""); };
  auto slash = text.find('/');
  std::string host(text.substr(0, slash));
  IpAddress out;
  out.is_v6 = host.find(':') != host.npos;
  if (::inet_pton(out.is_v6 ? AF_INET6 : AF_INET, host.c_str(), out.bytes.data()) != 1) return malformed();
  out.prefix_bits = static_cast<uint8_t>(out.bits());
  if (slash != text.npos) {
    auto digits = text.substr(slash + 1);
    int bits = -1;
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), bits);
    if (error != std::errc{} || end != digits.data() + digits.size() || bits < 0 || bits > out.bits())
      return malformed();
    out.prefix_bits = static_cast<uint8_t>(bits);
  }
  return out;
}

bool IpAddress::from_socket(const sockaddr* address, const sockaddr* netmask, IpAddress& out) {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return false;
  out = {};
  out.is_v6 = address->sa_family == AF_INET6;
  auto raw = [&](const sockaddr* a) -> const uint8_t* {
    if (out.is_v6) return reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr.s6_addr;
    return reinterpret_cast<const uint8_t*>(&reinterpret_cast<const sockaddr_in*>(a)->sin_addr);
  };
  const int nbytes = out.bits() / 8;
  std::memcpy(out.bytes.data(), raw(address), static_cast<size_t>(nbytes));
  out.prefix_bits = static_cast<uint8_t>(out.bits());
  if (!netmask) return true;
  int ones = 0;
  for (int i = 0; i < nbytes; ++i) ones += std::popcount(raw(netmask)[i]);
  out.prefix_bits = static_cast<uint8_t>(ones);
  return true;
}

std::string IpAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  ::inet_ntop(is_v6 ? AF_INET6 : AF_INET, bytes.data(), text, sizeof text);
  return text;
}

std::string IpAddress::to_string() const { return host() + "/" + std::to_string(prefix_bits); }

bool IpAddress::contains(const IpAddress& other) const {
  if (is_v6 != other.is_v6) return false;
  for (int left = prefix_bits, i = 0; left > 0; left -= 8, ++i) {
    auto mask = static_cast<uint8_t>(left >= 8 ? 0xff : 0xff << (8 - left));
    if ((bytes[static_cast<size_t>(i)] ^ other.bytes[static_cast<size_t>(i)]) & mask) return false;
  }
  return true;
}

bool IpAddress::is_loopback() const {
  if (!is_v6) return bytes[0] == 127;
  return std::all_of(bytes.begin(), bytes.end() - 1, [](auto b) { return b == 0; }) && bytes[15] == 1;
}

bool IpAddress::is_link_local() const {
  return is_v6 ? bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80 : bytes[0] == 169 && bytes[1] == 254;
}

}  // namespace torch_mooncake
