#include "core/fences.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "driver/faulty_driver.h"
#include "driver/host_driver.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};

class FenceTableTest : public ::testing::Test {
 protected:
  FenceTableTest() { host_.HoldEvents(true); }

  void TearDown() override { EXPECT_EQ(host_.unknown_events_destroyed(), 0u); }

  std::vector<uint32_t> Opened() {
    std::vector<uint32_t> numbers;
    const std::vector<bool> opened = fences_.Opened();
    for (uint32_t i = 0; i < opened.size(); ++i) {
      if (opened[i]) numbers.push_back(i);
    }
    return numbers;
  }

  // Ends the scope as a pool does, and returns what that opened.
  std::vector<uint32_t> EndScope() {
    fences_.EndScope();
    const std::vector<uint32_t> opened = Opened();
    fences_.Clear();
    return opened;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver_{host_};
  FenceTable fences_{driver_};
};

TEST_F(FenceTableTest, IsEmptyAtFirst) {
  EXPECT_TRUE(fences_.empty());
  EXPECT_FALSE(fences_.Poll());
  EXPECT_THAT(Opened(), IsEmpty());
  EXPECT_EQ(fences_.scope_fence_count(), 0u);
  fences_.EndScope();
  fences_.Clear();
  EXPECT_TRUE(fences_.empty());
}

TEST_F(FenceTableTest, AStreamHasOneFenceInACaptureScope) {
  const auto first = fences_.ForStream(kA, /*eager=*/false);
  EXPECT_NE(first.id, FenceId::kOpen);
  EXPECT_FALSE(first.reused);
  const auto again = fences_.ForStream(kA, /*eager=*/false);
  EXPECT_EQ(again.id, first.id);
  EXPECT_TRUE(again.reused);
  const auto other = fences_.ForStream(kB, /*eager=*/false);
  EXPECT_NE(other.id, first.id);
  EXPECT_FALSE(other.reused);
  EXPECT_EQ(fences_.scope_fence_count(), 2u);
}

TEST_F(FenceTableTest, ACaptureScopesFencesOpenAtItsEndWithoutEvents) {
  const uint32_t a = Index(fences_.ForStream(kA, false).id);
  const uint32_t b = Index(fences_.ForStream(kB, false).id);
  const uint32_t held = Index(fences_.Held(std::vector{kA, kB}, /*events=*/false));
  EXPECT_FALSE(fences_.Poll()) << "nothing opens while the scope lasts";
  EXPECT_THAT(EndScope(), ElementsAre(a, b, held));
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(driver_.calls(), IsEmpty()) << "the streams have joined: no event is needed";
}

TEST_F(FenceTableTest, WhatIsOpenedIsGoneWithClearAndItsNumberUsedAgain) {
  const FenceId first = fences_.ForStream(kA, false).id;
  fences_.EndScope();
  EXPECT_FALSE(fences_.empty());
  fences_.Clear();
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(Opened(), IsEmpty());
  const auto next = fences_.ForStream(kB, false);
  EXPECT_EQ(next.id, first);
  EXPECT_FALSE(next.reused) << "nothing is behind it any more";
}

TEST_F(FenceTableTest, AnEagerScopesFenceOpensWhenItsStreamsWorkIsDone) {
  const FenceId id = fences_.ForStream(kA, /*eager=*/true).id;
  EXPECT_THAT(EndScope(), IsEmpty());
  EXPECT_EQ(host_.usage().events, 1u);
  EXPECT_EQ(fences_.scope_fence_count(), 0u);
  EXPECT_FALSE(fences_.Poll());
  EXPECT_THAT(Opened(), IsEmpty());
  host_.CompleteEvents(kB);
  EXPECT_FALSE(fences_.Poll());
  host_.CompleteEvents(kA);
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(id)));
  EXPECT_EQ(host_.usage().events, 0u);
  EXPECT_FALSE(fences_.Poll()) << "nothing more";
}

TEST_F(FenceTableTest, AnEagerScopeGoesOnWithTheStreamsPendingFence) {
  const FenceId id = fences_.ForStream(kA, true).id;
  EndScope();
  const auto again = fences_.ForStream(kA, true);
  EXPECT_EQ(again.id, id);
  EXPECT_TRUE(again.reused);
  EXPECT_EQ(host_.usage().events, 0u) << "they say nothing of what the new scope will do";
  host_.CompleteEvents();
  EXPECT_FALSE(fences_.Poll()) << "the new scope has not ended";
  EndScope();
  EXPECT_EQ(host_.usage().events, 1u);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(id)));
}

