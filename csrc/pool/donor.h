// Donor: the memory one node lends, and the truth about what is in it. No network, no clock of its own, no threads:
// a data structure that the node's service (and the simulator) drives.
//
// Memory: data segments plus one table segment, all memfds held by the keeper, so that a restarted worker attaches to
// them (`attach`) and finds every published entry. A table entry is published by its state word, last.
// Generation words live in the table (read-only to clients): a reader on this host reads them in place, a remote one
// through the engine, after the payload. They change, with a fence, before an extent is superseded or reused.
// Pins: a client's own slot page (a small memfd it can write) holds (extent, generation) per pinned extent: write
// slot, full fence, re-read the word, then map. reclaim() changes the word, full fence, scans all slot pages once per
// batch; extents still pinned wait in limbo, unfindable and counted, until unpinned or their session ends.
//
// Quotas: of keys with a prefix, each extent counted from its reservation until it is given back or retired. What goes
// over one evicts others of that prefix, the least valuable first.
//
// Parents: what was reserved with a parent's key keeps it from being evicted here for as long as it is in this memory.
//
// SSD: what eviction would throw away is written to a log on disk first, if it is admitted (donor_demote.cpp has the
// rule), and its memory is free when it is there. Its ExtentRef stays what the home knows it by; promote() brings the
// bytes back into memory, in an extent of their own, which describe() names as `copy`: readers validate against that.
// What a disk can bring back at the next start is marked there, durably, before it is said to be gone: remove() tells
// when. With new memory only sealed objects are taken over from the disk.
//
// Failing calls change nothing. A ref whose generation is not the extent's is key_not_found everywhere; a call that the
// extent's state does not allow is invalid_argument.
//
// Threads: one caller at a time (the service's worker thread), except what clients do through shared memory.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/fd.h"
#include "memory/segment.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

struct DonorOptions {
  uint64_t limit_bytes = 0;             // of data; exhaustion evicts, then pool_full
  uint64_t grow_step_bytes = 64 << 20;  // fallocate in steps
  uint32_t max_extents = 0;             // 0: one for each KiB of the limit, but 2^20 at least and 2^28 at most
  std::vector<SsdOptions> ssd{};
};

// The table segment: header pages, then entries. Clients on this host map it read-only.
inline constexpr size_t kTableHeaderBytes = 16384;

// One entry of the shared table, 128 bytes. Read by clients on this host; only the donor writes.
struct alignas(128) ExtentEntry {
  uint64_t generation;  // atomic: the generation word. Equal to an ExtentRef's: those bytes are valid
  uint32_t state;       // atomic ExtentState; published last
  uint32_t piece_count;
  uint64_t nbytes;
  uint64_t key_hash[2];
  uint64_t version_view, version_counter;
  uint32_t record_segment;  // where key, meta, pieces are recorded for attach()
  uint32_t record_nbytes;
  uint64_t record_offset;
  uint64_t content_generation;  // what the word was while the bytes were valid: the extent's identity
  uint64_t writer;              // SessionId that may still write the bytes; 0: nobody
  uint64_t last_use;            // eviction: in bytes touched
  uint32_t uses;
  uint32_t crc32c;
  uint8_t has_crc, pin;  // pin: a Pin
  uint16_t replicas;     // as the object was put; 0: 1
  uint32_t promoted;     // a copy of a record on an SSD; its record's txn says which
  uint64_t ttl_ms;       // 0: never expires
  int64_t committed_ns;  // by the donor's steady clock, if it expires
};
static_assert(sizeof(ExtentEntry) == 128);

inline const ExtentEntry& table_entry(const std::byte* table, uint32_t index) {
  return reinterpret_cast<const ExtentEntry*>(table + kTableHeaderBytes)[index];
}

// What the keeper holds for the worker, so that the next worker can attach. `slots` come and go with sessions.
enum class SegmentRole : uint8_t { table = 1, records = 2, data = 3, slots = 4 };
struct HeldSegment {
  SegmentRole role{};
  uint64_t tag = 0;  // data: index; slots: the SessionId
  std::shared_ptr<Segment> segment;
};

