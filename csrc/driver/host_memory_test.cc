#include "driver/host_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <vector>

namespace cgp {
namespace {

constexpr uint64_t kUnit = 65536;

class HostMemoryTest : public testing::Test {
 protected:
  uint64_t Take(uint64_t units) {
    uint64_t offset = 1;
    EXPECT_EQ(memory_.TakePhysical(units * kUnit, &offset), 0);
    EXPECT_EQ(offset % kUnit, 0u);
    return offset / kUnit;
  }
  void Free(uint64_t offset, uint64_t units) {
    memory_.FreePhysical(offset * kUnit, units * kUnit);
  }

  HostMemory memory_{kUnit};
};

TEST_F(HostMemoryTest, TakesTheFirstBytesThatAreFree) {
  for (uint64_t i = 0; i < 8; ++i) EXPECT_EQ(Take(1), i);
  Free(2, 1);
  Free(5, 1);
  EXPECT_EQ(Take(2), 8u) << "no gap has two";
  EXPECT_EQ(Take(1), 2u);
  EXPECT_EQ(Take(1), 5u);
  EXPECT_EQ(Take(1), 10u);
}

TEST_F(HostMemoryTest, UsesAGapInPartsAndWhole) {
  EXPECT_EQ(Take(4), 0u);
  EXPECT_EQ(Take(1), 4u);
  Free(0, 4);
  EXPECT_EQ(Take(1), 0u);
  EXPECT_EQ(Take(3), 1u);
  EXPECT_EQ(Take(1), 5u);
}

TEST_F(HostMemoryTest, NeighbouringGapsAreOne) {
  for (uint64_t i = 0; i < 6; ++i) EXPECT_EQ(Take(1), i);
  // Before a gap, behind one, between two.
  Free(1, 1);
  Free(0, 1);
  Free(3, 1);
  Free(2, 1);
  EXPECT_EQ(Take(4), 0u);
  // The gap at the end is the end.
  Free(4, 1);
  Free(5, 1);
  EXPECT_EQ(Take(3), 4u);
  Free(4, 3);
  Free(0, 4);
  EXPECT_EQ(Take(10), 0u);
}

TEST_F(HostMemoryTest, GapsApartStayApart) {
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(Take(1), i);
  Free(0, 1);
  Free(2, 1);
  EXPECT_EQ(Take(2), 5u);
  EXPECT_EQ(Take(1), 0u);
  EXPECT_EQ(Take(1), 2u);
}

TEST_F(HostMemoryTest, AFileHasAnEnd) {
  EXPECT_EQ(Take(1), 0u);
  uint64_t offset = 12345;
  EXPECT_EQ(memory_.TakePhysical(uint64_t{0} - kUnit, &offset), EFBIG);
  EXPECT_EQ(memory_.TakePhysical(uint64_t{1} << 63, &offset), EFBIG);
  EXPECT_EQ(offset, 12345u);
  EXPECT_EQ(Take(1), 1u);
}

TEST_F(HostMemoryTest, ReservationsAreAlignedWhereverTheSystemPutsThem) {
  std::vector<void*> between;
  for (int i = 0; i < 8; ++i) {
    Address address = 0;
    EXPECT_EQ(memory_.Reserve(kUnit, &address), 0);
    EXPECT_EQ(address % kUnit, 0u);
    // Moves the place of the next one by a page of the system.
    between.push_back(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(memory_.FreeAddresses(address, kUnit), 0);
  }
  for (void* const page : between) munmap(page, 4096);
}

TEST_F(HostMemoryTest, MoreAddressesThanThereAreAreRefused) {
  Address address = 12345;
  EXPECT_NE(memory_.Reserve(uint64_t{0} - kUnit, &address), 0);
  EXPECT_NE(memory_.Reserve(uint64_t{1} << 60, &address), 0);
  EXPECT_EQ(address, 12345u);
}

TEST_F(HostMemoryTest, AligningLosesNoAddresses) {
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
    ASSERT_EQ(memory_.Reserve(kUnit, &address), 0);
    between.push_back(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ASSERT_EQ(memory_.FreeAddresses(address, kUnit), 0);
  }
  for (void* const page : between) munmap(page, 4096);
  // Half a unit each would be 2,048 pages; some may have gone to the heap.
  EXPECT_LT(pages_of_process(), before + 512);
}

}  // namespace
}  // namespace cgp
