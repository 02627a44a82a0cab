#include "rpc/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace torch_mooncake::rpc {
namespace {

Status malformed(std::string_view text, const char* why) {
  return {Code::invalid_argument, "address \"" + std::string(text) + "\": " + why};
}

Result<std::vector<SocketAddress>> lookup(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  int rc = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (rc != 0) return {Code::peer_lost, "host \"" + host + "\" cannot be resolved: " + ::gai_strerror(rc)};
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
  std::vector<SocketAddress> found;
  for (auto* entry = list; entry; entry = entry->ai_next) {
    SocketAddress a;
    std::memcpy(&a.storage, entry->ai_addr, entry->ai_addrlen);
    a.length = entry->ai_addrlen;
    found.push_back(a);
  }
  return found;
}

Result<std::vector<SocketAddress>> unix_address(const Address& address) {
  SocketAddress a;
  auto* un = reinterpret_cast<sockaddr_un*>(&a.storage);
  un->sun_family = AF_UNIX;
  bool is_abstract = address.path[0] == '@';
  if (address.path.size() + (is_abstract ? 0 : 1) > sizeof un->sun_path) {
    return malformed(address.to_string(), "a Unix socket path has at most 107 bytes");
  }
  std::memcpy(un->sun_path, address.path.data(), address.path.size());
  if (is_abstract) un->sun_path[0] = '\0';
  a.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.path.size() + (is_abstract ? 0 : 1));
  return std::vector{a};
}

}  // namespace

std::string Address::to_string() const {
  if (kind == Kind::unix) return "unix://" + path;
  bool is_v6 = host.find(':') != host.npos;
  return "tcp://" + (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

Result<Address> parse_address(std::string_view text) {
  Address address;
  std::string_view rest = text;
  if (auto at = text.find("://"); at != text.npos) {
    auto scheme = text.substr(0, at);
    rest = text.substr(at + 3);
    if (scheme == "unix") {
      address.kind = Address::Kind::unix;
      address.path = rest;
      if (rest.empty() || rest == "@") return malformed(text, "no path");
      if (rest[0] != '/' && rest[0] != '@') return malformed(text, "a Unix path is absolute, or starts with @");
      if (rest.find('\0') != rest.npos) return malformed(text, "a NUL byte in the path");
      return address;
    }
    if (scheme != "tcp") {
      return {Code::unsupported, "transport \"" + std::string(scheme) + "\" of address \"" + std::string(text) +
                                     "\" is not known (tcp, unix)"};
    }
  }
  std::string_view port;
  if (!rest.empty() && rest[0] == '[') {
    auto close = rest.find("]:");
    if (close == rest.npos) return malformed(text, "expected [v6]:port");
    address.host = rest.substr(1, close - 1);
    port = rest.substr(close + 2);
  } else {
    auto colon = rest.find(':');
    if (colon == rest.npos || colon != rest.rfind(':')) return malformed(text, "expected host:port");
    address.host = rest.substr(0, colon);
    port = rest.substr(colon + 1);
  }
  auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (error != std::errc{} || end != port.data() + port.size() || port.empty()) return malformed(text, "bad port");
  if (address.host.empty() || address.host.find_first_of(std::string_view("\0[]", 3)) != address.host.npos)
    return malformed(text, "no host");
  return address;
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_UNIX) return true;
  if (family() == 0) return false;
  if (family() == AF_INET) {
    auto* in = reinterpret_cast<const sockaddr_in*>(&storage);
    return ntohl(in->sin_addr.s_addr) >> 24 == 127;
  }
  auto* in6 = reinterpret_cast<const sockaddr_in6*>(&storage);
  if (IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr)) return in6->sin6_addr.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&in6->sin6_addr);
}

bool SocketAddress::is_wildcard() const {
  if (family() == AF_INET) return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == INADDR_ANY;
  if (family() == AF_INET6) {
    auto* in6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    return IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
  }
  return false;
}

