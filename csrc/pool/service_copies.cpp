// Copies from donor to donor: replicas that were lost with a node are made again in the background, and what only a
// leaving node has is moved away before it goes.
//
// The leader says what is to be copied where, few at a time (kAtOnce); the donor that is to have the copy fetches it,
// one after the other, and only into room that nobody uses: nothing is evicted for a copy. What is fetched is validated
// like any read; then the home makes it one of the object's replicas, if the object is still that version.
#include <algorithm>

#include "common/crc32c.h"
#include "common/log.h"
#include "common/random.h"
#include "pool/service_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kAtOnce = 4;
constexpr size_t kLookedAt = 64;             // keys that are taken up at once
constexpr int64_t kCopyMs = 60'000;          // of one object
constexpr int64_t kParkNs = 10'000'000'000;  // until a copy that found no room is tried again
constexpr size_t kTries = 3;                 // again, of one that has been lost while it was made
constexpr size_t kSources = 16;
constexpr int64_t kAskAgainMs = 250;
constexpr int64_t kAloneNs = 3'000'000'000;  // nobody leads for so long: who could, leaves too

// A leader that has just changed, or is about to.
bool passes(const Status& s) {
  return s.code() == Code::pool_unavailable || s.code() == Code::peer_lost || s.code() == Code::closed ||
         s.code() == Code::key_not_found || s.code() == Code::deadline_exceeded;
}

}  // namespace

// --- the leader ---

void NodeServiceImpl::tick_copies(int64_t now_ns) {
  std::vector<NodeId> late;
  for (const auto& [node, evacuation] : evacuations_)
    if (evacuation->deadline_ns <= now_ns || (node != self_.id && !members_.count(node))) late.push_back(node);
  for (const NodeId& node : late) evacuation_over(node);
  if (!parked_.empty() && now_ns >= parked_until_ns_) retry_copies();
  start_copies();
}

void NodeServiceImpl::retry_copies() {
  for (const KeyHash& hash : std::exchange(parked_, {})) home_->short_again(hash);
}

// Who leaves comes first.
void NodeServiceImpl::take_up_copies() {
  std::vector<NodeId> over;
  for (auto& [node, evacuation] : evacuations_) {
    for (size_t n = 0; n < kLookedAt && !evacuation->keys.empty(); ++n) {
      for (MissingCopy& what : home_->missing(evacuation->keys.back(), going_)) {
        ++evacuation->open;
        queue_copy(std::move(what), evacuation, 0);
      }
      evacuation->keys.pop_back();
    }
    if (evacuation->keys.empty() && evacuation->open == 0) over.push_back(node);
  }
  for (const NodeId& node : over) evacuation_over(node);
  if (!to_copy_.empty()) return;
  for (const KeyHash& hash : home_->take_short(kLookedAt))
    for (MissingCopy& what : home_->missing(hash)) queue_copy(std::move(what), nullptr, 0);
}

// Each time from another of the copies there are.
void NodeServiceImpl::queue_copy(MissingCopy what, const EvacuationPtr& evacuation, size_t tries) {
  auto copy = std::make_shared<Copying>();
  copy->sources = what.from;
  std::rotate(copy->sources.begin(), copy->sources.begin() + static_cast<ptrdiff_t>(tries % what.from.size()),
              copy->sources.end());
  copy->what = std::move(what);
  copy->evacuation = evacuation;
  copy->tries = tries;
  to_copy_.push_back(std::move(copy));
}

void NodeServiceImpl::start_copies() {
  for (size_t n = 0; n < kLookedAt && leader_ && copying_ < kAtOnce; ++n) {
    if (to_copy_.empty()) take_up_copies();
    if (to_copy_.empty()) return;
    auto copy = std::move(to_copy_.front());
    to_copy_.pop_front();
    ++copying_;
    start_copy(std::move(copy));
  }
}

