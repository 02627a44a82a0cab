#include "pool/ssd/io.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <new>

#include "common/failpoint.h"
#include "pool/ssd/format.h"

namespace torch_mooncake::pool::ssd {
namespace {

constexpr size_t kRequestBytes = 4 << 20;
constexpr size_t kKeptBytes = 64 << 20, kKeepBelow = 8 << 20;

struct Spare {
  std::mutex mutex;
  std::vector<std::pair<size_t, std::byte*>> buffers;
  size_t nbytes = 0;
};
Spare& spare() {
  static auto* s = new Spare;
  return *s;
}

// One transfer under way. The queue's thread counts requests down.
struct Move {
  std::shared_ptr<transfer::IoQueue> queue;
  DataFilePtr file;
  std::shared_ptr<void> hold;
  bool write = false;
  std::atomic<size_t> left{0};
  std::mutex mutex;
  Status status;
  std::function<void(const Status&)> done;
};

transfer::IoRequest request_of(const std::shared_ptr<Move>& move, uint64_t offset, std::byte* data, uint32_t nbytes);

void over(const std::shared_ptr<Move>& move, uint64_t offset, std::byte* data, uint32_t nbytes, int64_t n) {
  const char* what = move->write ? "writing " : "reading ";
  Status s;
  if (n < 0) {
    s = Status::from_errno(what + move->file->path(), static_cast<int>(-n));
  } else if (n < nbytes) {
    if (n > 0 && n % static_cast<int64_t>(kBlock) == 0) {  // short: go on with the rest
      move->queue->submit(
          {request_of(move, offset + static_cast<uint64_t>(n), data + n, nbytes - static_cast<uint32_t>(n))});
      return;
    }
    s = Status(Code::io, what + move->file->path() + ": " + std::to_string(n) + " of " + std::to_string(nbytes) +
                             " bytes at " + std::to_string(offset));
  }
  if (!s.is_ok()) {
    std::lock_guard lock(move->mutex);
    if (move->status.is_ok()) move->status = std::move(s);
  }
  if (move->left.fetch_sub(1) == 1) move->done(move->status);
}

transfer::IoRequest request_of(const std::shared_ptr<Move>& move, uint64_t offset, std::byte* data, uint32_t nbytes) {
  return {move->file->fd(),
          move->write,
          offset,
          data,
          nbytes,
          !move->file->direct(),
          [move, offset, data, nbytes](int64_t n) { over(move, offset, data, nbytes, n); }};
}

Status whole(ssize_t (*io)(int, void*, size_t, off_t), const char* what, const DataFile& file, std::byte* data,
             uint64_t nbytes, uint64_t offset) {
  while (nbytes > 0) {
    const ssize_t n = io(file.fd(), data, nbytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status::from_errno(std::string(what) + file.path(), errno);
    if (n == 0 || n % static_cast<ssize_t>(kBlock) != 0)
      return {Code::io, std::string(what) + file.path() + ": cut off at " + std::to_string(offset)};
    data += n;
    nbytes -= static_cast<uint64_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

}  // namespace

void Inbox::put(Task task) {
  std::unique_lock lock(mutex_);
  tasks_.push_back(std::move(task));
  cv_.notify_all();
  if (tasks_.size() != 1 || !wake_) return;
  const Task wake = wake_;
  ++waking_;
  lock.unlock();
  wake();
  lock.lock();
  --waking_;
  cv_.notify_all();
}

size_t Inbox::run() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (Task& task : tasks) task();
  return tasks.size();
}

void Inbox::set_wake(Task wake) {
  std::unique_lock lock(mutex_);
  wake_ = std::move(wake);
  cv_.wait(lock, [this] { return waking_ == 0; });
  const Task now = tasks_.empty() ? nullptr : wake_;
  lock.unlock();
  if (now) now();
}

bool Inbox::wait(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return !tasks_.empty(); });
}

Worker::Worker() {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] {
    ::pthread_setname_np(::pthread_self(), "tm-ssd");
    std::unique_lock lock(mutex_);
    for (;;) {
      cv_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = {};
      lock.lock();
    }
  });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  cv_.notify_all();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Worker::run(Task task) {
  std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  cv_.notify_one();
}

