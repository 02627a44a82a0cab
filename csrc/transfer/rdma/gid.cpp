#include "transfer/rdma/gid.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/fd.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

// What a question to the routing table says, in netlink's words.
struct Question {
  nlmsghdr header{};
  rtmsg route{};
  char attributes[64]{};

  void add(uint16_t type, const void* data, size_t n) {
    auto* attribute = reinterpret_cast<rtattr*>(reinterpret_cast<char*>(this) + NLMSG_ALIGN(header.nlmsg_len));
    attribute->rta_type = type;
    attribute->rta_len = static_cast<uint16_t>(RTA_LENGTH(n));
    std::memcpy(RTA_DATA(attribute), data, n);
    header.nlmsg_len = static_cast<uint32_t>(NLMSG_ALIGN(header.nlmsg_len) + RTA_ALIGN(attribute->rta_len));
  }
};

}  // namespace

IpAddress Gid::ip() const {
  IpAddress out;
  out.is_v6 = std::memcmp(raw.data(), kMapped, sizeof kMapped) != 0;
  if (out.is_v6)
    out.bytes = raw;
  else
    std::copy(raw.begin() + 12, raw.end(), out.bytes.begin());
  out.prefix_bits = static_cast<uint8_t>(out.bits());
  return out;
}

std::string Gid::to_string() const {
  const char* names[] = {"InfiniBand", "RoCE v1", "RoCE v2"};
  return std::string(names[static_cast<int>(kind)]) + " " + ip().host();
}

Gid Gid::decode(ByteReader& in) {
  Gid gid;
  gid.raw = in.get_id();
  gid.kind = static_cast<GidKind>(std::min<uint8_t>(in.get<uint8_t>(), 2));
  return gid;
}

Route find_route(const IpAddress& to, uint32_t interface) {
  Question question;
  question.header.nlmsg_len = NLMSG_LENGTH(sizeof(rtmsg));
  question.header.nlmsg_type = RTM_GETROUTE;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.route.rtm_family = to.is_v6 ? AF_INET6 : AF_INET;
  question.route.rtm_dst_len = static_cast<uint8_t>(to.bits());
  question.add(RTA_DST, to.bytes.data(), to.is_v6 ? 16 : 4);
  if (interface != 0) question.add(RTA_OIF, &interface, sizeof interface);
  UniqueFd socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
  timeval patience{1, 0};
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  alignas(nlmsghdr) char answer[4096];
  if (!socket.valid() || ::send(socket.get(), &question, question.header.nlmsg_len, 0) < 0) return Route::none;
  const ssize_t n = ::recv(socket.get(), answer, sizeof answer, 0);
  auto* header = reinterpret_cast<nlmsghdr*>(answer);
  if (n < 0 || !NLMSG_OK(header, static_cast<uint32_t>(n)) || header->nlmsg_type != RTM_NEWROUTE) return Route::none;
  auto* route = static_cast<rtmsg*>(NLMSG_DATA(header));
  if (route->rtm_type != RTN_UNICAST && route->rtm_type != RTN_LOCAL) return Route::none;
  auto left = static_cast<int>(RTM_PAYLOAD(header));
  for (auto* attribute = RTM_RTA(route); RTA_OK(attribute, left); attribute = RTA_NEXT(attribute, left))
    if (attribute->rta_type == RTA_GATEWAY || attribute->rta_type == RTA_VIA) return Route::by_gateway;
  return Route::direct;
}

std::vector<GidPair> rank_pairs(std::span<const Gid> ours, std::span<const Gid> theirs,
                                const std::function<Route(const IpAddress&, uint32_t)>& route) {
  struct Ranked {
    int rank;
    GidPair pair;
  };
  std::vector<Ranked> found;
  auto rank_of = [&](const Gid& a, const Gid& b) {
    if (a.kind != GidKind::roce_v2) return a.kind == GidKind::infiniband ? 0 : 5;
    const auto from = a.ip(), to = b.ip();
    if (from.is_v6 != to.is_v6 || from.is_link_local() != to.is_link_local()) return -1;
    if (from.is_link_local()) return 4;
    return static_cast<int>(route(to, a.interface));
  };
  for (size_t i = 0; i < ours.size(); ++i)
    for (size_t j = 0; j < theirs.size(); ++j)
      if (ours[i].kind == theirs[j].kind)
        if (int rank = rank_of(ours[i], theirs[j]); rank >= 0)
          found.push_back({rank, {static_cast<uint8_t>(i), static_cast<uint8_t>(j)}});
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
  std::vector<GidPair> out;
  for (auto& one : found) out.push_back(one.pair);
  return out;
}

}  // namespace torch_mooncake::transfer::rdma
