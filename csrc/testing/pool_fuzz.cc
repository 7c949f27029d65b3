// cgp_fuzz: random operations on the real pool set, judged after each.
//
//   by default     every operation there is, failing drivers included, compared with a naive model
//   --captures     programs over several captured streams, judged by an oracle and executed
//
// Sequence number i of a run is made from the run's seed plus i alone. On failure: exit code 1, the seed
// that repeats it, and the shortest sequence that still fails, as C++.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "testing/capture_program.h"
#include "testing/capture_session.h"
#include "testing/fuzz_session.h"
#include "testing/operation_generator.h"

namespace cgp {
namespace {

constexpr std::string_view kUsage =
    "usage: cgp_fuzz [--seed N] [--iterations N] [--seconds N] [--ops N]\n"
    "                [--numbers-only | --captures] [--fail-each]\n"
    "  --seed N         first sequence's seed (default 1)\n"
    "  --iterations N   at most so many sequences\n"
    "  --seconds N      no new sequence after so many seconds (default 10 if no bound is given)\n"
    "  --ops N          no new sequence after so many operations\n"
    "  --numbers-only   map no memory: faster, but contents are not compared\n"
    "  --captures       programs over several captured streams, executed\n"
    "  --fail-each      every call fails first, at each allocation or driver call that it makes\n";

constexpr uint64_t kUnbounded = std::numeric_limits<uint64_t>::max();

struct Options {
  uint64_t seed = 1;
  uint64_t iterations = kUnbounded;
  uint64_t seconds = kUnbounded;
  uint64_t operations = kUnbounded;
  bool numbers_only = false;
  bool captures = false;
  bool fail_each = false;
};

std::optional<Options> Parse(int count, char** arguments) {
  Options options;
  const std::pair<std::string_view, bool Options::*> flags[] = {
      {"--numbers-only", &Options::numbers_only},
      {"--captures", &Options::captures},
      {"--fail-each", &Options::fail_each}};
  const std::pair<std::string_view, uint64_t Options::*> numbers[] = {
      {"--seed", &Options::seed},
      {"--iterations", &Options::iterations},
      {"--seconds", &Options::seconds},
      {"--ops", &Options::operations}};
  for (int i = 1; i < count; ++i) {
    const auto named = [&](const auto& one) { return one.first == arguments[i]; };
    const auto* const flag = std::ranges::find_if(flags, named);
    const auto* const number = std::ranges::find_if(numbers, named);
    if (flag != std::end(flags)) {
      options.*flag->second = true;
    } else if (number == std::end(numbers) || ++i == count) {
      return std::nullopt;
    } else {
      const std::string_view text = arguments[i];
      const char* const end = text.data() + text.size();
      const auto read = std::from_chars(text.data(), end, options.*number->second);
      if (read.ptr != end || text.empty()) return std::nullopt;
    }
  }
  if (options.captures && options.numbers_only) return std::nullopt;
  if (std::min({options.iterations, options.seconds, options.operations}) == kUnbounded) {
    options.seconds = 10;
  }
  return options;
}

// What is fuzzed. Each has a session, its setup and its operations, and
//   Run(seed, &sequence)   makes a sequence of this seed and runs it; returns a complaint, or nothing
//   Closely(setup)         for looking more closely at each operation
//   Summary()              of all sequences
class Pools {
 public:
  using Session = FuzzSession;
  using Setup = FuzzSetup;
  using Operation = PoolOperation;

  explicit Pools(const Options& options) : options_(options) {}

  template <typename Sequence>
  std::string Run(uint64_t seed, Sequence* sequence) const {
    OperationGenerator generator(seed, !options_.numbers_only);
    sequence->setup = generator.setup();
    sequence->setup.fail_each = options_.fail_each;
    FuzzSession session(sequence->setup);
    for (uint64_t i = 0; i < generator.length(); ++i) {
      sequence->operations.push_back(generator.Next(session));
      std::string complaint = session.Run(sequence->operations.back());
      if (!complaint.empty()) return complaint;
    }
    return session.Finish();
  }
  static Setup Closely(Setup setup) {
    setup.inspect_every = 1;
    return setup;
  }
  static std::string Summary() { return {}; }

 private:
  const Options& options_;
};

class Captures {
 public:
  using Session = CaptureSession;
  using Setup = CaptureSetup;
  using Operation = CaptureStep;

  explicit Captures(const Options& options) : options_(options) {}

  template <typename Sequence>
  std::string Run(uint64_t seed, Sequence* sequence) {
    const CaptureProgram program(seed);
    sequence->setup = program.setup;
    sequence->setup.fail_each = options_.fail_each;
    sequence->operations = program.steps;
    CaptureSession session(sequence->setup);
    for (const CaptureStep& step : program.steps) {
      std::string complaint = session.Run(step);
      if (!complaint.empty()) return complaint;
    }
    reused_ += session.oracle().reused_granules();
    across_ += session.oracle().reused_across_streams();
    growths_ += session.oracle().growths_judged();
    return session.Finish();
  }
  static Setup Closely(const Setup& setup) { return setup; }
  std::string Summary() const {
    return "; " + std::to_string(reused_) + " granules reused, " + std::to_string(across_) +
           " of them across streams; " + std::to_string(growths_) + " growths judged";
  }

