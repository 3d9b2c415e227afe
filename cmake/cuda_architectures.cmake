# CMAKE_CUDA_ARCHITECTURES from FLASHGLA_CUDA_ARCHITECTURES. "native": those of this machine's GPUs, with Hopper's own
# instructions (90a), which CMake's own "native" leaves out.
set(CMAKE_CUDA_ARCHITECTURES ${FLASHGLA_CUDA_ARCHITECTURES})
if(FLASHGLA_CUDA_ARCHITECTURES STREQUAL "native")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities
    OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "FLASHGLA_CUDA_ARCHITECTURES is native, but nvidia-smi finds no GPU; name one, such as 90a-real")
  endif()
  string(REPLACE "\n" ";" CMAKE_CUDA_ARCHITECTURES "${capabilities}")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "\\." "")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real")
  list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
endif()

