#include "collectives/choice.h"

#include <algorithm>

namespace torch_mooncake::coll {
namespace {

constexpr uint64_t kAny = UINT64_MAX;
constexpr int kMany = INT32_MAX;

struct Row {
  Collective collective;
  uint64_t up_to_bytes;
  int up_to_ranks;
  Algorithm algorithm;
  const char* why;
  bool half = false;  // for fp16 and bf16 only
};

// The first row that fits. Also what is legal: the algorithms of a collective are those of its rows.
constexpr Row kTable[] = {
    {Collective::barrier, kAny, kMany, Algorithm::doubling, "fewest steps"},
    {Collective::broadcast, kLittleBytes, kMany, Algorithm::tree, "little data: fewest steps"},
    {Collective::broadcast, kAny, kMany, Algorithm::chain, "every link carries the data once, in pieces"},
    {Collective::all_reduce, 16 << 10, 8, Algorithm::direct, "little data, few ranks: one step"},
    {Collective::all_reduce, 16 << 10, kMany, Algorithm::doubling, "little data, many ranks: fewest steps"},
    {Collective::all_reduce, 1 << 20, 8, Algorithm::slices, "fewest bytes in two steps"},
    {Collective::all_reduce, kAny, 8, Algorithm::slices, "fewest bytes, every sum rounded once", true},
    {Collective::all_reduce, 1 << 20, kMany, Algorithm::halving, "fewest bytes in few steps"},
    {Collective::all_reduce, kAny, kMany, Algorithm::ring, "fewest bytes, two neighbours"},
    {Collective::reduce, 16 << 10, 8, Algorithm::direct, "little data, few ranks: one step"},
    {Collective::reduce, 16 << 10, kMany, Algorithm::tree, "little data, many ranks: fewest steps"},
    {Collective::reduce, kAny, kMany, Algorithm::slices, "every rank sends the data once"},
    {Collective::all_gather, kAny, 8, Algorithm::direct, "few ranks: one step"},
    {Collective::all_gather, 4 << 10, kMany, Algorithm::bruck, "little data, many ranks: fewest steps"},
    {Collective::all_gather, kAny, kMany, Algorithm::ring, "two neighbours"},
    {Collective::reduce_scatter, kAny, 8, Algorithm::slices, "fewest bytes in one step"},
    {Collective::reduce_scatter, 64 << 10, kMany, Algorithm::slices, "little data: one step"},
    {Collective::reduce_scatter, kAny, kMany, Algorithm::ring, "two neighbours"},
    {Collective::gather, kAny, kMany, Algorithm::direct, "one step"},
    {Collective::scatter, kAny, kMany, Algorithm::direct, "one step"},
    {Collective::all_to_all, kAny, kMany, Algorithm::direct, "every byte concerns two ranks only"},
};

constexpr const char* kCollectiveNames[] = {"barrier",        "broadcast", "all_reduce", "reduce",     "all_gather",
                                            "reduce_scatter", "gather",    "scatter",    "all_to_all", "a collective"};
constexpr const char* kAlgorithmNames[] = {"auto", "direct", "slices", "doubling", "halving",
                                           "ring", "tree",   "chain",  "bruck"};

bool goes_by_host(Collective collective) {
  return collective != Collective::gather && collective != Collective::scatter && collective != Collective::all_to_all;
}

std::string legal(Collective collective) {
  std::vector<std::string> names{"auto"};
  for (const Row& row : kTable) {
    const std::string name = name_of(row.algorithm);
    if (row.collective == collective && std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace

const char* name_of(Collective collective) {
  const auto i = static_cast<size_t>(collective);
  return i < std::size(kCollectiveNames) ? kCollectiveNames[i] : "something else";
}

const char* name_of(Algorithm algorithm) { return kAlgorithmNames[static_cast<size_t>(algorithm)]; }

Result<Algorithms> Algorithms::parse(std::string_view text) {
  Algorithms out;
  while (!trimmed(text).empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view entry = trimmed(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = std::min(entry.find('='), entry.size());
    const std::string_view collective = trimmed(entry.substr(0, equals));
    const auto known = std::find(kCollectiveNames, kCollectiveNames + kCollectives, collective);
    if (known == kCollectiveNames + kCollectives || equals == entry.size()) {
      std::string names;
      for (size_t i = 0; i < kCollectives; ++i) names += (i ? ", " : "") + std::string(kCollectiveNames[i]);
      return {Code::invalid_argument, "algorithms: \"" + std::string(entry) +
                                          "\" is not COLLECTIVE=[flat/]ALGORITHM; the collectives are " + names};
    }
    const auto which = static_cast<Collective>(known - kCollectiveNames);
    std::string_view algorithm = trimmed(entry.substr(equals + 1));
    Rule& rule = out.rules_[static_cast<size_t>(which)];
    rule = {};
    if (algorithm.substr(0, 5) == "flat/") {
      rule.flat = true;
      algorithm.remove_prefix(5);
    }
    const auto name = std::find(std::begin(kAlgorithmNames), std::end(kAlgorithmNames), algorithm);
    rule.algorithm = name == std::end(kAlgorithmNames) ? Algorithm::automatic
                                                       : static_cast<Algorithm>(name - std::begin(kAlgorithmNames));
    const bool fits = algorithm == "auto" || std::any_of(std::begin(kTable), std::end(kTable), [&](const Row& row) {
                        return row.collective == which && algorithm == name_of(row.algorithm);
                      });
    if (!fits)
      return {Code::invalid_argument, "algorithms: " + std::string(collective) + " has no \"" + std::string(algorithm) +
                                          "\"; it has " + legal(which) + ", and each of them with flat/ before it"};
  }
  return out;
}

std::string Algorithms::text() const {
  std::string out;
  for (size_t i = 0; i < kCollectives; ++i) {
    if (rules_[i] == Rule{}) continue;
    out += (out.empty() ? "" : ",") + std::string(kCollectiveNames[i]) + (rules_[i].flat ? "=flat/" : "=") +
           name_of(rules_[i].algorithm);
  }
  return out;
}

Choice choose(Collective collective, const Layout& layout, uint64_t nbytes, const Algorithms::Rule& rule, bool half) {
  Choice out;
  out.flat = rule.flat;
  out.by_host = layout.nested() && !rule.flat && goes_by_host(collective);
  const int ranks = out.by_host ? layout.hosts : layout.ranks;
  for (const Row& row : kTable) {
    if (row.collective != collective || (row.half && !half) || nbytes > row.up_to_bytes || ranks > row.up_to_ranks)
      continue;
    out.algorithm = row.algorithm;
    out.why = row.why;
    break;
  }
  if (rule.algorithm != Algorithm::automatic) {
    out.algorithm = rule.algorithm;
    out.why = "asked for";
  }
  const bool much = nbytes > kLittleBytes / static_cast<uint64_t>(layout.ranks);
  if (out.by_host && (collective == Collective::reduce_scatter || (collective == Collective::all_gather && much))) {
    out.algorithm = collective == Collective::all_gather ? Algorithm::direct : Algorithm::slices;
    out.why = "by host: between hosts in one step, whatever is asked for";
  }
  return out;
}

std::vector<uint64_t> size_classes(Collective collective) {
  std::vector<uint64_t> out;
  for (const Row& row : kTable)
    if (row.collective == collective) out.push_back(row.up_to_bytes);
  if (collective == Collective::all_reduce || collective == Collective::reduce) out.push_back(kLittleBytes);
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace torch_mooncake::coll
