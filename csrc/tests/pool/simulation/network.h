// Sessions of simulated processes: calls, posts and answers travel as events of the World, in order within a session,
// late, or not at all when the session breaks (its two sides learn of that at different times).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "pool/simulation/scheduler.h"
#include "rpc/endpoint.h"

namespace torch_mooncake::pool::sim {

class SimSession;
class SimEndpoint;

// Links between hosts: how long a message takes now, and who cannot reach whom.
class Network {
 public:
  // When what is sent now arrives.
  int64_t arrival(const Process* from, const Process* to);
  void partition(const Host* a, const Host* b, int64_t until);
  bool parted(const Host* a, const Host* b) const;
  double slow = 0.01;  // of the messages take milliseconds

  std::map<std::string, SimEndpoint*> listeners;  // by address
  // May change an incoming message, or answer a call in the place of its handler (true). For mutations.
  std::function<bool(Process* at, uint16_t method, std::string& body, rpc::Responder& responder,
                     const std::function<void(std::string)>& handle)>
      tamper;
  std::function<void(Process* at, uint16_t method, rpc::Message& answer)> tamper_answer;

 private:
  std::map<std::pair<const Host*, const Host*>, int64_t> parted_until_;
};
extern Network* network;

class SimEndpoint final : public rpc::Endpoint {
 public:
  SimEndpoint(Process* process, rpc::Identity self);
  ~SimEndpoint() override { close(); }
  const rpc::Identity& self() const override { return self_; }
  Result<std::string> listen(const std::string& address) override;
  Status listen_fd(UniqueFd fd, const std::string& address) override;
  Result<rpc::SessionPtr> connect(const std::string& address, Deadline deadline, bool reuse) override;
  void handle(uint16_t method, rpc::RunOn, rpc::Handler handler) override { handlers_[method] = std::move(handler); }
  void set_bulk_handler(rpc::BulkHandler*) override {}
  void on_session(std::function<void(const rpc::SessionPtr&)> fn) override { on_session_.push_back(std::move(fn)); }
  uint64_t add_timer(Deadline when, std::function<void()> fn) override;
  void cancel_timer(uint64_t id) override { timers_.erase(id); }
  std::vector<rpc::SessionPtr> sessions() const override;
  void close() override;

  Process* process() const { return process_; }
  const rpc::Handler* handler(uint16_t method) const;
  void forget(SimSession* session);
  void add(const std::shared_ptr<SimSession>& session);
  // The kernel ends what a dead process had; `silent`: with its host, so that nobody is told.
  void died(bool silent);
  const std::vector<std::shared_ptr<SimSession>>& live() const { return sessions_; }

 private:
  Process* const process_;
  rpc::Identity self_;
  std::unordered_map<uint16_t, rpc::Handler> handlers_;
  std::vector<std::function<void(const rpc::SessionPtr&)>> on_session_;
  std::vector<std::shared_ptr<SimSession>> sessions_;
  std::map<uint64_t, std::function<void()>> timers_;
  uint64_t next_timer_ = 1;
  bool closed_ = false;
};

// One side of a session.
class SimSession final : public rpc::Session {
 public:
  SimSession(SimEndpoint* endpoint, rpc::Identity peer, bool initiator, bool is_unix, std::string address);
  static void join(const std::shared_ptr<SimSession>& a, const std::shared_ptr<SimSession>& b);

  const rpc::Identity& peer() const override { return peer_; }
  const rpc::Identity& self() const override { return endpoint_->self(); }
  bool is_initiator() const override { return initiator_; }
  bool alive() const override { return alive_; }
  Status status() const override { return why_; }
  bool same_host() const override { return is_unix_; }
  int peer_pid() const override { return 0; }
  std::shared_ptr<const UniqueFd> peer_process() const override { return {}; }
  void call(uint16_t method, std::string body, Deadline deadline, rpc::CallDone done, std::vector<UniqueFd> fds,
            bool awaited) override;
  Result<rpc::Message> call_sync(uint16_t method, std::string body, Deadline deadline, std::vector<UniqueFd> fds,
                                 std::function<void(rpc::Message)> late) override;
  Status post(uint16_t method, std::string body) override;
  bool receive_until(const std::function<bool()>& done, Deadline, int64_t) override { return done(); }
  bool over_unix() const override { return is_unix_; }
  std::vector<std::shared_ptr<rpc::Lane>> lanes() const override;
  Status open_lanes(int, Deadline) override { return {}; }
  Result<std::shared_ptr<rpc::Lane>> open_lane(const rpc::LaneTarget&, Deadline) override;
  void on_close(std::function<void(const Status&)> fn) override;
  void on_lane_close(std::function<void(rpc::Lane&, const Status&)>) override {}
  void close(const Status& why) override { end(why.is_ok() ? Status(Code::closed, "closed") : why); }
  void set_state(Slot slot, std::shared_ptr<void> state) override { states_[slot] = std::move(state); }
  std::shared_ptr<void> state(Slot slot) const override { return states_[slot]; }

  // --- For the simulation.
  SimEndpoint* endpoint() const { return endpoint_; }
  Process* process() const { return endpoint_->process(); }
  std::shared_ptr<SimSession> other() const { return other_.lock(); }
  const std::string& address() const { return address_; }
  // This side learns that it is over; the other does after a while, unless `silent`.
  void end(const Status& why, bool silent = false);
  void forget_inbox() { inbox_.clear(); }
  // `fn` runs in the other's process when all sent before it has been handled; never if that side has ended.
  void send(std::function<void(SimSession&)> fn);
  void answer(uint64_t id, Result<rpc::Message> result);  // sends it

 private:
  struct Pending {
    uint16_t method = 0;
    rpc::CallDone done;
  };
  void receive(std::function<void(SimSession&)> fn);
  void handle_inbox();
  void arrived(uint16_t method, std::string body, std::vector<UniqueFd> fds, std::optional<uint64_t> id);
  void complete(uint64_t id, Result<rpc::Message> result);

  SimEndpoint* const endpoint_;
  const rpc::Identity peer_;
  const bool initiator_, is_unix_;
  const std::string address_;
  std::weak_ptr<SimSession> other_;
  std::shared_ptr<rpc::Lane> lane_;
  bool alive_ = true;
  Status why_;
  std::map<uint64_t, Pending> pending_;
  uint64_t next_call_ = 1;
  std::vector<std::function<void(const Status&)>> on_close_;
  bool closed_told_ = false;
  int64_t last_arrival_ = 0;
  std::deque<std::function<void(SimSession&)>> inbox_;
  bool handling_ = false;
  std::shared_ptr<void> states_[kSlots];
};

}  // namespace torch_mooncake::pool::sim
