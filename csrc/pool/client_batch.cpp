// Many keys at once: puts in chunks whose reservations, writes and commits overlap; look-ups, reads, removals.
#include <algorithm>
#include <deque>
#include <set>
#include <thread>
#include <unordered_set>

#include "common/crc32c.h"
#include "common/failpoint.h"
#include "pool/batch_messages.h"
#include "pool/client_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr size_t kChunkItems = 256;           // of a batch: small enough that nodes and we work at once
constexpr uint64_t kChunkBytes = 32 << 20;    // reserved together
constexpr uint64_t kInlineChunk = 1 << 20;    // sent together
constexpr uint64_t kInlineTotal = 32 << 10;   // a batch of so little goes in one message,
constexpr uint64_t kInlineAverage = 1 << 10;  // as do values so small, even where memory could be written directly
constexpr size_t kAhead = 4;                  // chunks that are reserved, or sent, before the first is done

template <typename T>
std::vector<Result<T>> all_fail(size_t n, const Status& why) {
  return std::vector<Result<T>>(n, Result<T>(why));
}

}  // namespace

// --- put ---

// One replica of a chunk: a node, what it reserves, and where that is.
struct ClientImpl::Leg {
  LinkPtr node;
  PendingCall reservation;
  std::vector<ExtentRef> extents;  // of the entries that were asked for, in that order
  bool quiescent = true;
  void give_back() {
    if (quiescent) node->give_back(std::exchange(extents, {}));  // else they stay fenced until our session ends
  }
};

// Entries that go to their nodes together.
struct ClientImpl::Chunk {
  std::vector<uint32_t> entries;  // indices in the round
  uint64_t nbytes = 0, meta_bytes = 0;
  bool rides = false;  // the values ride inside the commit
  TxnId txn{};
  std::vector<Leg> legs;  // none if they ride
  PendingCall commit;
  std::vector<uint32_t> asked;  // the entries of that commit, in its order
};

// A batch in which no key comes twice.
struct ClientImpl::Round {
  std::span<const PutEntry> entries;
  const PutOptions& options;
  Deadline deadline;
  Outcomes outcomes;
  LinkPtr here, home;
  std::shared_ptr<const View> view;
  std::vector<LinkPtr> donors{};  // one a replica
  std::vector<Chunk> chunks{};
  std::vector<uint32_t> singly{};  // entries to be put by themselves: they wait for room, or for a node that comes back

  void later(const std::vector<uint32_t>& some) { singly.insert(singly.end(), some.begin(), some.end()); }
  void fail(const std::vector<uint32_t>& some, const Status& why) {
    for (uint32_t i : some) outcomes[i] = why;
  }
  BatchHead head(const TxnId& txn) const {
    return {view->number,   options.kind, options.if_exists, options.label, options.parent,
            options.ttl_ms, options.pin,  options.checksum,  txn,           timeout_ms(deadline)};
  }
  uint32_t shard(uint32_t entry) const { return shard_of(hash_key(entries[entry].key, view->seed)); }
};

std::vector<Result<PutOutcome>> ClientImpl::put_many(std::span<const PutEntry> entries, const PutOptions& options,
                                                     Deadline deadline) {
  Status s = usable();
  if (s.is_ok()) s = check_put(options);
  if (s.is_ok() && options.parts != 1)
    s = Status(Code::invalid_argument, "a part of an object of several writers is put by itself");
  if (!s.is_ok()) return all_fail<PutOutcome>(entries.size(), s);
  auto outcomes = all_fail<PutOutcome>(entries.size(), {Code::internal, "not put"});
  std::unordered_set<std::string_view> keys;
  for (size_t begin = 0; begin < entries.size();) {  // a key's second put waits for the round of its first
    keys.clear();
    size_t end = begin;
    while (end < entries.size() && keys.insert(entries[end].key).second) ++end;
    put_round(entries.subspan(begin, end - begin), options, deadline, Outcomes(outcomes).subspan(begin, end - begin));
    begin = end;
  }
  return outcomes;
}

