// Grants: extents that a client has before it says for what. They belong to no key and no transaction, and end with
// their session, with the worker, or when its node leaves; a commit that names one makes it an object's.
#include "pool/donor_impl.h"

namespace torch_mooncake::pool {
namespace {

constexpr uint64_t kGrantShare = 16;  // of the memory, that all grants together may take

}  // namespace

Result<Reservation> DonorImpl::grant(uint64_t nbytes, SessionId writer, const TxnId& txn) {
  if (nbytes == 0 || writer == 0) return {Code::invalid_argument, "a grant of nothing, or to nobody"};
  const uint64_t want = Allocator::footprint(nbytes);
  const bool quota_of_all = group_of("") != 0;
  if (granted_bytes_ + want > options_.limit_bytes / kGrantShare || quota_of_all || !table_->has_free_entry() ||
      !space_.fits(nbytes))
    return {Code::pool_full, "no room to grant in advance"};
  Record record;
  record.txn = txn;
  TM_ASSIGN(record.placement, space_.allocate(nbytes, table_->next_index()));
  TM_ASSIGN(auto granted, add_extent(record, nbytes, writer, false));
  grants_.insert(granted.extent.index);
  granted_bytes_ += want;
  return granted;
}

void DonorImpl::end_grants() {
  if (!grants_.empty()) retire({grants_.begin(), grants_.end()});
}

Status DonorImpl::bind(ExtentRef extent, const ReserveRequest& request) {
  if (tiered(extent)) return {};  // told twice, and on an SSD since
  TM_TRY(check_request(request));
  TM_ASSIGN(const uint32_t index, find(extent));
  if (!grants_.count(index)) {
    const Record record = table_->record(index);
    if (valid(index) && record.txn == request.txn && record.key == request.key) return {};  // told twice
    return {Code::key_not_found, "extent " + std::to_string(index) + " is not granted"};
  }
  const ExtentEntry& e = table_->at(index);
  if (e.writer != request.writer || e.nbytes != request.nbytes)
    return {Code::invalid_argument, "extent " + std::to_string(index) + " is another writer's, or of another size"};
  const auto bound = with_parent(request, [&]() -> Result<uint32_t> {
    TM_TRY(make_quota_room(request));
    Record record{request.txn, request.part,  request.parts, request.kind,  table_->record(index).placement,
                  request.key, request.label, request.meta,  request.parent};
    TM_TRY(table_->rebind(index, record));
    grants_.erase(index);
    granted_bytes_ -= footprint(index);
    open_[request.txn].push_back(index);
    count(index);
    return index;
  });
  return bound.status();
}

}  // namespace torch_mooncake::pool
