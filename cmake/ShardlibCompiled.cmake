# shardlib::compiled: the definitions that header-only programs compile for themselves, compiled once into a static
# library. Both this project and the installed package configuration include it, so a user builds it with his own flags.
# SHARDLIB_INCLUDE_ROOT is the folder that holds shardlib/.
if(TARGET shardlib_compiled)
  return()
endif()
file(GLOB_RECURSE shardlib_definitions CONFIGURE_DEPENDS RELATIVE "${SHARDLIB_INCLUDE_ROOT}"
     "${SHARDLIB_INCLUDE_ROOT}/shardlib/*.hpp")
list(FILTER shardlib_definitions INCLUDE REGEX "/impl/")
set(shardlib_sources "")
set(shardlib_kernel_sources "") # sources that start kernels: those of these rooms, and those that call elementwise loops
set(shardlib_joined_definitions "") # the same as one text, without the largest
foreach(header IN LISTS shardlib_definitions)
  string(MAKE_C_IDENTIFIER "${header}" name)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/${name}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n")
  list(APPEND shardlib_sources "${source}")
  file(STRINGS "${SHARDLIB_INCLUDE_ROOT}/${header}" loops REGEX "^#include \"shardlib/kernels/elementwise.hpp\"")
  if(loops OR header MATCHES "^shardlib/(kernels|compute|optim|device/impl/tree_kernel)")
    list(APPEND shardlib_kernel_sources "${source}")
    if(NOT header MATCHES "/instances_")
      string(APPEND shardlib_joined_definitions "#include \"${header}\"\n")
    endif()
  endif()
endforeach()
if(SHARDLIB_GPU_LANGUAGE)
  # nvcc, or HIP's clang, compiles what starts kernels. The C++ compiler is faster, and makes toml++, which nvcc cannot.
  # CMake has no unity builds of CUDA, so the small definitions are put together here.
  list(REMOVE_ITEM shardlib_sources ${shardlib_kernel_sources})
  foreach(header IN LISTS shardlib_definitions)
    if(header MATCHES "^shardlib/kernels/impl/(instances_[a-z]+)\\.hpp$")
      file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/${CMAKE_MATCH_1}.cu"
           CONTENT "#include \"${header}\"\n")
      list(APPEND shardlib_sources "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/${CMAKE_MATCH_1}.cu")
    endif()
  endforeach()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/kernels.cu" CONTENT "${shardlib_joined_definitions}")
  list(APPEND shardlib_sources "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/kernels.cu")
  set(shardlib_gpu_sources ${shardlib_sources})
  list(FILTER shardlib_gpu_sources INCLUDE REGEX "\\.cu$")
  set_source_files_properties(${shardlib_gpu_sources} PROPERTIES LANGUAGE ${SHARDLIB_GPU_LANGUAGE})
endif()
add_library(shardlib_compiled STATIC EXCLUDE_FROM_ALL ${shardlib_sources})
# Most of a definition's compile time is spent in its headers, so several definitions are compiled together. CMake's default is
# 8; CMAKE_UNITY_BUILD_BATCH_SIZE sets another number.
set_target_properties(shardlib_compiled PROPERTIES UNITY_BUILD ON)
target_compile_definitions(shardlib_compiled PUBLIC SHARDLIB_COMPILED)
target_link_libraries(shardlib_compiled PUBLIC shardlib::shardlib)
add_library(shardlib::compiled ALIAS shardlib_compiled)

# The commit, which runs record. Its one small source is written before each build, so that no other file is compiled
# again after a commit.
get_filename_component(shardlib_root "${SHARDLIB_INCLUDE_ROOT}" DIRECTORY)
find_package(Git QUIET)
if(Git_FOUND AND EXISTS "${shardlib_root}/.git" AND EXISTS "${CMAKE_CURRENT_LIST_DIR}/ShardlibCommit.cmake")
  set(source "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/commit.cpp")
  add_custom_target(
    shardlib_commit BYPRODUCTS "${source}"
    COMMAND "${CMAKE_COMMAND}" "-DGIT=${GIT_EXECUTABLE}" "-DSOURCE=${shardlib_root}" "-DOUTPUT=${source}" -P
            "${CMAKE_CURRENT_LIST_DIR}/ShardlibCommit.cmake"
    COMMENT "" VERBATIM)
  add_dependencies(shardlib_compiled shardlib_commit)
  target_sources(shardlib_compiled PRIVATE "${source}")
  set_source_files_properties("${source}" PROPERTIES GENERATED ON SKIP_UNITY_BUILD_INCLUSION ON)
  target_compile_definitions(shardlib_compiled PUBLIC SHARDLIB_HAS_COMMIT)
endif()
