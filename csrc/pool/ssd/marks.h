// Marks: the file that says which records are superseded. A record that is marked is never found again, whatever
// becomes of the process, the memory or the power.
//
// Blocks of 4 KiB, each with a checksum, appended in groups; append() returns when they are on the disk (fdatasync).
// When the file is long it is written anew, with the marks of segments that still exist, and renamed over the old one.
// Opening it fails with `corrupt` if any block that was written is not whole: a mark may be missing then, and no record
// of the store can be trusted.
// Threads: one caller at a time. Calls block.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>

#include "pool/ssd/format.h"
#include "pool/ssd/io.h"

namespace torch_mooncake::pool::ssd {

class Marks {
 public:
  static Result<std::unique_ptr<Marks>> create(const std::string& folder, const Id128& store);
  static Result<std::unique_ptr<Marks>> open(const std::string& folder, const Id128& store);  // then keep_only()
  Status append(std::span<const Spot> spots);
  bool marked(const Spot& spot) const;
  void forget_segment(uint64_t segment) { marks_.erase(segment); }  // its file is gone, or will be before its number is
  Status keep_only(const std::set<uint64_t>& segments);             // there are no others
  uint64_t size() const;

 private:
  Marks(std::string folder, const Id128& store) : folder_(std::move(folder)), store_(store) {}
  Status load();
  Status rewrite();
  Status write_blocks(const DataFile& file, std::span<const Spot> spots, uint64_t* next) const;

  const std::string folder_;
  const Id128 store_;
  DataFilePtr file_;
  uint64_t next_ = 0, blocks_ = 0;                // of the file
  std::map<uint64_t, std::set<uint32_t>> marks_;  // segment -> blocks
};

}  // namespace torch_mooncake::pool::ssd
