// Where the memory has no room for as many executables as the limit allows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "exec/exec_cache.h"
#include "exec/exec_cache_fixture.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;

class ExecCacheRoomTest : public ExecCacheTest {
 protected:
  // The next executable that is to be made finds no memory; or none does until Disarm().
  void RunOutOfMemory(bool for_good = false) {
    book_.Arm({.for_good = for_good,
               .only = GraphBook::Call::kInstantiate,
               .status = DriverStatus::kOutOfMemory});
  }
};

TEST_F(ExecCacheRoomTest, WithoutMemoryForANewOneWhatIsHeldGoesOn) {
  for (const auto status : {DriverStatus::kOutOfMemory, DriverStatus::kFailed}) {
    MakeCache(2);
    const GraphNumber first = Add(Graph{10});
    const GraphNumber second = Add(Graph{11});
    const GraphNumber third = Add(Graph{12});
    Launch(first, kA);
    Launch(second, kA);
    for (uint32_t i = 0; i < kLongStay; ++i) Launch(third, kA);
    book_.Arm({.for_good = true, .only = GraphBook::Call::kInstantiate, .status = status});
    const uint64_t failures = book_.failures();
    if (status == DriverStatus::kOutOfMemory) {
      for (uint32_t i = 0; i < 2 * kVeryLongStay; ++i) Launch(third, kA);
      EXPECT_EQ(book_.failures(), failures + 1) << "it is not tried at each launch";
    } else {
      EXPECT_THROW(cache_->Lend(third, kA), DriverError);
    }
    book_.Disarm();
    Launch(third, kA);
    Launch(first, kA);
  }
}

TEST_F(ExecCacheRoomTest, WithoutMemoryForAnotherOneTheOneThatIsThereIsUpdated) {
  MakeCache(4);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  RunOutOfMemory(/*for_good=*/true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(Launch(second, kA), exec);
    EXPECT_EQ(Launch(first, kA), exec);
  }
  EXPECT_EQ(book_.updates(), 6u);
  EXPECT_EQ(book_.failures(), 1u) << "it is not tried at each switch";
  EXPECT_EQ(Execs(), 1u);
  book_.Disarm();
  for (uint32_t i = 0; i < kLaunchesBeforeMore; ++i) Launch(i % 2 == 0 ? second : first, kA);
  EXPECT_EQ(Execs(), 2u) << "there is memory again, and the limit allows two";
}

// Three small kinds and one large, of two graphs, in a memory that has room for one of each.
class ExecCacheOfSizes : public ExecCacheRoomTest,
                         public ::testing::WithParamInterface<std::optional<size_t>> {
 protected:
  void SetUp() override {
    MakeCache(GetParam());
    book_.SetMemory(9);
    for (const Graph graph : {Graph{40}, Graph{41}}) book_.SetSize(graph, 6);
    for (uint64_t kind = 0; kind < 3; ++kind) {
      small_.push_back(Add(Graph{10 * kind}, "small" + std::to_string(kind)));
    }
    large_ = {Add(Graph{40}, "large"), Add(Graph{41}, "large")};
    LaunchSmall();
    Launch(large_[0], kA);
    EXPECT_EQ(Execs(), 4u);
  }
  void LaunchSmall() {
    for (const GraphNumber graph : small_) Launch(graph, kA);
  }
  std::vector<GraphNumber> small_;
  std::vector<GraphNumber> large_;
};

TEST_P(ExecCacheOfSizes, WhatHasRoomStays) {
  for (size_t round = 0; round < 10; ++round) {
    Launch(large_[(round + 1) % 2], kA);
    LaunchSmall();
  }
  EXPECT_EQ(book_.instantiations(), 4u);
  EXPECT_EQ(book_.updates(), 10u);
  EXPECT_LE(book_.failures(), 1u);
}

TEST_P(ExecCacheOfSizes, AStayCostsTheOthersNothing) {
  Launch(large_[1], kA);
  for (uint32_t i = 0; i < kLaunchesBeforeMore / 2; ++i) Launch(large_[1], kA);
  EXPECT_EQ(Execs(), 4u);
  EXPECT_LE(book_.failures(), 1u);
}

