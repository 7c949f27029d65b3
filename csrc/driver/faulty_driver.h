// A driver that passes everything to another one and fails on demand, before the other one hears of
// it.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "driver/driver.h"
#include "driver/driver_call.h"

namespace cgp {

// What FaultyDriver fails.
struct Fault {
  uint64_t call_number = 1;  // counted from 1
  DriverStatus status = DriverStatus::kFailed;
  bool for_good = false;  // every call from that one on, instead of it alone
  std::optional<DriverCall> only = std::nullopt;  // count and fail calls of this kind alone
};

// Every call counts but those that cannot fail: device(), granularity(), MayQuiesce() and
// DestroyEvent().
class FaultyDriver final : public Driver {
 public:
  // `inner` must outlive this.
  explicit FaultyDriver(Driver& inner) : inner_(inner) {}

  // From now on, with the count and the record of calls begun anew. Replaces an earlier fault.
  void Arm(const Fault& fault);
  // Fails nothing any more; the count and the record of calls begin anew too.
  void Disarm();

  // Runs before each call, as what other threads do just then. It may not call this driver.
  void Meanwhile(std::function<void(DriverCall)> happens) { meanwhile_ = std::move(happens); }

  // The calls since the last Arm() or Disarm(), failed ones included, in order.
  std::vector<DriverCall> calls() const;
  uint64_t call_count() const;
  // How many of them were made to fail.
  uint64_t failures() const;

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
  bool MayQuiesce() noexcept override { return inner_.MayQuiesce(); }
  void Capture(StreamId stream, Frontier* frontier) override;
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override;
  Event RecordEvent(StreamId stream) override;
  Event RecordDeviceEvent() override;
  bool EventDone(Event event) override;
  void WaitEvent(StreamId stream, Event event) override;
  void DestroyEvent(Event event) noexcept override;
  MemoryInfo Info() override;

 private:
  // Records the call, and throws if it is one to fail.
  void Count(DriverCall call, uint64_t bytes = 0);

  Driver& inner_;
  std::function<void(DriverCall)> meanwhile_ = [](DriverCall) {};
  mutable std::mutex mutex_;
  std::optional<Fault> fault_;
  std::vector<DriverCall> calls_;
  uint64_t counted_ = 0;  // of the kind that the fault counts
  uint64_t failures_ = 0;
};

}  // namespace cgp
