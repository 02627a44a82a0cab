// A file region of an engine in this process.
#pragma once

#include "transfer/region_table.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

struct FileMemory final : RemoteMemory {
  explicit FileMemory(RegionImplPtr r) : region(std::move(r)) {}
  const RegionImplPtr region;
};

}  // namespace torch_mooncake::transfer
