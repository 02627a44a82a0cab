// A fake RDMA driver with the manners of hardware on its worst day. Queue pairs complete in random order among each
// other; payload moves when the completion is made and not before, that of unsignalled requests last; a request that
// fails has moved half of its bytes; a device may die and never complete anything again.
//
// The fabric (queue pairs and keys of all processes) is a file that children of the test share, and payload goes into
// other processes by process_vm_writev: nothing of a target process has to run for it, as with a NIC.
#pragma once

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "common/clock.h"
#include "common/fd.h"
#include "transfer/rdma/driver.h"

namespace fake_verbs {

using namespace torch_mooncake;
using namespace torch_mooncake::transfer::rdma;

struct Fabric {
  static constexpr uint32_t kKeys = 1 << 16, kQueuePairs = 1 << 12;
  struct Key {
    std::atomic<uint32_t> valid, users;
    int pid;
    uint64_t address, nbytes;
    bool writable;
  };
  struct Pair {
    std::atomic<uint32_t> ready, users;  // connected and not failed; a remote request is inside
    std::atomic<int32_t> receives;
    int pid;
    uint32_t device, peer;
  };
  std::atomic<uint32_t> keys_used, pairs_used, devices_used;
  Key keys[kKeys];
  Pair pairs[kQueuePairs];

  // This test's fabric; children find it by the environment.
  static Fabric& instance() {
    static Fabric* fabric = [] {
      const char* path = getenv("TM_TEST_FABRIC");
      int fd = path ? open(path, O_RDWR | O_CLOEXEC) : memfd_create("fabric", MFD_CLOEXEC);
      if (!path) {
        if (ftruncate(fd, sizeof(Fabric)) != 0) abort();
        setenv("TM_TEST_FABRIC", ("/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd)).c_str(), 1);
      }
      void* data = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (data == MAP_FAILED) abort();
      return static_cast<Fabric*>(data);
    }();
    return *fabric;
  }
};

// Waits until no request is inside. A process killed inside one stays there for ever: then for a second.
inline void wait_until_unused(std::atomic<uint32_t>& users) {
  for (auto deadline = Deadline::after_ms(1000); users.load() != 0 && !deadline.expired();) usleep(20);
}

inline sockaddr_un address_of(uint32_t device) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;
  std::string path = std::string(1, '\0') + "tm-fake" + getenv("TM_TEST_FABRIC") + "/" + std::to_string(device);
  std::memcpy(out.sun_path, path.data(), std::min(path.size(), sizeof out.sun_path));
  return out;
}

// Where a thread waits for as long as a test says: a kernel that takes its time.
class Gate {
 public:
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  void open() {
    {
      std::lock_guard lock(mutex_);
      closed_ = false;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return !closed_; });
    --waiting_;
  }
  int waiting() const {
    std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  int waiting_ = 0;
};

class FakeDevice;

class FakeRegistration final : public Registration {
 public:
  explicit FakeRegistration(uint32_t key) : key_(key) {}
  // The key of what is deregistered works on, as if the NIC had handed it out again at once.
  static inline std::atomic<bool> keys_live_on{false};
  ~FakeRegistration() override {
    if (keys_live_on) return;
    auto& key = Fabric::instance().keys[key_];
    key.valid = 0;
    wait_until_unused(key.users);
  }
  uint32_t local_key() const override { return key_; }
  uint32_t remote_key() const override { return key_; }

 private:
  const uint32_t key_;
};

class FakePair final : public QueuePair {
 public:
  FakePair(std::shared_ptr<FakeDevice> device, uint32_t number, uint32_t depth)
      : device_(std::move(device)), number_(number), depth_(depth) {}
  ~FakePair() override;
  QueuePairAddress address() const override { return {0, number_, 7, 4096}; }
  Status connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid& remote_gid) override;
  void fail() override;
  Status post(std::span<const WorkRequest> requests) override;
  Status post_receives(uint32_t count) override {
    mine().receives += static_cast<int32_t>(count);
    return {};
  }

 private:
  friend class FakeDevice;
  struct Queued {
    WorkRequest request;
    std::string inlined;
    int64_t at_ns;
  };
  Fabric::Pair& mine() const { return Fabric::instance().pairs[number_]; }

