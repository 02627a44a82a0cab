#include "collectives/board.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>

#include "collectives/exchange.h"
#include "common/log.h"
#include "common/process.h"
#include "memory/host_memory.h"

namespace torch_mooncake::coll {
namespace {

constexpr uint32_t kSlots = 4;
constexpr int64_t kSpinNs = 50'000, kHardSpinNs = 5'000;
constexpr int64_t kSleepNs = 20'000'000;  // then it is looked whether the group is in trouble

bool is_before(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) < 0; }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The counters lie in memory that another process maps, so the futexes are shared ones.
long futex(const std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), op, value, timeout, nullptr, 0);
}

}  // namespace

// What others write is looked at once and taken for a number, whatever it is.
struct Board::Head {
  alignas(64) std::atomic<uint32_t> posted{0};
  alignas(64) std::atomic<uint32_t> done{0};
  alignas(64) std::atomic<uint32_t> sleeps{0};  // its owner waits in a futex, or is about to
};
struct Board::Slot {
  alignas(64) uint32_t kind;
  uint64_t seq, nbytes, most, agreed;
  alignas(64) std::byte data[64];  // and on, to the slot's size
  static uint64_t stride(uint64_t slot_bytes) { return sizeof(Slot) - sizeof data + slot_bytes; }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

Board::Board(Group& group, const Team& team, int which)
    : group_(group), team_(team), which_(which), pid_(process_id()), seen_(team.size()) {}

uint64_t Board::segment_bytes() const { return sizeof(Head) + kSlots * Slot::stride(slot_bytes()); }

const char* Board::state() const { return !opened_ ? "not used yet" : usable_ ? "board" : "messages"; }

Board::Head& Board::head(int rank) const { return *reinterpret_cast<Head*>(seen_[rank].map->data); }

Board::Slot& Board::slot(int rank, uint32_t turn) const {
  return *reinterpret_cast<Slot*>(seen_[rank].map->data + sizeof(Head) + turn % kSlots * Slot::stride(slot_bytes()));
}

void Board::arrived(int rank, const Id128& segment, UniqueFd fd) {
  const auto found = std::find(team_.ranks.begin(), team_.ranks.end(), rank);
  if (found == team_.ranks.end()) return;
  const auto number = static_cast<size_t>(found - team_.ranks.begin());
  MappingPtr map;
  if (fd.valid()) {
    auto adopted = Segment::adopt(std::move(fd), segment);
    if (adopted.is_ok() && (*adopted)->capacity() >= segment_bytes()) {
      auto mapped = (*adopted)->map(Protection::read_only);
      if (mapped.is_ok()) map = *mapped;
    }
  }
  std::lock_guard lock(mutex_);
  if (seen_[number].came) return;
  seen_[number] = {true, std::move(map)};
  came_.notify_all();
}

Status Board::offer(const Call& call, int rank, const Segment* segment) {
  TM_ASSIGN(const rpc::SessionPtr session, group_.session_with(team_.ranks[rank], call.deadline));
  std::vector<UniqueFd> fds;
  if (segment && session->over_unix()) {
    UniqueFd copy(::fcntl(segment->fd(), F_DUPFD_CLOEXEC, 0));
    if (copy.valid()) fds.push_back(std::move(copy));
  }
  ByteWriter out;
  out.put(group_.id())
      .put(static_cast<uint32_t>(group_.rank()))
      .put(static_cast<uint8_t>(which_))
      .put(segment ? segment->id() : Id128{});
  auto answered = [group = group_.weak_from_this(), rank = team_.ranks[rank]](const Result<rpc::Message>& answer) {
    // It left before it knew of us, and so has not told us.
    if (auto g = group.lock(); g && answer.status().code() == Code::closed) g->on_leave(static_cast<uint32_t>(rank));
  };
  session->call(kBoard, out.take(), call.deadline, std::move(answered), std::move(fds));
  return {};
}

Status Board::open(const Call& call) {
  if (opened_) return {};
  const int n = team_.size(), me = team_.me;
  // Small boards are many: their slots get pages when they are written to.
  auto segment = Segment::create("torch-mooncake board", which_ == kLarge ? segment_bytes() : 1, segment_bytes());
  auto map = segment.is_ok() ? (*segment)->map(Protection::read_write) : Result<MappingPtr>(segment.status());
  if (map.is_ok()) {
    new ((*map)->data) Head;
    std::lock_guard lock(mutex_);
    seen_[me] = {true, *map};
    own_ = (*map)->data;
  }
  for (int rank = 0; rank < n; ++rank)
    if (rank != me) TM_TRY(offer(call, rank, map.is_ok() ? segment->get() : nullptr));
  uint8_t sees_all = map.is_ok();
  for (int rank = 0; rank < n; ++rank) {
    if (rank == me) continue;
    std::unique_lock lock(mutex_);
    opens_ = true;
    Status status;
    while (!seen_[rank].came && status.is_ok()) {
      came_.wait_for(lock, std::chrono::nanoseconds(kSleepNs));
      if (seen_[rank].came) break;
      lock.unlock();
      status = group_.trouble_with(team_.ranks[rank]);
      if (status.is_ok() && call.deadline.expired()) status = late();
      lock.lock();
    }
    opens_ = false;
    TM_TRY(status);
    sees_all &= seen_[rank].map != nullptr;
  }
  std::vector<uint8_t> all(n, sees_all);
  Exchange exchange(call);
  for (int i = 1; i < n; ++i) exchange.receive((me + n - i) % n, &all[(me + n - i) % n], 1);
  for (int i = 1; i < n; ++i) exchange.send((me + i) % n, &sees_all, 1);
  TM_TRY(exchange.wait());
  usable_ = std::all_of(all.begin(), all.end(), [](uint8_t sees) { return sees == 1; });
  opened_ = true;
  return {};
}

Status Board::late() const { return {Code::deadline_exceeded, "timed out waiting for " + group_.awaited()}; }

std::vector<int> Board::missing() const {
  std::vector<int> out;
  {
    std::lock_guard lock(mutex_);
    for (int rank = 0; rank < team_.size() && opens_; ++rank)
      if (!seen_[rank].came && rank != team_.me) out.push_back(team_.ranks[rank]);
    if (opens_) return out;
  }
  if (!usable_) return out;
  // Also while this rank waits for another one, by messages, which may wait for the one that has not come.
  const bool waits = waits_.load(std::memory_order_acquire);
  const uint32_t turn = turn_.load(std::memory_order_relaxed);
  for (int rank = 0; rank < team_.size(); ++rank)
    if (is_before(head(rank).posted.load(std::memory_order_relaxed), turn) ||
        (waits && is_before(head(rank).done.load(std::memory_order_relaxed), turn - kSlots)))
      out.push_back(team_.ranks[rank]);
  std::erase(out, group_.rank());
  return out;
}

Status Board::wait(const Call& call, int rank, const std::atomic<uint32_t>& counter, uint32_t at_least) {
  auto is_there = [&] { return !is_before(counter.load(std::memory_order_acquire), at_least); };
  if (is_there()) return {};
  static const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  const bool crowded = cores < team_.size();
  const int64_t begin = steady_ns();
  for (int64_t now = begin; now < begin + kSpinNs; now = steady_ns()) {
    // The one that is waited for may be where this thread runs, however many cores there are.
    const bool alone = !crowded && now < begin + kHardSpinNs;
    for (int i = 0; i < (alone ? 32 : 1); ++i) {
      if (is_there()) return {};
      alone ? relax() : std::this_thread::yield();
    }
  }
  waits_.store(true, std::memory_order_release);
  auto& sleeps = head(team_.me).sleeps;
  Status status;
  while (status.is_ok()) {
    sleeps.store(1, std::memory_order_seq_cst);
    const uint32_t now = counter.load(std::memory_order_seq_cst);
    if (!is_before(now, at_least)) break;
    const int64_t left = call.deadline.is_never() ? kSleepNs : std::min(kSleepNs, call.deadline.remaining_ns());
    const timespec timeout{0, static_cast<long>(std::max<int64_t>(left, 1))};
    (void)futex(counter, FUTEX_WAIT, now, &timeout);  // whatever it says, it is looked again
    if (is_there()) break;
    status = group_.trouble_with(team_.ranks[rank]);
    if (status.is_ok() && call.deadline.expired()) status = late();
    if (is_there()) status = {};  // it came, and left since
  }
  sleeps.store(0, std::memory_order_relaxed);
  waits_.store(false, std::memory_order_release);
  return status;
}

void Board::raise(std::atomic<uint32_t>& counter, uint32_t to) {
  counter.store(to, std::memory_order_seq_cst);
  for (int rank = 0; rank < team_.size(); ++rank) {
    if (rank == team_.me || head(rank).sleeps.load(std::memory_order_seq_cst) == 0) continue;
    (void)futex(counter, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
}

// ---- pages

struct Board::Residents {
  std::mutex mutex;
  std::vector<Board*> boards;
  std::atomic<uint64_t> uses{0};  // to tell who was last
};

Board::Residents& Board::residents() {
  static auto* residents = new Residents;  // outlives every group
  return *residents;
}

Board::~Board() {
  if (which_ != kLarge || pid_ != process_id()) return;  // in a forked child the mutex may be held by nobody
  auto& all = residents();
  std::lock_guard lock(all.mutex);
  std::erase(all.boards, this);
}

void Board::come_in() {
  auto& all = residents();
  used_.store(all.uses.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  if (resident_) return;
  resident_ = true;
  std::lock_guard lock(all.mutex);
  std::vector<std::pair<uint64_t, Board*>> by_use;  // a copy: they are being used
  for (Board* board : all.boards) by_use.emplace_back(board->used_.load(std::memory_order_relaxed), board);
  std::sort(by_use.begin(), by_use.end());
  for (const auto& [use, board] : by_use)
    if (all.boards.size() >= kResident && board->give_back()) std::erase(all.boards, board);
  all.boards.push_back(this);
}

bool Board::give_back() {
  std::unique_lock lock(pages_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  const uint32_t last = turn_.load(std::memory_order_relaxed);
  for (size_t rank = 0; rank < seen_.size(); ++rank)
    if (is_before(head(static_cast<int>(rank)).done.load(std::memory_order_acquire), last)) return false;
  // All but the page with the counters. The others' maps see it, too: zeros, which nobody looks at before the next
  // turn.
  const size_t page = page_size();
  if (::madvise(own_ + page, (segment_bytes() - 1) / page * page, MADV_REMOVE) != 0)
    log::warning("collectives", Status::from_errno("giving back the pages of a board", errno).message());
  resident_ = false;
  return true;
}

Status Turn::begin(Board::Kind kind, uint64_t nbytes, uint64_t most, uint64_t agreed) {
  Board* board = call_.board(which_);
  if (board == nullptr) return {};
  TM_TRY(board->check_alive());
  TM_TRY(board->open(call_));
  if (!board->usable_) return {};
  board_ = board;
  if (which_ == Board::kLarge) {
    pages_ = std::unique_lock(board->pages_);
    board->come_in();
  }
  kind_ = kind;
  turn_ = board->turn_.load(std::memory_order_relaxed) + 1;
  board->turn_.store(turn_, std::memory_order_relaxed);
  for (int rank = 0; rank < call_.size(); ++rank)
    if (rank != call_.rank()) TM_TRY(board->wait(call_, rank, board->head(rank).done, turn_ - kSlots));
  on_board_ = most <= board->slot_bytes() && !call_.rule(kind).flat;
  Board::Slot& slot = board->slot(call_.rank(), turn_);
  slot.kind = static_cast<uint32_t>(kind);
  slot.seq = call_.seq;
  slot.nbytes = nbytes;
  slot.most = most_ = most;
  slot.agreed = agreed_ = agreed;
  if (!on_board_) post();
  return {};
}

Turn::~Turn() {
  if (board_) board_->raise(board_->head(call_.rank()).done, turn_);
}

std::byte* Turn::mine() { return board_->slot(call_.rank(), turn_).data; }

void Turn::put(uint64_t at, const void* data, uint64_t nbytes) {
  if (nbytes == 0) return;
  std::memcpy(mine() + at, data, nbytes);
  call_.group.traffic().shown += nbytes;
}

void Turn::post() { board_->raise(board_->head(call_.rank()).posted, turn_); }

Result<const std::byte*> Turn::theirs(int rank, uint64_t nbytes) {
  TM_TRY(board_->wait(call_, rank, board_->head(rank).posted, turn_));
  const Board::Slot& slot = board_->slot(rank, turn_);
  const uint64_t shown = slot.nbytes;
  if (slot.kind == static_cast<uint32_t>(kind_) && shown == nbytes && slot.seq == call_.seq &&
      (slot.most != most_ || slot.agreed != agreed_))
    return {Code::layout_mismatch,
            call_.name_of(rank) + " has other sizes in " + coll::name_of(kind_) + " than this rank"};
  if (slot.kind != static_cast<uint32_t>(kind_) || shown != nbytes || slot.seq != call_.seq)
    return {Code::layout_mismatch, call_.name_of(rank) + " is in " +
                                       coll::name_of(static_cast<Board::Kind>(slot.kind)) + " with " +
                                       std::to_string(shown) + " bytes, where " + coll::name_of(kind_) + " with " +
                                       std::to_string(nbytes) + " is expected"};
  return slot.data;
}

Status Turn::meet(uint64_t nbytes) {
  for (int rank = 0; rank < call_.size() && board_; ++rank)
    if (rank != call_.rank()) TM_TRY(theirs(rank, nbytes).status());
  return {};
}

Status Turn::meet_at(int root, uint64_t root_nbytes, uint64_t leaf_nbytes) {
  if (call_.rank() == root) return meet(leaf_nbytes);
  return board_ ? theirs(root, root_nbytes).status() : Status();
}

Status Board::check_alive() const {
  if (pid_ != process_id()) return {Code::forked, "this process group belongs to the process that was forked"};
  return group_.trouble();
}

Result<bool> has_large_board(const Call& call, Board::Kind kind) {
  Board* board = call.board(Board::kLarge);
  if (board == nullptr || call.rule(kind).flat) return false;
  TM_TRY(board->check_alive());
  TM_TRY(board->open(call));
  return board->usable_.load();
}

}  // namespace torch_mooncake::coll
