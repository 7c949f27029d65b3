#include "exec/exec_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exec/exec_cache_fixture.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(ExecCacheTest, WhatIsNotShareableKeepsItsOwn) {
  MakeCache(1);
  const GraphNumber own = Add(Graph{10}, "like", "alone");
  const GraphNumber another = Add(Graph{11}, "like", "alone");
  const GraphNumber first = Add(Graph{20});
  const GraphNumber second = Add(Graph{21});
  const GraphExec exec = Launch(own, kA);
  for (int i = 0; i < 3; ++i) {
    Launch(first, kA);
    Launch(second, kA);
    Launch(another, kA);
    EXPECT_EQ(Launch(own, kA), exec);
  }
  EXPECT_EQ(Execs(), 3u);
  EXPECT_EQ(cache_->stats().alone, (std::map<std::string, size_t>{{"alone", 2}}));
  Remove(own);
  EXPECT_EQ(Execs(), 2u);
  EXPECT_EQ(cache_->stats().alone, (std::map<std::string, size_t>{{"alone", 1}}));
}

TEST_F(ExecCacheTest, WhatWasDroppedIsMadeAgain) {
  MakeCache(/*max_execs=*/1, std::chrono::milliseconds(0), /*budget_bytes=*/3);
  std::vector<GraphNumber> graphs;
  for (uint64_t i = 0; i < 4; ++i) graphs.push_back(Add(Graph{10 + i}));
  for (const GraphNumber graph : {graphs[0], graphs[1], graphs[2]}) Launch(graph, kA);
  Remove(graphs[2]);
  const GraphExec leased = cache_->Lease(graphs[0], kA);
  cache_->DropIdle();
  EXPECT_EQ(Execs(), 1u) << "the leased one";
  Return(graphs[0], kA);
  cache_->DropIdle();
  EXPECT_EQ(Execs(), 0u);

  cache_->MakeDropped({.stream = kB, .stream_lasts = true});
  EXPECT_EQ(Execs(), 2u) << "those that held a graph which is still there";
  const auto made = book_.instantiations();
  EXPECT_THAT(book_.uploads(), SizeIs(2)) << "the first launch is not to take longer";
  EXPECT_NE(Launch(graphs[0], kB), leased);
  Launch(graphs[1], kB);
  EXPECT_EQ(book_.instantiations(), made);
  cache_->MakeDropped({.stream = kB, .stream_lasts = true});
  EXPECT_EQ(book_.instantiations(), made);
}

TEST_F(ExecCacheTest, WhatHasNoMemoryAnyMoreIsLeftToItsLaunch) {
  MakeCache(1);
  const GraphNumber graph = Add(Graph{10});
  cache_->DropIdle();
  book_.Arm({.only = GraphBook::Call::kInstantiate, .status = DriverStatus::kOutOfMemory});
  cache_->MakeDropped({.stream = kA, .stream_lasts = true});
  EXPECT_EQ(Execs(), 0u);
  book_.Disarm();
  Launch(graph, kA);
}

TEST_F(ExecCacheTest, AnUnfinishedLaunchElsewhereIsNotTouched) {
  MakeCache(1);
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec running = Launch(first, kA);
  book_.ForgetChanges();
  const GraphExec other = Launch(second, kB);
  EXPECT_NE(other, running);
  EXPECT_THAT(book_.changed(), IsEmpty());
  EXPECT_EQ(book_.HeldBy(running), Graph{10});
  EXPECT_EQ(Execs(), 2u);
  // Each goes on with what it has.
  EXPECT_EQ(Launch(first, kA), running);
  EXPECT_EQ(Launch(second, kB), other);
  EXPECT_THAT(book_.changed(), IsEmpty());
  // Both have ended: the number goes back.
  host_.CompleteEvents();
  host_.HoldEvents(false);
  for (uint32_t i = 0; i < kLaunchesBeforeMore; ++i) Launch(i % 2 == 0 ? first : second, kA);
  EXPECT_EQ(Execs(), 1u) << "though each graph has its own";
}

