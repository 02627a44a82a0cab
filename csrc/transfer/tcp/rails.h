// Rails: pairs of a local and a remote NIC that bulk takes. Each side tells the other its ends (NICs with an address,
// their speed and NUMA node, and the port it listens on there); the side that connected makes the pairs and dials.
//
// Pure functions and values.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "rpc/address.h"
#include "rpc/session.h"
#include "topology/topology.h"

namespace torch_mooncake::transfer {

struct RailEnd {
  std::string nic;
  IpAddress address;
  uint16_t port = 0;  // where this engine listens at that address, 0: nowhere
  bool up = true;
  int64_t speed_mbps = 0;  // 0: unknown
  int numa_node = -1;
  auto operator<=>(const RailEnd&) const = default;
};

struct RailPlan {
  RailEnd local, remote;
  rpc::Rail key() const { return {local.address.host(), remote.address.host()}; }
  rpc::LaneTarget target(bool bind_device) const;
  bool up() const { return local.up && remote.up; }
};

// The addresses of the NICs that the filter allows, up or not. `listening`: hosts (perhaps wildcards) and ports.
std::vector<RailEnd> rail_ends(std::span<const Nic> nics, const NicFilter& filter,
                               std::span<const rpc::Address> listening);

// Each NIC of either side in at most one pair: first those of one subnet, then what is left over; IPv4 before IPv6,
// fast before slow, and the first NIC with the first, the second with the second. Pairs with less than a tenth of the
// fastest one's speed (management networks) are left out.
std::vector<RailPlan> plan_rails(std::span<const RailEnd> local, std::span<const RailEnd> remote);

void encode_ends(ByteWriter& out, std::span<const RailEnd> ends);
std::vector<RailEnd> decode_ends(ByteReader& in);  // in.ok() tells

}  // namespace torch_mooncake::transfer
