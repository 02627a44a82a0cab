// OpImpl: one batch of reads or writes with one outcome. Counts its parts, keeps their memory, ends once.
//
// States: pending -> done | failed | timeout | cancelled. The end comes when every part has said part_done(), which
// means that nothing touches the op's memory any more. stop() asks the parts for that; they comply within grace_ns().
// Regions, `keep` and `on_end` are dropped on the caller's thread if the op ended inside write() or read(), otherwise
// on the engine's callback thread: never on an I/O thread.
#pragma once

#include <atomic>
#include <mutex>
#include <span>

#include "transfer/transport.h"
#include "transfer/watchers.h"
#include "transfer/worker.h"

namespace torch_mooncake::transfer {

class PeerImpl;
class EngineImpl;

// A flag that can be waited for: spins at most 50 µs, then sleeps in the kernel.
class Event {
 public:
  void set();
  bool is_set() const { return word_.load(std::memory_order_acquire) == kSet; }
  // When a wait that begins now spins no longer, whatever it spins on.
  static int64_t spin_end_ns() { return steady_ns() + 50'000; }
  bool wait(Deadline deadline, int64_t spin_until_ns = spin_end_ns());  // false: the deadline passed first

 private:
  static constexpr uint32_t kClear = 0, kWaiting = 1, kSet = 2;
  std::atomic<uint32_t> word_{kClear};
};

OpState state_of(const Status& outcome);

class OpImpl final : public Op, public std::enable_shared_from_this<OpImpl> {
 public:
  OpImpl(std::shared_ptr<PeerImpl> peer, Direction direction, std::vector<Batch> batches, OpOptions options);
  ~OpImpl() override;

  OpState state() const override;
  Status status() const override;
  Status wait(Deadline deadline) override;
  void cancel() override;
  uint64_t nbytes() const override { return nbytes_; }
  uint64_t bytes_done() const override { return bytes_done_.load(std::memory_order_relaxed); }
  bool remote_quiescent() const override { return remote_quiescent_.load(std::memory_order_acquire); }
  std::string transport() const override;
  std::string peers() const override;
  bool watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) override;

  // For an op inside another one's part: told at the end, on the thread of the end; such an op is not counted.
  void set_inner(std::function<void(const Status&)> on_end) { inner_ = std::move(on_end); }
  // Takes leave to touch the local regions, groups the batches by path and submits them, or has the pacer do it. Called
  // once, by the engine. On an error nothing has begun.
  Status start();
  // The same in two steps, for an op that waits for something else in between: begin() takes leave and sets the
  // deadline, launch() submits. Stopped in between, it ends at once, and launch() does nothing.
  Status begin();
  void launch();
  // Called at the end, on the thread of the end, before anybody is told.
  void set_at_end(std::function<void()> fn) { at_end_ = std::move(fn); }
  void refuse(const Status& why);                       // ends an op whose start() failed
  void help(Deadline deadline, int64_t spin_until_ns);  // a thread that is about to wait does queued work itself

  // --- For the pacer, which holds the op open from start() to all_submitted().
  Priority priority() const { return options_.priority; }
  uint64_t unsubmitted() const { return unsubmitted_; }
  bool submit_instalment(uint64_t nbytes);  // false: that was the last
  void all_submitted() { part_done(nullptr, {}); }

  // --- For transports.
  void add(PartPtr part);
  void part_done(const PartPtr& part, const Status& status);
  void stop(const Status& why);  // why: deadline_exceeded, cancelled, closed, or a part's failure
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }
  Status stop_reason() const;
  Direction direction() const { return direction_; }
  Deadline deadline() const { return options_.deadline; }
  int64_t grace_ns() const { return grace_ns_; }  // how long after the deadline the op may end
  PeerImpl& peer() const { return *peer_; }
  const std::shared_ptr<PeerImpl>& peer_ptr() const { return peer_; }
  void add_bytes_done(uint64_t nbytes) { bytes_done_.fetch_add(nbytes, std::memory_order_relaxed); }
  // No byte of that part can land remotely any more: said by its transport, unless part_done() said that it was carried
  // out. The op is quiescent when it has ended and all its parts are.
  void quiescent(const Part& part);
  // Once, when it is known that no byte of this op can land remotely any more; never, if the session ends before.
  void when_quiescent(std::function<void()> fn);
  // The notification, for a transport that will deliver it behind its data. Empty if there is none, or if other parts
  // have data too (the op then sends it when all have ended).
  std::string take_notify();
  // By a transport that cannot after all, while a part of its own is there: the op sends it when all have ended.
  void give_back_notify(std::string text);
  // By a transport that hands what is left of its part to another; `all`: it has moved none of it.
  void moves_to(const std::string& from, const std::string& to, bool all);

 private:
  // What was submitted at once: some bytes, and the parts that still carry them.
  struct Instalment {
    uint32_t id;
    uint64_t nbytes;
    int parts;
  };
  struct LivePart {
    PartPtr part;
    uint32_t instalment;  // 0: the op was submitted whole
  };
  Status acquire_regions();
  void arm_timer();
  void pace();
  void sort_by_path();
  TransportEndpoint* endpoint_of(const Batch& batch) const;
  void submit(std::span<const Batch> batches);
  void submit_to(TransportEndpoint& endpoint, std::span<const Batch> batches);
  std::vector<Batch> cut(uint64_t nbytes);
  uint64_t leave_instalment(uint32_t id);  // with the mutex; the bytes of the instalment if this was its last part
  void finish_parts();
  void end(const Status& status);
  std::string describe() const;

  const std::shared_ptr<PeerImpl> peer_;
  const Direction direction_;
  std::vector<Batch> batches_;
  OpOptions options_;
  uint64_t nbytes_ = 0;
  const int64_t began_ns_ = steady_ns();
  int64_t grace_ns_ = 0;
  std::string transport_;  // all that were used; the last of them
  std::string last_transport_;
  bool one_submit_ = true, begun_ = false;
  std::atomic<uint64_t> unsubmitted_{0};  // and where the rest begins
  size_t next_batch_ = 0, next_extent_ = 0;
  uint64_t next_byte_ = 0;
  std::vector<RegionImpl*> used_;  // local regions in use, each once
  const uint64_t starter_;         // thread that called write() or read()

  mutable std::mutex mutex_;
  std::vector<LivePart> parts_;
  std::vector<const Part*> restless_;  // that are not known to be quiescent; only compared
  bool is_over_ = false;               // end() has run
  int parts_left_ = 1;                 // one for start() or the pacer
  std::vector<Instalment> instalments_;
  uint32_t last_instalment_ = 0;  // being submitted, or submitted last
  Watchers watchers_;
  Status failure_;  // first failure or reason to stop
  bool notifying_ = false, ending_ = false;
  uint64_t timer_ = 0;
  std::function<void(const Status&)> inner_;
  std::function<void()> when_quiescent_, at_end_;
  bool waiting_ = false;  // between begin() and launch()

  std::atomic<bool> stopping_{false}, remote_quiescent_{false};
  std::atomic<uint64_t> bytes_done_{0};
  std::atomic<OpState> state_{OpState::pending};
  Event ended_;
};
using OpImplPtr = std::shared_ptr<OpImpl>;

}  // namespace torch_mooncake::transfer
