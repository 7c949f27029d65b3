#include "core/base/index_set.h"

#include <gtest/gtest.h>

#include <iterator>
#include <random>
#include <set>
#include <vector>

namespace cgp {
namespace {

std::optional<uint32_t> NextIn(const std::set<uint32_t>& model, uint32_t from) {
  const auto found = model.lower_bound(from);
  if (found == model.end()) return std::nullopt;
  return *found;
}

std::vector<uint32_t> Members(const IndexSet& set) {
  std::vector<uint32_t> members;
  for (auto i = set.Next(0); i; i = set.Next(*i + 1)) members.push_back(*i);
  return members;
}

std::vector<uint32_t> Members(const std::set<uint32_t>& model) {
  return {model.begin(), model.end()};
}

class IndexSetOfSize : public ::testing::TestWithParam<uint32_t> {};

TEST_P(IndexSetOfSize, AgainstStdSet) {
  const uint32_t limit = GetParam();
  std::mt19937 random(limit);
  const auto any = [&] { return static_cast<uint32_t>(random() % limit); };
  IndexSet set;
  set.Resize(limit);
  std::set<uint32_t> model;
  for (int step = 0; step < 20'000; ++step) {
    // Mostly sparse, so that whole words run empty and full again.
    const uint32_t i = model.size() > 40 ? *model.lower_bound(any() % *model.rbegin()) : any();
    if (model.contains(i)) {
      set.Erase(i);
      model.erase(i);
    } else {
      set.Insert(i);
      model.insert(i);
    }
    ASSERT_EQ(set.Contains(i), model.contains(i));
    const uint32_t from = any();
    ASSERT_EQ(set.Next(from), NextIn(model, from)) << "step " << step << ", from " << from;
    const auto behind = model.upper_bound(from);
    if (behind == model.begin()) continue;
    ASSERT_EQ(set.Last(from), *std::prev(behind)) << "step " << step << ", from " << from;
  }
  EXPECT_EQ(Members(set), Members(model));
}

TEST_P(IndexSetOfSize, RangesAgainstStdSet) {
  const uint32_t limit = GetParam();
  std::mt19937 random(limit);
  IndexSet set;
  set.Resize(limit);
  std::set<uint32_t> model;
  for (int step = 0; step < 50; ++step) {
    const auto begin = static_cast<uint32_t>(random() % limit);
    const auto end = begin + static_cast<uint32_t>(random() % (limit - begin + 1));
    const std::size_t before = model.size();
    if (random() % 2 == 0) {
      for (uint32_t i = begin; i < end; ++i) model.insert(i);
      ASSERT_EQ(set.SetRange(begin, end, true), model.size() - before);
    } else {
      model.erase(model.lower_bound(begin), model.lower_bound(end));
      ASSERT_EQ(set.SetRange(begin, end, false), before - model.size());
    }
    ASSERT_EQ(Members(set), Members(model)) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, IndexSetOfSize,
                         ::testing::Values(1u, 63u, 64u, 65u, 4096u, 4097u, 70'000u));

}  // namespace
}  // namespace cgp
