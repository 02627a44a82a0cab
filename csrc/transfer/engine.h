// The transfer engine: moves bytes between memory of this process and memory of peers, over whatever connects them.
//
//   auto engine = Engine::create({.listen = {"tcp://127.0.0.1:0"}});
//   auto region = engine->register_memory(ptr, nbytes, {});            // -> descriptor() is sent to the peer by the
//   user auto peer   = engine->connect("tcp://…", deadline); auto remote = peer->open(descriptor, deadline); // a
//   RemoteRegion: bounds, rights, generation auto op     = engine->write({{region, 0, remote, 4096, 65536}}, {.deadline
//   = …}); Status s    = op->wait(deadline);
//
// Promises (docs/transfer-engine.md): a completed write is visible at the destination; a completed read holds what the
// source held; every op ends by its deadline + max(10 %, 250 ms) as done, failed, timeout or cancelled, after which no
// more bytes land in the caller's memory; the op keeps its regions alive until then; deregister() returns when nobody
// can touch the memory, or `busy` at its deadline with the memory quarantined.
//
// Ownership: shared_ptrs everywhere; an Op keeps its Peer and Regions. Threads: every method is safe from any thread
// that is not one of the engine's own. After close(), pending ops end with `closed` and new calls fail with it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/api.h"
#include "common/bytes.h"
#include "common/clock.h"
#include "common/status.h"
#include "memory/segment.h"
#include "rpc/endpoint.h"
#include "transfer/explain.h"

