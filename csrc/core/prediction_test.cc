// Captures that are predicted (predictor.h), seen through the pool.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/planning/capture_profile.h"
#include "core/pool.h"
#include "core/pool_test_pool.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;

// A block of so many bytes, freed before the step of that number; `scales` if it grows with the
// batch.
struct PredictionStep {
  uint64_t bytes = 0;
  uint32_t freed_at = CaptureProfile::kNever;
  bool scales = true;
};

class PredictionTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kSmallPage = 4096;

  void TearDown() override {
    faulty_.Disarm();
    EXPECT_NO_THROW(pool_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), IsEmpty());
  }

  // Allocates with everything checked that holds after each call.
  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = pool_.Allocate(bytes, stream);
    watch_.MarkUsed();
    uint64_t sum = 0;
    for (const PhysicalPiece& piece : pool_.Pieces(block.address)) {
      sum += piece.length_bytes;
      EXPECT_LE(piece.offset_bytes + piece.length_bytes, kSmallPage);
      for (uint64_t b = 0; b < piece.length_bytes; b += kGranule) {
        const std::pair granule{Index(piece.page), piece.offset_bytes + b};
        EXPECT_TRUE(taken_.insert(granule).second) << "held by another block";
        const auto freed = freed_by_.find(granule);
        EXPECT_TRUE(freed == freed_by_.end() || freed->second == stream)
            << "freed by another stream of this capture";
      }
    }
    EXPECT_EQ(sum, block.bytes);
    EXPECT_EQ(pool_.reserved_bytes(), pool_.Stats().pages * kSmallPage);
    pool_.Check();
    minimum_ = std::max(minimum_, pool_.Stats().allocated_bytes);
    return block;
  }

  void Free(Address address) {
    const StreamId stream = pool_.Find(address)->stream;
    for (const PhysicalPiece& piece : pool_.Pieces(address)) {
      for (uint64_t b = 0; b < piece.length_bytes; b += kGranule) {
        const std::pair granule{Index(piece.page), piece.offset_bytes + b};
        freed_by_[granule] = stream;
        taken_.erase(granule);
      }
    }
    pool_.Free(address);
    pool_.Check();
  }

  using Streams = std::function<StreamId(std::size_t step)>;

  // Captures the first `count` steps with this batch. What no step of them frees is freed behind
  // the last, but for what stays: that is returned.
  std::vector<Block> Capture(
      const std::vector<PredictionStep>& program, uint64_t batch,
      std::size_t count = ~std::size_t{0},
      const Streams& stream_of = [](std::size_t) { return kA; }) {
    freed_by_.clear();
    pool_.BeginScope(kind_);
    std::map<std::size_t, Block> live;
    const auto free_due = [&](std::size_t step) {
      std::erase_if(live, [&](const auto& entry) {
        if (program[entry.first].freed_at > step) return false;
        Free(entry.second.address);
        return true;
      });
    };
    const std::size_t steps = std::min(count, program.size());
    for (std::size_t i = 0; i < steps; ++i) {
      free_due(i);
      live[i] = Place(program[i].bytes * (program[i].scales ? batch : 1), stream_of(i));
    }
    free_due(CaptureProfile::kNever - 1);
    pool_.EndScope();
    pool_.Check();
    std::vector<Block> stay;
    for (const auto& [step, block] : live) stay.push_back(block);
    return stay;
  }

  virtual Block Place(uint64_t bytes, StreamId stream) { return Allocate(bytes, stream); }

  uint64_t MinimumPages() const { return (minimum_ + kSmallPage - 1) / kSmallPage; }

  // All that a call that fails must leave as it was.
  std::string Describe() const {
    std::ostringstream text;
    const PoolSnapshot snapshot = pool_.Snapshot();
    const PoolStats& stats = snapshot.stats;
    text << stats.pages << ' ' << stats.page_mappings << ' ' << stats.allocated_bytes << ' '
         << stats.requested_bytes << ' ' << stats.allocations << ' ' << stats.frees;
    for (const auto& live : snapshot.blocks) {
      text << "\n" << live.block.address << '+' << live.block.bytes;
      for (const auto& piece : live.pieces)
        text << ' ' << Index(piece.page) << ':' << piece.offset_bytes;
    }
    for (const auto& range : snapshot.ranges) {
      text << "\nrange " << range.address;
      for (const PageId page : range.pages) text << ' ' << Index(page);
    }
    return text.str();
  }

  HostDriver host_{
      {.granularity = 4096, .physical_limit_bytes = uint64_t{1} << 40, .map_memory = false}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  Pool pool_{faulty_, {}};
  ScopeKind kind_ = ScopeKind::kCapture;                        // of Capture()
  std::set<std::pair<uint32_t, uint64_t>> taken_;               // granules of live blocks
  std::map<std::pair<uint32_t, uint64_t>, StreamId> freed_by_;  // in this capture
  uint64_t minimum_ = 0;                                        // bytes
};

