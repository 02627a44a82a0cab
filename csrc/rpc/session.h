// Session: an authenticated relation of two engines (processes), made of one or more lanes (connections).
//
// A session carries (1) control messages: calls with one answer each, and one-way posts, ordered per session;
// (2) bulk frames: a small body followed by payload bytes that go straight from and to user memory. Control messages
// ride the first lane and overtake queued bulk frames there. Small control messages are written on the caller's
// thread when the socket takes them.
//
// A TCP session of two processes on one host gets a Unix connection too (see Endpoint::connect), which then is lane 0
// and carries control; the TCP connection is lane 1.
//
// Ownership: sessions are shared_ptrs; the Endpoint holds one until the session is over. Threads: every method is safe
// from any thread. Callbacks run on the endpoint's I/O threads and must not block, unless said otherwise. After the end
// of a session (EOF, error, close, the peer's death) every pending call fails with peer_lost (or closed), once; then
// its lanes die; after the last of them, when no frame is being received or sent any more, on_close callbacks run,
// once. Calls made later fail at once. Control messages that the kernel has not taken when a session ends are dropped.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/api.h"
#include "common/bytes.h"
#include "common/clock.h"
#include "common/fd.h"
#include "common/status.h"

namespace torch_mooncake::rpc {

// Who somebody is. Sent after authentication.
struct TM_API Identity {
  Id128 engine{};                      // random per Endpoint: an incarnation, never reused
  std::string host_id;                 // setting, or the boot id; equal host ids are a hint, a Unix lane is the proof
  std::string name;                    // for people: "node", "client", "rank3"
  std::string role;                    // what handlers may check: "node", "client", "engine"
  uint32_t pid = 0;                    // as the peer sees itself
  uint64_t nonce_address = 0;          // address of a 16-byte random value in the peer's memory, and the value itself:
  Id128 nonce{};                       //   lets process_vm_readv prove that a pid is this peer
  std::vector<std::string> addresses;  // where it listens: "tcp://…", "unix://…" ("unix://@name" is abstract)
  void encode(ByteWriter& out) const;
  static Identity decode(ByteReader& in);
};

struct Message {
  std::string body;
  std::vector<UniqueFd> fds;  // only over a Unix lane
};

using CallDone = std::function<void(Result<Message>)>;

// The answer to one call. Movable; answers once, from any thread; dropped unanswered it answers `internal`.
class TM_API Responder {
 public:
  struct State;
  Responder() = default;
  explicit Responder(std::shared_ptr<State> state);
  Responder(Responder&&) noexcept;
  Responder& operator=(Responder&&) noexcept;
  ~Responder();
  void ok(std::string body = {}, std::vector<UniqueFd> fds = {});
  void fail(const Status& status);  // arrives at the caller as the same code, message and retryability

 private:
  std::shared_ptr<State> state_;
};

class Lane;

// Where the payload of one arriving bulk frame goes. Lives until finish() returns.
class TM_API BulkReceive {
 public:
  virtual ~BulkReceive() = default;
  // Where payload byte `offset` and the following go now: fills in pieces, none of them empty, of together at most
  // `wanted` bytes, and returns their number. Called before every recv, so this is where grants are re-checked. 0 sends
  // the rest of the payload to a sink (and is asked no more).
  virtual size_t windows(uint64_t offset, uint64_t wanted, std::span<iovec> pieces) = 0;
  // The first `nbytes` of the last windows were placed; 0 if the recv brought none. Between windows() and this call the
  // pieces may be written, and only then.
  virtual void filled(uint64_t nbytes) = 0;
  // Some of the last windows is not mapped in this process; filled(0) came before. The rest of the payload goes to a
  // sink, finish() follows.
  virtual void unmapped(const Status& why) = 0;
  // The frame is over: ok, or the lane died inside it. Nothing writes to the windows any more.
  virtual void finish(const Status& status) = 0;
};

class TM_API BulkHandler {
 public:
  virtual ~BulkHandler() = default;
  // A bulk frame's header and body have arrived. Returning null sinks the payload.
  virtual std::unique_ptr<BulkReceive> begin(Lane& lane, std::string_view body, uint64_t payload_bytes) = 0;
};

// What waits behind what on a lane: control messages go first, then the foreground; the background gets at least one
// frame in nine.
enum class Priority : uint8_t { foreground = 0, background = 1 };

// One outgoing bulk frame. `payload` must stay valid until `sent` is called (always, once: ok when the kernel has the
// last byte and reads it no more, else why not; the lane then touches the payload no more). invalid_argument: some of
// the payload is not mapped in this process, so that no lane can send it. `keep` is dropped after that.
struct BulkFrame {
  std::string body;
  std::vector<iovec> payload;
  std::function<void(const Status&)> sent;
  std::shared_ptr<void> keep;
  Priority priority = Priority::foreground;
  // The kernel has the last byte, but reads it from `payload` until `sent` comes, a round trip later perhaps: it is
  // time for the next frame. Not called where `sent` comes at once, or where the lane dies first.
  std::function<void()> taken{};
};

// A rail is a pair of a local and a remote NIC, told by the addresses of a connection's two ends without their ports:
// "10.0.0.1", "fe80::1%eth0". Both are empty for a Unix socket. The two sides see one rail with its ends exchanged.
struct Rail {
  std::string local, remote;
  auto operator<=>(const Rail&) const = default;
};

// Where a further lane shall run. Empty fields: as the session was dialled, and as the kernel's routes choose.
struct LaneTarget {
  std::string address{};  // one of peer().addresses, with its port
  std::string from{};     // local host to bind to: which of our NICs' addresses
  std::string device{};   // local NIC to bind to by name (needs no privilege since Linux 5.7)
};

// What a lane's peer has taken so far.
struct LaneProgress {
  uint64_t waiting = 0;       // bytes queued here, and in the kernel without the peer's acknowledgement
  uint64_t acknowledged = 0;  // bytes ever acknowledged; a lane with bytes waiting where this stands still is stuck
  // TCP only. What the peer's kernel does, however slow its process is:
  bool in_flight = false;  // bytes are on the wire that it has not acknowledged
  uint32_t timeouts = 0;   // how often they (or the probe of a closed window) were sent again without an answer
  uint32_t rtt_us = 0;
};

class Session;

// One connection of a session, owned by one I/O thread.
class TM_API Lane {
 public:
  virtual ~Lane() = default;
  virtual Session& session() = 0;
  virtual uint32_t index() const = 0;  // 0 is the control lane; equal on both sides
  virtual bool is_unix() const = 0;
  virtual std::string describe() const = 0;  // "tcp 127.0.0.1:4000 -> 127.0.0.1:5000"
  virtual bool alive() const = 0;
  // Queue a bulk frame behind those of its priority queued before. Fails (and does not call `sent`) only if the lane is
  // dead.
  virtual Status send_bulk(BulkFrame frame) = 0;
  virtual uint64_t queued_bytes() const = 0;  // not yet given to the kernel
  virtual uint64_t bytes_sent() const = 0;
  virtual uint64_t bytes_received() const = 0;
  virtual const Rail& rail() const = 0;
  virtual LaneProgress progress() const = 0;  // asks the kernel
  virtual int64_t silent_ns() const = 0;      // since anything came
  // What the connection was tuned to, for people: {"congestion control", "reno"}, {"round trip", "0.05 ms"} …
  virtual std::vector<std::pair<std::string, std::string>> tuning() const = 0;
  // Shut the connection down (tests; a stuck lane). Both sides see it die; the session lives on while lane 0 does.
  virtual void kill(const Status& why) = 0;
};

class TM_API Session : public std::enable_shared_from_this<Session> {
 public:
  virtual ~Session() = default;
  virtual const Identity& peer() const = 0;
  virtual const Identity& self() const = 0;
  virtual bool is_initiator() const = 0;  // we connected
  virtual bool alive() const = 0;
  virtual Status status() const = 0;  // ok while alive, else why it ended

