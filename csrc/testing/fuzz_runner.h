// Runs random sequences of something, and reports the first that fails: its seed, and the shortest
// sequence that still fails.
//
// Sequence number i of a run is made from the run's seed plus i alone, so a failure is repeated by
// the seed that is printed.
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "testing/minimise.h"

namespace cgp {

struct FuzzBounds {
  uint64_t seed = 1;
  std::optional<uint64_t> iterations;
  std::optional<uint64_t> seconds;
  std::optional<uint64_t> operations;
};

// A Subject has
//   Setup, Operation              each with a ToString(); that of several operations ends each with
//                                 a line's end
//   option()                      what else to say on the command line to come to this subject
//   Run(seed, &sequence)          makes a sequence of this seed and runs it
//   Replay(setup, operations)     runs it again; both return a complaint, or nothing
//   Closely(setup)                the same, looking more closely at each operation
template <typename Subject>
class FuzzRunner {
 public:
  struct Sequence {
    typename Subject::Setup setup;
    std::vector<typename Subject::Operation> operations;  // up to the one that failed
  };

  explicit FuzzRunner(Subject subject) : subject_(subject) {}

  // Returns the exit code.
  int Run(const FuzzBounds& bounds) {
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
      std::snprintf(crash_text, sizeof crash_text, "\nfuzz: crashed; repeat with %s\n",
                    Again(seed).c_str());
      Sequence sequence;
      const std::string complaint = subject_.Run(seed, &sequence);
      if (!complaint.empty()) {
        Report(sequence, complaint, seed);
        return 1;
      }
      operations += sequence.operations.size();
    }
    std::printf("fuzz%s: %llu operations, %llu sequences, seed %llu: ok%s\n", subject_.option(),
                static_cast<unsigned long long>(operations),
                static_cast<unsigned long long>(sequences),
                static_cast<unsigned long long>(bounds.seed), subject_.Summary().c_str());
    return 0;
  }

 private:
  // A crash cannot be minimised from within; its seed is what a debugger needs.
  static inline char crash_text[128];

  static void OnCrash(int signal) {
    // Nothing else may be called from here.
    [[maybe_unused]] const auto written = write(STDERR_FILENO, crash_text, std::strlen(crash_text));
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }

  std::string Again(uint64_t seed) const {
    return "--seed " + std::to_string(seed) + " --iterations 1" + subject_.option();
  }

  // What a complaint says before its first number: complaints of one defect agree in that.
  static std::string KindOf(const std::string& complaint) {
    return complaint.substr(0, complaint.find_first_of("0123456789"));
  }

  void Report(const Sequence& sequence, const std::string& complaint, uint64_t seed) {
    std::printf("fuzz: FAILED, repeat with %s\n%s\n", Again(seed).c_str(), complaint.c_str());
    std::fflush(stdout);
    // Looking closely after each operation shows a defect where it happens, unless looking closely
    // hides it.
    auto closely = subject_.Closely(sequence.setup);
    const std::string kind = KindOf(complaint);
    if (KindOf(subject_.Replay(closely, sequence.operations)) != kind) closely = sequence.setup;
    const auto fails = [&](const auto& operations) {
      return KindOf(subject_.Replay(closely, operations)) == kind;
    };
    if (!fails(sequence.operations)) {
      std::printf("The same operations do not fail again, which is a defect of the fuzzer:\n%s",
                  ToString(sequence.operations).c_str());
      return;
    }
    const auto shortest = Minimise(sequence.operations, fails, 20'000);
    std::printf("Shortest sequence, %zu of %zu operations:\n  %s\n%sends with: %s\n",
                shortest.size(), sequence.operations.size(), ToString(closely).c_str(),
                ToString(shortest).c_str(), subject_.Replay(closely, shortest).c_str());
  }

  Subject subject_;
};

}  // namespace cgp
