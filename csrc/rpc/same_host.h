// The Unix sockets by which peers who came over TCP prove that they are on this host.
#pragma once

#include <string>

#include "common/bytes.h"
#include "rpc/socket.h"

namespace torch_mooncake::rpc {

// An abstract one: nothing to clean up, reached within one network namespace only.
Result<Listener> open_abstract_door(const Id128& engine);
// A file in `folder` (made with mode 0700 if there is none): reached from other network namespaces, containers say,
// that see the folder. Files of engines that were killed are removed. `auth`: the folder is somebody else's.
Result<Listener> open_file_door(const std::string& folder, const Id128& engine);

}  // namespace torch_mooncake::rpc
