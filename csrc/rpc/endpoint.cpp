#include "rpc/endpoint.h"

#include <condition_variable>
#include <map>
#include <set>

#include "common/random.h"
#include "rpc/acceptor.h"
#include "rpc/core.h"
#include "rpc/same_host.h"
#include "rpc/session_impl.h"
#include "rpc/socket.h"

namespace torch_mooncake::rpc {
namespace {

constexpr int64_t kCloseMs = 1500;

class EndpointImpl final : public Endpoint {
 public:
  explicit EndpointImpl(std::shared_ptr<Core> core)
      : core_(std::move(core)), acceptor_(std::make_shared<Acceptor>(core_)) {}
  ~EndpointImpl() override {
    close();
    // In a forked child the threads do not exist and cannot be joined: what they share is left alone for ever.
    if (core_->forked()) (void)new std::shared_ptr<Core>(core_);
  }

  const Identity& self() const override { return core_->identity(); }

  Result<std::string> listen(const std::string& text) override {
    TM_TRY(core_->usable());
    TM_ASSIGN(auto address, parse_address(text));
    TM_ASSIGN(auto listener, open_listener(address, !core_->options.token.empty()));
    return begin_listening(std::move(listener));
  }

  Status listen_fd(UniqueFd fd, const std::string& text) override {
    TM_TRY(core_->usable());
    TM_ASSIGN(auto address, parse_address(text));
    TM_ASSIGN(auto listener, adopt_listener(std::move(fd), address, !core_->options.token.empty()));
    return begin_listening(std::move(listener)).status();
  }

  Result<SessionPtr> connect(const std::string& text, Deadline deadline, bool reuse) override {
    TM_TRY(core_->usable());
    if (core_->in_own_thread()) return {Code::internal, "connect on one of the endpoint's own threads"};
    started_ = true;
    TM_ASSIGN(auto address, parse_address(text));
    if (!reuse) {
      TM_ASSIGN(auto session, connect_session(core_, text, deadline));
      return SessionPtr(std::move(session));
    }
    std::string name = address.to_string();
    std::unique_lock lock(mutex_);
    // One dial to an address at a time: the others wait for its session.
    while (dialling_.count(name) > 0) {
      auto until = std::chrono::nanoseconds(std::min(deadline.remaining_ns(), int64_t{3'600'000'000'000}));
      if (cv_.wait_for(lock, until) == std::cv_status::timeout && deadline.expired()) {
        return {Code::deadline_exceeded, "connecting to " + name};
      }
    }
    if (auto found = dialled_.find(name); found != dialled_.end()) {
      auto session = found->second.lock();
      if (session && session->alive()) return SessionPtr(std::move(session));
      dialled_.erase(found);
    }
    dialling_.insert(name);
    lock.unlock();
    auto session = connect_session(core_, text, deadline);
    lock.lock();
    dialling_.erase(name);
    if (session) dialled_[name] = *session;
    cv_.notify_all();
    if (!session) return session.status();
    return SessionPtr(*session);
  }

  void handle(uint16_t method, RunOn where, Handler handler) override {
    if (refuse_late("handle")) return;
    core_->methods[method] = {where, std::move(handler)};
  }
  void set_bulk_handler(BulkHandler* handler) override {
    if (!refuse_late("set_bulk_handler")) core_->bulk_handler = handler;
  }
  void on_session(std::function<void(const SessionPtr&)> fn) override {
    if (!refuse_late("on_session")) core_->on_session = std::move(fn);
  }

  uint64_t add_timer(Deadline when, std::function<void()> fn) override {
    if (core_->forked()) return 0;
    return core_->reactors[0]->add_timer(when.ns(), std::move(fn));
  }
  void cancel_timer(uint64_t id) override {
    if (!core_->forked()) core_->reactors[0]->cancel_timer(id);
  }

  std::vector<SessionPtr> sessions() const override {
    if (core_->forked()) return {};
    auto all = core_->sessions();
    std::erase_if(all, [](auto& session) { return !session->alive(); });
    return {all.begin(), all.end()};
  }

  void close() override {
    if (core_->forked() || core_->closing.exchange(true)) return;
    auto finish = [core = core_, acceptor = acceptor_] {
      acceptor->close();
      for (auto& session : core->sessions()) session->close({Code::closed, "this endpoint is closed"});
      if (!core->wait_no_lanes(Deadline::after_ms(kCloseMs))) {
        log::error("rpc", core->options.name + ": closing while a callback holds up an I/O thread");
      }
      core->worker.stop();
      for (auto& reactor : core->reactors) reactor->stop();
    };
    if (core_->in_own_thread()) {
      std::thread(finish).detach();  // it joins the thread we are on
    } else {
      finish();
    }
  }

 private:
  Result<std::string> begin_listening(Listener listener) {
    started_ = true;
    std::string dialable = listener.dialable;
    std::vector<std::string> addresses = listener.advertised;
    std::vector<Listener> doors;
    auto& options = core_->options;
    if (options.same_host_listener && !listener.is_unix && !has_abstract_door_.exchange(true)) {
      TM_ASSIGN(auto door, open_abstract_door(core_->engine));
      doors.push_back(std::move(door));
    }
    // Loopback is not reached from other network namespaces.
    if (options.same_host_listener && !listener.is_loopback && !options.socket_dir.empty() &&
        !has_file_door_.exchange(true)) {
      auto door = open_file_door(options.socket_dir, core_->engine);
      if (door)
        doors.push_back(std::move(*door));
      else
        log::warning("rpc", options.name + ": processes of this host in other network namespaces will not be " +
                                "recognised: " + door.status().message());
    }
    for (auto& door : doors) addresses.push_back(door.dialable);
    core_->add_addresses(addresses);
    for (auto& door : doors) TM_TRY(acceptor_->add(std::move(door)));
    TM_TRY(acceptor_->add(std::move(listener)));
    return dialable;
  }

  bool refuse_late(const char* what) {
    if (started_) log::error("rpc", std::string(what) + " after listen or connect has no effect");
    return started_;
  }

  const std::shared_ptr<Core> core_;
  const std::shared_ptr<Acceptor> acceptor_;
  std::atomic<bool> started_{false};
  std::atomic<bool> has_abstract_door_{false}, has_file_door_{false};
  std::mutex mutex_;
  std::condition_variable cv_;
  std::set<std::string> dialling_;
  std::map<std::string, std::weak_ptr<SessionImpl>> dialled_;
};

}  // namespace

Result<std::unique_ptr<Endpoint>> Endpoint::create(EndpointOptions options) {
  TM_ASSIGN(auto core, Core::create(std::move(options)));
  return std::unique_ptr<Endpoint>(std::make_unique<EndpointImpl>(std::move(core)));
}

}  // namespace torch_mooncake::rpc
