#include "testing/driver_watch.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace cgp {

void DriverWatch::Expect(bool condition, const std::string& rule) {
  if (!condition) violations_.push_back(rule);
}

std::optional<DriverWatch::Place> DriverWatch::At(Address address) const {
  const std::lock_guard lock(mutex_);
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return std::nullopt;
  const auto& [start, mapping] = *std::prev(after);
  if (address - start >= mapping.bytes) return std::nullopt;
  return Place{
      mapping.handle, address - start, mapping.bytes - (address - start), Accessible(address, 1),
      std::ranges::count_if(peers_, [&](int peer) { return host_.CanAccess(address, 1, peer); })};
}

template <typename Call>
void DriverWatch::GiveBack(const char* name, uint64_t map, const Call& call) {
  const bool used = map != 0 && map <= used_maps_;
  Expect(!used || !capturing_, std::string(name) + ": used, during a capture");
  try {
    call();
  } catch (const DriverError& error) {
    violations_.emplace_back(error.what());
    throw;
  }
}

Address DriverWatch::Reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const Address address = ForwardingDriver::Reserve(bytes);
  first_maps_[address] = 0;
  return address;
}

void DriverWatch::FreeAddresses(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto it = first_maps_.find(address);
  GiveBack("FreeAddresses", it == first_maps_.end() ? 0 : it->second,
           [&] { ForwardingDriver::FreeAddresses(address, bytes); });
  first_maps_.erase(it);
}

void DriverWatch::Release(Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto it = first_maps_of_handles_.find(handle);
  GiveBack("Release", it == first_maps_of_handles_.end() ? 0 : it->second,
           [&] { ForwardingDriver::Release(handle); });
  first_maps_of_handles_.erase(handle);
}

void DriverWatch::Map(Address address, uint64_t bytes, Handle handle) {
  const std::lock_guard lock(mutex_);
  ForwardingDriver::Map(address, bytes, handle);
  ++maps_;
  mappings_[address] = {.bytes = bytes, .handle = handle, .made_by = maps_};
  first_maps_of_handles_.try_emplace(handle, maps_);
  uint64_t& first = std::prev(first_maps_.upper_bound(address))->second;
  if (first == 0) first = maps_;
}

void DriverWatch::Unmap(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto it = mappings_.find(address);
  const uint64_t map = it == mappings_.end() ? 0 : it->second.made_by;
  Expect(quiet_ || map == 0 || map > used_maps_, "Unmap: used, without a Quiesce() before");
  GiveBack("Unmap", map, [&] { ForwardingDriver::Unmap(address, bytes); });
  mappings_.erase(it);
}

void DriverWatch::AddPeer(int peer) {
  const std::lock_guard lock(mutex_);
  ForwardingDriver::AddPeer(peer);
  peers_.push_back(peer);
}

void DriverWatch::Quiesce() {
  {
    const std::lock_guard lock(mutex_);
    ++calls_;
    ++quiesce_calls_;
    Expect(!capturing_, "Quiesce: during a capture");
    quiet_ = true;
  }
  FinishAll();
}

bool DriverWatch::MayQuiesce() noexcept {
  const std::lock_guard lock(mutex_);
  return !capturing_ && host_.MayQuiesce();
}

void DriverWatch::Capture(StreamId stream, Frontier* frontier) {
  const std::lock_guard lock(mutex_);
  Expect(!destroyed_streams_.contains(stream), "Capture: the stream was destroyed before");
  ForwardingDriver::Capture(stream, frontier);
}

void DriverWatch::ExpectNotCapturing(const std::string& call, StreamId stream) {
  Expect(!destroyed_streams_.contains(stream), call + ": the stream was destroyed before");
  Frontier frontier;
  host_.Capture(stream, &frontier);
  Expect(frontier.capture == kNoCapture, call + ": the stream is capturing");
}

Event DriverWatch::AddEvent(Clock clock) {
  ++calls_;
  const Event event{next_event_++};
  events_[event] = std::move(clock);
  return event;
}

Clock DriverWatch::Recorded(const char* call, Event event) {
  ++calls_;
  const auto it = events_.find(event);
  Expect(it != events_.end(), std::string(call) + ": not an event that is recorded");
  return it == events_.end() ? Clock{} : it->second;
}

Event DriverWatch::RecordEvent(StreamId stream) {
  const std::lock_guard lock(mutex_);
  ExpectNotCapturing("RecordEvent", stream);
  return AddEvent(Now(stream));
}

Event DriverWatch::RecordDeviceEvent() {
  const std::lock_guard lock(mutex_);
  Expect(!capturing_ && host_.MayQuiesce(), "RecordDeviceEvent: during a capture");
  return AddEvent(TakeMark());
}

bool DriverWatch::EventDone(Event event) {
  const std::lock_guard lock(mutex_);
  return Passed(Recorded("EventDone", event));
}

void DriverWatch::WaitEvent(StreamId stream, Event event) {
  const std::lock_guard lock(mutex_);
  ExpectNotCapturing("WaitEvent", stream);
  Wait(stream, Recorded("WaitEvent", event));
}

void DriverWatch::DestroyEvent(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  Expect(events_.erase(event) == 1, "DestroyEvent: not an event that is recorded");
}

}  // namespace cgp
