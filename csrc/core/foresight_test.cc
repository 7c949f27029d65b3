// What foresight.h says of which advice is given when, and of how far a plan is trusted. Pages have
// four granules.
#include "core/foresight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/placement_test_pool.h"

namespace cgp {
namespace {

constexpr uint32_t kNever = CaptureGuide::kNever;

// A block of so many granules at scale 1, freed before the step of that number.
struct Step {
  uint64_t granules = 0;
  uint32_t freed_at = kNever;
};
using Program = std::vector<Step>;

class ForesightTest : public SmallPool {
 protected:
  struct LiveBlock {
    std::vector<NodeId> pieces;
    CaptureGuide::Ticket ticket;
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
    advice_ = foresight_.Advise(bytes, view_, [this](const Foresight::PieceFunction& add) {
      ++plans_;
      const auto add_piece = [&](NodeId id, CaptureGuide::Ticket ticket) {
        const PageSpace::Node& node = space_.node(id);
        add(node.page, Granules(node.offset), Granules(node.length), ticket);
      };
      for (const auto& [number, block] : blocks_) {
        for (const NodeId id : block.pieces) add_piece(id, block.ticket);
      }
      for (const NodeId id : used_) add_piece(id, {});  // nothing is known of those
    });
    const Placement start = advice_.spot ? Reach(*advice_.spot) : WithoutAdvice(granules);
    EXPECT_TRUE(Fits(start, granules)) << "a place that is not free";
    LiveBlock block{.pieces = TakeBlock(start, granules), .ticket = {}, .granules = granules};
    live_ += granules;
    most_live_ = std::max(most_live_, live_);
    planned_ += advice_.planned ? 1 : 0;
    block.ticket = foresight_.Allocated(advice_, start, bytes, Granules(live_));
    start_ = start;
    blocks_.emplace(++last_, block);
    return last_;
  }

  void Free(int number) {
    const LiveBlock block = blocks_.at(number);
    for (const NodeId id : block.pieces) {
      const PageId page = space_.node(id).page;
      view_.Forget(space_.first(page), space_.last(page));
      space_.Give(id, FenceId::kOpen);
      view_.Learn(space_.first(page), space_.last(page));
    }
    foresight_.Freed(block.ticket);
    live_ -= block.granules;
    blocks_.erase(number);
  }

  // The first `count` steps of the program at a scale; what is left at its end is freed then, but
  // for what is to stay. Returns how many blocks lay where the plan said.
  int Capture(const Program& program, double scale, std::size_t count = ~std::size_t{0}) {
    planned_ = 0;
    places_.clear();
    advices_.clear();
    foresight_.BeginCapture();
    std::map<std::size_t, int> live;
    const std::size_t steps = std::min(count, program.size());
    for (std::size_t i = 0; i < steps; ++i) {
      FreeDue(program, i, live);
      live[i] = Allocate(Scaled(program[i].granules, scale));
      places_.push_back(start_);
      advices_.push_back(advice_);
    }
    FreeDue(program, kNever - 1, live);
    foresight_.EndCapture();
    return planned_;
  }

  static uint64_t Scaled(uint64_t granules, double scale) {
    return static_cast<uint64_t>(static_cast<double>(granules) * scale);
  }

  // Marks the pages of blocks below a page that live now.
  void Settle() {
    for (const auto& [number, block] : blocks_) {
      const PageId page = space_.node(block.pieces.front()).page;
      if (block.granules >= kP) continue;
      view_.Forget(space_.first(page), space_.last(page));
      space_.SetSettled(page, true);
      view_.Learn(space_.first(page), space_.last(page));
    }
  }

  Foresight foresight_{space_, ranges_};
  std::map<int, LiveBlock> blocks_;
  Foresight::Advice advice_;  // of the last block
  Placement start_;           // likewise
  // Of the last capture's blocks:
  std::vector<Placement> places_;
  std::vector<Foresight::Advice> advices_;
  uint64_t live_ = 0;  // granules
  uint64_t most_live_ = 0;
  int planned_ = 0;
  int plans_ = 0;  // how many were made in all

