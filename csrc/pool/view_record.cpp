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
struct StoredVouch {
  int64_t until_ns;
  uint64_t size;
  char leader[kVouchBytes];
};
constexpr size_t kVouchOffset = kCountedOffset + sizeof(int64_t);
static_assert(sizeof(TableHeader) <= kCountedOffset && kVouchOffset + sizeof(StoredVouch) <= kViewRecordOffset);
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

Vouch read_vouch(const Mapping& table) {
  const auto& stored = *reinterpret_cast<const StoredVouch*>(table.data + kVouchOffset);
  return {stored.until_ns, std::string(stored.leader, std::min<uint64_t>(stored.size, kVouchBytes))};
}

// A worker that is killed in between leaves a time that is over, if it is another leader's.
void write_vouch(Mapping& table, const Vouch& vouch) {
  auto& stored = *reinterpret_cast<StoredVouch*>(table.data + kVouchOffset);
  if (read_vouch(table).leader != vouch.leader) {
    stored.size = std::min(vouch.leader.size(), kVouchBytes);
    std::memcpy(stored.leader, vouch.leader.data(), stored.size);
  }
  std::atomic_ref(stored.until_ns).store(vouch.until_ns, std::memory_order_seq_cst);
}

}  // namespace torch_mooncake::pool
