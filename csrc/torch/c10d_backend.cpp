#include "torch/c10d_backend.h"

#include <Python.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include "common/log.h"
#include "common/random.h"
#include "torch/c10d_tensors.h"

namespace torch_mooncake::dist {
namespace {

constexpr int64_t kLeaveMs = 2000;

std::vector<uint8_t> to_store(std::string_view text) { return {text.begin(), text.end()}; }
std::string from_store(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::string member_key(int rank) { return "tm/rank/" + std::to_string(rank); }

// Other threads may need the GIL to end (callbacks of futures); who waits for them must not hold it.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

[[noreturn]] void raise(const std::string& text) { C10_THROW_ERROR(DistBackendError, "mooncake: " + text); }

// Waits for a key of every rank, and names those that did not publish it.
void wait_for_members(c10d::Store& store, int size, Ms timeout) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(member_key(rank));
  try {
    store.wait(keys, timeout);
  } catch (const std::exception& error) {
    std::string missing;
    for (int rank = 0; rank < size; ++rank) {
      bool there = false;
      try {
        there = store.check({keys[rank]});
      } catch (const std::exception&) {
        throw;  // the store itself is gone
      }
      if (!there) missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    if (missing.empty()) throw;
    C10_THROW_ERROR(DistStoreError, "mooncake: " + missing + " did not join the process group within " +
                                        std::to_string(timeout.count()) + " ms (" + error.what() + ")");
  }
}

}  // namespace

MooncakeBackend::MooncakeBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                 std::vector<int64_t> global_ranks, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)) {
  if (auto asked = coll::Algorithms::parse(options_->algorithms); !asked.is_ok())
    C10_THROW_ERROR(ValueError, "mooncake: " + asked.status().message());
  // Rank 0 chooses the token that all prove to each other, the id of the group, and its algorithms.
  if (rank == 0) {
    std::string token = coll::Hub::current_token();
    if (token.empty()) token = to_hex(random_id()) + to_hex(random_id());
    ByteWriter out;
    out.put(random_id()).put(std::string_view(token)).put(std::string_view(options_->algorithms));
    store->set("tm/group", to_store(out.take()));
  }
  store->wait({"tm/group"}, options_->timeout);
  const std::string published = from_store(store->get("tm/group"));
  ByteReader in(published);
  coll::GroupOptions group;
  group.id = in.get_id();
  coll::HubOptions hub_options;
  hub_options.token = in.get_string();
  auto algorithms = coll::Algorithms::parse(in.get_string());
  if (!in.done() || !algorithms.is_ok()) raise("what rank 0 published in the store cannot be read");
  group.algorithms = *algorithms;
  hub_options.host = options_->host;
  hub_options.host_id = options_->host_id;
  hub_options.transports = options_->transports;
  hub_options.name = "rank" + std::to_string(rank < static_cast<int>(global_ranks.size()) ? global_ranks[rank] : rank);
  auto hub = coll::Hub::acquire(hub_options);
  if (!hub.is_ok()) raise("cannot start: " + hub.status().to_string());
  try {
    store->set(member_key(rank), to_store((*hub)->self().encode()));
    wait_for_members(*store, size, options_->timeout);
    for (int peer = 0; peer < size; ++peer) {
      auto member = coll::Member::decode(from_store(store->get(member_key(peer))));
      if (!member.is_ok()) raise(member.status().to_string());
      group.members.push_back(*member);
    }
    group.rank = rank;
    group.global_ranks = std::move(global_ranks);
    auto joined = coll::Group::join(*hub, std::move(group));
    if (!joined.is_ok()) raise(joined.status().to_string());
    group_ = *joined;
  } catch (...) {
    (*hub)->release();
    throw;
  }
  init();
}

MooncakeBackend::~MooncakeBackend() { shutdown(); }

void MooncakeBackend::shutdown() {
  WithoutGil without_gil;
  group_->leave(Deadline::after_ms(kLeaveMs));
  executor_.stop();
  finisher_->stop();
}

void MooncakeBackend::abort() {
  WithoutGil without_gil;
  group_->abort({Code::cancelled, "the process group was aborted"});
}