 private:
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
    std::optional<NodeId> node = view_.BestFit(Granules(granules));
    if (const auto page = view_.NextWhole(PageId{0}); !node && page) node = space_.first(*page);
    if (!node) node = space_.first(ranges_.page_at(Map({.range = {}, .handles = {kNew}})));
    const PageSpace::Node& free = space_.node(*node);
    return {ranges_.slots_of(free.page).front(), Granules(free.offset)};
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

TEST_F(ForesightTest, KnowsNothingOfTheFirstCapture) {
  foresight_.BeginCapture();
  for (const uint64_t granules : {9U, 2U, 40U}) {
    Allocate(granules);
    EXPECT_FALSE(advice_.spot.has_value());
    EXPECT_FALSE(advice_.planned || advice_.lives_at_peak);
  }
}

TEST_F(ForesightTest, ACaptureNoLargerThanItsGuideGoesWhereThatLay) {
  Capture(kProgram, 4);
  const std::vector<Placement> guide = places_;
  const uint64_t mappings = ranges_.mapping_count();
  for (const double scale : {4.0, 2.0, 1.0}) {
    EXPECT_EQ(Capture(kProgram, scale), 0) << "there is nothing to plan";
    for (std::size_t i = 0; i < guide.size(); ++i) {
      EXPECT_EQ(places_[i].slot, guide[i].slot) << i;
      EXPECT_EQ(places_[i].offset, guide[i].offset) << i;
    }
  }
  EXPECT_EQ(ranges_.mapping_count(), mappings);
}

TEST_F(ForesightTest, TellsWhatLivesAtThePeak) {
  Capture(kProgram, 1);
  foresight_.BeginCapture();
  std::vector<bool> at_peak;
  for (const Step& step : kProgram) {
    Allocate(step.granules);
    at_peak.push_back(advice_.lives_at_peak);
  }
  EXPECT_EQ(at_peak, (std::vector<bool>{false, false, false, false, true, true, true}));
}

// Three small blocks tell how large the capture is, then kProgram.
const Program kTold{{2, 1},  {3, 2},  {5, 3},   {6, 6},   {9, 7},
                    {22, 8}, {13, 8}, {30, 11}, {40, 11}, {11, 11}};

TEST_F(ForesightTest, ALargerCaptureIsPlannedOnceTheProgramIsLearned) {
  Capture(kTold, 1);
  EXPECT_EQ(Capture(kTold, 2), 0) << "one capture does not say how sizes grow";
  for (const double scale : {4.0, 5.0, 10.0}) {
    const uint64_t pages = ranges_.page_count();
    const uint64_t mappings = ranges_.mapping_count();
    const uint32_t ranges = ranges_.range_count();
    EXPECT_GE(Capture(kTold, scale), 4) << scale;
    EXPECT_LE(ranges_.page_count(), PagesFor(scale) + 1);
    // What it grows by, and what the home did not show yet.
    EXPECT_LE(ranges_.mapping_count() - mappings, ranges_.page_count()) << pages;
    EXPECT_LE(ranges_.range_count(), ranges + 2);
  }
  // Once the home shows all pages, growth is all that is mapped.
  const uint64_t pages = ranges_.page_count();
  const uint64_t mappings = ranges_.mapping_count();
  EXPECT_GE(Capture(kTold, 11), 4);
  EXPECT_LE(ranges_.mapping_count() - mappings, (ranges_.page_count() - pages) * 2 + 4);
  EXPECT_EQ(most_live_, kPeakGranules * 11);
}

TEST_F(ForesightTest, APlanThatHasNoPlaceForSomeIsNotFollowed) {
  // Free in all, and in no place long enough for the larger ones.
  MapNew(std::vector<std::string>(64, "x.x."));
  Capture(kTold, 1);
  Capture(kTold, 2);
  EXPECT_EQ(Capture(kTold, 4), 0);
  EXPECT_GT(plans_, 0);
}

// --- How far a plan is trusted ---

class TrustTest : public ForesightTest {
 protected:
  void SetUp() override {
    Capture(kProgram, 1);
    Capture(kProgram, 2);
    before_ = ranges_.page_count();
  }
  // The pages that the pool would have without any plan.
  uint64_t Needed(uint64_t granules) const {
    return std::max<uint64_t>(before_, (granules + kP - 1) / kP);
  }
  uint64_t before_ = 0;
};

TEST_F(TrustTest, AFirstBlockThatOnlySeemsLargerMakesThePoolGrowLittle) {
  // Three or ten times the guide's first block, and then nothing of the guide's.
  for (const uint64_t first : {36U, 120U}) {
    foresight_.BeginCapture();
    std::vector<int> live;
    uint64_t granules = 0;
    for (const uint64_t next : {first, uint64_t{2}, uint64_t{19}, uint64_t{3}, uint64_t{17}}) {
      granules += next;
      live.push_back(Allocate(next));
      EXPECT_LE(ranges_.page_count(), std::max(Needed(granules), before_ + before_ / 64 + 1) + 1);
    }
    for (const int block : live) Free(block);
    foresight_.EndCapture();
  }
}

TEST_F(TrustTest, AFirstBlockThatOnlySeemsLargerDoesNotLeadTheRestAstray) {
  Program program = kProgram;
  for (Step& step : program) step.granules *= 2;
  program[0].granules *= 10;
  Capture(program, 1);
  EXPECT_LE(ranges_.page_count(), Needed(2 * kPeakGranules + program[0].granules) + 2);
}

TEST_F(TrustTest, BeforeThreeBlocksAreAsForetoldThePoolGrowsLittleAheadOfNeed) {
  foresight_.BeginCapture();
  uint64_t granules = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    Allocate(kProgram[i].granules * 20);
    granules += kProgram[i].granules * 20;
    EXPECT_LE(ranges_.page_count(), std::max(Needed(granules), before_ + before_ / 64 + 1) + 1);
  }
  EXPECT_EQ(advice_.match.evidence, 1U);
}

TEST_F(TrustTest, AsLongAsMoreBlocksAreMissedThanAsForetoldThePoolGrowsLittleAheadOfNeed) {
  Program program = kProgram;
  for (Step& step : program) step.granules *= 20;
  program.insert(program.begin() + 1, 3, Step{7, kNever});
  foresight_.BeginCapture();
  uint64_t granules = 0;
  for (const Step& step : program) {
    Allocate(step.granules);
    granules += step.granules;
    if (advice_.match.evidence > advice_.match.missed) break;
    EXPECT_LE(ranges_.page_count(), std::max(Needed(granules), before_ + before_ / 64 + 1) + 1);
  }
  EXPECT_EQ(advice_.match.evidence, 4U);
  EXPECT_EQ(advice_.match.missed, 3U);
}

TEST_F(ForesightTest, BeforeThatAPlanGetsWhatLivesNeedsAnyway) {
  const Program program{{50, 3}, {30, 3}, {10, 3}};  // the first lies lowest
  Capture(program, 1);
  Capture(program, 2);
  Capture(program, 6);
  EXPECT_TRUE(advices_.front().planned);
  EXPECT_EQ(advices_.front().match.evidence, 0U);
}

// The smallest come first, and would lie highest: what is not trusted with so many pages yet goes
// where the largest were to lie.
TEST_F(ForesightTest, WhatWasRefusedIsPlannedAroundWhenThePlanIsTrusted) {
  const Program program{{10, 8}, {20, 8}, {12, 8}, {24, 8}, {14, 8}, {40, 8}, {60, 8}};
  Capture(program, 1);
  Capture(program, 2);
  const int plans = plans_;
  Capture(program, 8);
  EXPECT_FALSE(advices_.front().planned);
  EXPECT_TRUE(advices_[5].planned);
  EXPECT_TRUE(advices_[6].planned);
  EXPECT_EQ(ranges_.page_count(), 2 * 180U);
  EXPECT_EQ(plans_, plans + 2);
}

// Begins with blocks that the pool has room for, however much larger they are, and goes on with
// those that make it grow.
class SmallFirstTest : public ForesightTest {
 protected:
  void SetUp() override {
    for (const Step& step : kProgram) {
      program_.push_back({step.granules * 10, step.freed_at + 4});
    }
    Capture(program_, 1);
    Capture(program_, 2);
    ASSERT_LE(ranges_.page_count(), Pages(2) + 1);
  }
  static uint64_t Pages(uint64_t scale) { return (10 * kPeakGranules * scale + 3) / 4; }

