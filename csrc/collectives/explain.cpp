// Group::explain(): JSON by hand, of names and numbers only.
#include "collectives/board.h"
#include "collectives/group.h"

namespace torch_mooncake::coll {
namespace {

std::string quoted(std::string_view text) { return '"' + std::string(text) + '"'; }  // names without quotes in them

std::string way(const Traffic::Way& way) {
  return "{\"sent\": " + std::to_string(way.sent) + ", \"received\": " + std::to_string(way.received) + "}";
}

std::string of_class(const Choice& choice, Algorithm half, uint64_t up_to, bool one_host, bool board) {
  std::string out = "{\"up_to_bytes\": " + (up_to == UINT64_MAX ? "null" : std::to_string(up_to));
  if (one_host && board && !choice.flat)
    return out + ", \"algorithm\": \"board\", \"why\": \"one host: shared slots\"}";
  out += ", \"algorithm\": " + quoted(name_of(choice.algorithm));
  out += ", \"by_host\": " + std::string(choice.by_host ? "true" : "false");
  if (half != choice.algorithm) out += ", \"of_fp16_and_bf16\": " + quoted(name_of(half));
  return out + ", \"why\": " + quoted(choice.why) + "}";
}

}  // namespace

std::string Group::explain() const {
  const auto& hosts = topology_.hosts();
  const Layout layout{size(), static_cast<int>(hosts.size())};
  const Board* small = boards_[Board::kSmall].get();
  std::string out = "{\"rank\": " + std::to_string(rank()) + ", \"ranks_of_hosts\": [";
  for (size_t host = 0; host < hosts.size(); ++host) {
    out += host ? ", [" : "[";
    for (size_t i = 0; i < hosts[host].size(); ++i) out += (i ? ", " : "") + std::to_string(hosts[host][i]);
    out += "]";
  }
  out += "], \"within_host\": " + quoted(small == nullptr ? "alone" : small->state());
  out += ", \"asked_for\": " + quoted(options_.algorithms.text()) + ", \"collectives\": {";
  for (size_t i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    const Algorithms::Rule& rule = options_.algorithms.of(collective);
    out += (i ? ", " : "") + quoted(coll::name_of(collective)) + ": [";
    const auto classes = size_classes(collective);
    std::string last;
    std::vector<std::string> texts;
    for (const uint64_t up_to : classes) {
      const Algorithm half = choose(collective, layout, up_to, rule, true).algorithm;
      const std::string text = of_class(choose(collective, layout, up_to, rule), half, up_to, single_host(),
                                        small != nullptr && small->state() != std::string("messages"));
      const std::string what = text.substr(text.find(", "));
      if (what == last) texts.pop_back();  // one class
      last = what;
      texts.push_back(text);
    }
    for (size_t k = 0; k < texts.size(); ++k) out += (k ? ", " : "") + texts[k];
    out += "]";
  }
  out += "}, \"traffic\": {\"to_hosts\": " + way(traffic_.to_hosts) + ", \"within_host\": " + way(traffic_.within_host);
  return out + ", \"shown\": " + std::to_string(traffic_.shown) + "}}";
}

}  // namespace torch_mooncake::coll