  // Proven same host: a lane runs over a Unix socket and the host ids are equal.
  virtual bool same_host() const = 0;
  // The peer's pid in our pid namespace by SO_PEERCRED, 0 if not same_host().
  virtual int peer_pid() const = 0;
  // A pidfd of the peer's process, which tells its death, also when it lives in another pid namespace (Linux 6.5). Of a
  // listener that was handed over (listen_fd) it may be the process that made it.
  // One for all who ask. Null if not same_host(), or if the kernel gives none.
  virtual std::shared_ptr<const UniqueFd> peer_process() const = 0;

  // Control messages. At most 16 MiB of body. `call` answers by `done` (I/O thread), also with deadline_exceeded.
  // `awaited`: somebody waits for it by receive_until(), and may well have another request then; the peer looks out for
  // that one for a while.
  virtual void call(uint16_t method, std::string body, Deadline deadline, CallDone done, std::vector<UniqueFd> fds = {},
                    bool awaited = false) = 0;
  // The same, waiting on this thread: spins at most 50 µs, then sleeps. Not from an I/O thread. `late`: gets an answer
  // that comes after the deadline (I/O thread), to give back what it grants.
  virtual Result<Message> call_sync(uint16_t method, std::string body, Deadline deadline,
                                    std::vector<UniqueFd> fds = {}, std::function<void(Message)> late = nullptr) = 0;
  virtual Status post(uint16_t method, std::string body) = 0;
  // Receives on the control lane with this thread, and handles what comes there, until done() is true: an answer then
  // costs no wake-up of an I/O thread. Spins until `spin_until_ns` (steady clock, at most 50 µs from the beginning of
  // the caller's wait, which may spin before and after this too), sleeps 1 ms, and gives up by itself; so at the
  // deadline, and at once if another thread is receiving; then wait as usual. Returns done().
  virtual bool receive_until(const std::function<bool()>& done, Deadline deadline, int64_t spin_until_ns) = 0;
  virtual bool over_unix() const = 0;  // lane 0 runs over a Unix socket, and with it those that open_lanes() makes

  // Bulk lanes. `lanes()` are those alive now. `open_lanes(n)`: have at least n (initiator only; the other side sees
  // them appear). A dead lane is not reopened by itself.
  virtual std::vector<std::shared_ptr<Lane>> lanes() const = 0;
  virtual Status open_lanes(int n, Deadline deadline) = 0;
  // One more lane, on a rail of the caller's choice (initiator only). It proves the session key like every lane, so a
  // target that is another process (or the same one restarted) refuses it.
  virtual Result<std::shared_ptr<Lane>> open_lane(const LaneTarget& target, Deadline deadline) = 0;

  virtual void on_close(std::function<void(const Status&)> fn) = 0;  // runs at once (here) if already over
  virtual void on_lane_close(std::function<void(Lane&, const Status&)> fn) = 0;
  virtual void close(const Status& why) = 0;  // returns at once

  // Any one object may hang its per-session state here (transfer, pool: one slot each; see Slot). Kept as long as the
  // Session: hold the session weakly in it.
  enum Slot : int { kTransferSlot = 0, kPoolSlot = 1, kCollectivesSlot = 2, kSlots = 3 };
  virtual void set_state(Slot slot, std::shared_ptr<void> state) = 0;
  virtual std::shared_ptr<void> state(Slot slot) const = 0;
};
using SessionPtr = std::shared_ptr<Session>;

}  // namespace torch_mooncake::rpc
