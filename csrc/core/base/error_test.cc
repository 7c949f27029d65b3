#include "core/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <type_traits>

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Check, SaysWhatFailedAndWhere) {
  const int line = __LINE__ + 2;
  try {
    CGP_CHECK(1 + 1 == 3);
    FAIL() << "nothing was thrown";
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("1 + 1 == 3"), HasSubstr("error_test.cc:" + std::to_string(line)),
                      HasSubstr("report")));
  }
}

TEST(Errors, SizesAreWrittenAsTorchWritesThem) {
  EXPECT_EQ(Size(0), "0 bytes");
  EXPECT_EQ(Size(1024), "1024 bytes");
  EXPECT_EQ(Size(1025), "1.00 KiB");
  EXPECT_EQ(Size(uint64_t{3} << 19), "1.50 MiB");
  EXPECT_EQ(Size(uint64_t{1} << 30), "1024.00 MiB");
  EXPECT_EQ(Size(uint64_t{5} << 29), "2.50 GiB");
  EXPECT_EQ(Size(~uint64_t{0}), "17179869184.00 GiB");
}

// What may succeed when asked again is a runtime_error; what is a mistake, the caller's or ours, a
// logic_error, and the two kinds of mistake are never caught as one another.
static_assert(std::is_base_of_v<std::runtime_error, OutOfMemoryError>);
static_assert(std::is_base_of_v<std::logic_error, UsageError>);
static_assert(std::is_base_of_v<std::logic_error, InternalError>);
static_assert(!std::is_base_of_v<UsageError, InternalError>);
static_assert(!std::is_base_of_v<InternalError, UsageError>);

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

TEST(DriverErrorTest, SaysTheDetailAndThatAddressesAreNotMemory) {
  const DriverError error(DriverStatus::kOutOfAddresses, "cuMemAddressReserve", 2,
                          "CUDA_ERROR_OUT_OF_MEMORY", 512, 1, "the detail");
  EXPECT_EQ(std::string(error.what()),
            "cuMemAddressReserve of 512 bytes on device 1 failed: CUDA_ERROR_OUT_OF_MEMORY (2): "
            "the detail. No virtual addresses are left, however much memory is free: release "
            "graph pools that are no longer used.");
}

}  // namespace
}  // namespace cgp
