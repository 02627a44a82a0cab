// NodeOptions checked and completed: what the user may say about a node, and what follows from it.
#pragma once

#include <string>
#include <string_view>

#include "common/api.h"
#include "pool/node.h"

namespace torch_mooncake::pool {

// "64G", "512MiB", "1.5T", "1073741824" (powers of 1024) -> bytes. invalid_argument says what was wrong.
TM_API Result<uint64_t> parse_bytes(std::string_view text);

// Checks every field and fills in what is left open except the token: memory_bytes. Touches no file.
TM_API Result<NodeOptions> resolve_options(NodeOptions options);

// <runtime_dir>/<pool>. Both are made, 0700, if absent; refused if they are not ours or open to others.
TM_API Result<std::string> prepare_folder(const NodeOptions& options);

// The token in `path`: 64 hex digits, made (0600, at once whole) if there is no such file. A file that others can read
// or that is not a token is refused. Called under the folder's lock.
TM_API Result<std::string> load_or_make_token(const std::string& path);

}  // namespace torch_mooncake::pool
