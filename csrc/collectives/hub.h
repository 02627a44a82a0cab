// Hub: what all groups of one process share: a transfer engine, its links to other ranks' engines, one progress thread.
// 128 groups cost 128 mailboxes, not 128 engines.
//
// Ownership: groups hold the hub; the registry holds it as long as a group is in it. When the last group leaves, the
// hub closes (engine, sessions, threads). Threads: every method is safe from any thread that is not an I/O thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "collectives/messages.h"
#include "collectives/request.h"
#include "common/api.h"
#include "common/fd.h"
#include "transfer/engine.h"

namespace torch_mooncake::coll {

class Group;
class Seats;

// What one rank publishes so that the others can reach it.
struct TM_API Member {
  Id128 engine{};
  std::string host_id;
  std::vector<std::string> addresses;
  std::string encode() const;
  static Result<Member> decode(std::string_view bytes);
};

struct HubOptions {
  std::string token;               // shared by all ranks; proven by both sides of every connection
  std::string host = "127.0.0.1";  // address to listen on
  std::string host_id;             // empty: the boot id
  std::string name = "rank";
  std::vector<std::string> transports = {"local", "shm", "tcp"};
  std::vector<std::string> nics{};  // see EngineOptions
  std::string rdma{};
  int heartbeat_ms = 500;         // period, on a native thread
  int heartbeat_limit_ms = 5000;  // silence after which a rank is lost, also one that does not answer at first contact
};

// Messages up to this size travel inside a control message, while the receiver has room for them.
inline constexpr uint64_t kEagerBytes = 32 << 10;
// Eager bytes that one process may have on the way to, or unread in, another. Beyond, messages wait at the sender.
inline constexpr int64_t kEagerWindow = 4 << 20;

// The relation to one other engine.
struct Link {
  explicit Link(const Id128& id) : engine(id) {}
  const Id128 engine;
  std::atomic<int64_t> credit{kEagerWindow};  // what we may still send eagerly
  std::atomic<int64_t> owed{0};               // what we have consumed and not yet told
  std::mutex mutex;
  std::condition_variable dialled;
  bool dialling = false;
  rpc::SessionPtr session;  // all our messages take this one, so that they stay in order
  Status gone;              // why it ended

  // Messages are posted without the lock: a write that fails may report the session's end on this thread.
  rpc::SessionPtr current() {
    std::lock_guard lock(mutex);
    return session;
  }
};
using LinkPtr = std::shared_ptr<Link>;

class TM_API Hub : public std::enable_shared_from_this<Hub> {
 public:
  // The hub of this process that uses `options.token`, made if there is none. It stays until its last group has left;
  // the caller follows up with Group::join() or release().
  static Result<std::shared_ptr<Hub>> acquire(const HubOptions& options);
  // A hub of its own, in no registry (several ranks in one process, as tests have them).
  static Result<std::shared_ptr<Hub>> create(const HubOptions& options);
  // The token of a hub that is open, or "".
  static std::string current_token();
  // Leaves all groups of all hubs: for the end of the process, so that others do not take it for a crash.
  static void leave_all(Deadline deadline);
  ~Hub();

  const Member& self() const { return self_; }
  const std::string& token() const { return token_; }
  Engine& engine() { return *engine_; }
  const std::shared_ptr<Progress>& progress() { return progress_; }

  // The live link to a member, dialled if need be, which takes no longer than silence is borne. peer_lost: it has ended
  // before, or there is no answer.
  Result<LinkPtr> link(const Member& member, Deadline deadline);
  // Links that exist to these engines.
  std::vector<LinkPtr> links(const std::vector<Id128>& engines);

  // Messages that came before the group did are delivered inside.
  Status add(const std::shared_ptr<Group>& group);
  void remove(const Id128& group);  // closes the hub if it was the last
  void hold();                      // as acquire(), for a further group
  void release();                   // acquire() or hold() without a group to follow
  void add(const std::shared_ptr<Seats>& seats);
  void remove_seats(const Id128& id);
  // `nbytes` of eager payload from the session's peer are no longer held.
  void consumed(const rpc::SessionPtr& session, uint64_t nbytes);

 private:
  explicit Hub(const HubOptions& options);
  Status start(const HubOptions& options);
  void close();
  void close_if_unused();
  // false: it is for a group that this process has left.
  bool on_message(uint16_t method, const rpc::SessionPtr& session, rpc::Message message);
  void deliver(Group& group, uint16_t method, const rpc::SessionPtr& session, std::string body,
               std::vector<UniqueFd> fds);
  LinkPtr link_of(const Id128& engine);
  void attach(const LinkPtr& link, const rpc::SessionPtr& session);
  void session_closed(const LinkPtr& link, const Status& why);
  std::vector<std::shared_ptr<Group>> groups();
  struct Registry;
  static Registry& registry();

  struct Early {
    uint16_t method;
    rpc::SessionPtr session;
    std::string body;
    std::vector<UniqueFd> fds;
  };
  const std::string token_;
  const int heartbeat_limit_ms_;
  Member self_;
  EnginePtr engine_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
  // Taken before a group's or a link's, never while holding one. Recursive: early messages are delivered inside add(),
  // and a group that hears of a loss there asks for links.
  std::recursive_mutex mutex_;
  std::map<Id128, LinkPtr> links_;
  std::map<Id128, std::shared_ptr<Group>> groups_;
  std::map<Id128, std::weak_ptr<Seats>> seats_;
  std::map<Id128, std::deque<Early>> early_;  // for groups not here yet
  uint64_t early_bytes_ = 0;
  std::set<Id128> past_;  // groups that were here
  int holds_ = 0;         // acquired, group not here yet
  const int pid_;
  bool closed_ = false;
};
using HubPtr = std::shared_ptr<Hub>;

}  // namespace torch_mooncake::coll
