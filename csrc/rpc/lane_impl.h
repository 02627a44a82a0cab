// LaneImpl: one connection. Frames go out by whoever finds the lane idle (a caller's thread, within a budget, or the
// I/O thread); frames come in on the I/O thread, or on a thread that waits for an answer and has taken the receiver's
// role (`receiving_`) for a moment.
//
// Sending: `sending_` makes one thread at a time the sender, who holds no lock while it is in sendmsg. Others queue
// their frames and go. Control frames go before queued bulk frames, after the frame that is under way.
//
// A frame sent by MSG_ZEROCOPY is finished when the kernel has done with its memory, not when it has taken the bytes.
//
// Death: any thread may shut the socket down (kill); the I/O thread then takes the receiver's role, finishes the frame
// being received, and when no sender is inside, has the kernel drop what it has not sent, waits until it reads no
// frame's memory any more, fails what is queued, closes the fd and tells the session.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "rpc/core.h"
#include "rpc/frame.h"
#include "rpc/reactor.h"
#include "rpc/session.h"
#include "rpc/spin_gate.h"
#include "rpc/zero_copy.h"

namespace torch_mooncake::rpc {

// A message's bytes, shared by the frame and by the session that keeps them until they are acknowledged. Never null.
using SharedBody = std::shared_ptr<const std::string>;
inline SharedBody share(std::string body) { return std::make_shared<const std::string>(std::move(body)); }

// EFAULT of a send or a recv.
inline Status unmapped_memory() {
  return {Code::invalid_argument, "registered memory is not mapped in process " + std::to_string(::getpid()) +
                                      ": freed before it was deregistered?"};
}

struct OutFrame {
  HeaderBytes header;
  SharedBody body;
  std::vector<UniqueFd> fds;
  std::vector<iovec> payload;
  std::function<void(const Status&)> sent;
  std::function<void()> taken;
  std::shared_ptr<void> keep;
  bool is_background = false;
  uint64_t total = 0;  // header, body and payload
  uint64_t done = 0;
  size_t payload_at = 0;                   // first payload piece not wholly sent,
  uint64_t payload_begin = 0;              // and the payload bytes before it
  std::optional<uint32_t> last_zero_copy;  // the last send that the kernel reads without a copy
  bool must_copy = false;                  // some of its memory cannot be read that way
  std::optional<Status> unmapped;          // or not at all, which ends the lane: the peer waits for the rest
};

class LaneImpl final : public Lane, public EventTarget, public std::enable_shared_from_this<LaneImpl> {
 public:
  LaneImpl(std::shared_ptr<Core> core, std::shared_ptr<SessionImpl> session, UniqueFd fd, uint32_t index);

  // Begins to receive. Before it, nothing is read.
  Status start();
  // Queues a control frame. Fails only if the lane is dead.
  Status send_control(const FrameHeader& header, SharedBody body, std::vector<UniqueFd> fds = {});
  Status send_control(const FrameHeader& header) { return send_control(header, share({})); }
  // The same without sending, for callers that hold a lock: send_queued() follows.
  Status queue_control(const FrameHeader& header, SharedBody body);
  void send_queued();
  bool is_killed() const {
    std::lock_guard lock(mutex_);
    return killed_.has_value();
  }
  // See Session::receive_until.
  bool receive_until(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns);
  int64_t last_heard_ns() const { return last_heard_ns_.load(std::memory_order_relaxed); }
  Reactor& reactor() { return *reactor_; }