// Small blocks first, so that the scale is trusted before the pool has to grow; and no size is
// another one's at a scale that the tests use.
const std::vector<PredictionStep> kNetwork{{11287, 3}, {17911, 5},  {14657, 4},
                                           {42013, 6}, {117281, 8}, {320011, 9},
                                           {49801, 8}, {240007, 9}, {27109, 9}};

// The same with the largest first, so that a plan has a place for all: it may use what the pool
// has grown by when a block comes, not before.
const std::vector<PredictionStep> kLargestFirst{{11287, 3},  {17911, 3},  {14657, 3},
                                                {320011, 9}, {240007, 9}, {117281, 8},
                                                {49801, 8},  {42013, 8},  {27109, 9}};

TEST_F(PredictionTest, ALargerCaptureMapsLittleMoreThanItGrowsBy) {
  Capture(kLargestFirst, 1);
  Capture(kLargestFirst, 2);
  Capture(kLargestFirst, 4);  // the first with a plan: its home has to be made
  for (const uint64_t batch : {5U, 8U, 9U, 12U}) {
    const PoolStats before = pool_.Stats();
    Capture(kLargestFirst, batch);
    const PoolStats after = pool_.Stats();
    EXPECT_LE(after.page_mappings - before.page_mappings, after.pages - before.pages + 4) << batch;
    EXPECT_LE(after.pages, MinimumPages() + 1) << batch;
  }
}

// As a transformer's, whose attention takes what the rest leaves free: each layer's input lies
// elsewhere.
TEST_F(PredictionTest, LayersThatAreAlikeComeToLieAlike) {
  pool_.BeginScope(ScopeKind::kCapture);
  const auto pages = [](double count) { return static_cast<uint64_t>(count * kSmallPage); };
  Address input = Allocate(pages(6.5)).address;
  uint64_t mapped = 0;
  for (int layer = 0; layer < 12; ++layer) {
    if (layer == 4) mapped = pool_.Stats().page_mappings;
    std::vector<Address> heads;
    for (int head = 0; head < 7; ++head) heads.push_back(Allocate(pages(10.5)).address);
    const Address scores = Allocate(pages(98.25)).address;
    Free(heads.back());
    const Address weights = Allocate(pages(98.25)).address;
    Free(scores);
    const Address output = Allocate(pages(6.5)).address;
    const Address dropped = Allocate(pages(98.25)).address;
    for (std::size_t head = 0; head + 1 < heads.size(); ++head) Free(heads[head]);
    Free(weights);
    Free(dropped);
    Free(input);
    input = output;
  }
  EXPECT_EQ(pool_.Stats().page_mappings, mapped);
  Free(input);
  pool_.EndScope();
}

// Where a block that takes a few granules of its last page lay apart from others, nothing uses the
// rest of it.
TEST(PredictionOfUnlikeBlocksTest, BlocksALittleLongerThanTheirPagesShareTheirLastOnes) {
  constexpr uint64_t kLargePage = 512 * kGranule;
  HostDriver host({.granularity = kLargePage, .map_memory = false});
  Pool pool(host, {});
  std::mt19937_64 random(5);
  pool.BeginScope(ScopeKind::kCapture);
  for (int round = 0; round < 6; ++round) {
    std::vector<Block> live;
    for (uint64_t i = 0; i < 60; ++i) {
      const uint64_t pages = i % 7 + 1;
      live.push_back(pool.Allocate(pages * (kLargePage + kGranule) + random() % 4 * kGranule, kA));
    }
    std::shuffle(live.begin(), live.end(), random);
    for (const Block& block : live) pool.Free(block.address);
  }
  pool.EndScope();
  const PoolStats stats = pool.Stats();
  EXPECT_LE(stats.reserved_bytes, stats.peak_allocated_bytes + 3 * kLargePage);
  pool.Check();
}

