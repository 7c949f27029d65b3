// Leases where there is no memory, where the driver fails, and in large pools; what a loan has. What
// goes and comes back the fuzzer judges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "driver/faulty_driver.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

constexpr PoolId kId{1, 0};
constexpr uint64_t kLimit = 40 * kPage;

class LeasesTest : public ::testing::Test {
 protected:
  void TearDown() override {
    faulty_.Disarm();
    EXPECT_NO_THROW(set_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), ::testing::IsEmpty());
  }

  Block Allocate(uint64_t pages, PoolId id = kId) {
    const Block block = set_.Allocate(id, pages * kPage, kA);
    watch_.MarkUsed();
    return block;
  }
  // A graph that needs so many pages, and leaves none in use. Returns where; its name is in name_.
  Block Capture(uint64_t pages) {
    set_.BeginScope(kId, ScopeKind::kCapture);
    const Block scratch = Allocate(pages);
    set_.Free(scratch.address);
    set_.EndScope(kId);
    name_ = set_.NameCapture(kId);
    return scratch;
  }
  uint64_t Held() const { return watch_.handle_bytes() / kPage; }

  // Fails each driver call of `call` in turn, on a pool that `begin` has brought about, and judges
  // what is left; then the call goes through.
  void FailEach(const std::function<void()>& begin, const std::function<void()>& call,
                const std::function<void(uint64_t)>& judge) {
    for (uint64_t number = 1, failures = 1; failures > 0; ++number) {
      begin();
      faulty_.Arm({.call_number = number});
      bool thrown = false;
      try {
        call();
      } catch (const DriverError&) {
        thrown = true;
      }
      failures = faulty_.failures();
      EXPECT_EQ(thrown, failures > 0) << number << ": a driver error was swallowed";
      faulty_.Disarm();
      set_.Check();
      EXPECT_EQ(set_.Usage().reserved_bytes.current, watch_.handle_bytes()) << number;
      judge(number);
      if (HasFailure()) return;
    }
  }

  HostDriver host_{{.granularity = kPage, .physical_limit_bytes = kLimit}};
  DriverWatch watch_{host_};
  FaultyDriver faulty_{watch_};
  PoolSet set_{faulty_, {.page_bytes = kPage}};
  uint64_t name_ = 0;
};

TEST_F(LeasesTest, AWakeWithoutMemoryLeavesThePoolAsleepAndWhole) {
  const Block scratch = Capture(25);
  set_.Sleep(kId, true);
  constexpr PoolId kOther{2, 0};
  set_.BeginScope(kOther, ScopeKind::kEager);
  const Block other = Allocate(20, kOther);
  EXPECT_THROW(set_.Wake(kId), OutOfMemoryError);
  EXPECT_THROW(set_.BeginScope(kId, ScopeKind::kCapture), OutOfMemoryError);
  EXPECT_TRUE(set_.Stats(kId).asleep);
  EXPECT_EQ(Held(), 20U);
  set_.EndScope(kOther);
  set_.Free(other.address);
  set_.Release(kOther);
  set_.Trim();
  set_.Wake(kId);
  EXPECT_TRUE(watch_.Accessible(scratch.address, scratch.bytes));
}

TEST_F(LeasesTest, WhereTheDriverFailsThePoolIsAsBeforeOrAsleepAndWhole) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block kept = Allocate(1);
  const Block scratch = Allocate(6);
  set_.Free(scratch.address);
  set_.Free(Allocate(4).address);
  set_.EndScope(kId);
  const auto is_whole = [&] {
    set_.Wake(kId);
    EXPECT_TRUE(watch_.Accessible(kept.address, kept.bytes));
    EXPECT_TRUE(watch_.Accessible(scratch.address, scratch.bytes));
    EXPECT_EQ(Held(), 7U);
  };
  FailEach([] {}, [&] { set_.Sleep(kId, true); }, [&](uint64_t) { is_whole(); });
  FailEach([&] { set_.Sleep(kId, true); }, [&] { set_.Wake(kId); },
           [&](uint64_t) {
             EXPECT_EQ(Held(), set_.Stats(kId).asleep ? 1U : 7U);
             is_whole();
           });
  const uint64_t lease = set_.Lease(kId, {kept.address});
  FailEach([] {}, [&] { set_.ReleaseLease(kId, lease); },
           [&](uint64_t) {
             set_.RestoreLease(kId, lease);
             is_whole();
           });
  FailEach([&] { set_.ReleaseLease(kId, lease); }, [&] { set_.RestoreLease(kId, lease); },
           [&](uint64_t) {
             set_.RestoreLease(kId, lease);
             is_whole();
           });
  FailEach([] {}, [&] { set_.BeginLoan(kId); },
           [&](uint64_t) {
             const PoolId loan{kId.first | uint64_t{1} << 63, kId.second};
             if (set_.InScope(loan)) set_.EndScope(loan);
             is_whole();
           });
}

TEST_F(LeasesTest, ATrimKeepsWhatIsLeftNeedsAlsoWhereTheDriverFails) {
  std::vector<uint64_t> names;
  Block small;
  set_.Retain(kId);
  FailEach(
      [&] {
        for (const uint64_t name : names) set_.DropCapture(kId, name);
        names.clear();
        set_.TrimToNeeds(kId);
        EXPECT_EQ(Held(), 0U);
        small = Capture(3);
        names.push_back(name_);
        Capture(20);
        set_.DropCapture(kId, name_);
        EXPECT_EQ(set_.Trim(), 0U) << "in use";
      },
      [&] { set_.TrimToNeeds(kId); },
      [&](uint64_t) {
        set_.TrimToNeeds(kId);
        EXPECT_EQ(Held(), 3U);
        EXPECT_TRUE(watch_.Accessible(small.address, small.bytes));
        EXPECT_NO_THROW(set_.BeginReplay(kId, names.front(), kA));
      });
}

