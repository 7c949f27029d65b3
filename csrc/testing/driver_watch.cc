#include "testing/driver_watch.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>
#include <utility>

namespace cgp {

DriverWatch::DriverWatch(Driver& inner) : inner_(inner) {}

void DriverWatch::Expect(bool condition, const std::string& rule) {
  if (!condition) violations_.push_back(rule);
}

void DriverWatch::ExpectGranular(const char* call, uint64_t value) {
  if (value % inner_.granularity() == 0) return;
  std::ostringstream text;
  text << call << ": " << value << " is no multiple of " << inner_.granularity();
  violations_.push_back(text.str());
}

void DriverWatch::set_capturing(bool capturing) {
  const std::lock_guard lock(mutex_);
  capturing_ = capturing;
}

void DriverWatch::set_events_allowed(bool allowed) {
  const std::lock_guard lock(mutex_);
  events_allowed_ = allowed;
}

void DriverWatch::MarkUsed() {
  const std::lock_guard lock(mutex_);
  used_maps_ = maps_;
  quiet_ = false;
}

uint64_t DriverWatch::Submit(StreamId stream, std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  streams_[stream].pending.push_back(std::move(action));
  return ++streams_[stream].submitted;
}

uint64_t DriverWatch::Submitted(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  const auto it = streams_.find(stream);
  return it == streams_.end() ? 0 : it->second.submitted;
}

bool DriverWatch::Done(StreamId stream, uint64_t work) const {
  const std::lock_guard lock(mutex_);
  return DoneLocked(stream, work);
}

bool DriverWatch::DoneLocked(StreamId stream, uint64_t work) const {
  const auto it = streams_.find(stream);
  return (it == streams_.end() ? 0 : it->second.done) >= work;
}

DriverWatch::Mark DriverWatch::TakeMark() const {
  const std::lock_guard lock(mutex_);
  return TakeMarkLocked();
}

DriverWatch::Mark DriverWatch::TakeMarkLocked() const {
  Mark mark;
  for (const auto& [id, stream] : streams_) mark.emplace(id, stream.submitted);
  return mark;
}

bool DriverWatch::Passed(const Mark& mark) const {
  const std::lock_guard lock(mutex_);
  return PassedLocked(mark);
}

bool DriverWatch::PassedLocked(const Mark& mark) const {
  return std::ranges::all_of(
      mark, [this](const auto& entry) { return DoneLocked(entry.first, entry.second); });
}

bool DriverWatch::IsBehind(StreamId waiting, StreamId stream, uint64_t work) const {
  const std::lock_guard lock(mutex_);
  if (waiting == stream || DoneLocked(stream, work)) return true;
  const auto it = streams_.find(waiting);
  if (it == streams_.end()) return false;
  const auto waited = it->second.waited.find(stream);
  return waited != it->second.waited.end() && waited->second >= work;
}

bool DriverWatch::DoNext(StreamId stream, uint64_t last) {
  std::function<void()> action;
  {
    const std::lock_guard lock(mutex_);
    Stream& one = streams_[stream];
    if (one.pending.empty() || one.done >= last) return false;
    action = std::move(one.pending.front());
    one.pending.pop_front();
    ++one.done;
  }
  // Not under the lock: it may ask for other streams' work. Nobody looks at this stream in between.
  if (action) action();
  return true;
}

void DriverWatch::Progress(StreamId stream, uint64_t count) {
  while (count > 0 && DoNext(stream, std::numeric_limits<uint64_t>::max())) --count;
}

void DriverWatch::Finish(StreamId stream, uint64_t work) {
  while (DoNext(stream, work)) {
  }
}

void DriverWatch::FinishAll() {
  std::vector<StreamId> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, stream] : streams_) streams.push_back(id);
  }
  for (const StreamId stream : streams) Finish(stream, std::numeric_limits<uint64_t>::max());
}

std::vector<std::string> DriverWatch::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

uint64_t DriverWatch::handle_bytes() const {
  const std::lock_guard lock(mutex_);
  return handle_bytes_;
}