namespace torch_mooncake {

class Engine;
class Peer;

enum class Direction : uint8_t { read, write };

// What a region is made of. A shared segment is host memory; the others are reached by their transports only.
enum class MemoryKind : uint8_t { host, file, cuda };
inline constexpr int kMemoryKinds = 3;

// Who goes first. Background ops yield to foreground ones in every transport, and are not starved.
enum class Priority : uint8_t { foreground, background };

namespace transfer::rdma {
class Driver;
}

struct EngineOptions {
  rpc::EndpointOptions rpc{};
  std::vector<std::string> listen{};  // empty: connects only
  // Which transports may be used, in order of preference. Unknown names raise `unsupported`. "tcp" covers lanes over
  // Unix sockets too, named "unix" in transport_for() when they carry the bytes.
  std::vector<std::string> transports = {"local", "shm", "tcp"};
  int lanes = 2;  // TCP lanes a rail (a pair of NICs) of each peer
  // Which NICs: globs of names ("eth*", "!docker*") and networks ("10.0.0.0/8"); empty: all but container bridges.
  std::vector<std::string> nics{};
  uint64_t slice_bytes = 4 << 20;  // the most one chunk on a lane carries, 256 KiB .. 4 MiB; less where lanes are slow
  // The most that ops of a priority, begun here, read and write together, in bytes/s. 0: no limit.
  uint64_t foreground_rate = 0, background_rate = 0;
  // Settings of "rdma", "sl=3,tc=106": rdma/options.h. `nics` chooses its devices, by their names too ("mlx5_*").
  std::string rdma{};
  // What "rdma" stands on; null: libibverbs, opened when an engine first allows "rdma".
  std::shared_ptr<transfer::rdma::Driver> rdma_driver{};
};

struct RegionOptions {
  bool readable = true;  // by peers
  bool writable = true;
  std::shared_ptr<void> keep{};  // dropped when the region is gone (a tensor)
  std::string label{};           // for errors
};

// A file to be registered. By path, or by a descriptor that is open (duplicated; the path is then for errors only).
struct FileOptions {
  std::string path{};
  int fd = -1;
  std::optional<uint64_t> nbytes{};  // default: what the file holds now
  bool writable = false;             // then a file that is shorter than nbytes is made longer (sparse)
  bool create = false;               // if it does not exist
};

// Memory that peers may reach. Registering is cheap and may overlap other regions.
class TM_API Region {
 public:
  virtual ~Region() = default;
  virtual MemoryKind kind() const = 0;
  virtual std::byte* data() const = 0;  // the first byte, where the kind has an address (a file has none)
  virtual uint64_t nbytes() const = 0;
  virtual uint64_t id() const = 0;
  virtual bool shared() const = 0;          // in a shared segment, which same-host peers map
  virtual uint64_t generation() const = 0;  // random start, never repeats within an engine
  virtual std::string descriptor()
      const = 0;  // versioned bytes: engine, id, generation, nbytes, rights, access records
};
using RegionPtr = std::shared_ptr<Region>;

// A peer's region as we know it. Valid while the session it was opened in lives.
class TM_API RemoteRegion {
 public:
  virtual ~RemoteRegion() = default;
  virtual uint64_t nbytes() const = 0;
  virtual const std::shared_ptr<Peer>& peer() const = 0;
  virtual std::string transport()
      const = 0;  // what would carry a read from it: "local" "shm" "process_vm" "unix" "tcp"
  // Non-null if the region lies in a segment this process has mapped (shm): the bytes themselves, for reading.
  virtual std::shared_ptr<const std::byte> mapped() const = 0;
  // The region's bytes where they lie, for reading, if they are in this process' address space (a mapped segment, an
  // engine of this process). Until the last copy of the pointer goes, the owner's deregister() waits, or is Busy. Null:
  // they are elsewhere, or the owner is taking them back.
  virtual std::shared_ptr<const std::byte> lease() { return nullptr; }
};
using RemoteRegionPtr = std::shared_ptr<RemoteRegion>;

struct Slice {
  RegionPtr local;
  uint64_t local_offset;
  RemoteRegionPtr remote;
  uint64_t remote_offset;
  uint64_t nbytes;
};

// Many slices between two regions: 24 bytes each, so that 100 000 pages are one cheap list.
struct Extent {
  uint64_t local_offset, remote_offset, nbytes;
};
struct Batch {
  RegionPtr local;
  RemoteRegionPtr remote;
  std::vector<Extent> extents;
};

enum class OpState : uint8_t { pending, done, failed, timeout, cancelled };

// A stream of CUDA on which an op keeps its place: it begins when what is queued there is done, and what is queued
// there afterwards waits for its end, however it ends. The buffers' bytes may be written by kernels queued before.
struct StreamOrder {
  int device = 0;
  uintptr_t stream = 0;  // cudaStream_t; 0 is the default stream
};

struct OpOptions {
  Deadline deadline = Deadline::after_ms(Deadline::kDefaultMs);
  Priority priority = Priority::foreground;
  std::string notify{};                         // to each target once, after its data is visible; <= 64 KiB
  std::shared_ptr<Peer> peer{};                 // who gets the notification of an op with an empty list
  std::optional<StreamOrder> stream{};          // of one peer
  std::shared_ptr<void> keep{};                 // dropped at the op's end, outside the engine's threads
  std::function<void(const Status&)> on_end{};  // engine callback thread, once
};

// Told of ends and arrivals (an event loop's). Called on any thread, the engine's among them: must not block.
class OpWatcher {
 public:
  virtual ~OpWatcher() = default;
  virtual void op_ended(uint64_t tag) = 0;
};

class TM_API Op {
 public:
  virtual ~Op() = default;
  virtual OpState state() const = 0;  // terminal states are final
  virtual Status status() const = 0;  // ok while pending or done
  bool ended() const { return state() != OpState::pending; }
  // Waits for the end (spins <= 50 µs, then sleeps). If `deadline` passes first: deadline_exceeded, the op goes on.
  virtual Status wait(Deadline deadline = Deadline::never()) = 0;
  virtual void cancel() = 0;  // asks; the op ends as cancelled unless it was done already
  virtual uint64_t nbytes() const = 0;
  virtual uint64_t bytes_done() const = 0;
  virtual bool remote_quiescent() const = 0;  // after the end: no bytes of this op can land remotely any more
  virtual std::string transport() const = 0;
  virtual std::string peers() const = 0;  // whom it is with; after a failure, who failed
  // Calls watcher->op_ended(tag) at the end, once. False: it has ended already, and nobody is called.
  virtual bool watch(std::shared_ptr<OpWatcher> watcher, uint64_t tag) = 0;
};
using OpPtr = std::shared_ptr<Op>;

class TM_API Peer {
 public:
  virtual ~Peer() = default;
  virtual const rpc::Identity& identity() const = 0;
  virtual const rpc::SessionPtr& session() const = 0;  // for control messages of the rooms above
  virtual bool alive() const = 0;
  virtual bool same_host() const = 0;
  // Checks a descriptor with its owner (one round trip, cached) and picks a path. Descriptor of another engine:
  // invalid_argument; of a region that is gone: key_not_found … with the region's label.
  virtual Result<RemoteRegionPtr> open(std::string_view descriptor, Deadline deadline) = 0;
  // Of a peer that connect() gave: gives this handle back; the session ends with its last handle. The session is shared
  // by all who connected to the same engine. Of one that peer_of() gave: ends the session for everybody.
  virtual void close() = 0;
};
using PeerPtr = std::shared_ptr<Peer>;

struct Notification {
  Id128 from_engine;
  std::string from_name;
  std::string data;
};

// Latencies of the ops that ended well, from the call to the end: one histogram for each direction, transport and size.
struct OpStats {
  // Upper bounds of the size classes.
  static constexpr std::array<uint64_t, 5> kClassBytes = {4 << 10, 64 << 10, 1 << 20, 16 << 20, UINT64_MAX};
  // Bucket i counts latencies up to 2^(8 + i) ns that no lower bucket counts; the last has no bound (above 34 s).
  static constexpr int kFirstBucketLog2Ns = 8, kBuckets = 29;

