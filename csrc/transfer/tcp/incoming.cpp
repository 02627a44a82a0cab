#include "transfer/tcp/incoming.h"

#include <algorithm>

#include "transfer/tcp/memory.h"

namespace torch_mooncake::transfer {

class Incoming::Receiver final : public rpc::BulkReceive {
 public:
  Receiver(std::shared_ptr<Incoming> stream, uint32_t chunk, std::vector<Target> targets, bool over_unix)
      : stream_(std::move(stream)), chunk_(chunk), targets_(std::move(targets)), over_unix_(over_unix) {
    for (auto& target : targets_) total_ += target.piece.nbytes;
  }

  std::span<std::byte> window(uint64_t, uint64_t wanted) override {
    if (inside_) leave();
    if (at_ == targets_.size()) return {};
    {
      std::unique_lock lock(stream_->mutex_);
      auto mine = [&] { return !stream_->stopped_ && stream_->chunks_[chunk_].owner == this; };
      // The lane that had this chunk before is inside one recv: it will find that it lost the chunk.
      stream_->left_.wait(lock, [&] { return !mine() || stream_->chunks_[chunk_].inside == nullptr; });
      if (!mine()) return {};
      stream_->chunks_[chunk_].inside = this;
      ++stream_->inside_;
    }
    inside_ = true;
    auto& target = targets_[at_];
    auto data = stream_->enter(target, window_);
    if (!data) {
      Status why = data.status();
      out();
      stream_->stop(why);
      return {};
    }
    entered_ = true;
    return {*data + within_, std::min(wanted, target.piece.nbytes - within_)};
  }

  void filled(uint64_t nbytes) override {
    received_ += nbytes;
    within_ += nbytes;
    if (within_ == targets_[at_].piece.nbytes) {
      ++at_;
      within_ = 0;
    }
    leave();
  }

  void finish(const Status& status) override {
    if (inside_) leave();
    std::unique_lock lock(stream_->mutex_);
    auto& chunk = stream_->chunks_[chunk_];
    if (chunk.owner == this) {
      chunk.owner = nullptr;
      if (status && received_ == total_ && !stream_->stopped_) {
        chunk.applied = true;
        ++stream_->applied_;
        stream_->applied(total_, over_unix_);
      }
    }
    stream_->settle(std::move(lock));
  }

 private:
  void leave() {
    if (std::exchange(entered_, false)) stream_->leave(window_);
    out();
  }
  void out() {
    inside_ = false;
    std::unique_lock lock(stream_->mutex_);
    stream_->chunks_[chunk_].inside = nullptr;
    --stream_->inside_;
    stream_->left_.notify_all();
    stream_->settle(std::move(lock));
  }

  const std::shared_ptr<Incoming> stream_;
  const uint32_t chunk_;
  const std::vector<Target> targets_;
  const bool over_unix_;
  uint64_t total_ = 0, received_ = 0, within_ = 0;
  size_t at_ = 0;
  bool inside_ = false, entered_ = false;
  Window window_;
};

std::unique_ptr<rpc::BulkReceive> Incoming::begin(uint32_t chunk, std::vector<Target> targets, bool over_unix) {
  auto receiver = std::make_unique<Receiver>(shared_from_this(), chunk, std::move(targets), over_unix);
  std::lock_guard lock(mutex_);
  if (stopped_ || over_ || chunk >= std::min(total_, kMaxChunks)) return nullptr;
  if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
  if (chunks_[chunk].applied) return nullptr;
  chunks_[chunk].owner = receiver.get();
  return receiver;
}

void Incoming::expect(uint32_t chunks) {
  std::unique_lock lock(mutex_);
  total_ = chunks;
  settle(std::move(lock));
}

void Incoming::stop(const Status& why) {
  std::unique_lock lock(mutex_);
  if (stopped_ || over_) return;
  stopped_ = true;
  why_ = why;
  left_.notify_all();
  settle(std::move(lock));
}

void Incoming::settle(std::unique_lock<std::mutex> lock) {
  if (over_ || inside_ > 0 || !(stopped_ || applied_ == total_)) return;
  over_ = true;
  bool stopped = stopped_;
  Status why = why_;
  lock.unlock();
  auto self = shared_from_this();
  stopped ? quiet(why) : complete();
}

}  // namespace torch_mooncake::transfer
