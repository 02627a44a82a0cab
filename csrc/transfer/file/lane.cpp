#include "transfer/file/lane.h"

#include "common/log.h"
#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {
namespace {

// Registers the region with GPUDirect Storage, until it is deregistered. False: it is used as it is, which is slower.
bool pin_for_storage(CudaMemory& memory, CuFileDriver& driver) {
  auto pinned = memory.attached([&]() -> std::shared_ptr<void> {
    auto made = driver.pin(memory.address(), memory.nbytes());
    if (made) return *made;
    log::warning("transfer", "GPUDirect Storage uses " + std::to_string(memory.nbytes()) + " bytes of " +
                                 memory.name() + " without registering them: " + made.status().message());
    return nullptr;
  });
  return pinned != nullptr;
}

}  // namespace

FileCudaPart::FileCudaPart(OpImplPtr op, std::string transport, Reached remote)
    : op_(std::move(op)), transport_(std::move(transport)), remote_(std::move(remote)) {}

void FileCudaPart::run(const OpImplPtr& op, std::string transport, Reached remote,
                       const std::vector<const Batch*>& batches) {
  std::shared_ptr<FileCudaPart> part(new FileCudaPart(op, std::move(transport), std::move(remote)));
  op->add(part);
  auto locals = locals_of(batches);
  auto hold = hold_both(op, locals, part->remote_);
  if (!hold) {
    op->quiescent(*part);
    return op->part_done(part, hold.status());
  }
  part->remote_.owner.reset();  // the hold has it
  bool local_file = locals.front()->kind() == MemoryKind::file;
  part->to_device_ = local_file == (op->direction() == Direction::write);
  // The first op of a file asks whether it can go directly, which may take a while.
  std::vector<std::shared_ptr<File>> unknown;
  {
    std::lock_guard lock(part->mutex_);  // the op may have been stopped already
    part->hold_ = std::move(*hold);
    for (size_t i = 0; i < batches.size(); ++i) {
      auto *ours = locals[i]->backing().get(), *theirs = part->remote_.backing.get();
      auto* file = static_cast<File*>(local_file ? ours : theirs);
      if (!file->storage_known()) unknown.push_back(file->shared_from_this());
      auto* memory = static_cast<CudaMemory*>(local_file ? theirs : ours);
      for (auto& e : batches[i]->extents) {
        uint64_t at_file = local_file ? e.local_offset : e.remote_offset;
        part->pieces_.push_back({file, memory, at_file, local_file ? e.remote_offset : e.local_offset, e.nbytes});
        part->nbytes_ += e.nbytes;
      }
    }
  }
  op->peer().engine().track_move(part);
  if (unknown.empty()) return part->start();
  File::waiters()->post({[part, unknown, threads = File::waiters()] {
    for (auto& file : unknown) (void)file->storage();  // held: the op may be over by now, and its regions gone
    part->start();
  }});
}

// ---- What comes next

bool FileCudaPart::goes_directly(const Piece& piece) const {
  return piece.direct && piece.at_file % File::kBlock == 0 && piece.nbytes >= File::kBlock && piece.memory->own() &&
         piece.file->storage() && !piece.file->storage_failed();
}

void FileCudaPart::advance(uint64_t nbytes) {
  auto& piece = pieces_.front();
  piece.at_file += nbytes;
  piece.at_memory += nbytes;
  piece.nbytes -= nbytes;
  if (piece.nbytes == 0) pieces_.pop_front();
}

FileCudaPart::ChunkPtr FileCudaPart::take_direct() {
  auto chunk = std::make_shared<Chunk>();
  auto piece = pieces_.front();
  piece.nbytes = std::min(piece.nbytes / File::kBlock * File::kBlock, kDirectBytes);
  chunk->nbytes = piece.nbytes;
  chunk->pieces.push_back(piece);
  advance(piece.nbytes);
  return chunk;
}

// Lies in the block as it lies in the file's blocks, so that all but its ends can bypass the page cache.
FileCudaPart::ChunkPtr FileCudaPart::take_bounced(std::byte* block) {
  auto chunk = std::make_shared<Chunk>();
  chunk->block = block;
  chunk->begin = pieces_.front().at_file % File::kBlock;
  uint64_t room = CudaQueue::kBlockBytes - chunk->begin;
  while (!pieces_.empty() && chunk->nbytes < room) {
    auto piece = pieces_.front();
    if (!chunk->pieces.empty() &&
        (piece.file != chunk->pieces[0].file || piece.memory != chunk->pieces[0].memory || goes_directly(piece)))
      break;
    piece.nbytes = std::min(piece.nbytes, room - chunk->nbytes);
    uint64_t head = piece.at_file % File::kBlock;
    auto rest = pieces_.front();
    if (head != 0 && rest.nbytes > File::kBlock - head) {  // what is behind the head may go directly
      rest.at_file += File::kBlock - head;
      rest.nbytes -= File::kBlock - head;
      if (goes_directly(rest)) piece.nbytes = std::min(piece.nbytes, File::kBlock - head);
    }
    chunk->nbytes += piece.nbytes;
    chunk->pieces.push_back(piece);
    advance(piece.nbytes);
  }
  return chunk;
}

void FileCudaPart::pump() {
  for (;;) {
    std::unique_lock lock(mutex_);
    if (stopped_ || pieces_.empty()) return settle(std::move(lock));
    if (in_flight_ == kMostInFlight) return;
    ChunkPtr chunk;
    if (goes_directly(pieces_.front())) {
      chunk = take_direct();
    } else {
      auto& queue = pieces_.front().memory->queue();
      auto* block = queue.take_block(
          [self = shared_from_this()](const Status& status) { status ? self->pump() : self->stop(status); });
      if (block == nullptr) return;  // the waiter comes back
      chunk = take_bounced(block);
    }
    ++in_flight_;
    lock.unlock();
    if (!chunk->block)
      File::waiters()->post(
          {[self = shared_from_this(), chunk, threads = File::waiters()] { self->move_directly(chunk); }});
    else
      to_device_ ? move_file(chunk) : copy(chunk);
  }
}

