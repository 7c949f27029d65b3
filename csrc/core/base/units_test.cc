#include "core/base/units.h"

#include <gtest/gtest.h>

#include <limits>
#include <type_traits>

namespace cgp {
namespace {

// Numbers of different meaning do not mix: what the types are for.
static_assert(!std::is_convertible_v<uint64_t, Granules>);
static_assert(!std::is_convertible_v<Granules, uint64_t>);
static_assert(!std::is_convertible_v<PageId, SlotId>);
static_assert(!std::is_convertible_v<uint32_t, PageId>);
static_assert(!std::is_convertible_v<PageId, uint32_t>);

TEST(Granules, BytesAreRoundedUpToGranules) {
  EXPECT_EQ(Granules::FromBytesRoundedUp(0).count(), 0u);
  EXPECT_EQ(Granules::FromBytesRoundedUp(1).count(), 1u);
  EXPECT_EQ(Granules::FromBytesRoundedUp(kGranuleBytes - 1).count(), 1u);
  EXPECT_EQ(Granules::FromBytesRoundedUp(kGranuleBytes).count(), 1u);
  EXPECT_EQ(Granules::FromBytesRoundedUp(kGranuleBytes + 1).count(), 2u);
}

TEST(Granules, RoundingUpTheLargestNumberOfBytesDoesNotWrap) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(Granules::FromBytesRoundedUp(kMost).count(), kMost / kGranuleBytes + 1);
}

TEST(Granules, Arithmetic) {
  EXPECT_EQ(Granules(7) + Granules(2), Granules(9));
  EXPECT_EQ(Granules(7) - Granules(2), Granules(5));
  EXPECT_EQ(Granules(7) * 3, Granules(21));
  EXPECT_EQ(Granules(7) / Granules(2), 3u);
  EXPECT_EQ(Granules(7) % Granules(2), Granules(1));
  Granules sum(7);
  sum += Granules(4);
  EXPECT_EQ(sum, Granules(11));
  sum -= Granules(10);
  EXPECT_EQ(sum, Granules(1));
}

}  // namespace
}  // namespace cgp
