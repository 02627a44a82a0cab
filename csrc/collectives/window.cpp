#include "collectives/window.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "common/log.h"

namespace torch_mooncake::coll {
namespace {
// Tags of torch's messages are ints, so these are never theirs.
uint64_t tag_of(uint64_t seq) { return (uint64_t{1} << 63) | seq; }
}  // namespace

Result<WindowPtr> Window::open(const Call& call, void* data, uint64_t nbytes, std::shared_ptr<void> keep) {
  WindowPtr window(new Window(call.group.shared_from_this(), call.seq, static_cast<std::byte*>(data)));
  TM_TRY(window->show(call, nbytes, std::move(keep)));
  return window;
}

Status Window::show(const Call& call, uint64_t nbytes, std::shared_ptr<void> keep) {
  std::string descriptor;
  if (nbytes > 0) {
    auto registered = group_->engine().register_memory(
        data_, nbytes, {.readable = false, .writable = true, .keep = std::move(keep), .label = "window"});
    TM_TRY(registered.status());
    region_ = *registered;
    descriptor = region_->descriptor();
  }
  struct Sizes {
    uint64_t nbytes, descriptor;
  };
  const Sizes own{nbytes, descriptor.size()};
  std::vector<Sizes> sizes(group_->size());
  std::vector<Piece> pieces;
  for (auto& size : sizes) pieces.push_back({&size, sizeof size});
  TM_TRY(all_gather(call, {&own, sizeof own}, pieces));
  shown_.resize(sizes.size());
  pieces.clear();
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    shown_[rank].nbytes = sizes[rank].nbytes;
    shown_[rank].descriptor.resize(sizes[rank].descriptor);
    pieces.push_back({shown_[rank].descriptor.data(), sizes[rank].descriptor});
  }
  return all_gather(call, {descriptor.data(), descriptor.size()}, pieces);
}

Window::~Window() {
  if (!region_) return;
  Status freed = group_->engine().deregister(region_, Deadline::after_ms(250));
  if (freed.code() == Code::busy) log::warning("collectives", "a window is still written to: " + freed.to_string());
}

std::vector<RequestPtr> Window::puts_to(int rank) {
  std::lock_guard lock(mutex_);
  auto& puts = shown_[rank].puts;
  std::erase_if(puts, [](const RequestPtr& put) { return put->ended() && put->status().is_ok(); });
  return puts;
}

Status Window::close(const Call& call) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return {Code::closed, "the window was closed"};
    closed_ = true;
  }
  for (int rank = 0; rank < group_->size(); ++rank) {
    // A put that failed has been reported by its own request; this only waits until it is over.
    for (const auto& put : puts_to(rank)) (void)put->wait(call.deadline);
  }
  const Status together = barrier(call);
  if (!region_) return together;
  const Status freed = group_->engine().deregister(std::exchange(region_, nullptr), call.deadline);
  return together.is_ok() ? freed : together;
}

Status Window::usable(int rank) const {
  if (closed_) return {Code::closed, "the window was closed"};
  if (rank < 0 || rank >= group_->size()) {
    return {Code::invalid_argument,
            "rank " + std::to_string(rank) + " of a window of " + std::to_string(group_->size()) + " ranks"};
  }
  return rank == group_->rank() ? Status() : group_->trouble_with(rank, Channel::p2p);
}

Result<RemoteRegionPtr> Window::remote(int rank, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (shown_[rank].remote) return shown_[rank].remote;
  }
  auto session = group_->session_with(rank, deadline, Channel::p2p);
  TM_TRY(session.status());
  auto peer = group_->engine().peer_of(*session);
  if (!peer) return {Code::peer_lost, "the connection is gone"};
  auto opened = peer->open(shown_[rank].descriptor, deadline);
  TM_TRY(opened.status());
  std::lock_guard lock(mutex_);
  return shown_[rank].remote = *opened;
}

RequestPtr Window::put(int to, uint64_t offset, const void* data, uint64_t nbytes, Deadline deadline,
                       std::shared_ptr<void> keep) {
  Status why;
  {
    std::lock_guard lock(mutex_);
    why = usable(to);
  }
  if (why.is_ok() && (offset > shown_[to].nbytes || nbytes > shown_[to].nbytes - offset)) {
    why = {Code::out_of_bounds, std::to_string(nbytes) + " bytes at " + std::to_string(offset) + " of a window of " +
                                    std::to_string(shown_[to].nbytes)};
  }
  if (!why.is_ok()) return Request::ended_with(to, why);
  if (to == group_->rank() || nbytes == 0) {
    if (nbytes > 0) std::memmove(data_ + offset, data, nbytes);
    return Request::ended_with(to, {});
  }
  auto request = std::make_shared<Request>(to, group_->progress(), keep);
  auto fail = [&](const Status& status) {
    request->finish(status.with(group_->name_of(to)));
    std::lock_guard lock(mutex_);
    shown_[to].puts.push_back(request);  // signals after it fail
    return request;
  };
  auto target = remote(to, deadline);
  if (!target.is_ok()) return fail(target.status());
  auto& engine = group_->engine();
  auto local = engine.register_memory(const_cast<void*>(data), nbytes,
                                      {.readable = true, .writable = false, .keep = keep, .label = "put"});
  if (!local.is_ok()) return fail(local.status());
  {
    std::lock_guard lock(mutex_);
    shown_[to].puts.push_back(request);
  }
  OpOptions options;
  options.deadline = deadline;
  options.keep = std::move(keep);
  options.on_end = [self = shared_from_this(), request, to, region = *local](const Status& status) {
    request->defer([=](bool) {
      const Status freed = self->group_->engine().deregister(region, Deadline::after_ms(250));
      const Status& outcome = status.is_ok() ? freed : status;
      request->finish(outcome.is_ok() ? outcome : outcome.with(self->group_->name_of(to)));
    });
  };
  auto op = engine.write({{*local, 0, *target, offset, nbytes}}, std::move(options));
  if (!op.is_ok()) {
    (void)engine.deregister(*local, Deadline::after_ms(250));  // nobody knows of it
    request->finish(op.status().with(group_->name_of(to)));
    return request;
  }
  request->set_cancel([weak = std::weak_ptr<Op>(*op)](Status) {
    if (auto op = weak.lock()) op->cancel();
  });
  return request;
}

RequestPtr Window::signal(int to, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (Status why = usable(to); !why.is_ok()) return Request::ended_with(to, why);
  }
  const auto puts = puts_to(to);
  if (puts.empty()) return group_->send(to, Channel::p2p, tag_of(seq_), nullptr, 0, deadline);
  auto request = std::make_shared<Request>(to, group_->progress(), nullptr);
  auto last = [self = shared_from_this(), request, puts, to, deadline](bool) {
    for (const auto& put : puts) {
      if (Status status = put->status(); !status.is_ok()) return request->finish(status);
    }
    auto sent = self->group_->send(to, Channel::p2p, tag_of(self->seq_), nullptr, 0, deadline);
    sent->on_end([sent = sent.get(), request] { request->finish(sent->status()); });
  };
  auto left = std::make_shared<std::atomic<size_t>>(puts.size());
  for (const auto& put : puts) {
    put->on_end([left, request, last] {
      if (left->fetch_sub(1) == 1) request->defer(last);
    });
  }
  return request;
}

RequestPtr Window::wait_signal(int from, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    if (Status why = usable(from); !why.is_ok()) return Request::ended_with(from, why);
  }
  return group_->receive(from, Channel::p2p, tag_of(seq_), nullptr, 0, deadline);
}

}  // namespace torch_mooncake::coll
