// CUDA functions made up for the tests of the driver over them, so that these run anywhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "driver/cuda_api.h"
#include "driver/cuda_driver.h"

namespace cgp::made_up_cuda {

inline constexpr uint64_t kGpuPage = uint64_t{2} << 20;
inline constexpr StreamId kStream{0x5000};

inline CUcontext const kPrimary = reinterpret_cast<CUcontext>(0x1000);
inline CUcontext const kPrimaryOfPeer = reinterpret_cast<CUcontext>(0x1800);
inline CUcontext const kOther = reinterpret_cast<CUcontext>(0x2000);
inline constexpr CUdeviceptr kAddress = 0x7f0000000000;
inline constexpr CUmemGenericAllocationHandle kHandle = 77;

// A function of a kernel. Its address is its handle, as it is of all that follows.
struct FakeFunction {
  std::map<CUfunction_attribute, int> attributes;  // 0 where there is none
};

struct FakeNode {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
  std::map<CUlaunchAttributeID, CUlaunchAttributeValue> attributes;  // nothing where there is none
  CUDA_MEMCPY3D_v2 copy{};
  CUDA_MEMSET_NODE_PARAMS_v1 memset{};
};

struct FakeEdge {
  size_t from;  // counted in the nodes of the graph
  size_t to;
  CUgraphEdgeData data{};
};

struct FakeGraph {
  std::vector<FakeNode> nodes;
  std::vector<FakeEdge> edges;
};

// What the made-up CUDA was told, and what it is to answer.
struct FakeCuda {
  int device_count = 2;
  int vmm = 1;
  int rdma = 1;
  int exports = 1;
  int compute_major = 9;
  int can_access_peer = 1;
  std::set<CUdevice> active;  // devices with a context
  bool event_ready = true;
  std::map<std::string, CUresult> failing;

  std::atomic<int> retained = 0;
  int released = 0;
  std::vector<std::string> calls;  // those that need a context, in order; "... of 1" in the peer's
  CUmemAllocationProp properties{};
  std::vector<CUmemAccessDesc> access;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  size_t alignment = 0;
  size_t offset = 1;
  CUmemGenericAllocationHandle handle = 0;
  unsigned int event_flags = 0;
  CUevent event = nullptr;
  CUstream stream = nullptr;
  CUcontext marked = nullptr;  // the context that an event was recorded for
  CUevent destroyed = nullptr;

  // The stream's capture, and what the node that is asked after depends on.
  CUstreamCaptureStatus capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture = 0;
  std::vector<CUgraphNode> nodes;
  std::vector<CUgraphEdgeData> edges;  // of each, or none at all: as CUDA has it
  CUgraphNode node = nullptr;

  // Of graphs and executables.
  std::set<int> unknown_attributes;  // of launches
  std::multiset<int> asked_attributes;
  std::set<int> unknown_function_attributes;
  std::multiset<int> asked_function_attributes;
  CUgraph graph = nullptr;
  CUgraphExec exec = nullptr;
  unsigned long long instantiate_flags = 0;
};

inline CUgraphExec const kExec = reinterpret_cast<CUgraphExec>(0x8000);
inline CUgraph ToCuda(FakeGraph* graph) { return reinterpret_cast<CUgraph>(graph); }

inline FakeCuda* fake = nullptr;
inline thread_local std::vector<CUcontext> contexts;
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

inline CUresult Outcome(const std::string& function) {
  const auto found = fake->failing.find(function);
  return found == fake->failing.end() ? CUDA_SUCCESS : found->second;
}

// For the functions that work on the current context.
inline CUresult InContext(const std::string& function) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (contexts.back() != kPrimary && contexts.back() != kPrimaryOfPeer) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  fake->calls.push_back(contexts.back() == kPrimary ? function : function + " of 1");
  return Outcome(function);
}

// For those of them that break captures of other threads, unless these are told not to mind.
inline CUresult InContextAndRelaxed(const std::string& function) {
  if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return InContext(function);
}

