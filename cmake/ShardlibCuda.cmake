# SHARDLIB_LAUNCHER=cuda: shardlib::shardlib with the CUDA toolkit, and shardlib_compile_as_cuda for programs.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90 CACHE STRING "GPUs to compile for: 80 is an A100, 90 an H100 or H200")
endif()
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(architecture MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 LESS 80)
    message(FATAL_ERROR "shardlib: CMAKE_CUDA_ARCHITECTURES has ${architecture}, but the kernels need a GPU of 80 (A100) or later")
  endif()
endforeach()
if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# NCCL is loaded when a program needs it (comm/nccl.hpp).
target_link_libraries(shardlib INTERFACE CUDA::cudart CUDA::cublas)
target_compile_definitions(shardlib INTERFACE SHARDLIB_LAUNCHER_CUDA)
target_compile_options(
  shardlib INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20;--extended-lambda;-Xcompiler=-fno-math-errno>")

# Makes nvcc compile the sources of a target, as all that start kernels must be: each op does. A kernel that calls a
# function without SHARDLIB_FUNCTION is an error, of which nvcc would only warn.
function(shardlib_compile_as_cuda target)
  get_target_property(sources ${target} SOURCES)
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE CUDA)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Werror=cross-execution-space-call>")
endfunction()
