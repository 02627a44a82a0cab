// What a simulated process asks of libc and would make a run depend on the outside: answered by the World while one
// runs. The test program defines these functions, so the dynamic linker gives them to libstdc++ as well.
#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "pool/simulation/scheduler.h"

using torch_mooncake::pool::sim::Fiber;
using torch_mooncake::pool::sim::kUs;
using torch_mooncake::pool::sim::WaitList;
using torch_mooncake::pool::sim::world;

namespace {

Fiber* fiber() { return world ? world->current() : nullptr; }

[[noreturn]] void out_of_place(const char* what) {
  std::fprintf(stderr, "simulation: %s outside of a fiber\n", what);
  std::abort();
}

int64_t nanoseconds(const timespec& t) { return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec; }

// Condition variables in use, by address. One is never destroyed while somebody waits.
std::map<const void*, WaitList>& conditions() {
  static auto* all = new std::map<const void*, WaitList>;
  return *all;
}

struct Thread {
  bool over = false;
  WaitList joiners;
};

int wait_for_condition(pthread_cond_t* condition, pthread_mutex_t* mutex, int64_t until) {
  if (!fiber()) out_of_place("pthread_cond_wait");
  pthread_mutex_unlock(mutex);
  conditions()[condition].wait(until);
  pthread_mutex_lock(mutex);
  return until != INT64_MAX && world->now() >= until ? ETIMEDOUT : 0;
}

}  // namespace

#define TM_INTERPOSED extern "C" __attribute__((visibility("default")))

TM_INTERPOSED int clock_gettime(clockid_t clock, timespec* out) noexcept {
  if (!fiber()) return static_cast<int>(::syscall(SYS_clock_gettime, clock, out));
  const int64_t ns = fiber()->process->host->clock(world->now());
  *out = {ns / 1'000'000'000, ns % 1'000'000'000};
  return 0;
}

TM_INTERPOSED int nanosleep(const timespec* request, timespec* rest) {
  if (!fiber()) return static_cast<int>(::syscall(SYS_nanosleep, request, rest));
  const auto* host = fiber()->process->host;
  world->sleep_until(host->when(host->clock(world->now()) + nanoseconds(*request)));
  return 0;
}

TM_INTERPOSED ssize_t getrandom(void* out, size_t nbytes, unsigned flags) {
  if (!fiber()) return ::syscall(SYS_getrandom, out, nbytes, flags);
  auto* at = static_cast<unsigned char*>(out);
  for (size_t i = 0; i < nbytes; ++i) at[i] = static_cast<unsigned char>(world->roll(256));
  return static_cast<ssize_t>(nbytes);
}

TM_INTERPOSED int close(int fd) {
  if (fiber()) fiber()->process->fds.erase(fd);
  return static_cast<int>(::syscall(SYS_close, fd));
}

TM_INTERPOSED int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  for (int64_t pause = 50 * kUs; pthread_mutex_trylock(mutex) != 0; pause = std::min(pause * 2, 10'000 * kUs)) {
    if (fiber()) {
      world->sleep_until(world->now() + world->between(kUs, pause));
    } else {
      ::sched_yield();
    }
  }
  return 0;
}

TM_INTERPOSED int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  return wait_for_condition(condition, mutex, INT64_MAX);
}

TM_INTERPOSED int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t,
                                         const timespec* until) {
  if (!fiber()) out_of_place("pthread_cond_clockwait");
  return wait_for_condition(condition, mutex, fiber()->process->host->when(nanoseconds(*until)));
}

TM_INTERPOSED int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (const auto it = conditions().find(condition); it != conditions().end()) it->second.wake();
  return 0;
}

TM_INTERPOSED int pthread_cond_broadcast(pthread_cond_t* condition) noexcept { return pthread_cond_signal(condition); }

TM_INTERPOSED int pthread_create(pthread_t* out, const pthread_attr_t*, void* (*body)(void*), void* argument) noexcept {
  if (!fiber()) out_of_place("pthread_create");
  auto* thread = new Thread;  // leaks, as the process does at the end of the run
  *out = reinterpret_cast<pthread_t>(thread);
  world->start(fiber()->process, [=] {
    body(argument);
    thread->over = true;
    thread->joiners.wake();
  });
  return 0;
}

TM_INTERPOSED int pthread_join(pthread_t id, void**) {
  auto* thread = reinterpret_cast<Thread*>(id);
  while (!thread->over) thread->joiners.wait(INT64_MAX);
  return 0;
}
