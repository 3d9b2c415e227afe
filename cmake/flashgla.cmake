# One CMake target a folder: flashgla_library(<folder> SOURCES ... DEPENDS ...), so that an include of a folder that is
# not among the dependencies does not link. Tests lie in the folder's tests/: flashgla_test(<folder> SOURCES ... DEPENDS ...).

add_library(flashgla_options INTERFACE)
target_compile_options(flashgla_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-missing-field-initializers>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wshadow=local -Wno-restrict>
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v>)
if(FLASHGLA_SANITIZE)
  target_compile_options(flashgla_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FLASHGLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(flashgla_options INTERFACE -fsanitize=${FLASHGLA_SANITIZE})
endif()

# For targets in which no loop is long: what their code takes is compile time.
set(FLASHGLA_COMPILE_QUICKLY $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)

# SIMD sources are compiled for AVX-512, AVX2 and the portable baseline (plain C++ on x86-64, NEON on Arm).
set(FLASHGLA_SIMD_TARGETS
  "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")
if(FLASHGLA_SANITIZE)  # the baseline alone: compile time
  set(FLASHGLA_SIMD_TARGETS HWY_COMPILE_ONLY_STATIC)
endif()

# Libraries built so far, in order; the installed package exports all of them.
set_property(GLOBAL PROPERTY FLASHGLA_LIBRARIES "")

function(flashgla_library folder)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  set(target flashgla_${folder})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(FlashGLA::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} PRIVATE $<BUILD_INTERFACE:flashgla_options> ${ARG_PRIVATE_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY FLASHGLA_LIBRARIES ${target})
endfunction()

function(flashgla_test folder)
  if(NOT FLASHGLA_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  set(target flashgla_${folder}_test)
  add_executable(${target} ${ARG_SOURCES})
  target_compile_options(${target} PRIVATE ${FLASHGLA_COMPILE_QUICKLY})
  target_link_libraries(${target} PRIVATE flashgla_options flashgla_testing ${ARG_DEPENDS} GTest::gtest GTest::gmock GTest::gtest_main)
  # Tests run beside each other on few cores: a thread that waits must not spin.
  gtest_discover_tests(${target} TEST_PREFIX ${folder}. DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=passive)
endfunction()