Status MooncakeBackend::run_body(const Body& body, uint64_t sequence, Deadline deadline, std::exception_ptr& raised) {
  TM_TRY(group_->trouble());
  Status status;
  try {
    status = body(coll::Call{*group_, sequence, deadline, scratch_});
  } catch (...) {  // torch ran out of memory, say: the other ranks wait in vain for our part
    raised = std::current_exception();
    status = {Code::internal, "an exception on this rank"};
  }
  scratch_.trim();
  if (!status.is_ok()) {
    error_ = status.code() == Code::deadline_exceeded ? c10d::ErrorType::TIMEOUT
             : status.code() == Code::peer_lost       ? c10d::ErrorType::REMOTE_ERROR
                                                      : c10d::ErrorType::COMM_ERROR;
    group_->give_up(status);
  }
  return status;
}

WorkPtr MooncakeBackend::run(Plan plan, Body body) {
  std::unique_lock order(order_mutex_);
  const uint64_t sequence = ++sequence_;
  std::string what =
      std::string(plan.name) + " (sequence " + std::to_string(sequence) + ") on " + group_->name_of(rank_);
  auto work = c10::make_intrusive<CollectiveWork>(group_, plan.type, plan.title, std::move(what), sequence,
                                                  plan.outputs, plan.inputs);
  const Deadline deadline = Deadline::after_ms(timeout_or_default(plan.timeout).count());
  auto task = [this, work, body = std::move(body), sequence, deadline] {
    std::exception_ptr raised;
    const Status status = run_body(body, sequence, deadline, raised);
    raised ? work->end(raised) : work->end(status);
  };
  if (!executor_.submit(std::move(task), !plan.async, &order)) raise("the process group was shut down");
  if (order.owns_lock()) order.unlock();
  std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

// ---- messages

WorkPtr MooncakeBackend::message(bool sending, TensorList& tensors, int peer, int tag) {
  const char* name = sending ? "send" : "recv";
  const at::Tensor tensor = only(tensors, name);
  TORCH_CHECK_VALUE(tag >= 0, "mooncake: ", name, ": tag must not be negative");
  const uint64_t number = ++messages_;
  const bool any = !sending && peer == coll::kAnySource;
  std::string what = std::string(name) + (sending ? " to " : " from ") + group_->name_of(peer) + " (tag " +
                     std::to_string(tag) + ") on " + group_->name_of(rank_);
  at::Tensor memory = tensor;
  at::Tensor staging;
  if (needs_staging(tensor)) {
    memory = sending ? contiguous_copy(tensor) : contiguous_like(tensor);
    if (!sending) staging = memory;
  }
  auto keep = std::make_shared<at::Tensor>(memory);
  const auto type = sending ? c10d::OpType::SEND : (any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV);
  const char* title = sending ? "mooncake:send" : (any ? "mooncake:recvAnySource" : "mooncake:recv");
  auto work =
      c10::make_intrusive<MessageWork>(group_, type, title, std::move(what), number, tensor, staging, finisher_);
  const Deadline deadline = Deadline::after_ms(options_->timeout.count());
  const auto channel = coll::Channel::p2p;
  const auto wire_tag = static_cast<uint64_t>(tag);
  work->follow(
      sending ? group_->send(peer, channel, wire_tag, memory.const_data_ptr(), memory.nbytes(), deadline, keep)
              : group_->receive(peer, channel, wire_tag, memory.mutable_data_ptr(), memory.nbytes(), deadline, keep));
  std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

WorkPtr MooncakeBackend::send(TensorList& tensors, int to, int tag) { return message(true, tensors, to, tag); }
WorkPtr MooncakeBackend::recv(TensorList& tensors, int from, int tag) {
  TORCH_CHECK_VALUE(from >= 0, "mooncake: recv: invalid source rank ", from);
  return message(false, tensors, from, tag);
}
WorkPtr MooncakeBackend::recvAnysource(TensorList& tensors, int tag) {
  return message(false, tensors, coll::kAnySource, tag);
}

// Everything starts when it is called; coalescing only gathers the works into one.
void MooncakeBackend::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_ = true;
}

WorkPtr MooncakeBackend::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalescing_ = false;
  return c10::make_intrusive<JointWork>(std::exchange(coalesced_, {}));
}

}  // namespace torch_mooncake::dist
