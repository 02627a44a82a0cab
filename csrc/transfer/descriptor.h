// Descriptor: what a region's owner tells the world about it. Versioned bytes that the user carries to peers.
//
// An access record says how one transport reaches the region ("memory" in each transport's folder makes and reads its
// own). Readers skip records they do not know, so a new transport needs no new version.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/bytes.h"
#include "common/status.h"
#include "transfer/engine.h"

namespace torch_mooncake::transfer {

enum class AccessKind : uint8_t { segment = 1, process_vm = 2, rdma = 8 };

struct AccessRecord {
  AccessKind kind;
  std::string body;
};

struct Descriptor {
  static constexpr uint32_t kMagic = 0x4d52'5254;  // "TRRM"
  static constexpr uint16_t kVersion = 3;
  Id128 engine{};
  MemoryKind kind = MemoryKind::host;
  uint64_t region = 0;
  uint64_t generation = 0;
  uint64_t nbytes = 0;
  bool readable = true;
  bool writable = true;
  std::string label;
  std::vector<AccessRecord> access;

  std::string encode() const;
  // Bytes that are no descriptor: invalid_argument; of another version: version_mismatch with both numbers.
  static Result<Descriptor> decode(std::string_view bytes);
  const std::string* find(AccessKind kind) const;
};

}  // namespace torch_mooncake::transfer
