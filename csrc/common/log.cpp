#include "common/log.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "common/clock.h"

namespace torch_mooncake::log {

Level parse_level(std::string_view text, Level fallback) {
  if (text == "debug") return Level::debug;
  if (text == "info") return Level::info;
  if (text == "warning") return Level::warning;
  if (text == "error") return Level::error;
  if (text == "off") return Level::off;
  return fallback;
}

namespace {
std::atomic<int>& current() {
  static std::atomic<int> value = [] {
    const char* env = std::getenv("TM_LOG_LEVEL");
    return static_cast<int>(parse_level(env ? env : "", Level::warning));
  }();
  return value;
}
}  // namespace

Level level() { return static_cast<Level>(current().load(std::memory_order_relaxed)); }
void set_level(Level level) { current().store(static_cast<int>(level), std::memory_order_relaxed); }

void write(Level at, std::string_view room, std::string_view text) {
  if (!enabled(at) || at == Level::off) return;
  static constexpr char kLetters[] = "DIWE";
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm local;
  localtime_r(&now.tv_sec, &local);
  char line[2048];
  int n = std::snprintf(line, sizeof line, "%c %02d:%02d:%02d.%03ld %d torch_mooncake.%.*s: %.*s\n",
                        kLetters[static_cast<int>(at)], local.tm_hour, local.tm_min, local.tm_sec,
                        now.tv_nsec / 1'000'000, static_cast<int>(::getpid()), static_cast<int>(room.size()),
                        room.data(), static_cast<int>(text.size()), text.data());
  if (n <= 0) return;
  size_t size = static_cast<size_t>(n);
  if (size >= sizeof line) {
    size = sizeof line;
    line[size - 1] = '\n';
  }
  while (::write(STDERR_FILENO, line, size) < 0 && errno == EINTR) {
  }
}

uint64_t Once::pass() {
  int64_t now = steady_ns();
  int64_t next = next_ns_.load(std::memory_order_relaxed);
  if (now >= next && next_ns_.compare_exchange_strong(next, now + period_ns_)) return 1 + suppressed_.exchange(0);
  suppressed_.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

}  // namespace torch_mooncake::log