  const std::shared_ptr<FakeDevice> device_;
  const uint32_t number_, depth_;
  std::deque<Queued> queue_;  // this and `failed_` under the device's mutex
  bool failed_ = false;
  bool lost_ = false;  // what it sends never arrives
};

class FakeDevice final : public Device, public std::enable_shared_from_this<FakeDevice> {
 public:
  FakeDevice(std::string name, uint64_t max_mr_nbytes)
      : name_(std::move(name)), max_mr_nbytes_(max_mr_nbytes), id_(Fabric::instance().devices_used++) {
    completion_fd_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
    ready_fd_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    event_fd_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    socket_ = UniqueFd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    auto address = address_of(id_);
    if (bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) abort();
    for (int fd : {ready_fd_.get(), socket_.get()}) {
      epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
      epoll_ctl(completion_fd_.get(), EPOLL_CTL_ADD, fd, &event);
    }
    thread_ = std::thread([this] { run(); });
  }
  ~FakeDevice() override { stop(); }
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // --- What a test does to it.
  // After `after` more requests, one fails so (and its queue pair with it).
  void fail_request(int after, Outcome outcome) {
    std::lock_guard lock(mutex_);
    fail_after_ = after;
    fail_outcome_ = outcome;
  }
  // Each completion takes so long.
  void set_delay_us(int us) { delay_us_ = us; }
  // Nothing completes, not even as flushed.
  void set_hanging(bool hanging) {
    {
      std::lock_guard lock(mutex_);
      hanging_ = hanging;
    }
    changed_.notify_all();
  }
  void set_port(bool up) {
    {
      std::lock_guard lock(mutex_);
      port_up_ = up;
    }
    changed_.notify_all();
    raise(up ? Event::port_up : Event::port_down);
  }
  void die() {
    set_hanging(true);
    raise(Event::fatal);
  }
  // Its GIDs; packets from the first `lost` of them never arrive.
  void set_gids(std::vector<Gid> gids, size_t lost) {
    std::lock_guard lock(mutex_);
    gids_ = std::move(gids);
    gids_lost_ = lost;
  }
  void set_max_pairs(int n) { max_pairs_ = n; }
  Gate connecting, failing, destroying, posting, registering, creating;
  void fail_connects(int n) { fail_connects_ = n; }  // the next so many
  // Taken away: it cannot be armed, and its descriptors say for ever that there is something.
  void take_away() {
    die();
    taken_away_ = true;
    uint64_t one = 1;
    (void)!write(ready_fd_.get(), &one, sizeof one);
  }
  int armings() const { return armings_; }
  void set_numa_node(int node) { numa_node_ = node; }
  uint64_t immediates() const { return immediates_; }             // that it was given to send
  static inline std::function<bool(const void* data)> on_device;  // no memory of this host
  static inline bool peer_memory = false;                         // it is registered by address all the same
  static inline std::function<bool(void* to, const void* from, size_t n)> takes_write;  // a device's memory
  uint64_t nbytes_moved() const { return moved_; }
  uint64_t requests() const { return requests_; }
  int pairs() const { return pairs_alive_; }

