#include <chrono>
#include <condition_variable>

#include "common/clock.h"
#include "rpc/responder_state.h"
#include "rpc/session_impl.h"

namespace torch_mooncake::rpc {
namespace {

constexpr int64_t kSpinNs = 50'000;
constexpr size_t kMaxErrorMessage = 64 << 10;

// To the session that brought the call, if it still lives.
struct Answer final : Responder::State {
  Answer(const std::shared_ptr<SessionImpl>& s, uint64_t call) : session(s), id(call) {}
  void ok(std::string body, std::vector<UniqueFd> fds) override {
    if (auto s = session.lock()) s->answer(id, std::move(body), std::move(fds));
  }
  void fail(const Status& status) override {
    if (auto s = session.lock()) s->answer_error(id, status);
  }
  const std::weak_ptr<SessionImpl> session;
  const uint64_t id;
};

// The caller of call_sync and whoever completes its call.
struct Waiter {
  std::mutex mutex;
  std::condition_variable cv;
  std::atomic<bool> ready{false};
  std::optional<Result<Message>> result;
  std::function<void(Message)> late;  // the caller has gone

  void set(Result<Message> r) {
    std::unique_lock lock(mutex);
    if (late) {
      lock.unlock();
      if (r) late(std::move(*r));
      return;
    }
    result = std::move(r);
    ready.store(true, std::memory_order_release);
    cv.notify_one();
  }
  // False: answered just now.
  bool leave(std::function<void(Message)> handler) {
    std::lock_guard lock(mutex);
    if (!result) late = std::move(handler);
    return !result;
  }
  bool is_ready() const { return ready.load(std::memory_order_acquire); }
  bool wait(Deadline deadline, int64_t spin_until_ns) {
    while (steady_ns() < spin_until_ns && !is_ready()) {
    }
    std::unique_lock lock(mutex);
    if (deadline.is_never()) {
      cv.wait(lock, [&] { return result.has_value(); });
      return true;
    }
    auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.ns()));
    return cv.wait_until(lock, until, [&] { return result.has_value(); });
  }
};

std::string encode_error(const Status& status) {
  ByteWriter w;
  w.put(status.code()).put(std::string_view(status.message()).substr(0, kMaxErrorMessage));
  return w.take();
}

Status decode_error(std::string_view body) {
  ByteReader r(body);
  auto code = r.get<uint8_t>();
  auto message = r.get_string();
  if (!r.done() || code == 0 || code > static_cast<uint8_t>(Code::internal)) {
    return {Code::corrupt, "an error answer that cannot be read"};
  }
  return {static_cast<Code>(code), message};
}

FrameHeader header_of(FrameType type, uint16_t method, uint64_t id, size_t body_bytes, size_t nfds) {
  FrameHeader header;
  header.type = type;
  header.method = method;
  header.id = id;
  header.body_bytes = static_cast<uint32_t>(body_bytes);
  header.nfds = static_cast<uint8_t>(nfds);
  return header;
}

}  // namespace

Status SessionImpl::check_message(size_t body_bytes, const std::vector<UniqueFd>& fds) const {
  if (body_bytes > kMaxBody) {
    return {Code::invalid_argument, "a message of " + std::to_string(body_bytes) + " bytes; the limit is 16 MiB"};
  }
  if (fds.size() > kMaxFds) return {Code::invalid_argument, "more than 64 file descriptors in one message"};
  auto lane = control();
  if (!fds.empty() && lane && !lane->is_unix()) {
    return {Code::unsupported, "file descriptors need a Unix socket; " + lane->describe() + " is not one"};
  }
  return {};
}

Status SessionImpl::begin_call(uint16_t method, std::string body, std::vector<UniqueFd> fds, bool awaited,
                               CallDone& done, uint64_t& id) {
  TM_TRY(check_message(body.size(), fds));
  {
    std::lock_guard lock(mutex_);
    if (ended_) return status_;
    id = next_call_++;
    calls_.emplace(id, Pending{std::move(done), 0});
  }
  auto lane = control();
  auto type = awaited && lane && lane->callers_spin() ? FrameType::hot_call : FrameType::call;
  auto header = header_of(type, method, id, body.size(), fds.size());
  Status sent = send_message(header, std::move(body), std::move(fds));
  if (sent) return sent;
  // If the call is no longer there, the end of the session has answered it.
  auto pending = take_call(id);
  if (!pending) return {};
  done = std::move(pending->done);
  return sent;
}

std::optional<SessionImpl::Pending> SessionImpl::take_call(uint64_t id) {
  std::lock_guard lock(mutex_);
  auto found = calls_.find(id);
  if (found == calls_.end()) return {};
  auto pending = std::move(found->second);
  calls_.erase(found);
  return pending;
}

void SessionImpl::complete(uint64_t id, Result<Message> result) {
  auto pending = take_call(id);
  if (!pending) return;  // its deadline passed: the answer is late, and dropped
  if (pending->timer) reactor().cancel_timer(pending->timer);
  pending->done(std::move(result));
}

