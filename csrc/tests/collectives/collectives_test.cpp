#include "collectives/collectives.h"

#include <doctest/doctest.h>

#include "collectives/numbers.h"
#include "collectives/world.h"

using namespace torch_mooncake;
using namespace torch_mooncake::coll;

namespace {
void check_all(World& world, uint64_t n) {
  CAPTURE(n);
  const int size = world.size();
  CAPTURE(size);
  const auto total = sum(size, n);
  world.must([](const Call& call) { return barrier(call); });
  world.must([](const Call& call) { return monitored_barrier(call); });
  world.must([&](const Call& call) {
    auto data = input(call.group.rank(), n);
    TM_TRY(all_reduce(call, data.data(), n, DType::f32, ReduceOp::sum));
    return data == total ? Status() : Status(Code::corrupt, "all_reduce");
  });
  for (int root : {0, size - 1}) {
    world.must([&](const Call& call) {
      auto data = input(call.group.rank(), n);
      TM_TRY(broadcast(call, data.data(), n * 4, root));
      return data == input(root, n) ? Status() : Status(Code::corrupt, "broadcast");
    });
    world.must([&](const Call& call) {
      const bool is_root = call.group.rank() == root;
      auto data = input(call.group.rank(), n);
      TM_TRY(reduce(call, data.data(), n, DType::f32, ReduceOp::sum, root));
      return data == (is_root ? total : input(call.group.rank(), n)) ? Status() : Status(Code::corrupt, "reduce");
    });
    world.must([&](const Call& call) {
      const auto in = input(call.group.rank(), n);
      std::vector<std::vector<float>> out(size, std::vector<float>(n));
      std::vector<void*> pointers;
      for (auto& o : out) pointers.push_back(o.data());
      TM_TRY(gather(call, in.data(), n * 4, pointers, root));
      for (int r = 0; r < size && call.group.rank() == root; ++r) {
        if (out[r] != input(r, n)) return Status(Code::corrupt, "gather");
      }
      std::vector<const void*> parts(pointers.begin(), pointers.end());
      std::vector<float> back(n);
      TM_TRY(scatter(call, parts, back.data(), n * 4, root));
      return back == in ? Status() : Status(Code::corrupt, "scatter");
    });
  }
  world.must([&](const Call& call) {  // sizes that differ by rank, one of them zero
    const auto in = input(call.group.rank(), n + call.group.rank());
    std::vector<std::vector<float>> out;
    std::vector<Piece> pieces;
    for (int r = 0; r < size; ++r) out.emplace_back(n + r);
    for (auto& o : out) pieces.push_back({o.data(), o.size() * 4});
    TM_TRY(all_gather(call, {in.data(), in.size() * 4}, pieces));
    for (int r = 0; r < size; ++r) {
      if (out[r] != input(r, n + r)) return Status(Code::corrupt, "all_gather");
    }
    return Status();
  });
  world.must([&](const Call& call) {
    std::vector<std::vector<float>> in;
    std::vector<ConstPiece> pieces;
    for (int r = 0; r < size; ++r) in.push_back(input(call.group.rank(), n + r * 5));
    for (auto& i : in) pieces.push_back({i.data(), i.size() * 4});
    std::vector<float> out(n + call.group.rank() * 5);
    TM_TRY(reduce_scatter(call, pieces, {out.data(), out.size() * 4}, DType::f32, ReduceOp::sum));
    return out == sum(size, out.size()) ? Status() : Status(Code::corrupt, "reduce_scatter");
  });
  world.must([&](const Call& call) {
    const int rank = call.group.rank();
    std::vector<std::vector<float>> in, out;
    std::vector<ConstPiece> ins;
    std::vector<Piece> outs;
    for (int r = 0; r < size; ++r) in.push_back(input(rank * size + r, n * ((rank + r) % 3)));
    for (int r = 0; r < size; ++r) out.emplace_back(n * ((rank + r) % 3));
    for (auto& i : in) ins.push_back({i.data(), i.size() * 4});
    for (auto& o : out) outs.push_back({o.data(), o.size() * 4});
    TM_TRY(all_to_all(call, ins, outs));
    for (int r = 0; r < size; ++r) {
      if (out[r] != input(r * size + rank, out[r].size())) return Status(Code::corrupt, "all_to_all");
    }
    return Status();
  });
}
}  // namespace

TEST_CASE("more ranks than bits in a word") {
  World world(70);
  world.timeout_ms = 120'000;  // a thread sanitizer wants its time
  for (uint64_t n : {3, 20'001}) check_all(world, n);
}

TEST_CASE("every collective, sizes around every threshold") {
  for (int size : {1, 2, 3, 4}) {
    World world(size);
    for (uint64_t n : {0, 1, 3, 1023, 4097, 70'001}) check_all(world, n);
  }
}

TEST_CASE("ranks on hosts of their own: chain broadcast, tcp only") {
  World world(3, {"tcp"}, false);
  CHECK_FALSE(world.groups[0]->single_host());
  for (uint64_t n : {1, 70'001, 700'001}) check_all(world, n);
}

TEST_CASE("many rounds of a large reduction") {
  World world(2);
  check_all(world, 3'000'001);
}

TEST_CASE("more ranks than the direct algorithm takes, not a power of two") {
  World world(11);
  for (uint64_t n : {1, 1000}) check_all(world, n);
  const uint64_t n = 100;  // fp32 accumulation: ten times 1 on top of 2048
  world.must([&](const Call& call) {
    std::vector<uint16_t> data(n, call.group.rank() == 4 ? 0x6800 : 0x3c00);
    TM_TRY(all_reduce(call, data.data(), n, DType::f16, ReduceOp::sum));
    return data == std::vector<uint16_t>(n, 0x6805) ? Status()
                                                    : Status(Code::corrupt, "fp16 " + std::to_string(data[0]));
  });
}

TEST_CASE("a rank that never comes: the others time out and name it, then all give up") {
  World world(3);
  world.timeout_ms = 300;
  const auto statuses = world.collective([](const Call& call) {
    if (call.group.rank() == 1) return Status();
    std::vector<float> data(100'000);
    Status status = all_reduce(call, data.data(), data.size(), DType::f32, ReduceOp::sum);
    call.group.give_up(status);
    return status;
  });
  for (int rank : {0, 2}) {
    CHECK_FALSE(statuses[rank].is_ok());
    CHECK((statuses[rank].message().find("rank 1") != std::string::npos ||
           statuses[rank].message().find("gave up") != std::string::npos));
  }
  world.timeout_ms = 20'000;
  const int64_t begin = steady_ns();
  Scratch scratch;
  Status late = barrier({*world.groups[1], 2, Deadline::after_ms(20'000), scratch});
  CHECK(late.code() == Code::deadline_exceeded);
  CHECK(late.message().find("gave up") != std::string::npos);
  CHECK(steady_ns() - begin < 5'000'000'000);
}

TEST_CASE("nothing is sent for arguments that make no sense") {
  World world(2);
  for (const auto& status : world.collective([](const Call& call) {
         float x = 0;
         return all_reduce(call, &x, 1, DType::f32, ReduceOp::bor);
       })) {
    CHECK(status.code() == Code::unsupported);
  }
  for (const auto& status : world.collective([](const Call& call) { return broadcast(call, nullptr, 0, 5); })) {
    CHECK(status.code() == Code::invalid_argument);
  }
  world.must([](const Call& call) { return barrier(call); });  // still in step
}
