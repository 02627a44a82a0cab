// Usage: who may touch some bytes now, and the end of it. The heart of quiescence.
//
// acquire(user) counts a user unless the bytes are revoked; release(user) ends that. revoke(fn) refuses new users and
// runs fn once the last one has gone (at once, on this thread, if there is none; otherwise on the thread of the last
// release). Between a successful acquire and its release the memory stays. Safe from any thread; about 20 ns each.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_mooncake::transfer {

class Usage {
 public:
  // `user` names who is blamed in a `busy`; it must outlive the use.
  bool acquire(const std::string& user) {
    std::lock_guard lock(mutex_);
    if (revoked_) return false;
    add(user);
    return true;
  }
  // For a holder that keeps its leave although new users are refused already (a mapped grant being called back).
  void acquire_always(const std::string& user) {
    std::lock_guard lock(mutex_);
    add(user);
  }
  void release(const std::string& user);
  // A second revoke replaces nothing: both functions run.
  void revoke(std::function<void()> drained);
  bool revoked() const {
    std::lock_guard lock(mutex_);
    return revoked_;
  }
  bool in_use() const {
    std::lock_guard lock(mutex_);
    return !users_.empty();
  }
  std::string users() const;  // "a, b"

 private:
  void add(const std::string& user) {
    for (auto& [name, count] : users_)
      if (name == &user) return void(++count);
    users_.emplace_back(&user, 1);
  }
  mutable std::mutex mutex_;
  bool revoked_ = false;
  std::vector<std::pair<const std::string*, int>> users_;
  std::vector<std::function<void()>> drained_;
};

}  // namespace torch_mooncake::transfer
