# `cmake --install` and find_package(FlashGLA): one target a folder (FlashGLA::ops, FlashGLA::model, ...) and
# FlashGLA::flashgla for all of them.
include(CMakePackageConfigHelpers)
get_property(libraries GLOBAL PROPERTY FLASHGLA_LIBRARIES)
list(REMOVE_ITEM libraries flashgla_bench flashgla_testing)
add_library(flashgla_all INTERFACE)
set_target_properties(flashgla_all PROPERTIES EXPORT_NAME flashgla)
add_library(FlashGLA::flashgla ALIAS flashgla_all)
target_link_libraries(flashgla_all INTERFACE ${libraries})
install(TARGETS ${libraries} flashgla_all EXPORT FlashGLATargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY flashgla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
  PATTERN tests EXCLUDE)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/FlashGLA)
install(EXPORT FlashGLATargets NAMESPACE FlashGLA:: DESTINATION ${package_folder})
configure_package_config_file(cmake/FlashGLAConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/FlashGLAConfig.cmake
  INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/FlashGLAConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/FlashGLAConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/FlashGLAConfigVersion.cmake
  cmake/FindOneDNN.cmake DESTINATION ${package_folder})
