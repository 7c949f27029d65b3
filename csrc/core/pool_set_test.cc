// What pool_set.h says of all pools of a device: who uses them, whose an address is, what is given
// back and when.
#include "core/pool_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "driver/faulty_driver.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"
#include "testing/pool_of.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PoolId kOne{0, 1};
constexpr PoolId kTwo{0, 2};
constexpr PoolId kUnknown{9, 9};

// The message of the exception of type E that `call` throws.
template <typename E, typename Call>
std::string MessageOf(const Call& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

class PoolSetTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_NO_THROW(set_->Check());
    watch_.Quiesce();
    set_.reset();
    EXPECT_THAT(watch_.violations(), IsEmpty());
    EXPECT_EQ(host_.usage(), HostUsage{});
    EXPECT_EQ(watch_.events(), 0U);
  }

  Block Allocate(PoolId id, uint64_t bytes, StreamId stream = kA) {
    const Block block = set_->Allocate(id, bytes, stream);
    watch_.MarkUsed();
    return block;
  }

  void Begin(PoolId id, ScopeKind kind = ScopeKind::kCapture) {
    set_->BeginScope(id, kind);
    watch_.set_capturing(kind == ScopeKind::kCapture);
  }

  void End(PoolId id) {
    watch_.set_capturing(false);
    set_->EndScope(id);
  }

  // A pool that was used by one graph, which is gone: `pages` pages and no live block.
  void MakeUnused(PoolId id, uint64_t pages) {
    Begin(id);
    set_->Free(Allocate(id, pages * kPage).address);
    End(id);
    set_->Release(id);
  }

  HostDriver host_{{.granularity = kPage, .map_memory = false}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  std::unique_ptr<PoolSet> set_ = std::make_unique<PoolSet>(faulty_);
};

TEST_F(PoolSetTest, CountsUsers) {
  EXPECT_FALSE(set_->Contains(kOne));
  EXPECT_EQ(set_->UseCount(kOne), 0);
  set_->Retain(kOne);
  EXPECT_TRUE(set_->Contains(kOne));
  EXPECT_EQ(set_->UseCount(kOne), 1);
  Begin(kOne);
  EXPECT_EQ(set_->UseCount(kOne), 2);
  End(kOne);
  EXPECT_EQ(set_->UseCount(kOne), 2) << "the graph lives on";
  set_->Release(kOne);
  set_->Release(kOne);
  EXPECT_FALSE(set_->Contains(kOne)) << "no user, no block, no memory";
}

TEST_F(PoolSetTest, RefusesUnknownPoolsAndNamesThem) {
  const auto names_it = AllOf(HasSubstr("9"), HasSubstr(ToString(kUnknown)));
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->Release(kUnknown); }), names_it);
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->EndScope(kUnknown); }), names_it);
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->Allocate(kUnknown, 1, kA); }), names_it);
  EXPECT_THAT(MessageOf<UsageError>([&] { (void)set_->Stats(kUnknown); }), names_it);
  EXPECT_THAT(MessageOf<UsageError>([&] { (void)set_->Snapshot(kUnknown); }), names_it);
  EXPECT_THAT(set_->ids(), IsEmpty());
}

TEST_F(PoolSetTest, ReservedIsWhatWasNotGivenBack) {
  Begin(kOne);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block one = Allocate(kOne, 3 * kPage);
  const Block two = Allocate(kTwo, 3 * kPage, kB);
  EXPECT_TRUE(set_->HasReserved(one.address + 3 * kPage - 1));
  EXPECT_FALSE(set_->HasReserved(0));
  EXPECT_FALSE(set_->HasReserved(~Address{0}));
  for (const Block& block : {one, two}) set_->Free(block.address);
  EXPECT_TRUE(set_->HasReserved(one.address)) << "no block has it, but the pool";
  End(kOne);
  End(kTwo);
  set_->Release(kOne);
  set_->Trim();
  EXPECT_FALSE(set_->HasReserved(one.address));
  EXPECT_TRUE(set_->HasReserved(two.address));
}

