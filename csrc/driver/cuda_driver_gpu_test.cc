// What the driver says on a machine without a GPU, and real memory on a real GPU: one of the two is
// skipped.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "driver/cuda_api.h"
#include "driver/cuda_driver.h"

namespace cgp {
namespace {

TEST(CudaDriverHereTest, SaysThatThereIsNoDriver) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) GTEST_SKIP() << "this machine has a CUDA driver";
  try {
    CudaDriver driver(0);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.status(), DriverStatus::kFailed);
    EXPECT_EQ(error.device(), 0);
    EXPECT_THAT(error.what(), testing::HasSubstr("NVIDIA driver"));
    EXPECT_THAT(error.what(), testing::HasSubstr("libcuda.so.1"));
  }
}

class CudaDriverGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    try {
      const CudaDriver driver(0);
    } catch (const DriverError& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

// Writes and reads device memory from the host, in the primary context of device 0.
class DeviceMemory {
 public:
  DeviceMemory() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    };
    find(&set_, "cuMemsetD8_v2");
    find(&copy_, "cuMemcpyDtoH_v2");
    api_ = &CudaApiOrThrow(0);
    CUcontext context = nullptr;
    EXPECT_EQ(api_->cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    EXPECT_EQ(api_->cuCtxPushCurrent(context), CUDA_SUCCESS);
  }
  ~DeviceMemory() {
    CUcontext context = nullptr;
    api_->cuCtxPopCurrent(&context);
    api_->cuDevicePrimaryCtxRelease(0);
  }
  void Fill(Address address, uint64_t bytes, unsigned char value) {
    EXPECT_EQ(set_(address, value, bytes), CUDA_SUCCESS);
    EXPECT_EQ(api_->cuCtxSynchronize(), CUDA_SUCCESS);
  }
  bool Holds(Address address, uint64_t bytes, unsigned char value) {
    std::vector<unsigned char> content(bytes);
    EXPECT_EQ(copy_(content.data(), address, bytes), CUDA_SUCCESS);
    return content == std::vector<unsigned char>(bytes, value);
  }

 private:
  const CudaApi* api_ = nullptr;
  PFN_cuMemsetD8_v3020 set_ = nullptr;
  PFN_cuMemcpyDtoH_v3020 copy_ = nullptr;
};

TEST_F(CudaDriverGpuTest, MapsAliasesAndGivesBack) {
  CudaDriver driver(0);
  const uint64_t page = driver.granularity();
  const uint64_t free_before = driver.Info().free_bytes;
  const Address address = driver.Reserve(16 * page);
  EXPECT_EQ(address % page, 0u);
  std::vector<Handle> handles;
  for (uint64_t i = 0; i < 8; ++i) {
    handles.push_back(driver.Create(page));
    driver.Map(address + i * page, page, handles[i]);
  }
  // The same handles once more, the other way round.
  for (uint64_t i = 0; i < 8; ++i) driver.Map(address + (8 + i) * page, page, handles[7 - i]);
  driver.SetAccess(address, 16 * page);
  driver.SetAccess(address, 16 * page);
  EXPECT_LE(driver.Info().free_bytes, free_before - 8 * page);
  EXPECT_THROW(driver.Map(address, page, handles[0]), DriverError);
  {
    DeviceMemory memory;
    for (uint64_t i = 0; i < 8; ++i) {
      memory.Fill(address + i * page, page, static_cast<unsigned char>(10 + i));
    }
    for (uint64_t i = 0; i < 8; ++i) {
      const auto value = static_cast<unsigned char>(10 + 7 - i);
      EXPECT_TRUE(memory.Holds(address + (8 + i) * page, page, value)) << i;
    }
    memory.Fill(address + 15 * page, page, 99);
    EXPECT_TRUE(memory.Holds(address, page, 99));
  }

  const Event event = driver.RecordEvent(StreamId{0});
  driver.WaitEvent(StreamId{0}, event);
  driver.Quiesce();
  EXPECT_TRUE(driver.EventDone(event));
  driver.DestroyEvent(event);
  for (const Handle handle : handles) driver.Release(handle);
  for (uint64_t i = 0; i < 16; ++i) driver.Unmap(address + i * page, page);
  driver.FreeAddresses(address, 16 * page);
}

TEST_F(CudaDriverGpuTest, AThreadWithoutAContextMayCall) {
  CudaDriver driver(0);
  std::string error;
  std::thread thread([&] {
    try {
      const Handle handle = driver.Create(driver.granularity());
      const Address address = driver.Reserve(driver.granularity());
      driver.Map(address, driver.granularity(), handle);
      driver.SetAccess(address, driver.granularity());
      driver.Quiesce();
      driver.Unmap(address, driver.granularity());
      driver.FreeAddresses(address, driver.granularity());
      driver.Release(handle);
    } catch (const DriverError& thrown) {
      error = thrown.what();
    }
  });
  thread.join();
  EXPECT_EQ(error, "");
}

TEST_F(CudaDriverGpuTest, MemoryEndsWithAnError) {
  CudaDriver driver(0);
  const MemoryInfo info = driver.Info();
  const uint64_t page = driver.granularity();
  const uint64_t too_much = (2 * info.total_bytes / page) * page;
  try {
    driver.Create(too_much);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
    EXPECT_EQ(error.bytes(), too_much);
    EXPECT_EQ(error.call(), "cuMemCreate");
  }
}

}  // namespace
}  // namespace cgp
