// What is asked for and lies on an SSD is brought into memory before it is described.
#include "pool/service_impl.h"

namespace torch_mooncake::pool {

// Brings those of `extents` into memory that are on an SSD only; `done` when all have come, or with why one could not
// for lack of room. At most a quarter of the memory at once: of more, the first would be evicted by the last. Who asked
// for the rest looks again.
void NodeServiceImpl::promote_then(const std::vector<ExtentRef>& extents, std::function<void(const Status&)> done) {
  struct State {
    size_t left = 1;
    Status failure;
    std::function<void(const Status&)> done;
  };
  auto state = std::make_shared<State>();
  state->done = std::move(done);
  const auto one = [state](const Status& s) {
    if (s.code() == Code::pool_full) state->failure = s;
    if (--state->left == 0) state->done(state->failure);
  };
  uint64_t bytes = 0;
  const uint64_t most = self_.limit_bytes / 4;
  for (const ExtentRef& extent : extents) {
    const auto nbytes = donor_->only_on_ssd(extent);
    if (!nbytes || (bytes > 0 && bytes + *nbytes > most)) continue;
    bytes += *nbytes;
    ++state->left;
    donor_->promote(extent, one);
  }
  one({});
}

// False: there is nothing to wait for. Else the look-up goes on by itself, once.
bool NodeServiceImpl::promote_for(RequestId request, const std::vector<Found>& found) {
  PendingLookup& lookup = lookups_.at(request);
  if (!lookup.call.describe || std::exchange(lookup.promoted, true)) return false;
  std::vector<ExtentRef> extents;
  for (const Found& f : found)
    for (const auto& [part, at] : f.places)
      if (at.node == self_.id && donor_->only_on_ssd(at.extent)) extents.push_back(at.extent);
  if (extents.empty()) return false;
  lookup.promoting = 1;
  promote_then(extents, [this, request](const Status&) {
    const auto it = lookups_.find(request);
    if (it == lookups_.end()) return;  // it was late
    it->second.promoting = 0;
    look_up(request);
  });
  return true;
}

// On the strand, when the disk has done something.
void NodeServiceImpl::disk_done() {
  still_leads();
  if (home_) home_->at(steady_ns());
  donor_->run_completions();
  retry_reservations();
  pump();
}

void NodeServiceImpl::on_tiers(const rpc::SessionPtr&, TierReport report, ResponderPtr responder) {
  if (const auto member = members_.find(report.node); leader_ && member != members_.end()) {
    for (const TierChange& c : report.extents) home_->moved(report.node, c.key, c.extent, c.tier);
    if (member->second.joining)
      member->second.moved.insert(member->second.moved.end(), report.extents.begin(), report.extents.end());
  }
  responder->ok();
}

}  // namespace torch_mooncake::pool
