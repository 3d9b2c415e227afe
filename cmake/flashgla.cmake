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

# Sets PREFIX_0, PREFIX_1, ...: the sources behind PARTS in their order, about as many bytes in each list.
function(flashgla_share prefix parts)
  set(total 1)
  foreach(number RANGE ${parts})
    set(${prefix}_${number} "")
  endforeach()
  foreach(source IN LISTS ARGN)
    get_filename_component(path ${source} ABSOLUTE)
    file(SIZE ${path} size)
    math(EXPR total "${total} + ${size}")
  endforeach()
  set(before 0)
  foreach(source IN LISTS ARGN)
    get_filename_component(path ${source} ABSOLUTE)
    file(SIZE ${path} size)
    math(EXPR part "(${before} + ${size} / 2) * ${parts} / ${total}")
    math(EXPR before "${before} + ${size}")
    list(APPEND ${prefix}_${part} ${source})
    set(${prefix}_${part} ${${prefix}_${part}} PARENT_SCOPE)
  endforeach()
endfunction()

# Compiles sources of a target in PARTS of about the same size, named NAME0, NAME1, ... (FLASHGLA_JOIN_SOURCES): headers
# are parsed and templates made once a part. Sources with options of their own stay alone.
function(flashgla_join_sources target name parts)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  flashgla_share(part ${parts} ${ARGN})
  math(EXPR last "${parts} - 1")
  foreach(number RANGE ${last})
    if(part_${number})
      set_property(SOURCE ${part_${number}} TARGET_DIRECTORY ${target} PROPERTY UNITY_GROUP ${name}${number})
    endif()
  endforeach()
endfunction()

# In PARTS sources that Highway includes once an instruction set: a part includes all of its sources for the first, then
# all for the next, so that Highway itself is parsed once a part and instruction set. Each source says that it is the
# file to include again; a part says after them that it is itself.
function(flashgla_join_simd_sources target name parts)
  flashgla_share(part ${parts} ${ARGN})
  math(EXPR last "${parts} - 1")
  foreach(number RANGE ${last})
    if(part_${number})
      set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}${number}.cpp)
      set(again "#undef HWY_TARGET_INCLUDE\n#define HWY_TARGET_INCLUDE \"${file}\"\n")
      list(TRANSFORM part_${number} REPLACE "(.+)" "#include \"\\1\"\n" OUTPUT_VARIABLE includes)
      list(JOIN includes "" includes)
      file(CONFIGURE OUTPUT ${file} @ONLY CONTENT "${again}#include \"hwy/foreach_target.h\"\n${includes}${again}")
      target_sources(${target} PRIVATE ${file})
      set_property(SOURCE ${file} TARGET_DIRECTORY ${target} PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
      set_property(SOURCE ${part_${number}} TARGET_DIRECTORY ${target} PROPERTY HEADER_FILE_ONLY ON)
    endif()
  endforeach()
endfunction()

# All C++ sources of a target, but those in cuda/, in PARTS; 0: each alone.
function(flashgla_join target parts)
  if(NOT FLASHGLA_JOIN_SOURCES OR parts EQUAL 0)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources EXCLUDE REGEX "cuda/|\\.cu$|^${CMAKE_BINARY_DIR}")
  flashgla_join_sources(${target} part ${parts} ${sources})
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
  gtest_discover_tests(${target} TEST_PREFIX ${folder}. NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 600 ENVIRONMENT OMP_WAIT_POLICY=passive)
endfunction()
