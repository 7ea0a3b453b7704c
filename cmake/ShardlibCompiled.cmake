# shardlib::compiled: the definitions that header-only programs compile for themselves, compiled once into a static
# library. Both this project and the installed package configuration include it, so a user's is built with his flags.
# SHARDLIB_INCLUDE_ROOT is the folder that holds shardlib/.
if(TARGET shardlib_compiled)
  return()
endif()
file(GLOB_RECURSE shardlib_definitions CONFIGURE_DEPENDS RELATIVE "${SHARDLIB_INCLUDE_ROOT}"
     "${SHARDLIB_INCLUDE_ROOT}/shardlib/*.hpp")
list(FILTER shardlib_definitions INCLUDE REGEX "/impl/")
set(shardlib_sources "")
foreach(header IN LISTS shardlib_definitions)
  string(MAKE_C_IDENTIFIER "${header}" name)
  set(source "${CMAKE_CURRENT_BINARY_DIR}/shardlib_compiled/${name}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "#include \"${header}\"\n")
  list(APPEND shardlib_sources "${source}")
endforeach()
add_library(shardlib_compiled STATIC EXCLUDE_FROM_ALL ${shardlib_sources})
# Their headers cost more than they do: several definitions share one reading of them.
set_target_properties(shardlib_compiled PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
target_compile_definitions(shardlib_compiled PUBLIC SHARDLIB_COMPILED)
target_link_libraries(shardlib_compiled PUBLIC shardlib::shardlib)
add_library(shardlib::compiled ALIAS shardlib_compiled)
