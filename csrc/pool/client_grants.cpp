#include "pool/client_grants.h"

#include <algorithm>

#include "common/clock.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint64_t kMostBytes = 1 << 20;  // of one: a copy of more takes far longer than to ask for room
constexpr uint64_t kAheadBytes = 4 << 20;
constexpr uint64_t kAhead = 16;
constexpr int64_t kIdleMs = 1000;
constexpr int64_t kIdleNs = kIdleMs * 1'000'000;

}  // namespace

std::optional<ReserveAnswer> Grants::take(uint64_t nbytes, const TxnId& txn) {
  if (nbytes == 0 || nbytes > kMostBytes) return {};
  std::optional<ReserveAnswer> taken;
  std::vector<ReserveAnswer> others;
  uint32_t more = 0;
  {
    std::lock_guard lock(mutex_);
    const int64_t now = steady_ns();
    const bool again = nbytes == nbytes_ && now - used_ns_ < kIdleNs;
    used_ns_ = now;
    nbytes_ = nbytes;
    if (!again) {
      others.swap(places_);
    } else {
      if (!places_.empty()) {
        taken = std::move(places_.back());
        places_.pop_back();
      }
      const uint64_t most = std::clamp<uint64_t>(kAheadBytes / nbytes, 1, kAhead);
      if (!asking_ && places_.size() <= most / 2 && now - refused_ns_ >= kIdleNs) {
        asking_ = true;
        more = static_cast<uint32_t>(most - places_.size());
      }
    }
  }
  give_back(std::move(others));
  if (more > 0) ask(nbytes, more, txn);
  return taken;
}

void Grants::ask(uint64_t nbytes, uint32_t count, const TxnId& txn) {
  call(kGrant, encode(GrantCall{id_, txn, nbytes, count}),
       [self = shared_from_this(), nbytes, txn](const Result<rpc::Message>& reply) {
         self->granted(nbytes, txn, reply);
       });
}

void Grants::granted(uint64_t nbytes, const TxnId& txn, const Result<rpc::Message>& reply) {
  auto answer = reply.is_ok() ? decode<GrantAnswer>(reply->body) : Result<GrantAnswer>(reply.status());
  bool watch_them = false;
  {
    std::lock_guard lock(mutex_);
    asking_ = false;
    if (!answer.is_ok()) {
      refused_ns_ = steady_ns();
    } else if (nbytes == nbytes_) {
      for (ReserveAnswer& place : answer->places) places_.push_back(std::move(place));
      answer->places.clear();
      watch_them = !places_.empty() && !std::exchange(watching_, true);
    }
  }
  if (watch_them) watch();
  if (answer.is_ok()) return give_back(std::move(answer->places));
  // Perhaps there is an answer that did not come, or not in time.
  if (answer.status().code() == Code::deadline_exceeded)
    call(kGiveBack, encode(GiveBackCall{id_, {}, txn, 1}), [](const Result<rpc::Message>&) {});
}

// Until there are none left.
void Grants::watch() {
  endpoint_.add_timer(Deadline::after_ms(kIdleMs), [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    std::vector<ReserveAnswer> idle;
    bool again;
    {
      std::lock_guard lock(self->mutex_);
      if (steady_ns() - self->used_ns_ >= kIdleNs) idle.swap(self->places_);
      again = self->watching_ = !self->places_.empty();
    }
    if (again) self->watch();
    self->give_back(std::move(idle));
  });
}

void Grants::give_back() {
  std::vector<ReserveAnswer> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(places_);
    refused_ns_ = steady_ns();
  }
  give_back(std::move(all));
}

void Grants::give_back(std::vector<ReserveAnswer> places) {
  if (places.empty()) return;
  GiveBackCall back{id_, {}, {}, 0};
  for (const ReserveAnswer& place : places) back.extents.push_back(place.extent);
  call(kGiveBack, encode(back), [](const Result<rpc::Message>&) {});
}

// Without a session there is nothing to give back, and nobody to ask.
void Grants::call(Method method, std::string body, std::function<void(const Result<rpc::Message>&)> done) {
  const auto session = session_.lock();
  if (!session) return done(Status(Code::closed, "the session is over"));
  session->call(method, std::move(body), Deadline::after_ms(2 * kIdleMs), std::move(done));
}

}  // namespace torch_mooncake::pool