  // --- Device
  DeviceInfo info() const override {
    std::lock_guard lock(mutex_);
    return {.name = name_,
            .port_up = port_up_,
            .max_mr_nbytes = max_mr_nbytes_,
            .max_message_nbytes = 1 << 30,
            .max_work_requests = 256,
            .max_inline_nbytes = 64,
            .mtu = 4096,
            .speed_mbps = 100'000,
            .numa_node = numa_node_};
  }
  std::vector<Gid> gids() const override {
    std::lock_guard lock(mutex_);
    return gids_;
  }
  Result<std::unique_ptr<Registration>> register_memory(void* data, uint64_t nbytes, bool, bool writable) override {
    if (on_device && on_device(data) && !peer_memory) return Status(Code::io, "ibv_reg_mr: Bad address");
    return add_key(reinterpret_cast<uint64_t>(data), nbytes, writable);
  }
  Result<std::unique_ptr<Registration>> add_key(uint64_t address, uint64_t nbytes, bool writable) {
    registering.pass();
    if (gone()) return Status(Code::io, "ibv_reg_mr: Input/output error");
    if (nbytes > max_mr_nbytes_) return Status(Code::io, "ibv_reg_mr: larger than max_mr_size");
    uint32_t index = ++Fabric::instance().keys_used;
    if (index >= Fabric::kKeys) return Status(Code::io, "ibv_reg_mr: Cannot allocate memory");
    auto& key = Fabric::instance().keys[index];
    key.pid = getpid();
    key.address = address;
    key.nbytes = nbytes;
    key.writable = writable;
    key.valid = 1;
    return std::unique_ptr<Registration>(new FakeRegistration(index));
  }
  Result<std::unique_ptr<Registration>> register_dmabuf(int fd, uint64_t offset, uint64_t nbytes, uint64_t address,
                                                        bool, bool writable) override {
    uint64_t range[2];  // as FakeCuda::export_dmabuf wrote them
    if (pread(fd, range, sizeof range, 0) != sizeof range || offset + nbytes > range[1] || range[0] + offset != address)
      return Status(Code::io, "ibv_reg_dmabuf_mr: Invalid argument");
    return add_key(address, nbytes, writable);
  }
  Result<std::unique_ptr<QueuePair>> make_queue_pair(uint32_t work_requests, uint32_t) override {
    creating.pass();
    uint32_t index = ++Fabric::instance().pairs_used;
    if (index >= Fabric::kQueuePairs) return Status(Code::io, "ibv_create_qp: Cannot allocate memory");
    auto& pair = Fabric::instance().pairs[index];
    pair.pid = getpid();
    pair.device = id_;
    std::lock_guard lock(mutex_);
    if (dead()) return Status(Code::io, "ibv_create_qp: Input/output error");
    if (pairs_alive_ >= max_pairs_) return Status(Code::busy, "the fake has as many queue pairs as it may");
    ++pairs_alive_;
    auto made = std::make_unique<FakePair>(shared_from_this(), index, work_requests);
    pairs_by_number_[index] = made.get();
    return std::unique_ptr<QueuePair>(std::move(made));
  }
  size_t poll(std::span<Completion> out) override {
    size_t n = 0;
    uint32_t received[2];
    while (n < out.size() && recv(socket_.get(), received, sizeof received, 0) == sizeof received)
      out[n++] = {0, received[0], Outcome::done, true, received[1]};
    std::lock_guard lock(mutex_);
    while (n < out.size() && !completions_.empty()) {
      out[n++] = std::move(completions_.front());
      completions_.pop_front();
    }
    return n;
  }
  Status arm() override {
    ++armings_;
    if (taken_away_) return {Code::io, "ibv_req_notify_cq: Input/output error"};
    std::lock_guard lock(mutex_);
    armed_ = true;
    return {};
  }
  int completion_fd() const override { return completion_fd_.get(); }
  void clear_completion_fd() override {
    if (!taken_away_) drain(ready_fd_.get());
  }
  int event_fd() const override { return event_fd_.get(); }
  bool gone() const override {
    std::lock_guard lock(mutex_);
    return dead();
  }
  std::optional<Event> next_event() override {
    std::lock_guard lock(mutex_);
    if (events_.empty()) {
      drain(event_fd_.get());
      return std::nullopt;
    }
    auto event = events_.front();
    events_.pop_front();
    return event;
  }

 private:
  friend class FakePair;
  bool dead() const { return hanging_ && !events_seen_fatal_.empty(); }
  static void drain(int fd) {
    uint64_t n;
    while (read(fd, &n, sizeof n) > 0) {
    }
  }
  void raise(Event event) {
    std::lock_guard lock(mutex_);
    events_.push_back(event);
    if (event == Event::fatal) events_seen_fatal_ = "fatal";
    uint64_t one = 1;
    (void)!write(event_fd_.get(), &one, sizeof one);
  }
  void complete(Completion completion) {  // mutex held
    completions_.push_back(std::move(completion));
    if (!std::exchange(armed_, false)) return;
    uint64_t one = 1;
    (void)!write(ready_fd_.get(), &one, sizeof one);
  }

  // Requests of `pair` up to the next that gives a completion; those that give none wait for it, but not for ever.
  size_t due(const FakePair& pair) const {
    for (size_t i = 0; i < pair.queue_.size(); ++i)
      if (pair.queue_[i].request.signalled || pair.failed_) return i + 1;
    bool old = !pair.queue_.empty() && steady_ns() - pair.queue_.front().at_ns > 20'000'000;
    return old ? pair.queue_.size() : 0;
  }

  void run() {
    std::unique_lock lock(mutex_);
    std::mt19937 random(id_);
    while (!stopping_) {
      std::vector<FakePair*> ready;
      if (!hanging_)
        for (auto& [number, pair] : pairs_by_number_)
          if (due(*pair) > 0) ready.push_back(pair);
      if (ready.empty()) {
        changed_.wait_for(lock, std::chrono::milliseconds(20));
        continue;
      }
      step(*ready[random() % ready.size()], lock);
    }
  }

