# libtorch_mooncake_cuda.so: kernels and what drives them. Opened with dlopen on the first use of a CUDA tensor; the
# CUDA runtime is linked statically, so `ldd` of it names no CUDA library.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)  # PTX of the last one is for what comes after it
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} does not know sm_100: CUDA 12.8 or newer is needed")
endif()
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # nvcc has it since 12.0, CMake before 3.26 does not know
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/*/cuda/*.cu)
add_library(torch_mooncake_cuda SHARED ${cuda_sources})
set(ptxas_report ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/ptxas.py)
set_target_properties(torch_mooncake_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static
                                                     CUDA_COMPILER_LAUNCHER "${ptxas_report};compile")
target_include_directories(torch_mooncake_cuda PRIVATE csrc)
target_compile_options(torch_mooncake_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xptxas=-v --Werror=all-warnings>)
add_custom_command(TARGET torch_mooncake_cuda POST_BUILD VERBATIM  # fails when a kernel spills
                   COMMAND ${ptxas_report} report -q ${CMAKE_BINARY_DIR}/CMakeFiles/torch_mooncake_cuda.dir)
tm_package_target(torch_mooncake_cuda "$ORIGIN" ${package_dir})
