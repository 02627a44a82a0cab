#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "rpc/lane_impl.h"

namespace torch_mooncake::rpc {
namespace {

// What a caller's thread sends itself before it leaves the rest to the I/O thread, and what the I/O thread sends on one
// lane before it looks after the others.
constexpr int64_t kCallerBudget = 256 << 10;
constexpr int64_t kIoBudget = 4 << 20;
constexpr int64_t kSendCost = 4 << 10;    // of the budget, however little is sent: a call of the kernel takes its time
constexpr size_t kPieces = 512;           // of one sendmsg,
constexpr uint64_t kSendBytes = 4 << 20;  // and their bytes: more than a socket takes at once

std::unique_ptr<OutFrame> control_frame(const FrameHeader& header, SharedBody body, std::vector<UniqueFd> fds) {
  auto frame = std::make_unique<OutFrame>();
  frame->header = encode_header(header);
  frame->body = std::move(body);
  frame->fds = std::move(fds);
  frame->total = kHeaderBytes + frame->body->size();
  return frame;
}

}  // namespace

Status LaneImpl::send_control(const FrameHeader& header, SharedBody body, std::vector<UniqueFd> fds) {
  return enqueue(control_frame(header, std::move(body), std::move(fds)), true);
}

Status LaneImpl::send_bulk(BulkFrame bulk) {
  if (bulk.body.size() > kMaxBody || bulk.payload.size() > (1u << 20)) {
    return {Code::invalid_argument, "bulk frame with a body of " + std::to_string(bulk.body.size()) + " bytes"};
  }
  auto frame = std::make_unique<OutFrame>();
  FrameHeader header;
  header.type = FrameType::bulk;
  header.body_bytes = static_cast<uint32_t>(bulk.body.size());
  for (auto& piece : bulk.payload) header.payload_bytes += piece.iov_len;
  if (header.payload_bytes > kMaxPayload) return {Code::invalid_argument, "bulk frame of more than 1 TiB"};
  frame->header = encode_header(header);
  frame->body = share(std::move(bulk.body));
  frame->payload = std::move(bulk.payload);
  frame->sent = std::move(bulk.sent);
  frame->taken = std::move(bulk.taken);
  frame->keep = std::move(bulk.keep);
  frame->is_background = bulk.priority == Priority::background;
  frame->total = kHeaderBytes + frame->body->size() + header.payload_bytes;
  return enqueue(std::move(frame), false);
}

Status LaneImpl::enqueue(std::unique_ptr<OutFrame> frame, bool is_control) {
  // Large frames are left to the I/O thread, so that a caller can spread its slices over lanes, and does not spend its
  // time on a message that takes the I/O thread's wake-up (about 45 µs) anyway; small ones save it by going out here.
  const int64_t inline_budget = frame->total <= static_cast<uint64_t>(kCallerBudget) ? kCallerBudget : 0;
  {
    std::lock_guard lock(mutex_);
    TM_TRY(push(std::move(frame), is_control));
    if (sending_ || waiting_for_room_) return {};
    sending_ = true;
  }
  send_with(inline_budget);
  return {};
}

// mutex_ held.
Status LaneImpl::push(std::unique_ptr<OutFrame> frame, bool is_control) {
  if (dead_.load(std::memory_order_relaxed) || killed_) {
    return killed_ ? *killed_ : Status(Code::peer_lost, description_ + " is gone");
  }
  queued_.fetch_add(frame->total, std::memory_order_relaxed);
  auto& queue = is_control ? control_ : bulk_[frame->is_background ? 1 : 0];
  queue.push_back(std::move(frame));
  return {};
}

Status LaneImpl::queue_control(const FrameHeader& header, SharedBody body) {
  std::lock_guard lock(mutex_);
  return push(control_frame(header, std::move(body), {}), true);
}

void LaneImpl::send_queued() {
  {
    std::lock_guard lock(mutex_);
    // Nobody becomes the sender of a lane that is dead: what is left is failed where it is buried.
    if (dead_.load(std::memory_order_relaxed) || sending_ || waiting_for_room_ || !has_queued()) return;
    sending_ = true;
  }
  send_with(0);
}

// Called with sending_ true and owned by this thread.
void LaneImpl::send_with(int64_t inline_budget) {
  if (reactor_->in_thread()) {
    drain(kIoBudget);
  } else if (inline_budget > 0) {
    drain(inline_budget);
  } else if (!reactor_->post([self = shared_from_this()] { self->drain(kIoBudget); })) {
    drain(kIoBudget);  // the reactors are gone, so is the socket
  }
}

// Control first, then the foreground; after every kAgeing frames of the foreground one of the background, which so gets
// its share however long the foreground's queue is.
std::deque<std::unique_ptr<OutFrame>>* LaneImpl::next_queue() {
  if (!control_.empty()) return &control_;
  auto &foreground = bulk_[0], &background = bulk_[1];
  if (!background.empty() && (foreground.empty() || ++passed_over_ > kAgeing)) {
    passed_over_ = 0;
    return &background;
  }
  return foreground.empty() ? nullptr : &foreground;
}

// Called with sending_ true and owned by this thread; gives it up before returning.
void LaneImpl::drain(int64_t budget) {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      if (death_waits_ || !fd_.valid()) {
        sending_ = false;
        bool finish = std::exchange(death_waits_, false);
        lock.unlock();
        if (!finish) return;
        if (!reactor_->post([self = shared_from_this()] { self->finish_death(); })) finish_death();
        return;
      }
      if (!current_) {
        auto* queue = next_queue();
        if (queue == nullptr) {
          sending_ = false;
          return;
        }
        current_ = std::move(queue->front());
        queue->pop_front();
      }
      if (budget <= 0) {
        lock.unlock();  // the rest is the I/O thread's, which sees to its other lanes in between
        if (reactor_->post([self = shared_from_this()] { self->drain(kIoBudget); })) return;
        budget = kIoBudget;
      }
    }
    bool zero_copied = false;
    ssize_t n = send_some(*current_, zero_copied);
    int err = errno;
    if (n < 0) {
      if (err == EINTR) continue;
      std::unique_lock lock(mutex_);
      sending_ = false;
      if (death_waits_) continue;  // take it up at the top; nobody else becomes the sender: the lane is dead
      if (err == EAGAIN || err == EWOULDBLOCK) {
        waiting_for_room_ = true;
        reactor_->rearm(token_, fd_.get(), interest());
        return;
      }
      if (err == EFAULT) {
        current_->unmapped = unmapped_memory();
        if (current_->done == 0) {  // the peer has not heard of it
          auto frame = std::move(current_);
          queued_.fetch_sub(frame->total, std::memory_order_relaxed);
          sending_ = true;
          lock.unlock();
          const Status why = *frame->unmapped;
          finish_frame(std::move(frame), why);
          continue;
        }
      }
      // The I/O thread sees the shutdown and cleans up.
      if (!killed_) {
        killed_ = Status(Code::peer_lost, peer_name_ + " (" + description_ + "): " + ::strerror(err));
      }
      ::shutdown(fd_.get(), SHUT_RDWR);
      return;
    }
    auto bytes = static_cast<uint64_t>(n);
    queued_.fetch_sub(bytes, std::memory_order_relaxed);
    sent_.fetch_add(bytes, std::memory_order_relaxed);
    budget -= std::max<int64_t>(n, kSendCost);
    bool all = current_->done == current_->total;
    if (!all && !zero_copied) continue;
    std::unique_ptr<OutFrame> finished;
    std::function<void()> taken;
    {
      std::lock_guard lock(mutex_);
      if (zero_copied) current_->last_zero_copy = zero_copy_.sent();
      if (!all) continue;
      finished = std::move(current_);
      if (finished->last_zero_copy && !zero_copy_.is_over(*finished->last_zero_copy)) {
        taken = std::move(finished->taken);
        lingering_.push_back(std::move(finished));
      }
    }
    if (finished) finish_frame(std::move(finished), Status::ok());
    if (taken) tell_taken(std::move(taken));
  }
}

