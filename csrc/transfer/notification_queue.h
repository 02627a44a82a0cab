// Notifications that have arrived at one engine, until somebody takes them. Safe from any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "transfer/engine.h"
#include "transfer/watchers.h"
#include "transfer/worker.h"

namespace torch_mooncake::transfer {

class NotificationQueue {
 public:
  explicit NotificationQueue(std::shared_ptr<Worker> callbacks) : callbacks_(std::move(callbacks)) {}
  void push(Notification note);
  Result<Notification> pop(Deadline deadline);  // deadline_exceeded or closed
  // From now on `fn` gets them, on the callback thread; those that wait already as well.
  void set_handler(std::function<void(Notification)> fn);
  bool watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag);  // see Engine::watch_notifications
  void close();
  uint64_t count() const;

 private:
  const std::shared_ptr<Worker> callbacks_;
  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Notification> notes_;
  Watchers watchers_;
  std::shared_ptr<std::function<void(Notification)>> handler_;
  bool closed_ = false;
  uint64_t count_ = 0;
};

}  // namespace torch_mooncake::transfer
