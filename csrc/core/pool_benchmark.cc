// What Allocate() and Free() cost, driver calls apart.
//
// SmallPairs and LargePairs free a random block among N live ones and allocate another. What
// recorded captures cost cgp_quality says.
//
// Times are those of the core: a decorator measures every driver call, and what an operation spent
// there is taken off. A pair is the allocation and the free of one block. The two clock readings
// around each operation are part of its time; `clock_ns` says how much that is for a pair.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/pool.h"
#include "driver/forwarding_driver.h"
#include "testing/host_driver.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kPageBytes = uint64_t{2} << 20;
constexpr cgp::StreamId kStream{1};

int64_t Nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// Adds up the time that calls take, those that throw included: it is the driver's too.
class TimedDriver final : public cgp::ForwardingDriver<TimedDriver> {
 public:
  using ForwardingDriver::ForwardingDriver;

  int64_t nanoseconds() const { return nanoseconds_; }

  struct Stop {
    TimedDriver& self;
    Clock::time_point start = Clock::now();
    ~Stop() { self.nanoseconds_ += Nanoseconds(Clock::now() - start); }
  };
  Stop Around(cgp::DriverCall, uint64_t) { return {*this}; }

 private:
  int64_t nanoseconds_ = 0;
};

// A pool over a host driver that only counts: the core decides the same, and no memory is touched.
struct Setup {
  cgp::HostDriver host{{.physical_limit_bytes = uint64_t{1} << 42, .map_memory = false}};
  TimedDriver driver{host};
  cgp::Pool pool{driver, {}};

  cgp::Address Allocate(uint64_t bytes) { return pool.Allocate(bytes, kStream).address; }

  // The time of `call` in ns without what it spent in the driver.
  template <typename Call>
  int64_t CoreTime(const Call& call) {
    const int64_t driver_before = driver.nanoseconds();
    const auto start = Clock::now();
    call();
    return Nanoseconds(Clock::now() - start) - (driver.nanoseconds() - driver_before);
  }
};

double Percentile(std::vector<int64_t>& samples, double fraction) {
  if (samples.empty()) return 0;
  const auto at = static_cast<ptrdiff_t>(static_cast<double>(samples.size() - 1) * fraction);
  std::nth_element(samples.begin(), samples.begin() + at, samples.end());
  return static_cast<double>(samples[static_cast<size_t>(at)]);
}

