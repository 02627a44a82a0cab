#include "transfer/instant.h"

#include "common/failpoint.h"
#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

void copy_extents(Direction direction, const Batch& batch, std::byte* local, std::byte* remote) {
  for (auto& extent : batch.extents) {
    auto *ours = local + extent.local_offset, *theirs = remote + extent.remote_offset;
    if (direction == Direction::read)
      copy_bytes(ours, theirs, extent.nbytes);
    else
      copy_bytes(theirs, ours, extent.nbytes);
  }
}

OpPtr EngineImpl::transfer_now(Direction direction, const Batch& batch, const OpOptions& options) {
  if (!options.notify.empty() || options.on_end || options.stream || !usable()) return nullptr;
  // What is to give way, or to keep to a rate, goes through the pacer.
  if (options.priority != Priority::foreground || options_.foreground_rate != 0) return nullptr;
  uint64_t nbytes = 0;
  for (auto& extent : batch.extents) {
    if (extent.nbytes > kInstantBytes - nbytes) return nullptr;
    nbytes += extent.nbytes;
  }
  if (!check(direction, {&batch, 1})) return nullptr;
  auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
  auto& peer = static_cast<PeerImpl&>(*remote.peer());
  auto& local = static_cast<RegionImpl&>(*batch.local);
  auto* endpoint = remote.path(direction, local.local_kind()).endpoint;
  if (!endpoint->copies_now(direction) || !peer.alive() || !local.usage().acquire(peer.name())) return nullptr;
  const bool writes = direction == Direction::write;
  const int64_t began_ns = steady_ns();
  metrics_.op_began();
  auto copy = [&]() -> Status {
    if (options.deadline.ns() <= began_ns) return {Code::deadline_exceeded, "its deadline passed"};
    TM_TRY(failpoint("transfer.copy"));
    return endpoint->copy_now(direction, batch);
  };
  Status status = copy();
  local.usage().release(peer.name());
  auto transport = endpoint->name();
  if (status)
    metrics_.bytes(transport, writes ? nbytes : 0, writes ? 0 : nbytes);
  else
    status = status.with((writes ? "write of " : "read of ") + std::to_string(nbytes) +
                         (writes ? " bytes to " : " bytes from ") + peer.name());
  auto op = std::make_shared<EndedOp>(peer.identity().name, nbytes, std::move(transport), std::move(status));
  metrics_.op_ended(writes, op->transport(), nbytes, steady_ns() - began_ns, op->state());
  return op;
}

}  // namespace torch_mooncake::transfer
