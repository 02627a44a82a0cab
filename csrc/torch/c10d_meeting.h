// Meeting: how the ranks of a new group find one another in a c10d Store.
//
// The store may hold what processes before us left there under the same names (a restart under torchrun, a group that
// was destroyed and made again), so nothing is believed that does not answer this very rank: rank r > 0 asks with a
// random word, rank 0 answers under that word, and again if the word changes. The answer is what all ranks share;
// everything else lies under the id in it, which is new.
//
// One object a group and rank; its calls block. Errors: DistStoreError naming the ranks that did not come in time; what
// the store throws when it is gone.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "common/bytes.h"
#include "common/clock.h"
#include "torch/c10d_work.h"

namespace torch_mooncake::dist {

class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int size, Ms timeout);

  // What all ranks share: on rank 0 as given, on the others as rank 0 gave it.
  std::string share(const std::string& own);
  // Publishes `own` under the id, and returns what each rank published.
  std::vector<std::string> members(const Id128& id, const std::string& own);

 private:
  void answer_until_all_are_there(const std::vector<std::string>& keys);
  void wait_for(const std::vector<std::string>& keys);
  std::vector<int> missing_of(const std::vector<std::string>& keys);  // by rank
  [[noreturn]] void did_not_join(const std::vector<int>& ranks) const;

  c10d::Store& store_;
  const int rank_, size_;
  const Ms timeout_;
  const Deadline deadline_;
  std::string shared_;  // rank 0's
};

}  // namespace torch_mooncake::dist