// Bytes freed by eager work are not protected by a capture on the same stream.
TEST_F(FenceTableTest, ACaptureDoesNotTakeOverAnEagerFence) {
  const FenceId eager = fences_.ForStream(kA, true).id;
  EndScope();
  const auto captured = fences_.ForStream(kA, false);
  EXPECT_NE(captured.id, eager);
  EXPECT_FALSE(captured.reused);
  EXPECT_THAT(EndScope(), ElementsAre(Index(captured.id)));
}

TEST_F(FenceTableTest, BlocksHeldInOneScopeShareAFenceWithTheStreamsOfAll) {
  const FenceId held = fences_.Held(std::vector{kA, kB}, /*events=*/true);
  EXPECT_EQ(fences_.Held(std::vector{kB, kC}, true), held);
  EXPECT_NE(fences_.Held(std::vector{kA}, false), held) << "this one needs no events";
  EXPECT_EQ(fences_.scope_fence_count(), 2u);
  EndScope();
  EXPECT_EQ(host_.usage().events, 3u) << "one for each of the three streams";
  host_.CompleteEvents(kA);
  host_.CompleteEvents(kB);
  EXPECT_FALSE(fences_.Poll());
  host_.CompleteEvents(kC);
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(held)));
}

TEST_F(FenceTableTest, AHeldFenceIsNobodysStreamFence) {
  const FenceId held = fences_.Held(std::vector{kA}, true);
  EXPECT_NE(fences_.ForStream(kA, true).id, held);
}

TEST_F(FenceTableTest, ALaterScopeHoldsItsBlocksBehindAFenceOfItsOwn) {
  const FenceId first = fences_.Held(std::vector{kA}, true);
  EndScope();
  EXPECT_NE(fences_.Held(std::vector{kA}, true), first) << "the first is pending already";
}

TEST_F(FenceTableTest, AfterStandsBehindTheWorkInFlightNow) {
  const FenceId id = fences_.After(std::vector{kA, kB});
  EXPECT_EQ(host_.usage().events, 2u);
  EXPECT_EQ(fences_.scope_fence_count(), 0u);
  host_.CompleteEvents(kA);
  EXPECT_FALSE(fences_.Poll());
  host_.CompleteEvents(kB);
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(id)));
}

TEST_F(FenceTableTest, AScopeThatEndsLeavesPendingFencesAlone) {
  const FenceId pending = fences_.After(std::vector{kA});
  const FenceId captured = fences_.ForStream(kA, false).id;
  EXPECT_THAT(EndScope(), ElementsAre(Index(captured)));
  EXPECT_EQ(host_.usage().events, 1u);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(pending)));
}

TEST_F(FenceTableTest, PollOpensEachFenceOnItsOwn) {
  const FenceId a = fences_.After(std::vector{kA});
  const FenceId b = fences_.After(std::vector{kB});
  host_.CompleteEvents(kB);
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(b)));
  fences_.Clear();
  host_.CompleteEvents(kA);
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(a)));
}

// Every RecordEvent() of an ending scope fails once: the scope is as it was and ends when tried
// again.
TEST_F(FenceTableTest, AFailingRecordEventLeavesTheScopeAsItWas) {
  const uint32_t captured = Index(fences_.ForStream(kA, false).id);
  const FenceId pending = fences_.After(std::vector{kC});
  fences_.ForStream(kB, true);
  fences_.Held(std::vector{kA, kB, kC}, true);
  constexpr uint64_t kEvents = 4;
  for (uint64_t n = 1; n <= kEvents; ++n) {
    driver_.Arm({.call_number = n, .only = DriverCall::kRecordEvent});
    EXPECT_THROW(fences_.EndScope(), DriverError) << "call " << n;
    EXPECT_EQ(driver_.failures(), 1u);
    EXPECT_EQ(host_.usage().events, 1u) << "that of the pending fence alone";
    EXPECT_EQ(fences_.scope_fence_count(), 3u);
    EXPECT_THAT(Opened(), IsEmpty());
  }
  driver_.Disarm();
  EXPECT_THAT(EndScope(), ElementsAre(captured));
  EXPECT_EQ(host_.usage().events, kEvents + 1);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), testing::SizeIs(3));
  EXPECT_THAT(Opened(), testing::Contains(Index(pending)));
}

TEST_F(FenceTableTest, AfterThatFailsMakesNoFence) {
  for (uint64_t n = 1; n <= 2; ++n) {
    driver_.Arm({.call_number = n, .only = DriverCall::kRecordEvent});
    EXPECT_THROW(fences_.After(std::vector{kA, kB}), DriverError);
    EXPECT_EQ(host_.usage().events, 0u);
    EXPECT_TRUE(fences_.empty());
  }
}

