// Nic: one RDMA device of an engine, and the thread that hears of its completions and events. The thread polls while
// there is something, then for 50 µs more, then sleeps on the completion channel.
//
// Ownership: the engine keeps its Nics until close(); clients are kept weakly. Threads: all methods are safe from any
// thread; clients are called on the Nic's thread, without any lock of its. After stop() nobody is called any more.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "common/log.h"
#include "transfer/rdma/driver.h"

namespace torch_mooncake::transfer::rdma {

class Nic {
 public:
  // The owner of a queue pair.
  class Client {
   public:
    virtual ~Client() = default;
    virtual void completed(std::span<const Completion> completions) = 0;  // of its queue pair, in order
    virtual void port_down() = 0;                                         // or the device is gone
    // Called each 10 ms after watch(), for as long as some client says true.
    virtual bool tick(int64_t now_ns) = 0;
  };

  Nic(std::shared_ptr<Device> device, uint32_t index);
  ~Nic() { stop(); }
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  Device& device() const { return *device_; }
  uint32_t index() const { return index_; }
  const DeviceInfo& info() const { return info_; }  // as it was when the engine was made
  bool up() const { return up_; }
  // It has died or was taken away, for good: as it was told, or as the device says now.
  bool gone() const { return gone_ || device_->gone(); }
  void add(uint32_t queue_pair, std::weak_ptr<Client> client);
  void remove(uint32_t queue_pair);
  void watch();
  void stop();

 private:
  void run();
  size_t poll();
  void arm();
  void sleep();
  void take_events();
  void lost(const std::string& why);
  std::vector<std::shared_ptr<Client>> clients() const;

  const std::shared_ptr<Device> device_;
  const uint32_t index_;
  const DeviceInfo info_;
  const UniqueFd wake_;
  std::atomic<bool> up_, stopping_{false}, watching_{false}, gone_{false};
  bool deaf_ = false;  // it could not be armed: it is looked at each tick
  log::Once deafness_{60'000};
  mutable std::mutex mutex_;
  std::unordered_map<uint32_t, std::weak_ptr<Client>> clients_;
  std::thread thread_;
};

}  // namespace torch_mooncake::transfer::rdma
