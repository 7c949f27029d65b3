#include "driver/number_driver.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <random>
#include <tuple>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

DriverError Thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const DriverError& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return DriverError(DriverStatus::kFailed, "", 0, "", 0, 0);
}

TEST(NumberDriverTest, GranularityIsAPowerOfTwo) {
  EXPECT_EQ(NumberDriver({.device = 3, .granularity = 512}).granularity(), 512u);
  EXPECT_EQ(NumberDriver({.device = 3}).device(), 3);
  for (const uint64_t granularity : {uint64_t{0}, uint64_t{256}, uint64_t{1000}, 3 * kPage}) {
    EXPECT_THROW(NumberDriver({.granularity = granularity}), UsageError) << granularity;
  }
}

TEST(NumberDriverTest, MemoryEnds) {
  NumberDriver driver({.device = 3, .granularity = kPage, .physical_limit_bytes = 4 * kPage});
  const Handle first = driver.Create(3 * kPage);
  const DriverError error = Thrown([&] { driver.Create(2 * kPage); });
  EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  EXPECT_EQ(error.bytes(), 2 * kPage);
  EXPECT_EQ(error.device(), 3);
  EXPECT_EQ(driver.Info().free_bytes, kPage);
  EXPECT_EQ(driver.Info().total_bytes, 4 * kPage);
  // A released handle holds its memory while it is mapped.
  const Address address = driver.Reserve(6 * kPage);
  driver.Map(address, 3 * kPage, first);
  driver.Map(address + 3 * kPage, 3 * kPage, first);
  driver.Release(first);
  driver.Unmap(address, 3 * kPage);
  EXPECT_EQ(driver.Info().free_bytes, kPage);
  driver.Unmap(address + 3 * kPage, 3 * kPage);
  EXPECT_EQ(driver.Info().free_bytes, 4 * kPage);
}

TEST(NumberDriverTest, AddressesEnd) {
  NumberDriver driver({.granularity = kPage, .address_limit_bytes = 4 * kPage});
  const Address address = driver.Reserve(3 * kPage);
  EXPECT_EQ(address % kPage, 0u);
  EXPECT_EQ(Thrown([&] { driver.Reserve(2 * kPage); }).status(), DriverStatus::kOutOfAddresses);
  EXPECT_EQ(driver.Reserve(kPage), address + 3 * kPage);
  driver.FreeAddresses(address, 3 * kPage);
  driver.Reserve(2 * kPage);
  NumberDriver endless({.granularity = kPage, .address_limit_bytes = ~uint64_t{0}});
  EXPECT_EQ(Thrown([&] { endless.Reserve(uint64_t{0} - kPage); }).status(),
            DriverStatus::kOutOfAddresses);
}

// The physical places of a pool's blocks after random work, and what is mapped where.
struct Decided {
  std::vector<std::tuple<PageId, uint64_t, uint64_t>> pieces;
  std::vector<std::vector<PageId>> ranges;
  bool operator==(const Decided&) const = default;
};

Decided Work(Driver& driver, uint32_t seed) {
  PoolSet set(driver);
  std::mt19937 random(seed);
  std::vector<Block> live;
  for (int graph = 0; graph < 3; ++graph) {
    set.BeginScope(kPool, ScopeKind::kCapture);
    for (int step = 0; step < 200; ++step) {
      if (live.empty() || random() % 5 < 3) {
        live.push_back(set.Allocate(kPool, 1 + random() % (5 * kPage), StreamId{random() % 2}));
      } else {
        const size_t index = random() % live.size();
        set.Free(live[index].address);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
      }
    }
    set.EndScope(kPool);
  }
  set.Check();
  Decided decided;
  for (const Block& block : live) {
    for (const auto& [page, offset, length] : set.Pieces(block.address)) {
      decided.pieces.emplace_back(page, offset, length);
    }
  }
  for (const auto& range : set.Snapshot(kPool).ranges) decided.ranges.push_back(range.pages);
  return decided;
}

TEST(NumberDriverTest, TheCoreDecidesAsOnMemory) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    NumberDriver numbers({.granularity = kPage});
    HostDriver memory({.granularity = kPage});
    EXPECT_EQ(Work(numbers, seed), Work(memory, seed)) << seed;
  }
}

}  // namespace
}  // namespace cgp
