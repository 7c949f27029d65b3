// cgp_fuzz: random operations on the real pool set, judged after each.
//
//   by default     every operation there is, failing drivers included, compared with a naive model
//   --captures     programs over several captured streams, judged by an oracle and executed
//
// On failure: exit code 1, the seed, and the shortest sequence that still fails, as C++.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "testing/capture_program.h"
#include "testing/capture_session.h"
#include "testing/fuzz_runner.h"
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

struct Options {
  FuzzBounds bounds;
  bool numbers_only = false;
  bool captures = false;
  bool fail_each = false;
};

std::optional<Options> Parse(int count, char** arguments) {
  Options options;
  FuzzBounds& bounds = options.bounds;
  for (int i = 1; i < count; ++i) {
    const std::string_view option = arguments[i];
    if (option == "--fail-each") {
      options.fail_each = true;
      continue;
    }
    if (option == "--numbers-only" || option == "--captures") {
      (option == "--captures" ? options.captures : options.numbers_only) = true;
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
  if (options.captures && options.numbers_only) return std::nullopt;
  if (!bounds.iterations && !bounds.seconds && !bounds.operations) bounds.seconds = 10;
  return options;
}

// Runs all operations, and what ends a session.
template <typename Session, typename Setup, typename Operation>
std::string RunAll(const Setup& setup, const std::vector<Operation>& operations) {
  Session session(setup);
  for (const Operation& operation : operations) {
    std::string complaint = session.Run(operation);
    if (!complaint.empty()) return complaint;
  }
  return session.Finish();
}

class PoolSubject {
 public:
  using Setup = FuzzSetup;
  using Operation = PoolOperation;

  PoolSubject(bool numbers_only, bool fail_each)
      : numbers_only_(numbers_only),
        fail_each_(fail_each),
        option_(std::string(numbers_only ? " --numbers-only" : "") +
                (fail_each ? " --fail-each" : "")) {}

  const char* option() const { return option_.c_str(); }
  std::string Summary() const { return {}; }

  template <typename Sequence>
  std::string Run(uint64_t seed, Sequence* sequence) const {
    OperationGenerator generator(seed, !numbers_only_);
    sequence->setup = generator.setup();
    sequence->setup.fail_each = fail_each_;
    FuzzSession session(sequence->setup);
    for (uint64_t i = 0; i < generator.length(); ++i) {
      sequence->operations.push_back(generator.Next(session));
      std::string complaint = session.Run(sequence->operations.back());
      if (!complaint.empty()) return complaint;
    }
    return session.Finish();
  }

  std::string Replay(const Setup& setup, const std::vector<Operation>& operations) const {
    return RunAll<FuzzSession>(setup, operations);
  }

  Setup Closely(Setup setup) const {
    setup.inspect_every = 1;
    return setup;
  }

 private:
  bool numbers_only_;
  bool fail_each_;
  std::string option_;
};

class CaptureSubject {
 public:
  using Setup = CaptureSetup;
  using Operation = CaptureStep;

  explicit CaptureSubject(bool fail_each) : fail_each_(fail_each) {}

  const char* option() const { return fail_each_ ? " --captures --fail-each" : " --captures"; }
  std::string Summary() const {
    return "; " + std::to_string(reused_) + " granules reused, " + std::to_string(across_) +
           " of them across streams; " + std::to_string(growths_) + " growths judged";
  }

  template <typename Sequence>
  std::string Run(uint64_t seed, Sequence* sequence) {
    const CaptureProgram program(seed);
    sequence->setup = program.setup;
    sequence->setup.fail_each = fail_each_;
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

  std::string Replay(const Setup& setup, const std::vector<Operation>& operations) const {
    return RunAll<CaptureSession>(setup, operations);
  }

  Setup Closely(const Setup& setup) const { return setup; }

 private:
  bool fail_each_;
  uint64_t reused_ = 0;
  uint64_t across_ = 0;
  uint64_t growths_ = 0;
};

}  // namespace
}  // namespace cgp

int main(int count, char** arguments) {
  const std::optional<cgp::Options> options = cgp::Parse(count, arguments);
  if (!options) {
    std::fputs(cgp::kUsage.data(), stderr);
    return 2;
  }
  if (options->captures) {
    return cgp::FuzzRunner(cgp::CaptureSubject(options->fail_each)).Run(options->bounds);
  }
  return cgp::FuzzRunner(cgp::PoolSubject(options->numbers_only, options->fail_each))
      .Run(options->bounds);
}