  std::string direction, transport;  // transport "mixed": several carried one op
  uint64_t up_to_nbytes = 0;         // UINT64_MAX: the largest class
  uint64_t ops = 0, nbytes = 0, latency_sum_ns = 0;
  std::array<uint64_t, kBuckets> latency{};
};

struct Outcomes {
  uint64_t done = 0, failed = 0, timeout = 0, cancelled = 0;
};

struct EngineStats {
  uint64_t ops = 0, ops_failed = 0, notifications = 0;  // ended; those of them that did not end well
  uint64_t ops_in_flight = 0;
  Outcomes reads, writes;
  std::vector<OpStats> latencies;
  uint64_t resent_slices = 0, failovers = 0;     // slices sent again; lanes and rails taken out while their peer lives
  uint64_t mover_queue = 0, callback_queue = 0;  // tasks that wait
  std::vector<LaneStats> lanes;
  std::map<std::string, uint64_t> bytes_sent, bytes_received;  // by transport; payload only
  uint64_t regions = 0, quarantined_regions = 0, sessions = 0;
};

class TM_API Engine : public std::enable_shared_from_this<Engine> {
 public:
  static Result<std::shared_ptr<Engine>> create(EngineOptions options);
  virtual ~Engine() = default;  // closes

  virtual const std::vector<std::string>& addresses() const = 0;  // dialable
  virtual const Id128& id() const = 0;

  virtual Result<RegionPtr> register_memory(void* data, uint64_t nbytes, RegionOptions options) = 0;
  // Part of a shared segment: same-host peers map it instead of asking for copies. It may reach up to the segment's
  // capacity, before that has grown so far: whoever hands out slices of it keeps them within size().
  virtual Result<RegionPtr> register_segment(const std::shared_ptr<Segment>& segment, uint64_t offset, uint64_t nbytes,
                                             RegionOptions options) = 0;
  // A live region that covers those bytes, the innermost and newest first; null if none does. O(log n).
  virtual RegionPtr region_at(const void* address, uint64_t nbytes) const = 0;
  // region_at() finds it no more (its memory may belong to somebody else now). Otherwise it lives on.
  virtual void forget_address(const RegionPtr& region) = 0;
  // A file as a region: peers read and write it through this engine. Errors: those of opening it (file/file.h).
  virtual Result<RegionPtr> register_file(FileOptions file, RegionOptions options) = 0;
  // Memory of a CUDA device, as torch or anybody else allocated it. The first call opens libcuda. Errors: unsupported
  // (no CUDA here), invalid_argument (not memory of one device).
  virtual Result<RegionPtr> register_cuda(void* data, uint64_t nbytes, RegionOptions options) = 0;
  // No new access from now on; returns when no byte can land or be read any more, else `busy` naming the peer.
  virtual Status deregister(const RegionPtr& region, Deadline deadline) = 0;

  virtual Result<PeerPtr> connect(const std::string& address, Deadline deadline) = 0;
  // This engine as a peer of itself, to read and write its own files and devices as those of any other.
  virtual Result<PeerPtr> self_peer(Deadline deadline) = 0;
  virtual PeerPtr peer_of(const rpc::SessionPtr& session) = 0;  // a session somebody dialled to us works both ways

  // What carries ordinary memory (in no shared segment) to and from that peer: "local" "process_vm" "unix" "tcp", or ""
  // if nothing allowed does. RemoteRegion::transport() and Op::transport() have the truth about one region, one op.
  virtual std::string transport_for(const PeerPtr& peer) const = 0;
  // Which path carries what to and from that peer, and why not a better one.
  virtual PeerExplanation explain(const PeerPtr& peer) const = 0;

  // Slices of several peers make one op with one outcome: the first failure stops the rest. All or nothing is not
  // promised for the bytes, only for the outcome. An empty list is done at once (the notification is still delivered).
  virtual Result<OpPtr> transfer(Direction direction, std::vector<Batch> batches, OpOptions options) = 0;
  // The same for little that this process can copy by itself: it is over on return, nothing is waited for. Null if the
  // list is not of that kind, has a notification or a callback, or cannot be carried out: transfer() then says why.
  virtual OpPtr transfer_now(Direction direction, const Batch& batch, const OpOptions& options) = 0;
  Result<OpPtr> write(std::vector<Slice> slices, OpOptions options);
  Result<OpPtr> read(std::vector<Slice> slices, OpOptions options);

  virtual Result<Notification> next_notification(Deadline deadline) = 0;
  // Calls watcher->op_ended(tag) when a notification arrives or the engine is closed, once. False: next_notification()
  // has something to say already.
  virtual bool watch_notifications(std::shared_ptr<OpWatcher> watcher, uint64_t tag) = 0;
  // Instead of the queue: called on the callback thread for each notification.
  virtual void on_notification(std::function<void(Notification)> fn) = 0;

  virtual rpc::Endpoint& rpc() = 0;  // to register methods (before listening: use EngineOptions.listen = {} and
                                     // listen() below)
  virtual Result<std::string> listen(const std::string& address) = 0;
  virtual EngineStats stats() const = 0;
  virtual void close() = 0;
};
using EnginePtr = std::shared_ptr<Engine>;

// What carries file I/O in this process: "io_uring", "threads (io_uring_setup: Operation not permitted)".
TM_API std::string file_io_choice();

}  // namespace torch_mooncake
