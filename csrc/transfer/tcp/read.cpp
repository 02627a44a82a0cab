#include "transfer/tcp/read.h"

#include "transfer/engine_impl.h"
#include "transfer/tcp/endpoint.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {
namespace {
constexpr uint64_t kMeasurable = 4 << 20;  // fewer bytes say little about a lane's rate
}

// ---- ReadPart

ReadPart::ReadPart(OpImplPtr op, StreamEndpoint& endpoint, uint64_t id, ChunkPlan plan)
    : op_(std::move(op)), endpoint_(endpoint), id_(id), plan_(std::move(plan)) {}

void ReadPart::run() {
  op_->add(self());
  expect(static_cast<uint32_t>(plan_.chunks.size()));
  {
    std::lock_guard lock(mutex_);
    if (plan_.chunks.empty() || is_over_) return;
    request_ = sending;
  }
  ByteWriter out;
  out.put(id_).put(static_cast<uint32_t>(plan_.chunks.size()));
  for (auto& chunk : plan_.chunks) out.put(chunk.count);
  std::string body = out.take();
  append_pieces(body, plan_.pieces);
  op_->peer().session()->call(kRead, std::move(body), Deadline::never(), [self = self()](Result<rpc::Message> answer) {
    if (!answer) self->stop(answer.status());
  });
  {
    std::lock_guard lock(mutex_);
    request_ = sent;
    if (!is_over_) return;
  }
  tell_owner();  // over meanwhile: behind the request
}

void ReadPart::tell_owner() { (void)op_->peer().session()->post(kReadEnd, ByteWriter().put(id_).take()); }

std::unique_ptr<rpc::BulkReceive> ReadPart::begin_frame(uint32_t chunk, uint64_t payload_bytes, bool over_unix) {
  if (chunk >= plan_.chunks.size() || plan_.chunks[chunk].nbytes != payload_bytes) {
    stop({Code::corrupt, op_->peer().name() + " sent a chunk that was not asked for"});
    return nullptr;
  }
  auto pieces = plan_.pieces_of(chunk);
  Frame frame;
  frame.targets.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i)
    frame.targets.push_back({plan_.local[plan_.chunks[chunk].first + i], pieces[i].nbytes, nullptr});
  return Incoming::begin(chunk, std::move(frame), over_unix);
}

void ReadPart::applied(uint64_t nbytes, bool over_unix) {
  op_->add_bytes_done(nbytes);
  op_->peer().engine().metrics().bytes(over_unix ? "unix" : "tcp", 0, nbytes);
}

void ReadPart::end(const Status& outcome) {
  endpoint_.read_over(id_);
  if (outcome && plan_.nbytes >= kMeasurable)
    endpoint_.lanes().learn_rate(static_cast<double>(plan_.nbytes) / static_cast<double>(steady_ns() - began_ns_));
  bool was_sent;
  {
    std::lock_guard lock(mutex_);
    is_over_ = true;
    was_sent = request_ == sent;
  }
  if (was_sent) tell_owner();
  op_->part_done(self(), outcome);
}

// ---- ReadSource

ReadSource::ReadSource(StreamEndpoint& endpoint, PeerImplPtr peer, uint64_t id, ChunkPlan plan,
                       rpc::Responder responder)
    : Outgoing(plan.chunks.size()),
      endpoint_(endpoint),
      peer_(std::move(peer)),
      id_(id),
      plan_(std::move(plan)),
      responder_(std::move(responder)) {}

Result<ChunkPlan> ReadSource::parse(ByteReader& in) {
  ChunkPlan plan;
  uint32_t first = 0;
  for (uint32_t n = in.get_count(4); n > 0; --n) {
    auto count = in.get<uint32_t>();
    if (count > kMaxPieces || count > kMaxPieces - first)
      return Status(Code::invalid_argument, "a read of too many pieces");
    plan.chunks.push_back({first, count, 0});
    first += count;
  }
  plan.pieces = get_pieces(in);
  if (!in.done() || first != plan.pieces.size()) return Status(Code::invalid_argument, "malformed read request");
  return plan;
}

Status ReadSource::gather(uint32_t chunk, uint32_t attempt, rpc::BulkFrame& frame) {
  frame.body = FrameHead{StreamKind::read, id_, chunk, attempt, {}}.encode();
  std::vector<Window> windows;
  Status status;
  uint32_t last_grant = 0;
  for (auto& piece : plan_.pieces_of(chunk)) {
    if (windows.empty() || piece.grant != last_grant) {
      auto window = peer_->grants().window(piece, Direction::read);
      status = window.status();
      if (!status) break;
      last_grant = piece.grant;
      windows.push_back(std::move(*window));
    }
    frame.payload.push_back({windows.back().region->data() + piece.offset, piece.nbytes});
  }
  // Held until the kernel has the last byte, so that no reader gets bytes of another owner.
  std::lock_guard lock(mutex_);
  windows_[chunk] = std::move(windows);
  return status;
}

void ReadSource::ungather(uint32_t chunk) {
  std::vector<Window> windows;
  {
    std::lock_guard lock(mutex_);
    auto it = windows_.find(chunk);
    if (it == windows_.end()) return;
    windows = std::move(it->second);
    windows_.erase(it);
  }
  for (auto& window : windows) peer_->grants().release(window);
}

void ReadSource::end(const Status& outcome) {
  {
    std::lock_guard lock(mutex_);
    if (outcome_) return;
    outcome_ = outcome;
  }
  endpoint_.lanes().stop(shared_from_this());
}

void ReadSource::at_rest() {
  endpoint_.source_over(id_);
  *outcome_ ? responder_.ok() : responder_.fail(*outcome_);
}

}  // namespace torch_mooncake::transfer
