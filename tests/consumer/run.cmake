# cmake -DWAY=add_subdirectory|find_package -DSOURCE=... -DBUILD=... -DSCRATCH=... -DCXX=... -P run.cmake
# Installs the library where needed, then configures, builds and runs the consumer project beside this file.
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
run("Configuring the consumer" "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${build}" -G "${GENERATOR}"
    "-DCMAKE_CXX_COMPILER=${CXX}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" -DCMAKE_BUILD_TYPE=Debug
    "-DCMAKE_CXX_FLAGS=-Wall -Wextra" ${where})
run("Building the consumer" "${CMAKE_COMMAND}" --build "${build}")
run("Running the consumer" "${build}/consumer")
message(STATUS "the consumer project works over ${WAY}")
