// Small ops over lanes: one message each way on the control lane, with the payload inside it. No stream, no second
// lane, and the thread that waits for the op receives the answer itself (Session::receive_until).
//
// kSmallWrite (call): notification, pieces, payload. Answered when it is applied; its end is known by that answer
// alone, as control messages are handled once. kSmallRead (call): pieces; the answer is the
// payload. The bytes pass through the message, so the caller's memory is read inside submit() only, and written under
// the part's lock, while the op lives.
#pragma once

#include <mutex>

#include "transfer/op.h"
#include "transfer/tcp/memory.h"

namespace torch_mooncake::transfer {

class SmallPart final : public Part, public std::enable_shared_from_this<SmallPart> {
 public:
  static constexpr uint64_t kMaxBytes = 16 << 10;
  static constexpr size_t kMaxPieces = 64;
  static bool fits(const ChunkPlan& plan) { return plan.nbytes <= kMaxBytes && plan.pieces.size() <= kMaxPieces; }

  SmallPart(OpImplPtr op, ChunkPlan plan) : op_(std::move(op)), plan_(std::move(plan)) {}
  void run();
  void stop(const Status& why) override { end(why); }
  void help(Deadline deadline, int64_t spin_until_ns) override;

  // At the other side.
  static void on_write(PeerImpl& peer, rpc::Message request, rpc::Responder responder);
  static void on_read(PeerImpl& peer, rpc::Message request, rpc::Responder responder);

 private:
  void write();
  void read();
  void arrived(std::string_view payload);
  void end(const Status& outcome);

  const OpImplPtr op_;
  const ChunkPlan plan_;
  std::mutex mutex_;
  bool over_ = false;
};

}  // namespace torch_mooncake::transfer
