#include "collectives/group.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "collectives/board.h"
#include "common/log.h"

namespace torch_mooncake::coll {
namespace {
Deadline soon() { return Deadline::after_ms(250); }
std::vector<std::string> hosts_of(const std::vector<Member>& members) {
  std::vector<std::string> out;
  for (const auto& member : members) out.push_back(member.host_id);
  return out;
}
Result<RegionPtr> registered_at(Engine& engine, Place place, void* data, uint64_t nbytes, RegionOptions options) {
  return place == Place::cuda ? engine.register_cuda(data, nbytes, std::move(options))
                              : engine.register_memory(data, nbytes, std::move(options));
}
}  // namespace

Result<GroupPtr> Group::join(HubPtr hub, GroupOptions options) {
  if (options.rank < 0 || options.rank >= static_cast<int>(options.members.size())) {
    return {Code::invalid_argument,
            "rank " + std::to_string(options.rank) + " of a group of " + std::to_string(options.members.size())};
  }
  if (options.members[options.rank].engine != hub->self().engine) {
    return {Code::invalid_argument, "the member published for this rank is another engine"};
  }
  std::shared_ptr<Group> group(new Group(hub, std::move(options)));
  TM_TRY(hub->add(group));
  return group;
}

Group::Group(HubPtr hub, GroupOptions options)
    : hub_(std::move(hub)),
      options_(std::move(options)),
      topology_(hosts_of(options_.members), options_.rank),
      gone_(options_.members.size()) {
  for (int which = 0; which < 2 && topology_.host().size() > 1; ++which)
    boards_[which] = std::make_unique<Board>(*this, topology_.host(), which);
}

Group::~Group() = default;  // the hub holds it until leave()

std::string Group::name_of_any(int rank) const {
  return rank < size() ? name_of(rank) + (rank == this->rank() ? ", which is this one" : "")
                       : "rank " + std::to_string(rank) + ", of " + std::to_string(size());
}

std::string Group::name_of(int rank) const {
  if (rank < 0) return "any rank";
  std::string name = "rank " + std::to_string(seat_of(rank));
  const auto& global = options_.global_ranks;
  if (rank < static_cast<int>(global.size()) && global[rank] != seat_of(rank)) {
    name += " (global rank " + std::to_string(global[rank]) + ")";
  }
  return name;
}

int Group::rank_in(int seat) const {
  if (options_.seats.empty()) return seat;
  const auto it = std::ranges::lower_bound(options_.seats, seat);
  return it != options_.seats.end() && *it == seat ? static_cast<int>(it - options_.seats.begin()) : -1;
}

std::vector<int> Group::gone_seats() const {
  std::lock_guard lock(mutex_);
  std::vector<int> out;
  for (int rank = 0; rank < size(); ++rank)
    if (!gone_[rank].is_ok()) out.push_back(seat_of(rank));
  return out;
}

void Group::lose_seat(int seat, const Status& why) {
  const int rank = rank_in(seat);
  if (rank >= 0 && rank < size())
    rank_gone(rank, {Code::peer_lost, name_of(rank) + " was lost: " + why.message()}, true);
}

Status Group::refusal(int peer, Channel channel) const {
  if (!ended_.is_ok()) return ended_;
  if (channel == Channel::collective && !trouble_.is_ok()) return trouble_;
  if (peer >= 0) return gone_[peer];
  for (const auto& gone : gone_) {
    if (!gone.is_ok()) return gone;
  }
  return {};
}

Status Group::trouble() const {
  std::lock_guard lock(mutex_);
  return ended_.is_ok() ? trouble_ : ended_;
}

Status Group::trouble_with(int rank, Channel channel) const {
  std::lock_guard lock(mutex_);
  return refusal(rank, channel);
}

std::string Group::awaited() const {
  std::vector<int> missing;
  for (const auto& board : boards_)
    if (board && missing.empty()) missing = board->missing();
  std::lock_guard lock(mutex_);
  std::vector<bool> waiting(size(), false);
  for (int rank : missing) waiting[rank] = true;
  for (const auto& [key, box] : boxes_) {
    for (const auto& posted : box.posted) {
      if (key.channel == Channel::collective && posted.source >= 0) waiting[posted.source] = true;
    }
  }
  for (const auto& [send_id, sending] : sending_) {
    if (sending.channel == Channel::collective) waiting[sending.to] = true;
  }
  std::string out;
  for (int rank = 0; rank < size(); ++rank) {
    if (waiting[rank]) out += (out.empty() ? "" : ", ") + name_of(rank);
  }
  return out.empty() ? "no rank" : out;
}

void Group::arm_timer(const RequestPtr& request, Channel channel, Deadline deadline) {
  if (channel == Channel::collective || deadline.is_never()) return;  // whoever runs a collective waits for it
  std::weak_ptr<Request> weak = request;
  auto progress = hub_->progress();
  const int peer = request->peer();
  const std::string text = "timed out waiting for " + name_of(peer);
  auto& rpc = hub_->engine().rpc();
  const uint64_t timer = rpc.add_timer(deadline, [weak, progress, text] {
    progress->enqueue([weak, text] {
      if (auto request = weak.lock()) request->cancel({Code::deadline_exceeded, text});
    });
  });
  request->on_end([hub = hub_, timer] { hub->engine().rpc().cancel_timer(timer); });
}

// ---- sending

Result<rpc::SessionPtr> Group::session_with(int rank, Deadline deadline, Channel channel) {
  TM_TRY(trouble_with(rank, channel));
  auto link = hub_->link(options_.members[rank], deadline);
  if (link.is_ok()) return (*link)->current();
  Status why(link.status().code(), name_of(rank) + ": " + link.status().message());
  if (why.code() == Code::peer_lost) rank_gone(rank, why, true);
  return why;
}

RequestPtr Group::send(int to, Channel channel, uint64_t tag, const void* data, uint64_t nbytes, Deadline deadline,
                       std::shared_ptr<void> keep, Place place) {
  if (to < 0 || to >= size() || to == rank()) {
    return Request::ended_with(to, {Code::invalid_argument, "cannot send to " + name_of_any(to)});
  }
  {
    std::lock_guard lock(mutex_);
    if (Status why = refusal(to, channel); !why.is_ok()) return Request::ended_with(to, why);
  }
  auto link = hub_->link(options_.members[to], deadline);
  if (!link.is_ok()) {
    Status why(link.status().code(), name_of(to) + ": " + link.status().message());
    if (why.code() == Code::peer_lost) rank_gone(to, why, true);
    return Request::ended_with(to, why);
  }
  const rpc::SessionPtr session = (*link)->current();
  const Envelope envelope{id(), static_cast<uint32_t>(rank()), channel, tag};
  const auto cost = static_cast<int64_t>(nbytes + 64);
  if (nbytes <= (place == Place::host ? kEagerBytes : 0)) {
    if ((*link)->credit.fetch_sub(cost) >= cost) {
      ByteWriter out;
      envelope.encode(out);
      out.raw({static_cast<const char*>(data), nbytes});
      Status status = session->post(kEager, out.take());
      if (status.is_ok()) way_to(to).sent += nbytes;
      return Request::ended_with(to, status.is_ok() ? status : status.with(name_of(to)));
    }
    (*link)->credit.fetch_add(cost);
  }

  // In the collectives the caller waits for every request, so that steps need no progress thread.
  auto request = std::make_shared<Request>(to, channel == Channel::p2p ? hub_->progress() : nullptr, keep);
  Ready ready{envelope, 0, nbytes, {}};
  RegionPtr region;
  if (nbytes > 0) {
    auto registered = registered_at(engine(), place, const_cast<void*>(data), nbytes,
                                    {.readable = true, .writable = false, .keep = keep, .label = "send"});
    if (!registered.is_ok()) return Request::ended_with(to, registered.status());
    region = *registered;
    ready.descriptor = region->descriptor();
  }
  {
    std::lock_guard lock(mutex_);
    if (Status why = refusal(to, channel); !why.is_ok()) {
      request = Request::ended_with(to, why);
    } else {
      ready.send_id = next_send_id_++;
      sending_[ready.send_id] = {to, channel, request, region, *link, nbytes};
    }
  }
  if (request->ended()) {
    if (region) (void)engine().deregister(region, soon());  // nobody knows of it
    return request;
  }
  request->set_cancel([weak = weak_from_this(), send_id = ready.send_id](Status why) {
    if (auto group = weak.lock()) group->end_send(send_id, std::move(why), true);
  });
  arm_timer(request, channel, deadline);
  if (Status status = session->post(kReady, ready.encode()); !status.is_ok()) {
    end_send(ready.send_id, status.with(name_of(to)), false);
  }
  return request;
}

// Not on an I/O thread: taking the region back may wait for a reader.
void Group::end_send(uint64_t send_id, Status status, bool withdraw) {
  Sending sending;
  {
    std::lock_guard lock(mutex_);
    auto it = sending_.find(send_id);
    if (it == sending_.end()) return;
    sending = std::move(it->second);
    sending_.erase(it);
  }
  if (withdraw) {
    const Verdict verdict{id(), static_cast<uint32_t>(rank()), send_id, static_cast<uint8_t>(status.code()),
                          status.message()};
    (void)sending.link->current()->post(kWithdraw, verdict.encode());  // a dead session needs no telling
  }
  if (sending.region) {
    // A reader that does not answer keeps the region (and through it the tensor) in the engine's quarantine.
    Status freed = engine().deregister(sending.region, soon());
    if (!freed.is_ok() && status.is_ok())
      log::warning("collectives", "a sent buffer is still being read: " + freed.to_string());
  }
  if (status.is_ok()) way_to(sending.to).sent += sending.nbytes;
  sending.request->finish(std::move(status));
}

void Group::on_taken(const Verdict& verdict) {
  RequestPtr request;
  {
    std::lock_guard lock(mutex_);
    auto it = sending_.find(verdict.send_id);
    if (it == sending_.end()) return;
    if (verdict.from != kNoRank && it->second.to != static_cast<int>(verdict.from)) return;
    request = it->second.request;
    it->second.taken = true;
  }
  Status status;
  if (verdict.code != 0) status = Status(static_cast<Code>(verdict.code), verdict.text).with(name_of(request->peer()));
  request->defer(
      [self = shared_from_this(), id = verdict.send_id, status](bool) { self->end_send(id, status, false); });
}

// ---- receiving

RequestPtr Group::receive(int from, Channel channel, uint64_t tag, void* data, uint64_t nbytes, Deadline deadline,
                          std::shared_ptr<void> keep, Place place) {
  if (from != kAnySource && (from < 0 || from >= size() || from == rank())) {
    return Request::ended_with(from, {Code::invalid_argument, "cannot receive from " + name_of_any(from)});
  }
  const Key key{channel, tag};
  auto request = std::make_shared<Request>(from, channel == Channel::p2p ? hub_->progress() : nullptr, std::move(keep));
  const Posted posted{from, request, static_cast<std::byte*>(data), nbytes, deadline, channel, place};
  if (channel == Channel::collective) {
    if (Status why = trouble(); !why.is_ok()) return Request::ended_with(from, why);
  }
  if (take_arrival(key, posted)) return request;

  // A session with whom we wait for is how we learn of their death.
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || (from != kAnySource && peer != from)) continue;
    {
      std::lock_guard lock(mutex_);
      if (!refusal(peer, channel).is_ok()) continue;
    }
    auto link = hub_->link(options_.members[peer], deadline);
    if (link.is_ok()) continue;
    Status why(link.status().code(), name_of(peer) + ": " + link.status().message());
    if (why.code() == Code::peer_lost) rank_gone(peer, why, true);
    if (take_arrival(key, posted)) return request;
    request->finish(why);
    return request;
  }
  request->set_cancel([weak = weak_from_this(), key, raw = request.get()](Status why) {
    auto group = weak.lock();
    if (!group) return;
    RequestPtr found;
    {
      std::lock_guard lock(group->mutex_);
      auto box = group->boxes_.find(key);
      if (box == group->boxes_.end()) return;
      auto& queue = box->second.posted;
      auto it = std::find_if(queue.begin(), queue.end(), [&](const Posted& p) { return p.request.get() == raw; });
      if (it == queue.end()) return;  // matched just now: its read ends by the same deadline
      found = it->request;
      queue.erase(it);
      group->drop_box_if_empty(key);
    }
    found->finish(std::move(why));
  });
  arm_timer(request, channel, deadline);
  while (!take_arrival(key, posted)) {
    Status why;
    {
      std::lock_guard lock(mutex_);
      why = refusal(from, channel);
      auto& box = boxes_[key];
      auto it = std::find_if(box.arrived.begin(), box.arrived.end(),
                             [&](const Arrival& a) { return from == kAnySource || a.source == from; });
      if (why.is_ok() && it != box.arrived.end()) continue;  // it came after the last look: look again
      if (why.is_ok()) {
        box.posted.push_back(posted);
        return request;
      }
      drop_box_if_empty(key);
    }
    request->finish(why);
    return request;
  }
  return request;
}

