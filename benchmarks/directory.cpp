// The directory's state machine in one process: what a look-up costs, what a key takes, and how long it takes to be
// rebuilt. Built and run by pool.py.
#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "pool/home.h"

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

namespace {

std::string key_of(uint64_t i) { return "cache/page/" + std::to_string(i * 2654435761u % 4294967291u); }

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// What a donor announces of `keys` objects, and a new home that it is all there is.
void rebuild(uint64_t keys, int rounds) {
  const NodeId donor{{7}};
  std::vector<Announced> extents(keys);
  for (uint64_t i = 0; i < keys; ++i) {
    Announced& a = extents[i];
    a.key = key_of(i);
    a.state = ExtentState::final;
    a.version = {1, i + 1};
    a.extent = {static_cast<uint32_t>(i), i + 1};
  }
  for (int round = 0; round < rounds; ++round) {
    Home home(2, 42);
    home.expect(donor);
    const double start = now_s();
    home.announce(donor, extents);
    const double took = now_s() - start;
    if (home.keys() != keys || !home.complete()) std::exit(3);
    std::printf("%.6f\n", took);
  }
}

}  // namespace

// directory rebuild KEYS ROUNDS: the seconds of each.
// directory KEYS ROUNDS: bytes a key, then for each round the look-ups a second: presence in batches of 1000,
// locations.
int main(int argc, char** argv) {
  if (argc > 3 && argv[1] == std::string_view("rebuild")) {
    rebuild(std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]));
    return 0;
  }
  const uint64_t keys = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1'000'000;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  const NodeId donor{{7}};
  const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
  Home home(1, 42);
  home.expect(donor);
  home.announce(donor, {});
  constexpr uint64_t kChunk = 1'000;
  CommitCall call;
  call.head.view = 1;
  for (uint64_t i = 0; i < keys; ++i) {
    call.head.key = key_of(i);
    std::memcpy(call.head.txn.data(), &i, sizeof i);
    call.replicas = {{donor, {static_cast<uint32_t>(i), i + 1}}};
    home.commit(i + 1, call, INT64_MAX);
    for (auto actions = home.take_actions(); !actions.empty(); actions = home.take_actions())
      for (HomeAction& action : actions)
        if (auto* send = std::get_if<SendMark>(&action); send && send->id) home.mark_done(send->id, Status());
  }
  if (home.keys() != keys) return 1;
  const size_t after = mallinfo2().uordblks + mallinfo2().hblkhd;
  std::printf("%.2f\n", static_cast<double>(after - before) / static_cast<double>(keys));

  constexpr uint64_t kAsked = 1'000'000;
  std::vector<std::string> names;
  for (uint64_t i = 0; i < kAsked; ++i) names.push_back(key_of(i * 7919 % keys));
  std::vector<std::string_view> views(names.begin(), names.end());
  for (int round = 0; round < rounds; ++round) {
    uint64_t found = 0;
    double start = now_s();
    for (uint64_t at = 0; at < kAsked; at += kChunk)
      for (Found::State state : home.states(std::span(views).subspan(at, kChunk)))
        found += state == Found::State::found;
    const double present = kAsked / (now_s() - start);
    start = now_s();
    for (std::string_view name : views) found += home.find(name).places.size();
    const double located = kAsked / (now_s() - start);
    if (found != 2 * kAsked) return 2;
    std::printf("%.0f %.0f\n", present, located);
  }
  return 0;
}
