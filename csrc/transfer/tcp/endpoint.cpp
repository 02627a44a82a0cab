#include "transfer/tcp/endpoint.h"

#include "common/log.h"
#include "transfer/engine_impl.h"
#include "transfer/tcp/small.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer {

StreamEndpoint::StreamEndpoint(PeerImpl& peer)
    : peer_(peer), lanes_(peer, [this] { keeper_.watch(); }), keeper_(peer, lanes_) {}

void StreamEndpoint::attach(EngineImpl& engine) {
  auto only_with_tcp = [](auto handler) {
    return [handler](PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
      if (peer.endpoint<StreamEndpoint>() == nullptr)
        return responder.fail({Code::unsupported, "tcp is not allowed at this engine"});
      handler(peer, std::move(request), std::move(responder));
    };
  };
  auto forward = [&](auto member) {
    return only_with_tcp([member](PeerImpl& peer, rpc::Message request, rpc::Responder responder) {
      (peer.endpoint<StreamEndpoint>()->*member)(std::move(request), std::move(responder));
    });
  };
  engine.handle(kWrite, forward(&StreamEndpoint::on_write));
  engine.handle(kWriteCancel, forward(&StreamEndpoint::on_write_cancel));
  engine.handle(kRead, forward(&StreamEndpoint::on_read));
  engine.handle(kReadEnd, forward(&StreamEndpoint::on_read_end));
  engine.handle(kRails, forward(&StreamEndpoint::on_rails));
  engine.handle(kLaneLost, forward(&StreamEndpoint::on_lane_lost));
  engine.handle(kLaneStuck, forward(&StreamEndpoint::on_lane_stuck));
  engine.handle(kSmallWrite, only_with_tcp(SmallPart::on_write));
  engine.handle(kSmallRead, only_with_tcp(SmallPart::on_read));
}

std::string StreamEndpoint::name() const { return peer_.session()->over_unix() ? "unix" : "tcp"; }

Explanation StreamEndpoint::explain() const {
  Explanation out{.transport = name(), .option = "tcp", .serves = "any host memory"};
  if (auto features = peer_.features(); features.known && !features.tcp)
    out.no_read = out.no_write = "the peer does not allow tcp";
  for (auto direction : {"read", "write"}) {
    out.sizes.push_back({direction, SmallPart::kMaxBytes, "inside one message each way on lane 0"});
    out.sizes.push_back({direction, UINT64_MAX,
                         "cut into chunks of up to " + std::to_string(lanes_.chunk_bytes() >> 10) + " KiB over " +
                             std::to_string(std::max<size_t>(1, lanes_.bulk_lanes().size())) + " lanes"});
  }
  out.lanes = lane_stats();
  return out;
}

std::vector<LaneStats> StreamEndpoint::lane_stats() const {
  std::vector<LaneStats> out;
  auto rates = lanes_.rates();
  for (auto& lane : peer_.session()->lanes()) {
    out.push_back({.transport = lane->is_unix() ? "unix" : "tcp",
                   .lane = lane->is_unix() ? lane->describe() + " #" + std::to_string(lane->index()) : lane->describe(),
                   .rail = lane->is_unix() ? "" : lane->rail().local + " -> " + lane->rail().remote,
                   .alive = lane->alive(),
                   .bytes_sent = lane->bytes_sent(),
                   .bytes_received = lane->bytes_received(),
                   .queued_bytes = lane->queued_bytes()});
    for (auto& [what, value] : lane->tuning()) out.back().facts.emplace_back(what, value);
    if (auto rate = rates.find(lane->index()); rate != rates.end() && rate->second > 0)
      out.back().facts.emplace_back("bytes a second", static_cast<int64_t>(rate->second));
  }
  return out;
}

bool StreamEndpoint::available() const { return peer_.features().tcp; }

Result<RemoteMemoryPtr> StreamEndpoint::open(const OpenedRegion& opened, Direction, Deadline deadline) {
  if (!available() || opened.descriptor.kind != MemoryKind::host) return RemoteMemoryPtr();
  TM_TRY(open_lanes(deadline));
  return RemoteMemoryPtr(std::make_shared<StreamMemory>());
}

void StreamEndpoint::submit(const OpImplPtr& op, std::span<const Batch> batches) {
  auto& options = peer_.engine().options();
  auto plan = plan_chunks(batches, lanes_.chunk_bytes(), options.lanes);
  if (SmallPart::fits(plan)) return std::make_shared<SmallPart>(op, std::move(plan))->run();
  if (op->direction() == Direction::write) {
    auto part = std::make_shared<WritePart>(op, lanes_, next_write_.fetch_add(1), std::move(plan));
    return part->run(op->take_notify());
  }
  uint64_t id = next_read_.fetch_add(1);
  auto part = std::make_shared<ReadPart>(op, *this, id, std::move(plan));
  {
    std::lock_guard lock(mutex_);
    reads_[id] = part;
  }
  part->run();
}

// ---- Frames