inline void FakeDevices(CudaApi* api) {
  api->cuInit = [](unsigned int) { return Outcome("cuInit"); };
  api->cuGetErrorName = [](CUresult code, const char** name) {
    *name = code == CUDA_ERROR_OUT_OF_MEMORY    ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == CUDA_ERROR_INVALID_VALUE  ? "CUDA_ERROR_INVALID_VALUE"
            : code == CUDA_ERROR_NO_DEVICE      ? "CUDA_ERROR_NO_DEVICE"
            : code == CUDA_ERROR_INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
                                                : nullptr;
    return *name == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
  };
  // Device numbers are not ordinals, so that mixing them up shows.
  api->cuDeviceGet = [](CUdevice* device, int ordinal) {
    if (ordinal < 0 || ordinal >= fake->device_count) return CUDA_ERROR_INVALID_DEVICE;
    *device = 100 + ordinal;
    return CUDA_SUCCESS;
  };
  api->cuDeviceGetCount = [](int* count) {
    *count = fake->device_count;
    return CUDA_SUCCESS;
  };
  api->cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED       ? fake->vmm
             : attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ? fake->rdma
             : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
                 ? fake->exports
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? fake->compute_major
                                                                         : -1;
    return CUDA_SUCCESS;
  };
  api->cuDeviceCanAccessPeer = [](int* can, CUdevice device, CUdevice peer) {
    *can = device == 101 && peer == 100 ? fake->can_access_peer : 0;
    return CUDA_SUCCESS;
  };
}

inline void FakeContexts(CudaApi* api) {
  api->cuDevicePrimaryCtxRetain = [](CUcontext* context, CUdevice device) {
    if (device != 100 && device != 101) return CUDA_ERROR_INVALID_DEVICE;
    const CUresult outcome = Outcome("cuDevicePrimaryCtxRetain");
    if (outcome == CUDA_SUCCESS) ++fake->retained;
    *context = device == 100 ? kPrimary : kPrimaryOfPeer;
    return outcome;
  };
  api->cuDevicePrimaryCtxGetState = [](CUdevice device, unsigned int* flags, int* active) {
    *flags = 0;
    *active = fake->active.contains(device) ? 1 : 0;
    return Outcome("cuDevicePrimaryCtxGetState");
  };
  api->cuDevicePrimaryCtxRelease = [](CUdevice) {
    ++fake->released;
    return CUDA_SUCCESS;
  };
  api->cuCtxGetCurrent = [](CUcontext* context) {
    *context = contexts.empty() ? nullptr : contexts.back();
    return CUDA_SUCCESS;
  };
  api->cuCtxPushCurrent = [](CUcontext context) {
    contexts.push_back(context);
    return CUDA_SUCCESS;
  };
  api->cuCtxPopCurrent = [](CUcontext* context) {
    *context = contexts.back();
    contexts.pop_back();
    return CUDA_SUCCESS;
  };
  api->cuCtxSynchronize = [] { return InContext("cuCtxSynchronize"); };
  api->cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode* mode) {
    std::swap(*mode, capture_mode);
    return CUDA_SUCCESS;
  };
}

inline void FakeMemory(CudaApi* api) {
  api->cuMemGetInfo = [](size_t* free, size_t* total) {
    *free = 3;
    *total = 4;
    return InContext("cuMemGetInfo");
  };
  api->cuMemGetAllocationGranularity = [](size_t* granularity,
                                          const CUmemAllocationProp* properties,
                                          CUmemAllocationGranularity_flags) {
    *granularity = properties->location.id == 100 ? kGpuPage : 0;
    return CUDA_SUCCESS;
  };
  api->cuMemAddressReserve = [](CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                                unsigned long long) {
    *address = kAddress;
    fake->bytes = bytes;
    fake->alignment = alignment;
    return InContext("cuMemAddressReserve");
  };
  api->cuMemAddressFree = [](CUdeviceptr address, size_t bytes) {
    fake->address = address;
    fake->bytes = bytes;
    return InContext("cuMemAddressFree");
  };
  api->cuMemCreate = [](CUmemGenericAllocationHandle* handle, size_t bytes,
                        const CUmemAllocationProp* properties, unsigned long long) {
    *handle = kHandle;
    fake->bytes = bytes;
    fake->properties = *properties;
    return InContext("cuMemCreate");
  };
  api->cuMemRelease = [](CUmemGenericAllocationHandle handle) {
    fake->handle = handle;
    return InContext("cuMemRelease");
  };
  api->cuMemMap = [](CUdeviceptr address, size_t bytes, size_t offset,
                     CUmemGenericAllocationHandle handle, unsigned long long) {
    fake->address = address;
    fake->bytes = bytes;
    fake->offset = offset;
    fake->handle = handle;
    return InContext("cuMemMap");
  };
  api->cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
    fake->address = address;
    fake->bytes = bytes;
    return InContext("cuMemUnmap");
  };
  api->cuMemSetAccess = [](CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                           size_t count) {
    fake->address = address;
    fake->bytes = bytes;
    fake->access.assign(access, access + count);
    return InContext("cuMemSetAccess");
  };
}

