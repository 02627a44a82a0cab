#include "collectives/exchange.h"

#include "collectives/device.h"
#include "common/log.h"

namespace torch_mooncake::coll {
namespace {
std::shared_ptr<void> keep_of(const Call& call) { return call.device ? call.device->keep() : nullptr; }
Place place_of(const Call& call) { return call.device ? Place::cuda : Place::host; }
}  // namespace

Exchange::~Exchange() {
  if (!requests_.empty()) call_back({Code::cancelled, "an earlier step of the collective failed"});
}

RequestPtr Exchange::send(int to, const void* data, uint64_t nbytes) {
  return requests_.emplace_back(call_.group.send(call_.member(to), Channel::collective, call_.seq, data, nbytes,
                                                 call_.deadline, keep_of(call_), place_of(call_)));
}

RequestPtr Exchange::receive(int from, void* data, uint64_t nbytes) {
  return requests_.emplace_back(call_.group.receive(call_.member(from), Channel::collective, call_.seq, data, nbytes,
                                                    call_.deadline, keep_of(call_), place_of(call_)));
}

Status Exchange::wait_for(std::span<const RequestPtr> some) {
  Status status = wait_first(requests_, some, call_.deadline);
  if (!status.is_ok()) call_back(status);
  std::erase_if(requests_, [](const RequestPtr& request) { return request->ended() && request->status().is_ok(); });
  return status;
}

Status Exchange::wait() {
  Status status = wait_all(requests_, call_.deadline);
  if (status.code() == Code::deadline_exceeded && call_.deadline.expired())  // not: another rank's, who gave up
    status = {status.code(), "timed out waiting for " + call_.group.awaited()};
  if (!status.is_ok()) call_back(status);
  requests_.clear();
  return status;
}

void Exchange::call_back(const Status& why) {
  std::vector<RequestPtr> pending;
  for (const auto& request : requests_) {
    request->cancel(why);
    if (!request->ended()) pending.push_back(request);
  }
  requests_.clear();
  // Reads under way end within the engine's bound; until then the buffers are not the caller's.
  for (const auto& request : pending) {
    while (request->wait(Deadline::after_ms(5000)).code() == Code::deadline_exceeded && !request->ended()) {
      log::error("collectives", "still waiting for a cancelled read from rank " + std::to_string(request->peer()));
    }
  }
}

Status Exchange::send_receive(const Call& call, int to, ConstPiece out, int from, Piece in) {
  Exchange exchange(call);
  exchange.receive(from, in.data, in.nbytes);
  exchange.send(to, out.data, out.nbytes);
  return exchange.wait();
}

}  // namespace torch_mooncake::coll
