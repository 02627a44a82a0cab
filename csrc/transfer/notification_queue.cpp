#include "transfer/notification_queue.h"

#include <chrono>

namespace torch_mooncake::transfer {

void NotificationQueue::push(Notification note) {
  std::vector<Watchers::Entry> watchers;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    ++count_;
    if (handler_) {
      callbacks_->post([fn = handler_, note = std::move(note)]() mutable { (*fn)(std::move(note)); });
      return;
    }
    notes_.push_back(std::move(note));
    arrived_.notify_one();
    watchers = watchers_.take();
  }
  for (auto& watcher : watchers) watcher.tell();
}

bool NotificationQueue::watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) {
  std::lock_guard lock(mutex_);
  if (closed_ || !notes_.empty()) return false;
  watchers_.add(std::move(watcher), tag);
  return true;
}

Result<Notification> NotificationQueue::pop(Deadline deadline) {
  std::unique_lock lock(mutex_);
  auto ready = [this] { return closed_ || !notes_.empty(); };
  if (deadline.is_never()) {
    arrived_.wait(lock, ready);
  } else {
    std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(deadline.ns())};
    arrived_.wait_until(lock, until, ready);
  }
  if (!notes_.empty()) {
    auto note = std::move(notes_.front());
    notes_.pop_front();
    return note;
  }
  if (closed_) return Status(Code::closed, "the engine is closed");
  return Status(Code::deadline_exceeded, "no notification arrived in time");
}

void NotificationQueue::set_handler(std::function<void(Notification)> fn) {
  std::lock_guard lock(mutex_);
  handler_ = std::make_shared<std::function<void(Notification)>>(std::move(fn));
  for (auto& note : notes_)
    callbacks_->post([fn = handler_, note = std::move(note)]() mutable { (*fn)(std::move(note)); });
  notes_.clear();
}

void NotificationQueue::close() {
  std::vector<Watchers::Entry> watchers;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    handler_ = nullptr;
    arrived_.notify_all();
    watchers = watchers_.take();
  }
  for (auto& watcher : watchers) watcher.tell();
}

uint64_t NotificationQueue::count() const {
  std::lock_guard lock(mutex_);
  return count_;
}

}  // namespace torch_mooncake::transfer
