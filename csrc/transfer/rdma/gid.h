// GIDs: the addresses of RDMA ports, and which two of them connect two ports.
//
// A RoCE port has several for each of its interface's IP addresses: RoCE v1 (Ethernet only) and v2 (over UDP, routed).
// Only two of one kind talk to each other, and only where the network carries that kind: pairs are tried in order of
// promise, the best first, until a connection made with one has carried a read.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/bytes.h"
#include "topology/ip.h"

namespace torch_mooncake::transfer::rdma {

enum class GidKind : uint8_t { infiniband = 0, roce_v1 = 1, roce_v2 = 2 };

struct TM_API Gid {
  std::array<uint8_t, 16> raw{};
  GidKind kind = GidKind::infiniband;
  uint8_t index = 0;       // in the port's table
  uint32_t interface = 0;  // the netdev's number, 0 without one

  IpAddress ip() const;  // of RoCE v2; IPv4 where it is mapped
  std::string to_string() const;
  void encode(ByteWriter& out) const { out.put(raw).put(kind); }
  static Gid decode(ByteReader& in);
};

// How the kernel would send to `to` from that interface.
enum class Route : uint8_t { direct, by_gateway, none };
TM_API Route find_route(const IpAddress& to, uint32_t interface);

struct GidPair {
  uint8_t ours = 0, theirs = 0;  // positions in the two lists
};
// All pairs that could work, best first: RoCE v2 between addresses that the routing table connects, without a gateway
// before through one; then those it does not connect (it may not know the fabric's own ways); link-local addresses; and
// RoCE v1. `route` is find_route, or a test's.
TM_API std::vector<GidPair> rank_pairs(std::span<const Gid> ours, std::span<const Gid> theirs,
                                       const std::function<Route(const IpAddress&, uint32_t)>& route = find_route);

}  // namespace torch_mooncake::transfer::rdma
