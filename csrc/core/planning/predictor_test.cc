// What predictor.h says of which advice is given when, and that it makes no pool grow beyond what
// lives in it. Pages have four granules.
#include "core/planning/predictor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/placement/placement_test_pool.h"

namespace cgp {
namespace {

constexpr uint32_t kNever = CaptureProfile::kNever;

// A block of so many granules at scale 1, freed before the step of that number.
struct Step {
  uint64_t granules = 0;
  uint32_t freed_at = kNever;
};
using Program = std::vector<Step>;

class PredictorTest : public SmallPool {
 protected:
  struct TestBlock {
    std::vector<NodeId> pieces;
    Placement start;
    Ticket ticket;
    uint64_t granules = 0;
  };

  void TearDown() override {
    space_.Check();
    ranges_.Check();
    view_.Check();
  }

  // Asks for advice and follows it, or does without. Returns the block's number.
  int Allocate(uint64_t granules) {
    const uint64_t bytes = granules * kGranuleBytes;
    ListLiveBlocks();
    const uint64_t most_pages =
        std::max<uint64_t>(ranges_.page_count(), (live_ + used_.size() + granules + kP - 1) / kP);
    EXPECT_EQ(predictor_.MostPages(Granules(granules)), most_pages);
    predictor_.ReserveOne(bytes);
    const bool had_planned = predictor_.has_planned();
    advice_ = predictor_.Advise(bytes, view_);
    plans_ += predictor_.has_planned() && !had_planned ? 1 : 0;
    const Placement start = advice_.spot ? Reach(*advice_.spot) : WithoutAdvice(granules);
    if (advice_.spot) {
      EXPECT_LE(ranges_.page_count(), most_pages) << "grown for what is predicted";
    }
    EXPECT_TRUE(Fits(start, granules)) << "a place that is not free";
    TestBlock block{
        .pieces = TakeBlock(start, granules), .start = start, .ticket = {}, .granules = granules};
    live_ += granules;
    most_live_ = std::max(most_live_, live_);
    block.ticket = predictor_.Allocated(advice_, start, bytes, Granules(live_));
    start_ = start;
    blocks_.emplace(++last_, block);
    return last_;
  }

  void Free(int number) {
    const TestBlock block = blocks_.at(number);
    for (const NodeId id : block.pieces) Give(id);
    predictor_.Freed(block.ticket);
    live_ -= block.granules;
    blocks_.erase(number);
  }

  // The first `count` steps of the program at a scale; what is left at its end is freed then, but
  // for what is to stay. Returns how many blocks lay where the plan said.
  int Capture(const Program& program, double scale, std::size_t count = ~std::size_t{0}) {
    planned_ = 0;
    const int plans = plans_;
    places_.clear();
    advices_.clear();
    predictor_.BeginScope(kind_);
    std::map<std::size_t, int> live;
    const std::size_t steps = std::min(count, program.size());
    for (std::size_t i = 0; i < steps; ++i) {
      FreeDue(program, i, live);
      live[i] = Allocate(Scaled(program[i].granules, scale));
      places_.push_back(start_);
      advices_.push_back(advice_);
      planned_ += advice_.spot && plans_ > plans ? 1 : 0;
    }
    FreeDue(program, kNever - 1, live);
    predictor_.EndScope();
    return planned_;
  }

  static uint64_t Scaled(uint64_t granules, double scale) {
    return static_cast<uint64_t>(static_cast<double>(granules) * scale);
  }

  LiveBlocks live_blocks_;  // as the predictor sees them
  Predictor predictor_{bytes_, live_blocks_};
  std::map<int, TestBlock> blocks_;
  Predictor::Advice advice_;  // of the last block
  Placement start_;           // likewise
  // Of the last capture's blocks:
  std::vector<Placement> places_;
  std::vector<Predictor::Advice> advices_;
  uint64_t live_ = 0;  // granules
  uint64_t most_live_ = 0;
  int planned_ = 0;
  ScopeKind kind_ = ScopeKind::kCapture;  // of Capture()
  int plans_ = 0;                         // how many were made in all
  std::size_t others_ = 0;                // more blocks that live: as many as are taken for one

