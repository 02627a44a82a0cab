#include "pool/ssd/store.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/clock.h"
#include "common/crc32c.h"
#include "common/log.h"

namespace torch_mooncake::pool::ssd {
namespace {

constexpr uint64_t kReadingBytes = 64 << 20;
constexpr int64_t kStalledNs = 1'000'000'000, kHangingNs = 10'000'000'000, kLostNs = 60'000'000'000;
constexpr int kMarkAttempts = 3;

// The record's bytes, of which the last block may be partly somebody else's.
uint32_t checksum(const std::vector<iovec>& data, uint64_t nbytes) {
  uint32_t crc = 0;
  for (const iovec& v : data) {
    const uint64_t n = std::min<uint64_t>(v.iov_len, nbytes);
    crc = crc32c(v.iov_base, n, crc);
    nbytes -= n;
  }
  return crc;
}

Result<Loaded> verified(const Buffer& buffer, const Id128& store, const Spot& spot) {
  TM_ASSIGN(Head head, decode_head(buffer.get(), spot.nbytes(), store, spot.segment, spot.block));
  if (head.spot != spot) return {Code::corrupt, "SSD record: it has another length"};
  const std::byte* data = buffer.get() + head.data_offset;
  if (crc32c(data, head.record.nbytes) != head.data_crc)
    return {Code::corrupt, "SSD record of key '" + head.record.key + "': the checksum of its bytes does not match"};
  return Loaded{std::move(head), buffer, data};
}

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const StoreOptions& options, Owner& owner) {
  if (options.limit_bytes < kLeastLimit && options.segment_bytes == 0)
    return {Code::invalid_argument, "an SSD store needs " + std::to_string(kLeastLimit >> 20) + " MiB at least"};
  const uint64_t bytes = options.segment_bytes
                             ? options.segment_bytes
                             : std::clamp<uint64_t>(options.limit_bytes / 16 >> 20 << 20, 4 << 20, uint64_t{2} << 30);
  TM_ASSIGN(Opened opened, open_folder(options.path, bytes));
  if (opened.segment_bytes > options.limit_bytes / 3)
    return {Code::invalid_argument, options.path + " was made for a higher limit (its segments have " +
                                        std::to_string(opened.segment_bytes >> 20) + " MiB): empty it"};
  return std::unique_ptr<Store>(new Store(options, owner, std::move(opened)));
}

Store::Store(StoreOptions options, Owner& owner, Opened opened)
    : options_(std::move(options)),
      owner_(owner),
      lock_(std::move(opened.lock)),
      id_(opened.store),
      segment_bytes_(opened.segment_bytes),
      opens_(opened.opens),
      direct_(opened.direct),
      max_segments_(options_.limit_bytes / segment_bytes_),
      marks_(std::move(opened.marks)),
      worker_(std::make_shared<Worker>()),
      errors_(opened.errors) {
  // The limit may have become lower.
  const size_t excess = opened.segments.size() > max_segments_ ? opened.segments.size() - max_segments_ : 0;
  for (size_t i = 0; i < opened.segments.size(); ++i) {
    FoundSegment& s = opened.segments[i];
    if (i < excess && ::unlink(s.file->path().c_str()) == 0) continue;
    segments_[s.number].file = std::move(s.file);
    std::move(s.records.begin(), s.records.end(), std::back_inserter(found_));
  }
}

Store::~Store() = default;

// --- writing ---

bool Store::has_room(uint64_t number, const Record& record) const {
  const Segment& s = segments_.at(number);
  const uint64_t index = blocks_of(s.index_nbytes + index_nbytes(record));
  return (s.next_block + blocks_of(record) + index + 1) * kBlock <= segment_bytes_;
}

std::optional<Spot> Store::place(const Record& record) {
  if (open_ && !has_room(*open_, record)) {
    segments_.at(*open_).state = State::sealing;
    seal_if_idle(*std::exchange(open_, std::nullopt));
  }
  if (!open_) {
    if (!spare_) {
      prepare();
      return {};
    }
    open_ = spare_->first;
    Segment& s = segments_[*open_];
    s.file = std::move(spare_->second);
    s.state = State::open;
    spare_.reset();
    prepare();
  }
  Segment& s = segments_.at(*open_);
  const Spot spot{*open_, s.next_block, static_cast<uint32_t>(blocks_of(record))};
  s.next_block += spot.blocks;
  s.index_nbytes += index_nbytes(record);
  ++s.writes;
  return spot;
}

std::optional<Spot> Store::write(uint64_t id, Record record, std::vector<iovec> data, std::shared_ptr<void> hold,
                                 Done done) {
  if (failed_ || !fits(record) || full()) return {};
  const auto spot = place(record);
  if (spot) submit(id, *spot, std::move(record), std::move(data), std::move(hold), std::move(done));
  return spot;
}

void Store::submit(uint64_t id, const Spot& spot, Record record, std::vector<iovec> data, std::shared_ptr<void> hold,
                   Done done) {
  writing_bytes_ += spot.nbytes();
  const uint64_t op = begin_op();
  worker_->run([this, id, spot, op, record = std::move(record), data = std::move(data), hold = std::move(hold),
                done = std::move(done), file = segments_.at(spot.segment).file, store = id_, inbox = options_.inbox,
                queue = options_.queue]() mutable {
    const uint32_t crc = checksum(data, record.nbytes);
    const uint64_t offset = data_offset(record);
    const uint64_t head_bytes = record.nbytes < kSlabLimit ? spot.nbytes() : offset;
    const Buffer head = make_buffer(head_bytes);
    std::memset(head.get(), 0, head_bytes);
    encode_head(record, store, spot, crc, head.get());
    std::vector<iovec> memory{{head.get(), head_bytes}};
    if (record.nbytes < kSlabLimit) {
      std::byte* to = head.get() + offset;
      for (const iovec& v : data) {
        std::memcpy(to, v.iov_base, v.iov_len);
        to += v.iov_len;
      }
    } else {
      memory.insert(memory.end(), data.begin(), data.end());
    }
    auto both = std::make_shared<std::pair<Buffer, std::shared_ptr<void>>>(head, std::move(hold));
    transfer(queue, std::move(file), true, spot.offset(), std::move(memory), std::move(both),
             [this, id, spot, op, crc, inbox, record = std::move(record), done = std::move(done)](const Status& s) {
               inbox->put([this, id, spot, op, crc, s, record, done] {
                 written_back(spot, s, [this, id, spot, op, crc, record, done](const Status& whole) {
                   end_op(op);
                   written(id, spot, record, crc, whole, done);
                 });
               });
             });
  });
}

// Through the page cache a write is not over before the disk has it: else memory fills with what is to be written, and
// the fsync that seals the segment takes longer than a healthy disk may be silent.
void Store::written_back(const Spot& spot, const Status& status, Done done) {
  const DataFilePtr file = segments_.at(spot.segment).file;
  if (file->direct() || !status.is_ok()) return done(status);
  worker_->run([spot, file, inbox = options_.inbox, done = std::move(done)] {
    const Status s = file->write_back(spot.offset(), spot.nbytes());
    inbox->put([done, s] { done(s); });
  });
}

void Store::written(uint64_t id, const Spot& spot, const Record& record, uint32_t data_crc, const Status& status,
                    const Done& done) {
  writing_bytes_ -= spot.nbytes();
  Segment& s = segments_.at(spot.segment);
  --s.writes;
  s.ids.push_back(id);  // whatever became of it: it may be found at the next start
  if (status.is_ok()) {
    succeeded();
    s.index.push_back({record, spot, data_offset(record), data_crc});
    s.index.back().record.label.clear();
    s.index.back().record.meta.clear();
  } else {
    error(status);
  }
  done(failed_ && status.is_ok() ? Status(Code::io, "out of service") : status);
  seal_if_idle(spot.segment);
}

void Store::seal_if_idle(uint64_t number) {
  Segment& s = segments_.at(number);
  if (s.state != State::sealing || s.writes > 0) return;
  std::string index;
  for (const Head& h : s.index) append_entry(index, h.record, id_, h.spot, h.data_offset, h.data_crc);
  const auto entries = static_cast<uint32_t>(s.index.size());
  s.index = {};
  s.writes = 1;  // the seal is one
  const uint64_t op = begin_op();
  worker_->run([this, number, op, entries, index = std::move(index), file = s.file, store = id_, inbox = options_.inbox,
                bytes = segment_bytes_] {
    const Status sealed = seal(*file, store, number, bytes, index, entries);
    inbox->put([this, number, op, sealed] {
      end_op(op);
      Segment& over = segments_.at(number);
      over.writes = 0;
      over.state = State::sealed;  // if it is not: the next start goes through its heads
      if (!sealed.is_ok()) error(sealed);
      prepare();
    });
  });
}

// --- reading ---

void Store::read(const Spot& spot, std::function<void(Result<Loaded>)> done) {
  waiting_reads_.push_back({spot, std::move(done)});
  pump_reads();
}

void Store::read_head(const Spot& spot, std::function<void(Result<Head>)> done, uint64_t blocks) {
  const Spot begin{spot.segment, spot.block, static_cast<uint32_t>(std::min<uint64_t>(spot.blocks, blocks))};
  auto decode = [this, spot, begin, done = std::move(done)](const Result<Loaded>& read) {
    if (!read.is_ok()) return done(read.status());
    const auto need = head_nbytes(read->data, id_, spot.segment, spot.block);
    if (need && *need > begin.nbytes() && begin.blocks < spot.blocks) return read_head(spot, done, blocks_of(*need));
    done(decode_head(read->data, begin.nbytes(), id_, spot.segment, spot.block));
  };
  waiting_reads_.push_back({begin, std::move(decode), false});
  pump_reads();
}

void Store::pump_reads() {
  while (!waiting_reads_.empty()) {
    Pending& next = waiting_reads_.front();
    const uint64_t nbytes = next.spot.nbytes();
    if (reading_bytes_ > 0 && reading_bytes_ + nbytes > kReadingBytes && !failed_) return;
    const Pending read = std::move(next);
    waiting_reads_.pop_front();
    const auto it = segments_.find(read.spot.segment);
    if (failed_ || it == segments_.end() || it->second.state == State::leaving) {
      const Status why = failed_ ? Status(Code::io, options_.path + " is out of service")
                                 : Status(Code::key_not_found, "its segment is being reclaimed");
      options_.inbox->put([done = read.done, why] { done(why); });
      continue;
    }
    ++it->second.reads;
    reading_bytes_ += nbytes;
    const uint64_t op = begin_op();
    const Buffer buffer = make_buffer(nbytes);
    auto finish = [this, op, read](Result<Loaded> loaded) {
      end_op(op);
      reading_bytes_ -= read.spot.nbytes();
      --segments_.at(read.spot.segment).reads;
      if (loaded.is_ok()) {
        succeeded();
      } else if (loaded.status().code() == Code::corrupt) {
        ++corrupt_;
        log::error("pool", loaded.status().to_string());
      } else {
        error(loaded.status());
      }
      read.done(std::move(loaded));
      destroy_if_idle();
      pump_reads();
    };
    auto on_disk = [inbox = options_.inbox, worker = worker_, store = id_, spot = read.spot, whole = read.whole, buffer,
                    finish](const Status& s) {
      if (!s.is_ok()) return inbox->put([finish, s] { finish(s); });
      if (!whole) return inbox->put([finish, buffer] { finish(Loaded{{}, buffer, buffer.get()}); });
      worker->run([inbox, store, spot, buffer, finish] {
        auto loaded = std::make_shared<Result<Loaded>>(verified(buffer, store, spot));
        inbox->put([finish, loaded] { finish(std::move(*loaded)); });
      });
    };
    transfer(options_.queue, it->second.file, false, read.spot.offset(), {{buffer.get(), nbytes}}, buffer, on_disk);
  }
}

// --- marks ---

void Store::mark(std::vector<Spot> spots, Done done) {
  if (failed_ || spots.empty()) return done({});
  waiting_marks_.emplace_back(std::move(spots), std::move(done));
  pump_marks();
}

void Store::pump_marks() {
  if (!running_marks_.empty() || waiting_marks_.empty() || failed_) return;
  running_marks_ = std::exchange(waiting_marks_, {});
  std::vector<Spot> all;
  for (const auto& [spots, done] : running_marks_) all.insert(all.end(), spots.begin(), spots.end());
  const uint64_t op = begin_op();
  worker_->run([this, op, all = std::move(all), marks = marks_, inbox = options_.inbox] {
    Status s;
    for (int i = 0; i < kMarkAttempts; ++i)
      if ((s = marks->append(all)).is_ok()) break;
    inbox->put([this, op, s] {
      end_op(op);
      if (failed_) return;  // they were answered then
      if (!s.is_ok()) {
        error(s);
        if (!failed_) fail(s);  // what cannot be marked must never be found again
        return;
      }
      for (auto& [spots, done] : std::exchange(running_marks_, {})) done({});
      pump_marks();
    });
  });
}

// --- health ---

uint64_t Store::begin_op() {
  ops_[++next_op_] = steady_ns();
  return next_op_;
}

bool Store::stalled() const { return !failed_ && !ops_.empty() && steady_ns() - ops_.begin()->second > kStalledNs; }

void Store::tick(int64_t now_ns) {
  if (failed_) return;
  // A long queue is no hanging disk, as long as it gets shorter; one request that never ends is.
  const int64_t oldest_ns = ops_.empty() ? now_ns : ops_.begin()->second;
  if (now_ns - std::max(oldest_ns, moved_on_ns_) > kHangingNs || now_ns - oldest_ns > kLostNs)
    return fail({Code::io, options_.path + " does not answer"});
  prepare();
}

StoreStats Store::stats() const {
  StoreStats s;
  s.path = options_.path;
  s.limit_bytes = options_.limit_bytes;
  s.used_bytes = (segments_.size() + (spare_ ? 1 : 0)) * segment_bytes_;
  s.writing_bytes = writing_bytes_;
  s.errors = errors_;
  s.corrupt = corrupt_;
  s.moved = moved_;
  s.reclaimed = reclaimed_;
  s.direct = direct_;
  s.out_of_service = failed_;
  return s;
}

Status Store::check() const {
  if (segments_.size() + (spare_ ? 1 : 0) > max_segments_)
    return {Code::corrupt, "SSD store: more segments than its limit allows"};
  uint32_t reads = 0;
  for (const auto& [number, s] : segments_) {
    reads += s.reads;
    if ((s.state == State::open) != (open_ == number)) return {Code::corrupt, "SSD store: an open segment too many"};
    if (uint64_t{s.next_block} * kBlock + blocks_of(s.index_nbytes) * kBlock + kBlock > segment_bytes_)
      return {Code::corrupt, "SSD store: a segment is longer than its file"};
  }
  if (ops_.empty() && (writing_bytes_ || reading_bytes_ || reads))
    return {Code::corrupt, "SSD store: bytes are counted as under way, and nothing is"};
  return {};
}

}  // namespace torch_mooncake::pool::ssd
