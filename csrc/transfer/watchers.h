// Who wants to know of the end of something, once. Guarded by its owner's mutex; told outside it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "transfer/engine.h"

namespace torch_mooncake::transfer {

class Watchers {
 public:
  struct Entry {
    std::shared_ptr<OpWatcher> watcher;
    uint64_t tag;
    void tell() const { watcher->op_ended(tag); }
  };
  void add(std::shared_ptr<OpWatcher> watcher, uint64_t tag) { entries_.push_back({std::move(watcher), tag}); }
  std::vector<Entry> take() { return std::exchange(entries_, {}); }

 private:
  std::vector<Entry> entries_;
};

}  // namespace torch_mooncake::transfer
