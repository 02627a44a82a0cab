#include "memory/shared_heap.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "memory/host_memory.h"

namespace torch_mooncake {
namespace {
constexpr size_t kSlabBytes = size_t{4} << 20;
constexpr size_t kOwnSegment = size_t{1} << 20;
}  // namespace

struct SharedHeap::Impl {
  // A mapped segment: a slab with a page map, or one allocation's own (no page map).
  struct Block {
    std::shared_ptr<Segment> segment;
    MappingPtr mapping;
    std::vector<bool> used;  // slabs only
    size_t live = 0;
  };
  struct Allocation {
    size_t nbytes;
    std::shared_ptr<Block> block;
  };

  mutable std::mutex mutex;
  std::map<uintptr_t, Allocation> allocations;  // by start address
  std::vector<std::shared_ptr<Block>> slabs;
  size_t own_segments = 0;
  size_t bytes_allocated = 0, bytes_held = 0;

  static Result<std::shared_ptr<Block>> make_block(size_t nbytes, bool is_slab) {
    TM_ASSIGN(auto segment, Segment::create(is_slab ? "tm-slab" : "tm-tensor", nbytes, nbytes));
    TM_ASSIGN(auto mapping, segment->map(Protection::read_write));
    auto block = std::make_shared<Block>();
    block->segment = std::move(segment);
    block->mapping = std::move(mapping);
    if (is_slab) block->used.resize(nbytes / page_size());
    return block;
  }

  void* add(std::shared_ptr<Block> block, size_t offset, size_t nbytes) {
    auto* pointer = block->mapping->data + offset;
    ++block->live;
    bytes_allocated += nbytes;
    allocations.emplace(reinterpret_cast<uintptr_t>(pointer), Allocation{nbytes, std::move(block)});
    return pointer;
  }

  // First run of `pages` free pages, or -1.
  static ptrdiff_t find_run(const std::vector<bool>& used, size_t pages) {
    size_t run = 0;
    for (size_t i = 0; i < used.size(); ++i) {
      run = used[i] ? 0 : run + 1;
      if (run == pages) return static_cast<ptrdiff_t>(i + 1 - pages);
    }
    return -1;
  }

  void* take_from(const std::shared_ptr<Block>& slab, size_t nbytes) {
    size_t pages = nbytes / page_size();
    ptrdiff_t first = find_run(slab->used, pages);
    if (first < 0) return nullptr;
    for (size_t i = 0; i < pages; ++i) slab->used[first + i] = true;
    return add(slab, first * page_size(), nbytes);
  }
};

SharedHeap::SharedHeap() : impl_(new Impl) {}

SharedHeap& SharedHeap::instance() {
  static auto* heap = [] {
    auto* made = new SharedHeap;
    ::pthread_atfork([] { instance().impl_->mutex.lock(); }, [] { instance().impl_->mutex.unlock(); },
                     [] { instance().impl_->mutex.unlock(); });
    return made;
  }();
  return *heap;
}

Result<void*> SharedHeap::allocate(size_t nbytes) {
  if (nbytes > (size_t{1} << 46)) return {Code::invalid_argument, "shared allocation of " + std::to_string(nbytes)};
  size_t rounded = (std::max<size_t>(nbytes, 1) + page_size() - 1) & ~(page_size() - 1);
  if (rounded < kOwnSegment) {
    std::lock_guard lock(impl_->mutex);
    for (auto& slab : impl_->slabs) {
      if (void* pointer = impl_->take_from(slab, rounded)) return pointer;
    }
  }
  bool is_slab = rounded < kOwnSegment;
  TM_ASSIGN(auto block, Impl::make_block(is_slab ? kSlabBytes : rounded, is_slab));
  std::lock_guard lock(impl_->mutex);
  impl_->bytes_held += block->segment->size();
  if (!is_slab) {
    ++impl_->own_segments;
    return impl_->add(std::move(block), 0, rounded);
  }
  impl_->slabs.push_back(block);
  return impl_->take_from(block, rounded);
}

void SharedHeap::free(void* pointer) {
  std::shared_ptr<Impl::Block> block;  // unmapped after the lock is released
  std::lock_guard lock(impl_->mutex);
  auto found = impl_->allocations.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == impl_->allocations.end()) {
    std::fprintf(stderr, "torch_mooncake: free of %p, which the shared heap did not give\n", pointer);
    std::abort();
  }
  block = found->second.block;
  size_t nbytes = found->second.nbytes;
  impl_->allocations.erase(found);
  impl_->bytes_allocated -= nbytes;
  --block->live;
  if (block->used.empty()) {
    --impl_->own_segments;
  } else {
    size_t first = (static_cast<std::byte*>(pointer) - block->mapping->data) / page_size();
    for (size_t i = 0; i < nbytes / page_size(); ++i) block->used[first + i] = false;
    if (block->live > 0) return;
    std::erase(impl_->slabs, block);
  }
  impl_->bytes_held -= block->segment->size();
}

std::optional<SharedHeap::Place> SharedHeap::find(const void* address, size_t nbytes) const {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard lock(impl_->mutex);
  auto after = impl_->allocations.upper_bound(at);
  if (after == impl_->allocations.begin()) return {};
  const auto& [start, allocation] = *std::prev(after);
  if (nbytes > allocation.nbytes || at - start > allocation.nbytes - nbytes) return {};
  auto* base = allocation.block->mapping->data;
  return Place{allocation.block->segment, at - reinterpret_cast<uintptr_t>(base)};
}

SharedHeap::Stats SharedHeap::stats() const {
  std::lock_guard lock(impl_->mutex);
  return {impl_->allocations.size(), impl_->slabs.size() + impl_->own_segments, impl_->bytes_allocated,
          impl_->bytes_held};
}

}  // namespace torch_mooncake
