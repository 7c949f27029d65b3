// What is kept of what happened, at which level, for how long and in which order.
#include "torch/observe/history.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace cgp {
namespace {

using Action = History::Action;
using When = History::When;
using Traces = std::vector<std::vector<History::TraceEntry>>;

constexpr PoolId kPool{3, 4};
constexpr size_t kMany = 1000;

struct Stack final : c10::GatheredContext {};

std::shared_ptr<c10::GatheredContext> GatherStack() { return std::make_shared<Stack>(); }

class HistoryTest : public ::testing::Test {
 protected:
  void SetUp() override { Gate::Set(Gate::kHistory, false); }

  void Configure(When when, size_t max_entries = kMany, bool clear = false,
                 const std::vector<std::string>& skip = {}) {
    history_.Configure(true, &GatherStack, max_entries, when, clear, skip);
  }
  static History::Event Event(Address address, Action action = Action::ALLOC) {
    return {action, 1, address, 700, StreamId{9}, kPool};
  }
  void Allocate(Address address) {
    history_.Record(Event(address), history_.Gather(When::STATE), "");
  }
  void Free(Address address) {
    history_.Record(Event(address, Action::FREE_REQUESTED), history_.Gather(When::ALL), "");
  }

  Traces Merged(Traces base = {}) {
    history_.MergeInto(base);
    return base;
  }
  // Of device 1, with nothing of the base's.
  std::vector<History::TraceEntry> Entries() {
    Traces traces = Merged();
    return traces.size() > 1 ? traces[1] : std::vector<History::TraceEntry>();
  }
  std::vector<size_t> Addresses() {
    std::vector<size_t> addresses;
    for (const auto& entry : Entries()) addresses.push_back(entry.addr_);
    return addresses;
  }
  std::vector<Action> Actions() {
    std::vector<Action> actions;
    for (const auto& entry : Entries()) actions.push_back(entry.action_);
    return actions;
  }

  History history_;
};

TEST_F(HistoryTest, AnEntrySaysWhatTheEventDid) {
  Configure(When::ALL);
  EXPECT_TRUE(history_.active());
  const History::Context context = GatherStack();
  history_.Record(Event(512, Action::SEGMENT_MAP), context, "metadata");
  const auto entries = Entries();
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0].action_, Action::SEGMENT_MAP);
  EXPECT_EQ(entries[0].device_, 1);
  EXPECT_EQ(entries[0].addr_, 512U);
  EXPECT_EQ(entries[0].size_, 700U);
  EXPECT_EQ(entries[0].stream_, reinterpret_cast<void*>(9));
  EXPECT_EQ(entries[0].mempool_, c10::MempoolId_t(3, 4));
  EXPECT_EQ(entries[0].context_, context);
  EXPECT_EQ(entries[0].user_metadata_, "metadata");
  EXPECT_EQ(entries[0].compile_context_, "N/A");
}

TEST_F(HistoryTest, ActionsToSkipAreSkippedAndTheirStacksKept) {
  Configure(When::ALLOC, kMany, false, {"alloc", "free_requested"});
  Allocate(512);
  EXPECT_NE(history_.ContextOf(512), nullptr) << "it lives, whatever the trace says";
  Free(512);
  EXPECT_EQ(history_.ContextOf(512), nullptr);
  EXPECT_EQ(Actions(), std::vector{Action::FREE_COMPLETED});
  Configure(When::ALLOC);
  Allocate(1024);
  EXPECT_EQ(Actions(), (std::vector{Action::FREE_COMPLETED, Action::ALLOC}));
}

TEST_F(HistoryTest, AnUnknownActionIsRefusedAndChangesNothing) {
  Configure(When::ALLOC);
  Allocate(512);
  EXPECT_THROW(history_.Configure(false, nullptr, 0, When::NEVER, true, {"nonsense"}), c10::Error);
  Allocate(1024);
  EXPECT_EQ(Addresses(), (std::vector<size_t>{512, 1024}));
}

TEST_F(HistoryTest, TheOldestEntriesGoFirst) {
  Configure(When::NEVER, 3);
  for (const Address address : {512U, 1024U, 1536U, 2048U}) Allocate(address);
  EXPECT_EQ(Addresses(), (std::vector<size_t>{1024, 1536, 2048}));
  Configure(When::NEVER, 2);
  Configure(When::NEVER, 3);
  EXPECT_EQ(Addresses(), (std::vector<size_t>{1536, 2048})) << "what did not fit is gone";
  Configure(When::NEVER, 0);
  Allocate(2560);
  EXPECT_TRUE(Addresses().empty());
}

// The base's entries come with times converted to microseconds.
class HistoryMergeTest : public HistoryTest {
 protected:
  static History::TraceEntry OfBase(time_t microseconds, size_t address) {
    History::TraceEntry entry(Action::ALLOC, 1, address, 1, nullptr, {0, 0}, 0);
    entry.time_.t_ = microseconds;
    return entry;
  }
  static time_t Now() { return c10::getTime() / 1000; }
  static constexpr time_t kSecond = 1000000;
};

TEST_F(HistoryMergeTest, OursStandBetweenTheBasesInOrderOfTime) {
  Configure(When::NEVER);
  Allocate(512);
  Allocate(1024);
  const time_t now = Now();
  const auto merged =
      Merged({{}, {OfBase(now - 60 * kSecond, 1), OfBase(now + 60 * kSecond, 2)}})[1];
  ASSERT_EQ(merged.size(), 4U);
  EXPECT_EQ(merged[0].addr_, 1U);
  EXPECT_EQ(merged[1].addr_, 512U);
  EXPECT_EQ(merged[2].addr_, 1024U);
  EXPECT_EQ(merged[3].addr_, 2U);
  EXPECT_NEAR(static_cast<double>(merged[1].time_.t_), static_cast<double>(now), 10.0 * kSecond);
  EXPECT_LE(merged[1].time_.t_, merged[2].time_.t_);
}

TEST_F(HistoryMergeTest, BothTogetherHaveAtMostAsManyEntriesAsWereAskedFor) {
  Configure(When::NEVER, 3);
  Allocate(512);
  Allocate(1024);
  const time_t now = Now();
  const auto merged = Merged(
      {{},
       {OfBase(now - 2 * kSecond, 1), OfBase(now - kSecond, 2), OfBase(now + 60 * kSecond, 3)}})[1];
  ASSERT_EQ(merged.size(), 3U);
  EXPECT_EQ(merged[0].addr_, 512U);
  EXPECT_EQ(merged[1].addr_, 1024U);
  EXPECT_EQ(merged[2].addr_, 3U);
}

}  // namespace
}  // namespace cgp
