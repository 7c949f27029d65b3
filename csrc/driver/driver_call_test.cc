#include "driver/driver_call.h"

#include <gtest/gtest.h>

namespace cgp {
namespace {

TEST(DriverCallTest, NamesEachCall) {
  EXPECT_EQ(Name(DriverCall::kReserve), "Reserve");
  EXPECT_EQ(Name(DriverCall::kSetAccess), "SetAccess");
  EXPECT_EQ(Name(DriverCall::kUnmap), "Unmap");
  EXPECT_EQ(Name(DriverCall::kDestroyEvent), "DestroyEvent");
  EXPECT_EQ(Name(DriverCall::kInfo), "Info");
}

}  // namespace
}  // namespace cgp
