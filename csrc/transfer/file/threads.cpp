#include "transfer/file/threads.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace torch_mooncake::transfer {

struct Threads::State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> waiting;
  size_t idle = 0;
  bool stopping = false;

  void work() {
    pthread_setname_np(pthread_self(), "tm-file");
    std::unique_lock lock(mutex);
    for (;;) {
      ++idle;
      wake.wait(lock, [&] { return stopping || !waiting.empty(); });
      --idle;
      if (waiting.empty()) return;
      auto task = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    }
  }
};

Threads::Threads() : state_(std::make_shared<State>()) {}

Threads::~Threads() {
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

void Threads::post(std::vector<std::function<void()>> tasks) {
  std::lock_guard lock(state_->mutex);
  for (auto& task : tasks) state_->waiting.push_back(std::move(task));
  for (size_t starting = 0; threads_.size() < kMost && state_->idle + starting < state_->waiting.size(); ++starting)
    start();
  state_->wake.notify_all();
}

void Threads::start() {
  sigset_t all, before;  // signals of the process belong to the user's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  threads_.emplace_back([state = state_] { state->work(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace torch_mooncake::transfer
