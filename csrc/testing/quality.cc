// cgp_quality: what pools reserve for recorded captures, in many orders, against what they must.
//
// Each trace is replayed as it was recorded and, with --orders N, by key up and down and shuffled, N
// orders in all. For each it prints reserved ÷ minimum (mean, 99th percentile, worst), the mappings
// that the pool asked for and, where --plain had to ask, the most pages ÷ plain stitching's. Exit code
// 1 where a bound is broken: it names trace, order and seed.
//
//   by default     runs of pools of 64 MiB and more reserve 1.006 of the minimum in the mean, 1.02 in
//                  99 of 100, 1.03 at the worst; smaller pools three pages more than the minimum
//   --plain        no run reserves more than 1.02 of plain stitching's pages, and two pages
//   --repeat N     the graphs N times over, in one pool: it is no larger than after the second time
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "driver/host_driver.h"
#include "testing/capture_trace.h"
#include "testing/plain_stitching.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = uint64_t{2} << 20;

// Of reserved ÷ minimum, for pools that need `kLargePool` pages and more.
constexpr uint64_t kLargePool = 32;
constexpr double kMostMean = 1.006;
constexpr double kMostP99 = 1.02;
constexpr double kMostWorst = 1.03;
constexpr uint64_t kSparePages = 3;  // more than that, for any pool
// Of pages ÷ plain stitching's.
constexpr double kMostOfPlain = 1.02;
constexpr double kSparePlainPages = 2;

double MostOfPlain(uint64_t plain_pages) {
  return static_cast<double>(plain_pages) * kMostOfPlain + kSparePlainPages;
}

struct Options {
  uint64_t orders = 1;
  uint64_t seed = 1;
  uint64_t repeat = 1;
  bool plain = false;
  std::vector<std::string> files;
};

// One replay.
struct Run {
  std::string order;     // with its seed
  uint64_t minimum = 0;  // pages
  uint64_t pages = 0;
  uint64_t mappings = 0;
  std::optional<uint64_t> plain_pages;
  uint64_t early_pages = 0;  // after the second time, with --repeat

  double ratio() const { return static_cast<double>(pages) / static_cast<double>(minimum); }
};

// Plays graphs to the pool, on a driver that keeps books only.
class Player {
 public:
  void Play(const CaptureTrace& graphs) {
    for (const TraceGraph& graph : graphs) {
      pool_.BeginScope(ScopeKind::kCapture);
      for (const TraceEvent& event : graph.events) {
        if (event.bytes > 0) {
          live_[event.block] = pool_.Allocate(event.bytes, StreamId{event.stream}).address;
        } else {
          pool_.Free(live_.extract(event.block).mapped());
        }
      }
      pool_.EndScope();
    }
  }
  // As when the graphs are captured anew: what still lives of them is given back.
  void FreeAll() {
    for (const auto& [block, address] : live_) pool_.Free(address);
    live_.clear();
  }
  PoolStats stats() const { return pool_.Stats(); }

 private:
  HostDriver driver_{{.physical_limit_bytes = uint64_t{1} << 46, .map_memory = false}};
  Pool pool_{driver_, {}};
  std::unordered_map<uint64_t, Address> live_;
};

uint64_t PlainPages(const CaptureTrace& graphs) {
  PlainStitching plain(kPage);
  for (const TraceGraph& graph : graphs) {
    plain.BeginCapture();
    for (const TraceEvent& event : graph.events) {
      if (event.bytes > 0) {
        plain.Allocate(event.block, event.bytes, event.stream);
      } else {
        plain.Free(event.block);
      }
    }
  }
  return plain.pages();
}

