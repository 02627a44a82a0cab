// NicWatch: tells when links or addresses of this network namespace change (netlink), on a thread of its own that
// sleeps otherwise.
//
// `changed` runs on that thread, at least once after each change, and may block. The destructor ends the thread and
// waits for a running `changed`; in a forked child, where the thread does not exist, it only forgets it.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <thread>

#include "common/api.h"
#include "common/fd.h"
#include "common/status.h"

namespace torch_mooncake {

class TM_API NicWatch {
 public:
  static Result<std::unique_ptr<NicWatch>> start(std::function<void()> changed);
  ~NicWatch();
  NicWatch(const NicWatch&) = delete;
  NicWatch& operator=(const NicWatch&) = delete;

 private:
  NicWatch() = default;
  void run();

  UniqueFd netlink_, stop_;
  std::function<void()> changed_;
  std::thread thread_;
  pid_t pid_ = 0;
};

}  // namespace torch_mooncake
