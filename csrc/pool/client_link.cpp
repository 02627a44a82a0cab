#include "pool/client_link.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "common/failpoint.h"
#include "common/log.h"
#include "memory/copy.h"
#include "pool/view_record.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint64_t kCopyStepBytes = 64 << 20;  // between two looks at the clock
constexpr int64_t kSpinNs = 50'000;
constexpr size_t kTouches = 256;  // told at once
constexpr int64_t kTouchNs = 100'000'000;

bool is_unix(const rpc::SessionPtr& session) {
  const auto lanes = session->lanes();
  return !lanes.empty() && lanes[0]->is_unix();
}

}  // namespace

Result<LinkPtr> Link::open(const LinkOptions& options, const std::string& address, Deadline deadline) {
  LinkPtr link(new Link);
  link->engine_ = options.engine;
  TM_ASSIGN(link->peer_, options.engine->connect(address, deadline));
  link->session_ = link->peer_->session();
  if (link->session_->peer().role != "node")
    return {Code::invalid_argument, address + " is not a node of a pool but a " + link->session_->peer().role};
  if (!is_unix(link->session_) && link->session_->peer().host_id == options.host_id) {
    // Memory is mapped over Unix sockets only. If it cannot be reached there it is another host to us.
    for (const std::string& other : link->session_->peer().addresses) {
      if (!other.starts_with("unix://")) continue;
      auto peer = options.engine->connect(other, deadline);
      if (!peer.is_ok() || (*peer)->identity().engine != link->peer_->identity().engine) continue;
      link->peer_ = std::move(peer).value();
      link->session_ = link->peer_->session();
      break;
    }
  }
  AttachRequest request;
  request.name = options.name;
  request.map = is_unix(link->session_) && link->session_->same_host();
  const int64_t before_ns = steady_ns();
  TM_ASSIGN(auto reply, link->session_->call_sync(kAttach, encode(request), deadline));
  TM_ASSIGN(link->attach_, decode<AttachAnswer>(reply.body));
  link->grants_ = std::make_shared<Grants>(options.engine->rpc(), link->session_, link->attach_.session);
  link->same_clock_ = before_ns <= link->attach_.now_ns && link->attach_.now_ns <= steady_ns();
  if (link->attach_.mapped) {
    TM_TRY(link->adopt(std::move(reply.fds)));
  } else {
    TM_TRY(link->open_regions(deadline));
  }
  return link;
}

Status Link::adopt(std::vector<UniqueFd> fds) {
  if (attach_.segments.empty() || fds.size() != attach_.segments.size() + 1)
    return {Code::internal, "attach: " + std::to_string(fds.size()) + " file descriptors came"};
  for (size_t i = 0; i < attach_.segments.size(); ++i) {
    TM_ASSIGN(auto segment, Segment::adopt(std::move(fds[i]), attach_.segments[i]));
    segments_.push_back(std::move(segment));
    if (i == 0) continue;
    TM_ASSIGN(auto readable, segments_[i]->map(Protection::read_only));
    TM_ASSIGN(auto writable, segments_[i]->map(Protection::read_write));
    capacity_bytes_ += segments_[i]->capacity();
    read_maps_.push_back(std::move(readable));
    write_maps_.push_back(std::move(writable));
  }
  TM_ASSIGN(auto slots, Segment::adopt(std::move(fds.back()), attach_.slots));
  TM_ASSIGN(pins_, PinPage::open(segments_[0], std::move(slots)));
  return {};
}

Status Link::open_regions(Deadline deadline) {
  if (attach_.descriptors.empty()) return {Code::internal, "attach: no descriptors came"};
  for (const std::string& descriptor : attach_.descriptors) {
    TM_ASSIGN(auto region, peer_->open(descriptor, deadline));
    regions_.push_back(std::move(region));
  }
  return {};
}

