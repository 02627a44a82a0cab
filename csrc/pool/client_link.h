// Link: a client's relation to one node: the session, and how the node's memory is reached: through maps of it (same
// host) or through the engine.
//
// Ownership: shared; objects handed out as maps hold their link, so that pins, maps and the session live as long as
// they do. The last reference detaches. Threads: safe from any.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pool/client.h"
#include "pool/client_grants.h"
#include "pool/messages.h"
#include "pool/pin_slots.h"
#include "transfer/engine.h"

namespace torch_mooncake::pool {

// A call under way, or (`finished`) one that could not be made. If nobody waits for it, its answer is dropped.
class PendingCall {
 public:
  static PendingCall start(const rpc::SessionPtr& session, Method method, std::string body, Deadline deadline);
  bool started() const { return state_ != nullptr; }
  Result<rpc::Message> wait();  // ends by the deadline that the call was made with

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable cv;
    std::atomic<bool> ready{false};
    std::optional<Result<rpc::Message>> result;
  };
  rpc::SessionPtr session_;
  std::shared_ptr<State> state_;
  Deadline deadline_ = Deadline::never();
};

// Bytes for an extent: laid end to end they fill its pieces.
struct ExtentWrite {
  const std::vector<Piece>* pieces = nullptr;
  std::span<const iovec> data;
};

struct LinkOptions {
  EnginePtr engine;
  std::string name, host_id;
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Connects and attaches; if the node is on this host, over its Unix socket and with maps.
  static Result<std::shared_ptr<Link>> open(const LinkOptions& options, const std::string& address, Deadline deadline);
  ~Link();

  const NodeId& node() const { return attach_.node; }
  const View& first_view() const { return attach_.view; }
  SessionId session_id() const { return attach_.session; }
  bool alive() const { return session_->alive(); }
  bool mapped() const { return attach_.mapped; }
  // Mapped, and its node was counted among the pool's less than `ttl_ns` ago: what it holds nobody else was given.
  // Asked after a generation word was read, it says that that extent was its key's current version.
  bool counted(int64_t ttl_ns) const;
  // A use of an extent that was found without asking. Told in batches; what is not told within 100 ms waits for the
  // next use.
  void touch(ExtentRef extent);
  // What touch() has kept back, now: before what must come after it.
  void tell_touches();
  const std::string& host_id() const { return session_->peer().host_id; }
  const EnginePtr& engine() const { return engine_; }

  // A call with its answer decoded.
  template <typename Answer, typename Request>
  Result<Answer> call(Method method, const Request& request, Deadline deadline) {
    auto reply = session_->call_sync(method, encode(request), deadline);
    if (!reply.is_ok()) return reply.status();
    return decode<Answer>(reply->body);
  }
  Status call_empty(Method method, std::string body, Deadline deadline) {
    return session_->call_sync(method, std::move(body), deadline).status();
  }
  PendingCall start_call(Method method, std::string body, Deadline deadline) {
    return PendingCall::start(session_, method, std::move(body), deadline);
  }
  Grants& grants() { return *grants_; }
  // Waits for nothing. If it does not arrive the session is over, which gives back everything.
  void give_back(std::vector<ExtentRef> extents);
  // The same of what may have been reserved for these transactions without our having been told where.
  void abandon(const TxnId& first, uint32_t n);

  // Copies user memory to extents' pieces. Mapped: by this thread and the copy pool. Remote: one engine op;
  // `quiescent` tells whether no byte of it can land remotely any more.
  Status write(std::span<const ExtentWrite> writes, Deadline deadline, bool* quiescent);
  // These ranges of the extent, validated after the data: key_not_found if superseded. They lie in `memory`, and come
  // in its order if it is more than one piece.
  Status read(ExtentRef extent, const std::vector<Piece>& pieces, std::span<const ReadRange> ranges,
              std::span<const iovec> memory, Deadline deadline);

  // One range of a small extent of a mapped node, by this thread alone, without a pin: the bytes first, then the word.
  Status read_small(ExtentRef extent, const std::vector<Piece>& pieces, const ReadRange& range);

  // Mapped only.
  PinPage& pins() { return *pins_; }
  const std::byte* read_only(const Piece& piece) const { return read_maps_[piece.segment]->data + piece.offset; }
  const MappingPtr& read_map(uint32_t segment) const { return read_maps_[segment]; }
  const std::shared_ptr<Segment>& segment(uint32_t index) const { return segments_[index + 1]; }
  // Room in the budget of maps (half of the memory, 8192 maps)? Returned by release_map().
  bool take_map(uint64_t nbytes);
  void release_map(uint64_t nbytes);
  uint64_t maps() const { return maps_; }
  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  struct Run {  // one contiguous stretch of a transfer
    uint32_t segment;
    uint64_t offset;
    std::byte* memory;
    uint64_t nbytes;
  };
  Link() = default;
  Status adopt(std::vector<UniqueFd> fds);
  Status open_regions(Deadline deadline);
  bool in_bounds(const std::vector<Piece>& pieces) const;
  Status add_runs(const std::vector<Piece>& pieces, std::span<const ReadRange> ranges, std::vector<Run>* out) const;
  Result<OpPtr> start(bool write, const std::vector<Run>& runs, std::span<const iovec> memory, Deadline deadline,
                      std::vector<RegionPtr>* registered);

  EnginePtr engine_;
  PeerPtr peer_;
  rpc::SessionPtr session_;
  AttachAnswer attach_;
  std::vector<std::shared_ptr<Segment>> segments_;  // table first
  std::vector<MappingPtr> read_maps_, write_maps_;  // of the data segments
  std::shared_ptr<PinPage> pins_;
  std::vector<RemoteRegionPtr> regions_;  // table first
  bool same_clock_ = false;
  std::shared_ptr<Grants> grants_;
  std::mutex touch_mutex_;
  std::vector<ExtentRef> touched_;
  int64_t touched_since_ns_ = 0;
  std::atomic<uint64_t> maps_{0}, mapped_bytes_{0};
  uint64_t capacity_bytes_ = 0;
};
using LinkPtr = std::shared_ptr<Link>;

inline constexpr uint64_t kMaxMaps = 8192;

}  // namespace torch_mooncake::pool
