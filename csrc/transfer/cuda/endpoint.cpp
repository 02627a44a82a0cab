#include "transfer/cuda/endpoint.h"

#include "transfer/cuda/lane.h"
#include "transfer/engine_impl.h"
#include "transfer/move_part.h"
#include "transfer/slices.h"

namespace torch_mooncake::transfer {

const Capabilities& CudaEndpoint::capabilities() const {
  static constexpr Capabilities can{
      .option = "",
      .same_process = true,
      .same_host = true,
      .read = true,
      .write = true,
      .target_idle = true,
      .owner_revokes = true,
      .carries_notify = false,
      .local_kinds = 1 << static_cast<int>(MemoryKind::host) | 1 << static_cast<int>(MemoryKind::cuda)};
  return can;
}

Result<RemoteMemoryPtr> CudaEndpoint::open(const OpenedRegion& opened, Direction, Deadline) {
  if (opened.descriptor.kind != MemoryKind::cuda) return RemoteMemoryPtr();
  auto owner = EngineImpl::find(opened.descriptor.engine);
  if (!owner) return RemoteMemoryPtr();
  auto region = owner->regions().find(opened.descriptor.region, opened.descriptor.generation);
  if (!region) return Status(Code::key_not_found, "the remote region is not registered any more");
  return RemoteMemoryPtr(std::make_shared<CudaRemote>(std::move(region)));
}

Explanation CudaEndpoint::explain() const {
  Explanation out;
  out.transport = name();
  out.serves = "CUDA memory of this process";
  out.ordinary_memory = false;
  if (!EngineImpl::find(peer_.identity().engine)) out.no_read = out.no_write = "the peer is no engine of this process";
  auto driver = CudaDriver::made();  // asking for one would make a context
  out.facts.emplace_back("driver",
                         driver ? driver->describe() : std::string("not opened: no CUDA memory is registered"));
  return out;
}

void CudaEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  auto direction = op->direction();
  for (auto* remote : remotes_of(batches)) {
    std::vector<HostPiece> pieces;
    std::vector<CudaQueue::Copy> copies;
    std::vector<RegionImplPtr> host_locals, cuda_locals;
    for (auto& batch : batches) {
      if (batch.remote.get() != remote) continue;
      auto local = std::static_pointer_cast<RegionImpl>(batch.local);
      auto& region = static_cast<CudaRemote&>(*remote->path(direction, local->kind()).memory).region;
      bool host = local->kind() == MemoryKind::host;
      for (auto& e : batch.extents) {
        auto *ours = local->data() + e.local_offset, *theirs = region->data() + e.remote_offset;
        if (host)
          pieces.push_back({ours, e.remote_offset, e.nbytes});
        else
          copies.push_back(direction == Direction::read ? CudaQueue::Copy{ours, theirs, e.nbytes}
                                                        : CudaQueue::Copy{theirs, ours, e.nbytes});
      }
      (host ? host_locals : cuda_locals).push_back(std::move(local));
    }
    auto region = static_cast<CudaRemote&>(*remote->path(direction).memory).region;
    bool devices = !cuda_locals.empty();
    if (devices) submit_copies(op, region, std::move(copies), std::move(cuda_locals));
    if (!devices || !host_locals.empty())
      std::make_shared<MovePart>(op, name(), region, std::move(host_locals))->run(std::move(pieces));
  }
}

void CudaEndpoint::submit_copies(const std::shared_ptr<OpImpl>& op, const std::shared_ptr<RegionImpl>& region,
                                 std::vector<CudaQueue::Copy> copies, std::vector<std::shared_ptr<RegionImpl>> locals) {
  auto& queue = static_cast<CudaMemory&>(*region->backing()).queue();
  auto& user = op->peer().name();
  if (!region->usage().acquire(user)) {
    auto part = std::make_shared<CudaCopyPart>(op, queue, std::move(copies), nullptr);
    op->add(part);
    return op->part_done(part, {Code::key_not_found, "remote " + region->name() + " was deregistered"});
  }
  locals.push_back(region);
  auto hold = hold_regions(op, std::move(locals));
  region->usage().release(user);
  std::make_shared<CudaCopyPart>(op, queue, std::move(copies), std::move(hold))->run();
}

}  // namespace torch_mooncake::transfer
