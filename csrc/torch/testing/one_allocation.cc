// One allocation in a capture with nothing to map, for scripts/allocation_files.py: only what runs
// between the two calls of gcov is counted.
#include "torch/graph_allocator.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"

extern "C" void __gcov_reset();
extern "C" void __gcov_dump();

int main() {
  using cgp::fake_cuda::Stream;
  constexpr c10::MempoolId_t kId{0, 1};
  constexpr cgp::CaptureId kCapture = 7;
  cgp::FakeBaseAllocator base;
  cgp::GraphAllocator allocator(base);
  cgp::fake_cuda::current_stream = Stream(1);
  allocator.beginAllocateToPool(0, kId, [](cudaStream_t stream) {
    return cgp::fake_cuda::ActiveCapture(stream) == kCapture;
  });
  cgp::fake_cuda::SetCapture(Stream(1), kCapture);
  for (int i = 0; i < 3; ++i) allocator.allocate(4096).clear();
  __gcov_reset();
  void* const block = allocator.raw_alloc(4096);
  __gcov_dump();
  cgp::fake_cuda::Reset();
  allocator.raw_delete(block);
  allocator.endAllocateToPool(0, kId);
  allocator.releasePool(0, kId);
}