std::unique_ptr<rpc::BulkReceive> StreamEndpoint::begin(std::string_view body, uint64_t payload_bytes, bool over_unix) {
  auto head = FrameHead::decode(body);
  if (!head) {
    peer_.session()->close(head.status().with(peer_.name()));
    return nullptr;
  }
  if (head->kind == StreamKind::write) {
    auto target = write_target(head->stream, true);
    return target ? target->begin_frame(std::move(*head), payload_bytes, over_unix) : nullptr;
  }
  std::shared_ptr<ReadPart> part;
  {
    std::lock_guard lock(mutex_);
    auto it = reads_.find(head->stream);
    if (it != reads_.end()) part = it->second;
  }
  return part ? part->begin_frame(head->chunk, payload_bytes, over_unix) : nullptr;
}

// ---- Writes that come in

std::shared_ptr<WriteTarget> StreamEndpoint::write_target(uint64_t id, bool make) {
  std::lock_guard lock(mutex_);
  if (over_ || id < writes_finished_below_ || writes_finished_.count(id)) return nullptr;
  auto it = writes_.find(id);
  if (it != writes_.end()) return it->second;
  if (!make) return nullptr;
  return writes_[id] = std::make_shared<WriteTarget>(*this, peer_.shared_from_this(), id);
}

void StreamEndpoint::write_over(uint64_t id) {
  std::lock_guard lock(mutex_);
  if (writes_.erase(id) == 0) return;
  writes_finished_.insert(id);
  while (!writes_finished_.empty() && *writes_finished_.begin() == writes_finished_below_) {
    writes_finished_.erase(writes_finished_.begin());
    ++writes_finished_below_;
  }
}

void StreamEndpoint::on_write(rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto id = in.get<uint64_t>();
  auto chunks = in.get<uint32_t>();
  auto notify = in.get_string();
  auto target = write_target(id, true);
  if (!in.done() || chunks > kMaxChunks || !target)
    return responder.fail({Code::invalid_argument, "malformed or repeated write"});
  target->header(chunks, std::move(notify), std::move(responder));
}

void StreamEndpoint::on_write_cancel(rpc::Message request, rpc::Responder responder) {
  auto target = write_target(ByteReader(request.body).get<uint64_t>(), false);
  if (!target) return responder.ok();  // messages keep their order, so it is over
  target->cancel(std::move(responder));
}

// ---- Reads

void StreamEndpoint::read_over(uint64_t id) {
  std::lock_guard lock(mutex_);
  reads_.erase(id);
}

void StreamEndpoint::source_over(uint64_t id) {
  std::lock_guard lock(mutex_);
  sources_.erase(id);
}

void StreamEndpoint::on_read(rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto id = in.get<uint64_t>();
  auto plan = ReadSource::parse(in);
  if (!plan) return responder.fail(plan.status());
  for (auto& piece : plan->pieces)
    if (Status status = peer_.grants().check(piece, Direction::read); !status) return responder.fail(status);
  auto source =
      std::make_shared<ReadSource>(*this, peer_.shared_from_this(), id, std::move(*plan), std::move(responder));
  {
    std::lock_guard lock(mutex_);
    if (over_) return;  // dropping the responder answers nobody: the session is gone
    sources_[id] = source;
  }
  lanes_.start(source);
}

void StreamEndpoint::on_read_end(rpc::Message request, rpc::Responder responder) {
  std::shared_ptr<ReadSource> source;
  {
    std::lock_guard lock(mutex_);
    auto it = sources_.find(ByteReader(request.body).get<uint64_t>());
    if (it != sources_.end()) source = it->second;
  }
  if (source) source->end({});
  responder.ok();
}

// ---- Rails, and lanes and sessions that die

void StreamEndpoint::on_rails(rpc::Message request, rpc::Responder responder) {
  ByteReader in(request.body);
  auto ends = decode_ends(in);
  if (in.done()) {
    peer_.learn_rails(std::move(ends));
    keeper_.peer_rails_changed();
  }
  responder.ok();
}

void StreamEndpoint::on_lane_lost(rpc::Message request, rpc::Responder responder) {
  keeper_.lane_lost(ByteReader(request.body).get<uint32_t>());
  responder.ok();
}

// The peer waits in vain for bytes to be taken, while we are alive. If nothing has come on our end for a while, our end
// goes too: it may never learn of the other's death.
void StreamEndpoint::on_lane_stuck(rpc::Message request, rpc::Responder responder) {
  auto index = ByteReader(request.body).get<uint32_t>();
  for (auto& lane : peer_.session()->lanes())
    if (lane->index() == index && index != 0 && lane->silent_ns() > LaneScheduler::kStuckNs / 2)
      lane->kill({Code::peer_lost, lane->describe() + " stood still, says " + peer_.name()});
  responder.ok();
}

void StreamEndpoint::lane_closed(const rpc::Lane& lane) {
  if (!peer_.session()->alive()) return;
  peer_.engine().metrics().failover();
  lanes_.lane_closed(lane);
  keeper_.lane_closed(lane);
}

void StreamEndpoint::session_over(const Status& why) {
  std::unordered_map<uint64_t, std::shared_ptr<WriteTarget>> writes;
  std::unordered_map<uint64_t, std::shared_ptr<ReadPart>> reads;
  {
    std::lock_guard lock(mutex_);
    over_ = true;
    writes.swap(writes_);
    reads = reads_;
  }
  for (auto& [id, target] : writes) target->stop(why);
  for (auto& [id, part] : reads) part->stop(why);
  lanes_.session_over(why);  // writes and read sources
}

}  // namespace torch_mooncake::transfer
