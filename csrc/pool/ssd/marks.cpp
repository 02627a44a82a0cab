#include "pool/ssd/marks.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "common/crc32c.h"
#include "common/failpoint.h"

namespace torch_mooncake::pool::ssd {
namespace {

constexpr uint32_t kMagic = 0x316b726d;
constexpr uint64_t kLeastBlocks = 256;

struct Entry {
  uint64_t segment;
  uint32_t block, zero;
};
struct MarkBlock {
  uint32_t magic, crc;
  Id128 store;
  uint64_t index;  // in the file
  uint32_t count, zero;
  static constexpr size_t kEntries = (kBlock - 40) / sizeof(Entry);
  Entry entries[kEntries];
  char rest[kBlock - 40 - kEntries * sizeof(Entry)];
};
static_assert(sizeof(MarkBlock) == kBlock);

uint32_t checksum(const MarkBlock& b) {
  const auto* from = reinterpret_cast<const std::byte*>(&b) + 2 * sizeof(uint32_t);
  return crc32c(from, sizeof b - 2 * sizeof(uint32_t));
}

}  // namespace

Result<std::unique_ptr<Marks>> Marks::create(const std::string& folder, const Id128& store) {
  std::unique_ptr<Marks> marks(new Marks(folder, store));
  TM_TRY(marks->rewrite());
  return marks;
}

Result<std::unique_ptr<Marks>> Marks::open(const std::string& folder, const Id128& store) {
  std::unique_ptr<Marks> marks(new Marks(folder, store));
  TM_ASSIGN(marks->file_, DataFile::open(folder + "/marks", false));
  TM_TRY(marks->load());
  return marks;
}

Status Marks::load() {
  struct stat info {};
  if (::fstat(file_->fd(), &info) != 0) return Status::from_errno(file_->path(), errno);
  const uint64_t blocks = static_cast<uint64_t>(info.st_size) / kBlock;
  constexpr uint64_t kChunk = 256;
  const Buffer buffer = make_buffer(kChunk * kBlock);
  const auto* read = reinterpret_cast<const MarkBlock*>(buffer.get());
  bool ended = false;
  for (uint64_t at = 0; at < blocks; at += kChunk) {
    const uint64_t n = std::min(kChunk, blocks - at);
    TM_TRY(file_->read(buffer.get(), n * kBlock, at * kBlock));
    for (uint64_t i = 0; i < n; ++i) {
      const MarkBlock& b = read[i];
      const auto* bytes = reinterpret_cast<const char*>(&b);
      if (std::all_of(bytes, bytes + kBlock, [](char c) { return c == 0; })) {
        ended = true;
        continue;
      }
      if (ended || b.magic != kMagic || b.crc != checksum(b) || b.store != store_ || b.index != at + i ||
          b.count > MarkBlock::kEntries)
        return {Code::corrupt, file_->path() + ": block " + std::to_string(at + i) + " is not whole"};
      for (uint32_t k = 0; k < b.count; ++k) marks_[b.entries[k].segment].insert(b.entries[k].block);
    }
  }
  return {};
}

Status Marks::write_blocks(const DataFile& file, std::span<const Spot> spots, uint64_t* next) const {
  while (!spots.empty()) {
    const Buffer buffer = make_buffer(kBlock);
    auto& b = *reinterpret_cast<MarkBlock*>(buffer.get());
    std::memset(&b, 0, sizeof b);
    b.magic = kMagic;
    b.store = store_;
    b.index = *next;
    b.count = static_cast<uint32_t>(std::min(spots.size(), MarkBlock::kEntries));
    for (uint32_t i = 0; i < b.count; ++i) b.entries[i] = {spots[i].segment, spots[i].block, 0};
    b.crc = checksum(b);
    TM_TRY(file.write(&b, kBlock, *next * kBlock));
    ++*next;
    spots = spots.subspan(b.count);
  }
  return {};
}

Status Marks::append(std::span<const Spot> spots) {
  TM_TRY(failpoint("ssd.mark"));
  const uint64_t needed = (spots.size() + MarkBlock::kEntries - 1) / MarkBlock::kEntries;
  for (const Spot& s : spots) marks_[s.segment].insert(s.block);
  if (next_ + needed > blocks_) return rewrite();
  TM_TRY(write_blocks(*file_, spots, &next_));
  return file_->sync();
}

// All marks there are, in a new file with room for as many again.
Status Marks::rewrite() {
  std::vector<Spot> all;
  for (const auto& [segment, blocks] : marks_)
    for (uint32_t block : blocks) all.push_back({segment, block, 0});
  const uint64_t blocks = std::max(kLeastBlocks, 2 * (all.size() / MarkBlock::kEntries + 1));
  const std::string path = folder_ + "/marks", fresh = path + ".new";
  if (::unlink(fresh.c_str()) != 0 && errno != ENOENT) return Status::from_errno(fresh, errno);
  TM_ASSIGN(auto file, DataFile::open(fresh, false, blocks * kBlock));
  const Buffer zeros = make_buffer(kBlock);
  std::memset(zeros.get(), 0, kBlock);
  uint64_t next = 0;
  TM_TRY(write_blocks(*file, all, &next));
  for (uint64_t i = next; i < blocks; ++i) TM_TRY(file->write(zeros.get(), kBlock, i * kBlock));
  TM_TRY(file->sync());
  if (::rename(fresh.c_str(), path.c_str()) != 0) return Status::from_errno("renaming " + fresh, errno);
  TM_TRY(sync_folder(folder_));
  file->moved(path);
  file_ = std::move(file);
  next_ = next;
  blocks_ = blocks;
  return {};
}

bool Marks::marked(const Spot& spot) const {
  const auto it = marks_.find(spot.segment);
  return it != marks_.end() && it->second.count(spot.block) != 0;
}

Status Marks::keep_only(const std::set<uint64_t>& segments) {
  std::erase_if(marks_, [&](const auto& of) { return segments.count(of.first) == 0; });
  return rewrite();
}

uint64_t Marks::size() const {
  uint64_t n = 0;
  for (const auto& [segment, blocks] : marks_) n += blocks.size();
  return n;
}

}  // namespace torch_mooncake::pool::ssd
