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

namespace cgp {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr PoolId kOne{0, 1};
constexpr PoolId kTwo{0, 2};
constexpr PoolId kUnknown{9, 9};
constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr uint64_t kPage = 4096;

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

TEST(PoolIdTest, PrintsBothNumbers) {
  EXPECT_THAT(ToString(PoolId{17, 4}), AllOf(HasSubstr("17"), HasSubstr("4")));
}

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

TEST_F(PoolSetTest, ListsItsPools) {
  EXPECT_THAT(set_->ids(), IsEmpty());
  set_->Retain(kTwo);
  set_->Retain(kOne);
  EXPECT_THAT(set_->ids(), ElementsAre(kOne, kTwo));
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

TEST_F(PoolSetTest, RefusesAScopeWithinAScope) {
  Begin(kOne);
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->BeginScope(kOne, ScopeKind::kEager); }),
              HasSubstr(ToString(kOne)));
  EXPECT_EQ(set_->UseCount(kOne), 1) << "the refused scope counts for nothing";
  Allocate(kOne, 1);
  End(kOne);
  EXPECT_THROW(set_->EndScope(kOne), UsageError);
}

TEST_F(PoolSetTest, ScopesOfDifferentPoolsMayCross) {
  Begin(kOne);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block one = Allocate(kOne, kPage);
  set_->EndScope(kOne);
  const Block two = Allocate(kTwo, kPage);
  End(kTwo);
  EXPECT_EQ(PoolOf(*set_, one.address), kOne);
  EXPECT_EQ(PoolOf(*set_, two.address), kTwo);
}

TEST_F(PoolSetTest, AllocatesOnlyInAnOpenScope) {
  set_->Retain(kOne);
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->Allocate(kOne, 512, kA); }),
              HasSubstr(ToString(kOne)));
  Begin(kOne);
  End(kOne);
  EXPECT_THROW(set_->Allocate(kOne, 512, kA), UsageError);
  EXPECT_EQ(set_->Stats(kOne).pages, 0U);
}

TEST_F(PoolSetTest, RefusesDoubleAndForeignFrees) {
  Begin(kOne);
  const Block block = Allocate(kOne, 4096);
  Allocate(kOne, 4096);
  set_->Free(block.address);
  const auto names_address =
      ::testing::AnyOf(HasSubstr(std::to_string(block.address)), HasSubstr("0x"));
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->Free(block.address); }), names_address);
  EXPECT_THAT(MessageOf<UsageError>([&] { set_->RecordUse(block.address, kB); }), names_address);
  EXPECT_THROW(set_->Free(0), UsageError);
  EXPECT_THROW(set_->Free(12345), UsageError);
  EXPECT_EQ(set_->Stats(kOne).frees, 1U);
  End(kOne);
}

TEST_F(PoolSetTest, WhoeverTriesIsToldWhoseTheBlockIs) {
  Begin(kOne);
  const Block block = Allocate(kOne, 3000);
  EXPECT_TRUE(set_->TryRecordUse(block.address, kA));
  EXPECT_FALSE(set_->TryRecordUse(block.address + 512, kA));
  EXPECT_EQ(set_->TryFree(block.address + 512), std::nullopt);
  const std::optional<Block> freed = set_->TryFree(block.address);
  ASSERT_TRUE(freed.has_value());
  EXPECT_EQ(freed->address, block.address);
  EXPECT_EQ(freed->bytes, block.bytes);
  EXPECT_EQ(freed->requested_bytes, 3000U);
  EXPECT_EQ(freed->stream, kA);
  EXPECT_EQ(set_->TryFree(block.address), std::nullopt);
  EXPECT_FALSE(set_->TryRecordUse(block.address, kA));
  EXPECT_EQ(set_->Stats(kOne).frees, 1U);
  End(kOne);
}

TEST_F(PoolSetTest, ATriedUseHoldsTheMemoryToo) {
  Begin(kOne);
  const Block block = Allocate(kOne, kPage);
  EXPECT_TRUE(set_->TryRecordUse(block.address, kB));
  set_->Free(block.address);
  Allocate(kOne, kPage);
  EXPECT_EQ(set_->Stats(kOne).pages, 2U);
  End(kOne);
}