// --- Streams that capture when their events are due ---

// For another pool, when the scope ends: its events are recorded once it does not.
TEST_F(FenceTableTest, EventsOfAStreamThatCapturesAreRecordedWhenItHasEnded) {
  const FenceId held = fences_.Held(std::vector{kA, kB}, /*events=*/true);
  const CaptureId capture = host_.graphs().Begin(kB);
  EXPECT_THAT(EndScope(), IsEmpty());
  EXPECT_EQ(fences_.scope_fence_count(), 0u);
  EXPECT_FALSE(fences_.Poll());
  EXPECT_EQ(host_.usage().events, 0u);
  host_.graphs().End(capture);
  EXPECT_FALSE(fences_.Poll());
  EXPECT_EQ(host_.usage().events, 2u) << "behind what they have in flight now";
  EXPECT_FALSE(fences_.Poll());
  EXPECT_EQ(host_.usage().events, 2u) << "once";
  const CaptureId next = host_.graphs().Begin(kB);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll()) << "whatever the stream does now";
  host_.graphs().End(next);
  EXPECT_THAT(Opened(), ElementsAre(Index(held)));
  EXPECT_EQ(host_.usage().events, 0u);
}

// The stream belongs to it until somebody ends it: no event can be recorded there.
TEST_F(FenceTableTest, EventsWaitForAnInvalidatedCaptureToo) {
  const CaptureId capture = host_.graphs().Begin(kB);
  host_.graphs().Invalidate(capture);
  const FenceId late = fences_.After(std::vector{kB});
  EXPECT_FALSE(fences_.Poll());
  EXPECT_EQ(host_.usage().events, 0u);
  host_.graphs().End(capture);
  fences_.Poll();
  EXPECT_EQ(host_.usage().events, 1u);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(late)));
}

TEST_F(FenceTableTest, AfterWaitsForACaptureToEnd) {
  const CaptureId capture = host_.graphs().Begin(kB);
  const FenceId late = fences_.After(std::vector{kA, kB});
  const FenceId soon = fences_.After(std::vector{kA});
  EXPECT_EQ(host_.usage().events, 1u);
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(soon)));
  fences_.Clear();
  host_.graphs().End(capture);
  fences_.Poll();
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(late)));
}

// Late events end with the capture, not with the scopes of this pool.
TEST_F(FenceTableTest, AScopeThatEndsLeavesLateFencesAlone) {
  const CaptureId capture = host_.graphs().Begin(kB);
  fences_.Held(std::vector{kB}, true);
  EndScope();
  const FenceId second = fences_.Held(std::vector{kA}, true);
  EXPECT_THAT(EndScope(), IsEmpty());
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(second)));
  host_.graphs().End(capture);
}

// As if it had never ended a scope: its events are due when the next one ends.
TEST_F(FenceTableTest, AnEagerScopeGoesOnWithTheStreamsLateFence) {
  const FenceId id = fences_.ForStream(kA, true).id;
  const CaptureId capture = host_.graphs().Begin(kA);
  EndScope();
  host_.graphs().End(capture);
  const auto again = fences_.ForStream(kA, true);
  EXPECT_EQ(again.id, id);
  EXPECT_TRUE(again.reused);
  EXPECT_FALSE(fences_.Poll());
  EXPECT_EQ(host_.usage().events, 0u) << "the scope has not ended";
  EndScope();
  EXPECT_EQ(host_.usage().events, 1u);
}

TEST_F(FenceTableTest, AFailingDriverLeavesLateFencesLate) {
  const FenceId held = fences_.Held(std::vector{kA, kB}, true);
  const CaptureId capture = host_.graphs().Begin(kB);
  for (uint64_t n = 1; n <= 2; ++n) {
    driver_.Arm({.call_number = n, .only = DriverCall::kCapture});
    EXPECT_THROW(fences_.EndScope(), DriverError);
    EXPECT_EQ(fences_.scope_fence_count(), 1u);
  }
  driver_.Disarm();
  EndScope();
  host_.graphs().End(capture);
  for (uint64_t n = 1; n <= 4; ++n) {  // two streams asked for, two events
    driver_.Arm({.call_number = n});
    EXPECT_THROW(fences_.Poll(), DriverError);
    EXPECT_EQ(host_.usage().events, 0u);
    EXPECT_THAT(Opened(), IsEmpty());
  }
  driver_.Disarm();
  EXPECT_FALSE(fences_.Poll());
  host_.CompleteEvents();
  EXPECT_TRUE(fences_.Poll());
  EXPECT_THAT(Opened(), ElementsAre(Index(held)));
}

