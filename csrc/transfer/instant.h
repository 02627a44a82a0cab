// Instant ops: little between memories that this process can copy between by itself, carried out inside write() or
// read(), with no part, no timer and no lock but those of the regions. What such an op leaves is its outcome.
#pragma once

#include <string>

#include "transfer/transport.h"

namespace torch_mooncake::transfer {

// The longest instant op. With 64 KiB the copy begins to cost more than the op around it.
inline constexpr uint64_t kInstantBytes = 64 << 10;

// An op that was over before it existed. Keeps nothing alive, so that to drop it costs and waits for nothing.
class EndedOp final : public Op {
 public:
  EndedOp(std::string peer, uint64_t nbytes, std::string transport, Status status)
      : peer_(std::move(peer)), nbytes_(nbytes), transport_(std::move(transport)), status_(std::move(status)) {}
  OpState state() const override {
    return status_.is_ok()                             ? OpState::done
           : status_.code() == Code::deadline_exceeded ? OpState::timeout
                                                       : OpState::failed;
  }
  Status status() const override { return status_; }
  Status wait(Deadline) override { return status_; }
  void cancel() override {}
  uint64_t nbytes() const override { return nbytes_; }
  uint64_t bytes_done() const override { return status_.is_ok() ? nbytes_ : 0; }
  bool remote_quiescent() const override { return true; }
  std::string transport() const override { return transport_; }
  std::string peers() const override { return peer_; }
  bool watch(std::shared_ptr<OpWatcher>, uint64_t) override { return false; }

 private:
  const std::string peer_;
  const uint64_t nbytes_;
  const std::string transport_;
  const Status status_;
};

// Copies the extents of a batch between two base addresses of this process.
void copy_extents(Direction direction, const Batch& batch, std::byte* local, std::byte* remote);

}  // namespace torch_mooncake::transfer
