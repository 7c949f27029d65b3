// The driver over CUDA functions that are made up, so that it runs anywhere.
// cuda_driver_captures_test.cc asks it about captures.
#include "driver/cuda_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "driver/cuda_driver_test_cuda.h"
#include "testing/allocation_faults.h"

namespace cgp {
namespace {

using namespace made_up_cuda;

TEST_F(CudaDriverTest, MakesHandlesAsExpandableSegmentsDo) {
  CudaDriver driver(0, api_);
  EXPECT_EQ(driver.device(), 0);
  EXPECT_EQ(driver.granularity(), kGpuPage);
  EXPECT_EQ(driver.Create(kGpuPage), Handle{kHandle});
  EXPECT_EQ(fake_.bytes, kGpuPage);
  EXPECT_EQ(fake_.properties.type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(fake_.properties.location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(fake_.properties.location.id, 100);
  EXPECT_EQ(fake_.properties.requestedHandleTypes, CU_MEM_HANDLE_TYPE_NONE);
  EXPECT_EQ(fake_.properties.allocFlags.gpuDirectRDMACapable, 1);
  fake_.rdma = 0;
  CudaDriver without(0, api_);
  without.Create(kGpuPage);
  EXPECT_EQ(fake_.properties.allocFlags.gpuDirectRDMACapable, 0);
}

TEST_F(CudaDriverTest, MakesHandlesThatCanBeExportedWhileTheyAreTo) {
  std::atomic<bool> exportable{false};
  CudaDriver driver(0, api_, &exportable);
  driver.Create(kGpuPage);
  EXPECT_EQ(fake_.properties.requestedHandleTypes, CU_MEM_HANDLE_TYPE_NONE);
  exportable = true;
  driver.Create(kGpuPage);
  EXPECT_EQ(fake_.properties.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

TEST_F(CudaDriverTest, PassesAddressesSizesAndHandles) {
  CudaDriver driver(0, api_);
  EXPECT_EQ(driver.Reserve(8 * kGpuPage), kAddress);
  EXPECT_EQ(fake_.bytes, 8 * kGpuPage);
  EXPECT_EQ(fake_.alignment, kGpuPage);
  driver.Map(kAddress + kGpuPage, 2 * kGpuPage, Handle{kHandle});
  EXPECT_EQ(fake_.address, kAddress + kGpuPage);
  EXPECT_EQ(fake_.bytes, 2 * kGpuPage);
  EXPECT_EQ(fake_.offset, 0u);
  EXPECT_EQ(fake_.handle, kHandle);
  driver.Unmap(kAddress + 2 * kGpuPage, 3 * kGpuPage);
  EXPECT_EQ(fake_.address, kAddress + 2 * kGpuPage);
  EXPECT_EQ(fake_.bytes, 3 * kGpuPage);
  driver.FreeAddresses(kAddress, 4 * kGpuPage);
  EXPECT_EQ(fake_.address, kAddress);
  EXPECT_EQ(fake_.bytes, 4 * kGpuPage);
  driver.Release(Handle{78});
  EXPECT_EQ(fake_.handle, 78u);
  EXPECT_EQ(driver.Info().free_bytes, 3u);
  EXPECT_EQ(driver.Info().total_bytes, 4u);
}

TEST_F(CudaDriverTest, GivesAccessToAllDevicesInOneCall) {
  CudaDriver driver(0, api_);
  driver.SetAccess(kAddress, 4 * kGpuPage);
  ASSERT_EQ(fake_.access.size(), 1u);
  EXPECT_EQ(fake_.access[0].location.id, 100);
  EXPECT_EQ(fake_.access[0].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  driver.AddPeer(1);
  driver.AddPeer(1);
  driver.AddPeer(0);  // itself
  fake_.calls.clear();
  driver.SetAccess(kAddress, 4 * kGpuPage);
  EXPECT_EQ(fake_.calls, std::vector<std::string>{"cuMemSetAccess"});
  ASSERT_EQ(fake_.access.size(), 2u);
  EXPECT_EQ(fake_.access[0].location.id, 100);
  EXPECT_EQ(fake_.access[1].location.id, 101);
  EXPECT_EQ(fake_.access[1].location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(fake_.access[1].flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  EXPECT_EQ(fake_.address, kAddress);
  EXPECT_EQ(fake_.bytes, 4 * kGpuPage);
}

// torch asked for access between them before, and will not do so again.
TEST_F(CudaDriverTest, LetsInWhoHasAContextAndCanReachTheDevice) {
  fake_.active = {100, 101};
  CudaDriver driver(0, api_);
  EXPECT_EQ(fake_.retained, 0) << "to look makes no context";
  driver.AddPeer(1);
  driver.SetAccess(kAddress, kGpuPage);
  ASSERT_EQ(fake_.access.size(), 2u);
  EXPECT_EQ(fake_.access[1].location.id, 101);
  const auto expect_alone = [&] {
    CudaDriver alone(0, api_);
    alone.SetAccess(kAddress, kGpuPage);
    EXPECT_EQ(fake_.access.size(), 1u);
  };
  fake_.can_access_peer = 0;
  expect_alone();
  fake_.can_access_peer = 1;
  fake_.active = {100};
  expect_alone();
  fake_.failing = {{"cuDevicePrimaryCtxGetState", CUDA_ERROR_INVALID_VALUE}};
  EXPECT_THROW(CudaDriver(0, api_), DriverError);
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
  driver.SetAccess(kAddress, kGpuPage);
  EXPECT_EQ(fake_.access.size(), 1u);
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

TEST_F(CudaDriverTest, TheDeviceIsMarkedByItsContext) {
  CudaDriver driver(0, api_);
  driver.DestroyEvent(driver.RecordDeviceEvent());
  EXPECT_EQ(fake_.marked, kPrimary);
  EXPECT_EQ(fake_.event, reinterpret_cast<CUevent>(0x6000));
  EXPECT_EQ(std::ranges::count(fake_.calls, "cuCtxSynchronize"), 0);
  fake_.destroyed = nullptr;
  Failing("cuCtxRecordEvent", CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          [&] { driver.RecordDeviceEvent(); });
  EXPECT_EQ(fake_.destroyed, reinterpret_cast<CUevent>(0x6000));
}

// What its blocks were recorded for may be running there.
TEST_F(CudaDriverTest, AMarkCoversTheDevicesWhoseStreamsWereAskedAfter) {
  CudaDriver driver(0, api_);
  Frontier frontier;
  driver.Capture(StreamOn(1, kStream), &frontier);
  fake_.calls.clear();
  const Event mark = driver.RecordDeviceEvent();
  EXPECT_TRUE(driver.EventDone(mark));
  driver.WaitEvent(kStream, mark);
  EXPECT_EQ(fake_.calls,
            (std::vector<std::string>{"cuEventCreate", "cuCtxRecordEvent", "cuEventCreate of 1",
                                      "cuCtxRecordEvent of 1", "cuEventQuery", "cuEventQuery",
                                      "cuStreamWaitEvent", "cuStreamWaitEvent"}));
  driver.DestroyEvent(mark);
}

// Before CUDA 12.5.
TEST_F(CudaDriverTest, AnOlderDriverWaitsForTheDeviceInstead) {
  api_.cuCtxRecordEvent = nullptr;
  CudaDriver driver(0, api_);
  driver.DestroyEvent(driver.RecordDeviceEvent());
  EXPECT_EQ(fake_.marked, nullptr);
  EXPECT_EQ(std::ranges::count(fake_.calls, "cuCtxSynchronize"), 1);
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
  const Event event = driver.RecordEvent(kStream);
  const auto failed = DriverStatus::kFailed;
  const auto memory = DriverStatus::kOutOfMemory;
  const Case cases[] = {
      {"cuMemAddressReserve", DriverStatus::kOutOfAddresses, kGpuPage,
       [&] { driver.Reserve(kGpuPage); }},
      {"cuMemAddressFree", failed, kGpuPage, [&] { driver.FreeAddresses(kAddress, kGpuPage); }},
      {"cuMemCreate", memory, kGpuPage, [&] { driver.Create(kGpuPage); }},
      {"cuMemRelease", failed, 0, [&] { driver.Release(Handle{kHandle}); }},
      {"cuMemMap", memory, kGpuPage, [&] { driver.Map(kAddress, kGpuPage, Handle{kHandle}); }},
      {"cuMemSetAccess", memory, kGpuPage, [&] { driver.SetAccess(kAddress, kGpuPage); }},
      {"cuMemUnmap", failed, kGpuPage, [&] { driver.Unmap(kAddress, kGpuPage); }},
      {"cuCtxSynchronize", failed, 0, [&] { driver.Quiesce(); }},
      {"cuEventCreate", failed, 0, [&] { driver.RecordEvent(kStream); }},
      {"cuEventRecord", failed, 0, [&] { driver.RecordEvent(kStream); }},
      {"cuStreamWaitEvent", failed, 0, [&] { driver.WaitEvent(kStream, event); }},
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
      Failing("cuMemMap", CUDA_ERROR_ALREADY_MAPPED, [&] { driver.Map(kAddress, kGpuPage, {}); });
  EXPECT_NE(std::string(unnamed.what()).find("unknown error (208)"), std::string::npos);
  driver.DestroyEvent(event);
}

TEST_F(CudaDriverTest, CountsAndTimesCallsFailedOnesToo) {
  CudaDriver driver(0, api_);
  EXPECT_TRUE(driver.calls().empty());
  const auto expect_counted = [&](std::string_view name, uint64_t calls) {
    EXPECT_EQ(driver.calls().at(name).first, calls) << name;
    EXPECT_GT(driver.calls().at(name).second, 0u) << name;
  };
  driver.Create(kGpuPage);
  expect_counted("cuMemCreate", 1);
  Failing("cuMemCreate", CUDA_ERROR_OUT_OF_MEMORY, [&] { driver.Create(kGpuPage); });
  expect_counted("cuMemCreate", 2);
  const Event event = driver.RecordEvent(kStream);
  expect_counted("cuEventRecord", 1);
  driver.EventDone(event);
  expect_counted("cuEventQuery", 1);
  driver.DestroyEvent(event);
}

TEST_F(CudaDriverTest, CallsComeFromManyThreads) {
  static std::atomic<int> released = 0;
  released = 0;
  api_.cuMemRelease = [](CUmemGenericAllocationHandle) {
    ++released;
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
          driver.SetAccess(kAddress, kGpuPage);
        }
      } catch (const DriverError&) {
        ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors, 0);
  EXPECT_EQ(fake_.retained, 1);
  EXPECT_EQ(released, 400);
}

TEST_F(CudaDriverTest, MakingOneAsksForNoContext) {
  const CudaDriver driver(0, api_);
  EXPECT_TRUE(driver.CanExport());
  fake_.exports = 0;
  EXPECT_FALSE(driver.CanExport());
  EXPECT_EQ(fake_.retained, 0);
}

TEST_F(CudaDriverTest, WhereItCannotBeUsedTheConstructorSaysWhy) {
  const auto reason = [&](int device) -> std::string {
    try {
      const CudaDriver driver(device, api_);
    } catch (const DriverError& error) {
      EXPECT_EQ(error.device(), device);
      return error.what();
    }
    return "none";
  };
  fake_.failing = {{"cuInit", CUDA_ERROR_NO_DEVICE}};
  EXPECT_EQ(reason(0), "cuInit on device 0 failed: CUDA_ERROR_NO_DEVICE (100).");
  fake_.failing.clear();
  EXPECT_EQ(reason(2), "cuDeviceGet on device 2 failed: CUDA_ERROR_INVALID_DEVICE (101).");
  EXPECT_EQ(reason(0), "none");
  fake_.vmm = 0;
  EXPECT_NE(reason(0).find("virtual memory management"), std::string::npos);
}

TEST_F(CudaDriverTest, AnEventThatIsNotRecordedIsDestroyedWithoutMemoryForTheError) {
  CudaDriver driver(0, api_);
  Frontier frontier;
  driver.Capture(StreamId{5}, &frontier);  // the context is there
  fake_.calls.reserve(100);
  for (uint64_t number = 1;; ++number) {
    fake_.failing = {{"cuEventRecord", CUDA_ERROR_INVALID_VALUE}};
    fake_.destroyed = nullptr;
    fake_.calls.clear();
    bool fired = false;
    try {
      const AllocationFault fault(number);
      try {
        driver.RecordEvent(StreamId{5});
      } catch (...) {
        fired = fault.fired();
        throw;
      }
    } catch (const std::exception&) {
    }
    const bool created = std::ranges::find(fake_.calls, "cuEventCreate") != fake_.calls.end();
    EXPECT_EQ(fake_.destroyed != nullptr, created) << "leaked, allocation " << number;
    if (!fired) break;
  }
}

}  // namespace
}  // namespace cgp
