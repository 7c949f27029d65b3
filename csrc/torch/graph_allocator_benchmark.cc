// What one allocation and one free cost in a capture, through adapter and core and with nothing to
// map: median and 99th percentile of 10^5 each, on 1 and 3 streams, in short captures and long ones; and what the adapter adds to
// eager work. Without a GPU: CUDA's streams are faked, and cheap. `queries` says how often an
// allocation asked for the capture of a stream, each time a call into the driver on a real device.
//
//   cgp_torch_benchmark [ROUNDS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "torch/graph_allocator.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"

namespace cgp {
namespace {

constexpr size_t kSamples = 100'000;
constexpr size_t kLive = 32;  // blocks

using Clock = std::chrono::steady_clock;

class Samples {
 public:
  Samples() { nanoseconds_.reserve(kSamples); }
  template <typename Function>
  void Time(const Function& function) {
    const auto start = Clock::now();
    function();
    const std::chrono::nanoseconds taken = Clock::now() - start;
    if (nanoseconds_.size() < kSamples) nanoseconds_.push_back(taken.count());
  }
  int64_t At(double share) {
    const auto at =
        nanoseconds_.begin() +
        static_cast<std::ptrdiff_t>(share * static_cast<double>(nanoseconds_.size() - 1));
    std::nth_element(nanoseconds_.begin(), at, nanoseconds_.end());
    return *at;
  }
  void Print(const char* what) {
    const int64_t median = At(0.5);
    std::printf("%-36s median %5ld ns, 99th percentile %5ld ns\n", what, static_cast<long>(median),
                static_cast<long>(At(0.99)));
  }

 private:
  std::vector<int64_t> nanoseconds_;
};

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

// Blocks of many sizes come and go; kLive of them live. The same captures of so many pairs follow
// each other in one pool; the first ones, in which the pool grows, do not count.
void CapturedPairs(GraphAllocator& allocator, uintptr_t streams, size_t pairs_a_capture) {
  const size_t captures = kSamples / pairs_a_capture;
  const size_t grows = std::max<size_t>(captures / 10, 1);
  allocator.scopes().Register(0, {0, 1});
  Samples allocate, free;
  int64_t queries = 0;
  for (size_t made = 0; made < grows + captures; ++made) {
    Capture capture(allocator);
    for (uintptr_t i = 1; i <= streams; ++i) {
      fake_cuda::SetCapture(fake_cuda::Stream(i), capture.id());
    }
    std::vector<DataPtr> live(kLive);
    for (size_t i = 0; i < pairs_a_capture; ++i) {
      fake_cuda::current_stream = fake_cuda::Stream(i % streams + 1);
      DataPtr& block = live[i * 7 % kLive];
      const size_t bytes = size_t{512} << (i * 7 % kLive % 12);
      if (made < grows) {
        block.clear();
        block = allocator.allocate(bytes);
        continue;
      }
      const int64_t before = fake_cuda::queries();
      free.Time([&] { block.clear(); });
      allocate.Time([&] { block = allocator.allocate(bytes); });
      queries += fake_cuda::queries() - before;
    }
  }
  allocator.releasePool(0, {0, 1});
  allocator.emptyCache();
  std::printf("captures of %zu pairs on %zu stream(s), %.2f queries an allocation\n",
              pairs_a_capture, static_cast<size_t>(streams),
              static_cast<double>(queries) / static_cast<double>(kSamples));
  allocate.Print("  allocate");
  free.Print("  free");
}

void EagerPairs(const char* what, CUDAAllocator& allocator) {
  Samples pairs;
  for (size_t i = 0; i < kSamples; ++i) pairs.Time([&] { allocator.allocate(4096).clear(); });
  pairs.Print(what);
}

}  // namespace
}  // namespace cgp

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 3;
  for (int round = 0; round < rounds; ++round) {
    cgp::FakeBaseAllocator base;
    cgp::GraphAllocator allocator(base);
    for (const size_t pairs : {size_t{1000}, cgp::kSamples}) {
      for (const uintptr_t streams : {1U, 3U}) cgp::CapturedPairs(allocator, streams, pairs);
    }
    cgp::Samples nothing;
    for (size_t i = 0; i < cgp::kSamples; ++i) nothing.Time([] {});
    nothing.Print("the clock alone");
    cgp::EagerPairs("eager pair, the base (a fake) alone", base);
    cgp::EagerPairs("eager pair, through the adapter", allocator);
  }
}