TEST_P(ExecCacheOfSizes, AGraphThatNeedsTheMemoryOfAllGetsIt) {
  book_.SetSize(Graph{50}, 9);
  const GraphNumber largest = Add(Graph{50}, "largest");
  EXPECT_EQ(Execs(), 4u);
  Launch(largest, kA);
  EXPECT_EQ(Execs(), 1u);
  LaunchSmall();
  Launch(large_[0], kA);
}

INSTANTIATE_TEST_SUITE_P(All, ExecCacheOfSizes, ::testing::Values(8, std::nullopt));

TEST_F(ExecCacheRoomTest, WithoutMemoryAStayTakesNothingFromTheGraphThatStays) {
  MakeCache(4);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  book_.SetMemory(1);
  for (uint32_t i = 0; i < 2 * kLaunchesBeforeMore; ++i) EXPECT_EQ(Launch(second, kA), exec);
  EXPECT_LE(book_.failures(), 4u);
  EXPECT_EQ(Launch(first, kA), exec) << "though the program stays with its graphs";
}

TEST_F(ExecCacheRoomTest, EachThatMakesRoomIsAwaited) {
  MakeCache(4, std::chrono::milliseconds(200));
  host_.HoldEvents(true);
  std::vector<GraphNumber> others;
  for (const uint64_t graph : {10U, 20U}) {
    others.push_back(Add(Graph{graph}, std::to_string(graph)));
    Launch(others.back(), kA);
  }
  book_.SetMemory(2);
  book_.SetSize(Graph{30}, 2);
  const GraphNumber large = Add(Graph{30}, "large");
  const auto begin = std::chrono::steady_clock::now();
  Launch(large, kA);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(400));
}

class ExecCacheLimits : public ExecCacheRoomTest,
                        public ::testing::WithParamInterface<std::optional<size_t>> {};

TEST_P(ExecCacheLimits, WithoutMemoryForItsKindACaptureEndsAllTheSame) {
  MakeCache(GetParam());
  const GraphNumber first = Add(Graph{10}, "one");
  const GraphNumber second = Add(Graph{20}, "two");
  const GraphExec oldest = Launch(first, kA);
  Launch(second, kA);
  RunOutOfMemory();
  const GraphNumber third = Add(Graph{30}, "three");
  EXPECT_EQ(Execs(), 2u);
  Launch(third, kA);
  EXPECT_EQ(Execs(), 2u);
  EXPECT_EQ(book_.HeldBy(oldest), std::nullopt) << "the longest unused makes room";
  Launch(first, kA);
  EXPECT_EQ(Execs(), 2u);
}

INSTANTIATE_TEST_SUITE_P(All, ExecCacheLimits, ::testing::Values(4, std::nullopt));

TEST_F(ExecCacheRoomTest, WithoutMemoryForTheOnlyOneACaptureFails) {
  MakeCache(4);
  for (const char* const alone : {"", "alone"}) {
    RunOutOfMemory();
    EXPECT_THROW(Add(Graph{10}, "one", alone), DriverError);
    EXPECT_EQ(Execs(), 0u);
  }
  Launch(Add(Graph{20}), kA);
  RunOutOfMemory();
  EXPECT_THROW(Add(Graph{30}, "alone", "alone"), DriverError)
      << "no executable of others will ever do for it";
  EXPECT_EQ(Execs(), 1u);
}

TEST_F(ExecCacheRoomTest, WithoutMemoryInOnesPlaceAnotherOneGoesToo) {
  MakeCache(2);
  const GraphNumber first = Add(Graph{10}, "one");
  const GraphNumber second = Add(Graph{20}, "two");
  const GraphNumber third = Add(Graph{30}, "three");
  Launch(first, kA);
  Launch(second, kA);
  RunOutOfMemory();
  Launch(third, kA);
  EXPECT_EQ(book_.failures(), 1u);
  EXPECT_EQ(Execs(), 1u);
}

