#include "pool/simulation/election.h"

namespace torch_mooncake::pool::sim {

class SimElection final : public Election {
 public:
  SimElection(Etcd* etcd, Host* host) : etcd_(*etcd), host_(host) {}

  Result<std::optional<Leader>> leader(Deadline deadline) override {
    TM_TRY(arrive(deadline));
    const auto found = etcd_.leader_;
    seen_ = found ? found->lease : 0;
    TM_TRY(come_back(deadline));
    return found ? std::optional<Leader>(found->leader) : std::optional<Leader>{};
  }
  Status end_seen(Deadline deadline) override { return revoke(seen_, deadline); }
  Result<std::optional<Won>> campaign(const Leader& self, Deadline deadline) override {
    const int64_t sent_ns = steady_ns();
    TM_TRY(arrive(deadline));
    if (etcd_.leader_) return std::optional<Won>{};
    const uint64_t lease = etcd_.next_lease_++, term = ++etcd_.revision_;
    etcd_.leases_[lease] = world->now() + kLeadS * kSecond;
    etcd_.leader_ = Etcd::Key{self, term, lease, host_};
    world->trace("leads", term, [&] { return host_->id; });
    TM_TRY(come_back(deadline));
    lease_ = lease;
    term_ = term;
    return std::optional<Won>(Won{term_, sent_ns + kLeadS * 900'000'000});
  }
  Result<int64_t> renew(Deadline deadline) override {
    const int64_t sent_ns = steady_ns();
    TM_TRY(arrive(deadline));
    const auto lease = etcd_.leases_.find(lease_);
    if (lease == etcd_.leases_.end()) return Status(Code::key_not_found, "the leader's lease has run out");
    lease->second = world->now() + kLeadS * kSecond;
    TM_TRY(come_back(deadline));
    return sent_ns + kLeadS * 900'000'000;
  }
  Status note(const LastView& view, Deadline deadline) override {
    TM_TRY(arrive(deadline));
    if (!etcd_.leader_ || etcd_.leader_->term != term_) return {Code::key_not_found, "another node leads, or none"};
    ++etcd_.revision_;
    etcd_.view_ = view;
    return come_back(deadline);
  }
  Status resign(Deadline deadline) override { return revoke(lease_, deadline); }
  Result<LastView> last_view(Deadline deadline) override {
    TM_TRY(arrive(deadline));
    LastView view = etcd_.view_;
    TM_TRY(come_back(deadline));
    return view;
  }

 private:
  Status revoke(uint64_t lease, Deadline deadline) {
    TM_TRY(arrive(deadline));
    etcd_.leases_.erase(lease);
    etcd_.pass();
    return come_back(deadline);
  }
  Status arrive(Deadline deadline) {
    TM_TRY(travel(deadline));
    etcd_.pass();
    return {};
  }
  Status come_back(Deadline deadline) { return travel(deadline); }
  Status travel(Deadline deadline) {
    const int64_t late = world->chance(0.02) ? world->between(100, 2500) : world->between(0, 5);
    world->sleep_until(world->now() + late * 1'000'000);
    while (!etcd_.reached(host_) && !deadline.expired()) world->sleep_until(world->now() + 50'000'000);
    if (!deadline.expired()) return {};
    return {Code::io, "etcd does not answer"};
  }

  Etcd& etcd_;
  Host* const host_;
  uint64_t term_ = 0, lease_ = 0, seen_ = 0;
};

std::unique_ptr<Election> Etcd::client(Host* host) { return std::make_unique<SimElection>(this, host); }

bool Etcd::reached(Host* host) const {
  const auto cut = cut_until_.find(host);
  return world->now() >= down_until_ && (cut == cut_until_.end() || world->now() >= cut->second);
}

void Etcd::pass() {
  std::erase_if(leases_, [](const auto& lease) { return lease.second <= world->now(); });
  if (leader_ && !leases_.count(leader_->lease)) {
    leader_.reset();
    ++revision_;
  }
}

void Etcd::restart() {
  pass();
  for (auto& [lease, until] : leases_) until = world->now() + kLeadS * kSecond;
}

}  // namespace torch_mooncake::pool::sim