TEST_F(PredictionTest, ALargePoolGrowsByHandlesOfSeveralPages) {
  for (const uint64_t batch : {1U, 2U, 4U, 8U}) Capture(kLargestFirst, batch);
  const PoolStats before = pool_.Stats();
  Capture(kLargestFirst, 12);
  const PoolStats after = pool_.Stats();
  EXPECT_GT(after.pages, before.pages + 400);
  EXPECT_LE(after.page_mappings - before.page_mappings, (after.pages - before.pages) / 5);
}

// But for what would take a page more where its like lay.
TEST_F(PredictionTest, ASmallerCaptureMakesNoPageAndMapsLittle) {
  Capture(kNetwork, 6);
  const PoolStats before = pool_.Stats();
  for (const uint64_t batch : {6U, 5U, 3U, 4U, 1U, 2U}) Capture(kNetwork, batch);
  EXPECT_LE(pool_.Stats().page_mappings, before.page_mappings * 11 / 10);
  EXPECT_EQ(pool_.Stats().pages, before.pages);
}

TEST_F(PredictionTest, ACaptureLiesWhereItsWarmUpLay) {
  for (const uint64_t batch : {2U, 1U, 5U, 8U}) {
    kind_ = ScopeKind::kEager;
    Capture(kNetwork, batch);
    watch_.Quiesce();
    const PoolStats before = pool_.Stats();
    kind_ = ScopeKind::kCapture;
    Capture(kNetwork, batch);
    EXPECT_EQ(pool_.Stats().page_mappings, before.page_mappings) << batch;
    EXPECT_EQ(pool_.Stats().pages, before.pages) << batch;
  }
}

TEST_F(PredictionTest, WhatEagerWorkUnmappedIsNoPlaceAnyMore) {
  kind_ = ScopeKind::kEager;
  Capture(kNetwork, 8);
  const PoolStats before = pool_.Stats();
  watch_.Quiesce();
  pool_.BeginScope(ScopeKind::kEager);
  pool_.UnmapStale();
  EXPECT_LT(pool_.Stats().page_mappings, before.page_mappings);
  pool_.EndScope();
  Capture(kNetwork, 8);
  EXPECT_LE(pool_.Stats().pages, before.pages * 101 / 100);
}

TEST_F(PredictionTest, APoolThatIsToldSoPredictsNothing) {
  Pool plain(faulty_, {.predicts = false});
  const auto capture = [&] {
    plain.BeginScope(ScopeKind::kCapture);
    std::vector<Block> live;
    for (const uint64_t pages : {9U, 2U, 7U, 3U, 9U}) {
      live.push_back(plain.Allocate(pages * kSmallPage + kGranule, kA));
      if (live.size() < 3) continue;
      plain.Free(std::exchange(live[0], live[2]).address);
      live.pop_back();
    }
    for (const Block& block : live) plain.Free(block.address);
    plain.EndScope();
    return plain.Stats().page_mappings;
  };
  const uint64_t first = capture();
  EXPECT_GT(capture(), first) << "where blocks lay before is not known";
}

// Each capture begins as if it were sixteen times the profile, and then is not.
TEST_F(PredictionTest, AProfileThatIsWildlyWrongCostsNoPage) {
  Capture(kNetwork, 4);
  for (const uint64_t batch : {1U, 2U, 3U, 4U}) {
    std::vector<PredictionStep> program = kNetwork;
    for (std::size_t i = 0; i < batch; ++i) program[i].bytes *= 64 / batch;
    Capture(program, batch);
    EXPECT_LE(pool_.Stats().pages, MinimumPages() + 1) << batch;
  }
}