void ClientImpl::put_round(std::span<const PutEntry> entries, const PutOptions& options, Deadline deadline,
                           Outcomes outcomes) {
  auto here = local(deadline);
  auto home_link = home(deadline);
  Round round{entries, options, deadline, outcomes, {}, {}, view()};
  if (here.is_ok() && home_link.is_ok()) choose_donors(round, *here);
  std::vector<uint32_t> small, large;
  uint64_t small_bytes = 0;
  for (uint32_t i = 0; i < entries.size(); ++i) {
    const uint64_t nbytes = total_bytes(entries[i].data);
    if (const Status s = check_entry(entries[i].key, entries[i].meta); !s.is_ok()) {
      outcomes[i] = s;
    } else if (round.donors.empty() || !options.parent.empty()) {
      round.singly.push_back(i);
    } else if (nbytes <= kInlineLimit) {
      small.push_back(i);
      small_bytes += nbytes + entries[i].key.size() + entries[i].meta.size();
    } else {
      large.push_back(i);
    }
  }
  if (!round.donors.empty()) {
    round.here = *here;
    round.home = *home_link;
    const bool one_node = round.here == round.home && round.donors.size() == 1;
    const bool rides = one_node && (!round.here->mapped() || small_bytes <= kInlineTotal ||
                                    small_bytes <= small.size() * kInlineAverage);
    auto add = [&](const std::vector<uint32_t>& some, bool rides) {
      const uint64_t most = rides ? kInlineChunk : kChunkBytes;
      bool open = false;
      for (uint32_t i : some) {
        const uint64_t meta = entries[i].meta.size();
        const uint64_t nbytes = total_bytes(entries[i].data) + (rides ? meta : 0);
        if (!open || round.chunks.back().entries.size() == kChunkItems || round.chunks.back().nbytes + nbytes > most ||
            round.chunks.back().meta_bytes + meta > kInlineChunk) {
          round.chunks.emplace_back();
          round.chunks.back().rides = rides;
          open = true;
        }
        round.chunks.back().entries.push_back(i);
        round.chunks.back().nbytes += nbytes;
        round.chunks.back().meta_bytes += meta;
      }
    };
    add(small, rides);
    add(large, false);
    if (const Status s = skip_existing(round); !s.is_ok())
      for (Chunk& chunk : round.chunks) round.later(std::exchange(chunk.entries, {}));
    size_t begun = 0;
    for (size_t i = 0; i < round.chunks.size(); ++i) {
      while (begun < round.chunks.size() && begun < i + kAhead) begin_chunk(round, round.chunks[begun++]);
      write_chunk(round, round.chunks[i]);
      if (i + 1 >= kAhead) finish_chunk(round, round.chunks[i + 1 - kAhead]);
    }
    for (size_t i = round.chunks.size() - std::min(round.chunks.size(), kAhead - 1); i < round.chunks.size(); ++i)
      finish_chunk(round, round.chunks[i]);
  }
  // A node that is gone is waited for once.
  Status in_vain;
  for (uint32_t i : round.singly) {
    if (!in_vain.is_ok() && !reachable()) {
      outcomes[i] = in_vain;
      continue;
    }
    outcomes[i] = put(entries[i].key, entries[i].meta, entries[i].data, options, deadline);
    if (outcomes[i].status().code() == Code::pool_unavailable) in_vain = outcomes[i].status();
  }
}

// None if there are too few: each key is told by itself.
void ClientImpl::choose_donors(Round& round, const LinkPtr& here) {
  if (round.options.replicas == 1) {
    round.donors = {here};
    return;
  }
  const auto wanted = replicas_wanted(*round.view, round.options);
  if (!wanted.is_ok()) return;
  std::set<std::string_view> hosts;
  for (const NodeInfo* node : by_preference(*round.view, here->node(), {})) {
    if (round.donors.size() == *wanted || hosts.count(node->host_id)) continue;
    auto donor = link(node->id, round.deadline);
    if (!donor.is_ok()) continue;
    hosts.insert(node->host_id);
    round.donors.push_back(std::move(donor).value());
  }
  if (round.donors.size() < *wanted && !round.options.replicas_lenient) round.donors.clear();
}

// What is there and stays is not written first.
Status ClientImpl::skip_existing(Round& round) {
  if (round.options.kind == Kind::named && round.options.if_exists == IfExists::replace) return {};
  std::vector<std::string> keys;
  for (const Chunk& chunk : round.chunks)
    for (uint32_t i : chunk.entries) keys.emplace_back(round.entries[i].key);
  TM_ASSIGN(auto found, look_up(keys, {}, round.deadline));
  size_t at = 0;
  for (Chunk& chunk : round.chunks)
    std::erase_if(chunk.entries, [&](uint32_t i) {
      const LookupEntry& entry = found[at++];
      if (!entry.found) return false;
      auto outcome = existing(round.entries[i].key, entry, round.options);
      if (outcome.is_ok())
        round.outcomes[i] = *outcome;
      else
        round.outcomes[i] = outcome.status();
      return true;
    });
  return {};
}

