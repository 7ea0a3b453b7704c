# The target check_headers compiles every header on its own: each must include what it uses.
file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
     "${PROJECT_SOURCE_DIR}/include/shardlib/*.hpp")
list(FILTER headers EXCLUDE REGEX "_inl\\.hpp$")  # X.hpp ends with X_inl.hpp: they are compiled together
if(NOT SHARDLIB_USE_MPI)
  list(FILTER headers EXCLUDE REGEX "^shardlib/comm/(mpi.*|shm_node)\\.hpp$")
endif()
set(sources "")
foreach(header IN LISTS headers)
  string(MAKE_C_IDENTIFIER "${header}" name)
  set(source "${PROJECT_BINARY_DIR}/check_headers/${name}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n")
  list(APPEND sources "${source}")
endforeach()
if(sources)
  add_library(check_headers OBJECT EXCLUDE_FROM_ALL ${sources})
  target_link_libraries(check_headers PRIVATE shardlib shardlib_own_flags)
endif()
