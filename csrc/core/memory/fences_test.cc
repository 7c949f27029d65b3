#include "core/memory/fences.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "driver/faulty_driver.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr StreamId kA{1};
constexpr StreamId kB{2};

class FenceTableTest : public ::testing::Test {
 protected:
  FenceTableTest() { host_.HoldEvents(true); }

  void TearDown() override { EXPECT_EQ(host_.unknown_events_destroyed(), 0u); }

  static std::vector<uint32_t> Numbers(const std::vector<FenceId>& fences) {
    std::vector<uint32_t> numbers;
    for (const FenceId fence : fences) numbers.push_back(Index(fence));
    return numbers;
  }
  // What these opened.
  std::vector<uint32_t> EndScope() { return Numbers(fences_.EndScope()); }
  std::vector<uint32_t> Poll() { return Numbers(fences_.Poll()); }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  FaultyDriver driver_{host_};
  FenceTable fences_{driver_};
};

TEST_F(FenceTableTest, IsEmptyAtFirst) {
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(Poll(), IsEmpty());
  EXPECT_THAT(EndScope(), IsEmpty());
  EXPECT_TRUE(fences_.empty());
}

TEST_F(FenceTableTest, AStreamHasOneFenceInACaptureScope) {
  const FenceId first = fences_.ForStream(kA, /*eager=*/false);
  EXPECT_NE(first, FenceId::kOpen);
  EXPECT_EQ(fences_.ForStream(kA, /*eager=*/false), first);
  EXPECT_NE(fences_.ForStream(kB, /*eager=*/false), first);
}

TEST_F(FenceTableTest, ACaptureScopesFencesOpenAtItsEndWithoutEvents) {
  const uint32_t a = Index(fences_.ForStream(kA, false));
  const uint32_t b = Index(fences_.ForStream(kB, false));
  const uint32_t held = Index(fences_.Held(/*eager=*/false));
  EXPECT_THAT(Poll(), IsEmpty()) << "nothing opens while the scope lasts";
  EXPECT_THAT(EndScope(), ElementsAre(a, b, held));
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(driver_.calls(), IsEmpty()) << "the streams have joined: no event is needed";
}

TEST_F(FenceTableTest, WhatIsOpenedIsGoneAndItsNumberUsedAgain) {
  const FenceId first = fences_.ForStream(kA, false);
  EXPECT_THAT(EndScope(), ElementsAre(Index(first)));
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(EndScope(), IsEmpty());
  EXPECT_EQ(fences_.ForStream(kB, false), first);
}

// --- Eager work ---

TEST_F(FenceTableTest, AnEagerFenceOpensOnceTheDeviceHasPassedAMark) {
  const FenceId a = fences_.ForStream(kA, /*eager=*/true);
  const FenceId held = fences_.Held(/*eager=*/true);
  EXPECT_THAT(EndScope(), IsEmpty());
  EXPECT_TRUE(fences_.NeedsMark());
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), IsEmpty()) << "nobody knows what is done";
  fences_.Mark();
  EXPECT_FALSE(fences_.NeedsMark());
  EXPECT_EQ(host_.usage().events, 1u) << "one for all";
  EXPECT_THAT(Poll(), IsEmpty());
  host_.CompleteEvents(kA);
  EXPECT_THAT(Poll(), IsEmpty()) << "the device has done the work of one stream only";
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), ElementsAre(Index(a), Index(held)));
  EXPECT_EQ(host_.usage().events, 0u);
  EXPECT_THAT(Poll(), IsEmpty()) << "nothing more";
}

TEST_F(FenceTableTest, NoStreamIsEverAsked) {
  fences_.ForStream(kA, true);
  fences_.Held(true);
  fences_.EndScope();
  fences_.Mark();
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), testing::SizeIs(2));
  EXPECT_THAT(driver_.calls(), Each(AnyOf(DriverCall::kRecordDeviceEvent, DriverCall::kEventDone)));
}

TEST_F(FenceTableTest, AStreamThatGoesOnTakesItsFenceFromTheMark) {
  const FenceId id = fences_.ForStream(kA, true);
  fences_.Mark();
  EXPECT_EQ(fences_.ForStream(kA, true), id);
  EXPECT_EQ(host_.usage().events, 1u) << "nothing has changed by asking";
  fences_.Renew(id);
  EXPECT_EQ(host_.usage().events, 0u) << "it says nothing of what the stream does now";
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), IsEmpty());
  fences_.Mark();
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), ElementsAre(Index(id)));
}

// Bytes freed by eager work are not protected by a capture on the same stream.
TEST_F(FenceTableTest, ACaptureDoesNotTakeOverAnEagerFence) {
  const FenceId eager = fences_.ForStream(kA, true);
  const FenceId captured = fences_.ForStream(kA, false);
  EXPECT_NE(captured, eager);
  EXPECT_THAT(EndScope(), ElementsAre(Index(captured)));
}