// However it goes on, a capture makes the pool hold no more than the profile would at its scale.
TEST_F(PredictionTest, ACaptureThatOnlyBeginsLikeItsProfileMakesThePoolGrowNoFurtherThanThat) {
  Capture(kNetwork, 1);
  Capture(kNetwork, 2);
  const uint64_t most = (minimum_ * 4 + kSmallPage - 1) / kSmallPage;
  for (std::size_t count = 1; count < kNetwork.size(); ++count) Capture(kNetwork, 8, count);
  EXPECT_LE(pool_.Stats().pages, most + most / 64 + 2);
}

TEST_F(PredictionTest, WhatAnotherStreamOfTheCaptureFreedIsNotTaken) {
  const auto alternating = [](std::size_t step) { return step % 2 == 0 ? kA : kB; };
  const auto shifted = [](std::size_t step) {
    return step % 3 == 0 ? kB : step % 3 == 1 ? kC : kA;
  };
  for (const uint64_t batch : {2U, 4U, 8U, 8U, 6U, 12U}) {
    Capture(kNetwork, batch, kNetwork.size(), alternating);
  }
  for (const uint64_t batch : {12U, 14U, 3U, 16U}) {
    Capture(kNetwork, batch, kNetwork.size(), shifted);
  }
}

TEST_F(PredictionTest, WhatEagerWorkKeepsIsPlannedAround) {
  Capture(kNetwork, 1);
  Capture(kNetwork, 2);
  pool_.BeginScope(ScopeKind::kEager);
  for (const uint64_t bytes : {9000U, 300U, 17000U}) Allocate(bytes);
  const Block gone = Allocate(5000);
  Free(gone.address);
  pool_.EndScope();
  for (const uint64_t batch : {4U, 8U, 3U}) Capture(kNetwork, batch);
  EXPECT_LE(pool_.Stats().pages, MinimumPages() + 3);
}

// --- Failures while a plan is followed ---

class PredictionFailureTest : public PredictionTest {
 protected:
  // Allocates with the fault armed. A call that fails changes nothing and succeeds when repeated.
  Block Place(uint64_t bytes, StreamId stream) override {
    if (!fault_) return Allocate(bytes, stream);
    const std::string before = Describe();
    const HostUsage usage = host_.usage();
    faulty_.Arm(*fault_);
    try {
      const Block block = Allocate(bytes, stream);
      survived_ += faulty_.failures();
      faulty_.Disarm();
      return block;
    } catch (const OutOfMemoryError&) {
      EXPECT_EQ(fault_->status, DriverStatus::kOutOfMemory);
    } catch (const DriverError& error) {
      EXPECT_EQ(error.status(), fault_->status);
    }
    faulty_.Disarm();
    ++failed_;
    EXPECT_EQ(Describe(), before);
    EXPECT_EQ(host_.usage(), usage);
    pool_.Check();
    return Allocate(bytes, stream);
  }

  std::optional<Fault> fault_;
  uint64_t failed_ = 0;    // calls of the pool
  uint64_t survived_ = 0;  // failed calls of the driver that no caller heard of
};

class PredictionEveryCallTest : public PredictionFailureTest,
                                public ::testing::WithParamInterface<uint64_t> {};

TEST_P(PredictionEveryCallTest, AnErrorLeavesEverythingAsItWas) {
  Capture(kNetwork, 1);
  Capture(kNetwork, 2);
  fault_ = Fault{.call_number = GetParam(), .status = DriverStatus::kFailed};
  Capture(kNetwork, 4);
  Capture(kNetwork, 8);
  EXPECT_GT(failed_, 0U);
  EXPECT_EQ(survived_, 0U) << "an error was swallowed";
  EXPECT_LE(pool_.Stats().pages, MinimumPages() + 1) << "it is still planned";
}

TEST_P(PredictionEveryCallTest, WithoutMemoryForThePlanABlockIsPlacedWithoutIt) {
  Capture(kLargestFirst, 1);
  Capture(kLargestFirst, 2);
  fault_ = Fault{.call_number = GetParam(), .status = DriverStatus::kOutOfMemory};
  Capture(kLargestFirst, 4);
  EXPECT_GT(survived_, 0U);
  Capture(kLargestFirst, 8);
  EXPECT_LE(pool_.Stats().pages, MinimumPages() + 3);
}

