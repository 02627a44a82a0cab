// SpinGate: spins are tried three in a row, then left out for a while, for longer each time, and at most for so long.
#include "rpc/spin_gate.h"

#include <doctest/doctest.h>

using torch_mooncake::rpc::SpinGate;

TEST_CASE("spin gate: three that met nothing, then a pause that grows to its limit; one that met something ends it") {
  SpinGate gate;
  auto spins_until_shut = [&] {
    int spins = 0;
    for (; gate.open(); ++spins) gate.spun(false);
    return spins;
  };
  auto waits_until_open = [&] {
    int waits = 1;  // the one that found it shut
    for (; !gate.open(); ++waits) {
    }
    return waits;
  };
  int before = 0;
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    CHECK(spins_until_shut() == (i == 0 ? 3 : 2));  // waits_until_open() has had the first
    CHECK_FALSE(gate.is_open());
    int pause = waits_until_open();
    gate.spun(false);
    CHECK(pause >= before);
    CHECK(pause <= 128);
    before = pause;
  }
  CHECK(before == 128);
  gate.spun(true);
  CHECK(spins_until_shut() == 3);
  CHECK(waits_until_open() == 4);
}
