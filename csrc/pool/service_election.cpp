// Membership by election: the membership thread of a node that was given a `discovery`. It follows who leads or, when
// nobody does, takes the lead; then it keeps the lease and the record of the view, while the strand leads.
//
// A leader's lease is judged on the strand, before anything is done for anybody: who wakes up after it has run out
// refuses all it is asked, whatever this thread is doing. A change of the view takes effect after it has been recorded:
// the next leader knows whose named objects count.
//
// While etcd does not answer a leader may go on by its members' vouches, and takes the key again afterwards if its
// lease has run out meanwhile: service_vouch.cpp has the rules, and why there are never two that act.
#include <ctime>
#include <future>

#include "common/log.h"
#include "common/random.h"
#include "pool/service_impl.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {
namespace {

// The leader before us has fenced itself, and may come back as a member, once etcd has answered what it is asking.
constexpr int64_t kReturnMs = 2 * kAskMs + kBeatMs;

}  // namespace

bool NodeServiceImpl::nap_ms(int64_t ms) {
  std::unique_lock lock(sleep_mutex_);
  sleep_cv_.wait_for(lock, std::chrono::milliseconds(ms),
                     [this] { return closing_ || left_ || (to_note_ && !etcd_silent_); });
  return !closing_ && !left_;
}

void NodeServiceImpl::election_thread() {
  static log::Once once(60'000);
  do {
    const Status s = take_part();
    if (!s.is_ok() && !closing_ && !left_ && once.pass())
      log::warning("pool", s.with("membership by " + options_.node.discovery).to_string());
  } while (nap_ms(kBeatMs / 2));
  if (left_) leave_record();
}

Status NodeServiceImpl::take_part() {
  const auto found = election_->leader(Deadline::after_ms(kAskMs));
  std::optional<Leader> leader = found.is_ok() ? *found : std::nullopt;
  if (const auto bound = vouched_for()) {
    if (!leader) leader = bound;  // it may be leading still, and needs us
    if (leader->node != bound->node) return {};
  } else {
    TM_TRY(found.status());
  }
  if (leader && leader->node != self_.id) {
    alone_since_ns_ = 0;
    Status last(Code::peer_lost, "the leader listens on no address that can be reached from here");
    for (const std::string& address : leader->addresses) {
      if (address.starts_with("unix://")) continue;  // its host's
      last = be_member(address, kAskMs);
      if (last.is_ok() || closing_ || left_) break;
    }
    return last;
  }
  if (leader) {  // an earlier worker of ours
    // Who leads next need not wait for us for as long as clients would believe what that one has told them.
    publish_counted(*table_map_, 0);
    TM_TRY(election_->end_seen(Deadline::after_ms(kAskMs)));
  }
  if (draining_) {
    if (alone_since_ns_ == 0) alone_since_ns_ = steady_ns();
    return {};
  }
  TM_ASSIGN(const LastView last, election_->last_view(Deadline::after_ms(kAskMs)));
  if (!may_lead(last)) return {};
  Leader self{self_.id, self_.incarnation, self_.addresses};
  TM_ASSIGN(auto won, election_->campaign(self, Deadline::after_ms(kAskMs)));
  return won ? lead(*won) : Status{};
}

// If nobody leads whom we could have told that we leave: whoever comes need not wait for us. Others may be doing the
// same.
void NodeServiceImpl::leave_record() {
  const Deadline deadline = Deadline::after_ms(kAskMs);
  const timespec pause{0, 50'000'000};
  for (; !deadline.expired(); nanosleep(&pause, nullptr)) {
    auto last = election_->last_view(deadline);
    if (!last.is_ok() || !last->has(self_.id)) return;
    const auto leader = election_->leader(deadline);
    if (!leader.is_ok() || *leader || vouched_for()) continue;
    const auto won = election_->campaign({self_.id, self_.incarnation, self_.addresses}, deadline);
    if (!won.is_ok() || !*won) continue;
    last = election_->last_view(deadline);
    if (last.is_ok() && last->has(self_.id)) {
      std::erase(last->members, self_.id);
      last->leader = self_.id;
      last->term = (*won)->term;
      (void)election_->note(*last, deadline);
    }
    (void)election_->resign(deadline);
  }
}

Status NodeServiceImpl::lead(const Election::Won& won) {
  TM_ASSIGN(LastView last, election_->last_view(Deadline::after_ms(kAskMs)));
  if (!may_lead(last)) return election_->resign(Deadline::after_ms(kAskMs));  // somebody has led in between
  if (!last.has(self_.id)) {  // somebody else may have newer versions of what we hold
    TM_TRY(drop_named_and_wait());
    last.members.push_back(self_.id);
  }
  const NodeId before = std::exchange(last.leader, self_.id);
  if (last.lineage == Id128{}) last.lineage = random_id();
  last.term = won.term;
  TM_TRY(election_->note(last, Deadline::after_ms(kAskMs)));
  strand_.run_and_wait([&] { begin_to_lead(won, last, before); });
  term_noted_ = true;
  etcd_silent_ = false;
  Status over;
  int64_t next_ns = 0;
  while (over.is_ok() && nap_ms(std::max<int64_t>(0, next_ns - steady_ns()) / 1'000'000 + 1)) {
    const Status noted = etcd_silent_ ? Status{} : note_view();
    if (noted.is_ok() && steady_ns() < next_ns) continue;
    const int64_t sent_ns = steady_ns();
    next_ns = sent_ns + kBeatMs * 1'000'000;
    const auto until = noted.is_ok() ? election_->renew(Deadline::after_ms(kAskMs)) : noted;
    if (etcd_silent_ != (until.status().code() == Code::io)) {
      etcd_silent_ = !etcd_silent_;
      log::warning("pool", etcd_silent_ ? "this node leads, and etcd does not answer" : "etcd answers again");
    }
    over = etcd_silent_ ? Status{} : until.status();
    if (over.code() == Code::key_not_found) over = lead_again();
    if (std::exchange(note_failed_, false)) ask_to_note();
    strand_.run_and_wait([&] {
      still_leads();
      if (until.is_ok() && term_noted_) renewed(*until, sent_ns);
      if (!leader_ && over.is_ok()) over = {Code::io, "the lease could not be renewed in time"};
    });
  }
  LastView without;
  strand_.run_and_wait([&] {
    if (leader_) stand_down();
    without = recorded();
  });
  if (!over.is_ok()) return over.with("this node leads no more");
  // It leaves: nobody need wait for it, nor for its lease to run out.
  std::erase(without.members, self_.id);
  TM_TRY(election_->note(without, Deadline::after_ms(kAskMs / 2)));
  return election_->resign(Deadline::after_ms(kAskMs / 2));
}

// Writes what the view is to be, and then lets the changes take effect that it has.
Status NodeServiceImpl::note_view() {
  {
    std::lock_guard lock(sleep_mutex_);
    if (!std::exchange(to_note_, false)) return {};
  }
  LastView view;
  uint64_t up_to = 0;
  bool by_lease = false;
  strand_.run_and_wait([&] {
    view = recorded();
    up_to = last_change_;
    by_lease = term_noted_ && steady_ns() + kAskMs * 1'000'000 < leased_until();
    if (by_lease) {
      about_to_record(view.members);
    } else {
      view.members = {may_be_recorded_.begin(), may_be_recorded_.end()};
      up_to = 0;
    }
  });
  if (term_noted_ && !by_lease) {
    note_failed_ = true;
    return {};
  }
  const Status noted = election_->note(view, Deadline::after_ms(kAskMs));
  note_failed_ = !noted.is_ok() || !by_lease;  // again with the next beat
  if (noted.code() == Code::key_not_found) return noted;
  term_noted_ |= noted.is_ok();
  strand_.run_and_wait([&] {
    still_leads();
    if (noted.is_ok()) recorded_ = may_be_recorded_ = {view.members.begin(), view.members.end()};
    while (noted.is_ok() && leader_ && !unnoted_.empty() && unnoted_.front().first <= up_to) {
      auto apply = std::move(unnoted_.front().second);
      unnoted_.pop_front();
      apply();
    }
    if (noted.is_ok() && by_lease && !unnoted_.empty()) ask_to_note();
    if (home_) pump();
  });
  return {};
}

void NodeServiceImpl::ask_to_note() {
  if (!election_) return;
  std::lock_guard lock(sleep_mutex_);
  to_note_ = true;
  sleep_cv_.notify_all();
}

void NodeServiceImpl::nothing_to_note() {
  std::lock_guard lock(sleep_mutex_);
  to_note_ = false;
}

LastView NodeServiceImpl::recorded() const { return {lineage_, self_.id, {counting_.begin(), counting_.end()}, term_}; }

// --- on the strand ---

void NodeServiceImpl::begin_to_lead(const Election::Won& won, const LastView& last, const NodeId& before) {
  const int64_t now = steady_ns();
  nothing_to_note();
  leader_session_.reset();
  seed_ = random_u64();
  lineage_ = last.lineage;
  counting_ = recorded_ = may_be_recorded_ = {last.members.begin(), last.members.end()};
  vouched_ns_.clear();
  vouched_until_ns_ = 0;
  term_ = won.term;
  home_.emplace(std::max(won.term << kTermBits, view_.number) + 1, seed_);
  ++reign_;
  leader_ = true;
  watched_ns_ = now;
  home_->at(now);
  home_->expect(self_.id);
  for (const NodeId& member : last.members) {
    if (member == self_.id) continue;
    home_->expect(member);
    expected_until_[member] = now + (member == before ? kReturnMs : kExpelMs) * 1'000'000;
  }
  renewed(won.until_ns, won.until_ns - kLeaseMs * 1'000'000);
  evicted_.clear();
  moved_.clear();
  home_->announce(self_.id, announcements());
  view_ = make_view();
  still_leads();
  pump();
}

void NodeServiceImpl::renewed(int64_t until_ns, int64_t since_ns) {
  if (leader_) renewed_ns_ = until_ns - kLeadS * 900'000'000;
  lead_until(until_ns, since_ns);
}

void NodeServiceImpl::lead_until(int64_t until_ns, int64_t since_ns) {
  if (!leader_) return;
  lead_until_ns_ = std::max(lead_until_ns_, until_ns);
  if (!draining_) publish_counted(*table_map_, since_ns);
}

void NodeServiceImpl::still_leads() {
  if (election_ && leader_ && steady_ns() >= lead_until_ns_) stand_down();
}

// Whatever was being done for others is over for them: what may have happened says so.
void NodeServiceImpl::stand_down() {
  log::warning("pool", "this node leads no more");
  const Status unknown(Code::peer_lost, "the directory node has stood down");
  const Status later(Code::pool_unavailable, "this node is no longer the directory node");
  leader_ = false;
  lead_until_ns_ = lease_until_ns_ = 0;
  publish_counted(*table_map_, 0);
  view_ = make_view();
  home_.reset();
  end_events();
  for (auto& [id, done] : std::exchange(commits_, {})) done(unknown);
  for (auto& [id, batch] : std::exchange(put_batches_, {})) batch.responder->fail(unknown);
  for (auto& [id, batch] : std::exchange(remove_batches_, {})) batch.responder->fail(unknown);
  for (auto& [id, lookup] : std::exchange(lookups_, {})) lookup.responder->fail(later);
  for (QuotaSet& set : std::exchange(quota_sets_, {})) set.responder->fail(later);  // the next one is asked, too
  members_.clear();
  expected_until_.clear();
  unheeded_.clear();
  unnoted_.clear();
  nothing_to_note();
  leaving_.clear();
  end_copies(later);
}

void NodeServiceImpl::when_noted(std::function<void()> change) {
  if (!election_) return change();
  unnoted_.emplace_back(++last_change_, std::move(change));
  ask_to_note();
}

}  // namespace torch_mooncake::pool
