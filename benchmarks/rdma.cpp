// What the RDMA transport's software costs, without the network: two programs in one, for benchmarks/rdma.py.
//
//   rdma slices OPS SLICES     posts and completes OPS lists of SLICES writes through a driver whose requests are done
//   at
//                              once; prints slices for each second of the processor, over all threads
//   rdma register COUNT NBYTES DEVICE
//                              registers COUNT regions with an engine, and the same with bare ibv_reg_mr; seconds of
//                              each
#include <infiniband/verbs.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include "transfer/engine.h"
#include "transfer/rdma/driver.h"

using namespace torch_mooncake;
using namespace torch_mooncake::transfer::rdma;

namespace {

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6; };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

template <typename T>
T must(Result<T> result) {
  if (result) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.status().to_string().c_str());
  std::exit(1);
}

void must(const Status& status) {
  if (status) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

// ---- A driver whose requests are done when they are posted

class InstantDevice;

struct InstantRegistration final : Registration {
  uint32_t local_key() const override { return 1; }
  uint32_t remote_key() const override { return 1; }
};

class InstantPair final : public QueuePair {
 public:
  InstantPair(InstantDevice& device, uint32_t number) : device_(device), number_(number) {}
  QueuePairAddress address() const override { return {0, number_, 0, 4096}; }
  Status connect(const QueuePairAddress&, const Gid&, const Gid&) override { return {}; }
  void fail() override {}
  Status post(std::span<const WorkRequest> requests) override;
  Status post_receives(uint32_t) override { return {}; }

 private:
  InstantDevice& device_;
  const uint32_t number_;
};

class InstantDevice final : public Device {
 public:
  DeviceInfo info() const override {
    DeviceInfo info;
    info.name = "instant";
    info.port_up = true;
    info.max_mr_nbytes = info.max_message_nbytes = 1 << 30;
    info.max_work_requests = 1 << 14;
    info.mtu = 4096;
    return info;
  }
  std::vector<Gid> gids() const override { return {Gid{}}; }
  Result<std::unique_ptr<Registration>> register_memory(void*, uint64_t, bool, bool) override {
    return std::unique_ptr<Registration>(new InstantRegistration);
  }
  Result<std::unique_ptr<Registration>> register_dmabuf(int, uint64_t, uint64_t, uint64_t, bool, bool) override {
    return Status(Code::unsupported, "no dmabuf");
  }
  Result<std::unique_ptr<QueuePair>> make_queue_pair(uint32_t, uint32_t) override {
    return std::unique_ptr<QueuePair>(new InstantPair(*this, ++pairs_));
  }
  size_t poll(std::span<Completion> out) override {
    std::lock_guard lock(mutex_);
    size_t n = 0;
    for (; n < out.size() && !done_.empty(); ++n) {
      out[n] = std::move(done_.front());
      done_.pop_front();
    }
    return n;
  }
  Status arm() override {
    std::lock_guard lock(mutex_);
    armed_ = true;
    return {};
  }
  int completion_fd() const override { return ready_; }
  void clear_completion_fd() override {
    uint64_t n;
    (void)!read(ready_, &n, sizeof n);
  }
  int event_fd() const override { return events_; }
  std::optional<Event> next_event() override { return std::nullopt; }

  void complete(uint32_t pair, std::span<const WorkRequest> requests) {
    std::lock_guard lock(mutex_);
    for (auto& request : requests) {
      if (request.opcode == Opcode::read)  // the check of a new connection
        std::memcpy(reinterpret_cast<void*>(request.local), reinterpret_cast<void*>(request.remote), request.nbytes);
      if (request.signalled) done_.push_back({request.id, pair, Outcome::done, false, 0});
    }
    if (!done_.empty() && std::exchange(armed_, false)) {
      uint64_t one = 1;
      (void)!write(ready_, &one, sizeof one);
    }
  }

 private:
  const int ready_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), events_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::atomic<uint32_t> pairs_{0};
  std::mutex mutex_;
  bool armed_ = false;
  std::deque<Completion> done_;
};

