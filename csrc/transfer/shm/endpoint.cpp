#include "transfer/shm/endpoint.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "transfer/copy_part.h"
#include "transfer/engine_impl.h"
#include "transfer/instant.h"
#include "transfer/shm/lane.h"
#include "transfer/slices.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {

// An fd to send: one that cannot be mapped for writing if the region is read-only.
Result<UniqueFd> fd_to_send(int fd, bool writable) {
  std::string path = "/proc/self/fd/" + std::to_string(fd);
  UniqueFd sent(writable ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!sent.valid()) return Status::from_errno("duplicating a segment's fd", errno);
  return sent;
}

// segment: u32 grant, u8 "send the fd". The grant counts as mapped from the answer on.
void on_segment(PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto grant = in.get<uint32_t>();
  bool send_fd = in.get<uint8_t>() != 0;
  auto region = peer.grants().find(grant);
  if (!in.done() || !region || !region->segment())
    return responder.fail({Code::key_not_found, "grant " + std::to_string(grant) + " names no segment"});
  if (!peer.same_host()) return responder.fail({Code::unsupported, "segments are for processes of this host"});
  if (!peer.grants().mark_mapped(grant, peer.session()->peer_process()))
    return responder.fail({Code::key_not_found, region->name() + " was deregistered"});
  std::vector<UniqueFd> fds;
  if (send_fd) {
    auto fd = fd_to_send(region->segment()->fd(), region->writable());
    if (!fd) return responder.fail(fd.status());
    fds.push_back(std::move(*fd));
  }
  responder.ok({}, std::move(fds));
}

}  // namespace

bool process_is_dead(int pidfd) {
  pollfd poll_fd{pidfd, POLLIN, 0};
  return poll(&poll_fd, 1, 0) == 1;
}

void SegmentEndpoint::attach(EngineImpl& engine) { engine.handle(kSegment, on_segment); }

Explanation SegmentEndpoint::explain() const {
  Explanation out{
      .transport = name(), .option = "shm", .serves = "regions in shared segments", .ordinary_memory = false};
  if (!peer_.same_host())
    out.no_read = out.no_write = "the peer is not on this host";
  else if (auto features = peer_.features(); features.known && !features.shm)
    out.no_read = out.no_write = "the peer does not allow shm";
  add_copy_sizes(out);
  return out;
}

Result<RemoteMemoryPtr> SegmentEndpoint::open(const OpenedRegion& opened, Direction, Deadline deadline) {
  auto* record = opened.descriptor.find(AccessKind::segment);
  if (record == nullptr || !peer_.same_host()) return RemoteMemoryPtr();
  TM_ASSIGN(auto place, parse_segment_record(*record));
  bool writable = opened.descriptor.writable;
  auto segment = SegmentCache::instance().find(place.segment, writable);
  ByteWriter request;
  request.put(opened.grant).put(static_cast<uint8_t>(segment == nullptr));
  TM_ASSIGN(auto answer, peer_.session()->call_sync(kSegment, request.take(), deadline));
  if (!segment) {
    if (answer.fds.size() != 1) return Status(Code::corrupt, peer_.name() + " sent no fd for its segment");
    TM_ASSIGN(segment, SegmentCache::instance().adopt(std::move(answer.fds[0]), place.segment, writable));
  }
  TM_ASSIGN(auto mapping, segment->map(writable ? Protection::read_write : Protection::read_only));
  if (place.offset > mapping->nbytes || opened.descriptor.nbytes > mapping->nbytes - place.offset)
    return Status(Code::out_of_bounds, "a descriptor of " + peer_.name() + " names bytes outside its segment");
  auto memory = std::make_shared<SegmentMemory>();
  memory->segment = std::move(segment);
  memory->data = mapping->data + place.offset;
  memory->mapping = std::move(mapping);
  return RemoteMemoryPtr(memory);
}

Status SegmentEndpoint::copy_now(Direction direction, const Batch& batch) {
  auto& remote = static_cast<RemoteRegionImpl&>(*batch.remote);
  if (!remote.usage().acquire(peer_.name())) {
    TM_TRY(peer_.session()->status());
    return {Code::key_not_found, "remote " + remote.name() + " was deregistered"};
  }
  copy_extents(direction, batch, batch.local->data(), static_cast<SegmentMemory&>(*remote.path(direction).memory).data);
  remote.usage().release(peer_.name());
  return peer_.session()->status();
}

void SegmentEndpoint::submit(const std::shared_ptr<OpImpl>& op, std::span<const Batch> batches) {
  auto direction = op->direction();
  auto pieces = copy_pieces_of(batches, direction, [&](const RemoteRegionImpl& remote) {
    return static_cast<SegmentMemory&>(*remote.path(direction).memory).data;
  });
  std::make_shared<SegmentCopy>(op, std::move(pieces), remotes_of(batches))->run();
}

}  // namespace torch_mooncake::transfer