void SessionImpl::call(uint16_t method, std::string body, Deadline deadline, CallDone done, std::vector<UniqueFd> fds,
                       bool awaited) {
  if (core_->forked()) return done(Status(Code::forked, "this session belongs to the parent process"));
  auto fail = [&](Status status) {
    auto shared = std::make_shared<CallDone>(std::move(done));
    auto tell = [shared, status] { (*shared)(status); };
    if (!reactor_->post(tell)) tell();
  };
  if (deadline.expired()) return fail({Code::deadline_exceeded, "the deadline had passed before the call"});
  uint64_t id = 0;
  Status begun = begin_call(method, std::move(body), std::move(fds), awaited, done, id);
  if (!begun) return fail(begun);
  if (deadline.is_never()) return;
  auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  std::weak_ptr<SessionImpl> weak = self;
  uint64_t timer = reactor().add_timer(deadline.ns(), [weak, id, method] {
    if (auto session = weak.lock()) {
      session->complete(id, Status(Code::deadline_exceeded,
                                   "no answer from " + session->peer().name + " to method " + std::to_string(method)));
    }
  });
  std::lock_guard lock(mutex_);
  if (auto found = calls_.find(id); found != calls_.end()) {
    found->second.timer = timer;
  } else {
    reactor().cancel_timer(timer);  // answered meanwhile
  }
}

Result<Message> SessionImpl::call_sync(uint16_t method, std::string body, Deadline deadline, std::vector<UniqueFd> fds,
                                       std::function<void(Message)> late) {
  if (core_->forked()) return {Code::forked, "this session belongs to the parent process"};
  if (core_->in_own_thread()) {
    for (auto& r : core_->reactors) {
      if (r->in_thread()) return {Code::internal, "call_sync on an I/O thread would wait for itself"};
    }
  }
  if (deadline.expired()) return {Code::deadline_exceeded, "the deadline had passed before the call"};
  auto waiter = std::make_shared<Waiter>();
  CallDone done = [waiter](Result<Message> result) { waiter->set(std::move(result)); };
  uint64_t id = 0;
  TM_TRY(begin_call(method, std::move(body), std::move(fds), true, done, id));
  int64_t spin_until_ns = steady_ns() + kSpinNs;
  bool answered = receive_until([&] { return waiter->is_ready(); }, deadline, spin_until_ns);
  if (!answered && !waiter->wait(deadline, spin_until_ns)) {
    if (late ? waiter->leave(std::move(late)) : take_call(id).has_value()) {
      return {Code::deadline_exceeded, "no answer from " + setup_.peer.name + " to method " + std::to_string(method)};
    }
    (void)waiter->wait(Deadline::never(), 0);  // it is being completed just now
  }
  return std::move(*waiter->result);
}

bool SessionImpl::receive_until(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns) {
  if (core_->forked()) return done();
  auto lane = control();
  return lane ? lane->receive_until(done, deadline, spin_until_ns) : done();
}

Status SessionImpl::post(uint16_t method, std::string body) {
  if (core_->forked()) return {Code::forked, "this session belongs to the parent process"};
  TM_TRY(check_message(body.size(), {}));
  auto header = header_of(FrameType::post, method, 0, body.size(), 0);
  return send_message(header, std::move(body), {});
}

void SessionImpl::answer(uint64_t id, std::string body, std::vector<UniqueFd> fds) {
  if (core_->forked()) return;
  if (Status fits = check_message(body.size(), fds); !fits) return answer_error(id, fits);
  auto header = header_of(FrameType::reply, 0, id, body.size(), fds.size());
  (void)send_message(header, std::move(body), std::move(fds));  // fails if the session is over: the caller knows
}

void SessionImpl::answer_error(uint64_t id, const Status& status) {
  if (core_->forked()) return;
  std::string body = encode_error(status.is_ok() ? Status(Code::internal, "failed with the status ok") : status);
  auto header = header_of(FrameType::error, 0, id, body.size(), 0);
  (void)send_message(header, std::move(body), {});
}

void SessionImpl::on_frame(LaneImpl& lane, const FrameHeader& header, std::string body, std::vector<UniqueFd> fds) {
  bool is_call = header.type == FrameType::call || header.type == FrameType::hot_call;
  bool is_message =
      is_call || header.type == FrameType::post || header.type == FrameType::reply || header.type == FrameType::error;
  if (is_message && !accept_message(lane, header)) return;
  switch (header.type) {
    case FrameType::control:
      return on_control_frame(lane, static_cast<uint32_t>(header.id));
    case FrameType::acknowledged: {
      std::lock_guard lock(mutex_);
      return forget_acknowledged(static_cast<uint32_t>(header.id));
    }
    case FrameType::ping: {
      FrameHeader pong;
      pong.type = FrameType::pong;
      (void)lane.send_control(pong);
      return;
    }
    case FrameType::reply:
      return complete(header.id, Message{std::move(body), std::move(fds)});
    case FrameType::error:
      return complete(header.id, decode_error(body));
    case FrameType::call:
    case FrameType::hot_call:
    case FrameType::post:
      break;
    default:
      return;  // pong: its arrival was the message
  }
  auto self = std::static_pointer_cast<SessionImpl>(shared_from_this());
  Responder responder;
  if (is_call) {
    if (header.type == FrameType::hot_call && lane.reactor().in_thread()) lane.expect_soon();
    responder = Responder(std::make_shared<Answer>(self, header.id));
  }
  auto found = core_->methods.find(header.method);
  if (found == core_->methods.end()) {
    Status unknown{Code::unsupported, self_.name + " does not serve method " + std::to_string(header.method)};
    if (header.type == FrameType::post) log::warning("rpc", unknown.message() + ", posted by " + setup_.peer.name);
    return responder.fail(unknown);
  }
  Message message{std::move(body), std::move(fds)};
  if (found->second.where == RunOn::inline_io) {
    return found->second.handler(self, std::move(message), std::move(responder));
  }
  struct Task {
    SessionPtr session;
    Message message;
    Responder responder;
  };
  auto task = std::make_shared<Task>(Task{self, std::move(message), std::move(responder)});
  core_->worker.post([&method = found->second, task] {
    method.handler(task->session, std::move(task->message), std::move(task->responder));
  });
}

}  // namespace torch_mooncake::rpc
