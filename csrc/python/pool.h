// The pool's objects as Python holds them.
#pragma once

#include "pool/client.h"
#include "python/support.h"

namespace torch_mooncake::python {

struct PyClient : Held<pool::Client> {
  using Held::Held;
};
struct PyObjectInfo : Held<pool::Object> {
  using Held::Held;
};

}  // namespace torch_mooncake::python
