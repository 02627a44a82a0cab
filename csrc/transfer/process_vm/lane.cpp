#include "transfer/process_vm/lane.h"

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace torch_mooncake::transfer {
namespace {

constexpr uint64_t kJobBytes = 256 << 10;  // short, so that the threads end a step together
constexpr size_t kJobVectors = 512;

struct Job {
  size_t first, count;
  uint64_t nbytes;
};

int run_job(int pid, const iovec* local, const iovec* remote, const Job& job) {
  ssize_t n = process_vm_readv(pid, local + job.first, job.count, remote + job.first, job.count, 0);
  if (n < 0) return errno;
  return static_cast<uint64_t>(n) == job.nbytes ? 0 : EFAULT;  // short: the source ends in the middle
}

Status vm_status(int error, int pid) {
  if (error == 0) return {};
  if (error == ESRCH) return {Code::peer_lost, "process " + std::to_string(pid) + " is gone"};
  return Status::from_errno("process_vm_readv from process " + std::to_string(pid), error);
}

}  // namespace

Status vm_read(int pid, std::span<const CopyPiece> pieces) {
  std::vector<iovec> local, remote;
  std::vector<Job> jobs;
  for (auto& piece : pieces) {
    for (uint64_t at = 0; at < piece.nbytes;) {
      if (jobs.empty() || jobs.back().nbytes == kJobBytes || jobs.back().count == kJobVectors)
        jobs.push_back({local.size(), 0, 0});
      uint64_t n = std::min(piece.nbytes - at, kJobBytes - jobs.back().nbytes);
      local.push_back({static_cast<char*>(piece.dst) + at, n});
      remote.push_back({const_cast<char*>(static_cast<const char*>(piece.src)) + at, n});
      ++jobs.back().count;
      jobs.back().nbytes += n;
      at += n;
    }
  }
  if (jobs.size() == 1) return vm_status(run_job(pid, local.data(), remote.data(), jobs[0]), pid);
  std::atomic<int> error{0};
  CopyPool::shared().parallel_for(jobs.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end && error.load(std::memory_order_relaxed) == 0; ++i)
      if (int e = run_job(pid, local.data(), remote.data(), jobs[i])) error.store(e, std::memory_order_relaxed);
  });
  return vm_status(error, pid);
}

Status vm_check_generation(int pid, uint64_t word_address, uint64_t generation) {
  uint64_t now = 0;
  iovec local{&now, sizeof now};
  iovec remote{reinterpret_cast<void*>(word_address), sizeof now};
  __sync_synchronize();  // the payload was read before; TSan knows no std::atomic_thread_fence
  if (process_vm_readv(pid, &local, 1, &remote, 1, 0) != sizeof now) return vm_status(errno, pid);
  if (now != generation) return {Code::key_not_found, "the source region was deregistered while it was read"};
  return {};
}

VmReadPart::VmReadPart(OpImplPtr op, std::vector<CopyPiece> pieces, std::vector<RemoteRegionImpl*> remotes)
    : CopyPart(std::move(op), std::move(pieces), "process_vm"), remotes_(std::move(remotes)) {}

Status VmReadPart::copy(std::span<const CopyPiece> pieces) {
  auto& session = *op().peer().session();
  TM_TRY(session.status());
  Status status = vm_read(session.peer_pid(), pieces);
  // A dead process' memory is gone before its sockets are: say what it is.
  return !status && !session.alive() ? session.status() : status;
}

Status VmReadPart::validate() {
  auto& session = *op().peer().session();
  for (auto* remote : remotes_) {
    auto& memory = static_cast<ProcessVmMemory&>(*remote->path(Direction::read).memory);
    TM_TRY(vm_check_generation(session.peer_pid(), memory.generation_word, memory.generation));
  }
  return session.status();
}

}  // namespace torch_mooncake::transfer
