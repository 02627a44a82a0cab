// How groups of MooncakeBackend come to be: by meeting at a store, in the place of a rank that was lost, as a part of
// another group; and how they change.
#include <torch/csrc/distributed/c10d/exception.h>

#include <ranges>

#include "common/random.h"
#include "torch/c10d_backend.h"
#include "torch/c10d_meeting.h"

namespace torch_mooncake::dist {
namespace {

constexpr std::string_view kScheme = "mooncake://", kTcp = "tcp://";

[[noreturn]] void raise(const Status& status) { C10_THROW_ERROR(DistBackendError, "mooncake: " + status.to_string()); }

coll::HubPtr hub_for(const MooncakeBackend::Options& options, std::string token, int64_t global_rank) {
  coll::HubOptions out;
  out.token = std::move(token);
  out.host = options.host;
  out.host_id = options.host_id;
  out.transports = options.transports;
  out.nics = options.nics;
  out.rdma = options.rdma;
  out.name = "rank" + std::to_string(global_rank);
  out.heartbeat_ms = static_cast<int>(options.heartbeat.count());
  out.heartbeat_limit_ms = static_cast<int>(options.heartbeat_timeout.count());
  auto hub = coll::Hub::acquire(out);
  if (!hub.is_ok()) raise(hub.status().with("cannot start"));
  return *hub;
}

// Of a running group: "mooncake://TOKEN@HOST:PORT,HOST:PORT/ID".
struct Contact {
  std::string token;
  std::vector<std::string> addresses;
  Id128 group{};

