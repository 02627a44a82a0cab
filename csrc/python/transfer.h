// How Python holds the engine's objects.
#pragma once

#include "python/support.h"
#include "transfer/engine.h"

namespace torch_mooncake::python {

struct PyRegion : Held<Region> {
  using Held::Held;
};
struct PyRemoteRegion : Held<RemoteRegion> {
  using Held::Held;
};
struct PyPeer : Held<Peer> {
  using Held::Held;
};
struct PyOp : Held<Op> {
  using Held::Held;
};
struct PyEngine : Held<Engine> {
  using Held::Held;
};

// Reads and writes in all their forms, and what is done with an op.
void bind_ops(nb::module_& m, nb::class_<PyEngine>& engine);

}  // namespace torch_mooncake::python