struct ReserveRequest {
  TxnId txn{};
  std::string key;
  Kind kind = Kind::named;
  uint64_t nbytes = 0;
  uint32_t part = 0, parts = 1;
  std::string meta, label;
  SessionId writer = 0;  // its end drops the reservation
  std::string parent{};  // the key that it comes after, if any
};
struct Reservation {
  ExtentRef extent;
  std::vector<Piece> pieces;
};
struct Announcement {  // what a donor tells a (new) home about one extent
  std::string key;
  Kind kind;
  Version version;
  ExtentState state;
  uint64_t nbytes;
  std::string meta, label;
  uint32_t part, parts;
  TxnId txn;
  ExtentRef extent;
  std::vector<Piece> pieces;
  uint32_t crc32c;
  bool has_crc;
  uint64_t ttl_ms = 0;
  int64_t committed_ns = 0;
  Tier tier = Tier::dram;
  std::optional<ExtentRef> copy{};  // where the bytes are, if not in `extent` itself
  uint32_t replicas = 1;            // as it was put. Not remembered on an SSD
  Pin pin = Pin::none;              // on an SSD: as when it was written
  std::string parent{};             // not remembered on an SSD
};
struct DonorStats {
  uint64_t limit_bytes = 0, allocated_bytes = 0, used_bytes = 0, limbo_bytes = 0, prepared_bytes = 0, fenced_bytes = 0;
  uint64_t granted_bytes = 0;  // in advance: not in used_bytes, nor in extents
  uint64_t extents = 0, limbo_extents = 0, prepared_extents = 0, pinned_extents = 0, evictions = 0;
  uint64_t soft_pinned_bytes = 0, hard_pinned_bytes = 0;
  SsdStats ssd;
};

class TM_API Donor {
 public:
  // Fresh memory, or what a previous worker left. After attach(): COMMITTED and FINAL entries are there; PREPARED ones
  // wait in prepared() for the home's word; what was half-written is ignored; what was on its way out is freed when its
  // readers and writers are gone. Old sessions whose client still holds its slot page (see slots_for_client) keep their
  // pins until they let go (found by sweep()); all other old sessions are over.
  static Result<std::unique_ptr<Donor>> create(DonorOptions options);
  static Result<std::unique_ptr<Donor>> attach(DonorOptions options, std::vector<HeldSegment> held);
  virtual ~Donor() = default;

  // What clients on this host map: table first, then data segments (Piece::segment + 1). Never changes in number.
  virtual std::vector<std::shared_ptr<Segment>> segments() const = 0;
  // What the keeper holds, now and when it changes (slot pages only; `added` false: let go of it).
  virtual std::vector<HeldSegment> held() const = 0;
  virtual void on_held_changed(std::function<void(const HeldSegment&, bool added)> fn) = 0;

  // All bytes at once or pool_full (message has asked, free, limit, pinned). Evicts exactly as many bytes as needed,
  // least valuable first; `evicted` reports them so that the home forgets them. invalid_argument: its parent comes
  // after it.
  virtual Result<Reservation> reserve(const ReserveRequest& request) = 0;
  // Room in advance: an extent that `writer` fills before it says for what. Of what is free, and a sixteenth of the
  // memory in all, else pool_full. It ends as a reservation does, by give_back(), abandon() or the session's end.
  virtual Result<Reservation> grant(uint64_t nbytes, SessionId writer, const TxnId& txn) = 0;
  virtual void end_grants() = 0;  // all of them: fenced
  // Makes of a grant what reserve() would have reserved; told twice it is ok. key_not_found: it is none (any more).
  virtual Status bind(ExtentRef extent, const ReserveRequest& request) = 0;
  // prepared -> committed. With `ttl_ms` it expires so long after `now_ns`; removing it is the home's affair, as is how
  // many replicas there should be.
  virtual Status commit(ExtentRef extent, Version version, std::optional<uint32_t> crc32c, uint64_t ttl_ms = 0,
                        int64_t now_ns = 0, uint32_t replicas = 1, Pin pin = Pin::none) = 0;
  // Of what is COMMITTED or FINAL. `soft`: evicted only when nothing else may be; `hard`: not at all, and brought into
  // memory if it is on an SSD, for which there may be no room (pool_full). `done` perhaps later, from
  // run_completions().
  virtual void set_pin(ExtentRef extent, Pin pin, std::function<void(const Status&)> done) = 0;
  // Instead of those there were; `used_bytes` is what other donors have. They outlive the worker. quotas(): with what
  // is used here. over_quota(): does this refusal of reserve() say that a quota, and not the memory, is full?
  virtual void set_quotas(const std::vector<Quota>& quotas) = 0;
  virtual std::vector<Quota> quotas() const = 0;
  static bool over_quota(const Status& refusal);
  virtual Status finalize(ExtentRef extent) = 0;   // committed -> final
  virtual Status supersede(ExtentRef extent) = 0;  // changes the generation word; then free() may follow
  virtual Status free(ExtentRef extent) = 0;       // limbo while pinned or while the writer may still write
  // supersede() and free() in one, and what is on an SSD is marked: `done` when no restart can bring it back.
  using Done = std::function<void(const Status&)>;
  virtual void remove(ExtentRef extent, Done done) = 0;
  virtual void drop_txn(const TxnId& txn) = 0;                              // PREPARED parts of an aborted transaction
  virtual std::vector<std::pair<TxnId, std::string>> prepared() const = 0;  // (txn, key) still open
  virtual void touch(ExtentRef extent) = 0;                                 // a use, for eviction
  virtual void set_evicted_callback(std::function<void(const Announcement&)> fn) = 0;

