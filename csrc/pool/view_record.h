// What a leader remembers of its last view over a restart of its worker: it lies in the header page of its donor's
// table segment, which the keeper holds. Two copies, written in turn, each with a checksum: a crash leaves one whole.
#pragma once

#include <vector>

#include "memory/segment.h"
#include "pool/types.h"

namespace torch_mooncake::pool {

struct ViewRecord {
  uint64_t view = 0;            // the highest this lineage has had; 0: none yet
  std::vector<NodeId> members;  // besides the leader; those beyond kMaxMembers are not recorded
  bool all = true;              // false: there were more members than recorded
};

inline constexpr size_t kViewRecordOffset = 2048;  // in the table segment
inline constexpr size_t kViewRecordMembers = 60;

ViewRecord read_view_record(const Mapping& table);
void write_view_record(Mapping& table, const ViewRecord& record);

}  // namespace torch_mooncake::pool
