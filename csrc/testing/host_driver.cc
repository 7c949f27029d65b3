#include "testing/host_driver.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <iterator>
#include <limits>
#include <system_error>

#include "core/base/error.h"
#include "testing/host_memory.h"

namespace cgp {
namespace {

// CUDA's codes for what is refused.
constexpr int kOutOfMemoryCode = 2;
constexpr int kInvalidValueCode = 1;
constexpr int kCaptureUnsupportedCode = 900;

constexpr uint64_t kSmallestGranularity = 512;

// Without map_memory addresses start here: not 0, and beyond what looks like a small number.
constexpr Address kFirstNumber = Address{1} << 40;

std::string Span(Address address, uint64_t bytes) {
  return "[" + Hex(address) + ", " + Hex(address + bytes) + ")";
}

template <typename Id>
std::string Number(Id id) {
  return std::to_string(static_cast<uint64_t>(id));
}

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

// A call that has the lock: it says why it is refused, and counts unless it throws.
class HostDriver::Call {
 public:
  Call(HostDriver& driver, DriverCall kind, uint64_t bytes = 0)
      : driver_(driver), lock_(driver.mutex_), kind_(kind), bytes_(bytes) {}
  ~Call() {
    if (std::uncaught_exceptions() == exceptions_) driver_.calls_.Add(kind_);
  }

  [[noreturn]] void Refuse(const std::string& why) const {
    Fail(DriverStatus::kFailed, kInvalidValueCode, "CUDA_ERROR_INVALID_VALUE", why);
  }
  [[noreturn]] void RefuseInCapture(const std::string& why) const {
    Fail(DriverStatus::kFailed, kCaptureUnsupportedCode, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
         why);
  }
  [[noreturn]] void RunOut(DriverStatus status, const std::string& why) const {
    Fail(status, kOutOfMemoryCode, "CUDA_ERROR_OUT_OF_MEMORY", why);
  }
  void CheckSystem(int error, DriverStatus status = DriverStatus::kFailed) const {
    if (error == 0) return;
    Fail(status, error, std::generic_category().message(error),
         "the system refused it, perhaps because the process has as many mappings as "
         "vm.max_map_count allows");
  }
  void CheckSize() const {
    const uint64_t granularity = driver_.options_.granularity;
    if (bytes_ != 0 && bytes_ % granularity == 0) return;
    Refuse("a size of " + std::to_string(bytes_) +
           " bytes is not a positive multiple of the granularity, " + std::to_string(granularity));
  }

 private:
  [[noreturn]] void Fail(DriverStatus status, int code, const std::string& code_name,
                         const std::string& why) const {
    throw DriverError(status, "HostDriver::" + std::string(Name(kind_)), code, code_name, bytes_,
                      driver_.options_.device, why);
  }

  HostDriver& driver_;
  const std::lock_guard<std::mutex> lock_;
  const DriverCall kind_;
  const uint64_t bytes_;
  const int exceptions_ = std::uncaught_exceptions();
};

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

HostDriver::Reservation& HostDriver::ReservationAround(const Call& call, Address address,
                                                       uint64_t bytes) {
  auto found = reservations_.upper_bound(address);
  if (found != reservations_.begin()) {
    --found;
    const uint64_t offset = address - found->first;
    Reservation& reservation = found->second;
    if (offset < reservation.bytes && bytes <= reservation.bytes - offset) return reservation;
  }
  call.Refuse(Span(address, bytes) + " does not lie in one reservation");
}

HostDriver::Physical& HostDriver::Held(const Call& call, Handle handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) call.Refuse("there is no handle " + Number(handle));
  if (found->second.released) call.Refuse("handle " + Number(handle) + " was released before");
  return found->second;
}

bool HostDriver::IsOlderThanCaptures(CaptureId made_in) const {
  const std::optional<CaptureId> oldest = graphs_.oldest();
  return oldest && made_in < *oldest;
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
  const Call call(*this, DriverCall::kReserve, bytes);
  call.CheckSize();
  const uint64_t room = options_.address_limit_bytes - usage_.reserved_bytes;
  if (bytes > room || bytes > std::numeric_limits<Address>::max() - next_address_) {
    call.RunOut(DriverStatus::kOutOfAddresses, std::to_string(room) + " of " +
                                                   std::to_string(options_.address_limit_bytes) +
                                                   " bytes of addresses are left");
  }
  Address address = next_address_;
  if (options_.map_memory) {
    call.CheckSystem(host_memory::Reserve(bytes, options_.granularity, &address),
                     DriverStatus::kOutOfAddresses);
  } else {
    next_address_ += bytes;
  }
  reservations_.emplace(address, Reservation{.bytes = bytes, .made_in = graphs_.newest()});
  ++usage_.reservations;
  usage_.reserved_bytes += bytes;
  return address;
}

void HostDriver::FreeAddresses(Address address, uint64_t bytes) {
  const Call call(*this, DriverCall::kFreeAddresses, bytes);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) {
    call.Refuse(Span(address, bytes) + " is not exactly what one Reserve() returned");
  }
  if (found->second.mappings != 0) {
    call.Refuse(std::to_string(found->second.mappings) + " mappings are in " +
                Span(address, bytes));
  }
  if (IsOlderThanCaptures(found->second.made_in)) {
    call.RefuseInCapture(Span(address, bytes) +
                         " was reserved before the capture that is under way");
  }
  if (options_.map_memory) call.CheckSystem(host_memory::Free(address, bytes));
  reservations_.erase(found);
  --usage_.reservations;
  usage_.reserved_bytes -= bytes;
}