bool Group::take_arrival(Key key, const Posted& posted) {
  Arrival arrival;
  {
    std::lock_guard lock(mutex_);
    if (!ended_.is_ok()) return false;
    auto box = boxes_.find(key);
    if (box == boxes_.end()) return false;
    auto& queue = box->second.arrived;
    auto it = std::find_if(queue.begin(), queue.end(),
                           [&](const Arrival& a) { return posted.source == kAnySource || a.source == posted.source; });
    if (it == queue.end()) return false;
    arrival = std::move(*it);
    queue.erase(it);
    drop_box_if_empty(key);
    if (!arrival.eager) reading_[posted.request.get()] = posted.request;
  }
  complete(posted, std::move(arrival));
  return true;
}

void Group::arrived(Key key, Arrival arrival) {
  std::optional<Posted> posted;
  {
    std::lock_guard lock(mutex_);
    if (!ended_.is_ok() || !gone_[arrival.source].is_ok()) return;
    auto& box = boxes_[key];
    auto it = std::find_if(box.posted.begin(), box.posted.end(),
                           [&](const Posted& p) { return p.source == kAnySource || p.source == arrival.source; });
    if (it == box.posted.end()) {
      box.arrived.push_back(std::move(arrival));
      return;
    }
    posted = *it;
    box.posted.erase(it);
    drop_box_if_empty(key);
    if (!arrival.eager) reading_[posted->request.get()] = posted->request;
  }
  complete(*posted, std::move(arrival));
}

