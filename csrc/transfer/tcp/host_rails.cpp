#include "transfer/tcp/host_rails.h"

#include <algorithm>

#include "common/log.h"

namespace torch_mooncake::transfer {

void HostRails::listening(const std::string& asked, const std::string& bound) {
  auto host = rpc::parse_address(asked), port = rpc::parse_address(bound);
  if (!host || !port || host->kind != rpc::Address::Kind::tcp || port->kind != rpc::Address::Kind::tcp) return;
  host->port = port->port;
  bool running;
  {
    std::lock_guard lock(mutex_);
    listening_.push_back(std::move(*host));
    running = started_;
  }
  if (running) (void)read();
}

void HostRails::start() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(started_, true)) return;
  }
  auto watch = NicWatch::start([this] {
    if (read()) changed_();
  });
  if (!watch) log::warning("transfer", watch.status().to_string() + ": rails are not refreshed");
  (void)read();
  std::lock_guard lock(mutex_);
  if (watch) watch_ = std::move(*watch);
}

void HostRails::stop() {
  std::unique_ptr<NicWatch> watch;
  std::lock_guard lock(mutex_);
  started_ = true;
  watch.swap(watch_);
}

bool HostRails::read() {
  auto nics = Topology::discover().nics;
  std::lock_guard lock(mutex_);
  auto ends = rail_ends(nics, filter_, listening_);
  excluded_.clear();
  for (auto& end : rail_ends(nics, NicFilter(), listening_)) {
    auto same = [&](auto& allowed) { return allowed.address == end.address; };
    if (std::none_of(ends.begin(), ends.end(), same)) excluded_.push_back(end.address.host());
  }
  if (ends == ends_) return false;
  ends_ = std::move(ends);
  return true;
}

std::vector<RailEnd> HostRails::ends() const {
  std::lock_guard lock(mutex_);
  return ends_;
}

bool HostRails::excludes(const std::string& host) const {
  std::lock_guard lock(mutex_);
  return std::find(excluded_.begin(), excluded_.end(), host) != excluded_.end();
}

}  // namespace torch_mooncake::transfer
