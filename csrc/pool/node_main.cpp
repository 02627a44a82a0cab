// torch-mooncake-node: one node of the pool. No torch, no Python.
#include <unistd.h>

#include <cstdio>

#include "common/log.h"
#include "pool/keeper.h"
#include "pool/node_args.h"

#ifndef TM_VERSION
#define TM_VERSION "0.1.0"
#endif

using namespace torch_mooncake;
using namespace torch_mooncake::pool;

int main(int argc, char** argv) {
  auto args = parse_node_args({argv + 1, argv + argc});
  if (!args.is_ok()) {
    std::fprintf(stderr, "torch-mooncake-node: %s\n", args.status().message().c_str());
    return kNodeUsage;
  }
  if (args->help) {
    std::fputs(node_usage().c_str(), stdout);
    return kNodeOk;
  }
  if (args->version) {
    std::puts("torch-mooncake-node " TM_VERSION);
    return kNodeOk;
  }
  return run_node(args->options);
}
