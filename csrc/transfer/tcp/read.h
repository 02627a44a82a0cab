// A read over lanes: ReadPart at the initiator, ReadSource at the owner of the source.
//
// kRead (call): u64 stream, u32 chunks, u32 pieces in each chunk, the pieces. The owner streams the chunks; its answer
// comes at the end, and only a failure matters. kReadEnd (post) tells it that the stream is over.
#pragma once

#include <optional>
#include <unordered_map>

#include "transfer/op.h"
#include "transfer/tcp/incoming.h"
#include "transfer/tcp/lane.h"
#include "transfer/tcp/memory.h"

namespace torch_mooncake::transfer {

class StreamEndpoint;

class ReadPart final : public Part, public Incoming {
 public:
  ReadPart(OpImplPtr op, StreamEndpoint& endpoint, uint64_t id, ChunkPlan plan);
  void run();
  void stop(const Status& why) override { Incoming::stop(why); }
  std::unique_ptr<rpc::BulkReceive> begin_frame(uint32_t chunk, uint64_t payload_bytes, bool over_unix);

 protected:
  bool enter(RegionImpl&) override { return true; }  // the op itself uses its regions
  void leave(RegionImpl&) override {}
  void applied(uint64_t nbytes, bool over_unix) override;
  void complete() override { end({}); }
  void quiet(const Status& why) override { end(why); }

 private:
  std::shared_ptr<ReadPart> self() { return std::static_pointer_cast<ReadPart>(shared_from_this()); }
  void end(const Status& outcome);
  void tell_owner();

  const OpImplPtr op_;
  StreamEndpoint& endpoint_;
  const uint64_t id_;
  const ChunkPlan plan_;
  const int64_t began_ns_ = steady_ns();
  std::mutex mutex_;
  enum { fresh, sending, sent } request_ = fresh;
  bool is_over_ = false;
};

class ReadSource final : public Outgoing {
 public:
  ReadSource(StreamEndpoint& endpoint, std::shared_ptr<PeerImpl> peer, uint64_t id, ChunkPlan plan,
             rpc::Responder responder);
  static Result<ChunkPlan> parse(ByteReader& in);
  void end(const Status& outcome);

 protected:
  Status gather(uint32_t chunk, uint32_t attempt, rpc::BulkFrame& frame) override;
  void ungather(uint32_t chunk) override;
  void broken(const Status& why) override { end(why); }
  void at_rest() override;

 private:
  StreamEndpoint& endpoint_;
  const std::shared_ptr<PeerImpl> peer_;
  const uint64_t id_;
  const ChunkPlan plan_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, std::vector<Window>> windows_;  // of chunks in flight
  std::optional<Status> outcome_;
  rpc::Responder responder_;
};

}  // namespace torch_mooncake::transfer
