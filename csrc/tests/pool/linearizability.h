// Is a history of one key's operations linearizable? Wing and Gong's search with memory. The key is a register whose
// value 0 means "missing". An operation that was never answered may have happened at any time after its call, or not
// at all. A loss (eviction, a donor's end) may remove the value at any time after it began, any number of times: misses
// are allowed then, old values never. A removal that was repeated, as its first answer was lost, may have removed what
// was put in between too (`remove_again`, besides its `remove`).
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace torch_mooncake::pool::test {

struct HistoryOp {
  enum class What {
    put,
    put_if_absent,
    kept,
    remove,
    removed_nothing,
    get,
    consume,
    expire,
    loss,
    remove_again
  } what = What::get;
  uint64_t value = 0;  // put: what; get: what was seen; consume: what was taken; expire: what is over
  int64_t called = 0;
  int64_t returned = INT64_MAX;  // INT64_MAX: unknown outcome
};

class LinearizabilityCheck {
 public:
  explicit LinearizabilityCheck(std::vector<HistoryOp> ops) : ops_(std::move(ops)), done_(ops_.size()) {}
  bool holds() { return search(0); }

 private:
  // All answered operations must be placed; the earliest return among those left bounds who may be next.
  bool search(uint64_t value) {
    if (!seen_.emplace(done_, value).second) return false;
    int64_t first_return = INT64_MAX;
    for (size_t i = 0; i < ops_.size(); ++i)
      if (!done_[i]) first_return = std::min(first_return, ops_[i].returned);
    if (first_return == INT64_MAX) return true;
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (done_[i] || ops_[i].what != HistoryOp::What::expire || ops_[i].value == value || !written(ops_[i].value))
        continue;
      done_[i] = true;  // values are written once: it has no effect any more, whenever it happens
      const bool holds = search(value);
      done_[i] = false;
      return holds;
    }
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (done_[i] || ops_[i].called > first_return) continue;
      const bool repeats = ops_[i].what == HistoryOp::What::loss;
      if (ops_[i].what == HistoryOp::What::remove_again) {  // or not
        done_[i] = true;
        const bool holds = search(0) || search(value);
        done_[i] = false;
        if (holds) return true;
        continue;
      }
      uint64_t next = value;
      if (!apply(ops_[i], next) || (repeats && next == value)) continue;
      if (!repeats) done_[i] = true;
      if (search(next)) return true;
      if (!repeats) done_[i] = false;
    }
    return false;
  }
  bool written(uint64_t value) const {
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].value == value &&
          (ops_[i].what == HistoryOp::What::put || ops_[i].what == HistoryOp::What::put_if_absent))
        return done_[i];
    return true;
  }
  static bool apply(const HistoryOp& op, uint64_t& value) {
    using What = HistoryOp::What;
    switch (op.what) {
      case What::put:
        value = op.value;
        return true;
      case What::put_if_absent:
        if (value != 0) return false;
        value = op.value;
        return true;
      case What::kept:
        return value != 0;
      case What::remove:
        value = 0;
        return true;
      case What::removed_nothing:
        return value == 0;
      case What::get:
        return value == op.value;
      case What::expire:
      case What::consume:
        if (value != op.value) return false;
        value = 0;
        return true;
      case What::loss:
      case What::remove_again:
        value = 0;
        return true;
    }
    return false;
  }

  const std::vector<HistoryOp> ops_;
  std::vector<bool> done_;
  std::set<std::pair<std::vector<bool>, uint64_t>> seen_;
};

}  // namespace torch_mooncake::pool::test
