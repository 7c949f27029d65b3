// A host driver that holds its caller also to the rules that the host driver cannot know of, and
// plays a device (timelines.h).
//
// It sits below whatever injects failures, so it sees only calls that are meant to happen. A broken
// rule is noted, not thrown, and so is what the host driver refuses to take back, since the caller
// might swallow an exception; a test asks for `violations()` after what it did.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "driver/forwarding_driver.h"
#include "testing/host_driver.h"
#include "testing/timelines.h"

namespace cgp {

class DriverWatch final : public ForwardingDriver<DriverWatch>, public Timelines {
 public:
  // `host` does the work and must outlive this; it is never asked for events or to quiesce.
  explicit DriverWatch(HostDriver& host) : ForwardingDriver(host), host_(host) {}

  // --- What a test says ---

  // From now on what is not capture-legal is a violation, but to undo what no one has used yet.
  void set_capturing(bool capturing) {
    const std::lock_guard lock(mutex_);
    capturing_ = capturing;
  }
  // Everything mapped so far may be in use by the device from now on: unmapping it needs a
  // Quiesce() first.
  void MarkUsed() {
    const std::lock_guard lock(mutex_);
    used_maps_ = maps_;
    quiet_ = false;
  }

  // The stream is gone: to name it from now on, as a caller with a handle of old would, is a
  // violation. CUDA would read memory that is not its own any more.
  void DestroyStream(StreamId stream) {
    const std::lock_guard lock(mutex_);
    destroyed_streams_.insert(stream);
  }

  // --- What it has seen ---

  std::vector<std::string> violations() const { return Locked(violations_); }
  uint64_t handle_bytes() const { return host_.usage().physical_bytes; }
  uint64_t handles() const { return host_.usage().handles; }
  uint64_t mappings() const { return host_.usage().mappings; }
  uint64_t reservations() const { return host_.usage().reservations; }
  size_t events() const { return Locked(events_).size(); }  // recorded and not destroyed
  uint64_t calls() const { return Locked(calls_); }  // that could have failed, since it was made
  uint64_t quiesce_calls() const { return Locked(quiesce_calls_); }
  int64_t peers() const { return std::ssize(Locked(peers_)); }

  struct Place {
    Handle handle{};
    uint64_t offset_bytes = 0;  // in the handle
    uint64_t left_bytes = 0;    // from there to the end of the mapping
    bool accessible = false;
    int64_t peers = 0;  // that have access
  };
  std::optional<Place> At(Address address) const;
  // Whether all of [address, address + bytes) is mapped and accessible.
  bool Accessible(Address address, uint64_t bytes) const {
    return host_.CanAccess(address, bytes, host_.device());
  }

  // --- Driver ---

  std::monostate Around(DriverCall, uint64_t) {
    const std::lock_guard lock(mutex_);
    ++calls_;
    return {};
  }
  Address Reserve(uint64_t bytes) override;
  void FreeAddresses(Address address, uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void Unmap(Address address, uint64_t bytes) override;
  void AddPeer(int peer) override;
  void Quiesce() override;
  bool MayQuiesce() noexcept override;
  void Capture(StreamId stream, Frontier* frontier) override;
  Event RecordEvent(StreamId stream) override;
  Event RecordDeviceEvent() override;
  bool EventDone(Event event) override;
  void WaitEvent(StreamId stream, Event event) override;
  void DestroyEvent(Event event) noexcept override;

 private:
  struct Mapping {
    uint64_t bytes = 0;
    Handle handle{};
    uint64_t made_by = 0;  // the number of the Map() call
  };

  template <typename Member>
  Member Locked(const Member& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }
  void Expect(bool condition, const std::string& rule);
  // Makes the call, which takes back what the Map() call number `map` first made use of possible
  // (0: none did), and notes if it may not be made or if the host driver refuses it.
  template <typename Call>
  void GiveBack(const char* name, uint64_t map, const Call& call);
  Event AddEvent(Clock clock);
  // Empty if there is none.
  Clock Recorded(const char* call, Event event);
  // For a call that names a stream.
  void ExpectNotCapturing(const std::string& call, StreamId stream);

  HostDriver& host_;
  mutable std::recursive_mutex mutex_;
  std::vector<std::string> violations_;
  std::map<Address, Mapping> mappings_;
  std::map<Address, uint64_t> first_maps_;  // by reservation: the first Map() call there, or 0
  std::unordered_map<Handle, uint64_t> first_maps_of_handles_;
  std::set<StreamId> destroyed_streams_;
  std::map<Event, Clock> events_;
  uint64_t next_event_ = 1;
  uint64_t maps_ = 0;       // Map() calls
  uint64_t used_maps_ = 0;  // what the first so many of them made may be in use
  uint64_t calls_ = 0;
  uint64_t quiesce_calls_ = 0;
  std::vector<int> peers_;
  bool capturing_ = false;
  bool quiet_ = true;  // the device has finished with all that is mapped
};

}  // namespace cgp