// Asks for room; or puts, if the values ride inside.
void ClientImpl::begin_chunk(Round& round, Chunk& chunk) {
  if (chunk.entries.empty()) return;
  chunk.txn = next_txn(static_cast<uint32_t>(chunk.entries.size()));
  if (!chunk.rides) {
    ReserveManyCall call;
    call.head = round.head(chunk.txn);
    call.items.reserve(chunk.entries.size());
    for (uint32_t i : chunk.entries)
      call.items.push_back(
          {round.shard(i), round.entries[i].key, round.entries[i].meta, total_bytes(round.entries[i].data)});
    for (const LinkPtr& donor : round.donors) {
      call.session = donor->session_id();
      chunk.legs.push_back({donor, donor->start_call(kReserveMany, encode(call), round.deadline), {}});
    }
    return;
  }
  PutManyCall call;
  call.head = round.head(chunk.txn);
  std::vector<std::string> gathered(chunk.entries.size());
  for (size_t n = 0; n < chunk.entries.size(); ++n) {
    const PutEntry& entry = round.entries[chunk.entries[n]];
    PutItem item{static_cast<uint32_t>(n), round.shard(chunk.entries[n]), entry.key, {}, {}, entry.meta, {}};
    if (entry.data.size() == 1) {
      item.data = {static_cast<const char*>(entry.data[0].iov_base), entry.data[0].iov_len};
    } else {
      for (const iovec& v : entry.data) gathered[n].append(static_cast<const char*>(v.iov_base), v.iov_len);
      item.data = gathered[n];
    }
    call.items.push_back(std::move(item));
  }
  chunk.asked = chunk.entries;
  chunk.commit = round.home->start_call(kPutMany, encode(call), round.deadline);
}

// What each donor has reserved; an answer that did not come, or refuses all, stands for the others', which go back.
Result<std::vector<ReserveManyAnswer>> ClientImpl::reserved_by_all(Chunk& chunk) {
  std::vector<ReserveManyAnswer> answers;
  Status why;
  for (Leg& leg : chunk.legs) {
    auto reply = leg.reservation.wait();
    auto answer = reply.is_ok() ? decode<ReserveManyAnswer>(reply->body) : Result<ReserveManyAnswer>(reply.status());
    if (answer.is_ok() && answer->items.size() > chunk.entries.size())
      answer = Status(Code::pool_unavailable, "a node reserved more than it was asked for");
    if (!reply.is_ok() && leaves_open(reply.status().code()))
      leg.node->abandon(chunk.txn, static_cast<uint32_t>(chunk.entries.size()));
    if (!answer.is_ok() && why.is_ok()) why = answer.status();
    answers.push_back(answer.is_ok() ? std::move(answer).value() : ReserveManyAnswer{});
  }
  if (why.is_ok()) return answers;
  for (size_t k = 0; k < chunk.legs.size(); ++k) {
    for (const Reserved& item : answers[k].items)
      if (item.code == Code::ok) chunk.legs[k].extents.push_back(item.place.extent);
    chunk.legs[k].give_back();
  }
  return why;
}

