// The real driver: libcufile.so.0 by dlopen, its functions by name. Types and numbers are those of cufile.h, which is
// not needed to build this.
#include <dlfcn.h>
#include <sys/types.h>

#include <cerrno>
#include <mutex>
#include <optional>

#include "transfer/file/cufile_driver.h"

namespace torch_mooncake::transfer {
namespace {

constexpr int kOpaqueFd = 1;       // CU_FILE_HANDLE_TYPE_OPAQUE_FD
constexpr int kFirstError = 5001;  // CUFILEOP_BASE_ERR + 1; cuFileRead and cuFileWrite give them with a minus

struct CuFileError {  // CUfileError_t
  int error, cuda_error;
};
struct CuFileDescr {  // CUfileDescr_t
  int type = kOpaqueFd;
  union {
    int fd;
    void* handle;
  } handle{};
  const void* operations = nullptr;
};

// What can be done about the usual ones.
std::string words(int error) {
  switch (error) {
    case 5001:
      return " (the nvidia-fs driver is not loaded)";
    case 5007:
    case 5008:
      return " (not supported on this platform or file system)";
    case 5009:
      return " (not supported on this device)";
    case 5025:
      return " (permission denied)";
    case 5034:
      return " (disabled by cufile.json)";
    default:
      return "";
  }
}

class LibCuFile final : public CuFileDriver {
 public:
  Status open() {
    library_ = dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library_) return {Code::unsupported, "there is no GPUDirect Storage here: " + std::string(dlerror())};
    bool all = load(cuFileDriverOpen, "cuFileDriverOpen") && load(cuFileHandleRegister, "cuFileHandleRegister") &&
               load(cuFileHandleDeregister, "cuFileHandleDeregister") && load(cuFileBufRegister, "cuFileBufRegister") &&
               load(cuFileBufDeregister, "cuFileBufDeregister") && load(cuFileRead, "cuFileRead") &&
               load(cuFileWrite, "cuFileWrite");
    if (!all) return {Code::unsupported, "libcufile.so.0 is too old: it has no " + missing_};
    return check(cuFileDriverOpen(), "cuFileDriverOpen");
  }

  std::string describe() const override { return "libcufile.so.0"; }

  Result<std::shared_ptr<void>> open(int fd) override {
    CuFileDescr descr;
    descr.handle.fd = fd;
    void* file = nullptr;
    TM_TRY(check(cuFileHandleRegister(&file, &descr), "cuFileHandleRegister"));
    return std::shared_ptr<void>(file, [this](void* p) { cuFileHandleDeregister(p); });
  }
  Result<std::shared_ptr<void>> pin(uint64_t address, uint64_t nbytes) override {
    auto* memory = reinterpret_cast<void*>(address);
    TM_TRY(check(cuFileBufRegister(memory, nbytes, 0), "cuFileBufRegister"));
    return std::shared_ptr<void>(memory, [this](void* p) { cuFileBufDeregister(p); });
  }
  Result<uint64_t> read(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t nbytes) override {
    return moved(cuFileRead(file, reinterpret_cast<void*>(base), nbytes, static_cast<off_t>(offset),
                            static_cast<off_t>(address - base)),
                 "cuFileRead");
  }
  Result<uint64_t> write(void* file, uint64_t offset, uint64_t base, uint64_t address, uint64_t nbytes) override {
    return moved(cuFileWrite(file, reinterpret_cast<const void*>(base), nbytes, static_cast<off_t>(offset),
                             static_cast<off_t>(address - base)),
                 "cuFileWrite");
  }

 private:
  static Status check(CuFileError error, const char* what) {
    if (error.error == 0) return {};
    return {Code::unsupported, std::string(what) + ": cuFile error " + std::to_string(error.error) +
                                   words(error.error) +
                                   (error.cuda_error ? ", CUDA error " + std::to_string(error.cuda_error) : "")};
  }
  static Result<uint64_t> moved(ssize_t n, const char* what) {
    if (n >= 0) return static_cast<uint64_t>(n);
    if (n <= -kFirstError)
      return Status(Code::io, std::string(what) + ": cuFile error " + std::to_string(-n) + words(static_cast<int>(-n)));
    return Status::from_errno(what, errno);
  }

  template <typename Fn>
  bool load(Fn*& fn, const char* name) {
    fn = reinterpret_cast<Fn*>(dlsym(library_, name));
    if (!fn) missing_ = name;
    return fn != nullptr;
  }

  void* library_ = nullptr;  // never closed, as libcuda
  std::string missing_;
  CuFileError (*cuFileDriverOpen)() = nullptr;
  CuFileError (*cuFileHandleRegister)(void**, CuFileDescr*) = nullptr;
  void (*cuFileHandleDeregister)(void*) = nullptr;
  CuFileError (*cuFileBufRegister)(const void*, size_t, int) = nullptr;
  CuFileError (*cuFileBufDeregister)(const void*) = nullptr;
  ssize_t (*cuFileRead)(void*, void*, size_t, off_t, off_t) = nullptr;
  ssize_t (*cuFileWrite)(void*, const void*, size_t, off_t, off_t) = nullptr;
};

struct Place {
  std::mutex mutex;
  std::shared_ptr<CuFileDriver> fake;
  std::optional<Result<std::shared_ptr<CuFileDriver>>> real;
};
Place& place() {
  static auto* p = new Place;  // outlives static destructors
  return *p;
}

}  // namespace

Result<std::shared_ptr<CuFileDriver>> open_libcufile() {
  auto driver = std::make_shared<LibCuFile>();
  TM_TRY(driver->open());
  return std::shared_ptr<CuFileDriver>(std::move(driver));
}

Result<std::shared_ptr<CuFileDriver>> CuFileDriver::get() {
  std::lock_guard lock(place().mutex);
  if (place().fake) return place().fake;
  if (!place().real) place().real = open_libcufile();
  return *place().real;
}

std::string CuFileDriver::describe_made() {
  std::lock_guard lock(place().mutex);
  if (place().fake) return place().fake->describe();
  if (!place().real) return "not opened: no op between a file and CUDA memory yet";
  return *place().real ? (**place().real)->describe() : "no: " + place().real->status().message();
}

void CuFileDriver::replace(std::shared_ptr<CuFileDriver> driver) {
  std::lock_guard lock(place().mutex);
  place().fake = std::move(driver);
}

}  // namespace torch_mooncake::transfer
