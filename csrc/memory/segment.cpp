#include "memory/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "common/random.h"
#include "memory/host_memory.h"

namespace torch_mooncake {
namespace {

size_t whole_pages(size_t nbytes) { return (nbytes + page_size() - 1) & ~(page_size() - 1); }

std::string mib(uint64_t nbytes) { return std::to_string((nbytes + (1 << 20) - 1) >> 20) + " MiB"; }

}  // namespace

Mapping::~Mapping() {
  if (data) ::munmap(data, nbytes);
}

void Mapping::fault_in(std::span<const CopyPiece> writes) {
  std::call_once(once_, [this] { seen_ = std::make_unique<std::atomic<bool>[]>(nbytes / kGroup + 1); });
  std::vector<const volatile std::byte*> fresh;
  for (auto& piece : writes) {
    auto* dst = static_cast<std::byte*>(piece.dst);
    if (dst < data || dst >= data + nbytes || piece.nbytes == 0) continue;
    size_t begin = static_cast<size_t>(dst - data), end = begin + piece.nbytes;
    for (size_t group = begin / kGroup; group * kGroup < end; ++group) {
      if (seen_[group].load(std::memory_order_relaxed)) continue;
      seen_[group].store(true, std::memory_order_relaxed);
      fresh.push_back(data + std::max(begin, group * kGroup));
    }
  }
  CopyPool::shared().parallel_for(fresh.size(), 32, [&](size_t first, size_t last) {
    for (; first < last; ++first) (void)*fresh[first];
  });
}

Result<std::shared_ptr<Segment>> Segment::create(const std::string& debug_name, size_t initial_bytes,
                                                 size_t capacity_bytes) {
  if (initial_bytes > capacity_bytes || capacity_bytes == 0 || capacity_bytes > (size_t{1} << 46)) {
    return {Code::invalid_argument, "segment " + debug_name + ": " + std::to_string(initial_bytes) + " of " +
                                        std::to_string(capacity_bytes) + " bytes"};
  }
  UniqueFd fd(::memfd_create(debug_name.substr(0, 200).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno("memfd_create " + debug_name, errno);
  size_t capacity = whole_pages(capacity_bytes);
  if (::ftruncate(fd.get(), static_cast<off_t>(capacity)) != 0) return Status::from_errno("ftruncate", errno);
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Status::from_errno("sealing a memfd", errno);
  }
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_ = std::move(fd);
  segment->id_ = random_id();
  segment->capacity_ = capacity;
  TM_TRY(segment->grow(initial_bytes));
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::adopt(UniqueFd fd, const Id128& id) {
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return Status::from_errno("segment fd", errno);
  int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
    return {Code::invalid_argument, "not a sealed memfd: its maker could truncate it under our map"};
  }
  if (info.st_size <= 0) return {Code::invalid_argument, "segment fd of length 0"};
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_ = std::move(fd);
  segment->id_ = id;
  segment->capacity_ = static_cast<size_t>(info.st_size);
  segment->adopted_ = true;
  return segment;
}

size_t Segment::size() const {
  if (!adopted_) return size_.load(std::memory_order_acquire);
  // Pages are given from the front and never taken back, so the block count is the length.
  struct stat info;
  if (::fstat(fd_.get(), &info) != 0) return 0;
  return std::min(capacity_, static_cast<size_t>(info.st_blocks) * 512);
}

Status Segment::grow(size_t new_size) {
  std::lock_guard lock(mutex_);
  size_t old_size = size();
  new_size = whole_pages(new_size);
  if (new_size <= old_size) return {};
  size_t more = new_size - old_size;
  if (new_size > capacity_) {
    return {Code::pool_full,
            "segment of " + mib(old_size) + " cannot grow by " + mib(more) + ": its limit is " + mib(capacity_)};
  }
  // memfds have no size limit of their own: past the free memory fallocate would call the OOM killer before it fails.
  uint64_t available = memory_available();
  if (more > (1 << 20) && more > available) {
    return {Code::pool_full, "segment of " + mib(old_size) + " cannot grow by " + mib(more) + ": the host has " +
                                 mib(available) + " left"};
  }
  int rc;
  do {
    rc = ::fallocate(fd_.get(), 0, static_cast<off_t>(old_size), static_cast<off_t>(more));
  } while (rc != 0 && errno == EINTR);
  if (rc != 0) {
    if (errno != ENOSPC && errno != ENOMEM) return Status::from_errno("fallocate", errno);
    return {Code::pool_full, "the host cannot give " + mib(more) + " to a segment of " + mib(old_size)};
  }
  size_.store(new_size, std::memory_order_release);
  return {};
}

Result<MappingPtr> Segment::map_range(Protection protection, bool is_private, size_t offset, size_t nbytes) const {
  int prot = protection == Protection::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  // MAP_NORESERVE: a private map is read far more often than written; it must not count as anonymous memory up front.
  void* data = ::mmap(nullptr, nbytes, prot, (is_private ? MAP_PRIVATE : MAP_SHARED) | MAP_NORESERVE, fd_.get(),
                      static_cast<off_t>(offset));
  if (data == MAP_FAILED) return Status::from_errno("mmap of " + mib(nbytes) + " of a segment", errno);
  return std::make_shared<Mapping>(static_cast<std::byte*>(data), nbytes);
}

Result<MappingPtr> Segment::map(Protection protection) {
  std::lock_guard lock(mutex_);
  auto& slot = protection == Protection::read_only ? read_only_ : read_write_;
  if (auto existing = slot.lock()) return existing;
  TM_ASSIGN(auto mapping, map_range(protection, false, 0, capacity_));
  slot = mapping;
  return mapping;
}

Result<MappingPtr> Segment::map_private(size_t offset, size_t nbytes) {
  size_t length = whole_pages(nbytes);
  if (offset % page_size() != 0) return {Code::invalid_argument, "private map at an offset that is not page aligned"};
  size_t limit = size();
  if (nbytes == 0 || length < nbytes || length > limit || offset > limit - length) {
    return {Code::out_of_bounds, "private map of " + std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                                     " in a segment of " + std::to_string(limit)};
  }
  return map_range(Protection::read_write, true, offset, length);
}

}  // namespace torch_mooncake
