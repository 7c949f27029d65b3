// The functions of CUDA's driver API that are used here. They are found at run time, so a machine
// without a driver can load the library, and a test can use functions of its own.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

namespace cgp {

// X(function, version): the CUDA version, times 1000, that brought the form of the function that is
// called here. It is looked up and typed by that version, whatever newer forms exist.
#define CGP_CUDA_FUNCTIONS(X)                 \
  X(cuInit, 2000)                             \
  X(cuGetErrorName, 6000)                     \
  X(cuDeviceGet, 2000)                        \
  X(cuDeviceGetCount, 2000)                   \
  X(cuDeviceGetAttribute, 2000)               \
  X(cuDeviceCanAccessPeer, 4000)              \
  X(cuDevicePrimaryCtxRetain, 7000)           \
  X(cuDevicePrimaryCtxRelease, 11000)         \
  X(cuDevicePrimaryCtxGetState, 7000)         \
  X(cuCtxGetCurrent, 4000)                    \
  X(cuCtxPushCurrent, 4000)                   \
  X(cuCtxPopCurrent, 4000)                    \
  X(cuCtxSynchronize, 2000)                   \
  X(cuMemGetInfo, 3020)                       \
  X(cuMemGetAllocationGranularity, 10020)     \
  X(cuMemAddressReserve, 10020)               \
  X(cuMemAddressFree, 10020)                  \
  X(cuMemCreate, 10020)                       \
  X(cuMemRelease, 10020)                      \
  X(cuMemMap, 10020)                          \
  X(cuMemUnmap, 10020)                        \
  X(cuMemSetAccess, 10020)                    \
  X(cuThreadExchangeStreamCaptureMode, 10010) \
  X(cuStreamGetCaptureInfo, 12030)            \
  X(cuGraphNodeGetDependencies, 12030)        \
  X(cuGraphGetNodes, 10000)                   \
  X(cuGraphGetEdges, 12030)                   \
  X(cuGraphNodeGetType, 10000)                \
  X(cuGraphKernelNodeGetParams, 12000)        \
  X(cuGraphKernelNodeGetAttribute, 11000)     \
  X(cuGraphMemcpyNodeGetParams, 10000)        \
  X(cuGraphMemsetNodeGetParams, 10000)        \
  X(cuFuncGetAttribute, 2020)                 \
  X(cuKernelGetAttribute, 12000)              \
  X(cuGraphInstantiateWithFlags, 11040)       \
  X(cuGraphExecUpdate, 12000)                 \
  X(cuGraphUpload, 11010)                     \
  X(cuGraphExecDestroy, 10000)                \
  X(cuEventCreate, 2000)                      \
  X(cuEventRecord, 2000)                      \
  X(cuEventQuery, 2000)                       \
  X(cuEventDestroy, 4000)                     \
  X(cuStreamWaitEvent, 3020)

// A function of CUDA's. It is called like a plain function, and knows its name for errors.
template <typename Function>
struct CudaFunction {
  const char* name;
  Function* pointer = nullptr;

  CudaFunction& operator=(Function* to) {
    pointer = to;
    return *this;
  }
  operator Function*() const { return pointer; }
};

struct CudaApi {
#define CGP_CUDA_FIELD(function, version)                                              \
  /* A name, which takes no parentheses. NOLINTNEXTLINE(bugprone-macro-parentheses) */ \
  CudaFunction<std::remove_pointer_t<PFN_##function##_v##version>> function{#function};
  CGP_CUDA_FUNCTIONS(CGP_CUDA_FIELD)
  CGP_CUDA_FIELD(cuCtxRecordEvent, 12050)  // nullptr if the driver is older
#undef CGP_CUDA_FIELD
  int version = 0;  // of the driver's CUDA, times 1000
};

// The functions of this machine's driver, which the first call loads for the whole process. Throws
// DriverError with the reason if there is no driver, or it is too old. Does not call cuInit.
const CudaApi& CudaApiOrThrow(int device);

}  // namespace cgp