void Group::drop_box_if_empty(Key key) {
  auto box = boxes_.find(key);
  if (box != boxes_.end() && box->second.arrived.empty() && box->second.posted.empty()) boxes_.erase(box);
}

void Group::complete(const Posted& posted, Arrival arrival) {
  posted.request->set_peer(arrival.source);
  if (arrival.eager) {
    const uint64_t nbytes = arrival.body.size() - arrival.payload_at;
    Status status;
    if (nbytes != posted.nbytes) {
      status = {Code::layout_mismatch, name_of(arrival.source) + " sent " + std::to_string(nbytes) +
                                           " bytes, the receive buffer has " + std::to_string(posted.nbytes)};
    } else if (nbytes > 0 && posted.place == Place::cuda) {
      status = {Code::unsupported, name_of(arrival.source) +
                                       " sent from memory of its host, the receive buffer is on a "
                                       "CUDA device"};
    } else if (nbytes > 0) {
      std::memcpy(posted.data, arrival.body.data() + arrival.payload_at, nbytes);
    }
    if (status.is_ok()) way_to(arrival.source).received += nbytes;
    posted.request->finish(std::move(status));
    hub_->consumed(arrival.session, nbytes + 64);
    return;
  }
  posted.request->defer([self = shared_from_this(), posted, arrival = std::move(arrival)](bool may_block) {
    self->read(posted, arrival, may_block);
  });
}