bool Is(const Gauge& gauge, uint64_t current, uint64_t peak, uint64_t added, uint64_t removed) {
  return gauge.current == current && gauge.peak == peak && gauge.added == added &&
         gauge.removed == removed;
}

TEST_F(PoolSetTest, PeaksBelowTheLevelsAreNoNewOnes) {
  Begin(kOne);
  const Block one = Allocate(kOne, 2 * kPage);
  SetUsage levels;
  levels.ForEachPair(levels, [](Gauge& gauge, const Gauge&) { gauge.peak = 4 * kPage; });
  set_->ResetPeaks(levels);
  set_->TakeNewPeak();
  const Block two = Allocate(kOne, 2 * kPage);
  EXPECT_FALSE(set_->HasNewPeak());
  EXPECT_EQ(set_->Usage().all.bytes.peak, 4 * kPage);
  const Block three = Allocate(kOne, 512);
  EXPECT_TRUE(set_->TakeNewPeak());
  EXPECT_EQ(set_->Usage().all.bytes.peak, 4 * kPage + 512);
  for (const Block& block : {one, two, three}) set_->Free(block.address);
  set_->ResetPeaks();
  EXPECT_EQ(set_->Usage().all.bytes.peak, 0U);
  EXPECT_EQ(set_->Usage().all.bytes.most, 4 * kPage + 512) << "whoever resets what";
  End(kOne);
}

// Pages are the pool's, not the driver's.
TEST(PoolSetPageTest, BlocksOfWholePagesShareNone) {
  constexpr uint64_t kGranularity = uint64_t{2} << 20;
  HostDriver driver{HostDriverOptions{.map_memory = false}};
  PoolSet set(driver, {.page_bytes = 2 * kGranularity});
  set.BeginScope(kOne, ScopeKind::kCapture);
  const Block small = set.Allocate(kOne, 1000, StreamId{1}, {}, /*whole_pages=*/true);
  EXPECT_EQ(small.bytes, 2 * kGranularity);
  EXPECT_EQ(small.requested_bytes, 1000U);
  EXPECT_EQ(set.Pieces(small.address).size(), 1U);
  EXPECT_THROW(set.Allocate(kOne, ~uint64_t{0} - 1, StreamId{1}, {}, true), OutOfMemoryError);
  set.Free(small.address);
  set.EndScope(kOne);
}

TEST_F(PoolSetTest, EachPoolsPhysicalMemoryIsCountedByItself) {
  EXPECT_THAT(set_->ReservedByPool(), IsEmpty());
  Begin(kOne);
  const Block one = Allocate(kOne, 4 * kPage);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  Allocate(kTwo, kPage);
  std::map<PoolId, Gauge> reserved = set_->ReservedByPool();
  EXPECT_EQ(reserved.size(), 2U);
  EXPECT_TRUE(Is(reserved[kOne], 4 * kPage, 4 * kPage, 4 * kPage, 0));
  EXPECT_TRUE(Is(reserved[kTwo], kPage, kPage, kPage, 0));

  set_->ResetPeaksByPool();
  set_->ResetTraffic();
  Allocate(kTwo, 2 * kPage);
  set_->Free(one.address);
  reserved = set_->ReservedByPool();
  EXPECT_TRUE(Is(reserved[kOne], 4 * kPage, 4 * kPage, 0, 0)) << "free, and held";
  EXPECT_TRUE(Is(reserved[kTwo], 3 * kPage, 3 * kPage, 2 * kPage, 0));
  End(kTwo);
  set_->EndScope(kOne);
  set_->Release(kOne);
  set_->Trim();
  set_->ResetPeaks();  // of all together, which each new one of theirs does
  reserved = set_->ReservedByPool();
  EXPECT_TRUE(Is(reserved[kOne], 0, 4 * kPage, 0, 4 * kPage)) << "gone, and remembered";
  EXPECT_TRUE(Is(reserved[kTwo], 3 * kPage, 3 * kPage, 2 * kPage, 0));
  set_->ResetPeaksByPool();
  EXPECT_TRUE(Is(set_->ReservedByPool()[kOne], 0, 0, 0, 4 * kPage));
}

