#include "transfer/file/queue.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>

#include "transfer/engine.h"

namespace torch_mooncake::transfer {
namespace {

constexpr size_t kMostThreads = 16;

// What the threads share with the queue; a thread that hangs in the disk outlives the queue.
struct State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<IoRequest> waiting;
  size_t idle = 0;
  bool stopping = false;
};

int64_t carry_out(const IoRequest& r) {
  for (;;) {
    ssize_t n = r.write ? pwrite(r.fd, r.data, r.nbytes, static_cast<off_t>(r.offset))
                        : pread(r.fd, r.data, r.nbytes, static_cast<off_t>(r.offset));
    if (n >= 0) return n;
    if (errno != EINTR) return -errno;
  }
}

void work(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "tm-file");
  std::unique_lock lock(state->mutex);
  for (;;) {
    ++state->idle;
    state->wake.wait(lock, [&] { return state->stopping || !state->waiting.empty(); });
    --state->idle;
    if (state->waiting.empty()) return;
    IoRequest request = std::move(state->waiting.front());
    state->waiting.pop_front();
    lock.unlock();
    int64_t result = carry_out(request);
    request.done(result);
    request = {};
    lock.lock();
  }
}

class ThreadQueue final : public IoQueue {
 public:
  ~ThreadQueue() override {
    if (getpid() != pid_) {  // the parent's: left as they are
      new std::pair(std::move(state_), std::move(threads_));
      return;
    }
    {
      std::lock_guard lock(state_->mutex);
      state_->stopping = true;
    }
    state_->wake.notify_all();
    for (auto& thread : threads_)
      if (thread.get_id() == std::this_thread::get_id())
        thread.detach();
      else
        thread.join();
  }
  const char* name() const override { return "threads"; }

  void submit(std::vector<IoRequest> requests) override {
    std::lock_guard lock(state_->mutex);
    for (auto& request : requests) state_->waiting.push_back(std::move(request));
    while (threads_.size() < kMostThreads && state_->idle + starting_ < state_->waiting.size()) start();
    starting_ = 0;
    state_->wake.notify_all();
  }

 private:
  void start() {
    sigset_t all, before;  // signals of the process belong to the user's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    threads_.emplace_back([state = state_] { work(state); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ++starting_;
  }

  const pid_t pid_ = getpid();
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::vector<std::thread> threads_;
  size_t starting_ = 0;
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
