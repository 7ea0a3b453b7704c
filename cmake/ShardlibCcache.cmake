# Compiles through ccache if it is installed and no other launcher is set.
find_program(SHARDLIB_CCACHE ccache)
mark_as_advanced(SHARDLIB_CCACHE)
if(SHARDLIB_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache caches compilations with a precompiled header only if it may ignore time stamps. Paths below the base folder count
  # as relative, so that a clone of this source finds the compilations of another one.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
      "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${SHARDLIB_CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-fpch-preprocess)
  endif()
endif()
