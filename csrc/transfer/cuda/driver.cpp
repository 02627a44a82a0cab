#include "transfer/cuda/driver.h"

#include <mutex>

namespace torch_mooncake::transfer {
namespace {

struct Place {
  std::mutex mutex;
  std::shared_ptr<CudaDriver> real, fake;
};
Place& place() {
  static auto* p = new Place;  // outlives static destructors
  return *p;
}

}  // namespace

Result<std::shared_ptr<CudaDriver>> CudaDriver::get() {
  std::lock_guard lock(place().mutex);
  if (place().fake) return place().fake;
  if (!place().real) {
    TM_ASSIGN(place().real, open_libcuda());
  }
  return place().real;
}

std::shared_ptr<CudaDriver> CudaDriver::made() {
  std::lock_guard lock(place().mutex);
  return place().fake ? place().fake : place().real;
}

std::shared_ptr<CudaDriver> CudaDriver::if_used() {
  if (auto driver = made()) return driver;
  if (!libcuda_in_use()) return nullptr;
  auto driver = get();
  return driver ? *driver : nullptr;
}

void CudaDriver::replace(std::shared_ptr<CudaDriver> driver) {
  std::lock_guard lock(place().mutex);
  place().fake = std::move(driver);
}

}  // namespace torch_mooncake::transfer