  void step(FakePair& pair, std::unique_lock<std::mutex>& lock) {
    std::vector<FakePair::Queued> batch;
    for (size_t n = due(pair); n > 0; --n) {
      batch.push_back(std::move(pair.queue_.front()));
      pair.queue_.pop_front();
    }
    bool flush = pair.failed_ || !port_up_;
    if (!port_up_) pair.failed_ = true;
    inside_ = &pair;
    lock.unlock();
    if (int us = delay_us_; us > 0 && !flush) usleep(us);
    std::vector<Completion> made;
    for (auto& queued : batch) {
      auto& request = queued.request;
      ++requests_;
      Outcome outcome = Outcome::flushed;
      if (!flush) {
        outcome = planned_failure();
        outcome = move(pair, queued, outcome);
      }
      if (outcome != Outcome::done || request.signalled)
        made.push_back(
            {request.id, pair.number_, outcome, false, 0, outcome == Outcome::done ? "" : "the fake's will"});
      if (outcome != Outcome::done) flush = true;
    }
    lock.lock();
    if (flush) {
      pair.failed_ = true;
      pair.mine().ready = 0;
    }
    for (auto& completion : made) complete(std::move(completion));
    inside_ = nullptr;
    changed_.notify_all();
  }

  Outcome planned_failure() {
    std::lock_guard lock(mutex_);
    return fail_after_ >= 0 && fail_after_-- == 0 ? fail_outcome_ : Outcome::done;
  }

  Outcome move(FakePair& pair, const FakePair::Queued& queued, Outcome planned) {
    auto& request = queued.request;
    auto& remote = Fabric::instance().pairs[pair.mine().peer];
    remote.users++;
    Outcome outcome = Outcome::retries_exceeded;
    // An immediate comes with the last byte, or not at all. Which of them, a sender that hears of a failure cannot
    // know.
    const bool immediate = request.opcode == Opcode::write_with_immediate;
    const bool whole = planned == Outcome::done || (immediate && ++unknown_fates_ % 2 == 0);
    if (remote.ready == 1 && remote.peer == pair.number_ && !pair.lost_)
      outcome = move_between(remote, queued, whole ? request.nbytes : request.nbytes / 2);
    if (outcome == Outcome::done && immediate && whole) outcome = deliver(remote, pair.mine().peer, request.immediate);
    remote.users--;
    return outcome == Outcome::done ? planned : outcome;
  }

  Outcome move_between(const Fabric::Pair& remote, const FakePair::Queued& queued, uint64_t nbytes) {
    auto& request = queued.request;
    if (request.nbytes == 0) return Outcome::done;
    auto& key = Fabric::instance().keys[request.remote_key % Fabric::kKeys];
    auto& ours = Fabric::instance().keys[request.local_key % Fabric::kKeys];
    auto inside = [](const Fabric::Key& k, uint64_t address, uint64_t n, int pid) {
      return k.valid && k.pid == pid && address >= k.address && address + n <= k.address + k.nbytes;
    };
    key.users++;
    Outcome outcome = Outcome::remote_access;
    bool write = request.opcode != Opcode::read;
    if (!request.inlined && !inside(ours, request.local, request.nbytes, getpid())) {
      outcome = Outcome::failed;
    } else if (inside(key, request.remote, request.nbytes, remote.pid) && (key.writable || !write)) {
      auto* local = request.inlined ? const_cast<char*>(queued.inlined.data()) : reinterpret_cast<char*>(request.local);
      auto* there = reinterpret_cast<char*>(request.remote);
      outcome = Outcome::done;
      if (remote.pid == getpid()) {
        auto* to = write ? there : local;
        auto* from = write ? local : there;
        if (!takes_write || !takes_write(to, from, nbytes)) std::memcpy(to, from, nbytes);
      } else {
        iovec l{local, nbytes}, r{there, nbytes};
        ssize_t n =
            write ? process_vm_writev(remote.pid, &l, 1, &r, 1, 0) : process_vm_readv(remote.pid, &l, 1, &r, 1, 0);
        if (n != static_cast<ssize_t>(nbytes)) outcome = Outcome::retries_exceeded;
      }
      moved_ += nbytes;
    }
    key.users--;
    return outcome;
  }

