# Finds what shardlib::shardlib stands on. Both this project and the installed package configuration include it, so
# that a build tree and an installation see the same targets. SHARDLIB_WITH_MPI and SHARDLIB_WITH_DNNL are ON (must be
# there), OFF or AUTO (used where found); the outcome is in SHARDLIB_USE_MPI and SHARDLIB_USE_DNNL.
include_guard(DIRECTORY)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(Eigen3 CONFIG REQUIRED)
find_package(fmt CONFIG REQUIRED)
include("${CMAKE_CURRENT_LIST_DIR}/ShardlibKokkos.cmake")

find_path(SHARDLIB_RANDOM123_INCLUDE_DIR Random123/philox.h)
mark_as_advanced(SHARDLIB_RANDOM123_INCLUDE_DIR)
if(NOT SHARDLIB_RANDOM123_INCLUDE_DIR)
  message(FATAL_ERROR "shardlib needs the Random123 headers (Debian: librandom123-dev);"
                      " set -DSHARDLIB_RANDOM123_INCLUDE_DIR=/path where they are elsewhere")
endif()
if(NOT TARGET shardlib::random123)
  add_library(shardlib::random123 INTERFACE IMPORTED GLOBAL)
  target_include_directories(shardlib::random123 INTERFACE "${SHARDLIB_RANDOM123_INCLUDE_DIR}")
endif()

set(SHARDLIB_USE_MPI OFF)
if(SHARDLIB_WITH_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface is enough; the C++ bindings left the standard long ago
  if(SHARDLIB_WITH_MPI STREQUAL "AUTO")
    find_package(MPI QUIET COMPONENTS CXX)
  else()
    find_package(MPI REQUIRED COMPONENTS CXX)
  endif()
  if(MPI_CXX_FOUND)
    set(SHARDLIB_USE_MPI ON)
  endif()
endif()

set(SHARDLIB_USE_DNNL OFF)
if(SHARDLIB_WITH_DNNL)
  # Debian's dnnl-config.cmake drags in OpenCL; the header and the library are all that is needed.
  find_path(SHARDLIB_DNNL_INCLUDE_DIR dnnl.h)
  find_library(SHARDLIB_DNNL_LIBRARY dnnl)
  mark_as_advanced(SHARDLIB_DNNL_INCLUDE_DIR SHARDLIB_DNNL_LIBRARY)
  if(SHARDLIB_DNNL_INCLUDE_DIR AND SHARDLIB_DNNL_LIBRARY)
    set(SHARDLIB_USE_DNNL ON)
    if(NOT TARGET shardlib::dnnl)
      add_library(shardlib::dnnl INTERFACE IMPORTED GLOBAL)
      target_include_directories(shardlib::dnnl INTERFACE "${SHARDLIB_DNNL_INCLUDE_DIR}")
      target_link_libraries(shardlib::dnnl INTERFACE "${SHARDLIB_DNNL_LIBRARY}")
    endif()
  elseif(NOT SHARDLIB_WITH_DNNL STREQUAL "AUTO")
    message(FATAL_ERROR "SHARDLIB_WITH_DNNL is ON, but oneDNN (dnnl.h, libdnnl) was not found")
  endif()
endif()
