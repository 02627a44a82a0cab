#include "transfer/tcp/incoming.h"

#include <algorithm>

#include "transfer/tcp/memory.h"

namespace torch_mooncake::transfer {

class Incoming::Receiver final : public rpc::BulkReceive {
 public:
  Receiver(std::shared_ptr<Incoming> stream, uint32_t chunk, Frame frame, bool over_unix)
      : stream_(std::move(stream)), chunk_(chunk), frame_(std::move(frame)), over_unix_(over_unix) {
    for (auto& target : frame_.targets) total_ += target.nbytes;
  }

  size_t windows(uint64_t, uint64_t, std::span<iovec> pieces) override {
    if (inside_) leave();
    auto& targets = frame_.targets;
    if (at_ == targets.size()) return 0;
    {
      std::unique_lock lock(stream_->mutex_);
      auto mine = [&] { return !stream_->stopped_ && stream_->chunks_[chunk_].owner == this; };
      // The lane that had this chunk before is inside one recv: it will find that it lost the chunk.
      stream_->left_.wait(lock, [&] { return !mine() || stream_->chunks_[chunk_].inside == nullptr; });
      if (!mine()) return 0;
      stream_->chunks_[chunk_].inside = this;
      ++stream_->inside_;
    }
    inside_ = true;
    size_t count = 0;
    for (uint64_t skip = within_; count < pieces.size() && at_ + count < targets.size(); skip = 0) {
      auto& target = targets[at_ + count];
      if (target.region && (entered_.empty() || entered_.back() != target.region)) {
        if (!stream_->enter(*target.region)) {
          Status why{Code::key_not_found, target.region->name() + " was deregistered"};
          leave();
          stream_->stop(why);
          return 0;
        }
        entered_.push_back(target.region);
      }
      pieces[count++] = {target.data + skip, target.nbytes - skip};
    }
    return count;
  }

  void filled(uint64_t nbytes) override {
    received_ += nbytes;
    for (nbytes += within_; at_ < frame_.targets.size() && nbytes >= frame_.targets[at_].nbytes; ++at_)
      nbytes -= frame_.targets[at_].nbytes;
    within_ = nbytes;
    leave();
  }

  void unmapped(const Status& why) override { stream_->stop(why); }

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
    for (auto* region : entered_) stream_->leave(*region);
    entered_.clear();
    inside_ = false;
    std::unique_lock lock(stream_->mutex_);
    stream_->chunks_[chunk_].inside = nullptr;
    --stream_->inside_;
    stream_->left_.notify_all();
    stream_->settle(std::move(lock));
  }

  const std::shared_ptr<Incoming> stream_;
  const uint32_t chunk_;
  const Frame frame_;
  const bool over_unix_;
  uint64_t total_ = 0, received_ = 0;
  size_t at_ = 0;        // the target that gets the next byte,
  uint64_t within_ = 0;  // and how many it has
  bool inside_ = false;
  std::vector<RegionImpl*> entered_;  // once for each run of targets in it
};

std::unique_ptr<rpc::BulkReceive> Incoming::begin(uint32_t chunk, Frame frame, bool over_unix) {
  auto receiver = std::make_unique<Receiver>(shared_from_this(), chunk, std::move(frame), over_unix);
  std::lock_guard lock(mutex_);
  if (stopped_ || over_ || chunk >= std::min(total_, kMaxChunks)) return nullptr;
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