// What the clock alone adds to a pair: two operations, each timed once.
double ClockNanoseconds() {
  std::vector<int64_t> samples(10'001);
  for (int64_t& sample : samples) {
    const auto start = Clock::now();
    sample = Nanoseconds(Clock::now() - start);
  }
  return 2 * Percentile(samples, 0.5);
}

// Times each pair: pair() returns the core's time in ns. Ends the scope.
template <typename Pair>
void TimePairs(benchmark::State& state, Setup& setup, const Pair& pair) {
  std::vector<int64_t> samples;
  for (auto _ : state) {
    samples.push_back(pair());
    state.SetIterationTime(static_cast<double>(samples.back()) * 1e-9);
  }
  setup.pool.EndScope();
  state.counters["median_ns"] = Percentile(samples, 0.5);
  state.counters["p99_ns"] = Percentile(samples, 0.99);
  state.counters["clock_ns"] = ClockNanoseconds();
}

// Log-uniform, so that each order of magnitude is as frequent as any other.
class Sizes {
 public:
  Sizes(uint64_t least, uint64_t most, uint64_t seed)
      : random_(seed),
        log_(std::log2(static_cast<double>(least)), std::log2(static_cast<double>(most))) {}
  uint64_t Next() { return static_cast<uint64_t>(std::exp2(log_(random_))); }
  size_t Below(size_t count) {
    return std::uniform_int_distribution<size_t>(0, count - 1)(random_);
  }

 private:
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> log_;
};

void RandomPairs(benchmark::State& state, uint64_t least, uint64_t most) {
  const auto live_blocks = static_cast<size_t>(state.range(0));
  Setup setup;
  Sizes sizes(least, most, /*seed=*/1);
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  std::vector<cgp::Address> live(live_blocks);
  const auto replace = [&](cgp::Address& address) {
    const uint64_t bytes = sizes.Next();
    int64_t time = setup.CoreTime([&] { setup.pool.Free(address); });
    time += setup.CoreTime([&] { address = setup.Allocate(bytes); });
    return time;
  };
  for (cgp::Address& address : live) address = setup.Allocate(sizes.Next());
  // Until the pool looks as it will from here on: fragmented, and no longer growing fast.
  for (size_t i = 0; i < 2 * live_blocks; ++i) replace(live[sizes.Below(live_blocks)]);

  TimePairs(state, setup, [&] { return replace(live[sizes.Below(live_blocks)]); });
  state.SetComplexityN(state.range(0));
  state.counters["ranges"] = static_cast<double>(setup.pool.Stats().ranges);
}

void SmallPairs(benchmark::State& state) { RandomPairs(state, cgp::kGranuleBytes, kPageBytes / 2); }
BENCHMARK(SmallPairs)
    ->RangeMultiplier(10)
    ->Range(100, 100'000)
    ->UseManualTime()
    ->Complexity(benchmark::oLogN);

void LargePairs(benchmark::State& state) { RandomPairs(state, kPageBytes, 16 * kPageBytes); }
BENCHMARK(LargePairs)->RangeMultiplier(10)->Range(10, 10'000)->Arg(3'000)->UseManualTime();

// How an operation grows with what is there already, which benchmarks/growth.py draws: pairs of
// small blocks of one size beside N live ones, beside what N graphs have left, and of whole pages
// in a pool of N; and making the last of those pages.
void TimePairsOf(benchmark::State& state, Setup& setup, uint64_t bytes) {
  TimePairs(state, setup, [&] {
    cgp::Address address = 0;
    const int64_t time = setup.CoreTime([&] { address = setup.Allocate(bytes); });
    return time + setup.CoreTime([&] { setup.pool.Free(address); });
  });
}

void GrowthOfBlocks(benchmark::State& state) {
  Setup setup;
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  Sizes sizes(cgp::kGranuleBytes, kPageBytes / 32, /*seed=*/1);
  std::vector<cgp::Address> freed;
  for (int64_t i = 0; i < state.range(0); ++i) {
    setup.Allocate(sizes.Next());
    if (i % 2 == 0) freed.push_back(setup.Allocate(sizes.Next()));
  }
  for (const cgp::Address address : freed) setup.pool.Free(address);
  TimePairsOf(state, setup, 4096);
}
BENCHMARK(GrowthOfBlocks)->RangeMultiplier(10)->Range(1000, 1'000'000)->UseManualTime();

void GrowthOfGraphs(benchmark::State& state) {
  Setup setup;
  Sizes sizes(cgp::kGranuleBytes, 4 * kPageBytes, /*seed=*/1);
  for (int64_t graph = 0; graph < state.range(0); ++graph) {
    setup.pool.BeginScope(cgp::ScopeKind::kCapture);
    std::vector<cgp::Address> freed;
    for (int i = 0; i < 50; ++i) freed.push_back(setup.Allocate(sizes.Next()));
    for (size_t i = 1; i < freed.size(); ++i) setup.pool.Free(freed[i]);
    setup.pool.EndScope();
  }
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  TimePairsOf(state, setup, 4096);
}
BENCHMARK(GrowthOfGraphs)->RangeMultiplier(10)->Range(10, 10'000)->UseManualTime();

void GrowthOfPages(benchmark::State& state) {
  Setup setup;
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  std::vector<cgp::Address> freed;
  std::vector<int64_t> last;
  for (int64_t page = 0; page < state.range(0); page += 2) {
    setup.Allocate(kPageBytes);
    const int64_t time = setup.CoreTime([&] { freed.push_back(setup.Allocate(kPageBytes)); });
    if (page >= state.range(0) - 100) last.push_back(time);
  }
  state.counters["new_page_ns"] = Percentile(last, 0.5);
  for (const cgp::Address address : freed) setup.pool.Free(address);
  TimePairsOf(state, setup, kPageBytes);
}
BENCHMARK(GrowthOfPages)->RangeMultiplier(10)->Range(100, 100'000)->UseManualTime();

}  // namespace
