// A write over lanes: WritePart at the initiator, WriteTarget at the owner of the destination.
//
// kWrite (call): u64 stream, u32 chunks, notification. Its answer, when every chunk is applied, is the op's
// acknowledgement. Chunks travel beside it and may come before it.
#pragma once

#include <atomic>
#include <optional>

#include "transfer/op.h"
#include "transfer/tcp/incoming.h"
#include "transfer/tcp/lane.h"
#include "transfer/tcp/memory.h"

namespace torch_mooncake::transfer {

class StreamEndpoint;

class WritePart final : public Part, public Outgoing {
 public:
  WritePart(OpImplPtr op, LaneScheduler& lanes, uint64_t id, ChunkPlan plan);
  void run(std::string notify);
  void stop(const Status& why) override;

 protected:
  Status gather(uint32_t chunk, uint32_t attempt, rpc::BulkFrame& frame) override;
  void ungather(uint32_t) override {}
  void broken(const Status& why) override { stop(why); }
  void at_rest() override;

 private:
  std::shared_ptr<WritePart> self() { return std::static_pointer_cast<WritePart>(shared_from_this()); }
  void end(const Status& outcome);  // no more frames; the first outcome stays

  const OpImplPtr op_;
  LaneScheduler& lanes_;
  const uint64_t id_;
  const ChunkPlan plan_;
  std::mutex mutex_;
  std::optional<Status> outcome_;
  enum { fresh, never, sending, sent } request_ = fresh;
  std::optional<Status> stop_;  // while the request is being sent: its cancellation comes behind it
  std::atomic<bool> rested_{false};
};

class WriteTarget final : public Incoming {
 public:
  WriteTarget(StreamEndpoint& endpoint, std::shared_ptr<PeerImpl> peer, uint64_t id);
  void header(uint32_t chunks, std::string notify, rpc::Responder responder);
  // `over` is answered when no byte of this stream can land.
  void cancel(rpc::Responder over);
  std::unique_ptr<rpc::BulkReceive> begin_frame(FrameHead head, uint64_t payload_bytes, bool over_unix);

 protected:
  bool enter(RegionImpl& region) override;
  void leave(RegionImpl& region) override;
  void applied(uint64_t nbytes, bool over_unix) override;
  void complete() override { answer({}); }
  void quiet(const Status& why) override { answer(why); }

 private:
  void answer(const Status& outcome);
  void finish_if_answered();

  StreamEndpoint& endpoint_;
  const std::shared_ptr<PeerImpl> peer_;
  const uint64_t id_;
  std::mutex mutex_;
  bool has_header_ = false;
  std::optional<Status> outcome_;
  std::string notify_;
  rpc::Responder responder_;
  std::vector<rpc::Responder> cancels_;
};

}  // namespace torch_mooncake::transfer
