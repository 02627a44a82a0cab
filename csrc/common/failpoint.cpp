#include "common/failpoint.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace torch_mooncake {
namespace {

struct Point {
  std::string action;
  int64_t sleep_ms = 0;
  uint64_t at = 0;  // 0: every passage
  uint64_t passed = 0;
};

struct Table {
  std::mutex mutex;
  std::map<std::string, Point, std::less<>> points;
};

std::atomic<Status (*)(std::string_view)> passage{nullptr};

Table& table() {
  static auto* t = new Table;  // never destroyed: threads may pass points at exit
  return *t;
}

[[noreturn]] void bad(std::string_view entry) {
  std::fprintf(stderr, "torch_mooncake: TM_FAILPOINTS entry not understood: \"%.*s\"\n", static_cast<int>(entry.size()),
               entry.data());
  std::abort();
}

template <typename T>
T number(std::string_view text, std::string_view entry) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) bad(entry);
  return value;
}

void parse(std::string_view spec, std::map<std::string, Point, std::less<>>& out) {
  while (!spec.empty()) {
    auto comma = spec.find(',');
    auto entry = spec.substr(0, comma);
    spec = comma == spec.npos ? std::string_view{} : spec.substr(comma + 1);
    auto equals = entry.find('=');
    if (equals == entry.npos || equals == 0) bad(entry);
    Point point;
    auto action = entry.substr(equals + 1);
    if (auto at = action.find('@'); at != action.npos) {
      point.at = number<uint64_t>(action.substr(at + 1), entry);
      action = action.substr(0, at);
    }
    if (auto colon = action.find(':'); colon != action.npos) {
      point.sleep_ms = number<int64_t>(action.substr(colon + 1), entry);
      action = action.substr(0, colon);
      if (action != "sleep") bad(entry);
    } else if (action != "error" && action != "kill" && action != "stop") {
      bad(entry);
    }
    point.action = action;
    out[std::string(entry.substr(0, equals))] = point;
  }
}

const bool from_environment = [] {
  if (const char* spec = std::getenv("TM_FAILPOINTS")) set_failpoints(spec);
  return true;
}();

}  // namespace

namespace failpoint_detail {

constinit std::atomic<bool> armed{false};

Status hit(std::string_view name) {
  if (const auto hook = passage.load(std::memory_order_acquire)) return hook(name);
  Point point;
  {
    std::lock_guard lock(table().mutex);
    auto found = table().points.find(name);
    if (found == table().points.end()) return {};
    ++found->second.passed;
    if (found->second.at != 0 && found->second.passed != found->second.at) return {};
    point = found->second;
  }
  if (point.action == "kill") {
    ::kill(::getpid(), SIGKILL);
  } else if (point.action == "stop") {
    ::kill(::getpid(), SIGSTOP);
  } else if (point.action == "sleep") {
    timespec ts{point.sleep_ms / 1000, point.sleep_ms % 1000 * 1'000'000};
    while (::nanosleep(&ts, &ts) != 0 && errno == EINTR) {
    }
  } else {
    return {Code::io, "failpoint " + std::string(name)};
  }
  return {};
}

}  // namespace failpoint_detail

void set_failpoint_hook(Status (*hook)(std::string_view)) {
  passage = hook;
  std::lock_guard lock(table().mutex);
  failpoint_detail::armed = hook || !table().points.empty();
}

void set_failpoints(std::string_view spec) {
  std::map<std::string, Point, std::less<>> points;
  parse(spec, points);
  std::lock_guard lock(table().mutex);
  table().points = std::move(points);
  failpoint_detail::armed = !table().points.empty();
}

}  // namespace torch_mooncake
