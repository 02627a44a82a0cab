#include "transfer/tcp/write.h"

#include "transfer/engine_impl.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

// ---- WritePart

WritePart::WritePart(OpImplPtr op, LaneScheduler& lanes, uint64_t id, ChunkPlan plan)
    : Outgoing(plan.chunks.size(), static_cast<rpc::Priority>(op->priority())),
      op_(std::move(op)),
      lanes_(lanes),
      id_(id),
      plan_(std::move(plan)) {}

void WritePart::run(std::string notify) {
  op_->add(self());
  {
    std::lock_guard lock(mutex_);
    if (outcome_ || request_ == never) return;
    request_ = sending;
  }
  ByteWriter out;
  out.put(id_).put(static_cast<uint32_t>(plan_.chunks.size())).put(std::string_view(notify));
  op_->peer().session()->call(kWrite, out.take(), Deadline::never(), [self = self()](Result<rpc::Message> answer) {
    auto& op = *self->op_;
    if (answer) op.add_bytes_done(self->plan_.nbytes);
    if (answer || op.peer().alive()) op.quiescent(*self);  // whatever it says, nothing lands after it
    self->end(answer.status());
  });
  lanes_.start(self());
  std::optional<Status> why;
  {
    std::lock_guard lock(mutex_);
    request_ = sent;
    why.swap(stop_);
  }
  if (why) stop(*why);
}

Status WritePart::gather(uint32_t chunk, uint32_t attempt, rpc::BulkFrame& frame) {
  auto pieces = plan_.pieces_of(chunk);
  frame.body = FrameHead{StreamKind::write, id_, chunk, attempt, {pieces.begin(), pieces.end()}}.encode();
  for (size_t i = 0; i < pieces.size(); ++i)
    frame.payload.push_back({plan_.local[plan_.chunks[chunk].first + i], pieces[i].nbytes});
  return {};
}

void WritePart::stop(const Status& why) {
  auto self = this->self();
  bool was_sent;
  {
    std::lock_guard lock(mutex_);
    if (outcome_) return;
    if (request_ == sending) {
      if (!stop_) stop_ = why;
      return;
    }
    was_sent = request_ == sent;
    if (!was_sent) request_ = never;
  }
  if (!was_sent) op_->quiescent(*this);
  end(why);  // before the write itself is answered with "cancelled"
  if (was_sent)
    op_->peer().session()->call(kWriteCancel, ByteWriter().put(id_).take(), Deadline::never(),
                                [self](Result<rpc::Message> answer) {
                                  if (answer) self->op_->quiescent(*self);
                                });
}

void WritePart::end(const Status& outcome) {
  {
    std::lock_guard lock(mutex_);
    if (outcome_) return;
    outcome_ = outcome;
  }
  lanes_.stop(self());
  if (rested_) return;
  // Frames in flight still read the caller's memory. Where nothing moves any more, the lanes have to go.
  std::weak_ptr<Outgoing> weak = self();
  op_->peer().engine().rpc().add_timer(Deadline::at_ns(steady_ns() + op_->grace_ns() / 2), [weak] {
    auto stream = std::static_pointer_cast<WritePart>(weak.lock());
    if (stream && !stream->rested_)
      stream->lanes_.kill_lanes_of(stream, {Code::deadline_exceeded, "stuck in a write that is over"});
  });
}

void WritePart::at_rest() {
  rested_ = true;
  op_->part_done(self(), *outcome_);
}

// ---- WriteTarget

WriteTarget::WriteTarget(StreamEndpoint& endpoint, PeerImplPtr peer, uint64_t id)
    : endpoint_(endpoint), peer_(std::move(peer)), id_(id) {}

std::unique_ptr<rpc::BulkReceive> WriteTarget::begin_frame(FrameHead head, uint64_t payload_bytes, bool over_unix) {
  if (head.pieces.empty()) {
    stop({Code::corrupt, "a frame without pieces"});
    return nullptr;
  }
  uint64_t nbytes = 0;
  uint32_t last_grant = 0;
  Frame frame;
  frame.targets.reserve(head.pieces.size());
  for (auto& piece : head.pieces) {
    Status status;
    if (frame.regions.empty() || piece.grant != last_grant) {
      auto region = peer_->grants().resolve(piece, Direction::write);
      status = region.status();
      if (region) frame.regions.push_back(std::move(*region));
      last_grant = piece.grant;
    } else {
      status = check_piece(frame.regions.back(), piece, Direction::write);
    }
    if (!status) {
      stop(status);
      return nullptr;
    }
    nbytes += piece.nbytes;
    auto* region = frame.regions.back().get();
    if (piece.nbytes > 0) frame.targets.push_back({region->data() + piece.offset, piece.nbytes, region});
  }
  if (nbytes != payload_bytes) {
    stop({Code::corrupt, "a frame's pieces and its payload differ in length"});
    return nullptr;
  }
  return Incoming::begin(head.chunk, std::move(frame), over_unix);
}

bool WriteTarget::enter(RegionImpl& region) { return region.usage().acquire(peer_->name()); }

void WriteTarget::leave(RegionImpl& region) { region.usage().release(peer_->name()); }

void WriteTarget::applied(uint64_t nbytes, bool over_unix) {
  peer_->engine().metrics().bytes(over_unix ? "unix" : "tcp", 0, nbytes);
}

void WriteTarget::header(uint32_t chunks, std::string notify, rpc::Responder responder) {
  {
    std::lock_guard lock(mutex_);
    has_header_ = true;
    notify_ = std::move(notify);
    responder_ = std::move(responder);
  }
  expect(chunks);
  finish_if_answered();
}

void WriteTarget::cancel(rpc::Responder over) {
  {
    std::lock_guard lock(mutex_);
    if (!outcome_) cancels_.push_back(std::move(over));
  }
  over.ok();  // a no-op if it was moved away
  stop({Code::cancelled, "cancelled by the writer"});
}

void WriteTarget::answer(const Status& outcome) {
  {
    std::lock_guard lock(mutex_);
    outcome_ = outcome;
  }
  finish_if_answered();
}

// Over when the outcome is there and the header has told whom to tell.
void WriteTarget::finish_if_answered() {
  rpc::Responder responder;
  std::vector<rpc::Responder> cancels;
  bool answerable;
  {
    std::lock_guard lock(mutex_);
    if (!outcome_) return;
    cancels.swap(cancels_);
    answerable = has_header_;
    if (has_header_) responder = std::move(responder_);
    if (has_header_ && *outcome_ && !notify_.empty())
      peer_->engine().notes()->push({peer_->identity().engine, peer_->identity().name, std::exchange(notify_, {})});
  }
  if (answerable) {
    endpoint_.write_over(id_);
    *outcome_ ? responder.ok() : responder.fail(*outcome_);
  }
  for (auto& cancel : cancels) cancel.ok();
}

}  // namespace torch_mooncake::transfer
