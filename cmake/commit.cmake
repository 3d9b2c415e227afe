# cmake -DSOURCE=FOLDER -DOUT=FILE -P commit.cmake: writes the source that names the commit of FOLDER, when it changed.
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=7 --exclude=* OUTPUT_VARIABLE commit
  OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  set(commit unknown)
endif()
set(text "#include \"cli/commit.h\"\n\nconst char* flashgla::cli::source_commit() { return \"${commit}\"; }\n")
if(EXISTS ${OUT})
  file(READ ${OUT} before)
endif()
if(NOT "${text}" STREQUAL "${before}")
  file(WRITE ${OUT} "${text}")
endif()
