// The oracle is given what a broken pool would do, and has to say so. (That it lets pass what is right, the fuzzer shows.)
#include "testing/reuse_oracle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "driver/host_driver.h"

namespace cgp {
namespace {

using ::testing::HasSubstr;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};
constexpr uint64_t kPage = 4096;

// Blocks of a page that come and go at page 0, in a scope with two streams.
class ReuseOracleTest : public ::testing::Test {
 protected:
  ReuseOracleTest() {
    oracle_.BeginScope();
    dag_.Begin(kA, 1);
    oracle_.BeginCapture(1);
    Launch(kA);
    dag_.Wait(kB, dag_.At(kA));
    Launch(kA);
    Launch(kB);
    oracle_.See(kA);
    oracle_.See(kB);
  }

  CaptureDag::Node Launch(StreamId stream) { return dag_.LaunchNothing(stream, false); }
  void Join(StreamId stream, StreamId other) { dag_.Wait(stream, dag_.At(other)); }
  static std::vector<PhysicalPiece> At(uint32_t page, uint64_t bytes = kPage) {
    return {{.page = PageId{page}, .offset_bytes = 0, .length_bytes = bytes}};
  }
  static Block Sized(StreamId stream, uint64_t bytes = kPage) {
    return {.address = 0, .bytes = bytes, .requested_bytes = bytes, .stream = stream};
  }
  std::string Place(StreamId stream, uint32_t page = 0, uint64_t bytes = kPage) {
    pages_ = std::max<uint64_t>(pages_, page + 1);
    return oracle_.Place(Sized(stream, bytes), At(page, bytes), pages_);
  }
  void Free(StreamId stream, const std::set<StreamId>& uses = {}, uint32_t page = 0,
            uint64_t bytes = kPage) {
    oracle_.Free(Sized(stream, bytes), At(page, bytes), uses);
  }

  HostDriver host_{{.map_memory = false}};
  DriverWatch watch_{host_};
  CaptureDag dag_;
  ReuseOracle oracle_{dag_, watch_, kPage};
  uint64_t pages_ = 0;
};

TEST_F(ReuseOracleTest, WhoMayNotTakeBytesIsNamed) {
  dag_.Begin(kC, 2);
  oracle_.BeginCapture(2);
  Launch(kC);
  for (uint32_t page = 0; page < 4; ++page) EXPECT_EQ(Place(kA, page), "");
  EXPECT_THAT(Place(kB, 0), HasSubstr("in use"));
  Free(kA, {}, 1);
  EXPECT_THAT(Place(kC, 1), HasSubstr("may not take")) << "of another capture";
  Free(kA, {kB}, 2);
  EXPECT_THAT(Place(kA, 2), HasSubstr("and used by others"));
  Free(kA, {}, 3);
  Join(kB, kA);
  dag_.LaunchNothing(kB, true);
  EXPECT_THAT(Place(kB, 3), HasSubstr("may not take granule 0 of page 3 yet: freed on stream 1"))
      << "a programmatic edge stands for nothing";
}

TEST_F(ReuseOracleTest, OnlyACaptureThatAllocatesKeepsWhatIsFreedInIt) {
  Place(kC, 0);
  Place(kC, 1);
  dag_.Begin(kC, 2);
  oracle_.BeginCapture(2);
  Launch(kC);
  Free(kC, {}, 0);
  Place(kC, 2);
  Free(kC, {}, 1);
  dag_.End(2);
  dag_.Wait(kC, dag_.At(kA));
  EXPECT_EQ(Place(kC, 0), "");
  EXPECT_THAT(Place(kC, 1), HasSubstr("may not take"));
}

TEST_F(ReuseOracleTest, AfterTheScopeAllIsFreeButWhatEagerWorkUses) {
  Place(kA, 0);
  Place(kA, 1);
  watch_.Submit(kC);
  Free(kA, {kB}, 0);
  Free(kA, {kC}, 1);
  dag_.EndCaptures();
  oracle_.EndScope();
  oracle_.BeginScope();
  dag_.Begin(kB, 2);
  EXPECT_EQ(Place(kB, 0), "");
  EXPECT_THAT(Place(kB, 1), HasSubstr("may not take"));
  watch_.FinishAll();
}

TEST_F(ReuseOracleTest, APoolDoesNotGrowWhereThereIsAStretchOrAFenceIsProven) {
  constexpr uint64_t kHalf = kPage / 2;
  EXPECT_EQ(Place(kA, 0, kHalf), "");
  EXPECT_THAT(Place(kA, 1, kHalf), HasSubstr("the pool grew")) << "beside the first";
  Place(kA, 2);
  Free(kA, {}, 2);
  EXPECT_EQ(Place(kB, 3, kPage - 512), "") << "B may not have it";
  Join(kB, kA);
  EXPECT_THAT(Place(kB, 4, kPage - 512), HasSubstr("the pool grew"));
  EXPECT_EQ(Place(kB, 5, kPage), "") << "of large blocks this is not said";
}

}  // namespace
}  // namespace cgp
