#include "rpc/acceptor.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <future>

#include "common/clock.h"
#include "rpc/auth.h"
#include "rpc/fork_guard.h"
#include "rpc/session_impl.h"
#include "rpc/wire.h"

namespace torch_mooncake::rpc {

struct Acceptor::Door : EventTarget {
  std::weak_ptr<Acceptor> acceptor;
  Listener listener;
  uint64_t token = 0;
  void on_events(uint32_t) override {
    if (auto a = acceptor.lock()) a->accept_from(*this);
  }
};

struct Acceptor::Visitor : EventTarget, std::enable_shared_from_this<Visitor> {
  Visitor(const Id128& engine, std::string token, AcceptorHandshake::FindSession find)
      : handshake(engine, std::move(token), std::move(find)) {}
  std::weak_ptr<Acceptor> acceptor;
  UniqueFd fd;
  std::string name;  // for the log
  bool is_unix = false;
  int peer_pid = 0;
  int64_t since_ns = steady_ns();
  uint64_t watch_token = 0, timer = 0;
  FrameDecoder decoder{Stage::unproven};
  AcceptorHandshake handshake;
  enum class State { hello, proof, ready } state = State::hello;

  void on_events(uint32_t) override {
    auto self = shared_from_this();
    auto a = acceptor.lock();
    while (a && fd.valid()) {
      char buffer[4096];
      // Never into the next frame: the socket may become a lane after this one.
      ssize_t n = ::recv(fd.get(), buffer, std::min(decoder.needed(), sizeof buffer), MSG_DONTWAIT);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n <= 0) return a->turn_away(*this, {Code::peer_lost, "closed during the handshake"}, false);
      std::string_view in(buffer, static_cast<size_t>(n));
      auto step = decoder.push(in);
      if (step == FrameDecoder::Step::error) return a->turn_away(*this, decoder.status(), false);
      if (step == FrameDecoder::Step::frame) a->on_frame(*this, decoder.header().type, decoder.take_body());
    }
  }
};

Acceptor::Acceptor(std::shared_ptr<Core> core) : core_(std::move(core)), reactor_(*core_->reactors[0]) {}

Status Acceptor::add(Listener listener) {
  auto door = std::make_shared<Door>();
  door->acceptor = weak_from_this();
  door->listener = std::move(listener);
  int fd = door->listener.fd.get();
  std::lock_guard lock(doors_mutex_);
  ForkGuard::add(fd);
  auto token = reactor_.watch(fd, EPOLLIN, door);
  if (!token) {
    ForkGuard::remove(fd);
    return token.status();
  }
  door->token = *token;
  doors_.push_back(std::move(door));
  return {};
}

void Acceptor::accept_from(Door& door) {
  for (int i = 0; i < 16 && !paused_ && !closed_; ++i) {
    if (visitors_.size() >= kMaxPending && !make_room()) return pause();
    UniqueFd fd(::accept4(door.listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.valid()) {
      admit(door, std::move(fd));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      if (complaints_.pass()) log::error("rpc", Status::from_errno("accept", errno).message());
      return pause();  // level-triggered: without a pause this thread would spin
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    }  // else: that connection is gone already (ECONNABORTED, EINTR, network errors)
  }
}

bool Acceptor::make_room() {
  auto silent = std::find_if(visitors_.begin(), visitors_.end(),
                             [](auto& visitor) { return visitor->state == Visitor::State::hello; });
  auto victim = silent != visitors_.end() ? *silent : visitors_.front();
  if (steady_ns() - victim->since_ns < kYoungMs * 1'000'000) return false;
  turn_away(*victim, {Code::busy, "too many connections are waiting to prove themselves"}, false);
  return true;
}

void Acceptor::admit(Door& door, UniqueFd fd) {
  auto find = [this](const Id128& id) -> std::optional<Digest> {
    if (auto found = candidates_.find(id); found != candidates_.end()) return found->second.key;
    if (auto session = core_->find_session(id)) return session->key().key;
    return {};
  };
  auto visitor = std::make_shared<Visitor>(core_->engine, core_->options.token, find);
  visitor->acceptor = weak_from_this();
  visitor->is_unix = door.listener.is_unix;
  visitor->name = visitor->is_unix ? "a Unix socket" : remote_address(fd.get()).to_string();
  visitor->fd = std::move(fd);
  if (visitor->is_unix) {
    auto peer = peer_credentials(visitor->fd.get());
    visitor->peer_pid = peer.pid;
    auto& listed = core_->options.allowed_uids;
    bool allowed = peer.uid == ::geteuid() || std::find(listed.begin(), listed.end(), peer.uid) != listed.end();
    if (!allowed) {
      Status why{Code::auth, "user id " + std::to_string(peer.uid) + " may not use this socket"};
      (void)send_handshake_frame(visitor->fd.get(), FrameType::reject, encode_reject(why));
      if (complaints_.pass()) log::warning("rpc", "closed a connection: " + why.message());
      return;
    }
  }
  tune(visitor->fd.get());
  auto token = reactor_.watch(visitor->fd.get(), EPOLLIN, visitor);
  if (!token) return;
  ForkGuard::add(visitor->fd.get());
  visitor->watch_token = *token;
  visitor->timer = reactor_.add_timer(steady_ns() + kHandshakeMs * 1'000'000, [weak = std::weak_ptr(visitor)] {
    auto late = weak.lock();
    auto acceptor = late ? late->acceptor.lock() : nullptr;
    if (acceptor && late->fd.valid()) {
      acceptor->turn_away(*late, {Code::deadline_exceeded, "no handshake within 2 s"}, false);
    }
  });
  visitors_.push_back(visitor);
}

void Acceptor::pause() {
  if (std::exchange(paused_, true)) return;
  std::lock_guard lock(doors_mutex_);
  for (auto& door : doors_) reactor_.rearm(door->token, door->listener.fd.get(), 0);
  reactor_.add_timer(steady_ns() + 20'000'000, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->resume();
  });
}

