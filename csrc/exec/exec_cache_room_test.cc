// Where the memory has no room for as many executables as the limit allows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "exec/exec_cache.h"
#include "exec/exec_cache_fixture.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;

class ExecCacheRoomTest : public ExecCacheTest {
 protected:
  // The next executable that is to be made finds no memory; or none does until Disarm().
  void RunOutOfMemory(bool for_good = false) {
    book_.Arm({.for_good = for_good,
               .only = GraphBook::Call::kInstantiate,
               .status = DriverStatus::kOutOfMemory});
  }
};

TEST_F(ExecCacheRoomTest, WithoutMemoryForANewOneWhatIsHeldGoesOn) {
  for (const auto status : {DriverStatus::kOutOfMemory, DriverStatus::kFailed}) {
    MakeCache(2);
    const GraphNumber first = Add(Graph{10});
    const GraphNumber second = Add(Graph{11});
    const GraphNumber third = Add(Graph{12});
    Launch(first, kA);
    Launch(second, kA);
    for (uint32_t i = 0; i < kLongStay; ++i) Launch(third, kA);
    book_.Arm({.for_good = true, .only = GraphBook::Call::kInstantiate, .status = status});
    const uint64_t failures = book_.failures();
    if (status == DriverStatus::kOutOfMemory) {
      for (uint32_t i = 0; i < 2 * kVeryLongStay; ++i) Launch(third, kA);
      EXPECT_EQ(book_.failures(), failures + 1) << "it is not tried at each launch";
    } else {
      EXPECT_THROW(cache_->Lease(third, kA), DriverError);
    }
    book_.Disarm();
    Launch(third, kA);
    Launch(first, kA);
  }
}

class ExecCacheLimits : public ExecCacheRoomTest,
                        public ::testing::WithParamInterface<std::optional<size_t>> {};

TEST_P(ExecCacheLimits, WithoutMemoryForItsKindACaptureEndsAllTheSame) {
  MakeCache(GetParam());
  const GraphNumber first = Add(Graph{10}, "one");
  const GraphNumber second = Add(Graph{20}, "two");
  const GraphExec oldest = Launch(first, kA);
  Launch(second, kA);
  RunOutOfMemory();
  const GraphNumber third = Add(Graph{30}, "three");
  EXPECT_EQ(Execs(), 2u);
  Launch(third, kA);
  EXPECT_EQ(Execs(), 2u);
  EXPECT_EQ(book_.HeldBy(oldest), std::nullopt) << "the longest unused makes room";
  Launch(first, kA);
  EXPECT_EQ(Execs(), 2u);
}

INSTANTIATE_TEST_SUITE_P(All, ExecCacheLimits, ::testing::Values(4, std::nullopt));

TEST_F(ExecCacheRoomTest, WithoutMemoryWhatIsInUseStaysAsItIs) {
  MakeCache(4);
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  book_.ForgetChanges();
  RunOutOfMemory(/*for_good=*/true);
  try {
    cache_->Lease(second, kB);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  }
  EXPECT_THAT(book_.changed(), IsEmpty());
  EXPECT_EQ(Launch(first, kA), exec);
  book_.Disarm();
  Launch(second, kB);
  EXPECT_EQ(Execs(), 2u);
}

}  // namespace
}  // namespace cgp
