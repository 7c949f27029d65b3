#include "testing/host_memory.h"

#include <sys/mman.h>

#include <cerrno>

namespace cgp::host_memory {
namespace {

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* Pointer(Address address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

int MapNew(uint64_t bytes, int flags, Address* address) {
  void* const start = mmap(nullptr, bytes, PROT_NONE, flags, -1, 0);
  if (start == MAP_FAILED) return errno;
  *address = reinterpret_cast<uintptr_t>(start);
  return 0;
}

}  // namespace

int Create(uint64_t bytes, Address* home) {
  return MapNew(bytes, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, home);
}

int Reserve(uint64_t bytes, uint64_t alignment, Address* address) {
  // mmap aligns to the system's pages only: reserve as much more as aligning can cost, and cut it
  // off.
  const uint64_t total = bytes + alignment;  // at most 2^64, which is 0 and refused
  Address first = 0;
  if (const int error = MapNew(total, kReserveFlags, &first)) return error;
  const Address aligned = (first + alignment - 1) & ~(alignment - 1);
  const uint64_t before = aligned - first;
  const uint64_t behind = alignment - before;
  // behind > 0. Cutting off may need one more entry in the kernel's table of mappings, which has a
  // limit.
  if (munmap(Pointer(aligned + bytes), behind) != 0 ||
      (before != 0 && munmap(Pointer(first), before) != 0)) {
    const int error = errno;
    munmap(Pointer(first), total);
    return error;
  }
  *address = aligned;
  return 0;
}

int Free(Address address, uint64_t bytes) {
  return munmap(Pointer(address), bytes) == 0 ? 0 : errno;
}

int Map(Address address, uint64_t bytes, Address home) {
  // Of nothing that is moved away, a shared mapping is copied: it stays where it is, too.
  void* const at = mremap(Pointer(home), 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, Pointer(address));
  return at == MAP_FAILED ? errno : 0;
}

int AllowAccess(Address address, uint64_t bytes) {
  return mprotect(Pointer(address), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : errno;
}

int ForbidAccess(Address address, uint64_t bytes) {
  return mprotect(Pointer(address), bytes, PROT_NONE) == 0 ? 0 : errno;
}

int Unmap(Address address, uint64_t bytes) {
  void* const at = mmap(Pointer(address), bytes, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? errno : 0;
}

}  // namespace cgp::host_memory
