// The driver over CUDA functions that are made here, so that it runs anywhere.
#if defined(CGP_HAS_CUDA_DRIVER)

#include "driver/cuda_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "driver/cuda_api.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = uint64_t{2} << 20;
constexpr StreamId kStream{0x5000};

CUcontext const kPrimary = reinterpret_cast<CUcontext>(0x1000);
CUcontext const kOther = reinterpret_cast<CUcontext>(0x2000);
constexpr CUdeviceptr kAddress = 0x7f0000000000;
constexpr CUmemGenericAllocationHandle kHandle = 77;

// What the made-up CUDA was told, and what it is to answer.
struct FakeCuda {
  int device_count = 2;
  int vmm = 1;
  int rdma = 1;
  int can_access_peer = 1;
  bool event_ready = true;
  std::map<std::string, CUresult> failing;

  std::atomic<int> retained = 0;
  int released = 0;
  std::vector<std::string> calls;  // those that need a context, in order
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
  CUevent destroyed = nullptr;

  // The stream's capture, and what the node that is asked after depends on.
  CUstreamCaptureStatus capture_status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t capture = 0;
  std::vector<CUgraphNode> nodes;
  std::vector<CUgraphEdgeData> edges;  // of each, or none at all: as CUDA has it
  CUgraphNode node = nullptr;
};

FakeCuda* fake = nullptr;
thread_local std::vector<CUcontext> contexts;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult Outcome(const std::string& function) {
  const auto found = fake->failing.find(function);
  return found == fake->failing.end() ? CUDA_SUCCESS : found->second;
}

// For the functions that work on the current context.
CUresult InContext(const std::string& function) {
  if (contexts.empty() || contexts.back() != kPrimary) return CUDA_ERROR_INVALID_CONTEXT;
  fake->calls.push_back(function);
  return Outcome(function);
}

void FakeDevices(CudaApi* api) {
  api->cuInit = [](unsigned int) { return Outcome("cuInit"); };
  api->cuDriverGetVersion = [](int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
  };
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
  api->cuDeviceGetName = [](char* name, int length, CUdevice) {
    std::strncpy(name, "Made-up GPU", static_cast<size_t>(length));
    return CUDA_SUCCESS;
  };
  api->cuDeviceGetAttribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED       ? fake->vmm
             : attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ? fake->rdma
                                                                                        : -1;
    return CUDA_SUCCESS;
  };
  api->cuDeviceCanAccessPeer = [](int* can, CUdevice device, CUdevice peer) {
    *can = device == 101 && peer == 100 ? fake->can_access_peer : 0;
    return CUDA_SUCCESS;
  };
}