Handle HostDriver::Create(uint64_t bytes) {
  const Call call(*this, DriverCall::kCreate, bytes);
  call.CheckSize();
  const uint64_t room = options_.physical_limit_bytes - usage_.physical_bytes;
  if (bytes > room) {
    call.RunOut(DriverStatus::kOutOfMemory, std::to_string(room) + " of " +
                                                std::to_string(options_.physical_limit_bytes) +
                                                " bytes are free");
  }
  Physical physical{.bytes = bytes};
  if (options_.map_memory) {
    call.CheckSystem(host_memory::Create(bytes, &physical.home), DriverStatus::kOutOfMemory);
  }
  const Handle handle{++last_handle_};
  handles_.emplace(handle, physical);
  ++usage_.handles;
  usage_.physical_bytes += bytes;
  return handle;
}

void HostDriver::Release(Handle handle) {
  const Call call(*this, DriverCall::kRelease);
  Physical& physical = Held(call, handle);
  if (physical.first_mapped_in && IsOlderThanCaptures(*physical.first_mapped_in)) {
    call.RefuseInCapture("handle " + Number(handle) +
                         " was mapped before the capture that is under way");
  }
  physical.released = true;
  DropIfUnused(handle);
}

void HostDriver::Map(Address address, uint64_t bytes, Handle handle) {
  const Call call(*this, DriverCall::kMap, bytes);
  call.CheckSize();
  if (address % options_.granularity != 0) {
    call.Refuse(Hex(address) + " is not a multiple of the granularity, " +
                std::to_string(options_.granularity));
  }
  Reservation& reservation = ReservationAround(call, address, bytes);
  Physical& physical = Held(call, handle);
  if (physical.bytes != bytes) {
    call.Refuse("handle " + Number(handle) + " has " + std::to_string(physical.bytes) +
                " bytes, and is mapped whole or not at all");
  }
  const auto next = mappings_.lower_bound(address);
  const bool hits_next = next != mappings_.end() && next->first < address + bytes;
  const bool hits_previous =
      next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address;
  if (hits_next || hits_previous) {
    const auto& [start, mapping] = hits_next ? *next : *std::prev(next);
    call.Refuse(Span(address, bytes) + " overlaps what is mapped at " + Span(start, mapping.bytes));
  }
  const auto made = mappings_.emplace_hint(
      next, address, Mapping{.bytes = bytes, .handle = handle, .made_in = graphs_.newest()});
  if (options_.map_memory) {
    const int error = host_memory::Map(address, bytes, physical.home);
    if (error != 0) mappings_.erase(made);
    call.CheckSystem(error);
  }
  ++reservation.mappings;
  ++physical.mappings;
  if (!physical.first_mapped_in) physical.first_mapped_in = graphs_.newest();
  ++usage_.mappings;
  usage_.mapped_bytes += bytes;
}

void HostDriver::SetAccess(Address address, uint64_t bytes) {
  const Call call(*this, DriverCall::kSetAccess, bytes);
  call.CheckSize();
  const auto first = mappings_.find(address);
  auto behind = first;
  uint64_t covered = 0;
  while (behind != mappings_.end() && covered < bytes && behind->first == address + covered) {
    covered += behind->second.bytes;
    ++behind;
  }
  if (covered != bytes) {
    call.Refuse(Span(address, bytes) + " is not covered by whole mappings, one beside the other");
  }
  if (options_.map_memory) {
    const int error = host_memory::AllowAccess(address, bytes);
    if (error != 0) {
      // It may have got some way.
      for (auto it = first; it != behind; ++it) {
        if (!it->second.accessible) host_memory::ForbidAccess(it->first, it->second.bytes);
      }
      call.CheckSystem(error);
    }
  }
  for (auto it = first; it != behind; ++it) {
    it->second.accessible = true;
    it->second.peers = peers_.size();
  }
}