Run Replay(const CaptureTrace& graphs, std::string order, const Options& options) {
  Run run{.order = std::move(order), .plain_pages = {}};
  run.minimum = std::max<uint64_t>(1, (MostLiveBytes(graphs) + kPage - 1) / kPage);
  Player player;
  for (uint64_t i = 0; i < options.repeat; ++i) {
    if (i > 0) player.FreeAll();
    player.Play(graphs);
    if (i < 2) run.early_pages = player.stats().pages;
  }
  run.pages = player.stats().pages;
  run.mappings = player.stats().page_mappings;
  // Plain stitching never takes less than the minimum: where that allows so much, it need not be asked.
  if (options.plain && static_cast<double>(run.pages) > MostOfPlain(run.minimum)) {
    run.plain_pages = PlainPages(graphs);
  }
  return run;
}

// The first `count` orders of a trace, by name.
std::vector<std::pair<std::string, CaptureTrace>> Orders(const CaptureTrace& trace,
                                                         const Options& options) {
  std::vector<std::pair<std::string, CaptureTrace>> orders = {{"recorded", trace}};
  std::vector<std::size_t> recorded(trace.size());
  std::iota(recorded.begin(), recorded.end(), 0);
  const auto key = [&](std::size_t place) { return trace[place].key; };
  for (uint64_t i = 1; i < options.orders; ++i) {
    std::vector<std::size_t> places = recorded;
    std::string name;
    if (i == 1) {
      name = "asc";
      std::ranges::stable_sort(places, {}, key);
    } else if (i == 2) {
      name = "desc";
      std::ranges::stable_sort(places, std::ranges::greater{}, key);
    } else {
      name = "seed " + std::to_string(options.seed + i);
      std::mt19937_64 random(options.seed + i);
      // Not std::shuffle: its result differs between standard libraries.
      for (std::size_t left = places.size(); left > 1; --left) {
        std::swap(places[left - 1], places[random() % left]);
      }
    }
    orders.emplace_back(std::move(name), InOrder(trace, places));
  }
  return orders;
}

// Runs of many traces and orders as one distribution.
class Summary {
 public:
  void Add(const Run& run) {
    ratios_.push_back(run.ratio());
    mappings_ += static_cast<double>(run.mappings);
  }
  std::size_t runs() const { return ratios_.size(); }
  double mean() const {
    return std::accumulate(ratios_.begin(), ratios_.end(), 0.0) / static_cast<double>(runs());
  }
  double mappings() const { return mappings_ / static_cast<double>(runs()); }
  // The least that so many in a hundred do not exceed. pre: there are runs.
  double Percentile(double percent) const {
    std::vector<double> sorted = ratios_;
    std::ranges::sort(sorted);
    const double rank = std::ceil(percent / 100 * static_cast<double>(runs()));
    return sorted[static_cast<std::size_t>(rank) - 1];
  }

 private:
  std::vector<double> ratios_;
  double mappings_ = 0;
};

void PrintHeader() {
  std::printf("%-28s %6s %10s %8s %8s %8s %9s %7s  %s\n", "trace", "orders", "minimum", "mean",
              "p99", "worst", "mappings", "plain", "worst order");
}

void Print(const std::string& name, const Summary& summary, const Run* worst,
           std::optional<double> plain) {
  const std::string minimum = worst ? std::to_string(worst->minimum * (kPage >> 20)) : "-";
  const std::string ratio = plain ? std::to_string(*plain).substr(0, 5) : "-";
  std::printf("%-28s %6zu %10s %8.4f %8.4f %8.4f %9.0f %7s  %s\n", name.c_str(), summary.runs(),
              minimum.c_str(), summary.mean(), summary.Percentile(99), summary.Percentile(100),
              summary.mappings(), ratio.c_str(), worst ? worst->order.c_str() : "-");
}