  std::string to_string() const {
    std::string out(kScheme);
    out += token + "@";
    for (const auto& address : addresses)
      out += (address == addresses.front() ? "" : ",") + address.substr(kTcp.size());
    return out + "/" + to_hex(group);
  }
  static Contact parse(std::string_view text) {
    Contact out;
    const size_t at = text.find('@'), slash = text.rfind('/');
    const bool legible = text.starts_with(kScheme) && at != text.npos && slash != text.npos && slash > at &&
                         from_hex(text.substr(slash + 1), out.group);
    TORCH_CHECK_VALUE(legible,
                      "mooncake: join: what contact() of a running group says is expected, "
                      "\"mooncake://TOKEN@HOST:PORT,…/ID\"");
    out.token = text.substr(kScheme.size(), at - kScheme.size());
    for (const auto address : std::views::split(text.substr(at + 1, slash - at - 1), ','))
      out.addresses.push_back(std::string(kTcp) + std::string(address.begin(), address.end()));
    return out;
  }
};

// What rank 0 chooses: the token that all prove to each other, the id of the group, and its algorithms.
std::string choose(const MooncakeBackend::Options& options) {
  std::string token = coll::Hub::current_token();
  if (token.empty()) token = to_hex(random_id()) + to_hex(random_id());
  ByteWriter out;
  out.put(random_id()).put(std::string_view(token)).put(std::string_view(options.algorithms));
  return out.take();
}

coll::SeatsPtr meet(c10d::Store& store, int rank, int size, std::vector<int64_t> global_ranks,
                    const MooncakeBackend::Options& options) {
  if (auto asked = coll::Algorithms::parse(options.algorithms); !asked.is_ok())
    C10_THROW_ERROR(ValueError, "mooncake: " + asked.status().message());
  Meeting meeting(store, rank, size, options.timeout);
  const std::string shared = meeting.share(rank == 0 ? choose(options) : "");
  ByteReader in(shared);
  coll::Seating seating;
  seating.group = in.get_id();
  std::string token = in.get_string();
  auto algorithms = coll::Algorithms::parse(in.get_string());
  if (!in.done() || !algorithms.is_ok()) raise({Code::corrupt, "what rank 0 published in the store cannot be read"});
  seating.algorithms = *algorithms;
  for (int peer = static_cast<int>(global_ranks.size()); peer < size; ++peer) global_ranks.push_back(peer);
  const coll::HubPtr hub = hub_for(options, std::move(token), global_ranks[rank]);
  try {
    for (const auto& bytes : meeting.members(seating.group, hub->self().encode())) {
      auto member = coll::Member::decode(bytes);
      if (!member.is_ok()) raise(member.status());
      seating.members.push_back(std::move(*member));
    }
    seating.active.assign(size, 1);
    seating.global_ranks = std::move(global_ranks);
    auto seats = coll::Seats::found(hub, rank, std::move(seating));
    if (!seats.is_ok()) raise(seats.status());
    return *seats;
  } catch (...) {
    hub->release();
    throw;
  }
}

coll::SeatsPtr join(int rank, int size, const MooncakeBackend::Options& options) {
  const Contact contact = Contact::parse(options.join);
  const coll::HubPtr hub = hub_for(options, contact.token, rank);
  auto seats =
      coll::Seats::join(hub, contact.group, rank, contact.addresses, Deadline::after_ms(options.timeout.count()));
  if (!seats.is_ok()) {
    hub->release();
    raise(seats.status());
  }
  const auto n = static_cast<int>((*seats)->seating().members.size());
  if (n == size) return *seats;
  (*seats)->close(Deadline::after_ms(0));
  raise({Code::invalid_argument, "the group has " + std::to_string(n) + " ranks, not " + std::to_string(size)});
}

}  // namespace

c10::intrusive_ptr<MooncakeBackend> MooncakeBackend::create(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, std::vector<int64_t> global_ranks,
                                                            c10::intrusive_ptr<Options> options) {
  const bool joins = !options->join.empty();
  coll::SeatsPtr seats =
      joins ? join(rank, size, *options) : meet(*store, rank, size, std::move(global_ranks), *options);
  auto out = c10::make_intrusive<MooncakeBackend>(rank, size, std::move(options), std::move(seats));
  out->sequence_ = out->seats_->seating().sequence;
  return out;
}

std::vector<int> MooncakeBackend::active_ranks() const { return seats_->seating().active_seats(); }
std::vector<int> MooncakeBackend::waiting_ranks() const { return seats_->waiting(); }

std::string MooncakeBackend::contact() const {
  const coll::Seating seating = seats_->seating();
  Contact out{seats_->token(), {}, seats_->id()};
  for (int seat : seating.active_seats())
    for (const auto& address : seating.members[seat].addresses) out.addresses.push_back(address);
  return out.to_string();
}

std::vector<int> MooncakeBackend::reseat(const std::vector<int>& remove, const std::vector<int>& admit, int at_least,
                                         Ms timeout) {
  const int64_t timeout_ms = timeout_or_default(timeout).count();
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  std::unique_lock order(order_mutex_, std::defer_lock);
  for (;;) {  // what ends may queue more, in callbacks of futures
    if (!executor_.drain(Deadline::after_ms(std::min<int64_t>(timeout_ms / 2, deadline.remaining_ms())))) {
      // It waits for somebody who is to be left out, say.
      seats_->group()->give_up({Code::cancelled, "the ranks of the group are to change"});
      if (!executor_.drain(deadline)) raise({Code::deadline_exceeded, "collectives before the change have not ended"});
    }
    order.lock();
    if (executor_.is_idle()) break;
    order.unlock();
  }
  const Status status = seats_->change(remove, admit, sequence_, at_least, deadline);
  if (!status.is_ok()) raise(status.with("cannot change who is in the group"));
  const coll::Seating seating = seats_->seating();
  sequence_ = seating.sequence;
  error_ = c10d::ErrorType::SUCCESS;
  parts_.clear();
  return seating.active_seats();
}

// ---- parts

c10::intrusive_ptr<MooncakeBackend::Options> MooncakeBackend::options_like(
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) const {
  auto ours = c10::dynamic_intrusive_pointer_cast<Options>(opts);
  auto out = c10::make_intrusive<Options>(ours ? *ours : *options_);
  if (opts) {
    out->timeout = opts->timeout;
    out->group_name = opts->group_name;
    out->group_desc = opts->group_desc;
  }
  out->join.clear();
  return out;
}

MooncakeBackend::BackendPtr MooncakeBackend::part(std::string name, const std::vector<int>& ranks,
                                                  c10::intrusive_ptr<Options> options) {
  const auto me = std::ranges::find(ranks, rank_);
  if (me == ranks.end()) return nullptr;
  std::lock_guard order(order_mutex_);
  const coll::Seating all = seats_->seating();
  coll::Seating seating;
  const uint64_t count = parts_[{name, ranks}]++;
  seating.group = coll::derived_id(all.group, name, ranks, count);
  for (int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "mooncake: ", name, ": there is no rank ", rank);
    TORCH_CHECK_VALUE(all.active[rank], "mooncake: ", name, ": rank ", rank, " is not active");
    seating.members.push_back(all.members[rank]);
    seating.global_ranks.push_back(all.global_ranks[rank]);
  }
  seating.active.assign(ranks.size(), 1);
  seating.algorithms = all.algorithms;
  const auto seat = static_cast<int>(me - ranks.begin());
  auto seats = seats_->found_part(seat, std::move(seating));
  if (!seats.is_ok()) raise(seats.status());
  return c10::make_intrusive<MooncakeBackend>(seat, static_cast<int>(ranks.size()), std::move(options), *seats);
}

MooncakeBackend::BackendPtr MooncakeBackend::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                   const std::vector<int>& ranks,
                                                   const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  auto options = options_like(opts);
  return part("split " + options->group_name, ranks, options);
}

MooncakeBackend::BackendPtr MooncakeBackend::shrink(const std::vector<int64_t>& exclude, int flags,
                                                    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  constexpr int kAbort = 1;  // torch.distributed.SHRINK_ABORT
  if (flags & kAbort) abort();
  std::vector<int> stay;
  for (int rank : active_ranks())
    if (std::ranges::find(exclude, rank) == exclude.end()) stay.push_back(rank);
  auto out = part("shrink", stay, options_like(opts));
  TORCH_CHECK_VALUE(out, "mooncake: shrink: rank ", rank_, " is among those that are left out");
  return out;
}

MooncakeBackend::BackendPtr MooncakeBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                   const int& rank, const int& size) {
  return create(store, rank, size, {}, options_like(opts));
}

}  // namespace torch_mooncake::dist