Link::~Link() {
  // The session may be shared with other users of the engine: it stays, what we attached goes. If the call does not
  // get through, the session is over or the node is gone, which ends it as well.
  if (session_ && attach_.session && session_->alive())
    session_->call(kDetach, encode(DetachRequest{attach_.session}), Deadline::after_ms(2000),
                   [](Result<rpc::Message>) {});
}

bool Link::counted(int64_t ttl_ns) const {
  return mapped() && same_clock_ && steady_ns() - counted_ns(pins_->table()) < ttl_ns;
}

void Link::touch(ExtentRef extent) {
  {
    std::lock_guard lock(touch_mutex_);
    const int64_t now = steady_ns();
    if (touched_.empty()) touched_since_ns_ = now;
    touched_.push_back(extent);
    if (touched_.size() < kTouches && now - touched_since_ns_ < kTouchNs) return;
  }
  tell_touches();
}

void Link::tell_touches() {
  TouchCall call;
  {
    std::lock_guard lock(touch_mutex_);
    call.extents.swap(touched_);
  }
  if (call.extents.empty()) return;
  if (const Status s = session_->post(kTouch, encode(call)); !s.is_ok()) return;  // a hint; the session is over
}

void Link::give_back(std::vector<ExtentRef> extents) {
  if (extents.empty()) return;
  session_->call(kGiveBack, encode(GiveBackCall{attach_.session, std::move(extents), {}, 0}), Deadline::after_ms(2000),
                 [](Result<rpc::Message>) {});
}

void Link::abandon(const TxnId& first, uint32_t n) {
  session_->call(kGiveBack, encode(GiveBackCall{attach_.session, {}, first, n}), Deadline::after_ms(2000),
                 [](Result<rpc::Message>) {});
}

PendingCall PendingCall::start(const rpc::SessionPtr& session, Method method, std::string body, Deadline deadline) {
  PendingCall call;
  call.session_ = session;
  call.deadline_ = deadline;
  call.state_ = std::make_shared<State>();
  session->call(method, std::move(body), deadline, [state = call.state_](Result<rpc::Message> result) {
    std::lock_guard lock(state->mutex);
    state->result = std::move(result);
    state->ready.store(true, std::memory_order_release);
    state->cv.notify_all();
  });
  return call;
}

Result<rpc::Message> PendingCall::wait() {
  const auto is_ready = [this] { return state_->ready.load(std::memory_order_acquire); };
  // Every call has an answer, at its deadline or when the session is over.
  if (!session_->receive_until(is_ready, deadline_, steady_ns() + kSpinNs)) {
    std::unique_lock lock(state_->mutex);
    state_->cv.wait(lock, [this] { return state_->result.has_value(); });
  }
  return std::move(*std::exchange(state_, nullptr)->result);
}

bool Link::take_map(uint64_t nbytes) {
  if (maps_.fetch_add(1) < kMaxMaps && mapped_bytes_.fetch_add(nbytes) + nbytes <= capacity_bytes_ / 2) return true;
  if (maps_.fetch_sub(1) <= kMaxMaps) mapped_bytes_.fetch_sub(nbytes);
  return false;
}

void Link::release_map(uint64_t nbytes) {
  maps_.fetch_sub(1);
  mapped_bytes_.fetch_sub(nbytes);
}

bool Link::in_bounds(const std::vector<Piece>& pieces) const {
  return std::all_of(pieces.begin(), pieces.end(), [&](const Piece& p) {
    const size_t n = mapped() ? read_maps_.size() : regions_.size() - 1;
    if (p.segment >= n) return false;
    const uint64_t limit = mapped() ? segments_[p.segment + 1]->capacity() : regions_[p.segment + 1]->nbytes();
    return p.nbytes <= limit && p.offset <= limit - p.nbytes;
  });
}

