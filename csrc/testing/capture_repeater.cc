#include "testing/capture_repeater.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace cgp {
namespace {

using Kind = Step::Kind;

constexpr size_t kMostPrograms = 4;
constexpr size_t kLeastSteps = 3;  // what is shorter repeats itself anyway
constexpr size_t kMostSteps = 120;

uint64_t Scaled(uint64_t bytes, double factor, unsigned power) {
  return std::max<uint64_t>(
      1, static_cast<uint64_t>(std::ceil(static_cast<double>(bytes) * std::pow(factor, power))));
}

template <typename T>
void MoveItem(std::vector<T>& items, size_t from, size_t to) {
  const auto at = [&](size_t i) { return items.begin() + static_cast<std::ptrdiff_t>(i); };
  if (from < to) {
    std::rotate(at(from), at(from + 1), at(to + 1));
  } else {
    std::rotate(at(to), at(from), at(from + 1));
  }
}

}  // namespace

void CaptureRepeater::Note(const Step& step, const FuzzSession& session) {
  const std::optional<ScopeKind> open = session.OpenScope(step.pool);
  const bool captures = open == ScopeKind::kCapture;
  Program& program = open_[step.pool];
  if (step.kind == Kind::kBeginCapture || step.kind == Kind::kBeginEager) {
    if (!open) program.clear();
  } else if (step.kind == Kind::kAllocate) {
    if (captures && step.amount > 0 && step.amount <= session.setup().physical_limit_bytes) {
      program.push_back(EventOf(step));
    }
  } else if (step.kind == Kind::kFree) {
    for (auto& [pool, of_pool] : open_) {
      const auto same = [&](const Event& event) { return event.step.item == step.item; };
      if (std::ranges::count_if(of_pool, same) == 1) of_pool.push_back({step});
    }
  } else if (step.kind == Kind::kEnd) {
    if (captures && program.size() >= kLeastSteps && program.size() <= kMostSteps) {
      std::vector<Program>& programs = programs_[step.pool];
      if (programs.size() == kMostPrograms) programs.erase(programs.begin());
      programs.push_back(std::move(program));
    }
    program.clear();
  }
}

CaptureRepeater::Event CaptureRepeater::EventOf(const Step& allocate) {
  const auto power = powers_.find(allocate.item);
  if (power != powers_.end()) return {allocate, power->second};
  return {allocate, !dice_.OneIn(5) ? 1U : dice_.OneIn(4) ? 2U : 0U};
}

// By which the program is to grow, so that it does not hold too much.
double CaptureRepeater::Factor(const Program& program) {
  const auto peak = [&](double factor) {
    std::map<uint64_t, uint64_t> live;
    uint64_t held = 0;
    uint64_t most = 0;
    for (const auto& [step, power] : program) {
      if (step.kind == Kind::kAllocate) {
        held += live[step.item] = Scaled(step.amount, factor, power);
      } else {
        held -= live[step.item];
      }
      most = std::max(most, held);
    }
    return most;
  };
  const double factor = dice_.Of(std::array{2.0, 2.0, 3.0, 1.25, 1.5, 4.0, 0.5, 1.0});
  return factor <= 1 || peak(factor) <= options_.most_bytes ? factor : dice_.OneIn(2) ? 1.0 : 0.5;
}

// The program at another scale, with some steps put in, left out or moved.
CaptureRepeater::Program CaptureRepeater::Vary(const Program& program, double factor,
                                               uint64_t& last_label) {
  // Half of the repetitions do exactly the same.
  const uint64_t changed = dice_.OneIn(2) ? 0 : 4 + dice_.Below(24);  // one step in so many
  const bool other_streams = dice_.OneIn(4);
  std::map<uint64_t, uint64_t> labels;  // the repetition's, by the program's
  Program varied;
  const auto free = [&](uint64_t label) {
    varied.push_back({{.kind = Kind::kFree, .item = label}});
  };
  for (const auto& [step, power] : program) {
    const bool change = changed > 0 && dice_.OneIn(changed);
    if (step.kind == Kind::kFree) {
      if (!labels.contains(step.item) || (change && dice_.OneIn(3))) continue;  // it survives
      free(labels[step.item]);
      continue;
    }
    if (change && dice_.OneIn(2)) continue;
    Step repeated = step;
    repeated.item = labels[step.item] = ++last_label;
    repeated.amount = Scaled(step.amount, factor, power);
    if (other_streams) repeated.stream = dice_.Below(options_.streams);
    powers_[repeated.item] = power;
    varied.push_back({repeated, power});
    if (!change) continue;
    // One more of the kind, for a moment or for good.
    Step more = repeated;
    more.item = ++last_label;
    more.amount = 1 + dice_.Below(2 * repeated.amount);
    varied.push_back({more, power});
    if (dice_.OneIn(2)) free(more.item);
  }
  // Frees at other times; one before its allocation does nothing.
  for (size_t i = 0; changed > 0 && i < varied.size(); ++i) {
    if (varied[i].step.kind == Kind::kFree && dice_.OneIn(changed)) {
      MoveItem(varied, i, dice_.Below(varied.size()));
    }
  }
  return varied;
}

void CaptureRepeater::AddFault(Steps& steps) {
  constexpr std::array kCalls = {DriverCall::kReserve, DriverCall::kCreate, DriverCall::kMap,
                                 DriverCall::kSetAccess};
  constexpr std::array kStatuses = {DriverStatus::kOutOfMemory, DriverStatus::kOutOfMemory,
                                    DriverStatus::kOutOfAddresses, DriverStatus::kFailed};
  Step fail{Kind::kFail};
  fail.fault.call_number = 1 + dice_.Below(4);
  fail.fault.status = dice_.Of(kStatuses);
  fail.fault.for_good = dice_.OneIn(2);
  if (dice_.OneIn(2)) fail.fault.only = dice_.Of(kCalls);
  const auto at = [&](size_t i) { return steps.begin() + static_cast<std::ptrdiff_t>(i); };
  const size_t begin = dice_.Below(steps.size());
  const size_t end = begin + dice_.Below(steps.size() - begin);
  steps.insert(at(end), {Kind::kMend});
  steps.insert(at(begin), fail);
}

Steps CaptureRepeater::Repeat(uint64_t pool, const FuzzSession& session, uint64_t& last_label) {
  const std::vector<Program>& programs = programs_[pool];
  if (programs.empty()) return {};
  const Program& program = dice_.OneIn(4) ? dice_.Of(programs) : programs.back();
  Steps steps;
  // What earlier captures left is kept, freed or freed in part.
  const uint64_t kept = dice_.Below(3);
  for (const uint64_t label : session.live_labels()) {
    if (kept == 0 || (kept == 1 && dice_.OneIn(2))) {
      steps.push_back({.kind = Kind::kFree, .item = label});
    }
  }
  steps.push_back({.kind = Kind::kBeginCapture, .pool = pool});
  for (const auto& [step, power] : Vary(program, Factor(program), last_label)) {
    steps.push_back(step);
  }
  const Step end{.kind = Kind::kEnd, .pool = pool};
  steps.push_back(end);
  if (options_.faults && dice_.OneIn(3)) AddFault(steps);
  // Given up half-way: the capture goes on with something else, or ends.
  if (dice_.OneIn(6)) {
    steps.resize(1 + dice_.Below(steps.size()));
    if (dice_.OneIn(2)) steps.push_back(end);
  }
  return steps;
}

}  // namespace cgp
