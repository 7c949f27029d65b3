// What torch calls a pool, and what we do.
//
// They are the same, but where captures that name no pool are to share one: torch gives each of
// these an id of its own, and here all of them stand for the device's shared pool.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/pool_set.h"

namespace cgp {

class PoolNames {
 public:
  using Name = c10::MempoolId_t;

  // The pool that is shared, on each device. An id that torch never makes: it counts from 1.
  static constexpr PoolId kShared{~0ULL, 0};

  // Whether torch made the name for a capture that names no pool.
  static bool IsAnonymous(Name name) { return name.first != 0 && name.second == 0; }

  // Which pool the name stands for.
  PoolId Find(c10::DeviceIndex device, Name name) const {
    return UseCount(device, name) > 0 ? kShared : PoolId{name.first, name.second};
  }

  // `pool` gets a user under this name, which stands for it from now on: for itself or kShared.
  void Hold(c10::DeviceIndex device, Name name, PoolId pool) {
    if (pool != kShared) return;
    const std::lock_guard lock(mutex_);
    ++users_[{device, name}];
  }
  // Loses one. A name without users stands for itself.
  void Release(c10::DeviceIndex device, Name name) {
    const std::lock_guard lock(mutex_);
    const auto it = users_.find({device, name});
    if (it != users_.end() && --it->second == 0) users_.erase(it);
  }
  // How many users of the shared pool the name has; 0 if it stands for itself.
  int UseCount(c10::DeviceIndex device, Name name) const {
    const std::lock_guard lock(mutex_);
    const auto it = users_.find({device, name});
    return it == users_.end() ? 0 : it->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, Name>, int> users_;  // of names that stand for kShared
};

}  // namespace cgp
