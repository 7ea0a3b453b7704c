# SHARDLIB_LAUNCHER=cuda or hip: shardlib::shardlib with the toolkit of NVIDIA or AMD, and shardlib_compile_for_gpu for
# programs. HIP is CUDA's launcher under other names (memory/hip.hpp).
if(SHARDLIB_LAUNCHER STREQUAL "hip")
  if(NOT CMAKE_HIP_ARCHITECTURES)
    set(CMAKE_HIP_ARCHITECTURES gfx90a CACHE STRING "GPUs to compile for: gfx90a is an MI250, gfx942 an MI300X")
  endif()
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "shardlib: SHARDLIB_LAUNCHER=hip takes the clang of HIP for C++ too, as both share one OpenMP;"
                        " set -DCMAKE_CXX_COMPILER=/path/to/its/clang++")
  endif()
  enable_language(HIP)
  find_package(hip CONFIG REQUIRED)
  find_package(hipblas CONFIG REQUIRED)
  target_link_libraries(shardlib INTERFACE hip::host roc::hipblas)
  target_compile_definitions(shardlib INTERFACE SHARDLIB_LAUNCHER_CUDA SHARDLIB_LAUNCHER_HIP)
  target_compile_options(shardlib INTERFACE "$<$<COMPILE_LANGUAGE:HIP>:-fno-math-errno>")
else()
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
  target_link_libraries(shardlib INTERFACE CUDA::cudart CUDA::cublas CUDA::cublasLt)
  target_compile_definitions(shardlib INTERFACE SHARDLIB_LAUNCHER_CUDA)
  target_compile_options(
    shardlib INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20;--extended-lambda;-Xcompiler=-fno-math-errno>")
endif()

# Makes nvcc or HIP's clang compile the sources of a target. All sources that start kernels need it, and each op starts some. A
# kernel that calls a function without SHARDLIB_FUNCTION is an error; by default nvcc only warns.
function(shardlib_compile_for_gpu target)
  string(TOUPPER "${SHARDLIB_LAUNCHER}" language) # a cache variable: the caller may be another project
  get_target_property(sources ${target} SOURCES)
  set_source_files_properties(${sources} TARGET_DIRECTORY ${target} PROPERTIES LANGUAGE ${language})
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Werror=cross-execution-space-call>")
endfunction()
