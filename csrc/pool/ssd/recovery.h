// What a store finds in its folder when it is opened: its files, and the records that are whole and not marked. The
// time it takes is that of reading the indexes of sealed segments; only a segment that was being written when its
// process ended is gone through, head by head, and is sealed then, so that nothing that lands in it later counts.
//
// A folder of another store's remains, of a store that failed, or whose marks are damaged, is emptied (only of files
// that are ours by name).
#pragma once

#include "pool/ssd/format.h"
#include "pool/ssd/io.h"
#include "pool/ssd/marks.h"

namespace torch_mooncake::pool::ssd {

struct FoundSegment {
  uint64_t number = 0;
  DataFilePtr file;
  std::vector<Head> records;  // labels and metadata are left out
};
struct Opened {
  UniqueFd lock;
  Id128 store{};
  uint64_t segment_bytes = 0, opens = 0;
  bool direct = false;
  std::unique_ptr<Marks> marks;
  std::vector<FoundSegment> segments;  // oldest first
  uint64_t errors = 0;                 // files and records that were there and could not be used
};

// Errors: busy (another process has the folder open), io, auth (no right to write there).
// A store made anew gets segments of `segment_bytes`; one that is there keeps its own.
Result<Opened> open_folder(const std::string& folder, uint64_t segment_bytes);

std::string segment_path(const std::string& folder, uint64_t number);
Status write_segment_header(const DataFile& file, const Id128& store, uint64_t number, uint64_t nbytes);
// Data first, then index and footer, each on the disk before the next.
Status seal(const DataFile& file, const Id128& store, uint64_t number, uint64_t segment_bytes, std::string index,
            uint32_t entries);
// So that the folder is taken for a new store's from now on.
Status disown(const std::string& folder);

}  // namespace torch_mooncake::pool::ssd
