#include "transfer/copy_part.h"

#include "common/failpoint.h"
#include "transfer/engine_impl.h"

namespace torch_mooncake::transfer {

CopyPart::CopyPart(OpImplPtr op, std::vector<CopyPiece> pieces, std::string transport)
    : op_(std::move(op)), pieces_(std::move(pieces)), transport_(std::move(transport)) {
  for (auto& piece : pieces_) nbytes_ += piece.nbytes;
}

void CopyPart::run() {
  auto self = shared_from_this();
  op_->add(self);
  if (nbytes_ <= kInlineBytes) return work_once();
  op_->peer().engine().mover().post([self] { self->work_once(); });
}

bool CopyPart::claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }

void CopyPart::work_once() {
  if (claim()) work();
}

void CopyPart::help(Deadline deadline, int64_t) {
  if (nbytes_ <= kHelpBytes || deadline.ns() >= op_->deadline().ns()) work_once();
}

void CopyPart::stop(const Status& why) {
  if (claim()) finish(why);  // not begun; otherwise work() sees op().stopping()
}

void CopyPart::work() {
  Status status = acquire();
  if (!status) return finish(status);
  status = copy_all();
  if (status) status = validate();
  release();
  finish(status);
}

Status CopyPart::copy_all() {
  size_t first = 0;
  while (first < pieces_.size()) {
    if (op_->stopping()) return op_->stop_reason();
    if (op_->deadline().expired()) return {Code::deadline_exceeded, "its deadline passed"};
    TM_TRY(failpoint("transfer.copy"));
    uint64_t step = 0;
    size_t count = 0;
    std::span<CopyPiece> rest = std::span(pieces_).subspan(first);
    while (count < rest.size() && step + rest[count].nbytes <= kStepBytes) step += rest[count++].nbytes;
    if (count > 0) {
      TM_TRY(copy(rest.first(count)));
      first += count;
    } else {  // one piece longer than a step: cut it
      CopyPiece& piece = rest[0];
      CopyPiece head{piece.dst, piece.src, kStepBytes};
      TM_TRY(copy({&head, 1}));
      piece.dst = static_cast<char*>(piece.dst) + kStepBytes;
      piece.src = static_cast<const char*>(piece.src) + kStepBytes;
      piece.nbytes -= kStepBytes;
      step = kStepBytes;
    }
    op_->add_bytes_done(step);
  }
  return {};
}

void CopyPart::finish(const Status& status) {
  bool writes = op_->direction() == Direction::write;
  uint64_t moved = status ? nbytes_ : 0;
  op_->peer().engine().metrics().bytes(transport_, writes ? moved : 0, writes ? 0 : moved);
  op_->quiescent(*this);  // whatever was written was written by this thread
  op_->part_done(shared_from_this(), status);
}

void add_copy_sizes(Explanation& out) {
  for (auto direction : {"read", "write"}) {
    out.sizes.push_back({direction, CopyPart::kInlineBytes, "copied on the caller's thread"});
    out.sizes.push_back({direction, UINT64_MAX, "copied by the mover, or by who waits, and the copy threads"});
  }
}

}  // namespace torch_mooncake::transfer