  Program program_{{2, 4}, {3, 4}, {5, 4}, {2, 4}};
};

TEST_F(SmallFirstTest, AfterFourBlocksAPlanHasAllThePagesThatItWants) {
  EXPECT_GE(Capture(program_, 12), 10);
  EXPECT_LE(ranges_.page_count(), Pages(12) + 1);
}

TEST_F(SmallFirstTest, EachCaptureHasAPlanOfItsOwn) {
  for (const uint64_t scale : {4U, 8U, 16U}) {
    EXPECT_GE(Capture(program_, static_cast<double>(scale)), 10) << scale;
    EXPECT_LE(ranges_.page_count(), Pages(scale) + 1);
  }
}

TEST_F(TrustTest, APlanThatIsGivenUpStaysSoForThisCapture) {
  foresight_.BeginCapture();
  for (std::size_t i = 0; i < kProgram.size(); ++i) {
    Allocate(kProgram[i].granules * 5);
    if (i < 1) continue;
    EXPECT_FALSE(advice_.planned && i > 1) << i;
    foresight_.GiveUpPlan();
  }
  foresight_.EndCapture();
  while (!blocks_.empty()) Free(blocks_.begin()->first);
  EXPECT_GE(Capture(kProgram, 20), 1) << "the next capture is planned again";
}

// A pool that is one range from the beginning, with room for all that is asked for: what is planned
// needs neither growth nor mapping.
class RoomyTest : public ForesightTest {
 protected:
  void SetUp() override {
    MapNew(std::vector<std::string>(700, "...."));
    Capture(kProgram, 1);
    Capture(kProgram, 2);
  }
  // At which scale to the guide each block was seen, and which were placed by a plan.
  std::vector<double> Scales() const {
    std::vector<double> scales;
    for (const Foresight::Advice& advice : advices_) scales.push_back(advice.match.scale);
    return scales;
  }
  std::vector<bool> Planned() const {
    std::vector<bool> planned;
    for (const Foresight::Advice& advice : advices_) planned.push_back(advice.planned);
    return planned;
  }
};

TEST_F(RoomyTest, ALikelyScaleIsPlanned) {
  const int plans = plans_;
  Capture(kProgram, 2 * 16);
  EXPECT_EQ(plans_, plans + 1);
  EXPECT_EQ(Scales(), std::vector<double>(kProgram.size(), 16));
  EXPECT_EQ(Planned(), std::vector<bool>(kProgram.size(), true));
}

// The first block is too large to tell the scale, so the plan that it lies in is for another one
// than the second tells.
TEST_F(RoomyTest, AScaleThatIsMostLikelyAMistakeIsNotPlannedNorIsAnotherScalesPlanFollowed) {
  Capture(kProgram, 2 * 17);
  EXPECT_EQ(Scales(), (std::vector<double>{0, 17, 17, 17, 17, 17, 17}));
  EXPECT_EQ(Planned(), (std::vector<bool>{true, false, false, false, false, false, false}));
}

// Each block is to the one before it as two of the guide's are, but at another scale.
TEST_F(RoomyTest, ACaptureGetsThreePlansAtMost) {
  Capture({{36}, {120}, {33}, {44}, {220}}, 1);
  EXPECT_EQ(Scales(), (std::vector<double>{3, 2, 1.5, 2, 220.0 / 60}));
  EXPECT_EQ(Planned(), (std::vector<bool>{true, true, true, false, false}));
  EXPECT_LE(advice_.match.missed, 2U) << "that would be a reason of its own";
}

// --- Places taken, and survivors ---

// More pages than the program needs, and a granule that lives where a block of it lay.
class TakenPlaceTest : public ForesightTest {
 protected:
  void TakePlaceOf(std::size_t step) {
    const Placement place = places_[step];
    Take(ranges_.page_at(place.slot), static_cast<uint32_t>(place.offset.count()), 1);
    blocks_.emplace(-1, LiveBlock{.pieces = {used_.back()}, .ticket = {}, .granules = 1});
    used_.pop_back();
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

TEST_F(TakenPlaceTest, NothingIsMappedForThePlanOfACaptureNoLargerThanItsGuide) {
  MapNew(std::vector<std::string>(21, "...."));
  MapNew(std::vector<std::string>(5, "...."));
  Capture(kProgram, 1);
  TakePlaceOf(3);
  EXPECT_GE(Capture(kProgram, 1), 1);
  for (const Foresight::Advice& advice : advices_) EXPECT_FALSE(advice.spot && advice.spot->growth);
}

TEST_F(TakenPlaceTest, AHomeThatWouldHaveToBeMappedFirstIsNotWorthIt) {
  MapNew(std::vector<std::string>(12, "...."));
  MapNew(std::vector<std::string>(12, "...."));
  Capture(kProgram, 1);
  TakePlaceOf(0);
  EXPECT_EQ(Capture(kProgram, 1), 0);
}

// Before a block of the guide's finds its place taken, so many blocks answer to nothing: small
// ones, that go beside what stayed, so that they need no plan themselves.
class OddBlocksTest : public TakenPlaceTest, public ::testing::WithParamInterface<uint32_t> {};

TEST_P(OddBlocksTest, AGuideThatMoreThanTwoDoNotAnswerToIsNone) {
  MapNew(std::vector<std::string>(28, "...."));
  Capture(kProgram, 1);
  TakePlaceOf(3);
  Settle();
  const uint32_t odd = GetParam();
  Program program = kProgram;
  for (Step& step : program) step.freed_at += odd;
  for (uint32_t i = 1; i <= odd; ++i) program.insert(program.begin() + i, Step{2, i + 1});
  EXPECT_EQ(Capture(program, 1) > 0, odd <= 2);
  EXPECT_EQ(advice_.match.missed, odd);
}

INSTANTIATE_TEST_SUITE_P(Odd, OddBlocksTest, ::testing::Range(1U, 5U));

TEST_F(ForesightTest, WhatLivesOnSinceTheLastCaptureIsPlannedAround) {
  Program program = kProgram;
  program.push_back({8, kNever});
  for (int capture = 0; capture < 6; ++capture) {
    Capture(program, 1);
    EXPECT_LE(uint64_t{ranges_.page_count()} * kP, most_live_ + 4 * kP);
    Settle();
  }
}

// A guide of two small blocks, of which the first stays.
class SurvivorTest : public ForesightTest {
 protected:
  void SetUp() override {
    Capture({{2, kNever}, {3, 2}, {2, 3}, {20, 4}}, 1);
    Settle();
    guide_ = places_;
    foresight_.BeginCapture();
  }
  PageId SettledPage() const { return ranges_.page_at(guide_[0].slot); }
  std::vector<Placement> guide_;
};

TEST_F(SurvivorTest, ASmallBlockOfWhichNothingIsKnownGoesBesideThoseThatStayed) {
  Allocate(1);
  EXPECT_FALSE(advice_.match.step.has_value());
  ASSERT_TRUE(advice_.spot.has_value());
  EXPECT_FALSE(advice_.planned);
  EXPECT_EQ(ranges_.page_at(start_.slot), SettledPage());
}

TEST_F(SurvivorTest, ASmallBlockThatIsKnownToStayGoesBesideThoseThatStayed) {
  Allocate(2);
  EXPECT_EQ(advice_.match.step, 0U);
  ASSERT_TRUE(advice_.spot.has_value());
  EXPECT_FALSE(advice_.planned);
  EXPECT_EQ(ranges_.page_at(start_.slot), SettledPage());
}

TEST_F(SurvivorTest, ASmallBlockThatIsKnownToGoDoesNotGoBesideThoseThatStayed) {
  Allocate(2);
  Allocate(3);
  ASSERT_TRUE(advice_.spot.has_value());
  EXPECT_EQ(start_.slot, guide_[1].slot);
  EXPECT_EQ(start_.offset, guide_[1].offset);
}

}  // namespace
}  // namespace cgp