void Acceptor::resume() {
  if (closed_ || !std::exchange(paused_, false)) return;
  std::lock_guard lock(doors_mutex_);
  for (auto& door : doors_) reactor_.rearm(door->token, door->listener.fd.get(), EPOLLIN);
}

UniqueFd Acceptor::release(Visitor& visitor) {
  reactor_.cancel_timer(visitor.timer);
  reactor_.unwatch(visitor.watch_token, visitor.fd.get());
  ForkGuard::remove(visitor.fd.get());
  UniqueFd fd = std::move(visitor.fd);
  for (auto* list : {&visitors_, &proven_}) {
    std::erase_if(*list, [&](auto& v) { return v.get() == &visitor; });
  }
  resume();
  return fd;
}

void Acceptor::turn_away(Visitor& visitor, const Status& why, bool tell) {
  auto keep = visitor.shared_from_this();
  if (tell) (void)send_handshake_frame(visitor.fd.get(), FrameType::reject, encode_reject(why));
  // A peer that leaves before it has said anything is a port scan or a health check: nothing to report.
  if (why.code() != Code::peer_lost) {
    if (auto n = complaints_.pass()) {
      log::warning("rpc", core_->options.name + " closed a connection from " + visitor.name + ": " + why.to_string() +
                              (n > 1 ? " (and " + std::to_string(n - 1) + " more)" : ""));
    }
  }
  UniqueFd fd = release(visitor);
  // Without unread bytes left behind, close() sends FIN and not RST, and the reason above arrives.
  char rest[512];
  while (tell && ::recv(fd.get(), rest, sizeof rest, MSG_DONTWAIT) > 0) {
  }
  for (auto it = candidates_.begin(); it != candidates_.end(); ++it) {
    if (it->second.control == &visitor) {  // the first connection keeps control
      it->second.control = nullptr;
      reactor_.rearm(it->second.first->watch_token, it->second.first->fd.get(), EPOLLIN);
      return;
    }
    if (it->second.first == &visitor) {
      auto* control = it->second.control;
      candidates_.erase(it);
      if (control) turn_away(*control, {Code::peer_lost, "its session is over"}, false);
      return;
    }
  }
}

void Acceptor::on_frame(Visitor& visitor, FrameType type, std::string body) {
  auto keep = visitor.shared_from_this();
  using State = Visitor::State;
  Status status;
  if (type == FrameType::reject) {
    return turn_away(visitor, decode_reject(body), false);
  } else if (visitor.state == State::hello && type == FrameType::hello) {
    status = greet(visitor, body);
  } else if (visitor.state == State::proof && type == FrameType::proof) {
    status = verify(visitor, body);
  } else if (visitor.state == State::ready && type == FrameType::ready) {
    status = begin_session(visitor, body);
  } else {
    status = {Code::corrupt, "a handshake frame out of turn"};
  }
  if (!status && visitor.fd.valid()) turn_away(visitor, status, true);
}

