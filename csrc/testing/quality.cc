// cgp_quality: what pools reserve and map for captures, in many orders, against what they must.
//
// Each trace is replayed as it was recorded and, with --orders N, by key up and down and shuffled,
// N orders in all. For each it prints reserved ÷ minimum (mean, 99th percentile, worst), the
// mappings of the pool and the time of an operation. Exit code 1 where a bound (kBounds) is broken:
// it names trace, order and seed.
//
//   --warm         each graph is captured behind a warm-up in the pool, as graph trees do it
//   --training     of training steps, where what survives a capture lies between what fits there
//   --hostile      of captures made to be bad, and of small ones that were found to be
//   --fresh        of programs that were made up for this run: chance makes some worse. The mean is
//                  judged as without, of --training and --hostile a hundredth above that; the
//                  worst may be 1.25 times as bad, or three pages worse
//   --streams      of programs of several streams, which say what they launch and wait for
//   --one-way      of streams of which one waits for another that never, or once, waits for it
//   --repeat N     the graphs N times over, in one pool: once all are dropped before the first of
//                  them is captured anew, and once, without --held, each when it has been. From the fourth
//                  time on (then: the fifth, or sixth) nothing is mapped, of several streams 2 %
//                  of the first time's at the most, and the pool is no larger than 1.01 of what
//                  it is then, and of one stream than 1.25 of what it must be

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "driver/driver_call.h"
#include "testing/capture_trace.h"
#include "testing/counted_core.h"
#include "testing/host_driver.h"
#include "testing/options.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = uint64_t{2} << 20;

constexpr std::size_t kOrders = 4;

using ScopePair = std::array<ScopeKind, 2>;

// For printf().
unsigned long long Long(uint64_t number) { return number; }

// Of reserved ÷ minimum. Mean and 99th percentile are those of pools that need `kLargePool` pages
// and more; none reserves more than the worst, or so many pages more than the minimum.
struct Bounds {
  double mean = 0;
  double p99 = 0;
  double worst = 0;
  double spare_pages = 0;
};
constexpr uint64_t kLargePool = 32;
constexpr double kAny = std::numeric_limits<double>::infinity();
constexpr Bounds kBounds{.mean = 1.010, .p99 = 1.035, .worst = 1.05, .spare_pages = 3};
constexpr Bounds kWarmBounds{.mean = 1.012, .p99 = 1.035, .worst = 1.05, .spare_pages = 3};
constexpr Bounds kHostileBounds{.mean = 1.03, .p99 = kAny, .worst = 1.6, .spare_pages = 4};
constexpr Bounds kTrainingBounds{.mean = 1.025, .p99 = 1.08, .worst = 1.08, .spare_pages = 4};
constexpr Bounds kStreamsBounds{.mean = 1.27, .p99 = kAny, .worst = 3, .spare_pages = 9};
constexpr Bounds kOneWayBounds{.mean = 1.45, .p99 = kAny, .worst = 3, .spare_pages = 11};

// Of captures made again and again: from this time on they map no more than that part of what they
// mapped the first time.
constexpr uint64_t kSettled = 4;
// Where old ones are dropped behind them, a ring may begin in the third, and has its size in the
// next. With several streams others may lose pages to it, and have new ones in the fifth.
constexpr uint64_t kSettledDropping = 5;
constexpr uint64_t kSettledDroppingOfSeveral = 6;
constexpr double kMostOfSeveral = 0.02;
constexpr uint64_t kFewOfSeveral = 6;  // calls, which two small programs map at a time
constexpr double kMostPages = 1.01;
// What they then take at the most of the minimum, or of the first time, or so many pages above.
// Several streams may come to take so many more.
constexpr double kMostDropped = 1.25;
constexpr uint64_t kSparePages = 3;

struct Options {
  uint64_t orders = 1;
  uint64_t seed = 1;
  uint64_t repeat = 1;
  bool warm = false;
  bool hostile = false;
  bool fresh = false;
  bool training = false;
  bool held = false;
  bool streams = false;
  bool one_way = false;

