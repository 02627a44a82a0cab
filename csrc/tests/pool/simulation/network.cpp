#include "pool/simulation/network.h"

#include <algorithm>

#include "common/crc32c.h"
#include "pool/messages.h"
#include "rpc/responder_state.h"

namespace torch_mooncake::pool::sim {
namespace {

constexpr int64_t kHeartbeatLimit = 5 * kSecond;  // of silence, then a session is over
constexpr int64_t kHandshakeMs = 2000;

class SimLane final : public rpc::Lane {
 public:
  explicit SimLane(SimSession& session, bool is_unix) : session_(session), is_unix_(is_unix) {}
  rpc::Session& session() override { return session_; }
  uint32_t index() const override { return 0; }
  bool is_unix() const override { return is_unix_; }
  std::string describe() const override { return "simulated"; }
  bool alive() const override { return session_.alive(); }
  Status send_bulk(rpc::BulkFrame) override { return {Code::unsupported, "simulated lanes carry no frames"}; }
  uint64_t queued_bytes() const override { return 0; }
  uint64_t bytes_sent() const override { return 0; }
  uint64_t bytes_received() const override { return 0; }
  const rpc::Rail& rail() const override { return rail_; }
  rpc::LaneProgress progress() const override { return {}; }
  int64_t silent_ns() const override { return 0; }
  std::vector<std::pair<std::string, std::string>> tuning() const override { return {}; }
  void kill(const Status& why) override { session_.end(why); }

