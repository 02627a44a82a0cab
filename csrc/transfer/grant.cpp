#include "transfer/grant.h"

namespace torch_mooncake::transfer {

uint32_t GrantTable::add(RegionImplPtr region) {
  std::lock_guard lock(mutex_);
  grants_[next_].region = std::move(region);
  return next_++;
}

RegionImplPtr GrantTable::find(uint32_t grant) const {
  std::lock_guard lock(mutex_);
  auto it = grants_.find(grant);
  return it == grants_.end() ? nullptr : it->second.region;
}

bool GrantTable::mark_mapped(uint32_t grant, std::shared_ptr<const UniqueFd> process) {
  std::lock_guard lock(mutex_);
  auto it = grants_.find(grant);
  if (it == grants_.end()) return false;
  if (it->second.mapped) return true;
  if (!it->second.region->usage().acquire(user_)) return false;
  it->second.mapped = true;
  it->second.process = std::move(process);
  return true;
}

void GrantTable::unmark_mapped(uint32_t grant) {
  RegionImplPtr region;
  {
    std::lock_guard lock(mutex_);
    auto it = grants_.find(grant);
    if (it == grants_.end() || !std::exchange(it->second.mapped, false)) return;
    region = it->second.region;
  }
  region->usage().release(user_);
}

void GrantTable::remove(uint32_t grant) {
  Grant gone;
  {
    std::lock_guard lock(mutex_);
    auto it = grants_.find(grant);
    if (it == grants_.end()) return;
    gone = std::move(it->second);
    grants_.erase(it);
  }
  if (gone.mapped) gone.region->usage().release(user_);
}

void GrantTable::remove_all() {
  for (auto& held : take_held()) held.region->usage().release(user_);
}

std::vector<uint32_t> GrantTable::mapped_on(const RegionImpl& region) const {
  std::lock_guard lock(mutex_);
  std::vector<uint32_t> out;
  for (auto& [index, grant] : grants_)
    if (grant.mapped && grant.region.get() == &region) out.push_back(index);
  return out;
}

std::vector<HeldGrant> GrantTable::take_held() {
  std::unordered_map<uint32_t, Grant> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(grants_);
  }
  std::vector<HeldGrant> held;
  for (auto& [index, grant] : all)
    if (grant.mapped) held.push_back({std::move(grant.region), std::move(grant.process)});
  return held;
}

Status check_piece(const RegionImplPtr& region, const Piece& piece, Direction direction, bool host) {
  if (!region)
    return {Code::key_not_found, "grant " + std::to_string(piece.grant) + " does not exist: its region is gone"};
  if (host && region->kind() != MemoryKind::host)
    return {Code::invalid_argument, region->name() + " is no host memory: its owner stages it"};
  if (direction == Direction::read ? !region->readable() : !region->writable())
    return {Code::invalid_argument,
            region->name() + " is not " + (direction == Direction::read ? "readable" : "writable") + " by peers"};
  if (piece.offset > region->nbytes() || piece.nbytes > region->nbytes() - piece.offset)
    return {Code::out_of_bounds, "bytes " + std::to_string(piece.offset) + " + " + std::to_string(piece.nbytes) +
                                     " leave " + region->name() + " of " + std::to_string(region->nbytes()) + " bytes"};
  return {};
}

Result<RegionImplPtr> GrantTable::resolve(const Piece& piece, Direction direction) const {
  auto region = find(piece.grant);
  TM_TRY(check_piece(region, piece, direction));
  return region;
}

Status GrantTable::check(const Piece& piece, Direction direction, bool host) const {
  return check_piece(find(piece.grant), piece, direction, host);
}

Result<Window> GrantTable::window(const Piece& piece, Direction direction, bool host) const {
  auto region = find(piece.grant);
  TM_TRY(check_piece(region, piece, direction, host));
  if (!region->usage().acquire(user_)) return Status(Code::key_not_found, region->name() + " was deregistered");
  auto* data = region->data() + piece.offset;
  return Window{std::move(region), data};
}

}  // namespace torch_mooncake::transfer