// Writes to what was reserved, and asks for the commit.
void ClientImpl::write_chunk(Round& round, Chunk& chunk) {
  if (chunk.rides || chunk.entries.empty()) return;
  auto answers = reserved_by_all(chunk);
  if (!answers.is_ok())
    return passing(answers.status()) ? round.later(chunk.entries) : round.fail(chunk.entries, answers.status());
  PutManyCall call;
  call.head = round.head(chunk.txn);
  std::vector<std::vector<ExtentWrite>> writes(chunk.legs.size());
  std::vector<std::vector<ExtentRef>> unused(chunk.legs.size());
  for (size_t n = 0; n < chunk.entries.size(); ++n) {
    const uint32_t i = chunk.entries[n];
    Reserved* refused = nullptr;
    bool tried = true;
    for (auto& answer : *answers) {
      tried = tried && n < answer.items.size();
      if (n < answer.items.size() && answer.items[n].code != Code::ok && !refused) refused = &answer.items[n];
    }
    if (refused || !tried) {
      for (size_t k = 0; k < answers->size(); ++k)
        if (auto& items = (*answers)[k].items; n < items.size() && items[n].code == Code::ok)
          unused[k].push_back(items[n].place.extent);
      if (!refused || refused->code == Code::pool_full || refused->code == Code::pool_unavailable)
        round.singly.push_back(i);
      else
        round.outcomes[i] = Status(refused->code, std::move(refused->message));
      continue;
    }
    PutItem item{static_cast<uint32_t>(n), round.shard(i), round.entries[i].key, {}, {}, {}, {}};
    for (size_t k = 0; k < answers->size(); ++k) {
      const ReserveAnswer& place = (*answers)[k].items[n].place;
      writes[k].push_back({&place.pieces, round.entries[i].data});
      item.replicas.push_back({chunk.legs[k].node->node(), place.extent});
      chunk.legs[k].extents.push_back(place.extent);
    }
    if (round.options.checksum) {
      uint32_t crc = 0;
      for (const iovec& v : round.entries[i].data) crc = crc32c(v.iov_base, v.iov_len, crc);
      item.crc32c = crc;
    }
    call.items.push_back(std::move(item));
    chunk.asked.push_back(i);
  }
  for (size_t k = 0; k < unused.size(); ++k) chunk.legs[k].node->give_back(std::move(unused[k]));
  if (chunk.asked.empty()) return;
  Status s = failpoint("client.reserved");
  if (s.is_ok()) s = write_legs(chunk.legs, writes, chunk.nbytes, round.deadline);
  if (s.is_ok()) s = failpoint("client.written");
  if (s.is_ok() && round.deadline.expired())
    s = Status(Code::deadline_exceeded, "before the commit: nothing was stored");
  if (s.is_ok()) {
    chunk.commit = round.home->start_call(kPutMany, encode(call), round.deadline);
    return;
  }
  if (passing(s)) {
    round.later(chunk.asked);
  } else {
    round.fail(chunk.asked, s);
  }
  chunk.asked.clear();
  for (Leg& leg : chunk.legs) leg.give_back();
}

// As write_all() does for one object.
Status ClientImpl::write_legs(std::vector<Leg>& legs, std::span<const std::vector<ExtentWrite>> writes, uint64_t nbytes,
                              Deadline deadline) {
  std::vector<Status> done(legs.size());
  auto write = [&](size_t k) { done[k] = legs[k].node->write(writes[k], deadline, &legs[k].quiescent); };
  std::vector<std::thread> others;
  const bool in_turn = nbytes <= (256 << 10);
  for (size_t k = 1; k < legs.size() && !in_turn; ++k) others.emplace_back(write, k);
  for (size_t k = 0; k < (in_turn ? legs.size() : 1); ++k) write(k);
  for (std::thread& other : others) other.join();
  for (const Status& s : done) TM_TRY(s);
  return {};
}

void ClientImpl::finish_chunk(Round& round, Chunk& chunk) {
  if (chunk.asked.empty()) return;
  auto reply = chunk.commit.wait();
  auto answer = reply.is_ok() ? decode<PutManyAnswer>(reply->body) : Result<PutManyAnswer>(reply.status());
  if (answer.is_ok() && answer->items.size() != chunk.asked.size())
    answer = Status(Code::internal, "a batch of puts was answered with the wrong number of outcomes");
  if (!answer.is_ok()) {
    const Status& s = answer.status();
    if (s.code() == Code::pool_unavailable) {  // said before anything was done
      round.later(chunk.asked);
    } else {
      round.fail(chunk.asked, leaves_open(s.code()) ? unknown_outcome(s) : s);
    }
    for (Leg& leg : chunk.legs) leg.give_back();  // no effect on what was committed meanwhile
  } else {
    std::vector<std::vector<ExtentRef>> unused(chunk.legs.size());
    for (size_t n = 0; n < chunk.asked.size(); ++n) {
      PutManyOutcome& outcome = answer->items[n];
      const uint32_t i = chunk.asked[n];
      if (outcome.code == Code::ok) {
        round.outcomes[i] = PutOutcome{outcome.answer.version, outcome.answer.stored};
      } else if (outcome.code == Code::pool_full || outcome.code == Code::pool_unavailable) {
        round.singly.push_back(i);
      } else {
        const Status s(outcome.code, std::move(outcome.message));
        round.outcomes[i] = leaves_open(s.code()) ? unknown_outcome(s) : s;
      }
      if (outcome.code == Code::ok && outcome.answer.stored) continue;
      for (size_t k = 0; k < unused.size(); ++k) unused[k].push_back(chunk.legs[k].extents[n]);
    }
    for (size_t k = 0; k < unused.size(); ++k) chunk.legs[k].node->give_back(std::move(unused[k]));
  }
  if (const Status s = failpoint("client.committed"); !s.is_ok()) round.fail(chunk.asked, s);
}

