// Pacer: how ops of different priority share an engine, whatever transport carries them.
//
// A foreground op goes to its transports at once. A background op is fed to them in instalments: a few are under way
// while nothing else wants to move, one while a foreground op is pending, and then only after it has waited for
// kAgeingNs, so that it is slowed but never starved. A foreground op therefore finds at most one window of background
// bytes ahead of it in any queue. A priority with a rate limit (bytes/s, at the initiator, reads and writes together)
// takes its instalments from a token bucket.
//
// Threads: every method is safe from any thread and does not block. Instalments are submitted on a thread of the
// pacer's own, made on first use. An op that is stopped leaves the queue at once.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include "rpc/endpoint.h"
#include "transfer/engine.h"
#include "transfer/worker.h"

namespace torch_mooncake::transfer {

class OpImpl;

// Bytes that may move now: refilled at `rate` bytes/s, up to what 50 ms bring. A take may overdraw it once.
class TokenBucket {
 public:
  explicit TokenBucket(uint64_t rate) : rate_(rate) {}  // 0: no limit
  bool limited() const { return rate_ != 0; }
  uint64_t rate() const { return rate_; }
  // When the next take will be allowed; at most now_ns if it is.
  int64_t ready_ns(int64_t now_ns) const;
  void take(uint64_t nbytes, int64_t now_ns);

 private:
  void refill(int64_t now_ns);
  const uint64_t rate_;
  double tokens_ = 0;
  int64_t filled_ns_ = 0;
};

class Pacer : public std::enable_shared_from_this<Pacer> {
 public:
  static constexpr uint64_t kInstalmentBytes = 4 << 20;
  static constexpr uint64_t kWindowBytes = 4 * kInstalmentBytes;  // of background, when it is alone
  static constexpr int64_t kAgeingNs = 20'000'000;

  Pacer(rpc::Endpoint& rpc, uint64_t foreground_rate, uint64_t background_rate);
  // An op begins. True: it may be submitted whole, now. False: give it to enqueue().
  bool begin(Priority priority, uint64_t nbytes);
  void enqueue(std::shared_ptr<OpImpl> op);
  void instalment_over(Priority priority, uint64_t nbytes);
  void stopped() { poke(); }  // an op that may be queued wants to end
  void over(Priority priority);
  void stop();  // ops that are still queued are let go, stopped

 private:
  struct Waiting {
    std::shared_ptr<OpImpl> op;
    int64_t since_ns;  // its last instalment, or its begin
  };
  uint64_t instalment(const TokenBucket& bucket) const;
  void poke();
  void pump();
  bool serve(Priority priority, int64_t* again_ns);

  rpc::Endpoint& rpc_;
  Worker worker_{"tm-pacer"};
  std::atomic<int> foreground_{0};  // ops pending
  std::atomic<bool> poked_{false}, waiting_{false};
  std::mutex mutex_;
  std::array<TokenBucket, 2> buckets_;
  std::array<std::deque<Waiting>, 2> queues_;
  uint64_t background_in_flight_ = 0;
  bool stopped_ = false;
  int64_t timer_ns_ = INT64_MAX;  // the earliest timer that is set
};

}  // namespace torch_mooncake::transfer