size_t DriverWatch::handles() const {
  const std::lock_guard lock(mutex_);
  return handles_.size();
}

size_t DriverWatch::mappings() const {
  const std::lock_guard lock(mutex_);
  return mappings_.size();
}

size_t DriverWatch::reservations() const {
  const std::lock_guard lock(mutex_);
  return reservations_.size();
}

size_t DriverWatch::events() const {
  const std::lock_guard lock(mutex_);
  return events_.size();
}

uint64_t DriverWatch::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

uint64_t DriverWatch::quiesce_calls() const {
  const std::lock_guard lock(mutex_);
  return quiesce_calls_;
}

int DriverWatch::peers() const {
  const std::lock_guard lock(mutex_);
  return peers_;
}

std::optional<DriverWatch::Place> DriverWatch::At(Address address) const {
  const std::lock_guard lock(mutex_);
  const auto after = mappings_.upper_bound(address);
  if (after == mappings_.begin()) return std::nullopt;
  const auto& [start, mapping] = *std::prev(after);
  if (address - start >= mapping.bytes) return std::nullopt;
  return Place{mapping.handle, address - start, mapping.bytes - (address - start),
               mapping.accessible, mapping.peers};
}

bool DriverWatch::CoveredLocked(Address address, uint64_t bytes, bool accessible) const {
  const Address end = address + bytes;
  while (address < end) {
    const auto after = mappings_.upper_bound(address);
    if (after == mappings_.begin()) return false;
    const auto& [start, mapping] = *std::prev(after);
    if (address - start >= mapping.bytes || (accessible && !mapping.accessible)) return false;
    address = start + mapping.bytes;
  }
  return true;
}

bool DriverWatch::Accessible(Address address, uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return CoveredLocked(address, bytes, true);
}

Address DriverWatch::Reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectGranular("Reserve", bytes);
  Expect(bytes > 0, "Reserve: no bytes");
  const Address address = inner_.Reserve(bytes);
  reservations_[address] = {bytes, 0};
  return address;
}

void DriverWatch::FreeAddresses(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  const auto it = reservations_.find(address);
  const bool exact = it != reservations_.end() && it->second.bytes == bytes;
  Expect(exact, "FreeAddresses: not what a Reserve() returned");
  Expect(!exact || !capturing_ || !Used(it->second.mapped),
         "FreeAddresses: used, during a capture");
  const auto first = mappings_.lower_bound(address);
  Expect(first == mappings_.end() || first->first >= address + bytes,
         "FreeAddresses: something is mapped there");
  inner_.FreeAddresses(address, bytes);
  reservations_.erase(address);
}

Handle DriverWatch::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectGranular("Create", bytes);
  Expect(bytes > 0, "Create: no bytes");
  const Handle handle = inner_.Create(bytes);
  handles_[handle] = {bytes, 0};
  handle_bytes_ += bytes;
  return handle;
}

void DriverWatch::Release(Handle handle) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  const auto it = handles_.find(handle);
  Expect(it != handles_.end(), "Release: not a handle that is held");
  Expect(it == handles_.end() || !capturing_ || !Used(it->second.mapped),
         "Release: used, during a capture");
  inner_.Release(handle);
  if (it == handles_.end()) return;
  handle_bytes_ -= it->second.bytes;
  handles_.erase(it);
}

void DriverWatch::Map(Address address, uint64_t bytes, Handle handle) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectGranular("Map", address);
  const auto held = handles_.find(handle);
  Expect(held != handles_.end() && held->second.bytes == bytes, "Map: not the handle's size");
  const auto room = reservations_.upper_bound(address);
  Expect(room != reservations_.begin() &&
             address + bytes <= std::prev(room)->first + std::prev(room)->second.bytes,
         "Map: outside of one reservation");
  const auto next = mappings_.lower_bound(address + bytes);
  Expect(next == mappings_.begin() ||
             std::prev(next)->first + std::prev(next)->second.bytes <= address,
         "Map: something is mapped there");
  inner_.Map(address, bytes, handle);
  ++maps_;
  mappings_[address] = {bytes, handle, false, 0, maps_};
  if (held != handles_.end() && held->second.mapped == 0) held->second.mapped = maps_;
  if (room != reservations_.begin() && std::prev(room)->second.mapped == 0) {
    std::prev(room)->second.mapped = maps_;
  }
}