Status Group::named(const Status& status, int rank) const {
  return status.is_ok() ? status : status.with(name_of(rank));
}

void Group::read(const Posted& posted, const Arrival& arrival, bool may_block) {
  const Ready& ready = arrival.ready;
  if (ready.nbytes != posted.nbytes) {
    return end_read(posted, arrival, nullptr,
                    {Code::layout_mismatch, name_of(arrival.source) + " sent " + std::to_string(ready.nbytes) +
                                                " bytes, the receive buffer has " + std::to_string(posted.nbytes)});
  }
  if (ready.nbytes == 0) return end_read(posted, arrival, nullptr, {});
  auto peer = engine().peer_of(arrival.session);
  if (!peer) {
    return end_read(posted, arrival, nullptr, {Code::peer_lost, name_of(arrival.source) + ": the connection is gone"});
  }
  auto remote = peer->open(ready.descriptor, posted.deadline);
  if (!remote.is_ok()) return end_read(posted, arrival, nullptr, remote.status().with(name_of(arrival.source)));
  // A device that hangs may write after the read has ended: the region keeps such memory.
  auto local = registered_at(engine(), posted.place, posted.data, posted.nbytes,
                             {.readable = false,
                              .writable = false,
                              .keep = posted.place == Place::cuda ? posted.request->keep() : nullptr,
                              .label = "receive"});
  if (!local.is_ok()) return end_read(posted, arrival, nullptr, local.status());

  OpOptions options;
  options.deadline = posted.deadline;
  options.keep = posted.request->keep();
  if (!may_block) {
    options.on_end = [self = shared_from_this(), posted, arrival, region = *local](const Status& status) {
      posted.request->defer(
          [=](bool) { self->end_read(posted, arrival, region, self->named(status, arrival.source)); });
    };
  }
  auto op = engine().read({{*local, 0, *remote, 0, posted.nbytes}}, std::move(options));
  if (!op.is_ok()) return end_read(posted, arrival, *local, named(op.status(), arrival.source));
  posted.request->set_cancel([weak = std::weak_ptr<Op>(*op)](Status) {
    if (auto op = weak.lock()) op->cancel();
  });
  if (may_block) end_read(posted, arrival, *local, named((*op)->wait(), arrival.source));
}

