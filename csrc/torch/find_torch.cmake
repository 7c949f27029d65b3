# What the adapter is built with, from the torch packages in CGP_TORCH_DIR alone: torch's CMake files would ask for a CUDA
# toolkit and its compiler, and none is needed.
#
#   CGP_CUDA_INCLUDE_DIRS      CUDA's headers: those of the wheels that the first torch depends on, else CUDA_HOME's
#   cgp_torch_release(DIR VAR) the release of the torch in DIR, as 2_11
#
# and for tests, which run without Python, of the first torch:
#
#   CGP_CUDART_LIBRARY         the runtime of the same origin as CUDA's headers
#   torch::c10, torch::c10_cuda, torch::torch_cuda

function(cgp_torch_release torch variable)
  file(STRINGS ${torch}/version.py line REGEX "^__version__ = ")
  string(REGEX MATCH "([0-9]+)\\.([0-9]+)" _ "${line}")
  set(${variable} ${CMAKE_MATCH_1}_${CMAKE_MATCH_2} PARENT_SCOPE)
endfunction()

list(GET CGP_TORCH_DIR 0 first_torch)
get_filename_component(site_packages "${first_torch}" DIRECTORY)

# cuda.h, cuda_runtime_api.h and libcudart of CUDA 13 share a folder; those of CUDA 12 lie in one folder per package.
file(GLOB wheel_includes LIST_DIRECTORIES true
  ${site_packages}/nvidia/cu[0-9]*/include ${site_packages}/nvidia/cuda_runtime/include)
file(GLOB wheel_cudarts
  ${site_packages}/nvidia/cu[0-9]*/lib/libcudart.so.* ${site_packages}/nvidia/cuda_runtime/lib/libcudart.so.*)
set(cuda_home $ENV{CUDA_HOME})
if(NOT cuda_home)
  set(cuda_home /usr/local/cuda)
endif()
if(NOT CGP_CUDA_INCLUDE_DIRS)
  foreach(candidate IN LISTS wheel_includes ITEMS ${cuda_home}/include)
    if(EXISTS ${candidate}/cuda_runtime_api.h AND EXISTS ${candidate}/cudaTypedefs.h)
      set(CGP_CUDA_INCLUDE_DIRS ${candidate})
      break()
    endif()
  endforeach()
endif()
if(NOT CGP_CUDA_INCLUDE_DIRS)
  message(FATAL_ERROR
    "no CUDA headers found beside ${first_torch} or in ${cuda_home}; pip install nvidia-cuda-runtime, or set CUDA_HOME")
endif()
# The runtime's wheel of CUDA 13 lacks crt/, which its own headers include, or holds only part of it; the whole stands in
# nvidia-cuda-crt, which torch does not depend on, and in triton, which it does.
foreach(candidate IN LISTS CGP_CUDA_INCLUDE_DIRS ITEMS ${site_packages}/triton/backends/nvidia/include ${cuda_home}/include)
  if(EXISTS ${candidate}/crt/host_defines.h AND EXISTS ${candidate}/crt/host_config.h)
    list(APPEND CGP_CUDA_INCLUDE_DIRS ${candidate})
    list(REMOVE_DUPLICATES CGP_CUDA_INCLUDE_DIRS)
    set(crt_found TRUE)
    break()
  endif()
endforeach()
if(NOT crt_found)
  message(FATAL_ERROR
    "crt/host_defines.h and crt/host_config.h were not found beside ${first_torch} or in ${cuda_home}/include; pip install nvidia-cuda-crt")
endif()

if(NOT CGP_BUILD_TESTS)
  return()
endif()
if(NOT CGP_CUDART_LIBRARY)
  file(GLOB toolkit_cudarts ${cuda_home}/lib64/libcudart.so)
  foreach(candidate IN LISTS wheel_cudarts toolkit_cudarts)
    set(CGP_CUDART_LIBRARY ${candidate})
    break()
  endforeach()
endif()
if(NOT CGP_CUDART_LIBRARY)
  message(FATAL_ERROR
    "no libcudart found beside ${first_torch} or in ${cuda_home}; pip install nvidia-cuda-runtime, or set CUDA_HOME")
endif()
foreach(name c10 c10_cuda torch_cuda)
  add_library(torch::${name} SHARED IMPORTED)
  set_target_properties(torch::${name} PROPERTIES IMPORTED_LOCATION ${first_torch}/lib/lib${name}.so)
  target_include_directories(torch::${name} INTERFACE ${first_torch}/include ${CGP_CUDA_INCLUDE_DIRS})
endforeach()
