# Install rules: headers, targets, and a package configuration that finds the dependencies as this build did.
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/shardlib")

set_target_properties(shardlib_shapes PROPERTIES EXPORT_NAME shapes)
install(TARGETS shardlib shardlib_shapes EXPORT shardlibTargets)
set(compatibility ARCH_INDEPENDENT)
if(SHARDLIB_INSTALL_COMPILED)
  set(compatibility "")
  set_target_properties(shardlib_compiled PROPERTIES EXPORT_NAME compiled EXCLUDE_FROM_ALL OFF
                                                     POSITION_INDEPENDENT_CODE ON)
  target_compile_options(shardlib_compiled PRIVATE -fno-semantic-interposition)
  # Programs are compiled for the same processor: Eigen's alignment depends on it, and both sides inline the same functions.
  string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
  separate_arguments(machine_flags UNIX_COMMAND "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}")
  list(FILTER machine_flags INCLUDE REGEX "^-m")
  target_compile_options(shardlib_compiled INTERFACE "$<INSTALL_INTERFACE:${machine_flags}>")
  install(TARGETS shardlib_compiled EXPORT shardlibTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
install(EXPORT shardlibTargets NAMESPACE shardlib:: DESTINATION "${package_dir}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/shardlib" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")

file(RELATIVE_PATH SHARDLIB_CONFIG_TO_INCLUDE "${CMAKE_INSTALL_PREFIX}/${package_dir}"
     "${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/shardlibConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/shardlibConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/shardlibConfigVersion.cmake" COMPATIBILITY SameMinorVersion
                                 ${compatibility})
include("${CMAKE_CURRENT_LIST_DIR}/ShardlibPkgConfig.cmake")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(FILES "${PROJECT_BINARY_DIR}/shardlibConfig.cmake" "${PROJECT_BINARY_DIR}/shardlibConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/ShardlibCompiled.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/ShardlibDependencies.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/ShardlibKokkos.cmake"
        DESTINATION "${package_dir}")
