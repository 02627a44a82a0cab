// RdmaEndpoint: notifications. The text comes as a message, immediates behind the data.
//
// Of a write whose slices have all been posted without a failure, each lane that has carried some carries an immediate
// behind them. On one lane nothing overtakes; between lanes there is no order, so the target counts: when it has the
// text, which names the lanes, and an immediate of each of them, all bytes are there. No round trip comes in between.
//
// If a lane fails meanwhile, it is not known what has arrived, and a slice that is sent again might come after its
// reader has been told. So the target is asked to forget the notification, before anything is sent again: it has been
// delivered, then so has every byte; or it never will be, and a new one is sent when all slices are done, with one
// immediate. That is also how reads and everything else that cannot count does it.
#include <algorithm>

#include "transfer/engine_impl.h"
#include "transfer/rdma/endpoint.h"
#include "transfer/rdma/later.h"
#include "transfer/rdma/passive_pair.h"
#include "transfer/wire.h"

namespace torch_mooncake::transfer::rdma {
namespace {

constexpr uint64_t kMostIdsUnderWay = 1 << 20;  // from the oldest; an immediate has room for kIdBits of one
// Of the peer's. It keeps to kMostIdsUnderWay and kNotifying, but what it has taken back may be heard of late.
constexpr uint64_t kMostIdsAhead = 2 * kMostIdsUnderWay;
constexpr size_t kMostIncoming = 4096;

}  // namespace

void RdmaEndpoint::note_carrier(RdmaPart& part, const RdmaLane& lane) {
  for (auto& carrier : part.carriers_)
    if (carrier.connection == lane.connection_) return;
  part.carriers_.push_back({lane.index_, lane.connection_});
}

bool RdmaEndpoint::room_for_notification() const {
  return notifying_.size() < kNotifying &&
         (notifying_.empty() || next_notify_ - notifying_.begin()->first < kMostIdsUnderWay);
}

void RdmaEndpoint::try_to_count(const RdmaPartPtr& part, Later& later) {
  if (part->notify_.empty() || !part->is_write() || part->notify_id_ != 0 || part->unsettled_ > 0) return;
  if (part->all_done() || lanes_.size() > kCountedLanes || !wait_to_notify_.empty() || !room_for_notification()) return;
  for (auto& carrier : part->carriers_) {
    auto& lane = *lanes_[carrier.lane];
    const bool same = lane.state_ == RdmaLane::State::up && lane.connection_ == carrier.connection;
    if (!same || lane.posted_.size() >= RdmaLane::kDepth) return;
  }
  part->notify_id_ = next_notify_++;
  part->counting_ = true;
  notifying_.emplace(part->notify_id_, part);
  uint64_t lanes = 0;
  for (auto& carrier : part->carriers_) {
    lanes_[carrier.lane]->append_counted(part);
    lanes |= uint64_t{1} << carrier.lane;
  }
  send_text(part, lanes, later);
}

// All slices are done.
void RdmaEndpoint::begin_notify(const RdmaPartPtr& part, Later& later) {
  if (!room_for_notification()) return wait_to_notify_.push_back(part);
  part->notify_id_ = next_notify_++;
  notifying_.emplace(part->notify_id_, part);
  part->counting_ = false;
  part->immediate_due_ = hopeless_.is_ok();
  send_text(part, 0, later);
  if (hopeless_)
    make_ready(part);
  else
    send_last_by_message(part->notify_id_, later);
}

void RdmaEndpoint::begin_waiting_notifications(Later& later) {
  while (!over_ && !wait_to_notify_.empty() && room_for_notification()) {
    auto part = std::move(wait_to_notify_.front());
    wait_to_notify_.pop_front();
    begin_notify(part, later);
  }
}

// notify: u64 id, u64 lanes whose immediates it waits for (a bit each; none: for the last one), u8 flush before it is
// delivered, text.
void RdmaEndpoint::send_text(const RdmaPartPtr& part, uint64_t lanes, Later& later) {
  ByteWriter request;
  request.put(part->notify_id_).put(lanes).put(static_cast<uint8_t>(part->flush_there_));
  request.put(std::string_view(part->notify_));
  later.add([this, part, id = part->notify_id_, body = request.take(), peer = peer_.shared_from_this()] {
    peer->session()->call(kRdmaNotify, body, Deadline::never(),
                          [this, part, id, peer](Result<rpc::Message> answer) { answered(part, id, answer.status()); });
  });
}

// Delivered: every byte is there, also of slices whose completions are yet to come. They are waited for, as our NIC may
// still read the memory, but none is sent again.
void RdmaEndpoint::answered(const RdmaPartPtr& part, uint64_t id, const Status& status) {
  Turn turn(*this);
  if (part->over_ || part->stopped_ || part->notify_id_ != id) return;
  if (part->recalling_ && status.code() == Code::cancelled) return;  // as it has been recalled
  if (!status) {
    stop(part, status, turn);
    return pump(turn);
  }
  part->answered_ = true;
  part->immediate_due_ = part->recalling_ = false;
  if (std::exchange(part->ready_, false)) std::erase(ready_, part);
  part->again_.clear();
  part->held_.clear();
  notify_over(*part, turn);
  end_at_rest(part, turn);
  pump(turn);
}

void RdmaEndpoint::recall(const RdmaPartPtr& part, Later& later) {
  if (std::exchange(part->recalling_, true)) return;
  later.add([this, part, id = part->notify_id_, peer = peer_.shared_from_this()] {
    peer->session()->call(kRdmaForget, ByteWriter().put(id).take(), Deadline::never(),
                          [this, part, id, peer](const Result<rpc::Message>& answer) { recalled(part, id, answer); });
  });
}

void RdmaEndpoint::recalled(const RdmaPartPtr& part, uint64_t id, const Result<rpc::Message>& answer) {
  Turn turn(*this);
  if (part->over_ || part->stopped_ || part->answered_ || part->notify_id_ != id) return;
  part->recalling_ = false;
  if (!answer) {
    stop(part, answer.status(), turn);
    return pump(turn);
  }
  auto held = std::exchange(part->held_, {});
  if (ByteReader(answer->body).get<uint8_t>() != 0) return;  // delivered: the answer to it is on its way
  notifying_.erase(id);
  part->notify_id_ = 0;
  part->counting_ = false;
  begin_waiting_notifications(turn);
  peer_.engine().metrics().resent(held.size());
  part->again_.insert(part->again_.end(), held.begin(), held.end());
  if (part->all_done())
    moved(part, turn);
  else
    ready_or_leave(part, turn);
  pump(turn);
}

void RdmaEndpoint::notify_over(RdmaPart& part, Later& later) {
  const uint64_t id = std::exchange(part.notify_id_, 0);
  if (id == 0) return;
  notifying_.erase(id);
  if (!part.answered_ && !over_) {
    later.add([id, peer = peer_.shared_from_this()] {
      peer->session()->call(kRdmaForget, ByteWriter().put(id).take(), Deadline::never(),
                            [peer](const Result<rpc::Message>&) {});
    });
  }
  begin_waiting_notifications(later);
}

void RdmaEndpoint::send_last_by_message(uint64_t id, Later& later) {
  later.add([id, peer = peer_.shared_from_this()] {
    (void)peer->session()->post(kRdmaImmediate, ByteWriter().put(id).take());
  });
}

// ---- The peer's

void RdmaEndpoint::on_notify(rpc::Message message, rpc::Responder responder) {
  ByteReader in(message.body);
  auto id = in.get<uint64_t>();
  auto lanes = in.get<uint64_t>();
  const bool flush = in.get<uint8_t>() != 0;
  auto text = in.get_string();
  if (!in.done() || text.size() > kMaxNotifyBytes)
    return responder.fail({Code::invalid_argument, "malformed rdma notification"});
  Status refused;
  {
    Turn turn(*this);
    if (over_) return;
    if (delivered(id)) {
      refused = {Code::cancelled, "that notification was taken back"};
    } else if (auto* incoming = incoming_at(id); incoming == nullptr || incoming->text) {
      refused = {Code::invalid_argument, "an rdma notification too many"};
    } else {
      incoming->text = std::move(text);
      incoming->wanted_lanes = lanes;
      incoming->flush = flush;
      incoming->responder = std::move(responder);
      return deliver(id, turn);
    }
  }
  responder.fail(refused);
}

RdmaEndpoint::Incoming* RdmaEndpoint::incoming_at(uint64_t id) {
  if (auto found = incoming_.find(id); found != incoming_.end()) return &found->second;
  if (id - delivered_below_ >= kMostIdsAhead || incoming_.size() >= kMostIncoming) return nullptr;
  return &incoming_[id];
}

// forget: u64 id. Answer: u8, it has been delivered. If not, it never is.
void RdmaEndpoint::on_forget(rpc::Message message, rpc::Responder responder) {
  ByteReader in(message.body);
  auto id = in.get<uint64_t>();
  if (!in.done()) return responder.fail({Code::invalid_argument, "malformed rdma forget"});
  Incoming forgotten;
  Turn turn(*this);
  const bool was_delivered = delivered(id);
  if (!was_delivered && id - delivered_below_ >= kMostIdsAhead) {
    return turn.later().add([shared = std::make_shared<rpc::Responder>(std::move(responder))] {
      shared->fail({Code::invalid_argument, "malformed rdma forget"});
    });
  }
  if (!was_delivered) {
    if (auto found = incoming_.extract(id)) forgotten = std::move(found.mapped());
    set_delivered(id);
  }
  auto shared = std::make_shared<rpc::Responder>(std::move(responder));
  auto gone = std::make_shared<Incoming>(std::move(forgotten));
  turn.later().add([shared, gone, was_delivered] {
    shared->ok(ByteWriter().put(static_cast<uint8_t>(was_delivered)).take());
    if (gone->text) gone->responder.fail({Code::cancelled, "that notification was taken back"});
  });
}

void RdmaEndpoint::on_immediate(rpc::Message message) {
  ByteReader in(message.body);
  auto id = in.get<uint64_t>();
  Turn turn(*this);
  if (!in.done() || over_ || delivered(id)) return;
  auto* incoming = incoming_at(id);
  if (incoming == nullptr) return;
  incoming->last = true;
  deliver(id, turn);
}

void RdmaEndpoint::immediate(uint32_t value) {
  constexpr uint64_t kMask = (uint64_t{1} << kIdBits) - 1;
  Turn turn(*this);
  const uint64_t ahead = (value - delivered_below_) & kMask;
  if (over_ || ahead >= kMostIdsAhead) return;  // of one that is over
  const uint64_t id = delivered_below_ + ahead;
  if (delivered(id)) return;
  const uint32_t lane = value >> kIdBits;
  auto* incoming = incoming_at(id);
  if (incoming == nullptr) return;
  lane == kLast ? void(incoming->last = true) : void(incoming->lanes |= uint64_t{1} << lane);
  deliver(id, turn);
}

void RdmaEndpoint::set_delivered(uint64_t id) {
  delivered_.insert(id);
  while (!delivered_.empty() && *delivered_.begin() == delivered_below_) {
    delivered_.erase(delivered_.begin());
    ++delivered_below_;
  }
}

void RdmaEndpoint::deliver(uint64_t id, Later& later) {
  auto it = incoming_.find(id);
  if (!it->second.complete()) return;
  auto incoming = std::make_shared<Incoming>(std::move(it->second));
  incoming_.erase(it);
  set_delivered(id);
  later.add([incoming, peer = peer_.shared_from_this()] {
    auto deliver = [incoming, peer](const Status& there) mutable {
      if (!there) return incoming->responder.fail(there);
      peer->engine().notes()->push({peer->identity().engine, peer->identity().name, std::move(*incoming->text)});
      incoming->responder.ok();
      auto callbacks = peer->engine().callbacks();
      callbacks->post([incoming = std::move(incoming), peer = std::move(peer)] {});  // perhaps the last references
    };
    // Behind the data also for whoever works on a device.
    incoming->flush ? peer->engine().flush_nic_writes(deliver) : deliver({});
  });
}

}  // namespace torch_mooncake::transfer::rdma
