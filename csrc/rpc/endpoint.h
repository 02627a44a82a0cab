// Endpoint: the sockets and I/O threads of one engine. Listens, connects, authenticates, keeps sessions.
//
// Handshake (before it: frames of at most 512 bytes, 2 s, at most 64 connections, never in the way of
// authenticated ones): both sides send a nonce and prove knowledge of the token by HMAC-SHA256 over both nonces, roles,
// engine ids, protocol versions and the address dialled; extra lanes prove the session key derived from them. Over a
// Unix socket the peer's uid (SO_PEERCRED) must be ours or listed, and the token is still proven if set. Garbage, an
// HTTP request or a TLS hello closes that connection, is logged once, and disturbs nobody. Versions that do not match
// give version_mismatch on both sides with both numbers. Two sides that connect to each other at once keep both
// sessions: sessions are cheap.
//
// Dead peers: EOF or RST at once (same host: SIGKILL is EOF); a silent one by heartbeats on lane 0 (period and limit
// below), independent of the user's threads.
//
// fork: every fd is close-on-exec; in a forked child all calls return `forked` and nothing is touched.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/api.h"
#include "rpc/session.h"

namespace torch_mooncake::rpc {

inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr size_t kMaxBody = size_t{16} << 20;
inline constexpr size_t kMaxBodyBeforeAuth = 512;

struct EndpointOptions {
  std::string name = "engine";
  std::string role = "engine";
  std::string token;                   // empty: only Unix sockets and loopback TCP may be bound
  std::string host_id;                 // empty: the boot id
  std::vector<uint32_t> allowed_uids;  // besides our own, on Unix sockets
  int io_threads = 2;                  // 1..4
  int heartbeat_ms = 500;              // period; 0 turns it off
  int heartbeat_limit_ms = 5000;       // silence after which a session is peer_lost
  // The first TCP listener also opens an abstract Unix socket, told to peers in Identity, that proves "same host"; the
  // first beyond loopback a socket file in this folder too (if one is given), for peers in other network namespaces.
  bool same_host_listener = true;
  std::string socket_dir{};
};

// A call has arrived. `session` stays valid for the call. inline_io handlers run on the I/O thread and must not block;
// worker handlers run on the endpoint's single worker thread, in order.
using Handler = std::function<void(const SessionPtr& session, Message request, Responder responder)>;
enum class RunOn { inline_io, worker };

class TM_API Endpoint {
 public:
  static Result<std::unique_ptr<Endpoint>> create(EndpointOptions options);
  virtual ~Endpoint() = default;  // closes
  virtual const Identity& self() const = 0;

  // "tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://0.0.0.0:7400" (needs a token), "unix:///path", "unix://@abstract".
  // Returns the address others can dial, with the port filled in.
  virtual Result<std::string> listen(const std::string& address) = 0;
  // Takes over a listening socket that somebody else bound (the node's keeper).
  virtual Status listen_fd(UniqueFd fd, const std::string& address) = 0;
  // A new session (or, with reuse, the live one we already dialled to this address). "host:port" means tcp. If the
  // peer's host id is ours, a Unix lane is tried too, and session.same_host() tells the outcome; failing that is no
  // error. Unknown scheme: unsupported, naming it.
  virtual Result<SessionPtr> connect(const std::string& address, Deadline deadline, bool reuse = true) = 0;

  // These three: before listen/connect; later they have no effect and log an error. Methods: 1-99 rpc itself, 100-199
  // transfer, 200-299 pool, 300-399 collectives, 400+ users.
  virtual void handle(uint16_t method, RunOn where, Handler handler) = 0;
  virtual void set_bulk_handler(BulkHandler* handler) = 0;  // outlives the endpoint
  // Every new session, dialled (in connect's thread) or accepted (on an I/O thread), before any message of it is
  // handled.
  virtual void on_session(std::function<void(const SessionPtr&)> fn) = 0;

  // Runs fn once at about `when` on an I/O thread (deadlines, retries). Returns an id for cancel_timer.
  virtual uint64_t add_timer(Deadline when, std::function<void()> fn) = 0;
  virtual void cancel_timer(uint64_t id) = 0;  // does not wait for a running fn

  virtual std::vector<SessionPtr> sessions() const = 0;
  // Ends all sessions and threads; everything pending fails with `closed`. Idempotent. Returns within ~2 s, unless a
  // worker handler runs longer: it is waited for. From a callback it returns at once and the threads end after it.
  virtual void close() = 0;
};

}  // namespace torch_mooncake::rpc