Status Link::add_runs(const std::vector<Piece>& pieces, std::span<const ReadRange> ranges,
                      std::vector<Run>* out) const {
  if (!in_bounds(pieces)) return {Code::corrupt, "a node names memory outside its segments"};
  if (pieces.size() == 1) {  // as most are
    for (const ReadRange& r : ranges) {
      if (r.offset > pieces[0].nbytes || r.nbytes > pieces[0].nbytes - r.offset)
        return {Code::out_of_bounds, "bytes beyond the extent"};
      if (r.nbytes > 0) out->push_back({pieces[0].segment, pieces[0].offset + r.offset, r.to, r.nbytes});
    }
    return {};
  }
  std::vector<uint64_t> ends;  // of the pieces, in the extent
  for (const Piece& p : pieces) ends.push_back((ends.empty() ? 0 : ends.back()) + p.nbytes);
  for (ReadRange r : ranges) {
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), r.offset) - ends.begin());
    for (; r.nbytes > 0; ++i) {
      if (i == pieces.size()) return {Code::out_of_bounds, "beyond the end of the object"};
      const Piece& p = pieces[i];
      const uint64_t from = r.offset - (ends[i] - p.nbytes), n = std::min(r.nbytes, p.nbytes - from);
      if (n > 0) out->push_back({p.segment, p.offset + from, r.to, n});
      r = {r.offset + n, r.to + n, r.nbytes - n};
    }
  }
  return {};
}

Status Link::write(std::span<const ExtentWrite> writes, Deadline deadline, bool* quiescent) {
  *quiescent = true;  // a mapped copy is over when this returns
  std::vector<Run> all;
  all.reserve(writes.size());
  std::vector<ReadRange> ranges;  // of an extent, one after the other
  std::vector<iovec> data;        // all of it, in order
  for (const ExtentWrite& write : writes) {
    ranges.clear();
    for (uint64_t at = 0; const iovec& v : write.data) {
      ranges.push_back({at, static_cast<std::byte*>(v.iov_base), v.iov_len});
      at += v.iov_len;
    }
    TM_TRY(add_runs(*write.pieces, ranges, &all));
    if (!mapped()) data.insert(data.end(), write.data.begin(), write.data.end());
  }
  if (!mapped()) {
    if (all.empty()) return {};
    *quiescent = false;
    std::vector<RegionPtr> registered;
    auto op = start(true, all, data, deadline, &registered);
    Status s = op.status();
    if (op.is_ok()) {
      s = (*op)->wait();
      *quiescent = s.is_ok() || (*op)->remote_quiescent();
    } else {
      *quiescent = true;
    }
    for (const RegionPtr& region : registered)
      if (const Status gone = engine_->deregister(region, Deadline::after_ms(2000)); !gone.is_ok() && s.is_ok())
        s = gone;
    return s;
  }
  std::vector<CopyPiece> batch;
  uint64_t bytes = 0;
  auto flush = [&]() -> Status {
    if (bytes >= (1 << 20))
      for (auto& map : write_maps_) map->fault_in(batch);
    CopyPool::shared().copy(batch);
    batch.clear();
    bytes = 0;
    TM_TRY(failpoint("client.copy"));
    if (deadline.expired()) return {Code::deadline_exceeded, "while copying into the pool: nothing was stored"};
    return {};
  };
  for (const Run& run : all) {
    for (uint64_t done = 0; done < run.nbytes;) {
      const uint64_t n = std::min(run.nbytes - done, kCopyStepBytes - bytes);
      batch.push_back({write_maps_[run.segment]->data + run.offset + done, run.memory + done, n});
      done += n;
      bytes += n;
      if (bytes == kCopyStepBytes) TM_TRY(flush());
    }
  }
  return batch.empty() ? Status{} : flush();
}