  Session& session() override;
  uint32_t index() const override { return index_; }
  bool is_unix() const override { return is_unix_; }
  std::string describe() const override { return description_; }
  bool alive() const override { return !dead_.load(std::memory_order_acquire); }
  Status send_bulk(BulkFrame frame) override;
  uint64_t queued_bytes() const override { return queued_.load(std::memory_order_relaxed); }
  uint64_t bytes_sent() const override { return sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const override { return received_.load(std::memory_order_relaxed); }
  const Rail& rail() const override { return rail_; }
  LaneProgress progress() const override;
  int64_t silent_ns() const override { return steady_ns() - last_heard_ns(); }
  std::vector<std::pair<std::string, std::string>> tuning() const override;
  void kill(const Status& why) override;

  void on_events(uint32_t events) override;
  bool look() override;
  void expect_soon() { reactor_->expect_soon(shared_from_this()); }
  bool callers_spin() const { return spin_gate_.is_open(); }  // those that wait for an answer on this lane

 private:
  // lane_send.cpp
  Status push(std::unique_ptr<OutFrame> frame, bool is_control);
  void send_with(int64_t inline_budget);
  Status enqueue(std::unique_ptr<OutFrame> frame, bool is_control);
  void drain(int64_t budget);
  std::deque<std::unique_ptr<OutFrame>>* next_queue();  // null: nothing waits
  bool has_queued() const { return !control_.empty() || !bulk_[0].empty() || !bulk_[1].empty(); }
  static constexpr int kAgeing = 8;
  void finish_frame(std::unique_ptr<OutFrame> frame, const Status& status);
  ssize_t send_some(OutFrame& frame, bool& zero_copied);
  void tell_taken(std::function<void()> taken);
  void finish_copied();   // frames that the kernel has done with
  bool memory_is_ours();  // of a dying lane: the kernel reads no frame's memory any more

  // lane_receive.cpp
  void take_role_and_receive();
  bool receive();  // whether anything came
  bool receive_for(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns);
  ssize_t receive_some(iovec* pieces, size_t count);
  bool parse_buffer();  // false: over
  bool take_payload_from_buffer();
  size_t ask_windows(std::span<iovec> pieces);
  void payload_arrived(uint64_t nbytes);
  bool begin_bulk();
  void end_bulk(const Status& status);
  void die(const Status& why);
  void finish_death();

  const std::shared_ptr<Core> core_;
  const std::shared_ptr<SessionImpl> session_;
  const std::shared_ptr<Reactor> reactor_;
  const uint32_t index_;
  bool is_unix_ = false;
  Rail rail_;
  std::string description_;
  std::string peer_name_;
  uint64_t token_ = 0;
  std::atomic<bool> dead_{false};
  std::atomic<uint64_t> queued_{0}, sent_{0}, received_{0};
  std::atomic<int64_t> last_heard_ns_;

  mutable std::mutex mutex_;  // the send side, fd_'s validity, and the cause of death
  UniqueFd fd_;
  std::deque<std::unique_ptr<OutFrame>> control_, bulk_[2];  // bulk: foreground, background
  int passed_over_ = 0;                                      // frames of the foreground since one of the background
  std::unique_ptr<OutFrame> current_;                        // begun; written to by the sender alone
  ZeroCopy zero_copy_;
  std::deque<std::unique_ptr<OutFrame>> lingering_;  // sent; the kernel may still read their memory
  bool sending_ = false;
  bool waiting_for_room_ = false;  // EPOLLOUT is armed
  bool polled_ = false;            // a waiting caller receives: EPOLLIN is not armed
  uint32_t interest() const;       // for epoll, by the two above
  bool death_waits_ = false;       // the I/O thread is done; the sender finishes it
  std::optional<Status> killed_;

  // The receive side: of whoever has the role.
  std::atomic<bool> receiving_{false};
  SpinGate spin_gate_;
  FrameDecoder decoder_{Stage::session};
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;  // unread bytes in buffer_
  std::deque<UniqueFd> arrived_fds_;
  bool in_payload_ = false;
  uint64_t payload_offset_ = 0, payload_left_ = 0;
  std::unique_ptr<BulkReceive> sink_;  // null: the rest is thrown away
  bool mostly_bulk_ = false;
  bool over_ = false;
};

}  // namespace torch_mooncake::rpc