inline void FakeEvents(CudaApi* api) {
  api->cuEventCreate = [](CUevent* event, unsigned int flags) {
    *event = reinterpret_cast<CUevent>(0x6000);
    fake->event_flags = flags;
    return InContext("cuEventCreate");
  };
  api->cuEventRecord = [](CUevent event, CUstream stream) {
    fake->event = event;
    fake->stream = stream;
    return InContext("cuEventRecord");
  };
  api->cuCtxRecordEvent = [](CUcontext context, CUevent event) {
    fake->marked = context;
    fake->event = event;
    return InContext("cuCtxRecordEvent");
  };
  api->cuEventQuery = [](CUevent event) {
    fake->event = event;
    const CUresult outcome = InContextAndRelaxed("cuEventQuery");
    if (outcome != CUDA_SUCCESS) return outcome;
    return fake->event_ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  };
  api->cuStreamWaitEvent = [](CUstream stream, CUevent event, unsigned int flags) {
    fake->stream = stream;
    fake->event = event;
    fake->event_flags = flags;
    return InContext("cuStreamWaitEvent");
  };
  api->cuEventDestroy = [](CUevent event) {
    fake->destroyed = event;
    return CUDA_SUCCESS;
  };
}

inline CUgraphNode Node(uint64_t number) {
  return reinterpret_cast<CUgraphNode>(0x7000 + 16 * number);
}

