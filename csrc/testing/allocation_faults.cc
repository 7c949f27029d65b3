#include "testing/allocation_faults.h"

#include <cstdlib>
#include <new>

namespace cgp {
namespace {

struct Faults {
  uint64_t number = 0;  // 0: none is to fail
  bool for_good = false;
  uint64_t counted = 0;
  bool fired = false;
  int spared = 0;
};
// Constant-initialised and without a destructor: operator new is called before and after main().
constinit thread_local Faults faults;

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (faults.number != 0 && faults.spared == 0) {
    ++faults.counted;
    const bool fails =
        faults.for_good ? faults.counted >= faults.number : faults.counted == faults.number;
    faults.fired |= fails;
    if (fails) throw std::bad_alloc();
  }
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const memory = alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__
                           ? std::malloc(bytes == 0 ? 1 : bytes)
                           : std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

AllocationFault::AllocationFault(uint64_t number, bool for_good) {
  faults = {.number = number, .for_good = for_good, .spared = faults.spared};
}

AllocationFault::~AllocationFault() { faults.number = 0; }

bool AllocationFault::fired() const { return faults.fired; }

AllocationsSpared::AllocationsSpared() { ++faults.spared; }

AllocationsSpared::~AllocationsSpared() { --faults.spared; }

}  // namespace cgp

// All forms, since sanitizers have their own of those that are missing.
void* operator new(std::size_t bytes) {
  return cgp::Allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return cgp::Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return operator new(bytes, alignment);
}
void* operator new[](std::size_t bytes, const std::nothrow_t& nothrow) noexcept {
  return operator new(bytes, nothrow);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
