// Device memory as a region: CudaMemory is its backing, CudaMove moves bytes between it and host memory by way of
// pinned blocks, a few at a time, so that the device's copies and ours overlap.
#pragma once

#include <mutex>

#include "transfer/backing.h"
#include "transfer/cuda/queue.h"
#include "transfer/region_table.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

class CudaMemory final : public Backing, public std::enable_shared_from_this<CudaMemory> {
 public:
  // Errors: unsupported (no CUDA here), invalid_argument (no device memory, or not all of it on one device).
  static Result<std::shared_ptr<CudaMemory>> of(uint64_t address, uint64_t nbytes);

  CudaMemory(std::shared_ptr<CudaDriver> driver, CudaQueue& queue, uint64_t address)
      : driver_(std::move(driver)), queue_(queue), address_(address) {}
  uint64_t address() const { return address_; }
  CudaQueue& queue() const { return queue_; }
  // A dmabuf of [offset, offset + nbytes) for a NIC: page aligned ranges. For the RDMA transport.
  Result<UniqueFd> export_dmabuf(uint64_t offset, uint64_t nbytes) const {
    return driver_->export_dmabuf(address_ + offset, nbytes);
  }

  std::vector<AccessRecord> access_records(const RegionImpl&) const override { return {}; }
  MovePtr move(MoveRequest request) override;
  std::string name() const override { return "memory of CUDA device " + std::to_string(queue_.device()); }

 private:
  const std::shared_ptr<CudaDriver> driver_;
  CudaQueue& queue_;
  const uint64_t address_;
};

class CudaMove final : public Move, public std::enable_shared_from_this<CudaMove> {
 public:
  static constexpr uint32_t kMostInFlight = 4;

  CudaMove(std::shared_ptr<CudaMemory> memory, MoveRequest request);
  void start() override { pump(); }
  void stop(const Status& why) override;
  void abandon() override {}  // all host memory is bounced: stop() was enough

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
  bool stopped_ = false, told_ = false;
  Status status_;
};

// A region in device memory that this process reaches itself.
struct CudaRemote final : RemoteMemory {
  explicit CudaRemote(RegionImplPtr r) : region(std::move(r)) {}
  const RegionImplPtr region;
};

}  // namespace torch_mooncake::transfer
