// The words of the pool, shared by donor, home, node and client. See docs/pool.md and the blueprint's section on the
// pool.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "common/status.h"

namespace torch_mooncake::pool {

using NodeId = Id128;  // names a node's memory: stays over restarts of its worker, new with new memory
using TxnId = Id128;
using SessionId = uint64_t;

inline constexpr uint32_t kMaxKeyBytes = 1024;
inline constexpr uint32_t kMaxMetaBytes = 1 << 20;
inline constexpr uint32_t kMaxPieces = 64;
inline constexpr size_t kMaxParts = 4096;
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kSlabLimit = 32 * 1024;  // smaller parts live in slabs: copied, never mapped
inline constexpr uint32_t kShards = 4096;
inline constexpr int64_t kLeaseMs = 5000;  // a member that has not heard from the leader for so long fences itself
inline constexpr int64_t kMaxViewTtlMs = kLeaseMs - 1000;  // who is believed for longer may have been replaced
inline constexpr uint64_t kMaxTtlMs = uint64_t{10} * 365 * 86'400'000;

enum class Kind : uint8_t { named = 0, sealed = 1 };
// Who is evicted last, and who never. Of a version: a replace, removal or expiry ends it.
enum class Pin : uint8_t { none = 0, soft, hard };
enum class IfExists : uint8_t { replace = 0, keep = 1, error = 2 };

// (view, counter), assigned by the home at commit; totally ordered.
struct Version {
  uint64_t view = 0;
  uint64_t counter = 0;
  auto operator<=>(const Version&) const = default;
};

// A run of bytes in a donor's segment. Page aligned from kSlabLimit up.
struct Piece {
  uint32_t segment = 0;  // index among the donor's data segments
  uint64_t offset = 0;
  uint64_t nbytes = 0;
};

// One object part on one donor. `generation` is the value of the extent's generation word while the bytes are valid;
// it never repeats in a pool's life.
struct ExtentRef {
  uint32_t index = 0;  // slot in the donor's extent table
  uint64_t generation = 0;
};

// Where the bytes of a replica are.
enum class Tier : uint8_t { dram = 0, ssd = 1 };

// What has become of a key. `moved`: the same version, but it is in another tier now.
enum class KeyChange : uint8_t { removed = 0, stored, moved };

enum class ExtentState : uint32_t { free = 0, prepared, committed, final, superseded, limbo };

// A replica as the directory hands it to readers.
struct Replica {
  NodeId node{};
  ExtentRef extent;
  std::vector<Piece> pieces;
  Tier tier = Tier::dram;  // where it was when it was looked up; whoever reads it finds it in memory
};

// One writer's part of an object: its bytes and its own metadata.
struct PartInfo {
  uint64_t offset = 0, nbytes = 0;
  std::string meta;
};

struct ObjectInfo {
  std::string key;
  Kind kind = Kind::named;
  Version version;
  uint64_t nbytes = 0;
  std::string meta;     // of part 0; opaque to the pool: how Python describes the tensors inside
  std::string label;    // the caller's version= label
  uint32_t crc32c = 0;  // of the bytes, if has_crc
  bool has_crc = false;
  std::optional<uint64_t> left_ms;  // until it expires, when it was looked up; none: never
  Pin pin = Pin::none;
  std::vector<PartInfo> parts;    // in order; one unless several writers made it
  std::vector<Replica> replicas;  // of part 0
};

// How many bytes of memory the keys with this prefix may have, in the whole pool. Of two that fit a key the longer
// counts.
inline constexpr size_t kMaxQuotas = 16;
inline constexpr size_t kMaxQuotaPrefix = 256;
struct Quota {
  std::string prefix;
  uint64_t limit_bytes = 0;
  uint64_t used_bytes = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(prefix, kMaxQuotaPrefix)(limit_bytes)(used_bytes);
  }
};

struct SsdOptions {
  std::string path;  // a folder of its own
  uint64_t limit_bytes = 0;
  uint64_t segment_bytes = 0;  // 0: as the store chooses
};
struct SsdStats {
  uint64_t limit_bytes = 0, used_bytes = 0;  // of files on the disks
  uint64_t records = 0, record_bytes = 0;    // that can be read
  uint64_t demotions = 0, promotions = 0;
  uint64_t dropped = 0;    // evicted without being written: the queue was full, or the log had no room
  uint64_t refused = 0;    // evicted without being written: not admitted, or larger than a segment
  uint64_t reclaimed = 0;  // lost as the oldest
  uint64_t errors = 0, corrupt = 0;
  uint64_t out_of_service = 0;  // stores
};

}  // namespace torch_mooncake::pool
