// FileCudaPart: bytes between files and CUDA memory that this process reaches both, in chunks. Whole blocks of files
// that GPUDirect Storage takes go between disk and device without a stop (cufile_driver.h); everything else, heads and
// tails of blocks among it, goes by way of pinned blocks, which the disk and the device both reach directly.
#pragma once

#include <deque>

#include "transfer/cuda/memory.h"
#include "transfer/file/file.h"
#include "transfer/move_part.h"

namespace torch_mooncake::transfer {

// A move too, so that the engine's close() waits for what is under way.
class FileCudaPart final : public Part, public Move, public std::enable_shared_from_this<FileCudaPart> {
 public:
  static constexpr uint32_t kMostInFlight = 8;
  static constexpr uint64_t kDirectBytes = 8 << 20;  // the most that one call of GPUDirect Storage is asked for

  // Starts one for these batches: their local regions are files and `remote` stands on CudaMemory, or the reverse.
  static void run(const OpImplPtr& op, std::string transport, Reached remote, const std::vector<const Batch*>& batches);
  void start() override { pump(); }
  void stop(const Status& why) override;
  void abandon() override {}  // stop() sees to it that the op ends

 private:
  // A run of a file and where it lies in a device's memory.
  struct Piece {
    File* file;
    CudaMemory* memory;
    uint64_t at_file, at_memory, nbytes;
    bool direct = true;  // try to
  };
  struct Chunk {
    std::vector<Piece> pieces;   // of one file and one memory
    std::byte* block = nullptr;  // pinned; null: directly
    uint64_t begin = 0;          // in the block
    uint64_t nbytes = 0;
  };
  using ChunkPtr = std::shared_ptr<Chunk>;
  FileCudaPart(OpImplPtr op, std::string transport, Reached remote);

  void pump();
  bool goes_directly(const Piece& piece) const;
  ChunkPtr take_direct();             // with the mutex
  ChunkPtr take_bounced(std::byte*);  // likewise
  void advance(uint64_t nbytes);
  // The steps of a chunk.
  void move_file(const ChunkPtr& chunk);
  void copy(const ChunkPtr& chunk);
  void move_directly(const ChunkPtr& chunk);
  void chunk_over(const ChunkPtr& chunk, const Status& status);
  bool begin_touching();  // false: stopped
  void end_touching();
  void settle(std::unique_lock<std::mutex> lock);

  const OpImplPtr op_;
  const std::string transport_;
  Reached remote_;
  bool to_device_ = false;

  std::mutex mutex_;
  std::deque<Piece> pieces_;  // what is left to do
  uint64_t nbytes_ = 0;
  uint32_t in_flight_ = 0, touching_ = 0;  // chunks; those of them that a device, or a disk directly, may be moving
  bool stopped_ = false, told_ = false;
  Status status_;
  std::shared_ptr<void> hold_;  // leave to touch both sides' regions
};

}  // namespace torch_mooncake::transfer
