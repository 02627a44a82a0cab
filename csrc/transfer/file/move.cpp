#include "transfer/file/move.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "common/failpoint.h"

namespace torch_mooncake::transfer {
namespace {

constexpr uint64_t kMost = IoQueue::kBlockBytes;

uint64_t round_down(uint64_t n) { return n & ~(File::kBlock - 1); }
uint64_t round_up(uint64_t n) { return round_down(n + File::kBlock - 1); }

}  // namespace

FileMove::FileMove(std::shared_ptr<File> file, MoveRequest request)
    : file_(std::move(file)), request_(std::move(request)) {
  std::erase_if(request_.pieces, [](const HostPiece& piece) { return piece.nbytes == 0; });
}

void FileMove::start() {
  if (request_.pieces.empty()) {
    std::unique_lock lock(mutex_);
    planned_ = true;
    return settle(std::move(lock));
  }
  file_->enqueue(shared_from_this());
}

void FileMove::stop(const Status& why) {
  std::unique_lock lock(mutex_);
  if (stopped_ || told_) return;
  stopped_ = true;
  status_ = why;
  settle(std::move(lock));
}

void FileMove::abandon() {
  std::unique_lock lock(mutex_);
  if (!stopped_ || told_ || request_.direction == Direction::read) return;
  told_ = true;
  auto done = std::move(request_.done);
  lock.unlock();
  done(status_);
}

// done() when the host memory is at rest, keep dropped when the file is.
void FileMove::settle(std::unique_lock<std::mutex> lock) {
  std::function<void(const Status&)> done;
  std::function<void(uint64_t)> progress;
  std::shared_ptr<void> keep;
  bool last = (planned_ || stopped_) && in_flight_ == 0;
  if (!told_ && (last || (stopped_ && touching_ == 0))) {
    told_ = true;
    done = std::move(request_.done);
  }
  if (last) {
    progress = std::move(request_.progress);
    keep = std::move(request_.keep);
  }
  Status status = status_;
  lock.unlock();
  if (done) done(status);
}

// ---- Planning, with the file's mutex

FileMove::RequestPtr FileMove::next() {
  std::lock_guard lock(mutex_);
  if (stopped_ || planned_) return nullptr;
  auto request = std::make_shared<Request>();
  request->move = shared_from_this();
  HostPiece first = request_.pieces[piece_];
  plan(*request, {first.host + at_, first.offset + at_, first.nbytes - at_});
  if (request->bounced)
    while (!planned_ && add_part(*request)) {
    }
  ++in_flight_;
  // A bounced write until it has been copied to its block, a bounced read while it is copied out.
  request->touching = !request->bounced || request_.direction == Direction::write;
  touching_ += request->touching;
  return request;
}

// What the first piece (or what is left of it) asks for decides how the request is carried out.
void FileMove::plan(Request& r, const HostPiece& first) {
  uint64_t head = first.offset % File::kBlock, n = std::min(first.nbytes, kMost);
  bool read = request_.direction == Direction::read;
  auto aligned = [&](const std::byte* p) { return reinterpret_cast<uintptr_t>(p) % file_->memory_align_ == 0; };
  r.offset = first.offset;
  r.data = first.host;
  if (!file_->direct()) {
    r.bounced = read && !file_->in_memory_ && !request_.patient;
  } else if (read && request_.patient && head == 0 && n >= File::kBlock && aligned(first.host)) {
    r.direct = true;
    n = round_down(n);
  } else if (read) {
    r.direct = r.bounced = true;
    r.offset -= head;
    r.head = static_cast<uint32_t>(head);
    n = std::min(n, kMost - head);
  } else if (head != 0 || n < File::kBlock) {  // part of a block: the cache reads the rest of it
    n = std::min(n, File::kBlock - head);
  } else {
    r.direct = true;
    n = round_down(n);
    r.bounced = !aligned(first.host);
  }
  r.wanted = r.head;
  r.parts.push_back({first.host, first.offset, n});
  r.wanted += static_cast<uint32_t>(n);
  at_ += n;
  if (at_ == request_.pieces[piece_].nbytes) {
    at_ = 0;
    planned_ = ++piece_ == request_.pieces.size();
  }
}

// The next piece too, if it follows in the file and fits.
bool FileMove::add_part(Request& r) {
  const HostPiece& piece = request_.pieces[piece_];
  uint64_t end = r.offset + r.wanted, left = piece.nbytes - at_;
  if (piece.offset + at_ != end || r.wanted == kMost) return false;
  uint64_t n = std::min(left, kMost - r.wanted);
  if (request_.direction == Direction::write && r.direct) n = round_down(n);
  if (n == 0) return false;
  r.parts.push_back({piece.host + at_, end, n});
  r.wanted += static_cast<uint32_t>(n);
  at_ += n;
  if (at_ == piece.nbytes) {
    at_ = 0;
    planned_ = ++piece_ == request_.pieces.size();
  }
  return true;
}

// ---- Carrying out

IoRequest FileMove::prepare(const RequestPtr& request) {
  Request& r = *request;
  r.length = static_cast<uint32_t>(r.direct ? round_up(r.wanted) : r.wanted);
  if (r.bounced) {
    r.data = file_->queue_->take_block();
    if (request_.direction == Direction::write) {
      auto* to = r.data;
      for (auto& part : r.parts) {
        std::memcpy(to, part.host, part.nbytes);
        to += part.nbytes;
      }
      touch_no_more(r);
    }
  }
  return io_of(request);
}

IoRequest FileMove::io_of(const RequestPtr& request) {
  Request& r = *request;
  // A rest that does not begin on a block goes through the cache.
  bool direct = r.direct && r.got % File::kBlock == 0;
  return {.fd = direct ? file_->direct_.get() : file_->cached_.get(),
          .write = request_.direction == Direction::write,
          .offset = r.offset + r.got,
          .data = r.data + r.got,
          .nbytes = r.length - r.got,
          .cached = !direct,
          .done = [self = shared_from_this(), request](int64_t n) { self->result(request, n); }};
}

void FileMove::result(const RequestPtr& request, int64_t n) {
  Request& r = *request;
  if (Status status = failpoint("transfer.file"); !status) return over(request, status.with(file_->name()));
  bool stopped;
  {
    std::lock_guard lock(mutex_);
    stopped = stopped_;
  }
  // Cancelled: the thread that gave it to io_uring has ended since.
  if (n < 0 && n != -EINTR && n != -EAGAIN && n != -ECANCELED) {
    const char* what = request_.direction == Direction::read ? "reading " : "writing ";
    return over(request, Status::from_errno(what + file_->name() + " at " + std::to_string(r.offset + r.got),
                                            static_cast<int>(-n)));
  }
  if (stopped) return over(request, {});
  if (n > 0) r.got += static_cast<uint32_t>(n);
  if (r.got >= r.wanted) {
    deliver(r);
    return over(request, {});
  }
  if (n == 0) return over(request, short_result(r));
  file_->queue_->submit({io_of(request)});  // interrupted or short: the rest
}

Status FileMove::short_result(Request& r) {
  if (request_.direction == Direction::write)
    return {Code::io, file_->name() + " takes no more bytes at " + std::to_string(r.offset + r.got)};
  struct stat st {};
  fstat(file_->cached_.get(), &st);
  return {Code::out_of_bounds,
          file_->name() + " ends at byte " + std::to_string(st.st_size) + ": it was cut short after it was registered"};
}

void FileMove::touch_no_more(Request& r) {
  std::unique_lock lock(mutex_);
  r.touching = false;
  --touching_;
  if (stopped_) settle(std::move(lock));
}

void FileMove::deliver(Request& r) {
  bool copies = r.bounced && request_.direction == Direction::read;
  if (copies) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return;
      r.touching = true;
      ++touching_;
    }
    auto* from = r.data + r.head;
    for (auto& part : r.parts) {
      std::memcpy(part.host, from, part.nbytes);
      from += part.nbytes;
    }
  }
  if (request_.progress) request_.progress(r.wanted - r.head);
  if (copies) touch_no_more(r);
}

void FileMove::over(const RequestPtr& request, const Status& status) {
  if (request->bounced) file_->queue_->give_block(request->data);
  {
    std::unique_lock lock(mutex_);
    --in_flight_;
    if (std::exchange(request->touching, false)) --touching_;
    if (!status && !stopped_) {
      stopped_ = true;
      status_ = status;
    }
    settle(std::move(lock));
  }
  file_->request_over();
}

}  // namespace torch_mooncake::transfer
