# cmake -DWAY=add_subdirectory|find_package -DSOURCE=... -DBUILD=... -DSCRATCH=... -DCXX=... -P run.cmake
# Installs the library where needed, then configures, builds and runs the consumer project beside this file, or the one in
# examples/template.
set(prefix "${SCRATCH}/prefix")
set(build "${SCRATCH}/build")

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${what} failed (${status}):\n${output}")
  endif()
endfunction()

file(REMOVE_RECURSE "${SCRATCH}")
if(WAY STREQUAL "find_package")
  run("Installing shardlib" "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${prefix}")
  set(where "-DCMAKE_PREFIX_PATH=${prefix}")
else()
  set(where "-DSHARDLIB_SOURCE_DIR=${SOURCE}" "-DSHARDLIB_WITH_MPI=${SHARDLIB_WITH_MPI}"
            "-DSHARDLIB_WITH_DNNL=${SHARDLIB_WITH_DNNL}" "-DSHARDLIB_WITH_OPENMP=${SHARDLIB_WITH_OPENMP}")
endif()
string(REPLACE ";" "\\;" launcher "${LAUNCHER}")
if(WAY STREQUAL "find_package")
  # An installation of the headers alone, from which a project builds shardlib::compiled for itself: that it is found.
  run("Configuring without the library" "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${SCRATCH}/headers" -G "${GENERATOR}"
      "-DCMAKE_CXX_COMPILER=${CXX}" -DSHARDLIB_BUILD_TESTS=OFF -DSHARDLIB_BUILD_EXAMPLES=OFF
      -DSHARDLIB_BUILD_BENCHMARKS=OFF)
  run("Installing the headers" "${CMAKE_COMMAND}" --install "${SCRATCH}/headers" --prefix "${SCRATCH}/headers_prefix")
  run("Finding the headers" "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${SCRATCH}/headers_consumer" -G
      "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_PREFIX_PATH=${SCRATCH}/headers_prefix")
endif()
run("Configuring the consumer" "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" -G "${GENERATOR}"
    "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" -DCMAKE_BUILD_TYPE=Debug
    -DCMAKE_CXX_FLAGS_DEBUG=-O0 "-DCMAKE_CXX_FLAGS=-Wall -Wextra" ${where})
if(WAY STREQUAL "add_subdirectory")
  run("Building the consumer" "${CMAKE_COMMAND}" --build "${build}")
  run("Running the consumer" "${build}/consumer")
else()
  # Here the project that users copy includes the whole library, in place of the consumer, as that takes long.
  run("Building the consumer's shapes" "${CMAKE_COMMAND}" --build "${build}" --target consumer_shapes)
  set(template "${SCRATCH}/template")
  run("Configuring examples/template" "${CMAKE_COMMAND}" -S "${SOURCE}/examples/template" -B "${template}" -G
      "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" -DCMAKE_BUILD_TYPE=Debug
      -DCMAKE_CXX_FLAGS_DEBUG=-O0 "-DCMAKE_CXX_FLAGS=-Wall -Wextra" ${where})
  run("Building examples/template" "${CMAKE_COMMAND}" --build "${template}")
  run("Testing examples/template" "${CMAKE_CTEST_COMMAND}" --test-dir "${template}" --output-on-failure)
  run("Training examples/template" "${template}/train" "${SOURCE}/README.md" 3)
  find_program(pkg_config pkg-config)
  file(GLOB_RECURSE pc "${prefix}/shardlib.pc")
  if(pkg_config AND pc)
    get_filename_component(pc "${pc}" DIRECTORY)
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E env "PKG_CONFIG_PATH=${pc}" "${pkg_config}" --cflags --libs shardlib
      OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run("Building with pkg-config" ${LAUNCHER} "${CXX}" -std=c++20 "${CMAKE_CURRENT_LIST_DIR}/src/launched.cpp" -o
        "${build}/launched" ${flags})
    run("Running what was built with pkg-config" "${build}/launched")
  endif()
endif()
message(STATUS "the consumer project works over ${WAY}")
