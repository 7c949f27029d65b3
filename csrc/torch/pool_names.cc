#include "torch/pool_names.h"

namespace cgp {

PoolId PoolNames::Find(c10::DeviceIndex device, Name name) const {
  return UseCount(device, name) > 0 ? kShared : PoolId{name.first, name.second};
}

void PoolNames::Share(c10::DeviceIndex device, Name name) {
  const std::lock_guard lock(mutex_);
  ++users_[{device, name}];
}

void PoolNames::Release(c10::DeviceIndex device, Name name) {
  const std::lock_guard lock(mutex_);
  const auto it = users_.find({device, name});
  if (it != users_.end() && --it->second == 0) users_.erase(it);
}

int PoolNames::UseCount(c10::DeviceIndex device, Name name) const {
  const std::lock_guard lock(mutex_);
  const auto it = users_.find({device, name});
  return it == users_.end() ? 0 : it->second;
}

}  // namespace cgp
