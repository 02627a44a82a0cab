#include "pool/ssd/recovery.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>

#include "common/clock.h"
#include "common/crc32c.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "common/random.h"

namespace torch_mooncake::pool::ssd {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kWindow = 64 << 10;
constexpr uint64_t kMostGap = 64 << 20;  // writes are never further apart than their queue is long

bool ours(const std::string& name) {
  return name == "store" || name == "marks" || name == "marks.new" || name == "store.new" ||
         (name.starts_with("segment-") && name.size() == 24);
}

// A worker that has just died may take a moment to let go of it.
Result<UniqueFd> lock_folder(const std::string& folder) {
  const std::string path = folder + "/lock";
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return Status::from_errno("opening " + path, errno);
  const Deadline until = Deadline::after_ms(5000);
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return Status::from_errno("locking " + path, errno);
    if (until.expired()) return Status(Code::busy, folder + " is in use by another node");
    ::usleep(10'000);
  }
  return fd;
}

std::vector<std::string> files_of(const std::string& folder) {
  std::vector<std::string> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    if (ours(entry.path().filename())) out.push_back(entry.path());
  return out;
}

Status empty(const std::string& folder) {
  for (const std::string& path : files_of(folder))
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) return Status::from_errno("removing " + path, errno);
  return sync_folder(folder);
}

Status write_superblock(const std::string& folder, const Opened& opened) {
  const std::string fresh = folder + "/store.new";
  if (::unlink(fresh.c_str()) != 0 && errno != ENOENT) return Status::from_errno(fresh, errno);
  TM_ASSIGN(auto file, DataFile::open(fresh, false, kBlock));
  const Buffer block = make_buffer(kBlock);
  std::memset(block.get(), 0, kBlock);
  Superblock s{};
  s.magic = Superblock::kMagic;
  s.layout = Superblock::kLayout;
  s.store = opened.store;
  s.segment_bytes = opened.segment_bytes;
  s.opens = opened.opens;
  s.crc = checksum_of(s);
  std::memcpy(block.get(), &s, sizeof s);
  TM_TRY(file->write(block.get(), kBlock, 0));
  TM_TRY(file->sync());
  if (::rename(fresh.c_str(), (folder + "/store").c_str()) != 0) return Status::from_errno("renaming " + fresh, errno);
  return sync_folder(folder);
}

Result<Superblock> read_superblock(const std::string& folder) {
  TM_ASSIGN(auto file, DataFile::open(folder + "/store", false));
  const Buffer block = make_buffer(kBlock);
  TM_TRY(file->read(block.get(), kBlock, 0));
  Superblock s;
  std::memcpy(&s, block.get(), sizeof s);
  if (s.magic != Superblock::kMagic || s.crc != checksum_of(s) || s.layout != Superblock::kLayout)
    return {Code::corrupt, file->path() + " is no store of ours"};
  return s;
}

Result<std::vector<Head>> read_index(const DataFile& file, const Opened& o, uint64_t number) {
  const Buffer block = make_buffer(kBlock);
  TM_TRY(file.read(block.get(), kBlock, o.segment_bytes - kBlock));
  Footer f;
  std::memcpy(&f, block.get(), sizeof f);
  if (f.magic != Footer::kMagic || f.crc != checksum_of(f) || f.store != o.store || f.number != number ||
      f.index_offset > o.segment_bytes || f.index_nbytes > o.segment_bytes - f.index_offset)
    return {Code::key_not_found, "not sealed"};
  const Buffer index = make_buffer(f.index_nbytes);
  TM_TRY(file.read(index.get(), blocks_of(f.index_nbytes) * kBlock, f.index_offset));
  if (f.index_crc != crc32c(index.get(), f.index_nbytes))
    return {Code::corrupt, file.path() + ": the checksum of its index does not match"};
  return decode_index({reinterpret_cast<const char*>(index.get()), f.index_nbytes}, o.store, number);
}

