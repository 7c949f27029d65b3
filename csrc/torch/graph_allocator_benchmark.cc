// What an allocation and its free cost in a capture, through the adapter and without a GPU. CUDA's
// streams are faked, and cheap; `queries` says how often a pair asked for the capture of a stream,
// each time a call into the driver on a real device.
#include <benchmark/benchmark.h>

#include "torch/graph_allocator.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

// Captures begin here, on device 0, as torch.cuda.CUDAGraph begins and ends them.
class Capture {
 public:
  explicit Capture(GraphAllocator& allocator) : allocator_(allocator) {
    fake_cuda::current_stream = fake_cuda::Stream(1);
    allocator_.beginAllocateToPool(0, {0, 1}, [id = id_](cudaStream_t stream) {
      return fake_cuda::ActiveCapture(stream) == id;
    });
    fake_cuda::SetCapture(fake_cuda::Stream(1), id_);
  }
  ~Capture() {
    fake_cuda::Reset();
    allocator_.endAllocateToPool(0, {0, 1});
    allocator_.releasePool(0, {0, 1});
  }
  CaptureId id() const { return id_; }

 private:
  inline static CaptureId last_id = 0;
  GraphAllocator& allocator_;
  const CaptureId id_ = ++last_id;
};

// One after the other on as many streams of the capture as the argument says.
void CapturedPairs(benchmark::State& state) {
  FakeBaseAllocator base;
  GraphAllocator allocator(base);
  Capture capture(allocator);
  const auto streams = static_cast<uintptr_t>(state.range(0));
  for (uintptr_t i = 1; i <= streams; ++i) {
    fake_cuda::SetCapture(fake_cuda::Stream(i), capture.id());
  }
  const int64_t before = fake_cuda::queries();
  uintptr_t i = 0;
  for (auto _ : state) {
    fake_cuda::current_stream = fake_cuda::Stream(i % streams + 1);
    benchmark::DoNotOptimize(allocator.allocate(4096));
    ++i;
  }
  state.counters["queries"] = benchmark::Counter(static_cast<double>(fake_cuda::queries() - before),
                                                 benchmark::Counter::kAvgIterations);
}
BENCHMARK(CapturedPairs)->Arg(1)->Arg(3);

}  // namespace
}  // namespace cgp