inline void FakeCaptures(CudaApi* api) {
  api->cuStreamGetCaptureInfo = [](CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph*, const CUgraphNode** nodes,
                                   const CUgraphEdgeData** edges, size_t* count) {
    fake->stream = stream;
    const CUresult outcome = InContext("cuStreamGetCaptureInfo");
    *status = fake->capture_status;
    // Of a stream that is not capturing nothing else is told.
    if (outcome != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return outcome;
    // As CUDA does where edges have data and nobody asks for it.
    if (edges == nullptr && !fake->edges.empty()) return CUDA_ERROR_LOSSY_QUERY;
    *id = fake->capture;
    *nodes = fake->nodes.data();
    if (edges != nullptr) *edges = fake->edges.empty() ? nullptr : fake->edges.data();
    *count = fake->nodes.size();
    return outcome;
  };
  api->cuGraphNodeGetDependencies = [](CUgraphNode node, CUgraphNode* nodes, CUgraphEdgeData* edges,
                                       size_t* count) {
    fake->node = node;
    const CUresult outcome = InContext("cuGraphNodeGetDependencies");
    if (outcome != CUDA_SUCCESS) return outcome;
    if (nodes == nullptr) {
      *count = fake->nodes.size();
      return outcome;
    }
    if (edges == nullptr && !fake->edges.empty()) return CUDA_ERROR_LOSSY_QUERY;
    // Room for more is filled with nothing; of more than there is room for, the first are told.
    for (size_t i = 0; i < *count; ++i) {
      nodes[i] = i < fake->nodes.size() ? fake->nodes[i] : nullptr;
      if (edges != nullptr) edges[i] = i < fake->edges.size() ? fake->edges[i] : CUgraphEdgeData{};
    }
    *count = std::min(*count, fake->nodes.size());
    return outcome;
  };
}

inline void FakeTemplates(CudaApi* api) {
  api->cuGraphGetNodes = [](CUgraph graph, CUgraphNode* nodes, size_t* count) {
    auto* const asked = reinterpret_cast<FakeGraph*>(graph);
    const CUresult outcome = InContext("cuGraphGetNodes");
    if (outcome != CUDA_SUCCESS) return outcome;
    if (nodes != nullptr) {
      for (size_t i = 0; i < std::min(*count, asked->nodes.size()); ++i) {
        nodes[i] = reinterpret_cast<CUgraphNode>(&asked->nodes[i]);
      }
    }
    *count = asked->nodes.size();
    return outcome;
  };
  api->cuGraphGetEdges = [](CUgraph graph, CUgraphNode* from, CUgraphNode* to,
                            CUgraphEdgeData* data, size_t* count) {
    auto* const asked = reinterpret_cast<FakeGraph*>(graph);
    const CUresult outcome = InContext("cuGraphGetEdges");
    if (outcome != CUDA_SUCCESS) return outcome;
    if (from == nullptr) {
      *count = asked->edges.size();
      return outcome;
    }
    if (data == nullptr) return CUDA_ERROR_LOSSY_QUERY;  // as CUDA does where they have some
    for (size_t i = 0; i < std::min(*count, asked->edges.size()); ++i) {
      from[i] = reinterpret_cast<CUgraphNode>(&asked->nodes[asked->edges[i].from]);
      to[i] = reinterpret_cast<CUgraphNode>(&asked->nodes[asked->edges[i].to]);
      data[i] = asked->edges[i].data;
    }
    return outcome;
  };
  api->cuGraphNodeGetType = [](CUgraphNode node, CUgraphNodeType* type) {
    *type = reinterpret_cast<FakeNode*>(node)->type;
    return InContext("cuGraphNodeGetType");
  };
  api->cuGraphMemcpyNodeGetParams = [](CUgraphNode node, CUDA_MEMCPY3D_v2* copy) {
    *copy = reinterpret_cast<FakeNode*>(node)->copy;
    return InContext("cuGraphMemcpyNodeGetParams");
  };
  api->cuGraphMemsetNodeGetParams = [](CUgraphNode node, CUDA_MEMSET_NODE_PARAMS_v1* memset) {
    *memset = reinterpret_cast<FakeNode*>(node)->memset;
    return InContext("cuGraphMemsetNodeGetParams");
  };
}

inline void FakeKernels(CudaApi* api) {
  api->cuGraphKernelNodeGetParams = [](CUgraphNode node, CUDA_KERNEL_NODE_PARAMS_v2* kernel) {
    *kernel = reinterpret_cast<FakeNode*>(node)->kernel;
    return InContext("cuGraphKernelNodeGetParams");
  };
  api->cuGraphKernelNodeGetAttribute = [](CUgraphNode node, CUlaunchAttributeID id,
                                          CUlaunchAttributeValue* value) {
    fake->asked_attributes.insert(id);
    if (fake->unknown_attributes.contains(id)) return CUDA_ERROR_INVALID_VALUE;
    *value = reinterpret_cast<FakeNode*>(node)->attributes[id];
    return InContext("cuGraphKernelNodeGetAttribute");
  };
  // A function that was never used is loaded when it is asked after, which captures forbid.
  api->cuFuncGetAttribute = [](int* value, CUfunction_attribute attribute, CUfunction function) {
    fake->asked_function_attributes.insert(attribute);
    if (fake->unknown_function_attributes.contains(attribute)) return CUDA_ERROR_INVALID_VALUE;
    *value = reinterpret_cast<FakeFunction*>(function)->attributes[attribute];
    return InContextAndRelaxed("cuFuncGetAttribute");
  };
  api->cuKernelGetAttribute = [](int* value, CUfunction_attribute attribute, CUkernel kernel,
                                 CUdevice device) {
    if (device != 100) return CUDA_ERROR_INVALID_DEVICE;
    fake->asked_function_attributes.insert(attribute);
    if (fake->unknown_function_attributes.contains(attribute)) return CUDA_ERROR_INVALID_VALUE;
    *value = reinterpret_cast<FakeFunction*>(kernel)->attributes[attribute];
    return InContextAndRelaxed("cuKernelGetAttribute");
  };
}

inline void FakeExecs(CudaApi* api) {
  api->cuGraphInstantiateWithFlags = [](CUgraphExec* exec, CUgraph graph,
                                        unsigned long long flags) {
    fake->graph = graph;
    fake->instantiate_flags = flags;
    *exec = kExec;
    return InContextAndRelaxed("cuGraphInstantiateWithFlags");
  };
  api->cuGraphExecUpdate = [](CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
    fake->exec = exec;
    fake->graph = graph;
    info->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
    return InContextAndRelaxed("cuGraphExecUpdate");
  };
  api->cuGraphUpload = [](CUgraphExec exec, CUstream stream) {
    fake->exec = exec;
    fake->stream = stream;
    return InContextAndRelaxed("cuGraphUpload");
  };
  api->cuGraphExecDestroy = [](CUgraphExec exec) {
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    fake->exec = exec;
    return Outcome("cuGraphExecDestroy");
  };
}

class CudaDriverTest : public testing::Test {
 protected:
  CudaDriverTest() {
    fake = &fake_;
    api_.version = 13000;
    FakeDevices(&api_);
    FakeContexts(&api_);
    FakeMemory(&api_);
    FakeEvents(&api_);
    FakeCaptures(&api_);
    FakeTemplates(&api_);
    FakeKernels(&api_);
    FakeExecs(&api_);
  }
  ~CudaDriverTest() override {
    fake = nullptr;
    contexts.clear();
  }

  // What `call` throws when CUDA's `function` fails with `code`.
  DriverError Failing(const std::string& function, CUresult code,
                      const std::function<void()>& call) {
    fake_.failing = {{function, code}};
    try {
      call();
    } catch (const DriverError& error) {
      fake_.failing.clear();
      EXPECT_EQ(error.call(), function);
      EXPECT_EQ(error.code(), code);
      EXPECT_TRUE(contexts.empty()) << "the thread's context is left changed";
      EXPECT_EQ(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
      return error;
    }
    ADD_FAILURE() << function << " failed, and nobody said so";
    return DriverError(DriverStatus::kFailed, "", 0, "", 0, 0);
  }

  FakeCuda fake_;
  CudaApi api_;
};

}  // namespace cgp::made_up_cuda
