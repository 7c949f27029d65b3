#include <gtest/gtest.h>

#include <string>

#include "core/driver.h"
#include "driver/driver_call.h"

namespace cgp {
namespace {

TEST(DriverErrorTest, SaysWhatHappenedAndWhatToDo) {
  const DriverError error(DriverStatus::kOutOfMemory, "cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY",
                          2097152, 0);
  EXPECT_EQ(std::string(error.what()),
            "cuMemCreate of 2097152 bytes on device 0 failed: CUDA_ERROR_OUT_OF_MEMORY (2). The "
            "device has no memory left for this: free tensors or graphs, or give back what is "
            "cached (torch.cuda.empty_cache()), and try again.");
  EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  EXPECT_EQ(error.call(), "cuMemCreate");
  EXPECT_EQ(error.code(), 2);
  EXPECT_EQ(error.bytes(), 2097152u);
  EXPECT_EQ(error.device(), 0);
}

TEST(DriverErrorTest, SaysNothingOfASizeThatTheCallHasNot) {
  const DriverError error(DriverStatus::kFailed, "cuMemRelease", 1, "CUDA_ERROR_INVALID_VALUE", 0,
                          3);
  EXPECT_EQ(std::string(error.what()),
            "cuMemRelease on device 3 failed: CUDA_ERROR_INVALID_VALUE (1).");
}

TEST(DriverErrorTest, SaysTheDetailAndThatAddressesAreNotMemory) {
  const DriverError error(DriverStatus::kOutOfAddresses, "cuMemAddressReserve", 2,
                          "CUDA_ERROR_OUT_OF_MEMORY", 512, 1, "the detail");
  EXPECT_EQ(std::string(error.what()),
            "cuMemAddressReserve of 512 bytes on device 1 failed: CUDA_ERROR_OUT_OF_MEMORY (2): "
            "the detail. No virtual addresses are left, however much memory is free: release "
            "graph pools that are no longer used.");
}

TEST(DriverCallTest, NamesEachCall) {
  EXPECT_EQ(Name(DriverCall::kReserve), "Reserve");
  EXPECT_EQ(Name(DriverCall::kSetAccess), "SetAccess");
  EXPECT_EQ(Name(DriverCall::kUnmap), "Unmap");
  EXPECT_EQ(Name(DriverCall::kDestroyEvent), "DestroyEvent");
  EXPECT_EQ(Name(DriverCall::kInfo), "Info");
}

}  // namespace
}  // namespace cgp
