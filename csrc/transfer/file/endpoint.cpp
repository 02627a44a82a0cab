#include "transfer/file/endpoint.h"

#include "transfer/engine_impl.h"
#include "transfer/file/lane.h"
#include "transfer/slices.h"

namespace torch_mooncake::transfer {

Result<RemoteMemoryPtr> FileEndpoint::open(const OpenedRegion& opened, Direction, Deadline) {
  return RegionHere::open(opened, MemoryKind::file);
}

Explanation FileEndpoint::explain() const {
  Explanation out;
  out.transport = name();
  out.serves = "files of this process";
  out.ordinary_memory = false;
  if (!EngineImpl::find(peer_.identity().engine)) out.no_read = out.no_write = "the peer is no engine of this process";
  out.facts.emplace_back("file I/O", file_io_choice());
  out.facts.emplace_back("GPUDirect Storage", storage_choice());
  return out;
}

void FileEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  for (auto* remote : remotes_of(batches)) {
    auto [host, files, devices] = batches_of(*remote, batches);
    auto kind = host.empty() ? MemoryKind::cuda : MemoryKind::host;
    auto reached =
        Reached::here(static_cast<RegionHere&>(*remote->path(op->direction(), as_local(kind)).memory).region);
    if (!host.empty()) MovePart::run(op, name(), reached, host);
    if (!devices.empty()) FileCudaPart::run(op, name(), reached, devices);
  }
}

}  // namespace torch_mooncake::transfer
