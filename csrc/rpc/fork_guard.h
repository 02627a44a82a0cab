// ForkGuard: what a forked child inherits of our sockets must not keep the parent's connections open after the parent
// has died. In the child, every guarded fd number is pointed at /dev/null: the numbers stay taken, so that objects the
// child inherited can neither use nor close anything of the child's own.
//
// Threads: any. An fd is removed from the guard before it is closed.
#pragma once

namespace torch_mooncake::rpc {

struct ForkGuard {
  static void add(int fd);
  static void remove(int fd);
};

}  // namespace torch_mooncake::rpc