// ---- The steps of a chunk

void FileCudaPart::move_file(const ChunkPtr& chunk) {
  MoveRequest request;
  request.direction = to_device_ ? Direction::read : Direction::write;
  request.patient = true;  // the block is the chunk's until this step is over
  auto* at = chunk->block + chunk->begin;
  for (auto& piece : chunk->pieces) {
    request.pieces.push_back({at, piece.at_file, piece.nbytes});
    at += piece.nbytes;
  }
  request.done = [self = shared_from_this(), chunk](const Status& status) {
    status && self->to_device_ ? self->copy(chunk) : self->chunk_over(chunk, status);
  };
  chunk->pieces[0].file->move(std::move(request))->start();
}

void FileCudaPart::copy(const ChunkPtr& chunk) {
  if (!begin_touching()) return chunk_over(chunk, {});
  std::vector<CudaQueue::Copy> copies;
  auto* at = chunk->block + chunk->begin;
  auto& memory = *chunk->pieces[0].memory;
  for (auto& piece : chunk->pieces)
    memory.each(piece.at_memory, piece.nbytes, [&](uint64_t address, uint64_t n) {
      auto* device = reinterpret_cast<void*>(address);
      copies.push_back(to_device_ ? CudaQueue::Copy{device, at, n} : CudaQueue::Copy{at, device, n});
      at += n;
    });
  memory.queue().copy(copies, [self = shared_from_this(), chunk](const Status& status) {
    self->end_touching();
    bool writes_file = status && !self->to_device_;
    writes_file ? self->move_file(chunk) : self->chunk_over(chunk, status);
  });
}

void FileCudaPart::move_directly(const ChunkPtr& chunk) {
  if (!begin_touching()) return chunk_over(chunk, {});
  auto& piece = chunk->pieces[0];
  auto& memory = *piece.memory;
  auto& storage = *piece.file->storage();
  uint64_t address = memory.address() + piece.at_memory;
  auto current = memory.driver().make_current(memory.queue().device());
  Result<uint64_t> n = current.status();
  if (current) {
    uint64_t base = pin_for_storage(memory, *storage.driver) ? memory.address() : address;
    n = to_device_ ? storage.driver->read(storage.file.get(), piece.at_file, base, address, piece.nbytes)
                   : storage.driver->write(storage.file.get(), piece.at_file, base, address, piece.nbytes);
  }
  end_touching();
  if (!n && current) piece.file->storage_broke(n.status());
  uint64_t moved = chunk->nbytes = n ? std::min(*n, piece.nbytes) : 0;
  // Short, or failed: the rest the other way, which knows what to say at the file's end, or of a broken disk.
  if (moved < piece.nbytes) {
    std::lock_guard lock(mutex_);
    pieces_.push_front(
        {piece.file, piece.memory, piece.at_file + moved, piece.at_memory + moved, piece.nbytes - moved, false});
  }
  chunk_over(chunk, {});
}

void FileCudaPart::chunk_over(const ChunkPtr& chunk, const Status& status) {
  if (chunk->block) chunk->pieces[0].memory->queue().give_block(chunk->block);
  std::unique_lock lock(mutex_);
  --in_flight_;
  if (!stopped_ && status) op_->add_bytes_done(chunk->nbytes);
  if (!stopped_ && !status) {
    stopped_ = true;
    status_ = status;
  }
  lock.unlock();
  pump();
}

// ---- The end

bool FileCudaPart::begin_touching() {
  std::lock_guard lock(mutex_);
  touching_ += !stopped_;
  return !stopped_;
}

void FileCudaPart::end_touching() {
  std::unique_lock lock(mutex_);
  --touching_;
  if (stopped_) settle(std::move(lock));
}

// A file is no memory: an op that was stopped may end while the disk hangs, and both regions stay in use until it
// answers.
void FileCudaPart::settle(std::unique_lock<std::mutex> lock) {
  bool last = (stopped_ || pieces_.empty()) && in_flight_ == 0;
  bool tell = !told_ && (last || (stopped_ && touching_ == 0));
  if (tell) told_ = true;
  auto hold = last ? std::move(hold_) : nullptr;
  Status outcome = status_;
  bool stopped = stopped_;
  lock.unlock();
  if (last) op_->quiescent(*this);
  hold.reset();
  if (!tell) return;
  if (!stopped) outcome = validate(*op_, remote_);
  bool writes = op_->direction() == Direction::write;
  if (outcome) op_->peer().engine().metrics().bytes(transport_, writes ? nbytes_ : 0, writes ? 0 : nbytes_);
  op_->part_done(shared_from_this(), outcome);
}

void FileCudaPart::stop(const Status& why) {
  std::unique_lock lock(mutex_);
  if (stopped_ || told_) return;
  stopped_ = true;
  status_ = why;
  settle(std::move(lock));
  // A device, or a disk that reaches it, that hangs: the op ends all the same, the memory stays in quarantine (hold_).
  std::weak_ptr<FileCudaPart> weak = shared_from_this();
  op_->peer().engine().rpc().add_timer(Deadline::at_ns(steady_ns() + op_->grace_ns() / 2), [weak, why] {
    auto self = weak.lock();
    if (!self) return;
    {
      std::lock_guard relock(self->mutex_);
      if (std::exchange(self->told_, true)) return;
    }
    self->op_->part_done(self, why);
  });
}

}  // namespace torch_mooncake::transfer
