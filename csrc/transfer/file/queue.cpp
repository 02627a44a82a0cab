#include "transfer/file/queue.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "transfer/engine.h"
#include "transfer/file/threads.h"

namespace torch_mooncake::transfer {
namespace {

int64_t carry_out(const IoRequest& r) {
  for (;;) {
    ssize_t n = r.write ? pwrite(r.fd, r.data, r.nbytes, static_cast<off_t>(r.offset))
                        : pread(r.fd, r.data, r.nbytes, static_cast<off_t>(r.offset));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

class ThreadQueue final : public IoQueue {
 public:
  const char* name() const override { return "threads"; }
  void submit(std::vector<IoRequest> requests) override {
    std::vector<std::function<void()>> tasks;
    for (auto& request : requests) tasks.push_back([r = std::move(request)] { r.done(carry_out(r)); });
    threads_.post(std::move(tasks));
  }

 private:
  Threads threads_;
};

}  // namespace

IoQueue::~IoQueue() {
  for (auto* block : spare_blocks_) std::free(block);
}

std::byte* IoQueue::take_block() {
  {
    std::lock_guard lock(blocks_mutex_);
    if (!spare_blocks_.empty()) {
      auto* block = spare_blocks_.back();
      spare_blocks_.pop_back();
      return block;
    }
  }
  return static_cast<std::byte*>(std::aligned_alloc(kBlockAlign, kBlockBytes));
}

void IoQueue::give_block(std::byte* block) {
  {
    std::lock_guard lock(blocks_mutex_);
    if (spare_blocks_.size() < kSpareBlocks) return spare_blocks_.push_back(block);
  }
  std::free(block);
}

std::shared_ptr<IoQueue> make_thread_queue() { return std::make_shared<ThreadQueue>(); }

std::shared_ptr<IoQueue> IoQueue::shared() {
  static std::mutex* mutex = new std::mutex;
  static auto* made = new std::pair<pid_t, std::weak_ptr<IoQueue>>;
  std::lock_guard lock(*mutex);
  auto queue = made->first == getpid() ? made->second.lock() : nullptr;
  if (queue) return queue;
  auto uring = make_uring_queue();
  queue = uring ? std::move(*uring) : make_thread_queue();
  *made = {getpid(), queue};
  return queue;
}

}  // namespace torch_mooncake::transfer

namespace torch_mooncake {

std::string file_io_choice() {
  auto uring = transfer::make_uring_queue();
  return uring ? (*uring)->name() : "threads (" + uring.status().message() + ")";
}

}  // namespace torch_mooncake