// On another host than the copies there are, and that stays: where most room is.
const NodeInfo* NodeServiceImpl::place_for(const Copying& copy) const {
  std::vector<const NodeInfo*> nodes{&self_};
  for (const auto& [id, member] : members_)
    if (member.announced) nodes.push_back(&member.info);
  std::set<std::string> hosts;
  for (const NodeInfo* node : nodes)
    for (const ReplicaRef& there : copy.what.from)
      if (there.node == node->id && !going_.count(node->id)) hosts.insert(node->host_id);
  const auto free_bytes = [&](const NodeInfo* node) {
    const uint64_t used = node == &self_ ? donor_->stats().used_bytes : node->used_bytes;
    return node->limit_bytes - std::min(node->limit_bytes, used);
  };
  const NodeInfo* best = nullptr;
  for (const NodeInfo* node : nodes) {
    const auto failed = copy.failed.find(node->id);
    if (hosts.count(node->host_id) || leaving_.count(node->id) || going_.count(node->id) ||
        (failed != copy.failed.end() && failed->second >= copy.sources.size()) || (node == &self_ && draining_))
      continue;
    if (!best || free_bytes(node) > free_bytes(best)) best = node;
  }
  return best;
}

void NodeServiceImpl::start_copy(std::shared_ptr<Copying> copy) {
  std::erase_if(copy->sources,
                [&](const ReplicaRef& there) { return there.node != self_.id && !members_.count(there.node); });
  const NodeInfo* to = place_for(*copy);
  if (!to || copy->sources.empty()) {
    copy->nowhere = true;
    return copy_over(copy, copy->last, 0);
  }
  const ReplicaRef from = copy->sources.front();
  CopyCall call;
  call.view = home_->view();
  call.shard = shard_of(copy->what.hash);
  call.from = from.node == self_.id ? self_ : members_.at(from.node).info;
  call.extent = from.extent;
  copy->at = to->id;
  CopyDone done = [this, copy, reign = reign_](const Result<CopyAnswer>& made) {
    still_leads();
    if (!home_ || reign != reign_) return;
    home_->at(steady_ns());
    if (!made.is_ok()) {
      copy->last = made.status();
      const Code code = copy->last.code();
      if (code == Code::key_not_found) return copy_over(copy, copy->last, 0);  // it has changed, or gone from there
      // From another, if it may be the source's fault; elsewhere, if it is the target's, or all have failed.
      auto& sources = copy->sources;
      std::rotate(sources.begin(), sources.begin() + 1, sources.end());
      if (code == Code::corrupt)
        sources.pop_back();
      else
        copy->failed[copy->at] += code == Code::pool_full ? sources.size() : 1;
      return start_copy(copy);
    }
    const RequestId request = next_request_++;
    commits_[request] = [this, copy, nbytes = made->nbytes](const Result<CommitAnswer>& joined) {
      copy_over(copy, joined.status(), nbytes);
    };
    home_->add_copy(request, copy->what, {copy->at, made->extent, Tier::dram}, made->txn, made->crc32c);
    pump();
  };
  if (to == &self_) return copy_here(call, std::move(done));
  members_.at(to->id).session->call(kCopy, encode(call), Deadline::after_ms(2 * kCopyMs),
                                    [this, done = std::move(done)](Result<rpc::Message> answer) {
                                      if (closing_) return;
                                      auto made = answer.is_ok() ? decode<CopyAnswer>(answer->body)
                                                                 : Result<CopyAnswer>(answer.status());
                                      strand_.run([done, made = std::move(made)] { done(made); });
                                    });
}

// What it was for may be missing still, whatever became of it: one end has lost it, or leaves too. Then it is made
// again, a few times; what has no place waits, or is left behind.
void NodeServiceImpl::copy_over(const std::shared_ptr<Copying>& copy, const Status& status, uint64_t nbytes) {
  if (!home_) return;  // this node leads no more
  --copying_;
  const EvacuationPtr& evacuation = copy->evacuation;
  auto missing = home_->missing(copy->what.hash, evacuation ? going_ : std::set<NodeId>{});
  std::erase_if(missing, [&](const MissingCopy& what) { return what.part != copy->what.part; });
  const bool again = !missing.empty() && !copy->nowhere && copy->tries < kTries;
  if (evacuation) {
    if (evacuation->over) {
      // Told already.
    } else if (again) {
      queue_copy(std::move(missing[0]), evacuation, copy->tries + 1);
    } else {
      Evacuated& result = evacuation->result;
      if (!missing.empty()) {
        ++result.left;
        result.why = status.is_ok() ? "where it was moved to leaves too" : status.message().substr(0, kMaxTextBytes);
      } else if (status.is_ok()) {
        ++result.moved;
        result.moved_bytes += nbytes;
      }
      if (--evacuation->open == 0 && evacuation->keys.empty()) evacuation_over(evacuation->node);
    }
  } else if (status.is_ok()) {
    home_->short_again(copy->what.hash);  // it may lack more than one
  } else if (again) {
    queue_copy(std::move(missing[0]), nullptr, copy->tries + 1);
  } else if (!missing.empty()) {
    if (parked_.empty()) parked_until_ns_ = steady_ns() + kParkNs;
    parked_.insert(copy->what.hash);
  }
  // Not from here: what finds no room may be a long list.
  if (std::exchange(copies_start_, true)) return;
  strand_.run([this] {
    copies_start_ = false;
    if (!home_) return;
    start_copies();
    pump();
  });
}

