// A driver for machines without a GPU: memory and addresses are this process's own.
//
// It keeps every rule that driver.h states for its caller and refuses what breaks one, as CUDA does
// or more strictly, with a DriverError that says which rule; what it refuses has changed nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/driver.h"
#include "driver/driver_call.h"
#include "testing/host_graphs.h"

namespace cgp {

// How often each call was made.
class CallCounts {
 public:
  void Add(DriverCall call) { ++counts_[static_cast<size_t>(call)]; }

  uint64_t operator[](DriverCall call) const { return counts_[static_cast<size_t>(call)]; }

  bool operator==(const CallCounts&) const = default;

 private:
  std::array<uint64_t, kDriverCallKinds> counts_{};
};

struct HostDriverOptions {
  int device = 0;
  // A power of two: from the system's page size up, or from 512 up without map_memory.
  uint64_t granularity = uint64_t{2} << 20;
  // What all handles, and all reservations, may hold together. Physical memory is taken only where
  // it is written to.
  uint64_t physical_limit_bytes = uint64_t{80} << 30;
  uint64_t address_limit_bytes = uint64_t{1} << 47;
  // false: the same rules and numbers, but addresses are only numbers and nothing can be read or
  // written there. For millions of calls a second.
  bool map_memory = true;
};

// What a driver holds now. Equal before and after a call that failed.
struct HostUsage {
  uint64_t handles = 0;         // not released yet, or still mapped
  uint64_t physical_bytes = 0;  // of these handles
  uint64_t reservations = 0;
  uint64_t reserved_bytes = 0;
  uint64_t mappings = 0;
  uint64_t mapped_bytes = 0;
  uint64_t events = 0;

  bool operator==(const HostUsage&) const = default;
};

class HostDriver final : public Driver {
 public:
  // Throws UsageError for options that make no sense, DriverError where the system cannot do it.
  explicit HostDriver(const HostDriverOptions& options = {});
  // Everything goes, mapped or not.
  ~HostDriver() override;

  int device() const noexcept override { return options_.device; }
  uint64_t granularity() const noexcept override { return options_.granularity; }
  Address Reserve(uint64_t bytes) override;
  void FreeAddresses(Address address, uint64_t bytes) override;
  Handle Create(uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void SetAccess(Address address, uint64_t bytes) override;
  void Unmap(Address address, uint64_t bytes) override;
  void AddPeer(int peer) override;
  void Quiesce() override;
  bool MayQuiesce() noexcept override;
  void Capture(StreamId stream, Frontier* frontier) override;
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override;
  Event RecordEvent(StreamId stream) override;
  Event RecordDeviceEvent() override;
  bool EventDone(Event event) override;
  void WaitEvent(StreamId stream, Event event) override;
  void DestroyEvent(Event event) noexcept override;
  MemoryInfo Info() override;

  // --- For tests ---

  HostUsage usage() const { return Locked(usage_); }

  // Calls that succeeded.
  CallCounts calls() const { return Locked(calls_); }

  // Whether all of [address, address + bytes) is mapped and `device` (this one or a peer) may read
  // and write it.
  bool CanAccess(Address address, uint64_t bytes, int device) const;

  // How often DestroyEvent(), which cannot throw, was given an event that does not exist.
  uint64_t unknown_events_destroyed() const { return Locked(unknown_events_destroyed_); }

  // Events are done at once, or, while held, when CompleteEvents() or Quiesce() says so. Letting go
  // of them completes nothing that is pending.
  void HoldEvents(bool hold);
  void CompleteEvents(std::optional<StreamId> only = {});

  // Every WaitEvent(), in order: which stream waits for the work of which, or of all (nothing). It
  // holds back nothing: CompleteEvents() is told when a stream's work is done.
  struct Wait {
    StreamId waiting;
    std::optional<StreamId> awaited;
    bool operator==(const Wait&) const = default;
  };
  std::vector<Wait> waits() const { return Locked(waits_); }

  // The captures that Capture() and Dependencies() tell of. While one is under way the calls that
  // are not capture-legal fail as CUDA's do, with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED. Legal,
  // because it undoes: Unmap() of a mapping made since, FreeAddresses() of a reservation made since,
  // Release() of a handle that was mapped only since or never. Captures may overlap; "since" is then
  // the begin of the oldest. RecordEvent() and WaitEvent() fail on the streams of a capture.
  HostGraphs& graphs() { return graphs_; }

 private:
  class Call;
  // What was "made in" a capture was made after that had begun, and before any later one.
  struct Physical {
    uint64_t bytes = 0;
    Address home = 0;  // see host_memory.h
    uint64_t mappings = 0;
    bool released = false;
    std::optional<CaptureId> first_mapped_in = std::nullopt;
  };
  struct Reservation {
    uint64_t bytes = 0;
    uint64_t mappings = 0;
    CaptureId made_in = 0;
  };
  struct Mapping {
    uint64_t bytes = 0;
    Handle handle{};
    CaptureId made_in = 0;
    bool accessible = false;
    size_t peers = 0;  // the first so many of peers_ have access
  };
  struct RecordedEvent {
    std::optional<StreamId> stream;  // none: of the device
    bool done = false;
  };

  template <typename Value>
  Value Locked(const Value& value) const {
    const std::lock_guard lock(mutex_);
    return value;
  }
  Reservation& ReservationAround(const Call& call, Address address, uint64_t bytes);
  Physical& Held(const Call& call, Handle handle);
  void DropIfUnused(Handle handle);
  void CheckNotCapturing(const Call& call, StreamId stream) const;
  Event AddEvent(std::optional<StreamId> stream);
  const RecordedEvent& Recorded(const Call& call, Event event) const;
  bool IsOlderThanCaptures(CaptureId made_in) const;

  const HostDriverOptions options_;
  mutable std::mutex mutex_;

  // invariant: a handle exists iff it is not released or mapped; the mappings of a handle and of a
  // reservation count those in mappings_, which lie in one reservation each and never overlap.
  std::unordered_map<Handle, Physical> handles_;
  std::map<Address, Reservation> reservations_;
  std::map<Address, Mapping> mappings_;
  std::unordered_map<Event, RecordedEvent> events_;
  std::vector<int> peers_;
  std::vector<Wait> waits_;

  HostUsage usage_;
  CallCounts calls_;
  uint64_t unknown_events_destroyed_ = 0;
  bool hold_events_ = false;
  uint64_t last_handle_ = 0;
  uint64_t last_event_ = 0;
  Address next_address_;  // without map_memory: where the next reservation starts

  HostGraphs graphs_;  // orders its own calls
};

}  // namespace cgp