 private:
  // What is used, and nothing is known of, and the others are blocks of no capture.
  void ListLiveBlocks() {
    live_blocks_ = {};
    const auto list = [this](Placement start, uint64_t granules, Ticket ticket) {
      LiveBlock live;
      live.block.bytes = granules * kGranuleBytes;
      live.site = {.slot = start.slot, .offset = static_cast<uint32_t>(start.offset.count())};
      live.ticket = ticket;
      live_blocks_.ReserveOne();
      live_blocks_.Insert((live_blocks_.size() + 1) * kGranuleBytes, std::move(live));
    };
    for (const auto& [number, block] : blocks_) list(block.start, block.granules, block.ticket);
    for (const NodeId id : used_) {
      const PageSpace::Node& node = space_.node(id);
      list({ranges_.slots_of(node.page).front(), Granules(node.offset)}, node.length, {});
    }
    for (std::size_t i = 0; i < others_; ++i) list({ranges_.range(RangeId{0}).begin(), {}}, 1, {});
  }

  void FreeDue(const Program& program, std::size_t step, std::map<std::size_t, int>& live) {
    std::erase_if(live, [&](const auto& entry) {
      if (program[entry.first].freed_at > step) return false;
      Free(entry.second);
      return true;
    });
  }

  Placement Reach(const CapturePlan::Spot& spot) {
    if (!spot.growth) return spot.place;
    return spot.growth->PlacementFrom(Map(spot.growth->mapping), kPageSize);
  }

  Placement WithoutAdvice(uint64_t granules) {
    if (granules >= kP) {
      if (const auto place = Find(granules, Slack::kNone)) return *place;
      const GrowthPlan growth = Plan(granules, Slack::kNone);
      return growth.PlacementFrom(Map(growth.mapping), kPageSize);
    }
    if (const std::optional<NodeId> chain = view_.BestFit(Granules(granules))) {
      const PageSpace::Node& free = space_.node(*chain);
      return {ranges_.slots_of(free.page).front(), Granules(free.offset)};
    }
    const std::optional<PageId> whole = view_.NextWhole(PageId{0});
    if (!whole) return {Map({.range = {}, .handles = {kNew}}), Granules(0)};
    return {ranges_.slots_of(*whole).front(), Granules(0)};
  }

  std::vector<NodeId> TakeBlock(Placement start, uint64_t granules) {
    std::vector<NodeId> pieces;
    uint32_t offset = static_cast<uint32_t>(start.offset.count());
    for (uint32_t slot = Index(start.slot); granules > 0; ++slot, offset = 0) {
      const auto piece = static_cast<uint32_t>(std::min<uint64_t>(granules, kP - offset));
      Take(ranges_.page_at(SlotId{slot}), offset, piece);
      pieces.push_back(used_.back());
      used_.pop_back();
      granules -= piece;
    }
    return pieces;
  }