// --- look-ups and reads ---

std::vector<Result<ObjectPtr>> ClientImpl::locate_many(std::span<const std::string> keys, Deadline deadline) {
  if (const Status s = usable(); !s.is_ok()) return all_fail<ObjectPtr>(keys.size(), s);
  std::vector<Result<ObjectPtr>> out;
  out.reserve(keys.size());
  std::vector<size_t> unknown;
  for (size_t i = 0; i < keys.size(); ++i) {
    out.emplace_back(cached(keys[i]));
    if (!*out.back()) unknown.push_back(i);
  }
  if (unknown.empty()) return out;
  std::vector<std::string> asked;
  const bool all = unknown.size() == keys.size();
  if (!all)
    for (size_t i : unknown) asked.push_back(keys[i]);
  const std::span<const std::string> names = all ? keys : std::span<const std::string>(asked);
  auto found = look_up_and_build(names, deadline);
  for (size_t n = 0; n < unknown.size(); ++n) out[unknown[n]] = std::move(found[n]);
  return out;
}

// In chunks: the home looks up the next ones while we make objects of what it has found.
std::vector<Result<ObjectPtr>> ClientImpl::look_up_and_build(std::span<const std::string> keys, Deadline deadline) {
  LookupCall shape;
  shape.describe = true;
  std::vector<Result<ObjectPtr>> out;
  out.reserve(keys.size());
  std::deque<PendingCall> ahead;
  if (keys.size() <= kChunkItems) {
    auto entries = look_up(keys, shape, deadline);
    return entries.is_ok() ? build(keys, std::move(entries).value(), deadline)
                           : all_fail<ObjectPtr>(keys.size(), entries.status());
  }
  const auto home_link = home(deadline);
  size_t asked = 0;
  while (out.size() < keys.size()) {
    for (; home_link.is_ok() && ahead.size() < kAhead && asked < keys.size();
         asked += std::min(kChunkItems, keys.size() - asked)) {
      const auto some = keys.subspan(asked, std::min(kChunkItems, keys.size() - asked));
      ahead.push_back(
          (*home_link)->start_call(kLookup, encode(question(some, shape, **home_link, deadline)), deadline));
    }
    const auto some = keys.subspan(out.size(), std::min(kChunkItems, keys.size() - out.size()));
    Result<std::vector<LookupEntry>> entries = Status(Code::pool_unavailable, "not asked");
    if (!ahead.empty()) {
      auto reply = ahead.front().wait();
      ahead.pop_front();
      auto answer = reply.is_ok() ? decode<LookupAnswer>(reply->body) : Result<LookupAnswer>(reply.status());
      if (answer.is_ok() && answer->entries.size() == some.size()) entries = std::move(answer->entries);
    }
    if (!entries.is_ok()) entries = look_up(some, shape, deadline);  // which asks again and again
    if (!entries.is_ok()) {                                          // once for all of them
      out.resize(keys.size(), Result<ObjectPtr>(entries.status()));
      return out;
    }
    auto found = build(some, std::move(entries).value(), deadline);
    std::move(found.begin(), found.end(), std::back_inserter(out));
  }
  return out;
}

std::vector<Status> ClientImpl::read_many(std::span<const ReadEntry> entries, Deadline deadline) {
  std::vector<Status> out;
  out.reserve(entries.size());
  std::set<NodeId> gone;
  for (const ReadEntry& entry : entries) out.push_back(read(entry.object, entry.offset, entry.out, gone, deadline));
  return out;
}

std::vector<Result<MappedObject>> ClientImpl::map_many(std::span<const ObjectPtr> objects, bool read_only,
                                                       Deadline deadline) {
  std::vector<Result<MappedObject>> out;
  out.reserve(objects.size());
  std::set<NodeId> gone;
  for (const ObjectPtr& object : objects) out.push_back(map(object, read_only, gone, deadline));
  return out;
}

// --- exists and remove ---

Result<std::vector<bool>> ClientImpl::exists(std::span<const std::string> keys, Deadline deadline) {
  TM_TRY(usable());
  if (keys.size() == 1 && cached(keys[0])) return std::vector<bool>{true};
  TM_ASSIGN(const std::string there, ask_exists(keys, false, deadline));
  return std::vector<bool>(there.begin(), there.end());
}

