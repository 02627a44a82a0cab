// A copy of pages cut into units that threads can share out: at most 1 MiB of one page each.
#pragma once

#include <span>
#include <vector>

#include "kv/pages.h"

namespace torch_mooncake::kv {

class CopyPlan {
 public:
  explicit CopyPlan(const PageCopy& copy);  // which must outlive it

  int64_t units() const { return groups() * copy_.count() * parts_; }
  int64_t grain() const;  // units that are worth the wake-up of a thread
  void run(int64_t begin, int64_t end) const;

 private:
  // Regions whose source pages lie within each other (heads of the same tokens): read together, row by row.
  using Bundle = std::span<const CopyRegion>;
  struct Offset {
    int64_t dst;
    int64_t src;
  };
  void plan_strided();
  void bundle();
  int64_t groups() const { return static_cast<int64_t>(strided() ? bundles_.size() : copy_.regions.size()); }
  bool strided() const { return page_.num_dims > 0; }
  Offset page(int64_t i) const;
  Offset part(int64_t index) const;
  void run_contiguous(int64_t begin, int64_t end) const;
  void run_strided(int64_t begin, int64_t end) const;
  void copy_dims(int first_dim, const Bundle& bundle, Offset at, int64_t ahead) const;
  void copy_rows(const CopyDim& rows, std::byte* dst, const std::byte* src, int64_t ahead) const;

  const PageCopy& copy_;
  PagePattern page_;   // strided: in the order of the loops
  bool non_temporal_;  // stores go around the cache
  std::vector<CopyRegion> regions_;
  std::vector<Bundle> bundles_;
  int64_t parts_ = 1;        // of a page
  int outer_dims_ = 0;       // strided: a part is one index of these dimensions, with all of the others
  int64_t part_nbytes_ = 0;  // of a full part
};

}  // namespace torch_mooncake::kv
