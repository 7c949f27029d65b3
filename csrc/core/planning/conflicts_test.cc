#include "core/planning/conflicts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace cgp {
namespace {

bool Meet(const Lifetime& a, const Lifetime& b) { return a.begin < b.end && b.begin < a.end; }

// Whom ForEach() names and does meet: each once.
std::set<uint32_t> MetBy(const Conflicts& conflicts, const std::vector<Lifetime>& lifetimes,
                         uint32_t number) {
  std::set<uint32_t> met;
  conflicts.ForEach(number, [&](uint32_t other) {
    EXPECT_NE(other, number);
    if (!Meet(lifetimes[number], lifetimes[other])) return;
    EXPECT_TRUE(met.insert(other).second) << other << " was named twice";
  });
  return met;
}

TEST(Conflicts, NamesAllThatMeetAndEachOnce) {
  for (uint32_t seed = 0; seed < 2'000; ++seed) {
    std::mt19937 random(seed);
    const auto first = static_cast<uint32_t>(random() % 4);
    const auto count = first + static_cast<uint32_t>(random() % 12);
    std::vector<Lifetime> lifetimes;
    for (uint32_t n = 0; n < count; ++n) {
      const auto begin = n < first ? 0 : static_cast<uint32_t>(random() % 16);
      lifetimes.push_back({begin, begin + 1 + static_cast<uint32_t>(random() % 8)});
    }
    // In the order of their begins, as blocks come, or in any.
    if (seed % 2 == 0) {
      std::sort(lifetimes.begin() + first, lifetimes.end(),
                [](const Lifetime& a, const Lifetime& b) { return a.begin < b.begin; });
    }
    const auto conflicts = Conflicts::Find(lifetimes, first, 1'000);
    ASSERT_TRUE(conflicts);
    for (uint32_t n = first; n < count; ++n) {
      std::set<uint32_t> expected;
      for (uint32_t other = 0; other < count; ++other) {
        if (other != n && Meet(lifetimes[n], lifetimes[other])) expected.insert(other);
      }
      ASSERT_EQ(MetBy(*conflicts, lifetimes, n), expected) << "seed " << seed << ", number " << n;
    }
  }
}

TEST(Conflicts, FewAreNamedThatDoNotMeet) {
  std::vector<Lifetime> lifetimes;
  for (uint32_t step = 0; step < 100; ++step) lifetimes.push_back({step, step + 2});
  const auto conflicts = Conflicts::Find(lifetimes, 0, 100);
  ASSERT_TRUE(conflicts);
  for (uint32_t n = 0; n < 100; ++n) {
    int named = 0;
    conflicts->ForEach(n, [&](uint32_t) { ++named; });
    EXPECT_EQ(named, n == 0 || n == 99 ? 1 : 2);
  }
}

TEST(Conflicts, GivesUpOnWhatAllLivesAtOnce) {
  const std::vector<Lifetime> lifetimes(100, Lifetime{0, 1});
  EXPECT_FALSE(Conflicts::Find(lifetimes, 0, 100 * 99 / 2 - 1));
  EXPECT_TRUE(Conflicts::Find(lifetimes, 0, 100 * 99 / 2));
}

}  // namespace
}  // namespace cgp
