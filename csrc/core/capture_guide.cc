#include "core/capture_guide.h"

#include "core/error.h"

namespace cgp {

void CaptureGuide::BeginCapture() {
  ++capture_;
  recorded_.clear();
  peak_ = Granules(0);
  peak_step_ = 0;
}

const CaptureGuide::Step* CaptureGuide::Next() const {
  return recorded_.size() < largest_.size() ? &largest_[recorded_.size()] : nullptr;
}

CaptureGuide::Ticket CaptureGuide::Allocated(Placement start, Granules length, Granules live) {
  const auto step = static_cast<uint32_t>(recorded_.size());
  recorded_.push_back({.step = {.start = start, .length = length}});
  if (live > peak_) {
    peak_ = live;
    peak_step_ = step;
  }
  return {capture_, step};
}

void CaptureGuide::Freed(Ticket ticket) {
  if (ticket.capture != capture_) return;
  recorded_[ticket.step].freed_at = static_cast<uint32_t>(recorded_.size());
}

void CaptureGuide::EndCapture() {
  if (peak_ >= largest_peak_) {
    largest_peak_ = peak_;
    largest_.clear();
    for (uint32_t i = 0; i < recorded_.size(); ++i) {
      Step step = recorded_[i].step;
      step.lives_at_peak = i <= peak_step_ && recorded_[i].freed_at > peak_step_;
      largest_.push_back(step);
    }
  }
  recorded_.clear();
  // What is freed from now on was not freed during the capture.
  ++capture_;
}

}  // namespace cgp
