#include "core/capture_guide.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/reserve.h"

namespace cgp {
namespace {

// How many steps an allocation may be ahead of the one expected; more after misses, up to a limit,
// because the guide may have had many steps that this capture leaves out.
constexpr uint32_t kWindow = 16;
constexpr uint32_t kWidestWindow = 128;

constexpr uint8_t kMostPower = 2;
constexpr double kMostBytes = 9e15;  // below 2^53; more than any device has

// How many of the last allocations are looked at to find the scale.
constexpr std::size_t kRecent = 8;

// A search costs far more than an allocation. It is made for the first misses, while there is
// little evidence, and then only whenever so many in a row have answered to nothing.
constexpr uint32_t kMuchEvidence = 4;
constexpr uint32_t kSearches = 8;
constexpr uint32_t kLost = 64;

// The least block of a smaller capture that says by which power its like grows.
constexpr Granules kTellsPower{32};

// What stands for a step is at most so many times larger or smaller.
constexpr uint64_t kAlike = 4;

uint64_t WholeBytes(double bytes) {
  // What scales exactly is a whole number of bytes, which rounding must not take for one more.
  const double exact = std::min(bytes - std::max(1e-3, bytes * 0x1p-50), kMostBytes);
  const auto whole = static_cast<uint64_t>(exact);
  return static_cast<double>(whole) < exact ? whole + 1 : whole;
}

Granules Rounded(uint64_t bytes) { return Granules::FromBytesRoundedUp(bytes); }

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
  const Granules length = Rounded(bytes);
  if (Rounded(largest_[step].bytes) == length) return 0;
  if (scale == 0) return std::nullopt;
  auto before = static_cast<double>(largest_[step].bytes);
  for (uint8_t power = 1; power <= kMostPower; ++power) {
    before *= scale;
    if (Rounded(WholeBytes(before)) == length) return power;
  }
  return std::nullopt;
}

CaptureGuide::Match CaptureGuide::Find(uint64_t bytes) const {
  Match match = alignment_;
  match.stands_for.reset();
  if (Answer(bytes, match)) return match;
  if (bytes > kGranuleBytes) {
    ++match.missed_in_a_row;
    ++match.missed;
    const bool unsure = match.evidence < kMuchEvidence && match.missed <= kSearches;
    if (unsure || match.missed_in_a_row % kLost == 0) FindScale(bytes, match);
  }
  if (!match.step && match.next < largest_.size()) {
    const uint64_t expected = Foretell(match.next, match.scale);
    if (bytes <= kAlike * expected && expected <= kAlike * bytes) match.stands_for = match.next;
  }
  return match;
}

// The scale is the one by which most of the last allocations answer to steps in their order, tried
// for each that would let the newest answer to one. The first of a capture does alone, for the
// first step.
void CaptureGuide::FindScale(uint64_t bytes, Match& match) const {
  const bool is_first = match.scale == 0 && match.missed == 1;
  const std::size_t from = recorded_.size() - std::min<std::size_t>(recorded_.size(), kRecent);
  const uint32_t base = from < recorded_.size() ? recorded_[from].next_before : match.next;
  // What was missed in a row may stand for as many steps.
  const uint32_t ahead = kWindow + std::max(match.missed_in_a_row, kWindow);
  const auto end = std::min(static_cast<uint32_t>(largest_.size()), base + ahead);
  Match best = match;
  best.evidence = 1;  // what a better one must exceed
  for (uint32_t step = base; step < end; ++step) {
    const Step& like = largest_[step];
    if (like.bytes <= kGranuleBytes) continue;
    const double ratio = static_cast<double>(bytes) / static_cast<double>(like.bytes);
    if (is_first) {
      if (like.power > 0) {
        best.scale = like.power == 2 ? std::sqrt(ratio) : ratio;
        best.evidence = 0;
        best.evidence_bytes = bytes;
        best.step = step;
        best.next = step + 1;
      }
      break;
    }
    for (const double scale : {ratio, std::sqrt(ratio)}) {
      Match tried = match;
      tried.scale = scale;
      tried.next = base;
      tried.evidence = 0;
      tried.evidence_bytes = 0;
      for (std::size_t i = from; i < recorded_.size(); ++i) Answer(recorded_[i].step.bytes, tried);
      if (Answer(bytes, tried) && tried.evidence > best.evidence) best = tried;
    }
  }
  if (!best.step) return;
  match = best;
  match.missed_in_a_row = 0;
  --match.missed;
}

// Lets the allocation answer to the first step of the window that is as large. Returns whether one
// is.
bool CaptureGuide::Answer(uint64_t bytes, Match& match) const {
  match.step.reset();
  // Blocks of a granule are all alike: they answer to no other than the next step, and are no
  // evidence; nor are, but for the first, those of one size.
  const bool tells = bytes > kGranuleBytes;
  const uint32_t window =
      tells ? std::min(kWindow * (1 + match.missed_in_a_row), kWidestWindow) : 1;
  const auto end = std::min(static_cast<uint32_t>(largest_.size()), match.next + window);
  for (uint32_t step = match.next; step < end; ++step) {
    const std::optional<uint8_t> power = PowerOf(step, bytes, match.scale);
    if (!power) continue;
    match.step = step;
    match.next = step + 1;
    match.missed_in_a_row = 0;
    if (tells && match.scale == 0) match.scale = 1;
    if (tells && (match.scale == 1 || *power > 0) && bytes != match.evidence_bytes) {
      ++match.evidence;
      match.evidence_bytes = bytes;
    }
    return true;
  }
  return false;
}

uint64_t CaptureGuide::Foretell(uint32_t step, double scale) const {
  const Step& like = largest_[step];
  if (scale == 0) return like.bytes;
  const double growth = like.power == 0 ? 1 : like.power == 1 ? scale : scale * scale;
  return WholeBytes(static_cast<double>(like.bytes) * growth);
}

std::optional<uint32_t> CaptureGuide::StepOf(Ticket ticket) const {
  return ticket.capture == capture_ ? recorded_[ticket.step].like : std::nullopt;
}

void CaptureGuide::ReserveOne() {
  ReserveMore(recorded_, 1);
  largest_.reserve(recorded_.capacity());
}

CaptureGuide::Ticket CaptureGuide::Allocated(const Match& match, Placement start, uint64_t bytes,
                                             Granules live) {
  const auto number = static_cast<uint32_t>(recorded_.size());
  Recorded& recorded = recorded_.emplace_back();
  recorded.step.start = start;
  recorded.step.bytes = bytes;
  recorded.like = match.step ? match.step : match.stands_for;
  recorded.next_before = alignment_.next;
  alignment_ = match;
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

// By which power of the scale each step has grown; the scale is best known at the end. Recorded
// steps get what is known of their like, then what this capture adds.
void CaptureGuide::LearnPowers() {
  const double scale = alignment_.scale;
  const bool tells = scale != 0 && scale != 1;
  std::size_t aligned = 0;
  for (Recorded& recorded : recorded_) {
    if (!recorded.like) continue;
    ++aligned;
    const uint8_t known = largest_[*recorded.like].power;
    recorded.step.power = known;
    // Near a scale of 1 a small block may be as large by any power.
    if (!tells || Rounded(Foretell(*recorded.like, scale)) == Rounded(recorded.step.bytes))
      continue;
    recorded.step.power = PowerOf(*recorded.like, recorded.step.bytes, scale).value_or(known);
  }
  // A smaller capture says as much of how its guide will grow, but for blocks so small in it that
  // they are as large by several powers.
  const bool same_program = 2 * aligned >= recorded_.size();
  if (peak_ >= largest_peak_ || !same_program || !tells) return;
  for (const Recorded& recorded : recorded_) {
    if (recorded.like && Rounded(recorded.step.bytes) >= kTellsPower)
      largest_[*recorded.like].power = recorded.step.power;
  }
}

void CaptureGuide::Forget() {
  largest_.clear();
  largest_peak_ = Granules(0);
}

void CaptureGuide::EndCapture() {
  LearnPowers();
  if (peak_ >= largest_peak_) {
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
