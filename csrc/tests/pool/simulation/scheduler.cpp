#include "pool/simulation/scheduler.h"

#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "common/failpoint.h"

namespace torch_mooncake::pool::sim {
namespace {

constexpr size_t kStackBytes = 2 << 20;    // touched as far as it is used; a guard page below
constexpr int64_t kLimit = 400 * kSecond;  // no run takes so long unless something hangs

Status failpoint_passed(std::string_view name) {
  if (world && world->current() && world->at_failpoint) world->at_failpoint(name);
  return {};
}

}  // namespace

World* world = nullptr;

World::World(uint64_t seed, bool verbose) : rng_(seed), verbose_(verbose) {
  world = this;
  set_failpoint_hook(failpoint_passed);
}

void World::run(std::function<void()> director) {
  Process* outside = process("director", new Host("outside", 0, 1.0));
  start(outside, [this, director = std::move(director)] {
    director();
    over_ = true;
  });
  while (!over_ && found_.empty()) {
    if (events_.empty() || events_.top().when > kLimit) return violation("something hangs");
    Event event = std::move(const_cast<Event&>(events_.top()));
    events_.pop();
    now_ = std::max(now_, event.when);
    event.fn();
  }
}

Process* World::process(std::string name, Host* host) {
  processes_.push_back(std::make_unique<Process>(Process{std::move(name), host, true, 0, {}, 0, {}}));
  return processes_.back().get();
}

void World::kill(Process* process) {
  if (!process->alive) return;
  trace("killed", 0, [&] { return process->name; });
  process->alive = false;
  for (int fd : std::exchange(process->fds, {})) {
    ::flock(fd, LOCK_UN);  // its maps of the file, which also go with a process, stay here
    ::close(fd);
  }
  if (process->on_killed) process->on_killed();
  if (current_ && current_->process == process) switch_out();
}

void World::at(int64_t when, std::function<void()> fn) {
  if (when == INT64_MAX) return;
  events_.push({std::max(when, now_), next_event_++, std::move(fn)});
}

void World::start_at(int64_t when, Process* process, std::function<void()> fn) {
  at(when, [this, process, fn = std::move(fn)]() mutable {
    if (!process->alive) return;
    if (process->paused_until > now_) return start_at(process->paused_until, process, std::move(fn));
    Fiber* fiber = nullptr;
    if (idle_.empty()) {
      fiber = new Fiber;
      void* stack =
          ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED || ::mprotect(stack, 4096, PROT_NONE) != 0) std::abort();
      ::getcontext(&fiber->context);
      fiber->context.uc_stack = {stack, 0, kStackBytes};
      fiber->context.uc_link = nullptr;
      ::makecontext(&fiber->context, &World::trampoline, 0);
    } else {
      fiber = idle_.back();
      idle_.pop_back();
    }
    fiber->process = process;
    fiber->body = std::move(fn);
    resume(fiber);
  });
}

void World::trampoline() {
  for (;;) {
    Fiber* self = world->current_;
    self->body();
    self->body = {};
    world->idle_.push_back(self);
    world->switch_out();
  }
}

void World::resume(Fiber* fiber) {
  ++fiber->turn;
  current_ = fiber;
  ::swapcontext(&main_, &fiber->context);
  current_ = nullptr;
}

void World::switch_out() { ::swapcontext(&current_->context, &main_); }

void World::resume_later(Fiber* fiber, uint64_t turn, int64_t when) {
  at(when, [this, fiber, turn] { resume_if(fiber, turn); });
}

void World::resume_if(Fiber* fiber, uint64_t turn) {
  if (fiber->turn != turn || !fiber->process->alive) return;
  if (fiber->process->paused_until > now_) return resume_later(fiber, turn, fiber->process->paused_until);
  resume(fiber);
}

void World::sleep_until(int64_t when) {
  resume_later(current_, current_->turn, when);
  switch_out();
}

void WaitList::wait(int64_t until) {
  Fiber* self = world->current();
  waiting_.emplace_back(self, self->turn);
  world->resume_later(self, self->turn, until);
  world->switch_out();
  std::erase_if(waiting_, [self](const auto& w) { return w.first == self; });
}

void WaitList::wake() {
  for (const auto& [fiber, turn] : std::exchange(waiting_, {}))
    world->resume_later(fiber, turn, world->now() + world->between(1, 20) * kUs);
}

void World::trace(const char* what, uint64_t a, const std::function<std::string()>& text) {
  for (uint64_t word : {static_cast<uint64_t>(now_), a, static_cast<uint64_t>(*what)})
    hash_ = (hash_ ^ word) * 0x100000001b3;
  if (!verbose_) return;
  std::printf("%12.6f  %-14s %-10s %s\n", static_cast<double>(now_) / 1e9,
              current_ ? current_->process->name.c_str() : "", what, text ? text().c_str() : std::to_string(a).c_str());
}

void World::violation(const std::string& what) {
  trace("violation", 0, [&] { return what; });
  if (found_.empty()) found_ = what;
}

}  // namespace torch_mooncake::pool::sim
