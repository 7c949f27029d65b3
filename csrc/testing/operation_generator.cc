#include "testing/operation_generator.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <optional>
#include <utility>

#include "core/base/units.h"

namespace cgp {

OperationGenerator::OperationGenerator(uint64_t seed, bool map_memory) : random_(seed) {
  setup_.map_memory = map_memory;
  // Real mappings come in system pages; numbers may be as small as makes cases frequent.
  setup_.granularity_bytes = map_memory ? 4096 : uint64_t{1024} << Below(3);
  setup_.page_bytes = setup_.granularity_bytes << (OneIn(2) ? 0 : Below(4));
  // One sequence in four lives with a limit that it will meet.
  setup_.physical_limit_bytes = OneIn(4) ? setup_.page_bytes * (1 + Below(40)) : uint64_t{1} << 30;
  setup_.tidy_end = OneIn(2);
  length_ = uint64_t{20} << Below(6);
  pools_ = 1 + Below(3);
  setup_.one_pool = pools_ == 1;
  streams_ = 1 + Below(4);
  most_live_ = uint64_t{4} << Below(6);
  mean_pages_ = std::exp2(static_cast<double>(Below(70)) / 10.0 - 4.0);  // 1/16 to 8
  captures_only_ = OneIn(2);

  const auto some = [this](unsigned usual) { return OneIn(3) ? 0U : 1 + unsigned(Below(usual)); };
  weights_.allocate = 20 + unsigned(Below(80));
  weights_.free = some(100);
  weights_.begin = 2 + some(10);
  weights_.end = some(6);
  weights_.retain = some(2);
  weights_.release = some(4);
  weights_.record_use = streams_ > 1 ? some(20) : 0;
  weights_.trim = some(4);
  weights_.progress = some(20);
  weights_.peer = OneIn(4) ? 1 : 0;
  weights_.fail = OneIn(3) ? 1 + unsigned(Below(10)) : 0;
  weights_.mend = weights_.fail;
  // Events are asked for in few places, so failing just them takes a sequence of its own.
  fails_events_ = OneIn(8);
  if (fails_events_) {
    captures_only_ = false;
    weights_.fail = weights_.progress = 20;
    weights_.mend = weights_.begin = weights_.end = 10;
  }
  // Handles of several pages are for pools of a thousand.
  large_ = seed % 16 == 15;
  if (large_) {
    setup_.page_bytes = setup_.granularity_bytes;
    setup_.physical_limit_bytes = 2500 * setup_.page_bytes;
    // A process has 65,530 mappings.
    length_ = std::min<uint64_t>(length_, 80);
    most_live_ = std::max<uint64_t>(most_live_, 16);
    pools_ = 1;
    setup_.one_pool = true;
  }
  weights_.bad = some(3);
  weights_.replay = captures_only_ ? 0 : some(10);
  weights_.inspect = some(2);
  if (!fails_events_ && OneIn(2)) {
    repeater_.emplace(
        random_,
        CaptureRepeater::Options{.streams = streams_,
                                 .most_bytes = std::min(setup_.physical_limit_bytes,
                                                        setup_.page_bytes * (large_ ? 1000 : 300)),
                                 .faults = weights_.fail > 0 || OneIn(8)});
    interruption_ = uint64_t{8} << Below(5);
    // Programs ask for whole numbers of elements, which scale exactly.
    if (!OneIn(4)) size_step_ = 16;
    weights_.begin = std::max(weights_.begin, 6U);
    weights_.end = std::max(weights_.end, 4U);
    if (!large_) length_ = std::max<uint64_t>(length_, 160);
  }
  if (OneIn(2)) {
    checkpoints_.resize(1 + Below(6));
    weights_.checkpoint = 1 + unsigned(Below(6));
    weights_.restore = 1 + unsigned(Below(12));
    weights_.end = std::max(weights_.end, 6U);
  }
}

uint64_t OperationGenerator::Below(uint64_t bound) {
  // Not std::uniform_int_distribution: its values differ between standard libraries.
  return random_() % bound;
}

uint64_t OperationGenerator::Bytes() {
  return (AnyBytes() + size_step_ - 1) / size_step_ * size_step_;
}

uint64_t OperationGenerator::AnyBytes() {
  const uint64_t page = setup_.page_bytes;
  if (large_ && OneIn(2)) return page * (2 + Below(OneIn(3) ? 1000 : 100)) - Below(page);
  switch (Below(8)) {
    case 0: {  // about a few whole pages
      const uint64_t pages = (1 + Below(4)) * page;
      const std::array<uint64_t, 5> near = {pages, pages - kGranuleBytes, pages + kGranuleBytes,
                                            pages - 1, pages + 1};
      return near[Below(near.size())];
    }
    case 1:
      return 1 + Below(2 * kGranuleBytes);
    case 2:
      return kGranuleBytes * (1 + Below(page / kGranuleBytes));
    default: {  // exponential
      const double uniform = (static_cast<double>(Below(1 << 20)) + 1.0) / (1 << 20);
      const double bytes = -std::log(uniform) * mean_pages_ * static_cast<double>(page);
      return std::clamp<uint64_t>(static_cast<uint64_t>(bytes), 1, 64 * page);
    }
  }
}

PoolOperation OperationGenerator::Allocate(const FuzzSession& session) {
  if (session.live_labels().size() >= most_live_) return Free(session);
  uint64_t pool = Pool();
  // Most allocations ought to succeed: look for a pool with an open scope.
  for (uint64_t tries = 0; tries < pools_ && !session.model().OpenScope({pool, 7}); ++tries) {
    pool = pool % pools_ + 1;
  }
  if (!session.model().OpenScope({pool, 7})) {
    return BeginOp{pool, captures_only_ || OneIn(2) ? ScopeKind::kCapture : ScopeKind::kEager};
  }
  return AllocateOp{++last_label_, pool, Bytes(), Stream()};
}

PoolOperation OperationGenerator::Free(const FuzzSession& session) {
  const std::vector<uint64_t>& live = session.live_labels();
  if (live.empty()) return InspectOp{};
  // What was allocated last is what is most often freed next.
  const uint64_t among = OneIn(2) ? std::min<uint64_t>(live.size(), 3) : live.size();
  return FreeOp{live[live.size() - 1 - Below(among)]};
}

PoolOperation OperationGenerator::Checkpoint(const FuzzSession& session) {
  const uint64_t pool = Pool();
  if (session.model().OpenScope({pool, 7}) && !OneIn(8)) return EndOp{pool};
  const uint64_t number = Below(checkpoints_.size());
  checkpoints_[number] = pool;
  return CheckpointOp{number, pool};
}

PoolOperation OperationGenerator::Restore(const FuzzSession& session) {
  const uint64_t number = Below(checkpoints_.size());
  const uint64_t pool = checkpoints_[number] == 0 || OneIn(16) ? Pool() : checkpoints_[number];
  if (session.model().OpenScope({pool, 7}) && !OneIn(8)) return EndOp{pool};
  return RestoreOp{number, pool};
}

PoolOperation OperationGenerator::Bad(const FuzzSession& session) {
  const std::vector<uint64_t>& live = session.live_labels();
  const std::vector<uint64_t>& freed = session.freed_labels();
  switch (Below(9)) {
    case 0:
      return BeginOp{Pool(), ScopeKind::kCapture};
    case 1:
      return EndOp{Pool()};
    case 2:
      return ReleaseOp{100};  // no such pool
    case 3:
      return AllocateOp{++last_label_, 100, Bytes(), Stream()};
    case 4:
      return AllocateOp{++last_label_, Pool(), 0, Stream()};
    case 5:  // more than there can ever be, up to what overflows when rounded up
      return AllocateOp{++last_label_, Pool(), ~uint64_t{0} - (random_() >> Below(64)), Stream()};
    case 6:
      return live.empty() ? PoolOperation(InspectOp{})
                          : PoolOperation(FreeInsideOp{live[Below(live.size())]});
    case 7:
      return FreeWildOp{OneIn(2) ? 0 : random_() >> Below(64)};
    default:
      return freed.empty() ? PoolOperation(InspectOp{})
                           : PoolOperation(FreeOp{freed[Below(freed.size())]});
  }
}

PoolOperation OperationGenerator::Fail() {
  constexpr std::array kStatuses = {DriverStatus::kOutOfMemory, DriverStatus::kOutOfAddresses,
                                    DriverStatus::kFailed};
  std::optional<DriverCall> only;
  if (fails_events_) {
    return FailOp{Below(3), DriverStatus::kFailed, false,
                  OneIn(4) ? DriverCall::kRecordDeviceEvent : DriverCall::kEventDone};
  }
  if (OneIn(3)) return FailAllocationOp{Below(OneIn(2) ? 4 : 40), OneIn(3)};
  if (OneIn(2)) only = static_cast<DriverCall>(Below(kDriverCallKinds));
  return FailOp{Below(OneIn(2) ? 4 : 30), kStatuses[Below(kStatuses.size())], OneIn(3), only};
}

// The next operation of the repetition under way; of a new one, if it is time for one.
std::optional<PoolOperation> OperationGenerator::NextOfRepetition(const FuzzSession& session) {
  const auto is_open = [&](uint64_t pool) {
    return session.model().OpenScope({pool, 7}).has_value();
  };
  if (!repeater_ || OneIn(interruption_)) return std::nullopt;
  const uint64_t pool = Pool();
  if (repetition_.empty() && !is_open(pool) && !OneIn(4)) {
    std::ranges::move(repeater_->Repeat(pool, session, last_label_),
                      std::back_inserter(repetition_));
  }
  if (repetition_.empty()) return std::nullopt;
  PoolOperation next = repetition_.front();
  repetition_.pop_front();
  // Something else ended the capture.
  const auto* const allocate = std::get_if<AllocateOp>(&next);
  if (allocate != nullptr && !is_open(allocate->pool)) {
    repetition_.clear();
    return std::nullopt;
  }
  return next;
}

PoolOperation OperationGenerator::Next(const FuzzSession& session) {
  std::optional<PoolOperation> repeated = NextOfRepetition(session);
  PoolOperation next = repeated ? *repeated : Choose(session);
  if (repeater_) repeater_->Note(next, session);
  return next;
}

PoolOperation OperationGenerator::Choose(const FuzzSession& session) {
  const std::array<unsigned, 17> weights = {
      weights_.allocate, weights_.free,    weights_.begin,      weights_.end,
      weights_.retain,   weights_.release, weights_.trim,       weights_.record_use,
      weights_.progress, weights_.peer,    weights_.fail,       weights_.mend,
      weights_.bad,      weights_.inspect, weights_.checkpoint, weights_.restore,
      weights_.replay};
  uint64_t total = 0;
  for (const unsigned weight : weights) total += weight;
  uint64_t pick = Below(total);
  size_t kind = 0;
  while (pick >= weights[kind]) pick -= weights[kind++];
  const std::vector<uint64_t>& live = session.live_labels();
  switch (kind) {
    case 0:
      return Allocate(session);
    case 1:
      return Free(session);
    case 2:
      return BeginOp{Pool(), captures_only_ || OneIn(2) ? ScopeKind::kCapture : ScopeKind::kEager};
    case 3:
      return EndOp{Pool()};
    case 4:
      return RetainOp{Pool()};
    case 5:
      return ReleaseOp{Pool()};
    case 6:
      return TrimOp{};
    case 7:
      return live.empty() ? PoolOperation(InspectOp{})
                          : PoolOperation(RecordUseOp{live[Below(live.size())], Stream()});
    case 8:
      return ProgressOp{Stream(), 1 + Below(8)};
    case 9:
      return EnablePeerOp{++last_peer_};
    case 10:
      return Fail();
    case 11:
      return MendOp{};
    case 12:
      return Bad(session);
    case 13:
      return InspectOp{};
    case 14:
      return Checkpoint(session);
    case 15:
      return Restore(session);
    default:
      return ReplayOp{Pool(), Stream()};
  }
}

}  // namespace cgp
