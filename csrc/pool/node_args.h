// The command line of torch-mooncake-node.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"
#include "pool/node.h"

namespace torch_mooncake::pool {

struct NodeArgs {
  NodeOptions options;
  bool help = false, version = false;
};

TM_API std::string node_usage();
// `args` without the program's name; "--name value" or "--name=value". What is not given comes from TM_RUNTIME_DIR,
// TM_POOL, TM_TOKEN, TM_MEMORY, TM_SSD, TM_LINGER_S and TM_HOST_ID. Unknown options, missing or malformed values:
// invalid_argument, naming the option. (Meaning is checked later, by resolve_options.)
TM_API Result<NodeArgs> parse_node_args(const std::vector<std::string>& args);

}  // namespace torch_mooncake::pool
