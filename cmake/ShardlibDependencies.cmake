# Finds the dependencies of shardlib::shardlib. Both this project and the installed package configuration include it, so that
# a build tree and an installation see the same targets. SHARDLIB_WITH_MPI, _DNNL and _OPENMP are ON (required), OFF or AUTO
# (used if found). The outcome is in SHARDLIB_USE_MPI, _DNNL and _OPENMP. SHARDLIB_WITH_KOKKOS and SHARDLIB_USE_KOKKOS are the
# same for Kokkos.
include_guard(DIRECTORY)

if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
   OR (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 19))
  message(FATAL_ERROR "shardlib: ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, but the"
                      " library needs g++ 12 or clang 19, or newer; name one with -DCMAKE_CXX_COMPILER, in a new build folder")
endif()
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(Eigen3 CONFIG QUIET)
find_package(fmt CONFIG QUIET)
find_path(SHARDLIB_RANDOM123_INCLUDE_DIR Random123/philox.h)
mark_as_advanced(SHARDLIB_RANDOM123_INCLUDE_DIR)
set(shardlib_required "") # and not found
if(NOT Eigen3_FOUND)
  list(APPEND shardlib_required "Eigen 3 (libeigen3-dev)")
endif()
if(NOT fmt_FOUND)
  list(APPEND shardlib_required "fmt (libfmt-dev)")
endif()
if(NOT SHARDLIB_RANDOM123_INCLUDE_DIR)
  list(APPEND shardlib_required "Random123/philox.h (librandom123-dev)")
elseif(NOT TARGET shardlib::random123)
  add_library(shardlib::random123 INTERFACE IMPORTED GLOBAL)
  target_include_directories(shardlib::random123 INTERFACE "${SHARDLIB_RANDOM123_INCLUDE_DIR}")
endif()

# Sets SHARDLIB_USE_<name> to whether the package's C++ component is there, as SHARDLIB_WITH_<name> asks for it.
macro(_shardlib_find_part name package remedy)
  set(SHARDLIB_USE_${name} OFF)
  if(SHARDLIB_WITH_${name})
    find_package(${package} QUIET COMPONENTS CXX)
    if(${package}_CXX_FOUND)
      set(SHARDLIB_USE_${name} ON)
    elseif(NOT SHARDLIB_WITH_${name} STREQUAL "AUTO")
      message(FATAL_ERROR "shardlib: SHARDLIB_WITH_${name} is ON, here or where this shardlib was installed, but ${package} for"
                          " ${CMAKE_CXX_COMPILER} was not found: install it (${remedy}), or configure shardlib with"
                          " -DSHARDLIB_WITH_${name}=OFF")
    endif()
  endif()
endmacro()
set(MPI_CXX_SKIP_MPICXX ON)  # the C interface is enough; the C++ bindings left the standard long ago
_shardlib_find_part(MPI MPI "libopenmpi-dev")
_shardlib_find_part(OPENMP OpenMP "for clang 19 libomp-19-dev")

set(SHARDLIB_USE_DNNL OFF)
if(SHARDLIB_WITH_DNNL)
  # Debian's dnnl-config.cmake requires OpenCL, so look for the header and the library alone.
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

# The dependencies of io/ (tokenizer, zarr chunks, checkpoints) and run/ (options, metrics). A program that includes neither
# does not need them. SHARDLIB_MISSING names those that were not found.
set(SHARDLIB_MISSING "")
if(NOT TARGET shardlib::io_libraries)
  add_library(shardlib::io_libraries INTERFACE IMPORTED GLOBAL)
endif()
# Library ("" for headers alone), header, Debian package.
foreach(part IN ITEMS "|toml++/toml.h|libtomlplusplus-dev"
                      "|nlohmann/json.hpp|nlohmann-json3-dev" "utf8proc|utf8proc.h|libutf8proc-dev"
                      "blosc|blosc.h|libblosc-dev" "z|zlib.h|zlib1g-dev" "zstd|zstd.h|libzstd-dev")
  string(REPLACE "|" ";" part "${part}")
  list(GET part 0 library)
  list(GET part 1 header)
  list(GET part 2 package)
  string(MAKE_C_IDENTIFIER "${header}" name)
  string(TOUPPER "SHARDLIB_${name}" name)
  find_path(${name}_INCLUDE_DIR "${header}")
  mark_as_advanced(${name}_INCLUDE_DIR)
  if(library)
    find_library(${name}_LIBRARY "${library}")
    mark_as_advanced(${name}_LIBRARY)
  endif()
  if(${name}_INCLUDE_DIR AND (NOT library OR ${name}_LIBRARY))
    target_include_directories(shardlib::io_libraries INTERFACE "${${name}_INCLUDE_DIR}")
    if(library)
      target_link_libraries(shardlib::io_libraries INTERFACE "${${name}_LIBRARY}")
    endif()
  else()
    list(APPEND SHARDLIB_MISSING "${header} (${package})")
  endif()
endforeach()
if(shardlib_required)
  list(APPEND shardlib_required ${SHARDLIB_MISSING})
  list(JOIN shardlib_required ", " shardlib_required)
  message(FATAL_ERROR "shardlib: not found: ${shardlib_required}; install them (on Debian scripts/setup.sh does), or name the"
                      " folders of their include and lib in CMAKE_PREFIX_PATH")
endif()
include("${CMAKE_CURRENT_LIST_DIR}/ShardlibKokkos.cmake")
if(SHARDLIB_MISSING)
  list(JOIN SHARDLIB_MISSING ", " SHARDLIB_MISSING)
  message(STATUS "shardlib: not found: ${SHARDLIB_MISSING}; parts of io/ and run/ that need these do not compile")
endif()
