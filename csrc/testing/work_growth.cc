// cgp_work_growth: that a graph costs the same work however many are in the pool already.
//
// Work is counted, not timed: this program has a core of its own, compiled with
// -fsanitize-coverage=trace-pc, by which every basic block of it that runs calls the counter below.
// The count is the same on every run. What libstdc++ does in its own library is not in it.
//
// The program that it captures leaves five small blocks behind in each graph. Exit code 1 where twice
// the graphs take more than 2.2 times the work.
#include <array>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "core/pool.h"
#include "driver/host_driver.h"

namespace {
uint64_t basic_blocks = 0;
}  // namespace

// The compiler's name for it. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() { ++basic_blocks; }
// NOLINTEND(bugprone-reserved-identifier)

namespace cgp {
namespace {

constexpr uint64_t kFewestGraphs = 4096;
constexpr uint64_t kMostGraphs = 65'536;
constexpr double kMostGrowth = 2.2;  // when graphs double: 2, and a little for searches in trees

class Captures {
 public:
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
  HostDriver driver_{{.physical_limit_bytes = uint64_t{1} << 46, .map_memory = false}};
  Pool pool_{driver_, {}};
  std::mt19937_64 random_{1};
};

int Main() {
  Captures captures;
  uint64_t before = 0;
  uint64_t graphs = 0;
  for (uint64_t most = kFewestGraphs; most <= kMostGraphs; most *= 2) {
    for (; graphs < most; ++graphs) captures.Add();
    const double growth = static_cast<double>(basic_blocks) / static_cast<double>(before);
    std::printf("%6llu graphs: %12llu basic blocks, %5.0f a graph",
                static_cast<unsigned long long>(graphs),
                static_cast<unsigned long long>(basic_blocks),
                static_cast<double>(basic_blocks) / static_cast<double>(graphs));
    if (before > 0) std::printf(", %.2f times those of half as many", growth);
    std::printf("\n");
    if (basic_blocks == 0) {
      std::printf("BROKEN: nothing is counted: the core was compiled without trace-pc\n");
      return 1;
    }
    if (before > 0 && growth > kMostGrowth) {
      std::printf("BROKEN: that is more than %.1f times\n", kMostGrowth);
      return 1;
    }
    before = basic_blocks;
  }
  return 0;
}

}  // namespace
}  // namespace cgp

int main() { return cgp::Main(); }