  Bounds bounds() const {
    if (!fresh) return KindsBounds();
    const auto& [mean, p99, worst, spare_pages] = KindsBounds();
    // Over seeds the mean of hostile ones, and of those that train, has a standard deviation of 0.003.
    const double chance = hostile || training ? 0.01 : 0;
    return {mean + chance, kAny, 1.25 * worst, spare_pages + 3};
  }
  const Bounds& KindsBounds() const {
    if (streams) return kStreamsBounds;
    if (one_way) return kOneWayBounds;
    if (hostile) return kHostileBounds;
    if (training) return kTrainingBounds;
    return warm ? kWarmBounds : kBounds;
  }
  // What the graphs are played as, in turn.
  ScopePair scopes() const {
    return {warm ? ScopeKind::kEager : ScopeKind::kCapture, ScopeKind::kCapture};
  }
};

// One replay.
struct Run {
  std::string order;     // with its seed
  std::size_t kind = 0;  // of the order: recorded, asc, desc, shuffled
  uint64_t minimum = 0;  // pages
  uint64_t pages = 0;
  uint64_t mappings = 0;
  uint64_t operations = 0;
  double seconds = 0;

  double ratio() const { return static_cast<double>(pages) / static_cast<double>(minimum); }
};

// Of this thread. In cgp_ablation a basic block of the core that runs counts as a nanosecond.
double ThreadSeconds() {
#ifdef CGP_RULE_SWITCHES
  return 1e-9 * static_cast<double>(basic_blocks);
#else
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#endif
}

// Plays graphs to a pool, on a driver that keeps books only.
class Player {
 public:
  // The graphs in scopes that are of these kinds in turn. With `drops` what lives of a graph's like
  // that was played before is freed behind it.
  void Play(const CaptureTrace& graphs, ScopePair kinds, bool drops) {
    std::vector<std::vector<Address>> old(graphs.size());
    for (const auto& [block, known] : live_) old[known.graph].push_back(known.address);
    live_.clear();
    const double start = ThreadSeconds();
    for (graph_ = 0; graph_ < graphs.size(); ++graph_) {
      pool_.BeginScope(kinds[0]);
      std::swap(kinds[0], kinds[1]);
      for (const TraceEvent& event : graphs[graph_].events) Do(event);
      if (capture_ != kNoCapture) driver_.graphs().End(std::exchange(capture_, kNoCapture));
      pool_.EndScope();
      operations_ += graphs[graph_].events.size();
      if (!drops) continue;
      for (const Address address : old[graph_]) pool_.Free(address);
    }
    seconds_ += ThreadSeconds() - start;
  }
  void FreeAll() {
    for (const auto& [block, known] : live_) pool_.Free(known.address);
    live_.clear();
  }
  PoolStats stats() const { return pool_.Stats(); }
  uint64_t map_calls() const { return driver_.calls()[DriverCall::kMap]; }
  uint64_t operations() const { return operations_; }
  double seconds() const { return seconds_; }

 private:
  struct Known {
    Address address = 0;
    std::size_t graph = 0;
  };

  void Do(const TraceEvent& event) {
    using enum TraceEvent::Kind;
    HostGraphs& graphs = driver_.graphs();
    const StreamId stream{event.stream};
    switch (event.kind) {
      case kAllocate:
        live_[event.block] = {pool_.Allocate(event.bytes, stream).address, graph_};
        break;
      case kFree:
        pool_.Free(live_.extract(event.block).mapped().address);
        break;
      case kUse:
        pool_.RecordUse(live_.at(event.block).address, stream);
        break;
      case kLaunch:
        if (capture_ == kNoCapture) capture_ = graphs.Begin(stream);
        graphs.Launch(stream);
        break;
      case kWait:
        graphs.Wait(stream, graphs.Record(StreamId{event.other}));
        break;
    }
  }

