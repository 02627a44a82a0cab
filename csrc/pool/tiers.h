// What a donor knows of objects that are, or are about to be, on an SSD. See donor_tiers.cpp.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "pool/donor.h"
#include "pool/ssd/store.h"

namespace torch_mooncake::pool {

class DonorImpl;

struct DiskSpot {
  size_t store = 0;
  ssd::Spot spot;
  bool operator==(const DiskSpot&) const = default;
};

// One object part. Its name is what the home knows: of the extent it was first put into, or made up for what was found
// on a disk under other memory. There is one for each part that has bytes on a disk, may have, or is a promoted copy.
struct Tiered {
  ssd::Record record;            // without label and metadata: they are with the bytes
  std::optional<DiskSpot> at;    // whole, to be read there
  std::vector<DiskSpot> spots;   // all that the next start may find: to be marked before it is said to be gone
  std::optional<uint32_t> dram;  // the extent that has the bytes
  bool writing = false, reading = false;
  uint32_t hits = 0;                 // since it was written
  std::vector<Donor::Done> waiters;  // for the bytes to be in memory
  ExtentRef name() const { return record.name; }
};

// Written ahead of need and set aside: its memory can be had at once, if it has not been used since.
struct CleanExtent {
  uint32_t index = 0;
  uint64_t generation = 0, last_use = 0;
};

struct WaitingPromotion {  // its bytes have been read, there was no room for them
  uint64_t generation = 0;
  std::shared_ptr<ssd::Loaded> loaded;
  int64_t until_ns = 0;
};

Id128 this_boot();
// What a promoted extent is known by: its record has it for a transaction.
TxnId txn_of(ExtentRef name);
ExtentRef name_of(const TxnId& txn);

// The donor's side of one store.
struct StoreOwner final : ssd::Owner {
  StoreOwner(DonorImpl& donor, size_t number) : donor(donor), number(number) {}
  DonorImpl& donor;
  const size_t number;
  uint64_t path_hash = 0;
  uint64_t demoting_bytes = 0;  // of memory that is free when it has been written
  std::unique_ptr<ssd::Store> store;
  std::optional<ssd::Spot> worth_moving(uint64_t id, uint64_t segment) override;
  void moving(uint64_t id, const ssd::Spot& from, const ssd::Spot& to) override;
  void moved(uint64_t id, const ssd::Spot& to, const Status& status) override;
  void destroyed(uint64_t segment, const std::vector<uint64_t>& ids) override;
  void out_of_service() override;
};

}  // namespace torch_mooncake::pool
