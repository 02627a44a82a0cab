// Pins against reclaim with a real reader process, and a writer stopped inside its copy.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <random>

#include "common/clock.h"
#include "pool/donor_fixture.h"
#include "pool/pin_slots.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

// What parent and child agree on, in shared memory.
struct Board {
  std::atomic<uint64_t> generation;  // seqlock-free: the parent publishes (index, generation, offset) under `turn`
  std::atomic<uint64_t> turn;        // odd while it changes
  std::atomic<uint32_t> index;
  std::atomic<uint64_t> offset;
  std::atomic<uint64_t> pins, misses, torn;
  std::atomic<bool> stop;
};

Board* make_board() {
  void* p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(p != MAP_FAILED);
  return new (p) Board{};
}

void fill(std::byte* at, uint64_t nbytes, uint64_t stamp) {
  auto* words = reinterpret_cast<uint64_t*>(at);
  for (uint64_t i = 0; i < nbytes / 8; ++i) words[i] = stamp;
}

bool holds(const std::byte* at, uint64_t nbytes, uint64_t stamp) {
  auto* words = reinterpret_cast<const uint64_t*>(at);
  for (uint64_t i = 0; i < nbytes / 8; ++i)
    if (std::atomic_ref(const_cast<uint64_t&>(words[i])).load(std::memory_order_relaxed) != stamp) return false;
  return true;
}

constexpr uint64_t kBytes = 64 << 10;

[[noreturn]] void read_until_stopped(Board* board, std::shared_ptr<PinPage> page, const std::byte* data) {
  while (!board->stop.load()) {
    const uint64_t turn = board->turn.load();
    const ExtentRef ref{board->index.load(), board->generation.load()};
    const uint64_t offset = board->offset.load();
    if (turn % 2 || board->turn.load() != turn || ref.generation == 0) continue;
    auto slot = page->pin(ref);
    if (!slot.is_ok()) {
      board->misses++;
      continue;
    }
    // Pinned: these bytes are this version's until we let go, whatever the donor does. The stamp is the generation.
    for (int look = 0; look < 3; ++look)
      if (!holds(data + offset, kBytes, ref.generation)) board->torn++;
    board->pins++;
    page->unpin(*slot);
  }
  ::_exit(0);
}

}  // namespace

TEST_CASE("a reader process that pins never sees bytes of another version, while versions change and are evicted") {
  Board* board = make_board();
  auto donor = make_donor(kBytes * 8);
  auto data = donor->segments()[1]->map(Protection::read_write).value();
  auto slots = Segment::adopt(donor->slots_for_client(1).value(), Id128{}).value();
  auto page = PinPage::open(donor->segments()[0], slots).value();
  const pid_t pid = ::fork();
  if (pid == 0) read_until_stopped(board, page, data->data);

  std::mt19937_64 rng(1);
  ExtentRef current{};
  const Deadline end = Deadline::after_ms(2500);
  uint64_t versions = 0, full = 0;
  for (; !end.expired(); ++versions) {
    auto r = try_reserve(*donor, "k" + std::to_string(rng() % 4), kBytes);
    if (!r.is_ok()) {
      ++full;
      continue;
    }
    fill(data->data + r->pieces[0].offset, kBytes, r->extent.generation);
    REQUIRE(donor->commit(r->extent, {1, versions}, {}).is_ok());
    board->turn++;
    board->index = r->extent.index;
    board->generation = r->extent.generation;
    board->offset = r->pieces[0].offset;
    board->turn++;
    if (current.generation && rng() % 2) {  // replaced; the others are left to eviction
      const Status superseded = donor->supersede(current);
      if (superseded) {
        REQUIRE(donor->free(current).is_ok());
      } else {
        REQUIRE(superseded.code() == Code::key_not_found);  // it was evicted
      }
    }
    current = r->extent;
    if (versions % 64 == 0) check(*donor);
  }
  board->stop = true;
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status));
  MESSAGE(versions << " versions, " << board->pins.load() << " pinned reads, " << board->misses.load() << " misses, "
                   << donor->stats().evictions << " evictions, " << full << " times full");
  CHECK(board->torn.load() == 0);
  CHECK(board->pins.load() > 100);
  CHECK(donor->stats().evictions > 100);
  donor->end_session(1);
  CHECK(donor->stats().limbo_extents == 0);
  check(*donor);
}