 private:
  SimSession& session_;
  const bool is_unix_;
  const rpc::Rail rail_;
};

struct Answer final : rpc::Responder::State {
  Answer(std::weak_ptr<SimSession> s, uint64_t call) : session(std::move(s)), id(call) {}
  void ok(std::string body, std::vector<UniqueFd> fds) override {
    if (const auto s = session.lock()) s->answer(id, rpc::Message{std::move(body), std::move(fds)});
  }
  void fail(const Status& status) override {
    if (const auto s = session.lock()) s->answer(id, status);
  }
  const std::weak_ptr<SimSession> session;
  const uint64_t id;
};

std::string name_of(uint16_t method) {
  static const std::map<uint16_t, const char*> kNames = {{kAttach, "attach"},
                                                         {kDetach, "detach"},
                                                         {kView, "view"},
                                                         {kReserve, "reserve"},
                                                         {kGiveBack, "give back"},
                                                         {kPutMany, "put many"},
                                                         {kBegin, "begin"},
                                                         {kCommit, "commit"},
                                                         {kRemoveMany, "remove"},
                                                         {kLookup, "lookup"},
                                                         {kExists, "exists"},
                                                         {kDescribe, "describe"},
                                                         {kKeys, "keys"},
                                                         {kStat, "stat"},
                                                         {kTouch, "touch"},
                                                         {kGrant, "grant"},
                                                         {kJoin, "join"},
                                                         {kAnnounce, "announce"},
                                                         {kBeat, "beat"},
                                                         {kMark, "mark"},
                                                         {kEvicted, "evicted"},
                                                         {kLeave, "leave"},
                                                         {kReserveMany, "reserve many"}};
  const auto it = kNames.find(method);
  return it == kNames.end() ? std::to_string(method) : it->second;
}

std::string text_of(uint16_t method, const std::string& body) {
  static constexpr const char* kMarks[] = {"commit", "finalize", "supersede", "drop", "pin"};
  if (method != kMark) return name_of(method);
  const auto mark = decode<Mark>(body);
  if (!mark.is_ok()) return "a mark that cannot be read";
  return "mark: " + std::string(kMarks[static_cast<size_t>(mark->what)]) + " " + std::to_string(mark->extent.index) +
         "." + std::to_string(mark->extent.generation) + " in view " + std::to_string(mark->view);
}

}  // namespace

Network* network = nullptr;

// --- links ---

int64_t Network::arrival(const Process* from, const Process* to) {
  const bool local = from->host == to->host;
  int64_t after = local ? world->between(3, 60) * kUs : world->between(20, 400) * kUs;
  if (world->chance(slow)) after = world->between(1, 40) * kMs;
  if (world->chance(slow / 20)) after = world->between(100, 1500) * kMs;
  int64_t at = world->now() + after;
  if (const auto it = parted_until_.find(std::minmax<const Host*>(from->host, to->host)); it != parted_until_.end())
    at = std::max(at, it->second + after);  // sent again until it gets through
  return at;
}

bool Network::parted(const Host* a, const Host* b) const {
  const auto it = parted_until_.find(std::minmax<const Host*>(a, b));
  return it != parted_until_.end() && it->second > world->now();
}

void Network::partition(const Host* a, const Host* b, int64_t until) {
  int64_t& known = parted_until_[std::minmax<const Host*>(a, b)];
  known = std::max(known, until);
}

// --- endpoint ---

SimEndpoint::SimEndpoint(Process* process, rpc::Identity self) : process_(process), self_(std::move(self)) {}

Status SimEndpoint::listen_fd(UniqueFd, const std::string& address) { return listen(address).status(); }

Result<std::string> SimEndpoint::listen(const std::string& address) {
  self_.addresses.push_back(address);
  network->listeners[address] = this;
  return address;
}

const rpc::Handler* SimEndpoint::handler(uint16_t method) const {
  const auto it = handlers_.find(method);
  return it == handlers_.end() ? nullptr : &it->second;
}

// The other side makes its session when it gets round to it; a stopped process does not, within the handshake's time.
Result<rpc::SessionPtr> SimEndpoint::connect(const std::string& address, Deadline deadline, bool reuse) {
  if (closed_) return {Code::closed, "the engine is closed"};
  if (reuse)
    for (const auto& s : sessions_)
      if (s->alive() && s->is_initiator() && s->address() == address) return rpc::SessionPtr(s);
  struct Attempt {
    std::shared_ptr<SimSession> ours;
    bool refused = false, given_up = false;
    WaitList done;
  };
  auto attempt = std::make_shared<Attempt>();
  const auto it = network->listeners.find(address);
  if (it == network->listeners.end()) {
    world->sleep_until(world->now() + world->between(20, 500) * kUs);
    return {Code::peer_lost, address + ": connection refused"};
  }
  SimEndpoint* target = it->second;
  const bool is_unix = address.starts_with("unix://");
  world->start_at(
      network->arrival(process_, target->process_), target->process_, [this, target, attempt, address, is_unix] {
        if (attempt->given_up || target->closed_ || closed_ || !process_->alive) return;
        auto ours = std::make_shared<SimSession>(this, target->self_, true, is_unix, address);
        auto theirs = std::make_shared<SimSession>(target, self_, false, is_unix, "");
        SimSession::join(ours, theirs);
        target->add(theirs);
        world->start_at(network->arrival(target->process_, process_), process_, [this, attempt, ours, theirs] {
          if (attempt->given_up || closed_) return theirs->end({Code::peer_lost, "the handshake was given up"}, true);
          add(ours);
          attempt->ours = ours;
          attempt->done.wake();
        });
      });
  const Deadline until = min(deadline, Deadline::after_ms(kHandshakeMs));
  while (!attempt->ours && !until.expired()) attempt->done.wait(process_->host->when(until.ns()));
  if (attempt->ours) return rpc::SessionPtr(attempt->ours);
  attempt->given_up = true;
  if (deadline.expired()) return {Code::deadline_exceeded, "connecting to " + address};
  return {Code::peer_lost, address + " did not answer"};
}

void SimEndpoint::add(const std::shared_ptr<SimSession>& session) {
  sessions_.push_back(session);
  for (const auto& fn : on_session_) fn(session);
}

void SimEndpoint::forget(SimSession* session) {
  std::erase_if(sessions_, [session](const auto& s) { return s.get() == session; });
}

std::vector<rpc::SessionPtr> SimEndpoint::sessions() const { return {sessions_.begin(), sessions_.end()}; }

uint64_t SimEndpoint::add_timer(Deadline when, std::function<void()> fn) {
  const uint64_t id = next_timer_++;
  timers_[id] = std::move(fn);
  const int64_t at = process_->host->when(when.ns());
  if (at == INT64_MAX) return id;
  world->start_at(std::max(at, world->now()) + world->between(10, 300) * kUs, process_, [this, id] {
    auto timer = timers_.extract(id);
    if (!closed_ && timer) timer.mapped()();
  });
  return id;
}

void SimEndpoint::close() {
  if (closed_) return;
  closed_ = true;
  timers_.clear();
  std::erase_if(network->listeners, [this](const auto& l) { return l.second == this; });
  for (const auto& s : std::vector(sessions_)) s->end({Code::closed, "the engine is closed"});
}

void SimEndpoint::died(bool silent) {
  closed_ = true;
  std::erase_if(network->listeners, [this](const auto& l) { return l.second == this; });
  for (const auto& s : sessions_) {
    s->forget_inbox();
    const auto other = s->other();
    if (!other) continue;
    const int64_t at = silent ? world->now() + kHeartbeatLimit + world->between(0, 500) * kMs
                              : network->arrival(process_, other->process());
    world->start_at(at, other->process(), [other] { other->end({Code::peer_lost, "the peer is gone"}, true); });
  }
}

// --- session ---

SimSession::SimSession(SimEndpoint* endpoint, rpc::Identity peer, bool initiator, bool is_unix, std::string address)
    : endpoint_(endpoint),
      peer_(std::move(peer)),
      initiator_(initiator),
      is_unix_(is_unix),
      address_(std::move(address)),
      lane_(std::make_shared<SimLane>(*this, is_unix)) {}

void SimSession::join(const std::shared_ptr<SimSession>& a, const std::shared_ptr<SimSession>& b) {
  a->other_ = b;
  b->other_ = a;
}

std::vector<std::shared_ptr<rpc::Lane>> SimSession::lanes() const {
  if (!alive_) return {};
  return {lane_};
}

Result<std::shared_ptr<rpc::Lane>> SimSession::open_lane(const rpc::LaneTarget&, Deadline) {
  return {Code::unsupported, "a simulated session has one lane"};
}

void SimSession::send(std::function<void(SimSession&)> fn) {
  const auto other = other_.lock();
  if (!alive_ || !other) return;
  last_arrival_ = std::max(last_arrival_ + 1, network->arrival(process(), other->process()));
  world->at(last_arrival_, [other, fn = std::move(fn)]() mutable { other->receive(std::move(fn)); });
}

void SimSession::receive(std::function<void(SimSession&)> fn) {
  if (!alive_ || !process()->alive) return;
  inbox_.push_back(std::move(fn));
  if (std::exchange(handling_, true)) return;
  world->start(process(), [self = std::static_pointer_cast<SimSession>(shared_from_this())] { self->handle_inbox(); });
}

void SimSession::handle_inbox() {
  while (!inbox_.empty() && alive_) {
    const auto fn = std::move(inbox_.front());
    inbox_.pop_front();
    fn(*this);
  }
  inbox_.clear();
  handling_ = false;
}

void SimSession::call(uint16_t method, std::string body, Deadline deadline, rpc::CallDone done,
                      std::vector<UniqueFd> fds, bool) {
  if (!alive_) return done(why_);
  const uint64_t id = next_call_++;
  pending_[id] = {method, std::move(done)};
  const int64_t until = process()->host->when(deadline.ns());
  if (until != INT64_MAX)
    world->start_at(until, process(), [self = std::static_pointer_cast<SimSession>(shared_from_this()), id, method] {
      self->complete(id, Status(Code::deadline_exceeded, "no answer to " + name_of(method)));
    });
  auto shared = std::make_shared<std::vector<UniqueFd>>(std::move(fds));
  send([method, body = std::move(body), shared, id](SimSession& at) mutable {
    at.arrived(method, std::move(body), std::move(*shared), id);
  });
}

Result<rpc::Message> SimSession::call_sync(uint16_t method, std::string body, Deadline deadline,
                                           std::vector<UniqueFd> fds, std::function<void(rpc::Message)>) {
  struct Waiter {
    std::optional<Result<rpc::Message>> result;
    WaitList list;
  };
  auto waiter = std::make_shared<Waiter>();
  call(
      method, std::move(body), deadline,
      [waiter](Result<rpc::Message> r) {
        waiter->result.emplace(std::move(r));
        waiter->list.wake();
      },
      std::move(fds), true);
  while (!waiter->result) waiter->list.wait(INT64_MAX);
  return std::move(*waiter->result);
}

Status SimSession::post(uint16_t method, std::string body) {
  if (!alive_) return why_;
  send([method, body = std::move(body)](SimSession& at) mutable { at.arrived(method, std::move(body), {}, {}); });
  return {};
}

void SimSession::arrived(uint16_t method, std::string body, std::vector<UniqueFd> fds, std::optional<uint64_t> id) {
  world->trace("call", method << 16 | crc32c(body.data(), body.size()) >> 16,
               [&] { return text_of(method, body) + ", from " + peer_.name; });
  const auto self = std::static_pointer_cast<SimSession>(shared_from_this());
  rpc::Responder responder;
  if (id) responder = rpc::Responder(std::make_shared<Answer>(self, *id));
  const rpc::Handler* handler = endpoint_->handler(method);
  if (!handler) return responder.fail({Code::unsupported, "no such method"});
  if (network->tamper && network->tamper(process(), method, body, responder, [self, handler](std::string b) {
        (*handler)(self, rpc::Message{std::move(b), {}}, rpc::Responder());
      }))
    return;
  (*handler)(self, rpc::Message{std::move(body), std::move(fds)}, std::move(responder));
}

void SimSession::answer(uint64_t id, Result<rpc::Message> result) {
  auto shared = std::make_shared<Result<rpc::Message>>(std::move(result));
  send([shared, id](SimSession& at) { at.complete(id, std::move(*shared)); });
}

void SimSession::complete(uint64_t id, Result<rpc::Message> result) {
  auto node = pending_.extract(id);
  if (!node) return;
  const uint16_t method = node.mapped().method;
  world->trace("answer", result.is_ok() ? crc32c(result->body.data(), result->body.size()) : 0, [&] {
    return name_of(method) + " by " + peer_.name + ": " + (result.is_ok() ? "ok" : result.status().to_string());
  });
  if (result.is_ok()) {
    for (const UniqueFd& fd : result->fds) process()->fds.insert(fd.get());
    if (network->tamper_answer) network->tamper_answer(process(), method, *result);
  }
  node.mapped().done(std::move(result));
}

void SimSession::on_close(std::function<void(const Status&)> fn) {
  if (closed_told_) return fn(why_);
  on_close_.push_back(std::move(fn));
}

void SimSession::end(const Status& why, bool silent) {
  if (!alive_) return;
  const auto self = std::static_pointer_cast<SimSession>(shared_from_this());
  alive_ = false;
  why_ = why;
  inbox_.clear();
  endpoint_->forget(this);
  ++process()->broken;
  world->trace("session over", 0, [&] { return "with " + peer_.name + ": " + why.to_string(); });
  if (const auto other = other_.lock(); other && !silent)
    world->start_at(network->arrival(process(), other->process()), other->process(), [other] {
      other->end({Code::peer_lost, "the peer has ended the session"}, true);
    });
  world->start(process(), [self] {
    for (auto& [id, pending] : std::exchange(self->pending_, {})) pending.done(self->why_);
    self->closed_told_ = true;
    for (const auto& fn : std::exchange(self->on_close_, {})) fn(self->why_);
  });
}

}  // namespace torch_mooncake::pool::sim
