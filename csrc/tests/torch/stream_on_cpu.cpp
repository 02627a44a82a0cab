// What the operators ask of torch's CUDA half, for the fake device of fake_cuda.cpp: its one device, and a stream that
// the kernels of cuda_on_cpu.cpp do not look at. Loaded before the operators, as libtorch_cuda.so.
#include <cstdint>

#define TEST_API extern "C" [[gnu::visibility("default")]]

TEST_API int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

TEST_API int32_t aoti_torch_create_device_guard(int32_t device, void** guard) {
  static int only;
  *guard = &only;
  return device == 0 ? 0 : 1;
}

TEST_API int32_t aoti_torch_delete_device_guard(void*) { return 0; }
