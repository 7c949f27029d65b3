#include "core/placement/known_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Placement At(uint32_t vpage) { return {VirtualPage{vpage}}; }

TEST(KnownPlaces, KeysNotAskedForInALongTimeAreForgotten) {
  KnownPlaces known;
  KnownPlaces::Add(known.At(1), At(1));
  KnownPlaces::Add(known.At(2), At(2));
  KnownPlaces::Key other = 10;
  for (int time = 0; time < 2; ++time) {
    for (std::size_t i = 0; i < KnownPlaces::kMostKeys; ++i) known.At(other++);
    EXPECT_THAT(known.At(1), ElementsAre(At(1))) << "asked for now and then";
  }
  EXPECT_THAT(known.At(2), IsEmpty());
}

}  // namespace
}  // namespace cgp
