// The Work objects of the "mooncake" backend.
//
// CollectiveWork is ended by the group's executor; MessageWork follows a request of the message layer. Both keep the
// tensors alive until the end, raise torch.distributed.DistBackendError from wait() with the ranks in the text, and
// make their Future when somebody asks for it. wait(timeout) that runs out raises and leaves the operation going.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/group.h"
#include "torch/c10d_executor.h"

namespace torch_mooncake::dist {

using TensorList = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using Ms = std::chrono::milliseconds;

// A DistBackendError that says what failed where: "allreduce (sequence 7) failed on rank 0: …".
std::exception_ptr make_error(const std::string& what, const Status& status);

class BaseWork : public c10d::Work {
 public:
  BaseWork(int rank, c10d::OpType type, const char* title, std::string what, uint64_t seq, TensorList outputs,
           const TensorList& inputs);

  bool wait(Ms timeout = kNoTimeout) override;
  void synchronize() override {}
  TensorList result() override { return outputs_; }
  FuturePtr getFuture() override;
  uint64_t getSequencenumber() const override { return seq_; }
  float getDuration() const override;  // milliseconds from begin() to the end
  void begin() { began_ns_ = steady_ns(); }
  std::shared_ptr<c10d::WorkInfo> info() const;  // once it has ended

 protected:
  // Ends the work; call once. Runs the callbacks of the future, so not on an I/O thread.
  void complete(std::exception_ptr error);
  virtual std::string awaited() const = 0;
  void mark(const FuturePtr& future);  // only the first call counts

  const std::string what_;
  const uint64_t seq_;
  TensorList outputs_;
  FuturePtr future_;
  std::atomic_flag marked_ = ATOMIC_FLAG_INIT;
  std::atomic<int64_t> began_ns_{0}, ended_ns_{0};
};

class CollectiveWork : public BaseWork {
 public:
  CollectiveWork(coll::GroupPtr group, c10d::OpType type, const char* title, std::string what, uint64_t seq,
                 TensorList outputs, const TensorList& inputs)
      : BaseWork(group->seat_of(group->rank()), type, title, std::move(what), seq, std::move(outputs), inputs),
        group_(std::move(group)) {}
  void end(const Status& status) { complete(status.is_ok() ? nullptr : make_error(what_, status)); }
  void end(std::exception_ptr error) { complete(std::move(error)); }

 protected:
  std::string awaited() const override { return group_->awaited(); }

 private:
  coll::GroupPtr group_;
};

// A send or a receive. If `staging` is set, a receive is copied from it into `tensor` at the end.
class MessageWork final : public BaseWork {
 public:
  MessageWork(coll::GroupPtr group, c10d::OpType type, const char* title, std::string what, uint64_t seq,
              at::Tensor tensor, at::Tensor staging, std::shared_ptr<Executor> finisher);
  // Takes over the request (once).
  void follow(coll::RequestPtr request);
  bool wait(Ms timeout = kNoTimeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return group_->seat_of(request_->peer()); }
  FuturePtr getFuture() override;

 protected:
  std::string awaited() const override { return group_->name_of(request_->peer()); }

 private:
  void finalize();  // once; on the finisher's or a waiting thread
  coll::GroupPtr group_;
  at::Tensor staging_;
  coll::RequestPtr request_;
  std::shared_ptr<Executor> finisher_;
  std::timed_mutex waiting_;  // one thread at a time does the request's work
  std::once_flag finalized_;
};

// Several works as one (batch_isend_irecv, coalesced collectives).
class JointWork final : public c10d::Work {
 public:
  explicit JointWork(std::vector<WorkPtr> works) : works_(std::move(works)) {}
  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(Ms timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  TensorList result() override;
  FuturePtr getFuture() override;

 private:
  std::vector<WorkPtr> works_;
};

// Copies between a tensor and its contiguous stand-in, without a trace in autograd.
void copy_tensor(const at::Tensor& to, const at::Tensor& from);
bool needs_staging(const at::Tensor& tensor);          // not contiguous, or a lazy conjugate or negative
at::Tensor contiguous_copy(const at::Tensor& tensor);  // of its values
at::Tensor contiguous_like(const at::Tensor& tensor);  // uninitialised

}  // namespace torch_mooncake::dist