TEST_F(ExecCacheRoomTest, WithoutMemoryWhatIsInUseStaysAsItIs) {
  MakeCache(4);
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  book_.ForgetChanges();
  RunOutOfMemory(/*for_good=*/true);
  try {
    cache_->Lend(second, kB);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.status(), DriverStatus::kOutOfMemory);
  }
  EXPECT_THAT(book_.changed(), IsEmpty());
  EXPECT_EQ(Launch(first, kA), exec);
  book_.Disarm();
  Launch(second, kB);
  EXPECT_EQ(Execs(), 2u);
}

TEST_F(ExecCacheRoomTest, AFailureOfAnotherSortIsNoReasonToDoWithout) {
  MakeCache(4);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  book_.ForgetChanges();
  book_.Arm({.for_good = true, .only = GraphBook::Call::kInstantiate});
  EXPECT_THROW(cache_->Lend(second, kA), DriverError);
  EXPECT_THAT(book_.changed(), IsEmpty());
  EXPECT_EQ(Launch(first, kA), exec);
  book_.Disarm();
  Launch(second, kA);
  EXPECT_EQ(Execs(), 2u);
}

TEST_F(ExecCacheRoomTest, WithoutMemoryARefusalIsTheEndOfIt) {
  MakeCache(4);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber refused = Add(Graph{11});
  book_.Refuse(Graph{11});
  Launch(first, kA);
  RunOutOfMemory(/*for_good=*/true);
  EXPECT_THROW(cache_->Lend(refused, kA), DriverError);
  book_.Disarm();
  Launch(refused, kA);
  Launch(first, kA);
  EXPECT_EQ(Execs(), 1u) << "what the memory had room for";
}

TEST_F(ExecCacheRoomTest, GraphsInUseKeepTheirOwnWithinTheBudget) {
  MakeCache(2, std::chrono::milliseconds(0), /*budget_bytes=*/6);  // one takes 1
  std::vector<GraphNumber> graphs;
  for (uint64_t i = 0; i < 8; ++i) graphs.push_back(Add(Graph{10 + i}, std::to_string(i % 4)));
  EXPECT_EQ(Execs(), 2u) << "what is captured is not in use yet";
  for (const GraphNumber graph : graphs) Launch(graph, kA);
  EXPECT_EQ(Execs(), 6u);
}

TEST_F(ExecCacheRoomTest, WhereAllHaveRoomNobodyMarksWhenALaunchEnds) {
  MakeCache(2, std::chrono::milliseconds(0), /*budget_bytes=*/6);
  std::vector<GraphNumber> graphs;
  for (uint64_t i = 0; i < 6; ++i) graphs.push_back(Add(Graph{10 + i}));
  for (std::size_t launch = 0; launch < 9; ++launch) Launch(graphs[launch % 3], kA);
  EXPECT_THAT(events_.calls(), IsEmpty());
  const GraphNumber too_many = Add(Graph{20});
  Launch(graphs[1], kA);
  EXPECT_EQ(host_.usage().events, 1u) << "now somebody may ask whether the launch before has ended";
  Remove(too_many);
  Launch(graphs[0], kA);
  EXPECT_EQ(host_.usage().events, 1u);
}

// Of what was updated before all had room, one is made anew in another's place.
TEST_F(ExecCacheRoomTest, WhereAllHaveRoomNobodyWaitsForAllThatIsQueued) {
  MakeCache(4, std::chrono::milliseconds(1000), /*budget_bytes=*/6);
  host_.HoldEvents(true);
  std::vector<GraphNumber> graphs;
  for (uint64_t i = 0; i < 7; ++i) graphs.push_back(Add(Graph{10 + i}));
  const auto cycle = [&] {
    for (const GraphNumber graph : graphs) {
      const auto began = std::chrono::steady_clock::now();
      Launch(graph, kA);
      EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(500));
      host_.CompleteEvents();  // the device is done with what was marked up to here
    }
  };
  for (int round = 0; round < 20; ++round) cycle();
  Remove(graphs.back());
  graphs.pop_back();
  for (int round = 0; round < 40; ++round) cycle();
}

}  // namespace
}  // namespace cgp
