// Mutations are made where the shipped code cannot notice: in its messages, its memory and its file locks.
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "pool/batch_messages.h"
#include "pool/messages.h"
#include "pool/pin_slots.h"
#include "pool/simulation/cluster.h"
#include "pool/simulation/run.h"

namespace torch_mooncake::pool::sim {
namespace {

using Handle = std::function<void(std::string)>;

// Answers a mark as if it had been carried out; `later`: and carries it out a while after that.
void fake_marks(Mark::What what, bool later) {
  network->tamper = [=](Process* at, uint16_t method, std::string& body, rpc::Responder& responder,
                        const Handle& handle) {
    if (method != kMark) return false;
    const auto mark = decode<Mark>(body);
    if (!mark.is_ok() || mark->what != what) return false;
    responder.ok();
    if (later) world->start_at(world->now() + 2 * kSecond, at, [handle, body] { handle(body); });
    return true;
  };
}

template <typename Message>
void change(uint16_t wanted, std::function<void(Message&)> fn) {
  network->tamper = [=](Process*, uint16_t method, std::string& body, rpc::Responder&, const Handle&) {
    if (method != wanted) return false;
    auto message = decode<Message>(body);
    if (!message.is_ok()) return false;
    fn(*message);
    body = encode(*message);
    return false;
  };
}

// Remembers what word each reader was told to expect, and gives it that.
void expect_words() {
  using Key = std::tuple<const Process*, Id128, uint32_t>;
  auto told = std::make_shared<std::map<Key, uint64_t>>();
  auto nodes = std::make_shared<std::map<Id128, NodeId>>();  // by engine
  network->tamper_answer = [=](Process* at, uint16_t method, rpc::Message& answer) {
    if (method == kAttach)
      if (const auto a = decode<AttachAnswer>(answer.body); a.is_ok())
        for (const NodeInfo& n : a->view.nodes) (*nodes)[n.incarnation] = n.id;
    if (method == kView)
      if (const auto v = decode<View>(answer.body); v.is_ok())
        for (const NodeInfo& n : v->nodes) (*nodes)[n.incarnation] = n.id;
    if (method != kLookup) return;
    if (const auto found = decode<LookupAnswer>(answer.body); found.is_ok())
      for (const LookupEntry& e : found->entries)
        for (const Place& p : e.places) (*told)[{at, p.at.node, p.at.extent.index}] = p.at.extent.generation;
  };
  engine_mutations.read = [=](Process* reader, const Id128& owner, uint64_t, uint64_t offset, std::string& bytes) {
    if (bytes.size() != sizeof(uint64_t) || offset < kTableHeaderBytes) return;
    const auto index = static_cast<uint32_t>((offset - kTableHeaderBytes) / sizeof(ExtentEntry));
    const auto node = nodes->find(owner);
    if (node == nodes->end()) return;
    if (const auto it = told->find({reader, node->second, index}); it != told->end())
      std::memcpy(bytes.data(), &it->second, sizeof it->second);
  };
}

// Clients of a host see its table of a while ago.
void show_old_tables() {
  network->tamper_answer = [](Process*, uint16_t method, rpc::Message& answer) {
    if (method != kAttach || answer.fds.empty()) return;
    auto table = Segment::adopt(UniqueFd(::dup(answer.fds[0].get())), Id128{});
    if (!table.is_ok()) return;
    auto shown = Segment::create("old table", (*table)->capacity(), (*table)->capacity());
    const auto from = (*table)->map(Protection::read_only), to = (*shown)->map(Protection::read_write);
    auto copy = std::make_shared<std::function<void()>>();
    *copy = [from = *from, to = *to, copy] {
      std::memcpy(to->data, from->data, from->nbytes);
      world->at(world->now() + 400 * kMs, *copy);
    };
    (*copy)();
    answer.fds[0] = UniqueFd(::dup((*shown)->fd()));
  };
}

void unpin_all(Cluster& cluster) {
  for (int i = 0; i < cluster.hosts(); ++i)
    for (const HeldSegment& held : cluster.node(i).slot_pages()) {
      const auto map = held.segment->map(Protection::read_write);
      if (!map.is_ok()) continue;
      auto* slots = reinterpret_cast<PinSlot*>((*map)->data);
      for (uint64_t s = 1; s < slots[0].generation && s < kPinSlots; ++s) slots[s].generation = 0;
    }
}

}  // namespace

void install(Mutation mutation, Cluster& cluster) {
  switch (mutation) {
    case Mutation::none:
      return;
    case Mutation::supersede_lost:
      return fake_marks(Mark::What::supersede, false);
    case Mutation::flip_early:
      return fake_marks(Mark::What::supersede, true);
    case Mutation::commit_lost:
      return fake_marks(Mark::What::commit, false);
    case Mutation::word_unchecked:
      return expect_words();
    case Mutation::old_words:
      return show_old_tables();
    case Mutation::pins_ignored:
      network->tamper = [&cluster](Process*, uint16_t, std::string&, rpc::Responder&, const Handle&) {
        unpin_all(cluster);
        return false;
      };
      return;
    case Mutation::fence_dropped:
      network->tamper_answer = [](Process*, uint16_t method, rpc::Message& answer) {
        if (method == kAttach && !answer.fds.empty()) ::flock(answer.fds.back().get(), LOCK_UN);
      };
      return;
    case Mutation::writes_after_end:
      engine_mutations.late_writes = true;
      return;
    case Mutation::consume_any:
      return change<RemoveManyCall>(kRemoveMany, [](RemoveManyCall& call) {
        for (RemoveItem& item : call.items) item.only.reset();
      });
    case Mutation::ttl_forgotten:
      return change<AnnounceRequest>(kAnnounce, [](AnnounceRequest& all) {
        for (Announced& a : all.extents) a.left_ms.reset();
      });
    case Mutation::eviction_untold:
      return change<EvictedReport>(kEvicted, [](EvictedReport& report) { report.extents.clear(); });
    case Mutation::stale_kept:
      network->tamper_answer = [](Process*, uint16_t method, rpc::Message& answer) {
        if (method != kJoin) return;
        if (auto joined = decode<JoinAnswer>(answer.body); joined.is_ok()) {
          joined->keep_named = true;
          answer.body = encode(*joined);
        }
      };
      network->tamper = [](Process*, uint16_t method, std::string& body, rpc::Responder& responder, const Handle&) {
        if (method != kMark) return false;
        const auto mark = decode<Mark>(body);
        if (!mark.is_ok() || mark->what != Mark::What::supersede) return false;
        responder.ok();
        return true;
      };
      return;
  }
}

}  // namespace torch_mooncake::pool::sim
