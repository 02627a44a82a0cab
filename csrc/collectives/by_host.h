// Collectives by host: first among the ranks of each host (through their shared slots, if they have any), then between
// hosts, then within each host again. A byte that is everybody's enters and leaves a host as often as it would if there
// were one rank on each.
//
// Little data is carried by one rank of each host (the root on its own). Much of it by as many of each as the smallest
// host has, each with a share; the steps within the hosts and between them run at the same time, round by round.
//
// Rounding: little data is summed in fp32 throughout (fp16, bf16); of much, every host rounds its sum once, then the
// sum of these is rounded as across.h says.
#pragma once

#include <span>

#include "collectives/collectives.h"

namespace torch_mooncake::coll::by_host {

Status barrier(const Call& call);
Status broadcast(const Call& call, Algorithm algorithm, void* data, uint64_t nbytes, int root);
Status all_gather(const Call& call, ConstPiece in, std::span<const Piece> out);
Status all_reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, DType dtype, ReduceOp op);
Status reduce(const Call& call, Algorithm algorithm, void* data, uint64_t count, DType dtype, ReduceOp op, int root);
Status reduce_scatter(const Call& call, std::span<const ConstPiece> in, Piece out, DType dtype, ReduceOp op);

}  // namespace torch_mooncake::coll::by_host
