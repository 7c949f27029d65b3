// What one eager allocation and its free cost through PyTorch's current CUDA allocator, without
// Python and ATen. Loaded by eager_overhead.py.
#include <c10/cuda/CUDACachingAllocator.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>

// Which allocator is measured: the adapter is another object than PyTorch's own.
extern "C" __attribute__((visibility("default"))) const void* CurrentAllocator() {
  return c10::cuda::CUDACachingAllocator::get();
}

// Nanoseconds for each of `pairs` pairs; negative, with a message on standard error, if an
// allocation fails. The first pair is not measured: it may ask the driver for memory, which the
// cache then keeps.
extern "C" __attribute__((visibility("default"))) double NanosecondsPerPair(size_t bytes,
                                                                            int pairs) {
  try {
    auto* allocator = c10::cuda::CUDACachingAllocator::get();
    allocator->allocate(bytes);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < pairs; ++i) allocator->allocate(bytes);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    return time.count() / pairs;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "eager_overhead: %s\n", error.what());
    return -1;
  }
}
