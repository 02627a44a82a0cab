#include "transfer/file/endpoint.h"

#include "transfer/engine_impl.h"
#include "transfer/file/memory.h"
#include "transfer/file/queue.h"
#include "transfer/move_part.h"
#include "transfer/slices.h"

namespace torch_mooncake::transfer {

const Capabilities& FileEndpoint::capabilities() const {
  static constexpr Capabilities can{.option = "",
                                    .same_process = true,
                                    .same_host = true,
                                    .read = true,
                                    .write = true,
                                    .target_idle = true,
                                    .owner_revokes = true,
                                    .carries_notify = false};
  return can;
}

Result<RemoteMemoryPtr> FileEndpoint::open(const OpenedRegion& opened, Direction, Deadline) {
  if (opened.descriptor.kind != MemoryKind::file) return RemoteMemoryPtr();
  auto owner = EngineImpl::find(opened.descriptor.engine);
  if (!owner) return RemoteMemoryPtr();
  auto region = owner->regions().find(opened.descriptor.region, opened.descriptor.generation);
  if (!region) return Status(Code::key_not_found, "the remote region is not registered any more");
  return RemoteMemoryPtr(std::make_shared<FileMemory>(std::move(region)));
}

Explanation FileEndpoint::explain() const {
  Explanation out;
  out.transport = name();
  out.serves = "files of this process";
  out.ordinary_memory = false;
  if (!EngineImpl::find(peer_.identity().engine)) out.no_read = out.no_write = "the peer is no engine of this process";
  out.facts.emplace_back("file I/O", file_io_choice());
  return out;
}

void FileEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  auto direction = op->direction();
  for (auto* remote : remotes_of(batches)) {
    std::vector<HostPiece> pieces;
    std::vector<RegionImplPtr> locals;
    for (auto& batch : batches) {
      if (batch.remote.get() != remote) continue;
      locals.push_back(std::static_pointer_cast<RegionImpl>(batch.local));
      for (auto& extent : batch.extents)
        pieces.push_back({batch.local->data() + extent.local_offset, extent.remote_offset, extent.nbytes});
    }
    auto& memory = static_cast<FileMemory&>(*remote->path(direction).memory);
    std::make_shared<MovePart>(op, name(), memory.region, std::move(locals))->run(std::move(pieces));
  }
}

}  // namespace torch_mooncake::transfer
