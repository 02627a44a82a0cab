// FakeCuda: a CUDA driver without a device. Its memory is host memory that only it hands out; streams are threads that
// carry out what is queued, as slowly and as badly as a test wants.
#pragma once

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
  std::function<void()> at_wait_flag;  // runs in it first
  std::atomic<int> events_alive{0};

  // One allocation; or many parts side by side, as expandable segments map them.
  std::shared_ptr<void> allocate(size_t nbytes, size_t parts = 1) {
    auto* memory = static_cast<char*>(std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096 + 4096));
    std::memset(memory, 0, nbytes);
    std::lock_guard lock(mutex_);
    if (nbytes < parts) parts = 1;
    size_t each = nbytes / parts;
    for (size_t i = 0; i < parts; ++i) {
      auto base = reinterpret_cast<uint64_t>(memory) + i * each;
      allocations_[base] = {base, i + 1 == parts ? nbytes - i * each : each, 0};
    }
    return std::shared_ptr<void>(memory, [this](void* p) {
      std::lock_guard relock(mutex_);
      auto from = allocations_.find(reinterpret_cast<uint64_t>(p));
      uint64_t end = from->first;
      while (from != allocations_.end() && from->first == end) {
        end += from->second.nbytes;
        from = allocations_.erase(from);
      }
      std::free(p);
    });
  }
  // A kernel.
  void queue(void* stream, std::function<void()> work) { static_cast<Stream*>(stream)->push(std::move(work)); }

  std::string describe() const override { return "fake CUDA"; }
  Result<transfer::CudaAllocation> find(uint64_t address) override {
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(address);
    if (it != allocations_.begin() && address < (--it)->first + it->second.nbytes) return it->second;
    return Status(Code::invalid_argument, "there is no device memory at that address");
  }
  Result<transfer::CudaStream> make_stream(int) override { return static_cast<void*>(new Stream(*this)); }
  void destroy_stream(int, transfer::CudaStream stream) override { delete static_cast<Stream*>(stream); }
  Status copy(int, void* dst, const void* src, size_t n, transfer::CudaStream stream) override {
    queue(stream, [this, dst, src, n, stream] {
      if (copy_us) std::this_thread::sleep_for(std::chrono::microseconds(copy_us));
      if (fail_copies > 0 && fail_copies-- > 0) {
        static_cast<Stream*>(stream)->failed = true;
        return;
      }
      std::memcpy(dst, src, n);
    });
    return {};
  }
  Result<transfer::CudaEvent> record(int, transfer::CudaStream stream) override {
    auto* event = new std::shared_ptr<Event>(std::make_shared<Event>());
    ++events_alive;
    queue(stream,
          [event = *event, stream] { event->state = static_cast<Stream*>(stream)->failed.exchange(false) ? 2 : 1; });
    return static_cast<void*>(event);
  }
  Result<bool> reached(int, transfer::CudaEvent event) override {
    int state = (*static_cast<std::shared_ptr<Event>*>(event))->state;
    if (state == 2) return Status(Code::io, "an illegal memory access was encountered");
    return state == 1;
  }
  void destroy_event(int, transfer::CudaEvent event) override {
    --events_alive;
    delete static_cast<std::shared_ptr<Event>*>(event);
  }
  Result<void*> allocate_pinned(int, size_t n) override { return std::aligned_alloc(4096, (n + 4095) / 4096 * 4096); }
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
  Result<UniqueFd> export_dmabuf(uint64_t, size_t) override {
    return Status(Code::unsupported, "the fake has no dmabuf");
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
  std::map<uint64_t, transfer::CudaAllocation> allocations_;
};

}  // namespace transfer_test
