// A donor's table as the home's marks see it, for the tests of the home. Values are numbers.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>

#include "pool/home.h"

namespace torch_mooncake::pool::test {

inline NodeId node(uint8_t n) {
  NodeId id{};
  id[0] = n;
  return id;
}
inline TxnId txn_of(uint64_t n) {
  TxnId id{};
  std::memcpy(id.data(), &n, sizeof n);
  return id;
}

struct ModelDonor {
  struct Extent {
    Announced a;
    uint64_t value = 0;
    int64_t expires_ms = INT64_MAX;
  };
  std::map<uint32_t, Extent> extents;
  // What its SSD would bring back at the next start: records that are not marked.
  std::map<uint32_t, Extent> disk;
  bool marks_disk = true;
  uint32_t next = 0;
  uint64_t generation = 1;
  int64_t now_ms = 0;

  ExtentRef reserve(const std::string& key, Kind kind, TxnId txn, uint32_t part, uint32_t parts, uint64_t value) {
    Extent e;
    e.a.key = key;
    e.a.kind = kind;
    e.a.state = ExtentState::prepared;
    e.a.txn = txn;
    e.a.part = part;
    e.a.parts = parts;
    e.a.extent = {next, generation++};
    e.value = value;
    extents[next] = e;
    return extents[next++].a.extent;
  }
  Extent* at(ExtentRef ref) {
    auto it = extents.find(ref.index);
    return it != extents.end() && it->second.a.extent.generation == ref.generation ? &it->second : nullptr;
  }
  Status apply(const Mark& mark) {
    if (mark.what == Mark::What::drop) {
      std::erase_if(extents,
                    [&](auto& e) { return e.second.a.state == ExtentState::prepared && e.second.a.txn == mark.txn; });
      return {};
    }
    Extent* e = at(mark.extent);
    if (!e) return {Code::key_not_found, "gone"};
    if (mark.what == Mark::What::commit) {
      if (e->a.state != ExtentState::prepared)
        return e->a.version == mark.version ? Status{} : Status{Code::invalid_argument, "committed"};
      e->a.version = mark.version;
      e->a.replicas = mark.replicas;
      e->a.state = ExtentState::committed;
      if (!mark.copy && mark.ttl_ms) e->expires_ms = now_ms + int64_t(mark.ttl_ms);
      e->a.pin = mark.pin;
    } else if (mark.what == Mark::What::pin) {
      e->a.pin = mark.pin;
    } else if (mark.what == Mark::What::finalize) {
      if (e->a.state == ExtentState::committed) e->a.state = ExtentState::final;
    } else {
      if (e->a.state == ExtentState::prepared) return {Code::invalid_argument, "prepared"};
      forget(mark.extent.index);  // the word has changed; no pins in this model
    }
    return {};
  }
  // Before it is said to be gone, its record is marked.
  void forget(uint32_t index) {
    extents.erase(index);
    if (marks_disk) disk.erase(index);
  }
  // Out of memory, onto the SSD: it stays what the home knows it by.
  std::optional<Announced> demote(uint32_t index) {
    const auto it = extents.find(index);
    if (it == extents.end() || it->second.a.state != ExtentState::final || disk.count(index)) return {};
    it->second.a.tier = Tier::ssd;
    disk[index] = it->second;
    return it->second.a;
  }
  void recover_disk() { extents.insert(disk.begin(), disk.end()); }
  std::vector<Announced> announce() const {
    std::vector<Announced> out;
    for (const auto& [i, e] : extents) {
      out.push_back(e.a);
      if (e.expires_ms != INT64_MAX) out.back().left_ms = uint64_t(std::max<int64_t>(0, e.expires_ms - now_ms));
    }
    return out;
  }
};

}  // namespace torch_mooncake::pool::test
