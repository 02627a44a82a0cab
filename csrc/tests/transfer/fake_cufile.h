// FakeCuFile: GPUDirect Storage without a device or a driver: it reads and writes the real file, straight from and to
// the fake device's memory, and behaves as badly as a test wants.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "common/fd.h"
#include "transfer/file/cufile_driver.h"

namespace transfer_test {

using namespace torch_mooncake;

class FakeCuFile final : public transfer::CuFileDriver {
 public:
  // In place of the real one, for as long as it lives.
  static std::shared_ptr<FakeCuFile> install() {
    auto fake = std::make_shared<FakeCuFile>();
    replace(fake);
    return fake;
  }

  std::atomic<bool> refuse_files{false}, refuse_pins{false}, hang{false}, hang_open{false};
  std::atomic<int> short_calls{0}, failing_calls{0};  // so many of the next
  std::atomic<int> files{0}, pins{0}, calls{0}, opens{0};
  std::atomic<uint64_t> nbytes{0};

  std::string describe() const override { return "fake cuFile"; }
  Result<std::shared_ptr<void>> open(int fd) override {
    if (refuse_files) return Status(Code::unsupported, "cuFileHandleRegister: cuFile error 5008");
    while (hang_open) usleep(1000);
    int flags = fcntl(fd, F_GETFL);
    CHECK(flags >= 0);
    CHECK((flags & O_DIRECT) != 0);
    std::string path = "/proc/self/fd/" + std::to_string(fd);  // buffers need no alignment without O_DIRECT
    auto* file = new UniqueFd(::open(path.c_str(), (fcntl(fd, F_GETFL) & O_ACCMODE) | O_CLOEXEC));
    ++files;
    ++opens;
    return std::shared_ptr<void>(file, [this](void* p) {
      delete static_cast<UniqueFd*>(p);
      --files;
    });
  }
  Result<std::shared_ptr<void>> pin(uint64_t address, uint64_t) override {
    if (refuse_pins) return Status(Code::unsupported, "cuFileBufRegister: cuFile error 5036");
    ++pins;
    return std::shared_ptr<void>(reinterpret_cast<void*>(address), [this](void*) { --pins; });
  }
  Result<uint64_t> read(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t n) override {
    TM_ASSIGN(n, allowed(offset, base, address, n));
    ssize_t got = pread(static_cast<UniqueFd*>(file)->get(), reinterpret_cast<void*>(address), n, off_t(offset));
    return count(got);
  }
  Result<uint64_t> write(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t n) override {
    TM_ASSIGN(n, allowed(offset, base, address, n));
    ssize_t put = pwrite(static_cast<UniqueFd*>(file)->get(), reinterpret_cast<void*>(address), n, off_t(offset));
    return count(put);
  }

 private:
  Result<uint64_t> allowed(uint64_t offset, uint64_t base, uint64_t address, uint64_t n) {
    ++calls;
    CHECK(offset % 4096 == 0);
    CHECK(n % 4096 == 0);
    CHECK(base <= address);
    while (hang) usleep(1000);
    if (failing_calls > 0 && failing_calls-- > 0) return Status(Code::io, "cuFileRead: Input/output error");
    if (short_calls > 0 && short_calls-- > 0) return n / 3 + 1;
    return n;
  }
  Result<uint64_t> count(ssize_t n) {
    if (n < 0) return Status(Code::io, "cuFileRead: an error of the file");
    nbytes += static_cast<uint64_t>(n);
    return static_cast<uint64_t>(n);
  }
};

}  // namespace transfer_test
