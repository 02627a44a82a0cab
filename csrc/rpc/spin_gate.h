// SpinGate: whether to spin before sleeping. To spin for 50 µs saves a sleep and a wake-up where the other side answers
// at once from another core; where the cores are busy it only keeps the answer from being made. So a spin that met
// nothing is not tried again for some waits, for more of them each time.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>

namespace torch_mooncake::rpc {

class SpinGate {
 public:
  static constexpr int64_t kSpinNs = 50'000;
  bool open() {
    if (skip_ == 0) return true;
    --skip_;
    return false;
  }
  void spun(bool met_something) {
    pause_ = met_something ? 0 : std::min(2 * pause_ + 4, 512);
    skip_ = pause_;
  }

 private:
  int pause_ = 0;  // waits to skip after the last failure
  int skip_ = 0;   // still to be skipped
};

}  // namespace torch_mooncake::rpc
