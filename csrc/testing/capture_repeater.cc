#include "testing/capture_repeater.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace cgp {
namespace {

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

void CaptureRepeater::Note(const PoolOperation& operation, const FuzzSession& session) {
  const auto captures = [&](uint64_t pool) {
    return session.model().OpenScope({pool, 7}) == ScopeKind::kCapture;
  };
  if (const auto* begin = std::get_if<BeginOp>(&operation)) {
    if (!session.model().OpenScope({begin->pool, 7})) open_[begin->pool].clear();
  } else if (const auto* allocate = std::get_if<AllocateOp>(&operation)) {
    if (captures(allocate->pool) && allocate->bytes > 0 &&
        allocate->bytes <= session.setup().physical_limit_bytes) {
      open_[allocate->pool].push_back(StepOf(*allocate));
    }
  } else if (const auto* free = std::get_if<FreeOp>(&operation)) {
    for (auto& [pool, program] : open_) {
      const auto same = [&](const Step& step) { return step.label == free->label; };
      if (std::ranges::count_if(program, same) == 1) program.push_back({.label = free->label});
    }
  } else if (const auto* end = std::get_if<EndOp>(&operation)) {
    Program& program = open_[end->pool];
    if (captures(end->pool) && program.size() >= kLeastSteps && program.size() <= kMostSteps) {
      std::vector<Program>& programs = programs_[end->pool];
      if (programs.size() == kMostPrograms) programs.erase(programs.begin());
      programs.push_back(std::move(program));
    }
    program.clear();
  }
}

CaptureRepeater::Step CaptureRepeater::StepOf(const AllocateOp& op) {
  Step step{.label = op.label, .bytes = op.bytes, .stream = op.stream};
  const auto power = powers_.find(op.label);
  if (power != powers_.end()) {
    step.power = power->second;
  } else if (OneIn(5)) {
    step.power = OneIn(4) ? 2 : 0;
  }
  return step;
}

// By which the program is to grow, so that it does not hold too much.
double CaptureRepeater::Factor(const Program& program) {
  constexpr std::array kFactors = {2.0, 2.0, 3.0, 1.25, 1.5, 4.0, 0.5, 1.0};
  const auto peak = [&](double factor) {
    std::map<uint64_t, uint64_t> live;
    uint64_t held = 0;
    uint64_t most = 0;
    for (const Step& step : program) {
      if (step.bytes > 0) held += live[step.label] = Scaled(step.bytes, factor, step.power);
      if (step.bytes == 0) held -= live[step.label];
      most = std::max(most, held);
    }
    return most;
  };
  const double factor = kFactors[Below(kFactors.size())];
  return factor <= 1 || peak(factor) <= options_.most_bytes ? factor : OneIn(2) ? 1.0 : 0.5;
}

// The program at another scale, with some steps put in, left out or moved.
CaptureRepeater::Program CaptureRepeater::Vary(const Program& program, double factor,
                                               uint64_t& last_label) {
  // Half of the repetitions do exactly the same.
  const uint64_t changed = OneIn(2) ? 0 : 4 + Below(24);  // one step in so many
  const bool other_streams = OneIn(4);
  std::map<uint64_t, uint64_t> labels;  // the repetition's, by the program's
  Program varied;
  for (const Step& step : program) {
    const bool change = changed > 0 && OneIn(changed);
    if (step.bytes == 0) {
      if (!labels.contains(step.label) || (change && OneIn(3))) continue;  // it survives
      varied.push_back({.label = labels[step.label]});
      continue;
    }
    if (change && OneIn(2)) continue;
    Step repeated = step;
    repeated.label = labels[step.label] = ++last_label;
    repeated.bytes = Scaled(step.bytes, factor, step.power);
    if (other_streams) repeated.stream = Below(options_.streams);
    powers_[repeated.label] = step.power;
    varied.push_back(repeated);
    if (!change) continue;
    // One more of the kind, for a moment or for good.
    Step more = repeated;
    more.label = ++last_label;
    more.bytes = 1 + Below(2 * repeated.bytes);
    varied.push_back(more);
    if (OneIn(2)) varied.push_back({.label = more.label});
  }
  // Frees at other times; one before its allocation does nothing.
  for (size_t i = 0; changed > 0 && i < varied.size(); ++i) {
    if (varied[i].bytes == 0 && OneIn(changed)) MoveItem(varied, i, Below(varied.size()));
  }
  return varied;
}

void CaptureRepeater::AddFault(std::vector<PoolOperation>& operations) {
  constexpr std::array kCalls = {DriverCall::kReserve, DriverCall::kCreate, DriverCall::kMap,
                                 DriverCall::kSetAccess};
  constexpr std::array kStatuses = {DriverStatus::kOutOfMemory, DriverStatus::kOutOfMemory,
                                    DriverStatus::kOutOfAddresses, DriverStatus::kFailed};
  FailOp fail{Below(4), kStatuses[Below(kStatuses.size())], OneIn(2), std::nullopt};
  if (OneIn(2)) fail.only = kCalls[Below(kCalls.size())];
  const auto at = [&](size_t i) { return operations.begin() + static_cast<std::ptrdiff_t>(i); };
  const size_t begin = Below(operations.size());
  const size_t end = begin + Below(operations.size() - begin);
  operations.insert(at(end), MendOp{});
  operations.insert(at(begin), fail);
}

std::vector<PoolOperation> CaptureRepeater::Repeat(uint64_t pool, const FuzzSession& session,
                                                   uint64_t& last_label) {
  const std::vector<Program>& programs = programs_[pool];
  if (programs.empty()) return {};
  const Program& program = OneIn(4) ? programs[Below(programs.size())] : programs.back();
  std::vector<PoolOperation> operations;
  // What earlier captures left is kept, freed or freed in part.
  const uint64_t kept = Below(3);
  for (const uint64_t label : session.live_labels()) {
    if (kept == 0 || (kept == 1 && OneIn(2))) operations.emplace_back(FreeOp{label});
  }
  operations.emplace_back(BeginOp{pool, ScopeKind::kCapture});
  for (const Step& step : Vary(program, Factor(program), last_label)) {
    if (step.bytes == 0) {
      operations.emplace_back(FreeOp{step.label});
    } else {
      operations.emplace_back(AllocateOp{step.label, pool, step.bytes, step.stream});
    }
  }
  operations.emplace_back(EndOp{pool});
  if (options_.faults && OneIn(3)) AddFault(operations);
  // Given up half-way: the capture goes on with something else, or ends.
  if (OneIn(6)) {
    operations.resize(1 + Below(operations.size()));
    if (OneIn(2)) operations.emplace_back(EndOp{pool});
  }
  return operations;
}

}  // namespace cgp