void DriverWatch::SetAccess(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectGranular("SetAccess", address);
  ExpectGranular("SetAccess", bytes);
  Expect(bytes > 0 && CoveredLocked(address, bytes, false), "SetAccess: not covered by mappings");
  inner_.SetAccess(address, bytes);
  const auto end = mappings_.lower_bound(address + bytes);
  for (auto it = std::prev(mappings_.upper_bound(address)); it != end; ++it) {
    it->second.accessible = true;
    it->second.peers = peers_;
  }
}

void DriverWatch::Unmap(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  const auto it = mappings_.find(address);
  const bool exact = it != mappings_.end() && it->second.bytes == bytes;
  Expect(exact, "Unmap: not what one Map() mapped");
  if (exact && Used(it->second.mapped)) {
    Expect(!capturing_, "Unmap: used, during a capture");
    Expect(quiet_, "Unmap: used, without a Quiesce() before");
  }
  inner_.Unmap(address, bytes);
  mappings_.erase(address);
}

void DriverWatch::AddPeer(int peer) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  inner_.AddPeer(peer);
  ++peers_;
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

void DriverWatch::Capture(StreamId stream, Frontier* frontier) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  inner_.Capture(stream, frontier);
}

bool DriverWatch::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  return inner_.Dependencies(node, nodes);
}

void DriverWatch::ExpectNotCapturing(const std::string& call, StreamId stream) {
  Expect(events_allowed_, call + ": the stream may be capturing");
  Frontier frontier;
  inner_.Capture(stream, &frontier);
  Expect(frontier.capture == kNoCapture, call + ": the stream is capturing");
}

Event DriverWatch::RecordEvent(StreamId stream) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectNotCapturing("RecordEvent", stream);
  const Event event{next_event_++};
  events_[event] = {{stream, streams_[stream].submitted}};
  return event;
}

bool DriverWatch::MayQuiesce() noexcept {
  const std::lock_guard lock(mutex_);
  return !capturing_ && inner_.MayQuiesce();
}

Event DriverWatch::RecordDeviceEvent() {
  const std::lock_guard lock(mutex_);
  ++calls_;
  Expect(!capturing_ && inner_.MayQuiesce(), "RecordDeviceEvent: during a capture");
  const Event event{next_event_++};
  events_[event] = TakeMarkLocked();
  return event;
}

bool DriverWatch::EventDone(Event event) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  const auto it = events_.find(event);
  Expect(it != events_.end(), "EventDone: not an event that is recorded");
  return it == events_.end() || PassedLocked(it->second);
}

void DriverWatch::WaitEvent(StreamId stream, Event event) {
  const std::lock_guard lock(mutex_);
  ++calls_;
  ExpectNotCapturing("WaitEvent", stream);
  const auto it = events_.find(event);
  Expect(it != events_.end(), "WaitEvent: not an event that is recorded");
  if (it == events_.end()) return;
  Stream& waiting = streams_[stream];
  waiting.pending.emplace_back([this, stream, mark = it->second] {
    for (const auto& [awaited, work] : mark) {
      if (awaited != stream) Finish(awaited, work);
    }
  });
  ++waiting.submitted;
  for (const auto& [awaited, work] : it->second) {
    uint64_t& known = waiting.waited[awaited];
    known = std::max(known, work);
  }
}

void DriverWatch::DestroyEvent(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  Expect(events_.erase(event) == 1, "DestroyEvent: not an event that is recorded");
}

MemoryInfo DriverWatch::Info() { return inner_.Info(); }

}  // namespace cgp