// `sent` and `keep` are never touched on a caller's thread: the caller may hold a lock that they take.
void LaneImpl::finish_frame(std::unique_ptr<OutFrame> frame, const Status& status) {
  if (!frame->sent && !frame->keep) return;
  if (reactor_->in_thread()) {
    if (frame->sent) frame->sent(status);
    return;
  }
  std::shared_ptr<OutFrame> shared = std::move(frame);
  auto tell = [shared, status] {
    if (shared->sent) shared->sent(status);
    shared->sent = nullptr;
    shared->taken = nullptr;
    shared->keep = nullptr;
  };
  if (!reactor_->post(tell)) tell();
}

void LaneImpl::tell_taken(std::function<void()> taken) {
  if (reactor_->in_thread()) return taken();
  (void)reactor_->post(std::move(taken));  // without reactors nobody sends any more
}

void LaneImpl::finish_copied() {
  std::deque<std::unique_ptr<OutFrame>> over;
  {
    std::lock_guard lock(mutex_);
    zero_copy_.collect(fd_.get());
    while (!lingering_.empty() && zero_copy_.is_over(*lingering_.front()->last_zero_copy)) {
      over.push_back(std::move(lingering_.front()));
      lingering_.pop_front();
    }
  }
  for (auto& frame : over) finish_frame(std::move(frame), Status::ok());
}

