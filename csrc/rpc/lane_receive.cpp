#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/clock.h"
#include "rpc/address.h"
#include "rpc/fork_guard.h"
#include "rpc/lane_impl.h"
#include "rpc/session_impl.h"
#include "rpc/socket.h"

namespace torch_mooncake::rpc {
namespace {

constexpr size_t kBufferBytes = 64 << 10;
// On a lane that carries bulk, payload bytes read together with a header are copied once more: read little ahead.
constexpr size_t kReadAhead = 4 << 10;
constexpr int64_t kReadBudget = 4 << 20;  // before other lanes of this thread get their turn
constexpr size_t kPieces = 128;           // of one recvmsg
constexpr int kSleepMs = 1;               // at most, of a caller that receives for itself
constexpr int kSilenceMs = 30'000;
constexpr int64_t kLookAgainNs = 2'000'000;  // whether the kernel still reads a dead lane's frames

}  // namespace

LaneImpl::LaneImpl(std::shared_ptr<Core> core, std::shared_ptr<SessionImpl> session, UniqueFd fd, uint32_t index)
    : core_(std::move(core)),
      session_(std::move(session)),
      reactor_(core_->reactors[core_->next_reactor()]),
      index_(index),
      peer_name_(session_->peer().name),
      last_heard_ns_(steady_ns()),
      fd_(std::move(fd)),
      buffer_(kBufferBytes) {
  SocketAddress here = local_address(fd_.get()), there = remote_address(fd_.get());
  is_unix_ = here.family() == AF_UNIX;
  if (is_unix_) {
    // Only the listening side's address has a name.
    std::string named = session_->is_initiator() ? there.to_string() : here.to_string();
    description_ = "unix " + named.substr(std::min(named.size(), std::strlen("unix://")));
  } else {
    auto plain = [](const SocketAddress& a) {
      std::string text = a.to_string();
      return text.rfind("tcp://", 0) == 0 ? text.substr(std::strlen("tcp://")) : text;
    };
    description_ = "tcp " + plain(here) + " -> " + plain(there);
    rail_ = {here.host(), there.host()};
    // Without heartbeats nobody else would find a peer that vanished.
    limit_silence(fd_.get(), core_->options.heartbeat_ms > 0 ? core_->options.heartbeat_limit_ms : kSilenceMs);
    zero_copy_.choose(fd_.get(), is_one_host(fd_.get()));
  }
  ForkGuard::add(fd_.get());
  core_->lane_opened();
}

Session& LaneImpl::session() { return *session_; }

Status LaneImpl::start() {
  std::lock_guard lock(mutex_);
  auto token = reactor_->watch(fd_.get(), interest(), shared_from_this());
  if (token) {
    token_ = *token;
    return {};
  }
  if (!killed_) killed_ = token.status();
  // Dies as a live lane would, on its own thread.
  (void)reactor_->post([self = shared_from_this()] { self->take_role_and_receive(); });
  return token.status();
}

// A hang-up is told whether asked for or not, and again and again: to a thread that cannot take the role, once.
uint32_t LaneImpl::interest() const {
  return (polled_ ? uint32_t{EPOLLONESHOT} : uint32_t{EPOLLIN}) | (waiting_for_room_ ? EPOLLOUT : 0u);
}

LaneProgress LaneImpl::progress() const {
  std::lock_guard lock(mutex_);
  uint64_t sent = sent_.load(std::memory_order_relaxed);
  int in_kernel = 0;
  if (!fd_.valid() || ::ioctl(fd_.get(), SIOCOUTQ, &in_kernel) != 0) in_kernel = 0;
  // A Unix socket counts its buffers' overhead too.
  uint64_t unread = std::min<uint64_t>(sent, static_cast<uint64_t>(std::max(in_kernel, 0)));
  LaneProgress progress{queued_bytes() + unread, sent - unread};
  tcp_info info{};
  socklen_t size = sizeof info;
  if (!is_unix_ && fd_.valid() && ::getsockopt(fd_.get(), IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
    progress.in_flight = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
    progress.timeouts = uint32_t{info.tcpi_retransmits} + info.tcpi_probes / 2u;
    progress.rtt_us = info.tcpi_rtt;
  }
  return progress;
}

std::vector<std::pair<std::string, std::string>> LaneImpl::tuning() const {
  std::lock_guard lock(mutex_);
  if (!fd_.valid()) return {};
  auto tuning = describe_tuning(fd_.get());
  if (!is_unix_) tuning.emplace_back("zero copy", zero_copy_.describe());
  return tuning;
}

void LaneImpl::kill(const Status& why) {
  if (core_->forked()) return;
  std::lock_guard lock(mutex_);
  if (dead_.load(std::memory_order_relaxed) || killed_) return;
  killed_ = why;
  ::shutdown(fd_.get(), SHUT_RDWR);
}

void LaneImpl::on_events(uint32_t events) {
  if (over_) return;
  if (events & EPOLLOUT) {
    bool drain_now = false;
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(waiting_for_room_, false)) reactor_->rearm(token_, fd_.get(), interest());
      if (!sending_ && (current_ || has_queued())) drain_now = sending_ = true;
    }
    if (drain_now) drain(4 << 20);
  }
  if (events & EPOLLERR) {
    finish_copied();
    // That told of frames, not of an end: it must not be the only event of a lane whose caller receives for itself.
    std::lock_guard lock(mutex_);
    if (polled_ && !(events & EPOLLHUP) && fd_.valid()) reactor_->rearm(token_, fd_.get(), interest());
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) take_role_and_receive();
}

