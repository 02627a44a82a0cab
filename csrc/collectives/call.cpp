// What a collective is called with: its team's place in the group, its working memory.
#include <new>

#include "collectives/collectives.h"

namespace torch_mooncake::coll {
namespace {
constexpr uint64_t kKeptBytes = uint64_t{64} << 20;
}

Layout Call::layout() const {
  const Topology& topology = group.topology();
  if (team == nullptr) return {group.size(), static_cast<int>(topology.hosts().size())};
  return {team->size(), team == &topology.host() ? 1 : team->size()};
}

const Algorithms::Rule& Call::rule(Collective collective) const {
  static constexpr Algorithms::Rule kNone;
  return team == &group.topology().host() ? kNone : group.algorithms().of(collective);
}

Board* Call::board(int which) const {
  const Topology& topology = group.topology();
  const bool is_host = team ? team == &topology.host() : group.single_host();
  return is_host ? group.board(which) : nullptr;
}

std::byte* Scratch::get(uint64_t nbytes) {
  if (nbytes > capacity_) {
    data_.reset();
    data_.reset(static_cast<std::byte*>(::operator new[](nbytes, std::align_val_t{64})));
    capacity_ = nbytes;
  }
  return data_.get();
}

Scratch& Scratch::inner() {
  if (!inner_) inner_ = std::make_unique<Scratch>();
  return *inner_;
}

void Scratch::trim() {
  if (inner_) inner_->trim();
  if (capacity_ <= kKeptBytes) return;
  data_.reset();
  capacity_ = 0;
}

void Scratch::Free::operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }

}  // namespace torch_mooncake::coll
