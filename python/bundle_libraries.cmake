# Run when a wheel is put together: copies the shared libraries that `program` and `modules` need into `destination`,
# each under the name by which it is asked for, and their licences beside them. What every Linux with Python has (C and
# C++ run time) stays out.
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${program} MODULES ${modules}
  RESOLVED_DEPENDENCIES_VAR libraries UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+)\\.so")
if(missing)
  message(FATAL_ERROR "libraries for the wheel are not found: ${missing}")
endif()
file(MAKE_DIRECTORY ${destination})
foreach(library IN LISTS libraries)
  get_filename_component(name ${library} NAME)
  file(REAL_PATH ${library} file)
  file(COPY_FILE ${file} ${destination}/${name})
  execute_process(COMMAND dpkg-query --search ${file} OUTPUT_VARIABLE package ERROR_QUIET RESULT_VARIABLE failed)
  string(REGEX MATCH "^[^:]+" package "${package}")
  if(NOT failed AND EXISTS /usr/share/doc/${package}/copyright)
    file(COPY_FILE /usr/share/doc/${package}/copyright ${destination}/${name}.licence)
  endif()
  message(STATUS "In the wheel: ${name}")
endforeach()
