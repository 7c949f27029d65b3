#include "core/planning/known_places.h"

#include <gtest/gtest.h>

#include <optional>

namespace cgp {
namespace {

constexpr Granules kLength(5000);

Placement At(uint32_t slot) { return {SlotId{slot}, Granules(7)}; }

bool Any(Placement /*place*/) { return true; }

class KnownPlacesTest : public testing::Test {
 protected:
  void Add(Granules length, uint32_t slot) {
    places_.Reserve(length);
    places_.Add(length, At(slot));
  }

  KnownPlaces places_;
};

TEST_F(KnownPlacesTest, NamesTheOldestThatFits) {
  for (const uint32_t slot : {9U, 3U, 5U, 3U}) Add(kLength, slot);
  EXPECT_EQ(places_.Find(kLength, Any), At(9));
  EXPECT_EQ(places_.Find(kLength, [](Placement place) { return place.slot < SlotId{9}; }), At(3));
  EXPECT_EQ(places_.Find(kLength, [](Placement place) { return place.slot > SlotId{9}; }),
            std::nullopt);
}

TEST_F(KnownPlacesTest, NamesThoseOfThatLengthOnly) {
  Add(kLength, 9);
  places_.Reserve(Granules(5001));
  EXPECT_EQ(places_.Find(Granules(5001), Any), std::nullopt);
  EXPECT_EQ(places_.Find(Granules(4999), Any), std::nullopt);
}

TEST_F(KnownPlacesTest, KeepsTheLastOfMany) {
  for (uint32_t slot = 0; slot < 2 * KnownPlaces::kMost; ++slot) Add(kLength, slot);
  uint32_t asked = KnownPlaces::kMost;
  EXPECT_EQ(places_.Find(kLength,
                         [&](Placement place) {
                           EXPECT_EQ(place, At(asked++));
                           return false;
                         }),
            std::nullopt);
  EXPECT_EQ(asked, 2 * KnownPlaces::kMost);
}

TEST_F(KnownPlacesTest, KnowsNothingAfterClear) {
  Add(kLength, 9);
  places_.Clear();
  EXPECT_EQ(places_.Find(kLength, Any), std::nullopt);
}

}  // namespace
}  // namespace cgp