bool SocketAddress::same_ip(const SocketAddress& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(&other.storage)->sin_addr.s_addr;
  }
  return family() == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(&other.storage)->sin6_addr, sizeof(in6_addr)) == 0;
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr, text, sizeof text);
  } else if (family() == AF_INET6) {
    auto* in6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    if (IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr)) {  // an IPv4 peer of a listener for both
      ::inet_ntop(AF_INET, in6->sin6_addr.s6_addr + 12, text, sizeof text);
      return text;
    }
    ::inet_ntop(AF_INET6, &in6->sin6_addr, text, sizeof text);
    char name[IF_NAMESIZE];
    if (in6->sin6_scope_id != 0) {
      bool named = ::if_indextoname(in6->sin6_scope_id, name) != nullptr;
      return std::string(text) + "%" + (named ? name : std::to_string(in6->sin6_scope_id));
    }
  }
  return text;
}

std::string SocketAddress::to_string() const {
  if (family() == 0) return "an address that is gone";
  Address address;
  if (family() == AF_INET) {
    address.port = ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  } else if (family() == AF_INET6) {
    address.port = ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  } else {
    address.kind = Address::Kind::unix;
    size_t header = offsetof(sockaddr_un, sun_path);
    auto* un = reinterpret_cast<const sockaddr_un*>(&storage);
    if (length > header && un->sun_path[0] == '\0') {
      address.path = "@" + std::string(un->sun_path + 1, length - header - 1);
    } else if (length > header) {
      address.path = std::string(un->sun_path, ::strnlen(un->sun_path, length - header));
    }
  }
  address.host = host();
  return address.to_string();
}

Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline) {
  if (address.kind == Address::Kind::unix) return unix_address(address);
  if (auto numeric = lookup(address.host, address.port, AI_NUMERICHOST | AI_NUMERICSERV)) return numeric;
  struct Shared {
    std::mutex mutex;
    std::condition_variable cv;
    std::optional<Result<std::vector<SocketAddress>>> answer;
  };
  auto shared = std::make_shared<Shared>();
  // The resolver cannot be interrupted; a lookup nobody waits for any more ends by itself.
  std::thread([shared, host = address.host, port = address.port] {
    auto answer = lookup(host, port, AI_NUMERICSERV);
    std::lock_guard lock(shared->mutex);
    shared->answer = std::move(answer);
    shared->cv.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  auto until = std::chrono::nanoseconds(std::min(deadline.remaining_ns(), int64_t{86'400'000'000'000}));
  if (!shared->cv.wait_for(lock, until, [&] { return shared->answer.has_value(); })) {
    return {Code::deadline_exceeded, "resolving host \"" + address.host + "\""};
  }
  return *shared->answer;
}

SocketAddress local_address(int fd) {
  SocketAddress a;
  a.length = sizeof a.storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&a.storage), &a.length) != 0) a = {};
  return a;
}

SocketAddress remote_address(int fd) {
  SocketAddress a;
  a.length = sizeof a.storage;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&a.storage), &a.length) != 0) a = {};
  return a;
}

std::vector<std::string> interface_hosts() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return {"127.0.0.1"};
  std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  std::vector<std::pair<int, std::string>> found;
  for (auto* i = list; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
    int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char host[INET6_ADDRSTRLEN];
    const void* raw = &reinterpret_cast<sockaddr_in*>(i->ifa_addr)->sin_addr;
    if (family == AF_INET6) {
      auto* in6 = reinterpret_cast<sockaddr_in6*>(i->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr)) continue;
      raw = &in6->sin6_addr;
    }
    ::inet_ntop(family, raw, host, sizeof host);
    int rank = (i->ifa_flags & IFF_LOOPBACK ? 2 : 0) + (family == AF_INET6 ? 1 : 0);
    found.emplace_back(rank, host);
  }
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::vector<std::string> hosts;
  for (auto& entry : found) hosts.push_back(entry.second);
  if (hosts.empty()) hosts.push_back("127.0.0.1");
  return hosts;
}

}  // namespace torch_mooncake::rpc
