// Pages that a pool is given ahead of need: where several streams make it grow in a capture, a
// 128th of its pages, once that is more than one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "core/base/error.h"
#include "core/pool.h"
#include "core/pool_proofs_test_pool.h"
#include "driver/faulty_driver.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

class PoolAheadTest : public PoolProofsTest {
 protected:
  // How many pages and how many handles a block makes the pool grow by.
  struct Growth {
    uint64_t pages = 0;
    uint64_t handles = 0;
    bool operator==(const Growth&) const = default;
  };
  Growth GrowthFor(uint64_t bytes, StreamId stream) {
    const uint64_t pages = pool_.Stats().pages;
    const uint64_t handles = pool_.handles();
    Allocate(bytes, stream);
    return {pool_.Stats().pages - pages, pool_.handles() - handles};
  }
};

TEST_F(PoolAheadTest, SeveralStreamsMakeAPoolGrowByMoreThanTheyNeed) {
  Begin({kA, kB});
  Allocate(600 * kPage, kA);
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{5, 1})) << "four of them ahead, in the same handle";
  EXPECT_EQ(GrowthFor(3 * kPage, kA), (Growth{0, 0}));
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{0, 0}));
  EXPECT_EQ(GrowthFor(kPage, kA), (Growth{5, 1})) << "whichever stream it is";
}

TEST_F(PoolAheadTest, OneStreamIsGivenWhatItNeeds) {
  Begin({kA, kB});
  Allocate(600 * kPage, kA);
  EXPECT_EQ(GrowthFor(kPage, kA), (Growth{1, 1}));
}

TEST_F(PoolAheadTest, ASmallPoolIsGivenWhatItNeeds) {
  Begin({kA, kB});
  Allocate(254 * kPage, kA);
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{1, 1}));
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{1, 1})) << "a page of 255";
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{3, 1})) << "two pages of 256";
}

TEST_F(PoolAheadTest, NothingIsMadeAheadInEagerScopes) {
  pool_.BeginScope(ScopeKind::kEager);
  Allocate(600 * kPage, kA);
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{1, 1}));
  EndScope();
}

TEST_F(PoolAheadTest, BlocksBelowAPageAreGivenOne) {
  Begin({kA, kB});
  Allocate(600 * kPage, kA);
  EXPECT_EQ(GrowthFor(kGranule, kB), (Growth{1, 1}));
}

// So that what the pool holds in vain stays below a 128th, whatever the blocks are like.
TEST_F(PoolAheadTest, WholePagesThatAreLeftCountAsMadeAhead) {
  Begin({kA, kB});
  Allocate(600 * kPage, kA);
  EXPECT_EQ(GrowthFor(kPage, kB), (Growth{5, 1}));
  EXPECT_EQ(GrowthFor(2 * kPage, kB), (Growth{0, 0}));
  EXPECT_EQ(GrowthFor(5 * kPage, kB), (Growth{5, 1})) << "two are left, and taken; two more ahead";
}

TEST_F(PoolAheadTest, ALaterBlockBelowAPageTakesWhatIsThere) {
  Begin({kA, kB});
  Allocate(600 * kPage, kA);
  Allocate(kPage, kB);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(GrowthFor(kPage - kGranule, kA), (Growth{0, 0}));
  EXPECT_EQ(GrowthFor(kPage - kGranule, kA), (Growth{1, 1}));
}

// --- Where the driver cannot ---

constexpr uint64_t kRoomForAll = 700 * kPage;

// 600 pages of A's, and B has asked for something.
struct AheadWorld {
  explicit AheadWorld(uint64_t limit = kRoomForAll)
      : host({.granularity = 4096, .physical_limit_bytes = limit, .map_memory = false}) {
    host.graphs().Begin(kA);
    host.graphs().Wait(kB, host.graphs().Record(kA));
    pool.BeginScope(ScopeKind::kCapture);
    pool.Allocate(600 * kPage, kA);
    pool.Allocate(kGranule, kB);
  }

  HostDriver host;
  FaultyDriver unmapping{host};  // to fail what undoes
  FaultyDriver driver{static_cast<Driver&>(unmapping)};
  Pool pool{driver, {.page_bytes = kPage}};
};

TEST(PoolAheadFailureTest, WhereMemoryIsShortABlockGetsWhatItNeeds) {
  AheadWorld world(605 * kPage);
  world.pool.Allocate(3 * kPage, kB);
  EXPECT_EQ(world.pool.Stats().pages, 604U);
  world.pool.Allocate(kPage, kA);
  EXPECT_EQ(world.pool.Stats().pages, 605U);
  EXPECT_THROW(world.pool.Allocate(kPage, kA), OutOfMemoryError);
  EXPECT_EQ(world.pool.Stats().pages, 605U);
  world.pool.Check();
}

TEST(PoolAheadFailureTest, OnlyALackOfMemoryOrAddressesIsPassedOver) {
  for (const DriverCall call : {DriverCall::kCreate, DriverCall::kMap, DriverCall::kSetAccess}) {
    for (const DriverStatus status :
         {DriverStatus::kOutOfMemory, DriverStatus::kOutOfAddresses, DriverStatus::kFailed}) {
      AheadWorld world;
      world.driver.Arm({.status = status, .only = call});
      if (status == DriverStatus::kFailed) {
        EXPECT_THROW(world.pool.Allocate(3 * kPage, kB), DriverError);
        EXPECT_EQ(world.pool.Stats().pages, 601U);
      } else {
        world.pool.Allocate(3 * kPage, kB);
        EXPECT_EQ(world.pool.Stats().pages, 604U);
      }
      EXPECT_EQ(world.driver.failures(), 1U);
      EXPECT_EQ(world.host.usage().physical_bytes, world.pool.reserved_bytes());
      world.pool.Check();
    }
  }
}

// What stays mapped is in the way of what the block needs.
TEST(PoolAheadFailureTest, WhereWhatIsMadeAheadCannotBeUndoneTheBlockGoesElsewhere) {
  AheadWorld world;
  const uint64_t ranges = world.pool.Stats().ranges;
  world.unmapping.Arm({.only = DriverCall::kUnmap});
  world.driver.Arm({.status = DriverStatus::kOutOfMemory, .only = DriverCall::kSetAccess});
  world.pool.Allocate(3 * kPage, kB);
  EXPECT_EQ(world.unmapping.failures(), 1U);
  EXPECT_EQ(world.pool.Stats().pages, 604U);
  EXPECT_EQ(world.pool.Stats().ranges, ranges + 1);
  world.pool.Check();
}

}  // namespace
}  // namespace cgp
