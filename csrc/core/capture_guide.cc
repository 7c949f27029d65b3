#include "core/capture_guide.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace cgp {
namespace {

// How many steps an allocation may be ahead of the one expected; more after misses, up to a limit,
// because the guide may have had many steps that this capture leaves out.
constexpr uint32_t kWindow = 16;
constexpr uint32_t kWidestWindow = 128;

constexpr uint8_t kMostPower = 2;

// The first block of a capture sets the scale if it is not larger than its like by more than this.
constexpr uint64_t kLikelyScale = 16;

// After so much evidence the scale is not looked for again, unless so many miss it in a row.
constexpr uint32_t kMuchEvidence = 4;
constexpr uint32_t kLost = 8;

// What stands for a step is at most so many times larger or smaller.
constexpr uint64_t kAlike = 4;

uint64_t WholeBytes(double bytes) {
  // What scales exactly is a whole number of bytes, which rounding must not take for one more.
  return static_cast<uint64_t>(std::ceil(bytes - 1e-3));
}

Granules Rounded(uint64_t bytes) { return Granules::FromBytesRoundedUp(bytes); }

// Whether a : b == c : d.
bool SameRatio(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  __extension__ using Product = unsigned __int128;
  return static_cast<Product>(a) * d == static_cast<Product>(b) * c;
}

}  // namespace

void CaptureGuide::BeginCapture() {
  ++capture_;
  alignment_ = {};
  recorded_.clear();
  peak_ = Granules(0);
  peak_step_ = 0;
}

// By which power of the scale a block of the step would have become this large.
std::optional<uint8_t> CaptureGuide::PowerOf(uint32_t step, uint64_t bytes, double scale) const {
  auto before = static_cast<double>(largest_[step].bytes);
  const uint8_t most = scale == 0 ? 0 : kMostPower;
  for (uint8_t power = 0; power <= most; ++power, before *= scale) {
    if (Rounded(WholeBytes(before)) == Rounded(bytes)) return power;
  }
  return std::nullopt;
}

CaptureGuide::Match CaptureGuide::Find(uint64_t bytes) const {
  Match match = alignment_;
  match.step.reset();
  match.stands_for.reset();
  match.power = 1;
  match.missed_bytes = 0;
  // Blocks of a granule are all alike: they answer to no other than the next step, and are no
  // evidence.
  const bool tells = bytes > kGranuleBytes;
  const uint32_t window =
      tells ? std::min(kWindow * (1 + match.missed_in_a_row), kWidestWindow) : 1;
  const auto end = std::min(static_cast<uint32_t>(largest_.size()), match.next + window);
  for (uint32_t step = match.next; step < end; ++step) {
    const std::optional<uint8_t> power = PowerOf(step, bytes, match.scale);
    if (!power) continue;
    match.step = step;
    match.next = step + 1;
    match.power = *power;
    match.missed_in_a_row = 0;
    if (tells && match.scale == 0) match.scale = 1;
    if (tells && (match.scale == 1 || *power > 0)) ++match.evidence;
    return match;
  }
  if (tells) {
    ++match.missed_in_a_row;
    ++match.missed;
    match.missed_bytes = bytes;
    if (match.evidence < kMuchEvidence || match.missed_in_a_row > kLost) FindScale(bytes, match);
  }
  if (!match.step && match.next < largest_.size()) {
    const uint64_t expected = Foretell(match.next, match.scale);
    if (bytes <= kAlike * expected && expected <= kAlike * bytes) match.stands_for = match.next;
  }
  return match;
}

// The scale is that by which two allocations in a row answer to two steps, those that leave out
// fewest. The first of a capture does alone, for the first step.
void CaptureGuide::FindScale(uint64_t bytes, Match& match) const {
  const auto count = static_cast<uint32_t>(largest_.size());
  const auto align = [&](uint32_t step) {
    match.step = step;
    match.next = step + 1;
    match.scale = static_cast<double>(bytes) / static_cast<double>(largest_[step].bytes);
    match.evidence = 0;
    match.missed_in_a_row = 0;
    match.missed_bytes = 0;
    --match.missed;
  };
  const uint64_t bytes_before = alignment_.missed_bytes;
  const bool is_first = alignment_.scale == 0 && bytes_before == 0;
  if (bytes_before == 0 && !is_first) return;
  std::optional<uint32_t> best;
  for (uint32_t first = match.next; first < std::min(count, match.next + kWindow); ++first) {
    const uint64_t guide_bytes = largest_[first].bytes;
    if (guide_bytes <= kGranuleBytes) continue;
    if (is_first) {
      if (bytes <= kLikelyScale * guide_bytes) align(first);
      return;
    }
    const uint32_t end = std::min({count, first + 1 + kWindow, best.value_or(count)});
    for (uint32_t second = first + 1; second < end; ++second) {
      if (SameRatio(bytes_before, guide_bytes, bytes, largest_[second].bytes)) best = second;
      if (best == second) break;
    }
  }
  if (best) align(*best);
}

uint64_t CaptureGuide::Foretell(uint32_t step, double scale) const {
  const Step& like = largest_[step];
  if (scale == 0) return like.bytes;
  return WholeBytes(static_cast<double>(like.bytes) * std::pow(scale, like.power));
}

std::optional<uint32_t> CaptureGuide::StepOf(Ticket ticket) const {
  return ticket.capture == capture_ ? recorded_[ticket.step].like : std::nullopt;
}

CaptureGuide::Ticket CaptureGuide::Allocated(const Match& match, Placement start, uint64_t bytes,
                                             Granules live) {
  const auto number = static_cast<uint32_t>(recorded_.size());
  alignment_ = match;
  Recorded recorded{.step = {.start = start, .bytes = bytes},
                    .like = match.step ? match.step : match.stands_for};
  recorded.step.steady = largest_.empty() || recorded.like.has_value();
  if (match.step) {
    const bool tells = match.scale != 0 && match.scale != 1;
    recorded.step.power = tells ? match.power : largest_[*match.step].power;
  }
  recorded_.push_back(recorded);
  if (live > peak_) {
    peak_ = live;
    peak_step_ = number;
  }
  return {capture_, number};
}

void CaptureGuide::Freed(Ticket ticket) {
  if (ticket.capture != capture_) return;
  recorded_[ticket.step].step.freed_at = static_cast<uint32_t>(recorded_.size());
}

void CaptureGuide::EndCapture() {
  if (peak_ >= largest_peak_) {
    if (alignment_.scale != 0 && alignment_.scale != 1) {
      const auto aligned =
          std::ranges::count_if(recorded_, [](const auto& r) { return r.like.has_value(); });
      learned_ = 2 * aligned >= std::ssize(recorded_);
    }
    largest_peak_ = peak_;
    largest_.clear();
    for (uint32_t i = 0; i < recorded_.size(); ++i) {
      Step step = recorded_[i].step;
      step.lives_at_peak = i <= peak_step_ && step.freed_at > peak_step_;
      largest_.push_back(step);
    }
  }
  recorded_.clear();
  // What is freed from now on was not freed during the capture.
  ++capture_;
}

}  // namespace cgp