void NodeServiceImpl::end_copies(const Status& why) {
  while (!evacuations_.empty()) evacuation_over(evacuations_.begin()->first, why);
  copying_ = 0;
  to_copy_.clear();
  parked_.clear();
  going_.clear();
}

void NodeServiceImpl::on_evacuate(const rpc::SessionPtr& session, EvacuateCall call, ResponderPtr responder) {
  const auto it = leader_ ? members_.find(call.node) : members_.end();
  if (it == members_.end() || it->second.session != session)
    return responder->fail({Code::key_not_found, "this node has not joined"});
  start_evacuation(call.node, steady_ns() + int64_t{call.timeout_ms} * 1'000'000,
                   [responder](const Result<Evacuated>& result) {
                     result.is_ok() ? responder->ok(encode(*result)) : responder->fail(result.status());
                   });
}

void NodeServiceImpl::start_evacuation(const NodeId& node, int64_t deadline_ns,
                                       std::function<void(const Result<Evacuated>&)> done) {
  if (evacuations_.count(node)) evacuation_over(node, {Code::pool_unavailable, "this node has asked again"});
  going_.insert(node);
  if (!home_->complete()) return done(Status(Code::pool_unavailable, "the directory is being rebuilt"));
  auto evacuation = std::make_shared<Evacuation>();
  evacuation->node = node;
  evacuation->keys = home_->only_on(node, going_);
  evacuation->deadline_ns = deadline_ns;
  evacuation->done = std::move(done);
  evacuations_[node] = evacuation;
  if (evacuation->keys.empty()) return evacuation_over(node);
  start_copies();
}

void NodeServiceImpl::evacuation_over(const NodeId& node, const Status& why) {
  const EvacuationPtr evacuation = std::move(evacuations_.extract(node).mapped());
  evacuation->over = true;
  std::erase_if(to_copy_, [&](const auto& copy) { return copy->evacuation == evacuation; });
  if (!why.is_ok()) return evacuation->done(why);
  if (const size_t late = evacuation->open + evacuation->keys.size(); late > 0) {
    evacuation->result.left += late;
    evacuation->result.why = "there was no more time";
  }
  evacuation->done(evacuation->result);
}

// --- the donor ---

void NodeServiceImpl::on_copy(const rpc::SessionPtr&, CopyCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok()) return responder->fail(s);
  if (const uint64_t seen = std::max(view_.number, fence_); call.view >> kTermBits < seen >> kTermBits)
    return responder->fail({Code::pool_unavailable, "this donor follows a later leader"});
  copy_here(call, [responder](const Result<CopyAnswer>& made) {
    made.is_ok() ? responder->ok(encode(*made)) : responder->fail(made.status());
  });
}

void NodeServiceImpl::copy_here(const CopyCall& call, CopyDone done) {
  std::unique_lock lock(copies_mutex_);
  if (closing_) {
    lock.unlock();
    return done(Status(Code::closed, "closing"));
  }
  copies_.emplace_back(call, std::move(done));
  if (!copier_.joinable()) copier_ = std::thread([this] { copier_thread(); });
  copies_cv_.notify_all();
}

void NodeServiceImpl::copier_thread() {
  for (;;) {
    std::unique_lock lock(copies_mutex_);
    while (copies_.empty() && !closing_) copies_cv_.wait_for(lock, std::chrono::seconds(1));
    if (closing_) break;
    auto [call, done] = std::move(copies_.front());
    copies_.pop_front();
    lock.unlock();
    auto made = make_copy(call);
    strand_.run([this, done = std::move(done), made = std::move(made)] {
      done_.copies += made.is_ok();
      done_.copied_bytes += made.is_ok() ? made->nbytes : 0;
      done(made);
    });
  }
  sources_.clear();
}