void FakeContexts(CudaApi* api) {
  api->cuDevicePrimaryCtxRetain = [](CUcontext* context, CUdevice device) {
    if (device != 100) return CUDA_ERROR_INVALID_DEVICE;
    const CUresult outcome = Outcome("cuDevicePrimaryCtxRetain");
    if (outcome == CUDA_SUCCESS) ++fake->retained;
    *context = kPrimary;
    return outcome;
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

void FakeMemory(CudaApi* api) {
  api->cuMemGetInfo = [](size_t* free, size_t* total) {
    *free = 3;
    *total = 4;
    return InContext("cuMemGetInfo");
  };
  api->cuMemGetAllocationGranularity = [](size_t* granularity,
                                          const CUmemAllocationProp* properties,
                                          CUmemAllocationGranularity_flags) {
    *granularity = properties->location.id == 100 ? kPage : 0;
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

void FakeEvents(CudaApi* api) {
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
  api->cuEventQuery = [](CUevent event) {
    // As CUDA does while some other thread captures.
    if (capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
      return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    fake->event = event;
    const CUresult outcome = InContext("cuEventQuery");
    if (outcome != CUDA_SUCCESS) return outcome;
    return fake->event_ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  };
  api->cuEventDestroy = [](CUevent event) {
    fake->destroyed = event;
    return CUDA_SUCCESS;
  };
}

CUgraphNode Node(uint64_t number) { return reinterpret_cast<CUgraphNode>(0x7000 + 16 * number); }

void FakeGraphs(CudaApi* api) {
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

class CudaDriverTest : public testing::Test {
 protected:
  CudaDriverTest() {
    fake = &fake_;
    FakeDevices(&api_);
    FakeContexts(&api_);
    FakeMemory(&api_);
    FakeEvents(&api_);
    FakeGraphs(&api_);
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

TEST_F(CudaDriverTest, EveryFunctionThatItAsksForIsMadeHere) {
#define CGP_EXPECT_SET(function, version) EXPECT_NE(api_.function, nullptr) << #function;
  CGP_CUDA_FUNCTIONS(CGP_EXPECT_SET)
#undef CGP_EXPECT_SET
}

TEST_F(CudaDriverTest, MakesHandlesAsExpandableSegmentsDo) {
  CudaDriver driver(0, api_);
  EXPECT_EQ(driver.device(), 0);
  EXPECT_EQ(driver.granularity(), kPage);
  EXPECT_EQ(driver.Create(kPage), Handle{kHandle});
  EXPECT_EQ(fake_.bytes, kPage);
  EXPECT_EQ(fake_.properties.type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(fake_.properties.location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(fake_.properties.location.id, 100);
  EXPECT_EQ(fake_.properties.requestedHandleTypes, CU_MEM_HANDLE_TYPE_NONE);
  EXPECT_EQ(fake_.properties.allocFlags.gpuDirectRDMACapable, 1);
  fake_.rdma = 0;
  CudaDriver without(0, api_);
  without.Create(kPage);
  EXPECT_EQ(fake_.properties.allocFlags.gpuDirectRDMACapable, 0);
}

TEST_F(CudaDriverTest, PassesAddressesSizesAndHandles) {
  CudaDriver driver(0, api_);
  EXPECT_EQ(driver.Reserve(8 * kPage), kAddress);
  EXPECT_EQ(fake_.bytes, 8 * kPage);
  EXPECT_EQ(fake_.alignment, kPage);
  driver.Map(kAddress + kPage, 2 * kPage, Handle{kHandle});
  EXPECT_EQ(fake_.address, kAddress + kPage);
  EXPECT_EQ(fake_.bytes, 2 * kPage);
  EXPECT_EQ(fake_.offset, 0u);
  EXPECT_EQ(fake_.handle, kHandle);
  driver.Unmap(kAddress + 2 * kPage, 3 * kPage);
  EXPECT_EQ(fake_.address, kAddress + 2 * kPage);
  EXPECT_EQ(fake_.bytes, 3 * kPage);
  driver.FreeAddresses(kAddress, 4 * kPage);
  EXPECT_EQ(fake_.address, kAddress);
  EXPECT_EQ(fake_.bytes, 4 * kPage);
  driver.Release(Handle{78});
  EXPECT_EQ(fake_.handle, 78u);
  EXPECT_EQ(driver.Info().free_bytes, 3u);
  EXPECT_EQ(driver.Info().total_bytes, 4u);
}

TEST_F(CudaDriverTest, GivesAccessToAllDevicesInOneCall) {
  CudaDriver driver(0, api_);
  driver.SetAccess(kAddress, 4 * kPage);
  ASSERT_EQ(fake_.access.size(), 1u);
  EXPECT_EQ(fake_.access[0].location.id, 100);
  EXPECT_EQ(fake_.access[0].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  driver.AddPeer(1);
  driver.AddPeer(1);
  driver.AddPeer(0);  // itself
  fake_.calls.clear();
  driver.SetAccess(kAddress, 4 * kPage);
  EXPECT_EQ(fake_.calls, std::vector<std::string>{"cuMemSetAccess"});
  ASSERT_EQ(fake_.access.size(), 2u);
  EXPECT_EQ(fake_.access[0].location.id, 100);
  EXPECT_EQ(fake_.access[1].location.id, 101);
  EXPECT_EQ(fake_.access[1].location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(fake_.access[1].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  EXPECT_EQ(fake_.address, kAddress);
  EXPECT_EQ(fake_.bytes, 4 * kPage);
}

TEST_F(CudaDriverTest, RefusesPeersThatAreNone) {
  CudaDriver driver(0, api_);
  EXPECT_THROW(driver.AddPeer(9), DriverError);
  fake_.can_access_peer = 0;
  try {
    driver.AddPeer(1);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_NE(std::string(error.what()).find("device 1 cannot access"), std::string::npos);
  }
  driver.SetAccess(kAddress, kPage);
  EXPECT_EQ(fake_.access.size(), 1u);
}

TEST_F(CudaDriverTest, RetainsThePrimaryContextWhenFirstNeededAndOnce) {
  {
    CudaDriver driver(0, api_);
    EXPECT_EQ(fake_.retained, 0) << "a driver that nobody uses must not make a context";
    driver.Create(kPage);
    driver.Quiesce();
    EXPECT_EQ(fake_.retained, 1);
    EXPECT_EQ(fake_.released, 0);
  }
  EXPECT_EQ(fake_.released, 1);
  { CudaDriver unused(0, api_); }
  EXPECT_EQ(fake_.released, 1);
}

TEST_F(CudaDriverTest, LeavesTheThreadsContextAsItWas) {
  CudaDriver driver(0, api_);
  driver.Quiesce();
  EXPECT_TRUE(contexts.empty());
  contexts = {kOther};
  driver.Quiesce();
  EXPECT_EQ(contexts, std::vector<CUcontext>{kOther});
  contexts = {kPrimary};
  driver.Quiesce();
  EXPECT_EQ(contexts, std::vector<CUcontext>{kPrimary});
  EXPECT_EQ(fake_.calls.size(), 3u);
}

TEST_F(CudaDriverTest, TriesAgainAfterAContextThatCouldNotBeMade) {
  CudaDriver driver(0, api_);
  const DriverError error =
      Failing("cuDevicePrimaryCtxRetain", CUDA_ERROR_OUT_OF_MEMORY, [&] { driver.Create(kPage); });
  EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  driver.Create(kPage);
  EXPECT_EQ(fake_.retained, 1);
}

TEST_F(CudaDriverTest, QueriesEventsInRelaxedModeOnly) {
  CudaDriver driver(0, api_);
  const Event event = driver.RecordEvent(kStream);
  EXPECT_EQ(fake_.event_flags, static_cast<unsigned int>(CU_EVENT_DISABLE_TIMING));
  EXPECT_EQ(fake_.stream, reinterpret_cast<CUstream>(0x5000));
  EXPECT_EQ(fake_.event, reinterpret_cast<CUevent>(0x6000));
  EXPECT_TRUE(driver.EventDone(event));
  EXPECT_EQ(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  fake_.event_ready = false;
  EXPECT_FALSE(driver.EventDone(event));
  EXPECT_EQ(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  Failing("cuEventQuery", CUDA_ERROR_INVALID_VALUE, [&] { driver.EventDone(event); });
  driver.DestroyEvent(event);
  EXPECT_EQ(fake_.destroyed, reinterpret_cast<CUevent>(0x6000));
}

TEST_F(CudaDriverTest, AnEventThatCannotBeRecordedIsDestroyed) {
  CudaDriver driver(0, api_);
  Failing("cuEventRecord", CUDA_ERROR_INVALID_VALUE, [&] { driver.RecordEvent(kStream); });
  EXPECT_EQ(fake_.destroyed, reinterpret_cast<CUevent>(0x6000));
  fake_.destroyed = nullptr;
  Failing("cuEventCreate", CUDA_ERROR_INVALID_VALUE, [&] { driver.RecordEvent(kStream); });
  EXPECT_EQ(fake_.destroyed, nullptr);
}

// What a programmatic launch makes: it waits until the one in front lets it, or has begun.
constexpr CUgraphEdgeData kLaunchedBy = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
                                         .to_port = 0,
                                         .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC,
                                         .reserved = {}};
constexpr CUgraphEdgeData kBegunBy = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_LAUNCH_ORDER,
                                      .to_port = 0,
                                      .type = CU_GRAPH_DEPENDENCY_TYPE_DEFAULT,
                                      .reserved = {}};

TEST_F(CudaDriverTest, TellsWhereAStreamStandsInItsCapture) {
  CudaDriver driver(0, api_);
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  fake_.capture = 17;
  fake_.nodes = {Node(1), Node(2)};
  Frontier frontier{.capture = 5, .nodes = {GraphNode{5}}, .waits = false};
  driver.Capture(kStream, &frontier);
  EXPECT_EQ(fake_.stream, reinterpret_cast<CUstream>(0x5000));
  EXPECT_EQ(frontier.capture, 17U);
  EXPECT_EQ(frontier.nodes, (std::vector{GraphNode{0x7010}, GraphNode{0x7020}}));
  EXPECT_TRUE(frontier.waits) << "edges without data are plain ones";
  fake_.edges.resize(2);
  driver.Capture(kStream, &frontier);
  EXPECT_TRUE(frontier.waits);
  EXPECT_EQ(frontier.nodes.size(), 2U);
  for (const CUgraphEdgeData& edge : {kLaunchedBy, kBegunBy}) {
    for (const size_t which : {0U, 1U}) {
      fake_.edges = std::vector<CUgraphEdgeData>(2);
      fake_.edges[which] = edge;
      driver.Capture(kStream, &frontier);
      EXPECT_FALSE(frontier.waits);
      EXPECT_EQ(frontier.nodes.size(), 2U);
    }
  }
  fake_.nodes.clear();
  fake_.edges.clear();
  driver.Capture(kStream, &frontier);
  EXPECT_EQ(frontier.capture, 17U);
  EXPECT_TRUE(frontier.nodes.empty());
  EXPECT_TRUE(frontier.waits);
}

TEST_F(CudaDriverTest, AStreamThatDoesNotCaptureStandsNowhere) {
  CudaDriver driver(0, api_);
  const auto expect_nowhere = [&] {
    Frontier frontier{.capture = 5, .nodes = {GraphNode{5}}, .waits = false};
    driver.Capture(kStream, &frontier);
    EXPECT_EQ(frontier.capture, kNoCapture);
    EXPECT_TRUE(frontier.nodes.empty());
    EXPECT_TRUE(frontier.waits);
  };
  fake_.capture = 17;
  fake_.nodes = {Node(1)};
  expect_nowhere();
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  expect_nowhere();
  // What is said of the legacy stream while another one captures.
  fake_.capture_status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  fake_.failing = {{"cuStreamGetCaptureInfo", CUDA_ERROR_STREAM_CAPTURE_IMPLICIT}};
  expect_nowhere();
  EXPECT_TRUE(contexts.empty());
}

TEST_F(CudaDriverTest, TellsAllThatANodeDependsOn) {
  CudaDriver driver(0, api_);
  for (const size_t count : {0U, 1U, 2U, 7U, 8U, 9U, 15U, 16U, 17U, 100U}) {
    fake_.nodes.clear();
    std::vector<GraphNode> expected;
    for (uint64_t i = 0; i < count; ++i) {
      fake_.nodes.push_back(Node(i));
      expected.push_back(GraphNode{0x7000 + 16 * i});
    }
    std::vector<GraphNode> nodes = {GraphNode{5}};
    fake_.edges.clear();
    EXPECT_TRUE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << count;
    EXPECT_EQ(fake_.node, reinterpret_cast<CUgraphNode>(0x8000));
    EXPECT_EQ(nodes, expected);
    fake_.edges.resize(count);
    EXPECT_TRUE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << count;
    // Any one of the edges makes the difference.
    for (size_t i = 0; i < count; ++i) {
      fake_.edges[i] = i % 2 == 0 ? kLaunchedBy : kBegunBy;
      EXPECT_FALSE(driver.Dependencies(GraphNode{0x8000}, &nodes)) << i << " of " << count;
      EXPECT_EQ(nodes, expected);
      fake_.edges[i] = {};
    }
  }
}

TEST_F(CudaDriverTest, EachErrorOfCudaIsThrownWithCallCodeAndBytes) {
  CudaDriver driver(0, api_);
  struct Case {
    const char* function;
    DriverStatus out_of_memory;
    uint64_t bytes;
    std::function<void()> call;
  };
  Frontier frontier;
  std::vector<GraphNode> nodes;
  const auto failed = DriverStatus::kFailed;
  const auto memory = DriverStatus::kOutOfMemory;
  const Case cases[] = {
      {"cuMemAddressReserve", DriverStatus::kOutOfAddresses, kPage, [&] { driver.Reserve(kPage); }},
      {"cuMemAddressFree", failed, kPage, [&] { driver.FreeAddresses(kAddress, kPage); }},
      {"cuMemCreate", memory, kPage, [&] { driver.Create(kPage); }},
      {"cuMemRelease", failed, 0, [&] { driver.Release(Handle{kHandle}); }},
      {"cuMemMap", memory, kPage, [&] { driver.Map(kAddress, kPage, Handle{kHandle}); }},
      {"cuMemSetAccess", memory, kPage, [&] { driver.SetAccess(kAddress, kPage); }},
      {"cuMemUnmap", failed, kPage, [&] { driver.Unmap(kAddress, kPage); }},
      {"cuCtxSynchronize", failed, 0, [&] { driver.Quiesce(); }},
      {"cuEventCreate", failed, 0, [&] { driver.RecordEvent(kStream); }},
      {"cuEventRecord", failed, 0, [&] { driver.RecordEvent(kStream); }},
      {"cuStreamGetCaptureInfo", failed, 0, [&] { driver.Capture(kStream, &frontier); }},
      {"cuGraphNodeGetDependencies", failed, 0, [&] { driver.Dependencies(GraphNode{1}, &nodes); }},
      {"cuMemGetInfo", failed, 0, [&] { driver.Info(); }},
  };
  for (const Case& c : cases) {
    const DriverError oom = Failing(c.function, CUDA_ERROR_OUT_OF_MEMORY, c.call);
    EXPECT_EQ(oom.status(), c.out_of_memory) << c.function;
    EXPECT_EQ(oom.bytes(), c.bytes) << c.function;
    EXPECT_EQ(oom.device(), 0);
    EXPECT_NE(std::string(oom.what()).find("CUDA_ERROR_OUT_OF_MEMORY (2)"), std::string::npos);
    const DriverError other = Failing(c.function, CUDA_ERROR_INVALID_VALUE, c.call);
    EXPECT_EQ(other.status(), failed) << c.function;
    EXPECT_NE(std::string(other.what()).find("CUDA_ERROR_INVALID_VALUE (1)"), std::string::npos);
  }
  const DriverError unnamed =
      Failing("cuMemMap", CUDA_ERROR_ALREADY_MAPPED, [&] { driver.Map(kAddress, kPage, {}); });
  EXPECT_NE(std::string(unnamed.what()).find("unknown error (208)"), std::string::npos);
}

TEST_F(CudaDriverTest, CountsAndTimesCallsFailedOnesToo) {
  CudaDriver driver(0, api_);
  EXPECT_EQ(driver.stats().total().calls, 0u);
  driver.Create(kPage);
  driver.Create(kPage);
  Failing("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY, [&] { driver.Create(kPage); });
  const Event event = driver.RecordEvent(kStream);
  driver.EventDone(event);
  driver.DestroyEvent(event);
  const CudaDriverStats stats = driver.stats();
  EXPECT_EQ(stats[DriverCall::kCreate].calls, 3u);
  EXPECT_GT(stats[DriverCall::kCreate].nanoseconds, 0u);
  EXPECT_EQ(stats[DriverCall::kRecordEvent].calls, 2u);  // made and recorded
  EXPECT_EQ(stats[DriverCall::kEventDone].calls, 1u);
  EXPECT_EQ(stats[DriverCall::kDestroyEvent].calls, 1u);
  EXPECT_EQ(stats.total().calls, 7u);
  EXPECT_GE(stats.total().nanoseconds, stats[DriverCall::kCreate].nanoseconds);
}

TEST_F(CudaDriverTest, CallsComeFromManyThreads) {
  api_.cuMemRelease = [](CUmemGenericAllocationHandle) {
    return contexts == std::vector<CUcontext>{kPrimary} ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
  };
  api_.cuMemSetAccess = [](CUdeviceptr, size_t, const CUmemAccessDesc*, size_t count) {
    return count == 1 || count == 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  };
  CudaDriver driver(0, api_);
  std::atomic<int> errors = 0;
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      try {
        for (int call = 0; call < 100; ++call) {
          driver.Release(Handle{kHandle});
          driver.AddPeer(1);
          driver.SetAccess(kAddress, kPage);
        }
      } catch (const DriverError&) {
        ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  EXPECT_EQ(fake_.retained, 1);
  EXPECT_EQ(driver.stats()[DriverCall::kRelease].calls, 400u);
}

TEST_F(CudaDriverTest, ProbeSaysWhatIsThere) {
  const CudaProbe probe = CudaDriver::Probe(1, api_);
  EXPECT_TRUE(probe.driver_loaded);
  EXPECT_EQ(probe.driver_version, 13000);
  EXPECT_EQ(probe.device_count, 2);
  EXPECT_TRUE(probe.vmm_supported);
  EXPECT_EQ(probe.name, "Made-up GPU");
  EXPECT_EQ(probe.reason, "");
  EXPECT_EQ(fake_.retained, 0);
}

TEST_F(CudaDriverTest, WhereProbeGivesAReasonTheConstructorThrows) {
  fake_.failing = {{"cuInit", CUDA_ERROR_NO_DEVICE}};
  CudaProbe probe = CudaDriver::Probe(0, api_);
  EXPECT_TRUE(probe.driver_loaded);
  EXPECT_EQ(probe.driver_version, 13000);
  EXPECT_EQ(probe.device_count, 0);
  EXPECT_EQ(probe.reason, "cuInit failed: CUDA_ERROR_NO_DEVICE (100)");
  EXPECT_THROW(CudaDriver(0, api_), DriverError);
  fake_.failing.clear();

  probe = CudaDriver::Probe(2, api_);
  EXPECT_EQ(probe.device_count, 2);
  EXPECT_FALSE(probe.vmm_supported);
  EXPECT_EQ(probe.reason, "there is no device 2 among the 2 that CUDA sees");
  EXPECT_THROW(CudaDriver(2, api_), DriverError);

  fake_.vmm = 0;
  probe = CudaDriver::Probe(0, api_);
  EXPECT_FALSE(probe.vmm_supported);
  EXPECT_EQ(probe.name, "Made-up GPU");
  EXPECT_NE(probe.reason.find("virtual memory management"), std::string::npos);
  try {
    CudaDriver driver(0, api_);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_NE(std::string(error.what()).find("virtual memory management"), std::string::npos);
  }
}

}  // namespace
}  // namespace cgp

#endif  // CGP_HAS_CUDA_DRIVER
