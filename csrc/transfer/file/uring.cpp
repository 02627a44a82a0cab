// io_uring by its system calls: one ring, one thread that waits for completions, submissions by whoever has some.
#include <linux/io_uring.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "common/failpoint.h"
#include "common/fd.h"
#include "common/log.h"
#include "transfer/file/queue.h"

namespace torch_mooncake::transfer {
namespace {

constexpr unsigned kEntries = 128;
constexpr uint32_t kAsyncFrom = 64 << 10;  // longer cached requests are left to the kernel's workers

int ring_setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(syscall(SYS_io_uring_setup, entries, params));
}
int ring_enter(int fd, unsigned submit, unsigned wait, unsigned flags) {
  return static_cast<int>(syscall(SYS_io_uring_enter, fd, submit, wait, flags, nullptr, 0));
}

struct Map {
  void* data = MAP_FAILED;
  size_t nbytes = 0;
  Map(int fd, size_t n, off_t offset) : nbytes(n) {
    data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
    if (data != MAP_FAILED) madvise(data, n, MADV_DONTFORK);
  }
  Map(const Map&) = delete;
  ~Map() {
    if (data != MAP_FAILED) munmap(data, nbytes);
  }
  bool ok() const { return data != MAP_FAILED; }
  template <typename T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data) + offset);
  }
};

uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store_release(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

// The ring and what is in it. Held by the queue and by its thread.
class Ring {
 public:
  Ring(UniqueFd fd, const io_uring_params& p)
      : fd_(std::move(fd)),
        rings_(fd_.get(),
               std::max<size_t>(p.sq_off.array + p.sq_entries * sizeof(uint32_t),
                                p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe)),
               IORING_OFF_SQ_RING),
        sqes_(fd_.get(), p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        sq_entries_(p.sq_entries),
        cq_entries_(p.cq_entries) {
    if (!ok()) return;
    sq_tail_ = rings_.at<uint32_t>(p.sq_off.tail);
    sq_mask_ = *rings_.at<uint32_t>(p.sq_off.ring_mask);
    sq_array_ = rings_.at<uint32_t>(p.sq_off.array);
    cq_head_ = rings_.at<uint32_t>(p.cq_off.head);
    cq_tail_ = rings_.at<uint32_t>(p.cq_off.tail);
    cq_mask_ = *rings_.at<uint32_t>(p.cq_off.ring_mask);
    cqes_ = rings_.at<io_uring_cqe>(p.cq_off.cqes);
  }
  bool ok() const { return rings_.ok() && sqes_.ok(); }

  void submit(std::vector<IoRequest> requests) {
    std::lock_guard lock(mutex_);
    for (auto& request : requests) waiting_.push_back(std::make_unique<IoRequest>(std::move(request)));
    push();
  }

  // Until stop(), and then until nothing is in flight.
  void reap() {
    for (;;) {
      uint32_t head = *cq_head_;
      while (head == load_acquire(cq_tail_)) {
        if (ring_enter(fd_.get(), 0, 1, IORING_ENTER_GETEVENTS) < 0 && errno != EINTR && errno != EAGAIN &&
            errno != EBUSY) {
          log::error("transfer", "io_uring_enter: " + std::string(strerror(errno)) + "; file I/O stops");
          return;
        }
      }
      std::vector<std::pair<std::unique_ptr<IoRequest>, int64_t>> over;
      for (uint32_t tail = load_acquire(cq_tail_); head != tail; ++head) {
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        over.emplace_back(reinterpret_cast<IoRequest*>(cqe.user_data), cqe.res);
      }
      store_release(cq_head_, head);
      bool stop;
      {
        std::lock_guard lock(mutex_);
        in_flight_ -= static_cast<uint32_t>(over.size());
        push();
        stop = stopping_ && in_flight_ == 0;
      }
      for (auto& [request, result] : over)
        if (request) request->done(result);
      if (stop) return;
    }
  }

  void stop() {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    waiting_.push_back(nullptr);  // a no-op wakes the thread
    push();
  }

 private:
  // With the mutex: gives the kernel what waits and fits.
  void push() {
    uint32_t tail = *sq_tail_, count = 0;
    while (!waiting_.empty() && in_flight_ < cq_entries_ && count < sq_entries_) {
      uint32_t index = tail & sq_mask_;
      io_uring_sqe& sqe = *sqes_.at<io_uring_sqe>(index * sizeof(io_uring_sqe));
      fill(sqe, waiting_.front().release());
      waiting_.pop_front();
      sq_array_[index] = index;
      ++tail;
      ++count;
      ++in_flight_;
    }
    store_release(sq_tail_, tail);
    unsubmitted_ += count;
    while (unsubmitted_ > 0) {
      int taken = ring_enter(fd_.get(), unsubmitted_, 0, 0);
      if (taken > 0) unsubmitted_ -= std::min<uint32_t>(unsubmitted_, static_cast<uint32_t>(taken));
      // EAGAIN and EBUSY: no memory, or completions to reap first; both pass.
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        log::error("transfer", "io_uring_enter: " + std::string(strerror(errno)) + "; file I/O stands still");
        return;
      }
    }
  }

  static void fill(io_uring_sqe& sqe, IoRequest* request) {
    std::memset(&sqe, 0, sizeof sqe);
    sqe.user_data = reinterpret_cast<uint64_t>(request);
    sqe.opcode = IORING_OP_NOP;
    if (!request) return;
    sqe.opcode = request->write ? IORING_OP_WRITE : IORING_OP_READ;
    sqe.fd = request->fd;
    sqe.addr = reinterpret_cast<uint64_t>(request->data);
    sqe.len = request->nbytes;
    sqe.off = request->offset;
    if (request->cached && request->nbytes >= kAsyncFrom) sqe.flags = IOSQE_ASYNC;
  }

  const UniqueFd fd_;
  const Map rings_, sqes_;
  const uint32_t sq_entries_, cq_entries_;
  uint32_t *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;

  std::mutex mutex_;
  std::deque<std::unique_ptr<IoRequest>> waiting_;
  uint32_t in_flight_ = 0, unsubmitted_ = 0;
  bool stopping_ = false;
};

