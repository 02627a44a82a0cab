// What a user may set for RDMA, in one line: "sl=3,tc=106,pkey=0x8001". Everything has a default that works.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::transfer::rdma {

struct TM_API RdmaOptions {
  uint8_t service_level = 0;         // sl, 0..15
  uint8_t traffic_class = 0;         // tc, 0..255: DSCP and ECN of RoCE v2
  uint32_t pkey = 0;                 // of the partition; 0: the port's first
  int gid_index = -1;                // gid; -1: chosen for each peer, by route
  uint32_t mtu = 4096;               // the most of a packet, bytes: 256, 512, 1024, 2048, 4096
  uint8_t timeout = 14;              // a packet is sent again after 4.096 us * 2^timeout, 1..31
  uint8_t retries = 6;               // so many times, 0..7; Soft-RoCE takes 7 for "for ever"
  bool relaxed_ordering = false;     // relaxed: NICs may write memory out of order, where they can
  bool on_demand = false;            // odp: pages are not pinned, where NICs can take page faults
  bool lazy = false;                 // memory is registered with NICs when RDMA first uses it
  uint64_t max_mr_nbytes = 0;        // mr: one registration holds no more, bytes; 0: what the device says
  uint32_t max_queue_pairs = 16384;  // qps: of this engine on one NIC; beyond, those of idle peers are closed

  // invalid_argument: an unknown name or a value out of range; says which.
  static Result<RdmaOptions> parse(std::string_view text);
};

}  // namespace torch_mooncake::transfer::rdma
