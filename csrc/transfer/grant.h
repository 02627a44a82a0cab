// Grants: the leave that one peer has to read or write regions of ours. Indices in its session, no secrets.
//
// Where our CPU moves the bytes (TCP, Unix sockets, a pull), window() is asked for every piece, so that a region being
// deregistered takes no more bytes. A *mapped* grant (a shared segment in the peer's address space) cannot be taken
// back by us alone: it counts as a use of the region until the peer releases it, or dies as the kernel shows it (a
// pidfd), never until a timeout.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/fd.h"
#include "transfer/region_table.h"
#include "transfer/transport.h"

namespace torch_mooncake::transfer {

// A piece of a region as the wire names it.
struct Piece {
  uint32_t grant;
  uint64_t offset;
  uint64_t nbytes;
};

// Leave to touch one piece now; give it back by release().
struct Window {
  RegionImplPtr region;
  std::byte* data = nullptr;
};

class PeerImpl;

// A mapped grant that outlived its session (held_grants.h).
struct HeldGrant {
  RegionImplPtr region;
  // pidfd, shared by all grants of a session; null if the kernel gives none (another pid namespace before Linux 6.5)
  std::shared_ptr<const UniqueFd> process;
  std::shared_ptr<PeerImpl> peer{};
};

// Bounds and rights of a piece in its region (null: there is none). Errors as GrantTable::check.
Status check_piece(const RegionImplPtr& region, const Piece& piece, Direction direction, bool host = true);

class GrantTable {
 public:
  // `user` is blamed in `busy`; outlives the table's grants.
  explicit GrantTable(const std::string& user) : user_(user) {}

  uint32_t add(RegionImplPtr region);
  // The region of a grant; null if there is no such grant.
  RegionImplPtr find(uint32_t grant) const;
  // The peer is about to map the region's segment. False if the region is being deregistered, or there is no grant.
  bool mark_mapped(uint32_t grant, std::shared_ptr<const UniqueFd> process);
  // It has not mapped it after all; the grant stays.
  void unmark_mapped(uint32_t grant);
  // The peer dropped the grant, or answered a revoke: nothing of it is touched any more.
  void remove(uint32_t grant);
  void remove_all();
  // Mapped grants on this region, to be called back.
  std::vector<uint32_t> mapped_on(const RegionImpl& region) const;
  // The session is over: forget all; the mapped ones are returned, still counted as uses.
  std::vector<HeldGrant> take_held();

  // The region of a piece after check(), to be entered by its usage(): for many pieces of one grant.
  Result<RegionImplPtr> resolve(const Piece& piece, Direction direction) const;
  // Errors: key_not_found (no grant, or the region is gone), invalid_argument (no such right), out_of_bounds.
  // `host`: the region must be host memory, because its bytes are touched where Window::data says.
  Status check(const Piece& piece, Direction direction, bool host = true) const;
  Result<Window> window(const Piece& piece, Direction direction, bool host = true) const;
  void release(Window& window) const { window.region->usage().release(user_); }

 private:
  struct Grant {
    RegionImplPtr region;
    bool mapped = false;
    std::shared_ptr<const UniqueFd> process;
  };
  const std::string& user_;
  mutable std::mutex mutex_;
  uint32_t next_ = 1;
  std::unordered_map<uint32_t, Grant> grants_;
};

}  // namespace torch_mooncake::transfer
