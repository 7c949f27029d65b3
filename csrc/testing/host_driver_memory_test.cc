// What stands behind the addresses is protected. That it holds what is written, at each of its
// addresses, each program that the fuzzer executes shows.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

volatile unsigned char* Byte(Address address) {
  return reinterpret_cast<volatile unsigned char*>(static_cast<uintptr_t>(address));
}

enum class Touch { kRead, kWrite };

// Whether touching the address ends a process by a fault: tried in a child.
bool Faults(Address address, Touch touch) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int number : {SIGSEGV, SIGBUS}) std::signal(number, SIG_DFL);
    if (touch == Touch::kWrite) {
      *Byte(address) = 1;
    } else {
      const unsigned char value = *Byte(address);
      static_cast<void>(value);
    }
    _exit(0);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) {
    ADD_FAILURE() << "no child to wait for";
    return false;
  }
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGSEGV || WTERMSIG(status) == SIGBUS;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  return false;
}

TEST(HostDriverMemoryTest, FaultsUnlessMappedAndGivenAccess) {
  HostDriver driver({.granularity = kPage});
  const Address address = driver.Reserve(3 * kPage);
  const Handle handle = driver.Create(kPage);
  EXPECT_TRUE(Faults(address, Touch::kRead));
  driver.Map(address, kPage, handle);
  driver.Map(address + kPage, kPage, driver.Create(kPage));
  EXPECT_TRUE(Faults(address, Touch::kRead));
  EXPECT_TRUE(Faults(address, Touch::kWrite));
  driver.SetAccess(address, kPage);
  EXPECT_FALSE(Faults(address, Touch::kRead));
  EXPECT_FALSE(Faults(address, Touch::kWrite));
  EXPECT_TRUE(Faults(address + kPage, Touch::kRead)) << "access was given to the neighbour only";
  driver.Unmap(address, kPage);
  EXPECT_TRUE(Faults(address, Touch::kRead));
  EXPECT_TRUE(Faults(address, Touch::kWrite));
  driver.Map(address, kPage, handle);
  EXPECT_TRUE(Faults(address, Touch::kRead)) << "a new mapping starts without access";
}

}  // namespace
}  // namespace cgp
