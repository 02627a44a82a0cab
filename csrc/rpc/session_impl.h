// SessionImpl: calls, lanes and callbacks of one session.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "rpc/core.h"
#include "rpc/frame.h"
#include "rpc/lane_impl.h"
#include "rpc/session.h"

namespace torch_mooncake::rpc {

class SessionImpl final : public Session {
 public:
  struct Setup {
    SessionKey key;
    Identity peer;
    bool is_initiator = false;
    std::string dialled;  // initiator: the address for further lanes
  };
  SessionImpl(std::shared_ptr<Core> core, Setup setup);

  const SessionKey& key() const { return setup_.key; }

  // Adds a lane; does not begin to receive on it. `peer_pid`: on a Unix socket, who is at the other end. Fails if the
  // session is over (the fd is closed) or the index is taken.
  Result<std::shared_ptr<LaneImpl>> add_lane(UniqueFd fd, uint32_t index, int peer_pid);
  // A heartbeat tick, on an I/O thread.
  void beat(int64_t now_ns, int64_t period_ns, int64_t limit_ns, bool forgive);

  // From lanes, on their I/O threads.
  void on_frame(LaneImpl& lane, const FrameHeader& header, std::string body, std::vector<UniqueFd> fds);
  void on_lane_dead(LaneImpl& lane, const Status& why);
  // From responders.
  void answer(uint64_t id, std::string body, std::vector<UniqueFd> fds);
  void answer_error(uint64_t id, const Status& status);

  const Identity& peer() const override { return setup_.peer; }
  const Identity& self() const override { return self_; }
  bool is_initiator() const override { return setup_.is_initiator; }
  bool alive() const override;
  Status status() const override;
  bool same_host() const override;
  int peer_pid() const override;
  std::shared_ptr<const UniqueFd> peer_process() const override;
  void call(uint16_t method, std::string body, Deadline deadline, CallDone done, std::vector<UniqueFd> fds,
            bool awaited) override;
  Result<Message> call_sync(uint16_t method, std::string body, Deadline deadline, std::vector<UniqueFd> fds,
                            std::function<void(Message)> late) override;
  Status post(uint16_t method, std::string body) override;
  bool receive_until(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns) override;
  bool over_unix() const override;
  std::vector<std::shared_ptr<Lane>> lanes() const override;
  Status open_lanes(int n, Deadline deadline) override;
  Result<std::shared_ptr<Lane>> open_lane(const LaneTarget& target, Deadline deadline) override;
  void on_close(std::function<void(const Status&)> fn) override;
  void on_lane_close(std::function<void(Lane&, const Status&)> fn) override;
  void close(const Status& why) override;
  void set_state(Slot slot, std::shared_ptr<void> state) override;
  std::shared_ptr<void> state(Slot slot) const override;

 private:
  static constexpr size_t kMaxLanes = 256;
  struct Pending {
    CallDone done;
    uint64_t timer = 0;
  };
  // Registers and sends; on failure the call is not pending and `done` is given back.
  Status begin_call(uint16_t method, std::string body, std::vector<UniqueFd> fds, bool awaited, CallDone& done,
                    uint64_t& id);
  std::optional<Pending> take_call(uint64_t id);
  void complete(uint64_t id, Result<Message> result);
  Status check_message(size_t body_bytes, const std::vector<UniqueFd>& fds) const;
  std::shared_ptr<LaneImpl> control() const;

  // session_control.cpp: numbered messages, and the move of control to another lane.
  struct Numbered {
    FrameHeader header;
    SharedBody body;
  };
  Status send_message(FrameHeader header, std::string body, std::vector<UniqueFd> fds);
  bool accept_message(LaneImpl& lane, const FrameHeader& header);  // false: a duplicate, or a lane that lies
  void forget_acknowledged(uint32_t sequence);                     // mutex_ held
  void control_lost(LaneImpl& lane, const Status& why);            // it is dead
  void offer_control();
  void look_at_offered(const std::shared_ptr<LaneImpl>& lane);  // in a while, and again until it answers or is given up
  void on_control_frame(LaneImpl& lane, uint32_t received);
  void take_control(const std::shared_ptr<LaneImpl>& lane, uint32_t received);
  void check_control(int64_t now_ns, int64_t limit_ns);  // at each heartbeat
  Reactor& reactor() const { return *reactor_; }

  const std::shared_ptr<Core> core_;
  const Setup setup_;
  const Identity& self_;  // a snapshot that lives as long as core_
  const std::shared_ptr<Reactor> reactor_;

  mutable std::mutex mutex_;
  Status status_;  // why it ended
  bool ended_ = false;
  bool told_ = false;            // on_close callbacks have run
  int64_t forgiven_ns_ = 0;      // when we ourselves last came back from being stopped
  int64_t heard_before_ns_ = 0;  // on lanes that are dead now
  std::vector<std::shared_ptr<LaneImpl>> lanes_;
  std::shared_ptr<LaneImpl> control_;
  uint32_t next_lane_ = 2;  // 0 and 1 belong to the connect
  bool has_unix_lane_ = false;
  int peer_pid_ = 0;
  std::shared_ptr<const UniqueFd> peer_process_;
  uint64_t next_call_ = 1;
  std::map<uint64_t, Pending> calls_;
  std::vector<std::function<void(const Status&)>> close_callbacks_;
  std::vector<std::function<void(Lane&, const Status&)>> lane_callbacks_;
  std::shared_ptr<void> states_[kSlots];

  // Control over TCP: what the peer has not acknowledged is kept, to be sent again on another lane.
  bool is_numbered_ = false;
  std::deque<Numbered> unacknowledged_;
  size_t unacknowledged_bytes_ = 0;
  bool can_move_ = true;  // false: too much was unacknowledged, and has been dropped,
  uint32_t dropped_ = 0;  // up to this one: when the peer has it after all, control can move again
  uint32_t last_sent_ = 0;
  uint32_t received_ = 0;              // without a gap
  std::set<uint32_t> received_above_;  // and these
  size_t since_acknowledged_ = 0, bytes_since_acknowledged_ = 0;
  bool is_moving_ = false;  // control has no lane: messages only wait
  int64_t moving_since_ns_ = 0;
  Status moved_why_;
  std::shared_ptr<LaneImpl> next_control_;  // initiator: offered to the peer. Acceptor: offered by it
  uint32_t next_received_ = 0;              // what the peer had received when it offered that
};

// connector.cpp: dial, prove, exchange identities; the session is added to the core and its lanes receive.
Result<std::shared_ptr<SessionImpl>> connect_session(const std::shared_ptr<Core>& core, const std::string& address,
                                                     Deadline deadline);
// A further connection of a session, proven; not yet a lane.
struct DialledLane {
  UniqueFd fd;
  int peer_pid = 0;
};
Result<DialledLane> dial_lane(const std::shared_ptr<Core>& core, const SessionKey& key, uint32_t index,
                              const LaneTarget& target, Deadline deadline);

}  // namespace torch_mooncake::rpc
