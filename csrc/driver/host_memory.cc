#include "driver/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <limits>
#include <system_error>

#include "core/error.h"

namespace cgp {
namespace {

void* Pointer(Address address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

constexpr uint64_t kLargestFile = std::numeric_limits<off_t>::max();

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

int PunchHole(int file, uint64_t offset, uint64_t bytes) {
  return fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                   static_cast<off_t>(bytes));
}

}  // namespace

HostMemory::HostMemory(uint64_t granularity)
    : granularity_(granularity), file_(memfd_create("cudagraph_pool", MFD_CLOEXEC)) {
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  // Tried here, so that FreePhysical() need not fail.
  if (ftruncate(file_, static_cast<off_t>(granularity)) != 0 ||
      PunchHole(file_, 0, granularity) != 0) {
    const int error = errno;
    close(file_);
    throw std::system_error(error, std::generic_category(), "giving back the memory of a memfd");
  }
  file_bytes_ = granularity;
}

HostMemory::~HostMemory() { close(file_); }

int HostMemory::TakePhysical(uint64_t bytes, uint64_t* offset) {
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    if (gap->second < bytes) continue;
    const uint64_t taken = gap->first;
    const uint64_t left = gap->second - bytes;
    if (left != 0) free_.emplace_hint(std::next(gap), taken + bytes, left);
    free_.erase(gap);
    *offset = taken;
    return 0;
  }
  if (bytes > kLargestFile - end_) return EFBIG;
  if (end_ + bytes > file_bytes_) {
    // Doubled, so that growing is rare; what is never written takes no memory.
    const uint64_t grown = std::max(end_ + bytes, std::min(2 * file_bytes_, kLargestFile));
    if (ftruncate(file_, static_cast<off_t>(grown)) != 0) return errno;
    file_bytes_ = grown;
  }
  *offset = end_;
  end_ += bytes;
  return 0;
}

void HostMemory::FreePhysical(uint64_t offset, uint64_t bytes) {
  const bool punched = PunchHole(file_, offset, bytes) == 0;
  CGP_CHECK(punched);  // The constructor has seen it work.
  auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    free_.emplace(offset, bytes);
  }
}

int HostMemory::Reserve(uint64_t bytes, Address* address) {
  // mmap aligns to the system's pages only: reserve as much more as aligning can cost, and cut it
  // off.
  const uint64_t total = bytes + granularity_;  // at most 2^64, which is 0 and refused
  void* const start = mmap(nullptr, total, PROT_NONE, kReserveFlags, -1, 0);
  if (start == MAP_FAILED) return errno;
  const Address first = reinterpret_cast<uintptr_t>(start);
  const Address aligned = (first + granularity_ - 1) & ~(granularity_ - 1);
  const uint64_t before = aligned - first;
  const uint64_t behind = granularity_ - before;
  // behind > 0. Cutting off may need one more entry in the kernel's table of mappings, which has a
  // limit.
  if (munmap(Pointer(aligned + bytes), behind) != 0 ||
      (before != 0 && munmap(start, before) != 0)) {
    const int error = errno;
    munmap(start, total);
    return error;
  }
  *address = aligned;
  return 0;
}

int HostMemory::FreeAddresses(Address address, uint64_t bytes) {
  return munmap(Pointer(address), bytes) == 0 ? 0 : errno;
}

int HostMemory::Map(Address address, uint64_t bytes, uint64_t offset) {
  void* const at = mmap(Pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file_,
                        static_cast<off_t>(offset));
  return at == MAP_FAILED ? errno : 0;
}

int HostMemory::AllowAccess(Address address, uint64_t bytes) {
  return mprotect(Pointer(address), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : errno;
}

int HostMemory::ForbidAccess(Address address, uint64_t bytes) {
  return mprotect(Pointer(address), bytes, PROT_NONE) == 0 ? 0 : errno;
}

int HostMemory::Unmap(Address address, uint64_t bytes) {
  void* const at = mmap(Pointer(address), bytes, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? errno : 0;
}

}  // namespace cgp
