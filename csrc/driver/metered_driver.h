// A driver that forwards to another one, limits its physical memory, and reports what is mapped.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/driver.h"
#include "driver/forwarding_driver.h"

namespace cgp {

class MeteredDriver final : public ForwardingDriver<MeteredDriver> {
 public:
  static constexpr uint64_t kNoLimit = ~uint64_t{0};

  // Is called after the calling thread has mapped or unmapped something. It must not throw: the
  // core would take that for a failure of the driver.
  using Listener = void (*)(int device, bool mapped, Address address, uint64_t bytes);

  explicit MeteredDriver(std::unique_ptr<Driver> inner, Listener listener = nullptr)
      : ForwardingDriver(*inner), owned_(std::move(inner)), listener_(listener) {}

  // From now on Create() fails, as on a full device, if all handles together would have more bytes.
  void SetLimit(uint64_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }
  // Whether this thread's most recent Create(), since ClearRefusals(), failed because of a limit.
  static bool LimitRefused();
  static void ClearRefusals();

  // The bytes of all handles, and how often that number has changed. If changes() is read first,
  // held_bytes() is as new or newer.
  uint64_t held_bytes() const { return created_.load(std::memory_order_acquire); }
  uint64_t changes() const { return changes_.load(std::memory_order_acquire); }

  // Counts captures that are open in the process and that no driver knows of.
  static void CountCaptures(int change) { captures_.fetch_add(change, std::memory_order_acq_rel); }

  Handle Create(uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void Unmap(Address address, uint64_t bytes) override;
  bool MayQuiesce() noexcept override {
    return inner().MayQuiesce() && captures_.load(std::memory_order_acquire) == 0;
  }

 private:
  static inline std::atomic<int> captures_{0};

  const std::unique_ptr<Driver> owned_;  // inner()
  const Listener listener_;
  std::atomic<uint64_t> limit_{kNoLimit};
  std::mutex mutex_;
  std::map<Handle, uint64_t> sizes_;  // of live handles, in bytes
  // Changed under mutex_. invariant: the sum of sizes_
  std::atomic<uint64_t> created_{0};
  std::atomic<uint64_t> changes_{0};
};

}  // namespace cgp
