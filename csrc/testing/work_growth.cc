// cgp_work_growth: that a graph costs the same work however many there are already, in its pool or
// with a pool each.
//
// Work is counted, not timed: counted_core.h.
//
// The programs leave blocks behind in each graph, but for the one of stitched blocks. Exit code 1
// where twice the graphs take more than 2.2 times the work.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "core/pool.h"
#include "core/pool_set.h"
#include "testing/counted_core.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr double kMostGrowth = 2.2;  // when graphs double: 2, and a little for searches in trees

constexpr HostDriverOptions kManyPages{.physical_limit_bytes = uint64_t{1} << 46,
                                       .map_memory = false};

class InOnePool {
 public:
  static constexpr const char* kName = "in one pool";
  // Until then the places that are known of each way to begin a graph grow to KnownPlaces'
  // kMostPlaces, and each of them is looked at.
  static constexpr uint64_t kFewest = 32'768;
  static constexpr uint64_t kMost = 131'072;

  // One graph: eight blocks, of which three are freed.
  void Add() {
    constexpr std::array<uint64_t, 5> kSizes = {512, 700, 1024, 4096, 100'000};
    constexpr int kBlocks = 8;
    constexpr int kFreed = 3;
    std::vector<Address> blocks;
    pool_.BeginScope(ScopeKind::kCapture);
    for (int i = 0; i < kBlocks; ++i) {
      const uint64_t bytes = kSizes[random_() % kSizes.size()];
      blocks.push_back(pool_.Allocate(bytes, StreamId{0}).address);
    }
    for (int i = 1; i <= kFreed; ++i) pool_.Free(blocks[blocks.size() - static_cast<size_t>(i)]);
    pool_.EndScope();
  }

 private:
  HostDriver driver_{kManyPages};
  Pool pool_{driver_, {}};
  std::mt19937_64 random_{1};
};

// Captures of two streams, of which one waits for the other. Each keeps five small blocks.
class OfTwoStreams {
 public:
  static constexpr const char* kName = "of two streams";
  static constexpr uint64_t kFewest = 2048;
  static constexpr uint64_t kMost = 16'384;

  void Add() {
    constexpr StreamId kA{1};
    constexpr StreamId kB{2};
    HostGraphs& graphs = driver_.graphs();
    pool_.BeginScope(ScopeKind::kCapture);
    const CaptureId capture = graphs.Begin(kA);
    graphs.Wait(kB, graphs.Record(kA));
    for (int i = 0; i < 5; ++i) {
      for (const StreamId stream : {kA, kB}) {
        const Address freed = pool_.Allocate(4096, stream).address;
        if (i % 2 == 0 || stream == kA) pool_.Allocate(512, stream);
        graphs.Launch(stream);
        pool_.Free(freed);
      }
    }
    graphs.Wait(kA, graphs.Record(kB));
    graphs.End(capture);
    pool_.EndScope();
  }

 private:
  HostDriver driver_{kManyPages};
  Pool pool_{driver_, {}};
};

// Scopes of eager work in a pool in which captures keep blocks, five for each.
class OfEagerWork {
 public:
  static constexpr const char* kName = "and eager scopes";
  static constexpr uint64_t kFewest = 2048;
  static constexpr uint64_t kMost = 16'384;

  void Add() {
    pool_.BeginScope(ScopeKind::kCapture);
    for (int i = 0; i < 5; ++i) pool_.Allocate(4096, StreamId{1});
    pool_.EndScope();
    for (int i = 0; i < 4; ++i) {
      pool_.BeginScope(ScopeKind::kEager);
      pool_.Free(pool_.Allocate(100'000, StreamId{1}).address);
      pool_.EndScope();
    }
  }

 private:
  HostDriver driver_{kManyPages};
  Pool pool_{driver_, {}};
};

// The same sizes again and again, of large blocks that are stitched.
class OfStitchedBlocks {
 public:
  static constexpr const char* kName = "of stitched blocks";
  static constexpr uint64_t kFewest = 200;
  static constexpr uint64_t kMost = 800;

  void Add() {
    constexpr uint64_t kBlocks = 100;
    constexpr uint64_t kSizes = 50;
    const uint64_t unit = 4096 * (made_++ % kSizes + 1);
    std::vector<Address> blocks;
    pool_.BeginScope(ScopeKind::kCapture);
    for (uint64_t i = 1; i <= kBlocks; ++i) {
      blocks.push_back(pool_.Allocate(i * unit, StreamId{0}).address);
    }
    for (const Address block : blocks) pool_.Free(block);
    pool_.EndScope();
  }

 private:
  HostDriver driver_{kManyPages};
  Pool pool_{driver_, {}};
  uint64_t made_ = 0;
};

class InPoolsOfTheirOwn {
 public:
  static constexpr const char* kName = "with a pool each";
  static constexpr uint64_t kFewest = 256;
  static constexpr uint64_t kMost = 2048;

  // One graph, with what torch and the adapter ask for each.
  void Add() {
    const PoolId id{0, ++made_};
    set_.Trim();
    set_.BeginScope(id, ScopeKind::kCapture);
    set_.Allocate(id, 512, StreamId{0});
    if (set_.TakeNewPeak()) peak_ = set_.Usage().all.bytes.peak;
    set_.ResetPeaks();
    set_.EndScope(id);
  }

 private:
  HostDriver driver_{kManyPages};
  PoolSet set_{driver_};
  uint64_t made_ = 0;
  uint64_t peak_ = 0;
};

template <typename Captures>
bool IsSteady() {
  Captures captures;
  basic_blocks = 0;
  uint64_t before = 0;
  uint64_t graphs = 0;
  for (uint64_t most = Captures::kFewest; most <= Captures::kMost; most *= 2) {
    for (; graphs < most; ++graphs) captures.Add();
    const double growth = static_cast<double>(basic_blocks) / static_cast<double>(before);
    std::printf("%6llu graphs %s: %12llu basic blocks, %5.0f a graph",
                static_cast<unsigned long long>(graphs), Captures::kName,
                static_cast<unsigned long long>(basic_blocks),
                static_cast<double>(basic_blocks) / static_cast<double>(graphs));
    if (before > 0) std::printf(", %.2f times those of half as many", growth);
    std::printf("\n");
    if (basic_blocks == 0) {
      std::printf("BROKEN: nothing is counted: the core was compiled without trace-pc\n");
      return false;
    }
    if (before > 0 && growth > kMostGrowth) {
      std::printf("BROKEN: that is more than %.1f times\n", kMostGrowth);
      return false;
    }
    before = basic_blocks;
  }
  return true;
}

}  // namespace
}  // namespace cgp

int main() {
  using namespace cgp;
  const std::array steady{IsSteady<InOnePool>(), IsSteady<InPoolsOfTheirOwn>(),
                          IsSteady<OfTwoStreams>(), IsSteady<OfEagerWork>(),
                          IsSteady<OfStitchedBlocks>()};
  return std::ranges::find(steady, false) == steady.end() ? 0 : 1;
}
