#include "core/base/index_set.h"

#include <gtest/gtest.h>

#include <iterator>
#include <random>
#include <set>
#include <utility>
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

TEST(IndexSet, WithoutRoomHasNoMembers) {
  IndexSet set;
  EXPECT_EQ(set.Next(0), std::nullopt);
  EXPECT_EQ(set.Next(1000), std::nullopt);
  set.Clear();
  set.Resize(0);
  EXPECT_EQ(set.Next(0), std::nullopt);
}

TEST(IndexSet, InsertingAndErasingTwiceIsInsertingAndErasingOnce) {
  IndexSet set;
  set.Resize(5000);
  set.Erase(4097);
  EXPECT_EQ(set.Next(0), std::nullopt);
  set.Insert(4097);
  set.Insert(4097);
  EXPECT_EQ(Members(set), std::vector<uint32_t>{4097});
  set.Erase(4097);
  EXPECT_EQ(set.Next(0), std::nullopt);
  set.Erase(4097);
  EXPECT_EQ(set.Next(0), std::nullopt);
}

TEST(IndexSet, NextBeyondTheLimitIsNone) {
  IndexSet set;
  set.Resize(64);
  set.Insert(63);
  EXPECT_EQ(set.Next(63), 63u);
  EXPECT_EQ(set.Next(64), std::nullopt);
  EXPECT_EQ(set.Next(~uint32_t{0}), std::nullopt);
}

TEST(IndexSet, RunsOfMembersAreFoundFromBothEnds) {
  IndexSet set;
  set.Resize(300);
  const auto expect_like_model = [&](uint32_t from, uint32_t limit) {
    uint32_t missing = from;
    while (missing < limit && set.Contains(missing)) ++missing;
    EXPECT_EQ(set.NextMissing(from, limit), missing) << from << " to " << limit;
    uint32_t run = limit;
    while (run > from && set.Contains(run - 1)) --run;
    EXPECT_EQ(set.LastRun(from, limit), run) << from << " to " << limit;
  };
  for (const auto& [begin, end] : {std::pair(0U, 1U), {3U, 64U}, {65U, 128U}, {130U, 270U}}) {
    set.SetRange(begin, end, true);
    for (uint32_t from = 0; from < 300; from += 7) {
      for (uint32_t limit = from; limit <= 300; ++limit) expect_like_model(from, limit);
    }
  }
}

class IndexSetOfSize : public ::testing::TestWithParam<uint32_t> {};

TEST_P(IndexSetOfSize, FindsASingleMemberFromEverywhere) {
  const uint32_t limit = GetParam();
  IndexSet set;
  set.Resize(limit);
  for (const uint32_t member : {uint32_t{0}, limit / 2, limit - 1}) {
    set.Insert(member);
    for (uint32_t from = 0; from < limit; ++from) {
      ASSERT_EQ(set.Contains(from), from == member);
      ASSERT_EQ(set.Next(from), from <= member ? std::optional(member) : std::nullopt)
          << "from " << from << ", member " << member;
    }
    set.Erase(member);
  }
}

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

TEST_P(IndexSetOfSize, FilledAndCleared) {
  const uint32_t limit = GetParam();
  IndexSet set;
  set.Resize(limit);
  for (uint32_t i = 0; i < limit; ++i) set.Insert(i);
  for (uint32_t i = 0; i < limit; ++i) ASSERT_EQ(set.Next(i), i);
  set.Clear();
  EXPECT_EQ(set.Next(0), std::nullopt);
  set.Insert(limit - 1);
  EXPECT_EQ(Members(set), std::vector<uint32_t>{limit - 1});
}

INSTANTIATE_TEST_SUITE_P(Sizes, IndexSetOfSize,
                         ::testing::Values(1u, 63u, 64u, 65u, 4096u, 4097u, 70'000u));

// From every size to every larger one, with members at both ends of each: levels widen, and new
// tops sum up what is below.
TEST(IndexSet, GrowsWhileFilled) {
  const std::vector<uint32_t> sizes{1, 2, 63, 64, 65, 128, 4096, 4097, 70'000, 262'144, 262'145};
  for (std::size_t first = 0; first < sizes.size(); ++first) {
    for (std::size_t step = 1; first + step < sizes.size(); ++step) {
      IndexSet set;
      std::set<uint32_t> model;
      for (std::size_t s = first; s < sizes.size(); s += step) {
        set.Resize(sizes[s]);
        ASSERT_EQ(Members(set), Members(model)) << "grown to " << sizes[s];
        for (const uint32_t i : {uint32_t{0}, sizes[s] / 3, sizes[s] - 1}) {
          set.Insert(i);
          model.insert(i);
        }
        ASSERT_EQ(Members(set), Members(model)) << "filled at " << sizes[s];
      }
      for (const uint32_t i : std::set<uint32_t>(model)) {
        set.Erase(i);
        model.erase(i);
        ASSERT_EQ(Members(set), Members(model)) << "after erasing " << i;
      }
    }
  }
}

TEST(IndexSet, GrowsWhileEmpty) {
  IndexSet set;
  for (const uint32_t limit : {0u, 1u, 65u, 5000u}) {
    set.Resize(limit);
    EXPECT_EQ(set.Next(0), std::nullopt);
  }
  set.Insert(4999);
  EXPECT_EQ(set.Next(0), 4999u);
}

TEST(IndexSet, ResizingToLessKeepsEverything) {
  IndexSet set;
  set.Resize(5000);
  set.Insert(4999);
  set.Resize(1);
  set.Resize(0);
  EXPECT_EQ(set.Next(0), 4999u);
}

}  // namespace
}  // namespace cgp