  HostDriver driver_{{.physical_limit_bytes = uint64_t{1} << 46, .map_memory = false}};
  Pool pool_{driver_, {}};
  std::unordered_map<uint64_t, Known> live_;
  std::size_t graph_ = 0;           // that is played
  CaptureId capture_ = kNoCapture;  // of programs that say what they launch
  uint64_t operations_ = 0;
  double seconds_ = 0;
};

// Each graph behind one that warms up for it: it does the same with blocks of its own, which are
// freed at its end, and has nothing that an earlier graph has left.
CaptureTrace WithWarmUps(const CaptureTrace& graphs) {
  using enum TraceEvent::Kind;
  constexpr uint64_t kOfWarmUp = uint64_t{1} << 63;
  CaptureTrace warmed;
  for (const TraceGraph& graph : graphs) {
    TraceGraph warm_up{.key = graph.key, .events = {}};
    std::set<uint64_t> live;
    for (TraceEvent event : graph.events) {
      if (event.kind == kAllocate) live.insert(event.block);
      if (!live.contains(event.block)) continue;
      if (event.kind == kFree) live.erase(event.block);
      event.block |= kOfWarmUp;
      warm_up.events.push_back(event);
    }
    for (const uint64_t block : live) {
      warm_up.events.push_back({.kind = kFree, .block = block | kOfWarmUp});
    }
    warmed.push_back(std::move(warm_up));
    warmed.push_back(graph);
  }
  return warmed;
}

uint64_t PagesOf(uint64_t bytes) { return std::max<uint64_t>(1, (bytes + kPage - 1) / kPage); }

Run Replay(const CaptureTrace& graphs, std::string order, const Options& options) {
  Run run{.order = std::move(order)};
  run.minimum = PagesOf(MostLiveBytes(graphs));
  Player player;
  player.Play(graphs, options.scopes(), /*drops=*/false);
  run.pages = player.stats().pages;
  run.mappings = player.stats().page_mappings;
  run.operations = player.operations();
  run.seconds = player.seconds();
  return run;
}

// Whether the graphs settle when they are captured again and again; says what they map.
bool Settles(const std::string& trace, const CaptureTrace& graphs, const Options& options,
             bool drops) {
  const bool several = options.streams || options.one_way;
  const uint64_t settled = !drops    ? kSettled
                           : several ? kSettledDroppingOfSeveral
                                     : kSettledDropping;
  Player player;
  uint64_t first = 0;   // calls of the first time
  uint64_t before = 0;  // calls of all times but the last
  uint64_t most = 0;    // of one time once it has settled
  uint64_t last = 0;    // time that mapped anything
  uint64_t pages = 0;   // when it has settled
  uint64_t first_pages = 0;
  for (uint64_t round = 1; round <= options.repeat; ++round) {
    if (!drops) player.FreeAll();
    player.Play(graphs, options.scopes(), drops);
    const uint64_t calls = player.map_calls() - before;
    before += calls;
    if (round == 1) {
      first = calls;
      first_pages = player.stats().pages;
    }
    if (calls > 0) last = round;
    if (round >= settled) most = std::max(most, calls);
    if (round == settled) pages = player.stats().pages;
  }
  const double may =
      several ? std::max<double>(kFewOfSeveral, kMostOfSeveral * static_cast<double>(first)) : 0;
  const uint64_t end = player.stats().pages;
  const uint64_t minimum = PagesOf(player.stats().peak_allocated_bytes);
  const uint64_t least = std::max(minimum, first_pages);
  const double ratio = static_cast<double>(end) / static_cast<double>(minimum);
  const bool right = static_cast<double>(most) <= may &&
                     (static_cast<double>(end) <= kMostPages * static_cast<double>(pages) ||
                      (several && end <= pages + kSparePages)) &&
                     (several || end <= least + kSparePages ||
                      static_cast<double>(end) <= kMostDropped * static_cast<double>(least));
  std::printf(
      "%s%-28s %-8s %8llu calls to map, %llu at all, %llu at most from time %llu on, the last in "
      "time %llu; %llu, %llu pages, %.3f\n",
      right ? "" : "BROKEN: ", trace.c_str(), drops ? "dropped" : "held", Long(first), Long(before),
      Long(most), Long(settled), Long(last), Long(pages), Long(end), ratio);
  return right;
}

