// FakeCuda: a CUDA driver without a device. Its memory is memory of the host (memfd, so that another process can really
// map what is shared with it) that only it hands out; streams are threads that carry out what is queued, as slowly and
// as badly as a test wants.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "transfer/cuda/driver.h"

namespace transfer_test {

using namespace torch_mooncake;

class FakeCuda final : public transfer::CudaDriver {
 public:
  // The process' fake, put in place by the first call. It stays: the queues of the engine hold its streams.
  static FakeCuda& install() {
    static auto* fake = new std::shared_ptr<FakeCuda>(std::make_shared<FakeCuda>());
    replace(*fake);
    return **fake;
  }

  std::atomic<int> copy_us{0};         // each copy takes so long
  std::atomic<int> fail_copies{0};     // so many of the next copies fail
  std::atomic<bool> hang{false};       // streams stand still
  std::atomic<bool> no_flags{false};   // the device has no stream memory operations
  std::atomic<bool> broken{false};     // every event fails, as after an error that the device does not recover from
  std::function<void()> at_wait_flag;  // runs in it first
  std::atomic<bool> captures{false};   // streams are being captured
  // Memory allocated from now on is a fault to whoever touches it but the driver; see host().
  std::atomic<bool> guarded{false};
  std::atomic<int> events_alive{0};
  std::atomic<bool> hang_pins{false}, no_pins{false};  // of host memory

  std::atomic<int> device_count{1};
  std::atomic<bool> peer_access{true};  // between any two devices
  std::atomic<int> first_used{0};       // devices from there on have a context in this process
  std::atomic<char> hardware{'0'};      // of device 0: other processes may see other devices
  std::atomic<bool> no_share{false}, no_map{false}, no_ids{false};
  std::atomic<int> mappings_alive{0}, mappings_made{0};
  std::atomic<int> unmapped_elsewhere{0};  // than on the thread that may wait for the device
  // What NICs write arrives at once, or when it is flushed.
  std::atomic<bool> no_dmabuf{false}, ordered{true}, fail_flushes{false}, hang_flushes{false};
  std::atomic<int> dmabufs_made{0}, flushes{0};

