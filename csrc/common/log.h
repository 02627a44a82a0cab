// Leveled log lines on stderr, one write() each, so that lines of several threads and processes never mix.
//
// Success logs nothing; the function that decides which error it is logs it. TM_LOG_LEVEL = debug, info, warning
// (default), error or off, read once. Safe from any thread; a line longer than 2 KiB is cut.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "common/api.h"
#include "common/status.h"

namespace torch_mooncake::log {

enum class Level : int { debug = 0, info = 1, warning = 2, error = 3, off = 4 };

TM_API Level level();
TM_API void set_level(Level level);
inline bool enabled(Level at) { return at >= level(); }
Level parse_level(std::string_view text, Level fallback);

TM_API void write(Level at, std::string_view room, std::string_view text);
inline void debug(std::string_view room, std::string_view text) { write(Level::debug, room, text); }
inline void info(std::string_view room, std::string_view text) { write(Level::info, room, text); }
inline void warning(std::string_view room, std::string_view text) { write(Level::warning, room, text); }
inline void error(std::string_view room, std::string_view text) { write(Level::error, room, text); }

// Lets the first event of a period through and counts the others. One object for each call site (or object) whose
// repetition is to be damped:
//     static log::Once once(60'000);
//     if (uint64_t n = once.pass()) log::warning("rpc", "…");    // n = 1 + the number suppressed since the last line
class TM_API Once {
 public:
  explicit Once(int64_t period_ms) : period_ns_(period_ms * 1'000'000) {}
  uint64_t pass();

 private:
  const int64_t period_ns_;
  std::atomic<int64_t> next_ns_{0};
  std::atomic<uint64_t> suppressed_{0};
};

}  // namespace torch_mooncake::log
