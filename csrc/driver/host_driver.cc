#include "driver/host_driver.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "driver/host_memory.h"

namespace cgp {
namespace {

// CUDA's codes for what is refused.
constexpr int kOutOfMemoryCode = 2;
constexpr int kInvalidValueCode = 1;
constexpr int kCaptureUnsupportedCode = 900;

constexpr uint64_t kSmallestGranularity = 512;

// Without map_memory addresses start here: not 0, and beyond what looks like a small number.
constexpr Address kFirstNumber = Address{1} << 40;

std::string CallName(DriverCall call) { return "HostDriver::" + std::string(Name(call)); }

std::string Span(Address address, uint64_t bytes) {
  std::string text = "[";
  text += Hex(address);
  text += ", ";
  text += Hex(address + bytes);
  text += ")";
  return text;
}

std::string Number(Handle handle) { return std::to_string(static_cast<uint64_t>(handle)); }

void CheckOptions(const HostDriverOptions& options) {
  const uint64_t smallest =
      options.map_memory ? static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) : kSmallestGranularity;
  if (!std::has_single_bit(options.granularity) || options.granularity < smallest) {
    throw UsageError("HostDriver: a granularity of " + std::to_string(options.granularity) +
                     " bytes cannot be: take a power of two from " + std::to_string(smallest) +
                     " up");
  }
}

}  // namespace

HostDriver::HostDriver(const HostDriverOptions& options)
    : options_(options), next_address_(std::max(kFirstNumber, options.granularity)) {
  CheckOptions(options);
}

HostDriver::~HostDriver() {
  if (!options_.map_memory) return;
  // An errno here is the kernel's limit of mappings; the addresses stay reserved then, and nothing
  // is behind them that others could see.
  for (const auto& [address, reservation] : reservations_) {
    host_memory::Free(address, reservation.bytes);
  }
  for (const auto& [handle, physical] : handles_) host_memory::Free(physical.home, physical.bytes);
}

void HostDriver::Refuse(DriverCall call, uint64_t bytes, const std::string& why) const {
  throw DriverError(DriverStatus::kFailed, CallName(call), kInvalidValueCode,
                    "CUDA_ERROR_INVALID_VALUE", bytes, options_.device, why);
}

void HostDriver::RefuseInCapture(DriverCall call, uint64_t bytes, const std::string& why) const {
  throw DriverError(DriverStatus::kFailed, CallName(call), kCaptureUnsupportedCode,
                    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", bytes, options_.device, why);
}

void HostDriver::FailSystem(DriverStatus status, DriverCall call, int error, uint64_t bytes) const {
  throw DriverError(status, CallName(call), error, std::generic_category().message(error), bytes,
                    options_.device,
                    "the system refused it, perhaps because the process has as many mappings as "
                    "vm.max_map_count allows");
}

void HostDriver::CheckSize(DriverCall call, uint64_t bytes) const {
  if (bytes == 0 || bytes % options_.granularity != 0) {
    Refuse(call, bytes,
           "a size of " + std::to_string(bytes) +
               " bytes is not a positive multiple of the granularity, " +
               std::to_string(options_.granularity));
  }
}

HostDriver::Reservation& HostDriver::ReservationAround(DriverCall call, Address address,
                                                       uint64_t bytes) {
  auto found = reservations_.upper_bound(address);
  if (found != reservations_.begin()) {
    --found;
    const uint64_t offset = address - found->first;
    Reservation& reservation = found->second;
    if (offset < reservation.bytes && bytes <= reservation.bytes - offset) return reservation;
  }
  Refuse(call, bytes, Span(address, bytes) + " does not lie in one reservation");
}

HostDriver::Physical& HostDriver::Held(DriverCall call, uint64_t bytes, Handle handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) Refuse(call, bytes, "there is no handle " + Number(handle));
  if (found->second.released) {
    Refuse(call, bytes, "handle " + Number(handle) + " was released before");
  }
  return found->second;
}

void HostDriver::DropIfUnused(Handle handle) {
  const auto found = handles_.find(handle);
  const Physical& physical = found->second;
  if (!physical.released || physical.mappings != 0) return;
  if (options_.map_memory) host_memory::Free(physical.home, physical.bytes);
  usage_.physical_bytes -= physical.bytes;
  --usage_.handles;
  handles_.erase(found);
}