Status Acceptor::greet(Visitor& visitor, const std::string& body) {
  TM_ASSIGN(auto challenge, visitor.handshake.on_hello(body));
  visitor.state = Visitor::State::proof;
  if (!send_handshake_frame(visitor.fd.get(), FrameType::challenge, challenge)) {
    return {Code::peer_lost, "does not read"};
  }
  return {};
}

Status Acceptor::verify(Visitor& visitor, const std::string& body) {
  TM_ASSIGN(auto welcome, visitor.handshake.on_proof(body));
  auto& claim = visitor.handshake.claim();
  const SessionKey& key = visitor.handshake.session();
  Status lost{Code::peer_lost, "does not read"};
  visitor.decoder.set_stage(Stage::proven);
  visitor.state = Visitor::State::ready;
  auto place = std::find_if(visitors_.begin(), visitors_.end(), [&](auto& v) { return v.get() == &visitor; });
  proven_.splice(proven_.end(), visitors_, place);
  if (!claim) {  // a new session
    ByteWriter identity;
    core_->identity().encode(identity);
    candidates_.emplace(key.id, Candidate{key.key, &visitor});
    if (!send_handshake_frame(visitor.fd.get(), FrameType::welcome, welcome)) return lost;
    if (!send_handshake_frame(visitor.fd.get(), FrameType::identity, identity.take())) return lost;
    return {};
  }
  if (auto found = candidates_.find(claim->session); found != candidates_.end()) {
    if (claim->index != 0 || !visitor.is_unix || found->second.control)
      return {Code::corrupt, "lane before its session"};
    // READY comes here; what comes on the first connection meanwhile is for the session.
    found->second.control = &visitor;
    auto* first = found->second.first;
    reactor_.rearm(first->watch_token, first->fd.get(), 0);
    if (!send_handshake_frame(visitor.fd.get(), FrameType::welcome, welcome)) return lost;
    return {};
  }
  auto session = core_->find_session(claim->session);
  if (!session) return {Code::peer_lost, "the session of this lane is over"};
  if (claim->index == 0) return {Code::corrupt, "a second control lane"};
  if (!send_handshake_frame(visitor.fd.get(), FrameType::welcome, welcome)) return lost;
  int peer_pid = visitor.peer_pid;
  auto lane = session->add_lane(release(visitor), claim->index, peer_pid);
  if (!lane) return lane.status();  // the socket is closed: the other side sees its lane die
  return (*lane)->start();
}

Status Acceptor::begin_session(Visitor& visitor, const std::string& body) {
  auto found = std::find_if(candidates_.begin(), candidates_.end(), [&](auto& entry) {
    return entry.second.control ? entry.second.control == &visitor : entry.second.first == &visitor;
  });
  if (found == candidates_.end()) return {Code::corrupt, "READY on the wrong connection"};
  ByteReader reader(body);
  SessionImpl::Setup setup;
  setup.peer = Identity::decode(reader);
  if (!reader.done() || setup.peer.engine != found->second.first->handshake.peer_engine()) {
    return {Code::corrupt, "an identity that does not fit"};
  }
  Candidate candidate = found->second;
  setup.key = {candidate.key, found->first};
  candidates_.erase(found);
  auto session = std::make_shared<SessionImpl>(core_, std::move(setup));
  std::vector<std::shared_ptr<LaneImpl>> lanes;
  Visitor* first = candidate.first;
  uint32_t index = 0;
  for (Visitor* v : {candidate.control, first}) {
    if (!v) continue;
    int peer_pid = v->peer_pid;
    TM_ASSIGN(auto lane, session->add_lane(release(*v), index++, peer_pid));
    lanes.push_back(std::move(lane));
  }
  core_->begin_session(session, lanes);
  return {};
}

void Acceptor::close_now() {
  if (std::exchange(closed_, true)) return;
  for (auto* list : {&visitors_, &proven_}) {
    while (!list->empty()) turn_away(*list->front(), {Code::peer_lost, "closing"}, false);
  }
  std::lock_guard lock(doors_mutex_);
  for (auto& door : doors_) {
    reactor_.unwatch(door->token, door->listener.fd.get());
    ForkGuard::remove(door->listener.fd.get());
    door->listener.remove_path();
    door->listener.fd.reset();
  }
  doors_.clear();
}

void Acceptor::close() {
  if (reactor_.in_thread()) return close_now();
  auto done = std::make_shared<std::promise<void>>();
  auto waits = done->get_future();
  bool posted = reactor_.post([self = shared_from_this(), done] {
    self->close_now();
    done->set_value();
  });
  if (posted) waits.wait();
}

}  // namespace torch_mooncake::rpc
