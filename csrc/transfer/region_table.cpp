#include "transfer/region_table.h"

#include "common/random.h"
#include "transfer/rdma/memory.h"

namespace torch_mooncake::transfer {

std::string RegionImpl::name() const {
  std::string out = "region " + std::to_string(id_);
  if (!options_.label.empty()) out += " '" + options_.label + "'";
  return out;
}

std::shared_ptr<rdma::RegionKeys> RegionImpl::nic_keys() const {
  std::lock_guard lock(keys_mutex_);
  return nic_keys_;
}

// Made without the lock, as that takes long: who asks whether there are any does not wait.
Status RegionImpl::ensure_nic_keys(const std::function<Result<std::shared_ptr<rdma::RegionKeys>>()>& make) {
  std::unique_lock lock(keys_mutex_);
  keys_made_.wait(lock, [&] { return !making_keys_; });  // whoever wants them meanwhile: they are made once
  if (nic_keys_) return {};
  if (forgotten_) return {Code::key_not_found, name() + " is not registered any more"};
  making_keys_ = true;
  lock.unlock();
  auto made = make();
  lock.lock();
  making_keys_ = false;
  keys_made_.notify_all();
  TM_TRY(made.status());
  if (forgotten_) {
    lock.unlock();
    return {Code::key_not_found, name() + " is not registered any more"};
  }
  nic_keys_ = std::move(*made);
  nic_keys_->set_generation(word_.load());
  return {};
}

RegionTable::RegionTable(const Id128& engine) : engine_(engine), next_generation_(random_u64() | 1) {}

RegionImplPtr RegionTable::add(Place place, RegionOptions options,
                               const std::function<std::vector<AccessRecord>(const RegionImpl&)>& records) {
  auto region = std::make_shared<RegionImpl>();
  region->data_ = static_cast<std::byte*>(place.data);
  region->nbytes_ = place.nbytes;
  region->options_ = std::move(options);
  region->kind_ = place.kind;
  const bool on_nics = place.kind == MemoryKind::cuda && place.nic_keys;
  region->local_kind_ = on_nics ? LocalKind::cuda_on_nics : as_local(place.kind);
  region->backing_ = std::move(place.backing);
  region->segment_ = std::move(place.segment);
  region->segment_offset_ = place.segment_offset;
  region->nic_keys_ = std::move(place.nic_keys);
  region->engine_ = engine_;
  {
    std::lock_guard lock(mutex_);
    region->id_ = next_id_++;
    region->generation_ = next_generation_;
    next_generation_ += 2;  // odd: never the zero that a dead word holds
  }
  region->word_.store(region->generation_, std::memory_order_release);
  if (region->nic_keys_) region->nic_keys_->set_generation(region->generation_);
  Descriptor d;
  d.engine = engine_;
  d.kind = region->kind_;
  d.region = region->id_;
  d.generation = region->generation_;
  d.nbytes = region->nbytes_;
  d.readable = region->options_.readable;
  d.writable = region->options_.writable;
  d.label = region->options_.label;
  d.access = records(*region);
  region->descriptor_ = d.encode();
  std::lock_guard lock(mutex_);
  live_.emplace(region->id_, region);
  auto begin = reinterpret_cast<uint64_t>(region->data_);
  if (begin != 0) index_.insert(begin, begin + region->nbytes_, region->id_);
  return region;
}

RegionImplPtr RegionTable::find(uint64_t id, uint64_t generation) const {
  std::lock_guard lock(mutex_);
  auto it = live_.find(id);
  return it == live_.end() || it->second->generation_ != generation ? nullptr : it->second;
}

RegionImplPtr RegionTable::at(const void* address, uint64_t nbytes) const {
  auto begin = reinterpret_cast<uint64_t>(address);
  if (begin + nbytes < begin) return nullptr;
  std::lock_guard lock(mutex_);
  auto it = live_.find(index_.find(begin, begin + nbytes));
  return it == live_.end() ? nullptr : it->second;
}

void RegionTable::forget_address(const RegionImpl& region) {
  std::lock_guard lock(mutex_);
  index_.erase(reinterpret_cast<uint64_t>(region.data_), region.id_);
}

bool RegionTable::remove(const RegionImplPtr& region) {
  {
    std::lock_guard lock(mutex_);
    auto it = live_.find(region->id_);
    if (it == live_.end() || it->second != region) return false;
    region->word_.store(0, std::memory_order_seq_cst);
    index_.erase(reinterpret_cast<uint64_t>(region->data_), region->id_);
    quarantined_.insert(live_.extract(it));
  }
  if (auto keys = region->nic_keys()) keys->set_generation(0);  // those made from now on begin with it
  return true;
}

std::shared_ptr<void> RegionTable::forget(const RegionImplPtr& region) {
  {
    std::lock_guard lock(mutex_);
    if (quarantined_.erase(region->id_) == 0) return nullptr;
  }
  std::shared_ptr<rdma::RegionKeys> keys;  // fences when it goes, without the lock
  {
    std::lock_guard lock(region->keys_mutex_);
    region->forgotten_ = true;
    keys = std::move(region->nic_keys_);
  }
  return std::move(region->options_.keep);
}

namespace {

std::vector<RegionImplPtr> values(const std::unordered_map<uint64_t, RegionImplPtr>& map) {
  std::vector<RegionImplPtr> out;
  for (auto& [id, region] : map) out.push_back(region);
  return out;
}

}  // namespace

std::vector<RegionImplPtr> RegionTable::live() const {
  std::lock_guard lock(mutex_);
  return values(live_);
}

std::vector<RegionImplPtr> RegionTable::quarantined() const {
  std::lock_guard lock(mutex_);
  return values(quarantined_);
}

uint64_t RegionTable::live_count() const {
  std::lock_guard lock(mutex_);
  return live_.size();
}

uint64_t RegionTable::quarantined_count() const {
  std::lock_guard lock(mutex_);
  return quarantined_.size();
}

}  // namespace torch_mooncake::transfer
