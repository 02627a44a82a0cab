#include "collectives/hub.h"

#include <unistd.h>

#include "collectives/group.h"
#include "collectives/seats.h"
#include "common/log.h"

namespace torch_mooncake::coll {
namespace {
constexpr uint64_t kEarlyLimitBytes = uint64_t{256} << 20;  // credits keep honest peers far below
}

std::string Member::encode() const {
  ByteWriter out;
  out.put(engine).put(std::string_view(host_id)).put(static_cast<uint32_t>(addresses.size()));
  for (const auto& address : addresses) out.put(std::string_view(address));
  return out.take();
}

Result<Member> Member::decode(std::string_view bytes) {
  ByteReader in(bytes);
  Member member;
  member.engine = in.get_id();
  member.host_id = in.get_string();
  const uint32_t n = in.get_count(4);
  for (uint32_t i = 0; i < n; ++i) member.addresses.push_back(in.get_string());
  if (!in.done()) return {Code::corrupt, "a rank's published address cannot be read"};
  return member;
}

// One a process, never destroyed. A forked child finds its parent's hubs here and passes them by.
struct Hub::Registry {
  std::mutex mutex;
  std::vector<HubPtr> hubs;
};
Hub::Registry& Hub::registry() {
  static auto* registry = new Registry;
  return *registry;
}

Hub::Hub(const HubOptions& options)
    : token_(options.token), heartbeat_limit_ms_(options.heartbeat_limit_ms), pid_(getpid()) {}
Hub::~Hub() { close(); }

Result<HubPtr> Hub::acquire(const HubOptions& options) {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  for (const auto& hub : all.hubs) {
    if (hub->pid_ != getpid() || hub->token_ != options.token) continue;
    std::lock_guard hub_lock(hub->mutex_);
    if (hub->closed_) continue;
    ++hub->holds_;
    return hub;
  }
  TM_ASSIGN(HubPtr hub, create(options));
  all.hubs.push_back(hub);
  return hub;
}

Result<HubPtr> Hub::create(const HubOptions& options) {
  HubPtr hub(new Hub(options));
  TM_TRY(hub->start(options));
  hub->holds_ = 1;
  return hub;
}

std::string Hub::current_token() {
  auto& all = registry();
  std::lock_guard lock(all.mutex);
  for (const auto& hub : all.hubs) {
    std::lock_guard hub_lock(hub->mutex_);
    if (hub->pid_ == getpid() && !hub->closed_) return hub->token_;
  }
  return {};
}

void Hub::leave_all(Deadline deadline) {
  std::vector<HubPtr> hubs;
  {
    auto& all = registry();
    std::lock_guard lock(all.mutex);
    for (const auto& hub : all.hubs) {
      if (hub->pid_ == getpid()) hubs.push_back(hub);
    }
  }
  for (const auto& hub : hubs) {
    for (const auto& group : hub->groups()) group->leave(deadline);
  }
}

Status Hub::start(const HubOptions& options) {
  EngineOptions engine_options;
  engine_options.rpc.name = options.name;
  engine_options.rpc.role = "rank";
  engine_options.rpc.token = options.token;
  engine_options.rpc.host_id = options.host_id;
  engine_options.rpc.heartbeat_ms = options.heartbeat_ms;
  engine_options.rpc.heartbeat_limit_ms = options.heartbeat_limit_ms;
  engine_options.transports = options.transports;
  engine_options.nics = options.nics;
  engine_options.rdma = options.rdma;
  TM_ASSIGN(engine_, Engine::create(std::move(engine_options)));
  std::weak_ptr<Hub> weak = weak_from_this();
  for (uint16_t method = kHello; method <= kBoard; ++method) {
    engine_->rpc().handle(
        method, rpc::RunOn::inline_io,
        [weak, method](const rpc::SessionPtr& session, rpc::Message message, rpc::Responder responder) {
          auto hub = weak.lock();
          const bool taken = hub && hub->on_message(method, session, std::move(message));
          if (method == kBoard && !taken) return responder.fail({Code::closed, "has left the group"});
          if (method == kLeave || method == kBoard) responder.ok();
        });
  }
  engine_->rpc().handle(kSeats, rpc::RunOn::inline_io,
                        [weak](const rpc::SessionPtr& session, rpc::Message message, rpc::Responder responder) {
                          ByteReader in(message.body);
                          const Id128 id = in.get_id();
                          SeatsPtr seats;
                          if (auto hub = weak.lock()) {
                            std::lock_guard lock(hub->mutex_);
                            if (auto it = hub->seats_.find(id); it != hub->seats_.end()) seats = it->second.lock();
                          }
                          if (!seats) return responder.fail({Code::key_not_found, "this process is not in that group"});
                          seats->on_call(session, in, std::move(responder));
                        });
  const bool v6 = options.host.find(':') != std::string::npos;
  auto address = engine_->listen("tcp://" + (v6 ? "[" + options.host + "]" : options.host) + ":0");
  if (!address.is_ok()) return address.status();
  self_.engine = engine_->id();
  self_.host_id = engine_->rpc().self().host_id;
  self_.addresses = {*address};
  return {};
}

void Hub::close() {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (pid_ != getpid()) return;  // a forked child touches nothing of its parent's
  if (engine_) engine_->close();
  progress_->stop();
}

Status Hub::add(const GroupPtr& group) {
  std::lock_guard lock(mutex_);
  if (closed_) return {Code::closed, "the hub is closed"};
  if (!groups_.emplace(group->id(), group).second) return {Code::key_exists, "this process is in that group already"};
  --holds_;
  auto early = early_.extract(group->id());
  if (early.empty()) return {};
  for (auto& message : early.mapped()) {  // under the lock: nothing newer may overtake
    early_bytes_ -= message.body.size();
    deliver(*group, message.method, message.session, std::move(message.body), std::move(message.fds));
  }
  return {};
}

void Hub::remove(const Id128& id) {
  {
    std::lock_guard lock(mutex_);
    if (groups_.erase(id) == 0) return;
    past_.insert(id);
  }
  close_if_unused();
}

void Hub::hold() {
  std::lock_guard lock(mutex_);
  ++holds_;
}

void Hub::add(const SeatsPtr& seats) {
  std::lock_guard lock(mutex_);
  seats_[seats->id()] = seats;
}

void Hub::remove_seats(const Id128& id) {
  std::lock_guard lock(mutex_);
  seats_.erase(id);
}

void Hub::release() {
  {
    std::lock_guard lock(mutex_);
    --holds_;
  }
  close_if_unused();
}

void Hub::close_if_unused() {
  {
    auto& all = registry();
    std::lock_guard lock(all.mutex);
    std::lock_guard hub_lock(mutex_);
    if (holds_ > 0 || !groups_.empty()) return;
    std::erase_if(all.hubs, [&](const HubPtr& hub) { return hub.get() == this; });
  }
  close();
}

std::vector<GroupPtr> Hub::groups() {
  std::lock_guard lock(mutex_);
  std::vector<GroupPtr> out;
  for (const auto& [id, group] : groups_) out.push_back(group);
  return out;
}

// ---- links

LinkPtr Hub::link_of(const Id128& engine) {
  std::lock_guard lock(mutex_);
  auto& link = links_[engine];
  if (!link) link = std::make_shared<Link>(engine);
  return link;
}

std::vector<LinkPtr> Hub::links(const std::vector<Id128>& engines) {
  std::vector<LinkPtr> out;
  std::lock_guard lock(mutex_);
  for (const auto& engine : engines) {
    auto it = links_.find(engine);
    if (it == links_.end()) continue;
    std::lock_guard link_lock(it->second->mutex);
    if (it->second->session && it->second->gone.is_ok()) out.push_back(it->second);
  }
  return out;
}

Result<LinkPtr> Hub::link(const Member& member, Deadline deadline) {
  const LinkPtr link = link_of(member.engine);
  {
    std::unique_lock lock(link->mutex);
    while (link->dialling && link->gone.is_ok()) {
      if (link->dialled.wait_for(
              lock, std::chrono::milliseconds(deadline.remaining_ms() < 0 ? 1000 : deadline.remaining_ms())) ==
              std::cv_status::timeout &&
          deadline.expired()) {
        return {Code::deadline_exceeded, "timed out connecting"};
      }
    }
    if (!link->gone.is_ok()) return link->gone;
    if (link->session) return link;
    link->dialling = true;
  }
  Status failed(Code::peer_lost, "it published no address");
  PeerPtr peer;
  const Deadline silence = heartbeat_limit_ms_ > 0 ? Deadline::after_ms(heartbeat_limit_ms_) : Deadline::never();
  for (const auto& address : member.addresses) {
    auto connected = engine_->connect(address, min(deadline, silence));
    if (connected.is_ok() && (*connected)->identity().engine == member.engine) {
      peer = *connected;
      break;
    }
    failed = connected.is_ok() ? Status(Code::peer_lost, "another process listens at its address " + address)
                               : connected.status().with("connecting to " + address);
    if (failed.code() == Code::deadline_exceeded && silence.expired() && !deadline.expired())
      failed = {Code::peer_lost,
                "no answer from " + address + " within " + std::to_string(heartbeat_limit_ms_) + " ms"};
  }
  rpc::SessionPtr session;
  {
    std::lock_guard lock(link->mutex);
    link->dialling = false;
    link->dialled.notify_all();
    if (!peer) {
      const bool final =
          failed.code() != Code::deadline_exceeded && failed.code() != Code::auth && failed.code() != Code::closed;
      return final ? Status(Code::peer_lost, failed.message()) : failed;
    }
    session = peer->session();
    if (!link->session) link->session = session;
  }
  (void)session->post(kHello, {});  // if it is dead already, attach() finds out
  attach(link, session);
  return link;
}

void Hub::attach(const LinkPtr& link, const rpc::SessionPtr& session) {
  session->set_state(rpc::Session::kCollectivesSlot, link);
  std::weak_ptr<rpc::Session> weak_session = session;
  session->on_close([weak = weak_from_this(), link, weak_session](const Status& why) {
    // The link holds its session: the session lets go of the link, or neither ever goes.
    if (auto over = weak_session.lock()) over->set_state(rpc::Session::kCollectivesSlot, nullptr);
    if (auto hub = weak.lock()) hub->session_closed(link, why);
  });
}

void Hub::session_closed(const LinkPtr& link, const Status& why) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
  }
  {
    std::lock_guard lock(link->mutex);
    if (!link->gone.is_ok()) return;
    link->gone = Status(Code::peer_lost, why.message());
    link->dialled.notify_all();
  }
  for (const auto& group : groups()) {
    if (why.code() == Code::closed) {
      group->abort(why);  // it is our own engine that has ended: nobody else was lost
    } else {
      group->on_engine_gone(link->engine, why);
    }
  }
}