// A closed socket would go on sending what it has, from memory that is somebody else's by then, to a peer that still
// takes it. Disconnected it drops its queue and resets the connection; what a NIC is reading just now is soon over.
bool LaneImpl::memory_is_ours() {
  std::lock_guard lock(mutex_);
  if (!fd_.valid() || zero_copy_.all_over()) return true;
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  (void)::connect(fd_.get(), &nobody, sizeof nobody);
  zero_copy_.collect(fd_.get());
  return zero_copy_.all_over();
}

// The kernel reads the payload here; a function of its own, so that thread_sanitizer.supp can name it.
[[gnu::noinline]] static ssize_t give_to_kernel(int fd, const msghdr& message, int flags) {
  const ssize_t n = ::sendmsg(fd, &message, flags);
  asm volatile("" ::: "memory");  // no tail call: it would not be on the stack
  return n;
}

ssize_t LaneImpl::send_some(OutFrame& frame, bool& zero_copied) {
  iovec pieces[kPieces];
  size_t count = 0;
  uint64_t at = frame.done;
  if (at < kHeaderBytes) {
    pieces[count++] = {frame.header.data() + at, kHeaderBytes - at};
    at = kHeaderBytes;
  }
  std::string_view body = *frame.body;
  if (uint64_t body_at = at - kHeaderBytes; body_at < body.size())
    pieces[count++] = {const_cast<char*>(body.data()) + body_at, body.size() - body_at};
  uint64_t before_payload = kHeaderBytes + body.size();
  uint64_t payload_done = frame.done > before_payload ? frame.done - before_payload : 0;
  while (frame.payload_at < frame.payload.size() &&
         frame.payload_begin + frame.payload[frame.payload_at].iov_len <= payload_done) {
    frame.payload_begin += frame.payload[frame.payload_at++].iov_len;
  }
  uint64_t skip = payload_done - frame.payload_begin;
  uint64_t offered = 0;
  size_t before = count;
  for (size_t i = frame.payload_at; i < frame.payload.size() && count < kPieces && offered < kSendBytes; ++i) {
    auto& piece = frame.payload[i];
    if (piece.iov_len > skip) pieces[count++] = {static_cast<char*>(piece.iov_base) + skip, piece.iov_len - skip};
    offered += piece.iov_len - skip;
    skip = 0;
  }
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  if (frame.done == 0 && !frame.fds.empty()) {
    // The fds travel with the frame's first byte; a frame begins its own sendmsg, so they are never another's.
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(frame.fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(frame.fds.size() * sizeof(int));
    for (size_t i = 0; i < frame.fds.size(); ++i) {
      int fd = frame.fds[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof fd);
    }
  }
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  zero_copied = !frame.must_copy && zero_copy_.wants(offered, count - before);
  ssize_t n = give_to_kernel(fd_.get(), message, zero_copied ? kFlags | MSG_ZEROCOPY : kFlags);
  if (n < 0 && zero_copied && (errno == EFAULT || errno == ENOBUFS || errno == ENOMEM)) {
    // Too many under way, or RLIMIT_MEMLOCK; or memory whose pages cannot be pinned (a device's), for which the next
    // send would fail as well.
    frame.must_copy = errno != ENOBUFS;
    zero_copied = false;
    n = give_to_kernel(fd_.get(), message, kFlags);
  }
  zero_copied = zero_copied && n > 0;
  if (n > 0) {
    frame.done += static_cast<uint64_t>(n);
    frame.fds.clear();
  }
  return n;
}

}  // namespace torch_mooncake::rpc
