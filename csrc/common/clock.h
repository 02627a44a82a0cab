// Steady time and absolute deadlines. A deadline is made once, at the API's edge, and travels through all retries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>

namespace torch_mooncake {

inline int64_t steady_ns() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{ts.tv_sec} * 1'000'000'000 + ts.tv_nsec;
}

class Deadline {
 public:
  static constexpr int64_t kDefaultMs = 30'000;
  static Deadline after_ms(int64_t ms) { return Deadline(steady_ns() + ms * 1'000'000); }
  static Deadline after_s(double s) { return Deadline(steady_ns() + static_cast<int64_t>(s * 1e9)); }
  static Deadline at_ns(int64_t ns) { return Deadline(ns); }
  static Deadline never() { return Deadline(INT64_MAX); }

  bool is_never() const { return at_ns_ == INT64_MAX; }
  bool expired() const { return !is_never() && steady_ns() >= at_ns_; }
  int64_t ns() const { return at_ns_; }
  int64_t remaining_ns() const { return is_never() ? INT64_MAX : std::max<int64_t>(0, at_ns_ - steady_ns()); }
  // For poll() and friends: -1 for never, else milliseconds rounded up.
  int remaining_ms() const {
    if (is_never()) return -1;
    return static_cast<int>(std::min<int64_t>((remaining_ns() + 999'999) / 1'000'000, 1 << 30));
  }
  friend Deadline min(Deadline a, Deadline b) { return a.at_ns_ < b.at_ns_ ? a : b; }

 private:
  explicit Deadline(int64_t at_ns) : at_ns_(at_ns) {}
  int64_t at_ns_;
};

}  // namespace torch_mooncake
