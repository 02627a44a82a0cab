// The donor's invariants: every byte is somebody's or free, every extent is where its state says, nothing is left over.
#include <algorithm>

#include "pool/donor_impl.h"

namespace torch_mooncake::pool {

Status DonorImpl::check() const {
  TM_TRY(table_->check());
  TM_TRY(space_.check());
  TM_TRY(lru_.check());
  TM_TRY(check_tiers());
  auto wrong = [](uint32_t index, const char* what) {
    return Status(Code::corrupt, "donor: extent " + std::to_string(index) + ": " + what);
  };
  struct Run {
    uint64_t begin, end;
    uint32_t index;
  };
  std::vector<Run> runs;
  std::vector<uint64_t> in_quotas(quotas_.size());
  uint64_t used = 0, kept_bytes = 0, granted = 0;
  size_t evictable = 0, prepared = 0, limbo = 0, children = 0;
  for (uint32_t i = 0; i < table_->entries(); ++i) {
    const ExtentState state = table_->state(i);
    if (state == ExtentState::free) {
      if (lru_.contains(i)) return wrong(i, "free, but in the eviction lists");
      if (hints_.count(i)) return wrong(i, "free, but has a hint pin");
      continue;
    }
    const Record record = table_->record(i);
    uint64_t nbytes = 0;
    for (const Piece& piece : record.placement.pieces) {
      if (piece.nbytes == 0 || piece.offset + piece.nbytes > data_->size()) return wrong(i, "piece out of bounds");
      runs.push_back({piece.offset, piece.offset + piece.nbytes, i});
      nbytes += piece.nbytes;
    }
    if (nbytes != table_->at(i).nbytes) return wrong(i, "pieces do not add up");
    if (record.placement.pieces.size() > kMaxPieces) return wrong(i, "too many pieces");
    used += Allocator::footprint(record.placement);
    const uint8_t group = state == ExtentState::limbo || grants_.count(i) ? 0 : group_of(record.key);
    if (counted(i) != group || (lru_.contains(i) && lru_.group(i) != group)) return wrong(i, "in another quota");
    if (group) in_quotas[group - 1] += Allocator::footprint(record.placement);
    children += state != ExtentState::limbo && !record.parent.empty();

    const bool ready = state == ExtentState::committed || state == ExtentState::final;
    const bool kept = kept_.count(i) != 0;
    if (lru_.contains(i) != (ready && !kept)) return wrong(i, "in the eviction lists exactly when committed or final");
    if (kept && (!ready || table_->at(i).pin != static_cast<uint8_t>(Pin::hard))) return wrong(i, "kept for no reason");
    if (kept) kept_bytes += footprint(i);
    if (valid(i) != (ready || state == ExtentState::prepared)) return wrong(i, "generation word and state disagree");
    if (ready && table_->at(i).writer != 0) return wrong(i, "committed, but has a writer");
    evictable += ready && !kept;
    if (grants_.count(i)) {
      if (state != ExtentState::prepared || !record.key.empty()) return wrong(i, "granted, but somebody's object");
      granted += footprint(i);
    } else if (state == ExtentState::prepared) {
      const auto txn = open_.find(record.txn);
      if (txn == open_.end() || std::count(txn->second.begin(), txn->second.end(), i) != 1)
        return wrong(i, "prepared, but in no transaction");
      ++prepared;
    }
    if (state == ExtentState::limbo) {
      if (std::count(limbo_.begin(), limbo_.end(), i) != 1) return wrong(i, "lost in limbo");
      ++limbo;
    }
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
  for (size_t k = 1; k < runs.size(); ++k)
    if (runs[k].begin < runs[k - 1].end) return wrong(runs[k].index, "overlaps another");
  if (used != space_.used_bytes())
    return {Code::corrupt, "donor: extents take " + std::to_string(used) + " bytes, the allocator says " +
                               std::to_string(space_.used_bytes())};
  size_t open = 0;
  for (const auto& [txn, extents] : open_) open += extents.size();
  if (open != prepared) return {Code::corrupt, "donor: a transaction has extents that are not prepared"};
  if (granted != granted_bytes_) return {Code::corrupt, "donor: grants do not add up"};
  if (limbo_.size() != limbo) return {Code::corrupt, "donor: limbo has extents that are elsewhere"};
  for (size_t g = 0; g < quotas_.size(); ++g)
    if (in_quotas[g] != quotas_[g].used_here) return {Code::corrupt, "donor: a quota does not add up"};
  if (children != families_.children()) return {Code::corrupt, "donor: children do not add up"};
  if (kept_bytes != kept_bytes_) return {Code::corrupt, "donor: what is pinned hard does not add up"};
  if (lru_.size() != evictable) return {Code::corrupt, "donor: eviction lists have members that are gone"};
  return {};
}

}  // namespace torch_mooncake::pool
