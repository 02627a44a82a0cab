# libtorch_mooncake_cuda.so: kernels and what drives them. Opened with dlopen on the first use of a CUDA tensor; the
# CUDA runtime is linked statically, so `ldd` of it names no CUDA library.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 90 100)
endif()
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # nvcc has it since 12.0, CMake before 3.26 does not know
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/*/cuda/*.cu)
add_library(torch_mooncake_cuda SHARED ${cuda_sources})
set_target_properties(torch_mooncake_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
target_include_directories(torch_mooncake_cuda PRIVATE csrc)
target_compile_options(torch_mooncake_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --Werror=all-warnings>)
tm_package_target(torch_mooncake_cuda "$ORIGIN" ${package_dir})