  // Stale generation: key_not_found. On an SSD only: busy (promote it first).
  virtual Result<Announcement> describe(ExtentRef extent) const = 0;
  // Also of what is on an SSD only, which stays there; it has no pieces.
  virtual void peek(ExtentRef extent, std::function<void(Result<Announcement>)> done) const = 0;
  // `done` when the bytes are in memory; several for one extent share one read. key_not_found: it is gone, or could not
  // be read and is gone now. pool_full: there was no room for it in five seconds.
  virtual void promote(ExtentRef extent, Done done) = 0;
  virtual std::optional<uint64_t> only_on_ssd(ExtentRef extent) const = 0;  // its length
  virtual bool making_room() const = 0;  // by writing to SSDs; what did not fit may fit soon
  // Told when an extent's bytes are only on an SSD, and when they are in memory again.
  virtual void set_tier_callback(std::function<void(const Announcement&)> fn) = 0;
  // Results of disk work wait until run_completions(); `wake` (from any thread) says that there are some.
  virtual void set_wake(std::function<void()> wake) = 0;
  virtual void run_completions() = 0;
  virtual void announce(const std::function<void(Announcement)>& fn) const = 0;  // COMMITTED and FINAL, not superseded
  std::vector<Announcement> announce() const;
  virtual std::vector<Announcement> announce_prepared() const = 0;  // what a rebuild may have to complete
  // The first `limit` behind `after`, in order, without what has expired by `now_ns`. Looks at all there is.
  virtual std::vector<std::string> keys(std::string_view prefix, size_t limit, int64_t now_ns = 0,
                                        std::string_view after = {}) const = 0;

  // The writer will write no more into this extent of its own: a fenced one can be reused, a PREPARED one is dropped.
  // (After drop_txn or a timeout the extent is `fenced`, in limbo, until this or the end of the writer's session.)
  virtual Status give_back(ExtentRef extent, SessionId session) = 0;
  // The same of all that the session reserved for `txn`, whether it knows of it or not.
  virtual void abandon(const TxnId& txn, SessionId session) = 0;

  // Sessions: a client's slot page (opened once), its pins, its unfinished writes. Session ids never repeat in a
  // pool's life, also not over a worker's restart: take random_u64().
  virtual Result<std::shared_ptr<Segment>> open_slots(SessionId session) = 0;
  // The fd to send to the client: its own open file, with a shared flock that the kernel drops when the client (and its
  // forked children) have closed it or are dead. That is how a later worker knows that an old session's pins are still
  // in use, so a client keeps this fd open while it has pins or a copy into pool memory under way, and no longer.
  virtual Result<UniqueFd> slots_for_client(SessionId session) = 0;
  // The session is over (EOF: the process is dead or has closed): its pins end, its PREPARED parts are dropped, limbo
  // is swept. Extents that it may still be writing into are safe to reuse only after this.
  virtual void end_session(SessionId session) = 0;
  // The connection is gone, which does not prove that the process is: as end_session() if its client has let go of the
  // slot page's lock (or has none), else it is an old session until sweep() finds that it has.
  virtual void lose_session(SessionId session) = 0;
  // Makes each of a chain at least as valuable as those before it in the list, whose first is the chain's last. Not a
  // use. What is gone is passed over.
  virtual void refresh(std::span<const ExtentRef> last_first) = 0;
  // Not evicted until then: for readers elsewhere, and for what somebody is about to read. Of one owner (0: nobody's)
  // the latest time counts; it ends with the owner's session or unpin(). Lost with the worker. False: the extent is
  // gone, or is on an SSD and a quarter of the memory is waited for already.
  virtual bool hint_pin(ExtentRef extent, int64_t until_ns, SessionId owner = 0) = 0;
  virtual void unpin(ExtentRef extent, SessionId owner) = 0;
  virtual void sweep(int64_t now_ns) = 0;

  virtual DonorStats stats() const = 0;
  // Sum of pieces = used bytes, no overlap, no orphan: ok or corrupt with what is wrong. For tests and `doctor`.
  virtual Status check() const = 0;
};

// One slot of a client's slot page; pool/pin_slots.h has the client's side. Slot 0 is the page's header: its
// `generation` is the number of slots ever used (so that a scan stops there).
struct PinSlot {
  uint64_t generation;  // 0: free
  uint32_t extent;
  uint32_t pad;
};
inline constexpr uint32_t kPinSlots = 8192;

}  // namespace torch_mooncake::pool