Result<std::vector<Head>> scan(const DataFile& file, const Opened& o, uint64_t number) {
  const uint64_t end = o.segment_bytes / kBlock - 1;  // the footer's
  const Buffer window = make_buffer(kWindow);
  uint64_t first = 0, have = 0, gap = 0;  // blocks in the window
  std::vector<Head> out;
  for (uint64_t at = 1; at < end && gap < kMostGap / kBlock;) {
    if (at < first || at >= first + have) {
      first = at;
      have = std::min(kWindow / kBlock, end - at);
      TM_TRY(file.read(window.get(), have * kBlock, first * kBlock));
    }
    const std::byte* here = window.get() + (at - first) * kBlock;
    const auto block = static_cast<uint32_t>(at);
    const auto nbytes = head_nbytes(here, o.store, number, block);
    if (nbytes) {
      Buffer more;
      if (*nbytes > (first + have - at) * kBlock && *nbytes <= (end - at) * kBlock) {
        more = make_buffer(*nbytes);
        TM_TRY(file.read(more.get(), blocks_of(*nbytes) * kBlock, at * kBlock));
        here = more.get();
      }
      auto head = decode_head(here, *nbytes, o.store, number, block);
      if (head.is_ok() && at + head->spot.blocks <= end) {
        at += head->spot.blocks;
        gap = 0;
        out.push_back(std::move(head).value());
        continue;
      }
    }
    ++at;
    ++gap;
  }
  return out;
}

Result<FoundSegment> open_segment(const std::string& path, Opened& o) {
  FoundSegment found;
  TM_ASSIGN(found.file, DataFile::open(path, o.direct));
  struct stat info {};
  if (::fstat(found.file->fd(), &info) != 0 || static_cast<uint64_t>(info.st_size) != o.segment_bytes)
    return {Code::corrupt, path + " is cut off"};
  const Buffer block = make_buffer(kBlock);
  TM_TRY(found.file->read(block.get(), kBlock, 0));
  SegmentHeader h;
  std::memcpy(&h, block.get(), sizeof h);
  if (h.magic != SegmentHeader::kMagic || h.crc != checksum_of(h) || h.store != o.store || h.nbytes != o.segment_bytes)
    return {Code::corrupt, path + " has no header of this store"};
  found.number = h.number;
  auto index = read_index(*found.file, o, h.number);
  if (index.is_ok()) {
    found.records = std::move(index).value();
    return found;
  }
  if (index.status().code() != Code::key_not_found) {
    ++o.errors;
    log::error("pool", index.status().to_string());
  }
  TM_ASSIGN(found.records, scan(*found.file, o, h.number));
  std::string entries;
  for (const Head& r : found.records) append_entry(entries, r.record, o.store, r.spot, r.data_offset, r.data_crc);
  TM_TRY(seal(*found.file, o.store, h.number, o.segment_bytes, entries, static_cast<uint32_t>(found.records.size())));
  return found;
}

Status start_anew(const std::string& folder, uint64_t segment_bytes, Opened& o) {
  TM_TRY(empty(folder));
  o.store = random_id();
  o.segment_bytes = segment_bytes;
  o.opens = 0;
  o.segments.clear();
  TM_ASSIGN(o.marks, Marks::create(folder, o.store));
  return {};
}

