#include "torch/put_off_events.h"

#include "torch/streams.h"

namespace cgp {
namespace {

bool Captures(StreamId stream) {
  return IsCapturing(reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)));
}

}  // namespace

Event PutOffEvents::Record(StreamId stream) {
  if (!Captures(stream)) return driver_.RecordEvent(stream);
  const std::lock_guard lock(mutex_);
  const Event event{kMark | ++count_};
  events_.emplace(event, PutOff{stream, std::nullopt});
  return event;
}

bool PutOffEvents::Done(Event event) {
  if (!IsPutOff(event)) return driver_.EventDone(event);
  const std::lock_guard lock(mutex_);
  PutOff& put_off = events_.at(event);
  if (!put_off.recorded) {
    if (Captures(put_off.stream)) return false;
    const RelaxedCaptureMode relaxed;  // other streams may be capturing
    put_off.recorded = driver_.RecordEvent(put_off.stream);
  }
  return driver_.EventDone(*put_off.recorded);
}

void PutOffEvents::Destroy(Event event) noexcept {
  if (!IsPutOff(event)) {
    driver_.DestroyEvent(event);
    return;
  }
  const std::lock_guard lock(mutex_);
  const auto put_off = events_.find(event);
  if (put_off->second.recorded) driver_.DestroyEvent(*put_off->second.recorded);
  events_.erase(put_off);
}

}  // namespace cgp