Buffer make_buffer(size_t nbytes) {
  nbytes = std::max<size_t>(blocks_of(nbytes), 1) * kBlock;
  std::byte* data = nullptr;
  {
    std::lock_guard lock(spare().mutex);
    auto& buffers = spare().buffers;
    for (size_t i = buffers.size(); i-- > 0;) {
      if (buffers[i].first < nbytes || buffers[i].first > 2 * nbytes) continue;
      nbytes = buffers[i].first;
      data = buffers[i].second;
      spare().nbytes -= nbytes;
      buffers.erase(buffers.begin() + static_cast<ptrdiff_t>(i));
      break;
    }
  }
  if (!data) data = static_cast<std::byte*>(std::aligned_alloc(kBlock, nbytes));
  if (!data) throw std::bad_alloc();
  return {data, [nbytes](std::byte* p) {
            std::lock_guard lock(spare().mutex);
            if (nbytes > kKeepBelow || spare().nbytes + nbytes > kKeptBytes) return std::free(p);
            spare().nbytes += nbytes;
            spare().buffers.emplace_back(nbytes, p);
          }};
}

Result<DataFilePtr> DataFile::open(const std::string& path, bool direct, uint64_t create_nbytes) {
  auto file = std::make_shared<DataFile>();
  file->path_ = path;
  file->direct_ = direct;
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (direct ? O_DIRECT : 0);
  file->fd_.reset(::open(path.c_str(), flags | (create_nbytes ? O_CREAT | O_EXCL : 0), 0600));
  if (!file->fd_.valid()) return Status::from_errno("opening " + path, errno);
  if (create_nbytes == 0) return file;
  int error = failpoint("ssd.allocate").is_ok() ? 0 : ENOSPC;
  if (error == 0 && ::fallocate(file->fd(), 0, 0, static_cast<off_t>(create_nbytes)) != 0) error = errno;
  if (error == EOPNOTSUPP && ::ftruncate(file->fd(), static_cast<off_t>(create_nbytes)) == 0) error = 0;  // sparse
  if (error == 0) return file;
  ::unlink(path.c_str());
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    return Status(Code::pool_full, "no room on the disk for " + path);
  return Status::from_errno("making " + path, error);
}

Status DataFile::read(void* to, uint64_t nbytes, uint64_t offset) const {
  TM_TRY(failpoint("ssd.read"));
  return whole(::pread, "reading ", *this, static_cast<std::byte*>(to), nbytes, offset);
}

Status DataFile::write(const void* from, uint64_t nbytes, uint64_t offset) const {
  TM_TRY(failpoint("ssd.write"));
  constexpr auto io = [](int fd, void* data, size_t n, off_t at) { return ::pwrite(fd, data, n, at); };
  return whole(io, "writing ", *this, static_cast<std::byte*>(const_cast<void*>(from)), nbytes, offset);
}

Status DataFile::sync() const {
  TM_TRY(failpoint("ssd.sync"));
  if (::fdatasync(fd()) != 0) return Status::from_errno("fdatasync of " + path_, errno);
  return {};
}

Status DataFile::write_back(uint64_t offset, uint64_t nbytes) const {
  constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  if (::sync_file_range(fd(), static_cast<off_t>(offset), static_cast<off_t>(nbytes), kAll) != 0)
    return Status::from_errno("writing back " + path_, errno);
  return {};
}

Result<bool> direct_io_works(const std::string& path) {
  struct statfs fs {};
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid() || ::fstatfs(fd.get(), &fs) != 0) return Status::from_errno("opening " + path, errno);
  const auto type = static_cast<unsigned long>(fs.f_type);
  if (type == TMPFS_MAGIC || type == RAMFS_MAGIC) return false;  // takes the flag, and has nothing but the cache
  fd.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  if (!fd.valid()) return false;
  const Buffer block = make_buffer(kBlock);
  return ::pread(fd.get(), block.get(), kBlock, 0) >= 0 || errno != EINVAL;
}

void transfer(const std::shared_ptr<transfer::IoQueue>& queue, DataFilePtr file, bool write, uint64_t offset,
              std::vector<iovec> memory, std::shared_ptr<void> hold, std::function<void(const Status&)> done) {
  if (Status s = failpoint(write ? "ssd.record.write" : "ssd.record.read"); !s.is_ok()) return done(s);
  auto move = std::make_shared<Move>();
  move->queue = queue;
  move->file = std::move(file);
  move->hold = std::move(hold);
  move->write = write;
  move->done = std::move(done);
  std::vector<transfer::IoRequest> requests;
  for (const iovec& v : memory) {
    auto* data = static_cast<std::byte*>(v.iov_base);
    for (size_t at = 0; at < v.iov_len; at += kRequestBytes) {
      const auto n = static_cast<uint32_t>(std::min(kRequestBytes, v.iov_len - at));
      requests.push_back(request_of(move, offset, data + at, n));
      offset += n;
    }
  }
  move->left = requests.size();
  queue->submit(std::move(requests));
}

Status sync_folder(const std::string& path) {
  TM_TRY(failpoint("ssd.sync"));
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || ::fsync(fd.get()) != 0) return Status::from_errno("fsync of " + path, errno);
  return {};
}

}  // namespace torch_mooncake::pool::ssd