TEST_CASE("pin and free at the same instant: either the pin fails or the extent waits in limbo") {
  Board* board = make_board();
  auto donor = make_donor(MiB);
  auto slots = Segment::adopt(donor->slots_for_client(1).value(), Id128{}).value();
  auto page = PinPage::open(donor->segments()[0], slots).value();
  // A round: the parent sets `turn`, both act, the reader answers in `pins` (round * 2 + got it), holds what it got
  // until the parent sets `offset`, and says that it has let go in `misses`.
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (uint64_t round = 1;; ++round) {
      for (int spins = 0; board->turn.load() < round;)
        if (++spins % 4096 == 0) ::sched_yield();
      if (board->stop.load()) ::_exit(0);
      auto slot = page->pin({board->index.load(), board->generation.load()});
      board->pins = round * 2 + slot.is_ok();
      while (board->offset.load() < round) ::sched_yield();
      if (slot.is_ok()) page->unpin(*slot);
      board->misses = round;
    }
  }
  uint64_t outcomes[2] = {0, 0};
  uint64_t round = 0;
  for (const Deadline end = Deadline::after_ms(2000); !end.expired();) {
    const ExtentRef ref = put(*donor, "k", 64);
    board->index = ref.index;
    board->generation = ref.generation;
    board->turn = ++round;
    for (uint64_t i = 0; i < (round * 7) % 300; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    REQUIRE(donor->free(ref).is_ok());
    while (board->pins.load() / 2 != round) ::sched_yield();
    const uint64_t got = board->pins.load() % 2;
    ++outcomes[got];
    const uint64_t limbo = donor->stats().limbo_extents;
    CHECK(limbo >= got);  // pinned, so not freed; more is caution: the reader was seen, and let go by itself
    if (limbo < got) break;
    board->offset = round;
    while (board->misses.load() != round) ::sched_yield();
    donor->sweep(1);
    REQUIRE(donor->stats().limbo_extents == 0);
  }
  board->offset = UINT64_MAX;
  board->stop = true;
  board->turn = round + 1;
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  MESSAGE(outcomes[1] << " pinned first, " << outcomes[0] << " freed first");
  CHECK(outcomes[0] + outcomes[1] > 100);
}

TEST_CASE("a reader killed while it holds a pin holds it no more once its session has ended") {
  auto donor = make_donor(MiB);
  const ExtentRef a = put(*donor, "a", MiB);
  auto slots = Segment::adopt(donor->slots_for_client(1).value(), Id128{}).value();
  auto page = PinPage::open(donor->segments()[0], slots).value();
  const pid_t pid = ::fork();
  if (pid == 0) {
    if (page->pin(a).is_ok()) ::raise(SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  REQUIRE(WIFSIGNALED(status));
  CHECK(donor->stats().pinned_extents == 1);
  CHECK(try_reserve(*donor, "b", MiB).status().code() == Code::pool_full);
  donor->end_session(1);
  CHECK(try_reserve(*donor, "b", MiB).is_ok());
  check(*donor);
}

TEST_CASE("a writer stopped inside its copy, timed out, and woken after the pool was filled: no object changes") {
  auto donor = make_donor(MiB);
  auto data = donor->segments()[1]->map(Protection::read_write).value();
  const SessionId writer = 1;
  const TxnId txn = random_id();
  const Reservation r = reserve(*donor, "late", MiB / 2, writer, txn);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::raise(SIGSTOP);
    std::memset(data->data + r.pieces[0].offset, 0xee, MiB / 2);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, WUNTRACED) == pid);
  REQUIRE(WIFSTOPPED(status));
  donor->drop_txn(txn);  // its time is over, its process is not

  std::vector<Announcement> objects;
  for (int i = 0; i < 40; ++i) {
    auto o = try_reserve(*donor, "o" + std::to_string(i), 64 << 10);
    if (!o.is_ok()) continue;
    for (const Piece& p : o->pieces) std::memset(data->data + p.offset, i + 1, p.nbytes);
    REQUIRE(donor->commit(o->extent, {1, static_cast<uint64_t>(i)}, {}).is_ok());
  }
  REQUIRE(donor->announce().size() == 8);  // half the pool: the rest is fenced
  CHECK(donor->stats().fenced_bytes == MiB / 2);
  REQUIRE(::kill(pid, SIGCONT) == 0);
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  REQUIRE(WIFEXITED(status));
  for (const Announcement& a : donor->announce()) {
    const auto value = static_cast<std::byte>(std::stoi(a.key.substr(1)) + 1);
    for (const Piece& p : a.pieces)
      for (uint64_t i = 0; i < p.nbytes; ++i) REQUIRE(data->data[p.offset + i] == value);
  }
  donor->end_session(writer);
  CHECK(donor->stats().fenced_bytes == 0);
  CHECK(try_reserve(*donor, "all", MiB).is_ok());
  check(*donor);
}
