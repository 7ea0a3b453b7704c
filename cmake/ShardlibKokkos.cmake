# Provides the target Kokkos::kokkos, unless SHARDLIB_WITH_KOKKOS is OFF, or AUTO and there is none. The outcome is in
# SHARDLIB_USE_KOKKOS.
#
# A proper Kokkos (4 or newer) is taken from its own package configuration. Debian's cannot be used: Debian 12 has only
# Trilinos' Kokkos 3.4, whose configuration names an include folder that does not exist, and sid's Kokkos 5.2 names
# static libraries that the package lacks. Loading such a configuration is a fatal error or leaves a broken target, so
# it is tried in a project of its own first; where it fails, the target is built here by hand.
include_guard(DIRECTORY)

# Sets SHARDLIB_KOKKOS_DIR to a folder whose KokkosConfig.cmake works, or to "". One that works is tried once.
function(_shardlib_find_kokkos_config)
  if(SHARDLIB_KOKKOS_DIR AND (NOT Kokkos_DIR OR Kokkos_DIR STREQUAL SHARDLIB_KOKKOS_DIR))
    return()
  endif()
  if(Kokkos_DIR)
    set(candidates "${Kokkos_DIR}")
  else()
    # No configuration has this version, so none is loaded: the call only lists what is there.
    find_package(Kokkos 999999 EXACT CONFIG QUIET)
    unset(Kokkos_DIR CACHE)
    set(candidates "")
    foreach(config version IN ZIP_LISTS Kokkos_CONSIDERED_CONFIGS Kokkos_CONSIDERED_VERSIONS)
      if(version VERSION_GREATER_EQUAL 4)
        get_filename_component(candidate "${config}" DIRECTORY)
        list(APPEND candidates "${candidate}")
      endif()
    endforeach()
  endif()

  set(works "")
  set(trial "${CMAKE_BINARY_DIR}/CMakeFiles/shardlib_kokkos_trial")
  file(WRITE "${trial}/CMakeLists.txt" "cmake_minimum_required(VERSION 3.22)\nproject(trial LANGUAGES CXX)\n"
                                       "find_package(Kokkos CONFIG REQUIRED)\n")
  foreach(candidate IN LISTS candidates)
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -S "${trial}" -B "${trial}/build" "-DKokkos_DIR=${candidate}" -G "${CMAKE_GENERATOR}"
              "-DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}"
      RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE reason)
    file(REMOVE_RECURSE "${trial}/build")
    if(status EQUAL 0)
      set(works "${candidate}")
      break()
    endif()
  endforeach()
  if(Kokkos_DIR AND NOT works)
    message(FATAL_ERROR "shardlib: a project with this Kokkos_DIR cannot be configured. Name another folder with a working"
                        " KokkosConfig.cmake, or leave it out (-UKokkos_DIR).\n${reason}")
  endif()
  set(SHARDLIB_KOKKOS_DIR "${works}" CACHE INTERNAL "The folder of a KokkosConfig.cmake that works")
endfunction()

function(_shardlib_note_kokkos_spaces)
  set(SHARDLIB_KOKKOS_OF_CUDA NO CACHE INTERNAL "Whether this Kokkos starts the kernels on GPUs")
  if("CUDA" IN_LIST ARGV AND SHARDLIB_LAUNCHER STREQUAL "kokkos" AND NOT SHARDLIB_KOKKOS_SPACE)
    set(SHARDLIB_KOKKOS_OF_CUDA YES CACHE INTERNAL "")
  elseif("${ARGV}" MATCHES "CUDA|HIP|SYCL")
    list(JOIN ARGV ", " devices)
    message(FATAL_ERROR "shardlib: this Kokkos (${devices}) is for GPUs, and only a compiler for GPUs accepts its headers."
                        " -DSHARDLIB_LAUNCHER=kokkos, with no SHARDLIB_KOKKOS_SPACE, starts kernels by a Kokkos of CUDA. Other"
                        " launchers need another Kokkos: set -DKokkos_DIR to one of the host (docs/platforms.md). cuda and hip"
                        " also work with -DSHARDLIB_WITH_KOKKOS=OFF.")
  endif()
  set(serial NO)
  if("SERIAL" IN_LIST ARGV)
    set(serial YES)
  endif()
  set(SHARDLIB_KOKKOS_SERIAL ${serial} CACHE INTERNAL "Whether this Kokkos has its serial space")
  set(openmp NO)
  if("OPENMP" IN_LIST ARGV)
    set(openmp YES)
  endif()
  set(SHARDLIB_KOKKOS_OPENMP ${openmp} CACHE INTERNAL "Whether this Kokkos has OpenMP, which its headers then need")
endfunction()