TEST_F(LeasesTest, ALoanHasNoCapturedAddressAndReplaysAreOrderedWithIt) {
  const Block scratch = Capture(8);
  const uint64_t replayed = watch_.Submit(kB);
  const PoolId loan = set_.BeginLoan(kId);
  EXPECT_EQ(set_.LendableBytes(kId), 0U) << "all is lent";
  const Block block = Allocate(8, loan);
  EXPECT_TRUE(watch_.IsBehind(kA, kB, replayed));
  EXPECT_TRUE(block.address + block.bytes <= scratch.address ||
              scratch.address + scratch.bytes <= block.address);
  EXPECT_EQ(Held(), 8U);
  EXPECT_THROW(Allocate(1, loan), OutOfMemoryError);
  EXPECT_THROW(set_.BeginReplay(kId, name_, kB), UsageError);
  const uint64_t borrowed = watch_.Submit(kA);
  set_.Free(block.address);
  set_.BeginReplay(kId, name_, kB);
  EXPECT_TRUE(watch_.IsBehind(kB, kA, borrowed));
  EXPECT_EQ(watch_.quiesce_calls(), 0U) << "the host waits for nothing";
  set_.Free(Allocate(2, loan).address);  // is lent again
  set_.EndScope(loan);
}

// A backward pass reads what the forward pass left, and whoever has the address of an output reads
// that, though nobody holds their blocks.
TEST_F(LeasesTest, ALoanHasNothingThatACaptureLeft) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block left = Allocate(3);
  set_.Free(Allocate(5).address);
  set_.EndScope(kId);
  const uint64_t forward = set_.NameCapture(kId);
  set_.BeginScope(kId, ScopeKind::kCapture);
  set_.Free(left.address);
  set_.EndScope(kId);
  EXPECT_EQ(set_.LendableBytes(kId), 5 * kPage);
  const PoolId loan = set_.BeginLoan(kId);
  EXPECT_THROW(Allocate(6, loan), OutOfMemoryError);
  set_.EndScope(loan);
  set_.DropCapture(kId, forward);
  EXPECT_EQ(set_.LendableBytes(kId), 8 * kPage);
}

TEST_F(LeasesTest, ACaptureOfTheLenderGetsNothingThatIsLent) {
  Capture(8);
  const PoolId loan = set_.BeginLoan(kId);
  const Block borrowed = Allocate(5, loan);
  std::memset(reinterpret_cast<void*>(borrowed.address), 7, borrowed.bytes);  // NOLINT
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block block = Allocate(8);
  EXPECT_EQ(Held(), 13U);
  std::memset(reinterpret_cast<void*>(block.address), 1, block.bytes);  // NOLINT
  EXPECT_EQ(*reinterpret_cast<const char*>(borrowed.address), 7);       // NOLINT
  EXPECT_THROW(Allocate(1, loan), UsageError) << "a capture is under way";
  set_.EndScope(kId);
  set_.Free(borrowed.address);
  set_.EndScope(loan);
}

TEST_F(LeasesTest, ATrimKeepsWhatIsLentToALiveBlock) {
  Capture(8);
  const PoolId loan = set_.BeginLoan(kId);
  const Block borrowed = Allocate(2, loan);
  set_.EndScope(loan);
  set_.DropCapture(kId, name_);
  set_.TrimToNeeds(kId);
  EXPECT_EQ(Held(), 2U);
  set_.Release(kId);
  set_.Trim();
  EXPECT_EQ(Held(), 2U);
  set_.Free(borrowed.address);
  set_.Trim();
  EXPECT_FALSE(set_.Contains(kId));
}

// It once looked through the whole pool as long as anything of it was lent or away.
TEST_F(LeasesTest, AFreeCostsTheSameHoweverMuchLives) {
  HostDriver host({.granularity = kPage, .map_memory = false});
  PoolSet set(host, {.page_bytes = kPage});
  set.BeginScope(kId, ScopeKind::kCapture);
  std::vector<Address> live;
  for (uint64_t i = 0; i < 16'000; ++i) {
    live.push_back(set.Allocate(kId, kGranuleBytes * (1 + i % 13), kA).address);
  }
  set.Free(set.Allocate(kId, 20 * kPage, kA).address);
  set.EndScope(kId);
  const auto seconds_of_frees = [&](std::size_t first) {
    const std::clock_t begin = std::clock();
    for (std::size_t i = first; i < live.size(); i += 8) set.Free(live[i]);
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  const double least = seconds_of_frees(0);
  const PoolId loan = set.BeginLoan(kId);
  set.Allocate(loan, kPage, kA);
  EXPECT_LT(seconds_of_frees(1), 100 * least + 0.1) << "some is lent";
  set.EndScope(loan);
  set.Sleep(kId, /*keeps_live=*/false);
  EXPECT_LT(seconds_of_frees(2), 100 * least + 0.1) << "all is away";
}

}  // namespace
}  // namespace cgp