Status Link::read_small(ExtentRef extent, const std::vector<Piece>& pieces, const ReadRange& range) {
  if (!in_bounds(pieces)) return {Code::corrupt, "an extent's pieces leave their segments"};
  uint64_t skip = range.offset, left = range.nbytes;
  std::byte* to = range.to;
  for (const Piece& piece : pieces) {
    if (left == 0) break;
    const uint64_t n = piece.nbytes > skip ? std::min(piece.nbytes - skip, left) : 0;
    if (n > 0) std::memcpy(to, read_maps_[piece.segment]->data + piece.offset + skip, n);
    skip -= std::min(skip, piece.nbytes);
    to += n;
    left -= n;
  }
  if (left > 0) return {Code::out_of_bounds, "a range leaves its extent"};
  if (!pins_->valid(extent)) return {Code::key_not_found, "superseded while it was read"};
  return {};
}

Status Link::read(ExtentRef extent, const std::vector<Piece>& pieces, std::span<const ReadRange> ranges,
                  std::span<const iovec> memory, Deadline deadline) {
  std::vector<Run> all;
  TM_TRY(add_runs(pieces, ranges, &all));
  if (mapped()) {
    auto slot = pins_->pin(extent);
    // Without a pin the bytes may change while they are copied; the word tells afterwards.
    if (!slot.is_ok() && slot.status().code() != Code::busy) return slot.status();
    Status s = failpoint("client.pinned");
    std::vector<CopyPiece> batch;
    for (const Run& run : all) batch.push_back({run.memory, read_maps_[run.segment]->data + run.offset, run.nbytes});
    CopyPool::shared().copy(batch);
    if (slot.is_ok()) {
      pins_->unpin(*slot);
    } else if (!pins_->valid(extent)) {
      return {Code::key_not_found, "superseded while it was read"};
    }
    return s;
  }
  std::vector<RegionPtr> registered;
  Status s;
  if (!all.empty()) {
    auto op = start(false, all, memory, deadline, &registered);
    s = op.is_ok() ? (*op)->wait() : op.status();
  }
  if (s.is_ok()) {  // the payload first, then its word
    alignas(8) uint64_t word = 0;
    auto region = engine_->register_memory(&word, sizeof word, {});
    if (!region.is_ok()) {
      s = region.status();
    } else {
      const uint64_t at =
          kTableHeaderBytes + uint64_t{extent.index} * sizeof(ExtentEntry) + offsetof(ExtentEntry, generation);
      OpOptions op_options;
      op_options.deadline = deadline;
      auto op = engine_->read({{*region, 0, regions_[0], at, sizeof word}}, std::move(op_options));
      s = op.is_ok() ? (*op)->wait() : op.status();
      registered.push_back(*region);
      if (s.is_ok() && word != extent.generation) s = Status(Code::key_not_found, "superseded while it was read");
    }
  }
  for (const RegionPtr& region : registered)
    if (const Status gone = engine_->deregister(region, Deadline::after_ms(2000)); !gone.is_ok() && s.is_ok()) s = gone;
  return s;
}

Result<OpPtr> Link::start(bool write, const std::vector<Run>& runs, std::span<const iovec> memory, Deadline deadline,
                          std::vector<RegionPtr>* registered) {
  std::vector<Slice> slices;
  size_t run = 0;
  for (const iovec& v : memory) {
    if (v.iov_len == 0) continue;
    RegionOptions options;
    options.label = "user memory of a pool transfer";
    TM_ASSIGN(auto region, engine_->register_memory(v.iov_base, v.iov_len, options));
    registered->push_back(region);
    const auto* base = static_cast<std::byte*>(v.iov_base);
    for (; run < runs.size() && runs[run].memory >= base && runs[run].memory < base + v.iov_len; ++run)
      slices.push_back({region, static_cast<uint64_t>(runs[run].memory - base), regions_[runs[run].segment + 1],
                        runs[run].offset, runs[run].nbytes});
  }
  OpOptions options;
  options.deadline = deadline;
  return write ? engine_->write(std::move(slices), std::move(options))
               : engine_->read(std::move(slices), std::move(options));
}

}  // namespace torch_mooncake::pool
