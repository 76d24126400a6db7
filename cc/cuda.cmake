# Adds cuda/ if it can be built, and says in one line what was decided and why.
# Sets CMAKE_CUDA_COMPILER and NCCL_INCLUDE_DIR for it.

string(TOLOWER "${JAXZERO_CUDA}" jaxzero_cuda)
if(NOT jaxzero_cuda MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "JAXZERO_CUDA is '${JAXZERO_CUDA}', expected auto, on or off")
endif()

if(jaxzero_cuda STREQUAL "off")
  message(STATUS "jaxzero: without CUDA: JAXZERO_CUDA is off")
  return()
endif()

find_program(JAXZERO_NVCC nvcc
  HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
jaxzero_python_path(
  "import importlib.util as u; print(u.find_spec('nvidia.nccl').submodule_search_locations[0])"
  nccl_dir)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${nccl_dir}/include")

if(NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/CMakeLists.txt")
  set(obstacle "these sources have no cc/cuda")
elseif(NOT JAXZERO_NVCC AND NOT CMAKE_CUDA_COMPILER)
  set(obstacle "no nvcc in PATH, CUDACXX or CUDA_HOME")
elseif(NOT NCCL_INCLUDE_DIR)
  set(obstacle "no nccl.h (install nvidia-nccl-cu13 or set NCCL_INCLUDE_DIR)")
endif()

if(DEFINED obstacle)
  if(jaxzero_cuda STREQUAL "on")
    message(FATAL_ERROR "JAXZERO_CUDA is on, but: ${obstacle}")
  endif()
  message(STATUS "jaxzero: without CUDA: ${obstacle}")
  return()
endif()

if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${JAXZERO_NVCC}")
endif()
message(STATUS "jaxzero: with CUDA: ${CMAKE_CUDA_COMPILER}, NCCL headers in ${NCCL_INCLUDE_DIR}")
add_subdirectory(cuda)
