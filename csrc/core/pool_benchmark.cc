// What Allocate() and Free() cost, driver calls apart.
//
// SmallPairs and LargePairs free a random block among N live ones and allocate another. Trace
// replays recorded captures, named by the environment variable CGP_BENCHMARK_TRACES (files
// separated by ':', written by benchmarks/trace_to_text.py): "cold" into a new pool, where pages
// are still being made and mapped, "warm" a second time into the same pool. PoolPairs and
// PoolSetPairs show what the front door adds.
//
// Times are those of the core: a decorator measures every driver call, and what an operation spent
// there is taken off. A pair is the allocation and the free of one block. The two clock readings
// around each operation are part of its time; `clock_ns` says how much that is for a pair.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/pool_set.h"
#include "driver/forwarding_driver.h"
#include "testing/capture_trace.h"
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

  uint64_t calls() const { return calls_; }
  int64_t nanoseconds() const { return nanoseconds_; }

  struct Stop {
    TimedDriver& self;
    Clock::time_point start = Clock::now();
    ~Stop() { self.nanoseconds_ += Nanoseconds(Clock::now() - start); }
  };
  Stop Around(cgp::DriverCall, uint64_t) {
    ++calls_;
    return {*this};
  }

 private:
  uint64_t calls_ = 0;
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

void CountPairs(benchmark::State& state, const std::string& of, std::vector<int64_t>& samples) {
  state.counters[of + "median_ns"] = Percentile(samples, 0.5);
  state.counters[of + "p99_ns"] = Percentile(samples, 0.99);
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
  CountPairs(state, "", samples);
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

// One block of so many pages, beside 10,000 live ones of a page, from a run that is free and goes
// back to it.
void PagesPairs(benchmark::State& state) {
  constexpr uint64_t kLiveBlocks = 10'000;
  const uint64_t bytes = static_cast<uint64_t>(state.range(0)) * kPageBytes;
  Setup setup;
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  for (uint64_t i = 0; i < kLiveBlocks; ++i) setup.Allocate(kPageBytes);
  setup.pool.Free(setup.Allocate(1000 * kPageBytes));
  std::vector<int64_t> allocations;
  std::vector<int64_t> frees;
  for (auto _ : state) {
    cgp::Address address = 0;
    allocations.push_back(setup.CoreTime([&] { address = setup.Allocate(bytes); }));
    frees.push_back(setup.CoreTime([&] { setup.pool.Free(address); }));
    state.SetIterationTime(static_cast<double>(allocations.back() + frees.back()) * 1e-9);
  }
  setup.pool.EndScope();
  state.counters["allocate_ns"] = Percentile(allocations, 0.5);
  state.counters["allocate_p99_ns"] = Percentile(allocations, 0.99);
  state.counters["free_ns"] = Percentile(frees, 0.5);
  state.counters["free_p99_ns"] = Percentile(frees, 0.99);
  state.counters["clock_ns"] = ClockNanoseconds() / 2;
}
BENCHMARK(PagesPairs)->Arg(1)->Arg(50)->Arg(500)->UseManualTime();

// An allocation and its free of one block among 100 live ones, at the front door or past it.
// Without clock readings, so that the door's own cost shows.
template <typename Allocate, typename Free>
void SameBlockPairs(benchmark::State& state, const Allocate& allocate, const Free& free) {
  for (int i = 0; i < 100; ++i) allocate();
  for (auto _ : state) free(allocate());
}

void PoolPairs(benchmark::State& state) {
  Setup setup;
  setup.pool.BeginScope(cgp::ScopeKind::kCapture);
  SameBlockPairs(
      state, [&] { return setup.Allocate(4096); },
      [&](cgp::Address address) { setup.pool.Free(address); });
}
BENCHMARK(PoolPairs);

void PoolSetPairs(benchmark::State& state) {
  Setup setup;
  cgp::PoolSet set(setup.driver);
  for (uint64_t i = 0; i < 8; ++i) set.Retain({0, i});
  set.BeginScope({0, 4}, cgp::ScopeKind::kCapture);
  SameBlockPairs(
      state,
      [&] {
        return set.Allocate({0, 4}, 4096, kStream).address;
      },
      [&](cgp::Address address) { set.Free(address); });
}
BENCHMARK(PoolSetPairs);

// Pair times, by size of the block.
struct PairTimes {
  std::vector<int64_t> small;  // below a page
  std::vector<int64_t> large;
};

// Replays the captures once; blocks that the trace leaves live are freed at the end. Returns the
// core's time in ns.
int64_t Replay(Setup& setup, const cgp::CaptureTrace& trace, PairTimes* times) {
  struct Live {
    cgp::Address address;
    uint64_t bytes;
    int64_t nanoseconds;
  };
  std::unordered_map<uint64_t, Live> live;
  int64_t total = 0;
  const auto free_block = [&](const Live& block) {
    const int64_t time = setup.CoreTime([&] { setup.pool.Free(block.address); });
    total += time;
    if (times == nullptr) return;
    (block.bytes < kPageBytes ? times->small : times->large).push_back(block.nanoseconds + time);
  };
  for (const cgp::TraceGraph& graph : trace) {
    setup.pool.BeginScope(cgp::ScopeKind::kCapture);
    for (const cgp::TraceEvent& event : graph.events) {
      if (event.kind == cgp::TraceEvent::Kind::kFree) {
        free_block(live.extract(event.block).mapped());
        continue;
      }
      const cgp::StreamId stream{event.stream};
      Live block{0, event.bytes, 0};
      block.nanoseconds =
          setup.CoreTime([&] { block.address = setup.pool.Allocate(event.bytes, stream).address; });
      total += block.nanoseconds;
      live.emplace(event.block, block);
    }
    setup.pool.EndScope();
  }
  for (const auto& [id, block] : live) free_block(block);
  return total;
}

void ReplayTrace(benchmark::State& state, const cgp::CaptureTrace& trace, bool warm) {
  PairTimes times;
  uint64_t driver_calls = 0;
  for (auto _ : state) {
    Setup setup;
    if (warm) Replay(setup, trace, nullptr);
    const uint64_t calls_before = setup.driver.calls();
    state.SetIterationTime(static_cast<double>(Replay(setup, trace, &times)) * 1e-9);
    driver_calls = setup.driver.calls() - calls_before;
  }
  CountPairs(state, "small_", times.small);
  CountPairs(state, "large_", times.large);
  state.counters["clock_ns"] = ClockNanoseconds();
  state.counters["driver_calls"] = static_cast<double>(driver_calls);
}

// Throws std::runtime_error for a file that cannot be read or is no trace.
void RegisterTraces() {
  const char* paths = std::getenv("CGP_BENCHMARK_TRACES");
  std::istringstream words(paths == nullptr ? "" : paths);
  for (std::string path; std::getline(words, path, ':');) {
    const auto trace = std::make_shared<const cgp::CaptureTrace>(cgp::ReadTrace(path));
    const std::string file = path.substr(path.rfind('/') + 1);
    for (const bool warm : {false, true}) {
      const std::string name =
          "Trace/" + file.substr(0, file.find('.')) + (warm ? "/warm" : "/cold");
      benchmark::RegisterBenchmark(
          name.c_str(),
          [trace, warm](benchmark::State& state) { ReplayTrace(state, *trace, warm); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

// Before main(), which benchmark_main brings.
[[maybe_unused]] const bool registered = [] {
  try {
    RegisterTraces();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "CGP_BENCHMARK_TRACES: %s\n", error.what());
    std::exit(2);
  }
  return true;
}();

}  // namespace
