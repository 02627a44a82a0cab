// Store: a log of records in one folder. Appends go to the open segment; a full one is sealed; when there is room for
// no more the oldest is reclaimed: a few records that its owner still wants are moved to the end, the others are lost
// (it is a cache), and its file is used again.
//
// The owner keeps the index (what is where) and asks by spot. It may rely on this:
//   * a spot that write() or moving() named may be found at the next start, whatever is reported of it, until
//     destroyed() of its segment or mark() of it is done;
//   * read() gives the bytes that were written there, or an error: corrupt (a checksum), io, key_not_found (its
//     segment is being reclaimed);
//   * write() never waits: none is returned when the queue is full, the log has no room at this moment, or it is out of
//     service;
//   * a disk that fails again and again, answers nothing for 10 s, or one request not in a minute, is taken out of
//     service, once: out_of_service().
//     From then on everything fails at once, and marks need not be written any more.
//
// Threads: the owner's alone; results come through its inbox. Disk work happens on the store's thread and the I/O
// queue.
#pragma once

#include <atomic>
#include <map>
#include <optional>

#include "common/api.h"
#include "common/clock.h"
#include "pool/ssd/recovery.h"

namespace torch_mooncake::pool::ssd {

struct Loaded {
  Head head;
  Buffer buffer;
  const std::byte* data = nullptr;  // in `buffer`
};

class Owner {
 public:
  virtual ~Owner() = default;
  // Where that record is, if it is worth a place at the end of the log.
  virtual std::optional<Spot> worth_moving(uint64_t id, uint64_t segment) = 0;
  virtual void moving(uint64_t id, const Spot& from, const Spot& to) = 0;
  virtual void moved(uint64_t id, const Spot& to, const Status& status) = 0;
  virtual void destroyed(uint64_t segment, const std::vector<uint64_t>& ids) = 0;
  virtual void out_of_service() = 0;
};

struct StoreOptions {
  std::string path;
  uint64_t limit_bytes = 0;
  uint64_t segment_bytes = 0;  // 0: a sixteenth of the limit, 4 MiB to 2 GiB
  uint64_t queue_bytes = 64 << 20;
  std::shared_ptr<Inbox> inbox;
  std::shared_ptr<transfer::IoQueue> queue;
};
inline constexpr uint64_t kLeastLimit = 64 << 20;

struct StoreStats {
  std::string path;
  uint64_t limit_bytes = 0;
  uint64_t used_bytes = 0;     // of files on the disk
  uint64_t writing_bytes = 0;  // in the queue
  uint64_t errors = 0, corrupt = 0;
  uint64_t moved = 0, reclaimed = 0;  // records; segments
  bool direct = false, out_of_service = false;
};

class TM_API Store {
 public:
  using Done = std::function<void(const Status&)>;
  static Result<std::unique_ptr<Store>> open(const StoreOptions& options, Owner& owner);
  ~Store();

  const Id128& id() const { return id_; }
  // What was found, once; each that the owner keeps is to be adopted.
  std::vector<Head> take_found() { return std::move(found_); }
  void adopt(uint64_t id, const Spot& spot) { segments_.at(spot.segment).ids.push_back(id); }

  bool fits(const Record& record) const { return blocks_of(record) * kBlock + 3 * kBlock <= segment_bytes_; }
  bool has_free_space() const { return !failed_ && segments_.size() + 1 < max_segments_; }  // displaces nothing
  bool full() const { return failed_ || writing_bytes_ >= options_.queue_bytes || stalled(); }
  bool stalled() const;  // it serves, and a request has been in the disk for a second
  bool room_soon() const { return !failed_ && !stalled() && !spare_ && (preparing_ || reclaiming_); }
  // `data` are the record's bytes, stable until done: whole blocks in memory of that alignment if they are kSlabLimit
  // or more. `hold` keeps that memory.
  std::optional<Spot> write(uint64_t id, Record record, std::vector<iovec> data, std::shared_ptr<void> hold, Done done);
  void read(const Spot& spot, std::function<void(Result<Loaded>)> done);
  // Without the bytes. `blocks`: what is read first.
  void read_head(const Spot& spot, std::function<void(Result<Head>)> done, uint64_t blocks = 8);
  // Durable when done. Groups of them share one fdatasync.
  void mark(std::vector<Spot> spots, Done done);
  void tick(int64_t now_ns);

  bool out_of_service() const { return failed_; }
  StoreStats stats() const;
  Status check() const;

 private:
  enum class State : uint8_t { open, sealing, sealed, leaving };
  struct Segment {
    DataFilePtr file;
    State state = State::sealed;
    uint32_t next_block = 1;
    uint64_t index_nbytes = 0;
    uint32_t writes = 0, reads = 0;
    std::vector<uint64_t> ids;  // of records that were whole when they were written
    std::vector<Head> index;    // until it is sealed
  };
  struct Pending {
    Spot spot;
    std::function<void(Result<Loaded>)> done;
    bool whole = true;  // a record; else its beginning, as it is
  };

  Store(StoreOptions options, Owner& owner, Opened opened);
  bool has_room(uint64_t number, const Record& record) const;
  std::optional<Spot> place(const Record& record);
  void submit(uint64_t id, const Spot& spot, Record record, std::vector<iovec> data, std::shared_ptr<void> hold,
              Done done);
  void written_back(const Spot& spot, const Status& status, Done done);
  void written(uint64_t id, const Spot& spot, const Record& record, uint32_t data_crc, const Status& status,
               const Done& done);
  void pump_reads();
  void pump_marks();
  void seal_if_idle(uint64_t number);
  // store_reclaim.cpp
  void prepare();
  void make_segment();
  void reclaim();
  void move(uint64_t id, const Spot& from);
  void move_over();
  void destroy_if_idle();
  void succeeded() { in_a_row_ = 0; }
  void error(const Status& status);
  void fail(const Status& why);
  uint64_t begin_op();
  void end_op(uint64_t op) {
    ops_.erase(op);
    moved_on_ns_ = steady_ns();
  }
  uint64_t next_number() { return opens_ << 32 | ++made_; }

  const StoreOptions options_;
  Owner& owner_;
  UniqueFd lock_;
  const Id128 id_;
  const uint64_t segment_bytes_, opens_;
  const bool direct_;
  const uint64_t max_segments_;
  std::shared_ptr<Marks> marks_;  // the worker's
  std::shared_ptr<Worker> worker_;
  std::vector<Head> found_;

  std::map<uint64_t, Segment> segments_;  // by number: oldest first
  std::optional<uint64_t> open_;
  std::optional<std::pair<uint64_t, DataFilePtr>> spare_;
  bool preparing_ = false;
  int64_t no_room_until_ns_ = 0;
  std::optional<uint64_t> reclaiming_;
  uint32_t moves_ = 0;
  uint64_t moving_bytes_ = 0;

  uint64_t writing_bytes_ = 0, reading_bytes_ = 0;
  std::deque<Pending> waiting_reads_;
  std::vector<std::pair<std::vector<Spot>, Done>> waiting_marks_, running_marks_;
  std::map<uint64_t, int64_t> ops_;  // since when: in the disk
  int64_t moved_on_ns_ = 0;          // when one was over last
  uint64_t next_op_ = 0, made_ = 0;
  uint64_t errors_ = 0, corrupt_ = 0, moved_ = 0, reclaimed_ = 0;
  uint32_t in_a_row_ = 0;
  bool failed_ = false;
};

}  // namespace torch_mooncake::pool::ssd
