#include "testing/operation_generator.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/base/units.h"

namespace cgp {
using enum Step::Kind;

OperationGenerator::OperationGenerator(uint64_t seed, bool map_memory) : dice_(seed) {
  setup.map_memory = map_memory;
  // Real mappings come in system pages; numbers may be as small as makes cases frequent.
  setup.granularity_bytes = map_memory ? 4096 : uint64_t{1024} << dice_.Below(3);
  setup.page_bytes = setup.granularity_bytes << (dice_.OneIn(2) ? 0 : dice_.Below(4));
  // One sequence in four lives with a limit that it will meet.
  setup.physical_limit_bytes =
      dice_.OneIn(4) ? setup.page_bytes * (1 + dice_.Below(40)) : uint64_t{1} << 30;
  setup.tidy_end = dice_.OneIn(2);
  left_ = uint64_t{20} << dice_.Below(6);
  pools_ = 1 + dice_.Below(3);
  setup.one_pool = pools_ == 1;
  streams_ = 1 + dice_.Below(4);
  most_live_ = uint64_t{4} << dice_.Below(6);
  mean_pages_ = std::exp2(static_cast<double>(dice_.Below(70)) / 10.0 - 4.0);  // 1/16 to 8
  captures_only_ = dice_.OneIn(2);

  const auto up_to = [this](uint64_t most) { return 1 + static_cast<unsigned>(dice_.Below(most)); };
  unsigned& begin = weights_[kBeginCapture];  // a scope of either kind
  unsigned& end = weights_[kEnd];
  weights_[kAllocate] = 19 + up_to(80);
  weights_[kFree] = dice_.Some(100);
  begin = 2 + dice_.Some(10);
  end = dice_.Some(6);
  weights_[kRetain] = dice_.Some(2);
  weights_[kRelease] = dice_.Some(4);
  weights_[kUse] = streams_ > 1 ? dice_.Some(20) : 0;
  weights_[kTrim] = dice_.Some(4);
  weights_[kProgress] = dice_.Some(20);
  weights_[kPeer] = dice_.OneIn(4) ? 1 : 0;
  const unsigned fail = dice_.OneIn(3) ? up_to(10) : 0;
  weights_[kFail] = weights_[kMend] = fail;
  // Events are asked for in few places, so failing just them takes a sequence of its own.
  fails_events_ = dice_.OneIn(8);
  if (fails_events_) {
    captures_only_ = false;
    weights_[kFail] = weights_[kProgress] = 20;
    weights_[kMend] = begin = end = 10;
  }
  // Handles of several pages are for pools of a thousand.
  large_ = seed % 16 == 15;
  if (large_) {
    setup.page_bytes = setup.granularity_bytes;
    setup.physical_limit_bytes = 2500 * setup.page_bytes;
    // A process has 65,530 mappings.
    left_ = std::min<uint64_t>(left_, 80);
    most_live_ = std::max<uint64_t>(most_live_, 16);
    pools_ = 1;
    setup.one_pool = true;
  }
  weights_[kFreeWild] = dice_.Some(3);  // bad input of any kind
  weights_[kReplay] = captures_only_ ? 0 : dice_.Some(10);
  weights_[kInspect] = dice_.Some(2);
  repeats_ = !fails_events_ && dice_.OneIn(2);
  if (repeats_) {
    repeats_fail_ = fail > 0 || dice_.OneIn(8);
    interruption_ = uint64_t{8} << dice_.Below(5);
    // Programs ask for whole numbers of elements, which scale exactly.
    if (!dice_.OneIn(4)) size_step_ = 16;
    begin = std::max(begin, 6U);
    end = std::max(end, 4U);
    if (!large_) left_ = std::max<uint64_t>(left_, 160);
  }
  leases_ = dice_.OneIn(2);
  if (leases_) {
    for (size_t kind = static_cast<size_t>(kBeginApart); kind < Step::kKinds; ++kind) {
      weights_[static_cast<Step::Kind>(kind)] = dice_.Some(6);
    }
    weights_[kReplay] = dice_.Some(12);
    names_ = dice_.OneIn(2);
    if (names_) weights_[kDropCapture] = weights_[kTrimToNeeds] = 6;
    end = std::max(end, 6U);
  }
  if (dice_.OneIn(2)) {
    checkpoints_.resize(1 + dice_.Below(6));
    weights_[kCheckpoint] = up_to(6);
    weights_[kRestore] = up_to(12);
    end = std::max(end, 6U);
  }
}

// Mostly of a pool that is at rest.
Step OperationGenerator::Lease(Step::Kind kind, const FuzzSession& session) {
  uint64_t pool = Pool();
  const uint64_t loan = PoolModel::LoanOf({pool}).first;
  const bool reads = kind == kReplay || kind == kNameCapture || kind == kDropCapture;
  if (session.OpenScope(pool) && !reads && !dice_.OneIn(8)) {
    return {.kind = kEnd, .pool = session.OpenScope(loan) && dice_.OneIn(2) ? loan : pool};
  }
  const bool lends = session.OpenScope(loan).has_value() && kind != kReplay && kind != kWake;
  // Some scopes of the lender begin beside the loan.
  if (lends && kind == kBeginLoan && !session.OpenScope(pool)) return Begin(pool);
  if (lends && dice_.OneIn(2)) return {.kind = kEnd, .pool = loan};
  Step step{.kind = kind, .stream = Stream(), .item = dice_.Below(8), .pool = pool};
  if (kind == kSleep) step.amount = dice_.OneIn(4) ? 1 : 0;
  if (kind == kLease) step.amount = dice_.OneIn(16) ? 0 : 1 + dice_.Below(3);
  if (kind >= kLease && kind <= kLeaseEnd) step.item %= 2;
  return step;
}

uint64_t OperationGenerator::Bytes() {
  return (AnyBytes() + size_step_ - 1) / size_step_ * size_step_;
}

uint64_t OperationGenerator::AnyBytes() {
  const uint64_t page = setup.page_bytes;
  if (large_ && dice_.OneIn(2)) {
    return page * (2 + dice_.Below(dice_.OneIn(3) ? 1000 : 100)) - dice_.Below(page);
  }
  switch (dice_.Below(8)) {
    case 0: {  // about a few whole pages
      const uint64_t pages = (1 + dice_.Below(4)) * page;
      return dice_.Of(
          std::array{pages, pages - kGranuleBytes, pages + kGranuleBytes, pages - 1, pages + 1});
    }
    case 1:
      return 1 + dice_.Below(2 * kGranuleBytes);
    case 2:
      return kGranuleBytes * (1 + dice_.Below(page / kGranuleBytes));
    default: {  // exponential
      const double uniform = (static_cast<double>(dice_.Below(1 << 20)) + 1.0) / (1 << 20);
      const double bytes = -std::log(uniform) * mean_pages_ * static_cast<double>(page);
      return std::clamp<uint64_t>(static_cast<uint64_t>(bytes), 1, 64 * page);
    }
  }
}

Step OperationGenerator::Begin(uint64_t pool) {
  const bool captures = captures_only_ || dice_.OneIn(2);
  const uint64_t amount = dice_.OneIn(8) ? 1 : 0;
  return {.kind = captures ? kBeginCapture : kBeginEager, .amount = amount, .pool = pool};
}

Step OperationGenerator::Allocate(const FuzzSession& session) {
  if (session.live_labels().size() >= most_live_) return Free(session);
  uint64_t pool = Pool();
  // Most allocations ought to succeed: look for a pool with an open scope.
  for (uint64_t tries = 0; tries < pools_ && !session.OpenScope(pool); ++tries) {
    pool = pool % pools_ + 1;
  }
  if (const uint64_t loan = PoolModel::LoanOf({pool}).first;
      session.OpenScope(loan) && (!session.OpenScope(pool) || dice_.OneIn(2))) {
    pool = loan;
  }
  if (!session.OpenScope(pool)) return Begin(pool);
  const uint64_t bytes = Bytes();
  return {kAllocate, Stream(), ++last_label_, bytes, pool};
}

Step OperationGenerator::Free(const FuzzSession& session) {
  const std::vector<uint64_t>& live = session.live_labels();
  if (live.empty()) return {kInspect};
  // What was allocated last is what is most often freed next.
  return {.kind = kFree, .item = dice_.NewOf(live, 3)};
}

Step OperationGenerator::Checkpoint(const FuzzSession& session) {
  const uint64_t pool = Pool();
  if (session.OpenScope(pool) && !dice_.OneIn(8)) return {.kind = kEnd, .pool = pool};
  const uint64_t number = dice_.Below(checkpoints_.size());
  checkpoints_[number] = pool;
  return {.kind = kCheckpoint, .item = number, .pool = pool};
}

Step OperationGenerator::Restore(const FuzzSession& session) {
  const uint64_t number = dice_.Below(checkpoints_.size());
  const uint64_t pool =
      checkpoints_[number] == 0 || dice_.OneIn(16) ? Pool() : checkpoints_[number];
  if (session.OpenScope(pool) && !dice_.OneIn(8)) return {.kind = kEnd, .pool = pool};
  return {.kind = kRestore, .item = number, .pool = pool};
}

Step OperationGenerator::Bad(const FuzzSession& session) {
  constexpr uint64_t kNoPool = 100;
  const std::vector<uint64_t>& live = session.live_labels();
  const std::vector<uint64_t>& freed = session.freed_labels();
  const auto allocate = [&](uint64_t pool, uint64_t bytes) -> Step {
    return {kAllocate, Stream(), ++last_label_, bytes, pool};
  };
  const uint64_t which = dice_.Below(9);
  if (which == 0) return {.kind = kBeginCapture, .pool = Pool()};
  if (which == 1) return {.kind = kEnd, .pool = Pool()};
  if (which == 2) return {.kind = kRelease, .pool = kNoPool};
  if (which == 3) return allocate(kNoPool, Bytes());
  if (which == 4) return allocate(Pool(), 0);
  if (which == 5) {  // more than there can ever be, up to what overflows when rounded up
    const uint64_t pool = Pool();
    return allocate(pool, ~uint64_t{0} - (dice_.Any() >> dice_.Below(64)));
  }
  if (which == 7) {
    return {.kind = kFreeWild, .amount = dice_.OneIn(2) ? 0 : dice_.Any() >> dice_.Below(64)};
  }
  const std::vector<uint64_t>& labels = which == 6 ? live : freed;
  if (labels.empty()) return {kInspect};
  return {.kind = which == 6 ? kFreeInside : kFree, .item = dice_.Of(labels)};
}

Step OperationGenerator::Fail() {
  Step step{kFail};
  Fault& fault = step.fault;
  if (fails_events_) {
    fault.call_number = 1 + dice_.Below(3);
    fault.only = dice_.OneIn(4) ? DriverCall::kRecordDeviceEvent : DriverCall::kEventDone;
    return step;
  }
  if (dice_.OneIn(3)) {
    step.kind = kFailAllocation;
    fault.call_number = 1 + dice_.Below(dice_.OneIn(2) ? 4 : 40);
    fault.for_good = dice_.OneIn(3);
    return step;
  }
  if (dice_.OneIn(2)) fault.only = static_cast<DriverCall>(dice_.Below(kDriverCallKinds));
  fault.call_number = 1 + dice_.Below(dice_.OneIn(2) ? 4 : 30);
  fault.status = static_cast<DriverStatus>(dice_.Below(3));
  fault.for_good = dice_.OneIn(3);
  return step;
}

void OperationGenerator::Note(const Step& step, const FuzzSession& session) {
  constexpr size_t kLeastSteps = 3;  // what is shorter repeats itself anyway
  constexpr size_t kMostSteps = 120;
  const bool open = session.OpenScope(step.pool).has_value();
  Steps& program = open_[step.pool];
  if (step.kind == kAllocate) {
    if (!open || step.amount == 0 || step.amount > setup.physical_limit_bytes) return;
    program.push_back(step);
    if (!powers_.contains(step.item)) {
      powers_[step.item] = !dice_.OneIn(5) ? 1 : dice_.OneIn(4) ? 2 : 0;
    }
  } else if (step.kind == kFree) {
    for (auto& [pool, some] : open_) {
      if (std::ranges::count(some, step.item, &Step::item) == 1) some.push_back(step);
    }
  } else if (step.kind == kEnd) {
    if (open && program.size() >= kLeastSteps && program.size() <= kMostSteps) {
      programs_[step.pool].push_back(program);
    }
    program.clear();
  } else if (!open) {
    program.clear();
  }
}

uint64_t OperationGenerator::Scaled(const Step& allocate, double factor) const {
  const double scale = std::pow(factor, powers_.at(allocate.item));
  return std::max<uint64_t>(
      1, static_cast<uint64_t>(std::ceil(static_cast<double>(allocate.amount) * scale)));
}

// The program at another scale, with some steps put in, left out or moved.
Steps OperationGenerator::Vary(const Steps& program) {
  double factor = dice_.Of(std::array{2.0, 2.0, 3.0, 1.25, 1.5, 4.0, 0.5, 1.0});
  uint64_t sum = 0;
  for (const Step& step : program) {
    if (step.kind == kAllocate) sum += Scaled(step, factor);
  }
  const uint64_t most = setup.page_bytes * (large_ ? 2000 : 500);
  if (factor > 1 && sum > std::min(setup.physical_limit_bytes, most)) factor = 1;
  // Half of the repetitions do exactly the same.
  const uint64_t changed = dice_.OneIn(2) ? 0 : 4 + dice_.Below(24);  // one step in so many
  const bool other_streams = dice_.OneIn(4);
  std::map<uint64_t, uint64_t> labels;  // the repetition's, by the program's
  Steps varied;
  for (const Step& step : program) {
    const bool change = changed > 0 && dice_.OneIn(changed);
    if (change && dice_.OneIn(2)) continue;
    Step& next = varied.emplace_back(step);
    if (step.kind == kFree) {
      next.item = labels[step.item];
      // At another time; before its allocation it does nothing.
      if (change) std::swap(next, varied[dice_.Below(varied.size())]);
      continue;
    }
    next.item = labels[step.item] = ++last_label_;
    next.amount = Scaled(step, factor);
    if (other_streams) next.stream = Stream();
    powers_[next.item] = powers_.at(step.item);
    if (!change) continue;
    // One more of the kind, for a moment or for good.
    Step more = next;
    more.item = ++last_label_;
    more.amount = 1 + dice_.Below(2 * more.amount);
    varied.push_back(more);
    if (dice_.OneIn(2)) varied.push_back({.kind = kFree, .item = more.item});
  }
  return varied;
}

void OperationGenerator::Repeat(uint64_t pool, const FuzzSession& session) {
  const std::vector<Steps>& programs = programs_[pool];
  if (programs.empty()) return;
  Steps steps;
  // What earlier captures left is kept, freed or freed in part.
  const uint64_t kept = dice_.Below(3);
  for (const uint64_t label : session.live_labels()) {
    if (kept == 0 || (kept == 1 && dice_.OneIn(2))) {
      steps.push_back({.kind = kFree, .item = label});
    }
  }
  // Some warm up for the next.
  const bool eager = !captures_only_ && dice_.OneIn(3);
  steps.push_back({.kind = eager ? kBeginEager : kBeginCapture, .pool = pool});
  const Steps varied = Vary(dice_.OneIn(4) ? dice_.Of(programs) : programs.back());
  steps.insert(steps.end(), varied.begin(), varied.end());
  steps.push_back({.kind = kEnd, .pool = pool});
  if (repeats_fail_ && dice_.OneIn(3)) {
    constexpr std::array kCalls = {DriverCall::kReserve, DriverCall::kCreate, DriverCall::kMap,
                                   DriverCall::kSetAccess};
    Step fail{kFail};
    fail.fault = {1 + dice_.Below(4), static_cast<DriverStatus>(dice_.Below(3)), dice_.OneIn(2)};
    if (dice_.OneIn(2)) fail.fault.only = dice_.Of(kCalls);
    const auto begin = static_cast<std::ptrdiff_t>(dice_.Below(steps.size()));
    const auto end = begin + static_cast<std::ptrdiff_t>(dice_.Below(steps.size())) / 2;
    steps.insert(std::min(steps.begin() + end, steps.end()), {kMend});
    steps.insert(steps.begin() + begin, fail);
  }
  // Some are given up half-way: the capture goes on with something else.
  if (dice_.OneIn(6)) steps.resize(1 + dice_.Below(steps.size()));
  repetition_.assign(steps.begin(), steps.end());
}

// The next step of the repetition under way; of a new one, if it is time for one.
std::optional<Step> OperationGenerator::NextOfRepetition(const FuzzSession& session) {
  if (!repeats_ || dice_.OneIn(interruption_)) return std::nullopt;
  const uint64_t pool = Pool();
  if (repetition_.empty() && !session.OpenScope(pool) && !dice_.OneIn(4)) {
    Repeat(pool, session);
  }
  if (repetition_.empty()) return std::nullopt;
  const Step next = repetition_.front();
  repetition_.pop_front();
  // Something else ended the capture.
  if (next.kind == kAllocate && !session.OpenScope(next.pool)) {
    repetition_.clear();
    return std::nullopt;
  }
  return next;
}

std::optional<Step> OperationGenerator::Next(const FuzzSession& session) {
  if (left_-- == 0) return std::nullopt;
  const std::optional<Step> repeated = NextOfRepetition(session);
  const Step next = repeated ? *repeated : Choose(session);
  if (repeats_) Note(next, session);
  return next;
}

Step OperationGenerator::Choose(const FuzzSession& session) {
  const uint64_t ended = Pool();
  if (names_ && session.MayName(ended)) return {.kind = kNameCapture, .pool = ended};
  const Step::Kind kind = weights_.Pick(dice_);
  if (kind == kAllocate) return Allocate(session);
  if (kind == kFree) return Free(session);
  if (kind == kBeginCapture) return Begin(Pool());
  if (kind == kFail) return Fail();
  if (kind == kFreeWild) return Bad(session);
  if (kind == kCheckpoint) return Checkpoint(session);
  if (kind == kRestore) return Restore(session);
  if (kind == kReplay || kind >= kBeginApart) return Lease(kind, session);
  if (kind == kPeer) return {.kind = kind, .item = ++last_peer_};
  if (kind == kProgress) {
    return {.kind = kind, .stream = Stream(), .amount = 1 + dice_.Below(8)};
  }
  if (kind == kEnd || kind == kRetain || kind == kRelease) {
    return {.kind = kind, .pool = Pool()};
  }
  Step step{kind};
  if (kind == kUse) {
    if (session.live_labels().empty()) return {kInspect};
    step.item = dice_.Of(session.live_labels());
    step.stream = Stream();
  }
  return step;
}

}  // namespace cgp