// ---- messages

void Hub::consumed(const rpc::SessionPtr& session, uint64_t nbytes) {
  auto link = std::static_pointer_cast<Link>(session->state(rpc::Session::kCollectivesSlot));
  if (!link) return;
  if (link->owed.fetch_add(static_cast<int64_t>(nbytes)) + static_cast<int64_t>(nbytes) < kEagerWindow / 4) return;
  const int64_t owed = link->owed.exchange(0);
  if (owed == 0) return;  // another thread was first
  ByteWriter out;
  out.put(owed);
  (void)session->post(kCredit, out.take());  // a dead session needs no credit
}

bool Hub::on_message(uint16_t method, const rpc::SessionPtr& session, rpc::Message message) {
  if (method == kHello) {
    const LinkPtr link = link_of(session->peer().engine);
    {
      std::lock_guard lock(link->mutex);
      if (!link->session && !link->dialling) link->session = session;
    }
    attach(link, session);
    return true;
  }
  if (method == kCredit) {
    ByteReader in(message.body);
    const auto nbytes = in.get<int64_t>();
    auto link = std::static_pointer_cast<Link>(session->state(rpc::Session::kCollectivesSlot));
    if (link && in.done() && nbytes > 0) link->credit.fetch_add(nbytes);
    return true;
  }
  ByteReader in(message.body);
  const Id128 id = in.get_id();  // every other message starts with its group
  if (!in.ok()) {
    session->close({Code::corrupt, "malformed collectives message"});
    return true;
  }
  GroupPtr group;
  {
    std::lock_guard lock(mutex_);
    auto it = groups_.find(id);
    if (it != groups_.end()) {
      group = it->second;
    } else if (!closed_ && !past_.contains(id)) {
      early_bytes_ += message.body.size();
      if (early_bytes_ <= kEarlyLimitBytes) {
        early_[id].push_back({method, session, std::move(message.body), std::move(message.fds)});
        return true;
      }
      early_bytes_ -= message.body.size();
    }
  }
  if (group) {
    deliver(*group, method, session, std::move(message.body), std::move(message.fds));
    return true;
  }
  if (method == kEager) consumed(session, message.body.size());
  if (method == kReady) {
    Ready ready;
    if (!ready.decode(message.body)) return false;
    const Verdict verdict{id, kNoRank, ready.send_id, static_cast<uint8_t>(Code::closed),
                          "the receiver has left the group"};
    (void)session->post(kTaken, verdict.encode());
  }
  return false;
}

