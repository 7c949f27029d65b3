// Events on streams that are capturing: put off until the capture is over.
//
// CUDA would take such an event for a part of the capture, and whoever then asks whether it is done
// gets an error, for ever. Yet memory that others wait for is freed, and scopes end, while some
// thread captures on a stream that has used it. What the stream had in flight before the capture is
// done when an event is that was recorded after it: that event says the same, only later.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "driver/driver.h"

namespace cgp {

class PutOffEvents {
 public:
  // `driver` must outlive this.
  explicit PutOffEvents(Driver& driver) : driver_(driver) {}

  // Driver's RecordEvent(), EventDone() and DestroyEvent(), for capturing streams too.
  Event Record(StreamId stream);
  bool Done(Event event);
  void Destroy(Event event) noexcept;

 private:
  // Marks an event of ours: no address and no count of the driver's gets there.
  static constexpr uint64_t kMark = uint64_t{1} << 63;
  static bool IsPutOff(Event event) { return (static_cast<uint64_t>(event) & kMark) != 0; }

  struct PutOff {
    StreamId stream{};
    std::optional<Event> recorded;  // once the stream was not capturing any more
  };

  Driver& driver_;
  std::mutex mutex_;
  uint64_t count_ = 0;  // of those that were put off so far
  std::map<Event, PutOff> events_;
};

}  // namespace cgp
