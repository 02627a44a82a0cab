// HostRails: our own ends of rails, kept up to date. One an engine.
//
// Nothing is read and no thread runs before start(), so engines that stay on their host have none of it. Thread-safe.
// After stop() the ends stay as they were.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "topology/nic_watch.h"
#include "transfer/tcp/rails.h"

namespace torch_mooncake::transfer {

class HostRails {
 public:
  // `changed` runs on the watching thread.
  HostRails(NicFilter filter, std::function<void()> changed)
      : filter_(std::move(filter)), changed_(std::move(changed)) {}
  // The engine listens: `asked` may have a wildcard host or port 0, `bound` has the port.
  void listening(const std::string& asked, const std::string& bound);
  void start();  // idempotent
  void stop();   // idempotent; not from `changed`
  std::vector<RailEnd> ends() const;
  // One of our addresses that the filter forbids.
  bool excludes(const std::string& host) const;

 private:
  bool read();  // whether the ends are others than before
  const NicFilter filter_;
  const std::function<void()> changed_;
  mutable std::mutex mutex_;
  std::vector<rpc::Address> listening_;
  std::vector<RailEnd> ends_;
  std::vector<std::string> excluded_;
  bool started_ = false;
  std::unique_ptr<NicWatch> watch_;
};

}  // namespace torch_mooncake::transfer
