// Quotas: the leader's donor remembers them, members learn them from its answers to their beats and tell it what they
// have used. So each donor knows what the others had half a second ago, or a little more. A change is acknowledged when
// all members have told that they know of it: whoever leads next does.
#include <algorithm>

#include "pool/service_impl.h"

namespace torch_mooncake::pool {

// Those that count, and what other nodes than this one have used of them.
std::vector<Quota> NodeServiceImpl::quotas_without(const NodeId& node) const {
  std::vector<Quota> quotas = donor_->quotas();
  for (Quota& quota : quotas) {
    if (node == self_.id) quota.used_bytes = 0;
    for (const auto& [id, member] : members_)
      for (const Quota& used : member.quotas)
        if (id != node && used.prefix == quota.prefix) quota.used_bytes += used.used_bytes;
  }
  return quotas;
}

void NodeServiceImpl::on_quota(const rpc::SessionPtr&, QuotaCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  if (call.set) {
    if (call.set->prefix.empty()) return responder->fail({Code::invalid_argument, "a quota is of a prefix"});
    std::vector<Quota> quotas = quotas_without(self_.id);
    std::erase_if(quotas, [&](const Quota& q) { return q.prefix == call.set->prefix; });
    if (call.set->limit_bytes > 0) quotas.push_back({call.set->prefix, call.set->limit_bytes, 0});
    if (quotas.size() > kMaxQuotas)
      return responder->fail({Code::invalid_argument, "a pool has at most " + std::to_string(kMaxQuotas) + " quotas"});
    donor_->set_quotas(quotas);
    share_quotas();
    retry_reservations();
    std::set<NodeId> members;
    for (const auto& [id, member] : members_) members.insert(id);
    quota_sets_.push_back({std::move(members), responder});
    return tell_quota_sets();
  }
  responder->ok(encode(QuotaAnswer{quotas_without({})}));
}

void NodeServiceImpl::knows_quotas(const NodeId& node, const std::vector<Quota>& known) {
  const std::vector<Quota> all = donor_->quotas();
  const auto same = [](const Quota& a, const Quota& b) {
    return a.prefix == b.prefix && a.limit_bytes == b.limit_bytes;
  };
  if (quota_sets_.empty() || !std::equal(all.begin(), all.end(), known.begin(), known.end(), same)) return;
  for (QuotaSet& set : quota_sets_) set.members.erase(node);
  tell_quota_sets();
}

void NodeServiceImpl::tell_quota_sets() {
  for (auto at = quota_sets_.begin(); at != quota_sets_.end();) {
    std::erase_if(at->members, [this](const NodeId& id) { return !members_.count(id); });
    if (!at->members.empty()) {
      ++at;
      continue;
    }
    at->responder->ok(encode(QuotaAnswer{quotas_without({})}));
    at = quota_sets_.erase(at);
  }
}

}  // namespace torch_mooncake::pool