// Says which bounds a run breaks, and how far.
class Judge {
 public:
  void JudgeRun(const std::string& trace, const Run& run, const Options& options) {
    const auto pages = static_cast<double>(run.pages);
    if (options.repeat > 1) {
      if (run.pages > run.early_pages) {
        Complain(trace, run, static_cast<double>(run.early_pages), "what it had after two times");
      }
    } else if (options.plain) {
      const double most = MostOfPlain(run.plain_pages.value_or(run.minimum));
      if (pages > most) Complain(trace, run, most, "plain stitching's pages allow");
    } else {
      const auto minimum = static_cast<double>(run.minimum);
      const double most = std::max(minimum * kMostWorst, minimum + kSparePages);
      if (pages > most) Complain(trace, run, most, "the minimum allows");
    }
  }
  // Of large pools.
  void JudgeAll(const Summary& summary, const Options& options) {
    if (options.plain || options.repeat > 1 || summary.runs() == 0) return;
    JudgeFigure("the mean", summary.mean(), kMostMean);
    JudgeFigure("the 99th percentile", summary.Percentile(99), kMostP99);
  }
  bool broken() const { return broken_; }

 private:
  void Complain(const std::string& trace, const Run& run, double most, const char* of) {
    broken_ = true;
    std::printf("BROKEN: %s, %s: %llu pages, %.1f are what %s\n", trace.c_str(), run.order.c_str(),
                static_cast<unsigned long long>(run.pages), most, of);
  }
  void JudgeFigure(const char* what, double is, double most) {
    if (is <= most) return;
    broken_ = true;
    std::printf("BROKEN: %s of reserved ÷ minimum is %.4f, above %.4f\n", what, is, most);
  }
  bool broken_ = false;
};

std::string NameOf(const std::string& path) {
  const std::string file = path.substr(path.rfind('/') + 1);
  return file.substr(0, file.find('.'));
}

// Returns the exit code.
int Main(const Options& options) {
  Summary all;
  Summary large;
  Judge judge;
  PrintHeader();
  for (const std::string& path : options.files) {
    const std::string name = NameOf(path);
    Summary summary;
    std::optional<double> plain;  // the worst run's pages ÷ plain stitching's
    std::vector<Run> runs;
    for (const auto& [order, graphs] : Orders(ReadTrace(path), options)) {
      const Run& run = runs.emplace_back(Replay(graphs, order, options));
      summary.Add(run);
      all.Add(run);
      if (run.minimum >= kLargePool) large.Add(run);
      judge.JudgeRun(name, run, options);
      if (run.plain_pages) {
        const double ratio = static_cast<double>(run.pages) /
                             static_cast<double>(std::max<uint64_t>(1, *run.plain_pages));
        plain = std::max(plain.value_or(0), ratio);
      }
    }
    Print(name, summary, &*std::ranges::max_element(runs, {}, &Run::ratio), plain);
  }
  if (large.runs() > 0) Print("large", large, nullptr, {});
  Print("all", all, nullptr, {});
  judge.JudgeAll(large, options);
  return judge.broken() ? 1 : 0;
}

constexpr std::string_view kUsage =
    "usage: cgp_quality [--orders N] [--seed N] [--repeat N] [--plain] TRACE.txt|FOLDER...\n";

// The file, or those of the folder.
std::vector<std::string> FilesOf(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return {path};
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  return files;
}

std::optional<Options> Parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string_view option = arguments[i];
    if (!option.starts_with("--")) {
      for (std::string& file : FilesOf(arguments[i])) options.files.push_back(std::move(file));
      continue;
    }
    if (option == "--plain") {
      options.plain = true;
      continue;
    }
    uint64_t* const value = option == "--orders"   ? &options.orders
                            : option == "--seed"   ? &options.seed
                            : option == "--repeat" ? &options.repeat
                                                   : nullptr;
    if (value == nullptr || ++i == count) return std::nullopt;
    const char* const end = arguments[i] + std::strlen(arguments[i]);
    if (std::from_chars(arguments[i], end, *value).ptr != end) return std::nullopt;
  }
  if (options.files.empty() || options.repeat == 0) return std::nullopt;
  return options;
}

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  const std::optional<cgp::Options> options = cgp::Parse(count, arguments);
  if (!options) {
    std::fputs(cgp::kUsage.data(), stderr);
    return 2;
  }
  try {
    return cgp::Main(*options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cgp_quality: %s\n", error.what());
    return 2;
  }
}
