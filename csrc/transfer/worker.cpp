#include "transfer/worker.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace torch_mooncake::transfer {

struct Worker::State {
  const char* name;
  const pid_t pid = getpid();
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  bool stopping = false;
  std::thread thread;
};

namespace {

// Signals of the process belong to the user's threads.
template <typename Fn>
std::thread start_without_signals(Fn fn) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(fn));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

Worker::Worker(const char* name) : state_(std::make_shared<State>()) { state_->name = name; }

Worker::~Worker() { stop(); }

void Worker::post(std::function<void()> task) {
  State& s = *state_;
  if (getpid() != s.pid) return task();
  {
    std::lock_guard lock(s.mutex);
    if (!s.stopping) {
      s.tasks.push_back(std::move(task));
      if (!s.thread.joinable()) {
        s.thread = start_without_signals([state = state_] {
          pthread_setname_np(pthread_self(), state->name);
          std::unique_lock lock(state->mutex);
          for (;;) {
            state->wake.wait(lock, [&] { return state->stopping || !state->tasks.empty(); });
            if (state->tasks.empty()) return;
            auto next = std::move(state->tasks.front());
            state->tasks.pop_front();
            lock.unlock();
            next();
            next = nullptr;
            lock.lock();
          }
        });
      }
      s.wake.notify_one();
      return;
    }
  }
  task();
}

bool Worker::in_thread() const {
  if (getpid() != state_->pid) return false;
  std::lock_guard lock(state_->mutex);
  return state_->thread.get_id() == std::this_thread::get_id();
}

size_t Worker::depth() const {
  if (getpid() != state_->pid) return 0;
  std::lock_guard lock(state_->mutex);
  return state_->tasks.size();
}

void Worker::stop() {
  State& s = *state_;
  std::thread thread;
  {
    if (getpid() != s.pid) {
      // The mutex may have been held at the fork and the thread is not ours: leave both as they are, for ever.
      new std::shared_ptr<State>(state_);
      return;
    }
    std::lock_guard lock(s.mutex);
    s.stopping = true;
    s.wake.notify_all();
    thread = std::move(s.thread);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

}  // namespace torch_mooncake::transfer