Address HostDriver::Reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  CheckSize(DriverCall::kReserve, bytes);
  const uint64_t room = options_.address_limit_bytes - usage_.reserved_bytes;
  if (bytes > room || bytes > std::numeric_limits<Address>::max() - next_address_) {
    throw DriverError(DriverStatus::kOutOfAddresses, CallName(DriverCall::kReserve),
                      kOutOfMemoryCode, "CUDA_ERROR_OUT_OF_MEMORY", bytes, options_.device,
                      std::to_string(room) + " of " + std::to_string(options_.address_limit_bytes) +
                          " bytes of addresses are left");
  }
  Address address = next_address_;
  if (options_.map_memory) {
    const int error = host_memory::Reserve(bytes, options_.granularity, &address);
    if (error != 0) FailSystem(DriverStatus::kOutOfAddresses, DriverCall::kReserve, error, bytes);
  } else {
    next_address_ += bytes;
  }
  reservations_.emplace(address, Reservation{.bytes = bytes, .made_in = epoch_});
  ++usage_.reservations;
  usage_.reserved_bytes += bytes;
  calls_.Add(DriverCall::kReserve);
  return address;
}

void HostDriver::FreeAddresses(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) {
    Refuse(DriverCall::kFreeAddresses, bytes,
           Span(address, bytes) + " is not exactly what one Reserve() returned");
  }
  if (found->second.mappings != 0) {
    Refuse(DriverCall::kFreeAddresses, bytes,
           std::to_string(found->second.mappings) + " mappings are in " + Span(address, bytes));
  }
  if (capturing() && found->second.made_in != epoch_) {
    RefuseInCapture(DriverCall::kFreeAddresses, bytes,
                    Span(address, bytes) + " was reserved before the capture that is under way");
  }
  if (options_.map_memory) {
    const int error = host_memory::Free(address, bytes);
    if (error != 0) FailSystem(DriverStatus::kFailed, DriverCall::kFreeAddresses, error, bytes);
  }
  reservations_.erase(found);
  --usage_.reservations;
  usage_.reserved_bytes -= bytes;
  calls_.Add(DriverCall::kFreeAddresses);
}

Handle HostDriver::Create(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  CheckSize(DriverCall::kCreate, bytes);
  const uint64_t room = options_.physical_limit_bytes - usage_.physical_bytes;
  if (bytes > room) {
    throw DriverError(DriverStatus::kOutOfMemory, CallName(DriverCall::kCreate), kOutOfMemoryCode,
                      "CUDA_ERROR_OUT_OF_MEMORY", bytes, options_.device,
                      std::to_string(room) + " of " +
                          std::to_string(options_.physical_limit_bytes) + " bytes are free");
  }
  Physical physical{.bytes = bytes};
  if (options_.map_memory) {
    const int error = host_memory::Create(bytes, &physical.home);
    if (error != 0) FailSystem(DriverStatus::kOutOfMemory, DriverCall::kCreate, error, bytes);
  }
  const Handle handle{++last_handle_};
  handles_.emplace(handle, physical);
  ++usage_.handles;
  usage_.physical_bytes += bytes;
  calls_.Add(DriverCall::kCreate);
  return handle;
}

void HostDriver::Release(Handle handle) {
  const std::lock_guard lock(mutex_);
  Physical& physical = Held(DriverCall::kRelease, 0, handle);
  if (capturing() && physical.was_mapped && physical.first_mapped_in != epoch_) {
    RefuseInCapture(
        DriverCall::kRelease, 0,
        "handle " + Number(handle) + " was mapped before the capture that is under way");
  }
  physical.released = true;
  DropIfUnused(handle);
  calls_.Add(DriverCall::kRelease);
}

void HostDriver::Map(Address address, uint64_t bytes, Handle handle) {
  const std::lock_guard lock(mutex_);
  CheckSize(DriverCall::kMap, bytes);
  if (address % options_.granularity != 0) {
    Refuse(DriverCall::kMap, bytes,
           Hex(address) + " is not a multiple of the granularity, " +
               std::to_string(options_.granularity));
  }
  Reservation& reservation = ReservationAround(DriverCall::kMap, address, bytes);
  Physical& physical = Held(DriverCall::kMap, bytes, handle);
  if (physical.bytes != bytes) {
    Refuse(DriverCall::kMap, bytes,
           "handle " + Number(handle) + " has " + std::to_string(physical.bytes) +
               " bytes, and is mapped whole or not at all");
  }
  const auto next = mappings_.lower_bound(address);
  const bool hits_next = next != mappings_.end() && next->first < address + bytes;
  const bool hits_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (hits_next || hits_previous) {
    const auto& [start, mapping] = hits_next ? *next : *std::prev(next);
    Refuse(DriverCall::kMap, bytes,
           Span(address, bytes) + " overlaps what is mapped at " + Span(start, mapping.bytes));
  }
  const auto made = mappings_.emplace_hint(
      next, address, Mapping{.bytes = bytes, .handle = handle, .made_in = epoch_});
  if (options_.map_memory) {
    const int error = host_memory::Map(address, bytes, physical.home);
    if (error != 0) {
      mappings_.erase(made);
      FailSystem(DriverStatus::kFailed, DriverCall::kMap, error, bytes);
    }
  }
  ++reservation.mappings;
  ++physical.mappings;
  if (!physical.was_mapped) physical.first_mapped_in = epoch_;
  physical.was_mapped = true;
  ++usage_.mappings;
  usage_.mapped_bytes += bytes;
  calls_.Add(DriverCall::kMap);
}

