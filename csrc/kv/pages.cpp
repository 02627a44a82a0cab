#include "kv/pages.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "kv/cpu/copy_plan.h"

namespace torch_mooncake::kv {
namespace {

std::string twice(const PageIds& ids, int64_t position, const std::string& name) {
  int64_t first = 0;
  while (ids[first] != ids[position]) ++first;
  return name + " has " + std::to_string(ids[position]) + " twice, at positions " + std::to_string(first) + " and " +
         std::to_string(position) + ": a page can be written once";
}

// A page that is read and written in one copy would be read before or after: nobody's guess either.
Status check_disjoint(const PageCopy& copy) {
  std::vector<bool> read(static_cast<size_t>(copy.src_pages));
  for (int64_t i = 0; i < copy.count(); ++i) read[copy.src_ids[i]] = true;
  for (int64_t i = 0; i < copy.count(); ++i)
    if (read[copy.dst_ids[i]])
      return {Code::invalid_argument, std::string(copy.dst_ids_name) + "[" + std::to_string(i) + "] is " +
                                          std::to_string(copy.dst_ids[i]) + ", which is in " + copy.src_ids_name +
                                          " too: a page of one pool is read or written, not both"};
  return {};
}

}  // namespace

void serial_for(int64_t n, int64_t, const ParallelBody& fn) { fn(0, n); }

Result<PagePattern> make_pattern(std::span<const CopyDim> dims, int64_t element_nbytes) {
  std::vector<CopyDim> kept;
  for (const CopyDim& dim : dims) {
    if (dim.size == 0) return PagePattern{};
    if (dim.size != 1) kept.push_back(dim);
  }
  std::stable_sort(kept.begin(), kept.end(), [](const CopyDim& a, const CopyDim& b) {
    int64_t left = std::abs(a.dst_stride), right = std::abs(b.dst_stride);
    return left != right ? left > right : std::abs(a.src_stride) > std::abs(b.src_stride);
  });
  std::vector<CopyDim> merged;
  for (const CopyDim& dim : kept) {
    if (!merged.empty()) {
      CopyDim& outer = merged.back();
      if (outer.src_stride == dim.size * dim.src_stride && outer.dst_stride == dim.size * dim.dst_stride) {
        outer = {outer.size * dim.size, dim.src_stride, dim.dst_stride};
        continue;
      }
    }
    merged.push_back(dim);
  }
  PagePattern pattern;
  pattern.run_nbytes = element_nbytes;
  if (!merged.empty() && merged.back().src_stride == element_nbytes && merged.back().dst_stride == element_nbytes) {
    pattern.run_nbytes *= merged.back().size;
    merged.pop_back();
  }
  if (merged.size() > kMaxCopyDims)
    return {Code::invalid_argument, "a page has " + std::to_string(merged.size()) +
                                        " dimensions that neither side has densely: at most " +
                                        std::to_string(kMaxCopyDims) + " can be copied"};
  pattern.num_dims = static_cast<int>(merged.size());
  std::copy(merged.begin(), merged.end(), pattern.dims);
  return pattern;
}

bool places_overlap(std::vector<Extent> dims, int64_t element_nbytes) {
  for (const Extent& dim : dims)
    if (dim.size == 0) return false;
  std::sort(dims.begin(), dims.end(),
            [](const Extent& a, const Extent& b) { return std::abs(a.stride) < std::abs(b.stride); });
  int64_t reach = element_nbytes;
  for (const Extent& dim : dims) {
    if (dim.size == 1) continue;
    if (std::abs(dim.stride) < reach) return true;
    reach += (dim.size - 1) * std::abs(dim.stride);
  }
  return false;
}

Status check_page_ids(const PageIds& ids, int64_t num_pages, bool unique, const std::string& name) {
  if (ids.data == nullptr) {
    if (ids.count <= num_pages) return {};
    return {Code::out_of_bounds,
            name + " has " + std::to_string(ids.count) + " places for " + std::to_string(num_pages) + " pages"};
  }
  for (int64_t i = 0; i < ids.count; ++i) {
    if (int64_t id = ids[i]; id < 0 || id >= num_pages)
      return {Code::out_of_bounds, name + "[" + std::to_string(i) + "] is " + std::to_string(id) + ", not in [0, " +
                                       std::to_string(num_pages) + ")"};
  }
  if (!unique) return {};
  std::vector<bool> seen(static_cast<size_t>(ids.count == 0 ? 0 : num_pages));
  for (int64_t i = 0; i < ids.count; ++i) {
    if (seen[ids[i]]) return {Code::invalid_argument, twice(ids, i, name)};
    seen[ids[i]] = true;
  }
  return {};
}

Status check_copy(const PageCopy& copy) {
  if (copy.src_ids.count != copy.dst_ids.count)
    return {Code::invalid_argument, std::string(copy.src_ids_name) + " has " + std::to_string(copy.src_ids.count) +
                                        " ids, " + copy.dst_ids_name + " " + std::to_string(copy.dst_ids.count)};
  if (copy.page.run_nbytes < 0 || copy.page.num_dims < 0 || copy.page.num_dims > kMaxCopyDims)
    return {Code::invalid_argument, "no page has this shape"};
  if (!copy.src_ids.on_device) TM_TRY(check_page_ids(copy.src_ids, copy.src_pages, false, copy.src_ids_name));
  if (!copy.dst_ids.on_device) TM_TRY(check_page_ids(copy.dst_ids, copy.dst_pages, true, copy.dst_ids_name));
  if (copy.in_place && !copy.src_ids.on_device && !copy.dst_ids.on_device) TM_TRY(check_disjoint(copy));
  std::vector<Extent> places{{copy.dst_pages, copy.dst_page_stride}};
  for (int d = 0; d < copy.page.num_dims; ++d) places.push_back({copy.page.dims[d].size, copy.page.dims[d].dst_stride});
  if (copy.nbytes() > 0 && places_overlap(places, copy.page.run_nbytes))
    return {Code::invalid_argument, "pages to be written overlap: stride " + std::to_string(copy.dst_page_stride) +
                                        " bytes, page " + std::to_string(copy.page.page_nbytes()) + " bytes"};
  return {};
}

Status copy_pages(const PageCopy& copy, const ParallelFor& parallel_for) {
  if (copy.src_ids.on_device || copy.dst_ids.on_device)
    return {Code::invalid_argument, "ids on a device cannot be read by the CPU"};
  TM_TRY(check_copy(copy));
  if (copy.nbytes() == 0) return {};
  CopyPlan plan(copy);
  parallel_for(plan.units(), plan.grain(), [&plan](int64_t begin, int64_t end) { plan.run(begin, end); });
  return {};
}

}  // namespace torch_mooncake::kv
