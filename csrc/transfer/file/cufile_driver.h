// CuFileDriver: what the engine asks of GPUDirect Storage (cuFile), which moves bytes between a disk and the memory of
// a CUDA device without a stop in host memory. The real one opens libcufile with dlopen when the first op between a
// file and CUDA memory comes, never before. Tests put a fake in its place.
//
// Threads: all methods are safe from any thread, on which the device's context must be current
// (CudaDriver::make_current). read() and write() wait for the disk.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"

namespace torch_mooncake::transfer {

class CuFileDriver {
 public:
  virtual ~CuFileDriver() = default;
  virtual std::string describe() const = 0;  // "libcufile.so.0"

  // A file that is open past the page cache (O_DIRECT); the descriptor must outlive what is returned. unsupported, with
  // the reason: not on this file system, not with this driver.
  virtual Result<std::shared_ptr<void>> open(int fd) = 0;
  // Makes memory of a device ready for the disk, for as long as what is returned lives: faster than memory that is not.
  virtual Result<std::shared_ptr<void>> pin(uint64_t address, uint64_t nbytes) = 0;
  // Bytes moved: fewer where the file ends, or for no reason. `base`: of the pinned memory, or `address` itself.
  virtual Result<uint64_t> read(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t nbytes) = 0;
  virtual Result<uint64_t> write(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t nbytes) = 0;

  // The process' driver, opened by the first call (or why it was not: the answer stays). unsupported: there is none
  // here.
  static Result<std::shared_ptr<CuFileDriver>> get();
  // For explain(), which must open nothing: "libcufile.so.0", "no: …", "not opened".
  static std::string describe_made();
  // In place of the real one, from now on; null: the real one again. For tests.
  static void replace(std::shared_ptr<CuFileDriver> driver);
};

Result<std::shared_ptr<CuFileDriver>> open_libcufile();

}  // namespace torch_mooncake::transfer
