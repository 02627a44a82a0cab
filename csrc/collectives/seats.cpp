#include "collectives/seats.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "common/log.h"
#include "common/random.h"
#include "common/sha256.h"

namespace torch_mooncake::coll {
namespace {

constexpr auto kLook = std::chrono::milliseconds(20);
constexpr int64_t kLeaveMs = 2000, kDialMs = 2000, kGraceMs = 1000, kAskMs = 5000;

void put_seats(ByteWriter& out, const std::vector<int>& seats) {
  out.put(static_cast<uint32_t>(seats.size()));
  for (int seat : seats) out.put(seat);
}

std::vector<int> get_seats(ByteReader& in) {
  std::vector<int> out(in.get_count(sizeof(int)));
  for (int& seat : out) seat = in.get<int>();
  return out;
}

bool contains(const std::vector<int>& seats, int seat) { return std::ranges::find(seats, seat) != seats.end(); }

void add_to(std::vector<int>& seats, const std::vector<int>& more) {
  for (int seat : more)
    if (!contains(seats, seat)) seats.push_back(seat);
}

std::string names(const std::vector<int>& seats) {
  std::string out;
  for (int seat : seats) out += (out.empty() ? "rank " : ", rank ") + std::to_string(seat);
  return out;
}

}  // namespace

Id128 derived_id(const Id128& parent, std::string_view purpose, const std::vector<int>& ranks, uint64_t count) {
  ByteWriter out;
  out.put(parent).put(purpose).put(count);
  put_seats(out, ranks);
  const Digest digest = sha256(out.take());
  Id128 id{};
  std::memcpy(id.data(), digest.data(), id.size());
  return id;
}

void Seating::encode(ByteWriter& out) const {
  out.put(epoch)
      .put(group)
      .put(sequence)
      .put(std::string_view(algorithms.text()))
      .put(static_cast<uint32_t>(members.size()));
  for (size_t seat = 0; seat < members.size(); ++seat)
    out.put(std::string_view(members[seat].encode())).put(active[seat]).put(global_ranks[seat]);
}

Result<Seating> Seating::decode(ByteReader& in) {
  Seating out;
  out.epoch = in.get<uint64_t>();
  out.group = in.get_id();
  out.sequence = in.get<uint64_t>();
  TM_ASSIGN(out.algorithms, Algorithms::parse(in.get_bytes()));
  const uint32_t n = in.get_count(13);
  for (uint32_t seat = 0; seat < n; ++seat) {
    TM_ASSIGN(Member member, Member::decode(in.get_bytes()));
    out.members.push_back(std::move(member));
    out.active.push_back(in.get<uint8_t>() != 0);
    out.global_ranks.push_back(in.get<int64_t>());
  }
  if (!in.ok()) return {Code::corrupt, "a seating cannot be read"};
  return out;
}

std::vector<int> Seating::active_seats() const {
  std::vector<int> out;
  for (size_t seat = 0; seat < active.size(); ++seat)
    if (active[seat]) out.push_back(static_cast<int>(seat));
  return out;
}

GroupOptions Seating::group_of(int seat) const {
  GroupOptions out;
  out.id = group;
  out.seats = active_seats();
  out.algorithms = algorithms;
  out.seat_count = static_cast<int>(members.size());
  for (int other : out.seats) {
    if (other == seat) out.rank = static_cast<int>(out.members.size());
    out.members.push_back(members[other]);
    out.global_ranks.push_back(global_ranks[other]);
  }
  return out;
}

Seats::Seats(HubPtr hub, const Id128& id, int seat) : hub_(std::move(hub)), id_(id), seat_(seat) {}

Result<SeatsPtr> Seats::found(HubPtr hub, int seat, Seating seating) {
  SeatsPtr out(new Seats(std::move(hub), seating.group, seat));
  TM_TRY(out->start(std::move(seating)));
  return out;
}

Result<SeatsPtr> Seats::found_part(int seat, Seating seating) const {
  hub_->hold();
  auto out = found(hub_, seat, std::move(seating));
  if (!out.is_ok()) hub_->release();
  return out;
}

Status Seats::start(Seating seating) {
  if (seat_ < 0 || seat_ >= static_cast<int>(seating.members.size()))
    return {Code::invalid_argument,
            "rank " + std::to_string(seat_) + " of a group of " + std::to_string(seating.members.size())};
  TM_ASSIGN(GroupPtr group, Group::join(hub_, seating.group_of(seat_)));
  {
    std::lock_guard lock(mutex_);
    group_ = std::move(group);
    seating_ = std::move(seating);
  }
  hub_->add(shared_from_this());
  return {};
}

Result<SeatsPtr> Seats::join(HubPtr hub, const Id128& id, int seat, const std::vector<std::string>& addresses,
                             Deadline deadline) {
  SeatsPtr out(new Seats(hub, id, seat));
  ByteWriter request = out->message(What::join);
  request.put(seat).put(std::string_view(hub->self().encode()));
  const std::string body = request.take();
  Status why(Code::invalid_argument, "no addresses to ask at");
  while (!addresses.empty()) {
    size_t refusals = 0;  // a port of a dead rank may be somebody else's by now
    for (const auto& address : addresses) {
      auto peer = hub->engine().connect(address, min(deadline, Deadline::after_ms(kDialMs)));
      auto answer = peer.is_ok()
                        ? (*peer)->session()->call_sync(kSeats, body, min(deadline, Deadline::after_ms(kAskMs)))
                        : peer.status();
      if (!answer.is_ok()) {
        why = answer.status().with(address);
        if (why.code() == Code::invalid_argument) return why;
        refusals += why.code() == Code::auth;
        continue;
      }
      ByteReader in(answer->body);
      TM_ASSIGN(Seating seating, Seating::decode(in));
      if (seat >= static_cast<int>(seating.members.size()) || !seating.active[seat] ||
          seating.members[seat].engine != hub->self().engine)
        return {Code::corrupt, "was answered with a seating that lacks this rank"};
      TM_TRY(out->start(std::move(seating)));
      return out;
    }
    if (refusals == addresses.size()) return why;
    if (deadline.expired()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return Status(why.code() == Code::invalid_argument ? why.code() : Code::deadline_exceeded,
                "nobody let rank " + std::to_string(seat) + " in: " + why.message());
}

GroupPtr Seats::group() const {
  std::lock_guard lock(mutex_);
  return group_;
}

Seating Seats::seating() const {
  std::lock_guard lock(mutex_);
  return seating_;
}

std::vector<int> Seats::waiting() const {
  std::lock_guard lock(mutex_);
  std::vector<int> out;
  for (const auto& [seat, joiner] : joiners_) out.push_back(seat);
  return out;
}

ByteWriter Seats::message(What what) const {
  ByteWriter out;
  out.put(id_).put(what);
  return out;
}

// `remove`, and whoever the present group has lost.
std::vector<int> Seats::lost(const std::vector<int>& remove) const {
  std::vector<int> out = remove;
  add_to(out, group()->gone_seats());
  std::erase(out, seat_);
  return out;
}

Status Seats::change(const std::vector<int>& remove, const std::vector<int>& admit, uint64_t sequence, int at_least,
                     Deadline deadline) {
  std::lock_guard one(changing_);
  const Seating now = seating();
  for (int seat : remove)
    if (seat == seat_) return {Code::invalid_argument, "this is rank " + std::to_string(seat) + " itself"};
  for (const auto* seats : {&remove, &admit})
    for (int seat : *seats)
      if (seat < 0 || seat >= static_cast<int>(now.members.size()))
        return {Code::invalid_argument, "there is no rank " + std::to_string(seat)};
  for (;;) {
    std::optional<Seating> news;
    {
      std::lock_guard lock(mutex_);
      if (has_heard_news()) news = heard_;
    }
    if (news) TM_TRY(take(std::move(*news)));
    Proposal proposal{seating(), lost(remove), admit, sequence};
    const auto& active = proposal.seating.active;
    if (!active[seat_]) return {Code::peer_lost, "the others went on without rank " + std::to_string(seat_)};
    const bool done = std::ranges::none_of(remove, [&](int seat) { return active[seat] && !contains(admit, seat); }) &&
                      std::ranges::all_of(admit, [&](int seat) { return active[seat] != 0; });
    if (proposal.seating.epoch > now.epoch && done) return {};
    int chair = 0;
    while (!active[chair] || contains(proposal.lost, chair)) ++chair;
    if (chair == seat_) {
      TM_TRY(preside(std::move(proposal), remove, at_least, deadline));
      continue;
    }
    Status why_not;
    TM_TRY(ask(chair, proposal, remove, deadline, why_not));
    if (why_not.is_ok()) continue;
    if (deadline.expired()) return {Code::deadline_exceeded, "the ranks did not agree in time: " + why_not.message()};
    std::this_thread::sleep_for(kLook);
  }
}

// `why_not` is set if it is to be looked again: that rank is lost, or does not know the group yet, or there are news.
Status Seats::ask(int chair, const Proposal& proposal, const std::vector<int>& remove, Deadline deadline,
                  Status& why_not) {
  ByteWriter out = message(What::propose);
  out.put(seat_);
  proposal.seating.encode(out);
  put_seats(out, proposal.lost);
  put_seats(out, proposal.admit);
  out.put(proposal.sequence);
  {
    std::lock_guard lock(mutex_);
    out.put(static_cast<uint32_t>(joiners_.size()));
    for (const auto& [seat, joiner] : joiners_) out.put(seat).put(std::string_view(joiner.member.encode()));
  }
  auto link = hub_->link(proposal.seating.members[chair], deadline);
  if (!link.is_ok()) {
    why_not = link.status().with("rank " + std::to_string(chair));
    if (link.status().code() == Code::peer_lost) group()->lose_seat(chair, link.status());
    const bool look_again = link.status().code() == Code::peer_lost || link.status().code() == Code::deadline_exceeded;
    std::lock_guard lock(mutex_);
    return !cancelled_.is_ok() ? cancelled_ : look_again ? Status() : why_not;
  }
  struct Answer {
    std::mutex mutex;
    std::condition_variable cv;
    std::optional<Result<rpc::Message>> message;
  };
  auto answer = std::make_shared<Answer>();
  // If the chair gives up at the same time, what it says tells more.
  const Deadline last = deadline.is_never() ? deadline : Deadline::after_ms(deadline.remaining_ms() + kGraceMs);
  (*link)->current()->call(kSeats, out.take(), last, [answer](Result<rpc::Message> message) {
    std::lock_guard lock(answer->mutex);
    answer->message = std::move(message);
    answer->cv.notify_all();
  });
  std::unique_lock lock(answer->mutex);
  while (!answer->message) {
    answer->cv.wait_for(lock, kLook);
    if (answer->message) break;
    lock.unlock();
    const bool chair_lost = contains(lost(remove), chair);  // before the look at what it may have said
    {
      std::lock_guard own(mutex_);
      if (!cancelled_.is_ok()) return cancelled_;
      if (has_heard_news()) {
        why_not = {Code::cancelled, "others have made a change"};
        return {};
      }
    }
    lock.lock();
    if (answer->message) break;
    if (chair_lost) {
      why_not = {Code::peer_lost, "rank " + std::to_string(chair) + " was lost"};
      return {};
    }
    if (last.expired())
      return {Code::deadline_exceeded, "rank " + std::to_string(chair) + ", which decides, did not answer in time"};
  }
  if (!answer->message->is_ok()) {
    const Status why = answer->message->status().with("rank " + std::to_string(chair));
    if (why.code() != Code::peer_lost && why.code() != Code::closed && why.code() != Code::key_not_found) return why;
    why_not = why;
    return {};
  }
  ByteReader in((*answer->message)->body);
  TM_ASSIGN(Seating next, Seating::decode(in));
  if (next.members.size() != proposal.seating.members.size()) return {Code::corrupt, "a seating of another group"};
  return take(std::move(next));
}

Status Seats::preside(Proposal own, const std::vector<int>& remove, int at_least, Deadline deadline) {
  // Whom nobody has talked to yet may be dead without anybody's knowing.
  for (int seat : own.seating.active_seats()) {
    if (seat == seat_ || contains(own.lost, seat)) continue;
    const auto link = hub_->link(own.seating.members[seat], deadline);
    if (!link.is_ok() && link.status().code() == Code::peer_lost) group()->lose_seat(seat, link.status());
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    Seating base = seating_;
    if (base.epoch > own.seating.epoch || has_heard_news()) return {};
    uint64_t sequence = own.sequence;
    std::vector<int> out, in = own.admit;
    for (const auto& [seat, proposed] : proposals_) {
      const Proposal& theirs = proposed.proposal;
      add_to(out, theirs.lost);
      add_to(in, theirs.admit);
      sequence = std::max(sequence, theirs.sequence);
      if (theirs.seating.epoch > base.epoch) base = theirs.seating;
    }
    lock.unlock();
    add_to(out, lost(remove));
    lock.lock();
    if (!cancelled_.is_ok()) return cancelled_;
    if (contains(out, seat_))
      return {Code::peer_lost, "other ranks take rank " + std::to_string(seat_) + " for lost, and go on without it"};
    std::vector<int> awaited, stay;
    for (int seat : base.active_seats()) {
      if (contains(out, seat)) continue;
      stay.push_back(seat);
      if (seat != seat_ && !proposals_.contains(seat)) awaited.push_back(seat);
    }
    std::vector<int> not_come;
    for (int seat : in)
      if (contains(stay, seat) || !joiners_.contains(seat)) not_come.push_back(seat);
    Status refused;
    if (awaited.empty() && static_cast<int>(stay.size()) < at_least)
      refused = {Code::cancelled, "only " + names(stay) + " would be left, fewer than " + std::to_string(at_least)};
    else if (deadline.expired() && !awaited.empty())
      refused = {Code::deadline_exceeded, names(awaited) + " did not agree to the change in time"};
    else if (deadline.expired() && !not_come.empty())
      refused = {Code::deadline_exceeded, "no replacement for " + names(not_come) + " came in time"};
    if (!refused.is_ok()) {
      for (auto& [seat, proposed] : proposals_) proposed.responder.fail(refused);
      proposals_.clear();
      return refused;
    }
    if (awaited.empty() && not_come.empty()) {
      Seating next = base;
      next.epoch = base.epoch + 1;
      next.group = random_id();
      next.sequence = sequence;
      for (int seat : base.active_seats()) next.active[seat] = contains(stay, seat);
      for (int seat : in) {
        next.members[seat] = joiners_.at(seat).member;
        next.active[seat] = 1;
      }
      lock.unlock();
      return take(std::move(next));
    }
    changed_.wait_for(lock, kLook);
  }
}

Status Seats::take(Seating next) {
  std::map<int, Proposed> proposals;
  std::vector<rpc::Responder> joiners;
  GroupPtr old;
  const bool is_in = seat_ < static_cast<int>(next.members.size()) && next.active[seat_] != 0 &&
                     next.members[seat_].engine == hub_->self().engine;
  GroupPtr group;
  if (is_in) {
    hub_->hold();
    auto joined = Group::join(hub_, next.group_of(seat_));
    if (!joined.is_ok()) {
      hub_->release();
      return joined.status();
    }
    group = *joined;
  }
  ByteWriter encoded;
  next.encode(encoded);
  const std::string body = encoded.take();
  std::vector<Id128> left;
  {
    std::unique_lock lock(mutex_);
    if (!cancelled_.is_ok() || next.epoch <= seating_.epoch) {  // never back to an older one
      const Status why = cancelled_;
      lock.unlock();
      if (group) group->leave(Deadline::after_ms(kLeaveMs));
      return why;
    }
    if (is_in) old = std::exchange(group_, group);
    for (int seat : seating_.active_seats())
      if (seat != seat_) left.push_back(seating_.members[seat].engine);
    for (int seat : next.active_seats()) {
      auto it = joiners_.find(seat);
      if (it == joiners_.end() || it->second.member.engine != next.members[seat].engine) continue;
      joiners.push_back(std::move(it->second.responder));
      joiners_.erase(it);
    }
    seating_ = std::move(next);
    proposals.swap(proposals_);
    changed_.notify_all();
  }
  for (auto& [seat, proposed] : proposals) proposed.responder.ok(body);
  for (auto& responder : joiners) responder.ok(body);
  if (!is_in) return {Code::peer_lost, "the others went on without rank " + std::to_string(seat_)};
  // Ahead of the good-bye, on the same sessions.
  ByteWriter told = message(What::seating);
  told.put(seat_).raw(body);
  const std::string news = told.take();
  for (const auto& link : hub_->links(left)) (void)link->current()->post(kSeats, news);  // a dead one needs no news
  old->leave(Deadline::after_ms(kLeaveMs));
  return {};
}

void Seats::cancel(const Status& why) {
  std::lock_guard lock(mutex_);
  if (cancelled_.is_ok()) cancelled_ = why;
  changed_.notify_all();
}

void Seats::close(Deadline deadline) {
  const Status why(Code::closed, "the process group was closed");
  cancel(why);
  std::map<int, Proposed> proposals;
  std::map<int, Joiner> joiners;
  GroupPtr group;
  {
    std::lock_guard lock(mutex_);
    proposals.swap(proposals_);
    joiners.swap(joiners_);
    group = group_;
  }
  for (auto& [seat, proposed] : proposals) proposed.responder.fail(why);
  for (auto& [seat, joiner] : joiners) joiner.responder.fail(why);
  hub_->remove_seats(id_);
  if (group) group->leave(deadline);
}

void Seats::on_call(const rpc::SessionPtr& session, ByteReader& in, rpc::Responder responder) {
  const auto what = in.get<What>();
  const int seat = in.get<int>();
  const Seating now = seating();
  const auto n = static_cast<int>(now.members.size());
  if (!in.ok() || what > What::seating || seat < 0 || seat >= n)
    return responder.fail(
        {Code::invalid_argument, "the group has " + std::to_string(n) + " ranks, none is " + std::to_string(seat)});
  if (what == What::propose) return on_proposal(session, seat, in, std::move(responder));
  if (what == What::seating) {
    auto seating = Seating::decode(in);
    if (seating.is_ok() && in.done() && seating->members.size() == now.members.size()) on_seating(std::move(*seating));
    return responder.ok();
  }
  auto member = Member::decode(in.get_bytes());
  if (!member.is_ok() || !in.done()) return responder.fail({Code::corrupt, "a request to join cannot be read"});
  if (what == What::join && now.active[seat] && now.members[seat].engine == member->engine) {
    ByteWriter out;  // it was let in, and who was to tell it is gone
    now.encode(out);
    return responder.ok(out.take());
  }
  if (what == What::joiner) responder.ok();
  on_joiner(seat, std::move(*member), what == What::join, std::move(responder));
}

void Seats::on_seating(Seating seating) {
  std::lock_guard lock(mutex_);
  if (seating.epoch <= std::max(heard_.epoch, seating_.epoch)) return;
  heard_ = std::move(seating);
  changed_.notify_all();
}

void Seats::on_proposal(const rpc::SessionPtr& session, int seat, ByteReader& in, rpc::Responder responder) {
  auto seating = Seating::decode(in);
  if (!seating.is_ok()) return responder.fail(seating.status());
  Proposal proposal;
  proposal.seating = std::move(*seating);
  proposal.lost = get_seats(in);
  proposal.admit = get_seats(in);
  proposal.sequence = in.get<uint64_t>();
  std::map<int, Member> joiners;
  for (uint32_t i = in.get_count(8); i > 0; --i) {
    const int at = in.get<int>();
    auto member = Member::decode(in.get_bytes());
    if (!member.is_ok()) return responder.fail(member.status());
    joiners[at] = std::move(*member);
  }
  const auto& members = proposal.seating.members;
  auto is_seat = [&](int at) { return at >= 0 && at < static_cast<int>(members.size()); };
  const bool sound = in.done() && is_seat(seat) && session->peer().engine == members[seat].engine &&
                     std::ranges::all_of(proposal.lost, is_seat) && std::ranges::all_of(proposal.admit, is_seat) &&
                     std::ranges::all_of(joiners, [&](const auto& joiner) { return is_seat(joiner.first); });
  Proposed before;
  std::unique_lock lock(mutex_);
  if (!sound || members.size() != seating_.members.size()) {
    lock.unlock();
    return responder.fail({Code::invalid_argument, "not a proposal of rank " + std::to_string(seat)});
  }
  if (proposal.seating.epoch < seating_.epoch) {  // it did not hear of the last change
    ByteWriter out;
    seating_.encode(out);
    lock.unlock();
    return responder.ok(out.take());
  }
  for (auto& [at, member] : joiners) joiners_.try_emplace(at, Joiner{std::move(member), {}});
  before = std::exchange(proposals_[seat], Proposed{std::move(proposal), std::move(responder)});
  changed_.notify_all();
  lock.unlock();  // `before` may answer its caller
}

void Seats::on_joiner(int seat, Member member, bool asked_here, rpc::Responder responder) {
  ByteWriter out = message(What::joiner);
  out.put(seat).put(std::string_view(member.encode()));
  const std::string body = out.take();
  std::vector<Member> others;
  Joiner before;
  {
    std::lock_guard lock(mutex_);
    for (int other : seating_.active_seats())
      if (other != seat_) others.push_back(seating_.members[other]);
    before = std::exchange(joiners_[seat], Joiner{std::move(member), std::move(responder)});
    changed_.notify_all();
  }
  before.responder.fail({Code::cancelled, "another replacement asks for rank " + std::to_string(seat)});
  if (!asked_here) return;
  hub_->progress()->enqueue([hub = hub_, others = std::move(others), body] {  // may have to dial
    for (const auto& other : others) {
      const auto link = hub->link(other, Deadline::after_ms(kDialMs));
      if (link.is_ok()) (*link)->current()->call(kSeats, body, Deadline::after_ms(kDialMs), [](const auto&) {});
    }
  });
}

}  // namespace torch_mooncake::coll
