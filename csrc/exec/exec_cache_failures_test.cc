// What is left of an ExecCache when a driver's calls fail, or memory ends: all of it, and nothing
// else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "exec/exec_cache_fixture.h"
#include "testing/allocation_faults.h"

namespace cgp {
namespace {

// Uses of a cache that are so many that each call of the drivers is made. Where one fails it is
// made again. Returns how many failed.
int Use(ExecCache* cache, const GraphBook& book, HostDriver* host, bool tries_again) {
  const StreamId streams[] = {kA, kB};
  int failed = 0;
  std::vector<std::pair<GraphNumber, Graph>> live;
  const auto attempt = [&](const auto& call) {
    for (;;) {
      try {
        call();
        return true;
      } catch (const DriverError&) {
        ++failed;
      }
      if (!tries_again) return false;
    }
  };
  for (uint64_t step = 0; step < 60; ++step) {
    if (step % 4 == 0) {
      const Graph graph{10 + step};
      attempt([&] { live.emplace_back(cache->Add(graph), graph); });
    }
    if (live.empty()) continue;
    const GraphNumber number = live[step * 7 % live.size()].first;
    const Graph graph = live[step * 7 % live.size()].second;
    const StreamId stream = streams[step % 2];
    if (step % 11 == 0) attempt([&] { cache->Prepare(number, {stream, true}); });
    GraphExec exec{};
    if (!attempt([&] { exec = cache->Lease(number, stream); })) continue;
    EXPECT_EQ(book.HeldBy(exec), graph) << "another graph would run";
    try {
      cache->Return(number, ExecCache::Launch{.stream = stream, .stream_lasts = step % 3 != 0});
    } catch (const DriverError&) {
      ++failed;  // it is returned all the same
    }
    if (step % 5 == 0) host->CompleteEvents();
    if (step % 17 == 0) attempt([&] { cache->DropIdle(); });
    if (step % 19 == 0) attempt([&] { cache->MakeDropped({stream, true}); });
    if (step % 13 == 0) {
      cache->Remove(number);
      live.erase(live.begin() + static_cast<long>(step * 7 % live.size()));
    }
  }
  for (const auto& entry : live) cache->Remove(entry.first);
  EXPECT_EQ(cache->stats().execs, 0u);
  return failed;
}

class ExecCacheFailureTest : public ExecCacheTest {
 protected:
  ExecCacheFailureTest() {
    host_.HoldEvents(true);
    for (uint64_t step = 0; step < 60; ++step) {
      book_.SetKind(Graph{10 + step}, step % 16 == 0 ? "odd" : "like",
                    step % 20 == 0 ? "alone" : "");
      if (step % 24 == 0) book_.Refuse(Graph{10 + step});
    }
  }
  // Uses it once without a fault, as it must stay possible.
  void ExpectUsable() {
    book_.Disarm();
    events_.Disarm();
    EXPECT_EQ(Use(cache_.get(), book_, &host_, false), 0);
  }
};

TEST_F(ExecCacheFailureTest, EachCallOfTheGraphDriverMayFailOnceOrForGood) {
  for (const bool for_good : {false, true}) {
    for (uint64_t call = 1;; ++call) {
      SCOPED_TRACE(call);
      MakeCache(2);
      const uint64_t before = book_.failures();
      book_.Arm({.call_number = call, .for_good = for_good});
      const int failed = Use(cache_.get(), book_, &host_, /*tries_again=*/!for_good);
      ASSERT_EQ(book_.failures() - before, static_cast<uint64_t>(failed)) << "each is told of";
      if (failed == 0) break;
      ExpectUsable();
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(ExecCacheFailureTest, EachCallForEventsMayFailOnceOrForGood) {
  for (const bool for_good : {false, true}) {
    for (uint64_t call = 1;; ++call) {
      SCOPED_TRACE(call);
      MakeCache(2);
      events_.Arm({.call_number = call, .for_good = for_good});
      Use(cache_.get(), book_, &host_, /*tries_again=*/!for_good);
      if (events_.failures() == 0) break;
      ExpectUsable();
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(ExecCacheTest, AnAddThatFailsForLackOfMemoryLeavesItsKindToTheNext) {
  bool fired = true;
  for (uint64_t number = 1; fired; ++number) {
    cache_.reset();
    MakeCache(2);
    Add(Graph{10}, "one");
    book_.SetKind(Graph{20}, "two");
    const AllocationFault fault(number);
    try {
      cache_->Add(Graph{20});
    } catch (const std::bad_alloc&) {
      EXPECT_EQ(book_.living(), 1u) << "allocation " << number;
      Add(Graph{21}, "two");
      EXPECT_EQ(book_.living(), 2u) << "it was taken for one of the other kind: " << number;
    }
    fired = fault.fired();
  }
}

TEST_F(ExecCacheTest, AFailedUpdateWithoutMemoryForItsErrorIsNeverLeased) {
  MakeCache(1);
  const GraphNumber first = Add(Graph{10});
  const GraphNumber second = Add(Graph{11});
  Launch(first, kA);
  for (uint64_t number = 1;; ++number) {
    Launch(first, kA);
    book_.ForgetChanges();
    book_.Arm({.only = GraphBook::Call::kUpdate});
    bool fired = true;
    try {
      const AllocationFault fault(number);
      try {
        cache_->Lease(second, kA);
      } catch (...) {
        fired = fault.fired();
        throw;
      }
    } catch (const std::exception& e) {
    }
    book_.Disarm();
    Launch(first, kA);
    if (HasFailure()) {
      ADD_FAILURE() << number;
      break;
    }
    if (!fired) break;
  }
}

TEST_F(ExecCacheTest, RemoveNeedsNoMemory) {
  MakeCache(2);
  const GraphNumber first = Add(Graph{10});
  Launch(first, kA);
  {
    const AllocationFault fault(1, true);
    EXPECT_NO_THROW(cache_->Remove(first)) << "SharedGraph's destructor calls it";
  }
}

TEST_F(ExecCacheTest, AddWithoutAnyMemoryLeavesNothing) {
  for (uint64_t number = 1;; ++number) {
    MakeCache(2);
    const GraphNumber first = Add(Graph{10});
    const GraphNumber second = Add(Graph{11});
    Launch(first, kA);
    Remove(first);  // its executable is kept for the second
    book_.SetKind(Graph{12}, "like");
    bool threw = false;
    std::optional<GraphNumber> added;
    {
      const AllocationFault fault(number, true);
      try {
        added = cache_->Add(Graph{12});
      } catch (const std::bad_alloc&) {
        threw = true;
      }
    }
    if (added) cache_->Remove(*added);
    Remove(second);
    EXPECT_EQ(book_.living(), 0U) << "an executable of a kind without graphs, allocation "
                                  << number;
    if (!threw || HasFailure()) break;
  }
}

}  // namespace
}  // namespace cgp
