#include "testing/host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <vector>

namespace cgp {
namespace {

constexpr uint64_t kUnit = 65536;

int Reserve(uint64_t bytes, Address* address) {
  return host_memory::Reserve(bytes, kUnit, address);
}

TEST(HostMemoryTest, ReservationsAreAlignedWhereverTheSystemPutsThem) {
  std::vector<void*> between;
  for (int i = 0; i < 8; ++i) {
    Address address = 0;
    EXPECT_EQ(Reserve(kUnit, &address), 0);
    EXPECT_EQ(address % kUnit, 0u);
    // Moves the place of the next one by a page of the system.
    between.push_back(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(host_memory::Free(address, kUnit), 0);
  }
  for (void* const page : between) munmap(page, 4096);
}

TEST(HostMemoryTest, MoreThanThereIsIsRefused) {
  Address address = 12345;
  EXPECT_NE(host_memory::Create(uint64_t{0} - kUnit, &address), 0);
  EXPECT_NE(host_memory::Create(uint64_t{1} << 63, &address), 0);
  EXPECT_NE(Reserve(uint64_t{0} - kUnit, &address), 0);
  EXPECT_NE(Reserve(uint64_t{1} << 60, &address), 0);
  EXPECT_EQ(address, 12345u);
}

TEST(HostMemoryTest, AligningLosesNoAddresses) {
  const auto pages_of_process = [] {
    std::ifstream statm("/proc/self/statm");
    uint64_t pages = 0;
    statm >> pages;
    return pages;
  };
  const uint64_t before = pages_of_process();
  std::vector<void*> between;
  for (int i = 0; i < 256; ++i) {
    Address address = 0;
    ASSERT_EQ(Reserve(kUnit, &address), 0);
    between.push_back(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_EQ(host_memory::Free(address, kUnit), 0);
  }
  for (void* const page : between) munmap(page, 4096);
  // Half a unit each would be 2,048 pages; some may have gone to the heap.
  EXPECT_LT(pages_of_process(), before + 512);
}

}  // namespace
}  // namespace cgp
