// Plain values: bytes, and dense CPU tensors, whose content lies in one piece of memory. What they are is read through
// the DLPack exchange table that a tensor type carries (a C struct: no attribute of Python's is looked up for each
// tensor); how that is described is asked of Python once for each dtype and shape.
//
// Threads: with the GIL. A batch keeps its values, and stays as it is without the GIL.
#pragma once

#include "python/support.h"

namespace torch_mooncake::python {

// The description of all values of one type, dtype and shape.
struct PlainForm {
  std::string meta;
  uint64_t nbytes = 0;
};

struct PlainValue {
  std::shared_ptr<const PlainForm> form;
  iovec data{};
};

struct PlainBatch {
  nb::object keep;  // a tuple of the values
  std::vector<PlainValue> items;
};

}  // namespace torch_mooncake::python