// I/O thread. A waiting caller that has the role arms epoll again when it goes, so nothing is missed.
void LaneImpl::take_role_and_receive() {
  if (receiving_.exchange(true, std::memory_order_acq_rel)) {
    std::lock_guard lock(mutex_);  // until the caller that has just taken the role has told epoll
    return;
  }
  if (!over_) (void)receive();
  receiving_.store(false, std::memory_order_release);
}

bool LaneImpl::look() {
  if (receiving_.exchange(true, std::memory_order_acq_rel)) return false;
  bool received = !over_ && receive();
  receiving_.store(false, std::memory_order_release);
  return received;
}

bool LaneImpl::receive_until(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns) {
  {
    std::unique_lock lock(mutex_);
    bool usable = !dead_.load(std::memory_order_relaxed) && !killed_ && token_ != 0;
    if (!usable || receiving_.exchange(true, std::memory_order_acq_rel)) {
      lock.unlock();
      return done();
    }
    polled_ = true;
    reactor_->rearm(token_, fd_.get(), interest());
  }
  bool is_done = receive_for(done, deadline, spin_until_ns);
  std::lock_guard lock(mutex_);
  polled_ = false;
  receiving_.store(false, std::memory_order_release);  // first: who is told by epoll finds the role free
  reactor_->rearm(token_, fd_.get(), interest());
  return is_done;
}

bool LaneImpl::receive_for(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns) {
  spin_until_ns = std::min(spin_until_ns, deadline.ns());
  bool spin = steady_ns() < spin_until_ns && spin_gate_.open(), slept = false;
  while (!done()) {
    bool received = (spin || slept) && receive();  // who sleeps at once was just too early for the answer
    if (received && !deadline.expired()) continue;
    if (spin && steady_ns() < spin_until_ns) continue;
    if (std::exchange(spin, false)) spin_gate_.spun(false);
    if (slept || deadline.expired()) return done();
    slept = true;
    pollfd ready{fd_.get(), POLLIN, 0};  // stays open: the I/O thread needs the role to bury the lane
    int ms = deadline.is_never() ? kSleepMs : std::min(deadline.remaining_ms(), kSleepMs);
    if (::poll(&ready, 1, ms) <= 0) return done();
  }
  if (spin) spin_gate_.spun(true);
  return true;
}

