# One CMake target a folder: flashgla_library(<folder> SOURCES ... DEPENDS ... [PARTS N]), so that an include of a folder
# that is not among the dependencies does not link. Its sources are compiled as N parts (flashgla_join; default 1, 0: each alone).
# Tests lie in the folder's tests/: flashgla_test(<folder> SOURCES ... DEPENDS ...).

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

# For the program's own sources, which only read flags and call libraries.
set(FLASHGLA_COMPILE_UNOPTIMIZED $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O0>)

# Precompiled headers (cmake/precompiled/NAME.h, headers of the system alone): with GCC, in builds of joined sources, and
# where there is no ccache, which keeps objects made with them for one folder alone.
set(FLASHGLA_PRECOMPILE OFF)
if(FLASHGLA_JOIN_SOURCES AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT FLASHGLA_SANITIZE AND NOT CCACHE_PROGRAM)
  set(FLASHGLA_PRECOMPILE ON)
endif()
function(flashgla_precompile target name)
  if(FLASHGLA_PRECOMPILE)
    target_precompile_headers(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:${PROJECT_SOURCE_DIR}/cmake/precompiled/${name}.h>)
  endif()
endfunction()

# Compiles a target's sources in PARTS of about the same number (FLASHGLA_JOIN_SOURCES): headers are parsed and templates
# made once a part. Sources with options of their own, those in cpu/ (Highway includes them once an instruction set) and
# those in cuda/ stay alone, and so do operators that need oneDNN, for programs of other operators (the Python extension)
# that are to be linked without it.
function(flashgla_join target parts)
  if(NOT FLASHGLA_JOIN_SOURCES OR parts EQUAL 0)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(alone ${sources})
  list(FILTER alone INCLUDE REGEX "(cpu|cuda)/|\\.cu$|ops/(cross_entropy|linear_step|matmul|quantised_linear)/")
  set_property(SOURCE ${alone} TARGET_DIRECTORY ${target} PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  list(REMOVE_ITEM sources ${alone})
  list(LENGTH sources count)
  math(EXPR batch "(${count} + ${parts} - 1) / ${parts}")
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

# SIMD sources are compiled for AVX-512, AVX2 and the portable baseline (plain C++ on x86-64, NEON on Arm).
set(FLASHGLA_SIMD_TARGETS
  "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL|HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)")

# Libraries built so far, in order; the installed package exports all of them.
set_property(GLOBAL PROPERTY FLASHGLA_LIBRARIES "")

function(flashgla_library folder)
  cmake_parse_arguments(ARG "" "PARTS" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  set(target flashgla_${folder})
  add_library(${target} STATIC ${ARG_SOURCES})
  if(NOT DEFINED ARG_PARTS)
    set(ARG_PARTS 1)
  endif()
  flashgla_join(${target} ${ARG_PARTS})
  add_library(FlashGLA::${folder} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} PRIVATE $<BUILD_INTERFACE:flashgla_options> ${ARG_PRIVATE_DEPENDS})
  set_property(GLOBAL APPEND PROPERTY FLASHGLA_LIBRARIES ${target})
endfunction()

# GoogleTest's headers, compiled once for all tests, as for a program.
if(FLASHGLA_TESTS AND FLASHGLA_PRECOMPILE)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_headers.cpp CONTENT "")
  add_library(flashgla_test_headers STATIC ${CMAKE_BINARY_DIR}/test_headers.cpp)
  set_target_properties(flashgla_test_headers PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(flashgla_test_headers PRIVATE -fPIE ${FLASHGLA_COMPILE_QUICKLY})
  target_link_libraries(flashgla_test_headers PRIVATE flashgla_options OpenMP::OpenMP_CXX GTest::gtest GTest::gmock)
  flashgla_precompile(flashgla_test_headers tests)
endif()

function(flashgla_test folder)
  if(NOT FLASHGLA_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  set(target flashgla_${folder}_test)
  add_executable(${target} ${ARG_SOURCES})
  list(LENGTH ARG_SOURCES count)
  math(EXPR parts "(${count} + 3) / 4")
  flashgla_join(${target} ${parts})
  target_compile_options(${target} PRIVATE ${FLASHGLA_COMPILE_QUICKLY})
  target_link_libraries(${target} PRIVATE flashgla_options flashgla_testing ${ARG_DEPENDS} GTest::gtest GTest::gmock GTest::gtest_main)
  if(FLASHGLA_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM flashgla_test_headers)
  endif()
  # Tests run beside each other on few cores: a thread that waits must not spin.
  gtest_discover_tests(${target} TEST_PREFIX ${folder}. DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=passive)
endfunction()
