// A driver around another that keeps its own books, holds its caller to every rule of
// driver/driver.h, and plays a device: streams whose work is done only when a test says so.
//
// It sits below whatever injects failures, so it sees only calls that are meant to happen. A broken
// rule is noted, not thrown, since the caller might swallow an exception; a test asks for
// `violations()` after what it did.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver/driver.h"

namespace cgp {

class DriverWatch final : public Driver {
 public:
  // `inner` does the work and must outlive this; it is never asked for events or to quiesce.
  explicit DriverWatch(Driver& inner);

  // --- What a test says ---

  // From now on what is not capture-legal is a violation, but to undo what no one has used yet.
  void set_capturing(bool capturing);
  // Whether RecordEvent() and WaitEvent() are allowed: not while the streams concerned may be capturing.
  void set_events_allowed(bool allowed);
  // Everything mapped so far may be in use by the device from now on: unmapping it needs a
  // Quiesce() first.
  void MarkUsed();

  // Work is numbered per stream from 1 in the order of submission, and done in that order. `action`
  // happens when it is done; it may ask for other streams' work to be finished first, as an event
  // that is waited for does.
  uint64_t Submit(StreamId stream, std::function<void()> action = nullptr);
  uint64_t Submitted(StreamId stream) const;
  bool Done(StreamId stream, uint64_t work) const;
  // All that is submitted by now, as a marked device has it: by stream, how much of its work.
  using Mark = std::map<StreamId, uint64_t>;
  Mark TakeMark() const;
  bool Passed(const Mark& mark) const;
  // Whether what is submitted to `waiting` from now on begins when that work is done: it is done, is
  // the stream's own, or was waited for.
  bool IsBehind(StreamId waiting, StreamId stream, uint64_t work) const;
  // Does up to `count` more of the stream's submitted work.
  void Progress(StreamId stream, uint64_t count);
  // Does the stream's work up to number `work`.
  void Finish(StreamId stream, uint64_t work);
  void FinishAll();

  // --- What it has seen ---

  std::vector<std::string> violations() const;
  uint64_t handle_bytes() const;  // handles created and not released
  size_t handles() const;
  size_t mappings() const;
  size_t reservations() const;
  size_t events() const;   // recorded and not destroyed
  uint64_t calls() const;  // that could have failed, since it was made
  uint64_t quiesce_calls() const;
  int peers() const;

  struct Place {
    Handle handle{};
    uint64_t offset_bytes = 0;  // in the handle
    uint64_t left_bytes = 0;    // from there to the end of the mapping
    bool accessible = false;
    int peers = 0;  // how many had been added when access was last set
  };
  std::optional<Place> At(Address address) const;
  // Whether all of [address, address + bytes) is mapped and accessible.
  bool Accessible(Address address, uint64_t bytes) const;

  // --- Driver ---

  int device() const noexcept override { return inner_.device(); }
  uint64_t granularity() const noexcept override { return inner_.granularity(); }
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

 private:
  // `mapped` is the number of the Map() call that made it (or the first that concerned it; 0: none
  // did).
  struct Reservation {
    uint64_t bytes = 0;
    uint64_t mapped = 0;
  };
  struct Mapping {
    uint64_t bytes = 0;
    Handle handle{};
    bool accessible = false;
    int peers = 0;
    uint64_t mapped = 0;
  };
  struct Held {
    uint64_t bytes = 0;
    uint64_t mapped = 0;
  };
  struct Stream {
    uint64_t submitted = 0;
    uint64_t done = 0;  // done + pending.size() == submitted
    std::deque<std::function<void()>> pending;
    Mark waited;  // what its last work comes after
  };

  // Does the stream's next piece of work, if its number is at most `last`.
  bool DoNext(StreamId stream, uint64_t last);
  void Expect(bool condition, const std::string& rule);
  Mark TakeMarkLocked() const;
  bool PassedLocked(const Mark& mark) const;
  bool DoneLocked(StreamId stream, uint64_t work) const;
  // For a call that names a stream.
  void ExpectNotCapturing(const std::string& call, StreamId stream);
  void ExpectGranular(const char* call, uint64_t value);
  bool Used(uint64_t mapped) const { return mapped != 0 && mapped <= used_maps_; }
  bool CoveredLocked(Address address, uint64_t bytes, bool accessible) const;

  Driver& inner_;
  mutable std::mutex mutex_;
  std::vector<std::string> violations_;
  std::map<Address, Reservation> reservations_;
  std::map<Address, Mapping> mappings_;
  std::map<Handle, Held> handles_;
  std::map<StreamId, Stream> streams_;
  std::map<Event, Mark> events_;
  uint64_t next_event_ = 1;
  uint64_t handle_bytes_ = 0;  // sum of handles_[*].bytes
  uint64_t maps_ = 0;          // Map() calls
  uint64_t used_maps_ = 0;     // what the first so many of them made may be in use
  uint64_t calls_ = 0;
  uint64_t quiesce_calls_ = 0;
  int peers_ = 0;
  bool capturing_ = false;
  bool events_allowed_ = true;
  bool quiet_ = true;  // the device has finished with all that is mapped
};

}  // namespace cgp
