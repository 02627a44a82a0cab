#include "transfer/tcp/rails.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <tuple>

namespace torch_mooncake::transfer {
namespace {

constexpr size_t kMinEncodedEnd = 4 + 1 + 16 + 1 + 2 + 1 + 8 + 4;
constexpr size_t kMaxRails = 32;
constexpr int64_t kTooSlow = 10;  // times slower than the fastest

uint16_t port_at(const IpAddress& address, std::span<const rpc::Address> listening) {
  for (auto& listener : listening) {
    auto host = IpAddress::parse(listener.host);
    if (!host) continue;
    bool any_v4 = !host->is_v6 && host->host() == "0.0.0.0", any = host->is_v6 && host->host() == "::";
    if (any || (any_v4 && !address.is_v6) || host->same_host(address)) return listener.port;
  }
  return 0;
}

int64_t speed_of(const RailPlan& rail) {
  auto a = rail.local.speed_mbps, b = rail.remote.speed_mbps;
  return a > 0 && b > 0 ? std::min(a, b) : std::max(a, b);
}

}  // namespace

rpc::LaneTarget RailPlan::target(bool bind_device) const {
  rpc::Address address;
  address.host = remote.address.host();
  address.port = remote.port;
  return {address.to_string(), local.address.host(), bind_device ? local.nic : std::string()};
}

std::vector<RailEnd> rail_ends(std::span<const Nic> nics, const NicFilter& filter,
                               std::span<const rpc::Address> listening) {
  std::vector<RailEnd> ends;
  for (auto& nic : nics) {
    if (nic.loopback || !filter.allows_name(nic)) continue;
    for (auto& address : nic.addresses) {
      if (address.is_link_local() || address.is_loopback() || !filter.allows(address)) continue;
      ends.push_back({nic.name, address, port_at(address, listening), nic.up, nic.speed_mbps, nic.numa_node});
    }
  }
  return ends;
}

std::vector<RailPlan> plan_rails(std::span<const RailEnd> local, std::span<const RailEnd> remote) {
  // The place of a NIC among those of its side, by NUMA node and name.
  auto order = [](std::span<const RailEnd> ends) {
    std::set<std::pair<int, std::string>> nics;
    for (auto& end : ends) nics.emplace(end.numa_node, end.nic);
    return nics;
  };
  auto place = [](const auto& nics, const RailEnd& end) {
    return static_cast<int>(std::distance(nics.begin(), nics.find({end.numa_node, end.nic})));
  };
  auto local_order = order(local), remote_order = order(remote);
  using Key = std::tuple<bool, bool, int64_t, int, int>;
  std::vector<std::pair<Key, RailPlan>> candidates;
  for (auto& a : local) {
    for (auto& b : remote) {
      if (a.address.is_v6 != b.address.is_v6 || b.port == 0) continue;
      // An address that is ours too (a container bridge has the same on every host) leads to ourselves.
      bool ours = std::any_of(local.begin(), local.end(), [&](auto& e) { return e.address.same_host(b.address); });
      if (ours) continue;
      RailPlan rail{a, b};
      bool one_subnet = a.address.contains(b.address) && b.address.contains(a.address);
      int x = place(local_order, a), y = place(remote_order, b);
      candidates.push_back({{!one_subnet, a.address.is_v6, -speed_of(rail), std::abs(x - y), x}, rail});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](auto& a, auto& b) { return a.first < b.first; });
  std::set<std::string> used_here, used_there;
  std::vector<RailPlan> rails;
  int64_t fastest = 0;
  for (auto& [key, rail] : candidates) {
    if (used_here.count(rail.local.nic) || used_there.count(rail.remote.nic) || rails.size() == kMaxRails) continue;
    used_here.insert(rail.local.nic);
    used_there.insert(rail.remote.nic);
    fastest = std::max(fastest, speed_of(rail));
    rails.push_back(rail);
  }
  std::erase_if(rails, [&](auto& rail) { return speed_of(rail) > 0 && speed_of(rail) * kTooSlow < fastest; });
  return rails;
}

void encode_ends(ByteWriter& out, std::span<const RailEnd> ends) {
  out.put(static_cast<uint32_t>(ends.size()));
  for (auto& end : ends) {
    out.put(std::string_view(end.nic)).put(static_cast<uint8_t>(end.address.is_v6)).put(end.address.bytes);
    out.put(end.address.prefix_bits).put(end.port).put(static_cast<uint8_t>(end.up)).put(end.speed_mbps);
    out.put(static_cast<int32_t>(end.numa_node));
  }
}

std::vector<RailEnd> decode_ends(ByteReader& in) {
  std::vector<RailEnd> ends(in.get_count(kMinEncodedEnd));
  for (auto& end : ends) {
    end.nic = in.get_string();
    end.address.is_v6 = in.get<uint8_t>() != 0;
    end.address.bytes = in.get_id();
    end.address.prefix_bits = std::min<uint8_t>(in.get<uint8_t>(), static_cast<uint8_t>(end.address.bits()));
    end.port = in.get<uint16_t>();
    end.up = in.get<uint8_t>() != 0;
    end.speed_mbps = std::max<int64_t>(0, in.get<int64_t>());
    end.numa_node = in.get<int32_t>();
  }
  return ends;
}

}  // namespace torch_mooncake::transfer
