// CopyPart: the part of an op that this process carries out by copying: within the process, within a mapped segment, or
// out of another process. Small parts run inside submit(); longer ones on the engine's mover thread, or on the thread
// that waits for the op, whichever comes first, in steps between which stop() and the deadline are obeyed.
#pragma once

#include <atomic>
#include <vector>

#include "memory/copy.h"
#include "transfer/op.h"

namespace torch_mooncake::transfer {

class CopyPart : public Part, public std::enable_shared_from_this<CopyPart> {
 public:
  // Up to this many bytes a part is copied inside submit(): a sleep and a wake cost more than the copy.
  static constexpr uint64_t kInlineBytes = 512 << 10;
  // So much is copied by a thread whose wait ends before the op's deadline: a few milliseconds of work.
  static constexpr uint64_t kHelpBytes = 64 << 20;
  static constexpr uint64_t kStepBytes = 16 << 20;

  CopyPart(OpImplPtr op, std::vector<CopyPiece> pieces, std::string transport);
  void run();  // adds itself to the op and starts
  void stop(const Status& why) override;
  void help(Deadline deadline, int64_t spin_until_ns) override;

 protected:
  // Leave to touch the remote bytes, from acquire() to release(). A failed acquire() is not released.
  virtual Status acquire() = 0;
  virtual void release() = 0;
  virtual Status copy(std::span<const CopyPiece> pieces) = 0;
  // After the last byte: did the bytes belong to that region of that peer all the time?
  virtual Status validate() = 0;
  OpImpl& op() const { return *op_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  bool claim();
  void work_once();  // on the first thread that comes
  void work();
  Status copy_all();
  void finish(const Status& status);

  const OpImplPtr op_;
  std::vector<CopyPiece> pieces_;
  const std::string transport_;
  uint64_t nbytes_ = 0;
  std::atomic<bool> claimed_{false};
};

// The size rules of everything that goes by CopyPart, for explain().
void add_copy_sizes(Explanation& out);

}  // namespace torch_mooncake::transfer
