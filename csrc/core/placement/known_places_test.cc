#include "core/placement/known_places.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Placement At(uint32_t vpage) { return {VirtualPage{vpage}}; }

TEST(KnownPlaces, WhatComesAgainIsKnownByAllSizesBeforeIt) {
  KnownPlaces known;
  const auto place = [&](uint64_t size, uint32_t vpage) {
    const KnownPlaces::Key key = known.Again(size);
    KnownPlaces::Add(known.At(key), At(vpage));
    known.Advance(key);
  };
  known.BeginScope();
  place(3, 1);
  place(5, 2);
  known.BeginScope();
  EXPECT_THAT(known.At(known.Again(5)), IsEmpty()) << "nothing came before it";
  place(3, 7);
  EXPECT_THAT(known.At(known.Again(5)), ElementsAre(At(2)));
  EXPECT_THAT(known.At(known.Again(6)), IsEmpty());
}

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
