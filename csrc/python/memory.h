// Memory that Python sees: a mapped pool object, and a pinned buffer of Python's.
#pragma once

#include "python/support.h"

namespace torch_mooncake::python {

// Mapped bytes with the buffer protocol, so that torch.frombuffer and numpy.frombuffer make arrays over them without
// a copy; the array keeps this object, which keeps the map. The buffer always says it is writable (torch warns
// otherwise); a write to a read-only map is SIGSEGV, as get(readonly=True) documents.
class Mapped {
 public:
  Mapped(std::shared_ptr<std::byte> data, uint64_t nbytes, bool zero_copy, bool read_only)
      : data_(std::move(data)), nbytes_(nbytes), zero_copy_(zero_copy), read_only_(read_only) {}
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_.get().get()); }
  uint64_t nbytes() const { return nbytes_; }
  bool zero_copy() const { return zero_copy_; }
  bool read_only() const { return read_only_; }

 private:
  Held<std::byte> data_;
  uint64_t nbytes_;
  bool zero_copy_, read_only_;
};

}  // namespace torch_mooncake::python
