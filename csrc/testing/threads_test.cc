// Many threads at once, in pools of one set and in several sets; meant to be run under
// ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"
#include "core/pool_set.h"
#include "testing/capture_program.h"
#include "testing/fuzz_session.h"
#include "testing/host_driver.h"
#include "testing/pool_of.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

// Fills a pool of this thread's own in several scopes, as one graph each, and lets go of them;
// returns how many blocks held foreign data.
uint64_t FillAndFree(PoolSet& set, PoolId id, ScopeKind kind, uint64_t seed) {
  std::mt19937_64 random(seed);
  uint64_t wrong = 0;
  for (int graph = 0; graph < 12; ++graph) {
    set.BeginScope(id, kind);
    std::vector<Kernel> live;  // each sees that its block holds what was written
    for (int i = 0; i < 60; ++i) {
      const StreamId stream{seed * 4 + random() % 2};
      const Block block = set.Allocate(id, 1 + random() % (6 * kPage), stream);
      live.push_back({block, random(), /*writes=*/false});
      Kernel{block, live.back().word, /*writes=*/true}.Run();
      if (random() % 8 == 0) set.RecordUse(block.address, StreamId{seed * 4 + 3});
      if (live.size() > 6) {
        const size_t pick = random() % live.size();
        if (!live[pick].Run()) ++wrong;
        set.Free(live[pick].block.address);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(pick));
      }
    }
    set.EndScope(id);
    for (const Kernel& owned : live) {
      if (!owned.Run() || PoolOf(set, owned.block.address) != id) ++wrong;
      set.Free(owned.block.address);
    }
    set.Release(id);
  }
  return wrong;
}

// Asks for everything that may be asked for at any time.
void Watch(const PoolSet& set, const std::atomic<bool>& done) {
  while (!done) {
    for (const PoolId id : set.ids()) {
      try {
        const PoolSnapshot snapshot = set.Snapshot(id);
        for (const auto& live : snapshot.blocks) (void)set.Find(live.block.address + 1);
      } catch (const UsageError&) {
        // Released and trimmed since.
      }
      (void)set.UseCount(id);
    }
    const SetUsage usage = set.Usage();
    if (usage.all.bytes.current > usage.reserved_bytes.current) ADD_FAILURE() << "out of step";
    (void)set.TrimmableBytes();
    set.Check();
    std::this_thread::yield();
  }
}

class ThreadsInOneSet : public ::testing::TestWithParam<ScopeKind> {};

TEST_P(ThreadsInOneSet, FillPoolsOfTheirOwn) {
  HostDriver host({.granularity = kPage});
  PoolSet set(host);
  std::atomic<uint64_t> wrong = 0;
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    threads.emplace_back([&, seed] {
      wrong += FillAndFree(set, {0, seed}, GetParam(), seed);
      // Sets have nothing in common.
      HostDriver own_host({.device = static_cast<int>(seed), .granularity = kPage});
      PoolSet own_set(own_host);
      wrong += FillAndFree(own_set, {0, 1}, GetParam(), seed);
    });
  }
  std::thread watcher([&] { Watch(set, done); });
  std::thread trimmer([&] {
    // Not while anything is captured.
    while (!done && GetParam() == ScopeKind::kEager) {
      set.Trim();
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  watcher.join();
  trimmer.join();
  EXPECT_EQ(wrong, 0U);
  set.Trim();
  EXPECT_TRUE(set.ids().empty());
  EXPECT_EQ(host.usage(), HostUsage{});
}

INSTANTIATE_TEST_SUITE_P(Kinds, ThreadsInOneSet,
                         ::testing::Values(ScopeKind::kCapture, ScopeKind::kEager),
                         [](const auto& one) {
                           return one.param == ScopeKind::kCapture ? "Capture" : "Eager";
                         });

// Captures of several streams in each thread, each into a pool of its own: as if each were alone.
TEST(ThreadsTest, ManyStreamsAreCapturedInEachOfManyThreads) {
  World world({.granularity = kPage}, {.page_bytes = kPage});
  std::vector<std::thread> threads;
  std::vector<std::string> complaints(6);
  std::atomic<uint64_t> across = 0;
  for (uint64_t number = 0; number < complaints.size(); ++number) {
    threads.emplace_back([&, number] {
      CaptureProgram program(1000 + number);
      program.setup.page_bytes = kPage;
      FuzzSession session(program.setup, &world, number);
      complaints[number] = RunAll(session, program.steps);
      across += session.model().reused_across_streams();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& complaint : complaints) EXPECT_EQ(complaint, "");
  EXPECT_GT(across, 0U);
  world.set->Trim();
  EXPECT_EQ(world.host.usage(), HostUsage{});
}

TEST(ThreadsTest, BlocksOfOneThreadAreFreedByAnother) {
  HostDriver host({.granularity = kPage});
  PoolSet set(host);
  set.BeginScope({0, 1}, ScopeKind::kCapture);
  constexpr size_t kBlocks = 2000;
  std::vector<std::atomic<Address>> handed_over(kBlocks);
  std::thread freeing([&] {
    for (std::atomic<Address>& place : handed_over) {
      Address address = 0;
      while ((address = place.load(std::memory_order_acquire)) == 0) std::this_thread::yield();
      set.Free(address);
    }
  });
  std::mt19937_64 random(3);
  for (std::atomic<Address>& place : handed_over) {
    const Block block = set.Allocate({0, 1}, 1 + random() % (3 * kPage), StreamId{1});
    Kernel{block, block.address, /*writes=*/true}.Run();
    place.store(block.address, std::memory_order_release);
  }
  freeing.join();
  set.EndScope({0, 1});
  EXPECT_EQ(set.Stats({0, 1}).live_blocks, 0U);
  set.Check();
}

}  // namespace
}  // namespace cgp