// The order number `number` of a trace, with its name.
std::pair<std::string, CaptureTrace> Order(const CaptureTrace& trace, uint64_t number,
                                           uint64_t seed) {
  std::vector<std::size_t> places(trace.size());
  std::iota(places.begin(), places.end(), 0);
  const auto key = [&](std::size_t place) { return trace[place].key; };
  std::string name = number == 0   ? "recorded"
                     : number == 1 ? "asc"
                     : number == 2 ? "desc"
                                   : "seed " + std::to_string(seed + number);
  if (number == 1) std::ranges::stable_sort(places, {}, key);
  if (number == 2) std::ranges::stable_sort(places, std::ranges::greater{}, key);
  std::mt19937_64 random(seed + number);
  // Not std::shuffle: its result differs between standard libraries.
  for (std::size_t left = number > 2 ? places.size() : 0; left > 1; --left) {
    std::swap(places[left - 1], places[random() % left]);
  }
  return {std::move(name), InOrder(trace, places)};
}

// Runs of many traces and orders as one distribution. pre of all but Add(): there are runs.
class Summary {
 public:
  void Add(const Run& run) {
    const double ratio = run.ratio();
    ratios_.insert(std::ranges::upper_bound(ratios_, ratio), ratio);
    sum_ += ratio;
    mappings_ += static_cast<double>(run.mappings);
    mappings_of_[run.kind] += static_cast<double>(run.mappings);
    ++runs_of_[run.kind];
    operations_ += static_cast<double>(run.operations);
    seconds_ += run.seconds;
  }
  std::size_t runs() const { return ratios_.size(); }
  double mean() const { return sum_ / static_cast<double>(runs()); }
  double mappings() const { return mappings_ / static_cast<double>(runs()); }
  double mappings(std::size_t kind) const {
    return mappings_of_[kind] / std::max(1.0, runs_of_[kind]);
  }
  double nanoseconds() const { return 1e9 * seconds_ / operations_; }
  // The least that so many in a hundred do not exceed.
  double Percentile(double percent) const {
    const double rank = std::ceil(percent / 100 * static_cast<double>(runs()));
    return ratios_[static_cast<std::size_t>(rank) - 1];
  }

 private:
  std::vector<double> ratios_;  // sorted
  double sum_ = 0;
  double mappings_ = 0;
  std::array<double, kOrders> mappings_of_{};  // by kind of order
  std::array<double, kOrders> runs_of_{};
  double operations_ = 0;
  double seconds_ = 0;
};

void Print(const std::string& name, const Summary& summary, const Run* worst) {
  const std::string minimum = worst ? std::to_string(worst->minimum * (kPage >> 20)) : "-";
  std::printf("%-28s %6zu %10s %8.4f %8.4f %8.4f %9.0f %8.0f %8.0f %8.0f %6.0f  %s\n", name.c_str(),
              summary.runs(), minimum.c_str(), summary.mean(), summary.Percentile(99),
              summary.Percentile(100), summary.mappings(), summary.mappings(1), summary.mappings(2),
              summary.mappings(3), summary.nanoseconds(), worst ? worst->order.c_str() : "-");
}

// Whether the run takes what it may; says it where not.
bool Judge(const std::string& trace, const Run& run, const Bounds& bounds) {
  const auto minimum = static_cast<double>(run.minimum);
  const double most = std::max(minimum * bounds.worst, minimum + bounds.spare_pages);
  if (static_cast<double>(run.pages) <= most) return true;
  std::printf("BROKEN: %s, %s: %llu pages, %.1f are what the minimum allows\n", trace.c_str(),
              run.order.c_str(), Long(run.pages), most);
  return false;
}