function(_shardlib_find_kokkos)
  if(TARGET Kokkos::kokkos)
    if(DEFINED Kokkos_DEVICES) # by the project that includes this one
      _shardlib_note_kokkos_spaces(${Kokkos_DEVICES})
    endif()
    return()
  endif()
  _shardlib_find_kokkos_config()
  if(SHARDLIB_KOKKOS_DIR)
    set(Kokkos_DIR "${SHARDLIB_KOKKOS_DIR}")
    set(Kokkos_LAUNCH_COMPILER OFF) # else one of GPUs replaces the compiler of every target that links it
    find_package(Kokkos CONFIG REQUIRED QUIET)
    _shardlib_note_kokkos_spaces(${Kokkos_DEVICES})
    if(SHARDLIB_KOKKOS_OF_CUDA)
      # Its flags are those of its own wrapper of nvcc as the compiler of C++. Here nvcc compiles CUDA, with flags of CMake.
      set_target_properties(Kokkos::kokkoscore PROPERTIES INTERFACE_COMPILE_OPTIONS "" INTERFACE_COMPILE_DEFINITIONS ""
                                                          INTERFACE_LINK_OPTIONS "")
      set(Kokkos_VERSION ${Kokkos_VERSION} PARENT_SCOPE)
      set(Kokkos_CUDA_ARCHITECTURES ${Kokkos_CUDA_ARCHITECTURES} PARENT_SCOPE)
    endif()
    message(STATUS "shardlib: Kokkos ${Kokkos_VERSION} (${Kokkos_DEVICES}), ${Kokkos_DIR}")
    return()
  endif()

  find_path(SHARDLIB_KOKKOS_INCLUDE_DIR Kokkos_Core.hpp PATH_SUFFIXES kokkos trilinos)
  find_library(SHARDLIB_KOKKOS_CORE_LIBRARY NAMES kokkoscore trilinos_kokkoscore)
  mark_as_advanced(SHARDLIB_KOKKOS_INCLUDE_DIR SHARDLIB_KOKKOS_CORE_LIBRARY)
  if(NOT SHARDLIB_KOKKOS_INCLUDE_DIR OR NOT SHARDLIB_KOKKOS_CORE_LIBRARY)
    if(SHARDLIB_WITH_KOKKOS STREQUAL "AUTO")
      message(STATUS "shardlib: no Kokkos, which this launcher does not need; as_kokkos is left out")
      return()
    endif()
    message(FATAL_ERROR "shardlib needs Kokkos (4 or newer, or Debian 12's libtrilinos-kokkos-dev) and found none that"
                        " works. Install it (on Debian scripts/setup.sh does), or set -DKokkos_DIR=/folder/of/"
                        "KokkosConfig.cmake.")
  endif()
  set(version "of unknown version")
  set(devices "")
  file(STRINGS "${SHARDLIB_KOKKOS_INCLUDE_DIR}/KokkosCore_config.h" lines
       REGEX "^#define KOKKOS_(VERSION [0-9]+|ENABLE_(SERIAL|OPENMP|THREADS|CUDA|HIP|SYCL))$")
  foreach(line IN LISTS lines)
    if(line MATCHES "VERSION ([0-9]+)$")
      math(EXPR major "${CMAKE_MATCH_1} / 10000")
      math(EXPR minor "${CMAKE_MATCH_1} / 100 % 100")
      math(EXPR patch "${CMAKE_MATCH_1} % 100")
      set(version "${major}.${minor}.${patch}")
    elseif(line MATCHES "ENABLE_([A-Z]+)$")
      list(APPEND devices ${CMAKE_MATCH_1})
    endif()
  endforeach()
  _shardlib_note_kokkos_spaces(${devices})
  if(SHARDLIB_KOKKOS_OF_CUDA)
    set(Kokkos_VERSION "${version}" PARENT_SCOPE)
  endif()
  add_library(Kokkos::kokkos INTERFACE IMPORTED GLOBAL)
  target_include_directories(Kokkos::kokkos INTERFACE "${SHARDLIB_KOKKOS_INCLUDE_DIR}")
  target_link_libraries(Kokkos::kokkos INTERFACE "${SHARDLIB_KOKKOS_CORE_LIBRARY}" ${CMAKE_DL_LIBS})
  if("OPENMP" IN_LIST devices)
    find_package(OpenMP REQUIRED COMPONENTS CXX)
    target_link_libraries(Kokkos::kokkos INTERFACE OpenMP::OpenMP_CXX)
  endif()
  message(STATUS "shardlib: Kokkos ${version} (${devices}), ${SHARDLIB_KOKKOS_INCLUDE_DIR}; its own CMake files do not"
                 " work and are not used")
endfunction()

if(SHARDLIB_WITH_KOKKOS)
  _shardlib_find_kokkos()
endif()
set(SHARDLIB_USE_KOKKOS OFF)
if(SHARDLIB_WITH_KOKKOS AND TARGET Kokkos::kokkos)
  set(SHARDLIB_USE_KOKKOS ON)
endif()
