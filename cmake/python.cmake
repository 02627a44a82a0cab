# The thin layers over libtorch_mooncake.so: _core (nanobind), _ops (torch's stable ABI), _c10d (torch's C++ API).
# Each is built when its sources are there.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

file(GLOB core_sources CONFIGURE_DEPENDS csrc/python/*.cpp)
if(TM_PYTHON AND core_sources)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE
                  OUTPUT_VARIABLE nanobind_ROOT RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "nanobind is not installed for ${Python_EXECUTABLE}: pip install 'nanobind>=2.4'")
  endif()
  find_package(nanobind CONFIG REQUIRED)
  nanobind_add_module(_core NB_DOMAIN torch_mooncake NOMINSIZE ${core_sources})
  target_compile_options(_core PRIVATE -Wall -Wextra)
  target_link_libraries(_core PRIVATE torch_mooncake)
  target_compile_definitions(_core PRIVATE TM_VERSION="${TM_VERSION}")
  tm_package_target(_core "$ORIGIN" ${package_dir})
endif()

file(GLOB ops_sources CONFIGURE_DEPENDS csrc/torch/ops*.cpp)
file(GLOB c10d_sources CONFIGURE_DEPENDS csrc/torch/c10d*.cpp)
if(NOT TM_TORCH OR NOT (ops_sources OR c10d_sources))
  return()
endif()

# find_package(Torch) would ask for a whole CUDA toolkit beside a CUDA build of torch.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import os
os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'
import torch
from torch.utils.cpp_extension import include_paths, library_paths
print(';'.join(include_paths()))
print(';'.join(library_paths()))
print('.'.join(torch.__version__.split('.')[:2]))
print(int(torch.compiled_with_cxx11_abi()))"
  OUTPUT_VARIABLE torch_facts RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(failed)
  message(FATAL_ERROR "torch cannot be imported by ${Python_EXECUTABLE}: install torch first, or set TM_TORCH=OFF")
endif()
string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$" matched "${torch_facts}")
set(torch_includes ${CMAKE_MATCH_1})
set(torch_library_dirs ${CMAKE_MATCH_2})
set(torch_version ${CMAKE_MATCH_3})
set(torch_cxx11_abi ${CMAKE_MATCH_4})
message(STATUS "torch ${torch_version}: ${torch_library_dirs}")

function(tm_torch_module name)
  add_library(${name} MODULE ${ARGN})
  set_target_properties(${name} PROPERTIES PREFIX "" SUFFIX ".so")
  target_include_directories(${name} SYSTEM PRIVATE ${torch_includes})
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_compile_definitions(${name} PRIVATE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
  target_link_directories(${name} PRIVATE ${torch_library_dirs})
  target_link_libraries(${name} PRIVATE torch_mooncake)
  tm_package_target(${name} "$ORIGIN" ${package_dir})
endfunction()

# _ops: torch >= 2.11 through its stable ABI, so one binary serves later torch too. No CUDA: csrc/kv/cuda is a plug-in.
if(ops_sources)
  tm_torch_module(_ops ${ops_sources})
  target_compile_definitions(_ops PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
  target_link_libraries(_ops PRIVATE torch_cpu)
endif()

# _c10d: c10d::Backend has no stable ABI, so this one belongs to the torch it was built against.
if(c10d_sources)
  tm_torch_module(_c10d ${c10d_sources})
  target_compile_definitions(_c10d PRIVATE TORCH_EXTENSION_NAME=_c10d TORCH_API_INCLUDE_EXTENSION_H
                                           TM_BUILT_TORCH="${torch_version}")
  target_link_libraries(_c10d PRIVATE torch torch_cpu c10 torch_python Python::Module)
endif()

# A CUDA device for the tests of _c10d, where there is none (csrc/tests/torch/fake_cuda.cpp).
if(c10d_sources AND TM_TESTS)
  tm_torch_module(fake_cuda csrc/tests/torch/fake_cuda.cpp)
  set_target_properties(fake_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests
                                             INSTALL_RPATH ${package_dir} EXCLUDE_FROM_ALL OFF)
  target_include_directories(fake_cuda PRIVATE csrc/tests)
  target_compile_definitions(fake_cuda PRIVATE TORCH_EXTENSION_NAME=fake_cuda TORCH_API_INCLUDE_EXTENSION_H)
  target_link_libraries(fake_cuda PRIVATE torch torch_cpu c10 torch_python Python::Module)
endif()

# The CUDA plug-in's kernels on the CPU, and torch's current stream, for the tests of _ops on the device above.
if(ops_sources AND c10d_sources AND TM_TESTS)
  set(on_cpu ${CMAKE_BINARY_DIR}/tests/on_cpu)
  add_library(cuda_on_cpu MODULE csrc/tests/torch/cuda_on_cpu.cpp)
  set_target_properties(cuda_on_cpu PROPERTIES OUTPUT_NAME torch_mooncake_cuda LIBRARY_OUTPUT_DIRECTORY ${on_cpu})
  target_include_directories(cuda_on_cpu PRIVATE csrc csrc/tests)
  target_compile_options(cuda_on_cpu PRIVATE -Wall -Wextra)
  add_library(stream_on_cpu MODULE csrc/tests/torch/stream_on_cpu.cpp)
  set_target_properties(stream_on_cpu PROPERTIES OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY ${on_cpu})
  target_link_options(stream_on_cpu PRIVATE -Wl,-soname,libtorch_cuda.so)
endif()
