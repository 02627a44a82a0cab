// Pull: a peer's write into our memory, carried out by us. And PullPart, the peer's end of it.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/copy.h"
#include "rpc/session.h"
#include "transfer/grant.h"
#include "transfer/op.h"

namespace torch_mooncake::transfer {

struct PullPiece {
  uint64_t source;  // address in the writer's process
  Piece target;
};
struct PullSource {
  uint64_t generation_word, generation;  // of a region the pieces come from
};
struct PullRequest {
  uint64_t id = 0;
  std::vector<PullSource> sources;
  std::vector<PullPiece> pieces;
  std::string notify;
  // Straight from the op's list, which may be long: made inside its call.
  static std::string encode(uint64_t id, std::string_view notify, std::span<const Batch> batches);
  static Result<PullRequest> decode(std::string_view body);
};

// Takes leave of the grants before every step, so that a region being deregistered is written no further. Ends by
// answering the responder, and whoever has asked for cancellation.
class Pull : public std::enable_shared_from_this<Pull> {
 public:
  static constexpr uint64_t kInlineBytes = 128 << 10;  // so little is pulled on the I/O thread
  static constexpr uint64_t kStepBytes = 16 << 20;

  Pull(std::shared_ptr<PeerImpl> peer, PullRequest request, rpc::Responder responder);
  uint64_t nbytes() const { return nbytes_; }
  void run();
  // `over` (may be empty) is answered when this pull writes no more.
  void cancel(rpc::Responder over);

 private:
  Status pull();
  Status step(std::span<const PullPiece> pieces, int pid);

  const std::shared_ptr<PeerImpl> peer_;
  PullRequest request_;
  uint64_t nbytes_ = 0;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  bool over_ = false;
  rpc::Responder responder_;
  std::vector<rpc::Responder> waiting_;
};

class PullPart final : public Part, public std::enable_shared_from_this<PullPart> {
 public:
  PullPart(OpImplPtr op, uint64_t id, uint64_t nbytes) : op_(std::move(op)), id_(id), nbytes_(nbytes) {}
  void run(std::string request);
  void stop(const Status& why) override;

 private:
  enum class State { fresh, sending, sent, over };
  const OpImplPtr op_;
  const uint64_t id_, nbytes_;
  std::mutex mutex_;
  State state_ = State::fresh;
  std::optional<Status> stop_;  // while it is being sent: its cancellation comes behind it
};

}  // namespace torch_mooncake::transfer