void Group::end_read(const Posted& posted, const Arrival& arrival, const RegionPtr& local, Status status) {
  if (local) {
    Status freed = engine().deregister(local, soon());
    if (!freed.is_ok() && status.is_ok()) status = freed;
  }
  const Verdict verdict{id(), static_cast<uint32_t>(rank()), arrival.ready.send_id, static_cast<uint8_t>(status.code()),
                        status.message()};
  (void)arrival.session->post(kTaken, verdict.encode());  // if the session died, so did the send
  {
    std::lock_guard lock(mutex_);
    reading_.erase(posted.request.get());
  }
  if (status.is_ok()) way_to(arrival.source).received += posted.nbytes;
  posted.request->finish(std::move(status));
}

// ---- from the hub

void Group::on_eager(const rpc::SessionPtr& session, const Envelope& envelope, std::string body, size_t payload_at) {
  if (envelope.source >= options_.members.size()) return;
  Arrival arrival;
  arrival.source = static_cast<int>(envelope.source);
  arrival.session = session;
  arrival.body = std::move(body);
  arrival.payload_at = payload_at;
  arrived({envelope.channel, envelope.tag}, std::move(arrival));
}

void Group::on_ready(const rpc::SessionPtr& session, Ready ready) {
  if (ready.envelope.source >= options_.members.size()) return;
  Arrival arrival;
  arrival.source = static_cast<int>(ready.envelope.source);
  arrival.session = session;
  arrival.eager = false;
  const Key key{ready.envelope.channel, ready.envelope.tag};
  arrival.ready = std::move(ready);
  arrived(key, std::move(arrival));
}

void Group::on_withdraw(const Verdict& verdict) {
  std::lock_guard lock(mutex_);
  for (auto box = boxes_.begin(); box != boxes_.end();) {
    std::erase_if(box->second.arrived, [&](const Arrival& a) {
      return !a.eager && a.source == static_cast<int>(verdict.from) && a.ready.send_id == verdict.send_id;
    });
    box = box->second.arrived.empty() && box->second.posted.empty() ? boxes_.erase(box) : std::next(box);
  }
}

void Group::on_trouble(const Trouble& trouble) {
  if (trouble.from >= options_.members.size()) return;
  const Status why(static_cast<Code>(trouble.code), trouble.text);
  if (trouble.lost_rank >= 0 && trouble.lost_rank < size()) {
    if (trouble.lost_rank != rank()) rank_gone(trouble.lost_rank, why, true);
    return;
  }
  fail_pending(Status(why.code(), name_of(trouble.from) + " gave up: " + why.message()), true, false, kAnySource);
}

void Group::on_leave(uint32_t rank) {
  if (rank >= options_.members.size()) return;
  rank_gone(static_cast<int>(rank), {Code::peer_lost, name_of(rank) + " has left the group"}, false);
}

void Group::on_board(uint32_t rank, uint8_t which, const Id128& segment, UniqueFd fd) {
  if (which < boards_.size() && boards_[which] && rank < options_.members.size())
    boards_[which]->arrived(static_cast<int>(rank), segment, std::move(fd));
}

void Group::on_engine_gone(const Id128& engine, const Status& why) {
  for (int rank = 0; rank < size(); ++rank) {
    if (options_.members[rank].engine != engine) continue;
    rank_gone(rank, {Code::peer_lost, name_of(rank) + " was lost: " + why.message()}, true);
  }
}

// ---- failure

void Group::rank_gone(int rank, const Status& why, bool lost) {
  {
    std::lock_guard lock(mutex_);
    if (!gone_[rank].is_ok() || !ended_.is_ok()) return;
    gone_[rank] = why;
  }
  if (lost) {
    log::warning("collectives", why.message());
    tell_trouble(rank, why);
  }
  fail_pending(why, lost, true, rank);
}

