// A member's side of membership: join the leader, announce, send heartbeats; fenced when the lease has run out. One
// thread, asleep between heartbeats.
#include <future>

#include "common/log.h"
#include "pool/service_impl.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {

bool NodeServiceImpl::sleep_ms(int64_t ms) {
  std::unique_lock lock(sleep_mutex_);
  return !sleep_cv_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return closing_.load(); });
}

void NodeServiceImpl::membership_thread() {
  static log::Once once(60'000);
  do {
    const Status s = be_member(options_.node.leader, kLeaseMs);
    if (alone_since_ns_ == 0) alone_since_ns_ = steady_ns();
    if (closing_ || left_) return;
    if (once.pass()) log::warning("pool", s.with("membership at " + options_.node.leader).to_string());
  } while (sleep_ms(kBeatMs / 2));
}

Status NodeServiceImpl::be_member(const std::string& address, int64_t connect_ms) {
  TM_ASSIGN(auto peer, engine_->connect(address, Deadline::after_ms(connect_ms)));
  const Status s = follow(peer->session());
  strand_.run_and_wait([&] { follows_.reset(); });
  return s;
}

Status NodeServiceImpl::follow(const rpc::SessionPtr& leader) {
  JoinRequest join;
  strand_.run_and_wait([&] {
    join.node = self_;
    join.node.used_bytes = donor_->stats().used_bytes;
    join.view = view_.number;
  });
  int64_t sent_ns = steady_ns();
  TM_ASSIGN(auto joined, leader->call_sync(kJoin, encode(join), Deadline::after_ms(kLeaseMs)));
  TM_ASSIGN(JoinAnswer answer, decode<JoinAnswer>(joined.body));
  TM_TRY(announce_to(leader, answer));
  while (sleep_ms(kBeatMs)) {
    BeatRequest beat;
    strand_.run_and_wait([&] {
      const DonorStats stats = donor_->stats();
      beat = {self_.id, self_.incarnation, view_.number, stats.limit_bytes, stats.used_bytes, donor_->quotas()};
    });
    if (left_) return {};
    sent_ns = steady_ns();
    TM_ASSIGN(auto reply, leader->call_sync(kBeat, encode(beat), Deadline::after_ms(kLeaseMs)));
    TM_ASSIGN(BeatAnswer news, decode<BeatAnswer>(reply.body));
    strand_.run([this, sent_ns, news] {
      counted(sent_ns);
      if (news.view && news.view->number > view_.number) view_ = *news.view;
      if (!leader_) donor_->set_quotas(news.quotas);
    });
  }
  return {};
}

void NodeServiceImpl::counted(int64_t at_ns) {
  lease_until_ns_ = at_ns + kLeaseMs * 1'000'000;
  if (!draining_) publish_counted(*table_map_, at_ns);
}

// The donor's table is copied and evictions are reported from one moment on, so that nothing falls between.
Status NodeServiceImpl::announce_to(const rpc::SessionPtr& leader, const JoinAnswer& answer) {
  // Nothing that an earlier leader still says changes what we announce.
  strand_.run_and_wait([&] { fence_ = std::max(fence_, answer.view.number); });
  if (!answer.keep_named) TM_TRY(drop_named_and_wait());
  std::vector<Announced> extents;
  strand_.run_and_wait([&] {
    extents = announcements();
    evicted_.clear();
    moved_.clear();
    leader_session_ = follows_ = leader;
  });
  constexpr size_t kChunk = 4096;
  int64_t sent_ns = 0;
  View view;
  for (size_t at = 0; at == 0 || at < extents.size(); at += kChunk) {
    AnnounceRequest part;
    part.view = answer.view.number;
    part.node = self_.id;
    part.first = at == 0;
    part.last = at + kChunk >= extents.size();
    const auto begin = extents.begin() + static_cast<ptrdiff_t>(std::min(at, extents.size()));
    part.extents.assign(begin, begin + static_cast<ptrdiff_t>(std::min(kChunk, extents.size() - at)));
    sent_ns = steady_ns();
    // With the last the home takes in all of them before it answers: 10 µs an object, several times what that takes.
    const int64_t patience_ms = kLeaseMs + (part.last ? static_cast<int64_t>(extents.size()) / 100 : 0);
    TM_ASSIGN(auto reply, leader->call_sync(kAnnounce, encode(part), Deadline::after_ms(patience_ms)));
    TM_ASSIGN(view, decode<View>(reply.body));
  }
  strand_.run_and_wait([&] {
    if (view.number > view_.number) view_ = view;
    counted(sent_ns);
  });
  alone_since_ns_ = 0;
  return {};
}

// What is on an SSD must not come back with the next worker, whom a rebuilt home would trust.
Status NodeServiceImpl::drop_named_and_wait() {
  auto dropped = std::make_shared<std::promise<Status>>();
  auto over = dropped->get_future();
  strand_.run_and_wait([&] { drop_named([dropped](const Status& s) { dropped->set_value(s); }); });
  while (over.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
    if (closing_) return {Code::closed, "closing"};
  return over.get();
}

// We were out of the view: somebody else may have newer versions of what we hold.
void NodeServiceImpl::drop_named(std::function<void(const Status&)> done) {
  auto left = std::make_shared<size_t>(1);
  const auto one = [left, done](const Status& s) {
    if (!s.is_ok()) log::error("pool", s.with("dropping what an expelled node held").to_string());
    if (--*left == 0) done({});
  };
  std::vector<ExtentRef> named;
  donor_->announce([&named](const Announcement& a) {
    if (a.kind == Kind::named) named.push_back(a.extent);
  });
  for (ExtentRef extent : named) {
    ++*left;
    donor_->remove(extent, one);
  }
  one({});
  retry_reservations();
}

// A home of another host counts by another clock, whose rate may differ by 10 %: a member says less than what is left,
// so that no home serves what an earlier one has called expired.
Announced NodeServiceImpl::slim(Announcement a) const {
  Announced slim{std::move(a.key), a.kind,   a.state, a.version, a.txn,      a.part,
                 a.parts,          a.extent, {},      a.tier,    a.replicas, a.pin};
  if (a.ttl_ms && a.state != ExtentState::prepared) {
    auto passed_ms = static_cast<uint64_t>(std::max<int64_t>(0, steady_ns() - a.committed_ns)) / 1'000'000 + 1;
    if (!leader_) passed_ms += passed_ms / 10;
    slim.left_ms = a.ttl_ms - std::min(a.ttl_ms, passed_ms);
  }
  return slim;
}

std::vector<Announced> NodeServiceImpl::announcements() const {
  std::vector<Announced> out;
  donor_->announce([&](Announcement a) { out.push_back(slim(std::move(a))); });
  for (Announcement& a : donor_->announce_prepared()) out.push_back(slim(std::move(a)));
  return out;
}

}  // namespace torch_mooncake::pool
