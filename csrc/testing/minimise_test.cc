#include "testing/minimise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> Numbers(int count) {
  std::vector<int> numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

bool Has(const std::vector<int>& items, int item) {
  return std::find(items.begin(), items.end(), item) != items.end();
}

TEST(Minimise, FindsTheItemsThatMatterWhereverTheyAre) {
  const auto fails = [](const std::vector<int>& items) {
    return Has(items, 0) && Has(items, 57) && Has(items, 99);
  };
  EXPECT_THAT(Minimise(Numbers(100), fails, 10'000), ElementsAre(0, 57, 99));
}

TEST(Minimise, KeepsTheOrder) {
  const auto fails = [](const std::vector<int>& items) {
    const auto at = std::find(items.begin(), items.end(), 3);
    return at != items.end() && std::find(at, items.end(), 8) != items.end();
  };
  EXPECT_THAT(Minimise(Numbers(10), fails, 10'000), ElementsAre(3, 8));
}

TEST(Minimise, EndsWithNothingIfNothingMatters) {
  EXPECT_THAT(Minimise(
                  Numbers(10), [](const auto&) { return true; }, 10'000),
              IsEmpty());
}

TEST(Minimise, StopsWhenTheTriesAreSpentWithAFailingSequence) {
  size_t tried = 0;
  const auto fails = [&](const std::vector<int>& items) {
    ++tried;
    return Has(items, 57);
  };
  const std::vector<int> rest = Minimise(Numbers(100), fails, 5);
  EXPECT_EQ(tried, 5U);
  EXPECT_TRUE(Has(rest, 57));
  EXPECT_LT(rest.size(), 100U);
}

}  // namespace
}  // namespace cgp
