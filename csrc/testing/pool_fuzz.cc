// cgp_fuzz: random operations on the real pool set, compared with the naive model after each.
//
// Sequence number i of a run is made from the run's seed plus i alone, so a failure is repeated by
// the seed that it prints. On failure: exit code 1, the seed, and the shortest sequence that still
// fails, as C++.
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/minimise.h"
#include "testing/operation_generator.h"

namespace cgp {
namespace {

constexpr std::string_view kUsage =
    "usage: cgp_fuzz [--seed N] [--iterations N] [--seconds N] [--ops N] [--numbers-only]\n"
    "  --seed N         first sequence's seed (default 1)\n"
    "  --iterations N   at most so many sequences\n"
    "  --seconds N      no new sequence after so many seconds (default 10 if no bound is given)\n"
    "  --ops N          no new sequence after so many operations\n"
    "  --numbers-only   map no memory: faster, but contents are not compared\n";

struct Bounds {
  uint64_t seed = 1;
  std::optional<uint64_t> iterations;
  std::optional<uint64_t> seconds;
  std::optional<uint64_t> operations;
  bool numbers_only = false;
};

struct Failure {
  std::vector<PoolOperation> operations;  // up to the one that failed
  std::string complaint;
};

std::optional<Bounds> Parse(int count, char** arguments) {
  Bounds bounds;
  for (int i = 1; i < count; ++i) {
    const std::string_view option = arguments[i];
    if (option == "--numbers-only") {
      bounds.numbers_only = true;
      continue;
    }
    uint64_t value = 0;
    if (i + 1 == count) return std::nullopt;
    const char* const text = arguments[++i];
    const char* const end = text + std::strlen(text);
    if (std::from_chars(text, end, value).ptr != end || text == end) return std::nullopt;
    if (option == "--seed") {
      bounds.seed = value;
    } else if (option == "--iterations") {
      bounds.iterations = value;
    } else if (option == "--seconds") {
      bounds.seconds = value;
    } else if (option == "--ops") {
      bounds.operations = value;
    } else {
      return std::nullopt;
    }
  }
  if (!bounds.iterations && !bounds.seconds && !bounds.operations) bounds.seconds = 10;
  return bounds;
}

// A crash cannot be minimised from within; its seed is what a debugger needs.
char crash_text[128];

void OnCrash(int signal) {
  // Nothing else may be called from here.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, crash_text, std::strlen(crash_text));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void SayOnCrash(uint64_t seed, bool numbers_only) {
  std::snprintf(crash_text, sizeof crash_text,
                "\nfuzz: crashed; repeat with --seed %llu --iterations 1%s\n",
                static_cast<unsigned long long>(seed), numbers_only ? " --numbers-only" : "");
}

std::string Replay(const FuzzSetup& setup, const std::vector<PoolOperation>& operations) {
  FuzzSession session(setup);
  for (const PoolOperation& operation : operations) {
    std::string complaint = session.Run(operation);
    if (!complaint.empty()) return complaint;
  }
  return session.Finish();
}

std::optional<Failure> RunSequence(OperationGenerator& generator) {
  FuzzSession session(generator.setup());
  Failure failure;
  for (uint64_t i = 0; i < generator.length(); ++i) {
    failure.operations.push_back(generator.Next(session));
    failure.complaint = session.Run(failure.operations.back());
    if (!failure.complaint.empty()) return failure;
  }
  failure.complaint = session.Finish();
  if (!failure.complaint.empty()) return failure;
  return std::nullopt;
}

// What a complaint says before its first number: complaints of one defect agree in that.
std::string KindOf(const std::string& complaint) {
  return complaint.substr(0, complaint.find_first_of("0123456789"));
}

void Report(const FuzzSetup& setup, const Failure& failure, uint64_t seed, bool numbers_only) {
  std::printf("fuzz: FAILED, repeat with --seed %llu --iterations 1%s\n%s\n",
              static_cast<unsigned long long>(seed), numbers_only ? " --numbers-only" : "",
              failure.complaint.c_str());
  std::fflush(stdout);
  // Looking closely after each operation shows a defect where it happens, unless looking closely
  // hides it.
  FuzzSetup closely = setup;
  closely.inspect_every = 1;
  const std::string kind = KindOf(failure.complaint);
  if (KindOf(Replay(closely, failure.operations)) != kind) closely = setup;
  const auto fails = [&](const std::vector<PoolOperation>& operations) {
    return KindOf(Replay(closely, operations)) == kind;
  };
  if (!fails(failure.operations)) {
    std::printf("The same operations do not fail again, which is a defect of the fuzzer:\n%s",
                ToString(failure.operations).c_str());
    return;
  }
  const std::vector<PoolOperation> shortest = Minimise(failure.operations, fails, 20'000);
  std::printf("Shortest sequence, %zu of %zu operations:\n  %s\n%sends with: %s\n", shortest.size(),
              failure.operations.size(), ToString(closely).c_str(), ToString(shortest).c_str(),
              Replay(closely, shortest).c_str());
}

int Fuzz(const Bounds& bounds) {
  const auto start = std::chrono::steady_clock::now();
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, OnCrash);
  uint64_t operations = 0;
  uint64_t sequences = 0;
  const auto over = [&] {
    const auto elapsed = std::chrono::steady_clock::now() - start;
    return (bounds.iterations && sequences >= *bounds.iterations) ||
           (bounds.operations && operations >= *bounds.operations) ||
           (bounds.seconds && elapsed >= std::chrono::seconds(*bounds.seconds));
  };
  for (; !over(); ++sequences) {
    const uint64_t seed = bounds.seed + sequences;
    SayOnCrash(seed, bounds.numbers_only);
    OperationGenerator generator(seed, !bounds.numbers_only);
    const std::optional<Failure> failure = RunSequence(generator);
    if (failure) {
      Report(generator.setup(), *failure, seed, bounds.numbers_only);
      return 1;
    }
    operations += generator.length();
  }
  std::printf("fuzz: %llu operations, %llu sequences, seed %llu: ok\n",
              static_cast<unsigned long long>(operations),
              static_cast<unsigned long long>(sequences),
              static_cast<unsigned long long>(bounds.seed));
  return 0;
}

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  const std::optional<cgp::Bounds> bounds = cgp::Parse(count, arguments);
  if (!bounds) {
    std::fputs(cgp::kUsage.data(), stderr);
    return 2;
  }
  return cgp::Fuzz(*bounds);
}
