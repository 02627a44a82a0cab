// Limits of what the keys with a prefix may have in memory.
#include <algorithm>

#include "pool/donor_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr std::string_view kOver = "the quota of ";

}  // namespace

bool Donor::over_quota(const Status& refusal) {
  return refusal.code() == Code::pool_full && refusal.message().starts_with(kOver);
}

uint8_t DonorImpl::group_of(std::string_view key) const {
  size_t best = 0;
  for (size_t g = 1; g <= quotas_.size(); ++g) {
    const std::string& prefix = quotas_[g - 1].quota.prefix;
    if (key.starts_with(prefix) && (best == 0 || prefix.size() > quotas_[best - 1].quota.prefix.size())) best = g;
  }
  return static_cast<uint8_t>(best);
}

void DonorImpl::count(uint32_t index) {
  if (quotas_.empty()) return;
  const uint8_t group = group_of(table_->record(index).key);
  if (group == 0) return;
  if (counted_.size() <= index) counted_.resize(index + 1);
  counted_[index] = group;
  quotas_[group - 1].used_here += footprint(index);
}

void DonorImpl::uncount(uint32_t index) {
  if (const uint8_t group = counted(index); group != 0) {
    quotas_[group - 1].used_here -= footprint(index);
    counted_[index] = 0;
  }
}

std::vector<Quota> DonorImpl::quotas() const {
  std::vector<Quota> out;
  for (const LiveQuota& q : quotas_) out.push_back({q.quota.prefix, q.quota.limit_bytes, q.used_here});
  return out;
}

void DonorImpl::set_quotas(const std::vector<Quota>& quotas) {
  const auto same = [](const LiveQuota& a, const Quota& b) {
    return a.quota.prefix == b.prefix && a.quota.limit_bytes == b.limit_bytes;
  };
  if (std::equal(quotas_.begin(), quotas_.end(), quotas.begin(), quotas.end(), same)) {
    for (size_t i = 0; i < quotas.size(); ++i) quotas_[i].quota.used_bytes = quotas[i].used_bytes;
    return;
  }
  table_->set_quotas(quotas);
  quotas_.clear();
  for (const Quota& q : quotas) quotas_.push_back({q, 0});
  counted_.clear();
  std::vector<uint32_t> members;
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (state == ExtentState::free || state == ExtentState::limbo || grants_.count(i)) continue;
    count(i);
    if (lru_.contains(i)) members.push_back(i);
  }
  std::sort(members.begin(), members.end(),
            [this](uint32_t a, uint32_t b) { return lru_.last_use(a) < lru_.last_use(b); });
  for (uint32_t i : members) {
    const uint32_t uses = lru_.uses(i);
    const uint64_t last_use = lru_.last_use(i);
    const bool soft = lru_.soft(i);
    take_off_clean(i);
    lru_.remove(i);
    lru_.restore(i, footprint(i), uses, last_use, soft, counted(i));
    if (in_io(i)) lru_.park(i);
  }
  clean_.clear();  // by groups that have other numbers now
}

// Others of the prefix go until this one is within its quota.
Status DonorImpl::make_quota_room(const ReserveRequest& request) {
  const uint8_t group = group_of(request.key);
  if (group == 0) return {};
  const LiveQuota& live = quotas_[group - 1];
  const uint64_t limit = live.quota.limit_bytes, want = Allocator::footprint(request.nbytes);
  const auto over = [&] {
    const uint64_t sum = live.used_here + live.quota.used_bytes + want;
    return sum - std::min(sum, limit);
  };
  if (over() == 0) return {};
  unpark();
  scan_pins();
  while (want <= limit && over() > 0) {
    const auto victims = pick_victims(request.nbytes, over(), group);
    if (victims.empty()) break;
    evict(victims);
  }
  if (over() == 0) return {};
  const bool written =
      std::any_of(in_io_.begin(), in_io_.end(), [&](const auto& e) { return counted(e.first) == group; });
  const bool soon = room_soon() && lru_.victim(group);
  if (want <= limit && (written || soon)) return being_written(request.nbytes);
  return {Code::pool_full, std::string(kOver) + "'" + live.quota.prefix + "' is " + std::to_string(limit) +
                               " bytes: " + std::to_string(want) + " asked, " + std::to_string(live.used_here) +
                               " used here and " + std::to_string(live.quota.used_bytes) +
                               " on other nodes, of which nothing here may be evicted"};
}

}  // namespace torch_mooncake::pool
