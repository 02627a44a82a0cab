// A copy of pages cut into units that threads can share out: at most 1 MiB of one page each.
#pragma once

#include "kv/pages.h"

namespace torch_mooncake::kv {

class CopyPlan {
 public:
  explicit CopyPlan(const PageCopy& copy);  // which must outlive it

  int64_t units() const { return static_cast<int64_t>(copy_.regions.size()) * copy_.count() * parts_; }
  int64_t grain() const;  // units that are worth the wake-up of a thread
  void run(int64_t begin, int64_t end) const;

 private:
  struct Place {
    const std::byte* src;
    std::byte* dst;
  };
  Place place(int64_t region, int64_t i) const;
  Place part(Place page, int64_t index) const;  // of a page with dimensions
  void run_contiguous(int64_t begin, int64_t end) const;
  void run_strided(int64_t begin, int64_t end) const;

  const PageCopy& copy_;
  const PagePattern& page_;
  bool non_temporal_;
  int64_t parts_ = 1;        // of a page
  int outer_dims_ = 0;       // a part is one index of these dimensions, with all of the others
  int64_t part_nbytes_ = 0;  // of a full part
};

}  // namespace torch_mooncake::kv
