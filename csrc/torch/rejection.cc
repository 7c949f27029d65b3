#include "torch/rejection.h"

#include <c10/cuda/CUDAAllocatorConfig.h>

namespace cgp {
namespace {

template <typename Config>
bool Setting() {
  if constexpr (requires { Config::throw_on_cudamalloc_oom(); }) {
    return Config::throw_on_cudamalloc_oom();
  } else {
    return false;
  }
}

}  // namespace

bool RejectsAtOnce() { return Setting<c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig>(); }

}  // namespace cgp