// Fails what is pending: all collectives (and those to come), messages with `rank`, or both; a rank that has left takes
// only its own part of the collectives along.
void Group::fail_pending(const Status& why, bool collectives, bool messages, int rank) {
  std::vector<RequestPtr> receives;
  std::vector<uint64_t> sends;
  {
    std::lock_guard lock(mutex_);
    if (collectives && trouble_.is_ok()) trouble_ = why;
    auto hit = [&](Channel channel, int peer) {
      const bool theirs = messages && (rank == kAnySource || peer == kAnySource || peer == rank);
      return theirs || (collectives && channel == Channel::collective);
    };
    for (auto box = boxes_.begin(); box != boxes_.end();) {
      std::erase_if(box->second.posted, [&](const Posted& p) {
        if (!hit(p.channel, p.source)) return false;
        receives.push_back(p.request);
        return true;
      });
      // What a dead rank announced cannot be read; what it sent eagerly is still good.
      std::erase_if(box->second.arrived, [&](const Arrival& a) { return messages && !a.eager && a.source == rank; });
      box = box->second.arrived.empty() && box->second.posted.empty() ? boxes_.erase(box) : std::next(box);
    }
    for (const auto& [send_id, sending] : sending_) {
      if (!sending.taken && hit(sending.channel, sending.to)) sends.push_back(send_id);
    }
  }
  for (const auto& request : receives) request->finish(why);
  if (sends.empty()) return;
  hub_->progress()->enqueue([self = shared_from_this(), sends = std::move(sends), why] {
    for (uint64_t send_id : sends) self->end_send(send_id, why, true);
  });
}

// Those we are connected to hear of it before this returns; the others by the progress thread, which may have to dial.
void Group::tell_trouble(int lost_rank, const Status& why) {
  const Trouble trouble{id(), static_cast<uint32_t>(rank()), lost_rank, static_cast<uint8_t>(why.code()),
                        why.message()};
  const std::string body = trouble.encode();
  std::vector<int> unconnected;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || peer == lost_rank) continue;
    {
      std::lock_guard lock(mutex_);
      if (!gone_[peer].is_ok()) continue;
    }
    const auto links = hub_->links({options_.members[peer].engine});
    if (links.empty()) {
      unconnected.push_back(peer);
    } else {
      (void)links[0]->current()->post(kTrouble, body);  // a failure of theirs is found by whoever waits for them
    }
  }
  if (unconnected.empty()) return;
  hub_->progress()->enqueue([self = shared_from_this(), unconnected = std::move(unconnected), body] {
    for (int peer : unconnected) {
      auto link = self->hub_->link(self->options_.members[peer], Deadline::after_ms(2000));
      if (link.is_ok()) (void)(*link)->current()->post(kTrouble, body);
    }
  });
}

void Group::give_up(const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (!trouble_.is_ok() || !ended_.is_ok()) return;  // the others know, or there is nobody to tell
  }
  tell_trouble(-1, why);
  fail_pending(why, true, false, kAnySource);
}

void Group::abort(const Status& why) {
  std::vector<RequestPtr> reading;
  {
    std::lock_guard lock(mutex_);
    if (!ended_.is_ok()) return;
    ended_ = why;
    for (const auto& [raw, request] : reading_) reading.push_back(request);
  }
  fail_pending(why, true, true, kAnySource);
  for (const auto& request : reading) request->cancel(why);
}

void Group::leave(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (left_) return;
    left_ = true;
  }
  std::vector<Id128> engines;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) engines.push_back(options_.members[peer].engine);
  }
  // The answers prove that everything we said before has been delivered, so that closing the connection loses nothing.
  ByteWriter out;
  out.put(id()).put(static_cast<uint32_t>(rank()));
  const std::string body = out.take();
  struct Answers {
    std::mutex mutex;
    std::condition_variable cv;
    size_t missing = 0;
  };
  auto answers = std::make_shared<Answers>();
  const auto links = hub_->links(engines);
  answers->missing = links.size();
  for (const auto& link : links) {
    link->current()->call(kLeave, body, deadline, [answers](Result<rpc::Message>) {
      std::lock_guard lock(answers->mutex);
      --answers->missing;
      answers->cv.notify_all();
    });
  }
  {
    std::unique_lock lock(answers->mutex);
    answers->cv.wait_for(lock, std::chrono::milliseconds(deadline.remaining_ms()),
                         [&] { return answers->missing == 0; });
  }
  abort({Code::closed, "the process group was closed"});
  hub_->remove(id());
}

}  // namespace torch_mooncake::coll
