#include "topology/filter.h"

#include <fnmatch.h>

#include <algorithm>

#include "topology/topology.h"

namespace torch_mooncake {
namespace {

constexpr const char* kContainerBridges[] = {"docker*", "br-*", "virbr*", "cni*", "flannel*", "podman*", "lxc*"};

bool matches(const char* glob, const Nic& nic) {
  if (::fnmatch(glob, nic.name.c_str(), 0) == 0) return true;
  return std::any_of(nic.rdma_devices.begin(), nic.rdma_devices.end(),
                     [&](auto& device) { return ::fnmatch(glob, device.c_str(), 0) == 0; });
}

}  // namespace

Result<NicFilter> NicFilter::parse(const std::vector<std::string>& patterns) {
  NicFilter filter;
  for (auto& text : patterns) {
    bool excludes = text.rfind('!', 0) == 0;
    std::string pattern = text.substr(excludes ? 1 : 0);
    if (pattern.empty()) return Status(Code::invalid_argument, "an empty pattern for NICs: \"" + text + "\"");
    if (auto network = IpAddress::parse(pattern)) {
      (excludes ? filter.not_networks_ : filter.networks_).push_back(*network);
    } else if (pattern.find_first_of("/:") != pattern.npos) {
      return network.status().with("pattern for NICs");
    } else {
      (excludes ? filter.not_names_ : filter.names_).push_back(pattern);
    }
  }
  return filter;
}

bool NicFilter::allows_name(const Nic& nic) const {
  auto any = [&](auto& globs) {
    return std::any_of(globs.begin(), globs.end(), [&](auto& glob) { return matches(glob.c_str(), nic); });
  };
  if (any(not_names_)) return false;
  if (!names_.empty()) return any(names_);
  return !not_names_.empty() || std::none_of(std::begin(kContainerBridges), std::end(kContainerBridges),
                                             [&](auto* glob) { return matches(glob, nic); });
}

bool NicFilter::allows(const IpAddress& address) const {
  auto any = [&](auto& networks) {
    return std::any_of(networks.begin(), networks.end(), [&](auto& network) { return network.contains(address); });
  };
  return !any(not_networks_) && (networks_.empty() || any(networks_));
}

bool NicFilter::allows(const Nic& nic) const {
  if (nic.loopback || !nic.up || !allows_name(nic)) return false;
  bool by_address = !networks_.empty() || (!not_networks_.empty() && !nic.addresses.empty());
  return !by_address ||
         std::any_of(nic.addresses.begin(), nic.addresses.end(), [&](auto& address) { return allows(address); });
}

}  // namespace torch_mooncake