class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(std::shared_ptr<Ring> ring) : ring_(std::move(ring)) {
    sigset_t all, before;  // signals of the process belong to the user's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([ring = ring_] {
      pthread_setname_np(pthread_self(), "tm-file");
      ring->reap();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~UringQueue() override {
    if (getpid() != pid_) {  // the parent's: left as they are
      new std::pair(std::move(ring_), std::move(thread_));
      return;
    }
    ring_->stop();
    if (thread_.get_id() == std::this_thread::get_id())
      thread_.detach();
    else
      thread_.join();
  }
  const char* name() const override { return "io_uring"; }
  void submit(std::vector<IoRequest> requests) override { ring_->submit(std::move(requests)); }

 private:
  const pid_t pid_ = getpid();
  std::shared_ptr<Ring> ring_;
  std::thread thread_;
};

}  // namespace

Result<std::shared_ptr<IoQueue>> make_uring_queue() {
  TM_TRY(failpoint("transfer.uring"));
  io_uring_params params{};
  params.flags = IORING_SETUP_CLAMP;
  UniqueFd fd(ring_setup(kEntries, &params));  // close-on-exec
  if (!fd.valid()) return Status(Code::unsupported, "io_uring_setup: " + std::string(strerror(errno)));
  constexpr uint32_t kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;
  if ((params.features & kNeeded) != kNeeded)
    return Status(Code::unsupported, "this kernel's io_uring is older than 5.6");
  auto ring = std::make_shared<Ring>(std::move(fd), params);
  if (!ring->ok()) return Status(Code::unsupported, "mmap of the io_uring: " + std::string(strerror(errno)));
  return std::shared_ptr<IoQueue>(std::make_shared<UringQueue>(std::move(ring)));
}

}  // namespace torch_mooncake::transfer
