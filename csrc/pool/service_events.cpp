// The stream of what becomes of keys: numbered, kept for those who are a little behind, honest to those who are too
// far.
#include <cstring>

#include "common/random.h"
#include "pool/service_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr int64_t kUnheardNs = 60'000'000'000;  // nobody has asked for so long: nothing is kept any more
constexpr size_t kEventBytes = 4 << 20;         // of one answer

}  // namespace

void NodeServiceImpl::on_events(const rpc::SessionPtr&, EventsCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  asked_events_ns_ = steady_ns();
  gather_events();
  if (stream_ == 0) {
    stream_ = random_u64() | 1;
    home_->observe(true);
  }
  if (answer_events(call, responder, false)) return;
  const int64_t deadline_ns = asked_events_ns_ + int64_t{call.timeout_ms} * 1'000'000;
  listening_.push_back({std::move(call), std::move(responder), deadline_ns});
}

// True if it has been answered: there was something to tell, or it is late.
bool NodeServiceImpl::answer_events(const EventsCall& call, const ResponderPtr& responder, bool late) {
  EventsAnswer answer;
  answer.stream = stream_;
  answer.last = last_event_;
  const uint64_t first = last_event_ - events_.size();  // the number before the oldest that is kept
  answer.anew = !home_->complete() || call.stream != stream_ || call.after < first || call.after > last_event_;
  if (!home_->complete()) answer.stream = 0;  // in a rebuild: anew once more
  if (!answer.anew) {
    size_t bytes = 0;
    for (uint64_t number = call.after + 1; number <= last_event_; ++number) {
      const KeyEvent& event = events_[static_cast<size_t>(number - first - 1)];
      if (!event.key.empty() && !event.key.starts_with(call.prefix)) continue;
      bytes += 64 + event.key.size();
      answer.events.push_back(event);
      if (bytes < kEventBytes && answer.events.size() < kMaxBatch) continue;
      answer.last = number;
      break;
    }
  }
  if (answer.events.empty() && !answer.anew && !late && call.timeout_ms > 0) return false;
  responder->ok(encode(answer));
  return true;
}

// Nobody is told what this node no longer knows.
void NodeServiceImpl::end_events() {
  stream_ = 0;
  events_.clear();
  for (Listening& l : std::exchange(listening_, {}))
    l.responder->fail({Code::pool_unavailable, "this node is no longer the directory node"});
}

void NodeServiceImpl::gather_events() {
  if (stream_ == 0) return;
  if (!home_ || !home_->observed()) return end_events();  // it has stood down, or is another home
  bool unknown = false;
  const uint64_t before = last_event_;
  for (Change& change : home_->take_changes()) {
    unknown |= change.what == KeyChange::stored && change.key.empty();
    Id128 hash;
    std::memcpy(hash.data(), change.hash.data(), sizeof hash);
    events_.push_back({hash, std::move(change.key), change.what, change.kind, change.version, change.tier});
    ++last_event_;
    if (events_.size() > kEventLog) events_.pop_front();
  }
  if (unknown) {  // a key came whose name the home does not know: whoever listens has to look
    stream_ = random_u64() | 1;
    events_.clear();
  }
  if (last_event_ == before) return;
  std::erase_if(listening_, [this](const Listening& l) { return answer_events(l.call, l.responder, false); });
}

void NodeServiceImpl::tick_events(int64_t now_ns) {
  if (stream_ == 0) return;
  if (!listening_.empty()) asked_events_ns_ = now_ns;
  std::erase_if(listening_, [&](const Listening& l) {
    return l.deadline_ns <= now_ns && answer_events(l.call, l.responder, true);
  });
  if (now_ns - asked_events_ns_ < kUnheardNs) return;
  home_->observe(false);
  end_events();
}

}  // namespace torch_mooncake::pool
