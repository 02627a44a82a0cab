// Which region covers an address: a search tree over [begin, end) that knows the greatest end below every node, so that
// any mix of nested, overlapping and repeated regions is searched in O(log n). Not synchronised.
#pragma once

#include <cstdint>
#include <memory>
#include <random>

namespace torch_mooncake::transfer {

class RegionIndex {
 public:
  void insert(uint64_t begin, uint64_t end, uint64_t id);  // (begin, id) is unique
  bool erase(uint64_t begin, uint64_t id);
  // The id of a region that covers [begin, end): of those that do, the one that begins last and is the newest; 0: none.
  uint64_t find(uint64_t begin, uint64_t end) const;

 private:
  // A treap: ordered by (begin, id), a heap by `priority`.
  struct Node {
    uint64_t begin, end, id, max_end;
    uint32_t priority;
    std::unique_ptr<Node> left, right;
  };
  using Link = std::unique_ptr<Node>;
  static void update(Node& node);
  static bool before(const Node& node, uint64_t begin, uint64_t id);
  static void split(Link tree, uint64_t begin, uint64_t id, Link& less, Link& rest);
  static Link merge(Link a, Link b);
  static void insert(Link& tree, Link node);
  static bool erase(Link& tree, uint64_t begin, uint64_t id);
  static const Node* find(const Node* node, uint64_t begin, uint64_t end);

  Link root_;
  std::minstd_rand random_;
};

}  // namespace torch_mooncake::transfer
