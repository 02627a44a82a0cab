#include "rpc/core.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "common/clock.h"
#include "common/process.h"
#include "common/random.h"
#include "rpc/session_impl.h"

namespace torch_mooncake::rpc {

namespace {
std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string text;
  in >> text;
  return text;
}
}  // namespace

void Worker::post(std::function<void()> task) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->stopping) return;
    state_->tasks.push_back(std::move(task));
  }
  state_->cv.notify_one();
  std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) return;
  thread_ = std::thread([state = state_] {
    std::unique_lock lock(state->mutex);
    while (true) {
      state->cv.wait(lock, [&] { return state->stopping || !state->tasks.empty(); });
      if (state->stopping) return;
      auto next = std::move(state->tasks.front());
      state->tasks.pop_front();
      lock.unlock();
      next();
      next = nullptr;
      lock.lock();
    }
  });
}

void Worker::stop() {
  std::deque<std::function<void()>> dropped;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    dropped.swap(state_->tasks);
  }
  state_->cv.notify_all();
  std::lock_guard lock(thread_mutex_);
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

bool Worker::in_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

Core::Core(EndpointOptions o)
    : options([&] {
        if (o.host_id.empty()) o.host_id = boot_id();
        return std::move(o);
      }()),
      engine(random_id()),
      pid(::getpid()),
      nonce_(std::make_unique<Id128>(random_id())) {
  auto identity = std::make_unique<Identity>();
  identity->engine = engine;
  identity->host_id = options.host_id;
  identity->name = options.name;
  identity->role = options.role;
  identity->pid = static_cast<uint32_t>(pid);
  identity->nonce_address = reinterpret_cast<uint64_t>(nonce_->data());
  identity->nonce = *nonce_;
  identities_.push_back(std::move(identity));
}

Result<std::shared_ptr<Core>> Core::create(EndpointOptions options) {
  if (options.io_threads < 1 || options.io_threads > 4) {
    return {Code::invalid_argument, "io_threads must be 1 to 4, not " + std::to_string(options.io_threads)};
  }
  if (options.heartbeat_ms < 0 || (options.heartbeat_ms > 0 && options.heartbeat_limit_ms < 2 * options.heartbeat_ms)) {
    return {Code::invalid_argument, "heartbeat_limit_ms must be at least twice heartbeat_ms"};
  }
  if (options.name.size() > 200 || options.role.size() > 64 || options.host_id.size() > 200) {
    return {Code::invalid_argument, "name, role or host_id is too long"};
  }
  std::shared_ptr<Core> core(new Core(std::move(options)));
  for (int i = 0; i < core->options.io_threads; ++i) {
    auto reactor = Reactor::create("tm-io-" + std::to_string(i));
    if (!reactor) {
      for (auto& r : core->reactors) r->stop();
      return reactor.status();
    }
    core->reactors.push_back(std::move(*reactor));
  }
  return core;
}

bool Core::forked() const { return process_id() != pid; }

Status Core::usable() const {
  if (forked()) return {Code::forked, "this endpoint belongs to the parent process"};
  if (closing) return {Code::closed, "this endpoint is closed"};
  return {};
}

bool Core::in_own_thread() const {
  if (worker.in_thread()) return true;
  return std::any_of(reactors.begin(), reactors.end(), [](auto& r) { return r->in_thread(); });
}

const Identity& Core::identity() const {
  std::lock_guard lock(mutex_);
  return *identities_.back();
}

void Core::add_addresses(const std::vector<std::string>& addresses) {
  std::lock_guard lock(mutex_);
  auto next = std::make_unique<Identity>(*identities_.back());
  next->addresses.insert(next->addresses.end(), addresses.begin(), addresses.end());
  identities_.push_back(std::move(next));
}

void Core::begin_session(const std::shared_ptr<SessionImpl>& session,
                         const std::vector<std::shared_ptr<LaneImpl>>& lanes) {
  {
    std::lock_guard lock(mutex_);
    sessions_.insert(session);
  }
  start_heartbeats();
  if (on_session) on_session(session);
  // A lane that cannot be watched dies by itself, and with lane 0 the session.
  for (auto& lane : lanes) (void)lane->start();
  if (closing) session->close({Code::closed, "this endpoint is closed"});  // close() may have missed it
}

void Core::remove_session(const SessionImpl* session) {
  std::shared_ptr<SessionImpl> dropped;
  std::lock_guard lock(mutex_);
  auto found = std::find_if(sessions_.begin(), sessions_.end(), [&](auto& s) { return s.get() == session; });
  if (found == sessions_.end()) return;
  dropped = *found;
  sessions_.erase(found);
}

std::vector<std::shared_ptr<SessionImpl>> Core::sessions() const {
  std::lock_guard lock(mutex_);
  return {sessions_.begin(), sessions_.end()};
}

std::shared_ptr<SessionImpl> Core::find_session(const Id128& id) const {
  std::lock_guard lock(mutex_);
  for (auto& session : sessions_) {
    if (session->key().id == id) return session;
  }
  return nullptr;
}

void Core::start_heartbeats() {
  if (options.heartbeat_ms == 0) return;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(beating_, true)) return;
    last_beat_ns_ = steady_ns();
  }
  reactors[0]->add_timer(steady_ns() + options.heartbeat_ms * int64_t{1'000'000}, [this] { heartbeat(); });
}

void Core::heartbeat() {
  int64_t now = steady_ns();
  const int64_t period = options.heartbeat_ms * int64_t{1'000'000};
  const int64_t limit = options.heartbeat_limit_ms * int64_t{1'000'000};
  std::vector<std::shared_ptr<SessionImpl>> all;
  bool we_slept;
  {
    std::lock_guard lock(mutex_);
    // If this thread itself was held up (SIGSTOP, a suspended VM), the silence is ours, not the peers'.
    we_slept = now - last_beat_ns_ > 2 * period + 100'000'000;
    last_beat_ns_ = now;
    all.assign(sessions_.begin(), sessions_.end());
    if (all.empty()) beating_ = false;
  }
  if (all.empty()) return;  // the next session starts it again
  for (auto& session : all) session->beat(now, period, limit, we_slept);
  reactors[0]->add_timer(now + period, [this] { heartbeat(); });
}

void Core::lane_opened() {
  std::lock_guard lock(mutex_);
  ++lanes_;
}

void Core::lane_closed() {
  std::lock_guard lock(mutex_);
  if (--lanes_ == 0) cv_.notify_all();
}

bool Core::wait_no_lanes(Deadline deadline) {
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, std::chrono::nanoseconds(deadline.remaining_ns()), [&] { return lanes_ == 0; });
}

}  // namespace torch_mooncake::rpc