TEST_F(PoolSetTest, FindsBlocksByAnyAddressAndPoolsByTheFirst) {
  Begin(kOne);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block one = Allocate(kOne, 3 * kPage);
  const Block two = Allocate(kTwo, 3 * kPage, kB);
  EXPECT_EQ(set_->Find(one.address + kPage)->address, one.address);
  EXPECT_EQ(set_->Find(two.address + 3 * kPage - 1)->stream, kB);
  EXPECT_EQ(PoolOf(*set_, two.address), kTwo);
  EXPECT_EQ(PoolOf(*set_, two.address + 512), std::nullopt);
  EXPECT_EQ(set_->Find(0), std::nullopt);
  set_->Free(one.address);
  EXPECT_EQ(set_->Find(one.address), std::nullopt);
  EXPECT_EQ(PoolOf(*set_, one.address), std::nullopt);
  End(kTwo);
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

TEST_F(PoolSetTest, PoolsShareNothing) {
  Begin(kOne);
  set_->Free(Allocate(kOne, 4 * kPage).address);
  End(kOne);
  Begin(kTwo);
  Allocate(kTwo, 4 * kPage);
  End(kTwo);
  EXPECT_EQ(set_->Stats(kOne).pages, 4U);
  EXPECT_EQ(set_->Stats(kTwo).pages, 4U);
  const SetUsage usage = set_->Usage();
  EXPECT_EQ(usage.reserved_bytes.current, 8 * kPage);
  EXPECT_EQ(usage.all.bytes.current, 4 * kPage);
  EXPECT_EQ(usage.all.count.added, 2U);
  EXPECT_EQ(usage.all.count.removed, 1U);
  EXPECT_EQ(usage.all.count.current, 1U);
}

bool Is(const Gauge& gauge, uint64_t current, uint64_t peak, uint64_t added, uint64_t removed) {
  return gauge.current == current && gauge.peak == peak && gauge.added == added &&
         gauge.removed == removed;
}

TEST_F(PoolSetTest, UsageIsThatOfAllPoolsTogether) {
  Begin(kOne);
  const Block one = Allocate(kOne, 4 * kPage - 1);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block two = Allocate(kTwo, 2 * kPage);
  set_->Free(one.address);
  Allocate(kTwo, kPage);
  SetUsage usage = set_->Usage();
  EXPECT_TRUE(Is(usage.all.count, 2, 2, 3, 1));
  EXPECT_TRUE(Is(usage.all.bytes, 3 * kPage, 6 * kPage, 7 * kPage, 4 * kPage));
  EXPECT_TRUE(
      Is(usage.all.requested_bytes, 3 * kPage, 6 * kPage - 1, 7 * kPage - 1, 4 * kPage - 1));
  EXPECT_TRUE(Is(usage.reserved_bytes, 7 * kPage, 7 * kPage, 7 * kPage, 0));

  set_->ResetPeaks();
  set_->ResetTraffic();
  set_->Free(two.address);
  End(kTwo);
  set_->EndScope(kOne);
  set_->Release(kOne);
  EXPECT_EQ(set_->Trim(), 4 * kPage);
  usage = set_->Usage();
  EXPECT_TRUE(Is(usage.all.count, 1, 2, 0, 1));
  EXPECT_TRUE(Is(usage.all.bytes, kPage, 3 * kPage, 0, 2 * kPage));
  EXPECT_TRUE(Is(usage.all.requested_bytes, kPage, 3 * kPage, 0, 2 * kPage));
  EXPECT_TRUE(Is(usage.reserved_bytes, 3 * kPage, 7 * kPage, 0, 4 * kPage));
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

TEST_F(PoolSetTest, UsageHasTheHandlesAndTheFreeBytesOfAllPools) {
  Begin(kOne);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block one = Allocate(kOne, 2 * kPage);
  Allocate(kTwo, 512);
  set_->Free(one.address);
  SetUsage usage = set_->Usage();
  EXPECT_TRUE(Is(usage.handles, 3, 3, 3, 0));
  EXPECT_TRUE(Is(usage.free_bytes, 3 * kPage - 512, 3 * kPage - 512, 5 * kPage, 2 * kPage + 512));
  EXPECT_TRUE(Is(usage.free_extents, 2, 2, 2, 0)) << "two whole pages, and the rest of one";

  End(kOne);
  set_->EndScope(kTwo);
  set_->Release(kOne);
  EXPECT_EQ(set_->Trim(), 2 * kPage);
  usage = set_->Usage();
  EXPECT_TRUE(Is(usage.handles, 1, 3, 3, 2));
  EXPECT_EQ(usage.free_bytes.current, kPage - 512);
  EXPECT_TRUE(Is(usage.free_extents, 1, 2, 2, 1));
}

TEST_F(PoolSetTest, ANewPeakIsToldOnce) {
  EXPECT_FALSE(set_->TakeNewPeak());
  Begin(kOne);
  const Block first = Allocate(kOne, kPage);
  EXPECT_TRUE(set_->TakeNewPeak());
  EXPECT_FALSE(set_->TakeNewPeak());
  set_->Free(first.address);
  Allocate(kOne, kPage);
  EXPECT_FALSE(set_->TakeNewPeak()) << "there was as much before";
  Allocate(kOne, 1);
  EXPECT_TRUE(set_->TakeNewPeak());
  End(kOne);
}

TEST_F(PoolSetTest, WhatFailsCountsForNothing) {
  Begin(kOne);
  faulty_.Arm({.only = DriverCall::kMap});
  EXPECT_THROW(set_->Allocate(kOne, kPage, kA), DriverError);
  faulty_.Disarm();
  const SetUsage usage = set_->Usage();
  EXPECT_TRUE(Is(usage.all.count, 0, 0, 0, 0));
  EXPECT_TRUE(Is(usage.reserved_bytes, 0, 0, 0, 0));
  End(kOne);
}

// --- Giving back ---

TEST_F(PoolSetTest, TrimsUnusedPoolsOnceTheDeviceIsDone) {
  MakeUnused(kOne, 3);
  EXPECT_TRUE(set_->Contains(kOne)) << "until its memory is given back";
  EXPECT_EQ(set_->TrimmableBytes(), 3 * kPage);
  EXPECT_EQ(set_->Trim(), 3 * kPage);  // the watch would note an Unmap() without a Quiesce()
  EXPECT_EQ(watch_.quiesce_calls(), 1U);
  EXPECT_FALSE(set_->Contains(kOne));
  EXPECT_EQ(host_.usage(), HostUsage{});
  EXPECT_EQ(set_->TrimmableBytes(), 0U);
}

TEST_F(PoolSetTest, ATrimOfNothingDoesNotWaitForTheDevice) {
  EXPECT_EQ(set_->Trim(), 0U);
  Begin(kOne);
  set_->Free(Allocate(kOne, kPage).address);
  End(kOne);
  EXPECT_EQ(set_->Trim(), 0U) << "the graph still lives";
  EXPECT_EQ(watch_.quiesce_calls(), 0U);
  EXPECT_EQ(set_->Stats(kOne).pages, 1U);
}

TEST_F(PoolSetTest, ALiveBlockKeepsAReleasedPool) {
  Begin(kOne);
  const Block block = Allocate(kOne, kPage);
  End(kOne);
  set_->Release(kOne);
  EXPECT_EQ(set_->TrimmableBytes(), 0U);
  EXPECT_EQ(set_->Trim(), 0U);
  EXPECT_TRUE(set_->Contains(kOne));
  EXPECT_EQ(set_->UseCount(kOne), 0);
  EXPECT_THROW(set_->Release(kOne), UsageError);
  set_->Free(block.address);
  EXPECT_EQ(set_->Trim(), kPage);
  EXPECT_FALSE(set_->Contains(kOne));
}

TEST_F(PoolSetTest, TrimLeavesPoolsInUseAlone) {
  MakeUnused(kOne, 2);
  Begin(kTwo);
  const Block block = Allocate(kTwo, 3 * kPage);
  End(kTwo);
  EXPECT_EQ(set_->Trim(), 2 * kPage);
  EXPECT_EQ(set_->Stats(kTwo).pages, 3U);
  EXPECT_TRUE(watch_.Accessible(block.address, block.bytes));
}

TEST_F(PoolSetTest, ATrimOfOnePoolLeavesTheOthersAlone) {
  MakeUnused(kOne, 2);
  MakeUnused(kTwo, 3);
  EXPECT_EQ(set_->Trim(kOne), 2 * kPage);
  MakeUnused(kOne, 5);
  EXPECT_EQ(set_->Trim(kTwo), 3 * kPage);
  EXPECT_EQ(set_->Trim(), 5 * kPage);
}

TEST_F(PoolSetTest, APoolTakenUpAgainBeforeATrimKeepsItsMemory) {
  MakeUnused(kOne, 3);
  Begin(kOne);
  EXPECT_EQ(set_->TrimmableBytes(), 0U);
  Allocate(kOne, 3 * kPage);
  End(kOne);
  EXPECT_EQ(set_->Stats(kOne).pages, 3U);
}

TEST_F(PoolSetTest, APoolMadeAnewAfterATrimStartsAnew) {
  MakeUnused(kOne, 3);
  set_->Trim();
  set_->Retain(kOne);
  const PoolStats stats = set_->Stats(kOne);
  EXPECT_EQ(stats.pages, 0U);
  EXPECT_EQ(stats.allocations, 0U);
  EXPECT_EQ(stats.peak_reserved_bytes, 0U);
}

TEST_F(PoolSetTest, APendingEagerFreeDoesNotKeepAPool) {
  Begin(kOne, ScopeKind::kEager);
  const Block block = Allocate(kOne, kPage);
  watch_.Submit(kA);
  set_->Free(block.address);
  End(kOne);
  set_->Release(kOne);
  EXPECT_EQ(set_->Trim(), kPage) << "after having waited for the device";
  EXPECT_EQ(watch_.events(), 0U);
}

TEST_F(PoolSetTest, AFailedQuiesceLeavesThePoolsAsTheyWere) {
  MakeUnused(kOne, 2);
  faulty_.Arm({.only = DriverCall::kQuiesce});
  EXPECT_THROW(set_->Trim(), DriverError);
  EXPECT_EQ(set_->TrimmableBytes(), 2 * kPage);
  faulty_.Disarm();
  EXPECT_EQ(set_->Trim(), 2 * kPage);
}

TEST_F(PoolSetTest, ACaptureOnlyGrows) {
  MakeUnused(kTwo, 2);
  Begin(kOne);
  const CaptureId capture = host_.graphs().Begin(kA);
  host_.graphs().Wait(kB, host_.graphs().Record(kA));
  Block block = Allocate(kOne, kPage);
  for (uint64_t i = 2; i < 40; ++i) {
    const Block next = Allocate(kOne, i * 700, i % 3 == 0 ? kB : kA);
    if (i % 5 == 0) set_->RecordUse(block.address, kB);
    set_->Free(block.address);
    block = next;
  }
  host_.graphs().End(capture);
  End(kOne);
  EXPECT_EQ(watch_.quiesce_calls(), 0U);
}

// --- Running out ---

TEST(PoolSetLimitTest, SaysWhatIsHeldAndWhatWasAskedFor) {
  HostDriver host(
      {.device = 3, .granularity = kPage, .physical_limit_bytes = 8 * kPage, .map_memory = false});
  PoolSet set(host);
  set.BeginScope(kOne, ScopeKind::kCapture);
  set.Allocate(kOne, 6 * kPage, kA);
  const std::string text = MessageOf<OutOfMemoryError>([&] { set.Allocate(kOne, 12345, kA); });
  EXPECT_THAT(text, HasSubstr("12345")) << "what was asked for";
  EXPECT_THAT(text, HasSubstr("device 3"));
  EXPECT_EQ(set.Stats(kOne).pages, 6U);
  set.Check();
  set.Allocate(kOne, 2 * kPage, kA);
}

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

TEST(PoolSetLimitTest, ATrimMakesRoom) {
  HostDriver host({.granularity = kPage, .physical_limit_bytes = 8 * kPage, .map_memory = false});
  PoolSet set(host);
  set.BeginScope(kOne, ScopeKind::kCapture);
  set.Free(set.Allocate(kOne, 6 * kPage, kA).address);
  set.EndScope(kOne);
  set.Release(kOne);
  set.BeginScope(kTwo, ScopeKind::kEager);
  EXPECT_THROW(set.Allocate(kTwo, 6 * kPage, kA), OutOfMemoryError);
  EXPECT_EQ(set.Trim(), 6 * kPage);
  set.Allocate(kTwo, 6 * kPage, kA);
}

// --- Peers ---

TEST_F(PoolSetTest, LetsAPeerIntoEverythingNowAndLater) {
  Begin(kOne);
  const Block before = Allocate(kOne, 3 * kPage);
  set_->BeginScope(kTwo, ScopeKind::kCapture);
  const Block other = Allocate(kTwo, kPage);
  set_->EnablePeer(5);
  const Block after = Allocate(kOne, 9 * kPage);
  for (const Block& block : {before, other, after}) {
    EXPECT_TRUE(host_.CanAccess(block.address, block.bytes, 5));
    EXPECT_TRUE(host_.CanAccess(block.address, block.bytes, host_.device()));
  }
  End(kTwo);
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
