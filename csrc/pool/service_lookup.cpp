// Questions: where a key is (the home's), what an extent is, which keys there are (the donor's).
#include "pool/service_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kAnswerBytes = 8 << 20;  // of the 16 MiB that a message may have

constexpr size_t kPeekMost = 256;

size_t answer_bytes(const Description& d) {
  return d.meta.size() + 32 * d.pieces.size() + (d.data ? d.data->bytes.size() : 0);
}

Description description_of(Announcement a) {
  Description d;
  d.nbytes = a.nbytes;
  d.meta = std::move(a.meta);
  d.label = std::move(a.label);
  if (a.has_crc) d.crc32c = a.crc32c;
  d.pieces = std::move(a.pieces);
  d.copy = a.copy;
  return d;
}

}  // namespace

void NodeServiceImpl::on_lookup(const rpc::SessionPtr&, LookupCall call, ResponderPtr responder) {
  if (const Status s = need_home(call.view); !s.is_ok()) return responder->fail(s);
  const RequestId request = next_request_++;
  const int64_t deadline = steady_ns() + int64_t{call.timeout_ms} * 1'000'000;
  lookups_[request] = {std::move(call), false, std::move(responder), deadline};
  look_up(request);
}

// Answers, or watches what cannot be answered yet.
void NodeServiceImpl::look_up(RequestId request) {
  const auto it = lookups_.find(request);
  if (it == lookups_.end() || it->second.promoting > 0) return;
  const PendingLookup& lookup = it->second;
  const LookupCall& call = lookup.call;
  std::vector<Found> found;
  found.reserve(call.keys.size());
  bool waits = false;
  for (const LookupKey& key : call.keys) {
    found.push_back(home_->find(key.key));
    const Found& f = found.back();
    const bool later = f.state == Found::State::later;
    const bool absent = f.state == Found::State::missing || (call.at_least && f.version < *call.at_least);
    if (!later && !(call.present && absent)) continue;
    home_->watch(request, key.key, !later);
    waits = true;
  }
  if (waits) return;
  if (lookup.exists_only) {
    ExistsAnswer there;
    for (const Found& f : found) there.there.push_back(f.state != Found::State::found ? 0 : f.on_ssd() ? 2 : 1);
    lookup.responder->ok(encode(there));
    lookups_.erase(it);
    return;
  }
  if (promote_for(request, found)) return;
  LookupAnswer answer;
  answer.view = home_->view();
  size_t bytes = 0;
  for (size_t i = 0; i < found.size() && bytes < kAnswerBytes; ++i) {
    const Found& f = found[i];
    LookupEntry entry;
    entry.found = f.state == Found::State::found;
    entry.kind = f.kind;
    entry.version = f.version;
    entry.parts = f.parts;
    entry.pin = f.pin;
    if (f.expires_ns != INT64_MAX)
      entry.left_ms = static_cast<uint64_t>(std::max<int64_t>(0, f.expires_ns - steady_ns())) / 1'000'000;
    for (const auto& [part, at] : f.places) {
      Place place{part, at, {}};
      if (call.describe && at.node == self_.id) {
        place.description = describe(at.extent, call.keys[i].key, call.data);
        if (place.description) bytes += answer_bytes(*place.description);
      }
      bytes += 128;
      entry.places.push_back(std::move(place));
    }
    bytes += 64;
    answer.entries.push_back(std::move(entry));
  }
  done_.lookups += answer.entries.size();
  for (const LookupEntry& entry : answer.entries) done_.misses += !entry.found;
  lookup.responder->ok(encode(answer));
  lookups_.erase(it);
}

std::optional<Description> NodeServiceImpl::describe(ExtentRef extent, const std::string& key, bool data) {
  auto a = donor_->describe(extent);
  if (!a.is_ok() || a->key != key) return std::nullopt;
  donor_->touch(extent);
  Description d = description_of(std::move(a).value());
  if (data && d.nbytes <= kInlineLimit) {
    d.data.emplace();
    for (const Piece& piece : d.pieces)
      d.data->bytes.append(reinterpret_cast<const char*>(data_maps_[piece.segment]->data + piece.offset), piece.nbytes);
  }
  return d;
}

void NodeServiceImpl::on_describe(const rpc::SessionPtr&, DescribeCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok() && !draining_) return responder->fail(s);
  if (call.peek) return peek(call, responder);
  std::vector<ExtentRef> extents;
  for (const EvictedExtent& e : call.extents) extents.push_back(e.extent);
  promote_then(extents, [this, call = std::make_shared<DescribeCall>(std::move(call)), responder](const Status& s) {
    answer_describe(*call, responder, s);
  });
}

