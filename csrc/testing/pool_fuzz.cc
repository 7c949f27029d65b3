// cgp_fuzz: random programs of steps on the real pool set, judged after each by a naive model;
// kUsage says of which kinds.
//
// Sequence number i of a run is made from the run's seed plus i alone. On failure: exit code 1, the
// seed that repeats it, and the shortest sequence that still fails, as C++.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "testing/capture_program.h"
#include "testing/fuzz_session.h"
#include "testing/minimise.h"
#include "testing/operation_generator.h"
#include "testing/options.h"
#include "testing/step.h"
#include "testing/text.h"

namespace cgp {
namespace {

constexpr char kUsage[] =
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

// A crash cannot be minimised from within; its seed is what a debugger needs.
char crash_text[160];

void OnCrash(int signal) {
  // Nothing else may be called from here.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, crash_text, std::strlen(crash_text));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Fuzzer {
 public:
  explicit Fuzzer(const Options& options) : options_(options) {}

  // `generator_of` makes a sequence's setup and steps from its seed. Returns the exit code.
  template <typename GeneratorOf>
  int Run(const GeneratorOf& generator_of) {
    using std::chrono::steady_clock;
    const auto start = steady_clock::now();
    for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, OnCrash);
    uint64_t operations = 0;
    uint64_t sequences = 0;
    for (; sequences < options_.iterations && operations < options_.operations &&
           (steady_clock::now() - start) / std::chrono::seconds(1) <
               static_cast<int64_t>(std::min<uint64_t>(options_.seconds, 1U << 30));
         ++sequences) {
      const uint64_t seed = options_.seed + sequences;
      const std::string again = Text("--seed ", seed, " --iterations 1", OtherOptions());
      std::snprintf(crash_text, sizeof crash_text, "\nfuzz: crashed; repeat with %s\n",
                    again.c_str());
      auto generator = generator_of(seed);
      setup_ = generator.setup;
      setup_.fail_each = options_.fail_each;
      Steps steps;
      const std::string complaint = RunOne(generator, &steps);
      if (!complaint.empty()) {
        std::printf("fuzz: FAILED, repeat with %s\n%s\n", again.c_str(), complaint.c_str());
        std::fflush(stdout);
        Report(steps, KindOf(complaint));
        return 1;
      }
      operations += steps.size();
    }
    std::string text = Text("fuzz", OtherOptions(), ": ", operations, " operations, ", sequences,
                            " sequences, seed ", options_.seed, ": ok");
    if (options_.captures) {
      text += Text("; ", reused_, " granules reused, ", across_, " of them across streams; ",
                   growths_, " growths judged");
    }
    std::puts(text.c_str());
    return 0;
  }

 private:
  std::string OtherOptions() const {
    return Text(options_.numbers_only ? " --numbers-only" : "",
                options_.captures ? " --captures" : "", options_.fail_each ? " --fail-each" : "");
  }

  // `steps`: up to the one that failed.
  template <typename Generator>
  std::string RunOne(Generator& generator, Steps* steps) {
    FuzzSession session(setup_);
    while (const std::optional<Step> step = generator.Next(session)) {
      steps->push_back(*step);
      std::string complaint = session.Run(*step);
      if (!complaint.empty()) return complaint;
    }
    std::string complaint = session.Finish();
    reused_ += session.model().reused_granules();
    across_ += session.model().reused_across_streams();
    growths_ += session.growths_judged();
    return complaint;
  }

  void Report(const Steps& steps, const std::string& kind) const {
    // Looking closely after each step shows a defect where it happens, unless it hides it.
    FuzzSetup setup = setup_;
    setup.inspect_every = 1;
    const auto run = [&](const Steps& some) { return RunAll(FuzzSession(setup), some); };
    const auto fails = [&](const Steps& some) { return KindOf(run(some)) == kind; };
    if (!fails(steps)) setup = setup_;
    if (!fails(steps)) {
      std::printf("The same operations do not fail again, which is a defect of the fuzzer:\n%s",
                  ToString(steps).c_str());
      return;
    }
    const Steps shortest = Minimise(steps, fails, 20'000);
    std::printf("Shortest sequence, %zu of %zu operations:\n  %s\n%sends with: %s\n",
                shortest.size(), steps.size(), ToString(setup).c_str(), ToString(shortest).c_str(),
                run(shortest).c_str());
  }

  const Options& options_;
  FuzzSetup setup_;  // of the last sequence
  // In all sequences.
  uint64_t reused_ = 0;
  uint64_t across_ = 0;
  uint64_t growths_ = 0;
};

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  using namespace cgp;
  Options options;
  const auto others = ParseOptions(count, arguments,
                                   {{"--seed", &options.seed},
                                    {"--iterations", &options.iterations},
                                    {"--seconds", &options.seconds},
                                    {"--ops", &options.operations},
                                    {"--numbers-only", &options.numbers_only},
                                    {"--captures", &options.captures},
                                    {"--fail-each", &options.fail_each}});
  if (!others || !others->empty() || (options.captures && options.numbers_only)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  if (std::min({options.iterations, options.seconds, options.operations}) == kUnbounded) {
    options.seconds = 10;
  }
  if (options.captures) {
    return Fuzzer(options).Run([](uint64_t seed) { return CaptureProgram(seed); });
  }
  return Fuzzer(options).Run(
      [&](uint64_t seed) { return OperationGenerator(seed, !options.numbers_only); });
}