Result<LinkPtr> NodeServiceImpl::link_to(const NodeInfo& node, Deadline deadline) {
  if (const auto it = sources_.find(node.id); it != sources_.end() && it->second->alive()) return it->second;
  if (sources_.size() >= kSources) sources_.clear();
  Status last(Code::peer_lost, "a node of the pool listens on no address that can be reached from here");
  for (const std::string& address : node.addresses) {
    if (address.starts_with("unix://")) continue;  // perhaps somebody else's, on its host
    auto opened = Link::open({engine_, "copies", self_.host_id}, address, deadline);
    if (opened.is_ok() && (*opened)->node() != node.id) opened = Status(Code::peer_lost, "another node answers there");
    if (opened.is_ok()) return sources_[node.id] = std::move(opened).value();
    last = opened.status().with(address);
  }
  return last;
}

Result<CopyAnswer> NodeServiceImpl::make_copy(const CopyCall& call) {
  const Deadline deadline = Deadline::after_ms(kCopyMs);
  const int64_t asked_ns = steady_ns();
  TM_ASSIGN(const LinkPtr from, link_to(call.from, min(deadline, Deadline::after_ms(kLeaseMs))));
  TM_ASSIGN(const Exported source, from->call<Exported>(kExport, ExportCall{call.extent}, deadline));
  const Description& d = source.description;
  ReserveRequest request;
  request.txn = random_id();
  request.key = source.key;
  request.kind = source.kind;
  request.nbytes = d.nbytes;
  request.part = source.part;
  request.parts = source.parts;
  request.meta = d.meta;
  request.label = d.label;
  request.parent = source.parent;
  Result<Reservation> place = Status(Code::closed, "closing");
  strand_.run_and_wait([&] {
    const DonorStats stats = donor_->stats();
    const uint64_t taken = stats.used_bytes + stats.prepared_bytes + stats.limbo_bytes + stats.granted_bytes;
    if (taken + d.nbytes > stats.limit_bytes) {
      place = Status(Code::pool_full, "no node has room for a copy of " + std::to_string(d.nbytes) + " bytes");
      return;
    }
    place = reserve(request);
    if (!place.is_ok()) return;
    reserved_until_[request.txn] = deadline.ns() + kCopyMs * 1'000'000;
    // Their clock may be slower than ours, by as much as a member's may be slower than a home's.
    const uint64_t left_ms = source.left_ms.value_or(0) - source.left_ms.value_or(0) / 10;
    copies_expire_[request.txn] = source.left_ms ? asked_ns + static_cast<int64_t>(left_ms) * 1'000'000 : INT64_MAX;
  });
  TM_TRY(place.status());
  std::vector<ReadRange> ranges;
  std::vector<iovec> memory;
  for (uint64_t at = 0; const Piece& piece : place->pieces) {
    std::byte* to = data_maps_[piece.segment]->data + piece.offset;
    ranges.push_back({at, to, piece.nbytes});
    memory.push_back({to, piece.nbytes});
    at += piece.nbytes;
  }
  Status s = from->read(d.copy.value_or(call.extent), d.pieces, ranges, memory, deadline);
  uint32_t crc = 0;
  for (const iovec& v : memory) crc = s.is_ok() && d.crc32c ? crc32c(v.iov_base, v.iov_len, crc) : 0;
  if (s.is_ok() && d.crc32c && crc != *d.crc32c)
    s = Status(Code::corrupt, "a replica's bytes do not match its checksum");
  if (s.is_ok()) return CopyAnswer{request.txn, place->extent, d.nbytes, d.crc32c};
  strand_.run_and_wait([&] {
    donor_->drop_txn(request.txn);
    reserved_until_.erase(request.txn);
    copies_expire_.erase(request.txn);
  });
  return s;
}

// Of a copy that is to be committed; 0: it never expires. A worker that has restarted since knows no more, and refuses.
Result<uint64_t> NodeServiceImpl::left_of_copy(const Mark& mark) const {
  if (const auto it = copies_expire_.find(mark.txn); it != copies_expire_.end()) {
    if (it->second == INT64_MAX) return uint64_t{0};
    return static_cast<uint64_t>(std::max<int64_t>(1, (it->second - steady_ns()) / 1'000'000));
  }
  auto known = donor_->describe(mark.extent);
  if (known.is_ok() && known->state != ExtentState::prepared && known->version == mark.version) return known->ttl_ms;
  return Status(Code::key_not_found, "this donor has made no such copy");
}