  // One allocation as by cudaMalloc; or many parts side by side, each mapped from a handle, as expandable segments are.
  std::shared_ptr<void> allocate(size_t nbytes, size_t parts = 1, int device = 0, void* at = nullptr) {
    constexpr size_t kPage = 4096;
    auto round_up = [](size_t n) { return (n + kPage - 1) / kPage * kPage; };
    size_t room = round_up(nbytes) + kPage, each = round_up((nbytes + parts - 1) / parts);
    auto* memory = static_cast<char*>(
        mmap(at, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED_NOREPLACE : 0), -1, 0));
    REQUIRE(memory != MAP_FAILED);
    std::lock_guard lock(mutex_);
    for (size_t begin = 0; begin < nbytes; begin += each) {
      size_t n = std::min(each, nbytes - begin);
      auto fd = std::make_shared<UniqueFd>(memfd_create("fake-cuda", MFD_CLOEXEC));
      REQUIRE(ftruncate(fd->get(), static_cast<off_t>(round_up(n))) == 0);
      REQUIRE(mmap(memory + begin, round_up(n), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd->get(), 0) ==
              memory + begin);
      char* alias = nullptr;
      if (guarded) {
        alias = static_cast<char*>(mmap(nullptr, round_up(n), PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0));
        REQUIRE(alias != MAP_FAILED);
        REQUIRE(mprotect(memory + begin, round_up(n), PROT_NONE) == 0);
      }
      auto base = reinterpret_cast<uint64_t>(memory) + begin;
      allocations_[base] = {{base, n, device, next_id_++}, std::move(fd), parts > 1, alias};
    }
    return std::shared_ptr<void>(memory, [this, room, round_up](void* p) {
      std::lock_guard relock(mutex_);
      auto begin = reinterpret_cast<uint64_t>(p);
      auto first = allocations_.lower_bound(begin), last = allocations_.lower_bound(begin + room);
      for (auto it = first; it != last; ++it)
        if (it->second.alias) munmap(it->second.alias, round_up(it->second.where.nbytes));
      allocations_.erase(first, last);
      munmap(p, room);
    });
  }
  // Where the driver itself, kernels and tests see what lies at that address of guarded memory; other memory is where
  // it is. Bytes from there to the end of the allocation.
  template <typename T>
  T* host(T* address) {
    auto at = reinterpret_cast<uint64_t>(address);
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(at);
    if (it == allocations_.begin() || at >= (--it)->first + it->second.where.nbytes || !it->second.alias)
      return address;
    return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(it->second.alias) + (at - it->first));
  }
  // A kernel.
  void queue(void* stream, std::function<void()> work) { static_cast<Stream*>(stream)->push(std::move(work)); }

  std::string describe() const override { return "fake CUDA"; }
  Result<transfer::CudaAllocation> find(uint64_t address) override {
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(address);
    if (it == allocations_.begin() || address >= (--it)->first + it->second.where.nbytes)
      return Status(Code::invalid_argument, "there is no device memory at that address");
    auto found = it->second.where;
    if (no_ids) found.id = 0;
    return found;
  }
  Result<std::shared_ptr<void>> make_current(int) override { return std::shared_ptr<void>(std::make_shared<int>()); }
  Result<transfer::CudaStream> make_stream(int) override { return static_cast<void*>(new Stream(*this)); }
  void destroy_stream(int, transfer::CudaStream stream) override { delete static_cast<Stream*>(stream); }
  Status copy(int, void* dst, const void* src, size_t n, transfer::CudaStream stream) override {
    queue(stream, [this, dst, src, n, stream] {
      if (copy_us) std::this_thread::sleep_for(std::chrono::microseconds(copy_us));
      if (fail_copies > 0 && fail_copies-- > 0) {
        static_cast<Stream*>(stream)->failed = true;
        return;
      }
      std::memcpy(host(static_cast<char*>(dst)), host(static_cast<const char*>(src)), n);
    });
    return {};
  }
  Result<bool> capturing(int, transfer::CudaStream) override { return captures.load(); }
  Result<transfer::CudaEvent> record(int, transfer::CudaStream stream) override {
    auto* event = new std::shared_ptr<Event>(std::make_shared<Event>());
    ++events_alive;
    queue(stream,
          [event = *event, stream] { event->state = static_cast<Stream*>(stream)->failed.exchange(false) ? 2 : 1; });
    return static_cast<void*>(event);
  }
  Result<bool> reached(int, transfer::CudaEvent event) override {
    if (broken) return Status(Code::io, "an illegal memory access was encountered");
    int state = (*static_cast<std::shared_ptr<Event>*>(event))->state;
    if (state == 2) return Status(Code::io, "an illegal memory access was encountered");
    return state == 1;
  }
  void destroy_event(int, transfer::CudaEvent event) override {
    --events_alive;
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  Result<void*> allocate_pinned(int, size_t n) override {
    while (hang_pins) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (no_pins) return Status(Code::io, "cuMemHostAlloc: out of memory");
    return std::aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  }
  void free_pinned(int, void* memory) override { std::free(memory); }
  Status wait_flag(int, transfer::CudaStream stream, uint32_t* flag, uint32_t value) override {
    if (at_wait_flag) at_wait_flag();
    if (no_flags) return {Code::unsupported, "operation not supported"};
    queue(stream, [flag, value] {
      while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < value)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
    return {};
  }
  // A dmabuf is a file that says what it is of; NICs of fake_verbs.h read that.
  Result<UniqueFd> export_dmabuf(uint64_t address, size_t nbytes) override {
    if (no_dmabuf) return Status(Code::unsupported, "the fake has no dmabuf");
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(address);
    uint64_t room = it == allocations_.begin() ? 0 : ((--it)->second.where.nbytes + 4095) / 4096 * 4096;
    if (room == 0 || address % 4096 != 0 || nbytes % 4096 != 0 || address + nbytes > it->first + room)
      return Status(Code::io, "cuMemGetHandleForAddressRange: invalid argument");
    UniqueFd fd(memfd_create("fake-dmabuf", MFD_CLOEXEC));
    const uint64_t range[] = {address, nbytes};
    REQUIRE(::write(fd.get(), range, sizeof range) == sizeof range);
    ++dmabufs_made;
    return fd;
  }
  bool orders_nic_writes(int) override { return ordered; }
  Status flush_nic_writes(int) override {
    while (hang_flushes) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(mutex_);
    if (fail_flushes) return {Code::io, "cuFlushGPUDirectRDMAWrites: an illegal memory access was encountered"};
    for (auto& [to, bytes] : held_back_) std::memcpy(to, bytes.data(), bytes.size());
    held_back_.clear();
    ++flushes;
    return {};
  }
  // A NIC writes here. False: this is no device memory, or it is ordered: then the NIC does.
  bool nic_writes(void* to, const void* from, size_t n) {
    auto address = reinterpret_cast<uint64_t>(to);
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(address);
    if (ordered || it == allocations_.begin() || address >= (--it)->first + it->second.where.nbytes) return false;
    held_back_.emplace_back(to, std::string(static_cast<const char*>(from), n));
    return true;
  }

  int devices() const override { return device_count; }
  std::string uuid(int device) override { return std::string("fake GPU ") + static_cast<char>(hardware + device); }
  bool in_use(int device) override { return device >= first_used; }
  bool reaches(int device, int other) override { return device == other || peer_access; }
  Result<transfer::CudaHandle> share(const transfer::CudaAllocation& allocation) override {
    if (no_share) return Status(Code::io, "cuIpcGetMemHandle: invalid argument");
    std::lock_guard lock(mutex_);
    auto it = allocations_.find(allocation.base);
    if (it == allocations_.end()) return Status(Code::io, "cuIpcGetMemHandle: invalid argument");
    transfer::CudaHandle out;
    int fd = it->second.fd->get();
    if (it->second.from_handle)
      out.fd.reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    else
      out.name = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
    return out;
  }
  Result<std::shared_ptr<void>> map(int, transfer::CudaHandle handle, uint64_t nbytes) override {
    if (no_map) return Status(Code::io, "cuIpcOpenMemHandle: invalid device context");
    if (!handle.fd.valid()) handle.fd.reset(open(handle.name.c_str(), O_RDWR | O_CLOEXEC));
    if (!handle.fd.valid()) return Status(Code::io, "cuIpcOpenMemHandle: mapping of buffer object failed");
    struct stat st {};
    if (fstat(handle.fd.get(), &st) != 0 || static_cast<uint64_t>(st.st_size) < nbytes)
      return Status(Code::io, "cuMemMap: invalid argument");
    void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle.fd.get(), 0);
    if (at == MAP_FAILED) return Status(Code::io, "cuMemMap: out of memory");
    ++mappings_alive;
    ++mappings_made;
    return std::shared_ptr<void>(at, [this, nbytes](void* p) {
      char thread[16] = "";
      pthread_getname_np(pthread_self(), thread, sizeof thread);
      unmapped_elsewhere += std::string(thread) != "tm-cuda-share";
      munmap(p, nbytes);
      --mappings_alive;
    });
  }

  struct Event {
    std::atomic<int> state{0};  // 1 reached, 2 reached after a failure
  };
  struct Stream {
    explicit Stream(FakeCuda& c) : cuda(c), thread([this] { run(); }) {}
    ~Stream() {
      push(nullptr);
      thread.join();
    }
    void push(std::function<void()> work) {
      std::lock_guard lock(mutex);
      queue.push_back(std::move(work));
      wake.notify_one();
    }
    void run() {
      for (;;) {
        std::function<void()> next;
        {
          std::unique_lock lock(mutex);
          wake.wait(lock, [&] { return !queue.empty(); });
          next = std::move(queue.front());
          queue.pop_front();
        }
        while (cuda.hang) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (!next) return;
        next();
      }
    }
    FakeCuda& cuda;
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::function<void()>> queue;
    std::atomic<bool> failed{false};
    std::thread thread;
  };

 private:
  std::mutex mutex_;
  struct Allocation {
    transfer::CudaAllocation where;
    std::shared_ptr<UniqueFd> fd;
    bool from_handle;
    char* alias;  // of guarded memory
  };
  uint64_t next_id_ = 1;
  std::map<uint64_t, Allocation> allocations_;
  std::vector<std::pair<void*, std::string>> held_back_;
};

}  // namespace transfer_test
