#include "core/planning/capture_profile.h"

#include <algorithm>

namespace cgp {
namespace {

// How many steps an allocation may be ahead of the one expected; more after misses, up to a limit,
// because the profile may have had many steps that this capture leaves out.
constexpr uint32_t kWindow = 16;
constexpr uint32_t kWidestWindow = 128;

constexpr double kMostBytes = 9e15;  // below 2^53; more than any device has

uint64_t WholeBytes(double bytes) {
  // What scales exactly is a whole number of bytes, which rounding must not take for one more.
  const double exact = std::min(bytes - std::max(1e-3, bytes * 0x1p-50), kMostBytes);
  const auto whole = static_cast<uint64_t>(exact);
  return static_cast<double>(whole) < exact ? whole + 1 : whole;
}

Granules Rounded(uint64_t bytes) { return Granules::FromBytesRoundedUp(bytes); }

}  // namespace

void CaptureProfile::BeginCapture() {
  ++capture_;
  alignment_ = {};
  recorded_.clear();
  peak_ = Granules(0);
  peak_step_ = 0;
}

// Whether a block of the step, scaled or not, or by the square, takes as many granules.
bool CaptureProfile::AsLarge(uint32_t step, uint64_t bytes, double scale) const {
  const Granules length = Rounded(bytes);
  if (Rounded(largest_[step].bytes) == length) return true;
  if (scale == 0) return false;
  const double scaled = static_cast<double>(largest_[step].bytes) * scale;
  return Rounded(WholeBytes(scaled)) == length || Rounded(WholeBytes(scaled * scale)) == length;
}

CaptureProfile::Match CaptureProfile::Find(uint64_t bytes) const {
  Match match = alignment_;
  if (MatchNext(bytes, match) || bytes <= kGranuleBytes) return match;
  if (match.scale == 0) {
    TakeScale(bytes, match);
  } else {
    ++match.missed_in_a_row;
  }
  return match;
}

// The block is taken for the like of the next step that is larger than a granule.
void CaptureProfile::TakeScale(uint64_t bytes, Match& match) const {
  const auto tells = [](const Step& step) { return step.bytes > kGranuleBytes; };
  const auto like = std::find_if(largest_.begin() + match.next, largest_.end(), tells);
  if (like == largest_.end()) return;
  match.scale = static_cast<double>(bytes) / static_cast<double>(like->bytes);
  match.step = static_cast<uint32_t>(like - largest_.begin());
  match.next = *match.step + 1;
}

// Lets the allocation match the first step of the window that is as large. Returns whether one
// is.
bool CaptureProfile::MatchNext(uint64_t bytes, Match& match) const {
  match.step.reset();
  // Blocks of a granule are all alike: they match no other than the next step.
  const bool tells = bytes > kGranuleBytes;
  const uint32_t window =
      tells ? std::min(kWindow * (1 + match.missed_in_a_row), kWidestWindow) : 1;
  const auto end = std::min(static_cast<uint32_t>(largest_.size()), match.next + window);
  for (uint32_t step = match.next; step < end; ++step) {
    if (!AsLarge(step, bytes, match.scale)) continue;
    match.step = step;
    match.next = step + 1;
    match.missed_in_a_row = 0;
    if (tells && match.scale == 0) match.scale = 1;
    return true;
  }
  return false;
}

uint64_t CaptureProfile::Predict(uint32_t step, double scale) const {
  const Step& like = largest_[step];
  return scale == 0 ? like.bytes : WholeBytes(static_cast<double>(like.bytes) * scale);
}

std::optional<uint32_t> CaptureProfile::StepOf(Ticket ticket) const {
  return IsOfThis(ticket) ? recorded_[ticket.step].like : std::nullopt;
}

Ticket CaptureProfile::Allocated(const Match& match, Placement start, uint64_t bytes,
                                 Granules live) {
  const auto number = static_cast<uint32_t>(recorded_.size());
  recorded_.push_back({.start = start, .bytes = bytes, .like = match.step});
  alignment_ = match;
  if (live > peak_) {
    peak_ = live;
    peak_step_ = number;
  }
  return {capture_, number};
}

void CaptureProfile::Freed(Ticket ticket) {
  if (!IsOfThis(ticket)) return;
  recorded_[ticket.step].freed_at = static_cast<uint32_t>(recorded_.size());
}

void CaptureProfile::Forget() {
  largest_.clear();
  largest_peak_ = Granules(0);
}

void CaptureProfile::Renumber(const RangeTable::Renumbering& renumbering) {
  for (std::vector<Step>* const steps : {&largest_, &recorded_}) {
    for (Step& step : *steps) {
      if (step.has_place()) step.start.slot = renumbering.Of(step.start.slot);
    }
  }
}

void CaptureProfile::EndCapture() {
  if (peak_ >= largest_peak_) {
    largest_peak_ = peak_;
    largest_.swap(recorded_);
    for (uint32_t i = 0; i < largest_.size() && i <= peak_step_; ++i) {
      largest_[i].lives_at_peak = largest_[i].freed_at > peak_step_;
    }
  }
  AbandonCapture();
}

void CaptureProfile::AbandonCapture() {
  recorded_.clear();
  // What is freed from now on was not freed during the capture.
  ++capture_;
}

}  // namespace cgp
