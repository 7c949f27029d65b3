#include "torch/testing/fake_cuda.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "driver/forwarding_driver.h"
#include "torch/runtime.h"
#include "torch/testing/fake_faults.h"

namespace cgp {
namespace fake_cuda {
namespace {

struct Capture {
  CaptureId id = 0;
  bool invalidated = false;
};

std::mutex mutex;
std::map<cudaStream_t, Capture> captures;
std::atomic<int64_t> queried{0};
std::vector<c10::MempoolId_t> host_routes;
std::atomic<bool> exports{false};

// Each thread has a stream of its own under the name of the per-thread default stream.
cudaStream_t Named(cudaStream_t stream) {
  static thread_local char of_thread = 0;
  return stream == cudaStreamPerThread ? reinterpret_cast<cudaStream_t>(&of_thread) : stream;
}

Capture Find(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  const auto found = captures.find(Named(stream));
  return found == captures.end() ? Capture{} : found->second;
}

// The host driver, but its captures are those of the test.
class FakeDriver final : public ForwardingDriver<FakeDriver> {
 public:
  explicit FakeDriver(std::unique_ptr<HostDriver> host)
      : ForwardingDriver(*host), host_(std::move(host)) {}

  HostDriver& host() { return *host_; }

  // As CUDA's: who captures is known to torch alone.
  bool MayQuiesce() noexcept override { return true; }
  // Nothing is ever captured, so the frontier has no nodes.
  void Capture(StreamId stream, Frontier* frontier) override {
    ForwardingDriver::Capture(stream, frontier);
    const auto capture = Of(stream);
    frontier->capture = capture.invalidated ? kNoCapture : capture.id;
    frontier->held = capture.id != kNoCapture;
  }
  // CUDA would make the event a part of the capture, and never say whether it is done; where the
  // capture has been invalidated it refuses this too.
  Event RecordEvent(StreamId stream) override {
    const DriverFault fault = Around(DriverCall::kRecordEvent, 0);
    if (Of(stream).id != kNoCapture) {
      throw DriverError(DriverStatus::kFailed, "FakeDriver::RecordEvent", 900,
                        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 0, device(),
                        "the stream is capturing");
    }
    return inner().RecordEvent(stream);
  }

  // A call that fails before the host driver hears of it, or not at all.
  class DriverFault {
   public:
    explicit DriverFault(const FakeDriver& driver, uint64_t bytes = 0) {
      if (faults::Fails(faults::Kind::kDriver)) {
        throw DriverError(DriverStatus::kFailed, "FakeDriver", 999, "CUDA_ERROR_UNKNOWN", bytes,
                          driver.device(), "made to fail");
      }
      ++faults::state.within;
    }
    ~DriverFault() { --faults::state.within; }
    DriverFault(const DriverFault&) = delete;
    DriverFault& operator=(const DriverFault&) = delete;
  };

  DriverFault Around(DriverCall, uint64_t bytes) { return DriverFault(*this, bytes); }

 private:
  static fake_cuda::Capture Of(StreamId stream) {
    return Find(reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(WithoutDevice(stream))));
  }

  const std::unique_ptr<HostDriver> host_;  // inner()
};

}  // namespace

c10::DeviceIndex NextDevice() {
  static std::atomic<int> next{0};
  return static_cast<c10::DeviceIndex>(next++);
}

cudaStream_t Stream(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number * 0x100); }

void SetCapture(cudaStream_t stream, CaptureId id) {
  const std::lock_guard lock(mutex);
  captures[Named(stream)] = {.id = id};
}

void Invalidate(cudaStream_t stream) {
  const std::lock_guard lock(mutex);
  captures[Named(stream)].invalidated = true;
}

void Reset() {
  const std::lock_guard lock(mutex);
  captures.clear();
  queried = 0;
  host_routes.clear();
}

CaptureId ActiveCapture(cudaStream_t stream) {
  ++queried;
  const Capture capture = Find(stream);
  return capture.invalidated ? 0 : capture.id;
}

std::vector<c10::MempoolId_t> ended_host_routes() {
  const std::lock_guard lock(mutex);
  return host_routes;
}

int64_t queries() { return queried; }

HostDriver& HostOf(Driver& made) { return dynamic_cast<FakeDriver&>(made).host(); }

}  // namespace fake_cuda

std::unique_ptr<Driver> MakeDriver(int device) {
  // Real addresses: as with CUDA, those of two devices differ.
  return fake_cuda::around_driver(
      std::make_unique<fake_cuda::FakeDriver>(std::make_unique<HostDriver>(
          HostDriverOptions{.device = device, .physical_limit_bytes = fake_cuda::kPhysicalLimit})));
}

void SetExportable(bool exportable) { fake_cuda::exports = exportable; }
bool Exports() { return fake_cuda::exports; }

void RequireDriverSupport(int, bool) {}

std::optional<CaptureId> CaptureOf(cudaStream_t stream) {
  const CaptureId id = fake_cuda::ActiveCapture(stream);
  return id == 0 ? std::nullopt : std::optional(id);
}
bool IsCapturing(cudaStream_t stream) { return fake_cuda::Find(stream).id != 0; }
bool HasContext(c10::DeviceIndex) { return true; }
cudaStream_t CurrentStream(c10::DeviceIndex) { return fake_cuda::current_stream; }
c10::DeviceIndex CurrentDevice() { return fake_cuda::current_device; }
void EndHostRoute(c10::MempoolId_t id) {
  const std::lock_guard lock(fake_cuda::mutex);
  fake_cuda::host_routes.push_back(id);
}
TorchWorkspaces FindWorkspaces(bool of_cublaslt) {
  return {of_cublaslt ? &fake_cuda::lt_workspaces : &fake_cuda::workspaces,
          [] { return size_t{4096}; }};
}
RelaxedCaptureMode::RelaxedCaptureMode() : changed_(false) {}
RelaxedCaptureMode::~RelaxedCaptureMode() = default;

}  // namespace cgp