  // A receiver that is not ready is asked again, for a while.
  static Outcome deliver(Fabric::Pair& remote, uint32_t number, uint32_t immediate) {
    for (auto deadline = Deadline::after_ms(500); remote.receives.fetch_sub(1) <= 0;) {
      remote.receives++;
      if (remote.ready != 1 || deadline.expired()) return Outcome::retries_exceeded;
      usleep(100);
    }
    uint32_t message[2] = {number, immediate};
    auto address = address_of(remote.device);
    UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    timeval patience{0, 500'000};
    setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    ssize_t n = sendto(socket.get(), message, sizeof message, 0, reinterpret_cast<sockaddr*>(&address), sizeof address);
    return n == sizeof message ? Outcome::done : Outcome::retries_exceeded;
  }

  const std::string name_;
  const uint64_t max_mr_nbytes_;
  const uint32_t id_;
  UniqueFd completion_fd_, ready_fd_, event_fd_, socket_;
  std::atomic<int> delay_us_{0};
  std::atomic<uint64_t> moved_{0}, requests_{0};
  std::atomic<int> pairs_alive_{0}, max_pairs_{1 << 20}, fail_connects_{0}, armings_{0}, numa_node_{-1};
  std::atomic<uint64_t> immediates_{0};
  std::atomic<bool> taken_away_{false};
  unsigned unknown_fates_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false, hanging_ = false, port_up_ = true, armed_ = false;
  std::string events_seen_fatal_;
  std::vector<Gid> gids_ = {Gid{.raw = {0xfe}, .kind = GidKind::infiniband}};
  size_t gids_lost_ = 0;
  int fail_after_ = -1;
  Outcome fail_outcome_ = Outcome::failed;
  std::map<uint32_t, FakePair*> pairs_by_number_;
  FakePair* inside_ = nullptr;
  std::deque<Completion> completions_;
  std::deque<Event> events_;
  std::thread thread_;
};

inline FakePair::~FakePair() {
  device_->destroying.pass();
  {
    std::unique_lock lock(device_->mutex_);
    queue_.clear();
    device_->pairs_by_number_.erase(number_);
    device_->changed_.wait(lock, [&] { return device_->inside_ != this; });
  }
  mine().ready = 0;
  wait_until_unused(mine().users);
  --device_->pairs_alive_;
}

inline Status FakePair::connect(const QueuePairAddress& remote, const Gid& our_gid, const Gid&) {
  device_->connecting.pass();
  if (device_->fail_connects_ > 0 && device_->fail_connects_-- > 0) return {Code::io, "ibv_modify_qp: no route"};
  mine().peer = remote.number;
  std::lock_guard lock(device_->mutex_);
  for (size_t i = 0; i < device_->gids_lost_; ++i) lost_ = lost_ || our_gid.raw == device_->gids_[i].raw;
  if (!device_->port_up_ || device_->dead()) return {Code::io, "ibv_modify_qp: the port is down"};
  mine().ready = 1;
  return {};
}

inline void FakePair::fail() {
  device_->failing.pass();
  {
    std::lock_guard lock(device_->mutex_);
    failed_ = true;
    mine().ready = 0;
  }
  device_->changed_.notify_all();
}

inline Status FakePair::post(std::span<const WorkRequest> requests) {
  device_->posting.pass();
  {
    std::lock_guard lock(device_->mutex_);
    for (auto& request : requests) device_->immediates_ += request.opcode == Opcode::write_with_immediate;
    if (queue_.size() + requests.size() > depth_) return {Code::io, "ibv_post_send: Cannot allocate memory"};
    for (auto& request : requests) {
      auto* local = reinterpret_cast<const void*>(request.local);  // what is inlined the CPU copies
      if (request.inlined && FakeDevice::on_device && FakeDevice::on_device(local))
        return {Code::io, "ibv_post_send: Bad address"};
      Queued queued{request, {}, steady_ns()};
      if (request.inlined) queued.inlined.assign(reinterpret_cast<const char*>(request.local), request.nbytes);
      queue_.push_back(std::move(queued));
    }
  }
  device_->changed_.notify_all();
  return {};
}

class FakeDriver final : public Driver {
 public:
  explicit FakeDriver(int devices, uint64_t max_mr_nbytes = 8 << 20) {
    Fabric::instance();
    for (int i = 0; i < devices; ++i)
      devices_.push_back(std::make_shared<FakeDevice>("fake" + std::to_string(i), max_mr_nbytes));
  }
  ~FakeDriver() override {
    for (auto& device : devices_) device->stop();
  }
  Result<std::vector<std::shared_ptr<Device>>> open_devices(const NicFilter&, const RdmaOptions&) override {
    if (devices_.empty()) return Status(Code::unsupported, "no RDMA device with an active port");
    return std::vector<std::shared_ptr<Device>>(devices_.begin(), devices_.end());
  }
  int numa_nodes() const override { return node_of ? 2 : 1; }
  int numa_node_of(const void* data, uint64_t) const override { return node_of ? node_of(data) : -1; }
  std::function<int(const void*)> node_of;  // set before the engine is made
  FakeDevice& device(size_t i) { return *devices_.at(i); }
  size_t count() const { return devices_.size(); }

 private:
  std::vector<std::shared_ptr<FakeDevice>> devices_;
};

}  // namespace fake_verbs