void HostDriver::Unmap(Address address, uint64_t bytes) {
  const Call call(*this, DriverCall::kUnmap, bytes);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.bytes != bytes) {
    call.Refuse(Span(address, bytes) + " is not exactly what one Map() mapped");
  }
  const Mapping mapping = found->second;
  if (IsOlderThanCaptures(mapping.made_in)) {
    call.RefuseInCapture(Span(address, bytes) + " was mapped before the capture that is under way");
  }
  if (options_.map_memory) call.CheckSystem(host_memory::Unmap(address, bytes));
  --ReservationAround(call, address, bytes).mappings;
  mappings_.erase(found);
  --usage_.mappings;
  usage_.mapped_bytes -= bytes;
  --handles_.at(mapping.handle).mappings;
  DropIfUnused(mapping.handle);
}

void HostDriver::AddPeer(int peer) {
  const Call call(*this, DriverCall::kAddPeer);
  if (peer < 0) call.Refuse("there is no device " + std::to_string(peer));
  peers_.push_back(peer);
}

void HostDriver::Quiesce() {
  const Call call(*this, DriverCall::kQuiesce);
  if (graphs_.AnyCapture())
    call.RefuseInCapture("waiting for the device while a capture is under way");
  for (auto& [event, recorded] : events_) recorded.done = true;
}

bool HostDriver::MayQuiesce() noexcept { return !graphs_.AnyCapture(); }

void HostDriver::Capture(StreamId stream, Frontier* frontier) {
  const Call call(*this, DriverCall::kCapture);
  graphs_.Capture(stream, frontier);
}

bool HostDriver::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) {
  const Call call(*this, DriverCall::kDependencies);
  try {
    return graphs_.Dependencies(node, nodes);
  } catch (const UsageError& error) {
    call.Refuse(error.what());
  }
}

Event HostDriver::RecordEvent(StreamId stream) {
  const Call call(*this, DriverCall::kRecordEvent);
  CheckNotCapturing(call, stream);
  return AddEvent(stream);
}

Event HostDriver::RecordDeviceEvent() {
  const Call call(*this, DriverCall::kRecordDeviceEvent);
  if (graphs_.AnyCapture()) {
    call.RefuseInCapture("marking the device's work while a capture is under way");
  }
  return AddEvent(std::nullopt);
}

Event HostDriver::AddEvent(std::optional<StreamId> stream) {
  const Event event{++last_event_};
  events_.emplace(event, RecordedEvent{.stream = stream, .done = !hold_events_});
  ++usage_.events;
  return event;
}

bool HostDriver::EventDone(Event event) {
  const Call call(*this, DriverCall::kEventDone);
  return Recorded(call, event).done;
}

void HostDriver::WaitEvent(StreamId stream, Event event) {
  const Call call(*this, DriverCall::kWaitEvent);
  const RecordedEvent& recorded = Recorded(call, event);
  CheckNotCapturing(call, stream);
  waits_.push_back({.waiting = stream, .awaited = recorded.stream});
}

void HostDriver::CheckNotCapturing(const Call& call, StreamId stream) const {
  if (graphs_.Contains(stream)) {
    call.RefuseInCapture("stream " + Number(stream) + " is capturing");
  }
}

const HostDriver::RecordedEvent& HostDriver::Recorded(const Call& call, Event event) const {
  const auto found = events_.find(event);
  if (found == events_.end()) call.Refuse("there is no event " + Number(event));
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
  const Call call(*this, DriverCall::kInfo);
  return {.free_bytes = options_.physical_limit_bytes - usage_.physical_bytes,
          .total_bytes = options_.physical_limit_bytes};
}

bool HostDriver::CanAccess(Address address, uint64_t bytes, int device) const {
  const std::lock_guard lock(mutex_);
  const auto peer = static_cast<size_t>(std::ranges::find(peers_, device) - peers_.begin());
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

void HostDriver::HoldEvents(bool hold) {
  const std::lock_guard lock(mutex_);
  hold_events_ = hold;
}

void HostDriver::CompleteEvents(std::optional<StreamId> only) {
  const std::lock_guard lock(mutex_);
  for (auto& [event, recorded] : events_) {
    if (!only || recorded.stream == only) recorded.done = true;
  }
}

}  // namespace cgp