TEST_F(ExecCacheTest, ACapturingStreamIsNotAskedAndCountsAsUnfinished) {
  MakeCache(1);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA);
  const CaptureId capture = host_.graphs().Begin(kA);
  const GraphExec other = Launch(second, kB);
  EXPECT_NE(other, exec);
  EXPECT_EQ(host_.calls()[DriverCall::kRecordEvent], 0u);
  host_.graphs().Invalidate(capture);
  EXPECT_NE(Launch(Add(Graph{12}), kB), exec) << "nor while nobody has ended it";
  host_.graphs().End(capture);
  Launch(Add(Graph{13}), kB);
  EXPECT_EQ(Execs(), 1u);
}

// Another thread begins a capture between the question whether one is under way and the mark, which
// is a part of it then: CUDA refuses every question after such an event.
class ExecCacheRaceTest : public ExecCacheTest, public ::testing::WithParamInterface<bool> {};

TEST_P(ExecCacheRaceTest, AMarkThatACaptureMayHaveTakenIsNotAskedAfter) {
  const bool lasts = GetParam();
  MakeCache(1);
  CaptureId capture = kNoCapture;
  bool marked = false;
  events_.Meanwhile([&](DriverCall call) {
    if (call == DriverCall::kRecordEvent) marked = true;
    if (call != DriverCall::kCapture || !marked || capture != kNoCapture) return;
    capture = host_.graphs().Begin(kA);
  });
  const GraphExec exec = Launch(Add(Graph{10}), kA, lasts);
  EXPECT_NE(Launch(Add(Graph{11}), kB), exec) << "it counts as unfinished";
  EXPECT_NE(capture, kNoCapture);
  EXPECT_EQ(host_.usage().events, 0u);
  for (const DriverCall call : events_.calls()) EXPECT_NE(call, DriverCall::kEventDone);
  host_.graphs().End(capture);
  Launch(Add(Graph{12}), kC);
  EXPECT_EQ(Execs(), lasts ? 1u : 2u) << "where the stream may be gone nobody will ever know";
}

INSTANTIATE_TEST_SUITE_P(StreamLasts, ExecCacheRaceTest, ::testing::Bool());

TEST_F(ExecCacheTest, AStreamThatMayGoIsMarkedAtOnceAndNeverNamedAgain) {
  MakeCache(1);
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const GraphExec exec = Launch(first, kA, /*lasts=*/false);
  EXPECT_THAT(events_.calls(),
              ElementsAre(DriverCall::kCapture, DriverCall::kRecordEvent, DriverCall::kCapture));
  events_.Disarm();
  EXPECT_NE(Launch(second, kB), exec);
  EXPECT_THAT(events_.calls(), ElementsAre(DriverCall::kEventDone)) << "the stream may be gone";
  Launch(first, kA, /*lasts=*/false);
  EXPECT_EQ(host_.usage().events, 1u) << "one mark for each executable";
}

TEST_F(ExecCacheTest, PreparesNothingOnAStreamThatACaptureHolds) {
  MakeCache(1);
  Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  const CaptureId capture = host_.graphs().Begin(kA);
  cache_->Prepare(second, {kA, true});
  EXPECT_EQ(book_.updates(), 1u) << "it can be held";
  EXPECT_THAT(book_.uploads(), IsEmpty()) << "but this would be captured";
  host_.graphs().End(capture);
  cache_->Prepare(second, {kA, true});
  EXPECT_THAT(book_.uploads(), SizeIs(1));
}

TEST_F(ExecCacheTest, WhatIsDestroyedHasEnded) {
  MakeCache(1, std::chrono::seconds(60));
  host_.HoldEvents(true);
  Launch(Add(Graph{10}, "one"), kA);
  const GraphNumber other = Add(Graph{20}, "two");
  std::atomic<bool> ended = false;
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ended = true;
    host_.HoldEvents(false);  // what is marked from now on
    host_.CompleteEvents();
  });
  Launch(other, kA);
  EXPECT_TRUE(ended) << "its memory was given back while it ran";
  device.join();
}

