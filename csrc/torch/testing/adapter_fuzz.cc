// cgp_torch_fuzz: random programs (adapter_fuzz_session.h) until one of them complains. Then: exit
// code 1, the seed that repeats it, and the shortest program that still fails, as what it did.
//
// A program's steps are numbers: each seeds the dice that one step throws, so that the others stay
// much what they are when it is taken out. A program runs in a process of its own, since pools live
// as long as that does.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "testing/minimise.h"
#include "testing/options.h"
#include "testing/step.h"
#include "testing/text.h"
#include "torch/testing/adapter_fuzz_session.h"

namespace cgp::simulated {
namespace {

struct Outcome {
  std::string complaint;  // empty: none
  std::string log;
};

// In a process of its own.
Outcome Run(uint64_t seed, const std::vector<uint64_t>& steps) {
  std::array<int, 2> ends{};
  TORCH_CHECK(pipe(ends.data()) == 0);
  const pid_t child = fork();
  TORCH_CHECK(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    alarm(60);
    auto* const session = new Session(seed);  // the threads stay
    for (const uint64_t step : steps) {
      session->Step(step);
      if (!complaint.empty()) break;
    }
    std::puts(complaint.c_str());
    std::fflush(stdout);
    _exit(complaint.empty() ? 0 : 1);
  }
  close(ends[1]);
  Outcome outcome;
  std::array<char, 4096> text{};
  for (ssize_t count = 0; (count = read(ends[0], text.data(), text.size())) > 0;) {
    outcome.log.append(text.data(), static_cast<size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status)) {
    outcome.complaint = Text("ended by signal ", WTERMSIG(status));
  } else if (WEXITSTATUS(status) != 0) {
    outcome.complaint = outcome.log.substr(outcome.log.rfind('\n', outcome.log.size() - 2) + 1);
  }
  return outcome;
}

int Fuzz(uint64_t first, uint64_t programs) {
  uint64_t count = 0;
  for (uint64_t seed = first; seed < first + programs; ++seed) {
    Dice dice(seed);
    std::vector<uint64_t> steps(100 + dice.Below(600));
    for (uint64_t& step : steps) step = dice.Any();
    count += steps.size();
    const std::string text = Run(seed, steps).complaint;
    if (text.empty()) continue;
    std::printf("fuzz: FAILED, repeat with --seed %ju --iterations 1\n%s\n", uintmax_t{seed},
                text.c_str());
    std::fflush(stdout);
    const std::string kind = KindOf(text);
    const auto fails = [&](const auto& some) { return KindOf(Run(seed, some).complaint) == kind; };
    const auto shortest = Minimise(steps, fails, 500);
    std::printf("Shortest program, %zu of %zu steps:\n%s", shortest.size(), steps.size(),
                Run(seed, shortest).log.c_str());
    return 1;
  }
  std::printf("fuzz of the adapter: %ju steps, %ju programs, seed %ju: ok\n", uintmax_t{count},
              uintmax_t{programs}, uintmax_t{first});
  return 0;
}

}  // namespace
}  // namespace cgp::simulated

int main(int count, char** arguments) {
  uint64_t seed = 1;
  uint64_t iterations = 200;
  const auto others =
      cgp::ParseOptions(count, arguments, {{"--seed", &seed}, {"--iterations", &iterations}});
  if (!others || !others->empty()) {
    std::fputs("usage: cgp_torch_fuzz [--seed N] [--iterations N]\n", stderr);
    return 2;
  }
  return cgp::simulated::Fuzz(seed, iterations);
}
