// libibverbs behind the driver interface, by dlopen: nothing links it.
#pragma once

#include "transfer/rdma/driver.h"

namespace torch_mooncake::transfer::rdma {

// One per process. open_devices() is `unsupported`, and says what to install, where the library is missing, or was
// missing its headers when this was built.
std::shared_ptr<Driver> verbs_driver();

}  // namespace torch_mooncake::transfer::rdma