bool LaneImpl::receive() {
  bool something = false;
  for (int64_t budget = kReadBudget; budget > 0;) {
    std::optional<Status> killed;
    {
      std::lock_guard lock(mutex_);
      killed = killed_;
    }
    if (killed) {
      die(*killed);
      return something;
    }
    iovec pieces[kPieces + 1];
    size_t count = 0;
    uint64_t window = 0;
    if (in_payload_) {
      count = ask_windows({pieces, kPieces});
      for (size_t i = 0; i < count; ++i) window += pieces[i].iov_len;
      if (count == 0) pieces[count++] = {buffer_.data(), std::min<uint64_t>(buffer_.size(), payload_left_)};
      // The next frame's header often follows at once: take it in the same call.
      if (sink_ && window == payload_left_) pieces[count++] = {buffer_.data(), kReadAhead};
    } else {
      // The rest of a bulk frame's body alone, so that its payload is read to where it belongs.
      size_t want = !mostly_bulk_ ? buffer_.size() : decoder_.in_body() ? decoder_.needed() : kReadAhead;
      pieces[count++] = {buffer_.data(), std::min(want, buffer_.size())};
    }
    ssize_t n = receive_some(pieces, count);
    if (n <= 0 && sink_ && window > 0) {
      int err = errno;
      sink_->filled(0);  // windows are open around one recv only, never while the lane sleeps
      errno = err;
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EFAULT && sink_ && window > 0) {
        auto finished = std::move(sink_);
        finished->unmapped(unmapped_memory());
        finished->finish(Status::ok());
        continue;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        die({Code::peer_lost, peer_name_ + " (" + description_ + "): " + ::strerror(errno)});
      }
      return something;
    }
    if (n == 0) {
      die({Code::peer_lost, peer_name_ + " (" + description_ + ") closed the connection or died"});
      return something;
    }
    something = true;
    last_heard_ns_.store(steady_ns(), std::memory_order_relaxed);
    received_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    budget -= n;
    auto bytes = static_cast<uint64_t>(n);
    begin_ = end_ = 0;
    if (!in_payload_) {
      end_ = bytes;
    } else if (!sink_) {
      payload_arrived(bytes);
    } else {
      uint64_t placed = std::min(bytes, window);
      end_ = bytes - placed;
      payload_arrived(placed);
    }
    if (!parse_buffer()) return something;
    // A short read emptied the socket: asking again would only give EAGAIN.
    size_t asked = 0;
    for (size_t i = 0; i < count; ++i) asked += pieces[i].iov_len;
    // (On a Unix socket it may have stopped at file descriptors; a caller that waits asks again if it needs to.)
    if (bytes < asked && (!is_unix_ || polled_)) return something;
  }
  return something;
}

ssize_t LaneImpl::receive_some(iovec* pieces, size_t count) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  if (!is_unix_) return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n = ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return n;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    size_t fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < fds; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      arrived_fds_.emplace_back(fd);
    }
  }
  return n;
}

// Everything in buffer_, which is then empty. Fds arrive with or before the first byte of their frame, in order.
bool LaneImpl::parse_buffer() {
  while (begin_ < end_) {
    if (in_payload_) {
      if (!take_payload_from_buffer()) return false;
      continue;
    }
    std::string_view in(buffer_.data() + begin_, end_ - begin_);
    auto step = decoder_.push(in);
    begin_ = end_ - in.size();
    if (step == FrameDecoder::Step::need_more) return true;
    if (step == FrameDecoder::Step::error) {
      die(decoder_.status().with(description_));
      return false;
    }
    const FrameHeader& header = decoder_.header();
    if (header.type == FrameType::bulk) {
      if (!begin_bulk()) return false;
      continue;
    }
    mostly_bulk_ = false;
    if (arrived_fds_.size() < header.nfds) {
      die({Code::corrupt, description_ + ": a frame's file descriptors did not arrive"});
      return false;
    }
    std::vector<UniqueFd> fds;
    for (int i = 0; i < header.nfds; ++i) {
      fds.push_back(std::move(arrived_fds_.front()));
      arrived_fds_.pop_front();
    }
    session_->on_frame(*this, header, decoder_.take_body(), std::move(fds));
  }
  return true;
}

