#include "pool/eviction.h"

#include <algorithm>
#include <bit>
#include <new>
#include <string>

namespace torch_mooncake::pool {

Turnover::Turnover(uint64_t capacity_bytes, uint32_t max_members) : capacity_(capacity_bytes) {
  constexpr uint32_t kFirstGhosts = 1 << 20;
  nodes_.reserve(max_members);  // a copy of 10 million would hold up everybody
  // One ghost a member, 4 to a bucket; zero pages until used.
  const uint64_t buckets = std::bit_ceil<uint64_t>(std::max<uint32_t>(max_members, 64)) / 4;
  ghost_mask_max_ = buckets - 1;
  ghost_mask_ = std::min<uint64_t>(buckets, kFirstGhosts / 4) - 1;
  ghosts_.reset(static_cast<Ghost*>(std::calloc(buckets * 4, sizeof(Ghost))));
  if (!ghosts_) throw std::bad_alloc();
}

uint16_t Turnover::list_of(const Node& node) {
  const auto by_use = static_cast<uint32_t>(std::min<int>(std::bit_width(node.uses) - 1, kClasses - 1));
  return static_cast<uint16_t>(node.group * kLists + (node.soft ? kClasses : 0) + by_use);
}

void Turnover::insert(uint32_t member, uint64_t key_hash, uint64_t nbytes, bool soft, uint8_t group) {
  now_ += nbytes;
  restore(member, nbytes, take_ghost(key_hash) + 1, now_, soft, group);
}

void Turnover::restore(uint32_t member, uint64_t nbytes, uint32_t uses, uint64_t last_use, bool soft, uint8_t group) {
  if (member >= nodes_.size()) nodes_.resize(member + 1);
  Node& node = nodes_[member];
  node.nbytes = nbytes;
  node.uses = std::max<uint32_t>(uses, 1);
  node.last_use = last_use;
  node.soft = soft;
  node.group = group;
  if (lists_.size() <= size_t{group} * kLists) lists_.resize((size_t{group} + 1) * kLists);
  now_ = std::max(now_, last_use);
  append(member, list_of(node));
  nbytes_ += nbytes;
  if (soft) soft_nbytes_ += nbytes;
  ++size_;
  // Half of the ghosts are where they are looked for after that; the others are forgotten.
  if (size_ / 4 > ghost_mask_ && ghost_mask_ < ghost_mask_max_) ghost_mask_ = 2 * ghost_mask_ + 1;
}

void Turnover::touch(uint32_t member) {
  Node& node = nodes_[member];
  now_ += node.nbytes;
  node.last_use = now_;
  if (node.uses != UINT32_MAX) ++node.uses;
  if (node.list == kParked) return;  // its class is found when it comes back
  unlink(member);
  append(member, list_of(node));
}

void Turnover::refresh(uint32_t member, uint32_t uses) {
  Node& node = nodes_[member];
  node.last_use = ++now_;
  node.uses = std::max(node.uses, uses);
  if (node.list == kParked) return;
  unlink(member);
  append(member, list_of(node));
}

void Turnover::remove(uint32_t member) {
  Node& node = nodes_[member];
  if (node.list != kParked) unlink(member);
  nbytes_ -= node.nbytes;
  if (node.soft) soft_nbytes_ -= node.nbytes;
  --size_;
  node = {};
}

void Turnover::evict(uint32_t member, uint64_t key_hash) {
  evicted_bytes_ += nodes_[member].nbytes;
  put_ghost(key_hash, nodes_[member].uses);
  remove(member);
}

std::optional<uint32_t> Turnover::victim(uint8_t group) const {
  const size_t begin = size_t{group} * kLists;
  return begin < lists_.size() ? least(begin, begin + kLists) : std::nullopt;
}

std::optional<uint32_t> Turnover::least(size_t begin, size_t end) const {
  std::optional<uint32_t> best;
  unsigned __int128 best_score = 0;
  for (const bool soft : {false, true}) {
    for (size_t list = begin; list < end; ++list) {
      const uint32_t head = lists_[list].head;
      if (head == kNone || nodes_[head].soft != soft) continue;
      const auto score = static_cast<unsigned __int128>(capacity_) * (list % kClasses) + nodes_[head].last_use;
      if (best && score >= best_score) continue;
      best = head;
      best_score = score;
    }
    if (best) break;
  }
  return best;
}

void Turnover::park(uint32_t member) {
  unlink(member);
  nodes_[member].list = kParked;
}

void Turnover::unpark(uint32_t member) {
  const uint16_t list = list_of(nodes_[member]);
  // It was the oldest of its class when it stepped aside; if it was used since, it belongs behind what is older.
  const uint32_t head = lists_[list].head;
  if (head == kNone || nodes_[member].last_use <= nodes_[head].last_use) {
    prepend(member, list);
  } else {
    uint32_t after = lists_[list].tail;
    while (nodes_[after].last_use > nodes_[member].last_use) after = nodes_[after].prev;
    Node& node = nodes_[member];
    node.list = list;
    node.prev = after;
    node.next = nodes_[after].next;
    (node.next == kNone ? lists_[list].tail : nodes_[node.next].prev) = member;
    nodes_[after].next = member;
  }
}

void Turnover::append(uint32_t member, uint16_t list) {
  Node& node = nodes_[member];
  node.list = list;
  node.prev = lists_[list].tail;
  node.next = kNone;
  (node.prev == kNone ? lists_[list].head : nodes_[node.prev].next) = member;
  lists_[list].tail = member;
}

void Turnover::prepend(uint32_t member, uint16_t list) {
  Node& node = nodes_[member];
  node.list = list;
  node.prev = kNone;
  node.next = lists_[list].head;
  (node.next == kNone ? lists_[list].tail : nodes_[node.next].prev) = member;
  lists_[list].head = member;
}

void Turnover::unlink(uint32_t member) {
  Node& node = nodes_[member];
  (node.prev == kNone ? lists_[node.list].head : nodes_[node.prev].next) = node.next;
  (node.next == kNone ? lists_[node.list].tail : nodes_[node.next].prev) = node.prev;
  node.prev = node.next = kNone;
}

uint32_t Turnover::take_ghost(uint64_t key_hash) {
  const auto tag = static_cast<uint32_t>(key_hash >> 32) | 1;
  Ghost* ghosts = bucket(key_hash);
  for (int i = 0; i < 4; ++i) {
    if (ghosts[i].tag != tag) continue;
    const uint32_t uses = evicted_bytes_ - ghosts[i].evicted_bytes <= 4 * capacity_ ? ghosts[i].uses : 0;
    ghosts[i] = {};
    return uses;
  }
  return 0;
}

void Turnover::put_ghost(uint64_t key_hash, uint32_t uses) {
  const auto tag = static_cast<uint32_t>(key_hash >> 32) | 1;
  Ghost* ghosts = bucket(key_hash);
  Ghost* oldest = &ghosts[0];
  for (int i = 0; i < 4; ++i) {
    if (ghosts[i].tag == 0 || ghosts[i].tag == tag) {
      oldest = &ghosts[i];
      break;
    }
    if (ghosts[i].evicted_bytes < oldest->evicted_bytes) oldest = &ghosts[i];
  }
  *oldest = {tag, uses, evicted_bytes_};
}

Status Turnover::check() const {
  size_t members = 0;
  uint64_t nbytes = 0;
  auto wrong = [](uint32_t member, const char* what) {
    return Status(Code::corrupt, "eviction: member " + std::to_string(member) + ": " + what);
  };
  for (uint32_t c = 0; c < lists_.size(); ++c) {
    uint32_t prev = kNone;
    for (uint32_t m = lists_[c].head; m != kNone; m = nodes_[m].next) {
      const Node& node = nodes_[m];
      if (node.list != c || list_of(node) != c) return wrong(m, "in the wrong list");
      if (node.prev != prev) return wrong(m, "broken link");
      if (prev != kNone && node.last_use < nodes_[prev].last_use) return wrong(m, "out of order");
      if (++members > size_) return wrong(m, "more listed than there are");
      nbytes += node.nbytes;
      prev = m;
    }
    if (lists_[c].tail != prev) return wrong(prev, "is not the tail");
  }
  for (uint32_t m = 0; m < nodes_.size(); ++m) {
    if (nodes_[m].list != kParked) continue;
    ++members;
    nbytes += nodes_[m].nbytes;
  }
  if (members != size_ || nbytes != nbytes_)
    return {Code::corrupt, "eviction: " + std::to_string(members) + " members listed, " + std::to_string(size_) +
                               " counted; bytes " + std::to_string(nbytes) + ", " + std::to_string(nbytes_)};
  return {};
}

}  // namespace torch_mooncake::pool
