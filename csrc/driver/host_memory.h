// What the host driver needs of the operating system: one memfd as physical memory, and addresses
// to put it behind.
//
// It knows no rules: HostDriver checks them. Sizes and addresses are multiples of the granularity.
// Members that return int give 0 or an errno, and after an errno nothing has changed. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <map>

#include "driver/driver.h"

namespace cgp {

class HostMemory {
 public:
  // Throws std::system_error where there is no memfd, or none that can give memory back.
  explicit HostMemory(uint64_t granularity);
  ~HostMemory();

  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // Takes the first free bytes of the file; they read as zeros. FreePhysical() returns them to the
  // system.
  int TakePhysical(uint64_t bytes, uint64_t* offset);
  void FreePhysical(uint64_t offset, uint64_t bytes);

  // Addresses at which any access faults, aligned to the granularity.
  int Reserve(uint64_t bytes, Address* address);
  int FreeAddresses(Address address, uint64_t bytes);

  // Puts the file's bytes behind reserved addresses, without access; AllowAccess() lets this
  // process in. Unmap() makes them plain reserved addresses again.
  int Map(Address address, uint64_t bytes, uint64_t offset);
  int AllowAccess(Address address, uint64_t bytes);
  int ForbidAccess(Address address, uint64_t bytes);
  int Unmap(Address address, uint64_t bytes);

 private:
  const uint64_t granularity_;
  int file_ = -1;
  uint64_t file_bytes_ = 0;
  // Free bytes by offset, apart from each other and from end_: [0, end_) = taken + free.
  std::map<uint64_t, uint64_t> free_;
  uint64_t end_ = 0;
};

}  // namespace cgp
