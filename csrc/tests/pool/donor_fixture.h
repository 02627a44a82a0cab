// Shared by the donor's tests: short ways to reserve and commit, and a second donor on the same memory.
#pragma once

#include <doctest/doctest.h>
#include <unistd.h>

#include <string>

#include "common/random.h"
#include "pool/donor.h"

namespace torch_mooncake::pool {

inline constexpr uint64_t MiB = 1 << 20;

inline std::unique_ptr<Donor> make_donor(uint64_t limit, uint32_t max_extents = 1 << 16) {
  auto donor = Donor::create({limit, MiB, max_extents});
  REQUIRE_MESSAGE(donor.is_ok(), donor.status().to_string());
  return std::move(donor).value();
}

// What the next worker does: adopt copies of the fds.
inline std::vector<HeldSegment> adopt_held(const std::vector<HeldSegment>& held) {
  std::vector<HeldSegment> out;
  for (const HeldSegment& h : held) {
    auto segment = Segment::adopt(UniqueFd(::dup(h.segment->fd())), h.segment->id());
    REQUIRE(segment.is_ok());
    out.push_back({h.role, h.tag, *segment});
  }
  return out;
}

inline Result<std::unique_ptr<Donor>> attach_donor(const std::vector<HeldSegment>& held) {
  return Donor::attach({0, MiB, 1 << 16}, adopt_held(held));
}

inline Result<Reservation> try_reserve(Donor& donor, const std::string& key, uint64_t nbytes, SessionId writer = 0,
                                       TxnId txn = random_id()) {
  ReserveRequest request;
  request.txn = txn;
  request.key = key;
  request.nbytes = nbytes;
  request.writer = writer;
  request.meta = "meta of " + key;
  request.label = "label";
  return donor.reserve(request);
}

inline Reservation reserve(Donor& donor, const std::string& key, uint64_t nbytes, SessionId writer = 0,
                           TxnId txn = random_id()) {
  auto r = try_reserve(donor, key, nbytes, writer, txn);
  REQUIRE_MESSAGE(r.is_ok(), r.status().to_string());
  return std::move(r).value();
}

inline ExtentRef put(Donor& donor, const std::string& key, uint64_t nbytes, Version version = {1, 1}) {
  const Reservation r = reserve(donor, key, nbytes);
  REQUIRE(donor.commit(r.extent, version, 7u).is_ok());
  return r.extent;
}

inline void check(const Donor& donor) {
  if (Status s = donor.check(); !s) FAIL(s.to_string());
}

}  // namespace torch_mooncake::pool
