#include "torch/install.h"

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <mutex>
#include <stdexcept>
#include <string>

#include "torch/runtime.h"

namespace cgp {
namespace {

// Orders threads that install the allocator or take it out.
std::mutex switch_mutex;

// Gives the base our unused memory before it gives up. It calls this whenever its cache has nothing
// that fits, with its lock held.
class FreeUnusedPoolsCallback final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    // The base asks the device next, whatever we could not give back.
    uint64_t bytes = 0;
    WithWarnings("giving back the memory of unused graph pools", [&] {
      GraphAllocator* const allocator = GraphAllocator::Find();
      if (allocator != nullptr) bytes = allocator->scopes().TryTrim(CurrentDevice());
    });
    return bytes > 0;
  }
};

const c10::RegistererFreeCudaMemoryCallbacksRegistry callback_registerer(
    "cudagraph_pool", c10::FreeCudaMemoryCallbacksRegistry(),
    c10::RegistererFreeCudaMemoryCallbacksRegistry::DefaultCreator<FreeUnusedPoolsCallback>);

void RefuseWhileCapturing(const char* what) {
  const GraphAllocator* allocator = GraphAllocator::Find();
  bool capturing = allocator != nullptr && allocator->capturing();
  // Captures that began before we were installed are known only by their streams.
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    // A device where nothing was done has no capture, and the legacy stream never captures. Asking
    // would make a context on the current device, and the process may be about to choose another.
    if (!HasContext(device)) continue;
    const cudaStream_t stream = CurrentStream(device);
    capturing = capturing || (stream != nullptr && IsCapturing(stream));
  }
  if (capturing) {
    throw std::runtime_error(
        std::string(what) +
        " was called while a CUDA graph capture is under way; call it before the capture begins "
        "or after it has ended");
  }
}

}  // namespace

std::shared_ptr<GraphAllocator> GetGraphAllocator() {
  GraphAllocator* allocator = GraphAllocator::Find();
  if (allocator == nullptr) {
    static auto* const made = new GraphAllocator(*cca::get());
    allocator = made;
  }
  return {allocator, [](GraphAllocator*) {}};
}

void RegisterWithC10(CUDAAllocator& allocator) {
  // The native allocator registers with priority 0 in some releases, and with 1 in later ones.
  // Equal priorities replace each other.
  c10::SetAllocator(c10::kCUDA, &allocator, 1);
}

void Enable(const Options& options) {
  const std::lock_guard lock(switch_mutex);
  RequireDriverSupport(CurrentDevice(), options.exportable);
  const bool enabled = IsEnabled();
  if (!enabled) RefuseWhileCapturing("enable()");
  const auto allocator = GetGraphAllocator();
  CUDAAllocator* installed = cca::allocator.load();
  if (installed != allocator.get() && installed != &allocator->base()) {
    throw std::runtime_error(
        "the allocator '" + installed->name() +
        "' was installed after cudagraph_pool was first enabled; restart the process and enable "
        "cudagraph_pool after it");
  }
  allocator->scopes().shares_captures = options.share_captures;
  allocator->scopes().takes_mempools = options.mempools;
  SetExportable(options.exportable);
  allocator->scopes().takes_captures = true;
  cca::allocator.store(allocator.get());
  RegisterWithC10(*allocator);
}

void Disable() {
  const std::lock_guard lock(switch_mutex);
  if (!IsEnabled()) return;
  GraphAllocator* allocator = GraphAllocator::Find();
  allocator->scopes().EndAbandoned();
  RefuseWhileCapturing("disable()");
  allocator->scopes().TryTrim();
  allocator->scopes().takes_captures = false;
}

bool IsEnabled() {
  GraphAllocator* const allocator = GraphAllocator::Find();
  return allocator != nullptr && cca::allocator.load() == allocator &&
         allocator->scopes().takes_captures;
}

}  // namespace cgp
