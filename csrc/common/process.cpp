#include "common/process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace torch_mooncake {
namespace {

std::atomic<pid_t> known{0};

}  // namespace

pid_t process_id() {
  pid_t pid = known.load(std::memory_order_relaxed);
  if (pid != 0) return pid;
  // Handlers of the child run in the order of their registration: whoever asks in a later one gets the new answer, and
  // in an earlier one (nobody knew the id before) asks the kernel.
  static const int registered = pthread_atfork(nullptr, nullptr, [] { known.store(::getpid()); });
  pid = ::getpid();
  if (registered == 0) known.store(pid, std::memory_order_relaxed);
  return pid;
}

}  // namespace torch_mooncake
