#include "torch/c10d_meeting.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

#include "common/random.h"

namespace torch_mooncake::dist {
namespace {

std::vector<uint8_t> to_store(std::string_view text) { return {text.begin(), text.end()}; }
std::string from_store(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::string question_key(int rank) { return "tm/question/" + std::to_string(rank); }
std::string answer_key(const std::string& word) { return "tm/answer/" + word; }

}  // namespace

Meeting::Meeting(c10d::Store& store, int rank, int size, Ms timeout)
    : store_(store), rank_(rank), size_(size), timeout_(timeout), deadline_(Deadline::after_ms(timeout.count())) {}

std::string Meeting::share(const std::string& own) {
  if (rank_ == 0) return shared_ = own;
  const std::string word = to_hex(random_id());
  store_.set(question_key(rank_), to_store(word));
  wait_for({answer_key(word)});
  return from_store(store_.get(answer_key(word)));
}

std::vector<std::string> Meeting::members(const Id128& id, const std::string& own) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size_; ++rank) keys.push_back("tm/" + to_hex(id) + "/rank/" + std::to_string(rank));
  store_.set(keys[rank_], to_store(own));
  rank_ == 0 ? answer_until_all_are_there(keys) : wait_for(keys);
  std::vector<std::string> out;
  for (const auto& key : keys) out.push_back(from_store(store_.get(key)));
  return out;
}

void Meeting::answer_until_all_are_there(const std::vector<std::string>& keys) {
  std::vector<std::string> answered(size_);
  for (auto pause = Ms(1);; pause = std::min(pause * 2, Ms(32))) {
    const auto missing = missing_of(keys);
    if (missing.empty()) return;
    if (deadline_.expired()) did_not_join(missing);
    for (int rank : missing) {
      if (!store_.check({question_key(rank)})) continue;
      const std::string word = from_store(store_.get(question_key(rank)));
      if (word == answered[rank]) continue;
      store_.set(answer_key(word), to_store(shared_));
      answered[rank] = word;
    }
    std::this_thread::sleep_for(pause);
  }
}

void Meeting::wait_for(const std::vector<std::string>& keys) {
  try {
    store_.wait(keys, Ms(std::max(1, deadline_.remaining_ms())));
  } catch (const std::exception&) {
    const auto missing = missing_of(keys);  // throws, too, if the store itself is gone
    if (missing.empty() || !deadline_.expired()) throw;
    did_not_join(missing);
  }
}

std::vector<int> Meeting::missing_of(const std::vector<std::string>& keys) {
  std::vector<int> out;
  if (store_.check(keys)) return out;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    if (!store_.check({keys[rank]})) out.push_back(static_cast<int>(rank));
  }
  return out;
}

void Meeting::did_not_join(const std::vector<int>& ranks) const {
  std::string names;
  for (int rank : ranks) names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank);
  C10_THROW_ERROR(DistStoreError, "mooncake: " + names + " did not join the process group within " +
                                      std::to_string(timeout_.count()) + " ms");
}

}  // namespace torch_mooncake::dist
