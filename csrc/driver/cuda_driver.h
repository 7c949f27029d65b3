// A driver that makes memory real on an NVIDIA GPU, by CUDA's virtual memory management.
//
// It needs no CUDA header to be used and no CUDA library to be linked: libcuda is found at run
// time.
//
// What is mapped is open to all devices that can reach it and had a context when the driver was made:
// torch asks for access between two devices once, and may have done so before.
//
// The primary context of the device, which is the one that the CUDA runtime and PyTorch use, is
// retained by the first call that needs it. Every call makes it current for its own duration where
// it is not, so that calls may come from any thread, one without a context included, and leaves the
// thread as it was.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "driver/driver.h"
#include "driver/driver_call.h"

namespace cgp {

struct CudaApi;
class CudaContext;

// Calls to CUDA since the driver was made, failed ones included.
struct CudaDriverStats {
  template <typename Count>
  struct Kind {
    Count calls{0};
    Count nanoseconds{0};
  };
  std::array<Kind<uint64_t>, kDriverCallKinds> kinds{};  // by DriverCall

  const Kind<uint64_t>& operator[](DriverCall call) const {
    return kinds[static_cast<size_t>(call)];
  }
};

class CudaDriver final : public Driver {
 public:
  // `device` is an ordinal as the CUDA runtime and PyTorch count (CUDA_VISIBLE_DEVICES applies).
  // Throws DriverError, which says why, where it cannot be used. Makes no context.
  // Handles that are made while `exportable`, if there is one, is set can be exported as file
  // descriptors; it must outlive this.
  explicit CudaDriver(int device, const std::atomic<bool>* exportable = nullptr);
  // With other functions than those of the driver of this machine; `api` must outlive this.
  CudaDriver(int device, const CudaApi& api, const std::atomic<bool>* exportable = nullptr);
  // What is still mapped or held stays so until the process ends.
  ~CudaDriver() override;

  // Whether memory of the device can be exported as file descriptors.
  bool CanExport() const;

  CudaDriverStats stats() const;

  int device() const noexcept override { return device_; }
  uint64_t granularity() const noexcept override { return granularity_; }
  Address Reserve(uint64_t bytes) override;
  void FreeAddresses(Address address, uint64_t bytes) override;
  Handle Create(uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void SetAccess(Address address, uint64_t bytes) override;
  void Unmap(Address address, uint64_t bytes) override;
  void AddPeer(int peer) override;
  void Quiesce() override;
  // CUDA does not tell of captures.
  bool MayQuiesce() noexcept override { return true; }
  void Capture(StreamId stream, Frontier* frontier) override;
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override;
  Event RecordEvent(StreamId stream) override;
  // A driver older than CUDA 12.5 cannot: then the device is waited for instead.
  Event RecordDeviceEvent() override;
  bool EventDone(Event event) override;
  void WaitEvent(StreamId stream, Event event) override;
  void DestroyEvent(Event event) noexcept override;
  MemoryInfo Info() override;

 private:
  class Timer;

  // Calls `function` with the context current, counted and timed as `call`. Throws its error.
  template <typename Function>
  void Call(CudaContext& context, DriverCall call, std::string_view name, uint64_t bytes,
            Function function);

  // That of the device whose stream it is.
  CudaContext& ContextOf(StreamId stream);
  int Attribute(int attribute) const;
  bool CanReach(int cu_peer) const;
  void LetActiveDevicesIn();

  std::vector<CudaContext*> Contexts();
  bool IsExportable() const { return exportable_ != nullptr && *exportable_; }

  // Calls record(event) for a new event.
  template <typename Record>
  Event NewEvent(CudaContext& context, DriverCall call, Record record);
  Event MarkAll(CudaContext& context);
  std::vector<Event> MarkedWith(Event event);

  const int device_;
  const CudaApi& api_;
  const std::atomic<bool>* const exportable_;
  int cu_device_ = 0;
  uint64_t granularity_ = 0;
  bool rdma_capable_ = false;

  std::unique_ptr<CudaContext> context_;
  std::mutex others_mutex_;
  std::map<int, std::unique_ptr<CudaContext>>
      others_;                                         // of other devices, once a stream was theirs
  std::map<Event, std::vector<Event>> others_marked_;  // with a RecordDeviceEvent(), theirs

  std::mutex peers_mutex_;
  std::vector<int> peers_;  // CUDA's device numbers

  using AtomicKind = CudaDriverStats::Kind<std::atomic<uint64_t>>;
  std::array<AtomicKind, kDriverCallKinds> stats_;
};

}  // namespace cgp