 private:
  const Options& options_;
  uint64_t reused_ = 0;
  uint64_t across_ = 0;
  uint64_t growths_ = 0;
};

// The shortest failing sequence that taking out ever smaller pieces leads to ("delta debugging"), after
// at most `tries`. pre: fails(items).
template <typename Item, typename Fails>
std::vector<Item> Minimise(std::vector<Item> items, const Fails& fails, size_t tries) {
  size_t piece = std::max<size_t>(items.size() / 2, 1);
  while (!items.empty()) {
    bool shorter = false;
    for (size_t start = 0; start < items.size() && tries > 0; --tries) {
      std::vector<Item> rest = items;
      const auto first = rest.begin() + static_cast<std::ptrdiff_t>(start);
      const size_t end = std::min(start + piece, items.size());
      rest.erase(first, first + static_cast<std::ptrdiff_t>(end - start));
      if (fails(rest)) {
        items = std::move(rest);
        shorter = true;
      } else {
        start = end;
      }
    }
    if (tries == 0 || (piece == 1 && !shorter)) break;
    if (!shorter) piece = std::max<size_t>(piece / 2, 1);
  }
  return items;
}

// A crash cannot be minimised from within; its seed is what a debugger needs.
char crash_text[160];

void OnCrash(int signal) {
  // Nothing else may be called from here.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, crash_text, std::strlen(crash_text));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

template <typename Subject>
class Fuzzer {
 public:
  explicit Fuzzer(const Options& options) : options_(options), subject_(options) {}

  // Returns the exit code.
  int Run() {
    const auto start = std::chrono::steady_clock::now();
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, OnCrash);
    uint64_t operations = 0;
    uint64_t sequences = 0;
    const auto elapsed = [&] {
      return static_cast<uint64_t>(
          std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start)
              .count());
    };
    for (; sequences < options_.iterations && operations < options_.operations &&
           elapsed() < options_.seconds;
         ++sequences) {
      const uint64_t seed = options_.seed + sequences;
      const std::string again =
          "--seed " + std::to_string(seed) + " --iterations 1" + OtherOptions();
      std::snprintf(crash_text, sizeof crash_text, "\nfuzz: crashed; repeat with %s\n",
                    again.c_str());
      Sequence sequence;
      const std::string complaint = subject_.Run(seed, &sequence);
      if (!complaint.empty()) {
        std::printf("fuzz: FAILED, repeat with %s\n%s\n", again.c_str(), complaint.c_str());
        std::fflush(stdout);
        Report(sequence, KindOf(complaint));
        return 1;
      }
      operations += sequence.operations.size();
    }
    std::printf("fuzz%s: %llu operations, %llu sequences, seed %llu: ok%s\n",
                OtherOptions().c_str(), static_cast<unsigned long long>(operations),
                static_cast<unsigned long long>(sequences),
                static_cast<unsigned long long>(options_.seed), subject_.Summary().c_str());
    return 0;
  }

 private:
  struct Sequence {
    typename Subject::Setup setup;
    std::vector<typename Subject::Operation> operations;  // up to the one that failed
  };

  std::string OtherOptions() const {
    return std::string(options_.numbers_only ? " --numbers-only" : "") +
           (options_.captures ? " --captures" : "") + (options_.fail_each ? " --fail-each" : "");
  }

  // What a complaint says before its first number: complaints of one defect agree in that.
  static std::string KindOf(const std::string& complaint) {
    return complaint.substr(0, complaint.find_first_of("0123456789"));
  }

  static std::string Replay(const Sequence& sequence) {
    typename Subject::Session session(sequence.setup);
    for (const auto& operation : sequence.operations) {
      std::string complaint = session.Run(operation);
      if (!complaint.empty()) return complaint;
    }
    return session.Finish();
  }

  static void Report(const Sequence& sequence, const std::string& kind) {
    // Looking closely after each operation shows a defect where it happens, unless it hides it.
    auto closely = sequence;
    closely.setup = Subject::Closely(sequence.setup);
    if (KindOf(Replay(closely)) != kind) closely.setup = sequence.setup;
    const auto fails = [&](const auto& operations) {
      return KindOf(Replay({closely.setup, operations})) == kind;
    };
    if (!fails(sequence.operations)) {
      std::printf("The same operations do not fail again, which is a defect of the fuzzer:\n%s",
                  ToString(sequence.operations).c_str());
      return;
    }
    closely.operations = Minimise(sequence.operations, fails, 20'000);
    std::printf("Shortest sequence, %zu of %zu operations:\n  %s\n%sends with: %s\n",
                closely.operations.size(), sequence.operations.size(),
                ToString(closely.setup).c_str(), ToString(closely.operations).c_str(),
                Replay(closely).c_str());
  }

  const Options& options_;
  Subject subject_;
};

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  const std::optional<cgp::Options> options = cgp::Parse(count, arguments);
  if (!options) {
    std::fputs(cgp::kUsage.data(), stderr);
    return 2;
  }
  return options->captures ? cgp::Fuzzer<cgp::Captures>(*options).Run()
                           : cgp::Fuzzer<cgp::Pools>(*options).Run();
}
