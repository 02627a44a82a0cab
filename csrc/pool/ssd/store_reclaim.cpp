// How a store gets its next segment: a new file while there is room, else the oldest one's. And how it is given up.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "common/clock.h"
#include "common/failpoint.h"
#include "common/log.h"
#include "pool/ssd/store.h"

namespace torch_mooncake::pool::ssd {
namespace {

constexpr uint32_t kErrorsInARow = 8;
constexpr int64_t kNoRoomNs = 10'000'000'000;

}  // namespace

// One segment is kept ready, so that appends need not wait for a file to be made or an old one to be emptied.
void Store::prepare() {
  if (failed_ || spare_ || preparing_ || reclaiming_) return;
  if (segments_.size() < max_segments_ && steady_ns() >= no_room_until_ns_) return make_segment();
  reclaim();
}

void Store::make_segment() {
  preparing_ = true;
  const uint64_t number = next_number(), op = begin_op();
  worker_->run([this, number, op, path = segment_path(options_.path, number), direct = direct_, bytes = segment_bytes_,
                store = id_, inbox = options_.inbox] {
    auto file = DataFile::open(path, direct, bytes);
    Status s = file.status();
    if (file.is_ok()) {
      s = write_segment_header(**file, store, number, bytes);
      if (!s.is_ok()) ::unlink(path.c_str());
    }
    inbox->put([this, number, op, s, made = file.is_ok() ? *file : nullptr] {
      end_op(op);
      preparing_ = false;
      if (s.is_ok()) {
        spare_.emplace(number, made);
        return;
      }
      no_room_until_ns_ = steady_ns() + kNoRoomNs;
      static log::Once once(60'000);
      if (s.code() == Code::pool_full) {
        ++errors_;  // the disk is full: what there is is used again
        if (once.pass()) log::warning("pool", s.to_string());
      } else {
        error(s);
      }
      prepare();
    });
  });
}

void Store::reclaim() {
  for (auto& [number, segment] : segments_) {
    if (segment.state != State::sealed) continue;
    reclaiming_ = number;
    break;
  }
  if (!reclaiming_) return;
  moves_ = 1;  // until all have been started
  moving_bytes_ = 0;
  const std::vector<uint64_t> ids = segments_.at(*reclaiming_).ids;
  for (uint64_t id : ids) {
    const auto from = owner_.worth_moving(id, *reclaiming_);
    // A quarter of a segment at most: the log must get on.
    if (!from || moving_bytes_ + from->nbytes() > segment_bytes_ / 4) continue;
    moving_bytes_ += from->nbytes();
    move(id, *from);
  }
  move_over();
}

void Store::move(uint64_t id, const Spot& from) {
  ++moves_;
  read(from, [this, id, from](Result<Loaded> loaded) {
    if (!loaded.is_ok() || full()) return move_over();
    // Only into the open segment: the next one is what this is about.
    const Record& record = loaded->head.record;
    if (!open_ || !has_room(*open_, record)) return move_over();
    const auto to = place(record);
    owner_.moving(id, from, *to);
    const Buffer buffer = loaded->buffer;
    std::vector<iovec> data{{buffer.get() + loaded->head.data_offset,
                             record.nbytes < kSlabLimit ? record.nbytes : blocks_of(record.nbytes) * kBlock}};
    submit(id, *to, record, std::move(data), buffer, [this, id, to = *to](const Status& s) {
      if (s.is_ok()) ++moved_;
      owner_.moved(id, to, s);
      move_over();
    });
  });
}

void Store::move_over() {
  if (--moves_ > 0 || failed_) return;
  segments_.at(*reclaiming_).state = State::leaving;
  destroy_if_idle();
}

// First the header, under whose number nothing of the old segment is found any more, then the name.
void Store::destroy_if_idle() {
  if (!reclaiming_ || failed_) return;
  Segment& old = segments_.at(*reclaiming_);
  if (old.state != State::leaving || old.reads > 0 || preparing_) return;
  preparing_ = true;
  const uint64_t number = next_number(), op = begin_op();
  const bool unlink = segments_.size() > max_segments_;
  worker_->run([this, number, unlink, op, from = *reclaiming_, file = old.file, folder = options_.path, store = id_,
                bytes = segment_bytes_, marks = marks_, inbox = options_.inbox] {
    Status s = failpoint("ssd.reclaim");
    if (s.is_ok()) s = write_segment_header(*file, store, number, bytes);
    const std::string path = segment_path(folder, number);
    if (s.is_ok() && unlink && ::unlink(file->path().c_str()) != 0) s = Status::from_errno("removing a segment", errno);
    if (s.is_ok() && !unlink && ::rename(file->path().c_str(), path.c_str()) != 0)
      s = Status::from_errno("renaming a segment", errno);
    if (s.is_ok()) {
      if (!unlink) file->moved(path);
      s = sync_folder(folder);
    }
    if (s.is_ok()) marks->forget_segment(from);
    inbox->put([this, number, unlink, op, from, s] {
      end_op(op);
      preparing_ = false;
      if (failed_) return;
      reclaiming_.reset();
      if (!s.is_ok()) {
        segments_.at(from).state = State::sealed;  // tried again
        return error(s);
      }
      ++reclaimed_;
      auto gone = std::move(segments_.extract(from).mapped());
      if (!unlink) spare_.emplace(number, std::move(gone.file));
      owner_.destroyed(from, gone.ids);
      prepare();
    });
  });
}

void Store::error(const Status& status) {
  ++errors_;
  static log::Once once(10'000);
  if (once.pass()) log::error("pool", status.with("SSD " + options_.path).to_string());
  if (++in_a_row_ >= kErrorsInARow && !failed_) fail(status);
}

void Store::fail(const Status& why) {
  failed_ = true;
  log::error("pool", why.with("the SSD in " + options_.path + " is taken out of service").to_string());
  owner_.out_of_service();
  worker_->run([folder = options_.path] {
    if (Status s = disown(folder); !s.is_ok()) log::error("pool", s.to_string());
  });
  for (auto* list : {&running_marks_, &waiting_marks_})
    for (auto& [spots, done] : std::exchange(*list, {})) done({});
  pump_reads();
}

}  // namespace torch_mooncake::pool::ssd