void HostDriver::SetAccess(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  CheckSize(DriverCall::kSetAccess, bytes);
  const auto first = mappings_.find(address);
  auto behind = first;
  uint64_t covered = 0;
  while (behind != mappings_.end() && covered < bytes && behind->first == address + covered) {
    covered += behind->second.bytes;
    ++behind;
  }
  if (covered != bytes) {
    Refuse(DriverCall::kSetAccess, bytes,
           Span(address, bytes) + " is not covered by whole mappings, one beside the other");
  }
  if (options_.map_memory) {
    const int error = host_memory::AllowAccess(address, bytes);
    if (error != 0) {
      // It may have got some way.
      for (auto it = first; it != behind; ++it) {
        if (!it->second.accessible) host_memory::ForbidAccess(it->first, it->second.bytes);
      }
      FailSystem(DriverStatus::kFailed, DriverCall::kSetAccess, error, bytes);
    }
  }
  for (auto it = first; it != behind; ++it) {
    it->second.accessible = true;
    it->second.peers = peers_.size();
    it->second.quiesces_before = calls_[DriverCall::kQuiesce];
  }
  calls_.Add(DriverCall::kSetAccess);
}

void HostDriver::Unmap(Address address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) {
    Refuse(DriverCall::kUnmap, bytes,
           Span(address, bytes) + " is not exactly what one Map() mapped");
  }
  const Mapping mapping = found->second;
  if (capturing() && mapping.made_in != epoch_) {
    RefuseInCapture(DriverCall::kUnmap, bytes,
                    Span(address, bytes) + " was mapped before the capture that is under way");
  }
  if (options_.map_memory) {
    const int error = host_memory::Unmap(address, bytes);
    if (error != 0) FailSystem(DriverStatus::kFailed, DriverCall::kUnmap, error, bytes);
  }
  if (mapping.accessible && mapping.quiesces_before == calls_[DriverCall::kQuiesce]) {
    ++unquiesced_unmaps_;
  }
  --ReservationAround(DriverCall::kUnmap, address, bytes).mappings;
  mappings_.erase(found);
  --usage_.mappings;
  usage_.mapped_bytes -= bytes;
  --handles_.at(mapping.handle).mappings;
  DropIfUnused(mapping.handle);
  calls_.Add(DriverCall::kUnmap);
}

void HostDriver::AddPeer(int peer) {
  const std::lock_guard lock(mutex_);
  if (peer < 0) Refuse(DriverCall::kAddPeer, 0, "there is no device " + std::to_string(peer));
  peers_.push_back(peer);
  calls_.Add(DriverCall::kAddPeer);
}

void HostDriver::Quiesce() {
  const std::lock_guard lock(mutex_);
  if (capturing()) {
    RefuseInCapture(DriverCall::kQuiesce, 0, "waiting for the device while a capture is under way");
  }
  for (auto& [event, recorded] : events_) recorded.done = true;
  calls_.Add(DriverCall::kQuiesce);
}

bool HostDriver::MayQuiesce() noexcept {
  const std::lock_guard lock(mutex_);
  return !capturing() && !graphs_.AnyCapture();
}

void HostDriver::Capture(StreamId stream, Frontier* frontier) {
  const std::lock_guard lock(mutex_);
  CheckExists(DriverCall::kCapture, stream);
  graphs_.Capture(stream, frontier);
  calls_.Add(DriverCall::kCapture);
}

bool HostDriver::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  const std::lock_guard lock(mutex_);
  if (!graphs_.Contains(node)) {
    Refuse(DriverCall::kDependencies, 0,
           "there is no node " + std::to_string(static_cast<uint64_t>(node)));
  }
  const bool waits = graphs_.Dependencies(node, nodes);
  calls_.Add(DriverCall::kDependencies);
  return waits;
}

Event HostDriver::RecordEvent(StreamId stream) {
  const std::lock_guard lock(mutex_);
  CheckNotCapturing(DriverCall::kRecordEvent, stream);
  const Event event = AddEvent(stream);
  calls_.Add(DriverCall::kRecordEvent);
  return event;
}

Event HostDriver::RecordDeviceEvent() {
  const std::lock_guard lock(mutex_);
  if (capturing() || graphs_.AnyCapture()) {
    RefuseInCapture(DriverCall::kRecordDeviceEvent, 0,
                    "marking the device's work while a capture is under way");
  }
  const Event event = AddEvent(std::nullopt);
  calls_.Add(DriverCall::kRecordDeviceEvent);
  return event;
}