void NodeServiceImpl::on_export(const rpc::SessionPtr&, ExportCall call, ResponderPtr responder) {
  if (const Status s = usable(); !s.is_ok() && !draining_) return responder->fail(s);
  promote_then({call.extent}, [this, call, responder](const Status& promoted) {
    if (!promoted.is_ok()) return responder->fail(promoted);
    auto a = donor_->describe(call.extent);
    if (!a.is_ok()) return responder->fail({Code::key_not_found, a.status().message()});
    Exported out{a->key, a->kind, a->part, a->parts, slim(*a).left_ms, {}, {}};
    out.description.nbytes = a->nbytes;
    out.description.meta = std::move(a->meta);
    out.description.label = std::move(a->label);
    if (a->has_crc) out.description.crc32c = a->crc32c;
    out.description.pieces = std::move(a->pieces);
    out.description.copy = a->copy;
    out.parent = std::move(a->parent);
    responder->ok(encode(out));
  });
}

// --- a node that leaves ---

// Of whoever leads at this moment.
Result<Evacuated> NodeServiceImpl::ask_to_evacuate(Deadline deadline) {
  rpc::SessionPtr leader;
  struct Over {
    std::mutex mutex;
    std::condition_variable cv;
    std::optional<Result<Evacuated>> result;
  };
  auto over = std::make_shared<Over>();
  bool leads = false, empty = false;
  strand_.run_and_wait([&] {
    const DonorStats stats = donor_->stats();
    empty = stats.extents + stats.prepared_extents == 0;
    leader = leader_session_;
    leads = leader_;
    if (!leads || !election_ || empty) return;
    start_evacuation(self_.id, deadline.ns(), [over](const Result<Evacuated>& r) {
      std::lock_guard lock(over->mutex);
      over->result = r;
      over->cv.notify_all();
    });
    pump();
  });
  if (empty) return Evacuated{};
  if (leads) {
    if (!election_) return {Code::unsupported, "the pool ends with its leader"};
    std::unique_lock lock(over->mutex);
    while (!over->result && !closing_) over->cv.wait_for(lock, std::chrono::milliseconds(100));
    return over->result ? *over->result : Status(Code::closed, "closing");
  }
  if (!leader) return {Code::pool_unavailable, "there is no leader"};
  EvacuateCall call{self_.id, 0};
  call.timeout_ms = static_cast<uint32_t>(std::clamp<int64_t>(deadline.remaining_ns() / 1'000'000, 0, 86'400'000));
  TM_ASSIGN(auto reply,
            leader->call_sync(kEvacuate, encode(call), Deadline::at_ns(deadline.ns() + kBeatMs * 2'000'000)));
  return decode<Evacuated>(reply.body);
}

void NodeServiceImpl::evacuate(Deadline deadline) {
  const auto writers = [this] {
    size_t open = 0;
    strand_.run_and_wait([&] { open = donor_->prepared().size(); });
    return open;
  };
  Evacuated told;
  Result<Evacuated> result = Evacuated{};
  for (bool again = true; again;) {
    const size_t open = writers();
    result = ask_to_evacuate(deadline);
    if (result.is_ok()) {
      told = {told.moved + result->moved, told.moved_bytes + result->moved_bytes, result->left, result->why};
      again = writers() < open && !deadline.expired();  // what they have put meanwhile goes too
    } else {
      const int64_t alone_ns = alone_since_ns_;
      again = passes(result.status()) && !deadline.expired() && (alone_ns == 0 || steady_ns() < alone_ns + kAloneNs) &&
              sleep_ms(kAskAgainMs);
    }
  }
  strand_.run_and_wait([&] {
    if (!result.is_ok()) {
      told.left = donor_->stats().extents;
      told.why = result.status().message().substr(0, kMaxTextBytes);
    }
    evacuated_ = told;
    for (const ResponderPtr& responder : std::exchange(ask_evacuated_, {})) responder->ok(encode(told));
  });
  if (told.left > 0 && result.status().code() != Code::unsupported)
    log::warning("pool", std::to_string(told.left) + " object(s) could not be moved to other nodes: " + told.why);
}

void NodeServiceImpl::on_drained(const rpc::SessionPtr&, Empty, ResponderPtr responder) {
  if (evacuated_) return responder->ok(encode(*evacuated_));
  ask_evacuated_.push_back(std::move(responder));
}

}  // namespace torch_mooncake::pool
