// SpinGate: whether a caller spins for its answer before it sleeps. To spin for 50 µs saves a sleep and a wake-up where
// the other side answers at once from another core; where the cores are busy, or the way is long, it only costs. So
// spins that met nothing are not tried again for some waits, for more of them each time.
//
// They are tried several in a row, because both sides have to find the step: the other side, woken by the first, looks
// for the next for as long (FrameType::hot_call) and answers that one from its own spin.
//
// Not thread-safe, but for is_open().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace torch_mooncake::rpc {

class SpinGate {
 public:
  static constexpr int64_t kSpinNs = 50'000;
  bool is_open() const { return skip_.load(std::memory_order_relaxed) == 0; }
  // A wait begins. True: it may spin, and says by spun() what came of it.
  bool open() {
    if (is_open()) return true;
    skip_.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  void spun(bool met_something) {
    if (met_something) {
      failed_ = pause_ = 0;
    } else if (++failed_ == kInARow) {
      failed_ = 0;
      pause_ = std::min(2 * pause_ + 4, kLongestPause);
      skip_.store(pause_, std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int kInARow = 3, kLongestPause = 128;
  int failed_ = 0;
  int pause_ = 0;             // waits to skip after the last failure
  std::atomic<int> skip_{0};  // still to be skipped
};

}  // namespace torch_mooncake::rpc
