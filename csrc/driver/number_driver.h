// A driver that makes nothing real: addresses, handles and events are only numbers.
//
// On it the core decides as on a GPU, on any machine, and nothing can be read or written. It counts
// what is taken and runs out of it, and trusts its caller to keep the rules of driver.h: the driver
// that holds the core to them is testing/host_driver.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/driver.h"

namespace cgp {

struct NumberDriverOptions {
  int device = 0;
  uint64_t granularity = uint64_t{2} << 20;  // a power of two from 512 up
  // What all handles, and all reservations, may hold together.
  uint64_t physical_limit_bytes = uint64_t{80} << 30;
  uint64_t address_limit_bytes = uint64_t{1} << 47;
};

class NumberDriver final : public Driver {
 public:
  // Throws UsageError for a granularity that cannot be.
  explicit NumberDriver(const NumberDriverOptions& options = {});

  int device() const noexcept override { return options_.device; }
  uint64_t granularity() const noexcept override { return options_.granularity; }
  Address Reserve(uint64_t bytes) override;
  void FreeAddresses(Address address, uint64_t bytes) override;
  Handle Create(uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void SetAccess(Address, uint64_t) override {}
  void Unmap(Address address, uint64_t bytes) override;
  void AddPeer(int) override {}
  MemoryInfo Info() override;

  // Nothing is captured, and what is submitted is done.
  void Quiesce() override {}
  bool MayQuiesce() noexcept override { return true; }
  void Capture(StreamId, Frontier* frontier) override { *frontier = {}; }
  bool Dependencies(GraphNode, std::vector<GraphNode>* nodes) override {
    nodes->clear();
    return true;
  }
  Event RecordEvent(StreamId) override { return RecordDeviceEvent(); }
  Event RecordDeviceEvent() override;
  bool EventDone(Event) override { return true; }
  void WaitEvent(StreamId, Event) override {}
  void DestroyEvent(Event) noexcept override {}

 private:
  struct Physical {
    uint64_t bytes = 0;
    uint64_t users = 0;  // its mappings, and who holds it
  };
  // Throws unless there is so much.
  void Require(uint64_t bytes, uint64_t room, DriverStatus status, const char* call) const;
  void Drop(Handle handle);

  const NumberDriverOptions options_;
  std::mutex mutex_;
  std::unordered_map<Handle, Physical> handles_;
  std::unordered_map<Address, Handle> mappings_;
  uint64_t physical_bytes_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t last_number_ = 0;  // of a handle or an event
  Address next_address_;
};

}  // namespace cgp
