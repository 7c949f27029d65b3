#include "torch/host_route.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

namespace cgp {

void EndHostRoute(c10::MempoolId_t id) {
  try {
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(id);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): torch closed it
  }
}

}  // namespace cgp
