// For tests with SSDs: a folder on a disk, not in memory, which goes with the test; and silence where errors are made.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "common/failpoint.h"
#include "common/log.h"

namespace torch_mooncake::pool::test {

struct Disk {
  Disk() {
    char name[] = "/var/tmp/tmssdXXXXXX";
    if (const char* made = ::mkdtemp(name)) path = made;
  }
  ~Disk() { std::filesystem::remove_all(path); }
  std::string path;
};

struct Quiet {  // and no failpoint afterwards
  Quiet() { log::set_level(log::Level::off); }
  ~Quiet() {
    log::set_level(log::Level::warning);
    set_failpoints("");
  }
};

}  // namespace torch_mooncake::pool::test