bool LaneImpl::begin_bulk() {
  payload_left_ = decoder_.header().payload_bytes;
  payload_offset_ = 0;
  in_payload_ = true;
  mostly_bulk_ = payload_left_ >= kReadAhead;
  std::string body = decoder_.take_body();
  if (core_->bulk_handler) sink_ = core_->bulk_handler->begin(*this, body, payload_left_);
  if (payload_left_ == 0) end_bulk(Status::ok());
  return true;
}

// The windows for the next bytes; none, with sink_ gone, if the rest is to be thrown away.
size_t LaneImpl::ask_windows(std::span<iovec> pieces) {
  if (!sink_) return 0;
  size_t count = sink_->windows(payload_offset_, payload_left_, pieces);
  if (count > 0) return count;
  auto finished = std::move(sink_);
  finished->finish(Status::ok());
  return 0;
}

bool LaneImpl::take_payload_from_buffer() {
  iovec pieces[kPieces];
  size_t count = ask_windows(pieces);
  uint64_t left = std::min<uint64_t>(end_ - begin_, payload_left_), placed = count == 0 ? left : 0;
  for (size_t i = 0; i < count && placed < left; ++i) {
    size_t n = std::min<size_t>(pieces[i].iov_len, left - placed);
    std::memcpy(pieces[i].iov_base, buffer_.data() + begin_ + placed, n);
    placed += n;
  }
  begin_ += placed;
  payload_arrived(placed);
  return true;
}

void LaneImpl::payload_arrived(uint64_t nbytes) {
  payload_offset_ += nbytes;
  payload_left_ -= nbytes;
  if (sink_) sink_->filled(nbytes);
  if (payload_left_ == 0) end_bulk(Status::ok());
}

void LaneImpl::end_bulk(const Status& status) {
  in_payload_ = false;
  auto finished = std::move(sink_);
  if (finished) finished->finish(status);
}

void LaneImpl::die(const Status& why) {
  if (!reactor_->in_thread()) return kill(why);  // the I/O thread buries it, when the waiting caller has gone
  if (std::exchange(over_, true)) return;
  if (in_payload_) end_bulk(why);
  bool sender_inside;
  {
    std::lock_guard lock(mutex_);
    if (!killed_) killed_ = why;
    dead_.store(true, std::memory_order_release);
    ::shutdown(fd_.get(), SHUT_RDWR);
    sender_inside = sending_;
    death_waits_ = sender_inside;
  }
  auto self = shared_from_this();  // the reactor's reference may be the last
  reactor_->unwatch(token_, fd_.get());
  if (!sender_inside) finish_death();
}

void LaneImpl::finish_death() {
  if (!memory_is_ours()) {
    reactor_->add_timer(steady_ns() + kLookAgainNs, [self = shared_from_this()] { self->finish_death(); });
    return;
  }
  std::deque<std::unique_ptr<OutFrame>> unsent;
  Status why;
  {
    std::lock_guard lock(mutex_);
    if (current_) unsent.push_back(std::move(current_));
    for (auto* queue : {&lingering_, &control_, &bulk_[0], &bulk_[1]}) {
      for (auto& frame : *queue) unsent.push_back(std::move(frame));
      queue->clear();
    }
    why = *killed_;
    ForkGuard::remove(fd_.get());
    fd_.reset();
  }
  arrived_fds_.clear();
  for (auto& frame : unsent) {
    const Status outcome = frame->unmapped.value_or(why);
    finish_frame(std::move(frame), outcome);
  }
  queued_ = 0;
  session_->on_lane_dead(*this, why);
  core_->lane_closed();
}

}  // namespace torch_mooncake::rpc
