#include "transfer/region_index.h"

#include <algorithm>

namespace torch_mooncake::transfer {

void RegionIndex::update(Node& node) {
  node.max_end = node.end;
  if (node.left) node.max_end = std::max(node.max_end, node.left->max_end);
  if (node.right) node.max_end = std::max(node.max_end, node.right->max_end);
}

bool RegionIndex::before(const Node& node, uint64_t begin, uint64_t id) {
  return node.begin < begin || (node.begin == begin && node.id < id);
}

// `less` gets what is before (begin, id).
void RegionIndex::split(Link tree, uint64_t begin, uint64_t id, Link& less, Link& rest) {
  if (!tree) return;
  Node& node = *tree;
  if (before(node, begin, id)) {
    Link right;
    split(std::move(node.right), begin, id, right, rest);
    node.right = std::move(right);
    less = std::move(tree);
  } else {
    Link left;
    split(std::move(node.left), begin, id, less, left);
    node.left = std::move(left);
    rest = std::move(tree);
  }
  update(node);
}

RegionIndex::Link RegionIndex::merge(Link a, Link b) {
  if (!a || !b) return a ? std::move(a) : std::move(b);
  Link& top = a->priority > b->priority ? a : b;
  if (&top == &a)
    a->right = merge(std::move(a->right), std::move(b));
  else
    b->left = merge(std::move(a), std::move(b->left));
  update(*top);
  return std::move(top);
}

// Down to the first node of a lower priority, whose place it takes.
void RegionIndex::insert(Link& tree, Link node) {
  Link* at = &tree;
  while (*at && (*at)->priority >= node->priority) {
    Node& above = **at;
    above.max_end = std::max(above.max_end, node->end);
    at = before(above, node->begin, node->id) ? &above.right : &above.left;
  }
  split(std::move(*at), node->begin, node->id, node->left, node->right);
  update(*node);
  *at = std::move(node);
}

void RegionIndex::insert(uint64_t begin, uint64_t end, uint64_t id) {
  auto node = std::make_unique<Node>(Node{begin, end, id, end, static_cast<uint32_t>(random_()), nullptr, nullptr});
  insert(root_, std::move(node));
}

bool RegionIndex::erase(Link& tree, uint64_t begin, uint64_t id) {
  if (!tree) return false;
  bool erased = true;
  if (tree->begin == begin && tree->id == id)
    tree = merge(std::move(tree->left), std::move(tree->right));
  else
    erased = erase(before(*tree, begin, id) ? tree->right : tree->left, begin, id);
  if (tree) update(*tree);
  return erased;
}

bool RegionIndex::erase(uint64_t begin, uint64_t id) { return erase(root_, begin, id); }

// Right to left. A search that fails follows one path; once all of a subtree begins early enough, max_end decides.
const RegionIndex::Node* RegionIndex::find(const Node* node, uint64_t begin, uint64_t end) {
  if (node == nullptr || node->max_end < end) return nullptr;
  if (node->begin > begin) return find(node->left.get(), begin, end);
  if (auto* found = find(node->right.get(), begin, end)) return found;
  if (node->end >= end) return node;
  return find(node->left.get(), begin, end);
}

uint64_t RegionIndex::find(uint64_t begin, uint64_t end) const {
  auto* node = find(root_.get(), begin, end);
  return node ? node->id : 0;
}

}  // namespace torch_mooncake::transfer
