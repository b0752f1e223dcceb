# SPDX-License-Identifier: Apache-2.0
# cmake --install: header, library, the plugins beside it, cqsa command, pkg-config file, find_package(cqsa).
include(CMakePackageConfigHelpers)

install(TARGETS cqsa EXPORT cqsaTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(TARGET cqsa_cuda)  # not in the export: nothing links against it
  install(TARGETS cqsa_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES include/cqsa.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET cqsa_tool)
  install(TARGETS cqsa_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

install(EXPORT cqsaTargets NAMESPACE cqsa:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cqsa)
configure_package_config_file(cmake/cqsaConfig.cmake.in ${CMAKE_BINARY_DIR}/cqsaConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cqsa)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/cqsaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/cqsaConfig.cmake ${CMAKE_BINARY_DIR}/cqsaConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/cqsa)

# From the folder of cqsa.pc up to the prefix, whatever the depth of libdir (lib, lib/x86_64-linux-gnu).
file(RELATIVE_PATH CQSA_PC_TO_PREFIX "/p/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/p")
configure_file(cmake/cqsa.pc.in ${CMAKE_BINARY_DIR}/cqsa.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/cqsa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