Event HostDriver::AddEvent(std::optional<StreamId> stream) {
  const Event event{++last_event_};
  events_.emplace(event, RecordedEvent{.stream = stream, .done = !hold_events_});
  ++usage_.events;
  return event;
}

bool HostDriver::EventDone(Event event) {
  const std::lock_guard lock(mutex_);
  const bool done = Recorded(DriverCall::kEventDone, event).done;
  calls_.Add(DriverCall::kEventDone);
  return done;
}

void HostDriver::WaitEvent(StreamId stream, Event event) {
  const std::lock_guard lock(mutex_);
  const RecordedEvent& recorded = Recorded(DriverCall::kWaitEvent, event);
  CheckNotCapturing(DriverCall::kWaitEvent, stream);
  waits_.push_back({.waiting = stream, .awaited = recorded.stream});
  calls_.Add(DriverCall::kWaitEvent);
}

void HostDriver::CheckExists(DriverCall call, StreamId stream) const {
  if (!destroyed_streams_.contains(stream)) return;
  Refuse(call, 0,
         "stream " + std::to_string(static_cast<uint64_t>(stream)) + " was destroyed before");
}

void HostDriver::CheckNotCapturing(DriverCall call, StreamId stream) const {
  CheckExists(call, stream);
  if (capturing_streams_.contains(stream) || graphs_.Contains(stream)) {
    RefuseInCapture(call, 0,
                    "stream " + std::to_string(static_cast<uint64_t>(stream)) + " is capturing");
  }
}

const HostDriver::RecordedEvent& HostDriver::Recorded(DriverCall call, Event event) const {
  const auto found = events_.find(event);
  if (found == events_.end()) {
    Refuse(call, 0, "there is no event " + std::to_string(static_cast<uint64_t>(event)));
  }
  return found->second;
}

void HostDriver::DestroyEvent(Event event) noexcept {
  const std::lock_guard lock(mutex_);
  if (events_.erase(event) == 0) {
    ++unknown_events_destroyed_;
    return;
  }
  --usage_.events;
  calls_.Add(DriverCall::kDestroyEvent);
}

MemoryInfo HostDriver::Info() {
  const std::lock_guard lock(mutex_);
  calls_.Add(DriverCall::kInfo);
  return {.free_bytes = options_.physical_limit_bytes - usage_.physical_bytes,
          .total_bytes = options_.physical_limit_bytes};
}

HostUsage HostDriver::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

CallCounts HostDriver::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

bool HostDriver::CanAccess(Address address, uint64_t bytes, int device) const {
  const std::lock_guard lock(mutex_);
  const auto peer = static_cast<size_t>(
      std::distance(peers_.begin(), std::find(peers_.begin(), peers_.end(), device)));
  auto it = mappings_.upper_bound(address);
  if (it == mappings_.begin()) return false;
  --it;
  Address at = address;
  while (it != mappings_.end() && it->first <= at && at - it->first < it->second.bytes) {
    const Mapping& mapping = it->second;
    if (!mapping.accessible || (device != options_.device && peer >= mapping.peers)) return false;
    const uint64_t here = it->first + mapping.bytes - at;
    if (here >= bytes) return true;
    at += here;
    bytes -= here;
    ++it;
  }
  return false;
}

uint64_t HostDriver::unquiesced_unmaps() const {
  const std::lock_guard lock(mutex_);
  return unquiesced_unmaps_;
}

std::vector<HostDriver::Wait> HostDriver::waits() const {
  const std::lock_guard lock(mutex_);
  return waits_;
}

uint64_t HostDriver::unknown_events_destroyed() const {
  const std::lock_guard lock(mutex_);
  return unknown_events_destroyed_;
}

void HostDriver::HoldEvents(bool hold) {
  const std::lock_guard lock(mutex_);
  hold_events_ = hold;
}

void HostDriver::CompleteEvents() {
  const std::lock_guard lock(mutex_);
  for (auto& [event, recorded] : events_) recorded.done = true;
}

void HostDriver::CompleteEvents(StreamId stream) {
  const std::lock_guard lock(mutex_);
  for (auto& [event, recorded] : events_) {
    if (recorded.stream == stream) recorded.done = true;
  }
}

void HostDriver::DestroyStream(StreamId stream) {
  const std::lock_guard lock(mutex_);
  destroyed_streams_.insert(stream);
}

void HostDriver::BeginCapture(const std::vector<StreamId>& streams) {
  const std::lock_guard lock(mutex_);
  capturing_streams_.insert(streams.begin(), streams.end());
  if (captures_++ == 0) ++epoch_;
}

void HostDriver::EndCapture() {
  const std::lock_guard lock(mutex_);
  if (captures_ == 0) throw UsageError("HostDriver::EndCapture: no capture is under way");
  if (--captures_ == 0) capturing_streams_.clear();
}

}  // namespace cgp
