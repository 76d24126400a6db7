# Adds cuda/ if it can be built, and says in one line what was decided and why.
# Leaves CMAKE_CUDA_COMPILER and NCCL_INCLUDE_DIR for it.

include(CheckLanguage)

# Sets `obstacle` to what stands in the way of CUDA, or to nothing.
function(jaxzero_find_cuda)
  set(obstacle "" PARENT_SCOPE)
  if(NOT EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/CMakeLists.txt")
    set(obstacle "these sources have no cc/cuda" PARENT_SCOPE)
    return()
  endif()

  jaxzero_python_path(
    "import importlib.util as u; print(u.find_spec('nvidia.nccl').submodule_search_locations[0])"
    nccl_dir)
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${nccl_dir}/include")
  if(NOT NCCL_INCLUDE_DIR)
    set(obstacle
      "no nccl.h (install nvidia-nccl-cu13, or set NCCL_INCLUDE_DIR)" PARENT_SCOPE)
    return()
  endif()

  if(CMAKE_CUDA_COMPILER)
    return()
  endif()
  if(NOT DEFINED ENV{CUDACXX})
    find_program(JAXZERO_NVCC nvcc
      HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT JAXZERO_NVCC)
      set(obstacle "no nvcc (set CUDACXX or CUDA_HOME)" PARENT_SCOPE)
      return()
    endif()
    set(ENV{CUDACXX} "${JAXZERO_NVCC}")
  endif()
  set(CMAKE_MESSAGE_LOG_LEVEL NOTICE)  # the decision alone is worth a line
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(obstacle "$ENV{CUDACXX} does not compile" PARENT_SCOPE)
  endif()
endfunction()

string(TOLOWER "${JAXZERO_CUDA}" jaxzero_cuda)
if(NOT jaxzero_cuda MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "JAXZERO_CUDA is '${JAXZERO_CUDA}', expected auto, on or off")
endif()

if(jaxzero_cuda STREQUAL "off")
  set(obstacle "JAXZERO_CUDA is off")
else()
  jaxzero_find_cuda()
endif()

if(NOT obstacle)
  add_subdirectory(cuda)
  if(NVTX_INCLUDE_DIR)
    set(ranges "NVTX headers in ${NVTX_INCLUDE_DIR}")
  else()
    set(ranges "no ranges for profilers (no nvtx3/nvToolsExt.h)")
  endif()
  message(STATUS
    "jaxzero: with CUDA: ${CMAKE_CUDA_COMPILER}, "
    "NCCL headers in ${NCCL_INCLUDE_DIR}, ${ranges}")
elseif(jaxzero_cuda STREQUAL "on")
  message(FATAL_ERROR "JAXZERO_CUDA is on, but: ${obstacle}")
else()
  message(STATUS "jaxzero: without CUDA: ${obstacle}")
endif()