Result<std::vector<std::optional<Tier>>> ClientImpl::tiers(std::span<const std::string> keys, Deadline deadline) {
  TM_TRY(usable());
  TM_ASSIGN(const std::string there, ask_exists(keys, true, deadline));
  std::vector<std::optional<Tier>> out;
  for (char c : there) out.push_back(c == 0 ? std::nullopt : std::optional(c == 1 ? Tier::dram : Tier::ssd));
  return out;
}

Result<std::string> ClientImpl::ask_exists(std::span<const std::string> keys, bool tiers, Deadline deadline) {
  std::string out;
  out.reserve(keys.size());
  while (out.size() < keys.size()) {
    size_t n = 0, bytes = 0;
    auto answer = with_retries(deadline, [&]() -> Result<ExistsAnswer> {
      TM_ASSIGN(auto node, home(deadline));
      ExistsCall call;
      call.view = view()->number;
      call.timeout_ms = timeout_ms(deadline);
      call.tiers = tiers;
      n = bytes = 0;
      for (; out.size() + n < keys.size() && n < kBatchItems && bytes < kBatchBytes; ++n) {
        call.keys.push_back(keys[out.size() + n]);
        bytes += call.keys.back().size();
      }
      return node->call<ExistsAnswer>(kExists, call, deadline);
    });
    if (!answer.is_ok()) return answer.status();
    if (answer->there.size() != n)
      return {Code::internal, "a question about keys was answered with the wrong number of answers"};
    out += answer->there;
  }
  return out;
}

Result<bool> ClientImpl::remove(std::string_view key, Deadline deadline, std::optional<Version> only) {
  const RemoveEntry one{key, only};
  return std::move(remove_many({&one, 1}, deadline)[0]);
}

// Removes, or pins.
std::vector<Result<bool>> ClientImpl::change_many(std::span<const RemoveEntry> entries, std::optional<Pin> pin,
                                                  Deadline deadline) {
  if (const Status s = usable(); !s.is_ok()) return all_fail<bool>(entries.size(), s);
  auto out = all_fail<bool>(entries.size(), {Code::internal, "not asked"});
  std::vector<bool> asked(entries.size());  // an earlier attempt may have removed it
  auto settle = [&](size_t i, Result<bool> removed) {
    const bool only = entries[i].only.has_value();
    // Not there any more: by an attempt that was not answered, or by somebody else?
    const bool open = only && asked[i] && (!removed.is_ok() || !*removed);
    if (open) {
      const Code code =
          removed.is_ok() || removed.status().code() == Code::internal ? Code::peer_lost : removed.status().code();
      out[i] = Status(
          code, "outcome unknown: the removal of key '" + std::string(entries[i].key) + "' took effect or did not");
    } else if (removed.is_ok()) {
      out[i] = *removed || asked[i];
    } else {
      out[i] = std::move(removed);
    }
  };
  for (size_t begin = 0; begin < entries.size(); begin += kBatchItems) {
    std::vector<size_t> some;  // not settled yet
    for (size_t i = begin; i < std::min(entries.size(), begin + kBatchItems); ++i) some.push_back(i);
    const Status end =
        with_retries(deadline, [&]() -> Result<bool> {
          TM_ASSIGN(auto node, home(deadline));
          const auto now = view();
          RemoveManyCall call;
          call.view = now->number;
          call.timeout_ms = timeout_ms(deadline);
          call.pin = pin;
          for (size_t i : some)
            call.items.push_back({shard_of(hash_key(entries[i].key, now->seed)), entries[i].key, entries[i].only});
          auto answer = node->call<RemoveManyAnswer>(kRemoveMany, call, deadline);
          if (answer.is_ok() && answer->items.size() != some.size())
            return {Code::internal, "a batch of removals was answered with the wrong number of outcomes"};
          std::vector<size_t> again;
          Status why = answer.status();
          for (size_t k = 0; k < some.size(); ++k) {
            Result<bool> removed(answer.status());
            if (answer.is_ok()) {
              RemoveOutcome& outcome = answer->items[k];
              removed = outcome.code == Code::ok ? Result<bool>(outcome.removed)
                                                 : Result<bool>(Status(outcome.code, std::move(outcome.message)));
            }
            asked[some[k]] = asked[some[k]] || leaves_open(removed.status().code());
            if (!removed.is_ok() && passing(removed.status())) {
              why = removed.status();
              again.push_back(some[k]);
            } else {
              settle(some[k], removed);
            }
          }
          some = std::move(again);
          if (some.empty()) return true;
          return why;
        }).status();
    for (size_t i : some) settle(i, end);
  }
  return out;
}

}  // namespace torch_mooncake::pool
