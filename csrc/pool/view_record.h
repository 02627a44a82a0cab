// What a node keeps in the header page of its donor's table segment, beside the table's own header.
//
// ViewRecord: what a leader remembers of its last view over a restart of its worker. Two copies, written in turn, each
// with a checksum: a crash leaves one whole.
//
// The time when the leader last counted this node among the pool's (by this host's steady clock), which clients on this
// host read: no other donor has been given what is here before kExpelMs after it. So a location that was looked up
// once is good as long as its generation word is what it was, and this time is not long ago.
//
// Vouch: which leader this node has promised to follow, and nobody else, and until when (service_vouch.cpp). A new
// worker keeps what the one before it has promised.
#pragma once

#include <string>
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

void publish_counted(Mapping& table, int64_t at_ns);  // 0: not any more
int64_t counted_ns(const Mapping& table);

struct Vouch {
  int64_t until_ns = 0;  // by this host's steady clock
  std::string leader;    // encoded; who differs from the last one comes only when that vouch is over
};
inline constexpr size_t kVouchBytes = 900;  // of a leader

Vouch read_vouch(const Mapping& table);
void write_vouch(Mapping& table, const Vouch& vouch);

}  // namespace torch_mooncake::pool
