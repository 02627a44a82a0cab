// Who comes after whom, on one donor: by keys' hashes, so that it does not matter which version of a parent is there.
// A child is an extent that was reserved with a parent; a parent may be anything, or nothing yet. All calls O(1), but
// comes_before() of a key that has children.
#pragma once

#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pool/index.h"

namespace torch_mooncake::pool {

class Families {
 public:
  void add(uint32_t child, const KeyHash& key, const KeyHash& parent) {
    parent_of_[child] = {key, parent};
    extents_.emplace(key, child);
    hold(parent);
  }
  // What waits for its children to go, and has none any more now, as wait_for_children() has told it.
  std::vector<uint32_t> remove(uint32_t child) {
    const auto it = parent_of_.find(child);
    if (it == parent_of_.end()) return {};
    const auto [key, parent] = it->second;
    auto [at, end] = extents_.equal_range(key);
    while (at != end && at->second != child) ++at;
    extents_.erase(at);
    parent_of_.erase(it);
    return let_go(parent);
  }
  // A parent is kept for a child that has no number yet.
  void hold(const KeyHash& parent) { ++children_[parent].count; }
  std::vector<uint32_t> let_go(const KeyHash& parent) {
    const auto left = children_.find(parent);
    if (--left->second.count > 0) return {};
    std::vector<uint32_t> waiting = std::move(left->second.waiting);
    children_.erase(left);
    return waiting;
  }
  bool empty() const { return children_.empty(); }
  size_t children() const { return parent_of_.size(); }
  bool has_children(const KeyHash& key) const { return !children_.empty() && children_.count(key) != 0; }
  void wait_for_children(const KeyHash& key, uint32_t extent) { children_.at(key).waiting.push_back(extent); }
  // Would `parent` come after `key`, however far, by any version or part of those in between?
  bool comes_before(const KeyHash& key, const KeyHash& parent) const {
    if (key == parent) return true;
    if (!has_children(key)) return false;
    std::vector<KeyHash> ahead{parent};
    std::unordered_set<KeyHash, HashOfHash> seen{parent};
    while (!ahead.empty()) {
      const auto [begin, end] = extents_.equal_range(ahead.back());
      ahead.pop_back();
      for (auto at = begin; at != end; ++at) {
        const KeyHash& next = parent_of_.at(at->second).second;
        if (next == key) return true;
        if (seen.insert(next).second) ahead.push_back(next);
      }
    }
    return false;
  }

 private:
  struct Children {
    size_t count = 0;
    std::vector<uint32_t> waiting;
  };
  std::unordered_map<uint32_t, std::pair<KeyHash, KeyHash>> parent_of_;  // extent -> its key, its parent
  std::unordered_multimap<KeyHash, uint32_t, HashOfHash> extents_;       // key -> such extents
  std::unordered_map<KeyHash, Children, HashOfHash> children_;
};

}  // namespace torch_mooncake::pool