void Hub::deliver(Group& group, uint16_t method, const rpc::SessionPtr& session, std::string body,
                  std::vector<UniqueFd> fds) {
  bool ok = false;
  switch (method) {
    case kEager: {
      ByteReader in(body);
      Envelope envelope;
      ok = envelope.decode(in);
      const size_t at = body.size() - in.rest().size();
      if (ok) group.on_eager(session, envelope, std::move(body), at);
      break;
    }
    case kReady: {
      Ready ready;
      ok = ready.decode(body);
      if (ok) group.on_ready(session, std::move(ready));
      break;
    }
    case kTaken:
    case kWithdraw: {
      Verdict verdict;
      ok = verdict.decode(body);
      if (ok) method == kTaken ? group.on_taken(verdict) : group.on_withdraw(verdict);
      break;
    }
    case kTrouble: {
      Trouble trouble;
      ok = trouble.decode(body);
      if (ok) group.on_trouble(trouble);
      break;
    }
    case kLeave: {
      ByteReader in(body);
      in.get_id();
      const auto rank = in.get<uint32_t>();
      ok = in.done();
      if (ok) group.on_leave(rank);
      break;
    }
    case kBoard: {
      ByteReader in(body);
      in.get_id();
      const auto rank = in.get<uint32_t>();
      const auto which = in.get<uint8_t>();
      const Id128 segment = in.get_id();
      ok = in.done();
      if (ok) group.on_board(rank, which, segment, fds.empty() ? UniqueFd() : std::move(fds[0]));
      break;
    }
    default:
      break;
  }
  if (!ok) session->close({Code::corrupt, "malformed collectives message " + std::to_string(method)});
}

}  // namespace torch_mooncake::coll
