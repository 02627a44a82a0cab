// Core: what an endpoint, its sessions and its lanes share. Lives until the last of them goes; its threads end when the
// endpoint closes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "common/log.h"
#include "rpc/auth.h"
#include "rpc/endpoint.h"
#include "rpc/reactor.h"

namespace torch_mooncake::rpc {

class LaneImpl;
class SessionImpl;

// The endpoint's single thread for handlers that may block. Made at the first task.
class Worker {
 public:
  ~Worker() { stop(); }
  void post(std::function<void()> task);  // dropped after stop()
  void stop();                            // drops what has not begun, waits for what has (not on itself)
  bool in_thread() const;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable cv;
    std::deque<std::function<void()>> tasks;
    bool stopping = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::mutex thread_mutex_;
  std::thread thread_;
};

class Core : public std::enable_shared_from_this<Core> {
 public:
  static Result<std::shared_ptr<Core>> create(EndpointOptions options);

  const EndpointOptions options;
  const Id128 engine;
  const pid_t pid;  // of the process that made it
  std::vector<std::shared_ptr<Reactor>> reactors;
  Worker worker;

  // ok, or why no call may be made: forked, closed.
  Status usable() const;
  bool forked() const;
  bool in_own_thread() const;  // an I/O thread or the worker
  std::atomic<bool> closing{false};

  // Set before listening and connecting, constant after.
  struct Method {
    RunOn where;
    Handler handler;
  };
  std::map<uint16_t, Method> methods;
  BulkHandler* bulk_handler = nullptr;
  std::function<void(const SessionPtr&)> on_session;

  // Who we are now (addresses grow by listen()). Snapshots live as long as the Core.
  const Identity& identity() const;
  void add_addresses(const std::vector<std::string>& addresses);

  // Makes a new session known (on_session), then lets its lanes receive.
  void begin_session(const std::shared_ptr<SessionImpl>& session, const std::vector<std::shared_ptr<LaneImpl>>& lanes);
  void remove_session(const SessionImpl* session);
  std::vector<std::shared_ptr<SessionImpl>> sessions() const;
  std::shared_ptr<SessionImpl> find_session(const Id128& id) const;
  // Lanes take the I/O threads in turn.
  size_t next_reactor() { return reactor_turn_.fetch_add(1) % reactors.size(); }

  // Lanes between their making and the end of their cleanup; close() waits until there are none.
  void lane_opened();
  void lane_closed();
  bool wait_no_lanes(Deadline deadline);

 private:
  explicit Core(EndpointOptions options);
  void start_heartbeats();  // with the first session
  void heartbeat();

  std::unique_ptr<Id128> nonce_;  // on the heap: its address is told to peers
  mutable std::mutex mutex_;
  std::condition_variable cv_;
  std::vector<std::unique_ptr<const Identity>> identities_;
  std::set<std::shared_ptr<SessionImpl>> sessions_;
  bool beating_ = false;
  int64_t last_beat_ns_ = 0;
  int lanes_ = 0;
  std::atomic<size_t> reactor_turn_{0};
};

}  // namespace torch_mooncake::rpc
