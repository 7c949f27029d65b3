// What the host driver needs of the operating system: memory, and addresses to put it behind.
//
// Memory is a shared mapping of no file. It has a home, an address at which nobody may access it,
// and may stand behind any others; it goes back to the system when it is mapped nowhere any more,
// its home included.
//
// These know no rules: HostDriver checks them. Each returns 0 or an errno, and after an errno
// nothing has changed, but where AllowAccess() has got some way.
#pragma once

#include <cstdint>

#include "core/driver.h"

namespace cgp::host_memory {

// It reads as zeros.
int Create(uint64_t bytes, Address* home);

// Addresses at which any access faults, multiples of `alignment`.
int Reserve(uint64_t bytes, uint64_t alignment, Address* address);

// Takes a home away, or addresses.
int Free(Address address, uint64_t bytes);

// Puts the memory behind reserved addresses, without access; AllowAccess() lets this process in.
// Unmap() makes them plain reserved addresses again.
int Map(Address address, uint64_t bytes, Address home);
int AllowAccess(Address address, uint64_t bytes);
int ForbidAccess(Address address, uint64_t bytes);
int Unmap(Address address, uint64_t bytes);

}  // namespace cgp::host_memory
