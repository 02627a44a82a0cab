// Device memory as a region: CudaMemory is its backing, CudaMove moves bytes between it and host memory by way of
// pinned blocks, a few at a time, so that the device's copies and ours overlap.
#pragma once

#include <algorithm>
#include <mutex>

#include "transfer/backing.h"
#include "transfer/cuda/queue.h"
#include "transfer/region_table.h"

namespace torch_mooncake::transfer {

// Bytes [offset, offset + nbytes) of a region, as they lie in this process' address space.
struct CudaRun {
  uint64_t offset, nbytes, address;
  std::shared_ptr<void> mapping{};  // what keeps them there, if they are another process'
};

class CudaMemory final : public Backing, public std::enable_shared_from_this<CudaMemory> {
 public:
  // Memory of this process. Errors: unsupported (no CUDA here), invalid_argument (no device memory, or not all of it on
  // one device).
  static Result<std::shared_ptr<CudaMemory>> of(uint64_t address, uint64_t nbytes);

  // `runs` follow one another and are all there is.
  CudaMemory(std::shared_ptr<CudaDriver> driver, CudaQueue& queue, std::vector<CudaRun> runs,
             std::vector<CudaAllocation> allocations = {})
      : driver_(std::move(driver)),
        queue_(queue),
        allocations_(std::move(allocations)),
        nbytes_(runs.back().offset + runs.back().nbytes),
        runs_(std::move(runs)) {}
  CudaDriver& driver() const { return *driver_; }
  CudaQueue& queue() const { return queue_; }
  uint64_t nbytes() const { return nbytes_; }
  // fn(address, nbytes) for each run of those bytes, in order.
  template <typename Fn>
  void each(uint64_t offset, uint64_t nbytes, Fn fn) const {
    auto run = std::upper_bound(runs_.begin(), runs_.end(), offset,
                                [](uint64_t at, const CudaRun& r) { return at < r.offset + r.nbytes; });
    for (; nbytes > 0; ++run) {
      uint64_t skip = offset - run->offset, n = std::min(nbytes, run->nbytes - skip);
      fn(run->address + skip, n);
      offset += n;
      nbytes -= n;
    }
  }
  // Of this process' memory: where it is, and the allocations that it is cut from, as they were when it was registered.
  uint64_t address() const { return runs_.front().address; }
  const std::vector<CudaAllocation>& allocations() const { return allocations_; }
  bool own() const { return !allocations_.empty(); }
  // What stands on this process' memory and has to go before it does (a registration): made by the first that asks,
  // null if that could not. detach() drops it: nobody may be using it, or ask for it afterwards.
  std::shared_ptr<void> attached(const std::function<std::shared_ptr<void>()>& make);
  void detach();
  // Before it is a region: whether other processes may map it, which takes that it stays until they have let go.
  void set_shareable(bool yes) { shareable_ = yes; }
  bool shareable() const { return shareable_; }
  // Gives the mappings of another process' memory back. Nobody may be using it, or use it afterwards.
  void unmap() { runs_.clear(); }

  std::vector<AccessRecord> access_records(const RegionImpl&) const override { return {}; }
  MovePtr move(MoveRequest request) override;
  std::string name() const override { return "memory of CUDA device " + std::to_string(queue_.device()); }

 private:
  const std::shared_ptr<CudaDriver> driver_;
  CudaQueue& queue_;
  const std::vector<CudaAllocation> allocations_;
  const uint64_t nbytes_;
  std::vector<CudaRun> runs_;
  bool shareable_ = true;
  std::mutex attach_mutex_;
  bool attach_tried_ = false;
  std::shared_ptr<void> attached_;
};

class CudaMove final : public Move, public std::enable_shared_from_this<CudaMove> {
 public:
  static constexpr uint32_t kMostInFlight = 4;

  CudaMove(std::shared_ptr<CudaMemory> memory, MoveRequest request);
  void start() override { pump(); }
  void stop(const Status& why) override;
  void abandon() override;

 private:
  struct Block {
    std::byte* data = nullptr;
    uint64_t nbytes = 0;
    std::vector<HostPiece> parts;
  };
  using BlockPtr = std::shared_ptr<Block>;
  void pump();
  bool fill(Block& block);  // with the mutex: the next pieces
  void carry(const BlockPtr& block);
  void copied(const BlockPtr& block, const Status& status);
  void settle(std::unique_lock<std::mutex> lock);

  const std::shared_ptr<CudaMemory> memory_;
  MoveRequest request_;
  std::mutex mutex_;
  size_t piece_ = 0;
  uint64_t at_ = 0;
  uint32_t in_flight_ = 0, touching_ = 0;
  bool stopped_ = false, told_ = false, abandoned_ = false;
  Status status_;
};

}  // namespace torch_mooncake::transfer
