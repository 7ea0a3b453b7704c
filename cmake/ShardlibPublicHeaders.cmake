# Sets `headers` to all headers except the definitions of impl/, and except those of MPI in a build without it.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/shardlib/*.hpp")
list(FILTER headers EXCLUDE REGEX "/impl/")
if(NOT SHARDLIB_USE_MPI)
  list(FILTER headers EXCLUDE REGEX "^shardlib/comm/(mpi/.*|shm/node)\\.hpp$")
endif()
