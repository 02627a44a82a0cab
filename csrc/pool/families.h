// Who comes after whom, on one donor: by keys' hashes, so that it does not matter which version of a parent is there.
// A child is an extent that was reserved with a parent; a parent may be anything, or nothing yet. All calls O(1), but
// comes_before() of a key that has children.
#pragma once

#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/index.h"

namespace torch_mooncake::pool {

class Families {
 public:
  void add(uint32_t child, const KeyHash& key, const KeyHash& parent) {
    parent_of_[child] = {key, parent};
    latest_[key] = child;
    ++children_[parent].count;
  }
  // What waits for its children to go, and has none any more now, as wait_for_children() has told it.
  std::vector<uint32_t> remove(uint32_t child) {
    const auto it = parent_of_.find(child);
    if (it == parent_of_.end()) return {};
    const auto [key, parent] = it->second;
    if (const auto last = latest_.find(key); last->second == child) latest_.erase(last);
    parent_of_.erase(it);
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
  // Would `parent` come after `key`, however far?
  bool comes_before(const KeyHash& key, KeyHash parent) const {
    if (key == parent) return true;
    if (!has_children(key)) return false;
    for (size_t steps = 0; steps <= parent_of_.size(); ++steps) {
      const auto it = latest_.find(parent);
      if (it == latest_.end()) return false;
      parent = parent_of_.at(it->second).second;
      if (parent == key) return true;
    }
    return true;
  }

 private:
  struct Children {
    size_t count = 0;
    std::vector<uint32_t> waiting;
  };
  std::unordered_map<uint32_t, std::pair<KeyHash, KeyHash>> parent_of_;  // extent -> its key, its parent
  std::unordered_map<KeyHash, uint32_t, HashOfHash> latest_;             // key -> the last such extent
  std::unordered_map<KeyHash, Children, HashOfHash> children_;
};

}  // namespace torch_mooncake::pool