TEST_F(ExecCacheTest, WhoWaitsLetsOthersGoOnAndThenPlansAnew) {
  MakeCache(1, std::chrono::seconds(10));
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10}, "one");
  const GraphNumber other = Add(Graph{20}, "two");
  const GraphExec exec = Launch(first, kA);
  std::thread waiting([&] { Launch(other, kA); });
  EXPECT_TRUE(SomebodyAsks());
  const GraphExec leased = cache_->Lease(first, kA);
  EXPECT_EQ(leased, exec) << "it was gone by the time that it could be had";
  // No launch has ended; but what is leased makes no room, so it gets one beyond the limit.
  waiting.join();
  EXPECT_EQ(book_.HeldBy(leased), Graph{10});
  EXPECT_EQ(Execs(), 2u);
  Return(first, kA);
}

TEST_F(ExecCacheTest, WhatIsLaunchedMeanwhileIsNotAwaited) {
  constexpr std::chrono::seconds kLongest{10};
  MakeCache(1, kLongest);
  host_.HoldEvents(true);
  const GraphNumber first = Add(Graph{10}, "one");
  const GraphNumber other = Add(Graph{20}, "two");
  Launch(first, kA);
  const auto begin = std::chrono::steady_clock::now();
  std::thread waiting([&] { Launch(other, kA); });
  EXPECT_TRUE(SomebodyAsks());
  Launch(first, kA);  // no launch ever ends
  waiting.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLongest);
}

// --- Many threads ---

TEST_F(ExecCacheTest, ThreadsLeaseAndReturnAtRandom) {
  constexpr int kThreads = 4;
  MakeCache(2, std::chrono::milliseconds(1));
  host_.HoldEvents(true);
  for (uint64_t graph = 0; graph < 100 * kThreads; ++graph) {
    book_.SetKind(Graph{graph}, graph % 3 == 0 ? "odd" : "like", graph % 10 == 9 ? "alone" : "");
    if (graph % 17 == 5) book_.Refuse(Graph{graph});
  }
  std::vector<GraphNumber> shared;
  for (uint64_t i = 0; i < 4; ++i) shared.push_back(cache_->Add(Graph{i}));
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread + 1);
      const StreamId stream{1 + thread};
      std::vector<std::pair<GraphNumber, Graph>> own;
      for (uint64_t i = 0; i < 4; ++i) own.emplace_back(shared[i], Graph{i});
      for (uint64_t step = 0; step < 600; ++step) {
        if (own.size() < 8 && random() % 4 == 0) {
          const Graph graph{100 * thread + 10 + random() % 90};
          own.emplace_back(cache_->Add(graph), graph);
        }
        const size_t pick = random() % own.size();
        const auto [number, graph] = own[pick];
        const GraphExec exec = cache_->Lease(number, stream);
        if (random() % 4 == 0) std::this_thread::yield();
        if (book_.HeldBy(exec) != graph) ++wrong;
        const auto launch = ExecCache::Launch{stream, random() % 3 != 0};
        cache_->Return(number, launch);
        if (random() % 6 == 0) host_.CompleteEvents(stream);
        if (random() % 16 == 0) cache_->Prepare(number, {stream, true});
        if (random() % 32 == 0) cache_->DropIdle();
        if (random() % 32 == 0) cache_->MakeDropped({stream, true});
        if (pick >= 4 && random() % 3 == 0) {
          cache_->Remove(number);
          own.erase(own.begin() + static_cast<long>(pick));
        }
        (void)cache_->stats();
      }
      for (size_t i = 4; i < own.size(); ++i) cache_->Remove(own[i].first);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  for (const GraphNumber number : shared) cache_->Remove(number);
  EXPECT_EQ(Execs(), 0u);
}

}  // namespace
}  // namespace cgp
