#include "transfer/process_vm/pull.h"

#include <algorithm>

#include "common/failpoint.h"
#include "common/packed.h"
#include "transfer/engine_impl.h"
#include "transfer/process_vm/endpoint.h"
#include "transfer/process_vm/lane.h"
#include "transfer/slices.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {
constexpr size_t kPieceBytes = 28;  // of a pull request
}

std::string PullRequest::encode(uint64_t id, std::string_view notify, std::span<const Batch> batches) {
  std::vector<const RegionImpl*> sources;
  for (auto& batch : batches) sources.push_back(static_cast<RegionImpl*>(batch.local.get()));
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  ByteWriter out;
  out.put(id).put(notify).put(static_cast<uint32_t>(sources.size()));
  for (auto* region : sources) out.put(reinterpret_cast<uint64_t>(region->generation_word())).put(region->generation());
  size_t count = count_extents(batches);
  out.put(static_cast<uint32_t>(count));
  std::string body = out.take();
  size_t at = body.size();
  body.resize(at + count * kPieceBytes);
  char* to = body.data() + at;
  for (auto& batch : batches) {
    auto base = reinterpret_cast<uint64_t>(batch.local->data());
    auto grant = static_cast<RemoteRegionImpl&>(*batch.remote).grant();
    for (auto& e : batch.extents) to = store(to, base + e.local_offset, grant, e.remote_offset, e.nbytes);
  }
  return body;
}

Result<PullRequest> PullRequest::decode(std::string_view body) {
  ByteReader in(body);
  PullRequest r;
  r.id = in.get<uint64_t>();
  r.notify = in.get_string();
  r.sources.resize(in.get_count(16));
  for (auto& s : r.sources) {
    s.generation_word = in.get<uint64_t>();
    s.generation = in.get<uint64_t>();
  }
  r.pieces.resize(in.get_count(kPieceBytes));
  if (!in.ok() || in.rest().size() != r.pieces.size() * kPieceBytes)
    return Status(Code::invalid_argument, "malformed pull request");
  const char* from = in.rest().data();
  for (auto& p : r.pieces) from = load(from, p.source, p.target.grant, p.target.offset, p.target.nbytes);
  return r;
}

// ---- Pull

Pull::Pull(PeerImplPtr peer, PullRequest request, rpc::Responder responder)
    : peer_(std::move(peer)), request_(std::move(request)), responder_(std::move(responder)) {
  for (auto& piece : request_.pieces) nbytes_ += piece.target.nbytes;
}

void Pull::run() {
  Status status = pull();
  auto& engine = peer_->engine();
  std::vector<rpc::Responder> waiting;
  {
    std::lock_guard lock(mutex_);
    over_ = true;
    waiting.swap(waiting_);
  }
  if (status) {
    engine.metrics().bytes("process_vm", 0, nbytes_);
    if (!request_.notify.empty())
      engine.notes()->push({peer_->identity().engine, peer_->identity().name, std::move(request_.notify)});
    responder_.ok();
  } else {
    responder_.fail(status);
  }
  for (auto& responder : waiting) responder.ok();
  if (auto* endpoint = peer_->endpoint<ProcessVmEndpoint>()) endpoint->pull_over(request_.id);
}

void Pull::cancel(rpc::Responder over) {
  cancelled_.store(true, std::memory_order_release);
  std::unique_lock lock(mutex_);
  if (!over_) return waiting_.push_back(std::move(over));
  lock.unlock();
  over.ok();
}

Status Pull::pull() {
  RegionImplPtr region;
  uint32_t last_grant = 0;
  for (auto& piece : request_.pieces) {
    if (!region || piece.target.grant != last_grant) region = peer_->grants().find(last_grant = piece.target.grant);
    TM_TRY(check_piece(region, piece.target, Direction::write));
  }
  auto& session = *peer_->session();
  int pid = session.peer_pid();
  if (pid <= 0 || !peer_->we_read_peer_vm()) return {Code::unsupported, "this process cannot read the writer's memory"};
  std::span<PullPiece> rest = request_.pieces;
  while (!rest.empty()) {
    TM_TRY(session.status());
    if (cancelled_.load(std::memory_order_acquire)) return {Code::cancelled, "cancelled by the writer"};
    TM_TRY(failpoint("transfer.pull"));
    size_t count = 0;
    for (uint64_t bytes = 0; count < rest.size() && bytes + rest[count].target.nbytes <= kStepBytes; ++count)
      bytes += rest[count].target.nbytes;
    if (count > 0) {
      TM_TRY(step(rest.first(count), pid));
      rest = rest.subspan(count);
    } else {
      PullPiece head = rest[0];
      head.target.nbytes = kStepBytes;
      TM_TRY(step({&head, 1}, pid));
      rest[0].source += kStepBytes;
      rest[0].target.offset += kStepBytes;
      rest[0].target.nbytes -= kStepBytes;
    }
  }
  for (auto& source : request_.sources) TM_TRY(vm_check_generation(pid, source.generation_word, source.generation));
  return session.status();
}

Status Pull::step(std::span<const PullPiece> pieces, int pid) {
  auto& grants = peer_->grants();
  std::vector<CopyPiece> copies;
  std::vector<Window> windows;
  copies.reserve(pieces.size());
  Status status;
  uint32_t last_grant = 0;
  for (auto& piece : pieces) {
    if (windows.empty() || piece.target.grant != last_grant) {
      auto window = grants.window(piece.target, Direction::write);
      status = window.status();
      if (!window) break;
      last_grant = piece.target.grant;
      windows.push_back(std::move(*window));
    }
    auto* target = windows.back().region->data() + piece.target.offset;
    copies.push_back({target, reinterpret_cast<const void*>(piece.source), piece.target.nbytes});
  }
  if (status && !copies.empty()) status = vm_read(pid, copies);
  for (auto& window : windows) grants.release(window);
  return status;
}

// ---- PullPart

void PullPart::run(std::string request) {
  auto self = shared_from_this();
  op_->add(self);
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::over) return;
    state_ = State::sending;
  }
  op_->peer().session()->call(
      kPull, std::move(request), Deadline::never(),
      [self](Result<rpc::Message> answer) {
        auto& op = *self->op_;
        if (answer) {
          op.add_bytes_done(self->nbytes_);
          op.peer().engine().metrics().bytes("process_vm", self->nbytes_, 0);
        }
        if (answer || op.peer().alive()) op.quiescent(*self);  // whatever it says, the target writes no more
        op.part_done(self, answer.status());
      },
      {}, nbytes_ <= Pull::kInlineBytes);
  std::optional<Status> why;
  {
    std::lock_guard lock(mutex_);
    state_ = State::sent;
    why.swap(stop_);
  }
  if (why) stop(*why);
}

// Our memory is only read by the target, and what it reads after this it throws away or puts where the failed op was
// going anyway: the part is over here at once. Its answer to the cancellation makes the part quiescent there.
void PullPart::stop(const Status& why) {
  auto self = shared_from_this();
  State before;
  {
    std::lock_guard lock(mutex_);
    if (state_ == State::sending) {
      if (!stop_) stop_ = why;
      return;
    }
    before = std::exchange(state_, State::over);
  }
  if (before == State::over) return;
  if (before == State::fresh)
    op_->quiescent(*this);
  else
    op_->peer().session()->call(kPullCancel, ByteWriter().put(id_).take(), Deadline::never(),
                                [self](Result<rpc::Message> answer) {
                                  if (answer) self->op_->quiescent(*self);
                                });
  op_->part_done(self, why);
}

}  // namespace torch_mooncake::transfer