// Of as many as fit into an answer; the rest is asked for again.
void NodeServiceImpl::peek(const DescribeCall& call, const ResponderPtr& responder) {
  const size_t n = std::min(call.extents.size(), kPeekMost);
  struct State {
    std::vector<std::optional<Description>> found;
    size_t left;
  };
  auto state = std::make_shared<State>(State{std::vector<std::optional<Description>>(n), n + 1});
  auto one = [state, responder] {
    if (--state->left > 0) return;
    DescribeAnswer answer;
    size_t bytes = 0;
    for (auto& d : state->found) {
      if (bytes >= kAnswerBytes) break;
      if (d) bytes += answer_bytes(*d) + 64;
      answer.descriptions.push_back(std::move(d));
    }
    responder->ok(encode(answer));
  };
  for (size_t i = 0; i < n; ++i)
    donor_->peek(call.extents[i].extent, [state, i, key = call.extents[i].key, one](Result<Announcement> a) {
      if (a.is_ok() && a->key == key) state->found[i] = description_of(std::move(a).value());
      one();
    });
  one();
}

void NodeServiceImpl::answer_describe(const DescribeCall& call, const ResponderPtr& responder, const Status& failure) {
  DescribeAnswer answer;
  size_t bytes = 0;
  for (const EvictedExtent& e : call.extents) {
    if (bytes >= kAnswerBytes) break;
    answer.descriptions.push_back(describe(e.extent, e.key, call.data));
    if (const auto& d = answer.descriptions.back()) bytes += answer_bytes(*d) + 64;
  }
  // Nothing but what could not be brought back from an SSD for lack of room: that is not "gone".
  if (bytes == 0 && !failure.is_ok()) return responder->fail(failure);
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_touch(const rpc::SessionPtr&, TouchCall call, ResponderPtr responder) {
  for (const ExtentRef& extent : call.extents) donor_->touch(extent);
  responder->ok();
}

void NodeServiceImpl::on_keys(const rpc::SessionPtr&, KeysCall call, ResponderPtr responder) {
  KeysAnswer answer;
  size_t bytes = 0;
  constexpr size_t kMostKeys = kAnswerBytes / 16;
  auto keys = donor_->keys(call.prefix, kMostKeys, steady_ns(), call.after);
  answer.more = keys.size() == kMostKeys;
  for (std::string& key : keys) {
    if (bytes >= kAnswerBytes) {
      answer.more = true;
      break;
    }
    bytes += key.size() + 4;
    answer.keys.push_back(std::move(key));
  }
  responder->ok(encode(answer));
}

void NodeServiceImpl::on_stat(const rpc::SessionPtr&, Empty, ResponderPtr responder) {
  const DonorStats stats = donor_->stats();
  StatAnswer answer;
  answer.view = leader_ ? home_->view() : view_.number;
  answer.keys = leader_ ? home_->keys() : 0;
  answer.limit_bytes = stats.limit_bytes;
  answer.used_bytes = stats.used_bytes;
  answer.limbo_bytes = stats.limbo_bytes;
  answer.prepared_bytes = stats.prepared_bytes;
  answer.fenced_bytes = stats.fenced_bytes;
  answer.granted_bytes = stats.granted_bytes;
  answer.extents = stats.extents;
  answer.pinned = stats.pinned_extents;
  answer.evictions = stats.evictions;
  answer.soft_pinned_bytes = stats.soft_pinned_bytes;
  answer.hard_pinned_bytes = stats.hard_pinned_bytes;
  answer.is_home = leader_;
  answer.activity = done_;
  answer.activity.starts = options_.starts;
  answer.activity.clients = static_cast<uint64_t>(clients_told_);
  answer.activity.waiting = waiting_.size();
  answer.activity.draining = draining_;
  answer.activity.to_copy = home_ ? home_->short_keys() + parked_.size() + to_copy_.size() + copying_ : 0;
  const Status ready = readiness();
  answer.activity.ready = ready.is_ok();
  answer.activity.unready = ready.message().substr(0, kMaxTextBytes);
  answer.ssd = stats.ssd;
  responder->ok(encode(answer));
}

// Whether a client that comes now is served.
Status NodeServiceImpl::readiness() const {
  TM_TRY(usable());
  if (leader_ && !home_->complete()) return {Code::pool_unavailable, "the directory is being rebuilt"};
  return {};
}

void NodeServiceImpl::on_drain(const rpc::SessionPtr&, Empty, ResponderPtr responder) {
  if (!options_.on_drain_asked) return responder->fail({Code::unsupported, "nobody runs this node who could end it"});
  responder->ok();
  options_.on_drain_asked();
}

}  // namespace torch_mooncake::pool