// The same of a figure over all large pools.
bool Judge(const char* what, double is, double most) {
  if (is <= most) return true;
  std::printf("BROKEN: %s of reserved ÷ minimum is %.4f, above %.4f\n", what, is, most);
  return false;
}

// Returns the exit code.
int Main(const Options& options, const std::set<std::filesystem::path>& files) {
  const Bounds bounds = options.bounds();
  Summary all;
  Summary large;
  bool right = true;
  if (options.repeat == 1) {
    std::printf("%-28s %6s %10s %8s %8s %8s %9s %8s %8s %8s %6s  %s\n", "trace", "orders",
                "minimum", "mean", "p99", "worst", "mappings", "asc", "desc", "shuffled", "ns",
                "worst order");
  }
  for (const std::filesystem::path& path : files) {
    const std::string name = path.stem();
    const CaptureTrace trace = ReadTrace(path);
    Summary summary;
    std::vector<Run> runs;
    for (uint64_t i = 0; i < options.orders; ++i) {
      auto [order, graphs] = Order(trace, i, options.seed);
      if (options.warm) graphs = WithWarmUps(graphs);
      if (options.repeat > 1) {
        right = Settles(name, graphs, options, /*drops=*/false) && right;
        if (!options.held) right = Settles(name, graphs, options, /*drops=*/true) && right;
        continue;
      }
      Run& run = runs.emplace_back(Replay(graphs, std::move(order), options));
      run.kind = std::min<uint64_t>(i, kOrders - 1);
      summary.Add(run);
      all.Add(run);
      if (run.minimum >= kLargePool) large.Add(run);
      right = Judge(name, run, bounds) && right;
    }
    if (!runs.empty()) Print(name, summary, &*std::ranges::max_element(runs, {}, &Run::ratio));
  }
  if (large.runs() > 0) {
    Print("large", large, nullptr);
    right = Judge("the mean", large.mean(), bounds.mean) && right;
    right = Judge("the 99th percentile", large.Percentile(99), bounds.p99) && right;
  }
  if (all.runs() > 0) Print("all", all, nullptr);
  return right ? 0 : 1;
}

// The files, and those of the folders.
std::set<std::filesystem::path> FilesOf(const std::vector<std::string>& named) {
  std::set<std::filesystem::path> files(named.begin(), named.end());
  for (const std::filesystem::path path : named) {
    if (!std::filesystem::is_directory(path)) continue;
    files.erase(path);
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".txt") files.insert(entry.path());
    }
  }
  return files;
}

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  cgp::Options options;
  const auto named = cgp::ParseOptions(count, arguments,
                                       {{"--orders", &options.orders},
                                        {"--seed", &options.seed},
                                        {"--repeat", &options.repeat},
                                        {"--warm", &options.warm},
                                        {"--hostile", &options.hostile},
                                        {"--fresh", &options.fresh},
                                        {"--training", &options.training},
                                        {"--held", &options.held},
                                        {"--streams", &options.streams},
                                        {"--one-way", &options.one_way}});
  // Nothing judges that.
  const bool is_eager_of_several = options.warm && (options.streams || options.one_way);
  if (!named || named->empty() || options.orders == 0 || options.repeat == 0 ||
      is_eager_of_several) {
    std::fputs(
        "usage: cgp_quality [--orders N] [--seed N] [--repeat N] [--warm] [--hostile] [--fresh]\n"
        "                   [--training] [--streams] [--one-way] [--held] TRACE.txt|FOLDER...\n",
        stderr);
    return 2;
  }
  try {
    return cgp::Main(options, cgp::FilesOf(*named));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cgp_quality: %s\n", error.what());
    return 2;
  }
}
