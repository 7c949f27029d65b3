#include "torch/fake_cuda.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "driver/host_driver.h"
#include "torch/device_driver.h"
#include "torch/streams.h"

namespace cgp {
namespace fake_cuda {
namespace {

struct Capture {
  unsigned long long id = 0;
  bool invalidated = false;
};

std::mutex mutex;
std::map<cudaStream_t, Capture> captures;
std::atomic<int64_t> query_count{0};

Capture Query(cudaStream_t stream) {
  query_count.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex);
  const auto found = captures.find(stream);
  return found == captures.end() ? Capture{} : found->second;
}

}  // namespace

cudaStream_t Stream(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number * 0x100); }

void SetCaptureId(cudaStream_t stream, unsigned long long id) {
  const std::lock_guard lock(mutex);
  captures[stream] = {.id = id};
}

void Invalidate(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  captures[stream].invalidated = true;
}

void Reset() {
  const std::lock_guard lock(mutex);
  captures.clear();
}

unsigned long long CaptureId(cudaStream_t stream) {
  const Capture capture = Query(stream);
  return capture.invalidated ? 0 : capture.id;
}

int64_t queries() { return query_count.load(std::memory_order_relaxed); }

}  // namespace fake_cuda

std::unique_ptr<Driver> MakeDriver(int device) {
  return std::make_unique<HostDriver>(
      HostDriverOptions{.device = device,
                        .physical_limit_bytes = fake_cuda::kPhysicalLimit,
                        .map_memory = false});
}

void RequireDriverSupport(int) {}

bool IsCapturing(cudaStream_t stream) { return fake_cuda::Query(stream).id != 0; }
cudaStream_t CurrentStream(c10::DeviceIndex) { return fake_cuda::current_stream; }
c10::DeviceIndex CurrentDevice() { return fake_cuda::current_device; }
RelaxedCaptureMode::RelaxedCaptureMode() = default;
RelaxedCaptureMode::~RelaxedCaptureMode() = default;

}  // namespace cgp
