#include "transfer/file/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <cerrno>

#include "common/log.h"
#include "transfer/file/move.h"

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x2000U
#endif

namespace torch_mooncake::transfer {
namespace {

Status errno_of(const std::string& what, const std::string& path) {
  return Status::from_errno(what + " " + path, errno);
}

bool lies_in_memory(int fd) {
  struct statfs fs {};
  if (fstatfs(fd, &fs) != 0) return false;
  auto type = static_cast<unsigned long>(fs.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

struct Refusal {
  std::mutex mutex;
  std::string why;
};
Refusal& last_refusal() {
  static auto* r = new Refusal;
  return *r;
}

}  // namespace

std::string storage_choice() {
  auto& refusal = last_refusal();
  std::lock_guard lock(refusal.mutex);
  return CuFileDriver::describe_made() + (refusal.why.empty() ? "" : "; not used for " + refusal.why);
}

Result<std::shared_ptr<File>> File::open(const FileOptions& options, std::shared_ptr<IoQueue> queue) {
  std::shared_ptr<File> file(new File(options.path, std::move(queue)));
  int flags =
      (options.writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK;  // a pipe without a writer must not block
  if (options.create && !options.writable)
    return Status(Code::invalid_argument, "create= needs writable=: " + options.path);
  if (options.fd >= 0) {
    file->cached_.reset(fcntl(options.fd, F_DUPFD_CLOEXEC, 0));
    if (!file->cached_.valid()) return errno_of("dup of", options.path);
    int mode = fcntl(options.fd, F_GETFL) & O_ACCMODE;
    if (mode == O_WRONLY || (options.writable && mode != O_RDWR))
      return Status(Code::invalid_argument, "file " + options.path + " is not open for " +
                                                (options.writable ? "reading and writing" : "reading"));
  } else {
    file->cached_.reset(::open(options.path.c_str(), flags | (options.create ? O_CREAT : 0), 0666));
    if (!file->cached_.valid()) return errno_of("open", options.path);
  }
  TM_TRY(file->check_kind(options));
  file->try_direct(flags);
  return file;
}

Status File::check_kind(const FileOptions& options) {
  struct stat st {};
  if (fstat(cached_.get(), &st) != 0) return errno_of("stat", path_);
  uint64_t size = static_cast<uint64_t>(st.st_size);
  if (S_ISBLK(st.st_mode)) {
    if (ioctl(cached_.get(), BLKGETSIZE64, &size) != 0) return errno_of("size of", path_);
  } else if (!S_ISREG(st.st_mode)) {
    return {Code::invalid_argument, path_ + " is neither a file nor a block device"};
  }
  nbytes_ = options.nbytes.value_or(size);
  in_memory_ = S_ISREG(st.st_mode) && lies_in_memory(cached_.get());
  if (nbytes_ <= size) return {};
  if (!options.writable || !S_ISREG(st.st_mode))
    return {Code::out_of_bounds, name() + " holds " + std::to_string(size) + " bytes, not " + std::to_string(nbytes_)};
  if (nbytes_ > INT64_MAX) return {Code::invalid_argument, "a file has no " + std::to_string(nbytes_) + " bytes"};
  while (ftruncate(cached_.get(), static_cast<off_t>(nbytes_)) != 0)
    if (errno != EINTR) return errno_of("making longer", path_);
  return {};
}

// A second descriptor without the page cache, if the file system keeps its promise: some take the flag and refuse the
// reads, and tmpfs takes both and has nothing but the cache.
void File::try_direct(int flags) {
  if (in_memory_) return;
  std::string self = "/proc/self/fd/" + std::to_string(cached_.get());
  UniqueFd fd(::open(self.c_str(), flags | O_DIRECT));
  if (!fd.valid()) return;
  struct statx st {};
  if (statx(fd.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &st) == 0 && (st.stx_mask & STATX_DIOALIGN)) {
    if (st.stx_dio_offset_align == 0 || kBlock % st.stx_dio_offset_align != 0) return;
    if (st.stx_dio_mem_align > IoQueue::kBlockAlign) return;
    memory_align_ = std::max<uint64_t>(st.stx_dio_mem_align, 1);
  }
  auto* block = queue_->take_block();
  ssize_t n = pread(fd.get(), block, kBlock, 0);
  bool refused = n < 0 && errno == EINVAL;
  queue_->give_block(block);
  if (!refused) direct_ = std::move(fd);
}

std::string File::how() const { return std::string(queue_->name()) + (direct() ? ", O_DIRECT" : ", page cache"); }

std::vector<AccessRecord> File::access_records(const RegionImpl&) const { return {}; }

MovePtr File::move(MoveRequest request) { return std::make_shared<FileMove>(shared_from_this(), std::move(request)); }

const File::Storage* File::storage() {
  if (storage_known_) return storage_ ? &*storage_ : nullptr;
  std::lock_guard lock(storage_mutex_);
  if (storage_known_) return storage_ ? &*storage_ : nullptr;
  auto take = [&]() -> Status {
    if (!direct()) return {Code::unsupported, "its file system has no O_DIRECT"};
    TM_ASSIGN(auto driver, CuFileDriver::get());
    TM_ASSIGN(auto file, driver->open(direct_.get()));
    storage_ = Storage{std::move(driver), std::move(file)};
    waiters_ = waiters();
    return {};
  };
  if (Status status = take(); !status) {
    std::lock_guard relock(last_refusal().mutex);
    last_refusal().why = name() + ": " + status.message();
  }
  storage_known_ = true;
  return storage_ ? &*storage_ : nullptr;
}

void File::storage_broke(const Status& why) {
  if (storage_failed_.exchange(true)) return;
  log::warning("transfer", "GPUDirect Storage is not used for " + name() + " any more: " + why.message());
  std::lock_guard lock(last_refusal().mutex);
  last_refusal().why = name() + ": " + why.message();
}

std::shared_ptr<Threads> File::waiters() {
  static auto* mutex = new std::mutex;
  static auto* made = new std::weak_ptr<Threads>;
  std::lock_guard lock(*mutex);
  auto threads = made->lock();
  if (!threads) *made = threads = std::make_shared<Threads>();
  return threads;
}

void File::enqueue(std::shared_ptr<FileMove> move) {
  {
    std::lock_guard lock(mutex_);
    ready_.push_back(std::move(move));
  }
  pump();
}

void File::request_over() {
  {
    std::lock_guard lock(mutex_);
    --in_flight_;
  }
  pump();
}

void File::pump() {
  std::vector<std::shared_ptr<FileMove::Request>> requests;
  {
    std::lock_guard lock(mutex_);
    while (in_flight_ < kMostInFlight && !ready_.empty()) {
      auto move = std::move(ready_.front());
      ready_.pop_front();
      auto request = move->next();
      if (!request) continue;
      requests.push_back(std::move(request));
      ++in_flight_;
      ready_.push_back(std::move(move));
    }
  }
  std::vector<IoRequest> io;
  for (auto& request : requests) io.push_back(request->move->prepare(request));
  if (!io.empty()) queue_->submit(std::move(io));
}

}  // namespace torch_mooncake::transfer