INSTANTIATE_TEST_SUITE_P(Calls, PredictionEveryCallTest, ::testing::Range<uint64_t>(1, 5));

TEST(PredictionLimitTest, APlanThatWantsMoreThanThereIsDoesNotStopWhatFits) {
  // The device has what the first steps of the third capture need, not what the profile predicts.
  HostDriver host({.granularity = 4096, .physical_limit_bytes = 900 * 4096, .map_memory = false});
  Pool pool(host, {});
  const auto capture = [&](uint64_t batch, std::size_t count) {
    pool.BeginScope(ScopeKind::kCapture);
    std::vector<Block> live;
    for (std::size_t i = 0; i < count; ++i) {
      live.push_back(pool.Allocate(kNetwork[i].bytes * batch, kA));
    }
    for (const Block& block : live) pool.Free(block.address);
    pool.EndScope();
    pool.Check();
  };
  capture(1, kNetwork.size());
  capture(2, kNetwork.size());
  EXPECT_NO_THROW(capture(6, 6));
  EXPECT_THROW(capture(6, kNetwork.size()), OutOfMemoryError);
  pool.EndScope();
  pool.Check();
}

// --- Random programs ---

enum class Sizes : uint8_t { kGrowing, kFalling, kShuffled };

class PredictionRandomTest : public PredictionTest,
                             public ::testing::WithParamInterface<std::tuple<Sizes, unsigned>> {
 protected:
  void SetUp() override {
    random_.seed(std::get<unsigned>(GetParam()));
    const std::size_t steps = 8 + random_() % 40;
    for (std::size_t i = 0; i < steps; ++i) {
      const uint64_t bytes = 1 + random_() % (random_() % 4 == 0 ? 6000 : 600);
      const auto freed_at = static_cast<uint32_t>(i + 1 + random_() % 8);
      program_.push_back({bytes, freed_at, random_() % 10 != 0});
      if (random_() % 14 == 0) program_.back().freed_at = CaptureProfile::kNever;
    }
  }

  std::vector<uint64_t> Batches() {
    std::vector<uint64_t> batches{4, 6, 8, 12, 16, 17, 24, 32};
    if (std::get<Sizes>(GetParam()) == Sizes::kFalling) std::ranges::reverse(batches);
    if (std::get<Sizes>(GetParam()) == Sizes::kShuffled) std::ranges::shuffle(batches, random_);
    return batches;
  }

  // Some of what outlived its capture goes before the next.
  void KeepSome(const std::vector<Block>& stay) {
    kept_.insert(kept_.end(), stay.begin(), stay.end());
    std::erase_if(kept_, [&](const Block& block) {
      if (random_() % 3 != 0) return false;
      Free(block.address);
      return true;
    });
  }

  std::mt19937 random_;
  std::vector<PredictionStep> program_;
  std::vector<Block> kept_;
};

// What is reserved beyond the minimum is the rest of pages that small survivors and edges keep from
// being whole, a few for each block that lives at the peak whatever the size of the pool. These
// pools are small, so it is a larger part than the 4 % that recorded programs came to at worst.
TEST_P(PredictionRandomTest, NoTwoBlocksShareAByteAndLittleIsReservedBeyondTheMinimum) {
  for (const uint64_t batch : Batches()) KeepSome(Capture(program_, batch));
  EXPECT_LE(pool_.Stats().pages, MinimumPages() * 110 / 100 + 2);
}

TEST_P(PredictionRandomTest, NorDoTheyWithSeveralStreams) {
  for (const uint64_t batch : Batches()) {
    const auto stream_of = [&](std::size_t) { return StreamId{1 + random_() % 3}; };
    KeepSome(Capture(program_, batch, program_.size(), stream_of));
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, PredictionRandomTest,
                         ::testing::Combine(::testing::Values(Sizes::kGrowing, Sizes::kFalling,
                                                              Sizes::kShuffled),
                                            ::testing::Range(0U, 12U)));

}  // namespace
}  // namespace cgp