Status InstantPair::post(std::span<const WorkRequest> requests) {
  device_.complete(number_, requests);
  return {};
}

struct InstantDriver final : Driver {
  Result<std::vector<std::shared_ptr<Device>>> open_devices(const NicFilter&, const RdmaOptions&) override {
    return std::vector<std::shared_ptr<Device>>{std::make_shared<InstantDevice>()};
  }
};

int slices(size_t ops, size_t count) {
  constexpr size_t kPage = 4096;
  auto make = [](const char* name) {
    EngineOptions options;
    options.rpc.name = name;
    options.listen = {"tcp://127.0.0.1:0"};
    options.transports = {"rdma"};
    options.rdma_driver = std::make_shared<InstantDriver>();
    return must(Engine::create(options));
  };
  auto a = make("a"), b = make("b");
  const size_t nbytes = count * 2 * kPage;
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto local = must(a->register_memory(data, nbytes, {})), target = must(b->register_memory(data, nbytes, {}));
  auto remote = must(must(a->connect(b->addresses().front(), Deadline::after_ms(5000)))
                         ->open(target->descriptor(), Deadline::after_ms(5000)));
  std::vector<Extent> extents;  // that are no neighbours: each is a slice
  for (size_t i = 0; i < count; ++i) extents.push_back({i * 2 * kPage, i * 2 * kPage, kPage});
  auto run = [&] { must(must(a->transfer(Direction::write, {{local, remote, extents}}, {}))->wait()); };
  run();
  const double cpu = cpu_seconds(), wall = now();
  for (size_t i = 0; i < ops; ++i) run();
  const double total = static_cast<double>(ops * count);
  std::printf("%.0f %.0f\n", total / (cpu_seconds() - cpu), total / (now() - wall));
  a->close();
  b->close();
  return 0;
}

// ---- Registrations

int registrations(size_t count, size_t nbytes, const std::string& device) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  EngineOptions options;
  options.transports = {"rdma"};
  options.nics = {device};
  auto engine = must(Engine::create(options));
  int n = 0;
  ibv_device** list = ibv_get_device_list(&n);
  ibv_context* context = nullptr;
  for (int i = 0; i < n; ++i)
    if (device == ibv_get_device_name(list[i])) context = ibv_open_device(list[i]);
  ibv_pd* pd = context ? ibv_alloc_pd(context) : nullptr;
  if (!pd) return 1;
  const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  std::vector<RegionPtr> regions;
  std::vector<ibv_mr*> bare;
  double ours = 0, theirs = 0;
  constexpr size_t kTurn = 50;
  for (size_t made = 0; made <= count; made += kTurn) {  // in turns; the first turn is not counted
    double start = now();
    for (size_t i = 0; i < kTurn; ++i) regions.push_back(must(engine->register_memory(data, nbytes, {})));
    if (made > 0) ours += now() - start;
    start = now();
    for (size_t i = 0; i < kTurn; ++i) bare.push_back(ibv_reg_mr(pd, data, nbytes, rights));
    if (made > 0) theirs += now() - start;
  }
  for (auto& region : regions) must(engine->deregister(region, Deadline::after_ms(5000)));
  engine->close();
  for (auto* mr : bare)
    if (!mr || ibv_dereg_mr(mr) != 0) return 1;
  std::printf("%.6f %.6f\n", ours, theirs);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "slices" && argc == 4) return slices(strtoul(argv[2], nullptr, 10), strtoul(argv[3], nullptr, 10));
  if (what == "register" && argc == 5)
    return registrations(strtoul(argv[2], nullptr, 10), strtoul(argv[3], nullptr, 10), argv[4]);
  std::fprintf(stderr, "usage: rdma slices OPS SLICES | rdma register COUNT NBYTES DEVICE\n");
  return 2;
}