  int last_ = 0;
};

// Peaks at its last step with 40 + 30 + 11 granules; no size is another's multiple by a scale that
// the tests use.
const Program kProgram{{6, 3}, {9, 4}, {22, 5}, {13, 5}, {30, 8}, {40, 8}, {11, 8}};
constexpr uint64_t kPeakGranules = 81;

uint64_t PagesFor(double scale) {
  const auto granules = static_cast<uint64_t>(static_cast<double>(kPeakGranules) * scale);
  return (granules + 3) / 4;
}

TEST_F(PredictorTest, KnowsNothingOfTheFirstCapture) {
  predictor_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t granules : {9U, 2U, 40U}) {
    Allocate(granules);
    EXPECT_FALSE(advice_.spot.has_value());
    EXPECT_FALSE(advice_.lives_at_peak);
  }
}

// Without advice it would go to the range that was made since.
TEST_F(PredictorTest, ABlockThatNothingElseKnowsGoesWhereOneOfItsSizeLay) {
  MapNew(std::vector<std::string>(32, "...."));
  predictor_.BeginScope(ScopeKind::kCapture);
  const int first = Allocate(40);
  EXPECT_FALSE(advice_.spot);
  const Placement place = start_;
  Free(first);
  MapNew(std::vector<std::string>(16, "...."));
  Allocate(39);
  EXPECT_FALSE(advice_.spot) << "of another size";
  Allocate(40);
  EXPECT_EQ(start_, place);
  Allocate(40);
  EXPECT_FALSE(advice_.spot) << "where it lay is taken";
}

TEST_F(PredictorTest, WhereBlocksLayIsForgottenWithTheCaptureAndNotUsedInSmallPools) {
  MapNew(std::vector<std::string>(31, "...."));
  predictor_.BeginScope(ScopeKind::kCapture);
  for (int block = 0; block < 2; ++block) {
    Free(Allocate(40));
    EXPECT_FALSE(advice_.spot) << block;
  }
  MapNew(std::vector<std::string>(16, "...."));
  Free(Allocate(40));
  EXPECT_TRUE(advice_.spot);
  predictor_.BeginScope(ScopeKind::kCapture);
  Allocate(40);
  EXPECT_FALSE(advice_.spot);
}

TEST_F(PredictorTest, ACaptureNoLargerThanItsProfileGoesWhereThatLay) {
  Capture(kProgram, 4);
  const std::vector<Placement> profile = places_;
  const uint64_t mappings = ranges_.mapping_count();
  for (const double scale : {4.0, 2.0, 1.0}) {
    EXPECT_EQ(Capture(kProgram, scale), 0) << "there is nothing to plan";
    for (std::size_t i = 0; i < profile.size(); ++i) {
      EXPECT_EQ(places_[i].slot, profile[i].slot) << i;
      EXPECT_EQ(places_[i].offset, profile[i].offset) << i;
    }
  }
  EXPECT_EQ(ranges_.mapping_count(), mappings);
}

TEST_F(PredictorTest, TellsWhatLivesAtThePeak) {
  Capture(kProgram, 1);
  predictor_.BeginScope(ScopeKind::kCapture);
  std::vector<bool> at_peak;
  for (const Step& step : kProgram) {
    Allocate(step.granules);
    at_peak.push_back(advice_.lives_at_peak);
  }
  EXPECT_EQ(at_peak, (std::vector<bool>{false, false, false, false, true, true, true}));
}

// Three small blocks tell how large the capture is, then the largest come first: what comes late
// lies high, where the pool has grown by then.
const Program kTold{{2, 1}, {3, 2}, {5, 3}, {40, 10}, {30, 10}, {11, 10}, {9, 8}, {6, 9}, {7, 10}};

TEST_F(PredictorTest, APlanThatHasNoPlaceForSomeIsNotFollowed) {
  // Free in all, and in no place long enough for the larger ones.
  MapNew(std::vector<std::string>(64, "x.x."));
  Capture(kTold, 1);
  Capture(kTold, 2);
  EXPECT_EQ(Capture(kTold, 4), 0);
  EXPECT_GT(plans_, 0);
}

// --- Larger captures ---

TEST_F(PredictorTest, ALargerCaptureMapsLittleMoreThanItGrowsBy) {
  for (const double scale : {1.0, 2.0, 4.0, 5.0, 10.0}) Capture(kTold, scale);
  const uint64_t pages = ranges_.page_count();
  const uint64_t mappings = ranges_.mapping_count();
  EXPECT_GE(Capture(kTold, 11), 4);
  EXPECT_LE(ranges_.mapping_count() - mappings, (ranges_.page_count() - pages) * 2 + 4);
  EXPECT_LE(ranges_.page_count(), PagesFor(11) + 11 * 22 / kP);
}

// Ten times the profile's first block, and then nothing of the profile's: Allocate() checks that no
// advice makes a page that what lives does not need.
TEST_F(PredictorTest, AProfileThatIsWildlyWrongCostsNoPage) {
  Capture(kProgram, 1);
  for (const uint64_t first : {60U, 360U, 3600U}) {
    const uint64_t before = ranges_.page_count();
    const Program program{{first, 5}, {2, 5}, {19, 5}, {3, 5}, {17, 5}};
    Capture(program, 1);
    EXPECT_LE(ranges_.page_count(), std::max(before, (first + 41 + kP - 1) / kP + 1)) << first;
  }
}

TEST_F(PredictorTest, ACaptureGetsOnePlan) {
  MapNew(std::vector<std::string>(PagesFor(2), "...."));
  for (const double scale : {1.0, 2.0}) Capture(kTold, scale);
  for (const double scale : {4.0, 8.0}) {
    const int plans = plans_;
    EXPECT_GE(Capture(kTold, scale), 4) << scale;
    EXPECT_EQ(plans_, plans + 1);
  }
}

TEST_F(PredictorTest, EagerWorkGetsNone) {
  MapNew(std::vector<std::string>(PagesFor(2), "...."));
  kind_ = ScopeKind::kEager;
  for (const double scale : {1.0, 2.0, 4.0, 1.0}) Capture(kTold, scale);
  EXPECT_EQ(plans_, 0);
  kind_ = ScopeKind::kCapture;
  Capture(kTold, 8);
  EXPECT_EQ(plans_, 1) << "for what was learned of eager work";
}

TEST_F(PredictorTest, APlanThatIsGivenUpStaysSoForThisCapture) {
  MapNew(std::vector<std::string>(700, "...."));
  Capture(kProgram, 1);
  predictor_.BeginScope(ScopeKind::kCapture);
  Allocate(kProgram[0].granules * 7);
  ASSERT_TRUE(advice_.spot);
  predictor_.GiveUpPlan();
  Allocate(kProgram[1].granules * 7);
  EXPECT_EQ(advice_.match.step, 1U);
  EXPECT_FALSE(advice_.spot);
  predictor_.EndScope();
  while (!blocks_.empty()) Free(blocks_.begin()->first);
  EXPECT_GE(Capture(kProgram, 8), 1) << "the next capture is planned again";
}

// As long as the program may last.
TEST_F(PredictorTest, EagerWorkIsPredictedForSoLong) {
  MapNew({"...."});
  for (const ScopeKind kind : {ScopeKind::kEager, ScopeKind::kCapture}) {
    predictor_.BeginScope(kind);
    for (uint32_t i = 0; i < Predictor::kMostEager; ++i) Free(Allocate(1));
    EXPECT_TRUE(predictor_.is_active());
    Free(Allocate(1));
    EXPECT_EQ(predictor_.is_active(), kind == ScopeKind::kCapture);
    predictor_.EndScope();
  }
}

TEST_F(PredictorTest, APoolOfVeryManyBlocksIsNotPlannedFor) {
  MapNew(std::vector<std::string>(200, "...."));
  Capture(kProgram, 1);
  others_ = 4097;
  Capture(kProgram, 2);
  EXPECT_EQ(plans_, 0);
  others_ = 4000;
  Capture(kProgram, 4);
  EXPECT_EQ(plans_, 1);
}

// --- Places taken, and survivors ---

// More pages than the program needs, and a granule that lives where a block of it lay.
class TakenPlaceTest : public PredictorTest {
 protected:
  void TakePlaceOf(std::size_t step) {
    const Placement place = places_[step];
    Take(ranges_.page_at(place.slot), static_cast<uint32_t>(place.offset.count()), 1);
  }
};

TEST_F(TakenPlaceTest, APlanIsMadeOfWhatIsMapped) {
  MapNew(std::vector<std::string>(28, "...."));
  Capture(kProgram, 1);
  const uint64_t mappings = ranges_.mapping_count();
  TakePlaceOf(3);
  // It is made when the fourth block finds its place taken: the two that live then are known to be
  // freed before the largest come, else there would be no room for these.
  EXPECT_GE(Capture(kProgram, 1), 2);
  EXPECT_EQ(ranges_.page_count(), 28U);
  EXPECT_EQ(ranges_.mapping_count(), mappings);
}

TEST_F(TakenPlaceTest, ASmallBlockIsNotWorthAPlan) {
  MapNew(std::vector<std::string>(28, "...."));
  const Program program{{2, 2}, {3, 2}};
  Capture(program, 1);
  const int plans = plans_;
  TakePlaceOf(0);
  Capture(program, 1);
  EXPECT_EQ(plans_, plans);
  EXPECT_FALSE(advices_.front().spot);
}

TEST_F(TakenPlaceTest, NothingIsMappedForThePlanOfACaptureNoLargerThanItsProfile) {
  MapNew(std::vector<std::string>(21, "...."));
  MapNew(std::vector<std::string>(5, "...."));
  Capture(kProgram, 1);
  TakePlaceOf(3);
  EXPECT_GE(Capture(kProgram, 1), 1);
  for (const Predictor::Advice& advice : advices_) EXPECT_FALSE(advice.spot && advice.spot->growth);
}

TEST_F(PredictorTest, WhatLivesOnSinceTheLastCaptureIsPlannedAround) {
  Program program = kProgram;
  program.push_back({8, kNever});
  for (int capture = 0; capture < 6; ++capture) {
    Capture(program, 1);
    EXPECT_LE(uint64_t{ranges_.page_count()} * kP, most_live_ + 4 * kP);
  }
}

}  // namespace
}  // namespace cgp
