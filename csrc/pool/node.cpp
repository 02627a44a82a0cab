// run_node: the keeper with the real worker, which is a donor and its service.
#include "pool/node.h"

#include "common/log.h"
#include "pool/keeper.h"
#include "pool/node_service.h"

namespace torch_mooncake::pool {
namespace {

// What the last worker left, or new memory.
Result<std::unique_ptr<Donor>> open_donor(WorkerContext& context, bool* attached) {
  DonorOptions options{context.options.memory_bytes};
  options.ssd = context.options.ssd;
  if (!context.held.empty()) {
    auto donor = Donor::attach(options, std::move(context.held));
    *attached = donor.is_ok();
    if (donor.is_ok()) return donor;
    log::error("node", "the pool's memory cannot be taken over, it starts empty: " + donor.status().to_string());
  }
  TM_ASSIGN(auto donor, Donor::create(options));
  TM_TRY(context.link->fresh());
  TM_TRY(context.link->hold(donor->held()));
  return donor;
}

Status serve(WorkerContext& context) {
  KeeperLink& link = *context.link;
  NodeServiceOptions options;
  options.node = context.options;
  options.listeners = std::move(context.listeners);
  TM_ASSIGN(options.donor, open_donor(context, &options.attached));
  options.donor->on_held_changed([&link](const HeldSegment& segment, bool added) {
    const Status told = added ? link.hold({segment}) : link.release(segment);
    if (!told) log::error("node", "telling the keeper of a segment: " + told.to_string());
  });
  options.on_clients_changed = [&link](int clients) {
    const Status told = link.clients(static_cast<uint32_t>(clients));
    if (!told) log::error("node", "telling the keeper of clients: " + told.to_string());
  };
  options.on_drain_asked = [&link] {
    if (Status told = link.leave(); !told) log::error("node", "telling the keeper to stop: " + told.to_string());
  };
  options.starts = context.starts;
  TM_ASSIGN(auto service, NodeService::create(std::move(options)));
  std::string addresses;
  for (const std::string& address : service->addresses()) addresses += (addresses.empty() ? "" : " ") + address;
  TM_TRY(link.ready(addresses));
  TM_TRY(link.wait_for_stop());
  // A drain that does not end in time ends the node all the same.
  if (Status drained = service->drain(Deadline::after_s(context.options.drain_s)); !drained)
    log::warning("node", "drain: " + drained.to_string());
  service->close();
  return {};
}

int node_worker(WorkerContext context) {
  Status served = serve(context);
  if (served) return kNodeOk;
  log::error("node", served.to_string());
  if (Status told = context.link->failed(served); !told) log::error("node", told.to_string());
  return kNodeFailed;
}

}  // namespace

int run_node(const NodeOptions& options) { return run_keeper(options, node_worker); }

}  // namespace torch_mooncake::pool
