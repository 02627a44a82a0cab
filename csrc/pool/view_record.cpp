#include "pool/view_record.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "common/crc32c.h"
#include "pool/extent_table.h"

namespace torch_mooncake::pool {
namespace {

struct Stored {
  uint64_t view;
  uint32_t members;
  uint32_t all;
  NodeId ids[kViewRecordMembers];
  uint32_t crc;  // of all before
};
constexpr size_t kCountedOffset = 1024;
static_assert(sizeof(TableHeader) <= kCountedOffset && kCountedOffset + sizeof(int64_t) <= kViewRecordOffset);
static_assert(kViewRecordOffset + 2 * sizeof(Stored) <= 4096);  // quotas follow, see extent_table.cpp

Stored* copies(std::byte* table) { return reinterpret_cast<Stored*>(table + kViewRecordOffset); }

bool sound(const Stored& s) {
  return s.view != 0 && s.members <= kViewRecordMembers && s.crc == crc32c(&s, offsetof(Stored, crc));
}

}  // namespace

ViewRecord read_view_record(const Mapping& table) {
  ViewRecord record;
  for (int i = 0; i < 2; ++i) {
    Stored s;
    std::memcpy(&s, &copies(table.data)[i], sizeof s);
    if (!sound(s) || s.view <= record.view) continue;
    record.view = s.view;
    record.all = s.all != 0;
    record.members.assign(s.ids, s.ids + s.members);
  }
  return record;
}

void write_view_record(Mapping& table, const ViewRecord& record) {
  Stored s{};
  s.view = record.view;
  s.members = static_cast<uint32_t>(std::min(record.members.size(), kViewRecordMembers));
  s.all = record.all && s.members == record.members.size();
  std::copy_n(record.members.begin(), s.members, s.ids);
  s.crc = crc32c(&s, offsetof(Stored, crc));
  Stored* both = copies(table.data);
  const int older = !sound(both[0]) ? 0 : !sound(both[1]) ? 1 : both[0].view > both[1].view;
  std::memcpy(&both[older], &s, sizeof s);
  std::atomic_thread_fence(std::memory_order_release);
}

void publish_counted(Mapping& table, int64_t at_ns) {
  std::atomic_ref(*reinterpret_cast<int64_t*>(table.data + kCountedOffset)).store(at_ns, std::memory_order_seq_cst);
}

int64_t counted_ns(const Mapping& table) {
  return std::atomic_ref(*reinterpret_cast<int64_t*>(table.data + kCountedOffset)).load(std::memory_order_seq_cst);
}

}  // namespace torch_mooncake::pool
