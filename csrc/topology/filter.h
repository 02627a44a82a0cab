// Which NICs the user wants: "eth*", "!docker*", "10.0.0.0/8", "!fe80::/10", "mlx5_*" (RDMA device names too).
//
// A pattern that is an IP address or network concerns addresses, any other is a glob over names. With at least one
// positive pattern of a kind, something of that kind has to match; a pattern after "!" excludes, whatever else matches.
// Without any pattern for names, bridges of container runtimes are left out.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"
#include "common/status.h"
#include "topology/ip.h"

namespace torch_mooncake {

struct Nic;

class TM_API NicFilter {
 public:
  NicFilter() = default;
  // invalid_argument for an empty pattern or a malformed network.
  static Result<NicFilter> parse(const std::vector<std::string>& patterns);

  bool allows_name(const Nic& nic) const;
  bool allows(const IpAddress& address) const;
  // Loopback NICs and those that are down never pass; of the rest, those with an allowed name and, if addresses are
  // filtered, an allowed address.
  bool allows(const Nic& nic) const;

 private:
  std::vector<std::string> names_, not_names_;
  std::vector<IpAddress> networks_, not_networks_;
};

}  // namespace torch_mooncake
