// A driver that forwards to another one, keeps a limit on physical memory and tells the history
// what is mapped.
//
// The limit is torch.cuda.set_per_process_memory_fraction()'s: what of it the base does not use.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "core/pool_set.h"
#include "driver/forwarding_driver.h"

namespace cgp {

class MeteredDriver final : public ForwardingDriver<MeteredDriver> {
 public:
  static constexpr uint64_t kNoLimit = ~uint64_t{0};

  explicit MeteredDriver(std::unique_ptr<Driver> inner)
      : ForwardingDriver(*inner), owned_(std::move(inner)) {}

  // From now on Create() fails, as if the device had no more, where all handles together would have
  // more bytes than that.
  void SetLimit(uint64_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }
  uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }

  // The bytes of all handles, and how often that number has changed. Who reads changes() first gets
  // bytes that are as new as that or newer.
  uint64_t held_bytes() const { return created_.load(std::memory_order_acquire); }
  uint64_t changes() const { return changes_.load(std::memory_order_acquire); }

  // While one lives, what its thread has mapped is noted as being for this pool and stream.
  class Purpose {
   public:
    Purpose(PoolId pool, StreamId stream);
    ~Purpose();
    // Whether of all refusals since the thread's last one was made the last was the limit's.
    static bool limit_refused();
    Purpose(const Purpose&) = delete;
    Purpose& operator=(const Purpose&) = delete;
  };

  // How many capture scopes torch has open in the process, which no driver knows of.
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
  std::atomic<uint64_t> limit_{kNoLimit};
  std::mutex mutex_;
  std::map<Handle, uint64_t> sizes_;  // of live handles, in bytes
  // Changed under mutex_. invariant: the sum of sizes_
  std::atomic<uint64_t> created_{0};
  std::atomic<uint64_t> changes_{0};
};

}  // namespace cgp
