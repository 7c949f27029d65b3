// The operator new of a whole program: what was not armed (fake_faults.h) does not fail.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "torch/testing/fake_faults.h"

// Inlined, g++ would take std::free() for a mistake.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (cgp::faults::Fails(cgp::faults::Kind::kMemory)) throw std::bad_alloc();
  if (void* const memory = std::malloc(std::max<size_t>(bytes, 1))) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (cgp::faults::Fails(cgp::faults::Kind::kMemory)) return nullptr;
  return std::malloc(std::max<size_t>(bytes, 1));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
