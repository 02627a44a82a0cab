// One seeded scheduler in virtual time for a whole cluster in one thread. What would be a thread of a process is a
// fiber here; exactly one runs, and it goes on until it waits (sleeps, takes a lock that is held, waits for an answer)
// or passes a failpoint. Everything random comes from one generator, so a seed names one run, event for event.
//
// interpose.cpp puts this in the place of libc's clock, sleep, randomness, threads, mutexes and condition variables,
// so the pool's code runs as it is shipped.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace torch_mooncake::pool::sim {

inline constexpr int64_t kUs = 1'000, kMs = 1'000'000, kSecond = 1'000'000'000;

// A machine: its steady clock has an offset and a rate of its own, and may jump forward.
class Host {
 public:
  Host(std::string id, int64_t offset_ns, double rate) : id(std::move(id)), clock_(offset_ns), rate_(rate) {}
  const std::string id;
  bool lost = false;  // its processes die without a word to anybody
  int64_t clock(int64_t now) const { return clock_ + static_cast<int64_t>(static_cast<double>(now - since_) * rate_); }
  int64_t when(int64_t clock_ns) const {  // INT64_MAX: never
    if (clock_ns == INT64_MAX) return INT64_MAX;
    return since_ + static_cast<int64_t>(static_cast<double>(clock_ns - clock_) / rate_) + 1;
  }
  void jump(int64_t now, int64_t by_ns) {
    clock_ = clock(now) + by_ns;
    since_ = now;
  }

 private:
  int64_t clock_, since_ = 0;
  double rate_;
};

// A process of a host. Dead: none of its fibers runs again, and what they held stays as it is, but for the files.
struct Process {
  std::string name;
  Host* host = nullptr;
  bool alive = true;
  int64_t paused_until = 0;
  std::set<int> fds;                // that came in messages
  int broken = 0;                   // sessions that it has lost
  std::function<void()> on_killed;  // what the kernel does then: connections end
};

struct Fiber {
  ucontext_t context;
  Process* process = nullptr;
  std::function<void()> body;
  uint64_t turn = 0;  // counts its resumptions, so that a late wake-up is known as such
};

// Those who wait for something. They ask again when they are woken, and may be woken for nothing.
class WaitList {
 public:
  void wait(int64_t until);  // virtual
  void wake();

 private:
  std::vector<std::pair<Fiber*, uint64_t>> waiting_;
};

class World {
 public:
  World(uint64_t seed, bool verbose);
  // Runs `director` and all it starts, until it returns or something is found to be wrong.
  void run(std::function<void()> director);

  int64_t now() const { return now_; }
  uint64_t roll(uint64_t n) { return rng_() % n; }
  bool chance(double p) { return static_cast<double>(rng_() >> 11) * 0x1p-53 < p; }
  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(roll(uint64_t(high - low) + 1)); }

  Process* process(std::string name, Host* host);
  // Fibers never run again; the kernel closes its files. On one of its own fibers it does not return.
  void kill(Process* process);
  void pause(Process* process, int64_t until) { process->paused_until = std::max(process->paused_until, until); }

  // An event outside of all processes, which must not wait.
  void at(int64_t when, std::function<void()> fn);
  // As a fiber of that process, as soon as it runs; never if it is dead by then.
  void start(Process* process, std::function<void()> fn) { start_at(now_, process, std::move(fn)); }
  void start_at(int64_t when, Process* process, std::function<void()> fn);

  // Of the running fiber.
  Fiber* current() const { return current_; }
  void sleep_until(int64_t when);
  void resume_later(Fiber* fiber, uint64_t turn, int64_t when);
  void switch_out();

  // What happened: into the hash, and on stdout of a verbose run.
  void trace(const char* what, uint64_t a, const std::function<std::string()>& text = {});
  uint64_t hash() const { return hash_; }
  void violation(const std::string& what);
  const std::string& found() const { return found_; }

  // Called at every failpoint that a fiber passes.
  std::function<void(std::string_view)> at_failpoint;

 private:
  struct Event {
    int64_t when;
    uint64_t number;
    std::function<void()> fn;
    bool operator<(const Event& o) const { return std::tie(o.when, o.number) < std::tie(when, number); }
  };
  void resume(Fiber* fiber);
  void resume_if(Fiber* fiber, uint64_t turn);
  static void trampoline();

  std::mt19937_64 rng_;
  const bool verbose_;
  int64_t now_ = kSecond;
  uint64_t next_event_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<Fiber*> idle_;
  Fiber* current_ = nullptr;
  ucontext_t main_;
  bool over_ = false;
  uint64_t hash_ = 0xcbf29ce484222325;
  std::string found_;
};

extern World* world;  // null outside of a run

}  // namespace torch_mooncake::pool::sim
