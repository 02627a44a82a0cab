// Which algorithm: a pure function of what all ranks know.
#include "collectives/choice.h"

#include <doctest/doctest.h>

#include "collectives/topology.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

TEST_CASE("topology: uneven hosts, ranks that are not in order") {
  const std::vector<std::string> ids{"a", "b", "a", "a", "c", "b"};
  const Topology topology(ids, 3);
  CHECK(topology.hosts() == std::vector<std::vector<int>>{{0, 2, 3}, {1, 5}, {4}});
  CHECK(topology.carriers() == 1);
  CHECK(topology.nested());
  CHECK(topology.host().ranks == std::vector<int>{0, 2, 3});
  CHECK(topology.host().me == 2);
  CHECK(topology.host_of(5) == 1);
  CHECK(topology.place_of(5) == 1);
  CHECK(topology.across(0).ranks == std::vector<int>{0, 1, 4});
  CHECK(topology.across(0).me == -1);
  CHECK(topology.across(0, 3).ranks == std::vector<int>{3, 1, 4});
  CHECK(topology.across(0, 3).me == 0);
  CHECK_FALSE(Topology({"a", "a"}, 0).nested());
  CHECK_FALSE(Topology({"a", "b"}, 0).nested());
  CHECK(Topology({"a", "b", "b", "a"}, 0).carriers() == 2);
}

TEST_CASE("choice: by size, ranks and hosts") {
  auto name = [](Collective collective, Layout layout, uint64_t nbytes) {
    const Choice choice = choose(collective, layout, nbytes);
    return std::string(choice.by_host ? "by host, " : "") + name_of(choice.algorithm);
  };
  using C = Collective;
  const Layout few{4, 4}, many{32, 32}, nested{8, 4}, wide{64, 16};
  CHECK(name(C::all_reduce, few, 8) == "direct");
  CHECK(name(C::all_reduce, few, 200'000) == "slices");
  CHECK(name(C::all_reduce, few, 64 << 20) == "ring");
  CHECK(choose(C::all_reduce, few, 64 << 20, {}, true).algorithm == Algorithm::slices);  // fp16, bf16
  CHECK(name(C::all_reduce, many, 8) == "doubling");
  CHECK(name(C::all_reduce, many, 200'000) == "halving");
  CHECK(name(C::all_reduce, many, 64 << 20) == "ring");
  CHECK(name(C::all_reduce, nested, 64 << 20) == "by host, ring");
  CHECK(name(C::all_reduce, wide, 64 << 20) == "by host, ring");
  CHECK(name(C::broadcast, nested, 8) == "by host, tree");
  CHECK(name(C::broadcast, few, 64 << 20) == "chain");
  CHECK(name(C::all_gather, few, 8) == "direct");
  CHECK(name(C::all_gather, many, 8) == "bruck");
  CHECK(name(C::all_gather, many, 1 << 20) == "ring");
  CHECK(name(C::reduce, many, 8) == "tree");
  CHECK(name(C::reduce_scatter, many, 1 << 20) == "ring");
  CHECK(name(C::all_to_all, nested, 1 << 20) == "direct");
  CHECK(name(C::barrier, nested, 0) == "by host, doubling");
  for (size_t i = 0; i < kCollectives; ++i) {
    const auto classes = size_classes(static_cast<C>(i));
    REQUIRE_FALSE(classes.empty());
    CHECK(classes.back() == UINT64_MAX);
    for (const uint64_t nbytes : classes)
      for (const Layout& layout : {few, many, nested, wide})
        CHECK(std::string(choose(static_cast<C>(i), layout, nbytes).why) != "");
  }
}

TEST_CASE("choice: what is asked for") {
  const auto asked = Algorithms::parse(" all_reduce=ring, broadcast=flat/tree ,reduce=flat/auto,");
  REQUIRE_MESSAGE(asked.is_ok(), asked.status().to_string());
  CHECK(asked->text() == "broadcast=flat/tree,all_reduce=ring,reduce=flat/auto");
  CHECK(Algorithms::parse(asked->text())->text() == asked->text());
  CHECK(Algorithms::parse("")->text() == "");
  const Layout nested{8, 4};
  Choice choice = choose(Collective::all_reduce, nested, 8, asked->of(Collective::all_reduce));
  CHECK(choice.algorithm == Algorithm::ring);
  CHECK(choice.by_host);
  CHECK(std::string(choice.why) == "asked for");
  choice = choose(Collective::broadcast, nested, 64 << 20, asked->of(Collective::broadcast));
  CHECK(choice.algorithm == Algorithm::tree);
  CHECK_FALSE(choice.by_host);
  choice = choose(Collective::reduce, nested, 8, asked->of(Collective::reduce));
  CHECK(choice.algorithm == Algorithm::direct);
  CHECK_FALSE(choice.by_host);
}

TEST_CASE("choice: what is not known is refused with what is") {
  auto message = [](std::string_view text) {
    const auto parsed = Algorithms::parse(text);
    CHECK(parsed.status().code() == Code::invalid_argument);
    return parsed.status().message();
  };
  CHECK(message("all_reduce=chain").find("has auto, direct, doubling, slices, halving, ring") != std::string::npos);
  CHECK(message("all_reduce=").find("all_reduce has no \"\"") != std::string::npos);
  CHECK(message("allreduce=ring").find("barrier, broadcast, all_reduce") != std::string::npos);
  CHECK(message("all_reduce").find("COLLECTIVE=[flat/]ALGORITHM") != std::string::npos);
  CHECK(message("a collective=direct").find("collectives are") != std::string::npos);
  CHECK(message("all_reduce=flat/").find("has no") != std::string::npos);
}