TEST_F(FenceTableTest, WhatIsHeldSharesAFenceUntilThatIsMarked) {
  const FenceId held = fences_.Held(/*eager=*/true);
  EXPECT_EQ(fences_.Held(true), held);
  const FenceId stream = fences_.ForStream(kA, true);
  EXPECT_NE(stream, held);
  fences_.Mark();
  const FenceId second = fences_.Held(true);
  EXPECT_NE(second, held);
  host_.CompleteEvents();
  EXPECT_THAT(Poll(), ElementsAre(Index(held), Index(stream)));
}

TEST_F(FenceTableTest, AnIdleDeviceOpensAll) {
  const uint32_t marked = Index(fences_.ForStream(kA, true));
  fences_.Mark();
  const uint32_t unmarked = Index(fences_.ForStream(kB, true));
  EXPECT_THAT(Numbers(fences_.OpenAll()), ElementsAre(marked, unmarked));
  EXPECT_EQ(host_.usage().events, 0u);
}

// --- Proof fences ---

TEST_F(FenceTableTest, AProofFenceOpensWhenTheScopeEnds) {
  const FenceId stream = fences_.ForStream(kA, false);
  const FenceId first = fences_.ForProof();
  const FenceId second = fences_.ForProof();
  EXPECT_NE(first, second);
  EXPECT_THAT(Poll(), IsEmpty());
  EXPECT_THAT(EndScope(), ElementsAre(Index(stream), Index(first), Index(second)));
  EXPECT_TRUE(fences_.empty());
  EXPECT_THAT(driver_.calls(), IsEmpty());
}

TEST_F(FenceTableTest, AProofFenceIsNobodysStreamFenceAndHoldsNothing) {
  const FenceId proof = fences_.ForProof();
  EXPECT_NE(fences_.ForStream(kA, false), proof);
  EXPECT_NE(fences_.Held(/*eager=*/false), proof);
  EXPECT_NE(fences_.ForProof(), proof);
}

TEST_F(FenceTableTest, AStreamWhoseFenceBecameAProofGetsAnother) {
  const FenceId first = fences_.ForStream(kA, false);
  const FenceId of_b = fences_.ForStream(kB, false);
  fences_.MakeProof(first);
  EXPECT_NE(fences_.ForStream(kA, false), first);
  EXPECT_NE(fences_.Held(/*eager=*/false), first);
  EXPECT_EQ(fences_.ForStream(kB, false), of_b);
  EXPECT_THAT(EndScope(), testing::Contains(Index(first)));
  EXPECT_TRUE(fences_.empty());
}

// However many a capture has had.
TEST_F(FenceTableTest, NumbersOfFencesAreUsedAgain) {
  uint32_t most = 0;
  for (int scope = 0; scope < 5; ++scope) {
    const FenceId pending = fences_.Held(/*eager=*/true);
    fences_.Mark();
    for (int i = 0; i < 100; ++i) most = std::max(most, Index(fences_.ForProof()));
    const FenceId stream = fences_.ForStream(kA, false);
    most = std::max(most, Index(stream));
    EXPECT_EQ(fences_.ForStream(kA, false), stream);
    EXPECT_THAT(EndScope(), testing::SizeIs(101));
    EXPECT_FALSE(fences_.empty()) << "one is pending";
    host_.CompleteEvents();
    EXPECT_THAT(Poll(), ElementsAre(Index(pending)));
    EXPECT_TRUE(fences_.empty());
  }
  EXPECT_EQ(most, 104u) << "two are the ring's";
}

// --- A driver that fails ---

TEST_F(FenceTableTest, AFailingDriverLeavesTheFencesAsTheyWere) {
  const FenceId id = fences_.ForStream(kA, true);
  driver_.Arm({.only = DriverCall::kRecordDeviceEvent});
  EXPECT_THROW(fences_.Mark(), DriverError);
  EXPECT_TRUE(fences_.NeedsMark());
  driver_.Disarm();
  fences_.Mark();
  host_.CompleteEvents();
  driver_.Arm({.only = DriverCall::kEventDone});
  EXPECT_THROW(fences_.Poll(), DriverError);
  driver_.Disarm();
  EXPECT_THAT(Poll(), ElementsAre(Index(id)));
  EXPECT_EQ(host_.usage().events, 0u);
}

TEST_F(FenceTableTest, TheDestructorDestroysItsEvents) {
  {
    FenceTable fences(driver_);
    fences.ForStream(kA, true);
    fences.Mark();
    EXPECT_EQ(host_.usage().events, 1u);
  }
  EXPECT_EQ(host_.usage().events, 0u);
}

}  // namespace
}  // namespace cgp