TEST_F(PoolSetTest, OnlyTheLastPoolsThatAreGoneAreRemembered) {
  constexpr uint64_t kPools = 250;
  for (uint64_t n = 1; n <= kPools; ++n) {
    const PoolId id{0, n};
    set_->BeginScope(id, ScopeKind::kCapture);
    set_->Free(Allocate(id, kPage).address);
    set_->EndScope(id);
    set_->Release(id);
    watch_.Quiesce();
    EXPECT_EQ(set_->Trim(), kPage);
  }
  const std::map<PoolId, Gauge> reserved = set_->ReservedByPool();
  EXPECT_EQ(reserved.size(), 100U);
  EXPECT_EQ(reserved.begin()->first, (PoolId{0, kPools - 99}));
}

// --- Giving back ---

TEST_F(PoolSetTest, ATrimOfOnePoolLeavesTheOthersAlone) {
  MakeUnused(kOne, 2);
  MakeUnused(kTwo, 3);
  EXPECT_EQ(set_->Trim(kOne), 2 * kPage);
  MakeUnused(kOne, 5);
  EXPECT_EQ(set_->Trim(kTwo), 3 * kPage);
  EXPECT_EQ(set_->Trim(), 5 * kPage);
}

// --- Running out ---

constexpr char kAdvice[] =
    ". Users are graphs and objects such as GraphPool: once they are gone a pool gives back what "
    "it holds. cudagraph_pool.report() says what each graph takes";

TEST_F(PoolSetTest, SaysWhatItsPoolsHold) {
  EXPECT_EQ(set_->Describe(), "");
  Begin(kOne);
  EXPECT_EQ(set_->Describe(kOne), "") << "it holds nothing yet";
  const Block kept = Allocate(kOne, kPage);
  set_->Free(Allocate(kOne, 2 * kPage).address);
  End(kOne);
  set_->Retain(kOne);
  const std::string one =
      "pool (0, 1) holds 12.00 KiB (4.00 KiB in live blocks, 8.00 KiB free) "
      "for 2 user(s)";
  EXPECT_EQ(set_->Describe(),
            "cudagraph_pool: graph pools of GPU 0 hold 12.00 KiB (4.00 KiB in live blocks, 8.00 "
            "KiB free): " +
                one + kAdvice);
  set_->Release(kOne);
  set_->Release(kOne);
  EXPECT_THAT(set_->Describe(), HasSubstr("for 0 user(s)")) << "a block keeps it";
  set_->Free(kept.address);
  set_->Trim();
  EXPECT_EQ(set_->Describe(), "");
}

TEST_F(PoolSetTest, NamesTheLargestPoolsAndFirstTheOneThatWasAskedFor) {
  for (uint64_t number = 1; number <= 5; ++number) MakeUnused({0, number}, number);
  const auto names = [](const std::string& text) {
    std::string found;
    for (size_t at = text.find("pool ("); at != std::string::npos;
         at = text.find("pool (", at + 1)) {
      found += text.substr(at + 9, 1);
    }
    return found;
  };
  EXPECT_EQ(names(set_->Describe()), "543");
  EXPECT_EQ(names(set_->Describe(PoolId{0, 2})), "254");
  EXPECT_EQ(names(set_->Describe(kUnknown)), "543");
  EXPECT_THAT(set_->Describe(),
              HasSubstr("hold 60.00 KiB (0 bytes in live blocks, 60.00 KiB free)"));
  EXPECT_THAT(set_->Describe(), HasSubstr("; 2 more."));
}

// --- The end ---

TEST(PoolSetEndTest, WaitsForTheDeviceBeforeItTakesMemoryAway) {
  HostDriver host({.granularity = kPage, .map_memory = false});
  DriverWatch watch(host);
  {
    PoolSet set(watch);
    set.BeginScope(kOne, ScopeKind::kEager);
    set.Free(set.Allocate(kOne, kPage, kA).address);
    set.Allocate(kOne, 3 * kPage, kB);
    watch.MarkUsed();
  }
  EXPECT_EQ(host.usage(), HostUsage{});
  EXPECT_THAT(watch.violations(), IsEmpty());
}

}  // namespace
}  // namespace cgp
