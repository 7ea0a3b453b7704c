# The target check_cuda compiles with nvcc, as CUDA sources: every header but the definitions of impl/, the kernels for a
# device, and the trainers, which are linked too. The trainers' definitions come from shardlib::compiled, which the C++ compiler
# makes. scripts/test-cuda.sh compiles op tests, and the definitions that start kernels, in a build for GPUs.
# check_cuda_quick is the part of it that fits into a test run.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "SHARDLIB_CHECK_CUDA needs nvcc; set -DCMAKE_CUDA_COMPILER=/path/to/nvcc")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real)
endif()
enable_language(CUDA)

add_library(shardlib_own_cuda_flags INTERFACE)
target_compile_options(shardlib_own_cuda_flags INTERFACE -std=c++20 -Werror=all-warnings -Xcompiler=-Wall,-Wextra)
# The warnings that shardlib_own_flags leaves out for g++ 12.
target_compile_options(
  shardlib_own_cuda_flags
  INTERFACE -Xcompiler=-Wno-maybe-uninitialized,-Wno-uninitialized,-Wno-stringop-overflow,-Wno-restrict,-Wno-array-bounds)
target_link_libraries(shardlib_own_cuda_flags INTERFACE shardlib_compiled)

add_custom_target(check_cuda)
add_custom_target(check_cuda_quick)

include("${CMAKE_CURRENT_LIST_DIR}/ShardlibPublicHeaders.cmake")
# Only definitions read these; the C++ header of oneDNN 2 stops nvcc with an internal error.
list(FILTER headers EXCLUDE REGEX "^shardlib/kernels/(bf16_gemm|convolution|gemm)\\.hpp$")
list(TRANSFORM headers REPLACE ".+" "#include \"\\0\"\n")
list(JOIN headers "" text)
file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/check_cuda/headers.cu" CONTENT "${text}")
add_library(check_cuda_headers OBJECT EXCLUDE_FROM_ALL "${PROJECT_BINARY_DIR}/check_cuda/headers.cu")
target_link_libraries(check_cuda_headers PRIVATE shardlib_own_cuda_flags)

# Every kernel for the device, by the direct launcher; and our declarations of NCCL against its header.
set(device_sources "${PROJECT_SOURCE_DIR}/tests/kernels.cu" "${PROJECT_SOURCE_DIR}/tests/nccl_header.cu")
set_source_files_properties(${device_sources} PROPERTIES LANGUAGE CUDA)
add_library(check_cuda_kernels OBJECT EXCLUDE_FROM_ALL ${device_sources})
target_link_libraries(check_cuda_kernels PRIVATE shardlib_own_cuda_flags)

# A training step as a build with SHARDLIB_LAUNCHER=cuda compiles it, which has no oneDNN.
set_source_files_properties("${PROJECT_SOURCE_DIR}/tests/gpt_step.cu" PROPERTIES LANGUAGE CUDA)
add_library(check_cuda_step OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/gpt_step.cu")
target_compile_definitions(check_cuda_step PRIVATE SHARDLIB_LAUNCHER_CUDA)
target_compile_options(check_cuda_step PRIVATE -Werror=cross-execution-space-call -USHARDLIB_WITH_DNNL --extended-lambda)
target_link_libraries(check_cuda_step PRIVATE shardlib_own_cuda_flags)

# A kernel that Kokkos starts, against a stand-in for a Kokkos of CUDA, which Debian does not have.
set_source_files_properties("${PROJECT_SOURCE_DIR}/tests/kokkos_launch.cu" PROPERTIES LANGUAGE CUDA)
add_library(check_cuda_kokkos OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/kokkos_launch.cu")
target_include_directories(check_cuda_kokkos BEFORE PRIVATE "${PROJECT_SOURCE_DIR}/tests/stand_in/kokkos")
target_compile_definitions(check_cuda_kokkos PRIVATE SHARDLIB_LAUNCHER_CUDA SHARDLIB_KOKKOS_CUDA="0")
target_compile_options(check_cuda_kokkos PRIVATE -USHARDLIB_WITH_DNNL --extended-lambda -Werror=cross-execution-space-call)
target_link_libraries(check_cuda_kokkos PRIVATE shardlib_own_cuda_flags)

foreach(program mlp_fsdp gpt_fsdp gpt2 gpt_pipeline moe)
  set(source "${PROJECT_SOURCE_DIR}/examples/${program}.cpp")
  set_source_files_properties("${source}" PROPERTIES LANGUAGE CUDA)
  add_executable(${program}_cuda EXCLUDE_FROM_ALL "${source}")
  target_link_libraries(${program}_cuda PRIVATE shardlib_own_cuda_flags)
  add_dependencies(check_cuda ${program}_cuda)
endforeach()

add_dependencies(check_cuda_quick check_cuda_headers check_cuda_kernels check_cuda_kokkos check_cuda_step mlp_fsdp_cuda)
add_dependencies(check_cuda check_cuda_headers check_cuda_kernels check_cuda_kokkos check_cuda_step)