// --- Proof fences ---

TEST_F(FenceTableTest, AProofFenceOpensWhenTheScopeEnds) {
  const FenceId stream = fences_.ForStream(kA, false).id;
  const FenceId first = fences_.ForProof();
  const FenceId second = fences_.ForProof();
  EXPECT_NE(first, second);
  EXPECT_EQ(fences_.scope_fence_count(), 3u);
  EXPECT_FALSE(fences_.Poll());
  EXPECT_THAT(EndScope(), ElementsAre(Index(stream), Index(first), Index(second)));
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(driver_.calls(), IsEmpty());
}

TEST_F(FenceTableTest, AProofFenceIsNobodysStreamFenceAndHoldsNothing) {
  const FenceId proof = fences_.ForProof();
  EXPECT_NE(fences_.ForStream(kA, false).id, proof);
  EXPECT_NE(fences_.Held(std::vector{kA, kB}, false), proof);
  EXPECT_NE(fences_.ForProof(), proof);
  EXPECT_THAT(fences_.StreamsBehind(proof), IsEmpty());
}

TEST_F(FenceTableTest, AStreamWhoseFenceBecameAProofGetsAnother) {
  const FenceId first = fences_.ForStream(kA, false).id;
  const FenceId of_b = fences_.ForStream(kB, false).id;
  fences_.MakeProof(first);
  const auto second = fences_.ForStream(kA, false);
  EXPECT_NE(second.id, first);
  EXPECT_FALSE(second.reused);
  EXPECT_NE(fences_.Held(std::vector{kA, kB}, false), first);
  EXPECT_EQ(fences_.ForStream(kB, false).id, of_b);
  EXPECT_THAT(EndScope(), testing::Contains(Index(first)));
  EXPECT_TRUE(fences_.empty());
}

// However many a capture has had.
TEST_F(FenceTableTest, NumbersOfFencesAreUsedAgain) {
  uint32_t most = 0;
  for (int scope = 0; scope < 5; ++scope) {
    const FenceId pending = fences_.After(std::vector{kC});
    for (int i = 0; i < 100; ++i) most = std::max(most, Index(fences_.ForProof()));
    const FenceId stream = fences_.ForStream(kA, false).id;
    most = std::max(most, Index(stream));
    EXPECT_EQ(fences_.ForStream(kA, false).id, stream);
    EXPECT_THAT(EndScope(), testing::SizeIs(101));
    EXPECT_FALSE(fences_.empty()) << "one is pending";
    host_.CompleteEvents();
    EXPECT_TRUE(fences_.Poll());
    EXPECT_THAT(Opened(), ElementsAre(Index(pending)));
    fences_.Clear();
    EXPECT_TRUE(fences_.empty());
  }
  EXPECT_EQ(most, 102u);
}

// --- A driver that fails ---

// The driver refuses what Capture() does not tell of: an invalidated capture, say.
TEST_F(FenceTableTest, AfterThatIsRefusedMakesNoFence) {
  host_.BeginCapture({kB});
  EXPECT_THROW(fences_.After(std::vector{kA, kB}), DriverError);
  EXPECT_EQ(host_.usage().events, 0u);
  EXPECT_TRUE(fences_.empty());
  host_.EndCapture();
}

// A fence whose events are done keeps that, whatever becomes of the next one.
TEST_F(FenceTableTest, AFailingEventDoneLosesNoFence) {
  fences_.After(std::vector{kA});
  fences_.After(std::vector{kB});
  host_.CompleteEvents();
  for (uint64_t n = 1; n <= 2; ++n) {
    driver_.Arm({.call_number = n, .only = DriverCall::kEventDone});
    EXPECT_THROW(fences_.Poll(), DriverError);
  }
  driver_.Disarm();
  fences_.Poll();
  EXPECT_THAT(Opened(), testing::SizeIs(2));
  EXPECT_EQ(host_.usage().events, 0u);
}

TEST_F(FenceTableTest, TheDestructorDestroysItsEvents) {
  {
    FenceTable fences(driver_);
    fences.After(std::vector{kA, kB});
    fences.ForStream(kA, true);
    fences.EndScope();
    EXPECT_EQ(host_.usage().events, 3u);
  }
  EXPECT_EQ(host_.usage().events, 0u);
}

}  // namespace
}  // namespace cgp
