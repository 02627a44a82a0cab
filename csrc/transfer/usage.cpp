#include "transfer/usage.h"

#include <algorithm>

namespace torch_mooncake::transfer {

void Usage::release(const std::string& user) {
  std::vector<std::function<void()>> run;
  {
    std::lock_guard lock(mutex_);
    auto it = std::find_if(users_.begin(), users_.end(), [&](auto& entry) { return entry.first == &user; });
    if (it == users_.end()) return;
    if (--it->second == 0) users_.erase(it);
    if (users_.empty() && revoked_) run.swap(drained_);
  }
  for (auto& fn : run) fn();
}

void Usage::revoke(std::function<void()> drained) {
  {
    std::lock_guard lock(mutex_);
    revoked_ = true;
    if (!users_.empty()) {
      drained_.push_back(std::move(drained));
      return;
    }
  }
  drained();
}

std::string Usage::users() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (auto& [name, count] : users_) out += (out.empty() ? "" : ", ") + *name;
  return out;
}

}  // namespace torch_mooncake::transfer
