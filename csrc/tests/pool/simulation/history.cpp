#include <algorithm>
#include <cstring>

#include "pool/simulation/workload.h"

namespace torch_mooncake::pool::sim {

using test::HistoryOp;

namespace {

uint64_t word(uint64_t number, uint32_t part, uint64_t i) {
  return i == 0 ? (number << 8 | part) : (number << 40 | uint64_t{part} << 32) ^ (i * 0x9e3779b97f4a7c15);
}

std::string describe(const HistoryOp& op) {
  static constexpr const char* kNames[] = {"put",  "put if absent", "there is one", "remove", "there was none",
                                           "read", "taken",         "expired",      "loss",   "removed again"};
  const auto seconds = [](int64_t ns) {
    return ns == INT64_MAX ? "never" : std::to_string(static_cast<double>(ns) / 1e9);
  };
  return " " + std::string(kNames[static_cast<size_t>(op.what)]) + " " + std::to_string(op.value) + ", " +
         seconds(op.called) + " to " + seconds(op.returned);
}

// The first answer that cannot be explained.
HistoryOp culprit(const std::vector<HistoryOp>& ops) {
  std::vector<HistoryOp> by_return = ops;
  std::sort(by_return.begin(), by_return.end(),
            [](const HistoryOp& a, const HistoryOp& b) { return a.returned < b.returned; });
  for (const HistoryOp& last : by_return) {
    std::vector<HistoryOp> until;
    for (HistoryOp op : ops) {
      const bool answered = op.returned <= last.returned;
      if (!answered && (op.called > last.returned || op.what == HistoryOp::What::get)) continue;
      if (!answered) op.returned = INT64_MAX;
      until.push_back(op);
    }
    if (!test::LinearizabilityCheck(until).holds()) return last;
  }
  return {};
}

}  // namespace

std::string make_bytes(uint64_t number, uint32_t part, uint64_t nbytes) {
  std::string out(nbytes, '\0');
  for (uint64_t i = 0; i < nbytes; i += 8) {
    const uint64_t w = word(number, part, i / 8);
    std::memcpy(out.data() + i, &w, std::min<uint64_t>(8, nbytes - i));
  }
  return out;
}

uint64_t identify(const History& history, const std::string& key, std::string_view bytes) {
  uint64_t first = 0;
  if (bytes.size() < 8) {
    world->violation(key + ": an object of " + std::to_string(bytes.size()) + " bytes");
    return 0;
  }
  std::memcpy(&first, bytes.data(), 8);
  const uint64_t number = first >> 8;
  std::string expected;
  std::string_view wanted_key;
  if (key.starts_with("sealed")) {
    expected = make_bytes(number, 0, bytes.size());
    wanted_key = key;
    if (key != "sealed" + std::to_string(number)) wanted_key = "another sealed key";
  } else {
    try {
      const History::Value& value = history.value(number);
      wanted_key = value.key;
      for (uint32_t part = 0; part < value.parts; ++part) expected += make_bytes(number, part, value.nbytes);
      if (value.never_stored)
        world->violation(key + ": value " + std::to_string(number) +
                         " was read, but its put said that nothing was stored");
    } catch (const std::out_of_range&) {
      world->violation(key + ": bytes that nobody has put");
      return 0;
    }
  }
  if (wanted_key != key) world->violation(key + ": bytes of " + std::string(wanted_key) + " were read");
  if (expected != bytes) {
    size_t at = 0;
    while (at < std::min(expected.size(), bytes.size()) && expected[at] == bytes[at]) ++at;
    world->violation(key + ": value " + std::to_string(number) + " is torn at byte " + std::to_string(at) + " of " +
                     std::to_string(bytes.size()));
  }
  return number;
}

uint64_t History::new_value(const std::string& key, uint64_t nbytes, uint32_t parts) {
  values_.push_back({key, nbytes, parts, false});
  return values_.size();
}

size_t History::add(const std::string& key, HistoryOp op) {
  ops_[key].push_back(op);
  return ops_[key].size() - 1;
}

void History::read(const std::string& key, uint64_t value, int64_t called) {
  add(key, {HistoryOp::What::get, value, called, stamp()});
}

std::string History::check(int64_t lossy_since, bool early) const {
  for (const auto& [key, all] : ops_) {
    std::vector<HistoryOp> ops = all;
    for (HistoryOp& op : ops)
      if (early && op.what == HistoryOp::What::expire && op.called != INT64_MAX)
        for (const HistoryOp& put : all)
          if (put.value == op.value && put.called < op.called) op.called = put.called;
    std::erase_if(ops, [](const HistoryOp& op) { return op.called == INT64_MAX; });
    if (lossy_since != INT64_MAX) ops.push_back({HistoryOp::What::loss, 0, leader_->clock(lossy_since), INT64_MAX});
    std::stable_sort(ops.begin(), ops.end(),
                     [](const HistoryOp& a, const HistoryOp& b) { return a.called < b.called; });
    if (test::LinearizabilityCheck(ops).holds()) continue;
    for (const HistoryOp& op : ops) world->trace("history", op.value, [&] { return key + describe(op); });
    return key + " is not linearizable:" + describe(culprit(ops));
  }
  return "";
}

}  // namespace torch_mooncake::pool::sim