Status take_over(const std::string& folder, Opened& o) {
  TM_ASSIGN(const Superblock s, read_superblock(folder));
  o.store = s.store;
  o.segment_bytes = s.segment_bytes;
  o.opens = s.opens;
  TM_ASSIGN(o.marks, Marks::open(folder, o.store));
  TM_ASSIGN(o.direct, direct_io_works(folder + "/store"));
  for (const std::string& path : files_of(folder)) {
    if (fs::path(path).filename().string().find("segment-") != 0) continue;
    auto found = open_segment(path, o);
    if (!found.is_ok()) {  // what it had is missing; a file that cannot be trusted is not kept
      ++o.errors;
      log::error("pool", found.status().with("an SSD segment is dropped").to_string());
      if (::unlink(path.c_str()) != 0) return Status::from_errno("removing " + path, errno);
      continue;
    }
    std::erase_if(found->records, [&](const Head& h) { return o.marks->marked(h.spot); });
    o.segments.push_back(std::move(found).value());
  }
  std::set<uint64_t> there;
  for (const FoundSegment& s : o.segments) there.insert(s.number);
  TM_TRY(o.marks->keep_only(there));
  std::sort(o.segments.begin(), o.segments.end(),
            [](const FoundSegment& a, const FoundSegment& b) { return a.number < b.number; });
  return {};
}

}  // namespace

std::string segment_path(const std::string& folder, uint64_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "/segment-%016" PRIx64, number);
  return folder + name;
}

Status write_segment_header(const DataFile& file, const Id128& store, uint64_t number, uint64_t nbytes) {
  const Buffer block = make_buffer(kBlock);
  std::memset(block.get(), 0, kBlock);
  SegmentHeader h{};
  h.magic = SegmentHeader::kMagic;
  h.store = store;
  h.number = number;
  h.nbytes = nbytes;
  h.crc = checksum_of(h);
  std::memcpy(block.get(), &h, sizeof h);
  TM_TRY(file.write(block.get(), kBlock, 0));
  return file.sync();
}

Status seal(const DataFile& file, const Id128& store, uint64_t number, uint64_t segment_bytes, std::string index,
            uint32_t entries) {
  TM_TRY(failpoint("ssd.seal"));
  TM_TRY(file.sync());
  Footer f{};
  f.magic = Footer::kMagic;
  f.store = store;
  f.number = number;
  f.index_nbytes = index.size();
  f.index_offset = segment_bytes - kBlock - blocks_of(index.size()) * kBlock;
  f.index_crc = crc32c(index.data(), index.size());
  f.entries = entries;
  f.crc = checksum_of(f);
  const uint64_t nbytes = segment_bytes - f.index_offset;
  const Buffer out = make_buffer(nbytes);
  std::memset(out.get(), 0, nbytes);
  if (!index.empty()) {
    std::memcpy(out.get(), index.data(), index.size());
    TM_TRY(file.write(out.get(), nbytes - kBlock, f.index_offset));
    TM_TRY(file.sync());
  }
  TM_TRY(failpoint("ssd.footer"));
  std::memcpy(out.get() + nbytes - kBlock, &f, sizeof f);
  TM_TRY(file.write(out.get() + nbytes - kBlock, kBlock, segment_bytes - kBlock));
  return file.sync();
}

Status disown(const std::string& folder) {
  if (::unlink((folder + "/store").c_str()) != 0 && errno != ENOENT)
    return Status::from_errno("removing " + folder + "/store", errno);
  return sync_folder(folder);
}

Result<Opened> open_folder(const std::string& folder, uint64_t segment_bytes) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return Status::from_errno("making " + folder, errno);
  Opened o;
  TM_ASSIGN(o.lock, lock_folder(folder));
  Status s(Code::key_not_found, "new");
  if (::access((folder + "/store").c_str(), F_OK) == 0) {
    s = take_over(folder, o);
    // Without all of its marks nothing in it can be served: what was removed might come back.
    if (!s.is_ok() && s.code() != Code::corrupt && s.code() != Code::io) return s;
    if (!s.is_ok()) {
      ++o.errors;
      log::error("pool", s.with("the SSD store in " + folder + " cannot be used, it starts empty").to_string());
    }
  }
  if (!s.is_ok()) TM_TRY(start_anew(folder, segment_bytes, o));
  ++o.opens;
  TM_TRY(write_superblock(folder, o));
  TM_ASSIGN(o.direct, direct_io_works(folder + "/store"));
  return o;
}

}  // namespace torch_mooncake::pool::ssd
