#include "transfer/local/endpoint.h"

#include "transfer/copy_part.h"
#include "transfer/engine_impl.h"
#include "transfer/instant.h"
#include "transfer/local/lane.h"
#include "transfer/local/memory.h"
#include "transfer/slices.h"

namespace torch_mooncake::transfer {

bool LocalEndpoint::available() const {
  auto owner = EngineImpl::find(peer_.identity().engine);
  return owner && owner->allows("local");
}

Explanation LocalEndpoint::explain() const {
  Explanation out{.transport = name(), .option = "local", .serves = "any host memory"};
  if (!available()) out.no_read = out.no_write = "the peer is not an engine of this process that allows local";
  add_copy_sizes(out);
  return out;
}

Result<RemoteMemoryPtr> LocalEndpoint::open(const OpenedRegion& opened, Direction, Deadline) {
  auto owner = EngineImpl::find(opened.descriptor.engine);
  if (!owner || !owner->allows("local") || opened.descriptor.kind != MemoryKind::host) return RemoteMemoryPtr();
  auto region = owner->regions().find(opened.descriptor.region, opened.descriptor.generation);
  if (!region) return Status(Code::key_not_found, "the remote region is not registered any more");
  return RemoteMemoryPtr(std::make_shared<LocalMemory>(std::move(region)));
}

Status LocalEndpoint::copy_now(Direction direction, const Batch& batch) {
  auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
  auto& region = *static_cast<LocalMemory&>(*remote.path(direction).memory).region;
  if (!region.usage().acquire(peer_.name()))
    return {Code::key_not_found, "remote " + region.name() + " was deregistered"};
  copy_extents(direction, batch, batch.local->data(), region.data());
  region.usage().release(peer_.name());
  return {};
}

void LocalEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  auto direction = op->direction();
  std::vector<RegionImplPtr> targets;
  auto pieces = copy_pieces_of(batches, direction, [&](const RemoteRegionImpl& remote) {
    return static_cast<LocalMemory&>(*remote.path(direction).memory).region->data();
  });
  for (auto* remote : remotes_of(batches))
    targets.push_back(static_cast<LocalMemory&>(*remote->path(direction).memory).region);
  std::make_shared<LocalCopy>(op, std::move(pieces), std::move(targets))->run();
}

}  // namespace torch_mooncake::transfer
